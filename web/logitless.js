// SPDX-License-Identifier: Apache-2.0
// Cross-entropy of a language model's head without the logits, on WebGPU: an ES module around
// logitless.wasm, which is the planner and dispatcher of the C++ library. Calls record work and return
// at once; reading a tensor waits. What every option means: docs/semantics.md. Types: logitless.d.ts.

import {DeviceSide} from './device.js';

const DTYPES = {
  f32: {code: 0, bytes: 4, array: Float32Array},
  f16: {code: 1, bytes: 2, array: Uint16Array},
  i32: {code: 3, bytes: 4, array: Int32Array},
};
const KINDS = {
  softmax: 0,
  crossEntropyForward: 1,
  crossEntropyBackward: 2,
  crossEntropyForwardBackward: 3,
  linearCrossEntropyForward: 4,
  linearCrossEntropyBackward: 5,
  linearCrossEntropyForwardBackward: 6,
};
const WORDS = {
  reduction: ['none', 'sum', 'mean'],
  outOfRange: ['error', 'ignore'],
  emptyMean: ['zero', 'nan'],
  inputKind: ['logits', 'probabilities'],
};
const CODES = [
  'ok', 'invalid_argument', 'wrong_shape', 'wrong_dtype', 'wrong_device', 'misaligned', 'unknown_enum',
  'workspace_too_small', 'target_out_of_range', 'backend_unavailable', 'not_supported', 'device_error', 'internal',
];
const TENSORS = [
  'logits', 'probabilities', 'input', 'weight', 'bias', 'target', 'tokenWeight', 'vocabWeight', 'loss', 'lse',
  'targetLogit', 'entropy', 'argmax', 'rowReference', 'rowLogSum', 'weightedLogitSum', 'gradLoss', 'gradLse',
  'gradTargetLogit', 'gradEntropy', 'gradLogits', 'gradInput', 'gradWeight', 'gradBias', 'fault',
];
const OPTIONS = [
  'ignoreIndex', 'labelSmoothing', 'zLoss', 'logitScale', 'softcap', 'temperature', 'probabilityFloor', 'normalizer',
  'vocabStart', 'vocabTotal',
];
// What bigger limits the planner can use.
const LIMITS = [
  'maxBufferSize', 'maxStorageBufferBindingSize', 'maxStorageBuffersPerShaderStage', 'maxComputeWorkgroupStorageSize',
  'maxComputeInvocationsPerWorkgroup', 'maxComputeWorkgroupSizeX',
];

const snake = (name) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
const count = (shape) => shape.reduce((product, size) => product * size, 1);

export class LogitlessError extends Error {
  /** @param {string} code a status code's name @param {string} message */
  constructor(code, message) {
    super(message);
    this.name = 'LogitlessError';
    this.code = code;
  }
}

// Why there is no WebGPU here, in a sentence for the visitor; null where there is.
export async function whyUnavailable() {
  if (!globalThis.isSecureContext) {
    return 'WebGPU needs a secure page: open it over https, or from localhost.';
  }
  if (!globalThis.navigator?.gpu) {
    return 'This browser has no WebGPU. Chrome and Edge 113, Safari 26 and Firefox 141 have it on most systems; on Linux it may have to be switched on.';
  }
  if (!(await navigator.gpu.requestAdapter())) {
    return 'This browser has WebGPU but found no adapter: the GPU or its driver is not supported, or is blocked. On Linux, Chrome may need --enable-unsafe-webgpu.';
  }
  return null;
}

// A strided view of a GPU buffer.
export class Tensor {
  constructor(owner, buffer, shape, dtype, {byteOffset = 0, stride, owned = false} = {}) {
    this.owner = owner;
    this.buffer = buffer;
    this.shape = shape;
    this.dtype = dtype;
    this.byteOffset = byteOffset;
    this.stride = stride ?? (shape.length === 2 ? [shape[1], 1] : shape.length === 1 ? [1] : []);
    this.owned = owned;
  }

  get bytes() {
    return count(this.shape) * DTYPES[this.dtype].bytes;
  }

  // The elements, once everything recorded before has run. Contiguous tensors only.
  async read() {
    return this.owner.read(this);
  }

  // The one element of a tensor of one.
  async item() {
    return (await this.read())[0];
  }

  write(data) {
    const {device} = this.owner;
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    const whole = bytes.length & ~3;
    device.queue.writeBuffer(this.buffer, this.byteOffset, bytes, 0, whole);
    if (whole < bytes.length) {
      const last = new Uint8Array(4);
      last.set(bytes.subarray(whole));
      device.queue.writeBuffer(this.buffer, this.byteOffset + whole, last);
    }
  }

  destroy() {
    this.owner.release(this);
  }
}

export class Logitless {
  // Options: `device` (a GPUDevice of yours), `limits: 'default'` (no bigger ones are asked for),
  // `wasm` (where logitless.wasm is).
  static async create({device, limits, wasm} = {}) {
    if (!device) {
      const why = await whyUnavailable();
      if (why) throw new LogitlessError('backend_unavailable', why);
      const adapter = await navigator.gpu.requestAdapter({powerPreference: 'high-performance'});
      const requiredLimits = limits === 'default' ? {} : Object.fromEntries(LIMITS.map((name) => [name, adapter.limits[name]]));
      device = await adapter.requestDevice({requiredLimits});
    }
    const side = new DeviceSide(device);
    const source = fetch(wasm ?? new URL('logitless.wasm', import.meta.url));
    // The module asks the system for nothing that a page has: every call of WASI's is answered with 0.
    const wasi = new Proxy({}, {get: () => () => 0});
    const {instance} = await WebAssembly.instantiateStreaming(source, {device: side.imports(), wasi_snapshot_preview1: wasi});
    return new Logitless(device, side, instance.exports);
  }

  constructor(device, side, core) {
    this.device = device;
    this.side = side;
    this.core = core;
    this.numbers = new WeakMap();  // GPUBuffer -> what the module calls it
    side.memory = core.memory;
    core._initialize();
    const l = device.limits;
    core.set_limits(
        l.maxBufferSize, l.maxStorageBufferBindingSize, l.maxStorageBuffersPerShaderStage, l.minStorageBufferOffsetAlignment,
        l.maxComputeWorkgroupStorageSize, l.maxComputeInvocationsPerWorkgroup, l.maxComputeWorkgroupsPerDimension);
  }

  // --- tensors

  empty(shape, dtype = 'f32') {
    const bytes = Math.max(16, Math.ceil(count(shape) * DTYPES[dtype].bytes / 4) * 4);
    const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
    return new Tensor(this, this.device.createBuffer({size: bytes, usage}), shape, dtype, {owned: true});
  }

  // A copy of `data` on the device: Float32Array, Int32Array, or Uint16Array with dtype 'f16'.
  tensor(data, shape = [data.length], dtype = data instanceof Int32Array ? 'i32' : data instanceof Uint16Array ? 'f16' : 'f32') {
    if (!(data instanceof DTYPES[dtype].array) || data.length !== count(shape)) {
      throw new LogitlessError('wrong_shape', `data is ${data.constructor.name} [${data.length}]; a ${dtype} tensor [${shape}] takes ${DTYPES[dtype].array.name} [${count(shape)}]`);
    }
    const tensor = this.empty(shape, dtype);
    tensor.write(data);
    return tensor;
  }

  // A buffer of the caller's, which stays the caller's. It must be usable as STORAGE.
  wrap(buffer, shape, dtype = 'f32', {byteOffset = 0, stride} = {}) {
    return new Tensor(this, buffer, shape, dtype, {byteOffset, stride});
  }

  release(tensor) {
    const number = this.numbers.get(tensor.buffer);
    if (number !== undefined) this.side.forget(number);
    this.numbers.delete(tensor.buffer);
    if (tensor.owned) tensor.buffer.destroy();
  }

  async read(tensor) {
    const {bytes, array} = DTYPES[tensor.dtype];
    const needed = count(tensor.shape) * bytes;
    const first = tensor.byteOffset & ~3;  // copies are of whole words
    const size = Math.ceil((tensor.byteOffset + needed - first) / 4) * 4;
    const reader = this.device.createBuffer({size: Math.max(4, size), usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST});
    const encoder = this.device.createCommandEncoder();
    if (size > 0) encoder.copyBufferToBuffer(tensor.buffer, first, reader, 0, size);
    this.device.queue.submit([encoder.finish()]);
    const mapped = reader.mapAsync(GPUMapMode.READ);
    mapped.catch(() => {});  // where the device is gone, done() says so first
    await this.done();
    await mapped;
    const start = tensor.byteOffset - first;
    const data = new array(reader.getMappedRange().slice(start, start + needed));
    reader.destroy();
    return data;
  }

  // Resolves once everything recorded so far was accepted; rejects with WebGPU's own message.
  async done() {
    const failure = await this.side.settled();
    if (failure) throw new LogitlessError('device_error', failure);
  }

  // --- ops; the tensors that are made here are the result's

  // probabilities [R, C] of logits [R, C]
  softmax(logits, {into} = {}) {
    const probabilities = into ?? this.empty(logits.shape, logits.dtype);
    this.#run('softmax', {logits, probabilities}, {});
    return probabilities;
  }

  // The loss of given logits [N, V], and with `gradients` their gradient (`inPlace`: over the logits).
  crossEntropy({logits, target, gradients = false, inPlace = false, statistics = [], ...rest}) {
    const tensors = {logits, target, ...this.#outputs(rest, statistics, logits.shape[0])};
    if (gradients) tensors.gradLogits = rest.gradLogits ?? (inPlace ? logits : this.empty(logits.shape, logits.dtype));
    return this.#call(gradients ? 'crossEntropyForwardBackward' : 'crossEntropyForward', tensors, rest);
  }

  // The loss of input [N, D] and weight [V, D], and the gradients that are asked for:
  // true, or some of 'input', 'weight', 'bias'.
  linearCrossEntropy({input, weight, bias, target, gradients = false, statistics = [], ...rest}) {
    const tensors = {input, weight, target, ...this.#outputs(rest, statistics, input.shape[0])};
    if (bias) tensors.bias = bias;
    const wanted = gradients === true ? ['input', 'weight', ...(bias ? ['bias'] : [])] : gradients || [];
    const given = {input, weight, bias};
    for (const name of wanted) {
      const field = `grad${name[0].toUpperCase()}${name.slice(1)}`;
      tensors[field] = rest[field] ?? this.empty(given[name].shape, rest.gradientDtype ?? given[name].dtype);
    }
    return this.#call(wanted.length > 0 ? 'linearCrossEntropyForwardBackward' : 'linearCrossEntropyForward', tensors, rest);
  }

  // Bytes of workspace of linearCrossEntropy on these shapes: {minimum, recommended}.
  plan({tokens, hidden, vocab, gradients = true, dtype = 'f32', ...options}) {
    const none = (shape, type = dtype) => new Tensor(this, null, shape, type);
    const tensors = {input: none([tokens, hidden]), weight: none([vocab, hidden]), target: none([tokens], 'i32'), loss: none(options.reduction === 'none' ? [tokens] : [], 'f32')};
    if (gradients) Object.assign(tensors, {gradInput: none([tokens, hidden]), gradWeight: none([vocab, hidden])});
    this.#begin(gradients ? 'linearCrossEntropyForwardBackward' : 'linearCrossEntropyForward', options);
    // Any number for a buffer of its own, at offset 0, as tensor() makes them.
    Object.entries(tensors).forEach(([name, tensor], i) => this.#give(name, tensor, i + 1));
    return this.#sizes();
  }

  // The same op in double by plain loops, from arrays, on the CPU: {loss, gradInput, ...}, each with the
  // f64 `value` and, with `bounds`, how far from it the contract allows a backend to be.
  evaluate({kind = 'linearCrossEntropyForwardBackward', tensors, shapes, outputs, bounds = false, ...options}) {
    const {core} = this;
    const held = [];
    const hold = (bytes) => {
      held.push(core.allocate(Math.max(8, bytes)));
      return held.at(-1);
    };
    try {
      this.#begin(kind, options);
      const dtypeOf = (data) => (data instanceof Int32Array ? 'i32' : data instanceof Uint16Array ? 'f16' : 'f32');
      for (const [name, data] of Object.entries(tensors)) {
        const address = hold(data.byteLength);
        new Uint8Array(core.memory.buffer, address, data.byteLength).set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
        this.#give(name, new Tensor(this, null, shapes[name] ?? [data.length], dtypeOf(data)), address);
      }
      for (const [name, shape] of Object.entries(outputs)) this.#give(name, new Tensor(this, null, shape, 'f32'), hold(8));
      this.#check(core.evaluate(bounds ? 1 : 0));
      const results = {};
      for (const [name, shape] of Object.entries(outputs)) {
        results[name] = {value: this.#doubles(name, 0, count(shape))};
        if (bounds) results[name].bound = this.#doubles(name, 1, count(shape));
      }
      return results;
    } finally {
      held.forEach((address) => core.release(address));
    }
  }

  // --- inside

  #outputs(rest, statistics, tokens) {
    const made = {loss: rest.loss ?? this.empty(rest.reduction === 'none' ? [tokens] : [])};
    for (const name of statistics) made[name] = rest[name] ?? this.empty([tokens], name === 'argmax' ? 'i32' : 'f32');
    for (const name of ['tokenWeight', 'vocabWeight', 'gradLoss', 'fault']) if (rest[name]) made[name] = rest[name];
    return made;
  }

  #call(kind, tensors, rest) {
    const workspaceBytes = this.#run(kind, tensors, rest);
    return {...Object.fromEntries(Object.entries(tensors).filter(([name]) => !['input', 'weight', 'bias', 'logits', 'target'].includes(name))), workspaceBytes};
  }

  #withText(text, call) {
    const bytes = new TextEncoder().encode(text);
    const address = this.core.allocate(bytes.length + 1);
    const memory = new Uint8Array(this.core.memory.buffer, address, bytes.length + 1);
    memory.set(bytes);
    memory[bytes.length] = 0;
    try {
      return call(address);
    } finally {
      this.core.release(address);
    }
  }

  #check(code) {
    if (code === 0) return;
    const memory = new Uint8Array(this.core.memory.buffer);
    const start = this.core.message();
    const message = new TextDecoder().decode(memory.slice(start, memory.indexOf(0, start)));
    throw new LogitlessError(CODES[code] ?? 'internal', message);
  }

  #begin(kind, options) {
    this.core.begin(KINDS[kind], options.accumulate ? 1 : 0);
    for (const name of OPTIONS) if (options[name] !== undefined) this.#option(name, options[name]);
    for (const [name, words] of Object.entries(WORDS)) {
      if (options[name] === undefined) continue;
      const value = words.indexOf(options[name]);
      if (value < 0) throw new LogitlessError('unknown_enum', `${name} is ${options[name]}; allowed: ${words.join(', ')}`);
      this.#option(name, value);
    }
  }

  #option(name, value) {
    this.#check(this.#withText(snake(name), (text) => this.core.option(text, value)));
  }

  #give(name, tensor, data) {
    const {shape, stride, dtype, byteOffset} = tensor;
    this.#withText(snake(name), (text) => this.core.tensor(
        text, data, byteOffset, DTYPES[dtype].code, shape.length, shape[0] ?? 0, shape[1] ?? 0, stride[0] ?? 0, stride[1] ?? 0));
  }

  #doubles(name, bound, length) {
    const address = this.#withText(snake(name), (text) => this.core.evaluated(text, bound));
    return new Float64Array(this.core.memory.buffer, address, length).slice();
  }

  #number(buffer) {
    if (!this.numbers.has(buffer)) this.numbers.set(buffer, this.side.adopt(buffer));
    return this.numbers.get(buffer);
  }

  #sizes() {
    const address = this.core.allocate(16);
    try {
      this.#check(this.core.workspace(address));
      const [minimum, recommended] = new Float64Array(this.core.memory.buffer, address, 2);
      return {minimum, recommended};
    } finally {
      this.core.release(address);
    }
  }

  // Records the op; the bytes of workspace it was given.
  #run(kind, tensors, options) {
    const unknown = Object.keys(options).filter((name) => ![...TENSORS, ...OPTIONS, ...Object.keys(WORDS), 'accumulate', 'budget', 'gradientDtype'].includes(name));
    if (unknown.length > 0) throw new LogitlessError('invalid_argument', `there is no option ${unknown[0]}`);
    this.#begin(kind, options);
    for (const [name, tensor] of Object.entries(tensors)) this.#give(name, tensor, this.#number(tensor.buffer));
    const {minimum, recommended} = this.#sizes();
    const budget = Math.max(minimum, options.budget ?? recommended);
    this.#check(this.core.run(budget));
    return budget;
  }
}

// SPDX-License-Identifier: Apache-2.0
// Cross-entropy of a language model's head without the logits, on WebGPU: an ES module around
// logitless.wasm, which is the planner and dispatcher of the C++ library. Calls record work and return
// at once; reading a tensor waits. What every option means: docs/semantics.md. Types: logitless.d.ts.

import {DeviceSide, first} from './device.js';

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
// What a call reads; all its other tensors it writes.
const INPUTS = new Set(['logits', 'input', 'weight', 'bias', 'target', 'tokenWeight', 'vocabWeight', 'gradLoss']);
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

  get isContiguous() {
    const dense = this.shape.length === 2 ? [this.shape[1], 1] : [1];
    return this.shape.every((size, d) => size <= 1 || this.stride[d] === dense[d]);
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
    this.owner.write(this, data);
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
    this.buffers = new WeakMap();  // GPUBuffer -> {number: the module's, written: verdict of what wrote it last}
    this.pending = Promise.resolve(null);  // the verdict of everything since the last done()
    /** @type {Promise<string>} resolves, with WebGPU's reason, when the device is lost */
    this.lost = side.whenLost;
    side.memory = core.memory;
    core._initialize();
    const l = device.limits;
    core.set_limits(
        l.maxBufferSize, l.maxStorageBufferBindingSize, l.maxStorageBuffersPerShaderStage, l.minStorageBufferOffsetAlignment,
        l.maxComputeWorkgroupStorageSize, l.maxComputeInvocationsPerWorkgroup, l.maxComputeWorkgroupsPerDimension);
  }

  get isLost() {
    return this.side.lost !== null;
  }

  // --- tensors

  empty(shape, dtype = 'f32') {
    this.#refuseIfLost();
    const size = Math.max(16, Math.ceil(count(shape) * DTYPES[dtype].bytes / 4) * 4);
    const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
    const {made, thrown, verdict} = this.side.scoped(`a tensor [${shape}] of ${size} bytes`, () => this.device.createBuffer({size, usage}));
    if (thrown) throw new LogitlessError('device_error', thrown);
    this.buffers.set(made, {number: this.side.adopt(made, verdict), written: this.#remember(verdict)});
    return new Tensor(this, made, shape, dtype, {owned: true});
  }

  // A copy of `data` on the device: Float32Array, Int32Array, or Uint16Array with dtype 'f16'.
  tensor(data, shape = [data.length], dtype = data instanceof Int32Array ? 'i32' : data instanceof Uint16Array ? 'f16' : 'f32') {
    if (!(data instanceof DTYPES[dtype].array) || data.length !== count(shape)) {
      throw new LogitlessError('wrong_shape', `data is ${data.constructor.name} [${data.length}]; a ${dtype} tensor [${shape}] takes ${DTYPES[dtype].array.name} [${count(shape)}]`);
    }
    const tensor = this.empty(shape, dtype);
    this.write(tensor, data);
    return tensor;
  }

  // A buffer of the caller's, which stays the caller's. It must be usable as STORAGE.
  wrap(buffer, shape, dtype = 'f32', {byteOffset = 0, stride} = {}) {
    return new Tensor(this, buffer, shape, dtype, {byteOffset, stride});
  }

  release(tensor) {
    const known = this.buffers.get(tensor.buffer);
    if (known) this.side.forget(known.number);
    this.buffers.delete(tensor.buffer);
    if (tensor.owned) tensor.buffer.destroy();
  }

  // Whole words at a time. Half a word at the end is padded where it ends the tensor's own buffer; elsewhere
  // the other half is somebody else's.
  write(tensor, data) {
    this.#refuseIfLost();
    if (!tensor.isContiguous || data.byteLength > tensor.bytes) {
      throw new LogitlessError('wrong_shape', `data has ${data.byteLength} bytes; allowed: up to the ${tensor.bytes} of a contiguous tensor`);
    }
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    const whole = bytes.length & ~3;
    if (whole !== bytes.length && !(tensor.owned && bytes.length === tensor.bytes)) {
      throw new LogitlessError('misaligned', `data has ${bytes.length} bytes; allowed: multiples of 4, or the whole of a tensor with a buffer of its own`);
    }
    const known = this.#known(tensor.buffer);
    const {thrown, verdict} = this.side.scoped('a write', () => {
      const {queue} = this.device;
      queue.writeBuffer(tensor.buffer, tensor.byteOffset, bytes, 0, whole);
      if (whole === bytes.length) return;
      const last = new Uint8Array(4);
      last.set(bytes.subarray(whole));
      queue.writeBuffer(tensor.buffer, tensor.byteOffset + whole, last);
    });
    if (thrown) throw new LogitlessError('device_error', thrown);
    // A whole tensor of its own is as good as new.
    const before = tensor.owned && bytes.length === tensor.bytes ? [] : [known.written];
    known.written = this.#remember(first([...before, verdict]));
  }

  async read(tensor) {
    this.#refuseIfLost();
    if (!tensor.isContiguous) throw new LogitlessError('invalid_argument', `stride is [${tensor.stride}]; allowed: what read() takes is contiguous`);
    const {array} = DTYPES[tensor.dtype];
    const start = tensor.byteOffset & ~3;  // copies are of whole words
    const size = Math.max(4, Math.ceil((tensor.byteOffset + tensor.bytes - start) / 4) * 4);
    const written = this.#known(tensor.buffer).written;
    const {made: reader, thrown, verdict} = this.side.scoped('a read', () => {
      const buffer = this.device.createBuffer({size, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST});
      const encoder = this.device.createCommandEncoder();
      encoder.copyBufferToBuffer(tensor.buffer, start, buffer, 0, size);
      this.device.queue.submit([encoder.finish()]);
      return buffer;
    });
    if (thrown) throw new LogitlessError('device_error', thrown);
    // Of a lost device WebGPU says so a moment after this has failed.
    const moment = () => new Promise((resolve) => setTimeout(resolve, 100));
    const mapped = reader.mapAsync(GPUMapMode.READ).then(
        () => null, async (error) => (await Promise.race([this.lost, moment()])) ?? `a read: ${error.message}`);
    try {
      const failure = await first([written, verdict, mapped]);
      this.#refuseIfLost();
      if (failure) throw new LogitlessError('device_error', failure);
      return new array(reader.getMappedRange().slice(tensor.byteOffset - start, tensor.byteOffset - start + tensor.bytes));
    } finally {
      reader.destroy();
    }
  }

  // Resolves once everything recorded since the last call was accepted; rejects with WebGPU's own message.
  async done() {
    const pending = this.pending;
    this.pending = Promise.resolve(null);
    const failure = await pending;
    this.#refuseIfLost();
    if (failure) throw new LogitlessError('device_error', failure);
  }

  // --- ops; the tensors that are made here are the result's

  // probabilities [R, C] of logits [R, C]
  softmax(logits, {into} = {}) {
    return this.#call('softmax', {logits, probabilities: into}, {probabilities: [logits.shape, logits.dtype]}, {}).probabilities;
  }

  // The loss of given logits [N, V], and with `gradients` their gradient (`inPlace`: over the logits).
  crossEntropy({logits, target, gradients = false, inPlace = false, statistics = [], ...rest}) {
    const outputs = this.#outputs(rest, statistics, logits.shape[0]);
    const given = {logits, target, ...(gradients && inPlace ? {gradLogits: logits} : {})};
    if (gradients) outputs.gradLogits = [logits.shape, logits.dtype];
    return this.#call(gradients ? 'crossEntropyForwardBackward' : 'crossEntropyForward', given, outputs, rest);
  }

  // The loss of input [N, D] and weight [V, D], and the gradients that are asked for:
  // true, or some of 'input', 'weight', 'bias'.
  linearCrossEntropy({input, weight, bias, target, gradients = false, statistics = [], ...rest}) {
    const outputs = this.#outputs(rest, statistics, input.shape[0]);
    const given = {input, weight, target, bias};
    const wanted = gradients === true ? ['input', 'weight', ...(bias ? ['bias'] : [])] : gradients || [];
    for (const name of wanted) {
      const like = given[name];
      if (!like) throw new LogitlessError('invalid_argument', `gradients has ${name}; allowed: input, weight, and bias where there is one`);
      outputs[`grad${name[0].toUpperCase()}${name.slice(1)}`] = [like.shape, rest.gradientDtype ?? like.dtype];
    }
    return this.#call(wanted.length > 0 ? 'linearCrossEntropyForwardBackward' : 'linearCrossEntropyForward', given, outputs, rest);
  }

  // Bytes of workspace of linearCrossEntropy on these shapes: {minimum, recommended}.
  plan({tokens, hidden, vocab, gradients = true, dtype = 'f32', gradientDtype = dtype, ...options}) {
    const none = (shape, type = dtype) => new Tensor(this, null, shape, type);
    const tensors = {input: none([tokens, hidden]), weight: none([vocab, hidden]), target: none([tokens], 'i32'), loss: none(options.reduction === 'none' ? [tokens] : [], 'f32')};
    if (gradients) Object.assign(tensors, {gradInput: none([tokens, hidden], gradientDtype), gradWeight: none([vocab, hidden], gradientDtype)});
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
      held.push(this.#allocate(Math.max(8, bytes)));
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
      // Those that the op adds to are among the tensors; of the others only the shape is looked at.
      for (const [name, shape] of Object.entries(outputs)) if (!tensors[name]) this.#give(name, new Tensor(this, null, shape, 'f32'), hold(8));
      this.#ask(() => core.evaluate(bounds ? 1 : 0));
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

  // Shape and dtype of the loss and of the statistics asked for.
  #outputs(rest, statistics, tokens) {
    const outputs = {loss: [rest.reduction === 'none' ? [tokens] : [], 'f32']};
    for (const name of statistics) outputs[name] = [[tokens], name === 'argmax' ? 'i32' : 'f32'];
    return outputs;
  }

  // The outputs that the caller does not bring are made here, and not kept where the call is refused.
  #call(kind, given, outputs, rest) {
    const tensors = Object.fromEntries(Object.entries({...rest, ...given}).filter(([name, tensor]) => tensor && TENSORS.includes(name)));
    const options = Object.fromEntries(Object.entries(rest).filter(([name]) => !TENSORS.includes(name)));
    const made = [];
    try {
      for (const [name, [shape, dtype]] of Object.entries(outputs)) {
        if (!tensors[name]) made.push((tensors[name] = this.empty(shape, dtype)));
      }
      const workspaceBytes = this.#run(kind, tensors, options);
      return {...Object.fromEntries(Object.entries(tensors).filter(([name]) => !INPUTS.has(name))), workspaceBytes};
    } catch (error) {
      for (const tensor of made) tensor.destroy();
      throw error;
    }
  }

  #allocate(bytes) {
    const address = this.core.allocate(bytes);
    if (address === 0) throw new LogitlessError('internal', `out of memory: the module has no ${bytes} bytes left`);
    return address;
  }

  #known(buffer) {
    if (!this.buffers.has(buffer)) this.buffers.set(buffer, {number: this.side.adopt(buffer), written: null});
    return this.buffers.get(buffer);
  }

  // For done(), too.
  #remember(verdict) {
    this.pending = first([this.pending, verdict]);
    return verdict;
  }

  #refuseIfLost() {
    if (this.isLost) throw new LogitlessError('device_error', this.side.lost);
  }

  #withText(text, call) {
    const bytes = new TextEncoder().encode(text);
    const address = this.#allocate(bytes.length + 1);
    const memory = new Uint8Array(this.core.memory.buffer, address, bytes.length + 1);
    memory.set(bytes);
    memory[bytes.length] = 0;
    try {
      return call(address);
    } finally {
      this.core.release(address);
    }
  }

  // Throws where a function of the module returns another code than 0, or traps.
  #ask(call) {
    let code;
    try {
      code = call();
    } catch (error) {
      throw new LogitlessError('internal', `the module stopped, out of memory perhaps: ${error.message}`);
    }
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
    this.#withText(snake(name), (text) => this.#ask(() => this.core.option(text, value)));
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

  #sizes() {
    const address = this.#allocate(16);
    try {
      this.#ask(() => this.core.workspace(address));
      const [minimum, recommended] = new Float64Array(this.core.memory.buffer, address, 2);
      return {minimum, recommended};
    } finally {
      this.core.release(address);
    }
  }

  // Records the op; the bytes of workspace it was given. Its verdict, with those of its inputs, is from
  // now on that of what it writes.
  #run(kind, tensors, options) {
    this.#refuseIfLost();
    const unknown = Object.keys(options).filter((name) => ![...OPTIONS, ...Object.keys(WORDS), 'accumulate', 'budget', 'gradientDtype'].includes(name));
    if (unknown.length > 0) throw new LogitlessError('invalid_argument', `there is no option ${unknown[0]}`);
    const known = Object.fromEntries(Object.entries(tensors).map(([name, tensor]) => [name, this.#known(tensor.buffer)]));
    this.#begin(kind, options);
    for (const [name, tensor] of Object.entries(tensors)) this.#give(name, tensor, known[name].number);
    const {minimum, recommended} = this.#sizes();
    const budget = Math.max(minimum, options.budget ?? recommended);
    this.side.begin();
    let refusal = null;
    try {
      this.#ask(() => this.core.run(budget));
    } catch (error) {
      refusal = error;
    }
    // What was refused has written nothing: its outputs are as good or as bad as before.
    if (refusal && !['device_error', 'internal'].includes(refusal.code)) throw refusal;
    const read = (name) => INPUTS.has(name) || name === 'fault' || (options.accumulate && name.startsWith('grad'));
    const before = Object.keys(tensors).filter(read).map((name) => known[name].written);
    const verdict = this.#remember(first([...before, this.side.end()]));
    for (const name of Object.keys(tensors)) if (!INPUTS.has(name)) known[name].written = verdict;
    // The next call makes the buffers of the workspace anew.
    verdict.then((failure) => failure && this.core.forget());
    if (refusal) throw refusal;
    return budget;
  }
}

// SPDX-License-Identifier: Apache-2.0
// Cross-entropy of a language model's head without the logits, on WebGPU: an ES module around
// logitless.wasm, which is the planner and dispatcher of the C++ library. Calls record work and return
// at once; reading a tensor waits. What every option means: docs/semantics.md. Types: logitless.d.ts.

import {Core, OPTIONS, WORDS} from './core.js';
import {DeviceSide, first} from './device.js';
import {count, DTYPES, LogitlessError, Tensor} from './tensor.js';

export {LogitlessError, Tensor};

const TENSORS = [
  'logits', 'probabilities', 'input', 'weight', 'bias', 'target', 'tokenWeight', 'vocabWeight', 'loss', 'lse',
  'targetLogit', 'entropy', 'argmax', 'rowReference', 'rowLogSum', 'weightedLogitSum', 'logprob', 'rank',
  'sumPSquared', 'meanLogit', 'maxLogprob', 'massAbove', 'gradLoss', 'gradLse', 'gradTargetLogit', 'gradEntropy', 'gradLogits',
  'gradInput', 'gradWeight', 'gradBias', 'fault', 'teacherInput', 'teacherWeight', 'teacherBias', 'teacherLogits', 'teacherEntropy',
  'acceptance',
];
const TEACHER = ['teacherInput', 'teacherWeight', 'teacherBias', 'teacherLogits', 'teacherTemperature'];
// The tensors that a call reads; it writes all its other tensors.
const INPUTS = new Set(['logits', 'input', 'weight', 'bias', 'target', 'tokenWeight', 'vocabWeight', 'temperature', 'gradLoss', ...TEACHER]);
const isIndex = (name) => name === 'argmax' || name === 'rank';
// A temperature is an option if it is a number.
const isTensor = (name, value) => TENSORS.includes(name) || (/^(t|teacherT)emperature$/.test(name) && value instanceof Tensor);
// The limits that the planner and the shaders can use beyond WebGPU's defaults.
const LIMITS = [
  'maxBufferSize', 'maxStorageBufferBindingSize', 'maxStorageBuffersPerShaderStage', 'maxComputeWorkgroupStorageSize',
  'maxComputeInvocationsPerWorkgroup', 'maxComputeWorkgroupSizeX',
];

// Resolves to the reason why there is no WebGPU, as a sentence for the visitor; or to null.
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

export class Logitless {
  // Options: `device` (a GPUDevice of yours), `limits: 'default'` (requests no larger limits),
  // `wasm` (the URL of logitless.wasm).
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
    // The module needs no system: every WASI function does nothing and returns 0.
    const wasi = new Proxy({}, {get: () => () => 0});
    const {instance} = await WebAssembly.instantiateStreaming(source, {device: side.imports(), wasi_snapshot_preview1: wasi});
    return new Logitless(device, side, instance.exports);
  }

  constructor(device, side, exports) {
    this.device = device;
    this.side = side;
    side.memory = exports.memory;
    this.core = new Core(exports);
    this.core.setLimits(device.limits);
    // GPUBuffer -> {made, written}: the verdicts of its creation and of what wrote it last. By buffer, because several
    // tensors may share one.
    this.buffers = new WeakMap();
    this.pending = Promise.resolve(null);  // the verdict of everything since the last done()
    /** @type {Promise<string>} resolves, with WebGPU's reason, when the device is lost */
    this.lost = side.whenLost;
  }

  get isLost() {
    return this.side.lost !== null;
  }

  // {asked, ready}: the number of pipelines that calls have needed so far, and of those compiled or refused.
  get pipelines() {
    return this.side.pipelines;
  }

  // --- tensors

  empty(shape, dtype = 'f32') {
    this.#refuseIfLost();
    const size = Math.max(16, Math.ceil(count(shape) * DTYPES[dtype].bytes / 4) * 4);
    const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
    const {made, thrown, verdict} = this.side.scoped(`a tensor [${shape}] of ${size} bytes`, () => this.device.createBuffer({size, usage}));
    if (thrown) throw new LogitlessError('device_error', thrown);
    this.buffers.set(made, {made: verdict, written: this.#remember(verdict)});
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

  // A tensor in the caller's buffer, which destroy() leaves alone. The buffer's usage must have STORAGE.
  wrap(buffer, shape, dtype = 'f32', {byteOffset = 0, stride} = {}) {
    // Not by instanceof, which is false for a buffer of another window.
    const brand = Object.prototype.toString.call(buffer).slice(8, -1);
    if (brand !== 'GPUBuffer') throw new LogitlessError('invalid_argument', `buffer is a ${brand}; allowed: a GPUBuffer`);
    return new Tensor(this, buffer, shape, dtype, {byteOffset, stride});
  }

  release(tensor) {
    if (tensor.owned) tensor.buffer.destroy();
  }

  // Writes whole 32-bit words. Half a word at the end is padded only if it ends the tensor's own buffer:
  // in another buffer the other half may belong to another tensor.
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
    // After the whole of its own buffer is written, earlier failures no longer matter.
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
    // If the device was lost, WebGPU reports the loss a moment after mapAsync has failed.
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

  // Resolves once everything recorded since the last done() was accepted; rejects with WebGPU's own message.
  async done() {
    const pending = this.pending;
    this.pending = Promise.resolve(null);
    const failure = await pending;
    this.#refuseIfLost();
    if (failure) throw new LogitlessError('device_error', failure);
  }

  // --- ops; the caller destroys the tensors of a result

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

  // The loss of input [N, D] and weight [V, D], and the gradients that are asked for.
  // `gradients`: true, or some of 'input', 'weight', 'bias'.
  linearCrossEntropy({input, weight, bias, target, gradients = false, statistics = [], ...rest}) {
    return this.#linear('linearCrossEntropy', {input, weight, target, bias}, gradients, statistics, rest);
  }

  // How far the student's head, input [N, D] and weight [V, D], is from a teacher's: teacherInput [N, Dt] and
  // teacherWeight [V, Dt], or teacherLogits [N, V]. `divergence`: 'forward_kl', 'reverse_kl', 'jsd', 'skew_kl' or 'tv'.
  linearDivergence({input, weight, bias, target, gradients = false, statistics = [], ...rest}) {
    return this.#linear('linearDivergence', {input, weight, target, bias}, gradients, statistics, rest);
  }

  // Bytes of workspace of linearCrossEntropy on these shapes, or, with teacherHidden or `teacherLogits: true`, of
  // linearDivergence: {minimum, recommended}.
  plan({tokens, hidden, vocab, teacherHidden, teacherLogits = false, gradients = true, dtype = 'f32', gradientDtype = dtype, ...options}) {
    const none = (shape, type = dtype) => new Tensor(this, null, shape, type);
    const tensors = {input: none([tokens, hidden]), weight: none([vocab, hidden]), target: none([tokens], 'i32'), loss: none(options.reduction === 'none' ? [tokens] : [], 'f32')};
    if (teacherLogits) tensors.teacherLogits = none([tokens, vocab]);
    else if (teacherHidden) Object.assign(tensors, {teacherInput: none([tokens, teacherHidden]), teacherWeight: none([vocab, teacherHidden])});
    const op = teacherLogits || teacherHidden ? 'linearDivergence' : 'linearCrossEntropy';
    if (gradients) Object.assign(tensors, {gradInput: none([tokens, hidden], gradientDtype), gradWeight: none([vocab, hidden], gradientDtype)});
    this.core.begin(`${op}Forward${gradients ? 'Backward' : ''}`, options);
    // Planning reads no buffer: different numbers stand for separate buffers, with tensors at offset 0.
    Object.entries(tensors).forEach(([name, tensor], i) => this.core.give(name, tensor, i + 1));
    return this.core.sizes();
  }

  // Evaluates an op on arrays in double by plain loops on the CPU: {loss, gradInput, ...}, each with the
  // f64 `value` and, with `bounds`, how far from it the contract allows a backend to be.
  evaluate({kind = 'linearCrossEntropyForwardBackward', tensors, shapes, outputs, bounds = false, ...options}) {
    const {core} = this;
    const held = [];
    const hold = (bytes) => {
      held.push(this.core.allocate(Math.max(8, bytes)));
      return held.at(-1);
    };
    try {
      this.core.begin(kind, options);
      const dtypeOf = (data) => (data instanceof Int32Array ? 'i32' : data instanceof Uint16Array ? 'f16' : 'f32');
      for (const [name, data] of Object.entries(tensors)) {
        const address = hold(data.byteLength);
        new Uint8Array(core.exports.memory.buffer, address, data.byteLength).set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
        this.core.give(name, new Tensor(this, null, shapes[name] ?? [data.length], dtypeOf(data)), address);
      }
      // Gradients that the op adds to are among `tensors`. Of other outputs only the shape is read.
      for (const [name, shape] of Object.entries(outputs)) if (!tensors[name]) this.core.give(name, new Tensor(this, null, shape, isIndex(name) ? 'i32' : 'f32'), hold(8));
      core.evaluate(bounds);
      const results = {};
      for (const [name, shape] of Object.entries(outputs)) {
        results[name] = {value: this.core.doubles(name, 0, count(shape))};
        if (bounds) results[name].bound = this.core.doubles(name, 1, count(shape));
      }
      return results;
    } finally {
      held.forEach((address) => core.release(address));
    }
  }

  // --- private

  #linear(op, given, gradients, statistics, rest) {
    const outputs = this.#outputs(rest, statistics, given.input.shape[0]);
    const wanted = gradients === true ? ['input', 'weight', ...(given.bias ? ['bias'] : [])] : gradients || [];
    for (const name of wanted) {
      const like = given[name];
      if (!like) throw new LogitlessError('invalid_argument', `gradients has ${name}; allowed: input, weight, and bias where there is one`);
      outputs[`grad${name[0].toUpperCase()}${name.slice(1)}`] = [like.shape, rest.gradientDtype ?? like.dtype];
    }
    return this.#call(`${op}Forward${wanted.length > 0 ? 'Backward' : ''}`, given, outputs, rest);
  }

  // Shape and dtype of the loss and of the statistics asked for.
  #outputs(rest, statistics, tokens) {
    const outputs = {loss: [rest.reduction === 'none' ? [tokens] : [], 'f32']};
    for (const name of statistics) outputs[name] = [[tokens], isIndex(name) ? 'i32' : 'f32'];
    return outputs;
  }

  // Creates the outputs that the caller does not give, and destroys them if the call is refused.
  #call(kind, given, outputs, rest) {
    const tensors = Object.fromEntries(Object.entries({...rest, ...given}).filter(([name, tensor]) => tensor && isTensor(name, tensor)));
    const options = Object.fromEntries(Object.entries(rest).filter(([name, value]) => !isTensor(name, value)));
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

  #known(buffer) {
    if (!this.buffers.has(buffer)) this.buffers.set(buffer, {made: null, written: null});
    return this.buffers.get(buffer);
  }

  // Returns the verdict, and adds it to those that done() waits for.
  #remember(verdict) {
    this.pending = first([this.pending, verdict]);
    return verdict;
  }

  #refuseIfLost() {
    if (this.isLost) throw new LogitlessError('device_error', this.side.lost);
  }

  // Records the op, and returns the bytes of its workspace.
  #run(kind, tensors, options) {
    this.#refuseIfLost();
    const unknown = Object.keys(options).filter((name) => ![...OPTIONS, ...Object.keys(WORDS), 'accumulate', 'budget', 'gradientDtype'].includes(name));
    if (unknown.length > 0) throw new LogitlessError('invalid_argument', `there is no option ${unknown[0]}`);
    this.core.begin(kind, options);
    // `side` holds a buffer as long as the buffer has a number, so numbers are dropped after the call.
    const numbers = new Map();
    try {
      for (const [name, tensor] of Object.entries(tensors)) {
        const {buffer} = tensor;
        if (!numbers.has(buffer)) numbers.set(buffer, this.side.adopt(buffer, this.#known(buffer).made));
        this.core.give(name, tensor, numbers.get(buffer));
      }
      const {minimum, recommended} = this.core.sizes();
      const budget = Math.max(minimum, options.budget ?? recommended);
      this.#record(tensors, options, budget);
      return budget;
    } finally {
      numbers.forEach((number) => this.side.forget(number));
    }
  }

  // The first message of the call's and its inputs' verdicts becomes the verdict of what the call writes.
  #record(tensors, options, budget) {
    let refusal = null;
    this.side.begin();
    try {
      this.core.run(budget);
    } catch (error) {
      refusal = error;
      this.side.abandon();
    }
    // A call refused with another code has written nothing, so its outputs keep their verdicts.
    if (refusal && !['device_error', 'internal'].includes(refusal.code)) throw refusal;
    const known = (name) => this.#known(tensors[name].buffer);
    const read = (name) => INPUTS.has(name) || name === 'fault' || (options.accumulate && name.startsWith('grad'));
    const before = Object.keys(tensors).filter(read).map((name) => known(name).written);
    const verdict = this.#remember(first([...before, this.side.end(), refusal?.message]));
    for (const name of Object.keys(tensors)) if (!INPUTS.has(name)) known(name).written = verdict;
    verdict.then((failure) => failure && this.core.forget());
    if (refusal) throw refusal;
  }
}

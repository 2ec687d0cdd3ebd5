// SPDX-License-Identifier: Apache-2.0
// What logitless.wasm exports (src/webgpu/browser/module.cpp), by the names of JavaScript: an op is begun, given
// its tensors and options, then planned, run, or evaluated in double. One op at a time.

import {DTYPES, LogitlessError} from './tensor.js';

const KINDS = {
  softmax: 0,
  crossEntropyForward: 1,
  crossEntropyBackward: 2,
  crossEntropyForwardBackward: 3,
  linearCrossEntropyForward: 4,
  linearCrossEntropyBackward: 5,
  linearCrossEntropyForwardBackward: 6,
};
export const WORDS = {
  reduction: ['none', 'sum', 'mean'],
  outOfRange: ['error', 'ignore'],
  emptyMean: ['zero', 'nan'],
  inputKind: ['logits', 'probabilities'],
};
const CODES = [
  'ok', 'invalid_argument', 'wrong_shape', 'wrong_dtype', 'wrong_device', 'misaligned', 'unknown_enum',
  'workspace_too_small', 'target_out_of_range', 'backend_unavailable', 'not_supported', 'device_error', 'internal',
];
export const OPTIONS = [
  'ignoreIndex', 'labelSmoothing', 'zLoss', 'logitScale', 'softcap', 'temperature', 'probabilityFloor', 'normalizer',
  'vocabStart', 'vocabTotal',
];

const snake = (name) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);

export class Core {
  constructor(exports) {
    this.exports = exports;
    exports._initialize();
  }

  setLimits(limits) {
    this.exports.set_limits(
        limits.maxBufferSize, limits.maxStorageBufferBindingSize, limits.maxStorageBuffersPerShaderStage,
        limits.minStorageBufferOffsetAlignment, limits.maxComputeWorkgroupStorageSize,
        limits.maxComputeInvocationsPerWorkgroup, limits.maxComputeWorkgroupsPerDimension);
  }

  allocate(bytes) {
    const address = this.exports.allocate(bytes);
    if (address === 0) throw new LogitlessError('internal', `out of memory: the module has no ${bytes} bytes left`);
    return address;
  }

  withText(text, call) {
    const bytes = new TextEncoder().encode(text);
    const address = this.allocate(bytes.length + 1);
    const memory = new Uint8Array(this.exports.memory.buffer, address, bytes.length + 1);
    memory.set(bytes);
    memory[bytes.length] = 0;
    try {
      return call(address);
    } finally {
      this.exports.release(address);
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
    const memory = new Uint8Array(this.exports.memory.buffer);
    const start = this.exports.message();
    const message = new TextDecoder().decode(memory.slice(start, memory.indexOf(0, start)));
    throw new LogitlessError(CODES[code] ?? 'internal', message);
  }

  begin(kind, options) {
    this.exports.begin(KINDS[kind], options.accumulate ? 1 : 0);
    for (const name of OPTIONS) if (options[name] !== undefined) this.#option(name, options[name]);
    for (const [name, words] of Object.entries(WORDS)) {
      if (options[name] === undefined) continue;
      const value = words.indexOf(options[name]);
      if (value < 0) throw new LogitlessError('unknown_enum', `${name} is ${options[name]}; allowed: ${words.join(', ')}`);
      this.#option(name, value);
    }
  }

  #option(name, value) {
    this.withText(snake(name), (text) => this.#ask(() => this.exports.option(text, value)));
  }

  give(name, tensor, data) {
    const {shape, stride, dtype, byteOffset} = tensor;
    this.withText(snake(name), (text) => this.exports.tensor(
        text, data, byteOffset, DTYPES[dtype].code, shape.length, shape[0] ?? 0, shape[1] ?? 0, stride[0] ?? 0, stride[1] ?? 0));
  }

  doubles(name, bound, length) {
    const address = this.withText(snake(name), (text) => this.exports.evaluated(text, bound));
    return new Float64Array(this.exports.memory.buffer, address, length).slice();
  }

  sizes() {
    const address = this.allocate(16);
    try {
      this.#ask(() => this.exports.workspace(address));
      const [minimum, recommended] = new Float64Array(this.exports.memory.buffer, address, 2);
      return {minimum, recommended};
    } finally {
      this.exports.release(address);
    }
  }

  run(budget) {
    this.#ask(() => this.exports.run(budget));
  }

  evaluate(bounds) {
    this.#ask(() => this.exports.evaluate(bounds ? 1 : 0));
  }

  // The workspace's buffers are made anew by the next call. A module that has stopped has none to forget.
  forget() {
    try {
      this.exports.forget();
    } catch {
      // run() has said so.
    }
  }
}

// SPDX-License-Identifier: Apache-2.0
// What logitless.wasm exports (src/webgpu/browser/module.cpp), with names in camelCase: an op is begun, given its
// tensors and options, then planned, run, or evaluated in double. One op at a time.

import {DTYPES, LogitlessError} from './tensor.js';

const KINDS = {
  softmax: 0,
  crossEntropyForward: 1,
  crossEntropyBackward: 2,
  crossEntropyForwardBackward: 3,
  linearCrossEntropyForward: 4,
  linearCrossEntropyBackward: 5,
  linearCrossEntropyForwardBackward: 6,
  linearDivergenceForward: 8,
  linearDivergenceBackward: 9,
  linearDivergenceForwardBackward: 10,
};
export const WORDS = {
  reduction: ['none', 'sum', 'mean'],
  outOfRange: ['error', 'ignore'],
  emptyMean: ['zero', 'nan'],
  inputKind: ['logits', 'probabilities'],
  divergence: ['forward_kl', 'reverse_kl', 'jsd', 'skew_kl', 'tv'],
};
const CODES = [
  'ok', 'invalid_argument', 'wrong_shape', 'wrong_dtype', 'wrong_device', 'misaligned', 'unknown_enum',
  'workspace_too_small', 'target_out_of_range', 'backend_unavailable', 'not_supported', 'device_error', 'internal',
];
export const OPTIONS = [
  'ignoreIndex', 'labelSmoothing', 'zLoss', 'logitScale', 'softcap', 'temperature', 'probabilityFloor', 'normalizer',
  'vocabStart', 'vocabTotal', 'beta', 'labelWeight', 'teacherLogitScale', 'teacherSoftcap', 'teacherTemperature',
];

const snake = (name) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);

// The message of a thrown value, which need not be an Error.
const said = (error) => error?.message ?? String(error);

export class Core {
  constructor(exports) {
    this.exports = exports;
    this.#enter((module) => module._initialize());
  }

  // Calls the module. A trap or an exception in the module leaves its stack pointer lowered. This restores the
  // pointer, because a module without stack space can run nothing.
  #enter(call) {
    const stack = this.exports.__stack_pointer;
    const before = stack.value;
    try {
      return call(this.exports);
    } catch (error) {
      stack.value = before;
      // A failed allocation ends in `unreachable`.
      const why = error instanceof WebAssembly.RuntimeError && /unreachable/i.test(error.message) ? ', out of memory perhaps' : '';
      throw new LogitlessError('internal', `the module stopped${why}: ${said(error)}`);
    }
  }

  // Returns an address as an unsigned number; JavaScript gets it from the module as a signed one.
  #address(call) {
    return this.#enter(call) >>> 0;
  }

  // Throws if a function of the module returns a code other than 0.
  #ask(call) {
    const code = this.#enter(call);
    if (code === 0) return;
    const start = this.#address((module) => module.message());
    const memory = new Uint8Array(this.exports.memory.buffer);
    const message = new TextDecoder().decode(memory.slice(start, memory.indexOf(0, start)));
    throw new LogitlessError(CODES[code] ?? 'internal', message);
  }

  setLimits(limits) {
    this.#enter((module) => module.set_limits(
        limits.maxBufferSize, limits.maxStorageBufferBindingSize, limits.maxStorageBuffersPerShaderStage,
        limits.minStorageBufferOffsetAlignment, limits.maxComputeWorkgroupStorageSize,
        limits.maxComputeInvocationsPerWorkgroup, limits.maxComputeWorkgroupsPerDimension));
  }

  allocate(bytes) {
    // The module's sizes have 32 bits; a larger number would be truncated.
    const address = bytes < 2 ** 32 ? this.#address((module) => module.allocate(bytes)) : 0;
    if (address === 0) throw new LogitlessError('internal', `out of memory: the module has no ${bytes} bytes left`);
    return address;
  }

  release(address) {
    this.#enter((module) => module.release(address));
  }

  // Calls f with the address of that many bytes, and releases them even if f throws.
  #withMemory(bytes, f) {
    const address = this.allocate(bytes);
    try {
      return f(address);
    } finally {
      this.release(address);
    }
  }

  // Calls call(address) with the address of the text, which ends with a 0 byte.
  #withText(text, call) {
    const bytes = new TextEncoder().encode(`${text}\0`);
    return this.#withMemory(bytes.length, (address) => {
      new Uint8Array(this.exports.memory.buffer, address, bytes.length).set(bytes);
      return call(address);
    });
  }

  begin(kind, options) {
    this.#enter((module) => module.begin(KINDS[kind], options.accumulate ? 1 : 0));
    for (const name of OPTIONS) if (options[name] !== undefined) this.#option(name, options[name]);
    for (const [name, words] of Object.entries(WORDS)) {
      if (options[name] === undefined) continue;
      const value = words.indexOf(options[name]);
      if (value < 0) throw new LogitlessError('unknown_enum', `${name} is ${options[name]}; allowed: ${words.join(', ')}`);
      this.#option(name, value);
    }
  }

  #option(name, value) {
    // WebAssembly would convert null to 0, and "one" to NaN.
    if (typeof value !== 'number') throw new LogitlessError('invalid_argument', `${name} is ${value}; allowed: a number`);
    this.#withText(snake(name), (text) => this.#ask((module) => module.option(text, value)));
  }

  give(name, tensor, data) {
    const {shape, stride, dtype, byteOffset} = tensor;
    const {code} = DTYPES[dtype];
    this.#withText(snake(name), (text) => this.#enter((module) => module.tensor(
        text, data, byteOffset, code, shape.length, shape[0] ?? 0, shape[1] ?? 0, stride[0] ?? 0, stride[1] ?? 0)));
  }

  doubles(name, bound, length) {
    const address = this.#withText(snake(name), (text) => this.#address((module) => module.evaluated(text, bound)));
    return new Float64Array(this.exports.memory.buffer, address, length).slice();
  }

  sizes() {
    return this.#withMemory(16, (address) => {
      this.#ask((module) => module.workspace(address));
      const [minimum, recommended] = new Float64Array(this.exports.memory.buffer, address, 2);
      return {minimum, recommended};
    });
  }

  run(budget) {
    this.#ask((module) => module.run(budget));
  }

  evaluate(bounds) {
    this.#ask((module) => module.evaluate(bounds ? 1 : 0));
  }

  // Drops the workspace's buffers, so that the next call creates new ones.
  forget() {
    try {
      this.#enter((module) => module.forget());
    } catch {
      // The module has stopped, which run() has reported.
    }
  }
}

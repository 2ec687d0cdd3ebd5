// SPDX-License-Identifier: Apache-2.0
// Views of GPU buffers, and the errors of this package.

export const DTYPES = {
  f32: {code: 0, bytes: 4, array: Float32Array},
  f16: {code: 1, bytes: 2, array: Uint16Array},
  i32: {code: 3, bytes: 4, array: Int32Array},
};
export const count = (shape) => shape.reduce((product, size) => product * size, 1);

export class LogitlessError extends Error {
  /** @param {string} code a status code's name @param {string} message */
  constructor(code, message) {
    super(message);
    this.name = 'LogitlessError';
    this.code = code;
  }
}

// Calls f with the tensors and destroys them.
export async function using(tensors, f) {
  try {
    return await f(tensors);
  } finally {
    for (const tensor of Object.values(tensors)) tensor?.destroy?.();
  }
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

  // Resolves to the elements, once everything recorded before has run. Contiguous tensors only.
  async read() {
    return this.owner.read(this);
  }

  // Resolves to the first element; for tensors with a single one.
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

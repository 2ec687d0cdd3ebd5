// SPDX-License-Identifier: Apache-2.0
// The browser's side of src/webgpu/device.h: what the wasm module calls to reach a GPUDevice. Work is
// recorded into one command encoder and handed over by submit(); nothing here waits. What WebGPU
// finds wrong it says later, so every error is kept until somebody asks.

const FILTERS = ['internal', 'out-of-memory', 'validation'];
const usage = () =>
  GPUBufferUsage.STORAGE | GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;

export class DeviceSide {
  /** @param {GPUDevice} device */
  constructor(device) {
    this.device = device;
    this.memory = null;  // of the wasm module, once there is one
    this.buffers = new Map();  // number -> GPUBuffer
    this.kernels = [null];
    this.next = 1;
    this.encoder = null;
    this.pass = null;
    this.failures = [];
    this.scopes = Promise.resolve();
    this.allocated = 0;  // bytes of the buffers made here
    this.most = 0;
    this.lost = null;
    device.lost?.then((info) => {
      this.lost = `the GPU device was lost: ${info.message || info.reason}`;
    });
  }

  // A number for a buffer of the caller's; forget() ends it.
  adopt(buffer) {
    const number = this.next++;
    this.buffers.set(number, buffer);
    return number;
  }
  forget(number) {
    this.buffers.delete(number);
  }

  // The first error since the last call, once WebGPU has had its say about all that was submitted.
  async settled() {
    await this.scopes;
    return this.lost ?? this.failures.shift() ?? null;
  }

  #openScopes() {
    for (const filter of FILTERS) this.device.pushErrorScope(filter);
  }

  #closeScopes(what) {
    const popped = FILTERS.map(() => this.device.popErrorScope().catch(() => null));
    this.scopes = Promise.all([this.scopes, ...popped]).then(([, ...errors]) => {
      for (const error of errors) if (error) this.failures.push(`${what}: ${error.message}`);
    });
  }

  #scoped(what, make) {
    this.#openScopes();
    let made = null;
    try {
      made = make();
    } catch (error) {
      this.failures.push(`${what}: ${error.message}`);
    }
    this.#closeScopes(what);
    return made;
  }

  #text(pointer) {
    const bytes = new Uint8Array(this.memory.buffer);
    return new TextDecoder().decode(bytes.slice(pointer, bytes.indexOf(0, pointer)));
  }

  #endPass() {
    this.pass?.end();
    this.pass = null;
  }

  // From the first call recorded to its submission one set of scopes is open: a call of the module
  // ends with submit(), so nobody else's scope comes between.
  #recording() {
    if (!this.encoder) {
      this.#openScopes();
      this.encoder = this.device.createCommandEncoder();
    }
    return this.encoder;
  }

  // The imports of the wasm module.
  imports() {
    const {device} = this;
    return {
      create_buffer: (bytes) => {
        const buffer = this.#scoped(`a buffer of ${bytes} bytes`, () => device.createBuffer({size: Math.max(16, bytes), usage: usage()}));
        if (!buffer) return 0;
        this.allocated += bytes;
        this.most = Math.max(this.most, this.allocated);
        return this.adopt(buffer);
      },
      destroy_buffer: (number) => {
        const buffer = this.buffers.get(number);
        if (!buffer) return;
        this.allocated -= buffer.size;
        buffer.destroy();
        this.forget(number);
      },
      // Before what is recorded and not submitted, as device.h says.
      write: (number, offset, data, bytes) => {
        this.#scoped('a write', () => device.queue.writeBuffer(this.buffers.get(number), offset, this.memory.buffer, data, bytes));
      },
      pipeline: (label, text, entry, constants, count) => {
        const view = new DataView(this.memory.buffer);
        const values = {};
        for (let i = 0; i < count; i++) {
          values[this.#text(view.getUint32(constants + 16 * i, true))] = view.getFloat64(constants + 16 * i + 8, true);
        }
        const name = `${this.#text(label)}.wgsl, ${this.#text(entry)}, ${JSON.stringify(values)}`;
        const kernel = this.#scoped(name, () => device.createComputePipeline({
          label: name,
          layout: 'auto',
          compute: {module: device.createShaderModule({code: this.#text(text), label: name}), entryPoint: this.#text(entry), constants: values},
        }));
        return kernel ? this.kernels.push({kernel, layout: kernel.getBindGroupLayout(0)}) - 1 : 0;
      },
      dispatch: (pipeline, bindings, count, x, y, z) => {
        const view = new DataView(this.memory.buffer);
        const entries = [];
        for (let binding = 0; binding < count; binding++) {
          const at = bindings + 24 * binding;
          const number = view.getUint32(at, true);
          if (number === 0) continue;
          const offset = Number(view.getBigUint64(at + 8, true));
          const size = Number(view.getBigUint64(at + 16, true));
          entries.push({binding, resource: {buffer: this.buffers.get(number), offset, size}});
        }
        const {kernel, layout} = this.kernels[pipeline];
        this.pass ??= this.#recording().beginComputePass();
        this.pass.setPipeline(kernel);
        this.pass.setBindGroup(0, device.createBindGroup({layout, entries}));
        this.pass.dispatchWorkgroups(x, y, z);
      },
      copy: (source, sourceOffset, target, targetOffset, bytes) => {
        this.#endPass();
        this.#recording().copyBufferToBuffer(this.buffers.get(source), sourceOffset, this.buffers.get(target), targetOffset, bytes);
      },
      submit: () => {
        if (!this.encoder) return;
        this.#endPass();
        const {encoder} = this;
        this.encoder = null;
        device.queue.submit([encoder.finish()]);
        this.#closeScopes('what was submitted');
      },
      error: (text, capacity) => {
        const message = this.lost ?? this.failures.shift();
        if (!message) return 0;
        const bytes = new Uint8Array(this.memory.buffer, text, capacity);
        const {written} = new TextEncoder().encodeInto(message, bytes.subarray(0, capacity - 1));
        bytes[written] = 0;
        return written + 1;
      },
    };
  }
}

// SPDX-License-Identifier: Apache-2.0
// The browser's side of src/webgpu/device.h: what the wasm module calls to reach a GPUDevice. Work is
// recorded into one command encoder and handed over by submit(); nothing here waits. What WebGPU finds
// wrong it says later: every buffer, pipeline and submission has a verdict, a promise of a message or
// null, and a call's verdict is the first of those of all that it used.

const FILTERS = ['internal', 'out-of-memory', 'validation'];
const usage = () =>
  GPUBufferUsage.STORAGE | GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;

// The first message of several verdicts, or null.
export const first = (verdicts) => Promise.all(verdicts).then((all) => all.find((message) => message) ?? null);

export class DeviceSide {
  /** @param {GPUDevice} device */
  constructor(device) {
    this.device = device;
    this.memory = null;  // of the wasm module, once there is one
    this.buffers = new Map();  // number -> {buffer, verdict}
    this.kernels = [null];
    this.next = 1;
    this.encoder = null;
    this.pass = null;
    this.isRecording = false;  // its scopes are open
    this.allocated = 0;  // bytes of the buffers made here
    this.most = 0;
    this.lost = null;
    this.whenLost = device.lost.then((info) => (this.lost = `the GPU device was lost: ${info.message || info.reason}`));
    this.begin();
  }

  // A number for a buffer of the caller's; forget() ends it.
  adopt(buffer, verdict = null) {
    const number = this.next++;
    this.buffers.set(number, {buffer, verdict});
    return number;
  }
  forget(number) {
    this.buffers.delete(number);
  }

  // Between these two lies a call of the module; end() gives its verdict.
  begin() {
    this.refusal = null;  // what was thrown at once
    this.verdicts = new Set();
  }
  end() {
    return first(this.verdicts).then((message) => this.lost ?? message);
  }

  // After a call that failed or trapped: what it recorded is dropped, and its scopes do not stay open on the page's device.
  abandon() {
    if (this.isRecording) this.#closeScopes('what was recorded');
    this.isRecording = false;
    this.encoder = this.pass = null;
  }

  // What `make` gives, or null where it throws, and the verdict of WebGPU.
  scoped(what, make) {
    this.#openScopes();
    let made = null;
    let thrown = null;
    try {
      made = make();
    } catch (error) {
      thrown = `${what}: ${error.message}`;
    }
    const verdict = this.#closeScopes(what);
    return {made, thrown, verdict: thrown ? Promise.resolve(thrown) : verdict};
  }

  #openScopes() {
    let open = 0;
    try {
      for (const filter of FILTERS) {
        this.device.pushErrorScope(filter);
        open++;
      }
    } catch (error) {
      for (; open > 0; open--) this.device.popErrorScope().catch(() => null);
      throw error;
    }
  }

  #closeScopes(what) {
    // A lost device has no scopes; whoever asks is told of the loss.
    const popped = FILTERS.map(async () => this.device.popErrorScope()).map((scope) => scope.catch(() => null));
    return first(popped).then((error) => (error ? `${what}: ${error.message}` : null));
  }

  // As a part of the call under way.
  #ofCall(what, make) {
    const {made, thrown, verdict} = this.scoped(what, make);
    this.refusal ??= thrown;
    this.verdicts.add(verdict);
    return {made, verdict};
  }

  // A buffer that the call uses.
  #bound(number) {
    const {buffer, verdict} = this.buffers.get(number);
    if (verdict) this.verdicts.add(verdict);
    return buffer;
  }

  // Addresses are unsigned; JavaScript is given them as signed numbers.
  #text(pointer) {
    const bytes = new Uint8Array(this.memory.buffer);
    const start = pointer >>> 0;
    return new TextDecoder().decode(bytes.slice(start, bytes.indexOf(0, start)));
  }

  #endPass() {
    this.pass?.end();
    this.pass = null;
  }

  // From the first call recorded to its submission one set of scopes is open: a call of the module
  // ends with submit(), so nobody else's scope comes between.
  #recording() {
    if (!this.isRecording) this.#openScopes();
    this.isRecording = true;
    this.encoder ??= this.device.createCommandEncoder();
    return this.encoder;
  }

  // How many pipelines the module has asked for, and of how many WebGPU has said that they are compiled or refused.
  get pipelines() {
    const asked = this.kernels.slice(1);
    return {asked: asked.length, ready: asked.filter(({ready}) => ready).length};
  }

  // Makes a kernel, or makes it anew. One that WebGPU refused is not kept: what it was short of may be there by the
  // next call.
  #compile(kernel) {
    const {made, verdict} = this.#ofCall(kernel.name, kernel.make);
    Object.assign(kernel, made, {verdict, failed: false, ready: false});
    verdict.then((message) => Object.assign(kernel, {failed: message !== null, ready: true}));
    return made !== null;
  }

  // Returns the number of a kernel of these constants, or 0 where it was refused.
  #pipeline(label, text, entry, constants, count) {
    const view = new DataView(this.memory.buffer);
    const values = {};
    for (let i = 0; i < count; i++) {
      const at = (constants >>> 0) + 16 * i;
      values[this.#text(view.getUint32(at, true))] = view.getFloat64(at + 8, true);
    }
    const name = `${this.#text(label)}.wgsl, ${this.#text(entry)}, ${JSON.stringify(values)}`;
    const make = () => {
      const module = this.device.createShaderModule({code: this.#text(text), label: name});
      const kernel = this.device.createComputePipeline({label: name, layout: 'auto', compute: {module, entryPoint: this.#text(entry), constants: values}});
      return {kernel, layout: kernel.getBindGroupLayout(0)};
    };
    const made = {name, make};
    return this.#compile(made) ? this.kernels.push(made) - 1 : 0;
  }

  #dispatch(pipeline, bindings, count, x, y, z) {
    const view = new DataView(this.memory.buffer);
    const entries = [];
    for (let binding = 0; binding < count; binding++) {
      const at = (bindings >>> 0) + 24 * binding;
      const number = view.getUint32(at, true);
      if (number === 0) continue;
      const offset = Number(view.getBigUint64(at + 8, true));
      const size = Number(view.getBigUint64(at + 16, true));
      entries.push({binding, resource: {buffer: this.#bound(number), offset, size}});
    }
    const known = this.kernels[pipeline];
    if (known.failed && !this.#compile(known)) return;
    const {kernel, layout, verdict} = known;
    this.verdicts.add(verdict);
    this.pass ??= this.#recording().beginComputePass();
    this.pass.setPipeline(kernel);
    this.pass.setBindGroup(0, this.device.createBindGroup({layout, entries}));
    this.pass.dispatchWorkgroups(x, y, z);
  }

  // The imports of the wasm module. An exception must not pass through the module, whose functions would never give
  // back their part of its stack. So it is kept as the call's refusal, which ends in a status: submit() hands nothing
  // over then.
  imports() {
    const guarded = ([name, call]) => [name, (...given) => {
      try {
        return call(...given);
      } catch (error) {
        this.refusal ??= `${name}: ${error?.message ?? error}`;
        return 0;
      }
    }];
    return Object.fromEntries(Object.entries(this.#calls()).map(guarded));
  }

  #calls() {
    const {device} = this;
    return {
      create_buffer: (bytes) => {
        const {made, verdict} = this.#ofCall(`a buffer of ${bytes} bytes`, () => device.createBuffer({size: Math.max(16, bytes), usage: usage()}));
        if (!made) return 0;
        this.allocated += made.size;
        this.most = Math.max(this.most, this.allocated);
        return this.adopt(made, verdict);
      },
      destroy_buffer: (number) => {
        const {buffer} = this.buffers.get(number) ?? {};
        if (!buffer) return;
        this.allocated -= buffer.size;
        this.forget(number);
        buffer.destroy();
      },
      // Before what is recorded and not submitted, as device.h says.
      write: (number, offset, data, bytes) => {
        this.#ofCall('a write', () => device.queue.writeBuffer(this.#bound(number), offset, this.memory.buffer, data >>> 0, bytes >>> 0));
      },
      pipeline: (label, text, entry, constants, count) => this.#pipeline(label, text, entry, constants, count),
      dispatch: (pipeline, bindings, count, x, y, z) => this.#dispatch(pipeline, bindings, count, x, y, z),
      copy: (source, sourceOffset, target, targetOffset, bytes) => {
        this.#endPass();
        this.#recording().copyBufferToBuffer(this.#bound(source), sourceOffset, this.#bound(target), targetOffset, bytes);
      },
      // 1, or 0 where something was refused at once: then nothing of what was recorded since the last one is handed over.
      submit: () => {
        if (this.refusal) {
          this.abandon();
          return 0;
        }
        if (!this.encoder) return 1;
        this.#endPass();
        device.queue.submit([this.encoder.finish()]);
        this.encoder = null;  // not before: its scopes are open until here
        this.isRecording = false;
        this.verdicts.add(this.#closeScopes('what was submitted'));
        return 1;
      },
      abandon: () => this.abandon(),
      error: (text, capacity) => {
        const message = this.lost ?? this.refusal;
        if (!message) return 0;
        const bytes = new Uint8Array(this.memory.buffer, text >>> 0, capacity);
        const {written} = new TextEncoder().encodeInto(message, bytes.subarray(0, capacity - 1));
        bytes[written] = 0;
        return written + 1;
      },
    };
  }
}

// SPDX-License-Identifier: Apache-2.0
// The browser's side of src/webgpu/device.h: what the wasm module calls to reach a GPUDevice. Work is
// recorded into one command encoder and handed over by submit(); nothing here waits. WebGPU reports
// errors later: every buffer, pipeline and submission has a verdict, a promise of a message or null.
// A call's verdict is the first message among the verdicts of everything that the call used.

const FILTERS = ['internal', 'out-of-memory', 'validation'];
const usage = () =>
  GPUBufferUsage.STORAGE | GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;

// The first message of several verdicts, or null.
export const first = (verdicts) => Promise.all(verdicts).then((all) => all.find((message) => message) ?? null);

export class DeviceSide {
  /** @param {GPUDevice} device */
  constructor(device) {
    this.device = device;
    this.memory = null;  // the wasm module's; Logitless sets it
    this.buffers = new Map();  // number -> {buffer, verdict}
    this.kernels = [null];
    this.next = 1;
    this.encoder = null;
    this.pass = null;
    this.isRecording = false;  // true: the error scopes of recorded work are open
    this.allocated = 0;  // bytes of the buffers made here
    this.most = 0;
    this.lost = null;
    this.whenLost = device.lost.then((info) => (this.lost = `the GPU device was lost: ${info.message || info.reason}`));
    this.begin();
  }

  // Returns the number by which the module knows a buffer, until forget().
  adopt(buffer, verdict = null) {
    const number = this.next++;
    this.buffers.set(number, {buffer, verdict});
    return number;
  }
  forget(number) {
    this.buffers.delete(number);
  }

  // begin() and end() enclose a call of the module; end() returns the call's verdict.
  begin() {
    this.refusal = null;  // the first message thrown during the call
    this.verdicts = new Set();
  }
  end() {
    return first(this.verdicts).then((message) => this.lost ?? message);
  }

  // After a call that failed or trapped: drops what the call recorded, and closes its error scopes.
  abandon() {
    if (this.isRecording) this.#closeScopes('what was recorded');
    this.isRecording = false;
    this.encoder = this.pass = null;
  }

  // Calls make(). Returns what it made, or null if it threw; the message thrown; and WebGPU's verdict.
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
    // A lost device may reject; `lost` then has the reason.
    const popped = FILTERS.map(async () => this.device.popErrorScope()).map((scope) => scope.catch(() => null));
    return first(popped).then((error) => (error ? `${what}: ${error.message}` : null));
  }

  // Like scoped(), and adds the outcome to the current call's refusal and verdicts.
  #ofCall(what, make) {
    const {made, thrown, verdict} = this.scoped(what, make);
    this.refusal ??= thrown;
    this.verdicts.add(verdict);
    return {made, verdict};
  }

  // Returns a buffer that the current call uses, whose verdict then counts for the call.
  #bound(number) {
    const {buffer, verdict} = this.buffers.get(number);
    if (verdict) this.verdicts.add(verdict);
    return buffer;
  }

  // Addresses are unsigned, but the module passes them to JavaScript as signed numbers.
  #text(pointer) {
    const bytes = new Uint8Array(this.memory.buffer);
    const start = pointer >>> 0;
    return new TextDecoder().decode(bytes.slice(start, bytes.indexOf(0, start)));
  }

  #endPass() {
    this.pass?.end();
    this.pass = null;
  }

  // One set of error scopes is open from the first command recorded to its submission. A call of the
  // module ends with submit(), so no scope of the page can come between.
  #recording() {
    if (!this.isRecording) this.#openScopes();
    this.isRecording = true;
    this.encoder ??= this.device.createCommandEncoder();
    return this.encoder;
  }

  // The number of pipelines that the module has asked for, and of those that are compiled or refused.
  get pipelines() {
    const asked = this.kernels.slice(1);
    return {asked: asked.length, ready: asked.filter(({ready}) => ready).length};
  }

  // Creates a kernel's pipeline. A refused one is created again at its next use, because WebGPU may
  // have refused it only for lack of memory.
  #compile(kernel) {
    const {made, verdict} = this.#ofCall(kernel.name, kernel.make);
    Object.assign(kernel, made, {verdict, failed: false, ready: false});
    verdict.then((message) => Object.assign(kernel, {failed: message !== null, ready: true}));
    return made !== null;
  }

  // Returns the number of a kernel with these constants, or 0 if it was refused at once.
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

  // The imports of the wasm module. An exception must not pass through the module, whose functions
  // would then not free their part of its stack. So it becomes the call's refusal: submit() submits
  // nothing then, and the module returns an error.
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
      // Takes effect before what is recorded and not yet submitted, as device.h says.
      write: (number, offset, data, bytes) => {
        this.#ofCall('a write', () => device.queue.writeBuffer(this.#bound(number), offset, this.memory.buffer, data >>> 0, bytes >>> 0));
      },
      pipeline: (label, text, entry, constants, count) => this.#pipeline(label, text, entry, constants, count),
      dispatch: (pipeline, bindings, count, x, y, z) => this.#dispatch(pipeline, bindings, count, x, y, z),
      copy: (source, sourceOffset, target, targetOffset, bytes) => {
        this.#endPass();
        this.#recording().copyBufferToBuffer(this.#bound(source), sourceOffset, this.#bound(target), targetOffset, bytes);
      },
      // Returns 1; or 0, having submitted nothing, if something was refused during the call.
      submit: () => {
        if (this.refusal) {
          this.abandon();
          return 0;
        }
        if (!this.encoder) return 1;
        this.#endPass();
        device.queue.submit([this.encoder.finish()]);
        this.encoder = null;
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

// SPDX-License-Identifier: Apache-2.0
// Lends suite.wasm a device with the default limits, through the library's own web/device.js, and
// the parts of WASI that it needs: time and printing.
import {DeviceSide} from '/web/device.js';

const adapter = await navigator.gpu.requestAdapter();
const device = await adapter.requestDevice();
const side = new DeviceSide(device);
const lines = [];
let memory = null;

// Addresses are unsigned in wasm, but JavaScript receives them as signed numbers.
const text = (pointer) => {
  const bytes = new Uint8Array(memory.buffer);
  const start = pointer >>> 0;
  return new TextDecoder().decode(bytes.slice(start, bytes.indexOf(0, start)));
};

// Returns the result of all work since the last read, and a buffer's bytes.
async function read(number, data, bytes, why, capacity) {
  const verdict = side.end();
  side.begin();
  const {buffer} = side.buffers.get(number);
  const reader = device.createBuffer({size: bytes, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST});
  const encoder = device.createCommandEncoder();
  encoder.copyBufferToBuffer(buffer, 0, reader, 0, bytes);
  device.queue.submit([encoder.finish()]);
  await reader.mapAsync(GPUMapMode.READ);
  new Uint8Array(memory.buffer, data >>> 0, bytes).set(new Uint8Array(reader.getMappedRange()));
  reader.destroy();
  const message = await verdict;
  return message ? new TextEncoder().encodeInto(message, new Uint8Array(memory.buffer, why >>> 0, capacity - 1)).written : 0;
}

let line = '';
const wasi = {
  fd_write: (fd, vectors, count, written) => {
    const view = new DataView(memory.buffer);
    let total = 0;
    for (let i = 0; i < count; i++) {
      const [start, size] = [view.getUint32(vectors + 8 * i, true), view.getUint32(vectors + 8 * i + 4, true)];
      line += new TextDecoder().decode(new Uint8Array(memory.buffer, start, size).slice());
      total += size;
    }
    const whole = line.split('\n');
    line = whole.pop();
    lines.push(...whole);
    view.setUint32(written, total, true);
    return 0;
  },
  clock_time_get: (id, precision, result) => {
    new DataView(memory.buffer).setBigUint64(result, BigInt(Math.round(performance.now() * 1e6)), true);
    return 0;
  },
  environ_sizes_get: (count, size) => {
    new DataView(memory.buffer).setUint32(count, 0, true);
    new DataView(memory.buffer).setUint32(size, 0, true);
    return 0;
  },
  proc_exit: (code) => {
    throw new Error(`exit ${code}: ${lines.slice(-5).join('\n')}`);
  },
};
const others = new Proxy(wasi, {get: (known, name) => known[name] ?? (() => 8 /* no such file */)});
const {instance} = await WebAssembly.instantiateStreaming(fetch('/build/web/suite/suite.wasm'), {
  device: side.imports(),
  suite: {
    read: new WebAssembly.Suspending(read),
    failed: (what) => {
      throw new Error(`${text(what)}: ${lines.slice(-5).join('\n')}`);
    },
  },
  wasi_snapshot_preview1: others,
});
memory = side.memory = instance.exports.memory;
instance.exports._initialize();
const run = WebAssembly.promising(instance.exports.run_tests);

// Returns how many of a filter's tests failed (-1: it has none), and their output.
globalThis.runTests = async (filter) => {
  lines.length = 0;
  const bytes = new TextEncoder().encode(`${filter}\0`);
  const address = instance.exports.allocate(bytes.length) >>> 0;
  new Uint8Array(memory.buffer, address, bytes.length).set(bytes);
  const failed = await run(address);
  return {failed, text: lines.join('\n')};
};
globalThis.everyPipeline = () => text(instance.exports.every_pipeline()).trim().split('\n');
globalThis.madePipelines = () => side.kernels.slice(1).map(({kernel}) => kernel.label);
globalThis.ready = true;

// SPDX-License-Identifier: Apache-2.0
// Runs a single compute pipeline from a binding table, so that tests/web/raw.py can test Tint.

const decode = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const encode = (bytes) => {
  let text = '';
  for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return btoa(text);
};

let device;
async function requireDevice() {
  if (device) return device;
  const adapter = await navigator.gpu.requestAdapter();
  device = await adapter.requestDevice();  // with the default limits
  return device;
}

async function validated(device, make) {
  device.pushErrorScope('validation');
  let made;
  let thrown;
  try {
    made = await make();
  } catch (error) {
    thrown = error;
  }
  const error = await device.popErrorScope();
  if (error || thrown) throw new Error((error ?? thrown).message);
  return made;
}

async function pipelineOf(device, {code, entry, constants, table}) {
  return validated(device, async () => {
    const module = device.createShaderModule({code});
    const messages = (await module.getCompilationInfo()).messages.filter((m) => m.type === 'error');
    if (messages.length > 0) throw new Error(messages.map((m) => `${m.lineNum}: ${m.message}`).join('\n'));
    const layout = table === null ? 'auto' : device.createPipelineLayout({
      bindGroupLayouts: [device.createBindGroupLayout({
        entries: table.map((type, binding) => ({binding, visibility: GPUShaderStage.COMPUTE, buffer: {type}})),
      })],
    });
    return device.createComputePipelineAsync({layout, compute: {module, entryPoint: entry, constants}});
  });
}

// Pipelines are cached: compiling takes longer than most dispatches.
const pipelines = new Map();
async function keptPipelineOf(device, {code, entry, constants, table}) {
  const key = JSON.stringify([code, entry, constants, table]);
  if (!pipelines.has(key)) pipelines.set(key, await pipelineOf(device, {code, entry, constants, table}));
  return pipelines.get(key);
}

// Compiles one entry point; returns the compiler's message, or ''.
globalThis.compile = async (request) => {
  try {
    await pipelineOf(await requireDevice(), request);
    return '';
  } catch (error) {
    return String(error.message);
  }
};

// Runs a pipeline on buffers (base64, one per binding); returns every buffer.
globalThis.runRaw = async (request) => {
  const device = await requireDevice();
  const pipeline = await keptPipelineOf(device, request);
  const {table, groups} = request;
  const buffers = request.buffers.map((text, binding) => {
    const bytes = decode(text);
    const usage = table[binding] === 'uniform' ? GPUBufferUsage.UNIFORM : GPUBufferUsage.STORAGE;
    const buffer = device.createBuffer({
      size: Math.max(16, bytes.length), usage: usage | GPUBufferUsage.COPY_DST | GPUBufferUsage.COPY_SRC,
    });
    device.queue.writeBuffer(buffer, 0, bytes);
    return buffer;
  });
  return validated(device, async () => {
    const encoder = device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, device.createBindGroup({
      layout: pipeline.getBindGroupLayout(0),
      entries: buffers.map((buffer, binding) => ({binding, resource: {buffer}})),
    }));
    pass.dispatchWorkgroups(...groups);
    pass.end();
    const readers = buffers.map((buffer) => {
      const reader = device.createBuffer({
        size: buffer.size, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST,
      });
      encoder.copyBufferToBuffer(buffer, 0, reader, 0, buffer.size);
      return reader;
    });
    device.queue.submit([encoder.finish()]);
    const results = [];
    for (const reader of readers) {
      await reader.mapAsync(GPUMapMode.READ);
      results.push(encode(new Uint8Array(reader.getMappedRange())));
      reader.destroy();
    }
    buffers.forEach((buffer) => buffer.destroy());
    return results;
  });
};
globalThis.ready = true;

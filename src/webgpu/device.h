// SPDX-License-Identifier: Apache-2.0
// The WebGPU backend asks this of a device: buffers, pipelines, dispatches. There are two
// implementations: webgpu.h (native.cpp) and the browser's own API, for the same planner and
// dispatcher compiled to wasm. Only scalars and pointers cross, nothing throws, nothing waits:
// calls are recorded in order, and `submit` hands them to the queue.
#pragma once

#include <cstddef>
#include <cstdint>

namespace logitless::webgpu {

// A buffer is a WGPUBuffer in a native program, a number given by the page in the browser; 0 is
// none.
using Buffer = uintptr_t;
using Pipeline = uint32_t;

struct Limits {
  uint64_t buffer_bytes = uint64_t{256} << 20;           // one buffer has at most so many
  uint64_t storage_binding_bytes = uint64_t{128} << 20;  // one binding has at most so many
  uint32_t storage_buffers = 8;                          // one dispatch binds at most so many
  uint32_t offset_alignment = 256;  // a storage binding starts at a multiple of this
  uint32_t workgroup_bytes = 16384;
  uint32_t workgroup_invocations = 256;
  uint32_t groups = 65535;  // a dispatch has at most so many in each dimension
};

// This sets an `override` of a shader.
struct Constant {
  const char* name;
  double value;
};

// Binding number i of group 0 is the i-th of a dispatch; a `buffer` of 0 leaves a number out.
struct Binding {
  Buffer buffer = 0;
  uint64_t offset = 0;  // it is a multiple of offset_alignment
  uint64_t bytes = 0;   // it is a multiple of 4
};

class Device {
 public:
  virtual ~Device() = default;
  virtual const Limits& limits() const = 0;
  // Creates a buffer that serves as storage, uniform, source and destination of copies, and holds
  // zeros. It returns 0 where there is no memory, and then error() says so.
  virtual Buffer create_buffer(uint64_t bytes) = 0;
  virtual void destroy_buffer(Buffer buffer) = 0;
  // Writes before what is submitted next; offset and bytes are multiples of 4.
  virtual void write(Buffer buffer, uint64_t offset, const void* data, uint64_t bytes) = 0;
  // Returns a pipeline, which is kept for the life of the device: asked for again, it is the same
  // one. `shader` is a file's name in shaders/, without .wgsl. It returns 0 where it cannot be
  // made, and then error() says why.
  virtual Pipeline pipeline(const char* shader, const char* entry, const Constant* constants,
                            uint32_t count) = 0;
  virtual void dispatch(Pipeline pipeline, const Binding* bindings, uint32_t count, uint32_t x,
                        uint32_t y, uint32_t z) = 0;
  virtual void copy(Buffer source, uint64_t source_offset, Buffer target, uint64_t target_offset,
                    uint64_t bytes) = 0;
  // Hands what was recorded to the queue; it returns false where that is refused, and then nothing
  // is handed over. What a page's device refuses later the page hears of later (web/logitless.js).
  virtual bool submit() = 0;
  // Drops what was recorded since the last submit, and what it refused with it.
  virtual void abandon() = 0;
  // Returns the first thing that went wrong and was not told yet, in WebGPU's own words, or nullptr
  // where nothing did. The text holds until the next call.
  virtual const char* error() = 0;
};

}  // namespace logitless::webgpu

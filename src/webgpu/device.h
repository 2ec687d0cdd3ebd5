// SPDX-License-Identifier: Apache-2.0
// The device interface of the WebGPU backend: buffers, pipelines, dispatches. Implemented on
// webgpu.h (native.cpp) and on the browser's own API, for the same planner and dispatcher compiled
// to wasm. Only scalars and pointers cross, nothing throws and nothing waits: calls are recorded in
// order, and `submit` hands them to the queue.
#pragma once

#include <cstddef>
#include <cstdint>

namespace logitless::webgpu {

// A WGPUBuffer in a native program, a number given by the page in the browser; 0: none.
using Buffer = uintptr_t;
using Pipeline = uint32_t;

struct Limits {
  uint64_t buffer_bytes = uint64_t{256} << 20;
  uint64_t storage_binding_bytes = uint64_t{128} << 20;
  uint32_t storage_buffers = 8;     // bindings of one dispatch
  uint32_t offset_alignment = 256;  // of a storage binding's start
  uint32_t workgroup_bytes = 16384;
  uint32_t workgroup_invocations = 256;
  uint32_t groups = 65535;  // workgroups of a dispatch, in each dimension
};

// The value of an `override` in a shader.
struct Constant {
  const char* name;
  double value;
};

// The i-th of a dispatch is binding i of group 0; a `buffer` of 0 skips that number.
struct Binding {
  Buffer buffer = 0;
  uint64_t offset = 0;  // a multiple of offset_alignment
  uint64_t bytes = 0;   // a multiple of 4
};

class Device {
 public:
  virtual ~Device() = default;
  virtual const Limits& limits() const = 0;
  // Creates a buffer of zeros for use as storage, uniform, and source and destination of copies.
  // Returns 0 where there is no memory; error() then says so.
  virtual Buffer create_buffer(uint64_t bytes) = 0;
  virtual void destroy_buffer(Buffer buffer) = 0;
  // Takes effect before what is submitted next; offset and bytes are multiples of 4.
  virtual void write(Buffer buffer, uint64_t offset, const void* data, uint64_t bytes) = 0;
  // Makes a pipeline, which is kept for the life of the device and returned again when it is asked
  // for again. `shader` is a file's name in shaders/, without .wgsl. Returns 0 where it cannot be
  // made; error() then says why.
  virtual Pipeline pipeline(const char* shader, const char* entry, const Constant* constants,
                            uint32_t count) = 0;
  virtual void dispatch(Pipeline pipeline, const Binding* bindings, uint32_t count, uint32_t x,
                        uint32_t y, uint32_t z) = 0;
  virtual void copy(Buffer source, uint64_t source_offset, Buffer target, uint64_t target_offset,
                    uint64_t bytes) = 0;
  // Hands what was recorded to the queue. Returns false where that is refused; nothing is handed
  // over then. A page hears later of what its device refuses later (web/logitless.js).
  virtual bool submit() = 0;
  // Drops what was recorded since the last submit, and its errors.
  virtual void abandon() = 0;
  // The first error that was not returned yet, in WebGPU's own words, or nullptr. The text is valid
  // until the next call.
  virtual const char* error() = 0;
};

}  // namespace logitless::webgpu

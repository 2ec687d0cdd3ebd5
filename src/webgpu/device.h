// SPDX-License-Identifier: Apache-2.0
// The device interface of the WebGPU backend: buffers, pipelines, dispatches. Implemented on
// webgpu.h (native.cpp), and on the browser's own API for the same planner and dispatcher compiled
// to wasm. Its arguments are scalars and pointers, and nothing waits for the device: calls are
// recorded in order, and `submit` passes them to the queue.
#pragma once

#include <cstddef>
#include <cstdint>

namespace logitless::webgpu {

// A WGPUBuffer in a native program, a number assigned by the page in the browser; 0: none.
using Buffer = uintptr_t;
using Pipeline = uint32_t;

struct Limits {
  uint64_t buffer_bytes = uint64_t{256} << 20;
  uint64_t storage_binding_bytes = uint64_t{128} << 20;
  uint32_t storage_buffers = 8;     // per dispatch
  uint32_t offset_alignment = 256;  // of a storage binding's start
  uint32_t workgroup_bytes = 16384;
  uint32_t workgroup_invocations = 256;
  uint32_t groups = 65535;  // workgroups per dispatch, in each dimension
};

// The value of an `override` in a shader.
struct Constant {
  const char* name;
  double value;
};

// Binding i of a dispatch is binding i of group 0; if `buffer` is 0, that number is skipped.
struct Binding {
  Buffer buffer = 0;
  uint64_t offset = 0;  // a multiple of offset_alignment
  uint64_t bytes = 0;   // a multiple of 4
};

class Device {
 public:
  virtual ~Device() = default;
  virtual const Limits& limits() const = 0;
  // Creates a buffer of zeros, usable as storage, uniform, and source and destination of copies.
  // Returns 0 if there is no memory; error() then has the message.
  virtual Buffer create_buffer(uint64_t bytes) = 0;
  virtual void destroy_buffer(Buffer buffer) = 0;
  // Takes effect before anything submitted later; offset and bytes are multiples of 4.
  virtual void write(Buffer buffer, uint64_t offset, const void* data, uint64_t bytes) = 0;
  // Returns a pipeline, which is cached for the life of the device. `shader` is the name of a file
  // in shaders/, without .wgsl. Returns 0 if it cannot be created; error() then has the reason.
  virtual Pipeline pipeline(const char* shader, const char* entry, const Constant* constants,
                            uint32_t count) = 0;
  virtual void dispatch(Pipeline pipeline, const Binding* bindings, uint32_t count, uint32_t x,
                        uint32_t y, uint32_t z) = 0;
  virtual void copy(Buffer source, uint64_t source_offset, Buffer target, uint64_t target_offset,
                    uint64_t bytes) = 0;
  // Passes what was recorded to the queue. Returns false, and passes nothing, if that is refused.
  // Errors that a browser's device reports later reach the page (web/logitless.js).
  virtual bool submit() = 0;
  // Drops what was recorded since the last submit, and its errors.
  virtual void abandon() = 0;
  // The first error not yet returned, in WebGPU's own words, or nullptr. The text is valid until
  // the next call.
  virtual const char* error() = 0;
};

}  // namespace logitless::webgpu

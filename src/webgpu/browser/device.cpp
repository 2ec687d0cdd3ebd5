// SPDX-License-Identifier: Apache-2.0
#include "src/webgpu/browser/device.h"

#include "src/webgpu/shaders.h"

// Sizes and offsets cross as doubles, which JavaScript's numbers are; they are exact to 2^53.
#define LOGITLESS_IMPORT(name) __attribute__((import_module("device"), import_name(name)))
extern "C" {
LOGITLESS_IMPORT("create_buffer") uint32_t device_create_buffer(double bytes);
LOGITLESS_IMPORT("destroy_buffer") void device_destroy_buffer(uint32_t buffer);
LOGITLESS_IMPORT("write")
void device_write(uint32_t buffer, double offset, const void* data, uint32_t bytes);
LOGITLESS_IMPORT("pipeline")
uint32_t device_pipeline(const char* label, const char* text, const char* entry,
                         const logitless::webgpu::Constant* constants, uint32_t count);
LOGITLESS_IMPORT("dispatch")
void device_dispatch(uint32_t pipeline, const logitless::webgpu::Binding* bindings, uint32_t count,
                     uint32_t x, uint32_t y, uint32_t z);
LOGITLESS_IMPORT("copy")
void device_copy(uint32_t source, double source_offset, uint32_t target, double target_offset,
                 double bytes);
LOGITLESS_IMPORT("submit") uint32_t device_submit();  // 0: refused
LOGITLESS_IMPORT("abandon") void device_abandon();
// Returns the number of bytes written to `text`, including the NUL; 0 if there is no error.
LOGITLESS_IMPORT("error") uint32_t device_error(char* text, uint32_t capacity);
}

namespace logitless::webgpu {

// web/device.js reads these structs from memory, so their layout is fixed.
static_assert(sizeof(Constant) == 16 && offsetof(Constant, value) == 8);
static_assert(sizeof(Binding) == 24 && offsetof(Binding, offset) == 8 &&
              offsetof(Binding, bytes) == 16);

Buffer BrowserDevice::create_buffer(uint64_t bytes) {
  return device_create_buffer(static_cast<double>(bytes));
}

void BrowserDevice::destroy_buffer(Buffer buffer) { device_destroy_buffer(buffer); }

void BrowserDevice::write(Buffer buffer, uint64_t offset, const void* data, uint64_t bytes) {
  device_write(buffer, static_cast<double>(offset), data, static_cast<uint32_t>(bytes));
}

Pipeline BrowserDevice::pipeline(const char* shader, const char* entry, const Constant* constants,
                                 uint32_t count) {
  std::string key = std::string(shader) + ' ' + entry;
  for (uint32_t i = 0; i < count; ++i) {
    key += ' ';
    key += constants[i].name;
    key.append(reinterpret_cast<const char*>(&constants[i].value), sizeof(double));
  }
  Pipeline& made = pipelines_[key];
  if (made == 0) made = device_pipeline(shader, shader_text(shader), entry, constants, count);
  return made;
}

void BrowserDevice::dispatch(Pipeline pipeline, const Binding* bindings, uint32_t count, uint32_t x,
                             uint32_t y, uint32_t z) {
  device_dispatch(pipeline, bindings, count, x, y, z);
}

void BrowserDevice::copy(Buffer source, uint64_t source_offset, Buffer target,
                         uint64_t target_offset, uint64_t bytes) {
  device_copy(source, static_cast<double>(source_offset), target,
              static_cast<double>(target_offset), static_cast<double>(bytes));
}

bool BrowserDevice::submit() { return device_submit() != 0; }

void BrowserDevice::abandon() { device_abandon(); }

const char* BrowserDevice::error() {
  return device_error(error_, sizeof(error_)) > 0 ? error_ : nullptr;
}

}  // namespace logitless::webgpu

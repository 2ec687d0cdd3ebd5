// SPDX-License-Identifier: Apache-2.0
// The device interface on the browser's own WebGPU: each call is a function of web/device.js,
// imported into the wasm module.
#pragma once

#include <map>
#include <string>

#include "src/webgpu/device.h"

namespace logitless::webgpu {

class BrowserDevice final : public Device {
 public:
  const Limits& limits() const override { return limits_; }
  void set_limits(const Limits& limits) { limits_ = limits; }
  Buffer create_buffer(uint64_t bytes) override;
  void destroy_buffer(Buffer buffer) override;
  void write(Buffer buffer, uint64_t offset, const void* data, uint64_t bytes) override;
  Pipeline pipeline(const char* shader, const char* entry, const Constant* constants,
                    uint32_t count) override;
  void dispatch(Pipeline pipeline, const Binding* bindings, uint32_t count, uint32_t x, uint32_t y,
                uint32_t z) override;
  void copy(Buffer source, uint64_t source_offset, Buffer target, uint64_t target_offset,
            uint64_t bytes) override;
  bool submit() override;
  void abandon() override;
  const char* error() override;

 private:
  Limits limits_;
  std::map<std::string, Pipeline> pipelines_;
  char error_[256];
};

}  // namespace logitless::webgpu

// SPDX-License-Identifier: Apache-2.0
// A fake WebGPU device that runs nothing: it counts allocations and reports which of WebGPU's rules
// a dispatch breaks, for shapes that would take too long to run.
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>

#include "src/webgpu/device.h"
#include "src/webgpu/shaders.h"

namespace logitless::webgpu {

class RecordedDevice final : public Device {
 public:
  explicit RecordedDevice(const Limits& limits) : limits_(limits) {}
  const Limits& limits() const override { return limits_; }

  Buffer create_buffer(uint64_t bytes) override {
    if (bytes > limits_.buffer_bytes) fault("a buffer of " + std::to_string(bytes) + " bytes");
    sizes_[++last_buffer_] = bytes;
    allocated_ += bytes;
    most_ = std::max(most_, allocated_);
    return last_buffer_;
  }
  void destroy_buffer(Buffer buffer) override {
    allocated_ -= sizes_.at(buffer);
    sizes_.erase(buffer);
  }
  void write(Buffer buffer, uint64_t offset, const void*, uint64_t bytes) override {
    inside("a write", {buffer, offset, bytes});
  }
  // A pipeline's name, as in docs/kernels/webgpu.md: file, entry, {"constant":value,...}.
  Pipeline pipeline(const char* shader, const char* entry, const Constant* constants,
                    uint32_t count) override {
    std::string name = std::string(shader) + ".wgsl, " + entry + ", {";
    for (uint32_t i = 0; i < count; ++i) {
      name += i > 0 ? ",\"" : "\"";
      name += constants[i].name;
      name += "\":";
      name += std::to_string(static_cast<int>(constants[i].value));
    }
    name += "}";
    const auto [found, added] =
        numbers_.try_emplace(name, static_cast<Pipeline>(numbers_.size() + 1));
    if (added) kernels_[found->second] = {name, written_bindings(shader_text(shader))};
    return found->second;
  }
  void dispatch(Pipeline pipeline, const Binding* bindings, uint32_t count, uint32_t x, uint32_t y,
                uint32_t z) override {
    const Kernel& kernel = kernels_.at(pipeline);
    ++dispatches_;
    if (std::max({x, y, z}) > limits_.groups) fault(kernel.name + ": too many groups");
    std::map<Buffer, int> bound;
    uint32_t storage = 0;
    for (uint32_t i = 0; i < count; ++i) {
      const Binding& b = bindings[i];
      if (b.buffer == 0) continue;
      inside(kernel.name, b);
      ++bound[b.buffer];
      if (b.offset % limits_.offset_alignment != 0) fault(kernel.name + ": a misaligned binding");
      if (i == 0) continue;
      ++storage;
      if (b.bytes > limits_.storage_binding_bytes) fault(kernel.name + ": a binding too large");
    }
    if (storage > limits_.storage_buffers) fault(kernel.name + ": too many storage buffers");
    for (const uint32_t i : kernel.written) {
      if (i < count && bindings[i].buffer != 0 && bound[bindings[i].buffer] > 1) {
        fault(kernel.name + ": binding " + std::to_string(i) + " is written and bound again");
      }
    }
  }
  void copy(Buffer source, uint64_t source_offset, Buffer target, uint64_t target_offset,
            uint64_t bytes) override {
    inside("a copy", {source, source_offset, bytes});
    inside("a copy", {target, target_offset, bytes});
  }
  bool submit() override { return true; }
  void abandon() override {}
  const char* error() override { return nullptr; }

  // Returns the first broken rule, or "".
  const std::string& faults() const { return fault_; }
  uint64_t allocated() const { return allocated_; }
  uint64_t most_allocated() const { return most_; }
  uint64_t dispatches() const { return dispatches_; }
  std::set<std::string> pipelines() const {
    std::set<std::string> names;
    for (const auto& [name, number] : numbers_) names.insert(name);
    return names;
  }

 private:
  struct Kernel {
    std::string name;
    std::set<uint32_t> written;
  };
  static std::set<uint32_t> written_bindings(std::string_view text) {
    std::set<uint32_t> numbers;
    constexpr std::string_view kBinding = "@binding(", kWritten = "var<storage, read_write>";
    for (size_t at = text.find(kBinding); at != text.npos; at = text.find(kBinding, at + 1)) {
      const std::string_view line = text.substr(at, text.find('\n', at) - at);
      if (line.find(kWritten) == line.npos) continue;
      numbers.insert(static_cast<uint32_t>(std::stoul(std::string(line.substr(kBinding.size())))));
    }
    return numbers;
  }
  void inside(const std::string& what, const Binding& b) {
    const auto found = sizes_.find(b.buffer);
    if (found == sizes_.end()) return fault(what + ": no such buffer");
    const uint64_t end = (found->second + 3) / 4 * 4;
    if (b.bytes % 4 != 0 || b.bytes == 0) fault(what + ": " + std::to_string(b.bytes) + " bytes");
    if (b.offset > end || b.bytes > end - b.offset) fault(what + ": beyond its buffer");
  }
  void fault(const std::string& what) {
    if (fault_.empty()) fault_ = what;
  }

  const Limits limits_;
  std::map<Buffer, uint64_t> sizes_;
  Buffer last_buffer_ = 0;
  std::map<std::string, Pipeline> numbers_;
  std::map<Pipeline, Kernel> kernels_;
  uint64_t allocated_ = 0, most_ = 0, dispatches_ = 0;
  std::string fault_;
};

}  // namespace logitless::webgpu

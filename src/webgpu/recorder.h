// SPDX-License-Identifier: Apache-2.0
// Records dispatches with their uniforms. Each uses a slot of the params buffer, which is written
// when it is full and at the end, before the dispatches that read it are submitted. After a failure
// nothing more is submitted, and work that an exception left unfinished is dropped.
#pragma once

#include <cstring>
#include <initializer_list>

#include "src/webgpu/device.h"

namespace logitless::webgpu {

class Recorder {
 public:
  static constexpr uint32_t kSlotBytes = 256, kSlots = 256, kMostBindings = 12;

  Recorder(Device* device, Buffer params) : device_(device), params_(params) {}
  ~Recorder() {
    if (finished_) return;
    device_->abandon();
    (void)device_->error();  // clears the error for the next call
  }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // Bindings are numbered 1, 2, ... in order; the uniform is binding 0.
  template <class Params>
  void dispatch(const char* shader, const char* entry, std::initializer_list<Constant> constants,
                const Params& params, std::initializer_list<Binding> bindings, uint32_t x,
                uint32_t y = 1, uint32_t z = 1) {
    if (failed_ || x == 0 || y == 0) return;
    const Pipeline pipeline = device_->pipeline(shader, entry, constants.begin(),
                                                static_cast<uint32_t>(constants.size()));
    if (pipeline == 0) failed_ = true;
    if (failed_) return;
    Binding all[kMostBindings] = {slot_of(params)};
    uint32_t count = 1;
    for (const Binding& binding : bindings) all[count++] = binding;
    device_->dispatch(pipeline, all, count, x, y, z);
  }

  // Dispatches a kernel of cast.wgsl, whose uniform is the last binding.
  void cast(const char* entry, uint32_t elements, Binding source, Binding result, uint32_t x,
            uint32_t y) {
    if (failed_ || x == 0 || y == 0) return;
    const Pipeline pipeline = device_->pipeline("cast", entry, nullptr, 0);
    if (pipeline == 0) failed_ = true;
    if (failed_) return;
    const Binding all[] = {source, result, slot_of(elements)};
    device_->dispatch(pipeline, all, 3, x, y, 1);
  }

  void copy(Buffer source, uint64_t source_offset, Buffer target, uint64_t target_offset,
            uint64_t bytes) {
    if (!failed_ && bytes > 0) {
      device_->copy(source, source_offset, target, target_offset, bytes);
    }
  }

  // Submits the rest. Returns false if anything went wrong; device->error() has the message.
  bool finish() {
    flush();
    finished_ = true;
    return !failed_;
  }

 private:
  template <class Params>
  Binding slot_of(const Params& params) {
    static_assert(sizeof(Params) <= kSlotBytes);
    if (used_ == kSlots) flush();
    std::memcpy(slots_ + used_ * kSlotBytes, &params, sizeof(params));
    return {params_, uint64_t{used_++} * kSlotBytes, kSlotBytes};
  }
  void flush() {
    if (failed_) {
      device_->abandon();
    } else {
      if (used_ > 0) device_->write(params_, 0, slots_, uint64_t{used_} * kSlotBytes);
      if (!device_->submit()) failed_ = true;
    }
    used_ = 0;
  }

  Device* const device_;
  const Buffer params_;
  uint32_t used_ = 0;
  bool failed_ = false, finished_ = false;
  unsigned char slots_[kSlots * kSlotBytes];
};

}  // namespace logitless::webgpu

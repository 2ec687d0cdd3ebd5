// SPDX-License-Identifier: Apache-2.0
// The result of a callback of webgpu.h. The waiter and the callback share it, because the callback
// may come after the waiter has given up; it lives until both have released it.
#pragma once

#include <atomic>
#include <utility>

#include "src/webgpu/library.h"

namespace logitless::webgpu {

template <class T>
class Awaited {
 public:
  Awaited() : shared_(new Shared) {}
  ~Awaited() { leave(shared_); }
  Awaited(const Awaited&) = delete;
  Awaited& operator=(const Awaited&) = delete;

  // The userdata for a callback, which must call `deliver` with it exactly once. After the callback
  // has answered, this may be called again for the next one.
  void* userdata() {
    shared_->value = T{};
    shared_->done = false;
    ++shared_->owners;
    return shared_;
  }
  template <class F>
  static void deliver(void* userdata, F&& fill) {
    auto* shared = static_cast<Shared*>(userdata);
    fill(shared->value);
    shared->done = true;
    leave(shared);
  }

  // Returns the result, or nullptr if there was no answer in a thousand rounds of events.
  // wgpu-native answers in the first round, or inside the call that received the userdata.
  const T* wait(const Library& call, WGPUInstance instance) {
    for (int i = 0; !shared_->done && i < 1000; ++i) call.InstanceProcessEvents(instance);
    return shared_->done ? &shared_->value : nullptr;
  }
  // Leaves the value to the pending callback.
  void give_up() {
    auto* fresh = new Shared;
    leave(std::exchange(shared_, fresh));
  }

 private:
  struct Shared {
    T value{};
    std::atomic<bool> done{false};
    std::atomic<int> owners{1};
  };
  static void leave(Shared* shared) {
    if (--shared->owners == 0) delete shared;
  }

  Shared* shared_;
};

}  // namespace logitless::webgpu

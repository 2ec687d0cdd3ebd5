// SPDX-License-Identifier: Apache-2.0
// A value that is asked for once is remembered here. Only what was found is remembered: a driver
// that was not ready or a library that was not loaded yet may be there when it is asked for again.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>

#include "logitless/status.h"

namespace logitless::cuda {

template <class T>
class Remembered {
 public:
  // Sets *value to what find(T*) has found, in this call or in an earlier one; or the Status says
  // why there is nothing yet. The value stays where it is for the life of the process.
  template <class Find>
  Status get(T** value, Find&& find) {
    *value = found_.load(std::memory_order_acquire);
    if (*value != nullptr) return {};
    const std::lock_guard lock(mutex_);
    *value = found_.load(std::memory_order_relaxed);
    if (*value != nullptr) return {};
    T& own = memory_.emplace();
    const Status status = find(&own);
    if (!status.ok()) {
      memory_.reset();
      return status;
    }
    *value = &own;
    found_.store(&own, std::memory_order_release);
    return {};
  }
  // Call this only while nobody uses the value.
  void forget() {
    found_ = nullptr;
    memory_.reset();
  }

 private:
  std::atomic<T*> found_{nullptr};
  std::mutex mutex_;
  std::optional<T> memory_;
};

}  // namespace logitless::cuda

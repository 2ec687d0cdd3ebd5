// SPDX-License-Identifier: Apache-2.0
// Caches a value once it is found. Failures are not cached: a driver that was not ready or a
// library that was not loaded may be there the next time.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>

#include "logitless/status.h"

namespace logitless::cuda {

template <class T>
class Remembered {
 public:
  // Sets *value to what find(T*) finds, or found in an earlier call; or returns why it failed. The
  // value keeps its address until the process ends.
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
  // Call only while the value is not in use.
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

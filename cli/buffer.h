// SPDX-License-Identifier: Apache-2.0
// A buffer is memory for tensors and workspaces, straight from the system: zero pages, none of them
// present until touched, and large pages where the system gives them, so that what a call touches
// can be seen.
#pragma once

#include <cstddef>
#include <cstdint>

#include "logitless/logitless.h"

namespace logitless::cli {

class Buffer {
 public:
  Buffer() = default;
  // It is aligned to 64 bytes or better; where there is no room it throws Failure.
  explicit Buffer(uint64_t bytes);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  void* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  Workspace workspace() const { return {data_, bytes_}; }

 private:
  void* mapping_ = nullptr;
  uint64_t mapped_ = 0;
  void* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace logitless::cli

// SPDX-License-Identifier: Apache-2.0
// Memory for tensors and workspaces, directly from mmap: pages are zero and not resident until
// touched, so that the memory a call touches can be measured; large pages if available.
#pragma once

#include <cstddef>
#include <cstdint>

#include "logitless/logitless.h"

namespace logitless::cli {

class Buffer {
 public:
  Buffer() = default;
  // Aligned to 64 bytes or better. Throws Failure if memory runs out.
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

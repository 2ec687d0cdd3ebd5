// SPDX-License-Identifier: Apache-2.0
// Measurements on CUDA: an op on copies of its host tensors, timed by the device's own clock.
#pragma once

#include <map>
#include <utility>

#include "cli/op_shape.h"

namespace logitless::cli {

// Failure with the reason where there is no CUDA to measure.
class CudaBench {
 public:
  CudaBench();
  ~CudaBench();
  CudaBench(const CudaBench&) = delete;
  CudaBench& operator=(const CudaBench&) = delete;

  template <class Op>
  WorkspaceSize size(const Op& host) const;
  // Seconds of one run; `fetch`: what it wrote goes back to the host, unmeasured.
  template <class Op>
  double timed(const Op& host, uint64_t workspace, bool fetch);
  // Frees the copies: the host's memory may hold something else from now on.
  void forget();

  const char* name() const { return name_; }
  uint64_t free_bytes() const;
  // Measured now: FLOP/s of cuBLASLt's product of two square matrices, bytes/s read and written.
  double product_rate(DType dtype);
  double copy_bandwidth();

 private:
  struct Copy {
    void* data = nullptr;
    uint64_t bytes = 0;
  };
  void* device_of(const TensorView& host);
  void reserve(uint64_t workspace);
  template <class F>
  double seconds(F&& work);

  char name_[64] = {};
  void* stream_ = nullptr;
  void *start_ = nullptr, *stop_ = nullptr;  // events
  std::map<const void*, Copy> copies_;
  Copy scratch_;
};

}  // namespace logitless::cli

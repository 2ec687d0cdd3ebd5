// SPDX-License-Identifier: Apache-2.0
// Measures a device that has its own memory: an op runs on copies of its host tensors.
#pragma once

#include <functional>
#include <map>
#include <memory>

#include "cli/op_shape.h"

namespace logitless::cli {

class GpuBench {
 public:
  virtual ~GpuBench() = default;
  GpuBench(const GpuBench&) = delete;
  GpuBench& operator=(const GpuBench&) = delete;

  template <class Op>
  WorkspaceSize size(const Op& host) const;
  // Seconds of one run. With `fetch` its outputs are then copied to the host, untimed.
  template <class Op>
  double timed(const Op& host, uint64_t workspace, bool fetch);
  // Frees the copies: the host's memory may be reused for other tensors after this call.
  virtual void forget() = 0;

  virtual const char* name() const = 0;
  virtual uint64_t free_bytes() const = 0;
  // Each call measures: FLOP/s of a product of two square matrices, and bytes/s read and written by
  // a copy.
  virtual double product_rate(DType dtype) = 0;
  virtual double copy_bandwidth() = 0;
  // The arithmetic of products, and whether its error bound is that of tensor cores
  // (tests/support/device_cuda.cpp).
  virtual const char* arithmetic() const = 0;
  virtual bool has_tensor_cores() const = 0;

 protected:
  explicit GpuBench(Device device) : execution_{.device = device} {}
  // The device's copy of the tensor, made if there is none.
  virtual void* device_of(const TensorView& host) = 0;
  virtual void fetch(const TensorView& host) = 0;
  virtual Workspace reserve(uint64_t bytes) = 0;
  // Seconds until everything that `work` submits is done.
  virtual double seconds(const std::function<void()>& work) = 0;

  Execution execution_;
};

uint64_t bytes_of(const TensorView& view);

// Each throws Failure with the reason if its backend is unavailable.
std::unique_ptr<GpuBench> make_cuda_bench();
std::unique_ptr<GpuBench> make_webgpu_bench();

}  // namespace logitless::cli

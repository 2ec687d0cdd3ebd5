// SPDX-License-Identifier: Apache-2.0
// The list through which `warmup` finds the .cu files of this library: each file adds an empty
// kernel, from which the driver finds the file's module and all kernels in it. Every file that
// launches a kernel is added automatically.
#pragma once

namespace logitless::cuda {

class KernelFile {
 public:
  explicit KernelFile(const void* kernel) : kernel_(kernel), next_(first()) { first() = this; }
  KernelFile(const KernelFile&) = delete;
  KernelFile& operator=(const KernelFile&) = delete;
  const void* kernel() const { return kernel_; }
  const KernelFile* next() const { return next_; }
  static KernelFile*& first() {
    static KernelFile* list = nullptr;
    return list;
  }

 private:
  const void* kernel_;
  const KernelFile* next_;
};

#ifdef __CUDACC__
namespace {
__global__ void names_this_file() {}
const KernelFile this_file(reinterpret_cast<const void*>(&names_this_file));
}  // namespace
#endif

}  // namespace logitless::cuda

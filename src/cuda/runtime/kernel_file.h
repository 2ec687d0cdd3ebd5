// SPDX-License-Identifier: Apache-2.0
// `warmup` finds the .cu files of this library through this list: each brings a kernel of its own,
// by which the driver knows the file's module and all kernels in it. A file that launches anything
// is in the list without having to say so.
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

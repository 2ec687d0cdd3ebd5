// SPDX-License-Identifier: Apache-2.0
// Asks the driver for the modules of this library's .cu files and loads every function in them.
// Drivers before CUDA 12.4 cannot enumerate functions: then only the modules are loaded.
#include "src/cuda/runtime/warmup.h"

#include <memory>
#include <new>

#include "src/cuda/ops.h"
#include "src/cuda/runtime/blas.h"
#include "src/cuda/runtime/kernel_file.h"

namespace logitless::cuda {
namespace {

Status driver_error(const char* what, CUresult code) {
  if (code == CUDA_SUCCESS) return {};
  return error(StatusCode::device_error, "cuda: %s failed: driver error %d", what,
               static_cast<int>(code));
}

bool enumerates(const Driver& d) {
  return d.module_of != nullptr && d.count_functions != nullptr &&
         d.enumerate_functions != nullptr && d.load_function != nullptr;
}

Status load_file(const Driver& driver, const void* kernel, int* kernels) {
  cudaFunction_t function;
  const cudaError_t code = api().function(&function, kernel);
  if (code != cudaSuccess) return cuda_error("cudaGetFuncBySymbol", code);
  if (!enumerates(driver))
    return {};  // the module is loaded; each kernel is loaded when it is launched
  CUmodule module;
  unsigned count = 0;
  Status status = driver_error("cuFuncGetModule", driver.module_of(&module, function));
  if (status.ok()) {
    status = driver_error("cuModuleGetFunctionCount", driver.count_functions(&count, module));
  }
  if (!status.ok() || count == 0) return status;
  const std::unique_ptr<CUfunction[]> functions(new (std::nothrow) CUfunction[count]);
  if (functions == nullptr) return Status(StatusCode::internal, "out of memory");
  status = driver_error("cuModuleEnumerateFunctions",
                        driver.enumerate_functions(functions.get(), count, module));
  for (unsigned i = 0; status.ok() && i < count; ++i) {
    status = driver_error("cuFuncLoad", driver.load_function(functions[i]));
  }
  *kernels += static_cast<int>(count);
  return status;
}

}  // namespace

Status load_kernels(LoadedKernels* loaded) {
  const Driver* driver;
  Status status = find_driver(&driver);
  for (const KernelFile* file = KernelFile::first(); status.ok() && file != nullptr;
       file = file->next()) {
    status = load_file(*driver, file->kernel(), &loaded->kernels);
    ++loaded->files;
  }
  return status;
}

Status warmup(const DeviceInfo& device) {
  LoadedKernels loaded;
  const Status status = load_kernels(&loaded);
  // Ops on given logits need no cuBLASLt, so its absence is no error here; linear ops report it.
  if (!status.ok() || !find_matrix_library().ok()) return status;
  return warmup_matrix_library(device);
}

}  // namespace logitless::cuda

// SPDX-License-Identifier: Apache-2.0
// Asks the driver for the modules of this library's .cu files and loads every function in them.
#include "src/cuda/warmup.h"

#include <cuda.h>

#include <memory>
#include <new>

#include "src/cuda/blas.h"
#include "src/cuda/kernel_file.h"
#include "src/cuda/ops.h"

namespace logitless::cuda {
namespace {

Status driver_error(const char* what, CUresult code) {
  if (code == CUDA_SUCCESS) return {};
  return error(StatusCode::device_error, "cuda: %s failed: driver error %d", what,
               static_cast<int>(code));
}

template <class Function>
Status find(const char* name, Function* function) {
  *function = reinterpret_cast<Function>(find_driver_function(name));
  if (*function != nullptr) return {};
  return error(StatusCode::not_supported,
               "cuda: warmup needs %s, of a driver for CUDA 12.4 or newer", name);
}

struct Driver {
  decltype(&cuFuncGetModule) module_of;
  decltype(&cuModuleGetFunctionCount) count;
  decltype(&cuModuleEnumerateFunctions) enumerate;
  decltype(&cuFuncLoad) load;
};

Status find_driver(Driver* driver) {
  Status status = find("cuFuncGetModule", &driver->module_of);
  if (status.ok()) status = find("cuModuleGetFunctionCount", &driver->count);
  if (status.ok()) status = find("cuModuleEnumerateFunctions", &driver->enumerate);
  if (status.ok()) status = find("cuFuncLoad", &driver->load);
  return status;
}

Status load_file(const Driver& driver, const void* kernel, int* kernels) {
  cudaFunction_t function;
  const cudaError_t code = cudaGetFuncBySymbol(&function, kernel);
  if (code != cudaSuccess) {
    (void)cudaGetLastError();
    return cuda_error("cudaGetFuncBySymbol", code);
  }
  CUmodule module;
  unsigned count = 0;
  Status status = driver_error("cuFuncGetModule", driver.module_of(&module, function));
  if (status.ok()) {
    status = driver_error("cuModuleGetFunctionCount", driver.count(&count, module));
  }
  if (!status.ok() || count == 0) return status;
  const std::unique_ptr<CUfunction[]> functions(new (std::nothrow) CUfunction[count]);
  if (functions == nullptr) return Status(StatusCode::internal, "out of memory");
  status =
      driver_error("cuModuleEnumerateFunctions", driver.enumerate(functions.get(), count, module));
  for (unsigned i = 0; status.ok() && i < count; ++i) {
    status = driver_error("cuFuncLoad", driver.load(functions[i]));
  }
  *kernels += static_cast<int>(count);
  return status;
}

}  // namespace

Status load_kernels(LoadedKernels* loaded) {
  Driver driver;
  Status status = find_driver(&driver);
  for (const KernelFile* file = KernelFile::first(); status.ok() && file != nullptr;
       file = file->next()) {
    status = load_file(driver, file->kernel(), &loaded->kernels);
    ++loaded->files;
  }
  return status;
}

Status warmup(const DeviceInfo& device) {
  LoadedKernels loaded;
  const Status status = load_kernels(&loaded);
  return status.ok() ? warmup_matrix_library(device) : status;
}

}  // namespace logitless::cuda

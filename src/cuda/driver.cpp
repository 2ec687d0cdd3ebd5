// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/driver.h"

#include <cuda.h>
#include <dlfcn.h>

#include <mutex>

#include "src/cuda/runtime.h"

namespace logitless::cuda {
namespace {

struct FunctionAttributes {
  decltype(&cuFuncGetAttribute) get = nullptr;
  decltype(&cuFuncSetAttribute) set = nullptr;

  FunctionAttributes() {
    get = reinterpret_cast<decltype(get)>(find_driver_function("cuFuncGetAttribute"));
    set = reinterpret_cast<decltype(set)>(find_driver_function("cuFuncSetAttribute"));
  }

  // Only ever raised, since another thread may be about to launch the same kernel with more.
  CUresult raise(CUfunction function, CUfunction_attribute attribute, int least) const {
    int now = 0;
    const CUresult code = get(&now, attribute, function);
    return code != CUDA_SUCCESS || now >= least ? code : set(function, attribute, least);
  }
};

}  // namespace

void* find_driver_function(const char* name) {
  // The runtime has loaded it; it stays for the life of the process.
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  return driver == nullptr ? nullptr : dlsym(driver, name);
}

Status allow_shared_memory(const void* kernel, int bytes) {
  static const FunctionAttributes attributes;
  static std::mutex mutex;
  if (attributes.get == nullptr || attributes.set == nullptr) {
    return Status(StatusCode::backend_unavailable, "cuda: the driver has no cuFuncSetAttribute");
  }
  cudaFunction_t function;
  const cudaError_t found = cudaGetFuncBySymbol(&function, kernel);
  if (found != cudaSuccess) return cuda_error("cudaGetFuncBySymbol", found);
  const std::lock_guard lock(mutex);
  CUresult code = attributes.raise(function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                                   CU_SHAREDMEM_CARVEOUT_MAX_SHARED);
  if (code == CUDA_SUCCESS) {
    code = attributes.raise(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes);
  }
  if (code == CUDA_SUCCESS) return {};
  return error(StatusCode::device_error,
               "cuda: %d bytes of shared memory are not to be had: driver error %d", bytes,
               static_cast<int>(code));
}

}  // namespace logitless::cuda

// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/driver.h"

#include <cuda.h>
#include <dlfcn.h>

#include <iterator>
#include <mutex>

#include "src/cuda/runtime.h"

namespace logitless::cuda {
namespace {

struct Functions {
  decltype(&cuFuncGetAttribute) get = nullptr;
  decltype(&cuFuncSetAttribute) set = nullptr;
  decltype(&cuCtxGetId) context_id = nullptr;

  Functions() {
    find("cuFuncGetAttribute", &get);
    find("cuFuncSetAttribute", &set);
    find("cuCtxGetId", &context_id);
  }
  template <class F>
  void find(const char* name, F* function) {
    *function = reinterpret_cast<F>(find_driver_function(name));
  }

  // Only ever raised, since another thread may be about to launch the same kernel with more.
  CUresult raise(CUfunction function, CUfunction_attribute attribute, int least) const {
    int now = 0;
    const CUresult code = get(&now, attribute, function);
    return code != CUDA_SUCCESS || now >= least ? code : set(function, attribute, least);
  }

  // Of the current context, never given to another; 0: not known.
  unsigned long long current_context() const {
    unsigned long long id = 0;
    return context_id != nullptr && context_id(nullptr, &id) == CUDA_SUCCESS ? id : 0;
  }
};

// What this thread has allowed: asking costs as much as a third of a launch.
struct Allowed {
  const void* kernel = nullptr;
  unsigned long long context = 0;
  int bytes = 0;
};
thread_local Allowed allowed[16];
thread_local unsigned next_allowed = 0;

}  // namespace

void* find_driver_function(const char* name) {
  // The runtime has loaded it; it stays for the life of the process.
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  return driver == nullptr ? nullptr : dlsym(driver, name);
}

Status allow_shared_memory(const void* kernel, int bytes) {
  static const Functions driver;
  static std::mutex mutex;
  if (driver.get == nullptr || driver.set == nullptr) {
    return Status(StatusCode::backend_unavailable, "cuda: the driver has no cuFuncSetAttribute");
  }
  const unsigned long long context = driver.current_context();
  for (const Allowed& a : allowed) {
    if (a.kernel == kernel && a.context == context && a.bytes >= bytes && context != 0) return {};
  }
  cudaFunction_t function;
  const cudaError_t found = cudaGetFuncBySymbol(&function, kernel);
  if (found != cudaSuccess) return cuda_error("cudaGetFuncBySymbol", found);
  const std::lock_guard lock(mutex);
  CUresult code = driver.raise(function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                               CU_SHAREDMEM_CARVEOUT_MAX_SHARED);
  if (code == CUDA_SUCCESS) {
    code = driver.raise(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes);
  }
  if (code == CUDA_SUCCESS) {
    allowed[next_allowed++ % std::size(allowed)] = {kernel, context, bytes};
    return {};
  }
  return error(StatusCode::device_error,
               "cuda: %d bytes of shared memory are not to be had: driver error %d", bytes,
               static_cast<int>(code));
}

}  // namespace logitless::cuda

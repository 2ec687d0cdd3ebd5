// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/runtime/driver.h"

#include <dlfcn.h>

#include <iterator>
#include <mutex>

#include "src/cuda/runtime/remembered.h"
#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda {
namespace {

struct Loaded {
  void* library = nullptr;
  Driver driver{};
  decltype(&cuCtxGetCurrent) current = nullptr;
};

Remembered<Loaded>& remembered_driver() {
  static auto& driver = *new Remembered<Loaded>;
  return driver;
}

Status load(Loaded* loaded) {
  // Never closed: the CUDA runtime uses libcuda until the process ends.
  void* library = api().open("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) {
    return Status(StatusCode::backend_unavailable, "cuda: libcuda.so.1 was not found");
  }
  loaded->library = library;
  Status status;
  const auto find = [&](auto& function, const char* name, bool required) {
    void* symbol = api().symbol(library, name);
    if (symbol == nullptr && required && status.ok()) {
      status = error(StatusCode::backend_unavailable, "cuda: the driver has no %s", name);
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
  };
  Driver& d = loaded->driver;
  find(d.get_attribute, "cuFuncGetAttribute", true);
  find(d.set_attribute, "cuFuncSetAttribute", true);
  find(d.context_id, "cuCtxGetId", true);
  find(loaded->current, "cuCtxGetCurrent", true);
  find(d.encode_tiled, "cuTensorMapEncodeTiled", true);
  find(d.module_of, "cuFuncGetModule", false);
  find(d.count_functions, "cuModuleGetFunctionCount", false);
  find(d.enumerate_functions, "cuModuleEnumerateFunctions", false);
  find(d.load_function, "cuFuncLoad", false);
  return status;
}

Status find_loaded(Loaded** loaded) { return remembered_driver().get(loaded, load); }

// Never lowers the attribute: another thread may be about to launch the same kernel with a larger
// value.
CUresult raise(const Driver& driver, CUfunction function, CUfunction_attribute attribute,
               int least) {
  int now = 0;
  const CUresult code = driver.get_attribute(&now, attribute, function);
  return code != CUDA_SUCCESS || now >= least ? code
                                              : driver.set_attribute(function, attribute, least);
}

// The id of the current context, never reused for another one; 0 if unknown.
unsigned long long current_context(const Driver& driver) {
  unsigned long long id = 0;
  return driver.context_id(nullptr, &id) == CUDA_SUCCESS ? id : 0;
}

// What this thread has allowed, cached because asking costs a third of a launch.
struct Allowed {
  const void* kernel = nullptr;
  unsigned long long context = 0;
  int bytes = 0;
};
thread_local Allowed allowed[16];
thread_local unsigned next_allowed = 0;

}  // namespace

Status find_driver(const Driver** driver) {
  Loaded* loaded;
  const Status status = find_loaded(&loaded);
  if (status.ok()) *driver = &loaded->driver;
  return status;
}

void* find_driver_function(const char* name) {
  Loaded* loaded;
  return find_loaded(&loaded).ok() ? api().symbol(loaded->library, name) : nullptr;
}

bool has_context() {
  Loaded* loaded;
  CUcontext context = nullptr;
  return !find_loaded(&loaded).ok() || loaded->current(&context) != CUDA_SUCCESS ||
         context != nullptr;
}

Status allow_shared_memory(const void* kernel, int bytes) {
  static std::mutex mutex;
  const Driver* driver;
  const Status status = find_driver(&driver);
  if (!status.ok()) return status;
  const unsigned long long context = current_context(*driver);
  for (const Allowed& a : allowed) {
    if (a.kernel == kernel && a.context == context && a.bytes >= bytes && context != 0) return {};
  }
  cudaFunction_t function;
  const cudaError_t found = api().function(&function, kernel);
  if (found != cudaSuccess) return cuda_error("cudaGetFuncBySymbol", found);
  const std::lock_guard lock(mutex);
  CUresult code = raise(*driver, function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                        CU_SHAREDMEM_CARVEOUT_MAX_SHARED);
  if (code == CUDA_SUCCESS) {
    code = raise(*driver, function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes);
  }
  if (code == CUDA_SUCCESS) {
    allowed[next_allowed++ % std::size(allowed)] = {kernel, context, bytes};
    return {};
  }
  return error(StatusCode::device_error,
               "cuda: %d bytes of shared memory are not to be had: driver error %d", bytes,
               static_cast<int>(code));
}

void forget_driver() { remembered_driver().forget(); }

}  // namespace logitless::cuda

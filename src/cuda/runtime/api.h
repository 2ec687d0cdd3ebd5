// SPDX-License-Identifier: Apache-2.0
// What this backend calls of the CUDA runtime (except for names of errors), the driver and
// cuBLASLt, as a table of functions. Tests replace it to simulate other machines
// (tests/cuda/recorded.h). The driver's and cuBLASLt's functions are found through `symbol`.
#pragma once

#include <cuda_runtime.h>

namespace logitless::cuda {

// Only for tests that record launches: the bytes of a kernel's parameter, which CUDA does not
// reveal, and a function that clears the parameter's padding.
struct Parameter {
  size_t bytes;
  void (*clear_padding)(void* value);
};

struct Api {
  // Functions of cudart.
  cudaError_t (*driver_version)(int* version);
  cudaError_t (*device_count)(int* count);
  cudaError_t (*device_properties)(cudaDeviceProp* properties, int device);
  cudaError_t (*current_device)(int* device);
  cudaError_t (*set_device)(int device);
  cudaError_t (*take_error)();
  cudaError_t (*function)(cudaFunction_t* function, const void* kernel);
  cudaError_t (*attributes)(cudaFuncAttributes* attributes, const void* kernel);
  cudaError_t (*launch)(const cudaLaunchConfig_t* config, const void* kernel, void** values,
                        const Parameter* parameters, int count);
  cudaError_t (*copy)(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                      cudaStream_t stream);
  // Functions of the dynamic loader.
  void* (*open)(const char* library, int mode);
  void* (*symbol)(void* library, const char* name);
  int (*close)(void* library);
};

// Read only by `api` and written only by replace_api.
extern const Api* current_api;
inline const Api& api() { return *current_api; }

// For tests, while no call is running: installs another table, or with nullptr the real one. Cached
// answers of the previous table are dropped.
void replace_api(const Api* replacement);

// Each drops one file's cached answers.
void forget_devices();
void forget_driver();
void forget_matrix_library();

}  // namespace logitless::cuda

// SPDX-License-Identifier: Apache-2.0
// All that this backend asks of the CUDA runtime, of the driver and of cuBLASLt: a table of
// functions. A test puts another in its place, to answer as a machine that is not to be had
// (tests/cuda/recorded.h). The functions of the driver and of cuBLASLt come by way of `symbol`.
#pragma once

#include <cuda_runtime.h>

namespace logitless::cuda {

// Says what CUDA does not say of a kernel's parameters, for a test that writes them down: how many
// bytes each has, and a function that clears those between its members. Nothing else reads it.
struct Parameter {
  size_t bytes;
  void (*clear_padding)(void* value);
};

struct Api {
  // cudart
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
  // The dynamic loader
  void* (*open)(const char* library, int mode);
  void* (*symbol)(void* library, const char* name);
  int (*close)(void* library);
};

// For `api` alone. Written by replace_api.
extern const Api* current_api;
inline const Api& api() { return *current_api; }

// For tests, while no call is running: another table, or with nullptr the machine's own. All that
// was learned by the one before is forgotten.
void replace_api(const Api* replacement);

// Makes each of the files that remember an answer forget it.
void forget_devices();
void forget_driver();
void forget_matrix_library();

}  // namespace logitless::cuda

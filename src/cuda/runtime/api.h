// SPDX-License-Identifier: Apache-2.0
// This table of functions has all that this backend asks of the CUDA runtime, of the driver and of
// cuBLASLt. A test puts another in its place, to answer as a machine that is not to be had
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
  // These are cudart's.
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
  // These are the dynamic loader's.
  void* (*open)(const char* library, int mode);
  void* (*symbol)(void* library, const char* name);
  int (*close)(void* library);
};

// Only `api` reads it; replace_api writes it.
extern const Api* current_api;
inline const Api& api() { return *current_api; }

// Tests call this while no call is running, with another table or, by nullptr, the machine's own.
// All that was learned through the one before is forgotten.
void replace_api(const Api* replacement);

// Each of the files that remember an answer forgets it.
void forget_devices();
void forget_driver();
void forget_matrix_library();

}  // namespace logitless::cuda

// SPDX-License-Identifier: Apache-2.0
// All that this backend calls of the CUDA runtime, the driver and cuBLASLt, as a table of
// functions. A test puts another in its place, to stand for a machine that it does not have
// (tests/cuda/recorded.h). The driver's and cuBLASLt's functions come through `symbol`.
#pragma once

#include <cuda_runtime.h>

namespace logitless::cuda {

// What CUDA does not tell of a kernel's parameters, for a test that records them: the bytes of
// each, and a function that clears its padding. Nothing else reads it.
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

// Read by `api` and written by replace_api, nothing else.
extern const Api* current_api;
inline const Api& api() { return *current_api; }

// For tests, while no call is running: takes another table, or by nullptr the machine's own. What
// was learned through the previous one is forgotten.
void replace_api(const Api* replacement);

// One for each file that remembers an answer.
void forget_devices();
void forget_driver();
void forget_matrix_library();

}  // namespace logitless::cuda

// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/runtime.h"

namespace logitless::cuda {

void Stream::enqueue(const char* name, const void* kernel, const LaunchShape& shape,
                     void** parameters) {
  if (shape.shared_bytes > 0) {
    fail(allow_shared_memory(kernel, static_cast<int>(shape.shared_bytes)));
    if (!ok()) return;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.blocks;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream_;
  cudaLaunchAttribute attribute{};
  if (shape.cluster > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  fail(cuda_error(name, cudaLaunchKernelExC(&config, kernel, parameters)));
}

}  // namespace logitless::cuda

// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda {

bool is_compiled_for_hopper(const void* kernel, const DeviceInfo& device, Stream* stream) {
  if (!device.has_clusters()) return false;
  return stream->answer<bool>([&] {
    cudaFuncAttributes attributes{};
    stream->fail(cuda_error("cudaFuncGetAttributes", api().attributes(&attributes, kernel)));
    return attributes.ptxVersion >= 90;
  });
}

void Stream::enqueue(const char* name, const void* kernel, const LaunchShape& shape, void** values,
                     const Parameter* parameters, int count) {
  if (shape.shared_bytes > 0) {
    answer<bool>([&] {
      fail(allow_shared_memory(kernel, static_cast<int>(shape.shared_bytes)));
      return ok();
    });
  }
  if (!ok() || preparing_) return;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.blocks;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream_;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  if (shape.early) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  fail(cuda_error(name, api().launch(&config, kernel, values, parameters, count)));
}

void Stream::copy(void* to, const void* from, int64_t bytes) {
  if (!ok() || preparing_) return;
  fail(cuda_error("cudaMemcpyAsync", api().copy(to, from, static_cast<size_t>(bytes),
                                                cudaMemcpyDeviceToDevice, stream_)));
}

}  // namespace logitless::cuda

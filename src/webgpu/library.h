// SPDX-License-Identifier: Apache-2.0
// The functions of webgpu.h that the native device calls, found in a loaded library.
#pragma once

#include <webgpu.h>
#include <wgpu.h>

namespace logitless::webgpu {

// clang-format off
#define LOGITLESS_WEBGPU_FUNCTIONS(X)                                                         \
  X(CreateInstance) X(InstanceRelease) X(InstanceRequestAdapter) X(InstanceProcessEvents)     \
  X(AdapterRequestDevice) X(AdapterRelease)                                                   \
  X(AdapterGetLimits) X(AdapterGetInfo) X(DeviceGetLimits) X(DeviceGetQueue)                  \
  X(DeviceCreateBuffer) X(DeviceCreateShaderModuleTrusted) X(DeviceCreateComputePipeline)     \
  X(DeviceCreateBindGroup) X(DeviceCreateCommandEncoder) X(DevicePushErrorScope)              \
  X(DevicePopErrorScope) X(DevicePoll) X(DeviceAddRef) X(QueueSubmit) X(QueueWriteBuffer)     \
  X(QueueAddRef) X(BufferMapAsync) X(BufferGetConstMappedRange) X(BufferUnmap)                \
  X(BufferRelease) X(ShaderModuleRelease) X(ComputePipelineGetBindGroupLayout)                \
  X(ComputePipelineRelease) X(BindGroupRelease) X(BindGroupLayoutRelease)                     \
  X(CommandEncoderBeginComputePass) X(CommandEncoderCopyBufferToBuffer)                       \
  X(CommandEncoderFinish) X(CommandEncoderRelease) X(CommandBufferRelease)                    \
  X(ComputePassEncoderSetPipeline) X(ComputePassEncoderSetBindGroup)                          \
  X(ComputePassEncoderDispatchWorkgroups) X(ComputePassEncoderEnd)                            \
  X(ComputePassEncoderRelease) X(GetVersion)
// clang-format on

struct Library {
#define LOGITLESS_DECLARE(name) decltype(&wgpu##name) name = nullptr;
  LOGITLESS_WEBGPU_FUNCTIONS(LOGITLESS_DECLARE)
#undef LOGITLESS_DECLARE
};

}  // namespace logitless::webgpu

// SPDX-License-Identifier: Apache-2.0
#include "paper_wgpu.h"

#include <cstdlib>
#include <new>
#include <utility>

namespace logitless::webgpu {
namespace {

// Returns a new object of any type.
template <class Handle>
Handle next() {
  static uintptr_t last = 0;
  return reinterpret_cast<Handle>(++last * 16);
}
WGPUStringView view(const char* text) { return {text, WGPU_STRLEN}; }

template <class Info, class Answer>
WGPUFuture answer(const Info& info, Answer&& call) {
  PaperWgpu& paper = paper_wgpu();
  // Not beyond the reserved size: this must not be the allocation that fails.
  if (paper.userdata.size() < paper.userdata.capacity()) paper.userdata.push_back(info.userdata1);
  if (paper.answers) {
    call(info);
  } else {
    paper.late.emplace_back([info, call] { call(info); });
  }
  return {};
}

}  // namespace

PaperWgpu& paper_wgpu() {
  static PaperWgpu paper;
  return paper;
}

}  // namespace logitless::webgpu

void* operator new(size_t bytes) {
  int& left = logitless::webgpu::paper_wgpu().allocations_left;
  void* memory = left == 0 ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  if (left > 0) --left;
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

using namespace logitless::webgpu;  // NOLINT: the C functions below are this file's purpose

extern "C" {

uint32_t wgpuGetVersion() { return 29u << 24; }

WGPUInstance wgpuCreateInstance(const WGPUInstanceDescriptor*) {
  ++paper_wgpu().instances;
  return next<WGPUInstance>();
}
void wgpuInstanceRelease(WGPUInstance) { --paper_wgpu().instances; }
void wgpuInstanceProcessEvents(WGPUInstance) {}
WGPUFuture wgpuInstanceRequestAdapter(WGPUInstance, const WGPURequestAdapterOptions*,
                                      WGPURequestAdapterCallbackInfo info) {
  return answer(info, [](const WGPURequestAdapterCallbackInfo& to) {
    const bool has = paper_wgpu().has_adapter;
    paper_wgpu().adapters += has ? 1 : 0;
    to.callback(has ? WGPURequestAdapterStatus_Success : WGPURequestAdapterStatus_Unavailable,
                has ? next<WGPUAdapter>() : nullptr, view(has ? "" : "none on paper"), to.userdata1,
                nullptr);
  });
}

WGPUFuture wgpuAdapterRequestDevice(WGPUAdapter, const WGPUDeviceDescriptor*,
                                    WGPURequestDeviceCallbackInfo info) {
  return answer(info, [](const WGPURequestDeviceCallbackInfo& to) {
    to.callback(WGPURequestDeviceStatus_Success, next<WGPUDevice>(), view(""), to.userdata1,
                nullptr);
  });
}
void wgpuAdapterRelease(WGPUAdapter) { --paper_wgpu().adapters; }
WGPUStatus wgpuAdapterGetLimits(WGPUAdapter, WGPULimits*) { return WGPUStatus_Error; }
WGPUStatus wgpuAdapterGetInfo(WGPUAdapter, WGPUAdapterInfo*) { return WGPUStatus_Error; }

WGPUStatus wgpuDeviceGetLimits(WGPUDevice, WGPULimits*) { return WGPUStatus_Error; }
WGPUQueue wgpuDeviceGetQueue(WGPUDevice) { return next<WGPUQueue>(); }
WGPUBuffer wgpuDeviceCreateBuffer(WGPUDevice, const WGPUBufferDescriptor*) {
  return next<WGPUBuffer>();
}
WGPUShaderModule wgpuDeviceCreateShaderModuleTrusted(WGPUDevice, const WGPUShaderModuleDescriptor*,
                                                     WGPUShaderRuntimeChecks) {
  return next<WGPUShaderModule>();
}
WGPUComputePipeline wgpuDeviceCreateComputePipeline(WGPUDevice,
                                                    const WGPUComputePipelineDescriptor*) {
  return next<WGPUComputePipeline>();
}
WGPUBindGroup wgpuDeviceCreateBindGroup(WGPUDevice, const WGPUBindGroupDescriptor*) {
  return next<WGPUBindGroup>();
}
WGPUCommandEncoder wgpuDeviceCreateCommandEncoder(WGPUDevice, const WGPUCommandEncoderDescriptor*) {
  ++paper_wgpu().encoders;
  paper_wgpu().recorded = 0;
  return next<WGPUCommandEncoder>();
}
void wgpuDevicePushErrorScope(WGPUDevice, WGPUErrorFilter) { ++paper_wgpu().scopes; }
WGPUFuture wgpuDevicePopErrorScope(WGPUDevice, WGPUPopErrorScopeCallbackInfo info) {
  --paper_wgpu().scopes;
  return answer(info, [](const WGPUPopErrorScopeCallbackInfo& to) {
    const bool fails = paper_wgpu().fails_scopes;
    to.callback(WGPUPopErrorScopeStatus_Success,
                fails ? WGPUErrorType_Validation : WGPUErrorType_NoError,
                view(fails ? "In wgpuPaper\n  refused on paper\n" : ""), to.userdata1, nullptr);
  });
}
WGPUBool wgpuDevicePoll(WGPUDevice, WGPUBool, const WGPUSubmissionIndex*) { return 1; }
void wgpuDeviceAddRef(WGPUDevice) {}

void wgpuQueueSubmit(WGPUQueue, size_t, const WGPUCommandBuffer*) {
  paper_wgpu().submitted += std::exchange(paper_wgpu().recorded, 0);
}
void wgpuQueueWriteBuffer(WGPUQueue, WGPUBuffer, uint64_t, const void*, size_t) {}
void wgpuQueueAddRef(WGPUQueue) {}

WGPUFuture wgpuBufferMapAsync(WGPUBuffer, WGPUMapMode, size_t, size_t,
                              WGPUBufferMapCallbackInfo info) {
  return answer(info, [](const WGPUBufferMapCallbackInfo& to) {
    to.callback(WGPUMapAsyncStatus_Success, view(""), to.userdata1, nullptr);
  });
}
const void* wgpuBufferGetConstMappedRange(WGPUBuffer, size_t, size_t) {
  static const unsigned char zeros[4096] = {};
  return zeros;
}
void wgpuBufferUnmap(WGPUBuffer) {}
void wgpuBufferRelease(WGPUBuffer) {}

void wgpuShaderModuleRelease(WGPUShaderModule) {}
WGPUBindGroupLayout wgpuComputePipelineGetBindGroupLayout(WGPUComputePipeline, uint32_t) {
  return next<WGPUBindGroupLayout>();
}
void wgpuComputePipelineRelease(WGPUComputePipeline) {}
void wgpuBindGroupRelease(WGPUBindGroup) {}
void wgpuBindGroupLayoutRelease(WGPUBindGroupLayout) {}

WGPUComputePassEncoder wgpuCommandEncoderBeginComputePass(WGPUCommandEncoder,
                                                          const WGPUComputePassDescriptor*) {
  return next<WGPUComputePassEncoder>();
}
void wgpuCommandEncoderCopyBufferToBuffer(WGPUCommandEncoder, WGPUBuffer, uint64_t, WGPUBuffer,
                                          uint64_t, uint64_t) {}
WGPUCommandBuffer wgpuCommandEncoderFinish(WGPUCommandEncoder, const WGPUCommandBufferDescriptor*) {
  return next<WGPUCommandBuffer>();
}
void wgpuCommandEncoderRelease(WGPUCommandEncoder) { --paper_wgpu().encoders; }
void wgpuCommandBufferRelease(WGPUCommandBuffer) {}

void wgpuComputePassEncoderSetPipeline(WGPUComputePassEncoder, WGPUComputePipeline) {}
void wgpuComputePassEncoderSetBindGroup(WGPUComputePassEncoder, uint32_t, WGPUBindGroup, size_t,
                                        const uint32_t*) {}
void wgpuComputePassEncoderDispatchWorkgroups(WGPUComputePassEncoder, uint32_t, uint32_t,
                                              uint32_t) {
  ++paper_wgpu().recorded;
}
void wgpuComputePassEncoderEnd(WGPUComputePassEncoder) {}
void wgpuComputePassEncoderRelease(WGPUComputePassEncoder) {}

}  // extern "C"

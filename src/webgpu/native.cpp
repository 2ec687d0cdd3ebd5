// SPDX-License-Identifier: Apache-2.0
// Buffers, pipelines and dispatches on wgpu-native. Recorded work is checked before it is
// submitted: an invalid pipeline in a submitted command buffer ends the process.
#include "src/webgpu/native.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "src/message.h"
#include "src/webgpu/library.h"
#include "src/webgpu/shaders.h"

namespace logitless::webgpu {
namespace {

WGPUStringView view(const char* text) { return {text, std::strlen(text)}; }
std::string string(WGPUStringView text) {
  if (text.data == nullptr) return "";
  return text.length == WGPU_STRLEN ? std::string(text.data) : std::string(text.data, text.length);
}
WGPUBuffer handle(Buffer buffer) { return reinterpret_cast<WGPUBuffer>(buffer); }

}  // namespace

NativeDevice::NativeDevice(const Library& library, WGPUInstance instance, WGPUAdapter adapter,
                           WGPUDevice device, WGPUQueue queue, Loss* loss)
    : call_(library), instance_(instance), device_(device), queue_(queue), loss_(loss) {
  WGPULimits limits = WGPU_LIMITS_INIT;
  if (call_.DeviceGetLimits(device_, &limits) == WGPUStatus_Success) {
    // Shaders count offsets within a binding in 32 bits, in elements of at least two bytes.
    constexpr uint64_t most = (uint64_t{1} << 32) - 256;
    limits_.buffer_bytes = limits.maxBufferSize;
    limits_.storage_binding_bytes = std::min(limits.maxStorageBufferBindingSize, most) & ~255ull;
    limits_.storage_buffers = limits.maxStorageBuffersPerShaderStage;
    limits_.offset_alignment =
        std::max(limits.minStorageBufferOffsetAlignment, limits.minUniformBufferOffsetAlignment);
    limits_.workgroup_bytes = limits.maxComputeWorkgroupStorageSize;
    limits_.workgroup_invocations = limits.maxComputeInvocationsPerWorkgroup;
    limits_.groups = limits.maxComputeWorkgroupsPerDimension;
  }
  WGPUAdapterInfo info = WGPU_ADAPTER_INFO_INIT;
  if (adapter != nullptr && call_.AdapterGetInfo(adapter, &info) == WGPUStatus_Success) {
    description_ = string(info.device) + ", " + string(info.description);
  }
}

NativeDevice::~NativeDevice() {
  for (auto& [name, kernel] : kernels_) {
    call_.BindGroupLayoutRelease(kernel.layout);
    call_.ComputePipelineRelease(kernel.pipeline);
  }
}

void NativeDevice::fail(const char* what, const char* why) {
  if (error_[0] != '\0') return;
  // Joins the lines of wgpu-native's message.
  size_t length = static_cast<size_t>(std::snprintf(error_, sizeof(error_), "%s:", what));
  bool between_words = true;
  for (; *why != '\0' && length + 2 < sizeof(error_); ++why) {
    if (std::strchr(" \t\n\r", *why) != nullptr) {
      between_words = true;
      continue;
    }
    if (between_words) error_[length++] = ' ';
    between_words = false;
    error_[length++] = *why;
  }
  error_[length] = '\0';
}

const char* NativeDevice::error() {
  if (error_[0] == '\0') return nullptr;
  std::memcpy(told_, error_, sizeof(told_));
  error_[0] = '\0';
  return told_;
}

Status NativeDevice::loss() {
  if (!is_lost()) return {};
  loss_->told = true;
  return logitless::error(StatusCode::device_error,
                          "webgpu: the device was lost (%s); the next call makes another, and "
                          "workspaces and buffers must be made anew",
                          loss_->why);
}

Status NativeDevice::loss_after_failure() {
  if (loss_ != nullptr && !loss_->is) {
    push_scope();
    call_.CommandEncoderRelease(call_.DeviceCreateCommandEncoder(device_, nullptr));
    pop_scope();
    error_[0] = '\0';
  }
  return loss();
}

void NativeDevice::push_scope() {
  // Not WGPUErrorFilter_Internal: wgpu-native 29 does not know it and ends the process.
  call_.DevicePushErrorScope(device_, WGPUErrorFilter_OutOfMemory);
  call_.DevicePushErrorScope(device_, WGPUErrorFilter_Validation);
}

// Allocates nothing unless an answer is late, because an exception must not leave a scope open.
bool NativeDevice::pop_scope() {
  bool clean = true;
  for (int i = 0; i < 2; ++i) {
    WGPUPopErrorScopeCallbackInfo info = WGPU_POP_ERROR_SCOPE_CALLBACK_INFO_INIT;
    info.mode = WGPUCallbackMode_AllowProcessEvents;
    info.userdata1 = caught_.userdata();
    info.callback = [](WGPUPopErrorScopeStatus status, WGPUErrorType type, WGPUStringView text,
                       void* userdata, void*) {
      Awaited<Caught>::deliver(userdata, [&](Caught& caught) {
        caught.is = status != WGPUPopErrorScopeStatus_Success || type != WGPUErrorType_NoError;
        copy_text(text, caught.text);
      });
    };
    call_.DevicePopErrorScope(device_, info);
    const Caught* caught = caught_.wait(call_, instance_);
    if (caught != nullptr && !caught->is) continue;
    clean = false;
    if (caught != nullptr) {
      fail("webgpu", caught->text);
    } else {
      fail("webgpu", "an error scope was not answered");
      caught_.give_up();
    }
  }
  return clean;
}

Buffer NativeDevice::create_buffer(uint64_t bytes) {
  WGPUBufferDescriptor descriptor = WGPU_BUFFER_DESCRIPTOR_INIT;
  descriptor.size = (bytes + 3) / 4 * 4;
  descriptor.usage = WGPUBufferUsage_Storage | WGPUBufferUsage_Uniform | WGPUBufferUsage_CopySrc |
                     WGPUBufferUsage_CopyDst;
  push_scope();
  const WGPUBuffer made = call_.DeviceCreateBuffer(device_, &descriptor);
  if (!pop_scope() || made == nullptr) {
    if (made != nullptr) call_.BufferRelease(made);
    return 0;
  }
  const Buffer buffer = reinterpret_cast<Buffer>(made);
  sizes_[buffer] = descriptor.size;
  allocated_ += descriptor.size;
  most_ = std::max(most_, allocated_);
  return buffer;
}

void NativeDevice::destroy_buffer(Buffer buffer) {
  const auto found = sizes_.find(buffer);
  if (found == sizes_.end()) return;
  allocated_ -= found->second;
  sizes_.erase(found);
  call_.BufferRelease(handle(buffer));  // destroyed after the queue's last use
}

void NativeDevice::write(Buffer buffer, uint64_t offset, const void* data, uint64_t bytes) {
  push_scope();
  call_.QueueWriteBuffer(queue_, handle(buffer), offset, data, bytes);
  if (!pop_scope()) broken_ = true;
}

Pipeline NativeDevice::pipeline_of_text(const char* text, const char* entry,
                                        const Constant* constants, uint32_t count) {
  std::vector<WGPUConstantEntry> entries(count, WGPUConstantEntry WGPU_CONSTANT_ENTRY_INIT);
  for (uint32_t i = 0; i < count; ++i) {
    entries[i].key = view(constants[i].name);
    entries[i].value = constants[i].value;
  }
  WGPUShaderSourceWGSL source = WGPU_SHADER_SOURCE_WGSL_INIT;
  source.code = view(text);
  WGPUShaderModuleDescriptor shader = WGPU_SHADER_MODULE_DESCRIPTOR_INIT;
  shader.nextInChain = &source.chain;
  push_scope();
  // No runtime checks of loops: their counter keeps drivers from unrolling.
  const WGPUShaderModule module =
      call_.DeviceCreateShaderModuleTrusted(device_, &shader, WGPUShaderRuntimeChecks_BoundsChecks);
  if (!pop_scope() || module == nullptr) return 0;
  WGPUComputePipelineDescriptor descriptor = WGPU_COMPUTE_PIPELINE_DESCRIPTOR_INIT;
  descriptor.compute.module = module;
  descriptor.compute.entryPoint = view(entry);
  descriptor.compute.constantCount = count;
  descriptor.compute.constants = entries.data();
  push_scope();
  Kernel kernel{call_.DeviceCreateComputePipeline(device_, &descriptor), nullptr};
  const bool made = pop_scope() && kernel.pipeline != nullptr;
  call_.ShaderModuleRelease(module);
  if (!made) return 0;
  kernel.layout = call_.ComputePipelineGetBindGroupLayout(kernel.pipeline, 0);
  const Pipeline number = static_cast<Pipeline>(kernels_.size() + 1);
  kernels_[number] = kernel;
  return number;
}

Pipeline NativeDevice::pipeline(const char* shader, const char* entry, const Constant* constants,
                                uint32_t count) {
  std::string key = std::string(shader) + "." + entry;
  for (uint32_t i = 0; i < count; ++i) {
    key += std::string(" ") + constants[i].name + "=" + std::to_string(constants[i].value);
  }
  const auto found = by_name_.find(key);
  if (found != by_name_.end()) return found->second;
  const char* text = shader_text(shader);
  if (text == nullptr) {
    fail("webgpu: no shader of that name", shader);
    return 0;
  }
  const Pipeline made = pipeline_of_text(text, entry, constants, count);
  if (made != 0) by_name_[key] = made;
  return made;
}

void NativeDevice::begin_pass() {
  if (encoder_ == nullptr) {
    push_scope();
    encoder_ = call_.DeviceCreateCommandEncoder(device_, nullptr);
  }
  if (pass_ == nullptr) pass_ = call_.CommandEncoderBeginComputePass(encoder_, nullptr);
}

void NativeDevice::end_pass() {
  if (pass_ == nullptr) return;
  call_.ComputePassEncoderEnd(pass_);
  call_.ComputePassEncoderRelease(pass_);
  pass_ = nullptr;
}

void NativeDevice::dispatch(Pipeline pipeline, const Binding* bindings, uint32_t count, uint32_t x,
                            uint32_t y, uint32_t z) {
  const auto found = kernels_.find(pipeline);
  if (found == kernels_.end()) {
    broken_ = true;
    return;
  }
  constexpr uint32_t kMost = 16;
  WGPUBindGroupEntry entries[kMost];
  uint32_t used = 0;
  for (uint32_t i = 0; i < count && i < kMost; ++i) {
    if (bindings[i].buffer == 0) continue;
    WGPUBindGroupEntry entry = WGPU_BIND_GROUP_ENTRY_INIT;
    entry.binding = i;
    entry.buffer = handle(bindings[i].buffer);
    entry.offset = bindings[i].offset;
    entry.size = bindings[i].bytes;
    entries[used++] = entry;
  }
  WGPUBindGroupDescriptor descriptor = WGPU_BIND_GROUP_DESCRIPTOR_INIT;
  descriptor.layout = found->second.layout;
  descriptor.entryCount = used;
  descriptor.entries = entries;
  push_scope();
  const WGPUBindGroup group = call_.DeviceCreateBindGroup(device_, &descriptor);
  if (!pop_scope() || group == nullptr) {
    broken_ = true;
    return;
  }
  begin_pass();
  call_.ComputePassEncoderSetPipeline(pass_, found->second.pipeline);
  call_.ComputePassEncoderSetBindGroup(pass_, 0, group, 0, nullptr);
  call_.ComputePassEncoderDispatchWorkgroups(pass_, x, y, z);
  call_.BindGroupRelease(group);
}

void NativeDevice::copy(Buffer source, uint64_t source_offset, Buffer target,
                        uint64_t target_offset, uint64_t bytes) {
  begin_pass();
  end_pass();
  call_.CommandEncoderCopyBufferToBuffer(encoder_, handle(source), source_offset, handle(target),
                                         target_offset, bytes);
}

void NativeDevice::abandon() {
  broken_ = false;
  if (encoder_ == nullptr) return;
  end_pass();
  call_.CommandEncoderRelease(encoder_);
  encoder_ = nullptr;
  (void)pop_scope();
}

bool NativeDevice::submit() {
  const bool broken = broken_;
  broken_ = false;
  if (encoder_ == nullptr) return !broken;
  end_pass();
  const WGPUCommandBuffer commands = call_.CommandEncoderFinish(encoder_, nullptr);
  call_.CommandEncoderRelease(encoder_);
  encoder_ = nullptr;
  const bool recorded = pop_scope() && commands != nullptr;
  bool submitted = false;
  if (recorded && !broken) {
    push_scope();
    call_.QueueSubmit(queue_, 1, &commands);
    submitted = pop_scope();
  }
  if (commands != nullptr) call_.CommandBufferRelease(commands);
  return submitted;
}

void NativeDevice::wait() { call_.DevicePoll(device_, 1, nullptr); }

bool NativeDevice::read(Buffer buffer, uint64_t offset, void* data, uint64_t bytes) {
  if (bytes == 0) return true;
  WGPUBufferDescriptor descriptor = WGPU_BUFFER_DESCRIPTOR_INIT;
  descriptor.size = (bytes + 3) / 4 * 4;
  descriptor.usage = WGPUBufferUsage_MapRead | WGPUBufferUsage_CopyDst;
  push_scope();
  const WGPUBuffer staging = call_.DeviceCreateBuffer(device_, &descriptor);
  if (!pop_scope() || staging == nullptr) return false;
  copy(buffer, offset, reinterpret_cast<Buffer>(staging), 0, descriptor.size);
  bool done = submit();
  if (done) {
    Awaited<bool> success;
    WGPUBufferMapCallbackInfo info = WGPU_BUFFER_MAP_CALLBACK_INFO_INIT;
    info.mode = WGPUCallbackMode_AllowProcessEvents;
    info.userdata1 = success.userdata();
    info.callback = [](WGPUMapAsyncStatus status, WGPUStringView, void* userdata, void*) {
      Awaited<bool>::deliver(
          userdata, [&](bool& success) { success = status == WGPUMapAsyncStatus_Success; });
    };
    call_.BufferMapAsync(staging, WGPUMapMode_Read, 0, descriptor.size, info);
    wait();
    const bool* answer = success.wait(call_, instance_);
    const bool mapped = answer != nullptr && *answer;
    const void* from =
        mapped ? call_.BufferGetConstMappedRange(staging, 0, descriptor.size) : nullptr;
    done = from != nullptr;
    if (done) std::memcpy(data, from, bytes);
    if (mapped) call_.BufferUnmap(staging);
    if (!done) fail("webgpu", "a buffer could not be read; the device may be lost");
  }
  call_.BufferRelease(staging);
  return done;
}

}  // namespace logitless::webgpu

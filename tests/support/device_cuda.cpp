// SPDX-License-Identifier: Apache-2.0
// The CUDA backend's memory for the suite. Blocks are reused by later cases, each host thread has
// its own stream, and errors of the device are thrown where they are seen.
#include <cuda.h>
#include <cuda_runtime.h>

#include <bit>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>

#include "device.h"
#include "src/cuda/promises.h"

namespace logitless::conformance {
namespace {

void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code) + " (" +
                           cudaGetErrorName(code) + ")");
}

// Caches free blocks by size. With LOGITLESS_TEST_FRESH_MEMORY=1 every block is an allocation of
// exactly its bytes, as compute-sanitizer needs it.
class Blocks {
 public:
  void* take(size_t bytes) {
    const size_t size =
        fresh_ ? std::max<size_t>(bytes, 1) : std::bit_ceil(std::max(bytes, kLeast));
    const std::lock_guard lock(mutex_);
    std::vector<void*>& free = free_[size];
    void* block = nullptr;
    if (!fresh_ && !free.empty()) {
      block = free.back();
      free.pop_back();
    } else {
      check(cudaMalloc(&block, size), "cudaMalloc");
    }
    sizes_[block] = size;
    return block;
  }
  // Does not throw, because destructors call it.
  void give_back(void* block) {
    const std::lock_guard lock(mutex_);
    const auto found = sizes_.find(block);
    if (found == sizes_.end()) return;
    if (fresh_ || found->second > kLargestKept) {
      (void)cudaFree(block);
    } else {
      free_[found->second].push_back(block);
    }
    sizes_.erase(found);
  }

 private:
  static constexpr size_t kLeast = 1024, kLargestKept = size_t{1} << 28;
  const bool fresh_ = std::getenv("LOGITLESS_TEST_FRESH_MEMORY") != nullptr;
  std::mutex mutex_;
  std::map<size_t, std::vector<void*>> free_;
  std::map<void*, size_t> sizes_;
};

// Streams outlive their threads and are reused by others.
class Streams {
 public:
  cudaStream_t take() {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      const cudaStream_t stream = free_.back();
      free_.pop_back();
      return stream;
    }
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    return stream;
  }
  void give_back(cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    free_.push_back(stream);
  }
  // The stream of a thread while it runs.
  struct OfAThread {
    OfAThread(Streams* all, int device) : streams(all) {
      const cuda::CurrentDevice current(device);
      stream = streams->take();
    }
    ~OfAThread() { streams->give_back(stream); }
    OfAThread(const OfAThread&) = delete;
    OfAThread& operator=(const OfAThread&) = delete;
    Streams* streams;
    cudaStream_t stream = nullptr;
  };

 private:
  std::mutex mutex_;
  std::vector<cudaStream_t> free_;
};

// Driver functions to reserve address space that is only partly backed by memory.
template <class Function>
Function driver_function(const char* name) {
  void* function = cuda::find_driver_function(name);
  if (function == nullptr) throw std::runtime_error(std::string("no ") + name);
  return reinterpret_cast<Function>(function);
}
#define DRIVER(name) driver_function<decltype(&name)>(#name)

void check_driver(CUresult code, const char* what) {
  if (code != CUDA_SUCCESS) {
    throw std::runtime_error(std::string(what) + " failed: " + std::to_string(code));
  }
}

constexpr size_t kPage = size_t{2} << 20;
size_t pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

class CudaDevice final : public TestDevice {
 public:
  explicit CudaDevice(int index) : index_(index) {}
  const char* name() const override { return "cuda"; }
  Device tensors() const override { return {DeviceType::cuda, index_}; }
  Execution execution() const override {
    return {.device = {DeviceType::cuda, index_}, .stream = stream()};
  }
  void* allocate(size_t bytes) const override {
    const cuda::CurrentDevice current(index_);
    return blocks_->take(bytes);
  }
  void release(void* data) const override {
    const cuda::CurrentDevice current(index_);
    blocks_->give_back(data);
  }
  void upload(void* device, const std::byte* host, size_t bytes) const override {
    const cuda::CurrentDevice current(index_);
    check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream()), "upload");
  }
  void download(std::byte* host, const void* device, size_t bytes) const override {
    const cuda::CurrentDevice current(index_);
    check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream()), "download");
    check(cudaStreamSynchronize(stream()), "what ran before the download");
  }

  void* reserve(size_t bytes, const Ranges& used) const override {
    const cuda::CurrentDevice current(index_);
    CUdeviceptr start = 0;
    check(cudaFree(nullptr), "context");
    check_driver(DRIVER(cuMemAddressReserve)(&start, pages(bytes), kPage, 0, 0), "reserve");
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {index_}};
    const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    std::map<size_t, bool> mapped;
    for (const auto& [offset, length] : used) {
      for (size_t page = offset / kPage; page <= (offset + length - 1) / kPage; ++page) {
        if (mapped[page]) continue;
        mapped[page] = true;
        CUmemGenericAllocationHandle memory;
        check_driver(DRIVER(cuMemCreate)(&memory, kPage, &properties, 0), "memory");
        const CUdeviceptr at = start + page * kPage;
        check_driver(DRIVER(cuMemMap)(at, kPage, 0, memory, 0), "map");
        check_driver(DRIVER(cuMemSetAccess)(at, kPage, &access, 1), "access");
        // the mapping keeps the memory alive
        check_driver(DRIVER(cuMemRelease)(memory), "release");
        check(cudaMemset(reinterpret_cast<void*>(at), 0, kPage), "clear");
      }
    }
    check(cudaDeviceSynchronize(), "clear");
    const std::lock_guard lock(mutex_);
    mapped_[reinterpret_cast<void*>(start)] = std::move(mapped);
    return reinterpret_cast<void*>(start);
  }
  void unreserve(void* data, size_t bytes) const override {
    const std::lock_guard lock(mutex_);
    const cuda::CurrentDevice current(index_);
    const auto start = reinterpret_cast<CUdeviceptr>(data);
    (void)cudaDeviceSynchronize();
    for (const auto& [page, is] : mapped_[data]) {
      (void)DRIVER(cuMemUnmap)(start + page * kPage, kPage);
    }
    (void)DRIVER(cuMemAddressFree)(start, pages(bytes));
    mapped_.erase(data);
  }

  bool synchronous() const override { return false; }
  // Without allow_tf32, f32 products use no tensor cores.
  bool tensor_cores(DType dtype) const override { return dtype != DType::f32; }
  bool has_tf32() const override { return true; }
  bool keeps_state(DType) const override { return true; }
  bool reference_is_maximum(DType dtype) const override {
    const cuda::DeviceInfo* info;
    return !cuda::find_device(index_, &info).ok() || cuda::reference_is_maximum(*info, dtype);
  }
  bool batch_invariant(const Case& c) const override {
    // Divergences may take cuBLASLt's products, which promise no invariance.
    if (diverges(c.op)) return false;
    const cuda::DeviceInfo* info;
    if (!is_linear(c.op)) return true;
    if (!cuda::find_device(index_, &info).ok()) return false;
    return is_served(c) && cuda::half_linear_ops_are_batch_invariant(*info);
  }

 private:
  // Whether half_linear_ops_are_batch_invariant() speaks of this case.
  static bool is_served(const Case& c) {
    return c.dtype != DType::f32 && c.placement == Placement::dense;
  }
  cudaStream_t stream() const {
    static thread_local std::map<const CudaDevice*, Streams::OfAThread> own;
    return own.try_emplace(this, streams_, index_).first->second.stream;
  }

  const int index_;
  // Never destroyed, because the driver may be gone by then.
  Blocks* const blocks_ = new Blocks;
  Streams* const streams_ = new Streams;
  mutable std::mutex mutex_;
  mutable std::map<void*, std::map<size_t, bool>> mapped_;
};

}  // namespace

Found find_cuda_device(int index) {
  char text[256];
  Status status;
  logitless_describe_backend(LOGITLESS_CUDA, text, sizeof(text), status.c());
  const cuda::DeviceInfo* info;
  if (status.ok()) status = cuda::find_device(index, &info);
  if (!status.ok()) return {"cuda", nullptr, status.message()};
  static std::map<int, CudaDevice> devices;
  return {"cuda", &devices.try_emplace(index, index).first->second, ""};
}

}  // namespace logitless::conformance

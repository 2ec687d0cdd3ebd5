// SPDX-License-Identifier: Apache-2.0
// Measurements on CUDA, timed by the device's own clock.
#include "cli/bench_gpu.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "cli/commands.h"
#include "cli/text.h"
#ifdef LOGITLESS_WITH_CUDA
#include "src/cuda/runtime/blas.h"
#endif

namespace logitless::cli {

#ifdef LOGITLESS_WITH_CUDA
namespace {

void check_cuda(cudaError_t code, const char* what) {
  if (code != cudaSuccess) throw Failure(fmt::format("{}: {}", what, cudaGetErrorString(code)));
}

constexpr Device kDevice{DeviceType::cuda, 0};

// Fills memory with bits that are numbers between 1/2 and 2 of either sign both as bf16 and as f32.
// Products of constant matrices use less power and run at a higher clock.
void fill_random(char* data, uint64_t bytes) {
  std::mt19937 random(42);
  std::vector<uint16_t> table(1 << 20);
  for (uint16_t& bits : table) bits = static_cast<uint16_t>(0x3F00 | (random() & 0x80FF));
  for (uint64_t at = 0; at < bytes; at += 2 * table.size()) {
    const uint64_t count = std::min<uint64_t>(2 * table.size(), bytes - at);
    check_cuda(cudaMemcpy(data + at, table.data(), count, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
}

class CudaBench final : public GpuBench {
 public:
  CudaBench();
  ~CudaBench() override;

  void forget() override;
  const char* name() const override { return name_; }
  uint64_t free_bytes() const override;
  const char* arithmetic() const override { return "cuBLASLt"; }
  bool has_tensor_cores() const override { return true; }
  double product_rate(DType dtype) override;
  double copy_bandwidth() override;

 private:
  struct Copy {
    void* data = nullptr;
    uint64_t bytes = 0;
  };
  void* device_of(const TensorView& host) override;
  void fetch(const TensorView& host) override;
  Workspace reserve(uint64_t bytes) override;
  double seconds(const std::function<void()>& work) override;

  char name_[64] = {};
  void* stream_ = nullptr;
  void *start_ = nullptr, *stop_ = nullptr;  // events
  std::map<const void*, Copy> copies_;
  Copy scratch_;
};

CudaBench::CudaBench() : GpuBench(kDevice) {
  const cuda::DeviceInfo* info;
  check(cuda::find_device(0, &info));
  check(warmup({.device = kDevice}));
  std::snprintf(name_, sizeof(name_), "%.60s", info->name);
  cudaStream_t stream;
  cudaEvent_t start, stop;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check_cuda(cudaEventCreate(&start), "cudaEventCreate");
  check_cuda(cudaEventCreate(&stop), "cudaEventCreate");
  stream_ = stream, start_ = start, stop_ = stop;
  execution_.stream = stream;
}

CudaBench::~CudaBench() {
  forget();
  if (stream_ == nullptr) return;
  (void)cudaEventDestroy(static_cast<cudaEvent_t>(start_));
  (void)cudaEventDestroy(static_cast<cudaEvent_t>(stop_));
  (void)cudaStreamDestroy(static_cast<cudaStream_t>(stream_));
}

void CudaBench::forget() {
  for (const auto& [host, copy] : copies_) (void)cudaFree(copy.data);
  copies_.clear();
  (void)cudaFree(scratch_.data);
  scratch_ = {};
}

void* CudaBench::device_of(const TensorView& host) {
  Copy& copy = copies_[host.data];
  const uint64_t bytes = bytes_of(host);
  if (copy.data == nullptr && bytes > 0) {
    check_cuda(cudaMalloc(&copy.data, bytes), "cudaMalloc");
    copy.bytes = bytes;
    check_cuda(cudaMemcpy(copy.data, host.data, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  return copy.data;
}

Workspace CudaBench::reserve(uint64_t bytes) {
  if (scratch_.bytes != bytes) {
    (void)cudaFree(scratch_.data);
    scratch_ = {};
    if (bytes > 0) check_cuda(cudaMalloc(&scratch_.data, bytes), "cudaMalloc of the workspace");
    scratch_.bytes = bytes;
  }
  return {scratch_.data, bytes};
}

void CudaBench::fetch(const TensorView& host) {
  const Copy& copy = copies_.at(host.data);
  check_cuda(cudaMemcpy(host.data, copy.data, copy.bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
}

double CudaBench::seconds(const std::function<void()>& work) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  const auto start = static_cast<cudaEvent_t>(start_), stop = static_cast<cudaEvent_t>(stop_);
  check_cuda(cudaDeviceSynchronize(), "the copies");
  check_cuda(cudaEventRecord(start, stream), "cudaEventRecord");
  work();
  check_cuda(cudaEventRecord(stop, stream), "cudaEventRecord");
  check_cuda(cudaEventSynchronize(stop), "the measured call");
  float milliseconds = 0;
  check_cuda(cudaEventElapsedTime(&milliseconds, start, stop), "cudaEventElapsedTime");
  return milliseconds * 1e-3;
}

uint64_t CudaBench::free_bytes() const {
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

double CudaBench::product_rate(DType dtype) {
  constexpr int64_t n = 8192;
  constexpr int kRepeats = 5;
  const cuda::DeviceInfo* info;
  check(cuda::find_device(0, &info));
  const uint64_t bytes = static_cast<uint64_t>(n * n) * static_cast<uint64_t>(size_of(dtype));
  const float constants[2] = {1, 0};
  reserve(3 * bytes + cuda::matrix_library_bytes + 256);
  char* const data = static_cast<char*>(scratch_.data);
  char* const library = data + 3 * bytes;
  char* const scalars = library + cuda::matrix_library_bytes;
  fill_random(data, 2 * bytes);
  check_cuda(cudaMemcpy(scalars, constants, sizeof(constants), cudaMemcpyHostToDevice), "copy");
  cuda::Product product;
  product.in = product.out = dtype;
  product.rows = product.columns = product.depth = n;
  product.a = {data, n, 1};
  product.b = {data + bytes, 1, n};
  product.c = data + 2 * bytes;
  product.c_stride = n;
  product.alpha = reinterpret_cast<const float*>(scalars);
  product.beta = product.alpha + 1;
  double best = 1e30;
  for (int i = 0; i <= kRepeats; ++i) {
    const double elapsed = seconds([&] {
      cuda::Stream stream(stream_);
      cuda::multiply(product, *info, library, &stream);
      check(stream.status());
    });
    if (i > 0) best = std::min(best, elapsed);
  }
  return 2.0 * n * n * n / best;
}

double CudaBench::copy_bandwidth() {
  constexpr uint64_t bytes = uint64_t{2} << 30;
  constexpr int kRepeats = 5;
  reserve(2 * bytes);
  char* const data = static_cast<char*>(scratch_.data);
  check_cuda(cudaMemset(data, 0x3F, bytes), "cudaMemset");
  double best = 1e30;
  for (int i = 0; i <= kRepeats; ++i) {
    const double elapsed = seconds([&] {
      check_cuda(cudaMemcpyAsync(data + bytes, data, bytes, cudaMemcpyDeviceToDevice,
                                 static_cast<cudaStream_t>(stream_)),
                 "cudaMemcpy");
    });
    if (i > 0) best = std::min(best, elapsed);
  }
  return 2.0 * bytes / best;
}

}  // namespace

std::unique_ptr<GpuBench> make_cuda_bench() { return std::make_unique<CudaBench>(); }
#else
std::unique_ptr<GpuBench> make_cuda_bench() {
  throw Failure("cuda: this library was built without it");
}
#endif

}  // namespace logitless::cli

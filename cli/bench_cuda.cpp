// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_cuda.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "cli/commands.h"
#include "cli/text.h"
#ifdef LOGITLESS_WITH_CUDA
#include "src/cuda/blas.h"
#endif

namespace logitless::cli {

#ifdef LOGITLESS_WITH_CUDA
namespace {

void check_cuda(cudaError_t code, const char* what) {
  if (code != cudaSuccess) throw Failure(fmt::format("{}: {}", what, cudaGetErrorString(code)));
}

uint64_t bytes_of(const TensorView& view) {
  uint64_t elements = 1;
  for (int32_t d = 0; d < view.rank; ++d) elements *= static_cast<uint64_t>(view.shape[d]);
  return elements * static_cast<uint64_t>(size_of(view.dtype));
}

constexpr Device kDevice{DeviceType::cuda, 0};

// The op with other data.
template <class Op, class F>
Op moved(const Op& host, F&& data_of) {
  Op op = host;
  logitless_op unused{};
  for_each_tensor(op, unused, [&](const char*, Access, TensorView& view, auto&&) {
    if (!view) return;
    view.data = data_of(view);
    view.device = kDevice;
  });
  return op;
}

// Numbers between 1/2 and 2 of either sign, as bf16 and as f32: equal ones would be multiplied at a
// higher clock.
void fill_random(char* data, uint64_t bytes) {
  std::mt19937 random(42);
  std::vector<uint16_t> table(1 << 20);
  for (uint16_t& bits : table) bits = static_cast<uint16_t>(0x3F00 | (random() & 0x80FF));
  for (uint64_t at = 0; at < bytes; at += 2 * table.size()) {
    const uint64_t count = std::min<uint64_t>(2 * table.size(), bytes - at);
    check_cuda(cudaMemcpy(data + at, table.data(), count, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
}

}  // namespace

CudaBench::CudaBench() {
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

void CudaBench::reserve(uint64_t workspace) {
  if (scratch_.bytes == workspace) return;
  (void)cudaFree(scratch_.data);
  scratch_ = {};
  if (workspace == 0) return;
  check_cuda(cudaMalloc(&scratch_.data, workspace), "cudaMalloc of the workspace");
  scratch_.bytes = workspace;
}

template <class F>
double CudaBench::seconds(F&& work) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  const auto start = static_cast<cudaEvent_t>(start_), stop = static_cast<cudaEvent_t>(stop_);
  check_cuda(cudaEventRecord(start, stream), "cudaEventRecord");
  work();
  check_cuda(cudaEventRecord(stop, stream), "cudaEventRecord");
  check_cuda(cudaEventSynchronize(stop), "the measured call");
  float milliseconds = 0;
  check_cuda(cudaEventElapsedTime(&milliseconds, start, stop), "cudaEventElapsedTime");
  return milliseconds * 1e-3;
}

template <class Op>
WorkspaceSize CudaBench::size(const Op& host) const {
  WorkspaceSize size;
  check(workspace(moved(host, [](const TensorView& view) { return view.data; }),
                  {.device = kDevice}, &size));
  return size;
}

template <class Op>
double CudaBench::timed(const Op& host, uint64_t workspace, bool fetch) {
  const Op op = moved(host, [&](const TensorView& view) { return device_of(view); });
  reserve(workspace);
  check_cuda(cudaDeviceSynchronize(), "the copies");
  const double elapsed = seconds(
      [&] { check(run(op, {scratch_.data, workspace}, {.device = kDevice, .stream = stream_})); });
  if (!fetch) return elapsed;
  const logitless_op unused{};
  for_each_tensor(host, unused, [&](const char*, Access access, const TensorView& view, auto&&) {
    if (!view || access == Access::read) return;
    const Copy& copy = copies_.at(view.data);
    check_cuda(cudaMemcpy(view.data, copy.data, copy.bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  });
  return elapsed;
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
#else
namespace {
[[noreturn]] void absent() { throw Failure("cuda: this library was built without it"); }
}  // namespace
CudaBench::CudaBench() { absent(); }
CudaBench::~CudaBench() = default;
void CudaBench::forget() {}
uint64_t CudaBench::free_bytes() const { absent(); }
double CudaBench::product_rate(DType) { absent(); }
double CudaBench::copy_bandwidth() { absent(); }
template <class Op>
WorkspaceSize CudaBench::size(const Op&) const {
  absent();
}
template <class Op>
double CudaBench::timed(const Op&, uint64_t, bool) {
  absent();
}
#endif

#define LOGITLESS_INSTANTIATE(Op)                          \
  template WorkspaceSize CudaBench::size(const Op&) const; \
  template double CudaBench::timed(const Op&, uint64_t, bool);
LOGITLESS_INSTANTIATE(Softmax)
LOGITLESS_INSTANTIATE(CrossEntropyForward)
LOGITLESS_INSTANTIATE(CrossEntropyBackward)
LOGITLESS_INSTANTIATE(CrossEntropyForwardBackward)
LOGITLESS_INSTANTIATE(LinearCrossEntropyForward)
LOGITLESS_INSTANTIATE(LinearCrossEntropyBackward)
LOGITLESS_INSTANTIATE(LinearCrossEntropyForwardBackward)
#undef LOGITLESS_INSTANTIATE

}  // namespace logitless::cli

// SPDX-License-Identifier: Apache-2.0
// The logits' product of the kernels for sm_80 (LOGITLESS_CUDA_KERNELS=sm80) beside CUTLASS's for
// the same instructions, on any GPU from sm_80 on. Both contenders of CUTLASS need a pass over the
// logits too: blocks of f32 logits, as the portable kernels have them, and whole bf16 logits, as
// torch.compile has them.
//   pip download --no-deps nvidia-cutlass==4.2.0.0 && unzip -d cutlass nvidia_cutlass*.whl
//   nvcc -std=c++20 -O3 -gencode arch=compute_80,code=compute_80 --expt-relaxed-constexpr \
//     -I cutlass/cutlass_library/source/include -I include bench/sm80_forward.cu \
//     build/release/liblogitless.a -o sm80_forward
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "cutlass/gemm/device/gemm.h"
#include "logitless/logitless.h"

namespace {

using bf16 = __nv_bfloat16;

#define CHECK(call)                                                              \
  do {                                                                           \
    if (const cudaError_t code = (call); code != cudaSuccess) {                  \
      std::fprintf(stderr, "line %d: %s\n", __LINE__, cudaGetErrorString(code)); \
      std::exit(1);                                                              \
    }                                                                            \
  } while (0)

struct Head {
  int tokens, hidden, vocab;
};
constexpr Head heads[] = {{8192, 4096, 128256}, {8192, 2048, 151936}, {4096, 768, 50304}};
constexpr int block_columns = 4096, rounds = 7;

template <class Out>
void multiply(const bf16* x, const bf16* w, void* z, int n, int v, int d, int pitch) {
  using In = cutlass::bfloat16_t;
  using Shape = cutlass::gemm::GemmShape<128, 256, 32>;
  using Epilogue = cutlass::epilogue::thread::LinearCombination<
      Out, 128 / cutlass::sizeof_bits<Out>::value, float, float,
      cutlass::epilogue::thread::ScaleType::OnlyAlphaScaling>;
  using Gemm = cutlass::gemm::device::Gemm<
      In, cutlass::layout::RowMajor, In, cutlass::layout::ColumnMajor, Out,
      cutlass::layout::RowMajor, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, Shape,
      cutlass::gemm::GemmShape<64, 64, 32>, cutlass::gemm::GemmShape<16, 8, 16>, Epilogue,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, 4>;
  Gemm gemm;
  auto* const in = reinterpret_cast<const In*>(x);
  auto* const weight = reinterpret_cast<const In*>(w);
  auto* const out = static_cast<Out*>(z);
  const auto status = gemm({{n, v, d}, {in, d}, {weight, d}, {out, pitch}, {out, pitch}, {1, 0}});
  if (status != cutlass::Status::kSuccess) {
    std::fprintf(stderr, "CUTLASS: %s\n", cutlassGetStatusString(status));
    std::exit(1);
  }
}

// A warp, a row and 1024 columns: the sum of exponentials relative to the anchor and, if kStores,
// the exponentials themselves.
template <class T, bool kStores>
__global__ void __launch_bounds__(256)
    sum_kernel(const T* logits, int64_t pitch, int rows, int columns, const float* anchors,
               float* sums, bf16* to, int64_t to_pitch) {
  const int lane = threadIdx.x % 32, groups = (rows + 7) / 8, segments = (columns + 1023) / 1024;
  for (int item = blockIdx.x; item < groups * segments; item += gridDim.x) {
    const int row = item % groups * 8 + threadIdx.x / 32, first = item / groups * 1024;
    const float anchor = anchors[row];
    float z[8][4], sum = 0;
#pragma unroll
    for (int g = 0; g < 8; ++g) {
      const int j = first + g * 128 + lane * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) z[g][i] = -INFINITY;
      if (j >= columns) continue;
      if constexpr (sizeof(T) == 4) {
        const float4 four = *reinterpret_cast<const float4*>(logits + row * pitch + j);
        z[g][0] = four.x, z[g][1] = four.y, z[g][2] = four.z, z[g][3] = four.w;
      } else {
        const uint2 four = *reinterpret_cast<const uint2*>(logits + row * pitch + j);
        z[g][0] = __uint_as_float(four.x << 16), z[g][1] = __uint_as_float(four.x & 0xffff0000u);
        z[g][2] = __uint_as_float(four.y << 16), z[g][3] = __uint_as_float(four.y & 0xffff0000u);
      }
    }
#pragma unroll
    for (int g = 0; g < 8; ++g) {
      const int j = first + g * 128 + lane * 4;
      alignas(8) bf16 e[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float y = exp2f(fmaf(z[g][i], 1.44269504f, -anchor));
        sum += y;
        e[i] = __float2bfloat16(y);
      }
      if (kStores && j < columns) {
        *reinterpret_cast<uint2*>(to + row * to_pitch + j) = *reinterpret_cast<uint2*>(e);
      }
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (lane == 0) sums[int64_t{item / groups} * rows + row] = sum;
  }
}

__global__ void fill(bf16* to, int64_t count, float scale, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed;
    float sum = 0;
    for (int k = 0; k < 4; ++k) {
      h ^= h >> 16, h *= 0x7feb352du, h ^= h >> 15, h *= 0x846ca68bu, h ^= h >> 16;
      sum += static_cast<float>(h & 0xffff) / 65536 - 0.5f;
    }
    to[i] = __float2bfloat16(sum * 1.7f * scale);
  }
}

std::vector<void*> taken;  // the device's memory of one head

template <class T>
T* take(int64_t count) {
  void* memory;
  CHECK(cudaMalloc(&memory, count * sizeof(T)));
  taken.push_back(memory);
  CHECK(cudaMemset(memory, 0, count * sizeof(T)));
  return static_cast<T*>(memory);
}

logitless::TensorView view(void* data, logitless::DType dtype, int64_t rows, int64_t columns = 0) {
  logitless::TensorView v{.data = data, .dtype = dtype, .device = {logitless::DeviceType::cuda, 0}};
  v.rank = columns > 0 ? 2 : rows > 0 ? 1 : 0;
  v.shape = {rows, columns};
  v.stride = {std::max<int64_t>(columns, 1), 1};
  return v;
}

void expect(const logitless::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message());
  std::exit(1);
}

float milliseconds(const std::function<void()>& call, int calls) {
  cudaEvent_t start, end;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&end));
  CHECK(cudaEventRecord(start));
  for (int i = 0; i < calls; ++i) call();
  CHECK(cudaEventRecord(end));
  CHECK(cudaEventSynchronize(end));
  float ms;
  CHECK(cudaEventElapsedTime(&ms, start, end));
  return ms / static_cast<float>(calls);
}

// A head's tensors and the two calls of the library.
class Measured {
 public:
  Measured(const Head& head, int multiprocessors) : head_(head), multiprocessors_(multiprocessors) {
    fill<<<1024, 256>>>(x_, n_ * d_, 1, 1);
    fill<<<1024, 256>>>(w_, v_ * d_, 1 / std::sqrt(static_cast<float>(d_)), 2);
    loss_.input = view(x_, logitless::DType::bf16, n_, d_);
    loss_.weight = view(w_, logitless::DType::bf16, v_, d_);
    loss_.target = view(take<int32_t>(n_), logitless::DType::i32, n_);
    loss_.loss = view(take<float>(1), logitless::DType::f32, 0);
    kept_ = loss_;
    logitless::Kept kept;
    expect(logitless::kept_size(loss_, execution_, ~uint64_t{0}, &kept));
    const auto [rows, columns] = kept.shape;
    kept_.kept = view(take<bf16>(rows * columns), logitless::DType::bf16, rows, columns);
    const auto [tokens, values] = kept.rows_shape;
    kept_.kept_rows = view(take<float>(tokens * values), logitless::DType::f32, tokens, values);
    logitless::WorkspaceSize size, kept_size;
    expect(logitless::workspace(loss_, execution_, &size));
    expect(logitless::workspace(kept_, execution_, &kept_size));
    scratch_.bytes = std::max(size.recommended, kept_size.recommended);
    scratch_.data = take<char>(static_cast<int64_t>(scratch_.bytes));
  }

  ~Measured() {
    for (void* memory : taken) CHECK(cudaFree(memory));
    taken.clear();
  }

  void print() {
    for (Contender& c : contenders_) c.call();
    CHECK(cudaDeviceSynchronize());
    for (int round = 0; round < rounds; ++round) {
      for (size_t i = 0; i < contenders_.size(); ++i) {
        Contender& c = contenders_[round % 2 == 0 ? i : contenders_.size() - 1 - i];
        c.ms.push_back(milliseconds(c.call, d_ < 1000 ? 20 : 2));
      }
    }
    std::printf("(%d, %d, %d)\n", head_.tokens, head_.hidden, head_.vocab);
    for (Contender& c : contenders_) {
      std::sort(c.ms.begin(), c.ms.end());
      const double ms = c.ms[rounds / 2];
      std::printf("  %-44s %7.3f ms, %5.1f TFLOP/s\n", c.name, ms, 2e-9 * n_ * v_ * d_ / ms);
    }
  }

 private:
  struct Contender {
    const char* name;
    std::function<void()> call;
    std::vector<float> ms = {};
  };

  void blocks(bool stores) {
    for (int64_t first = 0; first < v_; first += block_columns) {
      const int columns = static_cast<int>(std::min<int64_t>(block_columns, v_ - first));
      auto* const z = reinterpret_cast<float*>(logits_);
      multiply<float>(x_, w_ + first * d_, z, head_.tokens, columns, head_.hidden, block_columns);
      const auto pass = stores ? sum_kernel<float, true> : sum_kernel<float, false>;
      pass<<<2 * multiprocessors_, 256>>>(z, block_columns, head_.tokens, columns, anchors_,
                                          sums_ + first / 1024 * n_, e_ + first, v_);
    }
  }
  void whole() {
    multiply<cutlass::bfloat16_t>(x_, w_, logits_, head_.tokens, head_.vocab, head_.hidden,
                                  head_.vocab);
    sum_kernel<bf16, false><<<2 * multiprocessors_, 256>>>(reinterpret_cast<bf16*>(logits_), v_,
                                                           head_.tokens, head_.vocab, anchors_,
                                                           sums_, nullptr, 0);
  }

  const Head head_;
  const int multiprocessors_;
  const int64_t n_ = head_.tokens, d_ = head_.hidden, v_ = head_.vocab;
  bf16 *const x_ = take<bf16>(n_ * d_), *const w_ = take<bf16>(v_ * d_),
              *const e_ = take<bf16>(n_ * v_);
  char* const logits_ = take<char>(std::max(n_ * v_ * 2, n_* block_columns * 4));
  float *const anchors_ = take<float>(n_), *const sums_ = take<float>(n_ * (v_ / 1024 + 1));
  logitless::LinearCrossEntropyForward loss_, kept_;
  logitless::Workspace scratch_;
  const logitless::Execution execution_{.device = {logitless::DeviceType::cuda, 0}};
  std::vector<Contender> contenders_{
      {"loss: ours", [this] { expect(logitless::run(loss_, scratch_, execution_)); }},
      {"loss: CUTLASS, blocks of f32, a pass", [this] { blocks(false); }},
      {"loss: CUTLASS, whole in bf16, a pass", [this] { whole(); }},
      {"loss and E: ours", [this] { expect(logitless::run(kept_, scratch_, execution_)); }},
      {"loss and E: CUTLASS, blocks of f32, a pass", [this] { blocks(true); }}};
};

}  // namespace

int main() {
  setenv("LOGITLESS_CUDA_KERNELS", "sm80", 1);
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s\n", properties.name);
  for (const Head& head : heads) Measured(head, properties.multiProcessorCount).print();
  return 0;
}

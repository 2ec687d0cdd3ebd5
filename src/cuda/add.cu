// SPDX-License-Identifier: Apache-2.0
// The parts of grad_input of a group's ranks, added in the ranks' order. The vectors may begin at
// any element: only if all are aligned, a thread takes four at a time.
#include "src/backend.h"
#include "src/cuda/ops.h"
#include "src/cuda/views.cuh"

namespace logitless::cuda {
namespace {

constexpr int threads = 256;
constexpr int width = 4;

struct AddArguments {
  const float* parts[most_added];
  int count;
  void* sum;
  DType dtype;
  int64_t elements, packed;  // the first `packed` are taken by fours
};

template <class T>
struct alignas(width * sizeof(T)) Four {
  T x[width];
};

template <class T>
__device__ void add_parts(const AddArguments& a) {
  T* sum = static_cast<T*>(a.sum);
  const int64_t first = int64_t{blockIdx.x} * threads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * threads;
  for (int64_t i = first; i < a.packed / width; i += step) {
    float4 total = reinterpret_cast<const float4*>(a.parts[0])[i];
    for (int p = 1; p < a.count; ++p) {
      const float4 part = reinterpret_cast<const float4*>(a.parts[p])[i];
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    reinterpret_cast<Four<T>*>(sum)[i] = {
        {from_f32<T>(total.x), from_f32<T>(total.y), from_f32<T>(total.z), from_f32<T>(total.w)}};
  }
  for (int64_t i = a.packed + first; i < a.elements; i += step) {
    float total = a.parts[0][i];
    for (int p = 1; p < a.count; ++p) total += a.parts[p][i];
    sum[i] = from_f32<T>(total);
  }
}

__global__ void __launch_bounds__(threads) add_kernel(const __grid_constant__ AddArguments a) {
  with_dtype_on_device(a.dtype, [&](auto element) { add_parts<decltype(element)>(a); });
}

}  // namespace

void add(std::span<const TensorView> parts, const TensorView& sum, const DeviceInfo& device,
         Stream* stream) {
  AddArguments a{};
  a.sum = sum.as<char>();
  a.dtype = sum.dtype;
  a.elements = sum.shape[0];
  const auto misaligned = [](const TensorView& v) {
    return reinterpret_cast<uintptr_t>(v.as<char>()) %
           static_cast<uintptr_t>(width * size_of(v.dtype));
  };
  bool aligned = misaligned(sum) == 0;
  for (const TensorView& v : parts) {
    a.parts[a.count++] = v.as<const float>();
    aligned = aligned && misaligned(v) == 0;
  }
  a.packed = aligned ? a.elements / width * width : 0;
  // Enough blocks to fill the device, each with many elements.
  const int64_t wanted = (a.elements / (aligned ? width : 1) + threads) / threads;
  const int64_t most = int64_t{device.multiprocessors} * 8;
  stream->launch("add", add_kernel, static_cast<unsigned>(wanted < most ? wanted : most), threads,
                 a);
}

}  // namespace logitless::cuda

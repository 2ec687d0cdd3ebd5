// SPDX-License-Identifier: Apache-2.0
// values *= factor in place, 16 bytes per thread and step, and the ends separately. Every thread
// reads the factor first and returns if it is 1, so that the common case costs one launch and no
// memory traffic.
#include "src/backend.h"
#include "src/cuda/ops.h"
#include "src/cuda/views.cuh"

namespace logitless::cuda {
namespace {

constexpr int threads = 256;

struct Values {
  void* data;
  int64_t count;
  int64_t head;  // elements before the first whole 16 bytes
  DType dtype;
};
struct ScaleArguments {
  Values each[most_scaled];
  int count;
  const float* factor;
};

template <class T>
__device__ void scale_values(const Values& v, float f) {
  T* values = static_cast<T*>(v.data);
  constexpr int width = Pack<T>::width;
  const int64_t first = int64_t{blockIdx.x} * threads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * threads;
  const int64_t packs = (v.count - v.head) / width;
  Pack<T>* body = reinterpret_cast<Pack<T>*>(values + v.head);
  for (int64_t i = first; i < packs; i += step) {
    Pack<T> pack = body[i];
#pragma unroll
    for (int k = 0; k < width; ++k) pack.x[k] = from_f32<T>(to_f32(pack.x[k]) * f);
    body[i] = pack;
  }
  const int64_t tail = v.head + packs * width, rest = v.head + (v.count - tail);
  for (int64_t i = first; i < rest; i += step) {
    T& x = values[i < v.head ? i : tail + (i - v.head)];
    x = from_f32<T>(to_f32(x) * f);
  }
}

__global__ void __launch_bounds__(threads) scale_kernel(const __grid_constant__ ScaleArguments a) {
  const float f = *a.factor;
  if (f == 1.0f) return;
  for (int n = 0; n < a.count; ++n) {
    with_dtype_on_device(a.each[n].dtype,
                         [&](auto element) { scale_values<decltype(element)>(a.each[n], f); });
  }
}

}  // namespace

void scale(std::span<const TensorView> values, const TensorView& factor, const DeviceInfo& device,
           Stream* stream) {
  ScaleArguments a{};
  a.factor = factor.as<const float>();
  int64_t wanted = 1;
  for (const TensorView& v : values) {
    const int64_t count = v.shape[0], size = size_of(v.dtype), width = 16 / size;
    const int64_t off = static_cast<int64_t>(reinterpret_cast<uintptr_t>(v.as<char>()) % 16) / size;
    const int64_t head = off == 0 ? 0 : width - off;
    a.each[a.count++] = {v.as<char>(), count, head < count ? head : count, v.dtype};
    const int64_t blocks = (count / width + threads) / threads;
    if (blocks > wanted) wanted = blocks;
  }
  // Enough blocks to fill the device, and few enough to exit quickly.
  const int64_t most = int64_t{device.multiprocessors} * 8;
  stream->launch("scale", scale_kernel, static_cast<unsigned>(wanted < most ? wanted : most),
                 threads, a);
}

}  // namespace logitless::cuda

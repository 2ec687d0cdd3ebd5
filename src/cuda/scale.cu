// SPDX-License-Identifier: Apache-2.0
// values *= factor, in place: 16 bytes a thread and step, the ends apart. Every thread reads the
// factor first and leaves where it is 1, so that the common case costs one launch and no traffic.
#include "src/cuda/numbers.cuh"
#include "src/cuda/scale.h"

namespace logitless::cuda {
namespace {

constexpr int threads = 256;

template <class T>
__global__ void __launch_bounds__(threads)
    scale_kernel(T* values, int64_t count, int64_t head, const float* factor) {
  const float f = *factor;
  if (f == 1.0f) return;
  constexpr int width = Pack<T>::width;
  const int64_t first = int64_t{blockIdx.x} * threads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * threads;
  const int64_t packs = (count - head) / width;
  Pack<T>* body = reinterpret_cast<Pack<T>*>(values + head);
  for (int64_t i = first; i < packs; i += step) {
    Pack<T> pack = body[i];
#pragma unroll
    for (int k = 0; k < width; ++k) pack.x[k] = from_f32<T>(to_f32(pack.x[k]) * f);
    body[i] = pack;
  }
  const int64_t tail = head + packs * width, rest = head + (count - tail);
  for (int64_t i = first; i < rest; i += step) {
    T& x = values[i < head ? i : tail + (i - head)];
    x = from_f32<T>(to_f32(x) * f);
  }
}

}  // namespace

void scale(const TensorView& values, const TensorView& factor, const DeviceInfo& device,
           Stream* stream) {
  with_dtype(values.dtype, [&](auto element) {
    using T = decltype(element);
    T* data = values.as<T>();
    const int64_t count = values.shape[0];
    const int64_t off = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % 16 / sizeof(T));
    const int64_t width = 16 / sizeof(T);
    int64_t head = off == 0 ? 0 : width - off;
    if (head > count) head = count;
    const int64_t wanted = (count / width + threads) / threads;
    const int64_t most = int64_t{device.multiprocessors} * 8;  // enough to fill it, few to skip
    stream->launch("scale", scale_kernel<T>, static_cast<unsigned>(wanted < most ? wanted : most),
                   threads, data, count, head, factor.as<const float>());
  });
}

}  // namespace logitless::cuda

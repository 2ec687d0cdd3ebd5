// SPDX-License-Identifier: Apache-2.0
// What a framework would provide: memory on the CPU or on a CUDA device, with its stream. CUDA is
// available if the example was built with it (EXAMPLE_CUDA).
#pragma once

#include <cstdio>
#include <cstring>
#include <new>
#include <vector>

#include "logitless/logitless.h"
#ifdef EXAMPLE_CUDA
#include <cuda_runtime_api.h>
#endif

struct Place {
  logitless::Device device{};
  void* stream = nullptr;
};

inline bool on_cuda(logitless::Device device) { return device.type == logitless::DeviceType::cuda; }

// Opens a place on device 0 with a stream, or returns false and says why there is none.
inline bool open_cuda(Place* place) {
  place->device.type = logitless::DeviceType::cuda;
  const logitless::Status status = logitless::warmup({.device = place->device});
  const char* why = status.message();
#ifdef EXAMPLE_CUDA
  cudaStream_t stream = nullptr;
  if (status.ok() && cudaStreamCreate(&stream) == cudaSuccess) {
    place->stream = stream;
    return true;
  }
#else
  if (status.ok()) why = "this example was built without CUDA";
#endif
  std::printf("skipped: %s\n", why);
  return false;
}

// Memory for one call, on CUDA in stream order; data() is nullptr if there is too little.
class Scratch {
 public:
  Scratch(logitless::Device device, size_t bytes, void* stream) : device_(device), stream_(stream) {
#ifdef EXAMPLE_CUDA
    if (on_cuda(device)) {
      if (cudaMallocAsync(&data_, bytes, static_cast<cudaStream_t>(stream)) != cudaSuccess) {
        data_ = nullptr;
      }
      return;
    }
#endif
    data_ = ::operator new(bytes, std::align_val_t{64}, std::nothrow);
  }
  ~Scratch() {
#ifdef EXAMPLE_CUDA
    if (on_cuda(device_)) {
      if (data_ != nullptr) (void)cudaFreeAsync(data_, static_cast<cudaStream_t>(stream_));
      return;
    }
#endif
    ::operator delete(data_, std::align_val_t{64});
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* data() const { return data_; }

 private:
  [[maybe_unused]] logitless::Device device_;  // device_ and stream_ serve only where there is CUDA
  [[maybe_unused]] void* stream_;
  void* data_ = nullptr;
};

// A copy of `values` on the device.
class Memory {
 public:
  template <class T>
  Memory(const Place& place, const std::vector<T>& values)
      : scratch_(place.device, values.size() * sizeof(T), place.stream) {
#ifdef EXAMPLE_CUDA
    if (on_cuda(place.device)) {
      (void)cudaMemcpyAsync(data(), values.data(), values.size() * sizeof(T),
                            cudaMemcpyHostToDevice, static_cast<cudaStream_t>(place.stream));
      return;
    }
#endif
    std::memcpy(data(), values.data(), values.size() * sizeof(T));
  }
  void* data() const { return scratch_.data(); }

  template <class T>
  void read(const Place& place, std::vector<T>* values) const {
#ifdef EXAMPLE_CUDA
    if (on_cuda(place.device)) {
      const auto stream = static_cast<cudaStream_t>(place.stream);
      (void)cudaMemcpyAsync(values->data(), data(), values->size() * sizeof(T),
                            cudaMemcpyDeviceToHost, stream);
      (void)cudaStreamSynchronize(stream);
      return;
    }
#endif
    (void)place;
    std::memcpy(values->data(), data(), values->size() * sizeof(T));
  }

 private:
  Scratch scratch_;
};

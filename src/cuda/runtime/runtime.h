// SPDX-License-Identifier: Apache-2.0
// Wraps the CUDA runtime for the backend: errors become statuses, launches report only their own
// errors, and the caller's current device is restored.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "logitless/logitless.h"
#include "src/cuda/runtime/api.h"
#include "src/cuda/runtime/driver.h"
#include "src/cuda/runtime/kernel_file.h"
#include "src/message.h"

namespace logitless::cuda {

inline Status cuda_error(const char* what, cudaError_t code) {
  if (code == cudaSuccess) return {};
  (void)api().take_error();  // clears our own error: the caller must not see it
  return error(StatusCode::device_error, "cuda: %s failed: %s (%s)", what, cudaGetErrorString(code),
               cudaGetErrorName(code));
}

// The engine of linear ops for every device (linear/engine.h).
inline constexpr char kernels_of_every_device[] = "portable";
inline constexpr char kernels_of_sm80[] = "sm80";

// What planners and launches need to know of a device; read once per process.
struct DeviceInfo {
  int index = 0;
  int major = 0, minor = 0;
  int multiprocessors = 0;
  int64_t shared_bytes_per_block = 0;  // the most that a block can ask for
  char name[64] = {};
  // the engine named by LOGITLESS_CUDA_KERNELS; empty: the best one
  char kernels[24] = {};
  // Whether launches may be early (early.cuh), also in a graph: drivers for CUDA 12.3 and later.
  bool launches_early = false;
  // Whether kernels may use features new in sm_90. Not if an engine for sm_80 is named, so that a
  // newer device can run what sm_80 runs (tests, bug reports).
  bool has_clusters() const {
    return major >= 9 && std::strcmp(kernels, kernels_of_every_device) != 0 &&
           std::strcmp(kernels, kernels_of_sm80) != 0;
  }
};

// Returns backend_unavailable if there is no driver, a driver that is too old, or no device.
Status count_devices(int* count);
// Returns wrong_device if there is no such index, and backend_unavailable if that device is too old
// or does not answer, which does not affect other devices.
Status find_device(int index, const DeviceInfo** info);
// Finds the first device that works, or returns why device 0 does not.
Status find_first_device(const DeviceInfo** info);

// Makes the device current during this object's life, then restores the previous one. Also gives
// the thread a context: a thread that has not called CUDA yet (autograd's, say) has a current
// device but no context, and without one the driver creates no tensor map.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index) {
    if (api().current_device(&before_) != cudaSuccess) {
      (void)api().take_error();
      before_ = -1;
    }
    changed_ = before_ != index;
    if (changed_ || !has_context()) status_ = cuda_error("cudaSetDevice", api().set_device(index));
  }
  ~CurrentDevice() {
    if (changed_ && before_ >= 0 && api().set_device(before_) != cudaSuccess) {
      (void)api().take_error();
    }
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  const Status& status() const { return status_; }

 private:
  int before_ = -1;
  bool changed_ = false;
  Status status_;
};

struct LaunchShape {
  dim3 blocks;
  int threads = 0;
  size_t shared_bytes = 0;
  int cluster = 1;  // blocks along x
  // launched early (early.cuh); only for code compiled for sm_90, if launches_early
  bool early = false;
};

// Enqueues the launches of one call, in order, on its stream. After the first error it launches
// nothing more.
class Stream {
 public:
  explicit Stream(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {}
  cudaStream_t get() const { return stream_; }
  const Status& status() const { return status_; }
  bool ok() const { return status_.ok(); }
  void fail(const Status& status) {
    if (status_.ok()) status_ = status;
  }

  // Calls `enqueue`, which uses this stream, twice. The first call launches nothing but does
  // everything that can be refused, so that a refused call has written nothing; the second call
  // launches.
  template <class F>
  void prepare_and_run(F&& enqueue) {
    preparing_ = true;
    enqueue();
    preparing_ = false;
    next_answer_ = 0;
    if (ok()) enqueue();
  }
  bool preparing() const { return preparing_; }

  // Returns what `ask` returns; `ask` may fail this stream. The first most_answers questions asked
  // while preparing are not asked again: their answers are stored in order.
  template <class T, class Ask>
  T answer(Ask&& ask) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(answers_[0]));
    const int i = next_answer_++;
    T value;
    if (!preparing_ && i < answers_made_) {
      std::memcpy(&value, answers_[i], sizeof(T));
      return value;
    }
    value = ask();
    if (preparing_ && i < most_answers) {
      std::memcpy(answers_[i], &value, sizeof(T));
      answers_made_ = i + 1;
    }
    return value;
  }

  // Launches kernel<<<blocks, threads>>>(arguments...), or nothing if there are no blocks.
  template <class... Parameters, class... Arguments>
  void launch(const char* name, void (*kernel)(Parameters...), dim3 blocks, int threads,
              const Arguments&... arguments) {
    launch_config(name, kernel, LaunchShape{blocks, threads}, arguments...);
  }
  template <class... Parameters, class... Arguments>
  void launch_config(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape,
                     const Arguments&... arguments) {
    if (!ok() || shape.blocks.x == 0 || shape.blocks.y == 0 || shape.blocks.z == 0) return;
    enqueue_with<Parameters...>(name, reinterpret_cast<const void*>(kernel), shape, arguments...);
  }
  // Copies within the device's memory.
  void copy(void* to, const void* from, int64_t bytes);

 private:
  // Converts the arguments to the kernel's parameters, which live until it is enqueued.
  template <class... Parameters>
  void enqueue_with(const char* name, const void* kernel, const LaunchShape& shape,
                    const Parameters&... parameters) {
    const void* values[] = {&parameters...};
    static constexpr Parameter kinds[] = {{sizeof(Parameters), clear_padding<Parameters>}...};
    enqueue(name, kernel, shape, const_cast<void**>(values), kinds, sizeof...(Parameters));
  }
  void enqueue(const char* name, const void* kernel, const LaunchShape& shape, void** values,
               const Parameter* parameters, int count);
  template <class T>
  static void clear_padding([[maybe_unused]] void* value) {
#ifdef __has_builtin
#if __has_builtin(__builtin_clear_padding)
    __builtin_clear_padding(static_cast<T*>(value));
#endif
#endif
  }

  static constexpr int most_answers = 32;

  cudaStream_t stream_;
  Status status_;
  bool preparing_ = false;
  int next_answer_ = 0, answers_made_ = 0;
  unsigned char answers_[most_answers][128];  // the largest is a tensor map
};

// Whether the compiled code of `kernel` for the current device has clusters and early launches,
// which are new in sm_90; PTX of an older architecture has neither.
bool is_compiled_for_hopper(const void* kernel, const DeviceInfo& device, Stream* stream);

// A grid of x blocks by y of another axis, of which the grid's y takes up to 65535 and z the rest.
// block_of_second_axis (linear/linear.cuh) returns a block's index, which may be past the end.
inline dim3 two_axes(unsigned x, int64_t y) {
  const int64_t planes = (y + 65534) / 65535;
  return {x, static_cast<unsigned>(planes == 0 ? 0 : (y + planes - 1) / planes),
          static_cast<unsigned>(planes)};
}

inline unsigned blocks_for(int64_t items, int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

// Allocates consecutive ranges of a workspace, each at a multiple of 256 bytes. Without a base it
// only counts.
class Arena {
 public:
  static constexpr uint64_t alignment = 256;
  explicit Arena(void* base = nullptr) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    const uint64_t start = used_;
    used_ += (static_cast<uint64_t>(count) * sizeof(T) + alignment - 1) / alignment * alignment;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + start);
  }
  uint64_t used() const { return used_; }
  // back_to() makes later ranges overlap those taken since `start`, for arrays that are not in use
  // at the same time; at_least() then makes used() at least the end of the overlapped ranges.
  void back_to(uint64_t start) { used_ = start; }
  void at_least(uint64_t end) { used_ = used_ < end ? end : used_; }

 private:
  char* base_;
  uint64_t used_ = 0;
};

}  // namespace logitless::cuda

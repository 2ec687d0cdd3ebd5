// SPDX-License-Identifier: Apache-2.0
// A backend plans and runs the calls of one type of device.
#pragma once

#include <cstddef>
#include <cstring>
#include <new>
#include <span>
#include <type_traits>

#include "src/call.h"
#include "src/message.h"

namespace logitless {

// What a backend decided about a call and its workspace. Fixed storage, because `run` allocates
// nothing.
class Decisions {
 public:
  template <class T>
  void set(const T& value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(bytes_));
    static_assert(alignof(T) <= alignment);
    new (bytes_) T(value);
  }
  template <class T>
  const T& get() const {
    return *std::launder(reinterpret_cast<const T*>(bytes_));
  }

 private:
  static constexpr size_t alignment = 16;
  alignas(alignment) std::byte bytes_[2048];
};

struct Backend {
  virtual ~Backend() = default;
  // Plans a validated `call`. Pure and cheap; data pointers may be null. `recommended` may be left
  // unset if `given` bytes are at least the minimum.
  virtual Status workspace(const Call& call, uint64_t given, WorkspaceSize* size) const = 0;
  // Decides what depends only on a validated `call` and on its `bytes` of workspace, at least the
  // minimum. The only thing it reads of an address is Tensor::alignment.
  virtual Status decide(const Call&, uint64_t /*bytes*/, Decisions*) const { return {}; }
  // Runs a validated `call` in a validated workspace: aligned, with the bytes given to `decide`.
  virtual Status run(const Call& call, const Decisions& decided,
                     const Workspace& workspace) const = 0;
  // Whether `run` runs only call.part; otherwise part 1 runs everything.
  virtual bool divides(const Call&) const { return false; }
  virtual const char* name() const = 0;
  // Writes one line about the device or the implementation; returns the reason if none is usable.
  virtual Status describe(char* text, size_t bytes) const = 0;
  // Multiplies each of `values` by `factor`, all validated.
  virtual Status scale(std::span<const TensorView>, const TensorView&, const Execution&) const {
    return error(StatusCode::not_supported, "scale: %s has none; allowed: cuda", name());
  }
  // sum = parts[0] + parts[1] + ..., all validated.
  virtual Status add(std::span<const TensorView>, const TensorView&, const Execution&) const {
    return error(StatusCode::not_supported, "add: %s has none; allowed: cuda", name());
  }
  // See logitless_warmup (c.h).
  virtual Status warmup(const Execution&) const { return {}; }
};

const Backend& reference_backend();
const Backend& cpu_backend();
// cpu_keeps and cuda_keeps answer logitless_keeps for their backends.
bool cpu_keeps(DType dtype, const LossOptions& options);
#ifdef LOGITLESS_WITH_CUDA
bool cuda_keeps(DType dtype, const LossOptions& options);
// Returns nullptr and the reason if there is no usable driver. Devices are checked when used.
const Backend* cuda_backend(Status* status);
#endif

#ifdef LOGITLESS_WITH_WEBGPU
// Returns nullptr and the reason if there is no wgpu-native or no adapter.
const Backend* webgpu_backend(Status* status);
#endif

// Returns the backend for a device type, or nullptr and the reason in `status`.
const Backend* find_backend(DeviceType type, Status* status);
// Whether Backward uses what Forward keeps on devices of this type; none need exist.
bool keeps(DeviceType type, DType dtype, const LossOptions& options);

inline constexpr int most_scaled = 4;  // vectors that one call may scale
Status scale_values(std::span<const TensorView> values, const TensorView& factor,
                    const Execution& execution);
inline constexpr int most_added = 16;  // vectors that one call may add
Status add_values(std::span<const TensorView> parts, const TensorView& sum,
                  const Execution& execution);

}  // namespace logitless

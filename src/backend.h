// SPDX-License-Identifier: Apache-2.0
// A backend is a small named object that plans and runs every call: run.h calls it.
#pragma once

#include <cstddef>
#include <cstring>
#include <new>
#include <span>
#include <type_traits>

#include "src/call.h"
#include "src/message.h"

namespace logitless {

// What a backend decided of a call in so many bytes of workspace. It lies in fixed storage, because
// `run` allocates nothing.
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
  // Plans a validated `call`; this is pure and cheap, and data pointers may be null. What is
  // recommended may be left out where `given` bytes are the minimum or more.
  virtual Status workspace(const Call& call, uint64_t given, WorkspaceSize* size) const = 0;
  // Decides what depends on a validated `call` and on its `bytes` of workspace, the minimum or
  // more, alone. Of an address it looks at Tensor::alignment.
  virtual Status decide(const Call&, uint64_t /*bytes*/, Decisions*) const { return {}; }
  // Runs `call`; it and the workspace (aligned, of the bytes that were decided about) are
  // validated.
  virtual Status run(const Call& call, const Decisions& decided,
                     const Workspace& workspace) const = 0;
  virtual const char* name() const = 0;
  // Writes one line: ISA or device, threads; or says why no device of this backend serves.
  virtual Status describe(char* text, size_t bytes) const = 0;
  // Multiplies each of `values` by `factor`; all are validated.
  virtual Status scale(std::span<const TensorView>, const TensorView&, const Execution&) const {
    return error(StatusCode::not_supported, "scale: %s has none; allowed: cuda", name());
  }
  // Loads what the first run on the device would load.
  virtual Status warmup(const Execution&) const { return {}; }
};

const Backend& reference_backend();
const Backend& cpu_backend();
// This and its like decide for a backend, and answer logitless_keeps.
bool cpu_keeps(DType dtype, const LossOptions& options);
#ifdef LOGITLESS_WITH_CUDA
bool cuda_keeps(DType dtype, const LossOptions& options);
// Returns nullptr without a usable driver, and the reason. Each device answers for itself.
const Backend* cuda_backend(Status* status);
#endif

#ifdef LOGITLESS_WITH_WEBGPU
// Returns nullptr without wgpu-native or an adapter, and the reason.
const Backend* webgpu_backend(Status* status);
#endif

// Returns the backend for a device type, or nullptr and the reason in `status`.
const Backend* find_backend(DeviceType type, Status* status);
// Returns whether Backward uses what Forward keeps on such a device, which need not be there.
bool keeps(DeviceType type, DType dtype, const LossOptions& options);

inline constexpr int most_scaled = 4;  // a call takes at most so many vectors
Status scale_values(std::span<const TensorView> values, const TensorView& factor,
                    const Execution& execution);

}  // namespace logitless

// SPDX-License-Identifier: Apache-2.0
// A backend: a small named object that implements every op. Adding an op is one struct in ops.h and
// one word in `Backend`; a backend that forgets it does not compile.
#pragma once

#include <span>

#include "logitless/logitless.h"
#include "src/message.h"

namespace logitless {

template <class Op>
struct Implements {
  virtual ~Implements() = default;
  // Pure and cheap; `op` is validated. Data pointers may be null.
  virtual Status workspace(const Op& op, const Execution& execution, WorkspaceSize* size) const = 0;
  // `op` and the workspace (>= minimum, aligned) are validated.
  virtual Status run(const Op& op, const Workspace& workspace,
                     const Execution& execution) const = 0;
};

struct Backend : Implements<Softmax>,
                 Implements<CrossEntropyForward>,
                 Implements<CrossEntropyBackward>,
                 Implements<CrossEntropyForwardBackward>,
                 Implements<LinearCrossEntropyForward>,
                 Implements<LinearCrossEntropyBackward>,
                 Implements<LinearCrossEntropyForwardBackward> {
  virtual const char* name() const = 0;
  // Writes one line: ISA or device, threads. Or says why no device of this backend serves.
  virtual Status describe(char* text, size_t bytes) const = 0;
  // Each of values *= factor; all are validated.
  virtual Status scale(std::span<const TensorView>, const TensorView&, const Execution&) const {
    return error(StatusCode::not_supported, "scale: %s has none; allowed: cuda", name());
  }
  // Loads what the first run on the device would load.
  virtual Status warmup(const Execution&) const { return {}; }
};

namespace detail {

template <class Base, class Calls, class... Ops>
struct Calling : Base {};
template <class Base, class Calls, class Op, class... Rest>
struct Calling<Base, Calls, Op, Rest...> : Calling<Base, Calls, Rest...> {
  Status workspace(const Op& op, const Execution& execution, WorkspaceSize* size) const override {
    return Calls::workspace(op, execution, size);
  }
  Status run(const Op& op, const Workspace& workspace, const Execution& execution) const override {
    return Calls::run(op, workspace, execution);
  }
};

}  // namespace detail

// A backend whose ops are the static functions of Calls: workspace(op, execution, size) and run(op,
// workspace, execution).
template <class Calls>
using BackendOf =
    detail::Calling<Backend, Calls, Softmax, CrossEntropyForward, CrossEntropyBackward,
                    CrossEntropyForwardBackward, LinearCrossEntropyForward,
                    LinearCrossEntropyBackward, LinearCrossEntropyForwardBackward>;

const Backend& reference_backend();
const Backend& cpu_backend();
#ifdef LOGITLESS_WITH_CUDA
// nullptr without a usable driver, and the reason. Each device answers for itself.
const Backend* cuda_backend(Status* status);
#endif

#ifdef LOGITLESS_WITH_WEBGPU
// nullptr without wgpu-native or an adapter, and the reason.
const Backend* webgpu_backend(Status* status);
#endif

// The backend for a device type, or nullptr and the reason in `status`.
const Backend* find_backend(DeviceType type, Status* status);

}  // namespace logitless

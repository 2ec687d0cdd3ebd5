// SPDX-License-Identifier: Apache-2.0
// The reference as a backend: evaluates in double, then rounds every value once. No workspace; it
// allocates, which the other backends never do.
#include "src/backend.h"

#include <new>
#include <stdexcept>

#include "src/reference/numbers.h"
#include "src/reference/reference.h"

namespace logitless {
namespace {

template <class Op>
Status evaluate_and_write(const Op& op) {
  try {
    const reference::Result result = reference::evaluate(op, {}, false);
    if (!result.status.ok()) return result.status;
    logitless_op fields{};
    for_each_tensor(
        op, fields,
        [&](const char* name, Access access, const TensorView& view, const logitless_tensor*) {
          const auto found = result.outputs.find(name);
          if (access == Access::read || found == result.outputs.end()) return;
          reference::write(found->second.value, view);
        });
    return {};
  } catch (const std::bad_alloc&) {
    return error(StatusCode::internal, "out of memory");
  } catch (const std::length_error&) {  // more than a vector can hold
    return error(StatusCode::internal, "out of memory");
  } catch (const std::exception& e) {
    return error(StatusCode::internal, "%s", e.what());
  }
}

struct Calls {
  template <class Op>
  static Status workspace(const Op&, const Execution&, WorkspaceSize* size) {
    *size = {.minimum = 0, .recommended = 0, .alignment = 64};
    return {};
  }
  template <class Op>
  static Status run(const Op& op, const Workspace&, const Execution&) {
    return evaluate_and_write(op);
  }
};

struct ReferenceBackend final : BackendOf<Calls> {
  const char* name() const override { return "reference"; }
  Status describe(char* text, size_t bytes) const override {
    std::snprintf(text, bytes, "double, plain loops, one thread");
    return {};
  }
};

}  // namespace

const Backend& reference_backend() {
  static const ReferenceBackend backend;
  return backend;
}

}  // namespace logitless

// SPDX-License-Identifier: Apache-2.0
// The reference as a backend: evaluates in double, then rounds every value once. It needs no
// workspace, because it allocates its memory.
#include "src/backend.h"

#include <new>
#include <stdexcept>

#include "src/reference/numbers.h"
#include "src/reference/reference.h"

namespace logitless {
namespace {

Status evaluate_and_write(const Call& call) {
  try {
    const reference::Result result = reference::evaluate(call, {}, false);
    if (!result.status.ok()) return result.status;
    for (const Field& field : call.fields()) {
      const auto found = result.outputs.find(field.name);
      if (!field.written() || found == result.outputs.end()) continue;
      reference::write(found->second.value, *field.view);
    }
    if (call.fault) *call.fault.as<int32_t>() |= result.fault;
    return {};
  } catch (const std::bad_alloc&) {
    return error(StatusCode::internal, "out of memory");
  } catch (const std::length_error&) {  // more elements than a vector can hold
    return error(StatusCode::internal, "out of memory");
  } catch (const std::exception& e) {
    return error(StatusCode::internal, "%s", e.what());
  }
}

struct ReferenceBackend final : Backend {
  const char* name() const override { return "reference"; }
  Status workspace(const Call&, uint64_t, WorkspaceSize* size) const override {
    *size = {.minimum = 0, .recommended = 0, .alignment = 64};
    return {};
  }
  Status run(const Call& call, const Decisions&, const Workspace&) const override {
    return evaluate_and_write(call);
  }
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

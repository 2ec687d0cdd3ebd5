// SPDX-License-Identifier: Apache-2.0
// The two verbs: find the backend, validate, run.
#include "src/logitless.h"

#include "src/backend.h"
#include "src/validate.h"

namespace logitless {

const Backend* find_backend(DeviceType type, Status* status) {
  switch (type) {
    case DeviceType::cpu:
      return &cpu_backend();
    case DeviceType::reference:
      return &reference_backend();
    case DeviceType::cuda:
#ifdef LOGITLESS_WITH_CUDA
      return cuda_backend(status);
#else
      *status = error(StatusCode::backend_unavailable, "cuda: this library was built without it");
      return nullptr;
#endif
    case DeviceType::webgpu:
#ifdef LOGITLESS_WITH_WEBGPU
      return webgpu_backend(status);
#else
      *status = error(StatusCode::backend_unavailable, "webgpu: this library was built without it");
      return nullptr;
#endif
  }
  *status = error(StatusCode::unknown_enum,
                  "execution.device.type is %d; allowed: 0 (cpu) to 3 (reference)",
                  static_cast<int>(type));
  return nullptr;
}

namespace {

// The backend first: a device that this library does not have is said before what is wrong with the
// op.
template <class Op>
Status plan(const Op& op, const Execution& execution, const Implements<Op>** backend,
            WorkspaceSize* size) {
  Status status;
  *backend = find_backend(execution.device.type, &status);
  if (status.ok()) status = validate(op, execution);
  if (status.ok()) status = (*backend)->workspace(op, execution, size);
  return status;
}

}  // namespace

template <class Op>
Status workspace_of(const Op& op, const Execution& execution, WorkspaceSize* size) {
  const Implements<Op>* backend = nullptr;
  return plan(op, execution, &backend, size);
}

template <class Op>
Status run_op(const Op& op, const Workspace& workspace, const Execution& execution) {
  const Implements<Op>* backend = nullptr;
  WorkspaceSize size;
  Status status = plan(op, execution, &backend, &size);
  if (status.ok()) status = validate_data(op, workspace, size);
  if (status.ok()) status = backend->run(op, workspace, execution);
  return status;
}

#define LOGITLESS_INSTANTIATE(Op)                                            \
  template Status workspace_of(const Op&, const Execution&, WorkspaceSize*); \
  template Status run_op(const Op&, const Workspace&, const Execution&);
LOGITLESS_INSTANTIATE(Softmax)
LOGITLESS_INSTANTIATE(CrossEntropyForward)
LOGITLESS_INSTANTIATE(CrossEntropyBackward)
LOGITLESS_INSTANTIATE(CrossEntropyForwardBackward)
LOGITLESS_INSTANTIATE(LinearCrossEntropyForward)
LOGITLESS_INSTANTIATE(LinearCrossEntropyBackward)
LOGITLESS_INSTANTIATE(LinearCrossEntropyForwardBackward)
#undef LOGITLESS_INSTANTIATE

}  // namespace logitless

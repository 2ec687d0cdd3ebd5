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
Status plan(const Call& call, const Backend** backend, WorkspaceSize* size) {
  Status status;
  *backend = find_backend(call.execution.device.type, &status);
  if (status.ok()) status = validate(call);
  if (status.ok()) status = (*backend)->workspace(call, size);
  return status;
}

}  // namespace

Status workspace_of(const Call& call, WorkspaceSize* size) {
  const Backend* backend = nullptr;
  return plan(call, &backend, size);
}

Status run(const Call& call, const Workspace& workspace) {
  const Backend* backend = nullptr;
  WorkspaceSize size;
  Status status = plan(call, &backend, &size);
  if (status.ok()) status = validate_data(call, workspace, size);
  if (status.ok()) status = backend->run(call, workspace);
  return status;
}

}  // namespace logitless

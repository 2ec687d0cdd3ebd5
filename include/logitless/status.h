// SPDX-License-Identifier: Apache-2.0
// The result of a call. No exceptions cross the library's boundary.
#pragma once

#include <cstdint>
#include <cstring>

#include "logitless/c.h"
#include "logitless/cxx20.h"

namespace logitless {

enum class StatusCode : int32_t {
  ok = LOGITLESS_OK,
  invalid_argument = LOGITLESS_INVALID_ARGUMENT,
  wrong_shape = LOGITLESS_WRONG_SHAPE,
  wrong_dtype = LOGITLESS_WRONG_DTYPE,
  wrong_device = LOGITLESS_WRONG_DEVICE,
  misaligned = LOGITLESS_MISALIGNED,
  unknown_enum = LOGITLESS_UNKNOWN_ENUM,
  workspace_too_small = LOGITLESS_WORKSPACE_TOO_SMALL,
  target_out_of_range = LOGITLESS_TARGET_OUT_OF_RANGE,
  backend_unavailable = LOGITLESS_BACKEND_UNAVAILABLE,
  not_supported = LOGITLESS_NOT_SUPPORTED,
  device_error = LOGITLESS_DEVICE_ERROR,
  internal = LOGITLESS_INTERNAL,
};

// Ok, or a code and a message that names the field, its value and what is allowed.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, const char* message) {
    c_.code = static_cast<int32_t>(code);
    std::strncpy(c_.message, message, sizeof(c_.message) - 1);
  }
  bool ok() const { return c_.code == LOGITLESS_OK; }
  StatusCode code() const { return static_cast<StatusCode>(c_.code); }
  const char* message() const { return c_.message; }
  logitless_status* c() { return &c_; }
  const logitless_status* c() const { return &c_; }

 private:
  logitless_status c_ = LOGITLESS_STATUS_INIT;
};

}  // namespace logitless

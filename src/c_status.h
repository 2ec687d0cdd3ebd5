// SPDX-License-Identifier: Apache-2.0
// How the C entry points return a status: nothing is thrown, and nothing is written beyond the
// caller's struct.
#pragma once

#include <cstddef>
#include <cstring>
#include <exception>
#include <new>

#include "logitless/logitless.h"
#include "src/message.h"

namespace logitless {

// Writes no more than the caller's struct holds, and keeps its struct_size.
template <class T>
void write_struct(const T& source, T* destination) {
  uint32_t size;
  std::memcpy(&size, destination, sizeof(size));
  if (size > sizeof(T)) size = sizeof(T);
  if (size <= sizeof(uint32_t)) return;
  std::memcpy(reinterpret_cast<char*>(destination) + sizeof(uint32_t),
              reinterpret_cast<const char*>(&source) + sizeof(uint32_t), size - sizeof(uint32_t));
}

inline int32_t report(const Status& status, logitless_status* out) {
  if (out != nullptr) {
    uint32_t size;
    std::memcpy(&size, out, sizeof(size));
    if (size >= offsetof(logitless_status, message)) write_struct(*status.c(), out);
    // A shorter message still ends with a NUL.
    if (size > offsetof(logitless_status, message) && size < sizeof(logitless_status)) {
      reinterpret_cast<char*>(out)[size - 1] = 0;
    }
  }
  return status.c()->code;
}

// No exception crosses the C boundary, neither of a thread pool's allocation nor of a caller's
// executor.
template <class F>
Status guarded(F&& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::internal, "out of memory");
  } catch (const std::exception& e) {
    return error(StatusCode::internal, "%s", e.what());
  } catch (...) {
    return Status(StatusCode::internal, "an exception of unknown type");
  }
}

}  // namespace logitless

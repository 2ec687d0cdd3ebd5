// SPDX-License-Identifier: Apache-2.0
// Finds wgpu-native: the file named by LOGITLESS_WEBGPU_LIBRARY, else the library that the program
// has loaded, else one with a usual name.
#include "src/webgpu/library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>

#include "src/message.h"
#include "src/webgpu/native.h"

namespace logitless::webgpu {
namespace {

// The version of the header; other versions have different enums and structs.
constexpr uint32_t kMajor = 29;

void* open_library() {
  // secure_getenv ignores the variable in a program with more rights than its user, because the
  // file's code would get those rights.
  if (const char* named = secure_getenv("LOGITLESS_WEBGPU_LIBRARY"); named != nullptr) {
    return dlopen(named, RTLD_NOW | RTLD_LOCAL);
  }
  if (dlsym(RTLD_DEFAULT, "wgpuCreateInstance") != nullptr) return dlopen(nullptr, RTLD_NOW);
  for (const char* name : {"libwgpu_native-release.so", "libwgpu_native.so"}) {
    if (void* found = dlopen(name, RTLD_NOW | RTLD_LOCAL); found != nullptr) return found;
  }
  return nullptr;
}

Status load(Library* library) {
  void* handle = open_library();
  if (handle == nullptr) {
    return error(StatusCode::backend_unavailable,
                 "webgpu: no wgpu-native was found (LOGITLESS_WEBGPU_LIBRARY "
                 "names its file): %s",
                 dlerror());
  }
#define LOGITLESS_LOAD(name)                                                              \
  library->name = reinterpret_cast<decltype(library->name)>(dlsym(handle, "wgpu" #name)); \
  if (library->name == nullptr) {                                                         \
    return Status(StatusCode::backend_unavailable,                                        \
                  "webgpu: the library found is no wgpu-native: it has no wgpu" #name);   \
  }
  LOGITLESS_WEBGPU_FUNCTIONS(LOGITLESS_LOAD)
#undef LOGITLESS_LOAD
  const uint32_t version = library->GetVersion();
  if (version >> 24 != kMajor) {
    return error(StatusCode::backend_unavailable,
                 "webgpu: the wgpu-native found is of version %u; allowed: %u", version >> 24,
                 kMajor);
  }
  return {};
}

}  // namespace

// Only success is cached, because the program may load or name a library later.
const Library* find_library(Status* status) {
  static std::mutex mutex;
  static Library library;
  static bool found = false;
  const std::lock_guard lock(mutex);
  *status = found ? Status() : load(&library);
  found = status->ok();
  return found ? &library : nullptr;
}

}  // namespace logitless::webgpu

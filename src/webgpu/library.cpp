// SPDX-License-Identifier: Apache-2.0
// Finds wgpu-native: the file that LOGITLESS_WEBGPU_LIBRARY names, else what
// the program has loaded itself, else by its usual names.
#include "src/webgpu/library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "src/message.h"
#include "src/webgpu/native.h"

namespace logitless::webgpu {
namespace {

// The header's enums and structs are this version's: another's differ.
constexpr uint32_t kMajor = 29;

void* open_library() {
  if (const char* named = std::getenv("LOGITLESS_WEBGPU_LIBRARY"); named != nullptr) {
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

const Library* find_library(Status* status) {
  static Library library;
  static const Status found = load(&library);
  *status = found;
  return found.ok() ? &library : nullptr;
}

}  // namespace logitless::webgpu

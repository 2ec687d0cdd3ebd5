// SPDX-License-Identifier: Apache-2.0
// The library gives out its device's handles through the C interface; this program's own device
// class creates buffers with them and reads them back.
#include "tests/guards/bits_webgpu.h"

#ifdef LOGITLESS_WITH_WEBGPU
#include <cstdlib>

#include "src/webgpu/shaders.h"
#include "tests/support/device_webgpu.h"

namespace logitless::webgpu {

// Only satisfies the linker: the program creates no pipelines.
const char* shader_text(const char*) { return nullptr; }

}  // namespace logitless::webgpu
#endif

namespace logitless::guards {

#ifdef LOGITLESS_WITH_WEBGPU

conformance::Found find_webgpu() {
  // As in tests/webgpu/webgpu.cmake, unless the caller has set them.
  setenv("LOGITLESS_WEBGPU_LIBRARY", LOGITLESS_WEBGPU_LIBRARY_FILE, 0);
  setenv("LOGITLESS_WEBGPU_LIMITS", "default", 0);
  if (*LOGITLESS_WEBGPU_DRIVER != '\0') {
    setenv("VK_DRIVER_FILES", LOGITLESS_WEBGPU_DRIVER, 0);
    setenv("VK_ICD_FILENAMES", LOGITLESS_WEBGPU_DRIVER, 0);
  }
  Status status;
  void *instance = nullptr, *device = nullptr, *queue = nullptr;
  logitless_webgpu_device(0, &instance, &device, &queue, status.c());
  const webgpu::Library* library = status.ok() ? webgpu::find_library(&status) : nullptr;
  if (library == nullptr) return {"webgpu", nullptr, status.message()};
  static webgpu::NativeDevice native(*library, static_cast<WGPUInstance>(instance), nullptr,
                                     static_cast<WGPUDevice>(device),
                                     static_cast<WGPUQueue>(queue));
  static const conformance::WebGpuTestDevice found(&native);
  return {"webgpu", &found, ""};
}

#else

conformance::Found find_webgpu() { return {"webgpu", nullptr, "this build has no WebGPU"}; }

#endif

}  // namespace logitless::guards

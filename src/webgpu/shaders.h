// SPDX-License-Identifier: Apache-2.0
// The text of shaders/NAME.wgsl, preceded by the files of shaders/common that it uses, embedded by
// cmake/embed_shaders.cmake; nullptr for an unknown name.
#pragma once

namespace logitless::webgpu {

const char* shader_text(const char* name);

}  // namespace logitless::webgpu

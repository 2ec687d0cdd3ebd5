// SPDX-License-Identifier: Apache-2.0
// The text of shaders/NAME.wgsl with the files of shaders/common that it uses in front of it,
// compiled in (cmake/embed_shaders.cmake); nullptr for another name.
#pragma once

namespace logitless::webgpu {

const char* shader_text(const char* name);

}  // namespace logitless::webgpu

// SPDX-License-Identifier: Apache-2.0
// Returns the text of shaders/NAME.wgsl with the files of shaders/common that it uses in front of
// it, compiled in (cmake/embed_shaders.cmake), or nullptr for another name.
#pragma once

namespace logitless::webgpu {

const char* shader_text(const char* name);

}  // namespace logitless::webgpu

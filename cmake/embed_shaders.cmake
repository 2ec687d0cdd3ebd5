# cmake -D "FILES=a.wgsl;b.wgsl" -D OUTPUT=x.cpp -P embed_shaders.cmake: the files' text as shader_text (src/webgpu/shaders.h).
set(entries)
foreach(file ${FILES})
  get_filename_component(name ${file} NAME_WE)
  file(READ ${file} text)
  string(APPEND entries "    {\"${name}\", R\"wgsl(${text})wgsl\"},\n")
endforeach()
file(WRITE ${OUTPUT} "// Made of src/webgpu/shaders by cmake/embed_shaders.cmake.
#include \"src/webgpu/shaders.h\"

#include <cstring>

namespace logitless::webgpu {
namespace {

const struct {
  const char* name;
  const char* text;
} kShaders[] = {
${entries}};

}  // namespace

const char* shader_text(const char* name) {
  for (const auto& shader : kShaders) {
    if (std::strcmp(shader.name, name) == 0) return shader.text;
  }
  return nullptr;
}

}  // namespace logitless::webgpu
")

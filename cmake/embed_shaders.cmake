# cmake -D "FILES=a.wgsl;b.wgsl" -D OUTPUT=x.cpp -P embed_shaders.cmake: the files' text as shader_text (src/webgpu/shaders.h).
# A line "// Uses common: a, b." of a file puts common/a.wgsl and common/b.wgsl in front of the file. The texts are also written
# to shaders/NAME.wgsl beside the output, for the tests and for finding a line that a compiler's message names.
get_filename_component(texts ${OUTPUT} DIRECTORY)
file(REMOVE_RECURSE ${texts}/shaders)
set(entries)
foreach(file ${FILES})
  get_filename_component(folder ${file} DIRECTORY)
  if(folder MATCHES "/common$")
    continue()
  endif()
  get_filename_component(name ${file} NAME_WE)
  file(READ ${file} own)
  set(text "")
  if(own MATCHES "\n// Uses common: ([a-z, ]+)\\.\n")
    string(REGEX MATCHALL "[a-z]+" used "${CMAKE_MATCH_1}")
    foreach(one ${used})
      file(READ ${folder}/common/${one}.wgsl shared)
      string(APPEND text "// File common/${one}.wgsl:\n${shared}")
    endforeach()
    string(APPEND text "// File ${name}.wgsl:\n")
  endif()
  string(APPEND text "${own}")
  file(WRITE ${texts}/shaders/${name}.wgsl "${text}")
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

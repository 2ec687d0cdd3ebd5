// SPDX-License-Identifier: Apache-2.0
// Any bytes as a .safetensors file: refused with a SafetensorsError, or every tensor lies inside
// the file and holds what its dtype and shape say.
#include <cstdlib>
#include <span>
#include <vector>

#include "cli/safetensors.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace logitless::cli;
  // A copy in its own allocation, so that the sanitizer detects a read past its end.
  const std::vector<uint8_t> file(data, data + size);
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(file.data()), size);
  try {
    const Safetensors content = parse_safetensors(bytes);
    const std::byte* end = bytes.data() + bytes.size();
    size_t total = 0;
    for (const SafetensorsTensor& tensor : content.tensors) {
      require(tensor.data.data() >= bytes.data() + 8 && tensor.data.size() <= size);
      require(tensor.data.data() + tensor.data.size() <= end);
      require(content.find(tensor.name) == &tensor);
      if (tensor.dtype) {
        require(static_cast<uint64_t>(tensor.elements() * logitless::size_of(*tensor.dtype)) ==
                tensor.data.size());
      }
      total += tensor.data.size();
    }
    require(total <= size);
  } catch (const SafetensorsError& e) {
    require(e.what()[0] != 0);
  }
  return 0;
}

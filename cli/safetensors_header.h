// SPDX-License-Identifier: Apache-2.0
// The JSON header of a .safetensors file: only its syntax, nothing about the data.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace logitless::cli {

struct HeaderEntry {
  std::string name;
  std::string dtype;
  std::vector<uint64_t> shape;
  uint64_t begin = 0, end = 0;  // bytes from the end of the header
};

struct Header {
  std::vector<HeaderEntry> entries;
  std::map<std::string, std::string> metadata;
};

// Throws SafetensorsError if the header violates the format.
Header parse_header(std::string_view json);

// Quotes text of a file, shortened and made printable.
std::string in_quotes(std::string_view text);

}  // namespace logitless::cli

// SPDX-License-Identifier: Apache-2.0
// Reads and writes .safetensors files: 8 bytes of little-endian header length, a JSON header with
// each tensor's dtype, shape and byte range, then raw little-endian data. The whole file is checked
// before any tensor is returned; any content gives tensors or a SafetensorsError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "logitless/tensor.h"

namespace logitless::cli {

class OutputFile;

// Its message says in one line what is wrong with the file.
struct SafetensorsError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct SafetensorsTensor {
  std::string name;
  std::string dtype_name;      // as in the file: "F32", "U8", ...
  std::optional<DType> dtype;  // absent if the library lacks it
  std::vector<int64_t> shape;
  std::span<const std::byte> data;  // in the file's memory, at any alignment

  int64_t elements() const;  // cannot overflow: checked against the data's size
};

struct Safetensors {
  std::vector<SafetensorsTensor> tensors;  // sorted by name
  std::map<std::string, std::string> metadata;

  const SafetensorsTensor* find(std::string_view name) const;
};

// The result's views point into `file`.
Safetensors parse_safetensors(std::span<const std::byte> file);

// A file, mapped read-only.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const Safetensors& content() const { return content_; }

 private:
  void* address_ = nullptr;
  size_t bytes_ = 0;
  Safetensors content_;
};

struct TensorToWrite {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  const void* data = nullptr;  // dense
};

// Writes the whole file; the caller commits it.
void write_safetensors(OutputFile& file, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace logitless::cli

// SPDX-License-Identifier: Apache-2.0
// A .safetensors file has 8 bytes of little-endian header length, a JSON header that names every
// tensor's dtype, shape and byte range, and raw little-endian data; it is read and written here. A
// file is checked whole before a tensor is handed out; whatever it holds, the answer is tensors or
// a SafetensorsError.
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

// Says what is wrong with the file, in one line.
struct SafetensorsError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct SafetensorsTensor {
  std::string name;
  std::string dtype_name;      // it is as the file says: "F32", "U8", ...
  std::optional<DType> dtype;  // it is there where the library has it
  std::vector<int64_t> shape;
  std::span<const std::byte> data;  // it lies in the file's memory, at any alignment

  int64_t elements() const;  // it fits, since it is checked against the data's size
};

struct Safetensors {
  std::vector<SafetensorsTensor> tensors;  // they are sorted by name
  std::map<std::string, std::string> metadata;

  const SafetensorsTensor* find(std::string_view name) const;
};

// The views point into `file`.
Safetensors parse_safetensors(std::span<const std::byte> file);

// This is a file, mapped read-only.
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
  const void* data = nullptr;  // it is dense
};

// Writes all of a file's bytes; `file` is yet to be committed.
void write_safetensors(OutputFile& file, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace logitless::cli

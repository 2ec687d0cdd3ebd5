// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <nlohmann/json.hpp>

#include "cli/output_file.h"
#include "cli/safetensors.h"

namespace logitless::cli {
namespace {

const char* dtype_name(DType dtype) {
  static constexpr const char* kNames[] = {"F32", "F16", "BF16", "I32", "I64"};
  return kNames[static_cast<int>(dtype)];
}

uint64_t tensor_bytes(const TensorToWrite& tensor) {
  uint64_t bytes = static_cast<uint64_t>(size_of(tensor.dtype));
  for (const int64_t size : tensor.shape) bytes *= static_cast<uint64_t>(size);
  return bytes;
}

// Returns the header after its length, padded so that the data starts at a multiple of 8.
std::string head(const std::vector<TensorToWrite>& tensors,
                 const std::map<std::string, std::string>& metadata) {
  nlohmann::json header = nlohmann::json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t at = 0;
  for (const TensorToWrite& tensor : tensors) {
    const uint64_t end = at + tensor_bytes(tensor);
    header[tensor.name] = {
        {"dtype", dtype_name(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {at, end}}};
    at = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes + text;
}

}  // namespace

void write_safetensors(OutputFile& file, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  file.write(head(tensors, metadata));
  for (const TensorToWrite& tensor : tensors) file.write(tensor.data, tensor_bytes(tensor));
}

}  // namespace logitless::cli

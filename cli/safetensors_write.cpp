// SPDX-License-Identifier: Apache-2.0
// Writing: everything goes to a temporary file in the same directory, reaches the disk, and takes
// its name in one step.
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "cli/safetensors.h"

namespace logitless::cli {
namespace {

const char* dtype_name(DType dtype) {
  static constexpr const char* kNames[] = {"F32", "F16", "BF16", "I32", "I64"};
  return kNames[static_cast<int>(dtype)];
}

uint64_t bytes_of(const TensorToWrite& tensor) {
  uint64_t bytes = static_cast<uint64_t>(size_of(tensor.dtype));
  for (const int64_t size : tensor.shape) bytes *= static_cast<uint64_t>(size);
  return bytes;
}

// Length and header, padded so that the data starts at a multiple of 8.
std::string head(const std::vector<TensorToWrite>& tensors,
                 const std::map<std::string, std::string>& metadata) {
  nlohmann::json header = nlohmann::json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t at = 0;
  for (const TensorToWrite& tensor : tensors) {
    const uint64_t end = at + bytes_of(tensor);
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

[[noreturn]] void fail(const std::string& path) {
  throw std::runtime_error(fmt::format("{}: {}", path, std::strerror(errno)));
}

void write_all(int descriptor, const void* data, uint64_t bytes, const std::string& path) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor, at, std::min<uint64_t>(bytes, 1 << 30));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail(path);
    at += written;
    bytes -= static_cast<uint64_t>(written);
  }
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const std::string& path) : path_(path) {
  struct stat info;
  if (::stat(path.c_str(), &info) == 0) {
    if (!S_ISREG(info.st_mode)) {
      throw SafetensorsError(fmt::format("{}: exists and is not a regular file", path));
    }
    // A link stays a link: what it names is replaced.
    std::error_code unused;
    const auto real = std::filesystem::canonical(path, unused);
    if (!unused) path_ = real;
  }
  temporary_ = path_ + ".XXXXXX";
  descriptor_ = ::mkostemp(temporary_.data(), O_CLOEXEC);
  if (descriptor_ < 0) {
    temporary_.clear();
    throw SafetensorsError(fmt::format("{}: {}", path, std::strerror(errno)));
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void SafetensorsWriter::commit(const std::vector<TensorToWrite>& tensors,
                               const std::map<std::string, std::string>& metadata) {
  const std::string start = head(tensors, metadata);
  write_all(descriptor_, start.data(), start.size(), path_);
  for (const TensorToWrite& tensor : tensors) {
    write_all(descriptor_, tensor.data, bytes_of(tensor), path_);
  }
  const mode_t mask = ::umask(0);
  ::umask(mask);
  if (::fchmod(descriptor_, 0666 & ~mask) != 0 || ::fsync(descriptor_) != 0) fail(path_);
  const int closed = ::close(descriptor_);
  descriptor_ = -1;
  if (closed != 0 || ::rename(temporary_.c_str(), path_.c_str()) != 0) fail(path_);
  temporary_.clear();
  // The name reaches the disk with its directory; where directories cannot be synchronized, the
  // file is whole all the same.
  const std::string parent = std::filesystem::path(path_).parent_path();
  const int directory =
      ::open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory >= 0) {
    static_cast<void>(::fsync(directory));
    ::close(directory);
  }
}

}  // namespace logitless::cli

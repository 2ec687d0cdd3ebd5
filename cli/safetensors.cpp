// SPDX-License-Identifier: Apache-2.0
// The format's rules about data: every tensor lies inside the file, its bytes are those of its
// dtype and shape, and the tensors cover the data without overlaps or holes.
#include "cli/safetensors.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <tuple>

#include "cli/safetensors_header.h"

namespace logitless::cli {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the data is used as it lies in the file");

constexpr uint64_t kLengthBytes = 8;
// In bytes, the same limit as the safetensors library's.
constexpr uint64_t kMaxHeader = 100'000'000;

struct KnownDtype {
  std::string_view name;
  uint64_t bits;
  std::optional<DType> dtype;
};

constexpr KnownDtype kDtypes[] = {
    {"F32", 32, DType::f32}, {"F16", 16, DType::f16}, {"BF16", 16, DType::bf16},
    {"I32", 32, DType::i32}, {"I64", 64, DType::i64}, {"BOOL", 8, {}},
    {"U8", 8, {}},           {"I8", 8, {}},           {"U16", 16, {}},
    {"I16", 16, {}},         {"U32", 32, {}},         {"U64", 64, {}},
    {"F64", 64, {}},         {"C64", 64, {}},         {"F8_E5M2", 8, {}},
    {"F8_E4M3", 8, {}},      {"F8_E8M0", 8, {}},      {"F4", 4, {}},
    {"F6_E2M3", 6, {}},      {"F6_E3M2", 6, {}}};

template <class... T>
[[noreturn]] void fail(fmt::format_string<T...> format, T&&... values) {
  throw SafetensorsError(fmt::format(format, std::forward<T>(values)...));
}

const KnownDtype& known_dtype(const HeaderEntry& entry) {
  for (const KnownDtype& known : kDtypes) {
    if (known.name == entry.dtype) return known;
  }
  fail("tensor {} has the unknown dtype {}", in_quotes(entry.name), in_quotes(entry.dtype));
}

// The bytes of the entry's data; an element has `bits` bits.
uint64_t entry_bytes(const HeaderEntry& entry, uint64_t bits) {
  // A dimension of 0 makes the tensor empty, even if the product of the others overflows.
  if (std::find(entry.shape.begin(), entry.shape.end(), 0) != entry.shape.end()) return 0;
  uint64_t total = bits;
  for (const uint64_t size : entry.shape) {
    if (__builtin_mul_overflow(total, size, &total)) {
      fail("tensor {} has a shape whose product passes 2^64", in_quotes(entry.name));
    }
  }
  if (total % 8 != 0) fail("tensor {} does not fill whole bytes", in_quotes(entry.name));
  return total / 8;
}

SafetensorsTensor checked(const HeaderEntry& entry, std::span<const std::byte> data) {
  const std::string name = in_quotes(entry.name);
  const KnownDtype& known = known_dtype(entry);
  if (entry.begin > entry.end) {
    fail("tensor {} has data_offsets [{}, {}] that run backwards", name, entry.begin, entry.end);
  }
  if (entry.end > data.size()) {
    fail("tensor {} ends at byte {} of the data, which has {}", name, entry.end, data.size());
  }
  const uint64_t bytes = entry_bytes(entry, known.bits);
  if (bytes != entry.end - entry.begin) {
    fail("tensor {} has {} bytes; its dtype {} and its shape need {}", name,
         entry.end - entry.begin, entry.dtype, bytes);
  }
  SafetensorsTensor tensor{.name = entry.name,
                           .dtype_name = entry.dtype,
                           .dtype = known.dtype,
                           .shape = {},
                           .data = data.subspan(entry.begin, bytes)};
  for (const uint64_t size : entry.shape) {
    if (size > static_cast<uint64_t>(INT64_MAX)) fail("tensor {} has a size of {}", name, size);
    tensor.shape.push_back(static_cast<int64_t>(size));
  }
  return tensor;
}

void check_coverage(const std::vector<HeaderEntry>& entries, uint64_t data_bytes) {
  std::vector<const HeaderEntry*> order;
  for (const HeaderEntry& entry : entries) order.push_back(&entry);
  std::sort(order.begin(), order.end(), [](const HeaderEntry* a, const HeaderEntry* b) {
    return std::tie(a->begin, a->end) < std::tie(b->begin, b->end);
  });
  uint64_t at = 0;
  const HeaderEntry* previous = nullptr;
  for (const HeaderEntry* entry : order) {
    if (entry->begin < at) {
      fail("tensors {} and {} overlap", in_quotes(previous->name), in_quotes(entry->name));
    }
    if (entry->begin > at) {
      fail("bytes {} to {} of the data belong to no tensor", at, entry->begin);
    }
    at = entry->end;
    previous = entry;
  }
  if (at != data_bytes) fail("bytes {} to {} of the data belong to no tensor", at, data_bytes);
}

uint64_t header_length(std::span<const std::byte> file) {
  if (file.size() < kLengthBytes) {
    fail("{} bytes: too short to be a safetensors file", file.size());
  }
  uint64_t length;
  std::memcpy(&length, file.data(), sizeof(length));
  if (length > kMaxHeader) {
    fail("the header's length is {}; allowed: <= {} (is this a safetensors file?)", length,
         kMaxHeader);
  }
  if (length > file.size() - kLengthBytes) {
    fail("truncated: the header's length is {}, but {} bytes follow", length,
         file.size() - kLengthBytes);
  }
  return length;
}

}  // namespace

int64_t SafetensorsTensor::elements() const {
  int64_t count = 1;
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  for (const int64_t size : shape) count *= size;
  return count;
}

const SafetensorsTensor* Safetensors::find(std::string_view name) const {
  const auto at = std::lower_bound(tensors.begin(), tensors.end(), name,
                                   [](const SafetensorsTensor& tensor, std::string_view wanted) {
                                     return tensor.name < wanted;
                                   });
  return at != tensors.end() && at->name == name ? &*at : nullptr;
}

Safetensors parse_safetensors(std::span<const std::byte> file) {
  const uint64_t length = header_length(file);
  const auto* text = reinterpret_cast<const char*>(file.data()) + kLengthBytes;
  Header header = parse_header({text, length});
  const std::span<const std::byte> data = file.subspan(kLengthBytes + length);
  Safetensors content{.tensors = {}, .metadata = std::move(header.metadata)};
  for (const HeaderEntry& entry : header.entries) content.tensors.push_back(checked(entry, data));
  check_coverage(header.entries, data.size());
  std::sort(content.tensors.begin(), content.tensors.end(),
            [](const SafetensorsTensor& a, const SafetensorsTensor& b) { return a.name < b.name; });
  return content;
}

SafetensorsFile::SafetensorsFile(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat info;
  if (descriptor < 0 || ::fstat(descriptor, &info) != 0) {
    const int reason = errno;
    if (descriptor >= 0) ::close(descriptor);
    fail("{}: {}", path, std::strerror(reason));
  }
  bytes_ = static_cast<size_t>(info.st_size);
  void* address = nullptr;
  if (S_ISREG(info.st_mode) && bytes_ > 0) {
    address = ::mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, descriptor, 0);
  }
  const int reason = errno;
  ::close(descriptor);
  if (!S_ISREG(info.st_mode)) fail("{}: not a regular file", path);
  if (address == MAP_FAILED) fail("{}: {}", path, std::strerror(reason));
  address_ = address;
  try {
    content_ = parse_safetensors({static_cast<const std::byte*>(address_), bytes_});
  } catch (const SafetensorsError& e) {
    if (address_ != nullptr) ::munmap(address_, bytes_);
    fail("{}: {}", path, e.what());
  }
}

SafetensorsFile::~SafetensorsFile() {
  if (address_ != nullptr) ::munmap(address_, bytes_);
}

}  // namespace logitless::cli

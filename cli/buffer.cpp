// SPDX-License-Identifier: Apache-2.0
#include "cli/buffer.h"

#include <fmt/core.h>
#include <sys/mman.h>

#include <utility>

#include "cli/commands.h"
#include "cli/text.h"

namespace logitless::cli {
namespace {

constexpr uint64_t kLargePage = uint64_t{2} << 20;

}  // namespace

Buffer::Buffer(uint64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  mapped_ = bytes + kLargePage;
  void* address = bytes > UINT64_MAX / 2 ? MAP_FAILED
                                         : ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE,
                                                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) {
    throw Failure(fmt::format("no memory for {}", format_bytes(bytes)));
  }
  mapping_ = address;
  const uint64_t at = reinterpret_cast<uint64_t>(address);
  const uint64_t start = (at + kLargePage - 1) / kLargePage * kLargePage;
  data_ = static_cast<char*>(address) + (start - at);
#if defined(MADV_HUGEPAGE)
  // The tail keeps small pages, because a large one would count as bytes beyond the requested size.
  const uint64_t whole = bytes / kLargePage * kLargePage;
  if (whole > 0) ::madvise(data_, whole, MADV_HUGEPAGE);
  ::madvise(static_cast<char*>(data_) + whole, mapped_ - (start - at) - whole, MADV_NOHUGEPAGE);
#endif
}

Buffer::~Buffer() {
  if (mapping_ != nullptr) ::munmap(mapping_, mapped_);
}

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace logitless::cli

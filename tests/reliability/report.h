// SPDX-License-Identifier: Apache-2.0
// The conventions of make reliability's programs: options are "--name NUMBER", results are lines
// "name: value" on stdout. If a promise is broken, the exit code is 1 and stderr has the reason.
#pragma once

#include <cinttypes>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/support/cases.h"

namespace logitless::reliability {

inline constexpr conformance::OpKind kOps[] = {conformance::OpKind::softmax,
                                               conformance::OpKind::forward,
                                               conformance::OpKind::backward,
                                               conformance::OpKind::forward_backward,
                                               conformance::OpKind::linear_forward,
                                               conformance::OpKind::linear_backward,
                                               conformance::OpKind::linear_forward_backward};
inline constexpr DType kDtypes[] = {DType::f32, DType::f16, DType::bf16};

// Returns the number after `name`, or `otherwise` if the option is missing.
inline int64_t option(int argc, char** argv, const char* name, int64_t otherwise) {
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], name) == 0) return std::atoll(argv[i + 1]);
  }
  return otherwise;
}

inline void figure(const char* name, int64_t value) {
  std::printf("%s: %" PRId64 "\n", name, value);
}

[[gnu::format(printf, 1, 2)]] [[noreturn]] inline void broken(const char* format, ...) {
  std::fputs("BROKEN: ", stderr);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::exit(1);
}

// Random numbers that are the same on every machine and in every run (splitmix64).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t least, int64_t most) { return least + below(most - least + 1); }
  template <class T, size_t n>
  T pick(const T (&choices)[n]) {
    return choices[below(n)];
  }

 private:
  uint64_t state_;
};

// FNV-1a over bytes, in several pieces.
class Digest {
 public:
  void add(const void* data, size_t bytes) {
    const auto* p = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) value_ = (value_ ^ p[i]) * 0x100000001B3u;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xCBF29CE484222325u;
};

}  // namespace logitless::reliability

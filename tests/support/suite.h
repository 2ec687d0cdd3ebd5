// SPDX-License-Identifier: Apache-2.0
// The suite's test programs share this: tests parameterized by backend, op and input dtype.
#pragma once

#include <cstdlib>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "cases.h"
#include "device.h"
#include "gtest/gtest.h"

namespace logitless::conformance {

inline constexpr OpKind kOps[] = {OpKind::softmax,
                                  OpKind::forward,
                                  OpKind::backward,
                                  OpKind::forward_backward,
                                  OpKind::linear_forward,
                                  OpKind::linear_backward,
                                  OpKind::linear_forward_backward};
inline constexpr OpKind kLossOps[] = {OpKind::forward,          OpKind::backward,
                                      OpKind::forward_backward, OpKind::linear_forward,
                                      OpKind::linear_backward,  OpKind::linear_forward_backward};
inline constexpr OpKind kAllOps[] = {OpKind::softmax,
                                     OpKind::forward,
                                     OpKind::backward,
                                     OpKind::forward_backward,
                                     OpKind::linear_forward,
                                     OpKind::linear_backward,
                                     OpKind::linear_forward_backward,
                                     OpKind::divergence_forward,
                                     OpKind::divergence_backward,
                                     OpKind::divergence_forward_backward};
inline bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::string(value) == "1";
}
// Returns whether everything runs everywhere, however long it takes.
inline bool full() { return is_set("LOGITLESS_TEST_FULL"); }
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define LOGITLESS_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(LOGITLESS_SANITIZED)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
// Returns whether only a seeded eighth of the cases runs, because each takes many times as long.
inline bool eighth() { return !full() && (kSanitized || is_set("LOGITLESS_TEST_EIGHTH")); }

// Returns what moves a part of the cases on from one commit to the next (scripts/test sets it).
inline size_t rotation() {
  const char* value = std::getenv("LOGITLESS_TEST_SEED");
  return value == nullptr ? 0 : std::strtoull(value, nullptr, 10);
}
// Returns whether one of a case's runs is in its part: every run where all are, else a third, which
// differs from one case to the next, so that each run is one of some case's.
inline bool in_third(size_t run, size_t which_case) {
  return !eighth() || (run + which_case + rotation()) % 3 == 0;
}

inline std::vector<DType> inputs() { return {DType::f32, DType::f16, DType::bf16}; }
// Tests whose every case is many runs take these.
inline std::vector<DType> few_inputs() {
  return eighth() ? std::vector<DType>{DType::bf16} : inputs();
}

inline std::vector<std::string> device_names() {
  std::vector<std::string> names;
  for (const TestDevice* d : devices()) names.emplace_back(d->name());
  return names;
}

using Parameter = std::tuple<std::string, OpKind, DType>;

// Returns every backend, op and dtype. Of the reference, which is judged by itself, and under a
// sanitizer, which looks at memory, each op has one of the dtypes, the next op the next.
inline std::vector<Parameter> parameters(std::span<const OpKind> ops,
                                         const std::vector<DType>& dtypes) {
  std::vector<Parameter> all;
  for (const std::string& name : device_names()) {
    const bool one = !full() && (kSanitized || name == "reference");
    for (const OpKind op : ops) {
      if (diverges(op) && name == "webgpu") continue;  // it has none
      const size_t chosen = static_cast<size_t>(op) % dtypes.size();
      for (size_t i = 0; i < dtypes.size(); ++i) {
        if (!one || i == chosen) all.emplace_back(name, op, dtypes[i]);
      }
    }
  }
  return all;
}

class ConformanceTest : public testing::TestWithParam<Parameter> {
 protected:
  const TestDevice& device_ = device(std::get<0>(GetParam()));
  const OpKind op_ = std::get<1>(GetParam());
  const DType dtype_ = std::get<2>(GetParam());
};

inline std::string parameter_name(const testing::TestParamInfo<Parameter>& info) {
  return std::get<0>(info.param) + "_" + name_of(std::get<1>(info.param)) + "_" +
         name_of(std::get<2>(info.param));
}

#define LOGITLESS_CONFORMANCE_SUITE_OF(Suite, ops, dtypes) \
  INSTANTIATE_TEST_SUITE_P(All, Suite, testing::ValuesIn(parameters(ops, dtypes)), parameter_name)
#define LOGITLESS_CONFORMANCE_SUITE(Suite) LOGITLESS_CONFORMANCE_SUITE_OF(Suite, kOps, inputs())

}  // namespace logitless::conformance

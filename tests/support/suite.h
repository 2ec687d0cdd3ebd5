// SPDX-License-Identifier: Apache-2.0
// For the suite's test programs: tests with backend, op and input dtype as parameters.
#pragma once

#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "cases.h"
#include "device.h"
#include "gtest/gtest.h"
#include "rotation.h"

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
inline std::vector<DType> inputs() { return {DType::f32, DType::f16, DType::bf16}; }
// For tests in which every case is many runs.
inline std::vector<DType> few_inputs() {
  return eighth() ? std::vector<DType>{DType::bf16} : inputs();
}

inline std::vector<std::string> device_names() {
  std::vector<std::string> names;
  for (const TestDevice* d : devices()) names.emplace_back(d->name());
  return names;
}

using Parameter = std::tuple<std::string, OpKind, DType>;

// Every backend, op and dtype. The reference, which is compared with itself, and sanitizers, which
// check memory, get only one dtype per op, in rotation.
inline std::vector<Parameter> parameters(std::span<const OpKind> ops,
                                         const std::vector<DType>& dtypes) {
  std::vector<Parameter> all;
  for (const std::string& name : device_names()) {
    const bool one = !full() && (kSanitized || name == "reference");
    for (const OpKind op : ops) {
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

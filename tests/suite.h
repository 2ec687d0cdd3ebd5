// SPDX-License-Identifier: Apache-2.0
// What the suite's test programs share: tests parameterized by backend, op and input dtype.
#pragma once

#include <cstdlib>
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
inline constexpr DType kInputs[] = {DType::f32, DType::f16, DType::bf16};

// Everything everywhere, however long it takes.
inline bool full() {
  const char* value = std::getenv("LOGITLESS_TEST_FULL");
  return value != nullptr && std::string(value) == "1";
}

inline std::vector<std::string> device_names() {
  std::vector<std::string> names;
  for (const TestDevice* d : devices()) names.emplace_back(d->name());
  return names;
}

using Parameter = std::tuple<std::string, OpKind, DType>;

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

#define LOGITLESS_CONFORMANCE_SUITE_OF(Suite, ops, dtypes)                                      \
  INSTANTIATE_TEST_SUITE_P(All, Suite,                                                          \
                           testing::Combine(testing::ValuesIn(device_names()),                  \
                                            testing::ValuesIn(ops), testing::ValuesIn(dtypes)), \
                           parameter_name)
#define LOGITLESS_CONFORMANCE_SUITE(Suite) LOGITLESS_CONFORMANCE_SUITE_OF(Suite, kOps, kInputs)

}  // namespace logitless::conformance

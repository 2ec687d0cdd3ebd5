// SPDX-License-Identifier: Apache-2.0
// Helpers for tests of infinities, NaN and huge numbers.
#pragma once

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "judge.h"
#include "problem.h"
#include "suite.h"

namespace logitless::conformance {

inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline constexpr int64_t kTokens = 6, kHidden = 9, kVocab = 70, kRow = 2;

// Options with which an infinite logit takes another path through the formulas.
inline constexpr Setting kSettings[] = {
    {"plain", [](Case&) {}},
    {"smoothing", [](Case& c) { c.options.label_smoothing = 0.1f; }},
    {"smoothing_one", [](Case& c) { c.options.label_smoothing = 1; }},
    {"class weights and smoothing",
     [](Case& c) { c.vocab_weight = true, c.options.label_smoothing = 0.1f; }},
    {"softcap", [](Case& c) { c.options.softcap = 5; }},
    {"scale 0", [](Case& c) { c.options.logit_scale = 0; }},
    {"scale 0 and softcap", [](Case& c) { c.options.logit_scale = 0, c.options.softcap = 5; }},
    {"z_loss", [](Case& c) { c.options.z_loss = 0.01f; }},
    {"scale", [](Case& c) { c.options.logit_scale = -0.5f, c.options.temperature = 2; }},
    {"gradients of statistics",
     [](Case& c) { c.grad_lse = c.grad_target_logit = c.grad_entropy = true; }},
};

// Calls f(the case with the setting, the setting's name) for kSettings, then for kAlone.
template <class F>
void for_settings(const Case& c, F&& f) {
  const auto go = [&](const Setting& setting) {
    Case own = c;
    setting.apply(own);
    f(own, setting.name);
  };
  for (const Setting& setting : kSettings) go(setting);
  for (const Setting& setting : kAlone) go(setting);
}

class NonFinite : public ConformanceTest {
 protected:
  Case plain() const {
    Case c{.op = op_, .shape = {kTokens, kHidden, kVocab}, .dtype = dtype_, .statistics = true};
    c.options.reduction = Reduction::none;
    c.bias = true;
    c.bias_dtype = dtype_;
    return c;
  }
  // Compares with the reference and returns the outputs.
  template <class Op>
  Fields judged(const Problem<Op>& p, const std::string& what) {
    const Outcome outcome = execute(device_, p.op, p.pool);
    const Comparison result = compare(expected(device_, p.op, p.model), outcome);
    EXPECT_TRUE(result.ok()) << what << "\n" << result.report;
    return outcome.fields;
  }
};

inline void set(const TensorView& view, int64_t index, double value) {
  std::vector<double> values = read(view);
  values[index] = value;
  write(view, values);
}

// The tensor that masks columns: the logits, or the bias of all rows.
template <class Op>
const TensorView& masked_by(const Op& op) {
  if constexpr (LinearOp<Op>) {
    return op.bias;
  } else {
    return op.logits;
  }
}

// Expects rows other than `row` of every per-token field to have the same bits.
inline void expect_other_rows(const Fields& before, const Fields& after, int64_t row,
                              const std::string& what, int64_t tokens = kTokens) {
  for (const auto& [name, field] : after) {
    if (name == "grad_weight" || name == "grad_bias") continue;
    const std::vector<std::byte>& old = before.at(name).bits;
    const size_t bytes = field.bits.size() / static_cast<size_t>(tokens);
    for (size_t k = 0; k < field.bits.size(); ++k) {
      if (k / bytes == static_cast<size_t>(row) || field.bits[k] == old[k]) continue;
      ADD_FAILURE() << what << ": " << name << " changed in row " << k / bytes;
      break;
    }
  }
}

}  // namespace logitless::conformance

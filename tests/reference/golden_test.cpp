// SPDX-License-Identifier: Apache-2.0
// Compares the reference with PyTorch in float64. Every file of tests/goldens (written by
// scripts/make_goldens.py) runs as f32 with i64 targets and, where the inputs are exact there, as
// f16 and bf16 with i32 targets.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "example.h"
#include "src/reference/numbers.h"

namespace logitless::reference {
namespace {

using nlohmann::json;

std::vector<float> floats(const json& golden, const char* name) {
  return golden.contains(name) ? golden.at(name).get<std::vector<float>>() : std::vector<float>{};
}

Example example_of(const json& golden) {
  Example e;
  e.linear = golden.contains("input");
  e.tokens = golden.at("tokens");
  e.columns = golden.at("columns");
  e.hidden = golden.at("hidden");
  e.target = golden.at("target").get<std::vector<int64_t>>();
  e.input = floats(golden, "input");
  e.weight = floats(golden, "weight");
  e.bias = floats(golden, "bias");
  e.logits = floats(golden, "logits");
  e.token_weight = floats(golden, "token_weight");
  e.vocab_weight = floats(golden, "vocab_weight");
  e.temperature = floats(golden, "temperatures");
  e.grad_loss = floats(golden, "grad_loss");
  e.grad_lse = floats(golden, "grad_lse");
  e.grad_target_logit = floats(golden, "grad_target_logit");
  e.grad_entropy = floats(golden, "grad_entropy");
  const std::string reduction = golden.at("reduction");
  e.options.reduction = reduction == "none"  ? Reduction::none
                        : reduction == "sum" ? Reduction::sum
                                             : Reduction::mean;
  e.options.ignore_index = golden.at("ignore_index");
  e.options.label_smoothing = golden.at("label_smoothing");
  e.options.z_loss = golden.at("z_loss");
  e.options.logit_scale = golden.at("logit_scale");
  e.options.softcap = golden.at("softcap");
  e.options.temperature = golden.at("temperature");
  e.options.normalizer = golden.at("normalizer");
  e.options.probability_floor = golden.at("probability_floor");
  if (golden.at("input_kind") == "probabilities") e.options.input_kind = InputKind::probabilities;
  return e;
}

// Converts the inputs of an op to another dtype.
class Converted {
 public:
  explicit Converted(DType dtype) : dtype_(dtype) {}

  // Returns false if a value is not exact in the dtype.
  bool convert(TensorView* view) {
    if (!*view || dtype_ == DType::f32) return true;
    const std::vector<double> values = read(*view);
    std::vector<uint16_t>& bits = storage_.emplace_back(values.size());
    view->data = bits.data();
    view->dtype = dtype_;
    write(values, *view);
    return read(*view) == values;
  }
  void narrow(TensorView* target) {
    const std::vector<int64_t> values = read_indices(*target);
    indices_.assign(values.begin(), values.end());
    target->data = indices_.data();
    target->dtype = DType::i32;
  }

 private:
  DType dtype_;
  std::vector<std::vector<uint16_t>> storage_;
  std::vector<int32_t> indices_;
};

// Compares the op's outputs with the golden values; returns how many were compared.
template <class Op>
int check(const Example& example, DType dtype, const json& expected, const std::string& what) {
  Op op = make_op<Op>(example);
  Converted converted(dtype);
  bool exact = true;
  if constexpr (LinearOp<Op>) {
    exact = converted.convert(&op.input) && converted.convert(&op.weight) &&
            converted.convert(&op.bias);
  } else {
    exact = converted.convert(&op.logits);
  }
  if (!exact) return 0;
  if (dtype != DType::f32) converted.narrow(&op.target);
  const Result result = evaluate(op, {}, false);
  EXPECT_TRUE(result.status.ok()) << what;
  int compared = 0;
  for (const auto& [name, output] : result.outputs) {
    const std::vector<double> values = expected.at(name);
    expect_near(output.value, values, 1e-13, what + ": " + name);
    ++compared;
  }
  return compared;
}

template <class Forward, class Backward, class ForwardBackward>
int check_ops(const Example& example, DType dtype, const json& expected, const std::string& what) {
  int compared = check<Forward>(example, dtype, expected, what) +
                 check<Backward>(example, dtype, expected, what);
  if (example.grad_lse.empty()) compared += check<ForwardBackward>(example, dtype, expected, what);
  return compared;
}

TEST(ReferenceGolden, EqualsPyTorchInDouble) {
  int files = 0, compared[3] = {};
  for (const auto& entry : std::filesystem::directory_iterator(LOGITLESS_GOLDENS)) {
    const json golden = json::parse(std::ifstream(entry.path()));
    const Example example = example_of(golden);
    const std::string name = entry.path().filename();
    ++files;
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      const std::string what = name + " dtype " + std::to_string(static_cast<int>(dtype));
      const json& outputs = golden.at("outputs");
      compared[static_cast<int>(dtype)] +=
          example.linear
              ? check_ops<LinearCrossEntropyForward, LinearCrossEntropyBackward,
                          LinearCrossEntropyForwardBackward>(example, dtype, outputs, what)
              : check_ops<CrossEntropyForward, CrossEntropyBackward, CrossEntropyForwardBackward>(
                    example, dtype, outputs, what);
    }
  }
  EXPECT_EQ(files, 43);
  EXPECT_GT(compared[0], 500);
  EXPECT_GT(compared[1], 450);
  EXPECT_GT(compared[2], 450);
}

}  // namespace
}  // namespace logitless::reference

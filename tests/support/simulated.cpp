// SPDX-License-Identifier: Apache-2.0
// The simulated implementation. Sums have 16 lanes, like a vector unit's, or a single one.
#include "simulated.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace logitless::conformance {
namespace {

constexpr int kMostLanes = 16;

std::vector<float> floats(const TensorView& view) {
  const std::vector<double> values = read(view);
  return {values.begin(), values.end()};
}

// Rounds a finite number to nearest, ties to even.
float to_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000);
}

// Returns sum_k a[k stride_a] b[k stride_b].
float dot(const float* a, int64_t stride_a, const float* b, int64_t stride_b, int64_t count,
          int lanes, bool in_bf16 = false) {
  float lane[kMostLanes] = {};
  for (int64_t k = 0; k < count; ++k) {
    float& sum = lane[k % lanes];
    sum = std::fma(a[k * stride_a], b[k * stride_b], sum);
    if (in_bf16) sum = to_bf16(sum);
  }
  for (int half = lanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}

struct Simulation {
  Mutation mutation;
  int lanes;
  int64_t tokens, hidden, vocab;
  std::vector<float> input, weight, logits;  // [N,D] [V,D] [N,V]
  std::vector<int64_t> target;               // [N]
  std::vector<float> lse, loss;              // [N]

  void forward();
  void softmax_gradient(DType dtype);
  Field field(const TensorView& view, const std::vector<float>& values) const;
};

void Simulation::forward() {
  logits.resize(tokens * vocab);
  const int64_t used = mutation == Mutation::last_hidden_dropped ? hidden - 1 : hidden;
  for (int64_t i = 0; i < tokens; ++i) {
    float* z = &logits[i * vocab];
    for (int64_t j = 0; j < vocab; ++j) {
      z[j] = dot(&input[i * hidden], 1, &weight[j * hidden], 1, used, lanes);
      if (mutation == Mutation::logits_to_bf16) z[j] = to_bf16(z[j]);
    }
    const float maximum = *std::max_element(z, z + vocab);
    float sum = 0;
    const int64_t columns = mutation == Mutation::last_column_dropped ? vocab - 1 : vocab;
    for (int64_t j = 0; j < columns; ++j) {
      sum += std::exp((mutation == Mutation::lse_from_bf16 ? to_bf16(z[j]) : z[j]) - maximum);
    }
    lse.push_back(maximum + std::log(sum));
    loss.push_back((maximum - z[target[i]]) + std::log(sum));
  }
}

// Replaces logits by p - onehot, rounded as the contract allows for 16-bit inputs.
void Simulation::softmax_gradient(DType dtype) {
  for (int64_t i = 0; i < tokens; ++i) {
    for (int64_t j = 0; j < vocab; ++j) {
      float& z = logits[i * vocab + j];
      z = std::exp(z - lse[i]);
      const bool onehot =
          j == target[i] && !(mutation == Mutation::target_not_subtracted && i == tokens - 1);
      z -= onehot ? 1.0f : 0.0f;
      if (dtype != DType::f32) z = static_cast<float>(round_to(dtype, z));
      if (mutation == Mutation::probabilities_to_bf16) z = to_bf16(z);
    }
  }
}

Field Simulation::field(const TensorView& view, const std::vector<float>& values) const {
  Field field;
  field.dtype = view.dtype;
  field.shape.assign(view.shape.begin(), view.shape.begin() + view.rank);
  for (float x : values) field.value.push_back(round_to(view.dtype, x));
  return field;
}

}  // namespace

const char* name_of(Mutation mutation) {
  static constexpr const char* kNames[] = {"none",
                                           "logits_to_bf16",
                                           "lse_from_bf16",
                                           "last_column_dropped",
                                           "last_hidden_dropped",
                                           "probabilities_to_bf16",
                                           "gradient_sum_in_bf16",
                                           "last_token_dropped",
                                           "target_not_subtracted"};
  return kNames[static_cast<int>(mutation)];
}

Fields simulate(const LinearCrossEntropyForwardBackward& op, Mutation mutation, int lanes) {
  Simulation s{.mutation = mutation,
               .lanes = lanes,
               .tokens = op.input.shape[0],
               .hidden = op.input.shape[1],
               .vocab = op.weight.shape[0],
               .input = floats(op.input),
               .weight = floats(op.weight),
               .logits = {},
               .target = {},
               .lse = {},
               .loss = {}};
  for (double t : read(op.target)) s.target.push_back(static_cast<int64_t>(t));
  s.forward();
  Fields fields{{"loss", s.field(op.loss, s.loss)}, {"lse", s.field(op.statistics.lse, s.lse)}};
  s.softmax_gradient(op.input.dtype);
  const bool in_bf16 = mutation == Mutation::gradient_sum_in_bf16;
  std::vector<float> grad_input(s.tokens * s.hidden), grad_weight(s.vocab * s.hidden);
  for (int64_t i = 0; i < s.tokens; ++i) {
    for (int64_t d = 0; d < s.hidden; ++d) {
      grad_input[i * s.hidden + d] =
          dot(&s.logits[i * s.vocab], 1, &s.weight[d], s.hidden, s.vocab, s.lanes, in_bf16);
    }
  }
  const int64_t summed = mutation == Mutation::last_token_dropped ? s.tokens - 1 : s.tokens;
  for (int64_t j = 0; j < s.vocab; ++j) {
    for (int64_t d = 0; d < s.hidden; ++d) {
      grad_weight[j * s.hidden + d] =
          dot(&s.logits[j], s.vocab, &s.input[d], s.hidden, summed, s.lanes, in_bf16);
    }
  }
  fields["grad_input"] = s.field(op.grad_input, grad_input);
  fields["grad_weight"] = s.field(op.grad_weight, grad_weight);
  return fields;
}

}  // namespace logitless::conformance

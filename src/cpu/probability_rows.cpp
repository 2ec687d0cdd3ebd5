// SPDX-License-Identifier: Apache-2.0
// CrossEntropy on given probabilities, in double, element by element. Without label smoothing only
// the target's element is read.
#include "src/cpu/probability_rows.h"

#include <cmath>

#include "src/cpu/row_kernels.h"

namespace logitless::cpu {
namespace {

double element(const TensorView& v, int64_t row, int64_t column) {
  float value;
  const int64_t at = row * v.stride[0] + column * v.stride[1];
  load_as_f32(v.as<const char>() + at * size_of(v.dtype), v.dtype, 1, &value);
  return value;
}

// The target distribution q of one token.
struct Distribution {
  Distribution(const ProbabilityRow& view, const Tokens& tokens, int64_t k)
      : class_weight(view.class_weight),
        target(tokens.target[k]),
        onehot((1 - static_cast<double>(tokens.constants.smoothing)) * tokens.target_weight[k]),
        smoothing(tokens.constants.smoothing_per_class) {}
  double operator()(int64_t j) const {
    const double everywhere =
        smoothing == 0 ? 0 : smoothing * (class_weight != nullptr ? class_weight[j] : 1.0);
    return j == target ? onehot + everywhere : everywhere;
  }
  const float* class_weight;
  int64_t target;
  double onehot, smoothing;
};

}  // namespace

float probability_loss(const ProbabilityRow& view, const Tokens& tokens, int64_t k) {
  const Distribution q(view, tokens, k);
  const int64_t row = tokens.row[k], columns = view.probabilities.shape[1];
  double loss = 0;
  const auto add = [&](int64_t j) {
    if (q(j) != 0) loss -= q(j) * std::log(element(view.probabilities, row, j) + view.floor);
  };
  if (q.smoothing == 0) {
    add(q.target);
  } else {
    for (int64_t j = 0; j < columns; ++j) add(j);
  }
  return static_cast<float>(tokens.token_weight[k] * loss);
}

void probability_gradient(const ProbabilityRow& view, const Tokens& tokens, int64_t k,
                          const TensorView& gradient) {
  const Distribution q(view, tokens, k);
  const int64_t row = tokens.row[k], columns = view.probabilities.shape[1];
  const double scale =
      -static_cast<double>(tokens.upstream[k]) * tokens.gradient_scale * tokens.token_weight[k];
  for (int64_t j = 0; j < columns; ++j) {
    float value = 0;
    if (q(j) != 0) {
      value = static_cast<float>(scale * q(j) / (element(view.probabilities, row, j) + view.floor));
    }
    const int64_t at = row * gradient.stride[0] + j * gradient.stride[1];
    store_from_f32(&value, 1, gradient.dtype, gradient.as<char>() + at * size_of(gradient.dtype));
  }
}

}  // namespace logitless::cpu

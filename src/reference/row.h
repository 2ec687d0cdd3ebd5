// SPDX-License-Identifier: Apache-2.0
// One token's row of logits: what the loss and the gradients need of it, and how far f32 arithmetic
// may be from each number ("Logits", "Statistics of a token", "Accuracy" of docs/semantics.md).
#pragma once

#include <vector>

#include "src/reference/tokens.h"

namespace logitless::reference {

constexpr double u32 = 0x1p-24;
constexpr double tiny32 = 0x1p-126;

// gamma(K): the error of a sum of K products, relative to the sum of their magnitudes.
double gamma(const BoundModel& model, int64_t length);

// A value and how far an honest f32 computation may be from it.
struct Estimate {
  double value = 0;
  double error = 0;
};

struct Row {
  std::vector<double> z;                // [V]
  std::vector<double> slope;            // [V]  dz/draw
  std::vector<double> saturation;       // [V]  c/softcap; empty without a softcap
  std::vector<double> log_probability;  // [V]
  std::vector<double> probability;      // [V]
  double temperature = 1;
  double reference = 0;  // m, the row maximum, or as Forward wrote it
  double log_sum = 0;    // log s, or as Forward wrote it
  double lse = 0;
  double entropy = 0;  // or as Forward wrote it

  // Empty or 0 without bounds.
  std::vector<double> logit_error;        // [V]  e_j
  std::vector<double> probability_error;  // [V]
  double lse_error = 0;                   // B
  double entropy_error = 0;
};

struct RowSource {
  const Call& call;
  const std::vector<double>& weight;  // [V, D]; linear ops
  const std::vector<double>& bias;    // [V] or empty
  BoundModel model;
  bool with_bounds;
};

// The row of token i. Reads no other row.
Row make_row(const RowSource& source, const Token& token, int64_t i);
// Holds what a row of plain logits needs, the rest at its defaults; for Softmax.
Row softmax_row(std::vector<double> logits, bool with_bounds);

Estimate row_reference(const Row& row);
Estimate row_log_sum(const Row& row);
Estimate target_logit(const Row& row, const Token& token);
Estimate weighted_logit_sum(const Row& row, const std::vector<double>& class_weight);
Estimate logprob(const Row& row, const Token& token);
Estimate sum_p_squared(const Row& row);
Estimate mean_logit(const Row& row, int64_t vocab_total);
int64_t argmax(const Row& row);
std::vector<int64_t> accepted_argmax(const Row& row);  // columns of the views
int64_t rank(const Row& row, const Token& token);
std::vector<int64_t> accepted_rank(const Row& row, const Token& token);

Estimate row_loss(const Call& call, const Tokens& tokens, const Token& token, const Row& row);
// input_kind = probabilities; `p` is the row as given.
Estimate probability_loss(const Call& call, const Tokens& tokens, const Token& token,
                          const std::vector<double>& p);

// The gradient of one row with respect to raw.
struct RowGradient {
  std::vector<double> value;      // [V]  draw
  std::vector<double> error;      // [V]  of draw
  std::vector<double> magnitude;  // [V]  M, the sum of the magnitudes of draw's summands
  double stored_scale = 0;        // what a stored 16-bit dz may be multiplied with
};
RowGradient row_gradient(const Call& call, const Tokens& tokens, const Token& token,
                         const Row& row);
RowGradient probability_gradient(const Call& call, const Tokens& tokens, const Token& token,
                                 const std::vector<double>& p);

}  // namespace logitless::reference

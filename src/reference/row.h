// SPDX-License-Identifier: Apache-2.0
// This is one token's row of logits: what the loss and the gradients need of it, and how far f32
// arithmetic may be from each number ("Logits" and "Accuracy" of docs/semantics.md).
#pragma once

#include <vector>

#include "src/reference/tokens.h"

namespace logitless::reference {

constexpr double u32 = 0x1p-24;
constexpr double tiny32 = 0x1p-126;

// gamma(K) is the error of a sum of K products, relative to the sum of their magnitudes.
double gamma(const BoundModel& model, int64_t length);

// This is a value and how far an honest f32 computation may be from it.
struct Estimate {
  double value = 0;
  double error = 0;
};

struct Row {
  std::vector<double> z;                // [V]
  std::vector<double> slope;            // [V]  it is dz/draw
  std::vector<double> saturation;       // [V]  it is c/softcap, and empty without a softcap
  std::vector<double> log_probability;  // [V]
  std::vector<double> probability;      // [V]
  double temperature = 1;
  double reference = 0;  // it is m, the row maximum, or as Forward wrote it
  double log_sum = 0;    // it is log s, or as Forward wrote it
  double lse = 0;
  double entropy = 0;  // Backward has it as Forward wrote it

  // Without bounds these are empty or 0.
  std::vector<double> logit_error;        // [V]  it is e_j
  std::vector<double> probability_error;  // [V]
  double lse_error = 0;                   // it is B
  double entropy_error = 0;
};

// A row's state that an earlier Forward has written.
struct GivenState {
  double reference, log_sum;
  bool without_error;  // B is then only what p loses as it is made of the state
};

struct RowSource {
  const Call& call;
  const std::vector<double>& weight;  // [V, D]  only linear ops have it
  const std::vector<double>& bias;    // [V]  it is empty where there is none
  BoundModel model;
  bool with_bounds;
};

// Makes the row of token i. It reads no other row.
Row make_row(const RowSource& source, const Token& token, int64_t i);
// The same of that state, where there is one.
Row make_row(const RowSource& source, const Token& token, int64_t i, const GivenState* state);
// Makes what a row of plain logits needs, with the rest at its defaults, for Softmax.
Row softmax_row(std::vector<double> logits, bool with_bounds);

// Returns the loss times the token's weight. A device may take it for 0 below 2^-126.
Estimate weighted(const Estimate& loss, const Token& token);
Estimate row_loss(const Call& call, const Tokens& tokens, const Token& token, const Row& row);
// These serve input_kind = probabilities; `p` is the row as given.
Estimate probability_loss(const Call& call, const Tokens& tokens, const Token& token,
                          const std::vector<double>& p);

// This is the gradient of one row with respect to raw.
struct RowGradient {
  std::vector<double> value;      // [V]  it is draw
  std::vector<double> error;      // [V]  it is draw's error
  std::vector<double> magnitude;  // [V]  it is M, the sum of the magnitudes of draw's summands
  std::vector<double> chosen;     // [V]  it is M's part of chosen columns; empty where none are
  std::vector<int64_t> times;     // [V]  how often a column is chosen; where only these have one
  double stored_scale = 0;        // a stored 16-bit dz may be multiplied with so much

  explicit RowGradient(size_t columns) : value(columns), error(columns), magnitude(columns) {}
  // Takes dz of column j through the map from raw to z.
  void set(const LossOptions& options, const Row& row, size_t j, const Estimate& dz,
           double dz_magnitude);
};
RowGradient row_gradient(const Call& call, const Tokens& tokens, const Token& token,
                         const Row& row);
// The same where logits_at alone has a gradient.
RowGradient gradient_of_chosen(const Call& call, const Token& token, const Row& row);
RowGradient probability_gradient(const Call& call, const Tokens& tokens, const Token& token,
                                 const std::vector<double>& p);

}  // namespace logitless::reference

// SPDX-License-Identifier: Apache-2.0
// One token's row of logits: what the loss and the gradients need, with bounds of the error of f32
// arithmetic ("Logits" and "Accuracy" of docs/semantics.md).
#pragma once

#include <vector>

#include "src/reference/tokens.h"

namespace logitless::reference {

constexpr double u32 = 0x1p-24;
constexpr double tiny32 = 0x1p-126;

// The error of a sum of K = `length` products, relative to the sum of their magnitudes.
double gamma(const BoundModel& model, int64_t length);

// A value, and a bound of its error in f32.
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
  double entropy = 0;  // in Backward, as Forward wrote it

  // Empty or 0 if bounds are not wanted.
  std::vector<double> logit_error;        // [V]  e_j
  std::vector<double> probability_error;  // [V]
  double lse_error = 0;                   // B
  double entropy_error = 0;
};

// A row's state that an earlier Forward wrote.
struct GivenState {
  double reference, log_sum;
  bool without_error;  // B is then only the error of p computed from the state
};

struct RowSource {
  const Call& call;
  const std::vector<double>& weight;  // [V, D]  only in linear ops
  const std::vector<double>& bias;    // [V]  empty if there is none
  BoundModel model;
  bool with_bounds;
};

// Computes the row of token i, with the state that the call is given, if any.
Row make_row(const RowSource& source, const Token& token, int64_t i);
// Uses the given state instead, unless it is null.
Row make_row(const RowSource& source, const Token& token, int64_t i, const GivenState* state);
// A row of logits for Softmax, with default options.
Row softmax_row(std::vector<double> logits, bool with_bounds);

// Returns the loss times the token's weight, which a device may flush to 0 below 2^-126.
Estimate weighted(const Estimate& loss, const Token& token);
Estimate row_loss(const Call& call, const Tokens& tokens, const Token& token, const Row& row);
// For input_kind = probabilities; `p` is the row as given.
Estimate probability_loss(const Call& call, const Tokens& tokens, const Token& token,
                          const std::vector<double>& p);

// The gradient of one row with respect to raw.
struct RowGradient {
  std::vector<double> value;      // [V]  draw
  std::vector<double> error;      // [V]  draw's error
  std::vector<double> magnitude;  // [V]  M, the sum of the magnitudes of draw's summands
  std::vector<double> chosen;     // [V]  M's part of chosen columns; empty if there are none
  std::vector<int64_t> times;     // [V]  how often a column is chosen, in gradient_of_chosen
  double stored_scale = 0;        // upper bound of a stored 16-bit dz's multiplier

  explicit RowGradient(size_t columns) : value(columns), error(columns), magnitude(columns) {}
  // Takes dz of column j through the map to draw.
  void set(const LossOptions& options, const Row& row, size_t j, const Estimate& dz,
           double dz_magnitude);
};
RowGradient row_gradient(const Call& call, const Tokens& tokens, const Token& token,
                         const Row& row);
// The gradient where logits_at alone has an upstream gradient.
RowGradient gradient_of_chosen(const Call& call, const Token& token, const Row& row);
RowGradient probability_gradient(const Call& call, const Tokens& tokens, const Token& token,
                                 const std::vector<double>& p);

}  // namespace logitless::reference

// SPDX-License-Identifier: Apache-2.0
// The arguments and results of `logitless loss`.
#pragma once

#include <string>

#include "cli/buffer.h"
#include "cli/head.h"
#include "cli/output_file.h"
#include "logitless/logitless.h"

namespace logitless::cli {

struct LossArguments : HeadArguments {
  std::string reduction = "mean", grad_dtype = "f32";
  std::string gradients, per_token;  // files to write; empty: none
  bool statistics = false;

  bool wants_statistics() const { return statistics || !per_token.empty(); }
};

struct LossOutputs {
  Buffer loss;        // [N] where the reduction is none, else [1]
  Buffer token_loss;  // [N]  if `loss` is [1], and not finite or --per-token is given
  Buffer lse, target_logit, entropy;          // [N]
  Buffer log_probability, mass_above;         // [N]
  Buffer argmax, rank;                        // [N] i64
  Buffer grad_input, grad_weight, grad_bias;  // shaped as hidden, weight and bias
  OpCost cost;
};
LossOutputs compute_loss(const HeadInputs& inputs, const LossArguments& arguments);

void write_gradients(OutputFile& file, const HeadInputs& inputs, const LossOutputs& outputs,
                     const LossArguments& arguments);
void write_per_token(OutputFile& file, const HeadInputs& inputs, const LossOutputs& outputs,
                     const LossArguments& arguments);

}  // namespace logitless::cli

// SPDX-License-Identifier: Apache-2.0
// These structs hold what `logitless loss` is asked, and what it makes of it.
#pragma once

#include <string>

#include "cli/buffer.h"
#include "cli/head.h"
#include "cli/output_file.h"
#include "logitless/logitless.h"

namespace logitless::cli {

struct LossArguments : HeadArguments {
  std::string reduction = "mean", grad_dtype = "f32";
  std::string gradients, per_token;  // they are files to write; an empty one is not written
  bool statistics = false;

  bool wants_statistics() const { return statistics || !per_token.empty(); }
};

struct LossOutputs {
  Buffer loss;        // [N] where the reduction is none, else [1]
  Buffer token_loss;  // [N]  each token's where `loss` is [1] and is no number, or they are wanted
  Buffer lse, target_logit, entropy;          // each is [N]
  Buffer log_probability, mass_above;         // each is [N]
  Buffer argmax, rank;                        // [N] i64
  Buffer grad_input, grad_weight, grad_bias;  // they are shaped as hidden, weight and bias
  OpCost cost;
};
LossOutputs compute_loss(const HeadInputs& inputs, const LossArguments& arguments);

void write_gradients(OutputFile& file, const HeadInputs& inputs, const LossOutputs& outputs,
                     const LossArguments& arguments);
void write_per_token(OutputFile& file, const HeadInputs& inputs, const LossOutputs& outputs,
                     const LossArguments& arguments);

}  // namespace logitless::cli

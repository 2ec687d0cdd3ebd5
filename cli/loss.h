// SPDX-License-Identifier: Apache-2.0
// These structs hold what `logitless loss` is asked, and what it works on.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/buffer.h"
#include "cli/output_file.h"
#include "cli/safetensors.h"
#include "logitless/logitless.h"

namespace logitless::cli {

struct LossArguments {
  std::string file;
  std::string hidden = "hidden", weight = "weight", target = "target";
  // They are names; an empty one says that there is none.
  std::string bias, token_weight, vocab_weight;
  std::string reduction = "mean", out_of_range = "error", device = "cpu", grad_dtype = "f32";
  std::optional<uint64_t> memory;  // it counts bytes; without it the recommended workspace is taken
  std::string gradients, per_token;  // they are files to write; an empty one is not written
  bool statistics = false;
  int threads = 0;    // 0 takes the default
  int64_t shift = 0;  // a position has the target, and its weight, of the one so many behind it
  LossOptions options{};

  bool wants_statistics() const { return statistics || !per_token.empty(); }
};

// The library takes a tensor of the file like this: leading dimensions are flattened, and a copy is
// made where the data is not aligned to its elements.
struct InputTensor {
  TensorView view{};
  std::vector<int64_t> shape;  // it is as in the file
  Buffer copy;
};

struct LossInputs {
  InputTensor hidden;        // [..., D]
  InputTensor weight;        // [V, D]
  InputTensor target;        // [...]
  InputTensor bias;          // [V]
  InputTensor token_weight;  // [...]
  InputTensor vocab_weight;  // [V]

  int64_t tokens() const { return hidden.view.shape[0]; }
  int64_t hidden_size() const { return hidden.view.shape[1]; }
  int64_t vocab() const { return weight.view.shape[0]; }
  int64_t target_at(int64_t token) const;
};
LossInputs load_inputs(const SafetensorsFile& file, const LossArguments& arguments);

struct LossOutputs {
  Buffer loss;        // [N] where the reduction is none, else [1]
  Buffer token_loss;  // [N]  each token's where `loss` is [1] and is no number, or they are wanted
  Buffer lse, target_logit, entropy;          // each is [N]
  Buffer log_probability, mass_above;         // each is [N]
  Buffer argmax, rank;                        // [N] i64
  Buffer grad_input, grad_weight, grad_bias;  // they are shaped as hidden, weight and bias
  uint64_t workspace = 0;                     // so many bytes of what `size` says were used
  WorkspaceSize size{};
  double seconds = 0;
};
LossOutputs compute_loss(const LossInputs& inputs, const LossArguments& arguments);

void write_gradients(OutputFile& file, const LossInputs& inputs, const LossOutputs& outputs,
                     const LossArguments& arguments);
void write_per_token(OutputFile& file, const LossInputs& inputs, const LossOutputs& outputs,
                     const LossArguments& arguments);

}  // namespace logitless::cli

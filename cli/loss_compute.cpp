// SPDX-License-Identifier: Apache-2.0
// Builds an op from a head, and the tensors of an output file from the op's outputs.
#include <fmt/core.h>

#include <cmath>

#include "cli/loss.h"
#include "cli/text.h"

namespace logitless::cli {
namespace {

template <class Op>
void set_inputs(Op& op, const HeadInputs& inputs, const LossOptions& options) {
  op.input = inputs.hidden.view;                // [N, D]
  op.weight = inputs.weight.view;               // [V, D]
  op.bias = inputs.bias.view;                   // [V]
  op.target = inputs.target.view;               // [N]
  op.weights.token = inputs.token_weight.view;  // [N]
  op.weights.vocab = inputs.vocab_weight.view;  // [V]
  op.options = options;
}

uint64_t bytes_of(DType dtype, int64_t elements) {
  return static_cast<uint64_t>(size_of(dtype)) * static_cast<uint64_t>(elements);
}

template <class Op>
void set_outputs(Op& op, LossOutputs& outputs, const HeadInputs& inputs, bool statistics) {
  const int64_t tokens = inputs.tokens();
  const bool none = op.options.reduction == Reduction::none;
  outputs.loss = Buffer(bytes_of(DType::f32, none ? tokens : 1));
  op.loss = none ? vector_view(outputs.loss.data(), DType::f32, tokens)
                 : scalar_view(outputs.loss.data(), DType::f32);
  if (!statistics) return;
  const auto vector = [&](Buffer& buffer, DType dtype) {
    buffer = Buffer(bytes_of(dtype, tokens));
    return vector_view(buffer.data(), dtype, tokens);
  };
  op.statistics.lse = vector(outputs.lse, DType::f32);
  op.statistics.target_logit = vector(outputs.target_logit, DType::f32);
  op.statistics.entropy = vector(outputs.entropy, DType::f32);
  op.statistics.logprob = vector(outputs.log_probability, DType::f32);
  op.statistics.argmax = vector(outputs.argmax, DType::i64);
  op.statistics.rank = vector(outputs.rank, DType::i64);
  op.statistics.mass_above = vector(outputs.mass_above, DType::f32);
}

void set_gradients(LinearCrossEntropyForwardBackward& op, LossOutputs& outputs, DType dtype) {
  const auto like = [&](Buffer& buffer, const TensorView& view) {
    const int64_t elements = view.shape[0] * (view.rank == 2 ? view.shape[1] : 1);
    buffer = Buffer(bytes_of(dtype, elements));
    return view.rank == 2 ? matrix_view(buffer.data(), dtype, view.shape[0], view.shape[1])
                          : vector_view(buffer.data(), dtype, view.shape[0]);
  };
  op.grad_input = like(outputs.grad_input, op.input);
  op.grad_weight = like(outputs.grad_weight, op.weight);
  if (op.bias) op.grad_bias = like(outputs.grad_bias, op.bias);
}

// Returns each token's loss when a reduced one was requested, by running the loss once more.
Buffer token_losses(const HeadInputs& inputs, const LossArguments& arguments) {
  LossOutputs outputs;
  LinearCrossEntropyForward op;
  set_inputs(op, inputs, arguments.options);
  op.options.reduction = Reduction::none;
  set_outputs(op, outputs, inputs, false);
  outputs.cost = run_on_head(op, inputs, arguments, arguments.shift);
  return std::move(outputs.loss);
}

}  // namespace

LossOutputs compute_loss(const HeadInputs& inputs, const LossArguments& arguments) {
  LossOutputs outputs;
  if (arguments.gradients.empty()) {
    LinearCrossEntropyForward op;
    set_inputs(op, inputs, arguments.options);
    set_outputs(op, outputs, inputs, arguments.wants_statistics());
    outputs.cost = run_on_head(op, inputs, arguments, arguments.shift);
  } else {
    LinearCrossEntropyForwardBackward op;
    set_inputs(op, inputs, arguments.options);
    set_outputs(op, outputs, inputs, arguments.wants_statistics());
    set_gradients(op, outputs, parse_dtype(arguments.grad_dtype));
    outputs.cost = run_on_head(op, inputs, arguments, arguments.shift);
  }
  // If the loss is not finite, the token losses show which tokens cause it.
  if (arguments.options.reduction != Reduction::none &&
      (!arguments.per_token.empty() || !std::isfinite(*outputs.loss.as<const float>()))) {
    outputs.token_loss = token_losses(inputs, arguments);
  }
  return outputs;
}

void write_gradients(OutputFile& file, const HeadInputs& inputs, const LossOutputs& outputs,
                     const LossArguments& arguments) {
  const DType dtype = parse_dtype(arguments.grad_dtype);
  std::vector<TensorToWrite> tensors{
      {"grad_input", dtype, inputs.hidden.shape, outputs.grad_input.data()},
      {"grad_weight", dtype, inputs.weight.shape, outputs.grad_weight.data()}};
  if (inputs.bias.view) {
    tensors.push_back({"grad_bias", dtype, inputs.bias.shape, outputs.grad_bias.data()});
  }
  std::map<std::string, std::string> metadata{{"reduction", arguments.reduction}};
  if (arguments.options.reduction != Reduction::none) {
    metadata["loss"] = fmt::format("{}", *outputs.loss.as<const float>());
  }
  write_safetensors(file, tensors, metadata);
}

void write_per_token(OutputFile& file, const HeadInputs& inputs, const LossOutputs& outputs,
                     const LossArguments& arguments) {
  const std::vector<int64_t>& shape = inputs.target.shape;
  const bool none = arguments.options.reduction == Reduction::none;
  const std::vector<TensorToWrite> tensors{
      {"loss", DType::f32, shape, (none ? outputs.loss : outputs.token_loss).data()},
      {"log_probability", DType::f32, shape, outputs.log_probability.data()},
      {"lse", DType::f32, shape, outputs.lse.data()},
      {"target_logit", DType::f32, shape, outputs.target_logit.data()},
      {"entropy", DType::f32, shape, outputs.entropy.data()},
      {"argmax", DType::i64, shape, outputs.argmax.data()},
      {"rank", DType::i64, shape, outputs.rank.data()},
      {"mass_above", DType::f32, shape, outputs.mass_above.data()}};
  write_safetensors(file, tensors);
}

}  // namespace logitless::cli

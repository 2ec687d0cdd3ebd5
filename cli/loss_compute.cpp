// SPDX-License-Identifier: Apache-2.0
// This file makes an op of the tensors of a file, and tensors of a file of the op's outputs.
#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "cli/commands.h"
#include "cli/loss.h"
#include "cli/safetensors_header.h"
#include "cli/text.h"

namespace logitless::cli {
namespace {

// Multiplies the first `count` sizes, which fits where no size after them is 0: the file holds that
// many elements. An empty tensor may have sizes whose product does not.
int64_t product(const std::vector<int64_t>& shape, size_t count) {
  const auto end = shape.begin() + static_cast<std::ptrdiff_t>(count);
  if (std::find(shape.begin(), end, 0) != end) return 0;
  return std::accumulate(shape.begin(), end, int64_t{1}, std::multiplies<>());
}

const SafetensorsTensor& find(const Safetensors& content, const std::string& name,
                              const std::string& option) {
  const SafetensorsTensor* tensor = content.find(name);
  if (tensor != nullptr) return *tensor;
  constexpr size_t kListed = 8;
  std::string names;
  for (size_t i = 0; i < content.tensors.size() && i < kListed; ++i) {
    names += (i == 0 ? "" : ", ") + in_quotes(content.tensors[i].name);
  }
  if (content.tensors.size() > kListed) names += ", ...";
  throw BadInput(fmt::format("{}: the file has no tensor {}; it has {}", option, in_quotes(name),
                             names.empty() ? "none" : names));
}

// `rank` is that of the view. Leading dimensions are flattened into its first one where `flatten`
// is set.
InputTensor load(const Safetensors& content, const std::string& name, const std::string& option,
                 int32_t rank, bool flatten, const std::vector<std::string>& dtypes) {
  InputTensor input;
  if (name.empty()) return input;
  const SafetensorsTensor& tensor = find(content, name, option);
  if (std::find(dtypes.begin(), dtypes.end(), tensor.dtype_name) == dtypes.end()) {
    throw BadInput(fmt::format("{}: tensor {} has dtype {}; allowed: {}", option, in_quotes(name),
                               tensor.dtype_name, joined(dtypes)));
  }
  const size_t dimensions = tensor.shape.size();
  const auto wanted = static_cast<size_t>(rank);
  if (dimensions < wanted || (dimensions > wanted && !flatten)) {
    throw BadInput(fmt::format("{}: tensor {} has {} dimensions; allowed: {}{}", option,
                               in_quotes(name), dimensions, rank, flatten ? " or more" : ""));
  }
  if (rank == 2 && tensor.shape.back() == 0) {
    throw BadInput(fmt::format("{}: tensor {} has a last dimension of 0; allowed: >= 1", option,
                               in_quotes(name)));
  }
  const int64_t rows = product(tensor.shape, dimensions - wanted + 1);
  const void* data = tensor.data.data();
  if (tensor.data.empty()) {
    data = nullptr;
  } else if (reinterpret_cast<uintptr_t>(data) % static_cast<uint64_t>(size_of(*tensor.dtype)) !=
             0) {
    input.copy = Buffer(tensor.data.size());
    std::memcpy(input.copy.data(), data, tensor.data.size());
    data = input.copy.data();
  }
  input.view = rank == 2 ? matrix_view(data, *tensor.dtype, rows, tensor.shape.back())
                         : vector_view(data, *tensor.dtype, rows);
  input.shape = tensor.shape;
  return input;
}

int64_t element(const TensorView& integers, int64_t i) {
  return integers.dtype == DType::i64 ? integers.as<const int64_t>()[i]
                                      : integers.as<const int32_t>()[i];
}

std::string text_of(const std::vector<int64_t>& shape) {
  std::vector<std::string> extents;
  for (const int64_t extent : shape) extents.push_back(std::to_string(extent));
  return joined(extents);
}

// A shift stays within a sequence, which both shapes must tell alike.
void check_sequences(const InputTensor& hidden, const InputTensor& of_tokens,
                     const std::string& option, const std::string& name) {
  const std::vector<int64_t> sequences(hidden.shape.begin(), hidden.shape.end() - 1);
  if (of_tokens.shape == sequences) return;
  throw BadInput(
      fmt::format("{}: tensor {} has the shape [{}]; allowed with --shift: [{}], as --hidden",
                  option, in_quotes(name), text_of(of_tokens.shape), text_of(sequences)));
}

// Position i of the last dimension is given what position i + shift has, or `none` where there is
// none. `at` reads an element.
template <class T, class At>
InputTensor shifted(const InputTensor& given, DType dtype, int64_t shift, T none, At&& at) {
  const int64_t tokens = given.view.shape[0];
  const int64_t length = std::max<int64_t>(given.shape.back(), 1);
  InputTensor moved;
  moved.shape = given.shape;
  moved.copy = Buffer(sizeof(T) * static_cast<uint64_t>(tokens));
  T* to = moved.copy.as<T>();
  for (int64_t i = 0; i < tokens; ++i) {
    const bool has_one = shift < length && i % length < length - shift;
    to[i] = has_one ? at(i + shift) : none;
  }
  moved.view = vector_view(tokens > 0 ? to : nullptr, dtype, tokens);
  return moved;
}

// What belongs to a label moves with it: its weight too. Targets become i64, in which any
// ignore_index fits.
void shift(LossInputs& inputs, const LossArguments& arguments) {
  check_sequences(inputs.hidden, inputs.target, "--target", arguments.target);
  const TensorView target = inputs.target.view;
  inputs.target =
      shifted<int64_t>(inputs.target, DType::i64, arguments.shift, arguments.options.ignore_index,
                       [&](int64_t i) { return element(target, i); });
  if (!inputs.token_weight.view) return;
  check_sequences(inputs.hidden, inputs.token_weight, "--token-weight", arguments.token_weight);
  const auto* weight = inputs.token_weight.view.as<const float>();
  inputs.token_weight = shifted<float>(inputs.token_weight, DType::f32, arguments.shift, 0,
                                       [&](int64_t i) { return weight[i]; });
}

// The library counts tokens; the file has its own dimensions, in which nothing has moved:
// "target[3] is 99; ..." becomes "target[1, 1] is 99; ...".
std::string in_the_file(const std::string& message, const LossInputs& inputs, int64_t shift) {
  const std::string_view name = "target[";
  int64_t token = 0;
  const char* last = message.data() + message.size();
  if (!message.starts_with(name)) return message;
  const auto [end, problem] = std::from_chars(message.data() + name.size(), last, token);
  if (problem != std::errc{} || end == last || *end != ']') return message;
  std::vector<int64_t> index;
  token += shift;
  for (auto extent = inputs.target.shape.rbegin(); extent != inputs.target.shape.rend(); ++extent) {
    index.insert(index.begin(), token % *extent);
    token /= *extent;
  }
  return fmt::format("{}{}{}", name, text_of(index), std::string_view(end, last));
}

template <class Op>
void set_inputs(Op& op, const LossInputs& inputs, const LossOptions& options) {
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
void set_outputs(Op& op, LossOutputs& outputs, const LossInputs& inputs, bool statistics) {
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

template <class Op>
void run_op(const Op& op, const LossInputs& inputs, const LossArguments& arguments,
            LossOutputs& outputs) {
  const Execution execution{.device = {parse_device(arguments.device), 0}};
  check(workspace(op, execution, &outputs.size));
  outputs.workspace = arguments.memory.value_or(outputs.size.recommended);
  check_memory(outputs.workspace, outputs.size);
  const Buffer scratch(outputs.workspace);
  const auto start = std::chrono::steady_clock::now();
  const Status status = run(op, scratch.workspace(), execution);
  if (status.code() == StatusCode::target_out_of_range) {
    throw BadInput(in_the_file(status.message(), inputs, arguments.shift), "target",
                   "target_out_of_range");
  }
  check(status);
  outputs.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Returns each token's loss, where the reduced one was asked for, by running the loss alone once
// more.
Buffer token_losses(const LossInputs& inputs, const LossArguments& arguments) {
  LossOutputs outputs;
  LinearCrossEntropyForward op;
  set_inputs(op, inputs, arguments.options);
  op.options.reduction = Reduction::none;
  set_outputs(op, outputs, inputs, false);
  run_op(op, inputs, arguments, outputs);
  return std::move(outputs.loss);
}

}  // namespace

int64_t LossInputs::target_at(int64_t token) const { return element(target.view, token); }

LossInputs load_inputs(const SafetensorsFile& file, const LossArguments& arguments) {
  const Safetensors& content = file.content();
  const std::vector<std::string> floats{"F32", "F16", "BF16"}, integers{"I32", "I64"}, f32{"F32"};
  LossInputs inputs{
      .hidden = load(content, arguments.hidden, "--hidden", 2, true, floats),
      .weight = load(content, arguments.weight, "--weight", 2, false, floats),
      .target = load(content, arguments.target, "--target", 1, true, integers),
      .bias = load(content, arguments.bias, "--bias", 1, false, floats),
      .token_weight = load(content, arguments.token_weight, "--token-weight", 1, true, f32),
      .vocab_weight = load(content, arguments.vocab_weight, "--vocab-weight", 1, false, f32)};
  if (arguments.shift > 0) shift(inputs, arguments);
  return inputs;
}

LossOutputs compute_loss(const LossInputs& inputs, const LossArguments& arguments) {
  LossOutputs outputs;
  if (arguments.gradients.empty()) {
    LinearCrossEntropyForward op;
    set_inputs(op, inputs, arguments.options);
    set_outputs(op, outputs, inputs, arguments.wants_statistics());
    run_op(op, inputs, arguments, outputs);
  } else {
    LinearCrossEntropyForwardBackward op;
    set_inputs(op, inputs, arguments.options);
    set_outputs(op, outputs, inputs, arguments.wants_statistics());
    set_gradients(op, outputs, parse_dtype(arguments.grad_dtype));
    run_op(op, inputs, arguments, outputs);
  }
  // Those of a loss that is no number say whose fault it is.
  if (arguments.options.reduction != Reduction::none &&
      (!arguments.per_token.empty() || !std::isfinite(*outputs.loss.as<const float>()))) {
    outputs.token_loss = token_losses(inputs, arguments);
  }
  return outputs;
}

void write_gradients(OutputFile& file, const LossInputs& inputs, const LossOutputs& outputs,
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

void write_per_token(OutputFile& file, const LossInputs& inputs, const LossOutputs& outputs,
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

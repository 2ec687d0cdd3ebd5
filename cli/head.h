// SPDX-License-Identifier: Apache-2.0
// A model's head and its tokens, as `logitless loss` and `logitless score` read them from a
// .safetensors file.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/buffer.h"
#include "cli/commands.h"
#include "cli/safetensors.h"
#include "cli/text.h"
#include "logitless/logitless.h"

namespace logitless::cli {

struct HeadArguments {
  std::string file;
  std::string hidden = "hidden", weight = "weight", target = "target";
  // Names of tensors; empty: none.
  std::string bias, token_weight, vocab_weight;
  std::string device = "cpu";
  std::optional<uint64_t> memory;  // bytes of workspace; default: the recommended number
  int threads = 0;                 // 0: the default
  int64_t shift = 0;               // position i uses the target and weight of i + shift
  LossOptions options{};
};
// Adds the options that every such command has, and the file; `name` is the command's.
void add_head_options(CLI::App& command, const std::string& name, HeadArguments& arguments);

// A tensor of the file in the form the library accepts: leading dimensions flattened, and copied if
// the data is not aligned to its elements.
struct InputTensor {
  TensorView view{};
  std::vector<int64_t> shape;  // as in the file
  Buffer copy;
};

struct HeadInputs {
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
// Maps the file, and calls `body` with its tensors. The command ends if the file is truncated
// meanwhile.
void with_head(const Context& context, const std::string& command, const HeadArguments& arguments,
               const std::function<void(const HeadInputs&)>& body);

// A message of the library with its token indices turned into the file's, whose tensors are neither
// flattened nor shifted: "target[3] is 99; ..." becomes "target[1, 1] is 99; ...". Token 0 of the
// call is element `first` of the file's targets.
std::string in_the_file(const std::string& message, const HeadInputs& inputs, int64_t first);

struct OpCost {
  uint64_t workspace = 0;  // bytes used
  WorkspaceSize size{};
  double seconds = 0;
};

// Runs an op on tokens of the file, from element `first` of its targets on; throws its errors.
template <class Op>
OpCost run_on_head(const Op& op, const HeadInputs& inputs, const HeadArguments& arguments,
                   int64_t first) {
  const Execution execution{.device = {parse_device(arguments.device), 0}};
  OpCost cost;
  check(workspace(op, execution, &cost.size));
  cost.workspace = arguments.memory.value_or(cost.size.recommended);
  check_memory(cost.workspace, cost.size);
  const Buffer scratch(cost.workspace);
  const auto start = std::chrono::steady_clock::now();
  const Status status = run(op, scratch.workspace(), execution);
  if (status.code() == StatusCode::target_out_of_range) {
    throw BadInput(in_the_file(status.message(), inputs, first), "target", "target_out_of_range");
  }
  check(status);
  cost.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return cost;
}

}  // namespace logitless::cli

// SPDX-License-Identifier: Apache-2.0
// logitless loss: the loss of a model's head on tensors of a .safetensors file, and statistics of
// its tokens; writes gradients to another file.
#include "cli/loss.h"

#include <fmt/core.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <cmath>
#include <limits>
#include <memory>

#include "cli/commands.h"
#include "cli/output_file.h"
#include "cli/text.h"

namespace logitless::cli {
namespace {

using nlohmann::json;

struct Summary {
  double sum = 0, smallest = std::numeric_limits<double>::infinity(), largest = -smallest;
  int64_t count = 0;

  void add(double value) {
    sum += value;
    ++count;
    // std::min and std::max could drop a NaN, which must be printed.
    smallest = value < smallest || std::isnan(value) ? value : smallest;
    largest = value > largest || std::isnan(value) ? value : largest;
  }
  double mean() const { return sum / static_cast<double>(count); }
  json to_json() const {
    return {{"mean", count > 0 ? json(mean()) : json()},
            {"min", count > 0 ? json(smallest) : json()},
            {"max", count > 0 ? json(largest) : json()}};
  }
};

struct TokenSummary {
  int64_t valid = 0, ignored = 0, outside = 0, correct = 0, not_finite = 0;
  Summary loss, lse, entropy, log_probability;
};

TokenSummary summarize(const HeadInputs& inputs, const LossOutputs& outputs,
                       const LossArguments& arguments) {
  TokenSummary summary;
  const bool none = arguments.options.reduction == Reduction::none;
  const float* token_loss = (none ? outputs.loss : outputs.token_loss).as<const float>();
  for (int64_t i = 0; i < inputs.tokens(); ++i) {
    if (token_loss != nullptr && !std::isfinite(token_loss[i])) ++summary.not_finite;
    const int64_t target = inputs.target_at(i);
    if (target == arguments.options.ignore_index) {
      ++summary.ignored;
    } else if (target < 0 || target >= inputs.vocab()) {
      ++summary.outside;
    } else {
      ++summary.valid;
      if (none) summary.loss.add(token_loss[i]);
      if (!arguments.wants_statistics()) continue;
      summary.lse.add(outputs.lse.as<const float>()[i]);
      summary.entropy.add(outputs.entropy.as<const float>()[i]);
      summary.log_probability.add(outputs.log_probability.as<const float>()[i]);
      if (outputs.argmax.as<const int64_t>()[i] == target) ++summary.correct;
    }
  }
  return summary;
}

json loss_json(const HeadInputs& inputs, const LossOutputs& outputs,
               const LossArguments& arguments) {
  const float* loss = outputs.loss.as<const float>();
  if (arguments.options.reduction != Reduction::none) return *loss;
  json all = json::array();
  for (int64_t i = 0; i < inputs.tokens(); ++i) all.push_back(loss[i]);
  return all;
}

uint64_t logits_bytes(const HeadInputs& inputs) {
  return static_cast<uint64_t>(inputs.tokens()) * static_cast<uint64_t>(inputs.vocab()) *
         sizeof(float);
}

json report(const HeadInputs& inputs, const LossOutputs& outputs, const LossArguments& arguments,
            const TokenSummary& summary) {
  json out = {{"tokens", inputs.tokens()},
              {"hidden", inputs.hidden_size()},
              {"vocab", inputs.vocab()},
              {"dtype", name_of(inputs.hidden.view.dtype)},
              {"valid", summary.valid},
              {"ignored", summary.ignored},
              {"outside", summary.outside},
              {"not_finite", summary.not_finite},
              {"reduction", arguments.reduction},
              {"loss", loss_json(inputs, outputs, arguments)},
              {"device", arguments.device},
              {"workspace_bytes", outputs.cost.workspace},
              {"logits_bytes", logits_bytes(inputs)},
              {"seconds", outputs.cost.seconds}};
  if (arguments.options.reduction == Reduction::none) out["loss_summary"] = summary.loss.to_json();
  if (arguments.wants_statistics()) {
    const auto valid = static_cast<double>(summary.valid);
    out["statistics"] = {{"lse", summary.lse.to_json()},
                         {"entropy", summary.entropy.to_json()},
                         {"log_probability", summary.log_probability.to_json()},
                         {"accuracy", static_cast<double>(summary.correct) / valid},
                         {"perplexity", std::exp(-summary.log_probability.mean())}};
  }
  if (!arguments.gradients.empty()) out["gradients"] = arguments.gradients;
  if (!arguments.per_token.empty()) out["per_token"] = arguments.per_token;
  return out;
}

// Drops the sign of a NaN, which means nothing to a reader.
double unsigned_nan(double value) { return std::isnan(value) ? std::fabs(value) : value; }

void print_summary(const char* name, const Summary& s) {
  if (s.count == 0) return;
  fmt::print("{:<16}mean {:.6g}, {:.6g} to {:.6g}\n", name, unsigned_nan(s.mean()),
             unsigned_nan(s.smallest), unsigned_nan(s.largest));
}

void print_text(const HeadInputs& inputs, const LossOutputs& outputs,
                const LossArguments& arguments, const TokenSummary& summary) {
  if (arguments.options.reduction == Reduction::none) {
    print_summary("loss", summary.loss);
  } else {
    fmt::print("{:<16}{:.7g}  ({})\n", "loss", unsigned_nan(*outputs.loss.as<const float>()),
               arguments.reduction);
  }
  fmt::print("{:<16}{} of {} count", "tokens", summary.valid, inputs.tokens());
  if (summary.ignored > 0) fmt::print(", {} ignored", summary.ignored);
  if (summary.outside > 0) fmt::print(", {} outside the vocabulary", summary.outside);
  if (summary.not_finite > 0) fmt::print("; the loss of {} is NaN or infinite", summary.not_finite);
  fmt::print("\n{:<16}N {} x D {} x V {}, {}\n", "shape", inputs.tokens(), inputs.hidden_size(),
             inputs.vocab(), name_of(inputs.hidden.view.dtype));
  if (arguments.wants_statistics() && summary.valid > 0) {
    fmt::print("{:<16}{:.6g}\n", "perplexity", std::exp(-summary.log_probability.mean()));
    fmt::print("{:<16}{:.2f} %\n", "accuracy",
               100.0 * static_cast<double>(summary.correct) / static_cast<double>(summary.valid));
    print_summary("log probability", summary.log_probability);
    print_summary("entropy", summary.entropy);
    print_summary("lse", summary.lse);
  }
  // An implementation that stores logits holds them and their gradient.
  const bool gradients = !arguments.gradients.empty();
  const uint64_t held = logits_bytes(inputs) * (gradients ? 2 : 1);
  const std::string remark =
      outputs.cost.workspace < held ? "" : ": " + nothing_saved(held, outputs.cost.size);
  fmt::print("{:<16}{} of workspace ({} are {}{}), {:.1f} ms on {}\n", "cost",
             format_bytes(outputs.cost.workspace),
             gradients ? "the logits and their gradient" : "the logits", format_bytes(held), remark,
             outputs.cost.seconds * 1e3, arguments.device);
  for (const std::string& file : {arguments.gradients, arguments.per_token}) {
    if (!file.empty()) fmt::print("{:<16}{}\n", "written", file);
  }
}

void compute(const Context& context, const LossArguments& arguments, const HeadInputs& inputs) {
  const auto files =
      open_outputs({{"--gradients", arguments.gradients}, {"--per-token", arguments.per_token}},
                   {arguments.file});
  const LossOutputs outputs = compute_loss(inputs, arguments);
  if (files[0]) write_gradients(*files[0], inputs, outputs, arguments);
  if (files[1]) write_per_token(*files[1], inputs, outputs, arguments);
  for (const auto& output : files) {
    if (output) output->commit();
  }
  const TokenSummary summary = summarize(inputs, outputs, arguments);
  if (context.json) {
    print_json(report(inputs, outputs, arguments, summary));
  } else {
    print_text(inputs, outputs, arguments, summary);
  }
}

void run_loss(const Context& context, LossArguments& arguments) {
  arguments.options.reduction = arguments.reduction == "none"  ? Reduction::none
                                : arguments.reduction == "sum" ? Reduction::sum
                                                               : Reduction::mean;
  with_head(context, "loss", arguments,
            [&](const HeadInputs& inputs) { compute(context, arguments, inputs); });
}

void add_loss_options(CLI::App& command, LossArguments& a) {
  LossOptions& o = a.options;
  command.add_option("--token-weight", a.token_weight, "a weight for each token [...], F32");
  command.add_option("--vocab-weight", a.vocab_weight, "a weight for each class [V], F32");
  command.add_option("--reduction", a.reduction)
      ->check(CLI::IsMember({"none", "sum", "mean"}))
      ->capture_default_str();
  command.add_option("--label-smoothing", o.label_smoothing, "in [0, 1]")
      ->check(number())
      ->capture_default_str();
  command.add_option("--z-loss", o.z_loss, "factor of lse^2")
      ->check(number())
      ->capture_default_str();
}

}  // namespace

void add_loss(CLI::App& app, Context& context) {
  CLI::App* command = add_command(
      app, context, "loss", "loss, statistics and gradients of a head in a .safetensors file");
  auto arguments = std::make_shared<LossArguments>();
  LossArguments& a = *arguments;
  add_head_options(*command, "loss", a);
  add_loss_options(*command, a);
  command->add_flag("--statistics", a.statistics, "perplexity, accuracy, entropy, ...");
  command->add_option("--gradients", a.gradients, "write the gradients to this .safetensors file");
  command->add_option("--grad-dtype", a.grad_dtype, "of the gradients")
      ->check(CLI::IsMember(kFloatDtypes))
      ->capture_default_str();
  command->add_option("--per-token", a.per_token,
                      "write each token's loss, log-probability and statistics to this file");
  command->callback([&context, arguments] { run_loss(context, *arguments); });
}

}  // namespace logitless::cli

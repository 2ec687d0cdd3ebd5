// SPDX-License-Identifier: Apache-2.0
// logitless score: for each token of a .safetensors file its log-probability, its rank and the
// likeliest tokens, one JSON object per line. Tokens are processed in blocks, so that the outputs'
// memory does not grow with their number; a token's results do not depend on the others.
#include <fmt/core.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "cli/head.h"
#include "cli/output_file.h"
#include "cli/progress.h"
#include "cli/safetensors_header.h"
#include "cli/text.h"

namespace logitless::cli {
namespace {

constexpr int64_t kBlock = 2048;  // tokens, whose outputs are 6.1 MiB at most

struct ScoreArguments : HeadArguments {
  int64_t top = 0;  // 0: none
  std::string out;  // the file to write; empty: the standard output
};

// The op's outputs for a block of tokens.
struct Outputs {
  explicit Outputs(int64_t tokens, int64_t top)
      : loss(bytes(tokens, 4)),
        logprob(bytes(tokens, 4)),
        rank(bytes(tokens, 8)),
        reference(bytes(tokens, 4)),
        log_sum(bytes(tokens, 4)),
        top_logits(bytes(tokens * top, 4)),
        top_ids(bytes(tokens * top, 8)) {}
  static uint64_t bytes(int64_t elements, uint64_t size) {
    return static_cast<uint64_t>(elements) * size;
  }
  Buffer loss, logprob;        // [N] f32
  Buffer rank;                 // [N] i64
  Buffer reference, log_sum;   // [N] f32
  Buffer top_logits, top_ids;  // [N, k] f32, i64
};

struct Totals {
  int64_t tokens = 0, scored = 0, greedy = 0;
  double logprob = 0;
  uint64_t workspace = 0;
  double seconds = 0;
};

TensorView rows_of(const TensorView& all, int64_t first, int64_t count) {
  TensorView rows = all;
  const int64_t stride = all.stride[0] * size_of(all.dtype);
  if (rows.data != nullptr) rows.data = all.as<char>() + first * stride;
  rows.shape[0] = count;
  return rows;
}

// Fills `outputs` for `count` tokens from token `first` on.
OpCost score_block(const HeadInputs& inputs, const ScoreArguments& a, int64_t first, int64_t count,
                   const Outputs& outputs) {
  LinearCrossEntropyForward op;
  op.input = rows_of(inputs.hidden.view, first, count);                            // [N, D]
  op.weight = inputs.weight.view;                                                  // [V, D]
  op.bias = inputs.bias.view;                                                      // [V]
  op.target = rows_of(inputs.target.view, first, count);                           // [N]
  op.loss = vector_view(outputs.loss.data(), DType::f32, count);                   // [N]
  op.statistics.logprob = vector_view(outputs.logprob.data(), DType::f32, count);  // [N]
  op.statistics.rank = vector_view(outputs.rank.data(), DType::i64, count);        // [N]
  if (a.top > 0) {
    op.statistics.row_reference = vector_view(outputs.reference.data(), DType::f32, count);  // [N]
    op.statistics.row_log_sum = vector_view(outputs.log_sum.data(), DType::f32, count);      // [N]
    op.top_logits = matrix_view(outputs.top_logits.data(), DType::f32, count, a.top);  // [N, k]
    op.top_ids = matrix_view(outputs.top_ids.data(), DType::i64, count, a.top);        // [N, k]
  }
  op.options = a.options;
  return run_on_head(op, inputs, a, first + a.shift);
}

bool counts(const HeadInputs& inputs, const ScoreArguments& a, int64_t token) {
  const int64_t target = inputs.target_at(token);
  return target != a.options.ignore_index && target >= 0 && target < inputs.vocab();
}

// JSON has no NaN and no infinities. Writes the fewest digits that identify an f32.
void append(std::string& line, float value) {
  if (!std::isfinite(value)) {
    line += "null";
  } else {
    line += fmt::format("{}", value);
  }
}

// Appends the line of token `i` of the block, which is token `token` of the file.
void append_line(std::string& lines, const HeadInputs& inputs, const ScoreArguments& a,
                 const Outputs& outputs, int64_t i, int64_t token, Totals& totals) {
  lines += fmt::format(R"({{"index":{},"target":{})", token, inputs.target_at(token));
  ++totals.tokens;
  if (!counts(inputs, a, token)) {
    lines += ",\"ignored\":true}\n";
    return;
  }
  const float logprob = outputs.logprob.as<const float>()[i];
  const int64_t rank = outputs.rank.as<const int64_t>()[i];
  ++totals.scored;
  totals.greedy += rank == 0 ? 1 : 0;
  totals.logprob += static_cast<double>(logprob);
  lines += ",\"logprob\":";
  append(lines, logprob);
  lines += fmt::format(",\"rank\":{}", rank);
  if (a.top > 0) {
    const float reference = outputs.reference.as<const float>()[i];
    const float log_sum = outputs.log_sum.as<const float>()[i];
    const float* logits = outputs.top_logits.as<const float>() + i * a.top;  // [k]
    const int64_t* ids = outputs.top_ids.as<const int64_t>() + i * a.top;    // [k]
    lines += ",\"top_ids\":[";
    for (int64_t r = 0; r < a.top; ++r) {
      lines += fmt::format("{}{}", r == 0 ? "" : ",", ids[r]);
    }
    lines += "],\"top_logprobs\":[";
    for (int64_t r = 0; r < a.top; ++r) {
      const float value = (logits[r] - reference) - log_sum;
      lines += r == 0 ? "" : ",";
      append(lines, value > 0 ? 0 : value);  // NaN is kept
    }
    lines += "]";
  }
  lines += "}\n";
}

// An invalid target must fail before anything is written; the library's message names the token.
void check_targets(const HeadInputs& inputs, const ScoreArguments& a) {
  if (a.options.out_of_range == OutOfRange::ignore) return;
  for (int64_t i = 0; i < inputs.tokens(); ++i) {
    if (counts(inputs, a, i) || inputs.target_at(i) == a.options.ignore_index) continue;
    score_block(inputs, a, i, 1, Outputs(1, a.top));
  }
}

void check_shapes(const HeadInputs& inputs, const ScoreArguments& a) {
  const int64_t targets = inputs.target.view.shape[0], tokens = inputs.tokens();
  if (targets != tokens) {
    throw BadInput(fmt::format("--target: tensor {} has {} elements; allowed: {}, as --hidden",
                               in_quotes(a.target), targets, tokens));
  }
  if (a.top > inputs.vocab()) {
    throw BadInput(fmt::format("--top: {}; allowed: 1 to {}, the rows of --weight", a.top,
                               std::min<int64_t>(inputs.vocab(), 256)));
  }
}

Totals write_lines(const HeadInputs& inputs, const ScoreArguments& a, OutputFile* file) {
  Totals totals;
  const int64_t tokens = inputs.tokens(), block = std::min(tokens, kBlock);
  const Outputs outputs(block, a.top);
  Progress progress(tokens);
  std::string lines;
  for (int64_t first = 0; first == 0 || first < tokens; first += kBlock) {
    const int64_t count = std::min(block, tokens - first);
    progress.update(first, fmt::format("{} of {} tokens", first, tokens));
    const OpCost cost = score_block(inputs, a, first, count, outputs);
    totals.workspace = std::max(totals.workspace, cost.workspace);
    totals.seconds += cost.seconds;
    lines.clear();
    for (int64_t i = 0; i < count; ++i) {
      append_line(lines, inputs, a, outputs, i, first + i, totals);
    }
    if (file != nullptr) {
      file->write(lines);
      continue;
    }
    progress.clear();
    std::fwrite(lines.data(), 1, lines.size(), stdout);
    if (std::ferror(stdout) != 0) break;  // main reports the error
  }
  return totals;
}

void print_totals(const Context& context, const ScoreArguments& a, const Totals& totals) {
  const auto scored = static_cast<double>(totals.scored);
  const double mean = totals.logprob / scored;
  const double greedy = static_cast<double>(totals.greedy) / scored;
  if (context.json) {
    return print_json({{"tokens", totals.tokens},
                       {"scored", totals.scored},
                       {"log_probability", totals.logprob},
                       {"perplexity", std::exp(-mean)},
                       {"accuracy", greedy},
                       {"device", a.device},
                       {"workspace_bytes", totals.workspace},
                       {"seconds", totals.seconds},
                       {"out", a.out}});
  }
  fmt::print("{:<16}{} of {} scored\n", "tokens", totals.scored, totals.tokens);
  if (totals.scored > 0) {
    fmt::print("{:<16}{:.6g}\n{:<16}{:.6g}\n{:<16}{:.2f} %\n", "log probability",
               std::isnan(mean) ? std::fabs(totals.logprob) : totals.logprob, "perplexity",
               std::fabs(std::exp(-mean)), "accuracy", 100 * greedy);
  }
  fmt::print("{:<16}{} of workspace, {:.1f} ms on {}\n{:<16}{}\n", "cost",
             format_bytes(totals.workspace), totals.seconds * 1e3, a.device, "written", a.out);
}

void score(const Context& context, const ScoreArguments& a, const HeadInputs& inputs) {
  check_shapes(inputs, a);
  const auto files = open_outputs({{"--out", a.out}}, {a.file});
  check_targets(inputs, a);
  const Totals totals = write_lines(inputs, a, files[0].get());
  if (!files[0]) return;
  files[0]->commit();
  print_totals(context, a, totals);
}

}  // namespace

void add_score(CLI::App& app, Context& context) {
  CLI::App* command = add_command(app, context, "score",
                                  "log-probability, rank and likeliest tokens of each token in a "
                                  ".safetensors file, one JSON object a line");
  auto arguments = std::make_shared<ScoreArguments>();
  ScoreArguments& a = *arguments;
  a.options.reduction = Reduction::none;
  add_head_options(*command, "score", a);
  command->add_option("--top", a.top, "the K likeliest tokens too, 1 to 256")
      ->check(integer(1, 256));
  command->add_option("--out", a.out,
                      "write the lines to this file, and print what they come to; default: print "
                      "the lines");
  command->callback([&context, arguments] {
    with_head(context, "score", *arguments,
              [&](const HeadInputs& inputs) { score(context, *arguments, inputs); });
  });
}

}  // namespace logitless::cli

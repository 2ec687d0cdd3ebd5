// SPDX-License-Identifier: Apache-2.0
// This file prints the demo's figures, for people and as JSON.
#include "examples/demo/report.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include <algorithm>

#include "cli/text.h"
#include "src/cpu/dispatch.h"
#include "src/cpu/gemm.h"
#include "src/cpu/thread_pool.h"

namespace logitless::cli::demo {
namespace {

using nlohmann::json;

constexpr int64_t curve_columns = 60, curve_rows = 10;
constexpr size_t sample_lines = 14;

// Returns 1234567 as "1 234 567".
std::string grouped(int64_t number) {
  const std::string digits = fmt::format("{}", number);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text.push_back(' ');
    text.push_back(digits[i]);
  }
  return text;
}

std::string first_lines(const std::string& text, size_t lines) {
  size_t end = 0;
  for (; lines > 0 && end < text.size(); --lines)
    end = std::min(text.find('\n', end), text.size() - 1) + 1;
  return text.substr(0, end);
}

// Puts the mark before every line, and cuts long lines short.
std::string marked(const std::string& text, const char* mark) {
  constexpr size_t most = 100;
  std::string result;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    size_t shown = std::min(end, at + most);
    // Does not cut a UTF-8 character in two.
    while (shown < end && (text[shown] & 0xc0) == 0x80) ++shown;
    if (end > at) result += fmt::format("{}{}\n", mark, text.substr(at, shown - at));
    at = end + 1;
  }
  return result;
}

void print_memory(const Memory& m) {
  fmt::print("\nMemory\n");
  print_table({{"  logits of one batch in f32, never held", format_bytes(m.logits)},
               {"  their gradient, never held either", format_bytes(m.logits)},
               {"  workspace of the loss, in their place", format_bytes(m.workspace)},
               {"  parameters", format_bytes(m.parameters)},
               {"  gradients", format_bytes(m.gradients)},
               {"  moments of Adam", format_bytes(m.optimizer)},
               {"  the whole process at its peak",
                m.peak_resident > 0 ? format_bytes(m.peak_resident) : "unknown"}});
}

void print_perplexities(const Outcome& o, int64_t vocab) {
  fmt::print("\nPerplexity on {} held-out words (lower is better)\n", grouped(o.heldout_words));
  print_table(
      {{"  uniform", fmt::format("{:.1f}", static_cast<double>(vocab))},
       {"  unigram, add-1", fmt::format("{:.1f}", o.baselines.unigram)},
       {fmt::format("  bigram, add-k (k = {:.2g}, the best for these words)", o.baselines.k),
        fmt::format("{:.1f}", o.baselines.bigram)},
       {"  this model", fmt::format("{:.1f}", o.perplexity)}});
}

}  // namespace

void print_text(const Text& text) {
  fmt::print("Text        {} files, {}{}: {} words and marks, {} different\n", text.files,
             format_bytes(static_cast<uint64_t>(text.bytes)),
             text.truncated ? " (the rest is left out)" : "",
             grouped(static_cast<int64_t>(text.train.size() + text.heldout.size())),
             grouped(text.distinct));
  fmt::print("Vocabulary  {} words, every one of them in every softmax\n", grouped(text.vocab()));
  fmt::print("Held out    {}: {} words and marks\n",
             text.heldout_files > 0 ? fmt::format("{} whole files", text.heldout_files)
                                    : std::string("every twentieth block of the text"),
             grouped(static_cast<int64_t>(text.heldout.size())));
}

void print_model(const Model& model) {
  const Shape& s = model.shape();
  fmt::print("Model       log-bilinear, {} words of context, {} wide{}: {} parameters\n", s.context,
             s.hidden, s.units > 0 ? fmt::format(", {} rectified units", s.units) : "",
             grouped(static_cast<int64_t>(model.gradient().all.size())));
  fmt::print("Machine     {}, {} threads, products in {} ({})\n\n", cpu::target_name(),
             cpu::num_threads(), name_of(model.head().dtype()),
             cpu::name_of(cpu::choose_engine(model.head().dtype()).arithmetic));
  std::fflush(stdout);
}

void print_outcome(const Outcome& o, const Text& text) {
  fmt::print("\nTraining loss, nats a word, over {} words in {} steps and {:.0f} s\n",
             grouped(o.training.tokens), grouped(static_cast<int64_t>(o.training.loss.size())),
             o.training.seconds);
  fmt::print("{}", draw_curve(o.training.loss, curve_columns, curve_rows));
  print_memory(o.memory);
  print_perplexities(o, text.vocab());
  fmt::print("\nExact: {} words' losses differ from the same sums in double by at most {:.1e}\n",
             o.exactness.words, o.exactness.largest_difference);
  fmt::print("\nAfter these held-out words\n{}\nit writes\n{}\n", marked(o.sample.prompt, "  > "),
             marked(first_lines(o.sample.text, sample_lines), "  | "));
  fmt::print("{:.0f} s in all\n", o.seconds);
}

json to_json(const Outcome& o, const Text& text, const Model& model) {
  const Shape& s = model.shape();
  return {{"text",
           {{"files", text.files},
            {"bytes", text.bytes},
            {"truncated", text.truncated},
            {"train_tokens", text.train.size()},
            {"heldout_tokens", text.heldout.size()},
            {"heldout_files", text.heldout_files},
            {"distinct", text.distinct}}},
          {"model",
           {{"vocab", s.vocab},
            {"dim", s.hidden},
            {"context", s.context},
            {"units", s.units},
            {"parameters", model.gradient().all.size()}}},
          {"machine",
           {{"isa", cpu::target_name()},
            {"threads", cpu::num_threads()},
            {"dtype", name_of(model.head().dtype())}}},
          {"training",
           {{"batch", model.head().batch()},
            {"steps", o.training.loss.size()},
            {"tokens", o.training.tokens},
            {"seconds", o.training.seconds},
            {"tokens_per_second", static_cast<double>(o.training.tokens) / o.training.seconds},
            {"loss", o.training.loss}}},
          {"memory_bytes",
           {{"logits", o.memory.logits},
            {"workspace", o.memory.workspace},
            {"parameters", o.memory.parameters},
            {"gradients", o.memory.gradients},
            {"optimizer", o.memory.optimizer},
            {"peak_resident", o.memory.peak_resident}}},
          {"perplexity",
           {{"words", o.heldout_words},
            {"unknown_share", o.unknown_share},
            {"unigram", o.baselines.unigram},
            {"bigram", o.baselines.bigram},
            {"bigram_k", o.baselines.k},
            {"model", o.perplexity}}},
          {"exactness",
           {{"words", o.exactness.words}, {"largest_difference", o.exactness.largest_difference}}},
          {"prompt", o.sample.prompt},
          {"sample", o.sample.text},
          {"seconds", o.seconds}};
}

}  // namespace logitless::cli::demo

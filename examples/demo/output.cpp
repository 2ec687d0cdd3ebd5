// SPDX-License-Identifier: Apache-2.0
// This file samples text and saves the model.
#include "examples/demo/output.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <set>
#include <utility>

#include "cli/safetensors.h"
#include "cli/text.h"

namespace logitless::cli::demo {
namespace {

constexpr double nucleus = 0.9;  // a word is drawn from the likeliest ones, which have this share
// Nats subtracted from a word's logit for each excess occurrence in the context.
constexpr double repetition = 1;
constexpr int64_t usual_words = 2;  // occurrences of a word without a penalty; below, of a mark
constexpr int64_t usual_marks = 5;
constexpr int prompts_tried = 64;

bool is_word(const std::string& token) {
  return is_word_character(token.front()) && unicode_mark(token) == 0;
}

// Draws the next word from the likeliest ones, and never unknown_word or document_start.
class Sampler {
 public:
  // `context` is [K], the nearest word first.
  Sampler(const Text& text, const SampleOptions& options, std::vector<Token> context, Model* model)
      : text_(text),
        options_(options),
        model_(model),
        random_(options.seed),
        context_(std::move(context)) {}

  Token next() {
    find_probabilities();
    const Token chosen = draw();
    std::copy_backward(context_.begin(), context_.end() - 1, context_.end());
    context_.front() = chosen;
    return chosen;
  }

 private:
  void find_probabilities() {
    const int64_t vocab = model_->shape().vocab, hidden = model_->shape().hidden;
    probability_.resize(static_cast<size_t>(vocab));
    const std::span<const float> h = model_->hidden(context_);
    const Parameters& p = model_->parameters();
    // The logits of one word, the only ones that the demo ever holds.
    products_.forward({h.data(), 1, hidden}, {p.weight, vocab, hidden}, false,
                      {probability_.data(), 1, vocab});
    for (size_t v = 0; v < probability_.size(); ++v) probability_[v] += p.bias[v];
    discourage_repetition();
    probability_[unknown_word] = probability_[document_start] = -INFINITY;
    for (float& z : probability_) z /= static_cast<float>(options_.temperature);
    const TensorView view = matrix_view(probability_.data(), DType::f32, 1, vocab);
    const Softmax op{.logits = view, .probabilities = view};
    WorkspaceSize size;
    check(workspace(op, {}, &size));
    if (workspace_.bytes() < size.recommended) workspace_ = Buffer(size.recommended);
    check(run(op, workspace_.workspace(), {}));
  }

  // Without this a small model repeats a word forever.
  void discourage_repetition() {
    const std::set<Token> different(context_.begin(), context_.end());
    for (const Token v : different) {
      const auto index = static_cast<size_t>(v);
      const int64_t usual = is_word(text_.words[index]) ? usual_words : usual_marks;
      const int64_t extra = std::count(context_.begin(), context_.end(), v) - usual;
      if (extra > 0) probability_[index] -= static_cast<float>(repetition * extra);
    }
  }

  Token draw() {
    order_.resize(probability_.size());
    std::iota(order_.begin(), order_.end(), Token{0});
    const auto p = [&](Token v) { return double{probability_[static_cast<size_t>(v)]}; };
    std::sort(order_.begin(), order_.end(),
              [&](Token a, Token b) { return p(a) != p(b) ? p(a) > p(b) : a < b; });
    // Uses 53 random bits, because standard distributions differ between libraries.
    double left = static_cast<double>(random_() >> 11) * 0x1p-53 * nucleus;
    for (const Token v : order_) {
      left -= p(v);
      if (left < 0) return v;
    }
    return order_.front();
  }

  const Text& text_;
  SampleOptions options_;
  Model* model_;
  std::mt19937_64 random_;
  std::vector<Token> context_;
  std::vector<float> probability_;
  std::vector<Token> order_;
  Products products_;
  Buffer workspace_;
};

// Finds where to continue among random places of the held-out part: at best after a line end.
int64_t choose_prompt(const std::vector<Token>& words, const Text& text, int64_t context,
                      uint64_t seed) {
  std::mt19937_64 random(seed);
  int64_t best = 0, most = std::numeric_limits<int64_t>::min();
  const auto size = static_cast<int64_t>(words.size());
  for (int i = 0; i < prompts_tried; ++i) {
    const auto end = static_cast<int64_t>(random() % static_cast<uint64_t>(size)) + 1;
    const int64_t first = std::max<int64_t>(0, end - context);
    const std::set<Token> different(words.begin() + first, words.begin() + end);
    auto score = static_cast<int64_t>(different.size());
    if (text.words[static_cast<size_t>(words[static_cast<size_t>(end - 1)])].front() != '\n') {
      score -= context;
    }
    if (different.contains(unknown_word) || different.contains(document_start)) score -= context;
    if (score > most) {
      most = score;
      best = end;
    }
  }
  return best;
}

// JSON and safetensors are UTF-8, which a text need not be.
std::string to_json_text(const std::vector<std::string>& words) {
  return nlohmann::json(words).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

Sample write_text(const Text& text, const SampleOptions& options, Model* model) {
  const int64_t context = model->shape().context;
  const int64_t end = choose_prompt(text.heldout, text, context, options.seed);
  Sample sample;
  Writer prompt;
  std::vector<Token> nearest_first(static_cast<size_t>(context), document_start);
  for (int64_t k = std::min(context, end); k > 0; --k) {
    const Token token = text.heldout[static_cast<size_t>(end - k)];
    nearest_first[static_cast<size_t>(k - 1)] = token;
    prompt.add(text.words[static_cast<size_t>(token)]);
  }
  sample.prompt = prompt.text();
  Sampler sampler(text, options, std::move(nearest_first), model);
  Writer writer;
  int64_t words = 0;
  // The second limit ends the loop if the model writes only marks.
  for (int64_t tokens = 0; words < options.words && tokens < 20 * options.words; ++tokens) {
    const std::string& word = text.words[static_cast<size_t>(sampler.next())];
    if (is_word(word)) ++words;
    writer.add(word);
  }
  sample.text = writer.text() + "\n";
  return sample;
}

void save_model(OutputFile& file, const Text& text, std::span<const int64_t> heldout_at,
                Model* model) {
  const Shape& shape = model->shape();
  const auto tokens = std::min(static_cast<int64_t>(heldout_at.size()), model->head().batch());
  const Batch batch =
      make_batch(text.heldout, heldout_at.first(static_cast<size_t>(tokens)), shape.context);
  const std::span<const float> hidden = model->hidden(batch.context);
  std::vector<TensorToWrite> tensors = {
      {"hidden", DType::f32, {tokens, shape.hidden}, hidden.data()},
      {"target", DType::i32, {tokens}, batch.target.data()}};
  for (const Parameters::View& view : model->parameters().views) {
    tensors.push_back({view.name, DType::f32, view.shape, view.data});
  }
  write_safetensors(file, tensors,
                    {{"format", "logitless demo 1"},
                     {"embedding_scale", fmt::format("{}", embedding_scale)},
                     {"vocabulary", to_json_text(text.words)}});
}

}  // namespace logitless::cli::demo

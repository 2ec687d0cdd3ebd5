// SPDX-License-Identifier: Apache-2.0
// Sampling and saving.
#include "cli/demo_output.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "cli/commands.h"
#include "cli/safetensors.h"
#include "cli/text.h"

namespace logitless::cli::demo {
namespace {

// Probabilities of the next word, without the two that are no words.
class Sampler {
 public:
  Sampler(const SampleOptions& options, Model* model)
      : options_(options),
        model_(model),
        random_(options.seed),
        context_(static_cast<size_t>(model->shape().context), document_start) {}

  Token next() {
    const int64_t vocab = model_->shape().vocab, hidden = model_->shape().hidden;
    probability_.resize(static_cast<size_t>(vocab));
    const std::span<const float> h = model_->hidden(context_);
    const Parameters& p = model_->parameters();
    // The only logits of the demo: one word's.
    products_.forward({h.data(), 1, hidden}, {p.weight, vocab, hidden}, false,
                      {probability_.data(), 1, vocab});
    for (size_t v = 0; v < probability_.size(); ++v) {
      probability_[v] = (probability_[v] + p.bias[v]) / static_cast<float>(options_.temperature);
    }
    probability_[unknown_word] = probability_[document_start] = -INFINITY;
    normalize();
    const Token chosen = draw();
    std::copy_backward(context_.begin(), context_.end() - 1, context_.end());
    context_.front() = chosen;
    return chosen;
  }

 private:
  void normalize() {
    const auto vocab = static_cast<int64_t>(probability_.size());
    const TensorView view = matrix_view(probability_.data(), DType::f32, 1, vocab);
    const Softmax op{.logits = view, .probabilities = view};
    WorkspaceSize size;
    check(workspace(op, {}, &size));
    if (workspace_.bytes() < size.recommended) workspace_ = Buffer(size.recommended);
    check(run(op, workspace_.workspace(), {}));
  }

  Token draw() {
    // 53 random bits: the same number on every machine, which a standard distribution is not.
    double left = static_cast<double>(random_() >> 11) * 0x1p-53 *
                  std::accumulate(probability_.begin(), probability_.end(), 0.0);
    Token last = 0;
    for (size_t v = 0; v < probability_.size(); ++v) {
      if (probability_[v] == 0) continue;
      last = static_cast<Token>(v);
      left -= static_cast<double>(probability_[v]);
      if (left < 0) break;
    }
    return last;
  }

  SampleOptions options_;
  Model* model_;
  std::mt19937_64 random_;
  std::vector<Token> context_;  // [K], the nearest first
  std::vector<float> probability_;
  Products products_;
  Buffer workspace_;
};

// JSON and safetensors are UTF-8; a text need not be.
std::string to_json_text(const std::vector<std::string>& words) {
  return nlohmann::json(words).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

std::string write_text(const Text& text, const SampleOptions& options, Model* model) {
  Sampler sampler(options, model);
  Writer writer;
  int64_t words = 0;
  // A model may write nothing but marks; that ends too.
  for (int64_t tokens = 0; words < options.words && tokens < 20 * options.words; ++tokens) {
    const std::string& word = text.words[static_cast<size_t>(sampler.next())];
    if (is_word_character(word.front()) && unicode_mark(word) == 0) ++words;
    writer.add(word);
  }
  return writer.text() + "\n";
}

void check_output(const std::string& path) {
  try {
    SafetensorsWriter unused(path);
  } catch (const SafetensorsError& e) {
    throw BadInput(e.what());
  }
}

void save_text(const std::string& path, const std::string& content) {
  const std::string part = path + ".part";
  std::ofstream file(part, std::ios::binary);
  file << content;
  file.close();
  std::error_code failed;
  if (file) std::filesystem::rename(part, path, failed);
  if (!file || failed) {
    std::filesystem::remove(part, failed);
    throw Failure(fmt::format("{}: cannot be written", path));
  }
}

void save_model(const std::string& path, const Text& text, std::span<const int64_t> heldout_at,
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
  SafetensorsWriter(path).commit(tensors, {{"format", "logitless demo 1"},
                                           {"embedding_scale", fmt::format("{}", embedding_scale)},
                                           {"vocabulary", to_json_text(text.words)}});
}

}  // namespace logitless::cli::demo

// SPDX-License-Identifier: Apache-2.0
// This file reads, numbers and splits the demo's text.
#include "examples/demo/text.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>
#include <random>

#include "cli/commands.h"

namespace logitless::cli::demo {
namespace {

namespace fs = std::filesystem;

// The most that is read, so that any folder can be given.
constexpr int64_t most_bytes = int64_t{256} << 20;
constexpr int64_t fewest_tokens = 1000;
constexpr int64_t wanted_vocab = 30000;  // words seen once are included only to reach this
constexpr double heldout_share = 0.05;
constexpr int64_t block_tokens = 1000;  // with few files, blocks of this size are held out instead

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw BadInput(fmt::format("cannot read {}", path.string()));
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (file.bad()) throw BadInput(fmt::format("cannot read {}", path.string()));
  return text;
}

// The whole text. Words are numbered in order of appearance.
struct Corpus {
  std::unordered_map<std::string, int32_t> number;
  std::vector<std::string> word;               // by number
  std::vector<std::vector<int32_t>> document;  // the word numbers of each
  int64_t bytes = 0;
  int64_t tokens = 0;
  bool truncated = false;
};

void add_document(std::string_view text, Corpus* corpus) {
  std::vector<int32_t> document;
  std::string key;
  split_words(text, [&](std::string_view token) {
    key.assign(token);
    const auto [at, is_new] =
        corpus->number.try_emplace(key, static_cast<int32_t>(corpus->word.size()));
    if (is_new) corpus->word.push_back(key);
    document.push_back(at->second);
  });
  if (document.empty()) return;
  corpus->tokens += static_cast<int64_t>(document.size());
  corpus->document.push_back(std::move(document));
}

Corpus read_corpus(const std::vector<fs::path>& files) {
  Corpus corpus;
  for (const fs::path& path : files) {
    if (corpus.bytes >= most_bytes) {
      corpus.truncated = true;
      break;
    }
    std::string text = read_file(path);
    if (text.find('\0') != std::string::npos) {
      if (files.size() == 1) throw BadInput(fmt::format("{} is not a text", path.string()));
      continue;
    }
    if (corpus.bytes + static_cast<int64_t>(text.size()) > most_bytes) {
      text.resize(static_cast<size_t>(most_bytes - corpus.bytes));
      corpus.truncated = true;
    }
    corpus.bytes += static_cast<int64_t>(text.size());
    add_document(text, &corpus);
  }
  return corpus;
}

struct Part {
  std::vector<int32_t> word;  // word numbers; -1 before every document or block
  void add(const int32_t* first, size_t count) {
    word.push_back(-1);
    word.insert(word.end(), first, first + count);
  }
  size_t size() const { return word.size(); }
};

// Holds out whole files in an order drawn by the seed, none larger than a quarter of the intended
// share. Returns how many files, or 0 if they have fewer words than the share.
int64_t hold_out_files(const Corpus& corpus, uint64_t seed, Part* train, Part* heldout) {
  const auto share = static_cast<size_t>(heldout_share * static_cast<double>(corpus.tokens));
  std::vector<size_t> order(corpus.document.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::mt19937_64 random(seed);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
  std::vector<bool> chosen(order.size(), false);
  int64_t count = 0;
  size_t tokens = 0;
  for (size_t i : order) {
    if (tokens >= share) break;
    if (corpus.document[i].size() > share / 4) continue;
    chosen[i] = true;
    tokens += corpus.document[i].size();
    ++count;
  }
  if (tokens < share) return 0;
  for (size_t i = 0; i < corpus.document.size(); ++i) {
    (chosen[i] ? heldout : train)->add(corpus.document[i].data(), corpus.document[i].size());
  }
  return count;
}

// Holds out every twentieth block of the text.
void hold_out_blocks(const Corpus& corpus, Part* train, Part* heldout) {
  const auto every = static_cast<size_t>(std::lround(1 / heldout_share));
  const auto block = static_cast<size_t>(
      std::clamp<int64_t>(corpus.tokens / static_cast<int64_t>(every) / 4, 50, block_tokens));
  size_t index = 0;
  for (const std::vector<int32_t>& document : corpus.document) {
    for (size_t i = 0; i < document.size(); i += block, ++index) {
      const size_t count = std::min(block, document.size() - i);
      (index % every == every / 2 ? heldout : train)->add(document.data() + i, count);
    }
  }
}

// Fills words and count from the training part, and returns each word number's token.
std::vector<Token> choose_vocabulary(const Corpus& corpus, const Part& train, int64_t most,
                                     Text* text) {
  std::vector<int64_t> count(corpus.word.size(), 0);
  for (int32_t w : train.word) {
    if (w >= 0) ++count[static_cast<size_t>(w)];
  }
  std::vector<int32_t> order;
  for (size_t w = 0; w < count.size(); ++w) {
    if (count[w] > 0) order.push_back(static_cast<int32_t>(w));
  }
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const int64_t more = count[static_cast<size_t>(a)] - count[static_cast<size_t>(b)];
    return more != 0 ? more > 0 : a < b;  // equal counts come in order of appearance
  });
  const auto seen_twice =
      std::count_if(count.begin(), count.end(), [](int64_t c) { return c > 1; });
  const auto distinct = static_cast<int64_t>(order.size());
  int64_t wanted =
      distinct >= wanted_vocab ? std::max<int64_t>(seen_twice, wanted_vocab) : seen_twice;
  wanted = std::min(wanted, most - 2);
  text->words = {"<unk>", "<document>"};
  text->count = {0, 0};
  std::vector<Token> token(corpus.word.size(), unknown_word);
  for (int64_t i = 0; i < distinct; ++i) {
    const auto w = static_cast<size_t>(order[static_cast<size_t>(i)]);
    if (i >= wanted) {
      text->count[unknown_word] += count[w];
      continue;
    }
    token[w] = static_cast<Token>(text->words.size());
    text->words.push_back(corpus.word[w]);
    text->count.push_back(count[w]);
  }
  text->count[document_start] = std::count(train.word.begin(), train.word.end(), -1);
  return token;
}

std::vector<Token> to_tokens(const Part& part, const std::vector<Token>& token) {
  std::vector<Token> result(part.size());
  std::transform(part.word.begin(), part.word.end(), result.begin(),
                 [&](int32_t w) { return w < 0 ? document_start : token[static_cast<size_t>(w)]; });
  return result;
}

}  // namespace

void Writer::add(std::string_view token) {
  if (token.empty()) return;
  const bool two_words = !text_.empty() && is_word_character(text_.back()) &&
                         is_word_character(token.front()) && unicode_mark(token) == 0 &&
                         !(text_.size() >= 3 && unicode_mark(text_.substr(text_.size() - 3)) > 0);
  if (two_words) text_.push_back(' ');
  text_.append(token);
}

Text read_text(const std::vector<fs::path>& files, const TextOptions& options) {
  const Corpus corpus = read_corpus(files);
  if (corpus.tokens < fewest_tokens) {
    throw BadInput(fmt::format("the text has {} words and marks; at least {} are needed",
                               corpus.tokens, fewest_tokens));
  }
  Text text;
  text.files = static_cast<int64_t>(corpus.document.size());
  text.bytes = corpus.bytes;
  text.distinct = static_cast<int64_t>(corpus.word.size());
  text.truncated = corpus.truncated;
  Part train, heldout;
  text.heldout_files = hold_out_files(corpus, options.seed, &train, &heldout);
  if (text.heldout_files == 0) hold_out_blocks(corpus, &train, &heldout);
  const std::vector<Token> token = choose_vocabulary(corpus, train, options.vocab, &text);
  text.train = to_tokens(train, token);
  text.heldout = to_tokens(heldout, token);
  return text;
}

}  // namespace logitless::cli::demo

// SPDX-License-Identifier: Apache-2.0
// The demo's text is read from files, split into words, numbered, and divided into a training and a
// held-out part.
//
// A word is an identifier or a number; a punctuation mark includes the blanks around it (", " and
// "," are two marks); a line break includes the next line's indentation. So prose and source code
// can be restored from their tokens, up to some blanks and empty lines.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace logitless::cli::demo {

using Token = int32_t;
inline constexpr Token unknown_word = 0;    // any word that is not in the vocabulary
inline constexpr Token document_start = 1;  // before every document, or block of it

// Returns the text files under `paths`, sorted, or with no paths the sources of Python's standard
// library. It throws BadInput naming what is missing.
std::vector<std::filesystem::path> find_text(const std::vector<std::string>& paths);

// Splits one document and calls add(std::string_view) for every token.
template <class F>
void split_words(std::string_view text, F&& add);

// Puts tokens back together, with a blank between two words and nothing elsewhere.
class Writer {
 public:
  void add(std::string_view token);
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

struct TextOptions {
  int64_t vocab = 50257;  // words at most, the two above included
  uint64_t seed = 1;      // chooses the held-out files
};

struct Text {
  std::vector<std::string> words;  // [V]  the most frequent come first, after the two above
  std::vector<int64_t> count;      // [V]  of each word in the training part
  std::vector<Token> train;
  std::vector<Token> heldout;
  int64_t files = 0;
  // 0: blocks of the text are held out, because there are too few files
  int64_t heldout_files = 0;
  int64_t bytes = 0;
  int64_t distinct = 0;    // different words in the whole text
  bool truncated = false;  // the text was longer than what the demo reads
  int64_t vocab() const { return static_cast<int64_t>(words.size()); }
};

// Reads the files, without binary ones, and builds all of the above. Throws BadInput if a file is
// unreadable, or the only one is binary, or the text is too short.
Text read_text(const std::vector<std::filesystem::path>& files, const TextOptions& options);

}  // namespace logitless::cli::demo

#include "examples/demo/words-inl.h"

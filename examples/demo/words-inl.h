// SPDX-License-Identifier: Apache-2.0
// The implementation of split_words. Tokens are views into the text, except line breaks and marks,
// whose blanks are normalized: those are in a buffer that the next token overwrites. Uses only the
// standard library, because ../train.cpp includes it too.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace logitless::cli::demo {

inline bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (c & 0x80) != 0;
}
inline bool is_digit(char c) { return c >= '0' && c <= '9'; }
inline bool is_word_character(char c) { return is_letter(c) || is_digit(c); }
inline bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\f'; }

// Returns the bytes of a dash, quotation mark or ellipsis of the block U+2010..U+203F, or 0.
inline size_t unicode_mark(std::string_view s) {
  return s.size() >= 3 && s[0] == '\xe2' && s[1] == '\x80' && static_cast<uint8_t>(s[2]) >= 0x90
             ? 3
             : 0;
}

// Returns the bytes of an apostrophe and its ending after `word`, as in don't and it's, or 0. A
// single r, b, f or u before a quote is the prefix of a string literal.
inline size_t contraction(std::string_view word, std::string_view rest) {
  if (word.size() == 1 && std::string_view("rbfuRBFU").find(word[0]) != std::string_view::npos) {
    return 0;
  }
  const size_t quote = rest.starts_with('\'') ? 1 : rest.starts_with("\xe2\x80\x99") ? 3 : 0;
  if (quote == 0) return 0;
  for (std::string_view ending : {"s", "t", "re", "ve", "ll", "d", "m"}) {
    const std::string_view after = rest.substr(quote);
    if (after.starts_with(ending) &&
        (after.size() == ending.size() || !is_word_character(after[ending.size()]))) {
      return quote + ending.size();
    }
  }
  return 0;
}

inline size_t word_length(std::string_view s) {
  const bool number = is_digit(s[0]);
  size_t n = 1;
  while (n < s.size()) {
    const bool point = number && s[n] == '.' && n + 1 < s.size() && is_digit(s[n + 1]);
    if (!point && (!is_word_character(s[n]) || unicode_mark(s.substr(n)) > 0)) break;
    ++n;
  }
  return number ? n : n + contraction(s.substr(0, n), s.substr(n));
}

// Returns the length of a mark such as "==", "-----" or "->": a run of one character other than a
// bracket, or an operator that ends in '=' or '>'.
inline size_t mark_length(std::string_view s) {
  if (const size_t n = unicode_mark(s); n > 0) return n;
  if (std::string_view("()[]{}").find(s[0]) != std::string_view::npos) return 1;
  size_t n = 1;
  while (n < s.size() && s[n] == s[0]) ++n;
  if (n >= s.size()) return n;
  const bool assigns =
      s[n] == '=' && std::string_view("+-*/%&|^!<>:@").find(s[0]) != std::string_view::npos;
  const bool arrow = s[n] == '>' && (s[0] == '-' || s[0] == '=') && n == 1;
  return assigns || arrow ? n + 1 : n;
}

// Returns "\n" or "\n\n" (with an empty line between) and the indentation of the line that follows,
// with a tab as four.
inline std::string_view line_break(std::string_view s, size_t* used, std::string* buffer) {
  constexpr int deepest = 40;
  int lines = 0, indentation = 0;
  size_t n = 0;
  for (; n < s.size() && (s[n] == '\n' || is_blank(s[n])); ++n) {
    if (s[n] == '\n') {
      ++lines;
      indentation = 0;
    } else {
      indentation += s[n] == '\t' ? 4 : s[n] == ' ' ? 1 : 0;
    }
  }
  *used = n;
  buffer->assign(static_cast<size_t>(std::min(lines, 2)), '\n');
  buffer->append(static_cast<size_t>(std::min(indentation, deepest)), ' ');
  return *buffer;
}

template <class F>
void split_words(std::string_view text, F&& add) {
  std::string buffer;
  bool after_word = false, blank = false;
  while (!text.empty()) {
    size_t n = 0;
    if (is_blank(text[0])) {
      blank = true;
      n = 1;
    } else if (text[0] == '\n') {
      add(line_break(text, &n, &buffer));
      after_word = blank = false;
    } else if (is_word_character(text[0]) && unicode_mark(text) == 0) {
      n = word_length(text);
      add(text.substr(0, n));
      after_word = true;
      blank = false;
    } else {
      n = mark_length(text);
      buffer.clear();
      if (after_word && blank) buffer.push_back(' ');
      buffer.append(text.substr(0, n));
      size_t blanks = 0;
      while (n + blanks < text.size() && is_blank(text[n + blanks])) ++blanks;
      const bool line_ends = n + blanks == text.size() || text[n + blanks] == '\n';
      if (blanks > 0 && !line_ends) buffer.push_back(' ');
      n += blanks;
      add(std::string_view(buffer));
      after_word = blank = false;
    }
    text.remove_prefix(n);
  }
}

}  // namespace logitless::cli::demo

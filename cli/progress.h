// SPDX-License-Identifier: Apache-2.0
// Long work shows a progress bar on stderr, where stderr is a terminal, and nothing elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace logitless::cli {

class Progress {
 public:
  explicit Progress(int64_t total);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Shows `done` of the total, and what is under way. It is drawn at most ten times a second.
  void update(int64_t done, const std::string& text);
  // Takes the bar away, so that a line can be printed.
  void clear();

 private:
  int64_t total_;
  bool terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace logitless::cli

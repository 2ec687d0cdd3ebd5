// SPDX-License-Identifier: Apache-2.0
// A progress bar on stderr for long work, only if stderr is a terminal.
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

  // Shows `done` of the total, and `text`. Redraws at most ten times per second.
  void update(int64_t done, const std::string& text);
  // Removes the bar, so that a line can be printed.
  void clear();

 private:
  int64_t total_;
  bool terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace logitless::cli

// SPDX-License-Identifier: Apache-2.0
#include "cli/progress.h"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>

namespace logitless::cli {
namespace {

constexpr int64_t kWidth = 30;

size_t terminal_columns() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

Progress::Progress(int64_t total)
    : total_(std::max<int64_t>(total, 1)), terminal_(::isatty(STDERR_FILENO) == 1) {}

void Progress::update(int64_t done, const std::string& text) {
  if (!terminal_) return;
  const auto now = std::chrono::steady_clock::now();
  if (drawn_ && now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  const int64_t filled = std::clamp<int64_t>(done * kWidth / total_, 0, kWidth);
  const std::string bar = std::string(static_cast<size_t>(filled), '#') +
                          std::string(static_cast<size_t>(kWidth - filled), '.');
  const std::string line = fmt::format("[{}] {:3} %  {}", bar, done * 100 / total_, text);
  fmt::print(stderr, "\r\x1b[K{}", line.substr(0, terminal_columns() - 1));
  std::fflush(stderr);
  drawn_ = true;
}

void Progress::clear() {
  if (drawn_) fmt::print(stderr, "\r\x1b[K");
  drawn_ = false;
}

}  // namespace logitless::cli

// SPDX-License-Identifier: Apache-2.0
// This file draws the progress line and the loss curve.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "examples/demo/report.h"

namespace logitless::cli::demo {
namespace {

constexpr double seconds_between_lines = 5;
constexpr double seconds_between_redraws = 0.1;

// A braille character is two dots wide and four high; its code has one bit per dot.
constexpr int64_t cell_width = 2, cell_height = 4;
constexpr uint8_t dot_bits[cell_height][cell_width] = {
    {0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};

std::string braille(uint8_t dots) {  // the character is U+2800 + dots in UTF-8
  return {'\xe2', static_cast<char>(0xa0 | dots >> 6), static_cast<char>(0x80 | (dots & 0x3f))};
}

// Returns the means of `count` stretches of equal length.
std::vector<double> buckets(std::span<const float> values, int64_t count) {
  std::vector<double> result;
  const auto size = static_cast<int64_t>(values.size());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = i * size / count;
    const int64_t last = std::max(first + 1, (i + 1) * size / count);
    double sum = 0;
    for (int64_t j = first; j < last; ++j)
      sum += static_cast<double>(values[static_cast<size_t>(j)]);
    result.push_back(sum / static_cast<double>(last - first));
  }
  return result;
}

}  // namespace

void Progress::show(const TrainProgress& p) {
  if (mode_ == Mode::silent) return;
  const double between = mode_ == Mode::terminal ? seconds_between_redraws : seconds_between_lines;
  if (p.step > 1 && p.done < 1 && p.seconds - shown_ < between) return;
  shown_ = p.seconds;
  const auto left = static_cast<int64_t>(p.seconds / p.done - p.seconds);
  const std::string numbers = fmt::format("{:3.0f} %  loss {:.3f}  {:.0f} tokens/s  {}:{:02} left",
                                          100 * p.done, p.loss, p.rate, left / 60, left % 60);
  if (mode_ == Mode::lines) {
    fmt::print("step {}  {}\n", p.step, numbers);
  } else {
    constexpr int64_t width = 30;
    const auto full = static_cast<int64_t>(std::floor(p.done * width));
    // Returns to the line's start, overwrites it, and erases the rest of the old line.
    fmt::print("\r[{:<{}}] {}\x1b[K{}", std::string(static_cast<size_t>(full), '#'), width, numbers,
               p.done < 1 ? "" : "\n");
  }
  std::fflush(stdout);
}

void Progress::say(const char* what) {
  if (mode_ == Mode::silent) return;
  fmt::print("{}\n", what);
  std::fflush(stdout);
}

std::string draw_curve(std::span<const float> values, int64_t columns, int64_t rows) {
  if (values.empty()) return {};
  const std::vector<double> curve = buckets(values, columns * cell_width);
  const auto [lowest, highest] = std::minmax_element(curve.begin(), curve.end());
  const double low = *lowest, high = std::max(*highest, low + 1e-3);
  std::vector<uint8_t> cells(static_cast<size_t>(columns * rows), 0);
  const double dots = static_cast<double>(rows * cell_height - 1);
  int64_t before = -1;
  for (int64_t x = 0; x < columns * cell_width; ++x) {
    if (!std::isfinite(curve[static_cast<size_t>(x)])) continue;
    const auto y = std::clamp<int64_t>(
        std::lround((high - curve[static_cast<size_t>(x)]) / (high - low) * dots), 0,
        rows * cell_height - 1);
    // A vertical stroke connects this dot to the previous one.
    const int64_t from = before < 0 ? y : before;
    for (int64_t dot = std::min(from, y); dot <= std::max(from, y); ++dot) {
      cells[static_cast<size_t>(dot / cell_height * columns + x / cell_width)] |=
          dot_bits[dot % cell_height][x % cell_width];
    }
    before = y;
  }
  std::string picture;
  for (int64_t r = 0; r < rows; ++r) {
    const double value =
        high - (high - low) * (static_cast<double>(r) + 0.5) / static_cast<double>(rows);
    picture += fmt::format("{:7.2f} |", value);
    for (int64_t c = 0; c < columns; ++c)
      picture += braille(cells[static_cast<size_t>(r * columns + c)]);
    picture += "\n";
  }
  return picture;
}

}  // namespace logitless::cli::demo

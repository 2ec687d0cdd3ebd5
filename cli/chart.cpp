// SPDX-License-Identifier: Apache-2.0
#include "cli/chart.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

namespace logitless::cli {
namespace {

constexpr const char* kColours[] = {"#2f6fb0", "#d08a2e", "#4a9a62", "#8a5aa8"};
constexpr int kRow = 26, kBar = 16, kTop = 84, kBottom = 44, kMargin = 20;
constexpr int kPlot = 420;  // width of the plot, from share 0 to the last tick
constexpr double kLargestShare = 2;
constexpr double kCharacter = 6.8;  // width of a character at the labels' size

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string text(double x, double y, const std::string& words, const char* anchor,
                 const char* style = "") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}>{}</text>\n", x, y,
                     anchor, style, escaped(words));
}

std::string rectangle(double x, double y, double width, double height, const char* colour) {
  return fmt::format(
      "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" rx=\"2\" fill=\"{}\"/>\n",
      x, y, width, height, colour);
}

const char* colour_of(int group) {
  return kColours[static_cast<size_t>(group) % std::size(kColours)];
}

double text_width(size_t longest) { return kCharacter * static_cast<double>(longest); }

std::string grid(double left, double right_share, double height) {
  std::string out;
  const int step = right_share > 1.4 ? 50 : 20;
  for (int percent = 0; percent <= std::lround(right_share * 100); percent += step) {
    const double x = left + kPlot * percent / 100.0 / right_share;
    const char* colour = percent == 100 ? "#555" : "#ddd";
    out += fmt::format(
        "<line x1=\"{0:.1f}\" y1=\"{1}\" x2=\"{0:.1f}\" y2=\"{2:.1f}\" stroke=\"{3}\"/>\n", x,
        kTop - 6, height - kBottom, colour);
    out += text(x, height - kBottom + 16, fmt::format("{} %", percent), "middle");
  }
  return out;
}

std::string legend(const Chart& chart, double left) {
  std::string out;
  double x = left;
  for (size_t i = 0; i < chart.legend.size(); ++i) {
    out += rectangle(x, kTop - 32, 11, 11, colour_of(static_cast<int>(i)));
    out += text(x + 16, kTop - 22, chart.legend[i], "start");
    x += 36 + text_width(chart.legend[i].size());
  }
  return out;
}

}  // namespace

std::string to_svg(const Chart& chart) {
  size_t longest_label = 0, longest_note = 0;
  double largest = 1;
  for (const Bar& bar : chart.bars) {
    longest_label = std::max(longest_label, bar.label.size());
    longest_note = std::max(longest_note, bar.note.size());
    largest = std::max(largest, bar.share);
  }
  // Data in a cache may far exceed the memory bandwidth, so its bar is cut off at the plot's edge.
  const double right_share = std::min(std::ceil(largest * 5) / 5, kLargestShare);
  const double left = kMargin + text_width(longest_label) + 10;
  const double width = left + kPlot + 12 + text_width(longest_note) + kMargin;
  const double height = kTop + kRow * static_cast<double>(chart.bars.size()) + kBottom;
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
      "viewBox=\"0 0 {0:.0f} {1:.0f}\" font-family=\"sans-serif\" font-size=\"12\" "
      "fill=\"#222\">\n",
      width, height);
  out += fmt::format("<rect width=\"{:.0f}\" height=\"{:.0f}\" fill=\"#fff\"/>\n", width, height);
  out += text(kMargin, 24, chart.title, "start", " font-size=\"15\" font-weight=\"bold\"");
  out += text(kMargin, 42, chart.subtitle, "start", " fill=\"#666\"");
  out += legend(chart, left) + grid(left, right_share, height);
  for (size_t i = 0; i < chart.bars.size(); ++i) {
    const Bar& bar = chart.bars[i];
    const double y = kTop + kRow * static_cast<double>(i);
    const double length = kPlot * std::clamp(bar.share, 0.0, right_share) / right_share;
    out += text(left - 8, y + kBar - 4, bar.label, "end");
    out += rectangle(left, y, std::max(length, 1.0), kBar, colour_of(bar.group));
    out += text(left + kPlot + 12, y + kBar - 4, bar.note, "start");
  }
  return out + "</svg>\n";
}

}  // namespace logitless::cli

// SPDX-License-Identifier: Apache-2.0
// Horizontal bars of shares of a limit, as an SVG file.
#pragma once

#include <string>
#include <vector>

namespace logitless::cli {

struct Bar {
  std::string label;  // left of the bar
  std::string note;   // right of the bar
  double share = 0;   // of the limit; 1 is the limit itself
  int group = 0;      // chooses the colour and the line of the legend
};

struct Chart {
  std::string title, subtitle;
  std::vector<std::string> legend;  // by group
  std::vector<Bar> bars;
};

std::string to_svg(const Chart& chart);

}  // namespace logitless::cli

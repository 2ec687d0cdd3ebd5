// SPDX-License-Identifier: Apache-2.0
// Draws horizontal bars of shares of a limit, as an SVG file.
#pragma once

#include <string>
#include <vector>

namespace logitless::cli {

struct Bar {
  std::string label;  // it stands left of the bar
  std::string note;   // it stands right of it
  double share = 0;   // it is a share of the limit, whose line is at 1
  int group = 0;      // it decides the colour and the line of the legend
};

struct Chart {
  std::string title, subtitle;
  std::vector<std::string> legend;  // each group has one
  std::vector<Bar> bars;
};

std::string to_svg(const Chart& chart);

}  // namespace logitless::cli

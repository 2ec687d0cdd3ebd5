// SPDX-License-Identifier: Apache-2.0
// These are the numbers of a case, reproducible from its seed on every machine.
#pragma once

#include <cstdint>
#include <vector>

#include "cases.h"

namespace logitless::conformance {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u) {}
  uint64_t bits();
  double uniform();  // it lies in [0, 1)
  double normal();   // the mean is 0, the variance 1
  // Gives each element what normal() gives next. Those drawn lately are copied, for a test runs the
  // same case many times, and most of that time would be these.
  void fill_normal(std::vector<double>& values);
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(bits() % static_cast<uint64_t>(bound));
  }

 private:
  uint64_t state_;
};

struct Values {
  std::vector<double> target;         // [N]
  std::vector<double> input, weight;  // [N,D] [V,D]; linear ops have them
  std::vector<double> logits;         // [N,V]; logits ops have them
};
// Targets lie in [0, vocab_total) but for the ignored and outside ones; the model's data are those
// before any rounding to a dtype.
Values make_values(const Case& c);

std::vector<double> normals(int64_t count, uint64_t seed, double scale = 1, double offset = 0);

}  // namespace logitless::conformance

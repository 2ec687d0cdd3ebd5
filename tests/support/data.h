// SPDX-License-Identifier: Apache-2.0
// The values of a case, reproducible from its seed on every machine.
#pragma once

#include <cstdint>
#include <vector>

#include "cases.h"

namespace logitless::conformance {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u) {}
  uint64_t bits();
  double uniform();  // in [0, 1)
  double normal();   // mean 0, variance 1
  // Fills `values` with the next normal() numbers. Recent sequences are cached: tests repeat cases,
  // and would spend most of their time here.
  void fill_normal(std::vector<double>& values);
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(bits() % static_cast<uint64_t>(bound));
  }

 private:
  uint64_t state_;
};

struct Values {
  std::vector<double> target;         // [N]
  std::vector<double> input, weight;  // [N,D] [V,D]; in linear ops
  std::vector<double> logits;         // [N,V]; in logits ops
};
// Targets are in [0, vocab_total), except ignored and outside ones. Values are not yet rounded to a
// dtype.
Values make_values(const Case& c);

std::vector<double> normals(int64_t count, uint64_t seed, double scale = 1, double offset = 0);

}  // namespace logitless::conformance

// SPDX-License-Identifier: Apache-2.0
// Compares the row kernels of divergences with their formulas in double, on every instruction set.
#include "src/cpu/divergence_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "row_kernels.h"

namespace logitless::cpu {
namespace {

// One row of both heads. The logits are log-probabilities, so that both lse are 0.
struct Rows {
  std::vector<float> z, t;
};

Rows rows_apart(double most) {
  Rows rows;
  for (int j = 0; j < 203; ++j) {
    const float log_q = -1 - 0.3f * static_cast<float>(j % 19);
    rows.t.push_back(log_q);
    rows.z.push_back(static_cast<float>(log_q + most * std::sin(j)));
  }
  return rows;
}

double slope_of(DivergenceKind kind, double beta, double d) {
  using enum DivergenceKind;
  if (kind == reverse_kl) return d;
  if (kind == jsd) return -std::log1p(beta * std::expm1(-d));
  if (kind == skew_kl) return (1 - beta) * std::expm1(d) / (beta + (1 - beta) * std::exp(d));
  return d > 0 ? 0.5 : d < 0 ? -0.5 : 0;
}

double dz_of(const DivergenceTerms& terms, double z, double t) {
  using enum DivergenceKind;
  if (terms.kind == forward_kl) return std::exp(t) * std::expm1(z - t);
  const bool mixes = terms.kind == jsd || terms.kind == skew_kl;
  return (mixes ? 1 - double{terms.beta} : 1) * std::exp(z) *
         slope_of(terms.kind, terms.beta, z - t);
}

// dz stays accurate however close the heads are, and however small beta is.
TEST_P(RowKernels, SmallGradientsKeepTheirDigits) {
  for (int32_t kind = 0; kind < 5; ++kind) {
    for (const float beta : {1e-12f, 1e-3f, 0.5f, 0.999f}) {
      for (const double most : {1e-5, 0.1, 2.0, 30.0}) {
        const DivergenceTerms terms{static_cast<DivergenceKind>(kind), beta, 1 - beta, 0};
        const Rows rows = rows_apart(most);
        const auto count = static_cast<int64_t>(rows.z.size());
        std::vector<float> dz(rows.z.size());
        divergence_gradient(terms, {}, {}, {}, rows.z.data(), rows.t.data(), count, -1, dz.data());
        for (size_t j = 0; j < dz.size(); ++j) {
          const double want = dz_of(terms, rows.z[j], rows.t[j]);
          // The rounded difference z - t has a relative error that its exponential multiplies.
          const double relative = 10 + 2 * std::fabs(rows.z[j] - rows.t[j]);
          EXPECT_NEAR(dz[j], want, relative * kU * std::fabs(want) + 0x1p-126)
              << "kind " << kind << ", beta " << beta << ", z " << rows.z[j] << ", t " << rows.t[j];
        }
      }
    }
  }
}

TEST_P(RowKernels, EqualRowsAreExactlyNoDistanceApart) {
  const Rows rows = rows_apart(3);
  const auto count = static_cast<int64_t>(rows.z.size());
  for (int32_t kind = 0; kind < 5; ++kind) {
    const DivergenceTerms terms{static_cast<DivergenceKind>(kind), 0.3f, 0.7f, 0};
    const DivergenceSums sums = divergence_block(terms, {}, rows.z.data(), rows.z.data(), count,
                                                 {.value = true, .mean = true});
    EXPECT_EQ(sums.value, 0);
    EXPECT_EQ(sums.mean, 0);
    std::vector<float> dz(rows.z.size(), 1);
    divergence_gradient(terms, {}, {}, {}, rows.z.data(), rows.z.data(), count, -1, dz.data());
    for (const float x : dz) EXPECT_EQ(x, 0);
  }
}

TEST_P(RowKernels, AColumnThatBothLeaveOutAddsNothing) {
  for (int32_t kind = 0; kind < 5; ++kind) {
    const DivergenceTerms terms{static_cast<DivergenceKind>(kind), 0.3f, 0.7f, 0};
    const DivergenceWants wants{true, true, true};
    Rows rows = rows_apart(3);
    const DivergenceSums alone =
        divergence_block(terms, {}, rows.z.data(), rows.t.data(), 5, wants);
    for (int j = 5; j < 203; ++j) rows.z[j] = rows.t[j] = -kInf;
    const DivergenceSums beside =
        divergence_block(terms, {}, rows.z.data(), rows.t.data(), 203, wants);
    EXPECT_NEAR(beside.value, alone.value, 8 * kU * alone.value);
    EXPECT_NEAR(beside.acceptance, alone.acceptance, 8 * kU * alone.acceptance);
    EXPECT_FALSE(std::isnan(beside.mean));
  }
}

}  // namespace
}  // namespace logitless::cpu

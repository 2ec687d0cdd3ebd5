// SPDX-License-Identifier: Apache-2.0
// How CUDA divides rows of given logits among blocks; needs no GPU.
#include <gtest/gtest.h>

#include "src/cuda/rows/rows_plan.h"

namespace logitless::cuda {
namespace {

constexpr int64_t kHopper = 232448, kAmpere = 166912, kAda = 101376;

TEST(CudaRowsPlan, CoversEveryColumnWithinTheDevice) {
  for (const int64_t shared : {kHopper, kAmpere, kAda}) {
    for (const bool clusters : {false, true}) {
      for (const int64_t bytes : {2, 4}) {
        for (int64_t v = 1; v < (int64_t{1} << 30); v += 1 + v / 7) {
          const RowsPlan p = plan_rows(v, bytes, shared, clusters);
          const int64_t slice = int64_t{p.tile} * p.tiles;
          ASSERT_GE(slice * p.cluster, v) << v;
          ASSERT_LT(slice * (p.cluster - 1), v) << v << ": a block without columns";
          ASSERT_LT(int64_t{p.tile} * (p.tiles - 1), v) << v;
          ASSERT_EQ(p.tile % 64, 0) << v;
          ASSERT_EQ(p.shared_bytes, p.tile * bytes + rows_margin) << v;
          ASSERT_LE(p.shared_bytes + 1024, shared) << v;
          ASSERT_TRUE(p.threads >= 32 && p.threads <= most_row_threads &&
                      (p.threads & (p.threads - 1)) == 0);
          ASSERT_TRUE(p.cluster >= 1 && p.cluster <= (clusters ? 8 : 1) &&
                      (p.cluster & (p.cluster - 1)) == 0);
        }
      }
    }
  }
}

// A cluster of 8 blocks holds a row in shared memory: 227 KB per block, minus other uses.
TEST(CudaRowsPlan, ARowIsReadOnceWhereAClusterHoldsIt) {
  for (const int64_t v : {1, 1000, 32000, 50257, 128256, 256000, 460000}) {
    EXPECT_EQ(plan_rows(v, 4, kHopper, true).tiles, 1) << v;
    EXPECT_EQ(plan_rows(2 * v, 2, kHopper, true).tiles, 1) << v;
  }
  EXPECT_GT(plan_rows(463000, 4, kHopper, true).tiles, 1);
  EXPECT_EQ(plan_rows(41000, 4, kAmpere, false).tiles, 1);
  EXPECT_GT(plan_rows(42000, 4, kAmpere, false).tiles, 1);
}

TEST(CudaRowsPlan, ThreeBlocksShareAMultiprocessor) {
  for (const int64_t v : {32000, 50257, 128256}) {
    for (const int64_t bytes : {2, 4}) {
      const RowsPlan p = plan_rows(v, bytes, kHopper, true);
      EXPECT_LE(3 * (p.shared_bytes + 2048), kHopper + 1024) << v << ", " << bytes << " bytes";
      EXPECT_EQ(p.threads, 256);
    }
  }
}

}  // namespace
}  // namespace logitless::cuda

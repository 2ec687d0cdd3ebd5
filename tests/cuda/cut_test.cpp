// SPDX-License-Identifier: Apache-2.0
// How Hopper's kernels divide their tiles among clusters; needs no GPU.
#include <algorithm>
#include <array>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "src/cuda/linear/plan.h"
#include "src/cuda/linear/tiled/cut.h"
#include "src/cuda/linear/units.h"

namespace logitless::cuda {
namespace {

TEST(CudaUnits, EveryTileIsDoneOnceAndFoundAgain) {
  for (const int clusters : {1, 7, 66, 132}) {
    for (const int rows : {0, 1, 3, 4, 5, 16, 40}) {
      for (const int tiles : {1, 7, 8, 9, 64, 127, 262, 668}) {
        for (const int width : {1, unit_tiles}) {
          const Units u = Units::make(rows, tiles, width, clusters);
          std::vector<int> item_of(static_cast<size_t>(rows * tiles), -1);
          for (int n = 0; n < u.items; ++n) {
            const UnitItem item = u.item(n);
            ASSERT_EQ(item.end - item.tile, item.single < 0 ? width : 1);
            for (int tile = item.tile; tile < item.end; ++tile) {
              int& done = item_of.at(static_cast<size_t>(item.row_cluster * tiles + tile));
              ASSERT_EQ(done, -1) << "tile " << tile << " twice";
              done = item.single;
              if (width == 1) continue;
              const int unit = tile / width;
              ASSERT_EQ(u.single(item.row_cluster, unit, tile - unit * width), item.single);
            }
          }
          for (int row = 0; width > 1 && row < rows; ++row) {
            for (int unit = 0; unit < u.columns(); ++unit) {
              ASSERT_EQ(unit >= u.first_single(row), u.single(row, unit, 0) >= 0);
            }
          }
          EXPECT_EQ(u.items - u.whole, u.singles());
          EXPECT_EQ(u.whole * width + u.singles(), rows * tiles);
          if (width > 1 && rows > 0) {
            EXPECT_LE(u.singles(), most_singles(rows, tiles, clusters));
            EXPECT_LE(u.singles(), most_singles(rows + 5, tiles, clusters));
          }
          // Whole units are spread evenly over the clusters.
          EXPECT_EQ(u.whole % (width == 1 ? 1 : clusters), 0);
        }
      }
    }
  }
}

TEST(CudaCut, TakesEveryStepOfEveryTileOnce) {
  for (const auto& [tiles, clusters] : {std::pair{0, 66},
                                        {1, 66},
                                        {4, 66},
                                        {28, 66},
                                        {65, 66},
                                        {66, 66},
                                        {67, 66},
                                        {132, 66},
                                        {176, 66},
                                        {352, 66},
                                        {5511, 66},
                                        {1, 132},
                                        {4, 132},
                                        {22, 132},
                                        {131, 132},
                                        {300, 132}}) {
    for (const int depth : {0, 1, 5, 15, 24, 48, 128, 2004}) {
      for (const int slots : {0, 10, 66, 132, 198}) {
        const tiled::Cut cut = tiled::cut_tiles(tiles, depth, clusters, slots);
        EXPECT_LE(cut.slots(), slots);
        EXPECT_LE(cut.steps(clusters), (tiles + clusters - 1) / clusters * depth);
        // A tile's depth steps are done in order, from the first.
        std::vector<int> done(static_cast<size_t>(tiles), 0);
        for (int item = 0; item < cut.items(); ++item) {
          int& steps = done.at(static_cast<size_t>(cut.tile(item)));
          EXPECT_EQ(cut.begin(item), steps);
          EXPECT_GE(cut.end(item), cut.begin(item) + std::min(depth, 1)) << "a slice of nothing";
          steps = cut.end(item);
        }
        for (const int steps : done) EXPECT_EQ(steps, depth);
      }
    }
  }
}

// Both products share a launch: every cluster works on one of them, and grad_input's slices use at
// most `slots` slots.
TEST(CudaCut, SharesTheClusters) {
  for (const int clusters : {2, 3, 9, 66, 72}) {
    for (const int slots : {0, 7, 32, 132, 198}) {
      for (const int tokens : {1, 8, 16, 64}) {
        const tiled::Shares shares =
            tiled::share_teams(divide_up(tokens, 8) * 4, 786, 393, tokens, clusters, slots);
        EXPECT_GE(shares.input_teams, 1);
        EXPECT_LT(shares.input_teams, clusters);
        EXPECT_LE(shares.input.slots(), slots);
        EXPECT_GE(shares.steps, shares.input.steps(shares.input_teams));
      }
    }
  }
  EXPECT_EQ(tiled::share_teams(4, 786, 393, 8, 1, 32).input_teams, 0) << "one cluster";
}

TEST(CudaCut, FillsTheLastRound) {
  // Llama-3's grad_input has 352 tiles, which are 5.33 rounds of 66 clusters.
  const tiled::Cut cut = tiled::cut_tiles(352, 2004, 66, 132);
  EXPECT_EQ(cut.tail, 22);
  EXPECT_EQ(cut.slices, 3);
}

}  // namespace
}  // namespace logitless::cuda

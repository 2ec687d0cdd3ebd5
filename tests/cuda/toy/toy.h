// SPDX-License-Identifier: Apache-2.0
// The smallest engine that linear/tiled allows: plain bf16 calls, in tiles of 32 tokens x 64
// columns, with kernels of a few lines. A new family starts from a copy of it.
#pragma once

#include "src/cuda/linear/tiled/engine.h"

namespace logitless::cuda::toy {

inline constexpr tiled::Tile tile{.rows = 32, .columns = 64, .depth = 16};
static_assert(tile.is_valid());

class ToyEngine final : public tiled::TiledEngine {
 public:
  ToyEngine() : TiledEngine(toy::tile) {}
  const char* name() const override { return "toy"; }
  bool serves(const DeviceInfo&) const override { return true; }
  bool serves(const Call& op, const LinearShape& shape) const override;
  bool is_batch_invariant() const override { return false; }  // other engines serve most calls
  bool finds_maximum(const LinearShape&) const override { return true; }
  DeviceSpeed speed(const DeviceInfo& device) const override;

  void logits(const LinearWork& work, int64_t first, int64_t columns,
              const Panel& panel) const override;
  void remake(const LinearWork& work, const Panel& panel) const override;
  void input_sums(const LinearWork& work, const tiled::Kept& kept, const Range& rows, float* sums,
                  bool of_e, bool add) const override;
  void grad_input(const LinearWork& work, const tiled::Kept& kept, bool of_e) const override;
  void grad_weight(const LinearWork& work, const Panel& panel, const char* rows, bool of_e,
                   bool add) const override;
};

}  // namespace logitless::cuda::toy

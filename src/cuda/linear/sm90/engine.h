// SPDX-License-Identifier: Apache-2.0
// Hopper's engine. Some kernels multiply and compute sums, E or dz from the logits (forward.cuh);
// others compute the gradients' products (product.cuh, few_tokens.cuh).
#pragma once

#include "src/cuda/linear/sm90/tile.h"
#include "src/cuda/linear/tiled/engine.h"

namespace logitless::cuda::sm90 {

inline constexpr tiled::Tile tile{.rows = cluster_rows,
                                  .columns = tile_columns,
                                  .depth = tile_depth,
                                  .blocks = 2,
                                  .works_apart = true,
                                  .in_units = true,
                                  .slices = true,
                                  .runs_both = true,
                                  .weight_group = weight_group,
                                  .reads_rows = true,
                                  .starts_early = true};
static_assert(tile.is_valid());

class HopperEngine final : public tiled::TiledEngine {
 public:
  HopperEngine() : TiledEngine(sm90::tile) {}
  const char* name() const override { return "sm90"; }
  bool serves(const DeviceInfo& device) const override;
  bool serves(const Call& op, const LinearShape& shape) const override;
  bool lists_logits() const override { return true; }
  bool is_batch_invariant() const override { return true; }
  bool finds_maximum(const LinearShape& s) const override { return s.sums.has(SumKind::maximum); }
  DeviceSpeed speed(const DeviceInfo& device) const override;
  bool forms_in_place(const LinearCall& call) const override;
  int64_t columns_of_sums() const override { return tile_columns; }

  // logits.cu
  void store_logits(const LinearWork& work, const StoredLogits& to) const override;
  // forward.cu
  void logits(const LinearWork& work, int64_t first, int64_t columns,
              const Panel& panel) const override;
  void remake(const LinearWork& work, const Panel& panel) const override;
  void form_dz(const LinearWork& work, const Panel& panel,
               bool first) const override;  // form_dz.cu
  // product.cu
  void input_sums(const LinearWork& work, const tiled::Kept& kept, const Range& rows, float* sums,
                  bool of_e, bool add) const override;
  void grad_input(const LinearWork& work, const tiled::Kept& kept, bool of_e) const override;
  void grad_weight(const LinearWork& work, const Panel& panel, const char* rows, bool of_e,
                   bool add) const override;
  void both_gradients(const LinearWork& work, const Panel& panel, const char* rows, bool of_e,
                      bool add) const override;  // both_gradients.cu
};

// Whether this build has code of sm_90a (cmake/cuda.cmake); without it these kernels are empty.
bool has_code();
// The distance between rows of the weight; any value for a single row.
inline int64_t weight_stride(const LinearCall& call) {
  if (call.shape.copies_weight) return call.shape.hidden_pitch();
  return call.shape.vocab == 1 ? call.shape.hidden : call.weight.stride[0];
}

}  // namespace logitless::cuda::sm90

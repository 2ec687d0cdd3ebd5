// SPDX-License-Identifier: Apache-2.0
// The engine of a family of GPUs whose kernels compute tiles of logits in registers and never store
// all logits. The family defines the size of its tiles and the calls that its kernels serve, and
// launches them. Plans, their predicted time, memory and steps are here. sm90/ is such a family;
// tests/cuda/toy is a minimal one.
#pragma once

#include "src/cuda/linear/engine.h"
#include "src/cuda/linear/tiled/tile.h"

namespace logitless::cuda::tiled {

// E or dz of some columns in two places, `behind` following `panel`, or in one.
struct Kept {
  Panel panel, behind = {};
  int64_t columns() const { return panel.columns + behind.columns; }
};

class TiledEngine : public Engine {
 public:
  // `tile` must outlive every plan: plans point to it.
  explicit TiledEngine(const Tile& tile) : tile_(tile) {}
  explicit TiledEngine(const Tile&&) = delete;
  const Tile& tile() const { return tile_; }

  // The launches of the family's kernels. Panels are in blocks of 64 columns (arrays.h). A product
  // may read their rows up to a multiple of the tile's depth, and whole blocks: if it does, the
  // kernels that write E and dz must leave finite numbers in those rows, and zeros after the last
  // column. The compacted input has no rows after the chunk's.
  //
  // The partial sums of columns [first, first + columns) of the chunk, where `first` is a multiple
  // of the tile's columns; and E, if the panel has data. For top-k also z, in m.logits [rows,
  // block_columns].
  virtual void logits(const LinearWork& work, int64_t first, int64_t columns,
                      const Panel& panel) const = 0;
  // dz of the panel's columns, from logits computed again.
  virtual void remake(const LinearWork& work, const Panel& panel) const = 0;
  // The product of the chunk's panel rows and the weight's rows, written or added to `sums` [rows,
  // hidden_pitch] in f32. If it is of E, each row is multiplied by v, minus the smoothing's term of
  // the kept columns (class_row).
  virtual void input_sums(const LinearWork& work, const Kept& kept, const Range& rows, float* sums,
                          bool of_e, bool add) const = 0;
  // The caller's grad_input, all rows of the chunk, from E or dz of the whole vocabulary: like
  // input_sums, times gradient_scale, in the rows of the chunk's tokens.
  virtual void grad_input(const LinearWork& work, const Kept& kept, bool of_e) const = 0;
  // The panel's rows of grad_weight, at most rows_of_weight() of them: panel columns times `rows`
  // (input times v, or input itself), if of E minus smoothed_row times the class weights. They go
  // to the caller's grad_weight, times gradient_scale; or, if sums_grad_weight, to sums in f32, of
  // which the first lent_sum_rows are at the start of grad_weight's memory and the others in
  // grad_weight_sum. Only f32 can be added to (`add`).
  virtual void grad_weight(const LinearWork& work, const Panel& panel, const char* rows, bool of_e,
                           bool add) const = 0;
  // grad_input and grad_weight of one of several chunks in one launch, if the tile has runs_both.
  // If the plan has slots, a second launch adds them and reads nothing else.
  virtual void both_gradients(const LinearWork&, const Panel&, const char* /*rows*/, bool /*of_e*/,
                              bool /*add*/) const {}
  // dz in place of E; its columns are added to bias_sum if grad_bias is requested (`first`:
  // overwrites it). For calls with forms_in_place.
  virtual void form_dz(const LinearWork&, const Panel&, bool /*first*/) const {}
  // Whether form_dz serves a call with a softcap and smoothing, for which products cannot multiply
  // E; otherwise dz comes from logits computed again.
  virtual bool forms_in_place(const LinearCall&) const { return false; }

  void describe(const Call& op, LinearCall* call, const DeviceInfo& device) const override;
  void each_plan(const LinearShape& shape, const DeviceSpeed& speed, uint64_t bytes,
                 const std::function<void(const LinearPlan&)>& consider) const override;
  void complete(const LinearShape& shape, const DeviceSpeed& speed,
                LinearPlan* plan) const override;
  LinearPlan in_passes(const LinearShape& shape, const DeviceSpeed& speed, uint64_t minimum,
                       uint64_t bytes, const LinearPlan& best) const override;
  void place(Lifetime lifetime, const LinearShape& shape, const LinearPlan& plan, Arena* arena,
             LinearMemory* memory) const override;
  void for_steps(const LinearShape& shape, const LinearPlan& plan,
                 StepVisitor* visitor) const override;
  double seconds(const LinearShape& shape, const LinearPlan& plan, const DeviceSpeed& speed,
                 const Step& step) const override;
  void run(const LinearCall& call, const LinearPlan& plan, char* workspace,
           const DeviceInfo& device, Stream* stream) const override;

  // The number of slots for slices (cut.h) that an otherwise complete plan's products can use.
  int32_t slots_of(const LinearShape& shape, const LinearPlan& plan,
                   const DeviceSpeed& speed) const;

 private:
  const Tile& tile_;
};

// Copies the rows that count of a panel to `to`, which has the same width (copy_panel.cu).
void copy_panel(const LinearWork& work, const Panel& panel, char* to);

}  // namespace logitless::cuda::tiled

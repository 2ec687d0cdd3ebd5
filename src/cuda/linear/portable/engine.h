// SPDX-License-Identifier: Apache-2.0
// The engine for every GPU: cuBLASLt's products, with passes over blocks of logits between them.
// And one that computes the logits itself (fused_logits.cu), without the passes.
#pragma once

#include "src/cuda/linear/engine.h"
#include "src/cuda/runtime/blas.h"

namespace logitless::cuda {

class PortableEngine : public Engine {
 public:
  const char* name() const override { return kernels_of_every_device; }
  bool serves(const DeviceInfo&) const override { return true; }
  bool serves(const Call&, const LinearShape&) const override { return true; }
  bool lists_logits() const override { return true; }
  // cuBLASLt chooses its kernels by the batch.
  bool is_batch_invariant() const override { return false; }
  bool finds_maximum(const LinearShape&) const override { return true; }
  void describe(const Call& op, LinearCall* call, const DeviceInfo& device) const override;
  DeviceSpeed speed(const DeviceInfo& device) const override;
  void each_plan(const LinearShape& shape, const DeviceSpeed& speed, uint64_t bytes,
                 const std::function<void(const LinearPlan&)>& consider) const override;
  void place(Lifetime lifetime, const LinearShape& shape, const LinearPlan& plan, Arena* arena,
             LinearMemory* memory) const override;
  void for_steps(const LinearShape& shape, const LinearPlan& plan,
                 StepVisitor* visitor) const override;
  double seconds(const LinearShape& shape, const LinearPlan& plan, const DeviceSpeed& speed,
                 const Step& step) const override;
  void run(const LinearCall& call, const LinearPlan& plan, char* workspace,
           const DeviceInfo& device, Stream* stream) const override;

 protected:
  // Whether fused_logits computes the logits.
  virtual bool fuses() const { return false; }
};

// For 16-bit inputs whose weight has aligned rows, or columns that can be copied.
class Sm80Engine final : public PortableEngine {
 public:
  const char* name() const override { return kernels_of_sm80; }
  // It was not measured on a GPU that gains by it.
  bool is_default() const override { return false; }
  bool serves(const DeviceInfo& device) const override { return device.major >= 8; }
  bool serves(const Call& op, const LinearShape& shape) const override;
  bool is_batch_invariant() const override { return true; }

 private:
  bool fuses() const override { return true; }
};

// The time of a matrix product [rows, columns] x depth: whole waves of 128 x 256 tiles over the
// multiprocessors, or the time to move operands and result. If `sums`, the result is f32 and read
// too. If `may_split`, cuBLASLt splits the depth when a tenth of the multiprocessors would idle.
double product_time(const LinearShape& shape, const DeviceSpeed& speed, int64_t rows,
                    int64_t columns, int64_t depth, bool sums, bool may_split = false);

inline int64_t block_bytes(const LinearPlan& p) {
  return p.block_rows * p.block_columns * static_cast<int64_t>(sizeof(float));
}
// Whether the block of logits, unused while grad_input is computed, holds the parts of a split
// depth: only if it is larger than cuBLASLt's workspace.
inline bool lends_block(const LinearShape& s, const LinearPlan& p) {
  return s.on_cuda_cores && block_bytes(p) > matrix_library_bytes;
}

// Rows after the tokens' rows of kept E: two for the smoothing, and zeros up to a multiple of 8.
inline int64_t rows_behind(const LinearShape& s) {
  return round_up(s.tokens + (s.smoothing ? 2 : 0), 8) - s.tokens;
}

}  // namespace logitless::cuda

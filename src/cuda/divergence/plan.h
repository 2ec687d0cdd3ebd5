// SPDX-License-Identifier: Apache-2.0
// A divergence's two heads, in the form that the linear ops' products and kernels take, and where
// its arrays are.
#pragma once

#include "src/cuda/divergence/arrays.h"
#include "src/cuda/divergence/divergence.h"
#include "src/cuda/linear/linear.h"

namespace logitless::cuda {

// A call, and what follows from it alone.
struct DivergenceCall {
  LinearCall student;
  LinearCall teacher;         // has a weight if its logits are computed
  TensorView teacher_logits;  // if they are given
  TokenInput teacher_in;      // has maps if each token has a temperature
  TokenOutputs others;        // written for tokens that do not count
  DivergenceStatistics statistics;
  DivergenceOfShard shard;
  TensorView loss;
  DivergenceOptions options;
  TensorView kept, kept_rows;
  bool keeps = false;      // dz goes to `kept`
  bool from_kept = false;  // dz is read from `kept`
  // A shard's Forward writes both heads' logits to `kept`, or a later call reads them there.
  bool keeps_logits = false, reads_logits = false;
  bool alike = false;      // all tokens with a gradient share one factor
  float lift = 1;          // kept dz is stored times this
  bool may_store = false;  // an engine can store both heads' logits
  bool makes_teacher() const { return static_cast<bool>(teacher.weight); }
  // Whether Forward writes states or sums for other shards.
  bool hands_states_on() const {
    const DivergenceStates& s = shard.states;
    const bool states = s.row_reference || s.row_log_sum || s.teacher_row_reference ||
                        s.teacher_row_log_sum || shard.target_logit;
    return shard.divergence_sum || shard.slope_sum || (!shard.given && states);
  }
  // Whether rows are summed over after their states are known.
  bool sums_columns() const {
    const bool statistics =
        this->statistics.entropy || this->statistics.teacher_entropy || this->statistics.acceptance;
    return loss || keeps || statistics || shard.divergence_sum || shard.slope_sum ||
           (gradients() && !shard.given);
  }
  bool gradients() const { return student.shape.gradients(); }
  // Whether kept dz is multiplied by its rows' factors while it is copied: f16 inputs lack the
  // range for them.
  bool scales_panel() const { return from_kept && !alike && student.shape.dtype == DType::f16; }
};
DivergenceCall make_divergence(const Call& call);

// KeptRow::layout of dz: rows by token, each with all columns, rounded up to a multiple of 64.
inline constexpr float kept_dz_by_token = 21;

// What the products and the shared kernels need of a head.
struct DivergenceHead {
  LinearPlan plan;
  LinearMemory m;
};
struct LogitsOfHeads {
  float* student = nullptr;  // [rows, pitch]
  float* teacher = nullptr;  // [rows, pitch]
};
struct DivergenceMemory {
  Tokens tokens;                      // compacted
  Tokens ordered;                     // in the tokens' own order, for kept dz
  TokenMap* teacher_maps = nullptr;   // [N]
  float* losses = nullptr;            // [N]  by token
  DivergenceState* states = nullptr;  // [N]  compacted
  DivergenceHead student, teacher;
  DivergenceHead ready;           // the student, with the gradient products' input
  Partials sums, teacher_sums;    // of stored logits
  LogitsOfHeads logits;           // a chunk's whole rows
  LogitsOfHeads block;            // some columns of all tokens; overlaps `logits`
  char* dz = nullptr;             // [rows, panel_pitch]  of whole rows; may overwrite logits
  char* block_dz = nullptr;       // [N, panel_pitch]  of some columns; may overwrite logits
  float* scales = nullptr;        // [N]
  int32_t* logit_rows = nullptr;  // [N]  compacted, of kept logits
  uint64_t bytes = 0;
};
// Places the arrays of a plan. Without a workspace it only counts their bytes.
DivergenceMemory place_divergence(const DivergenceCall& call, const DivergencePlan& plan,
                                  void* workspace);

// Products read rows up to a multiple of 8; a panel's pitch is a multiple of 64 columns.
inline int64_t whole_rows(int64_t rows) { return round_up(rows, 8); }
inline int64_t panel_pitch(int64_t columns) { return round_up(columns, 64); }

// The smallest plan, and the fastest one within `bytes`.
DivergencePlan smallest_plan(const DivergenceCall& call, const DeviceInfo& device);
DivergencePlan quickest_plan(const DivergenceCall& call, uint64_t bytes, const DeviceInfo& device);
// The smallest plan that is at most 1 % slower than any within the recommended bytes.
DivergencePlan recommended_plan(const DivergenceCall& call, uint64_t minimum,
                                const DeviceInfo& device);

}  // namespace logitless::cuda

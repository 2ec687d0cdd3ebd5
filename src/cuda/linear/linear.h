// SPDX-License-Identifier: Apache-2.0
// The device arrays of a linear op, and the kernels between its products.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>

#include "src/cuda/linear/arrays.h"
#include "src/cuda/linear/lists.h"
#include "src/cuda/linear/plan.h"
#include "src/cuda/runtime/blas.h"
#include "src/cuda/tokens/tokens.h"
#include "src/row/coefficients.h"

namespace logitless::cuda {

// What the caller keeps from Forward to Backward (src/kept.h); nothing if `rows` is null.
struct KeptState {
  // E of the first `columns`, in the engine's layout of a panel.
  char* data = nullptr;
  float* rows = nullptr;  // [N, 8]
  int64_t columns = 0;
  float layout = 0;       // KeptRow::layout of the engine, which Backward checks
  bool consumes = false;  // this Backward may overwrite E: it is the last
};

// Everything that kernels may need to know of a call.
struct LinearCall {
  TokenInput in;
  TensorView input, weight, bias;
  TensorView grad_input, grad_weight, grad_bias;
  TensorView row_reference, row_log_sum, entropy;  // given to Backward
  // [N] of a shard: what a row's E is relative to if its target is in another shard. Backward reads
  // it from kept_rows.
  TensorView anchor;
  TokenOutputs outputs;
  LinearShape shape;
  MapFactors map;
  bool accumulate = false;
  int part = 0;  // of the steps (parts.h); 0: all
  // the engine's kernels start early: early.cuh
  bool launches_early = false;
  KeptState kept;
  TensorView ids, id_offsets, logits_at, grad_logits_at;
  TopLists top;
  bool plain() const { return map.identity && !in.makes_maps && !bias; }
};

// Arrays in the workspace, in the caller's `kept`, or in an output's memory until it is written.
struct LinearMemory {
  Tokens tokens;
  Tokens compacted;         // before arrange_tokens; set only if arranges()
  float* losses = nullptr;  // [N]  compacted; used if losses are reduced
  // [1] the number of finish_rows' blocks that have finished, in the last chunk
  int32_t* rows_finished = nullptr;
  char* library = nullptr;  // cuBLASLt's workspace
  // [V, hidden_pitch] if a product cannot read the caller's weight, else null
  char* weight = nullptr;
  char* weight_tail = nullptr;  // [8, hidden_pitch]  the last V % 8 rows, then zeros
  // [panel_rows, hidden_pitch]  compacted; may be in grad_input's memory
  char* input = nullptr;
  // the input times v; may be `input`, or in grad_weight's memory
  char* scaled = nullptr;
  // [V + a tile's columns] the bias in f32; tiled kernels read whole tiles
  float* bias_row = nullptr;
  float* class_weights = nullptr;  // [V + a tile's columns]  c_j, likewise
  float* target_logit = nullptr;   // [token_chunk]
  // [token_chunk] the slope of raw -> z, if each token has its own
  float* slope = nullptr;
  Partials partials;
  UnitShares units;
  RowGradient* gradients = nullptr;  // [token_chunk]
  float* target_gradient = nullptr;  // [token_chunk]  dz of the target
  RowFactors* factors = nullptr;     // [token_chunk]
  IdLists lists;
  ChosenGradients chosen;
  float* chosen_sizes = nullptr;  // [N]
  // [1 + token_chunk] the number of rows to compute again, then these rows
  int32_t* again = nullptr;
  float* logits = nullptr;          // [block_rows, block_columns]
  float* slots = nullptr;           // [slots, slot_size]  partial sums of sliced tiles
  float* row_sums = nullptr;        // [sum_rows, hidden_pitch]  sums of grad_input, if E is whole
  char* stored = nullptr;           // [panel_rows, stored_pitch]  E
  char* remade = nullptr;           // [panel_rows, remade_columns]  E or dz; may be `stored`
  float* grad_input_sum = nullptr;  // [token_chunk, hidden_pitch]
  // [V - lent_sum_rows, hidden_pitch] sums of the last rows; grad_weight's memory has the first
  float* grad_weight_sum = nullptr;
  // [8, hidden_pitch] sums of the last V % 8 rows of grad_weight
  float* weight_tail_sum = nullptr;
  float* bias_sum = nullptr;      // [V]
  float* bias_slabs = nullptr;    // [slabs, columns at a time]
  float* class_row = nullptr;     // [hidden_pitch]  sum_j c_j weight_j of E's columns
  float* smoothed_row = nullptr;  // [hidden_pitch]  sum_k s_k input_k
  float* slabs = nullptr;         // [slabs, hidden_pitch]
};

// The arguments of every step: the call, its plan and memory, and the step's chunk.
struct LinearWork {
  const LinearCall& call;
  const LinearPlan& plan;
  const LinearMemory& m;
  const DeviceInfo& device;
  Stream* stream;
  Chunk chunk;
};

inline int64_t stored_pitch(int64_t columns) { return (columns + 63) / 64 * 64; }
// The number of rows of grad_weight's f32 sums that fit in the memory of a chunk's E.
inline int64_t rows_in_place_of_e(const LinearShape& s, const LinearPlan& p) {
  return p.panel_rows * stored_pitch(p.stored_columns) * size_of(s.dtype) / (4 * s.hidden_pitch());
}
// Calls use(first, rows) for the pieces in which lent sums are rounded to rows of grad_weight in
// the same memory. The first piece is moved to E's memory before; each later one may be as large
// as all before it, whose sums it overwrites.
template <class F>
void for_lent_pieces(int64_t lent, int64_t in_place_of_e, F&& use) {
  for (int64_t done = 0; done < lent;) {
    const int64_t rows = std::min(done == 0 ? in_place_of_e : done, lent - done);
    use(done, rows);
    done += rows;
  }
}
// Columns of a panel in blocks that are summed at a time for grad_bias.
constexpr int64_t bias_columns = 16384;
constexpr int64_t bias_slab_rows = 1024, vocab_slab_rows = 512, token_slab_rows = 256;

// How long an array lives: during the call, or while a chunk's logits or its gradients are
// computed. Arrays of the latter two share memory.
enum class Lifetime { call, forward, gradients };
class Engine;
// The bytes of workspace that a plan's arrays take, and where each array is.
uint64_t bytes_of(const Engine& engine, const LinearShape& shape, const LinearPlan& plan);
LinearMemory place(const Engine& engine, const LinearCall& call, const LinearPlan& plan,
                   char* workspace);

// Places bias_slabs for `columns` columns of a panel at a time.
inline void place_bias_slabs(const LinearShape& s, const LinearPlan& p, int64_t columns,
                             Arena* arena, LinearMemory* m) {
  if (!s.grad_bias) return;
  m->bias_slabs = arena->take<float>(divide_up(p.panel_rows, bias_slab_rows) * columns);
}

// chosen.cu, in this order: the logits of chosen columns; the summed size of each token's
// gradients, to find the active tokens; what is added to dz; and the addition of it to a panel.
void chosen_logits(const LinearCall& call, const LinearMemory& m, Stream* stream);
void chosen_sizes(const LinearCall& call, const LinearMemory& m, Stream* stream);
void merge_chosen(const LinearCall& call, const LinearMemory& m, Stream* stream);
void add_chosen(const LinearWork& work, const Panel& panel);

// gather.cu
void copy_weight(const LinearWork& work);
void copy_weight_tail(const LinearWork& work);
// Gathers the chunk's rows of input and computes the targets' logits. If `clears`, rows of
// grad_input whose token does not count become 0. If `beside`, the previous kernel may still be
// running: it shares no memory with this one, and has itself waited for all kernels before it.
void gather_input(const LinearWork& work, bool clears, bool beside);
// Writes the bias and the class weights in f32, followed by `padding` zeros.
void column_terms(const LinearWork& work, int64_t padding);

// Returns an error if an extent exceeds 2^31 - 65536: kernels count rows and columns in 32 bits.
Status check_linear_extents(std::initializer_list<int64_t> extents);

// The weight from row `column` on, as an operand of a product.
Operand weight_rows(const LinearCall& call, const LinearMemory& m, int64_t column);

// rows.cu: from the partial sums, or the state given to Backward, computes the outputs of the
// chunk's tokens, after the last chunk the reduced loss, the gradients' factors (`with_factors`: of
// E's rows) and, if `scales`, the input times v. With factors it also writes the target's column of
// E, if `kept` has it.
void finish_rows(const LinearWork& work, bool with_factors, const std::array<Panel, 2>& kept,
                 bool scales);

// list_block.cu: merges a block of logits, raw or `mapped` to z, into the rows' lists of largest
// logits. The block starts at a partial sum, each of `segment` columns.
void list_block(const LinearWork& work, const Block& block, int64_t segment, bool mapped);

// Writes the targets' logits, if no other output is requested.
void write_targets(const LinearWork& work);

// finish_panel.cu: E of the rows beyond the exponent's range and, if E is computed after
// finish_rows, E of the target's column.
void finish_panel(const LinearWork& work, const Panel& panel, bool targets);
// With smoothing: the input times v, and in the plan's extra rows those of the smoothing's term.
void scale_input(const LinearWork& work);
// If `fills`, moves rows of kept E as arrange_tokens moved their tokens, each in exchange for the
// row of a token without a gradient; else moves them back. If `fills`, the rows after them become
// finite, because products may read these: up to a multiple of `whole`, or all if `whole` is 0.
void trade_rows(const LinearWork& work, const Panel& panel, bool fills, int whole);
// form_panel.cu: dz from the panel's kept E; `to` may be `from`. Rows that do not count become 0,
// up to a multiple of `whole` rows, or all of them if `whole` is 0.
void form_panel(const LinearWork& work, const Panel& from, const Panel& to, int whole);

// finish.cu
void class_row(const LinearWork& work);
// Writes the chunk's rows [row, row + rows) of grad_input from their f32 sums, which are of E if
// `scaled`. If `clears`, rows whose token does not count become 0.
void write_grad_input(const LinearWork& work, const float* sums, int64_t row, int64_t rows,
                      bool scaled, bool clears);
void add_to_bias(const LinearWork& work, const Panel& panel, bool scaled, bool first);
// Adds the sums in bias_slabs to bias_sum; the panel is E if there are `factors`, else dz.
void add_slabs_to_bias(const LinearWork& work, const Panel& panel, const RowFactors* factors,
                       bool first);
// Calls use(panel) for parts of a panel in blocks, with as many columns as bias_slabs has room for.
template <class F>
void for_bias_columns(DType dtype, const Panel& panel, F&& use) {
  for (int64_t j = 0; j < panel.columns; j += bias_columns) {
    Panel some = panel;
    some.data += j * panel.pitch * size_of(dtype);
    some.first += j;
    some.columns = std::min(panel.columns - j, bias_columns);
    use(some);
  }
}
void write_grad_weight(const LinearWork& work, const float* sums, int64_t row, int64_t rows);
// Writes the first rows of grad_weight, whose sums are in its own memory.
void write_lent_sums(const LinearWork& work);
void write_grad_bias(const LinearWork& work);
// The gradients of a call without tokens: zeros, or unchanged if accumulating.
void clear_grad_weight(const LinearWork& work);

}  // namespace logitless::cuda

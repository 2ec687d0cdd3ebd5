// SPDX-License-Identifier: Apache-2.0
// This header lists the device arrays of a linear op and the kernels between its products.
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

// The caller keeps this from Forward to Backward (src/kept.h); where `rows` is null it keeps
// nothing.
struct KeptState {
  // It holds E of the first `columns`, as the engine lays out a panel of them.
  char* data = nullptr;
  float* rows = nullptr;  // [N, 8]
  int64_t columns = 0;
  float layout = 0;       // every engine has a number for its layout, by which Backward knows it
  bool consumes = false;  // this Backward may overwrite it, as no other comes
};

// A kernel finds everything it may need of the call here.
struct LinearCall {
  TokenInput in;
  TensorView input, weight, bias;
  TensorView grad_input, grad_weight, grad_bias;
  TensorView row_reference, row_log_sum, entropy;  // Backward has them, where they are given
  // [N]  a shard has it: E of a row whose target is elsewhere is relative to it. Backward finds it
  // in kept_rows.
  TensorView anchor;
  TokenOutputs outputs;
  LinearShape shape;
  MapFactors map;
  bool accumulate = false;
  // true where the engine's kernels start early: early.cuh
  bool launches_early = false;
  KeptState kept;
  TensorView ids, id_offsets, logits_at, grad_logits_at;
  TopLists top;
  bool plain() const { return map.identity && !in.makes_maps && !bias; }
};

// These arrays lie in the workspace, or in an output's memory till that is written.
struct LinearMemory {
  Tokens tokens;
  Tokens compacted;         // these are the tokens as they were before `arranges`
  float* losses = nullptr;  // [N]  compacted; it is there where the losses are reduced
  // [1]  it counts the blocks of finish_rows that are done with the chunk
  int32_t* rows_finished = nullptr;
  char* library = nullptr;  // the matrix library works in it
  // [V, hidden_pitch]  it is there where a product cannot read the caller's
  char* weight = nullptr;
  char* weight_tail = nullptr;  // [8, hidden_pitch]  it holds the last V % 8 rows, then zeros
  // [token_chunk + extra_rows, hidden_pitch]  compacted; it may lie in grad_input's memory
  char* input = nullptr;
  // it is the input times v, may be `input`, and may lie in grad_weight's memory
  char* scaled = nullptr;
  // [V + a tile's columns]  it is the bias in f32, which tiled kernels read in whole tiles
  float* bias_row = nullptr;
  float* class_weights = nullptr;  // [V + a tile's columns]  it is c_j, for the same
  float* target_logit = nullptr;   // [token_chunk]
  // [token_chunk]  it is the slope of raw -> z, where each token has its own
  float* slope = nullptr;
  Partials partials;
  UnitShares units;
  RowGradient* gradients = nullptr;  // [token_chunk]
  float* target_gradient = nullptr;  // [token_chunk]  it is dz of the target
  RowFactors* factors = nullptr;     // [token_chunk]
  IdLists lists;
  ChosenGradients chosen;
  float* chosen_sizes = nullptr;  // [N]
  // [1 + token_chunk]  a count comes first, then the rows to be made again
  int32_t* again = nullptr;
  float* logits = nullptr;    // [block_rows, block_columns]
  float* slots = nullptr;     // [slots, slot_size]  slices of tiles leave their sums here
  float* row_sums = nullptr;  // [sum_rows, hidden_pitch]  it sums grad_input, where E is whole
  char* stored = nullptr;     // [panel_rows, stored_pitch]  it holds E
  char* remade = nullptr;     // [panel_rows, remade_columns]  it holds E or dz and may be `stored`
  float* grad_input_sum = nullptr;  // [token_chunk, hidden_pitch]
  // [V - lent_sum_rows, hidden_pitch]  it has the last rows; the first ones lie in grad_weight
  float* grad_weight_sum = nullptr;
  // [8, hidden_pitch]  it sums the last V % 8 rows of grad_weight
  float* weight_tail_sum = nullptr;
  float* bias_sum = nullptr;      // [V]
  float* bias_slabs = nullptr;    // [slabs, columns at a time]
  float* class_row = nullptr;     // [hidden_pitch]  it is sum_j c_j weight_j of E's columns
  float* smoothed_row = nullptr;  // [hidden_pitch]  it is sum_k s_k input_k
  float* slabs = nullptr;         // [slabs, hidden_pitch]
};

// Every step is launched with this: the call under its plan, in its memory, and the chunk the step
// is of.
struct LinearWork {
  const LinearCall& call;
  const LinearPlan& plan;
  const LinearMemory& m;
  const DeviceInfo& device;
  Stream* stream;
  Chunk chunk;
};

inline int64_t stored_pitch(int64_t columns) { return (columns + 63) / 64 * 64; }
// Counts the rows of grad_weight's f32 sums that fit where a chunk's E was.
inline int64_t rows_in_place_of_e(const LinearShape& s, const LinearPlan& p) {
  return p.panel_rows * stored_pitch(p.stored_columns) * size_of(s.dtype) / (4 * p.hidden_pitch);
}
// Calls use(first, rows) with the pieces in which lent sums become rows of grad_weight in their
// place. The first piece leaves grad_weight by way of E's memory; each piece after it may have
// twice as many rows, which go where the rows before them were.
template <class F>
void for_lent_pieces(int64_t lent, int64_t in_place_of_e, F&& use) {
  for (int64_t done = 0; done < lent;) {
    const int64_t rows = std::min(done == 0 ? in_place_of_e : done, lent - done);
    use(done, rows);
    done += rows;
  }
}
// The sums of dz that make grad_bias take so many columns at a time.
constexpr int64_t bias_columns = 16384;
constexpr int64_t bias_slab_rows = 1024, vocab_slab_rows = 512, token_slab_rows = 256;

// An array lives through the call, or as long as the logits or the gradients are made of a chunk.
// Arrays of the latter two share their memory.
enum class Lifetime { call, forward, gradients };
class Engine;
// The first function counts the bytes of workspace that a plan's arrays take, the second says where
// each lies.
uint64_t bytes_of(const Engine& engine, const LinearShape& shape, const LinearPlan& plan);
LinearMemory place(const Engine& engine, const LinearCall& call, const LinearPlan& plan,
                   char* workspace);

// Takes bias_slabs for so many columns of a panel at a time.
inline void place_bias_slabs(const LinearShape& s, const LinearPlan& p, int64_t columns,
                             Arena* arena, LinearMemory* m) {
  if (!s.grad_bias) return;
  m->bias_slabs = arena->take<float>(divide_up(p.panel_rows, bias_slab_rows) * columns);
}

// Chosen columns (chosen.cu): writes their logits; sums the sizes of each token's gradients, before
// it is known which tokens have one; makes what is added to dz; adds it to a panel that is made.
void chosen_logits(const LinearCall& call, const LinearMemory& m, Stream* stream);
void chosen_sizes(const LinearCall& call, const LinearMemory& m, Stream* stream);
void merge_chosen(const LinearCall& call, const LinearMemory& m, Stream* stream);
void add_chosen(const LinearWork& work, const Panel& panel);

// gather.cu defines these functions.
void copy_weight(const LinearWork& work);
void copy_weight_tail(const LinearWork& work);
// Gathers the chunk's rows of input and the targets' logits. If `clears`, rows of grad_input whose
// token does not count become 0. If `beside`, the kernel in front may run on, as it neither writes
// nor reads any of what this one does; it must start early itself.
void gather_input(const LinearWork& work, bool clears, bool beside);
// Writes the bias and the class weights in f32, with so many zeros behind them.
void column_terms(const LinearWork& work, int64_t padding);

// Rows and columns are counted in 32 bits on the device; offsets are not.
Status check_linear_extents(std::initializer_list<int64_t> extents);

// Returns the weight from row `column` on, as a product reads it.
Operand weight_rows(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
                    int64_t column);

// rows.cu makes, from the partial sums or the state that Backward was given, the outputs of the
// chunk's tokens, the loss of all after the last chunk, the factors of the gradients
// (`with_factors`: of E's rows), and the input times v where `scales`. With factors it also writes
// the target's column of E, where `kept` has it.
void finish_rows(const LinearWork& work, bool with_factors, const std::array<Panel, 2>& kept,
                 bool scales);

// Writes the targets' logits, where nothing else is asked for.
void write_targets(const LinearWork& work);

// finish_panel.cu makes E of the rows beyond the exponent's range and, where E is made after
// finish_rows, E of the target's column.
void finish_panel(const LinearWork& work, const Panel& panel, bool targets);
// Under smoothing, makes the input times v, and behind it the rows that make the smoothing's term.
void scale_input(const LinearWork& work);
// If `fills`, brings rows of kept E to where arrange_tokens has brought their tokens, else back:
// each trades its place with that of a token without a gradient. Products may read rows behind
// these, up to a multiple of `whole`, which are made finite.
void trade_rows(const LinearWork& work, const Panel& panel, bool fills, int whole);
// Makes dz of as many columns of kept E, where entropy has a gradient; `to` may be `from`. Rows
// that do not count become 0 up to a multiple of `whole` rows, or all of them where that is 0.
void form_panel(const LinearWork& work, const Panel& from, const Panel& to, int whole);

// finish.cu defines these functions.
void class_row(const LinearWork& work);
// Writes rows [row, row + rows) of the chunk from their f32 sums, which come of E if `scaled`. If
// `clears`, rows whose token does not count become 0.
void write_grad_input(const LinearWork& work, const float* sums, int64_t row, int64_t rows,
                      bool scaled, bool clears);
void add_to_bias(const LinearWork& work, const Panel& panel, bool scaled, bool first);
// Adds what bias_slabs holds of the panel; the panel is E if there are `factors`, else dz.
void add_slabs_to_bias(const LinearWork& work, const Panel& panel, const RowFactors* factors,
                       bool first);
// Calls use(panel) with as many columns of a panel in blocks as bias_slabs has room for.
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
// Writes the first rows of grad_weight, whose sums lie in its own memory.
void write_lent_sums(const LinearWork& work);
void write_grad_bias(const LinearWork& work);
// Writes the gradients of a call without tokens: zeros, or nothing when accumulating.
void clear_grad_weight(const LinearWork& work);

}  // namespace logitless::cuda

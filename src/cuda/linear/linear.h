// SPDX-License-Identifier: Apache-2.0
// The device arrays of a linear op and the kernels between its products.
#pragma once

#include <algorithm>
#include <array>

#include "src/coefficients.h"
#include "src/cuda/linear/arrays.h"
#include "src/cuda/linear/plan.h"
#include "src/cuda/runtime/blas.h"
#include "src/cuda/tokens/tokens.h"

namespace logitless::cuda {

// What the caller keeps from Forward to Backward (src/kept.h); `rows` null: nothing.
struct KeptState {
  char* data = nullptr;   // E of the first `columns`, as the engine lays out a panel of them
  float* rows = nullptr;  // [N, 8]
  int64_t columns = 0;
  float layout = 0;       // the engine's number
  bool consumes = false;  // no other Backward comes
};

// Everything a kernel may need of the call.
struct LinearCall {
  TokenInput in;
  TensorView input, weight, bias;
  TensorView grad_input, grad_weight, grad_bias;
  TensorView row_reference, row_log_sum, entropy;  // of Backward, where given
  TokenOutputs outputs;
  LinearShape shape;
  MapFactors map;
  bool accumulate = false;
  bool launches_early = false;  // the kernels between Hopper's products: early.cuh
  KeptState kept;
  bool plain() const { return map.identity && !in.makes_maps && !bias; }
};

// Arrays in the workspace, and those that lie in an output's memory till this is written.
struct LinearMemory {
  Tokens tokens;
  Tokens compacted;                  // as they were before `arranges`
  float* losses = nullptr;           // [N]  compacted, where they are reduced
  int32_t* rows_finished = nullptr;  // [1]  of the chunk, blocks of finish_rows that are done
  char* library = nullptr;           // the matrix library's own
  char* weight = nullptr;            // [V, hidden_pitch]  where copied
  char* weight_tail = nullptr;       // [8, hidden_pitch]  its last V % 8 rows, then zeros
  char* input = nullptr;           // [panel_rows, hidden_pitch]  compacted; or grad_input's memory
  char* scaled = nullptr;          // the same times v; may be `input`, or in grad_weight's memory
  float* bias_row = nullptr;       // [V + column_padding]  the bias in f32, for sm90/forward.h
  float* class_weights = nullptr;  // [V + column_padding]  c_j, likewise
  float* target_logit = nullptr;   // [token_chunk]
  float* slope = nullptr;          // [token_chunk]  of raw -> z, where each token has its own
  Partials partials;
  UnitShares units;
  RowGradient* gradients = nullptr;  // [token_chunk]
  float* target_gradient = nullptr;  // [token_chunk]  dz of the target, for sm90/forward.h
  RowFactors* factors = nullptr;     // [token_chunk]
  int32_t* again = nullptr;          // [1 + token_chunk]  count, then rows to be made again
  float* logits = nullptr;           // [block_rows, block_columns]
  float* slots = nullptr;            // [slots, 512, 192]  for sm90/product.h
  float* row_sums = nullptr;         // [sum_rows, hidden_pitch]  of grad_input, where E is whole
  char* stored = nullptr;            // [panel_rows, stored_pitch]  E
  char* remade = nullptr;            // [panel_rows, remade_columns]  E or dz; may be `stored`
  float* grad_input_sum = nullptr;   // [token_chunk, hidden_pitch]
  float* grad_weight_sum = nullptr;  // [V - lent_sum_rows, hidden_pitch]  the last rows
  float* weight_tail_sum = nullptr;  // [8, hidden_pitch]  of the last V % 8 rows of grad_weight
  float* bias_sum = nullptr;         // [V]
  float* bias_slabs = nullptr;       // [slabs, columns at a time]
  float* class_row = nullptr;        // [hidden_pitch]  sum_j c_j weight_j of E's columns
  float* smoothed_row = nullptr;     // [hidden_pitch]  sum_k s_k input_k
  float* slabs = nullptr;            // [slabs, hidden_pitch]
};

// A step is launched with this: the call under its plan, in its memory, and the chunk it is of.
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
  return panel_rows(p) * stored_pitch(p.stored_columns) * size_of(s.dtype) / (4 * p.hidden_pitch);
}
// use(first, rows) with the pieces in which lent sums become rows of grad_weight in their place:
// the first one leaves it by way of E's; then ever twice as many rows, to where those before them
// were.
template <class F>
void for_lent_pieces(int64_t lent, int64_t in_place_of_e, F&& use) {
  for (int64_t done = 0; done < lent;) {
    const int64_t rows = std::min(done == 0 ? in_place_of_e : done, lent - done);
    use(done, rows);
    done += rows;
  }
}
// So that a whole tile may be read.
constexpr int64_t column_padding = 192;
// The sums of dz that make grad_bias take so many columns at a time.
constexpr int64_t bias_columns = 16384;
constexpr int64_t bias_slab_rows = 1024, vocab_slab_rows = 512, token_slab_rows = 256;

// Bytes of workspace that a plan's arrays take; and where all of them lie.
uint64_t bytes_of(const LinearShape& shape, const LinearPlan& plan);
LinearMemory place(const LinearCall& call, const LinearPlan& plan, char* workspace);

// gather.cu
void copy_weight(const LinearWork& work);
void copy_weight_tail(const LinearWork& work);
// The chunk's rows of input and the targets' logits; `clears`: rows of grad_input whose token does
// not count become 0. `beside`: the kernel in front, early itself, neither writes nor reads any of
// what this one does.
void gather_input(const LinearWork& work, bool clears, bool beside);
// The bias and the class weights in f32, with zeros behind them.
void column_terms(const LinearWork& work);

// The weight from row `column` on, as it is multiplied.
Operand weight_rows(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
                    int64_t column);

// block_exponentials.cu: partial sums (where wanted) and E (where the panel is there).
void exponentials(const LinearWork& work, const Block& block, bool partial_sums,
                  const Panel& panel);
// block_gradients.cu: dz times the map's slope, from finished states.
void block_gradients(const LinearWork& work, const Block& block, const Panel& panel);

// rows.cu
// From the partial sums, or the state that Backward was given: outputs of the chunk's tokens, the
// loss of all after the last chunk, the factors of the gradients (`with_factors`: of E's rows), and
// the input times v where `scales`. With factors the target's column of E too, where `kept` has it.
void finish_rows(const LinearWork& work, bool with_factors, const std::array<Panel, 2>& kept,
                 bool scales);

// kept.cu
// E of the rows beyond the exponent's range; and, where it is made after finish_rows, of the
// target's column.
void finish_panel(const LinearWork& work, const Panel& panel, bool targets);
// Writes behind the panel's rows the class weights for the smoothing's term of E, and zeros; behind
// its columns: zeros to a multiple of 8.
void write_extra_rows(const LinearWork& work, const Panel& panel);
// Makes under smoothing input times v, and behind it the rows that make the smoothing's term.
void scale_input(const LinearWork& work);
// Brings rows of kept E to where arrange_tokens has brought their tokens, which `fills`, and back:
// each trades its place with that of a token without a gradient. What products may read behind the
// rows is made finite: up to a multiple of `whole` rows.
void trade_rows(const LinearWork& work, const Panel& panel, bool fills, int whole);
// dz of as many columns of kept E, where entropy has a gradient; `to` may be `from`. Of rows that
// do not count those become 0 that lie before a multiple of `whole` rows; 0: all.
void form_panel(const LinearWork& work, const Panel& from, const Panel& to, int whole);

// finish.cu
void class_row(const LinearWork& work);
// Rows [row, row + rows) of the chunk from their f32 sums; `scaled`: they come of E; `clears`:
// rows whose token does not count become 0.
void write_grad_input(const LinearWork& work, const float* sums, int64_t row, int64_t rows,
                      bool scaled, bool clears);
void add_to_bias(const LinearWork& work, const Panel& panel, bool scaled, bool first);
// Adds what bias_slabs holds of the panel; `factors`: of E.
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
// grad_weight of its first rows, whose sums lie in its own memory.
void write_lent_sums(const LinearWork& work);
void write_grad_bias(const LinearWork& work);
// Writes the gradients of a call without tokens: zeros, or left as they are when accumulating.
void clear_grad_weight(const LinearWork& work);

}  // namespace logitless::cuda

// SPDX-License-Identifier: Apache-2.0
// A plan says how a linear cross-entropy runs on CUDA. It is pure host arithmetic on the shape and
// the workspace, which `logitless plan` prints and tests check without a GPU. The kinds of plans
// trade time for workspace (docs/design.md):
//   loss_only   one product
//   whole       E = exp(z - z_target) of every token and column is kept: three products
//   chunks      E of one chunk of tokens at a time: three products, grad_weight summed in f32, of
//               which half lies in its own memory
//   mixed       E of a share of the vocabulary is kept, the rest made again: three and a part
//   frugal      nothing kept; dz made again with the lse known: four products
//   two_passes  E of one chunk of tokens at a time, for grad_input and the first rows of
//               grad_weight; then dz of the other columns for theirs: three and a half products
// Rows of grad_weight that no product has written yet are memory too: Hopper's kernels keep E or dz
// of earlier columns there (sm90/panels.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "logitless/ops.h"
#include "src/rounding.h"
#include "src/row/sums.h"

namespace logitless::cuda {

enum class PlanKind { loss_only, whole, chunks, mixed, frugal, two_passes };
const char* name_of(PlanKind kind);

struct LinearShape {
  int64_t tokens = 0, vocab = 0, hidden = 0;
  DType dtype = DType::bf16;
  SumSet sums{};        // made of a row beside its exponentials
  bool forward = true;  // lse is computed; false only where Backward was given the row state
  bool grad_input = false, grad_weight = false, grad_bias = false;
  bool copies_weight = false;      // a product cannot read the weight's rows as they lie
  bool direct_grad_weight = true;  // a product can write the output itself
  bool direct_grad_input = false;  // a product can write grad_input itself, where E is whole
  bool lends_grad_input = false;   // the output's memory holds the compacted input till the end
  bool lends_grad_weight = false;  // the output's later rows hold E or dz of earlier columns
  bool grad_weight_f32 = false;    // a product can add to an f32 grad_weight in place
  bool can_store = true;           // E serves: true of ForwardBackward
  bool forms_dz = false;           // E becomes dz in its place before the products
  bool on_cuda_cores = false;      // of cuBLASLt's products: f32 without TF32
  bool smoothing = false;
  bool maps = false;  // each token has a map of its own: TokenMap
  // Some tokens of a Backward may have no gradient, and are left out.
  bool screens_gradients = false;
  bool bias = false, class_weights = false;  // a product's own kernel reads them
  bool remakes_dz = false;    // columns that are not kept are made again as dz, else as E
  bool plain = false;         // there are no options: sm90/plain.cuh
  bool targets_only = false;  // the targets' logits alone are asked for
  bool reads_input = false;   // the products read the caller's own rows, where every token counts
  int64_t weight_rows = 0;    // the first so many rows of grad_weight are made; 0 means all
  // E of so many columns is in the caller's memory: Forward keeps it, Backward finds it
  int64_t kept_columns = 0;
  bool forms_panels = false;  // Backward forms dz of kept columns elsewhere, a panel at a time
  // Returns whether form_panel forms dz, of state that the caller kept and of f16, and makes rows
  // beyond the range again. Else sm90/form_dz.cu forms it, and sums grad_bias on the way.
  bool forms_by_rows() const { return forms_dz && (kept_columns > 0 || dtype == DType::f16); }
  // Returns whether tokens without a gradient leave the first rows of kept E to others; only a
  // Backward knows them.
  bool arranges() const { return kept_columns > 0 && !forward; }
  int64_t rows_of_weight() const { return weight_rows > 0 ? weight_rows : vocab; }
  bool gradients() const { return grad_input || grad_weight || grad_bias; }
  bool operator==(const LinearShape&) const = default;
};

// The cost model needs these figures of a device. They were measured on one H200
// (docs/kernels/cuda.md) and are scaled by the multiprocessors elsewhere.
struct DeviceSpeed {
  double products = 680e12;  // products of 16-bit operands reach so many FLOP/s
  double products_f32 = 45e12;
  double memory = 4.0e12;  // memory moves so many bytes/s
  double launch = 3e-6;    // a launch takes so many seconds
  double multiprocessors = 132;
  int clusters() const { return static_cast<int>(multiprocessors) / 2; }
  bool operator==(const DeviceSpeed&) const = default;
};

struct LinearPlan {
  PlanKind kind = PlanKind::loss_only;
  int64_t token_chunk = 0, chunks = 0;
  int64_t block_rows = 0, block_columns = 0;  // so much of the logits is in f32 memory at a time
  bool holds_logits = false;  // the matrix library's product puts the logits in memory
  // Products take the last V % 8 columns alone, where this is not 0, and as many rows of
  // grad_weight, but for products on the CUDA cores, which take any.
  int64_t tail_columns = 0;
  int64_t sum_rows = 0;  // so many rows of grad_input are summed in f32 at a time, where E is whole
  int64_t stored_columns = 0;  // the workspace holds E of so many columns, per chunk
  int64_t lent_columns = 0;    // grad_weight's memory holds E of so many columns behind these
  // E is copied before its rows are written, so that as many columns are lent as fit
  bool copies_lent = true;
  // grad_input is made first, where E of all columns is kept: sm90/panels.h
  bool input_first = true;
  // So many columns of E or dz are made at a time, where not all are stored.
  int64_t remade_columns = 0;
  // Products take E times each row's factor, so that it need not become dz before.
  bool multiplies_e = false;
  bool smooths_e = false;        // the smoothing's term is then added by extra rows
  bool grad_weight_sum = false;  // grad_weight is summed in f32, [V, D]
  int64_t lent_sum_rows = 0;     // the first so many rows of that lie in grad_weight's own memory
  // grad_input is summed in f32, [token_chunk, D]; else block_rows at a time
  bool grad_input_sum = false;
  int64_t hidden_pitch = 0;    // it is D rounded up to 16 bytes, a row's pitch
  int64_t segments = 0;        // a row has so many partial sums
  int32_t slots = 0;           // so many slots take the sums of sliced tiles: sm90/cut.h
  int64_t slot_size = 0;       // a slot has so many floats
  int32_t input_clusters = 0;  // so many clusters make grad_input, where both products run at once
  bool copies_input = true;    // the input is copied to compacted rows, where not all tokens count
  bool lends_input = false;    // the compacted rows lie in grad_input's memory till the end
  // The scaled input has memory of its own, as the input is read again after it is made.
  bool scales_apart = false;
  // The scaled input lies at this byte of grad_weight's memory, or not there (-1).
  int64_t lent_scaled = -1;
  int64_t panel_row_block = 1;  // a panel's rows are rounded up to a multiple of this
  int64_t extra_rows = 0;       // so many rows follow a panel's
  int64_t slab_columns = 0;     // grad_bias is summed over so many columns of a panel at a time
  int32_t unit_width = 0;       // a segment has so many tiles, or is none (0): units.h
  int32_t single_tiles = 0;     // at most so many tiles have sums that lie apart
  int32_t single_rows = 0;      // each of these tiles has so many rows
  int64_t first_rows = 0;       // the first of two passes makes so many rows of grad_weight
  uint64_t bytes = 0;
  double seconds = 0;  // it is predicted
};

// Returns how many rows of grad_weight a product of their own makes.
inline int64_t tail_rows(const LinearShape& s, const LinearPlan& p) {
  return s.grad_weight && !s.on_cuda_cores ? p.tail_columns : 0;
}

// Returns how many columns of E are there when the gradients begin.
inline int64_t kept_columns(const LinearPlan& p) { return p.stored_columns + p.lent_columns; }
// Returns how many rows a panel has, and so the compacted input.
inline int64_t panel_rows(const LinearPlan& p) {
  return round_up(p.token_chunk, p.panel_row_block) + p.extra_rows;
}

// A row's partial sum covers so many, in every plan.
inline constexpr int64_t segment_columns = 1024;
// A chunk's rows have so many behind them: two for the smoothing's own term, and zeros up to the
// next multiple of 8.
inline constexpr int64_t extra_rows = 16;

// These two make the calls that a plan of two passes consists of, which run in the memory behind
// the rows' states (row_reference and row_log_sum). The first makes the loss, grad_input and the
// first rows of grad_weight; the second makes the other rows from the states.
LinearShape first_pass(const LinearShape& shape, int64_t first_rows);
LinearShape second_pass(const LinearShape& shape, int64_t first_rows);
uint64_t state_bytes(const LinearShape& shape);

}  // namespace logitless::cuda

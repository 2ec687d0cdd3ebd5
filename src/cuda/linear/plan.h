// SPDX-License-Identifier: Apache-2.0
// How a linear cross-entropy runs on CUDA: pure host arithmetic on the shape and the workspace,
// printed by `logitless plan` and tested without a GPU. Plans, a frontier of time against
// workspace (docs/design.md):
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

namespace logitless::cuda {

enum class PlanKind { loss_only, whole, chunks, mixed, frugal, two_passes };
const char* name_of(PlanKind kind);

struct LinearShape {
  int64_t tokens = 0, vocab = 0, hidden = 0;
  DType dtype = DType::bf16;
  bool forward = true;  // lse is computed (absent only where Backward was given the row state)
  bool grad_input = false, grad_weight = false, grad_bias = false;
  bool copies_weight = false;      // its rows are not what a product can read
  bool direct_grad_weight = true;  // a product can write the output itself
  bool direct_grad_input = false;  // where E is whole
  bool lends_grad_input = false;   // the output's memory holds the compacted input till the end
  bool lends_grad_weight = false;  // the output's later rows hold E or dz of earlier columns
  bool grad_weight_f32 = false;    // and add to it
  bool can_store = true;           // E serves: ForwardBackward
  bool forms_dz = false;           // E becomes dz in its place before the products
  bool smoothing = false;
  bool entropy = false, weighted_sum = false, argmax = false;
  bool squares = false, ranks = false;  // sum p^2, columns above the target
  bool logit_sum = false;               // sum z beside weighted_sum
  bool maps = false;                    // each token has a map of its own: TokenMap
  bool screens_gradients = false;       // Backward: some tokens may have none, and are left out
  bool bias = false, class_weights = false;  // that a product's own kernel reads
  bool remakes_dz = false;                   // what is not kept of E is made again as dz, else as E
  bool plain = false;                        // there are no options: sm90/plain.cuh
  bool reads_input = false;                  // the caller's own rows, where they serve
  int64_t weight_rows = 0;                   // of grad_weight that are made, the first ones; 0: all
  int64_t kept_columns = 0;   // of E in the caller's memory: Forward keeps them, Backward has them
  bool forms_panels = false;  // Backward: their dz is formed elsewhere, a panel at a time
  // dz is formed by form_panel, which makes rows beyond the range again: of state that the caller
  // kept, and of f16. Else sm90/form_dz.cu forms it and sums grad_bias on the way.
  bool forms_by_rows() const { return forms_dz && (kept_columns > 0 || dtype == DType::f16); }
  // Backward: tokens without a gradient leave the first rows of kept E to others.
  bool arranges() const { return kept_columns > 0 && !forward; }
  int64_t rows_of_weight() const { return weight_rows > 0 ? weight_rows : vocab; }
  bool gradients() const { return grad_input || grad_weight || grad_bias; }
  bool operator==(const LinearShape&) const = default;
};

// The cost model needs this of a device: measured figures of one H200 (docs/kernels/cuda.md),
// scaled by the multiprocessors elsewhere.
struct DeviceSpeed {
  double products = 680e12;  // FLOP/s of 16-bit products
  double products_f32 = 45e12;
  double memory = 4.0e12;  // bytes/s
  double launch = 3e-6;    // seconds
  double multiprocessors = 132;
  int clusters() const { return static_cast<int>(multiprocessors) / 2; }
  bool operator==(const DeviceSpeed&) const = default;
};

struct LinearPlan {
  PlanKind kind = PlanKind::loss_only;
  int64_t token_chunk = 0, chunks = 0;
  int64_t block_rows = 0, block_columns = 0;  // logits in f32 at a time
  bool holds_logits = false;                  // which the matrix library's product puts in memory
  int64_t tail_columns = 0;                   // the last V % 8, where products take them alone
  int64_t sum_rows = 0;                       // of grad_input in f32 at a time, where E is whole
  int64_t stored_columns = 0;                 // of E, per chunk, in the workspace
  int64_t lent_columns = 0;                   // of E behind them, in grad_weight's memory
  bool copies_lent = true;                    // as many as fit if E is copied before its rows come
  bool input_first = true;                    // where E of all is kept: sm90/panels.h
  int64_t remade_columns = 0;                 // of E or dz at a time, where not all are stored
  bool multiplies_e = false;                  // E times each row's factor: it is not made dz before
  bool smooths_e = false;                     // with the smoothing's term as rows of its own
  bool grad_weight_sum = false;               // [V, D] in f32
  int64_t lent_sum_rows = 0;                  // of it in grad_weight's own memory: the first ones
  bool grad_input_sum = false;                // [token_chunk, D] in f32; else block_rows at a time
  int64_t hidden_pitch = 0;                   // D, to 16 bytes
  int64_t segments = 0;                       // partial sums of a row
  int32_t slots = 0;                          // of tiles in slices: sm90/cut.h
  int64_t slot_size = 0;                      // floats of one
  int32_t input_clusters = 0;                 // of grad_input, where both products run at once
  bool copies_input = true;                   // to compacted rows, where not all tokens count
  bool lends_input = false;                   // these lie in grad_input's memory till the end
  bool scales_apart = false;                  // the input is asked for again after the scaled one
  int64_t lent_scaled = -1;                   // its place in grad_weight's memory, or -1
  int64_t panel_row_block = 1;                // of a panel's rows, in whole ones
  int64_t extra_rows = 0;                     // behind them
  int64_t slab_columns = 0;                   // of a panel, whose sums make grad_bias at a time
  int32_t unit_width = 0;                     // tiles of a segment, or 0: units.h
  int32_t single_tiles = 0;                   // whose sums lie apart, at most
  int32_t single_rows = 0;                    // of each
  int64_t first_rows = 0;                     // of grad_weight, made in the first of two passes
  uint64_t bytes = 0;
  double seconds = 0;  // predicted
};

// Columns of E that are there when the gradients begin.
inline int64_t kept_columns(const LinearPlan& p) { return p.stored_columns + p.lent_columns; }
// Rows of a panel, and of the compacted input.
inline int64_t panel_rows(const LinearPlan& p) {
  return round_up(p.token_chunk, p.panel_row_block) + p.extra_rows;
}

inline constexpr int64_t segment_columns = 1024;  // of a row's partial sums: fixed for every plan
// A chunk's rows have so many behind them: two for the smoothing's own term, zeros to the next
// multiple of 8.
inline constexpr int64_t extra_rows = 16;

// The calls that a plan of two passes consists of, both in the memory behind the rows' states
// (row_reference and row_log_sum): loss, grad_input and the first rows of grad_weight; from the
// states the others.
LinearShape first_pass(const LinearShape& shape, int64_t first_rows);
LinearShape second_pass(const LinearShape& shape, int64_t first_rows);
uint64_t state_bytes(const LinearShape& shape);

}  // namespace logitless::cuda

// SPDX-License-Identifier: Apache-2.0
// How a linear op runs on CUDA, decided from shape, device and bytes of workspace: `logitless plan`
// prints a plan and tests check it without a GPU. The kinds of plans trade time for workspace
// (docs/design.md):
//   loss_only   one product
//   whole       E = exp(z - z_target) of every token and column is kept: three products
//   chunks      E of one chunk of tokens at a time: three products, grad_weight summed in f32, up
//               to half of the sums in its own memory
//   mixed       E of a share of the vocabulary is kept, the rest computed again: 3 to 4 products
//   frugal      nothing kept; dz from logits computed again with the lse known: four products
//   two_passes  E of one chunk of tokens at a time, for grad_input and the first rows of
//               grad_weight; then dz of the other columns for the other rows: 3.5 products, or 4
//               with grad_bias, because then the second pass computes all rows
// Tiled kernels also keep E or dz in rows of grad_weight that are not yet written (tiled/panels.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>

#include "logitless/ops.h"
#include "src/rounding.h"
#include "src/row/sums.h"

namespace logitless::cuda {

enum class PlanKind { loss_only, whole, chunks, mixed, frugal, two_passes };
const char* name_of(PlanKind kind);

// How dz of a column is computed. The engine chooses one way for the columns whose E is kept and
// one for the others.
enum class Origin {
  e,             // products multiply E, and each row has a factor; dz is never stored
  dz_in_place,   // a kernel of the engine turns E into dz in place, and sums grad_bias with it
  dz_by_rows,    // form_panel overwrites E with dz
  dz_in_panels,  // form_panel computes dz from the caller's E, a panel at a time
  again_dz,      // logits are computed again and become dz
  again_e,       // logits are computed again and become E
};
// Whether products multiply E rather than dz.
constexpr bool is_e(Origin o) { return o == Origin::e || o == Origin::again_e; }
// Whether E is kept from the pass over the logits.
constexpr bool is_kept(Origin o) { return o < Origin::again_dz; }
// Whether kept E becomes dz before the products.
constexpr bool forms_dz(Origin o) { return is_kept(o) && o != Origin::e; }
// Whether form_panel computes dz; rows beyond the range of E are then computed again as dz.
constexpr bool is_by_rows(Origin o) { return o == Origin::dz_by_rows || o == Origin::dz_in_panels; }

// What an engine's kernels can do for a call, on which the plans depend.
struct Kernels {
  // How kept E is used; again_dz if there is none, as in a Backward without kept state.
  Origin kept = Origin::e;
  // How the columns that are not kept are computed if products multiply kept E; else again_dz.
  Origin others = Origin::again_e;
  bool direct_grad_weight = true;  // a product can write the output itself
  bool direct_grad_input = false;  // a product can write grad_input itself, if E is whole
  bool lends_grad_input = false;   // grad_input's memory can hold the compacted input
  bool lends_grad_weight = false;  // grad_weight's later rows can hold E or dz
  bool plain = false;              // kernels for calls without options serve this call
  bool reads_input = false;        // products can read the caller's own rows of input
  bool scales_rows = false;        // finish_rows can read them, to multiply them by v
  bool takes_eights = false;       // the last V % 8 columns are products of their own
  bool operator==(const Kernels&) const = default;
};

// Properties of a call. The engine sets `bias`, `class_weights` and `kept_columns`, and may change
// `maps` and `kernels`.
struct LinearShape {
  int64_t tokens = 0, vocab = 0, hidden = 0;
  DType dtype = DType::bf16;
  SumSet sums{};        // of a row, other than of exponentials
  bool forward = true;  // compute lse; false if Backward is given the row state
  bool grad_input = false, grad_weight = false, grad_bias = false;
  bool copies_weight = false;    // a product cannot read the weight's rows in place
  bool grad_weight_f32 = false;  // a product can add to an f32 grad_weight in place
  bool on_cuda_cores = false;    // cuBLASLt's f32 products without TF32
  bool smoothing = false;
  bool maps = false;  // each token has its own map: TokenMap
  // Some tokens may have no gradient and are left out (only in Backward).
  bool screens_gradients = false;
  bool bias = false, class_weights = false;  // read by the engine's kernels
  bool targets_only = false;                 // only the targets' logits are requested
  bool input_first = false;                  // grad_input is written before grad_weight
  bool chooses = false;                      // tokens have chosen columns
  int64_t chosen = 0;                        // chosen columns with gradients of their own, of
                                             // all tokens
  int64_t listed = 0;                        // k of top-k
  int64_t weight_rows = 0;                   // the first rows of grad_weight are computed; 0: all
  // columns of E in the caller's memory, written by Forward and read by Backward
  int64_t kept_columns = 0;
  Kernels kernels{};
  bool can_keep() const { return is_kept(kernels.kept); }
  // D rounded up to 16 bytes, the pitch of rows in the workspace.
  int64_t hidden_pitch() const { return round_up(hidden, 16 / size_of(dtype)); }
  int64_t rows_of_weight() const { return weight_rows > 0 ? weight_rows : vocab; }
  bool gradients() const { return grad_input || grad_weight || grad_bias; }
  bool operator==(const LinearShape&) const = default;
};

// A device's figures for the cost model, measured on one H200. PortableEngine::speed scales
// them for devices that are not Hopper.
struct DeviceSpeed {
  double products = 680e12;  // FLOP/s of products of 16-bit operands
  double products_f32 = 45e12;
  double memory = 4.0e12;  // bytes/s
  double launch = 3e-6;    // seconds
  double multiprocessors = 132;
  bool operator==(const DeviceSpeed&) const = default;
};

// The part of a plan that only its engine knows, in the engine's own type.
class EnginePart {
 public:
  template <class T>
  T& as() {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= size && alignof(T) <= 8);
    return *std::launder(reinterpret_cast<T*>(bytes_));
  }
  template <class T>
  const T& as() const {
    return const_cast<EnginePart*>(this)->as<T>();
  }

 private:
  static constexpr size_t size = 48;
  alignas(8) std::byte bytes_[size] = {};
};

struct LinearPlan {
  PlanKind kind = PlanKind::loss_only;
  int64_t token_chunk = 0, chunks = 0;
  int64_t block_rows = 0, block_columns = 0;  // a block of f32 logits
  int64_t sum_rows = 0;        // rows of grad_input summed in f32 at a time, if E is whole
  int64_t stored_columns = 0;  // columns of E of a chunk in the workspace, or in `kept`
  int64_t lent_columns = 0;    // the next columns of E, in grad_weight's memory
  // Whether one product writes grad_input, without sums in f32, before a row of grad_weight is
  // written: if all of E is kept, a part of it in these rows. Before `settle`: whether it may.
  bool input_first = true;
  // Columns of E or dz computed at a time, if not all are stored.
  int64_t remade_columns = 0;
  // Columns of the first of two products that write grad_weight, with the bits of a single one, if
  // the call asks for grad_input first; 0: there is one product.
  int64_t first_columns = 0;
  int64_t lent_sum_rows = 0;  // rows of grad_weight's f32 sums in its own memory
  int64_t segments = 0;       // partial sums of a row
  bool copies_input = true;   // compacts the input; with reads_input if not all tokens count
  int64_t panel_rows = 0;     // rows of a panel in memory, with padding
  int64_t extra_rows = 0;     // padding rows that the gather and extra_rows.cu write
  int64_t first_rows = 0;     // two passes: rows of grad_weight that the first writes
  uint64_t bytes = 0;
  double seconds = 0;  // predicted
  EnginePart own{};
};

// The last columns, which have their own product in grad_input; and the last rows of grad_weight
// that have their own: none on the CUDA cores, whose products write any number of rows.
inline int64_t tail_columns(const LinearShape& s) {
  return s.kernels.takes_eights ? s.vocab % 8 : 0;
}
inline int64_t tail_rows(const LinearShape& s) {
  return s.grad_weight && !s.on_cuda_cores ? tail_columns(s) : 0;
}

// Columns of E in memory when the gradients begin.
inline int64_t kept_columns(const LinearPlan& p) { return p.stored_columns + p.lent_columns; }
// Whether rows of kept E are moved so that tokens with a gradient come first. Only Backward knows
// which tokens those are.
inline bool arranges(const LinearShape& s) { return s.kept_columns > 0 && !s.forward; }
// Whether products multiply E and apply each row's factor, so that dz need not be computed first.
inline bool multiplies_e(const LinearShape& s, const LinearPlan& p) {
  return s.gradients() && kept_columns(p) > 0 && s.kernels.kept == Origin::e;
}
// Whether the smoothing's term is computed separately, because it is no part of E.
inline bool smooths_e(const LinearShape& s, const LinearPlan& p) {
  return s.smoothing && multiplies_e(s, p);
}
// Whether the scaled input has its own memory, because the input is read again later.
inline bool scales_apart(const LinearShape& s, const LinearPlan& p) {
  return s.grad_weight && kept_columns(p) < s.vocab && multiplies_e(s, p);
}
// Whether the scaled input is computed from the caller's rows, because no product reads a copy.
inline bool scales_rows(const LinearShape& s, const LinearPlan& p) {
  return s.kernels.scales_rows && !s.forward && s.grad_weight && !s.smoothing &&
         p.stored_columns == s.vocab && multiplies_e(s, p);
}
// Whether grad_weight is summed in f32, [V, D].
inline bool sums_grad_weight(const LinearShape& s, const LinearPlan& p) {
  return s.grad_weight && (!s.kernels.direct_grad_weight || (p.chunks > 1 && !s.grad_weight_f32));
}
// Whether grad_input is summed in f32, [token_chunk, D], over several panels.
inline bool sums_grad_input(const LinearShape& s, const LinearPlan& p) {
  return s.grad_input && p.stored_columns < s.vocab && !p.input_first;
}
// Whether the compacted input stays in grad_input's memory: with a single chunk nothing of
// grad_input is written before the last product has read the input. To save less than a megabyte is
// not worth the launch that clears this memory.
inline bool lends_input(const LinearShape& s, const LinearPlan& p) {
  return s.kernels.lends_grad_input && p.chunks == 1 && !p.input_first && !s.input_first &&
         p.token_chunk * s.hidden_pitch() * size_of(s.dtype) > 1 << 20;
}

// Columns per partial sum of a block of logits.
inline constexpr int64_t segment_columns = 1024;

// The calls of a plan of two passes, in the memory that the rows' states leave (row_reference and
// row_log_sum). The first pass computes the loss, grad_input and the first rows of grad_weight; the
// second computes the other rows and grad_bias from the states.
LinearShape first_pass(const LinearShape& shape, int64_t first_rows);
LinearShape second_pass(const LinearShape& shape, int64_t first_rows);
uint64_t state_bytes(const LinearShape& shape);

}  // namespace logitless::cuda

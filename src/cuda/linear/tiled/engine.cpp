// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/tiled/engine.h"

#include <algorithm>

#include "src/cuda/linear/tiled/teams.h"
#include "src/kept.h"

namespace logitless::cuda::tiled {
namespace {

// KeptRow::layout of a panel in blocks of 64 columns
constexpr float kept_in_blocks = 11;

// Whether a product can write this gradient itself: f32 or the inputs' dtype, with contiguous rows.
bool writes(const Tensor& gradient, DType inputs) {
  return (gradient.dtype == DType::f32 || gradient.dtype == inputs) &&
         (gradient.stride[1] == 1 || gradient.shape[1] == 1);
}

// Whether the view is one piece of memory: rows without gaps, multiples of 16 bytes.
bool is_memory(const Tensor& v) {
  return v.shape[1] % 8 == 0 && v.stride[1] == 1 && v.stride[0] == v.shape[1] && is_aligned(v);
}

// Whether the call has no map, bias, smoothing, gradient of entropy, top-k, or sums beyond the
// loss's.
bool is_plain(const LinearCall& call) {
  const LinearShape& s = call.shape;
  return call.plain() && !s.smoothing && s.sums.empty() && !call.in.grad_entropy && s.listed == 0;
}

// Whether the products can read the caller's own rows of input, in plain calls without gradients.
bool reads_input(const Tensor& v, const LinearShape& s) {
  const int64_t element = size_of(s.dtype);
  const bool rows = (v.stride[1] == 1 || s.hidden == 1) &&
                    (s.tokens == 1 || (v.stride[0] >= s.hidden && v.stride[0] * element % 16 == 0 &&
                                       v.stride[0] * element < int64_t{1} << 31));
  return s.kernels.plain && !s.gradients() && s.kept_columns == 0 && s.tokens > 0 && rows &&
         is_aligned(v);
}

}  // namespace

void TiledEngine::describe(const Call& op, LinearCall* call, const DeviceInfo& device) const {
  LinearShape& s = call->shape;
  Kernels& k = s.kernels;
  k.others = Origin::again_dz;
  call->launches_early = tile_.starts_early && device.launches_early;
  // With a softcap every element of the smoothing's term has its own slope, which E may give.
  const bool slopes = s.smoothing && call->map.capped;
  call->kept.layout = kept_in_blocks;
  // With a softcap, a temperature that all tokens share becomes a map per row, as temperatures per
  // token do, so that both give the same bits.
  if (call->map.capped && call->in.options.temperature != 1) s.maps = call->in.makes_maps = true;
  if (slopes && s.can_keep()) {
    k.kept = forms_in_place(*call) ? Origin::dz_in_place : Origin::again_dz;
  }
  if (s.dtype == DType::f16) keep_codes(call);
  if (op.kept && !slopes) {
    // A product of the remaining logits starts at a whole tile.
    const int64_t room = kept_columns(op);
    lay_out_kept(op, room < s.vocab ? room / tile_.columns * tile_.columns : room, call);
  }
  // dz overwrites E if E is not needed again; else it is computed a panel at a time.
  if (k.kept == Origin::dz_by_rows && s.kept_columns > 0 && !op.consume_kept) {
    k.kept = Origin::dz_in_panels;
  }
  k.plain = is_plain(*call);
  k.reads_input = tile_.reads_rows && reads_input(op.input, s);
  s.bias = static_cast<bool>(op.bias);
  s.class_weights = call->in.vocab_weight && (s.smoothing || s.sums.has(SumKind::weighted));
  if (!s.gradients()) return;
  k.scales_rows = is_aligned(op.input) && op.input.stride[1] == 1 && s.hidden % 8 == 0 &&
                  op.input.stride[0] > 0 && op.input.stride[0] % 8 == 0;
  k.direct_grad_weight = !op.grad_weight || writes(op.grad_weight, s.dtype);
  k.direct_grad_input = s.grad_input && writes(op.grad_input, s.dtype);
  k.lends_grad_input = s.grad_input && op.grad_input.dtype == s.dtype && is_memory(op.grad_input);
  k.lends_grad_weight =
      s.grad_weight && !op.accumulate && k.direct_grad_weight && is_memory(op.grad_weight);
}

void TiledEngine::place(Lifetime lifetime, const LinearShape& s, const LinearPlan& p, Arena* arena,
                        LinearMemory* m) const {
  const TiledPart& own = tiled_part(p);
  const auto take = [&]<class T>(bool is_there, T** array, int64_t count) {
    if (is_there) *array = arena->take<T>(count);
  };
  if (lifetime == Lifetime::forward) {
    take(s.listed > 0, &m->logits, p.block_rows * p.block_columns);
    const int64_t singles = int64_t{own.single_tiles} * own.single_rows;
    m->partials.unit_width = own.unit_width;
    m->partials.single_rows = own.single_rows;
    take(singles > 0, &m->partials.single_maximum, singles);
    return take(singles > 0, &m->partials.single_sum, singles);
  }
  if (lifetime == Lifetime::gradients) {
    return take(own.slots > 0, &m->slots, own.slots * slot_size(p));
  }
  take(s.bias, &m->bias_row, s.vocab + tile_.columns);
  take(s.class_weights, &m->class_weights, s.vocab + tile_.columns);
  take(scales_apart(s, p) && own.lent_scaled < 0, &m->scaled,
       p.panel_rows * s.hidden_pitch() * size_of(s.dtype));
  place_bias_slabs(s, p, std::min(bias_columns, round_up(s.vocab, 64)), arena, m);
}

}  // namespace logitless::cuda::tiled

// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/sm90/engine.h"

#include <cmath>

#include "src/cuda/linear/sm90/forward.h"
#include "src/cuda/linear/sm90/panels.h"
#include "src/cuda/linear/sm90/product.h"
#include "src/kept.h"

namespace logitless::cuda::sm90 {
namespace {

// Softcapped logits can be told from E: z = z_target + log E is known to half of an ulp of E, 2^-8,
// which is little beside the softcap, whose square is the slope's unit. Two capped logits are up to
// 2 cap nats apart, and the target's probability is no less than e^(-2 cap) / V; both must be
// normal numbers.
bool e_tells_slope(const MapFactors& map, int64_t vocab) {
  const double cap = std::fabs(map.outward);
  return cap >= 15 && std::exp2(-124.0) * static_cast<double>(vocab) * std::exp(2 * cap) < 1;
}

bool is_aligned(const Tensor& v) { return v.alignment == 0 || v.alignment == most_alignment; }

// KeptRow::layout has it: the panel is in blocks of 64 columns
constexpr float kept_in_blocks = 11;

// Returns whether the view is one piece of memory in whole 16 bytes a row, with nothing between the
// rows.
bool is_memory(const Tensor& v) {
  return v.shape[1] % 8 == 0 && v.stride[1] == 1 && v.stride[0] == v.shape[1] && is_aligned(v);
}

// Returns whether no option and no statistic takes more than the logits, which plain.cuh then
// serves.
bool is_plain(const LinearCall& call) {
  const LinearShape& s = call.shape;
  return call.plain() && !s.smoothing && s.sums.empty() && !call.in.grad_entropy;
}

// Returns whether the products can read the caller's own rows of input, which only the loss alone
// may do.
bool reads_input(const Tensor& v, const LinearShape& s) {
  const int64_t element = size_of(s.dtype);
  const bool rows = (v.stride[1] == 1 || s.hidden == 1) &&
                    (s.tokens == 1 || (v.stride[0] >= s.hidden && v.stride[0] * element % 16 == 0 &&
                                       v.stride[0] * element < int64_t{1} << 31));
  return s.kernels.plain && !s.gradients() && s.kept_columns == 0 && s.tokens > 0 && rows &&
         is_aligned(v);
}

}  // namespace

bool HopperEngine::serves(const DeviceInfo& device) const {
  return has_code() && device.major == 9;
}

bool HopperEngine::serves(const Call& op, const LinearShape& s) const {
  const Tensor& w = op.weight;
  const bool rows = s.copies_weight || w.stride[1] == 1 || s.hidden == 1;
  return s.dtype != DType::f32 && rows && (s.copies_weight || is_aligned(w));
}

void HopperEngine::describe(const Call& op, LinearCall* call, const DeviceInfo& device) const {
  LinearShape& s = call->shape;
  Kernels& k = s.kernels;
  k.others = Origin::again_dz;
  call->launches_early = device.launches_early;
  // Under a softcap every element of the smoothing's term has a slope of its own, which E tells.
  const bool slopes = s.smoothing && call->map.capped;
  call->kept.layout = kept_in_blocks;
  // Under a softcap a temperature that all tokens share becomes a map of each row, as one a token
  // does, so that both give the same bits.
  if (call->map.capped && call->in.options.temperature != 1) s.maps = call->in.makes_maps = true;
  // The kernel that keeps both has no room for these.
  const bool more = s.maps || s.sums.has(SumKind::squares | SumKind::above);
  if (slopes && s.can_keep()) {
    k.kept = !more && e_tells_slope(call->map, s.vocab) ? Origin::dz_in_place : Origin::again_dz;
  }
  if (s.dtype == DType::f16) keep_codes(call);
  if (op.kept && !slopes) lay_out_kept(op, kept_columns(op), call);
  // dz takes the place of E where nobody asks for E again; else it is formed a panel at a time.
  if (k.kept == Origin::dz_by_rows && s.kept_columns > 0 && !op.consume_kept) {
    k.kept = Origin::dz_in_panels;
  }
  k.plain = is_plain(*call);
  k.reads_input = reads_input(op.input, s);
  s.bias = static_cast<bool>(op.bias);
  s.class_weights = call->in.vocab_weight && (s.smoothing || s.sums.has(SumKind::weighted));
  if (!s.gradients()) return;
  k.direct_grad_weight = !op.grad_weight || writes(op.grad_weight, s.dtype);
  k.direct_grad_input = s.grad_input && writes(op.grad_input, s.dtype);
  k.lends_grad_input = s.grad_input && op.grad_input.dtype == s.dtype && is_memory(op.grad_input);
  k.lends_grad_weight =
      s.grad_weight && !op.accumulate && k.direct_grad_weight && is_memory(op.grad_weight);
}

void HopperEngine::place(Lifetime lifetime, const LinearShape& s, const LinearPlan& p, Arena* arena,
                         LinearMemory* m) const {
  const TiledPart& own = tiled_part(p);
  const auto take = [&]<class T>(bool is_there, T** array, int64_t count) {
    if (is_there) *array = arena->take<T>(count);
  };
  if (lifetime == Lifetime::forward) {
    const int64_t singles = int64_t{own.single_tiles} * own.single_rows;
    m->partials.unit_width = own.unit_width;
    m->partials.single_rows = own.single_rows;
    take(singles > 0, &m->partials.single_maximum, singles);
    return take(singles > 0, &m->partials.single_sum, singles);
  }
  if (lifetime == Lifetime::gradients) {
    return take(own.slots > 0, &m->slots, int64_t{own.slots} * own.slot_size);
  }
  take(s.bias, &m->bias_row, s.vocab + column_padding);
  take(s.class_weights, &m->class_weights, s.vocab + column_padding);
  take(scales_apart(s, p) && own.lent_scaled < 0, &m->scaled,
       p.panel_rows * p.hidden_pitch * size_of(s.dtype));
  place_bias_slabs(s, p, std::min(bias_columns, round_up(s.vocab, 64)), arena, m);
}

DeviceSpeed HopperEngine::speed(const DeviceInfo& device) const {
  return {.multiprocessors = static_cast<double>(device.multiprocessors)};
}

}  // namespace logitless::cuda::sm90

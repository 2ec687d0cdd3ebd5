// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "src/cuda/divergence/plan.h"
#include "src/cuda/linear/engine.h"
#include "src/cuda/runtime/blas.h"
#include "src/kept.h"
#include "src/row/divergence.h"
#include "src/row/map.h"

namespace logitless::cuda {
namespace {

// A bound of a row's |dz| before the label's term. reverse_kl has no bound, but p |d - mean|
// exceeds this many nats only where q is too small for f32.
float most_dz(DivergenceKind kind) { return kind == DivergenceKind::reverse_kl ? 512 : 2; }
float usual_dz(DivergenceKind kind) { return kind == DivergenceKind::reverse_kl ? 64 : 1; }

// dz of f16 is stored times a power of two, so that small values keep their bits.
float lift_of(const DivergenceOptions& o) {
  const DivergenceKind kind = effective_kind(o);
  const float usual = kind == DivergenceKind::reverse_kl ? 64 : 1024;
  const float most = 32768 / (most_dz(kind) + o.label_weight);
  return std::exp2(std::floor(std::log2(std::fmin(usual, most))));
}

LinearCall head_of(const TokenInput& in, const LossOptions& options, const TensorView& input,
                   const TensorView& weight, const TensorView& bias) {
  LinearCall head;
  head.in = in;
  head.input = input;
  head.weight = weight;
  head.bias = bias;
  head.map = map_factors(logit_map(options));
  LinearShape& s = head.shape;
  s.maps = in.makes_maps;
  if (!weight) return head;
  s.tokens = input.shape[0];
  s.vocab = weight.shape[0];
  s.hidden = weight.shape[1];
  s.dtype = input.dtype;
  s.on_cuda_cores = s.dtype == DType::f32 && !options.allow_tf32;
  s.copies_weight = !serves_product(weight);
  s.kernels.takes_eights = true;
  return head;
}

void add_gradients(const Call& call, LinearCall* head) {
  LinearShape& s = head->shape;
  head->grad_input = call.grad_input;
  head->grad_weight = call.grad_weight;
  head->grad_bias = call.grad_bias;
  head->accumulate = call.accumulate;
  s.grad_input = static_cast<bool>(call.grad_input);
  s.grad_weight = static_cast<bool>(call.grad_weight);
  s.grad_bias = static_cast<bool>(call.grad_bias);
  s.grad_weight_f32 = call.grad_weight.dtype == DType::f32;
  const TensorView& out = call.grad_weight;
  s.kernels.direct_grad_weight = !out || ((out.dtype == DType::f32 || out.dtype == s.dtype) &&
                                          out.stride[1] == 1 && serves_product(out));
}

// Equal heads get logits of equal bits only if both use the same kind of product.
void copy_both_or_none(DivergenceCall* made) {
  LinearShape &s = made->student.shape, &t = made->teacher.shape;
  if (s.hidden != t.hidden) return;
  s.copies_weight = t.copies_weight = s.copies_weight || t.copies_weight;
}

// An engine sums raw logits, so there must be no bias or softcap, and the scale must preserve the
// order.
bool may_store(const LinearCall& head, const LossOptions& options, const Tensor& weight) {
  const LinearShape& s = head.shape;
  return weight && s.dtype != DType::f32 && has_aligned_rows(weight, s) && !head.bias &&
         !head.map.capped && options.logit_scale > 0;
}

// Whether the products can read the caller's own rows if every token counts: whole multiples of 16
// bytes, without gaps, and without padding rows after the last.
bool reads_rows(const Tensor& input, const LinearShape& s) {
  const bool memory = input.stride[1] == 1 && input.stride[0] == s.hidden &&
                      s.hidden * size_of(s.dtype) % most_alignment == 0;
  return memory && input.alignment == most_alignment && whole_rows(s.tokens) == s.tokens;
}

void add_kept(const Call& call, DivergenceCall* made) {
  TokenInput& in = made->student.in;
  const bool is_half = call.input.dtype == DType::f16;
  made->kept = call.kept;
  made->kept_rows = call.kept_rows;
  const bool logits = call.kept && keeps_logits(call), dz = call.kept && !logits;
  made->keeps_logits = logits && !call.state_given();
  made->reads_logits = logits && call.state_given();
  made->keeps = dz && call.forward;
  made->from_kept = dz && !call.forward;
  // In f16, reverse_kl divides each kept row by its own factor, because its dz has no bound.
  const bool divides = is_half && effective_kind(call.divergence) == DivergenceKind::reverse_kl;
  made->alike = !in.per_row_upstream && !in.token_weight && !in.makes_maps && !divides;
  if (dz && is_half) made->lift = lift_of(call.divergence);
  if (!is_half) return;
  if (made->from_kept) {
    in.beyond = 8191;  // 1 + this is gradient_scale's limit, so row factors are at most 1
  } else {
    in.lift = lift_of(call.divergence);
    in.beyond = usual_dz(effective_kind(call.divergence)) - 1 + call.divergence.label_weight;
  }
}

}  // namespace

DivergenceCall make_divergence(const Call& call) {
  DivergenceCall made;
  made.options = call.divergence;
  made.options.kind = effective_kind(call.divergence);
  made.student = head_of(token_input(call), call.options, call.input, call.weight, call.bias);
  if (call.gradients) add_gradients(call, &made.student);
  add_kept(call, &made);

  // Without gradients, kept logits leave no product that reads the weight.
  if (made.reads_logits && !call.gradients) made.student.shape.copies_weight = false;

  made.teacher_in = made.student.in;
  made.teacher_in.options.logit_scale = call.divergence.teacher_logit_scale;
  made.teacher_in.options.softcap = call.divergence.teacher_softcap;
  made.teacher_in.options.temperature = call.divergence.teacher_temperature;
  made.teacher_in.temperature = call.teacher_temperature;
  const bool needs_teacher = !made.from_kept;
  const bool multiplies = needs_teacher && !made.reads_logits;
  made.teacher_in.makes_maps = needs_teacher && call.teacher_temperature;
  made.teacher =
      head_of(made.teacher_in, call.teacher_options(), call.teacher_input,
              multiplies ? TensorView(call.teacher_weight) : TensorView{}, call.teacher_bias);
  if (made.makes_teacher()) {
    copy_both_or_none(&made);
    made.may_store = may_store(made.student, call.options, call.weight) &&
                     may_store(made.teacher, call.teacher_options(), call.teacher_weight);
  }
  if (needs_teacher) made.teacher_logits = call.teacher_logits;
  if (call.forward && !call.target) {
    const auto set = [](LinearCall* head) {
      head->shape.kernels.reads_input = reads_rows(head->input, head->shape);
    };
    set(&made.student);
    if (made.makes_teacher()) set(&made.teacher);
  }
  made.shard = {.given = call.state_given(),
                .states = {call.row_reference, call.row_log_sum, call.teacher_row_reference,
                           call.teacher_row_log_sum},
                .target_logit = call.target_logit,
                .divergence_sum = call.divergence_sum,
                .slope_sum = call.slope_sum};
  if (made.options.kind != DivergenceKind::forward_kl) made.shard.slope_mean = call.slope_mean;
  if (!call.forward) return made;
  made.loss = call.loss;
  made.statistics = {call.entropy, call.teacher_entropy, call.acceptance, call.logprob};
  // Outputs that tokens.cu sets to 0 for tokens that do not count, under other outputs' names.
  made.others = {call.loss,
                 {.lse = call.teacher_entropy,
                  .target_logit = call.acceptance,
                  .entropy = call.entropy,
                  .row_reference = made.shard.given ? call.divergence_sum : call.row_reference,
                  .row_log_sum = made.shard.given ? call.slope_sum : call.row_log_sum,
                  .weighted_logit_sum = call.target_logit,
                  .logprob = call.logprob}};
  if (made.shard.given) return made;
  made.others.statistics.mean_logit = call.teacher_row_reference;
  made.others.statistics.sum_p_squared = call.teacher_row_log_sum;
  return made;
}

}  // namespace logitless::cuda

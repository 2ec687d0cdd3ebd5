// SPDX-License-Identifier: Apache-2.0
// These rules are of LinearDivergence ops alone: docs/semantics.md, "Divergences of two heads".
#include <cfloat>
#include <cmath>

#include "src/message.h"
#include "src/rules.h"

namespace logitless {
namespace {

struct RangeRule {
  const char* name;
  float DivergenceOptions::* value;
  bool (*ok)(float);
  const char* allowed;
};
constexpr RangeRule kRanges[] = {
    {"label_weight", &DivergenceOptions::label_weight,
     [](float x) { return x >= 0 && x <= FLT_MAX; }, "finite, >= 0"},
    {"teacher_logit_scale", &DivergenceOptions::teacher_logit_scale,
     [](float x) { return std::isfinite(x); }, "finite"},
    {"teacher_softcap", &DivergenceOptions::teacher_softcap,
     [](float x) { return x == 0 || (x >= FLT_MIN && x <= FLT_MAX); },
     "0 (none), or finite, positive and not subnormal"},
    {"teacher_temperature", &DivergenceOptions::teacher_temperature,
     [](float x) { return x >= FLT_MIN && x <= FLT_MAX; }, "finite, positive and not subnormal"},
};

bool reads_beta(DivergenceKind kind) {
  return kind == DivergenceKind::jsd || kind == DivergenceKind::skew_kl;
}

// A divergence has no use for these options of a loss.
Status check_unused_options(const Call& call) {
  const LossOptions& o = call.options;
  for (const auto& [name, value] :
       {std::pair{"label_smoothing", o.label_smoothing}, std::pair{"z_loss", o.z_loss}}) {
    if (value == 0) continue;
    return error(StatusCode::invalid_argument, "%s is %g; %s allows: 0", name,
                 unsigned_nan(static_cast<double>(value)), call.op_name());
  }
  if (o.vocab_total != 0 || o.vocab_start != 0) {
    return error(StatusCode::not_supported,
                 "vocab_total is %lld and vocab_start %lld; %s allows: 0, the whole vocabulary",
                 static_cast<long long>(o.vocab_total), static_cast<long long>(o.vocab_start),
                 call.op_name());
  }
  return {};
}

}  // namespace

Status check_divergence_options(const Call& call) {
  if (!call.diverges) return {};
  const DivergenceOptions& o = call.divergence;
  const auto kind = static_cast<int32_t>(o.kind);
  if (kind < 0 || kind > LOGITLESS_TV) {
    return error(StatusCode::unknown_enum,
                 "divergence kind is %d; allowed: forward_kl, reverse_kl, jsd, skew_kl, tv", kind);
  }
  if (reads_beta(o.kind) && !(o.beta >= 0 && o.beta <= 1)) {
    return error(StatusCode::invalid_argument, "beta is %g; allowed: 0 to 1",
                 unsigned_nan(static_cast<double>(o.beta)));
  }
  for (const RangeRule& rule : kRanges) {
    const float value = o.*rule.value;
    if (!rule.ok(value)) {
      return error(StatusCode::invalid_argument, "%s is %g; allowed: %s", rule.name,
                   unsigned_nan(static_cast<double>(value)), rule.allowed);
    }
  }
  const Status status = check_factors("of the teacher, ", call.teacher_options());
  return status.ok() ? check_unused_options(call) : status;
}

// The teacher is a head or logits, or nothing beside what is kept.
Status check_teacher(const Call& call) {
  if (!call.diverges) return {};
  const bool input = static_cast<bool>(call.teacher_input);
  const bool weight = static_cast<bool>(call.teacher_weight);
  if (input != weight) {
    return error(StatusCode::invalid_argument, "%s is given without %s; allowed: both or neither",
                 input ? "teacher_input" : "teacher_weight",
                 input ? "teacher_weight" : "teacher_input");
  }
  if (call.teacher_logits) {
    const char* beside = weight ? "teacher_weight" : call.teacher_bias ? "teacher_bias" : nullptr;
    if (beside != nullptr) {
      return error(StatusCode::invalid_argument,
                   "teacher_logits is given beside %s; allowed: one of logits and a head", beside);
    }
  } else if (!weight) {
    if (call.teacher_bias) {
      return error(StatusCode::invalid_argument,
                   "teacher_bias is given without teacher_weight; allowed: beside it");
    }
    if (call.forward || !call.kept) {
      return error(StatusCode::invalid_argument,
                   "teacher_weight is missing, and so is teacher_logits; %s needs one",
                   call.op_name());
    }
  }
  if (call.teacher_temperature && call.divergence.teacher_temperature != 1) {
    return error(StatusCode::invalid_argument,
                 "teacher_temperature is given as a tensor and as the number %g; allowed: one (1 "
                 "beside a tensor)",
                 static_cast<double>(call.divergence.teacher_temperature));
  }
  if (call.vocab_weight) {
    return error(StatusCode::invalid_argument, "vocab_weight is given; %s has no class weights",
                 call.op_name());
  }
  if (call.target) return {};
  const char* needs = call.divergence.label_weight != 0 ? "label_weight"
                      : call.forward && call.logprob    ? "logprob"
                                                        : nullptr;
  if (needs == nullptr) return {};
  return error(StatusCode::invalid_argument, "target is missing; %s needs it", needs);
}

Status check_teacher_sizes(const Call& call) {
  if (!call.diverges) return {};
  if (call.teacher_weight && call.teacher_input.shape[1] == 0) {
    return error(StatusCode::invalid_argument, "teacher_input has shape %s; allowed: D >= 1",
                 shape_text(call.teacher_input).text);
  }
  const DType dtype = call.input.dtype;
  for (const char* name : {"teacher_input", "teacher_weight"}) {
    if (call[name] && call[name].dtype != dtype) {
      return error(StatusCode::wrong_dtype, "%s is %s; allowed: %s, the dtype of input", name,
                   name_of(call[name].dtype), name_of(dtype));
    }
  }
  const TensorView& bias = call.teacher_bias;
  if (bias && bias.dtype != dtype && bias.dtype != DType::f32) {
    return error(StatusCode::wrong_dtype, "teacher_bias is %s; allowed: f32%s%s",
                 name_of(bias.dtype), dtype == DType::f32 ? "" : ", ",
                 dtype == DType::f32 ? "" : name_of(dtype));
  }
  constexpr int64_t most = int64_t{1} << 56;
  const int64_t d = call.teacher_weight ? call.teacher_input.shape[1] : 1;
  if (call.tokens() <= most / d && call.vocab() <= most / d) return {};
  return error(
      StatusCode::invalid_argument,
      "teacher_weight: N = %lld, V = %lld, D = %lld; allowed: no product of two above 2^56",
      static_cast<long long>(call.tokens()), static_cast<long long>(call.vocab()),
      static_cast<long long>(d));
}

}  // namespace logitless

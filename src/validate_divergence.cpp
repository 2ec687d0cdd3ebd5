// SPDX-License-Identifier: Apache-2.0
// Rules of the LinearDivergence ops: docs/semantics.md, "Divergences of two heads".
#include <cfloat>
#include <utility>

#include "src/message.h"
#include "src/row/divergence.h"
#include "src/rules.h"

namespace logitless {
namespace {

// Below this, a ratio p/q that f32 cannot hold would matter.
constexpr float least_beta = 0x1p-90f;

bool reads_beta(DivergenceKind kind) {
  return kind == DivergenceKind::jsd || kind == DivergenceKind::skew_kl;
}

// Options of a loss that a divergence does not use.
Status check_unused_options(const Call& call) {
  const LossOptions& o = call.options;
  for (const auto& [name, value] :
       {std::pair{"label_smoothing", o.label_smoothing}, std::pair{"z_loss", o.z_loss}}) {
    if (value == 0) continue;
    return error(StatusCode::invalid_argument, "%s is %g; %s allows: 0", name,
                 unsigned_nan(static_cast<double>(value)), call.op_name());
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
  if (reads_beta(o.kind) && o.beta != 0 && !(o.beta >= least_beta && o.beta <= 1)) {
    return error(StatusCode::invalid_argument, "beta is %g; allowed: 0, or 2^-90 to 1",
                 unsigned_nan(static_cast<double>(o.beta)));
  }
  if (!(o.label_weight >= 0 && o.label_weight <= FLT_MAX)) {
    return error(StatusCode::invalid_argument, "label_weight is %g; allowed: finite, >= 0",
                 unsigned_nan(static_cast<double>(o.label_weight)));
  }
  const Status status = check_teacher_map(call.teacher_options());
  return status.ok() ? check_unused_options(call) : status;
}

// The teacher is a head, or logits, or, in a Backward with kept state, absent.
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
      return error(
          StatusCode::invalid_argument,
          "teacher_weight is missing, and so is teacher_logits; allowed: one of logits and a "
          "head");
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
                      : call.target_logit               ? "target_logit"
                                                        : nullptr;
  if (needs == nullptr) return {};
  return error(StatusCode::invalid_argument, "target is missing; %s needs it", needs);
}

namespace {

constexpr const char* kStates[] = {"row_reference", "row_log_sum", "teacher_row_reference",
                                   "teacher_row_log_sum"};

Status check_all_states(const Call& call, const char* needs) {
  for (const char* name : kStates) {
    if (call[name]) continue;
    return error(StatusCode::invalid_argument,
                 "%s is missing; %s needs the whole vocabulary's states of both heads", name,
                 needs);
  }
  return {};
}

Status check_sums(const Call& call) {
  const char* sum = call.divergence_sum ? "divergence_sum" : "slope_sum";
  const Status status = check_all_states(call, sum);
  if (!status.ok()) return status;
  for (const char* name :
       {"loss", "entropy", "teacher_entropy", "logprob", "target_logit", "kept"}) {
    if (!call[name] || (call.kept && call.shard() && name == std::string_view("kept"))) continue;
    return error(StatusCode::invalid_argument, "%s is given beside %s; allowed: acceptance", name,
                 sum);
  }
  return {};
}

Status check_states_of_backward(const Call& call) {
  const char* given = nullptr;
  for (const char* name : kStates) {
    if (call[name]) given = name;
  }
  if (call.shard()) given = "Backward on a shard of the vocabulary";
  if (given == nullptr) {
    if (!call.slope_mean) return {};
    return error(StatusCode::invalid_argument,
                 "slope_mean is given without row_reference; allowed: beside the states");
  }
  if (call.kept && !call.shard()) {
    return error(StatusCode::invalid_argument, "kept is given beside %s; allowed: one of them",
                 given);
  }
  const Status status = check_all_states(call, given);
  if (!status.ok()) return status;
  const bool has_mean = effective_kind(call.divergence) != DivergenceKind::forward_kl;
  if (has_mean && !call.slope_mean) {
    return error(StatusCode::invalid_argument,
                 "slope_mean is missing; row_reference needs it beside every kind but forward_kl");
  }
  return {};
}

// What a shard keeps are logits, which the calls after its states read.
Status check_kept_of_shard(const Call& call) {
  if (!call.kept || !call.shard()) return {};
  if (call.execution.device.type != DeviceType::cuda) {
    return error(StatusCode::not_supported,
                 "kept is given on a shard of the vocabulary; allowed on CUDA alone");
  }
  for (const char* name : kStates) {
    if (call[name]) continue;
    return error(StatusCode::invalid_argument,
                 "%s is missing; kept on a shard needs the states of both heads", name);
  }
  return {};
}

}  // namespace

// The rows' states and sums, which Forward and Backward exchange between shards.
Status check_divergence_states(const Call& call) {
  if (!call.diverges) return {};
  const Status status = check_kept_of_shard(call);
  if (!status.ok()) return status;
  if (!call.forward) return check_states_of_backward(call);
  return call.sums_of_shard() ? check_sums(call) : Status();
}

// A shard's Forward writes either states or sums.
Status check_divergence_shard(const Call& call) {
  if (call.acceptance && !call.sums_of_shard()) {
    return error(
        StatusCode::invalid_argument,
        "acceptance is given on a shard of the vocabulary without divergence_sum; allowed: "
        "beside it, as a sum");
  }
  if (call.forward && call.logprob) {
    return error(StatusCode::invalid_argument,
                 "logprob is given on a shard of the vocabulary; %s allows: the whole vocabulary",
                 call.op_name());
  }
  return {};
}

}  // namespace logitless

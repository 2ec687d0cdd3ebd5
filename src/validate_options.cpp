// SPDX-License-Identifier: Apache-2.0
// Rules of docs/semantics.md about options, alone and together with the op's tensors.
#include <cfloat>
#include <cmath>

#include "src/message.h"
#include "src/row/statistics.h"
#include "src/rules.h"

namespace logitless {
namespace {

struct EnumRule {
  const char* name;
  int32_t (*value)(const LossOptions&);
  int32_t most;
  const char* allowed;
};
constexpr EnumRule kEnums[] = {
    {"reduction", [](const LossOptions& o) { return static_cast<int32_t>(o.reduction); }, 2,
     "none, sum, mean"},
    {"out_of_range", [](const LossOptions& o) { return static_cast<int32_t>(o.out_of_range); }, 1,
     "error, ignore"},
    {"empty_mean", [](const LossOptions& o) { return static_cast<int32_t>(o.empty_mean); }, 1,
     "zero, nan"},
    {"input_kind", [](const LossOptions& o) { return static_cast<int32_t>(o.input_kind); }, 1,
     "logits, probabilities"},
};

struct RangeRule {
  const char* name;
  float LossOptions::* value;
  bool (*ok)(float);
  const char* allowed;
  bool of_map = false;  // also applies to a teacher's options
};
// Divisors must be normal numbers: a device may flush a subnormal to zero, and its inverse
// overflows.
constexpr RangeRule kRanges[] = {
    {"label_smoothing", &LossOptions::label_smoothing, [](float x) { return x >= 0 && x <= 1; },
     "0 to 1"},
    {"z_loss", &LossOptions::z_loss, [](float x) { return x >= 0 && x <= FLT_MAX; },
     "finite, >= 0"},
    {"logit_scale", &LossOptions::logit_scale, [](float x) { return std::isfinite(x); }, "finite",
     true},
    {"softcap", &LossOptions::softcap,
     [](float x) { return x == 0 || (x >= FLT_MIN && x <= FLT_MAX); },
     "0 (none), or finite, positive and not subnormal", true},
    {"temperature", &LossOptions::temperature, [](float x) { return x >= FLT_MIN && x <= FLT_MAX; },
     "finite, positive and not subnormal", true},
    {"probability_floor", &LossOptions::probability_floor,
     [](float x) { return x >= 0 && x <= FLT_MAX; }, "finite, >= 0"},
};

Status check_range(const char* prefix, const RangeRule& rule, const LossOptions& options) {
  const float value = options.*rule.value;
  if (rule.ok(value)) return {};
  return error(StatusCode::invalid_argument, "%s%s is %g; allowed: %s", prefix, rule.name,
               unsigned_nan(static_cast<double>(value)), rule.allowed);
}

// The factors of z = softcap / temperature tanh(logit_scale / softcap raw) and of its slope must
// fit in f32 on every backend; tanh is often computed from exp of twice its argument.
struct FactorRule {
  const char* name;
  double (*value)(const LossOptions&);
  bool capped;  // only with a softcap
};
constexpr FactorRule kFactors[] = {
    {"logit_scale / temperature",
     [](const LossOptions& o) { return static_cast<double>(o.logit_scale) / o.temperature; },
     false},
    {"2 logit_scale / softcap",
     [](const LossOptions& o) { return 2.0 * o.logit_scale / o.softcap; }, true},
    {"softcap / temperature",
     [](const LossOptions& o) { return static_cast<double>(o.softcap) / o.temperature; }, true},
    {"temperature / softcap",
     [](const LossOptions& o) { return static_cast<double>(o.temperature) / o.softcap; }, true},
};

// The message begins with `whose`.
Status check_factors(const char* whose, const LossOptions& o) {
  for (const FactorRule& rule : kFactors) {
    if (rule.capped && o.softcap == 0) continue;
    const double value = rule.value(o), size = std::fabs(value);
    if (value != 0 && !(size >= FLT_MIN && size <= FLT_MAX)) {
      return error(StatusCode::invalid_argument, "%s%s is %g; allowed: 0 or a normal f32 number",
                   whose, rule.name, value);
    }
  }
  return {};
}

}  // namespace

Status check_option_enums(const Call& call) {
  if (!call.loss_op) return {};
  for (const EnumRule& rule : kEnums) {
    const int32_t value = rule.value(call.options);
    if (value < 0 || value > rule.most) {
      return error(StatusCode::unknown_enum, "%s is %d; allowed: %s", rule.name, value,
                   rule.allowed);
    }
  }
  return {};
}

Status check_option_ranges(const Call& call) {
  if (!call.loss_op) return {};
  for (const RangeRule& rule : kRanges) {
    const Status status = check_range("", rule, call.options);
    if (!status.ok()) return status;
  }
  return check_factors("", call.options);
}

Status check_teacher_map(const LossOptions& options) {
  for (const RangeRule& rule : kRanges) {
    const Status status = rule.of_map ? check_range("teacher_", rule, options) : Status();
    if (!status.ok()) return status;
  }
  return check_factors("of the teacher, ", options);
}

// A call has one temperature in its options, or a tensor with one per token, which stays on the
// device.
Status check_temperature(const Call& call) {
  if (!call.temperature || call.options.temperature == 1) return {};
  return error(StatusCode::invalid_argument,
               "temperature is given as a tensor and as options.temperature = %g; allowed: one (1 "
               "beside a tensor)",
               static_cast<double>(call.options.temperature));
}

Status check_normalizer(const Call& call) {
  if (!call.loss_op) return {};
  const double value = call.options.normalizer;
  const bool view = static_cast<bool>(call["normalizer"]);
  if (!(value >= 0 && value <= DBL_MAX)) {
    return error(StatusCode::invalid_argument,
                 "options.normalizer is %g; allowed: finite, >= 0 (0: counted)",
                 unsigned_nan(value));
  }
  if (view && value != 0) {
    return error(StatusCode::invalid_argument,
                 "normalizer is given as a tensor and as options.normalizer = %g; allowed: one",
                 value);
  }
  if ((view || value != 0) && call.options.reduction != Reduction::mean) {
    return error(StatusCode::invalid_argument,
                 "normalizer is given with reduction %s; allowed: with mean only",
                 name_of(call.options.reduction));
  }
  return {};
}

// Combine needs V, and the shards' values of statistics that their rows' states do not give.
Status check_combine(const Call& call) {
  if (!call.combines) return {};
  if (call.options.vocab_total < 1) {
    return error(StatusCode::invalid_argument,
                 "vocab_total is %lld; allowed: >= 1, the columns of all shards",
                 static_cast<long long>(call.options.vocab_total));
  }
  for (const Statistic& statistic : kStatistics) {
    if (statistic.of_whole_rows && call.*statistic.tensor) {
      return error(StatusCode::not_supported,
                   "%s is given to Combine; allowed: ops that have the logits",
                   statistic.name.data());
    }
  }
  if (call["loss"] && call.options.label_smoothing > 0 && !call["shard_weighted_logit_sum"]) {
    return error(StatusCode::invalid_argument,
                 "shard_weighted_logit_sum is missing; loss needs it under label_smoothing");
  }
  for (const Statistic& statistic : kStatistics) {
    const std::string_view given = statistic.of_shards;
    if (!given.empty() && call.*statistic.tensor && !call[given]) {
      return error(StatusCode::invalid_argument, "%s is missing; %s needs it", given.data(),
                   statistic.name.data());
    }
  }
  return {};
}

Status check_shard_range(const Call& call) {
  if (!call.loss_op) return {};
  const int64_t start = call.options.vocab_start, total = call.options.vocab_total;
  const int64_t vocab = call.combines ? 0 : call.vocab();  // Combine accepts any shard's options
  if (total < 0 || (total > 0 && total < vocab)) {
    return error(StatusCode::invalid_argument,
                 "vocab_total is %lld; allowed: 0 (whole) or >= V = %lld",
                 static_cast<long long>(total), static_cast<long long>(vocab));
  }
  const int64_t most = total > 0 ? total - vocab : 0;
  if (start < 0 || start > most) {
    return error(StatusCode::invalid_argument,
                 "vocab_start is %lld; allowed: 0 to %lld (vocab_total %lld, V %lld)",
                 static_cast<long long>(start), static_cast<long long>(most),
                 static_cast<long long>(total), static_cast<long long>(vocab));
  }
  return {};
}

// A shard alone does not know a row's loss: Forward writes partial statistics, Backward reads
// global ones.
Status check_shard_fields(const Call& call) {
  if (!call.shard()) {
    if (!call["anchor"]) return {};
    return error(StatusCode::invalid_argument,
                 "anchor is given on the whole vocabulary; allowed: a shard of it (vocab_total)");
  }
  if (call.forward && call.gradients) {
    return error(StatusCode::not_supported,
                 "vocab_total is %lld and V %lld: %s does not run on a shard of the vocabulary; "
                 "use Forward, combine and Backward",
                 static_cast<long long>(call.vocab_total()), static_cast<long long>(call.vocab()),
                 call.op_name());
  }
  if (call["loss"]) {
    return error(StatusCode::invalid_argument,
                 "loss is given on a shard of the vocabulary; allowed: statistics, which `combine` "
                 "turns into the loss");
  }
  if (call.diverges) return check_divergence_shard(call);
  for (const Statistic& statistic : kStatistics) {
    if (statistic.of_whole_rows && call.*statistic.tensor) {
      return error(StatusCode::not_supported,
                   "%s is given on a shard of the vocabulary; allowed: the whole vocabulary",
                   statistic.name.data());
    }
  }
  if (call.forward && call["kept"] && !call["anchor"]) {
    return error(StatusCode::invalid_argument,
                 "anchor is missing; kept on a shard of the vocabulary needs the targets' logits");
  }
  if (call.gradients && !call.only_chosen) {
    for (const char* name : {"row_reference", "row_log_sum"}) {
      if (!call[name]) {
        return error(StatusCode::invalid_argument,
                     "%s is missing; Backward on a shard of the vocabulary needs the global one",
                     name);
      }
    }
  }
  return {};
}

Status check_probability_input(const Call& call) {
  if (!call.loss_op || call.options.input_kind != InputKind::probabilities) return {};
  const LossOptions& o = call.options;
  if (call.linear || call.combines) {
    return error(StatusCode::invalid_argument, "input_kind is probabilities; %s allows: logits",
                 call.op_name());
  }
  const struct {
    const char* name;
    float value, neutral;
  } options[] = {{"softcap", o.softcap, 0},
                 {"logit_scale", o.logit_scale, 1},
                 {"temperature", o.temperature, 1},
                 {"z_loss", o.z_loss, 0}};
  for (const auto& option : options) {
    if (option.value != option.neutral) {
      return error(StatusCode::invalid_argument,
                   "%s is %g with input_kind probabilities; allowed: %g", option.name,
                   static_cast<double>(option.value), static_cast<double>(option.neutral));
    }
  }
  if (call.shard()) {
    return error(StatusCode::invalid_argument,
                 "vocab_total is %lld with input_kind probabilities; allowed: 0 or V = %lld",
                 static_cast<long long>(o.vocab_total), static_cast<long long>(call.vocab()));
  }
  const char* given = nullptr;
  for (const char* name : {"grad_lse", "grad_target_logit", "grad_entropy"}) {
    if (call[name]) given = name;
  }
  for (const Statistic& statistic : kStatistics) {
    if (call.*statistic.tensor) given = statistic.name.data();
  }
  if (given != nullptr) {
    return error(StatusCode::invalid_argument,
                 "%s is given with input_kind probabilities, which has no statistics", given);
  }
  if (call["temperature"]) {
    return error(StatusCode::invalid_argument,
                 "temperature is given with input_kind probabilities; allowed: none");
  }
  return {};
}

}  // namespace logitless

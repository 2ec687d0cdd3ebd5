// SPDX-License-Identifier: Apache-2.0
// Tables of bad calls: each row names the mistake, the status that it must give, and the field that
// the message must name.
#pragma once

#include <limits>
#include <ostream>

#include "subject.h"

namespace logitless::testing {

using Mistake = std::function<bool(Subject&)>;  // returns false where the op cannot make it
using enum StatusCode;

// Which verbs must see the mistake: `workspace` and `run`, or `run` alone, if it is about memory.
enum class Seen { by_both, by_run };

struct Reject {
  const char* name;
  Mistake make;
  StatusCode code;
  const char* field;
  Seen seen = Seen::by_both;
};
inline void PrintTo(const Reject& reject, std::ostream* out) { *out << reject.name; }

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kSubnormal = 1e-40f;

template <class T>
inline Mistake option(T LossOptions::* member, T value) {
  return [=](Subject& s) {
    if (s.options == nullptr) return false;
    s.options->*member = value;
    return true;
  };
}

template <class T>
inline Mistake divergence(T DivergenceOptions::* member, T value) {
  return [=](Subject& s) {
    if (!s.diverges()) return false;
    s.divergence->*member = value;
    return true;
  };
}
inline Mistake diverging(std::function<bool(Subject&)> how) {
  return [=](Subject& s) { return s.diverges() && how(s); };
}
// Gives a divergence's Forward its sums and one more field that is not allowed with them.
inline Mistake beside_sums(const char* name) {
  return diverging([=](Subject& s) {
    const bool forward = s.forward() && !s.gradients();
    const TensorView view = forward ? s[name] : TensorView{};
    return forward && s.make_sums() && (s[name] = view);
  });
}
inline Mistake on_divergences_shard(const char* name) {
  return diverging([=](Subject& s) {
    const bool forward = s.forward() && !s.gradients();
    const TensorView view = forward ? s[name] : TensorView{};
    return forward && s.make_shard() && (s[name] = view);
  });
}
inline Mistake mixing(float beta) {
  return diverging([=](Subject& s) {
    s.divergence->kind = DivergenceKind::skew_kl, s.divergence->beta = beta;
    return true;
  });
}

inline Mistake map(float logit_scale, float softcap, float temperature) {
  return [=](Subject& s) {
    if (s.options == nullptr) return false;
    s.options->logit_scale = logit_scale, s.options->softcap = softcap;
    s.options->temperature = temperature;
    return true;
  };
}

inline Mistake missing(std::initializer_list<const char*> names) {
  return [names = std::vector<std::string>(names.begin(), names.end())](Subject& s) {
    if (!s.has(names[0])) return false;
    for (const auto& name : names) s[name] = {};
    return true;
  };
}

inline Mistake change(const char* name, std::function<void(TensorView&)> how) {
  return [=](Subject& s) {
    if (!s.has(name)) return false;
    how(s[name]);
    return true;
  };
}

inline Mistake dtype(const char* name, DType value) {
  return change(name, [=](TensorView& v) { v.dtype = value; });
}

inline Mistake loss_op(std::function<void(Subject&)> how) {
  return [=](Subject& s) {
    if (s.options == nullptr) return false;
    how(s);
    return true;
  };
}

inline Mistake any_op(std::function<void(Subject&)> how) {
  return [=](Subject& s) {
    how(s);
    return true;
  };
}

// Makes a mistake in an op whose input is probabilities.
inline Mistake probabilities(std::function<bool(Subject&)> how) {
  return [=](Subject& s) { return s.make_probabilities() && how(s); };
}

inline Mistake on_shard(const char* name) {
  return [name](Subject& s) {
    if (!s.has(name)) return false;
    const TensorView given = s[name];
    if (!s.make_shard()) return false;
    s[name] = given;
    return true;
  };
}
inline Mistake with_probabilities(const char* name) {
  return [=](Subject& s) {
    if (!s.has(name)) return false;
    const TensorView kept = s[name];
    if (!s.make_probabilities()) return false;
    s[name] = kept;
    return true;
  };
}

// Options, devices, and which fields are there.
inline const Reject kOpRejects[] = {
    {"unknown reduction", option(&LossOptions::reduction, Reduction(3)), unknown_enum, "reduction"},
    {"negative reduction", option(&LossOptions::reduction, Reduction(-1)), unknown_enum,
     "reduction"},
    {"unknown out_of_range", option(&LossOptions::out_of_range, OutOfRange(2)), unknown_enum,
     "out_of_range"},
    {"unknown empty_mean", option(&LossOptions::empty_mean, EmptyMean(2)), unknown_enum,
     "empty_mean"},
    {"unknown input_kind", option(&LossOptions::input_kind, InputKind(2)), unknown_enum,
     "input_kind"},
    {"label_smoothing 1.5", option(&LossOptions::label_smoothing, 1.5f), invalid_argument,
     "label_smoothing"},
    {"label_smoothing -0.1", option(&LossOptions::label_smoothing, -0.1f), invalid_argument,
     "label_smoothing"},
    {"label_smoothing NaN", option(&LossOptions::label_smoothing, kNaN), invalid_argument,
     "label_smoothing"},
    {"z_loss negative", option(&LossOptions::z_loss, -1e-9f), invalid_argument, "z_loss"},
    {"z_loss inf", option(&LossOptions::z_loss, kInf), invalid_argument, "z_loss"},
    {"z_loss NaN", option(&LossOptions::z_loss, kNaN), invalid_argument, "z_loss"},
    {"logit_scale inf", option(&LossOptions::logit_scale, -kInf), invalid_argument,
     "logit_scale is"},
    {"logit_scale NaN", option(&LossOptions::logit_scale, kNaN), invalid_argument,
     "logit_scale is"},
    {"softcap negative", option(&LossOptions::softcap, -1.f), invalid_argument, "softcap"},
    {"softcap inf", option(&LossOptions::softcap, kInf), invalid_argument, "softcap is"},
    {"softcap NaN", option(&LossOptions::softcap, kNaN), invalid_argument, "softcap"},
    {"softcap subnormal", option(&LossOptions::softcap, kSubnormal), invalid_argument, "softcap"},
    {"temperature 0", option(&LossOptions::temperature, 0.f), invalid_argument, "temperature"},
    {"temperature negative", option(&LossOptions::temperature, -1.f), invalid_argument,
     "temperature"},
    {"temperature inf", option(&LossOptions::temperature, kInf), invalid_argument, "temperature"},
    {"temperature NaN", option(&LossOptions::temperature, kNaN), invalid_argument, "temperature"},
    {"temperature subnormal", option(&LossOptions::temperature, kSubnormal), invalid_argument,
     "temperature"},
    {"a slope beyond f32", map(1e20f, 0, 1e-20f), invalid_argument, "logit_scale / temperature"},
    {"a slope below f32", map(-1e-20f, 0, 1e20f), invalid_argument, "logit_scale / temperature"},
    {"a cap too small for the scale", map(1e10f, 1e-30f, 1), invalid_argument,
     "2 logit_scale / softcap"},
    {"a cap too large for the scale", map(-1e-10f, 1e30f, 1), invalid_argument,
     "2 logit_scale / softcap"},
    {"a cap beyond f32", map(1, 1e30f, 1e-10f), invalid_argument, "softcap / temperature"},
    {"a cap below f32", map(1, 1e-30f, 1e10f), invalid_argument, "softcap / temperature"},
    {"probability_floor negative", option(&LossOptions::probability_floor, -1e-9f),
     invalid_argument, "probability_floor"},
    {"probability_floor inf", option(&LossOptions::probability_floor, kInf), invalid_argument,
     "probability_floor"},
    {"probability_floor NaN", option(&LossOptions::probability_floor, kNaN), invalid_argument,
     "probability_floor"},
    {"temperature twice", option(&LossOptions::temperature, 2.f), invalid_argument,
     "temperature is given"},
    {"normalizer twice", option(&LossOptions::normalizer, 2.0), invalid_argument, "normalizer"},
    {"host normalizer negative", loss_op([](Subject& s) {
       s.drop({"normalizer"});
       s.options->normalizer = -1;
     }),
     invalid_argument, "normalizer"},
    {"host normalizer NaN", loss_op([](Subject& s) {
       s.drop({"normalizer"});
       s.options->normalizer = kNaN;
     }),
     invalid_argument, "normalizer"},
    {"host normalizer inf", loss_op([](Subject& s) {
       s.drop({"normalizer"});
       s.options->normalizer = kInf;
     }),
     invalid_argument, "normalizer"},
    {"host normalizer of a sum", loss_op([](Subject& s) {
       s.drop({"normalizer"});
       s.options->normalizer = 2;
       s.options->reduction = Reduction::sum;
     }),
     invalid_argument, "normalizer"},
    {"normalizer of a sum", option(&LossOptions::reduction, Reduction::sum), invalid_argument,
     "normalizer"},
    {"unknown device", any_op([](Subject& s) { s.execution.device.type = DeviceType(4); }),
     unknown_enum, "device"},
    {"negative device", any_op([](Subject& s) { s.execution.device.type = DeviceType(-1); }),
     unknown_enum, "device"},
    {"second cpu",
     [](Subject& s) {
       s.execution.device.index = 1;
       return !s.by_the_rules_alone();
     },
     wrong_device, "device"},
    {"negative index", any_op([](Subject& s) { s.execution.device.index = -1; }), wrong_device,
     "device"},
    {"no webgpu",
     [](Subject& s) {
       if (s.by_the_rules_alone()) return false;
       s.execution.device.type = DeviceType::webgpu;
       return true;
     },
     backend_unavailable, "webgpu"},
    {"no input", missing({"input"}), invalid_argument, "input"},
    {"no weight", missing({"weight"}), invalid_argument, "weight"},
    {"no logits", missing({"logits"}), invalid_argument, "logits"},
    {"no probabilities", missing({"probabilities"}), invalid_argument, "probabilities"},
    {"no target", missing({"target"}), invalid_argument, "target"},
    {"no shard_row_reference", missing({"shard_row_reference"}), invalid_argument,
     "shard_row_reference"},
    {"no shard_row_log_sum", missing({"shard_row_log_sum"}), invalid_argument, "shard_row_log_sum"},
    {"no shard_target_logit", missing({"shard_target_logit"}), invalid_argument,
     "shard_target_logit"},
    {"entropy without the shards'", missing({"shard_entropy"}), invalid_argument, "shard_entropy"},
    {"argmax without the shards'", missing({"shard_argmax"}), invalid_argument, "shard_argmax"},
    {"weighted_logit_sum without the shards'", missing({"shard_weighted_logit_sum"}),
     invalid_argument, "shard_weighted_logit_sum"},
    {"a smoothed loss without weighted sums",
     [](Subject& s) {
       if (!s.combines()) return false;
       s.options->label_smoothing = 0.1f;
       s.drop({"shard_weighted_logit_sum", "weighted_logit_sum"});
       return true;
     },
     invalid_argument, "shard_weighted_logit_sum"},
    {"sum_p_squared without the shards'", missing({"shard_sum_p_squared"}), invalid_argument,
     "shard_sum_p_squared"},
    {"mean_logit without the shards'", missing({"shard_mean_logit"}), invalid_argument,
     "shard_mean_logit"},
    {"max_logprob without the shards'", missing({"shard_max_logprob"}), invalid_argument,
     "shard_max_logprob"},
    {"no grad_logits", missing({"grad_logits"}), invalid_argument, "grad_logits"},
    {"no gradient", missing({"grad_input", "grad_weight", "grad_bias"}), invalid_argument,
     "grad_weight"},
    {"no output",
     [](Subject& s) {
       if (!s.forward() || s.gradients()) return false;
       s.drop_statistics();
       s.drop({"loss"});
       return true;
     },
     invalid_argument, "loss"},
    {"row_reference alone",
     [](Subject& s) { return !s.forward() && s.give_states() && missing({"row_log_sum"})(s); },
     invalid_argument, "row_log_sum"},
    {"row_log_sum alone",
     [](Subject& s) { return !s.forward() && s.give_states() && missing({"row_reference"})(s); },
     invalid_argument, "row_reference"},
    {"grad_entropy alone", [](Subject& s) { return !s.forward() && missing({"entropy"})(s); },
     invalid_argument, "entropy"},
    {"kept alone", missing({"kept_rows"}), invalid_argument, "kept_rows"},
    {"kept_rows alone", missing({"kept"}), invalid_argument, "kept"},
    {"kept without the row state",
     [](Subject& s) {
       const bool loss = s.has("kept") && !s.diverges() && !s.forward();
       return loss && missing({"row_reference", "row_log_sum"})(s);
     },
     invalid_argument, "row_reference"},
    {"kept of another Forward",
     [](Subject& s) { return s.gradients() && s.has("kept") && (s.key_error = 1) > 0; },
     invalid_argument, "kept_key"},
    {"consuming what is not kept",
     [](Subject& s) {
       s.drop({"kept", "kept_rows"});
       return s.consume != nullptr && (*s.consume = true);
     },
     invalid_argument, "consume_kept"},
};

// Makes a mistake in a call with chosen columns.
inline Mistake choosing(std::function<bool(Subject&)> how) {
  return [=](Subject& s) { return s.make_chosen() && how(s); };
}
inline Mistake chosen(const char* name, std::function<void(TensorView&)> how) {
  return choosing(change(name, std::move(how)));
}

// Makes a mistake in a call whose chosen columns are lists.
inline Mistake listing_ids(std::function<bool(Subject&)> how) {
  return [=](Subject& s) { return s.make_id_lists() && how(s); };
}
// Gives a Backward with `only_chosen` one more field, which is not allowed there.
inline Mistake only_choosing(const char* name) {
  return [=](Subject& s) {
    if (s.only_chosen == nullptr) return false;
    const TensorView view = s[name];
    if (!s.make_only_chosen()) return false;
    s[name] = view;
    return true;
  };
}

inline const Reject kChosenRejects[] = {
    {"ids without logits_at", choosing(missing({"logits_at"})), invalid_argument,
     "ids is given without logits_at"},
    {"ids without grad_logits_at", choosing(missing({"grad_logits_at"})), invalid_argument,
     "ids is given without grad_logits_at"},
    {"logits_at without ids",
     choosing([](Subject& s) { return s.forward() && missing({"ids"})(s); }), invalid_argument,
     "logits_at is given without ids"},
    {"grad_logits_at without ids",
     choosing([](Subject& s) { return !s.forward() && missing({"ids"})(s); }), invalid_argument,
     "grad_logits_at is given without ids"},
    {"K = 0", choosing([](Subject& s) {
       for (const auto& [name, view] : s.of_choice) s[name].shape[1] = 0;
       return true;
     }),
     wrong_shape, "ids has shape [3, 0]"},
    {"K above 1024", chosen("ids", [](TensorView& v) { v.shape[1] = 1025, v.stride[1] = 0; }),
     wrong_shape, "ids has shape [3, 1025]"},
    {"N of ids", chosen("ids", [](TensorView& v) { v.shape[0] = 2; }), wrong_shape,
     "ids has shape [2, 4]"},
    {"a vector of ids", chosen("ids", [](TensorView& v) { v.rank = 1; }), wrong_shape,
     "ids has rank 1"},
    {"K of logits_at", chosen("logits_at", [](TensorView& v) { v.shape[1] = 1; }), wrong_shape,
     "logits_at has shape [3, 1]"},
    {"N of logits_at", chosen("logits_at", [](TensorView& v) { v.shape[0] = 4; }), wrong_shape,
     "logits_at has shape [4, 4]"},
    {"K of grad_logits_at", chosen("grad_logits_at", [](TensorView& v) { v.shape[1] = 3; }),
     wrong_shape, "grad_logits_at has shape [3, 3]"},
    {"ids f32", choosing(dtype("ids", DType::f32)), wrong_dtype, "ids is f32"},
    {"logits_at bf16", choosing(dtype("logits_at", DType::bf16)), wrong_dtype, "logits_at is bf16"},
    {"grad_logits_at f16", choosing(dtype("grad_logits_at", DType::f16)), wrong_dtype,
     "grad_logits_at is f16"},
    {"logits_at that overlap themselves",
     chosen("logits_at", [](TensorView& v) { v.stride[0] = 0; }), invalid_argument,
     "logits_at has shape"},
    {"ids on another device", chosen("ids", [](TensorView& v) { v.device.index = 1; }),
     wrong_device, "ids is on"},
    {"more ids than there are numbers for", choosing([](Subject& s) {
       constexpr int64_t many = int64_t{1} << 50;
       s.drop_statistics();
       s.drop({"loss", "grad_input", "grad_weight", "bias", "grad_loss", "token_weight",
               "temperature"});
       for (const char* name : {"input", "target", "ids", "logits_at", "grad_logits_at"}) {
         if (s.has(name)) s[name].shape[0] = many, s[name].stride[0] = 0;
       }
       for (const char* name : {"ids", "logits_at", "grad_logits_at"}) {
         if (s.has(name)) s[name].shape[1] = 1000, s[name].stride[1] = 0;
       }
       return true;
     }),
     invalid_argument, "ids: N = 1125899906842624, K = 1000"},
    {"id_offsets without ids",
     [](Subject& s) {
       if (!s.make_id_lists()) return false;
       s.drop({"ids", "logits_at", "grad_logits_at"});
       return true;
     },
     invalid_argument, "ids is missing; id_offsets needs it"},
    {"rows of ids beside id_offsets",
     [](Subject& s) {
       if (!s.make_id_lists()) return false;
       s["ids"].rank = 2, s["ids"].shape = {3, 4}, s["ids"].stride = {4, 1};
       return true;
     },
     wrong_shape, "ids has rank 2"},
    {"one offset too few", listing_ids(change("id_offsets", [](TensorView& v) { v.shape[0] = 3; })),
     wrong_shape, "id_offsets has shape [3]; allowed: [4]"},
    {"offsets in f32", listing_ids(dtype("id_offsets", DType::f32)), wrong_dtype,
     "id_offsets is f32"},
    {"more listed ids than there are numbers for", listing_ids([](Subject& s) {
       for (const char* name : {"ids", "logits_at", "grad_logits_at"}) {
         if (s.has(name)) s[name].shape[0] = int64_t{1} << 57, s[name].stride[0] = 0;
       }
       return true;
     }),
     invalid_argument, "ids: M = 144115188075855872; allowed: up to 2^56"},
    {"M of logits_at", listing_ids(change("logits_at", [](TensorView& v) { v.shape[0] = 3; })),
     wrong_shape, "logits_at has shape [3]; allowed: [4]"},
    {"M of grad_logits_at",
     listing_ids(change("grad_logits_at", [](TensorView& v) { v.shape[0] = 3; })), wrong_shape,
     "grad_logits_at has shape [3]; allowed: [4]"},
    {"only chosen columns, and none",
     [](Subject& s) { return s.make_only_chosen() && missing({"ids", "grad_logits_at"})(s); },
     invalid_argument, "grad_logits_at is missing; only_chosen needs it"},
    {"only chosen columns and a gradient of the loss", only_choosing("grad_loss"), invalid_argument,
     "grad_loss is given with only_chosen"},
    {"only chosen columns and a gradient of lse", only_choosing("grad_lse"), invalid_argument,
     "grad_lse is given with only_chosen"},
    {"only chosen columns and a token weight", only_choosing("token_weight"), invalid_argument,
     "token_weight is given with only_chosen"},
    {"only chosen columns and class weights", only_choosing("vocab_weight"), invalid_argument,
     "vocab_weight is given with only_chosen"},
    {"only chosen columns and label smoothing",
     [](Subject& s) { return s.make_only_chosen() && (s.options->label_smoothing = 0.5f) > 0; },
     invalid_argument, "label_smoothing is 0.5 with only_chosen; allowed: 0"},
    {"only chosen columns and a z-loss",
     [](Subject& s) { return s.make_only_chosen() && (s.options->z_loss = 0.5f) > 0; },
     invalid_argument, "z_loss is 0.5 with only_chosen; allowed: 0"},
    {"only chosen columns and a normalizer",
     [](Subject& s) { return s.make_only_chosen() && (s.options->normalizer = 2) > 0; },
     invalid_argument, "options.normalizer is 2 with only_chosen; allowed: 0"},
};

// Makes a mistake in a call with top_logits and top_ids.
inline Mistake listing(std::function<bool(Subject&)> how) {
  return [=](Subject& s) { return s.make_lists() && how(s); };
}
inline Mistake listed(const char* name, std::function<void(TensorView&)> how) {
  return listing(change(name, std::move(how)));
}
// Changes k, the number of top logits, in every field that has it.
inline Mistake listing_so_many(int64_t count) {
  return listing([=](Subject& s) {
    for (const auto& [name, view] : s.of_lists) {
      s[name].shape[1] = name.starts_with("shard_") ? Subject::n * count : count;
      s[name].stride = {name.starts_with("shard_") ? Subject::n * count : count, 1};
    }
    return true;
  });
}

// The largest logits (top-k).
inline const Reject kListRejects[] = {
    {"top_logits without top_ids", listing(missing({"top_ids"})), invalid_argument,
     "top_logits is given without top_ids"},
    {"top_ids without top_logits",
     listing([](Subject& s) { return !s.combines() && missing({"top_logits"})(s); }),
     invalid_argument, "top_ids is given without top_logits"},
    {"lists without the shards' logits", listing(missing({"shard_top_logits"})), invalid_argument,
     "top_logits is given without shard_top_logits"},
    {"lists without the shards' ids", listing(missing({"shard_top_ids"})), invalid_argument,
     "top_logits is given without shard_top_ids"},
    {"the shards' lists alone",
     listing([](Subject& s) { return s.combines() && missing({"top_logits", "top_ids"})(s); }),
     invalid_argument, "shard_top_logits is given without top_logits"},
    {"lists beside kept state",
     [](Subject& s) {
       if (!s.has("kept")) return false;
       const TensorView kept = s["kept"], rows = s["kept_rows"];
       if (!s.make_lists()) return false;
       s["kept"] = kept, s["kept_rows"] = rows;
       return true;
     },
     invalid_argument, "top_logits is given beside kept"},
    {"k = 0", listing_so_many(0), wrong_shape, "k from 1 to 5"},
    {"k above V", listing_so_many(6), wrong_shape, "top_logits has shape [3, 6]"},
    {"k above 256",
     [](Subject& s) {
       if (!s.make_shard()) return false;
       s.drop({"vocab_weight"});
       s.options->vocab_total = 1000;
       return listing_so_many(257)(s);
     },
     wrong_shape, "k from 1 to 256"},
    {"N of top_logits", listed("top_logits", [](TensorView& v) { v.shape[0] = 2; }), wrong_shape,
     "top_logits has shape [2, 4]"},
    {"a vector of top_logits", listed("top_logits", [](TensorView& v) { v.rank = 1; }), wrong_shape,
     "top_logits has rank 1"},
    {"k of top_ids", listed("top_ids", [](TensorView& v) { v.shape[1] = 3; }), wrong_shape,
     "top_ids has shape [3, 3]"},
    {"P of the shards' lists", listed("shard_top_logits", [](TensorView& v) { v.shape[0] = 1; }),
     wrong_shape, "shard_top_logits has shape [1, 12]; allowed: [2, 12]"},
    {"top_logits bf16", listing(dtype("top_logits", DType::bf16)), wrong_dtype,
     "top_logits is bf16"},
    {"top_ids f32", listing(dtype("top_ids", DType::f32)), wrong_dtype, "top_ids is f32"},
    {"shard_top_ids f32", listing(dtype("shard_top_ids", DType::f32)), wrong_dtype,
     "shard_top_ids is f32"},
    {"top_ids i32 of a huge vocabulary",
     [](Subject& s) {
       if (!s.make_shard() || !s.make_lists()) return false;
       s.drop({"vocab_weight", "argmax"});
       s.options->vocab_total = int64_t{1} << 31;
       s["top_ids"].dtype = DType::i32;
       return true;
     },
     wrong_dtype, "top_ids is i32"},
    {"top_logits that overlap themselves",
     listed("top_logits", [](TensorView& v) { v.stride[0] = 0; }), invalid_argument,
     "top_logits has shape"},
    {"lists of more than there are numbers for", listing([](Subject& s) {
       if (s.combines()) return false;
       constexpr int64_t many = int64_t{1} << 54;
       s.drop_statistics();
       s.drop({"loss", "bias", "token_weight", "temperature"});
       for (const char* name : {"input", "target", "top_logits", "top_ids"}) {
         s[name].shape[0] = many, s[name].stride[0] = 0;
       }
       for (const char* name : {"top_logits", "top_ids"}) s[name].shape[1] = 5;
       return true;
     }),
     invalid_argument, "top_logits: N = 18014398509481984, k = 5"},
};

inline const Reject kDivergenceRejects[] = {
    {"unknown kind", divergence(&DivergenceOptions::kind, DivergenceKind(5)), unknown_enum, "kind"},
    {"negative kind", divergence(&DivergenceOptions::kind, DivergenceKind(-1)), unknown_enum,
     "kind"},
    {"beta above 1", mixing(1.01f), invalid_argument, "beta"},
    {"beta below 0", mixing(-0.01f), invalid_argument, "beta"},
    {"beta NaN", mixing(kNaN), invalid_argument, "beta"},
    {"beta that f32 has no ratio beside", mixing(0x1p-91f), invalid_argument, "2^-90"},
    {"beta below f32's normal numbers", mixing(kSubnormal), invalid_argument, "2^-90"},
    {"label_weight negative", divergence(&DivergenceOptions::label_weight, -0.5f), invalid_argument,
     "label_weight"},
    {"label_weight inf", divergence(&DivergenceOptions::label_weight, kInf), invalid_argument,
     "label_weight"},
    {"teacher_logit_scale NaN", divergence(&DivergenceOptions::teacher_logit_scale, kNaN),
     invalid_argument, "teacher_logit_scale"},
    {"teacher_softcap negative", divergence(&DivergenceOptions::teacher_softcap, -1.f),
     invalid_argument, "teacher_softcap"},
    {"teacher_softcap subnormal", divergence(&DivergenceOptions::teacher_softcap, kSubnormal),
     invalid_argument, "teacher_softcap"},
    {"teacher_temperature 0", divergence(&DivergenceOptions::teacher_temperature, 0.f),
     invalid_argument, "teacher_temperature"},
    {"teacher_temperature twice", divergence(&DivergenceOptions::teacher_temperature, 2.f),
     invalid_argument, "teacher_temperature"},
    {"a teacher's slope beyond f32", diverging([](Subject& s) {
       s.drop({"teacher_temperature"});
       s.divergence->teacher_logit_scale = 1e20f, s.divergence->teacher_temperature = 1e-20f;
       return true;
     }),
     invalid_argument, "of the teacher"},
    {"a smoothed divergence", diverging(option(&LossOptions::label_smoothing, 0.1f)),
     invalid_argument, "label_smoothing"},
    {"a divergence with a z_loss", diverging(option(&LossOptions::z_loss, 0.1f)), invalid_argument,
     "z_loss"},
    {"sums without a teacher's state", diverging([](Subject& s) {
       if (!s.forward() || !s.make_sums()) return false;
       s.drop({"teacher_row_log_sum"});
       return true;
     }),
     invalid_argument, "teacher_row_log_sum"},
    {"slope_sum without a state", diverging([](Subject& s) {
       if (!s.forward() || !s.make_sums()) return false;
       s.drop({"divergence_sum", "row_reference"});
       return true;
     }),
     invalid_argument, "row_reference is missing; slope_sum"},
    {"a loss beside sums", beside_sums("loss"), invalid_argument, "loss is given"},
    {"an entropy beside sums", beside_sums("entropy"), invalid_argument, "entropy is given"},
    {"a teacher's entropy beside sums", beside_sums("teacher_entropy"), invalid_argument,
     "teacher_entropy is given"},
    {"a logprob beside sums", beside_sums("logprob"), invalid_argument, "logprob is given"},
    {"a target's logit beside sums", beside_sums("target_logit"), invalid_argument,
     "target_logit is given"},
    {"kept beside sums or states", diverging([](Subject& s) {
       if (!s.has("kept") || s.of_sums.empty()) return false;
       const TensorView kept = s["kept"], rows = s["kept_rows"];
       s.make_sums();
       s["kept"] = kept, s["kept_rows"] = rows;
       return true;
     }),
     invalid_argument, "kept is given beside"},
    {"Backward with some of the states", diverging([](Subject& s) {
       if (s.forward() || !s.make_sums()) return false;
       s.drop({"teacher_row_log_sum"});
       return true;
     }),
     invalid_argument, "teacher_row_log_sum"},
    {"states without slope_mean", diverging([](Subject& s) {
       if (s.forward() || !s.make_sums()) return false;
       s.divergence->kind = DivergenceKind::reverse_kl;
       s.drop({"slope_mean"});
       return true;
     }),
     invalid_argument, "slope_mean is missing"},
    {"slope_mean without states", diverging([](Subject& s) {
       if (s.forward() || s.of_sums.empty()) return false;
       s["slope_mean"] = s.of_sums["slope_mean"];
       return true;
     }),
     invalid_argument, "slope_mean is given"},
    {"a target_logit without a target", diverging([](Subject& s) {
       if (!s.has("target_logit")) return false;
       s.divergence->label_weight = 0;
       s.drop({"target", "logprob"});
       return true;
     }),
     invalid_argument, "target is missing; target_logit"},
    {"a loss of a shard's divergence", on_divergences_shard("loss"), invalid_argument,
     "loss is given"},
    {"a logprob of a shard's divergence", on_divergences_shard("logprob"), invalid_argument,
     "logprob is given"},
    {"an acceptance of a shard without sums", on_divergences_shard("acceptance"), invalid_argument,
     "acceptance is given"},
    {"kept of a shard's divergence elsewhere than on CUDA", diverging([](Subject& s) {
       if (!s.has("kept") || s.by_the_rules_alone()) return false;
       const TensorView kept = s["kept"], rows = s["kept_rows"];
       s.make_shard();
       s["kept"] = kept, s["kept_rows"] = rows;
       return true;
     }),
     not_supported, "kept is given on a shard"},
    {"kept logits of a shard without a state", diverging([](Subject& s) {
       if (!s.forward() || !s.has("kept") || !s.by_the_rules_alone()) return false;
       const TensorView kept = s["kept"], rows = s["kept_rows"];
       s.make_shard();
       s["kept"] = kept, s["kept_rows"] = rows;
       s["kept"].shape[0] *= 2;  // f32 logits of both heads
       s.drop({"teacher_row_log_sum"});
       return true;
     }),
     invalid_argument, "teacher_row_log_sum is missing; kept on a shard"},
    {"teacher_input alone", missing({"teacher_weight"}), invalid_argument, "teacher_weight"},
    {"teacher_weight alone", missing({"teacher_input"}), invalid_argument, "teacher_input"},
    {"no teacher", diverging([](Subject& s) {
       s.drop({"kept", "kept_rows"});
       return missing({"teacher_input", "teacher_weight", "teacher_bias"})(s);
     }),
     invalid_argument, "teacher_logits"},
    {"teacher_bias alone", missing({"teacher_input", "teacher_weight"}), invalid_argument,
     "teacher_bias"},
    {"two teachers",
     diverging([](Subject& s) { return bool(s["teacher_logits"] = s.teacher_logits); }),
     invalid_argument, "teacher_logits"},
    {"teacher_logits with a bias", diverging([](Subject& s) {
       const TensorView bias = s["teacher_bias"];
       s.give_teacher_logits();
       return bool(s["teacher_bias"] = bias);
     }),
     invalid_argument, "teacher_bias"},
    {"V of teacher_weight", change("teacher_weight", [](TensorView& v) { v.shape[0] = 4; }),
     wrong_shape, "teacher_weight"},
    {"V of teacher_weight names weight",
     change("teacher_weight", [](TensorView& v) { v.shape[0] = 6; }), wrong_shape, "weight"},
    {"D of teacher_weight", change("teacher_weight", [](TensorView& v) { v.shape[1] = 3; }),
     wrong_shape, "teacher_weight"},
    {"N of teacher_input", change("teacher_input", [](TensorView& v) { v.shape[0] = 2; }),
     wrong_shape, "teacher_input"},
    {"D = 0 of the teacher", diverging([](Subject& s) {
       s["teacher_input"].shape[1] = s["teacher_weight"].shape[1] = 0;
       return true;
     }),
     invalid_argument, "teacher_input"},
    {"V of teacher_logits", diverging([](Subject& s) {
       return s.give_teacher_logits() && (s["teacher_logits"].shape[1] = 4) > 0;
     }),
     wrong_shape, "teacher_logits"},
    {"teacher_input of another dtype", dtype("teacher_input", DType::bf16), wrong_dtype,
     "teacher_input"},
    {"teacher_weight of another dtype", dtype("teacher_weight", DType::f16), wrong_dtype,
     "teacher_weight"},
    {"teacher_bias f16 with f32", dtype("teacher_bias", DType::f16), wrong_dtype, "teacher_bias"},
    {"kept of some columns of a divergence", diverging([](Subject& s) {
       if (!s.has("kept")) return false;
       s["weight"].shape[0] = 64 * 5, s["weight"].stride[0] = 0;
       s["kept"].shape[0] = 64 * 3;
       s.drop({"bias", "grad_bias", "grad_weight", "teacher_bias"});
       s["teacher_weight"].shape[0] = 64 * 5, s["teacher_weight"].stride[0] = 0;
       return true;
     }),
     wrong_shape, "kept"},
};

// Shapes, dtypes, shards and probabilities: how fields must fit each other.
inline const Reject kFieldRejects[] = {
    {"V = 0 of logits", change("logits", [](TensorView& v) { v.shape[1] = 0; }), invalid_argument,
     "logits"},
    {"V = 0 of weight", change("weight", [](TensorView& v) { v.shape[0] = 0; }), invalid_argument,
     "weight"},
    {"D = 0", change("input", [](TensorView& v) { v.shape[1] = 0; }), invalid_argument, "input"},
    {"D = 0 and N = 0", change("input", [](TensorView& v) { v.shape = {0, 0}; }), invalid_argument,
     "input"},
    {"D of weight", change("weight", [](TensorView& v) { v.shape[1] = 3; }), wrong_shape, "weight"},
    {"N of input",
     [](Subject& s) {
       return !s.diverges() && change("input", [](TensorView& v) { v.shape[0] = 2; })(s);
     },
     wrong_shape, "target"},
    {"V of weight", change("weight", [](TensorView& v) { v.shape[0] = 4; }), wrong_shape, "bias"},
    {"loss [] of none",
     [](Subject& s) {
       if (!s.forward()) return false;
       s.options->reduction = Reduction::none;
       s.drop({"normalizer", "grad_loss"});
       return true;
     },
     wrong_shape, "loss"},
    {"grad_loss [] of none",
     [](Subject& s) {
       if (!s.gradients()) return false;
       s.options->reduction = Reduction::none;
       s.drop({"normalizer", "loss"});
       return true;
     },
     wrong_shape, "grad_loss"},
    {"loss [N] of a mean",
     change("loss", [](TensorView& v) { v.rank = 1, v.shape = {3, 0}, v.stride = {1, 0}; }),
     wrong_shape, "loss"},
    {"input and weight of one integer dtype",
     [](Subject& s) {
       if (!s.linear()) return false;
       s["input"].dtype = s["weight"].dtype = DType::i32;
       return true;
     },
     wrong_dtype, "input"},
    {"weight of another dtype", dtype("weight", DType::f16), wrong_dtype, "weight"},
    {"bias f16 with f32", dtype("bias", DType::f16), wrong_dtype, "bias"},
    {"bias bf16 with f16",
     [](Subject& s) {
       if (!s.linear()) return false;
       s["input"].dtype = s["weight"].dtype = DType::f16;
       s["bias"].dtype = DType::bf16;
       return true;
     },
     wrong_dtype, "bias"},
    {"accumulating grad_weight bf16",
     [](Subject& s) {
       if (s.accumulate == nullptr) return false;
       *s.accumulate = true;
       s["grad_weight"].dtype = DType::bf16;
       return true;
     },
     wrong_dtype, "grad_weight"},
    {"accumulating grad_bias f16",
     [](Subject& s) {
       if (s.accumulate == nullptr) return false;
       *s.accumulate = true;
       s["grad_bias"].dtype = DType::f16;
       return true;
     },
     wrong_dtype, "grad_bias"},
    {"kept of another dtype", dtype("kept", DType::bf16), wrong_dtype, "kept"},
    {"kept in f16", dtype("kept", DType::f16), wrong_dtype, "kept"},
    {"rows of kept with a gap",
     change("kept", [](TensorView& v) { v.shape[0] = 64, v.stride[0] = 65; }), invalid_argument,
     "kept"},
    {"rows of kept_rows with a gap", change("kept_rows", [](TensorView& v) { v.stride[0] = 9; }),
     invalid_argument, "kept_rows"},
    {"kept of two blocks where there is one",
     change("kept", [](TensorView& v) { v.shape[0] = 128; }), wrong_shape, "kept"},
    {"kept of half a block", change("kept", [](TensorView& v) { v.shape[0] = 32; }), wrong_shape,
     "kept"},
    {"argmax i32 of a huge vocabulary",
     [](Subject& s) {
       if (!s.has("argmax") || !s.make_shard()) return false;
       s.drop({"vocab_weight"});
       s.options->vocab_total = int64_t{1} << 31;
       s["argmax"].dtype = DType::i32;
       return true;
     },
     wrong_dtype, "argmax"},
    {"rank i32 of a huge vocabulary",
     [](Subject& s) {
       if (!s.has("rank") || s.linear() || s.gradients()) return false;
       s.drop({"vocab_weight"});
       s["logits"].shape[1] = int64_t{1} << 31;
       s["logits"].stride = {0, 0};
       s["rank"].dtype = DType::i32;
       return true;
     },
     wrong_dtype, "rank"},
    {"vocab_total below V",
     [](Subject& s) { return !s.combines() && option(&LossOptions::vocab_total, int64_t{4})(s); },
     invalid_argument, "vocab_total"},
    {"vocab_total negative", option(&LossOptions::vocab_total, int64_t{-1}), invalid_argument,
     "vocab_total"},
    {"vocab_total huge",
     [](Subject& s) {
       if (!s.make_shard()) return false;
       s.drop({"vocab_weight"});
       s.options->vocab_total = std::numeric_limits<int64_t>::max();
       return true;
     },
     invalid_argument, "vocab_total"},
    {"vocab_start negative", option(&LossOptions::vocab_start, int64_t{-1}), invalid_argument,
     "vocab_start"},
    {"vocab_start without vocab_total",
     [](Subject& s) { return !s.combines() && option(&LossOptions::vocab_start, int64_t{1})(s); },
     invalid_argument, "vocab_start"},
    {"shard past the end",
     [](Subject& s) { return s.make_shard() && (s.options->vocab_start = 12) > 0; },
     invalid_argument, "vocab_start"},
    {"Combine of no vocabulary",
     [](Subject& s) { return s.combines() && option(&LossOptions::vocab_total, int64_t{0})(s); },
     invalid_argument, "vocab_total"},
    {"Combine past the end",
     [](Subject& s) { return s.combines() && option(&LossOptions::vocab_start, int64_t{6})(s); },
     invalid_argument, "vocab_start"},
    {"Combine of no shard",
     [](Subject& s) {
       if (!s.combines()) return false;
       for (auto& [name, view] : s.views) {
         if (name.starts_with("shard_")) view->shape[0] = 0;
       }
       return true;
     },
     invalid_argument, "shard_row_reference"},
    {"Combine with a rank",
     [](Subject& s) {
       if (!s.combines()) return false;
       *s.of_whole_rows["rank"] = s["lse"];
       s.of_whole_rows["rank"]->dtype = DType::i64;
       return true;
     },
     not_supported, "rank"},
    {"Combine with a mass above the target",
     [](Subject& s) {
       if (!s.combines()) return false;
       *s.of_whole_rows["mass_above"] = s["lse"];
       return true;
     },
     not_supported, "mass_above"},
    {"N of shard_row_reference",
     change("shard_row_reference", [](TensorView& v) { v.shape[1] = 2; }), wrong_shape,
     "shard_row_reference"},
    {"P of shard_row_reference",
     change("shard_row_reference", [](TensorView& v) { v.shape[0] = 1; }), wrong_shape,
     "shard_row_log_sum"},
    {"shard_argmax i32 of a huge vocabulary",
     [](Subject& s) {
       if (!s.combines()) return false;
       s.drop({"vocab_weight"});
       s.options->vocab_total = int64_t{1} << 31;
       s["shard_argmax"].dtype = DType::i32;
       return true;
     },
     wrong_dtype, "shard_argmax"},
    {"vocab_weight [V] on a shard",
     [](Subject& s) {
       return s.has("vocab_weight") && s.make_shard() && (s["vocab_weight"].shape[0] = 5) > 0;
     },
     wrong_shape, "vocab_weight"},
    {"loss on a shard",
     [](Subject& s) {
       if (!s.forward()) return false;
       const TensorView loss = s["loss"];
       if (!s.make_shard()) return false;
       s["loss"] = loss;
       return true;
     },
     invalid_argument, "loss"},
    {"rank on a shard", on_shard("rank"), not_supported, "rank"},
    {"mass_above on a shard", on_shard("mass_above"), not_supported, "mass_above"},
    {"kept state of a shard without the targets' logits",
     [](Subject& s) {
       if (!s.has("anchor")) return false;
       const TensorView kept = s["kept"], rows = s["kept_rows"];
       if (!s.make_shard()) return false;
       s["kept"] = kept, s["kept_rows"] = rows, s["anchor"] = {};
       return true;
     },
     invalid_argument, "anchor"},
    {"an anchor of the whole vocabulary",
     [](Subject& s) { return s.has("anchor") && (s["anchor"] = s.anchor); }, invalid_argument,
     "anchor"},
    {"ForwardBackward on a shard",
     [](Subject& s) {
       if (!s.forward() || !s.gradients()) return false;
       s.drop({"loss", "vocab_weight"});
       s.options->vocab_total = 16;
       return true;
     },
     not_supported, "Backward"},
    {"Backward on a shard without row_reference",
     [](Subject& s) {
       if (s.forward() || !s.make_shard()) return false;
       s.drop({"row_reference", "row_log_sum"});
       return true;
     },
     invalid_argument, "row_reference"},
    {"probabilities in a linear op, or of shards",
     [](Subject& s) {
       if (!s.linear() && !s.combines()) return false;
       s.options->input_kind = InputKind::probabilities;
       s.drop_statistics();
       return true;
     },
     invalid_argument, "input_kind"},
    {"probabilities, softcap", probabilities(option(&LossOptions::softcap, 3.f)), invalid_argument,
     "softcap"},
    {"probabilities, scale", probabilities(option(&LossOptions::logit_scale, 2.f)),
     invalid_argument, "logit_scale"},
    {"probabilities, temperature", probabilities(option(&LossOptions::temperature, 2.f)),
     invalid_argument, "temperature"},
    {"probabilities, z_loss", probabilities(option(&LossOptions::z_loss, 0.1f)), invalid_argument,
     "z_loss"},
    {"probabilities on a shard", probabilities([](Subject& s) {
       s.drop({"vocab_weight", "loss"});
       s.options->vocab_total = 16;
       return !s.forward();
     }),
     invalid_argument, "vocab_total"},
    {"probabilities, lse", with_probabilities("lse"), invalid_argument, "lse"},
    {"probabilities, target_logit", with_probabilities("target_logit"), invalid_argument,
     "target_logit"},
    {"probabilities, entropy", with_probabilities("entropy"), invalid_argument, "entropy"},
    {"probabilities, argmax", with_probabilities("argmax"), invalid_argument, "argmax"},
    {"probabilities, weighted_logit_sum", with_probabilities("weighted_logit_sum"),
     invalid_argument, "weighted_logit_sum"},
    {"probabilities, logprob", with_probabilities("logprob"), invalid_argument, "logprob"},
    {"probabilities, rank", with_probabilities("rank"), invalid_argument, "rank"},
    {"probabilities, sum_p_squared", with_probabilities("sum_p_squared"), invalid_argument,
     "sum_p_squared"},
    {"probabilities, mean_logit", with_probabilities("mean_logit"), invalid_argument, "mean_logit"},
    {"probabilities, max_logprob", with_probabilities("max_logprob"), invalid_argument,
     "max_logprob"},
    {"probabilities, mass_above", with_probabilities("mass_above"), invalid_argument, "mass_above"},
    {"probabilities, a temperature of each token", with_probabilities("temperature"),
     invalid_argument, "temperature is given"},
    {"probabilities, grad_lse", with_probabilities("grad_lse"), invalid_argument, "grad_lse"},
    {"probabilities, grad_target_logit", with_probabilities("grad_target_logit"), invalid_argument,
     "grad_target_logit"},
};

}  // namespace logitless::testing

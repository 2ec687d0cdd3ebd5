// SPDX-License-Identifier: Apache-2.0
// Calls at the edge of what is allowed. The rules for CUDA accept them. The CPU and the reference
// run them, in the recommended and the minimum workspace, and write no input.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <ostream>

#include "subject.h"

namespace logitless::testing {
namespace {

// Changes the call; returns false where the op has nothing to change.
using Change = std::function<bool(Subject&)>;

struct Accept {
  const char* name;
  Change make;
  bool keeps = false;  // keep `kept` and `kept_rows`, which most changes exclude
};
void PrintTo(const Accept& accept, std::ostream* out) { *out << accept.name; }

Change on_field(const char* name, std::function<void(TensorView&)> how) {
  return [=](Subject& s) {
    if (!s.has(name)) return false;
    how(s[name]);
    return true;
  };
}

Change on_options(std::function<void(LossOptions&)> how) {
  return [=](Subject& s) {
    if (s.options == nullptr) return false;
    how(*s.options);
    if (s.diverges()) s.options->label_smoothing = s.options->z_loss = 0;
    if (s.options->temperature != 1) s.drop({"temperature"});
    return true;
  };
}

// Lays out every input (or, if `written`, every output) with rows `stride` elements apart and
// columns `step` apart.
Change with_strides(bool written, int64_t stride, int64_t step) {
  return [=](Subject& s) {
    for (auto& [name, view] : s.views) {
      if (s.written(name) != written) continue;
      if (view->rank == 1) view->stride[0] = step;
      if (view->rank == 2) view->stride = {stride, step};
    }
    return true;
  };
}

// Lays out two fields in one buffer, the second `bytes` after the first.
Change beside(const char* first, const char* second, int64_t bytes, std::array<int64_t, 2> stride) {
  return [=](Subject& s) {
    if (!s.has(first) || !s.has(second)) return false;
    s[first].stride = s[second].stride = stride;
    s[second].data = static_cast<char*>(s[first].data) + bytes;
    return true;
  };
}

Change dtypes(std::initializer_list<const char*> names, DType dtype) {
  return [=, names = std::vector<const char*>(names)](Subject& s) {
    bool any = false;
    for (const char* name : names) {
      if (s.has(name)) s[name].dtype = dtype, any = true;
    }
    return any;
  };
}

const Accept kAccepts[] = {
    {"loss of shape [1]", on_field("loss", [](TensorView& v) { v.rank = 1, v.shape[0] = 1; })},
    {"grad_loss of shape [1]",
     on_field("grad_loss", [](TensorView& v) { v.rank = 1, v.shape[0] = 1; })},
    {"normalizer of shape [1]",
     on_field("normalizer", [](TensorView& v) { v.rank = 1, v.shape[0] = 1; })},
    {"normalizer i64", dtypes({"normalizer"}, DType::i64)},
    {"normalizer counted", on_field("normalizer", [](TensorView& v) { v = {}; })},
    {"normalizer from the host",
     [](Subject& s) {
       s.drop({"normalizer"});
       return on_options([](LossOptions& o) { o.normalizer = 1e300; })(s);
     }},
    {"a sum",
     [](Subject& s) {
       s.drop({"normalizer"});
       return on_options([](LossOptions& o) { o.reduction = Reduction::sum; })(s);
     }},
    {"no reduction",
     [](Subject& s) {
       s.drop({"normalizer"});
       for (const char* name : {"loss", "grad_loss"}) {
         if (!s.has(name)) continue;
         TensorView& v = s[name];
         v.rank = 1, v.shape = {Subject::n, 0}, v.stride = {1, 0};
       }
       return on_options([](LossOptions& o) { o.reduction = Reduction::none; })(s);
     }},
    {"options at their ends", on_options([](LossOptions& o) {
       o.label_smoothing = 1;
       o.z_loss = 0;
       o.logit_scale = -FLT_MIN;
       o.softcap = FLT_MIN;
       o.temperature = FLT_MIN;
       o.probability_floor = 0;
       o.ignore_index = INT64_MIN;
       o.allow_tf32 = true;
       o.empty_mean = EmptyMean::nan;
       o.out_of_range = OutOfRange::ignore;
     })},
    {"options at their other ends", on_options([](LossOptions& o) {
       o.z_loss = FLT_MAX;
       o.logit_scale = 0;
       o.softcap = o.temperature = o.probability_floor = FLT_MAX;
       o.ignore_index = INT64_MAX;
     })},
    {"the steepest map", on_options([](LossOptions& o) { o.logit_scale = -FLT_MAX; })},
    {"the widest softcap", on_options([](LossOptions& o) { o.softcap = 8e37f; })},
    {"the narrowest softcap", on_options([](LossOptions& o) { o.softcap = FLT_MIN; })},
    {"N = 0, NULL data",
     [](Subject& s) {
       s.make_empty();
       for (auto& [name, view] : s.views) {
         if (view->rank >= 1 && view->shape[0] == 0) view->data = nullptr;
       }
       return true;
     }},
    {"N = 0 and V = 0",
     [](Subject& s) {
       if (s.combines()) return false;
       s.make_empty();
       for (auto& [name, view] : s.views) {
         if (s.linear() && view->rank >= 1 && view->shape[0] == Subject::v) view->shape[0] = 0;
         if (!s.linear() && view->rank == 2) view->shape[1] = 0;
         if (name == "vocab_weight") view->shape[0] = 0;
       }
       return true;
     }},
    {"vocab_total = V", on_options([](LossOptions& o) { o.vocab_total = Subject::v; })},
    {"Combine of any shard's options",
     [](Subject& s) { return s.combines() && (s.options->vocab_start = Subject::v) > 0; }},
    {"Combine for a loss alone",
     [](Subject& s) {
       s.drop({"shard_entropy", "shard_argmax", "shard_weighted_logit_sum", "shard_sum_p_squared",
               "shard_mean_logit", "shard_max_logprob"});
       return s.combines() && s.write_only("loss");
     }},
    {"Combine of one shard",
     [](Subject& s) {
       if (!s.combines()) return false;
       for (auto& [name, view] : s.views) {
         if (name.starts_with("shard_")) view->shape[0] = 1;
       }
       return true;
     }},
    {"shard_argmax i32", dtypes({"shard_argmax"}, DType::i32)},
    {"a shard", [](Subject& s) { return s.make_shard(); }},
    {"a shard that keeps",
     [](Subject& s) {
       if (!s.has("kept")) return false;
       const TensorView kept = s["kept"], rows = s["kept_rows"];
       if (!s.make_shard()) return false;
       s["kept"] = kept, s["kept_rows"] = rows;
       return true;
     }},
    {"the last shard",
     [](Subject& s) { return s.make_shard() && (s.options->vocab_start = 16 - Subject::v) > 0; }},
    {"a target on another shard",
     [](Subject& s) {
       if (!s.make_shard()) return false;
       s["target"].as<int64_t>()[0] = 15;
       return true;
     }},
    {"probabilities as input", [](Subject& s) { return s.make_probabilities(); }},
    {"inputs broadcast", with_strides(false, 0, 0)},
    {"inputs broadcast along rows", with_strides(false, 0, 1)},
    {"inputs transposed", with_strides(false, 1, 5)},
    {"outputs transposed", with_strides(true, 1, 5)},
    {"outputs with gaps", with_strides(true, 19, 3)},
    {"rows closer than columns, none shared", with_strides(true, 2, 7)},
    {"any stride where there is one element",
     on_field("fault", [](TensorView& v) { v.stride[0] = int64_t{1} << 62; })},
    {"loss [1] of stride 0",
     on_field("loss", [](TensorView& v) { v.rank = 1, v.shape[0] = 1, v.stride[0] = 0; })},
    {"probabilities in place",
     [](Subject& s) {
       return s.has("probabilities") && beside("logits", "probabilities", 0, {5, 1})(s);
     }},
    {"grad_logits in place", beside("logits", "grad_logits", 0, {5, 1})},
    {"grad_logits in place, with gaps", beside("logits", "grad_logits", 0, {20, 3})},
    {"column slices of one buffer", beside("logits", "grad_logits", 20, {10, 1})},
    {"column slices, the second first", beside("grad_logits", "logits", 20, {10, 1})},
    {"column slices of a transposed buffer", beside("logits", "probabilities", 12, {1, 6})},
    {"interleaved columns", beside("logits", "grad_logits", 4, {10, 2})},
    {"interleaved tokens", beside("lse", "target_logit", 4, {2, 0})},
    {"one buffer after the other", beside("logits", "grad_logits", 60, {5, 1})},
    {"inputs in one place", beside("input", "weight", 0, {4, 1})},
    {"target i32", dtypes({"target"}, DType::i32)},
    {"argmax and rank i32", dtypes({"argmax", "rank"}, DType::i32)},
    {"one temperature for all", on_field("temperature", [](TensorView& v) { v.stride[0] = 0; })},
    {"a temperature that is none",
     [](Subject& s) {
       if (!s.has("temperature")) return false;
       s["temperature"].as<float>()[1] = 0;
       return true;
     }},
    {"f16", dtypes({"input", "weight", "bias", "logits", "teacher_input", "teacher_weight", "teacher_bias"}, DType::f16)},
    {"bf16", dtypes({"input", "weight", "bias", "logits", "teacher_input", "teacher_weight", "teacher_bias"}, DType::bf16)},
    {"f16 with a bias in f32", dtypes({"input", "weight", "teacher_input", "teacher_weight"}, DType::f16)},
    {"gradients f16",
     dtypes({"grad_input", "grad_weight", "grad_bias", "grad_logits"}, DType::f16)},
    {"probabilities bf16", dtypes({"probabilities"}, DType::bf16)},
    {"accumulating", [](Subject& s) { return s.accumulate != nullptr && (*s.accumulate = true); }},
    {"accumulating into a bias alone",
     [](Subject& s) {
       s.drop({"grad_weight"});
       return s.accumulate != nullptr && (*s.accumulate = true);
     }},
    {"only a loss",
     [](Subject& s) {
       s.drop({"fault", "token_weight", "vocab_weight", "normalizer", "temperature"});
       return s.write_only("loss");
     }},
    {"only an argmax", [](Subject& s) { return s.write_only("argmax"); }},
    {"only a log-probability", [](Subject& s) { return s.write_only("logprob"); }},
    {"only a rank", [](Subject& s) { return s.write_only("rank"); }},
    {"only a sum of squares", [](Subject& s) { return s.write_only("sum_p_squared"); }},
    {"only a mean logit", [](Subject& s) { return s.write_only("mean_logit"); }},
    {"only a largest log-probability", [](Subject& s) { return s.write_only("max_logprob"); }},
    {"only a mass above the target", [](Subject& s) { return s.write_only("mass_above"); }},
    {"only grad_bias",
     [](Subject& s) {
       s.drop({"grad_input", "grad_weight"});
       return s.has("grad_bias");
     }},
    {"Backward without what Forward wrote",
     [](Subject& s) {
       if (s.forward() || !s.gradients()) return false;
       s.drop({"row_reference", "row_log_sum", "grad_entropy", "entropy"});
       return true;
     }},
    {"a teacher's logits", [](Subject& s) { return s.give_teacher_logits(); }},
    {"a teacher's logits in bf16",
     [](Subject& s) {
       if (!s.give_teacher_logits()) return false;
       s["teacher_logits"].dtype = DType::bf16;
       return true;
     }},
    {"a divergence of no label",
     [](Subject& s) {
       if (!s.diverges()) return false;
       s.divergence->label_weight = 0;
       s.drop({"target", "logprob", "target_logit"});
       return true;
     }},
    {"chosen columns", [](Subject& s) { return s.make_chosen(); }},
    {"chosen columns of i32, in any strides", [](Subject& s) {
       if (!s.make_chosen()) return false;
       s["ids"].dtype = DType::i32;
       for (const char* name : {"ids", "logits_at", "grad_logits_at"}) {
         if (s.has(name)) s[name].stride = {9, 2};
       }
       return true;
     }},
    {"1024 chosen columns, all of them one", [](Subject& s) {
       if (s.forward() || !s.make_chosen()) return false;
       for (const char* name : {"ids", "grad_logits_at"}) {
         s[name].shape[1] = 1024, s[name].stride = {1, 0};
       }
       return true;
     }},
    {"chosen columns alone",
     [](Subject& s) { return s.make_chosen() && s.write_only("logits_at"); }},
    {"lists of chosen columns", [](Subject& s) { return s.make_id_lists(); }},
    {"only chosen columns", [](Subject& s) { return s.make_only_chosen(); }},
    {"only chosen columns of a shard",
     [](Subject& s) { return s.only_chosen != nullptr && s.make_shard() && s.make_only_chosen(); }},
    {"chosen columns of a shard", [](Subject& s) { return s.make_shard() && s.make_chosen(); }},
    {"lists of the largest logits", [](Subject& s) { return s.make_lists(); }},
    {"lists of i32, in any strides", [](Subject& s) {
       if (!s.make_lists()) return false;
       for (const auto& [name, view] : s.of_lists) {
         if (name.ends_with("ids")) s[name].dtype = DType::i32;
         if (!name.starts_with("shard_")) s[name].stride = {9, 2};
       }
       return true;
     }},
    {"lists alone", [](Subject& s) {
       if (s.combines() || !s.make_lists()) return false;
       const TensorView ids = s["top_ids"];
       return s.write_only("top_logits") && (s["top_ids"] = ids);
     }},
    {"lists of a shard", [](Subject& s) { return s.make_shard() && s.make_lists(); }},
    {"a list of one", [](Subject& s) {
       if (s.combines() || !s.make_lists()) return false;
       s["top_logits"].shape[1] = s["top_ids"].shape[1] = 1;
       return true;
     }},
    {"a divergence's sums or states", [](Subject& s) { return s.make_sums(); }},
    {"a divergence's sums without acceptance",
     [](Subject& s) {
       if (!s.diverges() || !s.forward() || !s.make_sums()) return false;
       s.drop({"acceptance", "slope_sum"});
       return true;
     }},
    {"states of forward_kl without a mean",
     [](Subject& s) {
       if (!s.diverges() || s.forward() || !s.make_sums()) return false;
       s.drop({"slope_mean"});
       return true;
     }},
    {"a divergence on a shard",
     [](Subject& s) { return s.diverges() && s.make_shard(); }},
    {"a divergence's sums on a shard",
     [](Subject& s) { return s.diverges() && s.forward() && s.make_shard() && s.make_sums(); }},
    {"a beta that nobody reads",
     [](Subject& s) {
       if (!s.diverges()) return false;
       s.divergence->beta = NAN;
       return true;
     }},
    {"kept state without the teacher",
     [](Subject& s) {
       if (!s.diverges() || s.forward() || s.execution.device.type == DeviceType::reference) {
         return false;
       }
       s.drop({"teacher_input", "teacher_weight", "teacher_bias"});
       return true;
     },
     true},
    {"addresses of odd elements",
     [](Subject& s) {
       for (auto& [name, view] : s.views) view->byte_offset = size_of(view->dtype);
       return true;
     }},
    {"kept state", [](Subject& s) { return s.has("kept"); }, true},
    {"kept state that is consumed",
     [](Subject& s) { return s.consume != nullptr && (*s.consume = true); }, true},
    {"kept state in bf16", dtypes({"input", "weight", "bias", "kept", "teacher_input", "teacher_weight", "teacher_bias"}, DType::bf16), true},
    {"kept state in f16", dtypes({"input", "weight", "bias", "kept", "teacher_input", "teacher_weight", "teacher_bias"}, DType::f16), true},
    {"kept state of no token",
     [](Subject& s) {
       s.make_empty();
       if (s.has("kept")) s["kept"].shape[0] = 0;
       return s.has("kept");
     },
     true},
    {"nothing but kept state",
     [](Subject& s) {
       if (!s.has("kept")) return false;
       const TensorView rows = s["kept_rows"];
       if (!s.write_only("kept")) return false;
       s["kept_rows"] = rows;
       return true;
     },
     true},
    {"a workspace at an offset",
     [](Subject& s) {
       s.workspace.byte_offset = s.size.alignment;
       s.workspace.bytes -= s.size.alignment;
       return true;
     }},
};

class AcceptTable : public ::testing::TestWithParam<Accept> {};

TEST_P(AcceptTable, AcceptedAndNoInputWritten) {
  int made = 0;
  for_each_judged_subject([&](Subject& s) {
    SCOPED_TRACE(describe(s));
    if (!GetParam().keeps) s.drop({"kept", "kept_rows"});
    if (!GetParam().make(s)) return;
    ++made;
    WorkspaceSize size;
    const Status planned = s.ask_workspace(&size);
    ASSERT_TRUE(planned.ok()) << planned.message();
    EXPECT_LE(size.minimum, size.recommended);
    if (s.workspace.bytes < size.recommended) s.give_workspace(size.recommended);
    const auto before = s.snapshot();
    for (const uint64_t bytes : {s.workspace.bytes, size.minimum}) {
      s.workspace.bytes = bytes;
      const Status status = s.call_run();
      EXPECT_TRUE(status.ok()) << status.message();
    }
    const auto after = s.snapshot();
    for (const auto& [name, view] : s.views) {
      // In the rows of the table for calls in place, an output shares the memory of the logits.
      const bool shared = name == "logits";
      if (s.written(name) || shared) continue;
      EXPECT_TRUE(before.at(name) == after.at(name)) << name;
    }
  });
  EXPECT_GT(made, 0) << "no op takes this change: the row tests nothing";
}

std::string row_name(const ::testing::TestParamInfo<Accept>& info) {
  std::string name = info.param.name;
  for (char& c : name) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return std::to_string(info.index) + "_" + name;
}

INSTANTIATE_TEST_SUITE_P(Edge, AcceptTable, ::testing::ValuesIn(kAccepts), row_name);

TEST(Accepts, DefaultsOfTheTwoInterfacesAreTheSame) {
  const LossOptions defaults;
  const logitless_loss_options from_cpp = detail::to_c(defaults);
  const logitless_loss_options from_c = LOGITLESS_LOSS_OPTIONS_INIT;
  EXPECT_EQ(std::memcmp(&from_cpp, &from_c, sizeof(from_c)), 0);
}

}  // namespace
}  // namespace logitless::testing

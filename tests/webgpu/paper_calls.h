// SPDX-License-Identifier: Apache-2.0
// Calls on a device that runs nothing: each op that WebGPU has, with what changes which kernels the
// backend uses, or how it binds them.
#pragma once

#include <set>
#include <string>

#include "logitless/fields.h"
#include "recorded_device.h"
#include "src/call.h"
#include "src/webgpu/run.h"

namespace logitless::webgpu {

struct PaperCall {
  int64_t tokens, hidden, vocab;
  DType dtype = DType::f32;     // of input and weight, or of logits
  DType gradient = DType::f32;  // of gradients or probabilities
  bool strided = false;         // no view can be bound in place
  bool optional = false;        // with most optional tensors
  bool capped = false, scaled = false, probabilities = false, none = false;
  bool targets_only = false;  // a Forward without a product
  DivergenceKind divergence = DivergenceKind::forward_kl;
};

// All columns are kept, or some; left out in a part of the calls.
inline TensorView paper_kept(const PaperCall& c, const std::string& name) {
  const int64_t all = (c.vocab + 63) / 64, blocks = c.none ? std::min<int64_t>(all, 3) : all;
  if (c.scaled || c.dtype == DType::f16) return {};
  if (name == "kept_rows") return matrix_view(nullptr, DType::f32, c.tokens, 8);
  return matrix_view(nullptr, c.dtype, blocks * round_up(c.tokens, 64), 64);
}

// As many chosen columns as allowed, or few; with all other outputs or, in some calls, none.
inline TensorView paper_chosen(const PaperCall& c, const std::string& name) {
  if (name == "id_offsets") return {};  // this backend has no lists
  if (!c.targets_only && !c.optional && c.dtype != DType::bf16) return {};
  const DType dtype = name != "ids" ? DType::f32 : c.none ? DType::i32 : DType::i64;
  return matrix_view(nullptr, dtype, c.tokens, c.none ? 64 : 3);
}

inline TensorView paper_view(const PaperCall& c, const std::string& name) {
  const auto is = [&](std::initializer_list<const char*> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (is({"logits"})) return matrix_view(nullptr, c.dtype, c.tokens, c.vocab);
  if (is({"probabilities", "grad_logits"})) {
    return matrix_view(nullptr, c.gradient, c.tokens, c.vocab);
  }
  if (is({"input"})) return matrix_view(nullptr, c.dtype, c.tokens, c.hidden);
  if (is({"weight"})) return matrix_view(nullptr, c.dtype, c.vocab, c.hidden);
  if (is({"teacher_logits"})) {
    return c.capped && c.none ? matrix_view(nullptr, c.dtype, c.tokens, c.vocab) : TensorView{};
  }
  if (is({"teacher_input", "teacher_weight", "teacher_bias"}) && c.capped && c.none) return {};
  if (is({"teacher_input", "teacher_weight"})) {  // the teacher's D differs
    const int64_t rows = is({"teacher_input"}) ? c.tokens : c.vocab;
    return matrix_view(nullptr, c.dtype, rows, c.hidden + (c.scaled ? 4 : 3));
  }
  if (is({"grad_input"})) return matrix_view(nullptr, c.gradient, c.tokens, c.hidden);
  if (is({"grad_weight"})) return matrix_view(nullptr, c.gradient, c.vocab, c.hidden);
  if (name.find("top_") != name.npos) return {};  // this backend has no lists
  if (name.starts_with("shard_")) {
    const bool always = is({"shard_row_reference", "shard_row_log_sum", "shard_target_logit"});
    const DType index = c.none ? DType::i32 : DType::i64;
    if (!always && !c.optional) return {};
    return matrix_view(nullptr, is({"shard_argmax"}) ? index : DType::f32, 3, c.tokens);
  }
  if (is({"target"})) return vector_view(nullptr, c.none ? DType::i32 : DType::i64, c.tokens);
  if (is({"loss"}) || (is({"grad_loss"}) && c.optional)) {
    return c.none ? vector_view(nullptr, DType::f32, c.tokens) : scalar_view(nullptr, DType::f32);
  }
  if (is({"teacher_temperature"}) && c.scaled) return {};
  // With every option and with none; left out in a part of the calls.
  if (is({"temperature", "teacher_temperature"})) {
    const bool given =
        c.optional ? c.dtype != DType::bf16 : c.dtype == DType::bf16 && c.gradient == DType::f32;
    return given && !c.probabilities ? vector_view(nullptr, DType::f32, c.tokens) : TensorView{};
  }
  if (is({"ids", "id_offsets", "logits_at", "grad_logits_at"})) return paper_chosen(c, name);
  const bool of_targets = is({"target_logit"}) || (c.optional && is({"bias"}));
  if (c.targets_only ? !of_targets : !c.optional) return {};
  if (is({"vocab_weight"})) return vector_view(nullptr, DType::f32, c.vocab);
  if (is({"bias", "teacher_bias"}))
    return vector_view(nullptr, c.none ? DType::f32 : c.dtype, c.vocab);
  if (is({"grad_bias"})) return vector_view(nullptr, c.gradient, c.vocab);
  if (is({"normalizer"})) {
    return c.none ? TensorView{} : scalar_view(nullptr, c.capped ? DType::i64 : DType::f32);
  }
  if (is({"fault"})) return vector_view(nullptr, DType::i32, 1);
  if (is({"kept", "kept_rows"})) return paper_kept(c, name);
  if (c.probabilities && !is({"token_weight"})) return {};
  // Some calls lack logprob, some the statistics that few calls ask for.
  if (is({"logprob"}) && !c.none) return {};
  if (is({"rank", "sum_p_squared", "mean_logit", "max_logprob", "mass_above"}) &&
      c.dtype == DType::f16)
    return {};
  if (is({"argmax", "rank"}))
    return vector_view(nullptr, c.none ? DType::i32 : DType::i64, c.tokens);
  return vector_view(nullptr, DType::f32, c.tokens);
}

template <class Op>
Op paper_op(const PaperCall& c, RecordedDevice* device) {
  Op op;
  logitless_op unused{};
  for_each_tensor(op, unused, [&](const char* name, Access, TensorView& view, auto&&) {
    view = paper_view(c, name);
    const std::string_view is = name;
    if (c.targets_only && is == "loss") view = {};
    if (CombiningOp<Op> && (is == "rank" || is == "mass_above")) view = {};  // Combine has neither
    if constexpr (DivergenceOp<Op>) {
      if (is == "vocab_weight" || (is == "target" && c.scaled && !c.optional)) view = {};
      // All columns are kept, or none.
      if (is.starts_with("kept") && c.none) view = {};
      // A shard of the vocabulary has these.
      static const std::set<std::string_view> of_shards{
          "row_reference",       "row_log_sum",  "teacher_row_reference",
          "teacher_row_log_sum", "target_logit", "divergence_sum",
          "slope_sum",           "slope_mean"};
      if (of_shards.contains(is)) view = {};
    }
    if (!view) return;
    int64_t elements = 1;
    const bool strided = c.strided && !std::string_view(name).starts_with("kept");
    for (int d = 0; d < view.rank; ++d) {
      if (strided) view.stride[d] *= d == view.rank - 1 ? 2 : 3;
      elements += std::max<int64_t>(view.shape[d] - 1, 0) * view.stride[d];
    }
    view.byte_offset = strided ? static_cast<uint64_t>(size_of(view.dtype)) : 0;
    const uint64_t bytes = view.byte_offset + static_cast<uint64_t>(elements * size_of(view.dtype));
    view.data = reinterpret_cast<void*>(device->create_buffer((bytes + 3) / 4 * 4));
  });
  if constexpr (DivergenceOp<Op>) {
    op.divergence = {.kind = c.divergence,
                     .beta = 0.25f,
                     .label_weight = op.target ? 0.5f : 0,
                     .teacher_softcap = c.capped ? 4.0f : 0.0f};
  }
  if constexpr (LossOp<Op>) {
    op.options.reduction = c.none ? Reduction::none : Reduction::mean;
    op.options.label_smoothing = c.optional && !DivergenceOp<Op> ? 0.1f : 0;
    op.options.softcap = c.capped ? 5 : 0;
    op.options.logit_scale = c.scaled ? 0.5f : 1;
    if constexpr (CombiningOp<Op>) op.options.vocab_total = c.vocab;
    if (c.probabilities) op.options.input_kind = InputKind::probabilities;
  }
  return op;
}

// The memory that one call on its own buffers took, and the rules that it broke.
struct PaperResult {
  uint64_t minimum = 0, tensors = 0, predicted = 0, most = 0;  // bytes
  std::string faults;
};

template <class Op>
PaperResult run_on_paper(const PaperCall& c, const Limits& limits, uint64_t budget,
                         std::set<std::string>* pipelines = nullptr) {
  RecordedDevice device(limits);
  const Op op = paper_op<Op>(c, &device);
  const logitless::Call call(op, {.device = {DeviceType::webgpu, 0}});
  PaperResult result;
  result.tensors = device.allocated();
  uint64_t recommended = 0;
  Plan plan;
  Status status = workspace_sizes(problem_of(call), limits, &result.minimum, &recommended);
  // A budget of 0 means the minimum workspace, 1 the recommended one.
  if (budget <= 1) budget = budget == 0 ? result.minimum : recommended;
  if (status.ok()) status = make_plan(problem_of(call), limits, budget, &plan);
  result.predicted = plan.total;
  WorkspaceBuffers workspace(&device, budget);
  if (status.ok()) status = run(call, budget, &workspace);
  result.most = device.most_allocated();
  result.faults = status.ok() ? device.faults() : status.message();
  if (pipelines != nullptr) pipelines->merge(device.pipelines());
  return result;
}

// Calls f(call) for the variants of PaperCall that an op of this type can have, in one shape.
template <class Op, class F>
void for_each_paper_call(PaperCall c, F&& f) {
  auto number = static_cast<int>(c.tokens);
  for (int bits = 0; bits < 64; ++bits) {
    c.strided = bits & 1, c.optional = bits & 2, c.capped = bits & 4, c.scaled = bits & 8;
    c.probabilities = bits & 16, c.none = bits & 32;
    const bool has_logits = !LinearOp<Op> && LossOp<Op> && !CombiningOp<Op>;
    if (c.probabilities && (!has_logits || c.capped || c.scaled)) continue;
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const DType gradient : {DType::f32, dtype}) {
        c.dtype = dtype;
        c.gradient = gradient;
        // Each pipeline of a divergence is for one kind, so the kinds alternate among the calls.
        c.divergence = static_cast<DivergenceKind>(DivergenceOp<Op> ? number++ % 5 : 0);
        f(c);
        if (!std::is_same_v<Op, LinearCrossEntropyForward>) continue;
        PaperCall targets = c;
        targets.targets_only = true;
        f(targets);
      }
    }
  }
}

// Returns the pipelines of products of every tile size, of rows read once and of rows in slots,
// with workspaces that lead to every plan.
inline std::set<std::string> every_pipeline(const Limits& limits) {
  std::set<std::string> all;
  for_each_op([&]<class Op>(const Op&, int32_t) {
    for (const PaperCall shape :
         {PaperCall{3, 8, 40}, PaperCall{40, 256, 9000}, PaperCall{100, 96, 9000},
          PaperCall{256, 256, 2048}, PaperCall{140, 40, 16900}}) {
      for_each_paper_call<Op>(shape, [&](const PaperCall& c) {
        for (const uint64_t budget : {uint64_t{0}, uint64_t{1}, UINT64_MAX}) {
          (void)run_on_paper<Op>(c, limits, budget, &all);
        }
      });
    }
  });
  return all;
}

}  // namespace logitless::webgpu

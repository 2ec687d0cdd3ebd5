// SPDX-License-Identifier: Apache-2.0
// Decides how CUDA runs a linear op: the engine, the plan, and the places in the workspace. The
// work is enqueued; the host never waits, and does not know how many tokens count.
#include <algorithm>
#include <array>
#include <cstddef>

#include "src/backend.h"
#include "src/cuda/linear/linear_cross_entropy.h"
#include "src/cuda/linear/search.h"
#include "src/cuda/ops.h"
#include "src/cuda/runtime/blas.h"
#include "src/kept.h"
#include "src/row/map.h"

namespace logitless::cuda {

bool is_aligned(const Tensor& v) { return v.alignment == 0 || v.alignment == most_alignment; }

bool has_aligned_rows(const Tensor& weight, const LinearShape& s) {
  const bool rows = weight.stride[1] == 1 || s.hidden == 1;
  return s.copies_weight || (rows && is_aligned(weight));
}

void lay_out_kept(const Call& op, int64_t columns, LinearCall* call) {
  call->kept.columns = columns;
  LinearShape& s = call->shape;
  if (!cuda_keeps(s.dtype, op.options)) return;
  // f16 keeps codes, from which only dz can be computed. E times a factor cannot give the gradients
  // of entropy or of chosen columns, which may exist where the factor is 0.
  const bool forms = op.grad_entropy || op.grad_logits_at || s.dtype == DType::f16;
  if (op.grad_entropy && call->map.capped) return;  // E includes the slope, so log p is not known
  s.kept_columns = columns;
  if (columns > 0) s.kernels.kept = forms && s.gradients() ? Origin::dz_by_rows : Origin::e;
}

void keep_codes(LinearCall* call) {
  LinearShape& s = call->shape;
  // Near a softcap's limit, the code of a logit is too coarse for the slope.
  if (call->map.capped) s.kernels.kept = Origin::again_dz;
  if (s.can_keep() && s.gradients()) s.kernels.kept = Origin::dz_by_rows;
}

// If all class weights are 1, one sum serves both weighted_logit_sum and mean_logit.
static SumSet sums_of(const Call& call) {
  const SumSet sums = call.sums().without(SumKind::exponentials);
  if (call.vocab_weight || !sums.has(SumKind::logits)) return sums;
  return sums.without(SumKind::logits) | SumKind::weighted;
}

// The anchors [N] that a shard's Forward left in kept_rows.
static TensorView kept_anchors(const TensorView& rows) {
  TensorView anchor = rows;
  anchor.byte_offset += offsetof(KeptRow, target_logit);
  anchor.rank = 1;
  return anchor;
}

static void take_lists(const Call& call, LinearCall* made) {
  LinearShape& s = made->shape;
  s.chooses = static_cast<bool>(call.ids);
  made->ids = call.ids;
  made->id_offsets = call.id_offsets;
  made->logits_at = call.logits_at;
  made->grad_logits_at = call.grad_logits_at;
  if (call.grad_logits_at) s.chosen = call.all_chosen();
  made->top = {call.top_logits, call.top_ids};
  s.listed = call.listed();
}

EngineCall make_call(std::span<const Engine* const> engines, const Call& call,
                     const DeviceInfo& device) {
  LinearCall made;
  made.in = token_input(call);
  if (call.input.dtype == DType::f16) made.in.lift = 64;
  made.input = call.input;
  made.weight = call.weight;
  made.bias = call.bias;
  made.map = map_factors(logit_map(call.options));
  LinearShape& s = made.shape;
  s.tokens = call.input.shape[0];
  s.vocab = call.weight.shape[0];
  s.hidden = call.weight.shape[1];
  s.dtype = call.input.dtype;
  s.on_cuda_cores = s.dtype == DType::f32 && !call.options.allow_tf32;
  s.forward = !call.state_given();
  s.targets_only = call.targets_only();
  made.anchor = call.anchor;
  s.smoothing = call.options.label_smoothing > 0;
  s.copies_weight = !serves_product(call.weight);
  s.maps = made.in.makes_maps;
  s.screens_gradients = made.in.screens_gradients();
  s.sums = sums_of(call);
  made.outputs = token_outputs(call);
  take_lists(call, &made);
  if (!call.forward) {
    made.row_reference = call.row_reference;
    made.row_log_sum = call.row_log_sum;
    made.entropy = call.entropy;
  }
  if (call.gradients) {
    made.grad_input = call.grad_input;
    made.grad_weight = call.grad_weight;
    made.grad_bias = call.grad_bias;
    made.accumulate = call.accumulate;
    made.part = call.part;
    s.input_first = call.grad_input_first && call.grad_input;
    s.grad_input = static_cast<bool>(call.grad_input);
    s.grad_weight = static_cast<bool>(call.grad_weight);
    s.grad_bias = static_cast<bool>(call.grad_bias);
    s.grad_weight_f32 = call.grad_weight.dtype == DType::f32;
    // cuBLASLt writes contiguous rows, in f32 or the inputs' dtype.
    const TensorView& out = call.grad_weight;
    s.kernels.direct_grad_weight = !out || ((out.dtype == DType::f32 || out.dtype == s.dtype) &&
                                            out.stride[1] == 1 && serves_product(out));
  }
  s.kernels.kept = call.forward ? Origin::e : Origin::again_dz;
  if (call.kept && s.tokens > 0) {
    made.kept.data = call.kept.as<char>();
    made.kept.rows = call.kept_rows.as<float>();
    made.kept.consumes = call.consume_kept;
    if (call.shard() && !call.forward) made.anchor = kept_anchors(call.kept_rows);
  }
  const Engine& engine = engine_for(engines, call, s, device);
  engine.describe(call, &made, device);
  return {&engine, made};
}

namespace {

TensorView rows_from(TensorView view, int64_t first) {
  if (!view) return view;
  view.byte_offset += first * view.stride[0] * size_of(view.dtype);
  view.shape[0] -= first;
  return view;
}

// The op that writes those rows of grad_weight (and all of grad_bias) that the first pass does not:
// a Backward of the columns after the first ones, as of a shard.
Call second_op(const Call& op, const Call& state, int64_t first_rows) {
  LinearCrossEntropyBackward second{
      .input = op.input,
      .weight = rows_from(op.weight, first_rows),
      .bias = rows_from(op.bias, first_rows),
      .target = op.target,
      .row_reference = state.row_reference,
      .row_log_sum = state.row_log_sum,
      .grad_loss = op.grad_loss,
      .grad_weight = rows_from(op.grad_weight, first_rows),
      .grad_bias = op.grad_bias,
      .options = op.options,
      .weights = {op.token_weight, op.vocab_weight, op.normalizer, op.temperature},
      .fault = op.fault};
  if (first_rows > 0) {
    second.options.vocab_start = first_rows;
    second.options.vocab_total = op.weight.shape[0];
  }
  return {second, op.execution};
}

// Two passes, one after the other, in the workspace that the rows' states leave.
LinearPasses two_passes(const LinearDecisions& decided, const LinearShape& shape, const Call& op,
                        char* workspace, const DeviceInfo& device) {
  const int64_t first_rows = decided.plan.first_rows;
  Arena states(workspace);
  Call first = op;
  const auto keep = [&](Tensor* state) {
    float* values = states.take<float>(shape.tokens);
    if (*state) return;  // the caller's output holds the state
    *state = TensorView{.data = values,
                        .dtype = DType::f32,
                        .device = op.input.device,
                        .rank = 1,
                        .shape = {op.tokens()},
                        .stride = {1}};
  };
  keep(&first.row_reference);
  keep(&first.row_log_sum);
  const Call second = second_op(op, first, first_rows);
  // grad_weight stays set: its memory may hold panels until it is written
  first.grad_bias = {};
  const auto pass = [&](LinearCall call, const LinearShape& planned,
                        const LinearPlan& plan) -> LinearPass {
    call.shape = planned;
    call.in.skips_inactive = false;  // a ForwardBackward multiplies every row, in both passes
    return {call, plan, workspace + states.used()};
  };
  const std::span only(&decided.engine, 1);
  return {
      decided.engine,
      2,
      {pass(make_call(only, first, device).call, first_pass(shape, first_rows), decided.pass[0]),
       pass(make_call(only, second, device).call, second_pass(shape, first_rows),
            decided.pass[1])}};
}

}  // namespace

Status linear_workspace(const Call& call, const DeviceInfo& device, uint64_t given,
                        WorkspaceSize* size) {
  Status status = find_matrix_library();
  if (status.ok()) {
    status = check_linear_extents(
        {call.input.shape[0], call.weight.shape[0], call.weight.shape[1], call.all_chosen()});
  }
  if (!status.ok()) return status;
  // An unknown address may turn out too unaligned for the best engine, so the sizes must suffice
  // also for the engine that then runs the call.
  Call asked = call;
  std::array<Tensor*, 3> unknown;
  size_t count = 0;
  const auto find_unknown = [&](Tensor* v) {
    if (*v && v->alignment == 0) unknown[count++] = v;
  };
  find_unknown(&asked.weight);
  if (call.gradients) {
    find_unknown(&asked.grad_input);
    find_unknown(&asked.grad_weight);
  } else {
    find_unknown(&asked.input);
  }
  *size = {0, 0, Arena::alignment};
  for (size_t i = 0; i < size_t{1} << count; ++i) {
    for (size_t n = 0; n < count; ++n) {
      const int64_t least = size_of(unknown[n]->dtype);
      unknown[n]->alignment = static_cast<uint32_t>((i >> n & 1) != 0 ? least : most_alignment);
    }
    const Asked planned = asked_of(asked, device);
    const uint64_t minimum =
        search(planned.engine, planned.shape, planned.speed, given).least.bytes;
    size->minimum = std::max(size->minimum, minimum);
    if (given >= minimum) continue;
    size->recommended = std::max({size->recommended, minimum, planned.recommended().bytes});
  }
  return {};
}

LinearDecisions decide_linear(const Call& op, uint64_t bytes, const DeviceInfo& device) {
  const Asked asked = asked_of(op, device);
  LinearDecisions decided{&asked.engine, asked.plan(bytes)};
  if (decided.plan.kind == PlanKind::two_passes) {
    decided.pass = plans_of_passes(asked, decided.plan.first_rows, bytes);
  }
  return decided;
}

LinearPasses linear_passes(const Call& op, const LinearDecisions& decided,
                           const Workspace& workspace, const DeviceInfo& device) {
  // Uses the decided engine: the environment may have changed since.
  const LinearCall call = make_call({&decided.engine, 1}, op, device).call;
  char* memory = static_cast<char*>(workspace.data) + workspace.byte_offset;
  if (decided.plan.kind == PlanKind::two_passes) {
    return two_passes(decided, call.shape, op, memory, device);
  }
  return {decided.engine, 1, {LinearPass{call, decided.plan, memory}}};
}

}  // namespace logitless::cuda

// f16 keeps codes of logits, which are too coarse for a softcap's slope near its limit. In other
// dtypes E includes the slope, but smoothing's term needs each element's slope alone.
bool logitless::cuda_keeps(DType dtype, const LossOptions& options) {
  return options.softcap == 0 || (dtype != DType::f16 && options.label_smoothing == 0);
}

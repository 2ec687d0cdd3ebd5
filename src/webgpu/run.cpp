// SPDX-License-Identifier: Apache-2.0
// The order of a call: work done once, the chunks, and work on the sums of all chunks.
#include "src/webgpu/run.h"

#include <algorithm>
#include <cmath>

#include "src/message.h"

namespace logitless::webgpu {
namespace {

// A call that combines shards covers the whole vocabulary, whatever vocab_start its options have.
LossOptions options_of(const Call& call) {
  LossOptions options = call.options;
  if (call.combines) options.vocab_start = 0;
  return options;
}

}  // namespace

Run::Run(const Call& call, const Problem& problem, const Plan& plan, WorkspaceBuffers* workspace)
    : call_(call),
      problem_(problem),
      plan_(plan),
      options_(options_of(call)),
      student_(student()),
      teacher_(teacher()),
      workspace_(*workspace),
      device_(workspace->device()),
      recorder_(device_, (*workspace)[Role::params]) {}

Run::Window Run::window_of(int64_t index) const {
  const int64_t first = index * plan_.window;
  return {index, first, std::min(plan_.window, problem_.vocab - first)};
}

Run::Chunk Run::chunk_of(int64_t index) const {
  const int64_t first = index * plan_.chunk;
  return {first, std::min(plan_.chunk, problem_.tokens - first), index == 0};
}

// Sums `count` values in role *in down to at most `most`; returns the number left, and their role
// in *in.
int64_t Run::tree(int64_t count, int64_t most, Role* in) {
  while (count > most) {
    const Role to = *in == Role::sums ? Role::more_sums : Role::sums;
    const uint32_t groups = blocks(count, kValuesOfASum);
    recorder_.dispatch("sum", "tree", {}, SumParams{.count = u32(count)}, {role(*in), role(to)},
                       std::min(groups, kGroups), blocks(groups, kGroups));
    *in = to;
    count = groups;
  }
  return count;
}

void Run::prepare_vocabulary() {
  const TensorView& vocab_weight = call_["vocab_weight"];
  if (vocab_weight && !problem_.vocab_weight_bound) {
    gather_vector(vocab_weight, 0, problem_.vocab_total, dense(Role::vocab_weight, 0, 1));
  }
  if (problem_.sums_vocab_weight) {
    const uint32_t groups = blocks(problem_.vocab_total, kValuesOfASum);
    recorder_.dispatch("sum", "tree", {}, SumParams{.count = u32(problem_.vocab_total)},
                       {whole_vocab_weight(), role(Role::sums)}, std::min(groups, kGroups),
                       blocks(groups, kGroups));
    Role in = Role::sums;
    tree(groups, 1, &in);
    recorder_.dispatch("sum", "keep_weight_sum", {}, SumParams{},
                       {role(in), {}, role(Role::scalars)}, 1);
  }
  for (const Head* head : {&student_, &teacher_}) {
    if (head->bias && !head->bias_bound && !reads_kept()) {
      gather_vector(head->bias, 0, problem_.vocab, dense(head->bias_copy, 0, 1));
    }
  }
  if (!call_.accumulate) return;
  const int64_t hidden = round_up(problem_.hidden, 4);
  if (problem_.wants_grad_weight && !problem_.grad_weight_bound) {
    gather(call_["grad_weight"], {.rows = problem_.vocab, .columns = problem_.hidden},
           dense(Role::grad_weight, 0, hidden), hidden, false);
  }
  if (problem_.wants_grad_bias) {
    gather_vector(call_["grad_bias"], 0, problem_.vocab, dense(Role::grad_bias, 0, 1));
  }
}

// Computes the normalizer and the factor common to all gradients on the device.
void Run::normalize() {
  if (problem_.softmax) return;
  SumParams p{.empty_is_nan = options_.empty_mean == EmptyMean::nan ? 1u : 0u, .nan = kNan};
  Binding counted = zeros(), view = zeros(), grad = zeros();
  int64_t base;
  if (options_.reduction == Reduction::mean) {
    const TensorView& normalizer = call_["normalizer"];
    if (normalizer) {
      p.kind = normalizer.dtype == DType::i64 ? 4 : 3;
      view = bound(normalizer, {}, &base);
      p.view = u32(base * size_of(normalizer.dtype) / 4);
    } else if (options_.normalizer != 0) {
      p.kind = 2;
      // f32 has a smaller range than the caller's double, so the exponent is passed separately.
      p.number = static_cast<float>(std::frexp(options_.normalizer, &p.exponent));
    } else if (problem_.tokens == 0) {
      p.kind = 2;
    } else {
      p.kind = 1;
      counted = count_tokens(&p.count);
    }
  }
  if (given("grad_loss") && options_.reduction != Reduction::none) {
    grad = bound(call_["grad_loss"], {}, &base);
    p.has_grad = 1;
    p.grad = u32(base);
  }
  recorder_.dispatch("sum", p.count > 1 ? "normalize_sums" : "normalize", {}, p,
                     {counted, {}, role(Role::scalars), view, grad}, 1);
}

// Sums c_t over the tokens that count, down to `*few` values at the binding's start.
Binding Run::count_tokens(uint32_t* few) {
  int64_t sums = 0;
  for (int64_t i = 0; i < plan_.chunks; ++i) {
    const Chunk chunk = chunk_of(i);
    TokenParams p = token_params(chunk);
    p.sums = u32(sums);
    const Binding target = targets(chunk, &p);
    const uint32_t groups = blocks(chunk.tokens, kValuesOfASum);
    recorder_.dispatch("tokens", "count", {}, p,
                       {target, whole_vocab_weight(), {}, {}, {}, {}, role(Role::sums)}, groups);
    sums += groups;
  }
  Role in = Role::sums;
  *few = u32(tree(sums, kValuesOfASum, &in));
  return role(in);
}

void Run::finish_loss() {
  const TensorView& loss = call_["loss"];
  if (!loss || !problem_.reduces) return;
  Role in = Role::sums;
  const int64_t few = tree(sums_, kValuesOfASum, &in);
  int64_t base;
  const Binding result = bound(loss, {}, &base);
  SumParams p{.count = u32(few),
              .kind = options_.reduction == Reduction::mean ? 1u : 0u,
              .empty_is_nan = options_.empty_mean == EmptyMean::nan ? 1u : 0u,
              .nan = kNan,
              .loss = u32(base)};
  const Binding sum = sums_ > 0 ? role(in) : zeros();
  recorder_.dispatch("sum", few > 1 ? "finish_sums" : "finish", {}, p,
                     {sum, {}, role(Role::scalars), {}, {}, result}, 1);
}

void Run::finish_gradients() {
  const int64_t hidden = round_up(problem_.hidden, 4);
  if (problem_.wants_grad_weight && !problem_.grad_weight_bound) {
    scatter(dense(Role::grad_weight, 0, hidden), call_["grad_weight"],
            {.rows = problem_.vocab, .columns = problem_.hidden}, false);
  }
  if (problem_.wants_grad_bias) {
    // Written as one row [1, V]: scatter would treat a vector as V rows of a workgroup each.
    TensorView view = call_["grad_bias"];
    view.rank = 2;
    view.shape = {1, problem_.vocab};
    view.stride = {0, view.stride[0]};
    scatter(dense(Role::grad_bias, 0, 1), view, {.columns = problem_.vocab}, false);
  }
}

void Run::run_chunk(const Chunk& chunk) {
  if (plan_.plain) {
    make_plain(chunk);
    return;
  }
  if (problem_.diverges) {
    run_divergence(chunk);
    return;
  }
  begin_chunk(chunk);
  if (problem_.rows_at_once) {
    make_rows(chunk);
    emit_outputs(chunk);
    return;
  }
  if (problem_.targets_only) {
    for (int64_t w = 0; w < plan_.windows; ++w) make_logits(chunk, window_of(w), student_);
    emit_outputs(chunk);
    return;
  }
  if (problem_.combines) fold_shards(chunk);
  const bool needs_state =
      !problem_.state_given && !problem_.combines && !(problem_.probabilities && !call_["loss"]);
  if (needs_state) {
    for (int64_t w = 0; w < plan_.windows; ++w) {
      make_logits(chunk, window_of(w), student_);
      make_partials(chunk, window_of(w), student_);
      keep_logits(chunk, window_of(w));
    }
  }
  combine(chunk, student_);
  keep_or_check_rows(chunk);
  for (int64_t w = 0; w < plan_.windows && problem_.needs_logits_again(); ++w) {
    if (!needs_state || !plan_.whole) {
      const Window rest = take_logits(chunk, window_of(w));
      if (rest.columns > 0) make_logits(chunk, rest, student_);
    }
    if (problem_.ranks) add_ranks(chunk, window_of(w));
    if (problem_.gradients || problem_.softmax) make_gradients(chunk, window_of(w));
  }
  emit_outputs(chunk);
  emit_grad_input(chunk);
}

Status Run::all() {
  prepare_vocabulary();
  normalize();
  for (int64_t i = 0; i < plan_.chunks; ++i) run_chunk(chunk_of(i));
  finish_loss();
  finish_gradients();
  if (recorder_.finish()) return {};
  const char* why = device_->error();
  return error(StatusCode::device_error, "%s", why != nullptr ? why : "webgpu: refused");
}

Status run(const Call& call, uint64_t budget, WorkspaceBuffers* workspace) {
  const Problem problem = problem_of(call);
  Plan plan;
  Device* device = workspace->device();
  Status status = make_plan(problem, device->limits(), budget, &plan);
  if (!status.ok()) return status;
  if (!workspace->prepare(plan)) {
    const char* why = device->error();
    return error(StatusCode::device_error, "webgpu: a workspace of %llu bytes: %s",
                 static_cast<unsigned long long>(plan.total), why != nullptr ? why : "no memory");
  }
  return Run(call, problem, plan, workspace).all();
}

}  // namespace logitless::webgpu

// SPDX-License-Identifier: Apache-2.0
#include "src/webgpu/plan.h"

#include <algorithm>
#include <iterator>

#include "src/message.h"
#include "src/webgpu/cost.h"
#include "src/webgpu/statistics.h"

namespace logitless::webgpu {
namespace {

// A chunk is one row of workgroups, so at most 65535 tokens (except for plain calls in place).
// Unless the op is `direct`, one workgroup lists a chunk's tokens, so a chunk has at most 4096.
constexpr int64_t kMostTokens = 4096, kMostInPlace = 65535;
constexpr int64_t kLeastTokens = 64;
constexpr int64_t kMostChosen = 64;       // chosen_ids.wgsl has one thread per id
constexpr int64_t kColumnsAtOnce = 4096;  // of a row in registers, 16 per thread
// The most tokens of a plain call in place, and its most columns: 65535 workgroups of 256 threads.
constexpr int64_t kMostPlain = int64_t{65535} * 256;
constexpr uint64_t kParams = uint64_t{256} * 256, kSmall = 256;

uint64_t& bytes_of(Plan* plan, Role role) { return plan->bytes[static_cast<size_t>(role)]; }
void set_bytes(Plan* plan, Role role, int64_t bytes) {
  bytes_of(plan, role) = static_cast<uint64_t>(round_up(bytes, 256));
}

int64_t sums_of(int64_t values) { return (values + kValuesOfASum - 1) / kValuesOfASum; }

// The number of first sums: of losses, chunk by chunk, and of class weights.
int64_t first_sums(const Problem& p, const Plan& plan) {
  int64_t sums = plan.chunks * sums_of(plan.chunk);
  if (p.sums_vocab_weight) sums = std::max(sums, sums_of(p.vocab_total));
  return std::max<int64_t>(sums, 1);
}

void fill_teacher(const Problem& p, Plan* plan) {
  const TeacherProblem& t = p.teacher;
  const int64_t chunk = std::max<int64_t>(plan->chunk, 1);
  set_bytes(plan, Role::teacher_rows, 4 * kStateWords * chunk);
  if (t.temperatures) set_bytes(plan, Role::teacher_extras, 4 * kExtraWords * chunk);
  if (t.has_bias && !t.bias_bound) set_bytes(plan, Role::teacher_bias, 4 * p.vocab);
  if (t.is_head) set_bytes(plan, Role::teacher_hidden, 4 * chunk * round_up(t.hidden, 4));
  bytes_of(plan, Role::teacher_block) = bytes_of(plan, Role::block);
}

void fill_bytes(const Problem& p, Plan* plan) {
  const auto set = [&](Role role, int64_t bytes) { set_bytes(plan, role, bytes); };
  const int64_t chunk = std::max<int64_t>(plan->chunk, 1), hidden = round_up(p.hidden, 4);
  set(Role::params, kParams);
  set(Role::zeros, kSmall);
  set(Role::spare, kSmall);
  set(Role::scalars, kSmall);
  const int64_t sums = first_sums(p, *plan);
  set(Role::sums, 4 * sums);
  set(Role::more_sums, 4 * sums_of(sums));
  if (p.has_vocab_weight && !p.vocab_weight_bound) set(Role::vocab_weight, 4 * p.vocab_total);
  if (p.has_bias && !p.bias_bound) set(Role::bias, 4 * p.vocab);
  if (!p.plain) {
    set(Role::rows, 4 * kStateWords * chunk);
    set(Role::counted, 16 + 4 * chunk);
    set(Role::inputs, 32 * chunk);
  }
  if (p.extras()) set(Role::extras, 4 * kExtraWords * chunk);
  if (p.reduces) set(Role::losses, 4 * chunk);
  if (!p.plain && !p.rows_at_once && !p.targets_only)
    set(Role::partials, 4 * kSlotWords * chunk * std::max<int64_t>(plan->slots, 1));
  plan->window_bytes = static_cast<uint64_t>(round_up(4 * chunk * plan->window, 256));
  if (!p.direct && !p.targets_only) {
    set(Role::block, static_cast<int64_t>(plan->window_bytes) * (plan->whole ? plan->windows : 1));
  }
  set(Role::ids, p.id_bytes * chunk * p.chosen);
  set(Role::chosen, 4 * chunk * p.chosen);
  if (p.linear) {
    set(Role::hidden, 4 * chunk * hidden);
    if (p.wants_grad_input) set(Role::grad_hidden, 4 * chunk * hidden);
    if (plan->slices > 1) set(Role::slices, 4 * plan->slices * chunk * hidden);
    int64_t copied = p.weight_bound || p.reads_kept ? 0 : hidden;  // elements per row of a weight
    if (p.wants_grad_input && !p.weight_bound) copied = hidden;
    if (p.has_teacher() && p.teacher.is_head && !p.teacher.weight_bound) {
      copied = std::max(copied, round_up(p.teacher.hidden, 4));
    }
    set(Role::weight, 4 * plan->window * copied);
    if (p.wants_grad_weight && !p.grad_weight_bound) set(Role::grad_weight, 4 * p.vocab * hidden);
    if (p.wants_grad_bias) set(Role::grad_bias, 4 * p.vocab);
  }
  if (p.has_teacher()) fill_teacher(p, plan);
  plan->total = 0;
  for (const uint64_t bytes : plan->bytes) plan->total += bytes;
}

// Whether every binding and every buffer of the plan is within the limits.
bool within(const Problem& p, const Limits& limits, const Plan& plan) {
  // A view's binding starts at the multiple of 256 before it.
  const auto most = static_cast<int64_t>(limits.storage_binding_bytes) - 256;
  const int64_t hidden = round_up(p.hidden, 4);
  const auto fits = [&](int64_t rows, int64_t bytes) { return bytes == 0 || rows <= most / bytes; };
  if (plan.window_bytes > limits.storage_binding_bytes) return false;
  if (!fits(plan.chunk, std::max<int64_t>(plan.slots, 1) * 4 * kSlotWords) ||
      !fits(plan.chunk, 4 * kStateWords) || !fits(plan.chunk, p.id_bytes * p.chosen)) {
    return false;
  }
  if (plan.chunk > 1 && !fits(plan.chunk, p.token_stride_bytes)) return false;
  if (!fits(plan.window, 4)) return false;
  // A workgroup handles the columns of the smallest tile, or of a copy.
  if (plan.window > int64_t{limits.groups} * (p.linear ? 32 : 256)) return false;
  if (p.linear &&
      (!fits(plan.chunk * plan.slices, 4 * hidden) || !fits(plan.window, 4 * hidden) ||
       !fits(plan.window, p.weight_row_bytes) || !fits(plan.window, p.grad_weight_row_bytes))) {
    return false;
  }
  const int64_t of_teacher = round_up(p.teacher.hidden, 4);
  if (p.has_teacher() && (!fits(plan.chunk, 4 * of_teacher) || !fits(plan.window, 4 * of_teacher) ||
                          !fits(plan.window, p.teacher.weight_row_bytes))) {
    return false;
  }
  for (const uint64_t bytes : plan.bytes) {
    if (bytes > limits.buffer_bytes) return false;
  }
  return true;
}

int64_t most_tokens(const Problem& p) {
  return std::min(p.tokens, p.plain && p.in_place ? kMostPlain
                            : p.direct            ? kMostInPlace
                                                  : kMostTokens);
}

struct Choice {
  int64_t chunk = 0, window = 0, slices = 1;
  bool whole = false;
};

Plan plan_of(const Problem& p, const Choice& choice) {
  Plan plan;
  plan.chunk = choice.chunk;
  plan.chunks = choice.chunk == 0 ? 1 : (p.tokens + choice.chunk - 1) / choice.chunk;
  plan.window = choice.window;
  plan.windows = choice.window == 0 ? 0 : (p.vocab + choice.window - 1) / choice.window;
  plan.slots = p.combines ? 2 : (p.vocab + kSlotColumns - 1) / kSlotColumns;
  plan.whole = choice.whole || plan.windows <= 1;
  plan.slices = choice.slices;
  plan.plain = p.plain;
  plan.kept_columns = p.kept_columns;
  const bool again = p.needs_logits_again() && !p.state_given && !plan.whole;
  const bool all_kept = p.state_given && p.kept_columns > 0 && p.kept_columns == p.vocab;
  if (p.linear)
    plan.products =
        !(all_kept || p.targets_only) + again + p.wants_grad_input + p.wants_grad_weight;
  if (p.diverges) {
    plan.products = !p.reads_kept + (p.has_teacher() && p.teacher.is_head) + p.wants_grad_input +
                    p.wants_grad_weight;
  }
  fill_bytes(p, &plan);
  return plan;
}

// Whether it helps to hold more than one window at a time.
bool wants_whole(const Problem& p) {
  return p.has_teacher() || (p.needs_logits_again() && !p.state_given && !p.reads_kept);
}

// Calls f(choice) for each choice: chunks are even shares of the tokens, windows are halved until f
// accepts one. Chunks of fewer than 64 tokens are tried only if nothing else is within the limits.
template <class F>
void each_choice(const Problem& p, const bool& kept_to_limits, F&& f) {
  const auto windows = [&](int64_t chunk, bool whole) {
    const bool no_logits = p.vocab == 0 || p.combines;
    bool taken = no_logits && (f(Choice{.chunk = chunk, .whole = whole}), true);
    for (int64_t w = round_up(p.vocab, 4); w > 0 && !taken; w = round_up(w / 2, kSlotColumns)) {
      for (int64_t slices = most_slices(p, chunk, w);; slices /= 2) {
        taken |= f(Choice{chunk, w, slices, whole});
        if (slices <= 1) break;
      }
      if (p.plain || p.rows_at_once || w <= kSlotColumns) break;
    }
  };
  const int64_t most = most_tokens(p);
  int64_t parts = most == 0 ? 1 : (p.tokens + most - 1) / most;
  for (;; parts = parts * 4 / 3 + 1) {
    const int64_t even = (p.tokens + parts - 1) / parts;
    const int64_t chunk = even < kLeastTokens ? even : std::min(round_up(even, 64), most);
    if (kept_to_limits && chunk < std::min(kLeastTokens, p.tokens)) break;
    if (wants_whole(p)) windows(chunk, true);
    if (!p.has_teacher()) windows(chunk, false);
    if (chunk <= 1) break;
  }
}

}  // namespace

bool is_bound_matrix(const TensorView& v) {
  return v && v.data != nullptr && v.dtype == DType::f32 && v.stride[1] == 1 &&
         v.shape[1] % 4 == 0 && v.stride[0] % 4 == 0 && v.stride[0] >= v.shape[1] &&
         v.byte_offset % 16 == 0;
}

bool is_bound_vector(const TensorView& v) {
  return v && v.data != nullptr && v.dtype == DType::f32 && (v.stride[0] == 1 || v.shape[0] == 1) &&
         v.byte_offset % 256 == 0;
}

namespace {

// Whether the kernels can work in the matrix that an op on given logits writes.
bool is_direct(const Call& call) {
  const TensorView& in = call["logits"];
  const TensorView& out = call[!call.loss_op ? "probabilities" : "grad_logits"];
  if (call.linear || !out || in.data == nullptr || out.data == nullptr) return false;
  if (out.dtype != DType::f32 || (out.stride[1] != 1 && out.shape[1] > 1)) return false;
  // A dispatch can bind a buffer that it writes only once, so in-place ops need equal views.
  return in.data != out.data ||
         (in.byte_offset == out.byte_offset && in.dtype == out.dtype && in.stride == out.stride);
}

// Whether plain.wgsl serves all of the call's inputs, outputs and options. It does not serve a part
// of a vocabulary.
bool is_plain(const Call& call, const Problem& p) {
  if (!p.direct || p.probabilities || p.vocab > kMostPlain) return false;
  for (const Field& field : call.fields()) {
    constexpr std::string_view kKnown[] = {"logits", "probabilities", "grad_logits", "target",
                                           "loss",   "grad_loss",     "normalizer",  "temperature"};
    const bool known =
        std::find(std::begin(kKnown), std::end(kKnown), field.name) != std::end(kKnown);
    if (field.given() && !known) return false;
  }
  if (p.softmax) return true;
  const LossOptions& o = call.options;
  return o.label_smoothing == 0 && o.softcap == 0 && !call.shard() &&
         o.reduction != Reduction::none;
}

// A row of plain.wgsl must fit in one binding, and so must a full chunk's rows of a slab of kept
// state. The device decides this, not the workspace: a token's bits depend on it, and Backward
// reads what Forward kept.
Problem on_device(Problem p, const Limits& limits) {
  p.plain &= p.vocab <= static_cast<int64_t>(limits.storage_binding_bytes - 512) / 4;
  if (limits.storage_binding_bytes < slab_binding_bytes(kMostTokens)) p.kept_columns = 0;
  p.reads_kept &= p.kept_columns > 0;
  return p;
}

}  // namespace

namespace {

TeacherProblem teacher_of(const Call& call) {
  TeacherProblem t;
  t.is_head = call.teacher_is_head();
  t.is_there = t.is_head || call.teacher_logits;
  t.temperatures = static_cast<bool>(call.teacher_temperature);
  if (!t.is_head) return t;
  t.hidden = call.teacher_input.shape[1];
  t.weight_bound = is_bound_matrix(call.teacher_weight);
  if (t.weight_bound) t.weight_row_bytes = 4 * call.teacher_weight.stride[0];
  t.has_bias = static_cast<bool>(call.teacher_bias);
  t.bias_bound = is_bound_vector(call.teacher_bias);
  return t;
}

// Notes the call's chosen columns and whether it asks for the largest logits.
void choose(const Call& call, Problem* p) {
  p->chosen = call.chosen();
  if (call.ids) p->id_bytes = size_of(call.ids.dtype);
  p->id_lists = call.lists();
  p->only_chosen = call.only_chosen;
  p->targets_only = call.targets_only();
  p->lists = static_cast<bool>(call.top_logits);
}

// Whether the tensor has a row per token.
bool is_of_tokens(std::string_view name, const Problem& p) {
  constexpr std::string_view kOthers[] = {"weight",      "bias",           "vocab_weight",
                                          "grad_weight", "grad_bias",      "fault",
                                          "kept",        "teacher_weight", "teacher_bias"};
  if (name == "loss" && p.reduces) return false;
  return std::find(std::begin(kOthers), std::end(kOthers), name) == std::end(kOthers);
}

}  // namespace

Problem problem_of(const Call& call) {
  Problem p;
  p.tokens = call.tokens();
  p.vocab = call.vocab();
  p.vocab_total = call.vocab_total();
  p.linear = call.linear;
  p.gradients = call.gradients;
  p.softmax = !call.loss_op;
  p.combines = call.combines;
  p.diverges = call.diverges;
  if (call.diverges) p.teacher = teacher_of(call);
  for (const char* name : {"row_reference", "row_log_sum", "teacher_row_reference",
                           "teacher_row_log_sum", "divergence_sum", "slope_sum", "target_logit"}) {
    p.hands_states |= call.diverges && call[name];
  }
  choose(call, &p);
  p.hidden = call.linear ? call.hidden() : 0;
  p.state_given = !call.forward && static_cast<bool>(call["row_reference"]);
  p.has_bias = static_cast<bool>(call["bias"]);
  p.bias_bound = is_bound_vector(call["bias"]);
  p.has_vocab_weight = static_cast<bool>(call["vocab_weight"]);
  p.vocab_weight_bound = is_bound_vector(call["vocab_weight"]);
  p.direct = is_direct(call);
  // A logprob always comes from sums of slots, so that its bits do not depend on other outputs.
  p.rows_at_once = p.direct && !p.state_given && p.vocab <= kColumnsAtOnce && !call["logprob"];
  p.temperatures = call["temperature"] && !call.combines;  // included in the shards' states
  p.more_statistics = asks_extras(call);
  const TensorView& loss = call["loss"];
  if (!p.softmax) {
    p.probabilities = call.options.input_kind == InputKind::probabilities;
    p.rows_at_once &= !p.probabilities;
    p.sums_vocab_weight = p.has_vocab_weight && call.options.label_smoothing > 0;
    p.reduces = loss && call.options.reduction != Reduction::none;
  }
  if (p.linear) {
    p.weight_bound = is_bound_matrix(call["weight"]);
    if (p.weight_bound) p.weight_row_bytes = 4 * call["weight"].stride[0];
    p.wants_grad_input = static_cast<bool>(call["grad_input"]);
    p.wants_grad_weight = static_cast<bool>(call["grad_weight"]);
    p.wants_grad_bias = static_cast<bool>(call["grad_bias"]);
    p.kept_columns = columns_kept(call);
    p.reads_kept = p.diverges && !call.forward && p.kept_columns > 0;
    p.grad_weight_bound = is_bound_matrix(call["grad_weight"]);
    if (p.grad_weight_bound) p.grad_weight_row_bytes = 4 * call["grad_weight"].stride[0];
  }
  p.in_place =
      p.direct && call["logits"].data == call[p.softmax ? "probabilities" : "grad_logits"].data;
  p.plain = is_plain(call, p);
  p.ranks = (call["rank"] || call["mass_above"]) && !p.rows_at_once;
  for (const Field& field : call.fields()) {
    const TensorView& v = *field.view;
    if (!field.given() || v.rank == 0 || (v.shape[0] <= 1 && !call.combines)) continue;
    if (is_of_tokens(field.name, p)) {
      const int64_t stride = v.stride[call.combines && v.rank == 2 ? 1 : 0];
      p.token_stride_bytes = std::max(p.token_stride_bytes, stride * size_of(v.dtype));
    }
  }
  return p;
}

namespace {

Status check_columns(const Problem& p) {
  if (p.id_lists) {
    return error(StatusCode::not_supported, "id_offsets: webgpu has no lists; allowed: none");
  }
  if (p.only_chosen) {
    return error(StatusCode::not_supported, "only_chosen is 1; webgpu allows 0");
  }
  if (p.chosen > kMostChosen) {
    return error(StatusCode::not_supported, "ids: K is %lld; webgpu allows 1 to %lld",
                 static_cast<long long>(p.chosen), static_cast<long long>(kMostChosen));
  }
  if (p.lists) {
    return error(StatusCode::not_supported, "top_logits: webgpu has no top-k; allowed: none");
  }
  return {};
}

}  // namespace

Status make_plan(const Problem& problem, const Limits& limits, uint64_t budget, Plan* plan) {
  const Problem p = on_device(problem, limits);
  const Status columns = check_columns(p);
  if (!columns.ok()) return columns;
  if (problem.diverges && (problem.vocab_total > problem.vocab || problem.hands_states)) {
    return error(StatusCode::not_supported,
                 "vocab_total is %lld and V %lld; webgpu allows of a divergence: the whole "
                 "vocabulary, without states and sums",
                 static_cast<long long>(problem.vocab_total),
                 static_cast<long long>(problem.vocab));
  }
  if (problem.reads_kept && !p.reads_kept && !p.teacher.is_there) {
    return error(StatusCode::not_supported,
                 "kept: this device binds %llu bytes, and nothing is kept on it; teacher_weight or "
                 "teacher_logits is needed",
                 static_cast<unsigned long long>(limits.storage_binding_bytes));
  }
  bool any = false, found = false;
  double best = 0;
  each_choice(p, any, [&](const Choice& choice) {
    const Plan made = plan_of(p, choice);
    if (!within(p, limits, made)) return false;
    const bool enough = made.total <= budget;
    if (!enough && !found && (!any || made.total < plan->total)) *plan = made;
    any = true;
    if (!enough) return false;
    const double time = predicted_microseconds(p, made);
    if (!found || time < best) best = time, *plan = made;
    found = true;
    return true;
  });
  const auto vocab_bytes = static_cast<uint64_t>(4 * p.vocab_total);
  if (p.has_vocab_weight && vocab_bytes > limits.storage_binding_bytes) {
    return error(StatusCode::not_supported,
                 "vocab_weight: %lld classes; allowed: one binding of the "
                 "device, %llu bytes",
                 static_cast<long long>(p.vocab_total),
                 static_cast<unsigned long long>(limits.storage_binding_bytes));
  }
  if (p.vocab_total > INT32_MAX) {
    return error(StatusCode::not_supported, "vocab_total is %lld; allowed on webgpu: < 2^31",
                 static_cast<long long>(p.vocab_total));
  }
  if (any) return {};
  return error(StatusCode::not_supported,
               "N = %lld, V = %lld, D = %lld: 1024 rows of weight, or a sum of "
               "grad_weight, pass "
               "this device's limits: %llu bytes a binding, %llu a buffer",
               static_cast<long long>(p.tokens), static_cast<long long>(p.vocab),
               static_cast<long long>(p.hidden),
               static_cast<unsigned long long>(limits.storage_binding_bytes),
               static_cast<unsigned long long>(limits.buffer_bytes));
}

Status workspace_sizes(const Problem& problem, const Limits& limits, uint64_t* minimum,
                       uint64_t* recommended) {
  const Problem p = on_device(problem, limits);
  Plan plan;
  Status status = make_plan(p, limits, 0, &plan);
  if (!status.ok()) return status;
  *minimum = plan.total;
  // Recommends blocks of at most about a quarter of the f32 logits, with 64 to 1024 tokens.
  const int64_t tokens = p.direct ? most_tokens(p)
                                  : std::clamp(p.tokens / (p.has_teacher() ? 8 : 4),
                                               std::min(p.tokens, kLeastTokens), int64_t{1024});
  Problem part = p;
  part.tokens = tokens;
  status = make_plan(part, limits, UINT64_MAX, &plan);
  if (!status.ok()) return status;
  const Plan own = plan_of(p, {plan.chunk, plan.window, 1, plan.whole});
  // The recommended size is what the plan for those bytes uses.
  status = make_plan(p, limits, std::max(own.total, *minimum), &plan);
  *recommended = plan.total;
  return status;
}

}  // namespace logitless::webgpu

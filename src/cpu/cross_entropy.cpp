// SPDX-License-Identifier: Apache-2.0
// Cross-entropy on given logits [N, V]. A row's gradient is written right after its state is
// computed, so that a row that fits the cache is read from memory once. Tasks are groups of rows; a
// row's bits depend on no other row.
#include <algorithm>

#include "src/cpu/logit_rows.h"
#include "src/cpu/ops.h"
#include "src/cpu/probability_rows.h"
#include "src/cpu/thread_pool.h"
#include "src/cpu/tokens.h"

namespace logitless::cpu {
namespace {

bool needs_forward(const Call& call) { return !call.state_given(); }

// Offsets in the workspace, in bytes.
struct Layout {
  uint64_t states = 0;        // RowState [N] of ops with a loss, float [N] with probabilities
  uint64_t rare = 0;          // RareStatistics [N], if any is requested
  uint64_t class_weight = 0;  // [V]  a copy where the view is strided
  uint64_t lanes = 0;         // lane_bytes of each thread
  bool copies_weight = false;
  bool uses_weight = false;
};

Layout layout_of(const Call& call) {
  Layout l;
  const SumSet sums = call.sums();
  const int64_t tokens = call.logits.shape[0], columns = call.logits.shape[1];
  const bool probabilities = call.options.input_kind == InputKind::probabilities;
  l.uses_weight =
      call.vocab_weight && (call.options.label_smoothing > 0 || sums.has(SumKind::weighted));
  l.copies_weight = l.uses_weight && columns > 1 && call.vocab_weight.stride[0] != 1;
  l.states = tokens_bytes(tokens);
  const uint64_t state = !call.forward ? 0 : probabilities ? sizeof(float) : sizeof(RowState);
  l.rare = l.states + padded(tokens * state);
  l.class_weight =
      l.rare + (sums.has(RareBlock::kinds) ? padded(tokens * sizeof(RareStatistics)) : 0);
  l.lanes = l.class_weight + (l.copies_weight ? padded(columns * sizeof(float)) : 0);
  return l;
}

LogitRows rows_of(const Call& call) {
  RowsPurpose purpose{.forward = needs_forward(call), .maps = static_cast<bool>(call.temperature)};
  if (!call.forward) purpose.needs_logits = static_cast<bool>(call.grad_entropy);
  return LogitRows(call.logits, call.grad_logits, logit_map(call.options), purpose);
}

// Returns the shard's class weights, contiguous, or null if all are 1 or none is needed.
const float* class_weights(const LossOptions& options, const TensorView& weight, int64_t columns,
                           const Layout& layout, char* memory) {
  if (!layout.uses_weight) return nullptr;
  const int64_t start = options.vocab_total > 0 ? options.vocab_start : 0;
  if (!layout.copies_weight) return weight.as<const float>() + start * weight.stride[0];
  float* copy = reinterpret_cast<float*>(memory + layout.class_weight);
  for (int64_t j = 0; j < columns; ++j) copy[j] = f32_at(weight, start + j);
  return copy;
}

struct Run {
  const Call& call;
  const Tokens& tokens;
  const LogitRows& rows;
  const float* class_weight;
  BlockWants wants;
  RowState* states;      // [valid]  only in ops with a loss
  RareStatistics* rare;  // [valid]  null if none is requested

  // Runs rows [begin, end) of the views.
  void operator()(int64_t begin, int64_t end, float* scratch) const {
    const int64_t first = first_at_or_after(tokens, begin), last = first_at_or_after(tokens, end);
    if (call.grad_logits) clear_ignored(begin, end, first);
    for (int64_t k = first; k < last; k += rows.group()) {
      const RowGroup group{tokens.row + k, tokens.target + k, std::min(rows.group(), last - k),
                           &tokens, k};
      RowState own[most_rows];
      RowState* group_states = call.forward ? states + k : own;
      const bool forward = needs_forward(call);
      if (forward) {
        rows.forward(group, class_weight, wants, scratch,
                     {group_states, rare != nullptr ? rare + k : nullptr, call.vocab_total()});
      }
      if (!call.forward) take_given(group, group_states);
      if (call.grad_logits) write_gradient(group, k, group_states, forward, scratch);
    }
  }

  void clear_ignored(int64_t begin, int64_t end, int64_t k) const {
    for (int64_t row = begin; row < end; ++row) {
      if (k < tokens.valid && tokens.row[k] == row) {
        ++k;
      } else {
        rows.clear(row);
      }
    }
  }

  void take_given(const RowGroup& group, RowState* given) const {
    for (int64_t r = 0; r < group.count; ++r) {
      if (!needs_forward(call)) {
        given[r].reference = f32_at(call.row_reference, group.row[r]);
        given[r].log_sum = f32_at(call.row_log_sum, group.row[r]);
      }
      if (call.entropy) given[r].entropy = f32_at(call.entropy, group.row[r]);
    }
  }

  void write_gradient(const RowGroup& group, int64_t k, const RowState* group_states,
                      bool after_forward, float* scratch) const {
    RowGradient coefficients[most_rows];
    // Rows are not summed up, so the common factor is applied at once.
    for (int64_t r = 0; r < group.count; ++r) {
      coefficients[r] =
          scaled(token_gradient(call, tokens, k + r, group_states[r]), tokens.gradient_scale);
    }
    rows.gradient(group, class_weight, coefficients, after_forward ? group_states : nullptr,
                  scratch);
  }
};

void run_probabilities(const Call& call, const Tokens& tokens, const float* class_weight,
                       float* losses, const Executor& executor) {
  const ProbabilityRow view{call.logits, class_weight, call.options.probability_floor};
  const LogitRows rows = rows_of(call);
  const TensorView gradient = call.grad_logits;
  for_each_task(executor, executor.num_threads, tokens.total, [&](int64_t row, int64_t) {
    const int64_t k = first_at_or_after(tokens, row);
    const bool counts = k < tokens.valid && tokens.row[k] == row;
    if (!counts && gradient) rows.clear(row);
    if (!counts) return;
    if (call.forward) losses[k] = probability_loss(view, tokens, k);
    if (gradient) probability_gradient(view, tokens, k, gradient);
  });
  if (call.forward) write_losses(tokens, losses, call.loss, call.options);
}

}  // namespace

Status logits_loss_workspace(const Call& call, WorkspaceSize* size) {
  const Layout layout = layout_of(call);
  *size = {};
  size->minimum = size->recommended = layout.lanes;
  const LogitRows rows = rows_of(call);
  const int64_t tasks = tasks_of(rows, call.logits.shape[0]);
  if (tasks == 0 || call.options.input_kind == InputKind::probabilities) return {};
  size->minimum += rows.lane_bytes();
  size->recommended +=
      rows.lane_bytes() * std::min<int64_t>(executor_of(call.execution).num_threads, tasks);
  return {};
}

Status run_logits_loss(const Call& call, const Workspace& workspace) {
  const Executor& executor = executor_of(call.execution);
  const Layout layout = layout_of(call);
  const int64_t total = call.logits.shape[0], columns = call.logits.shape[1];
  char* memory = static_cast<char*>(workspace.data) + workspace.byte_offset;
  Tokens tokens;
  Status status = prepare_tokens(call, columns, memory, &tokens);
  if (!status.ok()) return status;
  const float* class_weight =
      class_weights(call.options, call.vocab_weight, columns, layout, memory);
  char* states = memory + layout.states;
  if (call.options.input_kind == InputKind::probabilities) {
    run_probabilities(call, tokens, class_weight, reinterpret_cast<float*>(states), executor);
    return {};
  }
  const LogitRows rows = rows_of(call);
  const BlockWants wants{call.sums()};
  auto* const rare = reinterpret_cast<RareStatistics*>(memory + layout.rare);
  const Run run{call,
                tokens,
                rows,
                class_weight,
                wants,
                reinterpret_cast<RowState*>(states),
                wants.rare() ? rare : nullptr};
  const uint64_t scratch_bytes = workspace.bytes - layout.lanes;
  for_each_task(executor, lanes_of(rows, executor, scratch_bytes), tasks_of(rows, total),
                [&](int64_t task, int64_t lane) {
                  char* scratch = memory + layout.lanes + lane * rows.lane_bytes();
                  run(task * rows.task_rows(), std::min(total, (task + 1) * rows.task_rows()),
                      reinterpret_cast<float*>(scratch));
                });
  if (call.forward) write_tokens(call, tokens, run.states, run.rare);
  return {};
}

}  // namespace logitless::cpu

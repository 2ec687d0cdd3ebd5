// SPDX-License-Identifier: Apache-2.0
// Cross-entropy on given logits [N, V]: each row is read once from memory, its state formed, and
// its gradient written while the row is still in the cache. Tasks are groups of rows; every row's
// bits are its own.
#include <algorithm>

#include "src/cpu/logit_rows.h"
#include "src/cpu/ops.h"
#include "src/cpu/probability_rows.h"
#include "src/cpu/thread_pool.h"
#include "src/cpu/tokens.h"

namespace logitless::cpu {
namespace {

template <class Op>
TensorView gradient_view(const Op& op) {
  if constexpr (GradientOp<Op>) return op.grad_logits;
  return {};
}

// Row states are made here, not given.
template <class Op>
bool needs_forward(const Op& op) {
  if constexpr (BackwardOnlyOp<Op>) return !op.row_reference;
  return true;
}

template <class Op>
BlockWants wants_of(const Op& op) {
  BlockWants wants;
  if constexpr (ForwardOp<Op>) {
    wants = {.weighted_sum = op.options.label_smoothing > 0 || op.statistics.weighted_logit_sum,
             .entropy = static_cast<bool>(op.statistics.entropy),
             .argmax = static_cast<bool>(op.statistics.argmax)};
  }
  return wants;
}

// Says where things lie in the workspace.
struct Layout {
  uint64_t states = 0;        // RowState [N], or float [N] with probabilities; ops with a loss
  uint64_t class_weight = 0;  // [V], a copy where the view is strided
  uint64_t lanes = 0;         // then lane_bytes a thread
  bool copies_weight = false;
  bool uses_weight = false;
};

template <class Op>
Layout layout_of(const Op& op) {
  Layout l;
  const int64_t tokens = op.logits.shape[0], columns = op.logits.shape[1];
  const bool probabilities = op.options.input_kind == InputKind::probabilities;
  l.uses_weight = op.weights.vocab && (op.options.label_smoothing > 0 || wants_of(op).weighted_sum);
  l.copies_weight = l.uses_weight && columns > 1 && op.weights.vocab.stride[0] != 1;
  l.states = tokens_bytes(tokens);
  const uint64_t state = !ForwardOp<Op> ? 0 : probabilities ? sizeof(float) : sizeof(RowState);
  l.class_weight = l.states + padded(tokens * state);
  l.lanes = l.class_weight + (l.copies_weight ? padded(columns * sizeof(float)) : 0);
  return l;
}

template <class Op>
LogitRows rows_of(const Op& op) {
  RowsPurpose purpose{.forward = needs_forward(op)};
  if constexpr (BackwardOnlyOp<Op>) purpose.needs_logits = static_cast<bool>(op.grad_entropy);
  return LogitRows(op.logits, gradient_view(op), logit_map(op.options), purpose);
}

template <class Op>
Status loss_workspace(const Op& op, const Execution& execution, WorkspaceSize* size) {
  const Layout layout = layout_of(op);
  *size = {};
  size->minimum = size->recommended = layout.lanes;
  const LogitRows rows = rows_of(op);
  const int64_t tasks = tasks_of(rows, op.logits.shape[0]);
  if (tasks == 0 || op.options.input_kind == InputKind::probabilities) return {};
  size->minimum += rows.lane_bytes();
  size->recommended +=
      rows.lane_bytes() * std::min<int64_t>(executor_of(execution).num_threads, tasks);
  return {};
}

// The shard's class weights, contiguous; null: all 1, or none wanted.
const float* class_weights(const LossOptions& options, const TensorView& weight, int64_t columns,
                           const Layout& layout, char* memory) {
  if (!layout.uses_weight) return nullptr;
  const int64_t start = options.vocab_total > 0 ? options.vocab_start : 0;
  if (!layout.copies_weight) return weight.as<const float>() + start * weight.stride[0];
  float* copy = reinterpret_cast<float*>(memory + layout.class_weight);
  for (int64_t j = 0; j < columns; ++j) copy[j] = f32_at(weight, start + j);
  return copy;
}

// One call on logits.
template <class Op>
struct Run {
  const Op& op;
  const Tokens& tokens;
  const LogitRows& rows;
  const float* class_weight;
  BlockWants wants;
  RowState* states;  // [valid]; ops with a loss

  // Rows [begin, end) of the views.
  void operator()(int64_t begin, int64_t end, float* scratch) const {
    const int64_t first = first_at_or_after(tokens, begin), last = first_at_or_after(tokens, end);
    if (gradient_view(op)) clear_ignored(begin, end, first);
    for (int64_t k = first; k < last; k += rows.group()) {
      const RowGroup group{tokens.row + k, tokens.target + k, std::min(rows.group(), last - k)};
      RowState own[most_rows];
      RowState* group_states = ForwardOp<Op> ? states + k : own;
      const bool forward = needs_forward(op);
      if (forward) rows.forward(group, class_weight, wants, scratch, group_states);
      if constexpr (BackwardOnlyOp<Op>) take_given(group, group_states);
      if (gradient_view(op)) write_gradient(group, k, group_states, forward, scratch);
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
      if (!needs_forward(op)) {
        given[r].reference = f32_at(op.row_reference, group.row[r]);
        given[r].log_sum = f32_at(op.row_log_sum, group.row[r]);
      }
      if (op.entropy) given[r].entropy = f32_at(op.entropy, group.row[r]);
    }
  }

  void write_gradient(const RowGroup& group, int64_t k, const RowState* group_states,
                      bool after_forward, float* scratch) const {
    RowGradient coefficients[most_rows];
    const float scale = tokens.gradient_scale;
    for (int64_t r = 0; r < group.count; ++r) {
      RowGradient& g = coefficients[r] = token_gradient(op, tokens, k + r, group_states[r]);
      // Nothing is summed here, so the common factor goes in at once.
      g.probability *= scale;
      g.smoothing *= scale;
      g.onehot *= scale;
      g.entropy *= scale;
    }
    rows.gradient(group, class_weight, coefficients, after_forward ? group_states : nullptr,
                  scratch);
  }
};

template <class Op>
void run_probabilities(const Op& op, const Tokens& tokens, const float* class_weight, float* losses,
                       const Executor& executor) {
  const ProbabilityRow view{op.logits, class_weight, op.options.probability_floor};
  const LogitRows rows = rows_of(op);
  const TensorView gradient = gradient_view(op);
  for_each_task(executor, executor.num_threads, tokens.total, [&](int64_t row, int64_t) {
    const int64_t k = first_at_or_after(tokens, row);
    const bool counts = k < tokens.valid && tokens.row[k] == row;
    if (!counts && gradient) rows.clear(row);
    if (!counts) return;
    if constexpr (ForwardOp<Op>) losses[k] = probability_loss(view, tokens, k);
    if (gradient) probability_gradient(view, tokens, k, gradient);
  });
  if constexpr (ForwardOp<Op>) write_losses(tokens, losses, op.loss, op.options);
}

template <class Op>
Status loss_run(const Op& op, const Workspace& workspace, const Execution& execution) {
  const Executor& executor = executor_of(execution);
  const Layout layout = layout_of(op);
  const int64_t total = op.logits.shape[0], columns = op.logits.shape[1];
  char* memory = static_cast<char*>(workspace.data) + workspace.byte_offset;
  Tokens tokens;
  Status status = prepare_tokens(op, columns, memory, &tokens);
  if (!status.ok()) return status;
  const float* class_weight = class_weights(op.options, op.weights.vocab, columns, layout, memory);
  char* states = memory + layout.states;
  if (op.options.input_kind == InputKind::probabilities) {
    run_probabilities(op, tokens, class_weight, reinterpret_cast<float*>(states), executor);
    return {};
  }
  const LogitRows rows = rows_of(op);
  const Run<Op> run{op,           tokens,       rows,
                    class_weight, wants_of(op), reinterpret_cast<RowState*>(states)};
  const uint64_t scratch_bytes = workspace.bytes - layout.lanes;
  for_each_task(executor, lanes_of(rows, executor, scratch_bytes), tasks_of(rows, total),
                [&](int64_t task, int64_t lane) {
                  char* scratch = memory + layout.lanes + lane * rows.lane_bytes();
                  run(task * rows.task_rows(), std::min(total, (task + 1) * rows.task_rows()),
                      reinterpret_cast<float*>(scratch));
                });
  if constexpr (ForwardOp<Op>) {
    write_tokens(tokens, run.states, {op.loss, op.statistics, op.options});
  }
  return {};
}

}  // namespace

#define LOGITLESS_LOSS_OP(Op)                                                        \
  Status workspace(const Op& op, const Execution& execution, WorkspaceSize* size) {  \
    return loss_workspace(op, execution, size);                                      \
  }                                                                                  \
  Status run(const Op& op, const Workspace& workspace, const Execution& execution) { \
    return loss_run(op, workspace, execution);                                       \
  }
LOGITLESS_LOSS_OP(CrossEntropyForward)
LOGITLESS_LOSS_OP(CrossEntropyBackward)
LOGITLESS_LOSS_OP(CrossEntropyForwardBackward)
#undef LOGITLESS_LOSS_OP

}  // namespace logitless::cpu

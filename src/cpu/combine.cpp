// SPDX-License-Identifier: Apache-2.0
// This file combines what Forward wrote of shards of the vocabulary: tokens are prepared as for any
// loss, each one's shards are folded, and loss and statistics written as any op's.
#include <algorithm>

#include "src/cpu/ops.h"
#include "src/cpu/thread_pool.h"
#include "src/cpu/tokens.h"
#include "src/row/shards.h"

namespace logitless::cpu {
namespace {

constexpr int64_t task_tokens = 256;

// The workspace holds the tokens and then these arrays, at these offsets in bytes.
struct Layout {
  uint64_t states, more, end;  // RowState [N], MoreStatistics [N]
  explicit Layout(const Call& call) {
    states = tokens_bytes(call.tokens());
    more = states + padded(call.tokens() * sizeof(RowState));
    end = more + padded(call.tokens() * sizeof(MoreStatistics));
  }
};

float f32_at(const TensorView& v, int64_t shard, int64_t i) {
  return v ? v.as<const float>()[shard * v.stride[0] + i * v.stride[1]] : 0;
}
int64_t int_at(const TensorView& v, int64_t shard, int64_t i) {
  if (!v) return -1;
  const int64_t at = shard * v.stride[0] + i * v.stride[1];
  return v.dtype == DType::i64 ? v.as<const int64_t>()[at] : v.as<const int32_t>()[at];
}

ShardState state_of(const Call& call, int64_t shard, int64_t i) {
  return {.reference = f32_at(call.shard_row_reference, shard, i),
          .target_logit = f32_at(call.shard_target_logit, shard, i),
          .log_sum = f32_at(call.shard_row_log_sum, shard, i),
          .entropy = f32_at(call.shard_entropy, shard, i),
          .sum_p_squared = f32_at(call.shard_sum_p_squared, shard, i),
          .weighted_logit_sum = f32_at(call.shard_weighted_logit_sum, shard, i),
          .mean_logit = f32_at(call.shard_mean_logit, shard, i),
          .argmax = int_at(call.shard_argmax, shard, i)};
}

void fold_token(const Call& call, int64_t i, RowState* state, MoreStatistics* more) {
  const ShardState all =
      fold_shards(call.shards(), [&](int64_t s) { return state_of(call, s, i); });
  *state = {.reference = all.reference,
            .log_sum = static_cast<float>(all.log_sum),
            .target_logit = all.target_logit,
            .weighted_logit_sum = static_cast<float>(all.weighted_logit_sum),
            .entropy = static_cast<float>(all.entropy),
            .argmax = all.argmax};
  *more = {.mean_logit = static_cast<float>(all.mean_logit),
           .sum_p_squared = static_cast<float>(all.sum_p_squared)};
}

}  // namespace

Status combine_workspace(const Call& call, WorkspaceSize* size) {
  *size = {};
  size->minimum = size->recommended = Layout(call).end;
  return {};
}

Status run_combine(const Call& given, const Workspace& workspace) {
  // The maps are in the shards' states already, and those are of the whole vocabulary together.
  Call call = given;
  call.options.vocab_start = 0;
  call.temperature = {};
  const Layout layout(call);
  char* memory = static_cast<char*>(workspace.data) + workspace.byte_offset;
  Tokens tokens;
  Status status = prepare_tokens(call, call.vocab(), memory, &tokens);
  if (!status.ok()) return status;
  auto* const states = reinterpret_cast<RowState*>(memory + layout.states);
  auto* const more = reinterpret_cast<MoreStatistics*>(memory + layout.more);
  const Executor& executor = executor_of(call.execution);
  for_each_task(executor, executor.num_threads, (tokens.valid + task_tokens - 1) / task_tokens,
                [&](int64_t task, int64_t) {
                  const int64_t end = std::min(tokens.valid, (task + 1) * task_tokens);
                  for (int64_t k = task * task_tokens; k < end; ++k) {
                    fold_token(call, tokens.row[k], &states[k], &more[k]);
                  }
                });
  write_tokens(tokens, states, {call.loss, call.statistics(), call.options, more});
  return {};
}

}  // namespace logitless::cpu

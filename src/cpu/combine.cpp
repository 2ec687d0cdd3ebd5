// SPDX-License-Identifier: Apache-2.0
// The op Combine: prepares tokens as for any loss, folds each token's shards, and writes loss and
// statistics as any op does.
#include <algorithm>

#include "src/cpu/ops.h"
#include "src/cpu/thread_pool.h"
#include "src/cpu/tokens.h"
#include "src/cpu/top.h"
#include "src/row/shards.h"

namespace logitless::cpu {
namespace {

constexpr int64_t task_tokens = 256;

// Offsets in the workspace, in bytes, after the tokens.
struct Layout {
  uint64_t states, rare, end;  // RowState [N], RareStatistics [N]
  explicit Layout(const Call& call) {
    states = tokens_bytes(call.tokens());
    rare = states + padded(call.tokens() * sizeof(RowState));
    end = rare + padded(call.tokens() * sizeof(RareStatistics));
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

RowStatistics fold_token(int64_t shards, const ShardViews& views, int64_t i) {
  return rounded<RowStatistics>(fold_shards(shards, [&](int64_t s) {
    return shard_state(
        views, [&](const TensorView& v) { return f32_at(v, s, i); },
        [&](const TensorView& v) { return int_at(v, s, i); });
  }));
}

}  // namespace

Status combine_workspace(const Call& call, WorkspaceSize* size) {
  *size = {};
  size->minimum = size->recommended = Layout(call).end;
  return {};
}

Status run_combine(const Call& given, const Workspace& workspace) {
  // No temperature: the shards' states include it. No vocab_start: together the shards are the
  // whole vocabulary.
  Call call = given;
  call.options.vocab_start = 0;
  call.temperature = {};
  const Layout layout(call);
  char* memory = static_cast<char*>(workspace.data) + workspace.byte_offset;
  Tokens tokens;
  Status status = prepare_tokens(call, call.vocab(), memory, &tokens);
  if (!status.ok()) return status;
  if (call.top_logits) clear_lists(call);
  auto* const states = reinterpret_cast<RowState*>(memory + layout.states);
  auto* const rare = reinterpret_cast<RareStatistics*>(memory + layout.rare);
  const ShardViews views = shard_views(call);
  const Executor& executor = executor_of(call.execution);
  for_each_task(executor, executor.num_threads, (tokens.valid + task_tokens - 1) / task_tokens,
                [&](int64_t task, int64_t) {
                  const int64_t end = std::min(tokens.valid, (task + 1) * task_tokens);
                  for (int64_t k = task * task_tokens; k < end; ++k) {
                    const RowStatistics row = fold_token(call.shards(), views, tokens.row[k]);
                    states[k] = row;
                    rare[k] = row;
                    if (call.top_logits) combine_lists(call, tokens.row[k]);
                  }
                });
  write_tokens(call, tokens, states, rare);
  return {};
}

}  // namespace logitless::cpu

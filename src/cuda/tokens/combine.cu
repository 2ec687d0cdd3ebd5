// SPDX-License-Identifier: Apache-2.0
// The op Combine, in four steps: tokens are compacted as for any loss; each thread folds the shards
// of one token, which are N elements apart, so that a warp's reads are contiguous; the losses are
// reduced; top-k lists are merged (top.cu).
#include "src/cuda/ops.h"
#include "src/cuda/runtime/early.cuh"
#include "src/cuda/tokens/tokens.cuh"
#include "src/row/shards.h"

namespace logitless::cuda {
namespace {

// Folding takes long and shares nothing: small blocks spread a few thousand tokens over all
// multiprocessors.
constexpr int threads = 64;
constexpr int64_t most_tokens = (int64_t{1} << 31) - 1;  // kernels count tokens in 32 bits

struct CombineArguments {
  TokenInput in;
  TokenOutputs out;
  ShardViews shards;  // each [P, N]
  const TokenScalars* scalars;
  float* losses;  // [N]  null if each token's loss is an output
};

__device__ float shard_value(const TensorView& v, int64_t shard, int64_t i) {
  return present(v) ? *address<const float>(v, shard, i) : 0.0f;
}
__device__ int64_t shard_index(const TensorView& v, int64_t shard, int64_t i) {
  if (!present(v)) return -1;
  return v.dtype == DType::i64 ? *address<const int64_t>(v, shard, i)
                               : *address<const int32_t>(v, shard, i);
}

__device__ RowStatistics fold_token(const CombineArguments& a, int64_t i) {
  return rounded<RowStatistics>(
      fold_shards(a.shards.shard_row_reference.shape[0], [&](int64_t shard) {
        return shard_state(
            a.shards, [&](const TensorView& v) { return shard_value(v, shard, i); },
            [&](const TensorView& v) { return shard_index(v, shard, i); });
      }));
}

// Before its wait this kernel may only read what the previous kernel, which compacts the tokens,
// does not write.
__global__ void __launch_bounds__(threads)
    combine_kernel(const __grid_constant__ CombineArguments a) {
  const int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x;
  const int64_t target = i < a.in.target.shape[0] ? load_int(a.in.target, i) : 0;
  const bool counts = i < a.in.target.shape[0] && kind_of_target(a.in, target) == TokenKind::counts;
  RowStatistics row;
  float c = 0, weight = 0;
  if (counts) {
    row = fold_token(a, i);
    c = target_weight(a.in, target);
    weight = token_weight(a.in, i);
  }
  wait_for_kernel_before();
  let_next_start();
  if (!counts) return;
  constexpr int here = 0;  // every target is in the whole vocabulary
  put_state(a.in, a.out.statistics, i, here, row);
  if (present(a.out.loss)) {
    *loss_of(a.losses, a.out.loss, i) = token_loss(*a.scalars, here, c, weight, row);
  }
}

struct Layout {
  Tokens tokens;
  float* losses = nullptr;  // [N]  if the loss is reduced, else null
  uint64_t bytes = 0;
};

Layout layout_of(const Call& call, void* memory) {
  Arena arena(memory);
  Layout layout;
  layout.tokens = place_tokens(&arena, call.tokens(), {});
  if (call.loss && call.options.reduction != Reduction::none) {
    layout.losses = arena.take<float>(call.tokens());
  }
  layout.bytes = arena.used();
  return layout;
}

// No temperature: the shards' states include it. No vocab_start: together the shards are the whole
// vocabulary.
TokenInput input_of(const Call& call) {
  TokenInput in = token_input(call);
  in.options.vocab_start = int64_t{0};
  in.temperature = {};
  in.makes_maps = false;
  return in;
}

// Returns whether the next kernel may be launched early.
bool launch_combine(const Call& call, const TokenInput& in, const Layout& layout,
                    const DeviceInfo& device, Stream* stream) {
  CombineArguments a{};
  a.in = in;
  a.out = token_outputs(call);
  a.shards = shard_views(call);
  a.scalars = layout.tokens.scalars;
  a.losses = layout.losses;
  const bool early =
      device.launches_early &&
      is_compiled_for_hopper(reinterpret_cast<const void*>(combine_kernel), device, stream);
  const LaunchShape shape{
      .blocks = blocks_for(call.tokens(), threads), .threads = threads, .early = early};
  stream->launch_config("combine", combine_kernel, shape, a);
  return early && call.tokens() > 0;
}

}  // namespace

Status combine_workspace(const Call& call, const DeviceInfo&, WorkspaceSize* size) {
  *size = {};
  size->minimum = size->recommended = layout_of(call, nullptr).bytes;
  size->alignment = Arena::alignment;
  if (call.tokens() <= most_tokens) return {};
  return error(StatusCode::not_supported, "cuda: target has shape [%lld]; allowed: up to [%lld]",
               static_cast<long long>(call.tokens()), static_cast<long long>(most_tokens));
}

Status run_combine(const Call& call, const Workspace& workspace, const DeviceInfo& device,
                   Stream* stream) {
  const Layout layout = layout_of(call, static_cast<char*>(workspace.data) + workspace.byte_offset);
  const TokenInput in = input_of(call);
  stream->prepare_and_run([&] {
    prepare_tokens(in, layout.tokens, token_outputs(call), stream);
    const bool early = launch_combine(call, in, layout, device, stream);
    write_loss(in, layout.tokens, layout.losses, call.loss, stream, early);
    const TopLists lists{call.top_logits, call.top_ids};
    if (lists) {
      combine_lists(in, {call.shard_top_logits, call.shard_top_ids}, lists, stream);
    }
  });
  return {};
}

}  // namespace logitless::cuda

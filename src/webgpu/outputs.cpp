// SPDX-License-Identifier: Apache-2.0
// What a chunk leaves: its gradients, a window at a time, and its losses and statistics.
#include <algorithm>

#include "src/webgpu/run.h"

namespace logitless::webgpu {

void Run::make_gradients(const Chunk& chunk, const Window& window) {
  RowParams p = row_params(chunk, window);
  const Binding vocab_weight = vocab_weight_window(window, &p.weight_base);
  if (chunk.tokens > 0) {
    const Binding logits = block(chunk, window, &p);
    const Binding counted = role(Role::counted), rows = role(Role::rows);
    const uint32_t groups = blocks(window.columns, kSlotColumns);
    if (problem_.probabilities) {
      recorder_.dispatch("probabilities", "gradient", {direct()}, p,
                         {{}, counted, vocab_weight, rows, {}, {}, {}, {}, {}, logits}, groups,
                         p.rows);
    } else {
      recorder_.dispatch("gradient", "gradient", {is_capped(), is_scaled(p), direct()}, p,
                         {counted, vocab_weight, rows, logits}, groups, p.rows);
    }
  }
  if (problem_.linear) add_products(chunk, window);
  if (problem_.linear || problem_.direct) return;
  scatter(dense(Role::block, static_cast<int64_t>(block(window).offset / 4), plan_.window),
          result(),
          {.first_row = chunk.first,
           .rows = chunk.tokens,
           .first_column = window.first,
           .columns = window.columns},
          true);
}

// grad_input += draw . weight; grad_weight += draw^T . hidden; grad_bias +=
// column sums of draw.
void Run::add_products(const Chunk& chunk, const Window& window) {
  const auto hidden = u32(round_up(problem_.hidden, 4));
  const bool adds = call_.accumulate || !chunk.is_first;
  if (problem_.wants_grad_bias) {
    const SumParams p{
        .count = u32(window.columns), .row_stride = u32(plan_.window), .adds = adds ? 1u : 0u};
    const Binding sum{workspace_[Role::grad_bias], static_cast<uint64_t>(window.first) * 4,
                      static_cast<uint64_t>(window.columns) * 4};
    recorder_.dispatch("sum", "columns", {}, p,
                       {block(window), {}, {}, {}, {}, {}, role(Role::counted), sum},
                       blocks(window.columns, 64));
  }
  if (problem_.wants_grad_input) {
    ProductParams p{.rows = u32(chunk.tokens),
                    .columns = hidden,
                    .depth = u32(window.columns),
                    .a_stride = u32(plan_.window / 4),
                    .result_stride = hidden / 4,
                    .adds = window.index > 0 ? 1u : 0u};
    const Binding weight = weight_window(window, &p.b_base, &p.b_stride);
    add_to_grad_hidden(p, weight, window);
  }
  if (problem_.wants_grad_weight) {
    ProductParams p{.rows = u32(window.columns),
                    .columns = hidden,
                    .depth = u32(chunk.tokens),
                    .a_stride = u32(plan_.window / 4),
                    .b_stride = hidden / 4,
                    .result_stride = hidden / 4,
                    .adds = adds ? 1u : 0u,
                    // Chunks are blocks already.
                    .block_depth = std::max(32u, plan_.chunks > 1 ? u32(problem_.tokens / 8) : 0u)};
    Binding sum{workspace_[Role::grad_weight], static_cast<uint64_t>(window.first) * hidden * 4,
                static_cast<uint64_t>(window.columns) * hidden * 4};
    if (problem_.grad_weight_bound) {
      const TensorView& view = call_["grad_weight"];
      int64_t base;
      sum = bound(view,
                  {.first_row = window.first, .rows = window.columns, .columns = problem_.hidden},
                  &base);
      p.result_base = u32(base / 4);
      p.result_stride = u32(view.stride[0] / 4);
    }
    product(p, {.a_transposed = true, .bounded = 2}, block(window), role(Role::hidden), sum,
            zeros());
  }
}

// Slices of the window's columns have a sum each, which are added afterwards.
void Run::add_to_grad_hidden(const ProductParams& params, Binding weight, const Window& window) {
  const ProductKind kind{.bounded = 1, .slices = plan_.slices};
  if (plan_.slices == 1) {
    product(params, kind, block(window), weight, role(Role::grad_hidden), zeros());
    return;
  }
  ProductParams p = params;
  p.adds = 0;
  p.slice_stride = params.rows * params.result_stride;
  product(p, kind, block(window), weight, role(Role::slices), zeros());
  recorder_.dispatch("slices", "add_slices", {},
                     SliceParams{.row_length = params.result_stride,
                                 .slices = u32(plan_.slices),
                                 .slice_stride = p.slice_stride,
                                 .adds = params.adds},
                     {role(Role::slices), role(Role::grad_hidden), role(Role::counted)},
                     blocks(params.result_stride, 64), params.rows);
}

void Run::emit(const Chunk& chunk, const TensorView& view, StateWord word, uint32_t kind,
               int64_t first) {
  if (!view || chunk.tokens == 0) return;
  TokenParams p = token_params(chunk);
  int64_t base;
  const Binding result = bound(view, {.first_row = first, .rows = chunk.tokens}, &base);
  const int64_t words = size_of(view.dtype) / 4;
  p.base = u32(base * words);
  p.stride = u32(view.stride[0] * words);
  p.word = static_cast<uint32_t>(word);
  p.kind = kind;
  recorder_.dispatch("tokens", "emit", {}, p,
                     {{}, {}, {}, {}, {}, {}, {}, role(Role::rows), result},
                     blocks(chunk.tokens, 256));
}

void Run::emit_outputs(const Chunk& chunk) {
  if (!call_.forward) return;
  static constexpr struct {
    const char* name;
    StateWord word;
    uint32_t kind;
  } kOutputs[] = {{"lse", StateWord::log_sum, 1},
                  {"target_logit", StateWord::target_logit, 0},
                  {"entropy", StateWord::entropy, 0},
                  {"argmax", StateWord::argmax, 2},
                  {"row_reference", StateWord::m, 0},
                  {"row_log_sum", StateWord::log_sum, 0},
                  {"weighted_logit_sum", StateWord::weighted, 0}};
  for (const auto& output : kOutputs) {
    const TensorView& view = call_[output.name];
    const uint32_t wide = output.kind == 2 && view.dtype == DType::i64 ? 1 : 0;
    emit(chunk, view, output.word, output.kind + wide, chunk.first);
  }
  const TensorView& loss = call_["loss"];
  if (!loss) return;
  if (!problem_.reduces) {
    emit(chunk, loss, StateWord::loss, 0, chunk.first);
    return;
  }
  if (chunk.tokens == 0) return;
  TensorView losses{.data = reinterpret_cast<void*>(workspace_[Role::losses]), .rank = 1};
  losses.shape = {chunk.tokens, 0};
  losses.stride = {1, 0};
  emit(chunk, losses, StateWord::loss, 0, 0);
  sum_losses(chunk);
}

void Run::sum_losses(const Chunk& chunk) {
  const uint32_t groups = blocks(chunk.tokens, kValuesOfASum);
  recorder_.dispatch("sum", "tree", {},
                     SumParams{.count = u32(chunk.tokens), .result_base = u32(sums_)},
                     {role(Role::losses), role(Role::sums)}, groups);
  sums_ += groups;
}

}  // namespace logitless::webgpu

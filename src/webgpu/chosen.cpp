// SPDX-License-Identifier: Apache-2.0
// The chosen columns of a chunk of tokens. Forward computes each of their logits by a dot product.
// Backward computes their dz separately, with their own upstream gradients, and overwrites these
// columns of the window with it.
#include "src/webgpu/run.h"

namespace logitless::webgpu {

// Copies the ids (as two words if they have 64 bits) and Backward's gradients; then turns each id
// into its column.
void Run::begin_chosen(const Chunk& chunk) {
  if (!call_.ids || chunk.tokens == 0) return;
  const Part part{.first_row = chunk.first, .rows = chunk.tokens, .columns = problem_.chosen};
  const int64_t words = problem_.id_bytes / 4;
  for (int64_t word = 0; word < words; ++word) {
    TensorView view = call_.ids;
    view.dtype = DType::f32;
    view.byte_offset += static_cast<uint64_t>(4 * word);
    view.stride = {words * view.stride[0], words * view.stride[1]};
    gather(view, part, dense(Role::ids, word, words * problem_.chosen, words), problem_.chosen,
           false);
  }
  if (call_.grad_logits_at) {
    gather(call_.grad_logits_at, part, dense(Role::chosen, 0, problem_.chosen), problem_.chosen,
           false);
  }
  TokenParams p = token_params(chunk);
  p.chosen = u32(problem_.chosen);
  p.id_words = u32(words);
  const Binding target = targets(chunk, &p);
  const Binding fault = fault_of(&p);
  recorder_.dispatch("chosen_ids", "begin", {}, p,
                     {target, role(Role::ids), role(Role::chosen), role(Role::rows), fault},
                     u32(chunk.tokens));
}

RowParams Run::chosen_params(const Chunk& chunk, const Window& window) const {
  RowParams p = row_params(chunk, window);
  p.chosen = u32(problem_.chosen);
  p.id_words = u32(problem_.id_bytes / 4);
  return p;
}

// Computes the logits of the window's chosen columns and, if no other logits are computed, of the
// targets. The weight and the bias are those of the window's product.
void Run::make_chosen_logits(const Chunk& chunk, const Window& window, Binding weight,
                             const ProductParams& operands, Binding bias) {
  RowParams p = chosen_params(chunk, window);
  p.depth = operands.depth / 4;
  p.weight_first = operands.b_base;
  p.weight_stride = operands.b_stride;
  const bool with_target = problem_.targets_only && call_.target_logit;
  recorder_.dispatch("chosen", "logits",
                     {is_capped(),
                      is_scaled(),
                      own_temperature(),
                      {"has_bias", student_.bias ? 1.0 : 0.0},
                      {"with_target", with_target ? 1.0 : 0.0}},
                     p,
                     {role(Role::counted),
                      ids(),
                      chosen(),
                      extras(),
                      role(Role::hidden),
                      weight,
                      bias,
                      {},
                      role(Role::rows)},
                     blocks(chunk.tokens * (problem_.chosen + (with_target ? 1 : 0)), 64));
}

// Computes the gradients of the window's chosen raw logits, before the block's logits are
// overwritten by gradients.
void Run::make_chosen_gradients(const Chunk& chunk, const Window& window) {
  if (!call_.grad_logits_at) return;
  RowParams p = chosen_params(chunk, window);
  const Binding vocab_weight = vocab_weight_window(window, &p.weight_base);
  recorder_.dispatch("chosen", "gradients", {is_capped(), is_scaled(), own_temperature()}, p,
                     {role(Role::counted),
                      role(Role::ids),
                      role(Role::chosen),
                      extras(),
                      {},
                      {},
                      {},
                      vocab_weight,
                      role(Role::rows),
                      block(window)},
                     blocks(chunk.tokens * problem_.chosen, 64));
}

// Writes the chosen columns' gradients over those in the block.
void Run::put_chosen_gradients(const Chunk& chunk, const Window& window) {
  if (!call_.grad_logits_at) return;
  recorder_.dispatch("chosen", "put", {}, chosen_params(chunk, window),
                     {role(Role::counted),
                      role(Role::ids),
                      role(Role::chosen),
                      {},
                      {},
                      {},
                      {},
                      {},
                      role(Role::rows),
                      block(window)},
                     blocks(chunk.tokens * problem_.chosen, 64));
}

void Run::emit_chosen(const Chunk& chunk) {
  if (!call_.logits_at) return;
  scatter(dense(Role::chosen, 0, problem_.chosen), call_.logits_at,
          {.first_row = chunk.first, .rows = chunk.tokens, .columns = problem_.chosen}, false);
}

}  // namespace logitless::webgpu

// SPDX-License-Identifier: Apache-2.0
// A chunk of tokens: finds which of them count, computes their logits a window at a time, the state
// of their rows, their gradients a window at a time, their losses and statistics.
#include <algorithm>
#include <bit>
#include <iterator>

#include "src/webgpu/cost.h"
#include "src/webgpu/run.h"

namespace logitless::webgpu {
namespace {

// Splits a double into a sum of two floats.
void split(double value, float* high, float* low) {
  *high = static_cast<float>(value);
  *low = static_cast<float>(value - static_cast<double>(*high));
}

}  // namespace

MapFactors factors_of(const LossOptions& o) {
  MapFactors f;
  f.slope = static_cast<float>(static_cast<double>(o.logit_scale) / o.temperature);
  if (!capped(o)) return f;
  // Doubled, because validation keeps twice the factor a normal number: a device may flush a
  // subnormal to 0.
  split(2.0 * o.logit_scale / o.softcap, &f.cap_in, &f.cap_in_low);
  split(static_cast<double>(o.softcap) / o.temperature, &f.cap_out, &f.cap_out_low);
  return f;
}

// Flags for the upstream gradients that are per token.
uint32_t Run::gradient_flags() const {
  const bool each = given("grad_loss") && options_.reduction == Reduction::none;
  return (each ? kHasTokenGrad : 0u) | (given("grad_lse") ? kHasGradLse : 0u) |
         (given("grad_target_logit") ? kHasGradTarget : 0u) |
         (given("grad_entropy") ? kHasGradEntropy : 0u);
}

TokenParams Run::token_params(const Chunk& chunk) const {
  TokenParams p;
  p.tokens = u32(chunk.tokens);
  p.vocab_total = u32(problem_.vocab_total);
  p.vocab_start = u32(options_.vocab_start);
  p.vocab = u32(problem_.vocab);
  p.nan = kNan;
  const auto ignore = static_cast<uint64_t>(options_.ignore_index);
  p.ignore_low = static_cast<uint32_t>(ignore);
  p.ignore_high = static_cast<uint32_t>(ignore >> 32);
  if (!given("target")) p.flags |= kIsSoftmax;
  if (problem_.extras()) p.flags |= kHasExtras;
  if (!problem_.softmax && !call_.forward) p.flags |= kIsBackward | gradient_flags();
  if (given("grad_logits_at")) p.flags |= kHasGradChosen;
  if (problem_.has_vocab_weight) p.flags |= kHasVocabWeight;
  if (given("token_weight")) p.flags |= kHasTokenWeight;
  if (options_.out_of_range == OutOfRange::ignore) p.flags |= kOutsideIsIgnored;
  p.wide = call_["target"].dtype == DType::i64 ? 1 : 0;
  return p;
}

Binding Run::targets(const Chunk& chunk, TokenParams* params) const {
  const TensorView& target = call_["target"];
  if (!target || chunk.tokens == 0) return zeros();
  int64_t base;
  const Binding binding = bound(target, {.first_row = chunk.first, .rows = chunk.tokens}, &base);
  params->base = u32(base * size_of(target.dtype) / 4);
  params->stride = u32(target.stride[0] * size_of(target.dtype) / 4);
  return binding;
}

Binding Run::whole_vocab_weight() const {
  if (!problem_.has_vocab_weight) return zeros();
  if (!problem_.vocab_weight_bound) return role(Role::vocab_weight);
  int64_t base;
  return bound(call_["vocab_weight"], {.rows = problem_.vocab_total}, &base);
}

// The fault's binding, or a spare buffer.
Binding Run::fault_of(TokenParams* params) const {
  if (!given("fault")) return role(Role::spare);
  int64_t base;
  const Binding fault = bound(call_["fault"], {}, &base);
  params->fault = u32(base);
  params->flags |= kHasFault;
  return fault;
}

void Run::begin_chunk(const Chunk& chunk) {
  static constexpr struct {
    const char* name;
    bool of_backward;
  } kInputs[] = {{"token_weight", false},     {"grad_loss", false},  {"row_reference", true},
                 {"row_log_sum", true},       {"entropy", true},     {"grad_lse", true},
                 {"grad_target_logit", true}, {"grad_entropy", true}};
  for (int64_t k = 0; k < 8; ++k) {
    const TensorView& view = call_[kInputs[k].name];
    if (!view || (kInputs[k].of_backward && call_.forward)) continue;
    if (k == 1 && options_.reduction != Reduction::none) continue;
    gather_vector(view, chunk.first, chunk.tokens, dense(Role::inputs, k, 8));
  }
  begin_chosen(chunk);
  TokenParams params = token_params(chunk);
  const Binding target = targets(chunk, &params);
  const Binding fault = fault_of(&params);
  recorder_.dispatch("tokens", problem_.direct ? "each" : "chunk", {}, params,
                     {target,
                      whole_vocab_weight(),
                      role(Role::inputs),
                      role(Role::rows),
                      role(Role::counted),
                      fault,
                      {},
                      {},
                      {},
                      written_extras(),
                      role(Role::scalars)},
                     problem_.direct ? blocks(chunk.tokens, 256) : 1);
  begin_head(chunk, student_);
  if (problem_.direct) copy_logits(chunk);
}

// Prepares a head's logits: the factors of temperatures per token, and the rows of its input.
void Run::begin_head(const Chunk& chunk, const Head& head) {
  scale_chunk(chunk, head);
  if (!head.is_head) return;
  const int64_t hidden = round_up(head.hidden, 4);
  gather(head.input, {.first_row = chunk.first, .rows = chunk.tokens, .columns = head.hidden},
         dense(head.hidden_rows, 0, hidden), hidden, true);
}

// Computes the factors of temperatures per token, if there are any.
void Run::scale_chunk(const Chunk& chunk, const Head& head) {
  const TensorView& view = head.temperature;
  if (chunk.tokens == 0 || !view) return;
  int64_t base;
  const Binding temperatures = bound(view, {.first_row = chunk.first, .rows = chunk.tokens}, &base);
  TemperatureParams p{
      .tokens = u32(chunk.tokens),
      .base = u32(base),
      .stride = u32(view.stride[0]),
      .logit_scale = std::bit_cast<uint32_t>(head.options.logit_scale),
      .softcap = capped(head.options) ? std::bit_cast<uint32_t>(head.options.softcap) : 0,
      .of_all = plan_.plain ? 1u : 0u,
      .has_fault = given("fault") ? 1u : 0u,
      .nan = kNan};
  Binding fault = role(Role::spare);
  if (given("fault")) {
    fault = bound(call_["fault"], {}, &base);
    p.fault = u32(base);
  }
  recorder_.dispatch(
      "temperature", "scale", {}, p,
      {temperatures, plan_.plain ? zeros() : role(Role::rows), role(head.extras), fault},
      blocks(chunk.tokens, 256));
}

RowParams Run::row_params(const Chunk& chunk, const Window& window, const Head& head) const {
  RowParams p;
  p.rows = u32(chunk.tokens);
  p.columns = u32(window.columns);
  p.row_stride = u32(plan_.window);
  p.first_column = u32(window.first);
  p.slots = u32(plan_.slots);
  p.nan = kNan;
  p.slope = head.factors.slope;
  p.cap_in = head.factors.cap_in;
  p.cap_in_low = head.factors.cap_in_low;
  p.cap_out = head.factors.cap_out;
  p.cap_out_low = head.factors.cap_out_low;
  p.smoothing = options_.label_smoothing;
  p.smoothing_per_class =
      static_cast<float>(static_cast<double>(options_.label_smoothing) /
                         static_cast<double>(std::max<int64_t>(problem_.vocab_total, 1)));
  p.z_loss = options_.z_loss;
  p.floor = options_.probability_floor;
  p.classes = static_cast<float>(problem_.vocab_total);
  p.flags = gradient_flags();
  const bool backward = !call_.forward;
  const auto flag = [&](bool is, uint32_t bit) { p.flags |= is ? bit : 0; };
  flag(problem_.has_vocab_weight, kHasVocabWeight);
  flag(problem_.state_given, kHasState);
  flag(backward && given("entropy"), kHasEntropy);
  flag(problem_.softmax || problem_.diverges, kIsSoftmax);  // no loss of this head alone
  flag(problem_.gradients, kWantsGradient);
  return p;
}

Binding Run::block(const Window& window, Role role) const {
  const uint64_t offset =
      plan_.whole ? static_cast<uint64_t>(window.index) * plan_.window_bytes : 0;
  return {workspace_[role], offset, plan_.window_bytes};
}

const TensorView& Run::result() const {
  return call_[problem_.softmax ? "probabilities" : "grad_logits"];
}

// Copies the chunk's logits to the memory of the result.
void Run::copy_logits(const Chunk& chunk) {
  const TensorView &in = call_["logits"], &out = result();
  if (in.data == out.data || chunk.tokens == 0) return;
  int64_t base;
  const Binding all = bound(out, {.rows = out.shape[0], .columns = out.shape[1]}, &base);
  const Dense rows{all.buffer, all.offset + all.bytes,
                   static_cast<int64_t>(out.byte_offset / 4) + chunk.first * out.stride[0],
                   out.stride[0], 1};
  gather(in, {.first_row = chunk.first, .rows = chunk.tokens, .columns = problem_.vocab}, rows,
         problem_.vocab, false);
}

Binding Run::block(const Chunk& chunk, const Window& window, RowParams* params) const {
  if (!problem_.direct) return block(window);
  int64_t base;
  const Binding binding = bound(result(),
                                {.first_row = chunk.first,
                                 .rows = chunk.tokens,
                                 .first_column = window.first,
                                 .columns = window.columns},
                                &base);
  params->base = u32(base);
  params->row_stride = u32(result().stride[0]);
  return binding;
}

// The class weights of the window's columns; *base becomes the first one's offset in the binding.
Binding Run::vocab_weight_window(const Window& window, uint32_t* base) const {
  *base = 0;
  if (!problem_.has_vocab_weight) return zeros();
  const Binding whole = whole_vocab_weight();
  const int64_t first = problem_.vocab_total > problem_.vocab ? options_.vocab_start : 0;
  *base = u32(first + window.first);
  return whole;
}

void Run::product(const ProductParams& params, const ProductKind& kind, Binding a, Binding b,
                  Binding result, Binding bias) {
  const Tile tile = tile_of(params.rows, params.columns, params.depth, kind.b_transposed);
  ProductParams p = params;
  p.slice_depth = blocks(params.depth, 16 * kind.slices) * 16;
  const auto with = [&](std::initializer_list<Constant> constants) {
    const char* name = tile.small ? "product_small" : "product";
    recorder_.dispatch(name, name, constants, p, {a, b, result, role(Role::counted), bias},
                       blocks(params.columns, tile.n), blocks(params.rows, tile.m),
                       u32(kind.slices));
  };
  const Constant a_transposed{"a_transposed", kind.a_transposed ? 1.0 : 0.0},
      b_transposed{"b_transposed", kind.b_transposed ? 1.0 : 0.0},
      has_bias{"has_bias", kind.has_bias ? 1.0 : 0.0},
      bounded{"bounded", static_cast<double>(kind.bounded)};
  if (tile.small) return with({a_transposed, b_transposed, has_bias, bounded});
  with({a_transposed,
        b_transposed,
        has_bias,
        bounded,
        {"tile_m", static_cast<double>(tile.m)},
        {"tile_n", static_cast<double>(tile.n)},
        {"threads", static_cast<double>(tile.threads())}});
}

// The weight's rows of a window, [columns, D] with D rounded up to 4, in the view itself or copied.
Binding Run::weight_window(const Window& window, const Head& head, uint32_t* base,
                           uint32_t* stride) {
  const Part part{.first_row = window.first, .rows = window.columns, .columns = head.hidden};
  const int64_t hidden = round_up(head.hidden, 4);
  if (!head.weight_bound) {
    gather(head.weight, part, dense(Role::weight, 0, hidden), hidden, false);
    *base = 0;
    *stride = u32(hidden / 4);
    return role(Role::weight);
  }
  int64_t first;
  const Binding binding = bound(head.weight, part, &first);
  *base = u32(first / 4);
  *stride = u32(head.weight.stride[0] / 4);
  return binding;
}

void Run::make_logits(const Chunk& chunk, const Window& window, const Head& head) {
  if (problem_.direct) return;
  const int64_t padded = round_up(window.columns, 4);
  if (!head.is_head) {
    gather(
        head.logits,
        {.first_row = chunk.first,
         .rows = chunk.tokens,
         .first_column = window.first,
         .columns = window.columns},
        dense(head.block, static_cast<int64_t>(block(window, head.block).offset / 4), plan_.window),
        padded, true);
    return;
  }
  const auto hidden = u32(round_up(head.hidden, 4));
  ProductParams p{.rows = u32(chunk.tokens),
                  .columns = u32(padded),
                  .depth = hidden,
                  .a_stride = hidden / 4,
                  .result_base = u32((window.first - window.index * plan_.window) / 4),
                  .result_stride = u32(plan_.window / 4),
                  .b_rows = u32(window.columns)};
  const Binding weight = weight_window(window, head, &p.b_base, &p.b_stride);
  Binding bias = zeros();
  const bool has_bias = static_cast<bool>(head.bias);
  if (has_bias) {
    // Windows, and the rest of a window after its kept columns, start at multiples of 64 columns,
    // which are multiples of a binding's alignment.
    int64_t base;
    bias = head.bias_bound
               ? bound(head.bias, {.first_row = window.first, .rows = window.columns}, &base)
               : Binding{workspace_[head.bias_copy], static_cast<uint64_t>(window.first) * 4,
                         static_cast<uint64_t>(window.columns) * 4};
  }
  if (call_.forward && (call_.ids || problem_.targets_only)) {
    make_chosen_logits(chunk, window, weight, p, bias);
  }
  if (problem_.targets_only) return;
  product(p, {.b_transposed = true, .has_bias = has_bias, .bounded = 1}, role(head.hidden_rows),
          weight, block(window, head.block), bias);
}

void Run::make_partials(const Chunk& chunk, const Window& window, const Head& head) {
  RowParams p = row_params(chunk, window, head);
  const Binding vocab_weight = vocab_weight_window(window, &p.weight_base);
  if (chunk.tokens == 0) return;
  const Binding logits = problem_.direct ? block(chunk, window, &p) : block(window, head.block);
  const Binding counted = role(Role::counted), rows = role(head.rows),
                partials = role(Role::partials);
  const uint32_t groups = blocks(window.columns, kSlotColumns);
  if (problem_.probabilities) {
    recorder_.dispatch("probabilities", "slots", {direct()}, p,
                       {logits, counted, vocab_weight, rows, partials}, groups, p.rows);
  } else {
    recorder_.dispatch(
        "slots", "slots",
        {is_capped(head), is_scaled(head), own_temperature(head), direct(), more_statistics()}, p,
        {logits, counted, vocab_weight, rows, partials, extras(head)}, groups, p.rows);
  }
}

// One kernel does the work of slots, combine and gradient.
void Run::make_rows(const Chunk& chunk) {
  if (chunk.tokens == 0) return;
  const Window window = window_of(0);
  RowParams p = row_params(chunk, window);
  const Binding vocab_weight = vocab_weight_window(window, &p.weight_base);
  const Binding logits = block(chunk, window, &p);
  // A thread holds 16 columns, which decides how many threads a row takes.
  const int leaders = window.columns <= 256 ? 4 : window.columns <= 1024 ? 8 : 16;
  const int threads = leaders * leaders;
  recorder_.dispatch("row", "row",
                     {is_capped(),
                      is_scaled(),
                      own_temperature(),
                      more_statistics(),
                      {"row_threads", 1.0 * threads},
                      {"leaders", 1.0 * leaders}},
                     p,
                     {vocab_weight, role(Role::rows), role(Role::inputs), role(Role::scalars),
                      logits, written_extras()},
                     blocks(chunk.tokens, 256 / threads));
}

void Run::make_plain(const Chunk& chunk) {
  if (chunk.tokens == 0) return;
  scale_chunk(chunk, student_);
  copy_logits(chunk);
  TokenParams token = token_params(chunk);
  const Binding target = targets(chunk, &token);
  RowParams row = row_params(chunk, window_of(0));
  const Binding logits = block(chunk, window_of(0), &row);
  const PlainParams p{.rows = row.rows,
                      .columns = row.columns,
                      .row_stride = row.row_stride,
                      .base = row.base,
                      .target_base = token.base,
                      .target_stride = token.stride,
                      .wide = token.wide,
                      .ignore_low = token.ignore_low,
                      .ignore_high = token.ignore_high,
                      .flags = token.flags | (problem_.reduces ? kHasLoss : 0u),
                      .nan = kNan,
                      .slope = row.slope,
                      .z_loss = row.z_loss};
  // Rows per workgroup.
  const int64_t rows = row.columns <= 256 ? 16 : row.columns <= 1024 ? 4 : 1;
  const uint32_t groups = blocks(chunk.tokens, rows);
  // For an absent output, any buffer that this dispatch does not bind otherwise.
  const Binding losses = role(problem_.reduces ? Role::losses : Role::more_sums);
  const uint32_t wide = device_->limits().groups;
  recorder_.dispatch("plain", "plain", {is_scaled(), own_temperature()}, p,
                     {target, role(Role::scalars), losses, logits, extras()},
                     std::min(groups, wide), blocks(groups, wide));
  if (problem_.reduces) sum_losses(chunk);
}

// Folds the tokens' states of each shard, shard after shard.
void Run::fold_shards(const Chunk& chunk) {
  const auto of_shard = [&](std::string_view name, int64_t shard) {
    TensorView row = call_[name];
    if (!row) return row;
    row.byte_offset += static_cast<uint64_t>(shard * row.stride[0] * size_of(row.dtype));
    row.rank = 1;
    row.shape = {row.shape[1], 0};
    row.stride = {row.stride[1], 0};
    return row;
  };
  for (int64_t shard = 0; shard < call_.shards() && chunk.tokens > 0; ++shard) {
    int64_t word = 0;
    for (const std::string_view name : kFoldInputs) {
      const Dense to = dense(Role::partials, word++, kFoldWords);
      if (const TensorView row = of_shard(name, shard)) {
        gather_vector(row, chunk.first, chunk.tokens, to);
      }
    }
    FoldParams p{.is_first = shard == 0 ? 1u : 0u, .nan = kNan};
    Binding argmax = zeros();
    if (const TensorView row = of_shard("shard_argmax", shard)) {
      int64_t base;
      argmax = bound(row, {.first_row = chunk.first, .rows = chunk.tokens}, &base);
      const int64_t words = size_of(row.dtype) / 4;
      p.argmax_base = u32(base * words);
      p.argmax_stride = u32(row.stride[0] * words);
      p.has_argmax = 1;
    }
    recorder_.dispatch(
        "fold", "fold", {more_statistics()}, p,
        {role(Role::counted), role(Role::partials), role(Role::rows), written_extras(), argmax},
        blocks(chunk.tokens, 64));
  }
}

void Run::combine(const Chunk& chunk, const Head& head) {
  const RowParams p = row_params(chunk, {}, head);
  const Binding counted = role(Role::counted), partials = role(Role::partials),
                rows = role(head.rows), inputs = role(Role::inputs), scalars = role(Role::scalars);
  const uint32_t groups = blocks(chunk.tokens, 64);
  if (problem_.probabilities) {
    recorder_.dispatch("probabilities", "combine", {direct()}, p,
                       {{}, counted, {}, {}, {}, partials, rows, inputs, scalars}, groups);
  } else {
    const Constant folded{"folded", problem_.combines ? 1.0 : 0.0};
    recorder_.dispatch("combine", "combine",
                       {direct(), more_statistics(), folded, is_capped(head), is_scaled(head),
                        own_temperature(head)},
                       p, {counted, partials, rows, inputs, scalars, written_extras()}, groups);
  }
}

void Run::add_ranks(const Chunk& chunk, const Window& window) {
  if (chunk.tokens == 0) return;
  RowParams p = row_params(chunk, window);
  const Binding logits = block(chunk, window, &p);
  recorder_.dispatch("rank", "rank", {is_capped(), is_scaled(), own_temperature(), direct()}, p,
                     {logits, role(Role::counted), {}, role(Role::rows), written_extras()}, p.rows);
}

void Run::make_gradients(const Chunk& chunk, const Window& window) {
  RowParams p = row_params(chunk, window);
  const Binding vocab_weight = vocab_weight_window(window, &p.weight_base);
  make_chosen_gradients(chunk, window);
  if (chunk.tokens > 0) {
    const Binding logits = block(chunk, window, &p);
    const Binding counted = role(Role::counted), rows = role(Role::rows);
    const uint32_t groups = blocks(window.columns, kSlotColumns);
    if (problem_.probabilities) {
      recorder_.dispatch("probabilities", "gradient", {direct()}, p,
                         {{}, counted, vocab_weight, rows, {}, {}, {}, {}, {}, logits}, groups,
                         p.rows);
    } else {
      recorder_.dispatch("gradient", "gradient",
                         {is_capped(), is_scaled(), own_temperature(), direct()}, p,
                         {counted, vocab_weight, rows, logits, extras()}, groups, p.rows);
    }
  }
  put_chosen_gradients(chunk, window);
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

// Computes grad_input += draw . weight, grad_weight += draw^T . hidden and grad_bias += column sums
// of draw.
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
                    .adds = window.index > 0 ? 1u : 0u,
                    .block_depth = 32};
    const Binding weight = weight_window(window, student_, &p.b_base, &p.b_stride);
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
                    // Chunks divide the depth already, so blocks of the depth need not be short.
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

// Each slice of the window's columns has its own sum; the sums are added afterwards.
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

void Run::emit(const Chunk& chunk, const TensorView& view, Word word, Emit kind, int64_t first) {
  if (!view || chunk.tokens == 0) return;
  TokenParams p = token_params(chunk);
  int64_t base;
  const Binding result = bound(view, {.first_row = first, .rows = chunk.tokens}, &base);
  const int64_t words = size_of(view.dtype) / 4;
  p.base = u32(base * words);
  p.stride = u32(view.stride[0] * words);
  p.word = word.at;
  p.row_words = word.of == Role::extras ? kExtraWords : kStateWords;
  p.kind = static_cast<uint32_t>(kind) + (view.dtype == DType::i64 ? 1 : 0);
  recorder_.dispatch("tokens", "emit", {}, p, {{}, {}, {}, {}, {}, {}, {}, role(word.of), result},
                     blocks(chunk.tokens, 256));
}

void Run::emit_outputs(const Chunk& chunk) {
  if (!call_.forward) return;
  for_each_asked(call_, [&](const TensorView& view, Word word, Emit kind) {
    emit(chunk, view, word, kind, chunk.first);
  });
  emit_chosen(chunk);
  const TensorView& loss = call_["loss"];
  if (!loss) return;
  if (!problem_.reduces) {
    emit(chunk, loss, StateWord::loss, Emit::word, chunk.first);
    return;
  }
  if (chunk.tokens == 0) return;
  TensorView losses{.data = reinterpret_cast<void*>(workspace_[Role::losses]), .rank = 1};
  losses.shape = {chunk.tokens, 0};
  losses.stride = {1, 0};
  emit(chunk, losses, StateWord::loss, Emit::word, 0);
  sum_losses(chunk);
}

void Run::emit_grad_input(const Chunk& chunk) {
  if (!problem_.wants_grad_input) return;
  scatter(dense(Role::grad_hidden, 0, round_up(problem_.hidden, 4)), call_["grad_input"],
          {.first_row = chunk.first, .rows = chunk.tokens, .columns = problem_.hidden}, true);
}

void Run::sum_losses(const Chunk& chunk) {
  const uint32_t groups = blocks(chunk.tokens, kValuesOfASum);
  recorder_.dispatch("sum", "tree", {},
                     SumParams{.count = u32(chunk.tokens), .result_base = u32(sums_)},
                     {role(Role::losses), role(Role::sums)}, groups);
  sums_ += groups;
}

}  // namespace logitless::webgpu

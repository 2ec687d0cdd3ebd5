// SPDX-License-Identifier: Apache-2.0
// The plans of a linear op whose products are cuBLASLt's, and the time of each.
#include <algorithm>
#include <cmath>

#include "src/cuda/linear/plan_search.h"
#include "src/cuda/linear/plan_time.h"
#include "src/cuda/linear/portable/engine.h"
#include "src/cuda/linear/portable/kernels.h"

namespace logitless::cuda {
namespace {

constexpr int64_t least_chunk = 128;
// Room for the rows after a chunk's: two for the smoothing's term, and zeros up to the next
// multiple of 8.
constexpr int64_t extra_rows = 16;
// Bounds of a block of logits, in bytes. Larger blocks save pairs of launches, about 5 us each
// outside CUDA graphs. Much smaller ones would stay in the L2 cache, which saves less time than
// their launches take (docs/experiments/2026-11-portable-blocks.md).
constexpr int64_t most_block = int64_t{128} << 20, least_block = int64_t{1} << 20;

// Whether the depth of grad_input's product of `rows` rows can be split: the block of logits must
// hold the parts' sums, each as large as the result. If logits are computed too, their pass decides
// the size of the block.
bool has_room_for_parts(const LinearShape& s, const LinearPlan& p, int64_t rows) {
  const bool whole = p.stored_columns == s.vocab || s.kernels.kept == Origin::dz_in_panels;
  return s.kept_columns == s.vocab && whole && lends_block(s, p) &&
         rows * s.hidden_pitch() <= p.block_rows * p.block_columns;
}

// The time of the product that computes the logits of `rows` tokens and `columns` columns, and of
// the pass over them, unless it is `fused` with the product.
double pass_time(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed, int64_t rows,
                 int64_t columns, bool stores, bool fused) {
  const double element = static_cast<double>(size_of(s.dtype));
  if (fused && s.listed == 0) return product_time(s, speed, rows, columns, s.hidden, false);
  return in_pieces(rows, p.block_rows, [&](int64_t block_rows) {
    const double logits = static_cast<double>(block_rows) * static_cast<double>(columns);
    const auto blocks = static_cast<double>(divide_up(columns, p.block_columns));
    const double product =
        product_time(s, speed, block_rows, std::min(columns, p.block_columns), s.hidden, false);
    const bool has_tail = !s.on_cuda_cores && columns % 8 > 0;
    const double tail = has_tail ? product_time(s, speed, block_rows, 8, s.hidden, false) : 0;
    return blocks * (product + speed.launch) + tail +
           logits * (8 / (1.5 * speed.memory) + (stores ? element / speed.memory : 0)) +
           (s.listed > 0 ? blocks * speed.launch + logits * 4 / (1.5 * speed.memory) : 0);
  });
}

// Completes a plan, except for its time.
LinearPlan finish(const LinearShape& s, LinearPlan p) {
  settle(s, &p);
  p.bytes = bytes_of(PortableEngine(), s, p);
  return p;
}

void add_rows(int64_t behind, LinearPlan* p) {
  p->extra_rows = behind;
  p->panel_rows = p->token_chunk + behind;
}

// Nearly equal chunks of at most `most` tokens: 513 tokens by 512 are 264 and 249.
LinearPlan chunked(const LinearShape& s, int64_t most, bool fuses) {
  const int64_t tokens = std::max<int64_t>(s.tokens, 1);
  LinearPlan p;
  p.token_chunk = round_up(divide_up(tokens, divide_up(tokens, most)), 8);
  p.chunks = divide_up(tokens, p.token_chunk);
  add_rows(extra_rows, &p);
  p.segments = divide_up(s.vocab, fuses ? fused_columns : segment_columns);
  return p;
}

// Considers the plans of this chunk and block in which columns are computed again, by the width of
// their panels.
template <class F>
void each_width(const LinearShape& s, uint64_t bytes, LinearPlan p, F&& consider) {
  for (const int64_t width : panel_widths) {
    p.stored_columns = 0;
    p.remade_columns = width * p.block_columns;
    consider(finish(s, p));
    if (!s.can_keep()) continue;
    const int64_t column_bytes = p.panel_rows * size_of(s.dtype) +
                                 (s.grad_bias ? divide_up(p.panel_rows, bias_slab_rows) * 4 : 0);
    const LinearPlan mixed = largest_share(s, bytes, segment_columns, segment_columns, column_bytes,
                                           [&](int64_t columns) {
                                             p.stored_columns = columns;
                                             return finish(s, p);
                                           });
    if (mixed.bytes > 0) consider(mixed);
  }
}

// Considers the plans with E of all tokens in the caller's memory: read by Backward's products in a
// single chunk, or written by Forward a chunk at a time.
void each_of_kept(const LinearShape& s, LinearPlan p,
                  const std::function<void(const LinearPlan&)>& consider) {
  add_rows(rows_behind(s), &p);
  for (int64_t block = most_block; block >= least_block; block /= 2) {
    set_block(s, block, &p);
    p.stored_columns = s.kernels.kept == Origin::dz_in_panels ? 0 : s.kept_columns;
    if (!s.gradients() || p.stored_columns == s.vocab) {
      consider(finish(s, p));
      continue;
    }
    for (const int64_t width : panel_widths) {
      p.remade_columns = width * p.block_columns;
      consider(finish(s, p));
    }
  }
}

}  // namespace

double product_time(const LinearShape& s, const DeviceSpeed& speed, int64_t rows, int64_t columns,
                    int64_t depth, bool sums, bool may_split) {
  const double rate = s.dtype == DType::f32 ? speed.products_f32 : speed.products;
  const double element = static_cast<double>(size_of(s.dtype));
  const double r = static_cast<double>(rows), c = static_cast<double>(columns),
               d = static_cast<double>(depth);
  const double tiles = static_cast<double>(divide_up(rows, 128) * divide_up(columns, 256));
  const double full = tiles / speed.multiprocessors;
  const bool splits = may_split && full < 0.9 * std::ceil(full);
  const double waves = splits ? full : std::ceil(full);
  const double arithmetic = waves * speed.multiprocessors * 128 * 256 * 2 * d / rate;
  const double moved = (r + c) * d * element + r * c * (sums ? 8 : element);
  // Half of the traffic of a result that is read and written in f32 is not hidden by arithmetic.
  const double shown = sums ? r * c * 8 / speed.memory / 2 : 0;
  return std::max(arithmetic + shown, moved / speed.memory) + speed.launch;
}

double PortableEngine::seconds(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed,
                               const Step& step) const {
  const int64_t columns = step.panel.columns, n = step.tokens.count;
  switch (step.kind) {
    case StepKind::logits:
      return pass_time(s, p, speed, n, columns, is_kept(step.panel.origin), fuses());
    case StepKind::remake:
      return pass_time(s, p, speed, n, columns, true, fuses() && step.of_e()) + 4 * speed.launch;
    case StepKind::form_dz:
    case StepKind::form_panel:
      return static_cast<double>(columns * n * size_of(s.dtype)) * 2 / speed.memory +
             2 * speed.launch;
    case StepKind::grad_weight:
      return product_time(s, speed, std::min(columns, s.rows_of_weight()), s.hidden, n,
                          adds_to_weight(s, p));
    case StepKind::grad_input:
      return product_time(s, speed, step.rows.count, s.hidden, columns, true,
                          has_room_for_parts(s, p, step.rows.count));
    default:
      return shared_step_time(s, p, speed, step);
  }
}

void PortableEngine::each_plan(const LinearShape& s, const DeviceSpeed&, uint64_t bytes,
                               const std::function<void(const LinearPlan&)>& consider) const {
  for (int64_t most = round_up(std::max<int64_t>(s.tokens, 1), 8);;
       most = std::max(most / 2, least_chunk)) {
    LinearPlan p = chunked(s, most, fuses());
    if (s.kept_columns > 0) {
      each_of_kept(s, p, consider);
      if (s.gradients() || most <= least_chunk) return;
      continue;
    }
    for (int64_t block = most_block; block >= least_block; block /= 2) {
      set_block(s, block, &p);
      p.stored_columns = s.gradients() && s.can_keep() ? s.vocab : 0;
      if (!s.gradients() || s.can_keep()) consider(finish(s, p));
      if (s.gradients()) each_width(s, bytes, p, consider);
    }
    if (most <= least_chunk || s.targets_only) break;
  }
}

}  // namespace logitless::cuda

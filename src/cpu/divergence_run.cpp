// SPDX-License-Identifier: Apache-2.0
// The divergences of two heads on the CPU. A chunk's logits of both heads are in the workspace,
// [heads][tile][chunk][192]: the first pass computes the logits and both lse, the second sums over
// their columns, the third computes the gradient. docs/semantics.md has the formulas,
// docs/kernels/cpu.md the schedule and measurements. Forward may keep, for compacted tokens, the
// gradient of the raw logits for an upstream gradient of 1, each row divided by a power of two that
// its row of kept_rows records:
//   kept  [tile][rows (kept.h)][192]  in the input's dtype, the last tile of fewer blocks of 64
#include <cmath>
#include <limits>

#include "src/cpu/divergence_kernels.h"
#include "src/cpu/linear_products.h"
#include "src/cpu/logit_rows.h"
#include "src/cpu/ops.h"
#include "src/row/divergence.h"

namespace logitless::cpu {
namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

// Kept elements are scaled so that the usual maximum is this; f16 ends at 65504.
constexpr double kept_size = 16384;

DivergenceTerms terms_of(const DivergenceOptions& o) {
  return {effective_kind(o), o.beta, 1 - o.beta, o.label_weight};
}

class DivergenceRun : public LinearProducts {
 public:
  DivergenceRun(const Call& call, const LinearShape& shape, const LinearPlan& plan, char* memory)
      : LinearProducts(call, shape, plan, memory),
        terms_(terms_of(call.divergence)),
        map_(logit_map(call.options)),
        teacher_map_(logit_map(call.teacher_options())) {
    const bool has_mean = terms_.kind != DivergenceKind::forward_kl;
    const bool makes_dz = (call.gradients && !call.state_given()) || call.kept;
    wants_ = {.value = call.forward && (call.loss || call.kept || call.divergence_sum),
              .mean = has_mean && (makes_dz || call.slope_sum),
              .acceptance = call.forward && call.acceptance};
  }

  // Runs the chunk of compacted tokens [first, first + count).
  void run_chunk(const Tokens& tokens, int64_t first, int64_t count);
  // Writes the loss, and the statistics of tokens that do not count.
  void write_loss(const Tokens& tokens) const;
  // Sets `fault` where a row's kept state is not of this layout and number of columns.
  void check_kept(const Tokens& tokens) const;

 private:
  enum Head { student, teacher };
  LogitMap map_of(int64_t n) const { return cpu::map_of(map_, *tokens_, first_ + n); }
  LogitMap teacher_map_of(int64_t n) const {
    return cpu::map_of(teacher_map_, tokens_->teacher_temperature, tokens_->row[first_ + n]);
  }
  // [chunk][vocab_tile]
  float* logits(Head head, int64_t tile) const {
    const int64_t tiles = head * plan_.vocab_tiles + tile;
    return at<float>(plan_.logits_at) + tiles * plan_.token_chunk * vocab_tile;
  }
  // [vocab_tiles][chunk]
  BlockState* blocks(Head head) const {
    return at<BlockState>(plan_.blocks_at) + head * plan_.vocab_tiles * plan_.token_chunk;
  }
  RowState* states(Head head) const {  // [chunk]
    return at<RowState>(plan_.states_at) + head * plan_.token_chunk;
  }
  DivergenceRow* rows() const { return at<DivergenceRow>(plan_.gradients_at); }  // [chunk]
  DivergenceSums* sums() const {
    return at<DivergenceSums>(plan_.sums_at);
  }  // [vocab_tiles][chunk]
  float* losses() const { return at<float>(plan_.losses_at); }  // [N]
  PackedInput packed_teacher() const {
    return {at<char>(plan_.teacher_along_at), shape_.teacher_hidden, plan_.padded_teacher};
  }
  SumSet sums_of(Head head) const;
  // Returns the target of the chunk's n-th token as a column of the tile; outside of [0, width) if
  // another tile has it.
  int64_t target_of(int64_t tile, int64_t n) const {
    const int64_t target = tokens_->target[first_ + n];
    return target < 0 ? -1 : target - tile * vocab_tile;
  }
  bool is_its(const KeptRow& row) const {
    return row.layout == divergence_layout && row.columns == static_cast<float>(kept_);
  }
  void load_teacher(int64_t tile, float* t) const;
  void sum_logits(Head head, int64_t tile, const TensorView& bias, const Lane& lane) const;
  void make_logits();
  RowState state_of(Head head, int64_t n) const;
  void begin_rows();
  void sum_columns();
  void finish_row(int64_t n) const;
  // Writes a token's outputs other than its loss: all 0 for {}, {}, {}.
  void put_outputs(int64_t i, const RowState& own, const RowState& teachers,
                   const DivergenceSums& row) const;
  void write_statistics(int64_t n, const DivergenceSums& row) const;
  void keep_gradients() const;
  void kept_row_of(int64_t tile, int64_t n, float* row) const;
  DivergenceScale scale_of(int64_t n) const;

  DivergenceTerms terms_;
  LogitMap map_, teacher_map_;
  DivergenceWants wants_;
};

SumSet DivergenceRun::sums_of(Head head) const {
  const TensorView& entropy = head == student ? call_.entropy : call_.teacher_entropy;
  return call_.forward && entropy ? SumKind::exponentials | SumKind::shifted
                                  : SumSet(SumKind::exponentials);
}

// Loads a tile of the given logits, [count][vocab_tile].
void DivergenceRun::load_teacher(int64_t tile, float* t) const {
  for (int64_t n = 0; n < count_; n += most_rows) {
    const RowGroup group{tokens_->row + first_ + n, nullptr, std::min(most_rows, count_ - n)};
    load_group(call_.teacher_logits, group, tile * vocab_tile, tile_width(tile), t + n * vocab_tile,
               vocab_tile);
  }
}

void DivergenceRun::sum_logits(Head head, int64_t tile, const TensorView& bias,
                               const Lane& lane) const {
  const int64_t width = tile_width(tile);
  if (bias) load_vector(bias, tile * vocab_tile, width, lane.bias);
  const BlockWants wants{sums_of(head)};
  for (int64_t n = 0; n < count_; ++n) {
    float* row = logits(head, tile) + n * vocab_tile;
    forward_block(head == student ? map_of(n) : teacher_map_of(n), row, bias ? lane.bias : nullptr,
                  nullptr, width, wants, blocks(head) + tile * plan_.token_chunk + n);
    const int64_t target = target_of(tile, n);
    if (head == student && target >= 0 && target < width) {
      states(student)[n].target_logit = row[target];
    }
  }
}

void DivergenceRun::make_logits() {
  for_each_task(executor_, plan_.lanes, plan_.vocab_tiles, [&](int64_t tile, int64_t index) {
    const Lane lane = this->lane(index);
    const int64_t first = tile * vocab_tile, width = tile_width(tile);
    multiply_input(packed_input(), 0, count_, source_of(call_.weight, nullptr), first, width, lane,
                   logits(student, tile));
    sum_logits(student, tile, call_.bias, lane);
    if (call_.teacher_is_head()) {
      multiply_input(packed_teacher(), 0, count_, source_of(call_.teacher_weight, nullptr), first,
                     width, lane, logits(teacher, tile));
    } else {
      load_teacher(tile, logits(teacher, tile));
    }
    sum_logits(teacher, tile, call_.teacher_bias, lane);
  });
}

RowState DivergenceRun::state_of(Head head, int64_t n) const {
  if (call_.state_given()) {
    const int64_t i = tokens_->row[first_ + n];
    const bool own = head == student;
    return {.reference = f32_at(own ? call_.row_reference : call_.teacher_row_reference, i),
            .log_sum = f32_at(own ? call_.row_log_sum : call_.teacher_row_log_sum, i)};
  }
  const SumSet wants = sums_of(head);
  RowState state = sum_of_tiles(n, blocks(head), nullptr, wants).finish(wants);
  state.target_logit = states(head)[n].target_logit;
  return state;
}

// Computes both heads' row states from the tiles' sums, or reads the given ones.
void DivergenceRun::begin_rows() {
  for_each_token([&](int64_t n) {
    RowState state[2];
    for (const Head head : {student, teacher}) states(head)[n] = state[head] = state_of(head, n);
    const RowState &z = state[student], &t = state[teacher];
    const float apart = (z.reference - t.reference) + (z.log_sum - t.log_sum);
    rows()[n] = {z.reference, z.log_sum, t.reference, t.log_sum, apart};
  });
}

void DivergenceRun::sum_columns() {
  if (wants_.value || wants_.mean || wants_.acceptance) {
    for_each_task(executor_, plan_.lanes, plan_.vocab_tiles, [&](int64_t tile, int64_t) {
      const float *z = logits(student, tile), *t = logits(teacher, tile);
      for (int64_t n = 0; n < count_; ++n) {
        sums()[tile * plan_.token_chunk + n] = divergence_block(
            terms_, rows()[n], z + n * vocab_tile, t + n * vocab_tile, tile_width(tile), wants_);
      }
    });
  }
  for_each_token([&](int64_t n) { finish_row(n); });
}

void DivergenceRun::finish_row(int64_t n) const {
  double value = 0, mean = 0, acceptance = 0;
  for (int64_t tile = 0; tile < plan_.vocab_tiles; ++tile) {
    const DivergenceSums& block = sums()[tile * plan_.token_chunk + n];
    value += wants_.value ? block.value : 0;
    mean += wants_.mean ? block.mean : 0;
    acceptance += wants_.acceptance ? block.acceptance : 0;
  }
  DivergenceRow& row = rows()[n];
  if (call_.slope_mean && terms_.kind != DivergenceKind::forward_kl) {
    mean = f32_at(call_.slope_mean, tokens_->row[first_ + n]);
  }
  row.mean = std::isfinite(mean) ? static_cast<float>(mean) : nan_value;
  // skew_kl with beta = 1 compares the teacher with itself, so the value is 0.
  if (terms_.kind == DivergenceKind::skew_kl && terms_.rest == 0 && !std::isnan(value)) value = 0;
  // A sum of logarithms may have lost the row's NaN.
  if (std::isnan(row.apart)) value = acceptance = row.mean = nan_value;
  if (call_.forward) {
    write_statistics(n, {static_cast<float>(value), row.mean, static_cast<float>(acceptance)});
  }
}

void DivergenceRun::put_outputs(int64_t i, const RowState& own, const RowState& teachers,
                                const DivergenceSums& row) const {
  const auto put = [&](const TensorView& view, float value) {
    if (view) write_f32(view, i, value);
  };
  put(call_.entropy, own.entropy);
  put(call_.teacher_entropy, teachers.entropy);
  put(call_.acceptance, row.acceptance);
  put(call_.logprob, own.logprob());
  put(call_.divergence_sum, row.value);
  put(call_.slope_sum, row.mean);
  put(call_.target_logit, own.target_logit);
  if (call_.state_given()) return;  // the states are inputs
  put(call_.row_reference, own.reference);
  put(call_.row_log_sum, own.log_sum);
  put(call_.teacher_row_reference, teachers.reference);
  put(call_.teacher_row_log_sum, teachers.log_sum);
}

void DivergenceRun::write_statistics(int64_t n, const DivergenceSums& row) const {
  const int64_t k = first_ + n;
  const RowState& state = states(student)[n];
  float loss = row.value;
  if (terms_.label_weight != 0) loss -= terms_.label_weight * state.logprob();
  losses()[k] = tokens_->token_weight[k] * loss;
  put_outputs(tokens_->row[k], state, states(teacher)[n], row);
  if (!call_.kept) return;
  // |dz| is at most 2 (D + 2) for reverse_kl, and less than 4 for the other kinds; the label's term
  // adds its weight.
  const double far = terms_.kind == DivergenceKind::reverse_kl ? row.value : 0;
  const LogitMap map = map_of(n);
  const double most = (2 * (far + 2) + terms_.label_weight) *
                      std::fabs(static_cast<double>(map.scale) / map.temperature);
  const bool is_usual = std::isfinite(most) && most > 0;
  *kept_row(*tokens_, k) = {
      .reference = state.reference,
      .log_sum = state.log_sum,
      .target_logit = state.target_logit,
      .rest = static_cast<float>(is_usual ? power_of_two_above(most / kept_size) : 1),
      .overwritten = 0,
      .layout = divergence_layout,
      .columns = static_cast<float>(kept_),
      .unused = 0};
}

void DivergenceRun::keep_gradients() const {
  for_each_task(executor_, plan_.lanes, plan_.vocab_tiles, [&](int64_t tile, int64_t) {
    alignas(64) float row[vocab_tile];
    const int64_t width = tile_width(tile);
    const TileRows kept = kept_tile(tile);
    for (int64_t n = 0; n < count_; ++n) {
      const float divisor = kept_row(*tokens_, first_ + n)->rest;
      divergence_gradient(terms_, rows()[n], map_of(n), {1 / divisor, 1},
                          logits(student, tile) + n * vocab_tile,
                          logits(teacher, tile) + n * vocab_tile, width, target_of(tile, n), row);
      store_from_f32(row, width, call_.kept.dtype, kept.at(n));
    }
  });
}

// Computes a row of a tile's gradient from what Forward kept.
void DivergenceRun::kept_row_of(int64_t tile, int64_t n, float* row) const {
  const int64_t k = first_ + n, width = tile_width(tile);
  const KeptRow& kept = *kept_row(*tokens_, k);
  if (!is_its(kept)) {
    std::fill(row, row + width, nan_value);
    return;
  }
  const float factor = tokens_->upstream[k] * tokens_->token_weight[k] * kept.rest;
  load_as_f32(kept_tile(tile).at(n), call_.kept.dtype, width, row);
  add_scaled(row, 0, factor, 1, width, true, row, 0);
}

// Returns the row's upstream gradient times its weight, as two factors.
DivergenceScale DivergenceRun::scale_of(int64_t n) const {
  const float g = tokens_->upstream[first_ + n] * tokens_->token_weight[first_ + n];
  if (!std::isfinite(g)) return {1, g};
  int power;
  const float last = std::frexp(g, &power);
  return {std::ldexp(1.0f, power - 1), 2 * last};
}

void DivergenceRun::run_chunk(const Tokens& tokens, int64_t first, int64_t count) {
  begin_chunk(tokens, first, count);
  if (shape_.forward) {
    pack_along(call_.input, packed_input());
    if (call_.teacher_is_head()) pack_along(call_.teacher_input, packed_teacher());
    for (int64_t n = 0; n < count; ++n) {
      states(student)[n].target_logit = states(teacher)[n].target_logit =
          -std::numeric_limits<float>::infinity();
    }
    make_logits();
    begin_rows();
    sum_columns();
    if (call_.kept) keep_gradients();
  }
  if (!shape_.gradients()) return;
  if (call_.grad_weight) pack_across();
  gradient_pass(first == 0, [&](int64_t tile, const Lane&, bool) {
    return [this, tile](int64_t n, float* row) {
      if (!shape_.forward) return kept_row_of(tile, n, row);
      divergence_gradient(
          terms_, rows()[n], map_of(n), scale_of(n), logits(student, tile) + n * vocab_tile,
          logits(teacher, tile) + n * vocab_tile, tile_width(tile), target_of(tile, n), row);
    };
  });
}

void DivergenceRun::write_loss(const Tokens& tokens) const {
  write_losses(tokens, losses(), call_.loss, call_.options);
  for_each_other(tokens, [&](int64_t i) { put_outputs(i, {}, {}, {}); });
}

void DivergenceRun::check_kept(const Tokens& tokens) const {
  for (int64_t k = 0; call_.fault && k < tokens.valid; ++k) {
    if (!is_its(*kept_row(tokens, k))) *call_.fault.as<int32_t>() |= 2;
  }
}

}  // namespace

Status run_divergence(const Call& call, const LinearPlan& plan, const Workspace& workspace) {
  const LinearShape shape = shape_of(call);
  char* memory = static_cast<char*>(workspace.data) + workspace.byte_offset;
  Tokens tokens;
  Status status = prepare_tokens(call, shape.vocab, memory + plan.tokens_at, &tokens);
  if (!status.ok()) return status;
  DivergenceRun run(call, shape, plan, memory);
  if (!shape.forward) run.check_kept(tokens);
  for (int64_t first = 0; first < tokens.valid; first += plan.token_chunk) {
    run.run_chunk(tokens, first, std::min(plan.token_chunk, tokens.valid - first));
  }
  if (call.gradients) run.finish(tokens, tokens.valid > 0);
  if (call.forward) run.write_loss(tokens);
  return {};
}

}  // namespace logitless::cpu

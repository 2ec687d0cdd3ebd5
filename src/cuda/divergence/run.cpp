// SPDX-License-Identifier: Apache-2.0
// Runs a plan of a divergence (docs/kernels/divergence.md). The host never waits, and does not know
// how many tokens count.
#include <algorithm>

#include "src/cuda/divergence/kernels.h"
#include "src/cuda/divergence/plan.h"
#include "src/cuda/linear/engines.h"
#include "src/cuda/linear/portable/products.h"
#include "src/kept.h"

namespace logitless::cuda {
namespace {

class DivergenceRun {
 public:
  DivergenceRun(const DivergenceCall& call, const DivergencePlan& plan,
                const DivergenceMemory& memory, const DeviceInfo& device, Stream* stream)
      : call_(call), p_(plan), m_(memory), device_(device), stream_(stream) {}

  // Runs a part of the call, or with 0 all of it: docs/semantics.md, "Parts".
  void run(int part) {
    if (part <= 1) through_grad_input();
    if (part == 1 || !call_.gradients() || tokens() == 0) return;
    later_gradients(part);
  }

 private:
  void through_grad_input() {
    prepare_tokens(call_.student.in, m_.tokens, call_.others, stream_);
    if (tokens() == 0) return without_tokens();
    if (m_.teacher_maps != nullptr) {
      screen_tokens(call_.teacher_in, m_.teacher.m.tokens, stream_);
    }
    copy_weights();
    KeptRow* const kept_rows = call_.kept_rows.as<KeptRow>();
    if (call_.keeps_logits) note_logit_rows(all(), kept_rows, vocab(), stream_);
    if (call_.reads_logits) {
      find_logit_rows(call_.student.in, all(), kept_rows, vocab(), m_.logit_rows, stream_);
    }
    if (p_.way == DivergenceWay::from_kept) {
      gradients_of_kept();
    } else {
      from_logits();
    }
    write_loss(call_.student.in, m_.tokens, m_.losses, call_.loss, stream_);
  }

  const LinearShape& shape() const { return call_.student.shape; }
  int64_t tokens() const { return shape().tokens; }
  int64_t vocab() const { return shape().vocab; }
  int64_t element() const { return size_of(shape().dtype); }
  Chunk chunk_of(int64_t first, int64_t rows) const {
    return {m_.student.m.tokens, first, static_cast<int32_t>(rows)};
  }
  Chunk all() const { return chunk_of(0, tokens()); }

  // Calls use(work) with a head and a chunk in the form that the products and shared kernels take.
  template <class F>
  void with_head(const LinearCall& call, DivergenceHead head, const Chunk& chunk, F&& use) const {
    head.plan.extra_rows = whole_rows(chunk.rows) - chunk.rows;
    if (call.shape.kernels.reads_input) {
      // Products read through this pointer and never write.
      const int64_t row = gathers_all() ? 0 : chunk.first;
      head.m.input = static_cast<char*>(call.input.data) + call.input.byte_offset +
                     row * call.shape.hidden * element();
    }
    const LinearWork work{call, head.plan, head.m, device_, stream_, chunk};
    use(work);
  }
  template <class F>
  void with_student(const Chunk& chunk, F&& use) const {
    with_head(call_.student, m_.student, chunk, use);
  }
  template <class F>
  void with_teacher(Chunk chunk, F&& use) const {
    if (!call_.makes_teacher()) return;
    chunk.tokens.map = m_.teacher_maps;
    with_head(call_.teacher, m_.teacher, chunk, use);
  }

  void without_tokens() {
    write_loss(call_.student.in, m_.tokens, m_.losses, call_.loss, stream_);
    if (call_.gradients()) with_student({m_.tokens}, [](const auto& w) { clear_grad_weight(w); });
  }

  void copy_weights() {
    const auto copy = [](const LinearWork& work) {
      if (work.call.shape.copies_weight) copy_weight(work);
      if (work.m.weight_tail != nullptr) copy_weight_tail(work);
    };
    with_student(all(), copy);
    with_teacher(all(), copy);
  }

  // Whether the inputs of all tokens are gathered at once rather than per chunk.
  bool gathers_all() const { return p_.way == DivergenceWay::columns; }
  static void gather(LinearWork work) {
    LinearMemory memory = work.m;
    if (work.call.shape.kernels.reads_input) memory.input = nullptr;
    gather_input({work.call, work.plan, memory, work.device, work.stream, work.chunk}, false,
                 false);
  }

  void from_logits() {
    if (gathers_all()) {
      with_student(all(), gather);
      with_teacher(all(), gather);
    }
    for (int64_t first = 0; first < tokens(); first += p_.chunk) {
      const Chunk chunk = chunk_of(first, std::min(p_.chunk, tokens() - first));
      if (!gathers_all()) {
        if (!call_.reads_logits || p_.way == DivergenceWay::chunks) with_student(chunk, gather);
        with_teacher(chunk, gather);
      } else if (call_.shard.given) {
        break;
      }
      rows_of(chunk);
      if (p_.way == DivergenceWay::chunks) {
        gradients(chunk, rows_panel(), first > 0, true);
      }
    }
    if (p_.way == DivergenceWay::whole) {
      if (shape().grad_weight) with_head(call_.student, m_.ready, all(), gather);
      gradients(all(), rows_panel(), false, true);
    }
    if (p_.way != DivergenceWay::columns) return;
    if (call_.shard.given) {
      divergence_given_states(rows_call(all(), all_columns(0)), stream_);
    }
    if (p_.stored > 0) gradients(all(), rows_panel(), false, false);
    gradients_by_columns();
  }

  // Some columns of every row, at most `most` per call, and the destination of their logits.
  struct Columns {
    int64_t first, columns, most;
    LogitsOfHeads to;
    int64_t pitch() const { return panel_pitch(most); }
  };
  // All columns of the rows from `row` on.
  Columns all_columns(int64_t row) const {
    const bool kept = call_.keeps_logits || call_.reads_logits;
    return {0, vocab(), vocab(), kept ? kept_logits(call_.reads_logits ? 0 : row, 0) : m_.logits};
  }
  Columns columns_from(int64_t first) const {
    const int64_t columns = std::min(p_.columns, vocab() - first);
    if (call_.reads_logits) return {first, columns, vocab(), kept_logits(0, first)};
    return {first, columns, p_.columns, m_.block};
  }
  // The teacher's logits follow the student's.
  LogitsOfHeads kept_logits(int64_t row, int64_t first) const {
    const int64_t pitch = panel_pitch(vocab()), all = kept_rows_of(tokens()) * pitch;
    float* const student = call_.kept.as<float>() + row * pitch + first;
    return {student, call_.teacher_logits ? nullptr : student + all};
  }

  void logits(const Chunk& chunk, const Columns& c) {
    if (call_.reads_logits) return;
    if (p_.sum_columns > 0) return store(chunk, c, false);
    const int64_t most_rows = std::min(p_.chunk, tokens());
    HeadProducts::Logits block{.rows = chunk.rows,
                               .column = c.first,
                               .columns = c.columns,
                               .most_rows = std::max<int64_t>(most_rows, chunk.rows),
                               .most_columns = c.most,
                               .pitch = c.pitch()};
    block.row = gathers_all() ? chunk.first : 0;
    const auto multiply = [&](float* to) {
      return [&, to](const LinearWork& work) {
        block.to = to;
        HeadProducts(work).logits(block);
      };
    };
    with_student(chunk, multiply(c.to.student));
    with_teacher(chunk, multiply(c.to.teacher));
  }

  // Whether the states come from an engine's sums; a shard may have been given its states.
  bool makes_states() const { return p_.sum_columns > 0 && !call_.shard.given; }
  // logits() by the device's engine. If `makes_sums`, also the states of whole rows.
  void store(const Chunk& chunk, const Columns& c, bool makes_sums) {
    const auto by = [&](float* to, const Partials& sums) {
      return [&, to](const LinearWork& work) {
        engine_for(device_).store_logits(work, {.to = to,
                                                .pitch = c.pitch(),
                                                .row = gathers_all() ? chunk.first : 0,
                                                .first = c.first,
                                                .columns = c.columns,
                                                .partials = makes_sums ? sums : Partials{}});
      };
    };
    with_student(chunk, by(c.to.student, m_.sums));
    with_teacher(chunk, by(c.to.teacher, m_.teacher_sums));
    if (makes_sums) divergence_states(chunk, m_.sums, m_.teacher_sums, m_.states, stream_);
  }

  // The arguments of the row kernels.
  DivergenceRows rows_call(const Chunk& chunk, const Columns& c) const {
    const LinearCall &s = call_.student, &t = call_.teacher;
    DivergenceRows rows{.in = s.in,
                        .chunk = chunk,
                        .student = {.made = c.to.student,
                                    .pitch = c.pitch(),
                                    .bias = s.bias,
                                    .map = s.map,
                                    .maps = m_.tokens.map},
                        .teacher = {.made = c.to.teacher,
                                    .pitch = c.pitch(),
                                    .given = call_.teacher_logits,
                                    .bias = t.bias,
                                    .map = t.map,
                                    .maps = m_.teacher_maps},
                        .first = c.first,
                        .columns = static_cast<int32_t>(c.columns)};
    rows.beta = call_.options.beta;
    rows.label_weight = call_.options.label_weight;
    rows.has_target = static_cast<bool>(s.in.target);
    rows.states = m_.states;
    rows.shard = call_.shard;
    rows.logit_rows = m_.logit_rows;
    return rows;
  }

  // Writes the outputs of a chunk's tokens, and the states or dz for its gradients.
  void rows_of(const Chunk& chunk) {
    const Columns columns = all_columns(chunk.first);
    if (makes_states()) {
      store(chunk, columns, true);
    } else {
      logits(chunk, columns);
    }
    DivergenceRows rows = rows_call(chunk, columns);
    const DivergenceStatistics& out = call_.statistics;
    rows.has_outputs = call_.loss || out.entropy || out.teacher_entropy || out.acceptance ||
                       out.logprob || call_.hands_states_on();
    rows.sums_columns = call_.sums_columns();
    rows.losses = m_.losses;
    rows.loss = call_.loss;
    rows.has_states = makes_states();
    rows.statistics = out;
    if (call_.keeps) {
      rows.dz = {.data = call_.kept.as<char>(),
                 .pitch = panel_pitch(vocab()),
                 .columns = static_cast<int32_t>(vocab()),
                 .dtype = shape().dtype,
                 .kept_rows = call_.kept_rows.as<float>(),
                 .lift = call_.lift,
                 .layout = kept_dz_by_token};
    } else if (m_.dz != nullptr) {
      rows.dz = to_panel(rows_panel(), p_.way == DivergenceWay::chunks ? 0 : chunk.first);
    }
    divergence_rows(rows, call_.options.kind, whole_rows(chunk.rows), device_, stream_);
  }

  DivergencePanel to_panel(const Panel& panel, int64_t row) const {
    return {.data = panel.data + row * panel.pitch * element(),
            .pitch = panel.pitch,
            .columns = static_cast<int32_t>(panel.columns),
            .dtype = shape().dtype};
  }
  // dz of whole rows, in the workspace.
  Panel rows_panel() const {
    const int64_t columns = p_.way == DivergenceWay::columns ? p_.stored : vocab();
    return {m_.dz, panel_pitch(columns), 0, columns, false};
  }
  Panel kept_panel(int64_t first, int64_t columns) const {
    char* const data = call_.kept.as<char>() + first * element();
    return {data, panel_pitch(vocab()), first, columns, false};
  }
  Panel block_panel(int64_t first) const {
    const int64_t columns = std::min(p_.columns, vocab() - first);
    return {m_.block_dz, panel_pitch(p_.columns), first, columns, false};
  }

  void gradients_by_columns() {
    for (int64_t first = p_.stored; first < vocab(); first += p_.columns) {
      const Columns c = columns_from(first);
      logits(all(), c);
      DivergenceRows rows = rows_call(all(), c);
      rows.dz = to_panel(block_panel(first), 0);
      divergence_block(rows, call_.options.kind, whole_rows(tokens()), stream_);
      gradients(all(), block_panel(first), false, first + c.columns >= vocab());
    }
  }

  void gradients_of_kept() {
    const LinearCall& s = call_.student;
    kept_factors({.in = s.in,
                  .tokens = m_.tokens,
                  .ordered = m_.ordered,
                  .factors = m_.student.m.factors,
                  .scales = m_.scales,
                  .kept_rows = call_.kept_rows.as<float>(),
                  .layout = kept_dz_by_token,
                  .slope = s.map.slope,
                  .lift = call_.lift,
                  .vocab = vocab(),
                  .alike = call_.alike},
                 stream_);
    if (s.grad_weight) {
      gather_scaled(s.input, m_.student.m.factors, whole_rows(tokens()), s.shape.hidden_pitch(),
                    m_.student.m.input, stream_);
    }
    if (!call_.scales_panel()) return gradients(all(), kept_panel(0, vocab()), false, true);
    for (int64_t first = 0; first < vocab(); first += p_.columns) {
      const int64_t columns = std::min(p_.columns, vocab() - first);
      scale_panel(shape().dtype, kept_panel(first, columns), m_.scales, tokens(),
                  whole_rows(tokens()), block_panel(first), stream_);
      gradients(all(), block_panel(first), false, first + columns >= vocab());
    }
  }

  // Computes the gradients of a panel, but grad_weight and grad_bias of the last one: see
  // later_gradients. `adds`: added to those of earlier chunks. `last`: the panel has the last
  // columns, so grad_input is written from its sums.
  void gradients(const Chunk& chunk, const Panel& dz, bool adds, bool last) {
    const bool ends = last && chunk.first + chunk.rows >= tokens();
    with_head(call_.student, m_.ready, chunk, [&](const LinearWork& work) {
      if (!ends) {
        grad_weight(work, dz, adds);
        grad_bias(work, dz, adds);
      }
      if (!shape().grad_input) return;
      float* const sums = work.m.grad_input_sum;
      HeadProducts(work).grad_input(dz, 0, chunk.rows, sums, dz.first > 0);
      if (last) write_grad_input(work, sums, 0, chunk.rows, has_factors(), true);
    });
  }
  void grad_weight(const LinearWork& work, const Panel& dz, bool adds) const {
    if (shape().grad_weight) HeadProducts(work).grad_weight(dz, work.m.input, adds);
  }
  void grad_bias(const LinearWork& work, const Panel& dz, bool adds) const {
    if (shape().grad_bias) add_to_bias(work, dz, has_factors(), !adds);
  }
  bool has_factors() const { return m_.student.m.factors != nullptr; }

  // The panel with the last columns of the last tokens, whose dz is still there.
  struct LastPanel {
    Chunk chunk;
    Panel dz;
    bool adds = false;
  };
  LastPanel last_panel() const {
    const auto last_of = [](int64_t count, int64_t each) { return (count - 1) / each * each; };
    switch (p_.way) {
      case DivergenceWay::chunks: {
        const int64_t first = last_of(tokens(), p_.chunk);
        return {chunk_of(first, tokens() - first), rows_panel(), first > 0};
      }
      case DivergenceWay::columns:
        return {all(), block_panel(p_.stored + last_of(vocab() - p_.stored, p_.columns))};
      case DivergenceWay::from_kept:
        if (!call_.scales_panel()) return {all(), kept_panel(0, vocab())};
        return {all(), block_panel(last_of(vocab(), p_.columns))};
      default:
        return {all(), rows_panel()};
    }
  }

  // What follows grad_input: grad_weight of the last panel, then the rest. A shard's wide panel is
  // divided in halves, so that the caller's work after parts 1 and 2 runs beside a product each.
  void later_gradients(int part) {
    const auto [chunk, dz, adds] = last_panel();
    const auto in_part = [&](int of) { return part == 0 || part == of; };
    int64_t half = dz.columns;
    if (call_.shard.given && half >= 4096) half = round_up(half / 2, 512);
    with_head(call_.student, m_.ready, chunk, [&](const LinearWork& work) {
      Panel first = dz, second = dz;
      first.columns = std::min(half, dz.columns);
      second.data += first.columns * element();
      second.first += first.columns, second.columns -= first.columns;
      if (in_part(2)) grad_weight(work, first, adds);
      if (!in_part(3)) return;
      if (second.columns > 0) grad_weight(work, second, adds);
      grad_bias(work, dz, adds);
    });
    if (in_part(3)) write_weight_sums();
  }

  void write_weight_sums() {
    const LinearShape& s = shape();
    with_head(call_.student, m_.ready, all(), [&](const LinearWork& work) {
      const int64_t tail = tail_rows(s);
      if (sums_grad_weight(s, work.plan)) {
        write_grad_weight(work, work.m.grad_weight_sum, 0, s.vocab - tail);
      }
      if (tail > 0) write_grad_weight(work, work.m.weight_tail_sum, s.vocab - tail, tail);
      if (s.grad_bias) write_grad_bias(work);
    });
  }

  const DivergenceCall& call_;
  const DivergencePlan& p_;
  const DivergenceMemory& m_;
  const DeviceInfo& device_;
  Stream* stream_;
};

}  // namespace

Status run_divergence(const Call& call, const DivergencePlan& plan, const Workspace& workspace,
                      const DeviceInfo& device, Stream* stream) {
  const DivergenceCall made = make_divergence(call);
  const DivergenceMemory memory =
      place_divergence(made, plan, static_cast<char*>(workspace.data) + workspace.byte_offset);
  DivergenceRun run(made, plan, memory, device, stream);
  stream->prepare_and_run([&] { run.run(call.part); });
  return {};
}

}  // namespace logitless::cuda

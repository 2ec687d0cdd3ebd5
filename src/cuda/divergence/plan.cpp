// SPDX-License-Identifier: Apache-2.0
// The plans for a divergence in a number of bytes, and the predicted time of each.
#include "src/cuda/divergence/plan.h"

#include <algorithm>
#include <array>

#include "src/cuda/linear/engines.h"
#include "src/cuda/linear/plan_time.h"
#include "src/cuda/linear/portable/engine.h"
#include "src/cuda/runtime/blas.h"

namespace logitless::cuda {
namespace {

// Logits of more tokens at a time do not speed up a product, whose tiles have at most 512 rows.
constexpr std::array<int64_t, 8> chunk_sizes{2048, 1536, 1024, 768, 512, 256, 128, 64};
// Chunks larger than a block's memory holds, for plans by columns: each chunk reads both weights.
constexpr std::array<int64_t, 4> state_chunks{128, 192, 256, 512};
// The number of columns whose dz is made together with the states is a multiple of V /
// stored_parts, which is rounded down to a multiple of 64.
constexpr int64_t stored_parts = 24;
// Rows of a tile in engines that store logits. Storing pays if tiles are nearly full and the
// vocabulary is not small.
constexpr int64_t stored_rows = 512;
bool is_worth_storing(int64_t chunk, int64_t vocab) {
  return vocab >= 4096 && chunk > 0 && 8 * chunk >= 7 * round_up(chunk, stored_rows);
}
constexpr std::array<int64_t, 9> widths{16384, 8192, 4096, 3072, 2560, 2048, 1536, 1024, 512};

// Tokens whose input is gathered at a time.
int64_t input_rows(const DivergenceCall& call, const DivergencePlan& p) {
  const bool all = p.way == DivergenceWay::columns || p.way == DivergenceWay::from_kept;
  return all ? whole_rows(call.student.shape.tokens) : p.chunk;
}

// Elements of a head's logits, for whole rows.
int64_t row_logits(const DivergenceCall& call, const DivergencePlan& p) {
  const bool known = p.way == DivergenceWay::columns && call.shard.given;
  if (p.way == DivergenceWay::from_kept || known || call.keeps_logits || call.reads_logits) {
    return 0;
  }
  // If dz overwrites the logits, a product reads rows after the last token too.
  const int64_t tokens = call.student.shape.tokens;
  const int64_t rows = p.way == DivergenceWay::none ? std::min(p.chunk, tokens) : p.chunk;
  return rows * panel_pitch(call.student.shape.vocab);
}

// Elements of dz made of whole rows.
int64_t dz_of_rows(const DivergenceCall& call, const DivergencePlan& p) {
  const LinearShape& s = call.student.shape;
  switch (p.way) {
    case DivergenceWay::whole:
      return whole_rows(s.tokens) * panel_pitch(s.vocab);
    case DivergenceWay::chunks:
      return p.chunk * panel_pitch(s.vocab);
    case DivergenceWay::columns:
      return whole_rows(s.tokens) * p.stored;
    default:
      return 0;
  }
}
// Elements of some columns' dz.
int64_t dz_of_block(const DivergenceCall& call, const DivergencePlan& p) {
  const bool some = p.way == DivergenceWay::columns || call.scales_panel();
  return some ? whole_rows(call.student.shape.tokens) * p.columns : 0;
}

LogitsOfHeads place_logits(const DivergenceCall& call, int64_t logits, Arena* arena) {
  LogitsOfHeads both;
  if (logits > 0) both.student = arena->take<float>(logits);
  if (logits > 0 && call.makes_teacher()) both.teacher = arena->take<float>(logits);
  return both;
}

// Places the sums of stored logits, which the gradients' arrays may overwrite.
void place_sums(const DivergenceCall& call, const DivergencePlan& p, Arena* arena,
                DivergenceMemory* m) {
  const int64_t rows = std::min(p.chunk, call.student.shape.tokens);
  const int64_t segments = divide_up(call.student.shape.vocab, p.sum_columns);
  for (Partials* sums : {&m->sums, &m->teacher_sums}) {
    sums->maximum = arena->take<float>(rows * segments);
    sums->sum = arena->take<float>(rows * segments);
    sums->segments = segments;
    sums->unit_width = 1;
  }
}

// Places the memory that a gather of `rows` rows writes.
void place_input(const LinearShape& s, int64_t rows, Arena* arena, DivergenceHead* head) {
  if (!s.kernels.reads_input) {
    head->m.input = arena->take<char>(rows * s.hidden_pitch() * size_of(s.dtype));
  }
  head->m.target_logit = arena->take<float>(rows);
  if (s.maps) head->m.slope = arena->take<float>(rows);
}

void place_head(const LinearCall& call, int64_t rows, Arena* arena, DivergenceHead* head) {
  const LinearShape& s = call.shape;
  const int64_t row = s.hidden_pitch() * size_of(s.dtype);
  if (s.copies_weight) head->m.weight = arena->take<char>(s.vocab * row);
  place_input(s, rows, arena, head);
  head->m.rows_finished = arena->take<int32_t>(1);
}

void place_gradients(const DivergenceCall& call, const DivergencePlan& p, int64_t panel_columns,
                     Arena* arena, DivergenceMemory* m) {
  const LinearShape& s = call.student.shape;
  DivergenceHead& head = m->student;
  const int64_t pitch = s.hidden_pitch();
  const bool by_chunk = p.way == DivergenceWay::chunks;
  const int64_t rows = by_chunk ? p.chunk : s.tokens;
  head.plan.token_chunk = rows;
  head.plan.chunks = by_chunk ? divide_up(s.tokens, p.chunk) : 1;
  if (s.grad_input && tail_columns(s) > 0) {
    head.m.weight_tail = arena->take<char>(8 * pitch * size_of(s.dtype));
  }
  if (s.grad_input && p.way != DivergenceWay::whole) {
    head.m.grad_input_sum = arena->take<float>(rows * pitch);
  }
  if (sums_grad_weight(s, head.plan)) head.m.grad_weight_sum = arena->take<float>(s.vocab * pitch);
  if (tail_rows(s) > 0) head.m.weight_tail_sum = arena->take<float>(8 * pitch);
  if (!s.grad_bias) return;
  head.m.bias_sum = arena->take<float>(s.vocab);
  head.m.bias_slabs = arena->take<float>(divide_up(rows, bias_slab_rows) * panel_columns);
}

void place_factors(const DivergenceCall& call, Arena* arena, DivergenceMemory* m) {
  const int64_t tokens = call.student.shape.tokens;
  m->ordered = m->tokens;
  m->ordered.row = arena->take<int32_t>(tokens);
  m->ordered.scalars = arena->take<TokenScalars>(1);
  m->student.m.factors = arena->take<RowFactors>(tokens);
  if (call.scales_panel()) m->scales = arena->take<float>(tokens);
  m->student.m.tokens = m->ordered;
}

// Arrays that are no longer used when the gradients are computed share memory with the gradients'
// arrays: grad_input's sums and all tokens' input if dz of all tokens is stored, else the logits of
// some columns and their dz. Returns the student with the input that the gradients' products read.
DivergenceHead place_stages(const DivergenceCall& call, const DivergencePlan& p, Arena* to,
                            DivergenceMemory* memory) {
  const LinearShape& s = call.student.shape;
  Arena& arena = *to;
  DivergenceMemory& m = *memory;
  const bool in_place = s.dtype == DType::f32 && !call.reads_logits;  // dz overwrites the logits
  const auto take_dz = [&](int64_t elements) {
    return elements > 0 ? arena.take<char>(elements * size_of(s.dtype)) : nullptr;
  };
  if (p.way == DivergenceWay::columns) m.dz = take_dz(dz_of_rows(call, p));
  const uint64_t start = arena.used();
  m.logits = place_logits(call, row_logits(call, p), &arena);
  if (p.sum_columns > 0) place_sums(call, p, &arena, &m);
  const uint64_t end = arena.used();
  DivergenceHead gathered = m.student;
  if (p.way == DivergenceWay::whole) {
    arena.back_to(start);
    place_input(s, whole_rows(s.tokens), &arena, &gathered);
    if (s.grad_input) {
      m.student.m.grad_input_sum = arena.take<float>(s.tokens * s.hidden_pitch());
    }
    arena.at_least(end);
  }
  if (p.way == DivergenceWay::columns) {
    arena.back_to(start);
    const int64_t block = call.reads_logits ? 0 : whole_rows(s.tokens) * p.columns;
    m.block = place_logits(call, block, &arena);
  }
  if (in_place && p.way == DivergenceWay::columns) {
    m.block_dz = reinterpret_cast<char*>(m.block.student);
  } else {
    m.block_dz = take_dz(dz_of_block(call, p));
  }
  if (in_place && p.way == DivergenceWay::chunks) {
    m.dz = reinterpret_cast<char*>(m.logits.student);
  } else if (p.way != DivergenceWay::columns) {
    m.dz = take_dz(dz_of_rows(call, p));
  }
  arena.at_least(end);
  return gathered;
}

}  // namespace

const char* name_of(DivergenceWay way) {
  constexpr const char* names[] = {"loss only", "whole", "chunks", "columns", "kept"};
  return names[static_cast<int>(way)];
}

DivergenceMemory place_divergence(const DivergenceCall& call, const DivergencePlan& p,
                                  void* workspace) {
  Arena arena(workspace);
  const LinearShape& s = call.student.shape;
  DivergenceMemory m;
  m.tokens = place_tokens(&arena, s.tokens, {call.student.in.screens_gradients(), s.maps});
  if (call.teacher_in.makes_maps) m.teacher_maps = arena.take<TokenMap>(s.tokens);
  if (call.loss && call.student.in.options.reduction != Reduction::none) {
    m.losses = arena.take<float>(s.tokens);
  }
  if (p.way == DivergenceWay::columns || p.sum_columns > 0) {
    m.states = arena.take<DivergenceState>(s.tokens);
  }
  if (call.reads_logits) m.logit_rows = arena.take<int32_t>(s.tokens);
  char* const library = arena.take<char>(matrix_library_bytes);
  place_head(call.student, input_rows(call, p), &arena, &m.student);
  if (call.makes_teacher()) {
    const bool all = p.way == DivergenceWay::columns;
    place_head(call.teacher, all ? whole_rows(s.tokens) : p.chunk, &arena, &m.teacher);
  }
  m.student.m.library = m.teacher.m.library = library;
  m.student.m.tokens = m.teacher.m.tokens = m.tokens;
  m.teacher.m.tokens.map = m.teacher_maps;
  const DivergenceHead gathered = place_stages(call, p, &arena, &m);
  if (call.from_kept) place_factors(call, &arena, &m);
  if (call.gradients()) {
    const bool some = p.way == DivergenceWay::columns || call.scales_panel();
    place_gradients(call, p, some ? std::max(p.columns, p.stored) : s.vocab, &arena, &m);
  }
  m.ready = m.student;
  m.ready.m.input = gathered.m.input;
  m.ready.m.target_logit = gathered.m.target_logit, m.ready.m.slope = gathered.m.slope;
  m.bytes = arena.used();
  return m;
}

namespace {

// Predicts the seconds of a plan from the device's speeds.
class DivergencePrice {
 public:
  DivergencePrice(const DivergenceCall& call, const DivergencePlan& plan, const DeviceSpeed& speed)
      : call_(call), p_(plan), speed_(speed), s_(call.student.shape) {}

  double seconds() const {
    const bool by_chunk = p_.way == DivergenceWay::chunks;
    double sum = 30 * speed_.launch;
    const bool known = p_.way == DivergenceWay::columns && call_.shard.given;
    if (p_.way != DivergenceWay::from_kept && !known) {
      sum += in_pieces(s_.tokens, p_.chunk, [&](int64_t rows) {
        const double own = logits(rows, s_.vocab) + passes(rows);
        return by_chunk ? own + gradients(rows, s_.vocab, true) : own;
      });
    }
    if (p_.way == DivergenceWay::whole) sum += gradients(s_.tokens, s_.vocab, false);
    if (p_.stored > 0) sum += gradients(s_.tokens, p_.stored, false);
    if (p_.way == DivergenceWay::columns) {
      sum += in_pieces(s_.vocab - p_.stored, p_.columns, [&](int64_t columns) {
        return logits(s_.tokens, columns) + moved(s_.tokens, columns, read() + dz()) +
               gradients(s_.tokens, columns, false);
      });
    }
    if (p_.way == DivergenceWay::from_kept) {
      sum += in_pieces(s_.vocab, p_.columns, [&](int64_t columns) {
        const double scaled = call_.scales_panel() ? moved(s_.tokens, columns, 2 * dz()) : 0;
        return scaled + gradients(s_.tokens, columns, false);
      });
    }
    return sum;
  }

 private:
  double moved(int64_t rows, int64_t columns, double bytes) const {
    return static_cast<double>(rows) * static_cast<double>(columns) * bytes / speed_.memory +
           speed_.launch;
  }
  double dz() const { return static_cast<double>(size_of(s_.dtype)); }
  // Bytes of both heads' logits that a pass reads.
  double read() const {
    return call_.teacher_logits ? 4.0 + static_cast<double>(size_of(call_.teacher_logits.dtype))
                                : 8.0;
  }
  // Computing both heads' logits. Half of the time to write them and to read the weight is not
  // hidden by arithmetic.
  double logits(int64_t rows, int64_t columns) const {
    if (call_.reads_logits) return 0;
    const bool stores = p_.sum_columns > 0;
    const double rounds = stores ? rounds_of(rows, columns) : 1;
    const auto head = [&](const LinearShape& s) {
      return product_time(s, speed_, rows, columns, s.hidden, false) * rounds +
             moved(rows, columns, stores ? 1 : 2) + moved(s.hidden, columns, dz() / 2);
    };
    return head(s_) + (call_.makes_teacher() ? head(call_.teacher.shape) : 0);
  }
  // The time of both heads' tiles in whole rounds of the device's teams, divided by the time
  // without idle teams.
  double rounds_of(int64_t rows, int64_t columns) const {
    const auto teams = static_cast<int64_t>(speed_.multiprocessors / 2);
    const int64_t tiles = 2 * divide_up(rows, stored_rows) * divide_up(columns, p_.sum_columns);
    const double all = static_cast<double>(divide_up(tiles, teams) * teams * stored_rows);
    return all * static_cast<double>(p_.sum_columns) / (2 * static_cast<double>(rows * columns));
  }
  // The passes over rows of logits, priced by their bytes.
  double passes(int64_t rows) const {
    const bool makes_dz =
        p_.way == DivergenceWay::whole || p_.way == DivergenceWay::chunks || call_.keeps;
    const bool again = call_.options.kind != DivergenceKind::forward_kl;
    const int64_t columns = makes_dz ? s_.vocab : p_.stored;
    const int reads = 2 - (p_.sum_columns > 0 ? 1 : 0);
    return moved(rows, s_.vocab, reads * read()) +
           moved(rows, columns, (again ? read() : 0) + dz());
  }
  double gradients(int64_t rows, int64_t columns, bool adds) const {
    double sum = 0;
    if (s_.grad_input) sum += product_time(s_, speed_, rows, s_.hidden, columns, true);
    if (s_.grad_weight) sum += product_time(s_, speed_, columns, s_.hidden, rows, adds);
    if (s_.grad_bias) sum += moved(rows, columns, dz());
    return sum;
  }

  const DivergenceCall& call_;
  const DivergencePlan& p_;
  const DeviceSpeed& speed_;
  const LinearShape& s_;
};

DivergencePlan finished(const DivergenceCall& call, DivergencePlan p, const DeviceSpeed& speed) {
  p.bytes = place_divergence(call, p, nullptr).bytes;
  p.seconds = DivergencePrice(call, p, speed).seconds();
  return p;
}

int64_t chunk_of(int64_t tokens, int64_t most) {
  return std::min(most, whole_rows(std::max<int64_t>(tokens, 1)));
}

// Tokens whose whole rows of logits fit into the memory of a block's logits and dz.
int64_t chunk_in_block(const DivergenceCall& call, int64_t columns) {
  const LinearShape& s = call.student.shape;
  const int64_t logits = call.makes_teacher() ? 8 : 4;
  const int64_t dz = s.dtype == DType::f32 ? 0 : size_of(s.dtype);
  const int64_t bytes = whole_rows(s.tokens) * columns * (logits + dz);
  const int64_t fitting = bytes / (panel_pitch(s.vocab) * logits) / 8 * 8;
  return std::clamp(fitting, chunk_sizes.back(), chunk_sizes.front());
}

DeviceSpeed speed_of(const DeviceInfo& device) { return engines().back()->speed(device); }

template <class F>
void each_plan(const DivergenceCall& call, const DeviceInfo& device, F&& consider) {
  const LinearShape& s = call.student.shape;
  const DeviceSpeed speed = speed_of(device);
  const int64_t stored = call.may_store ? engine_for(device).columns_of_sums() : 0;
  const auto use = [&](DivergencePlan p) {
    p.columns = std::min(p.columns, panel_pitch(s.vocab - p.stored));
    if (is_worth_storing(p.chunk, s.vocab) && !call.reads_logits) p.sum_columns = stored;
    consider(finished(call, p, speed));
  };
  if (call.from_kept) {
    if (!call.scales_panel()) return use({.way = DivergenceWay::from_kept, .columns = s.vocab});
    for (const int64_t width : widths) use({.way = DivergenceWay::from_kept, .columns = width});
    return;
  }
  for (const int64_t most : chunk_sizes) {
    const int64_t chunk = chunk_of(s.tokens, most);
    if (!call.gradients()) {
      use({.way = DivergenceWay::none, .chunk = chunk});
      continue;
    }
    use({.way = DivergenceWay::whole, .chunk = chunk});
    use({.way = DivergenceWay::chunks, .chunk = chunk});
  }
  if (!call.gradients()) return;
  for (const int64_t width : widths) {
    const auto by_chunk = [&](int64_t most) {
      use({.way = DivergenceWay::columns, .chunk = chunk_of(s.tokens, most), .columns = width});
    };
    const int64_t least = chunk_in_block(call, width);
    by_chunk(least);
    if (call.shard.given) continue;  // nothing needs whole rows
    for (const int64_t most : state_chunks) {
      if (most > least) by_chunk(most);
    }
  }
  if (call.shard.given) return;
  const int64_t part = s.vocab / (64 * stored_parts) * 64;
  for (int64_t parts = 1; part > 0 && parts < stored_parts; ++parts) {
    for (const int64_t chunk : {256, 512, 1024}) {
      use({.way = DivergenceWay::columns,
           .chunk = chunk_of(s.tokens, chunk),
           .columns = 4096,
           .stored = parts * part});
    }
  }
}

}  // namespace

DivergencePlan smallest_plan(const DivergenceCall& call, const DeviceInfo& device) {
  DivergencePlan least;
  each_plan(call, device, [&](const DivergencePlan& p) {
    const bool smaller =
        p.bytes < least.bytes || (p.bytes == least.bytes && p.seconds < least.seconds);
    if (least.bytes == 0 || smaller) least = p;
  });
  return least;
}

DivergencePlan quickest_plan(const DivergenceCall& call, uint64_t bytes, const DeviceInfo& device) {
  DivergencePlan best;
  each_plan(call, device, [&](const DivergencePlan& p) {
    if (p.bytes > bytes) return;
    const bool better =
        p.seconds < best.seconds || (p.seconds == best.seconds && p.bytes < best.bytes);
    if (best.bytes == 0 || better) best = p;
  });
  return best;
}

DivergencePlan recommended_plan(const DivergenceCall& call, uint64_t minimum,
                                const DeviceInfo& device) {
  // The recommended limit: 16-bit dz of all tokens if a product reads it, plus 1.2 GiB.
  const LinearShape& s = call.student.shape;
  const uint64_t dz = call.gradients() ? 2 * static_cast<uint64_t>(s.tokens) * s.vocab : 0;
  const uint64_t most = std::max(dz + (uint64_t{1229} << 20), minimum);
  const double best = quickest_plan(call, most, device).seconds;
  // Takes the smallest plan that is at most 1 % slower.
  DivergencePlan least;
  each_plan(call, device, [&](const DivergencePlan& p) {
    if (p.bytes > most || p.seconds > 1.01 * best) return;
    if (least.bytes == 0 || p.bytes < least.bytes) least = p;
  });
  return least;
}

Status divergence_workspace(const Call& call, const DeviceInfo& device, uint64_t given,
                            WorkspaceSize* size) {
  Status status = find_matrix_library();
  const auto extent = [](const TensorView& v, int axis) { return v ? v.shape[axis] : 0; };
  if (status.ok()) {
    status = check_linear_extents({call.input.shape[0], call.weight.shape[0], call.weight.shape[1],
                                   extent(call.teacher_weight, 1)});
  }
  if (!status.ok()) return status;
  const DivergenceCall made = make_divergence(call);
  *size = {smallest_plan(made, device).bytes, 0, Arena::alignment};
  if (given >= size->minimum) return {};
  size->recommended = recommended_plan(made, size->minimum, device).bytes;
  return {};
}

DivergencePlan divergence_plan(const Call& call, uint64_t bytes, const DeviceInfo& device) {
  return quickest_plan(make_divergence(call), bytes, device);
}

}  // namespace logitless::cuda

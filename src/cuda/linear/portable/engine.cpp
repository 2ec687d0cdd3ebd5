// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/portable/engine.h"

#include <algorithm>

#include "src/kept.h"

namespace logitless::cuda {
namespace {

// KeptRow::layout of a panel of rows with all columns, followed by some padding rows
constexpr float kept_in_rows = 12;

// Columns of E that the caller's memory has room for, including the rows that products read after
// the tokens': all columns, or whole segments.
int64_t columns_in_rows(const Call& op, const LinearShape& s) {
  const int64_t columns = kept_columns(op), rows = s.tokens + rows_behind(s);
  const int64_t elements = kept_rows_of(s.tokens) * round_up(columns, kept_block);
  if (rows * round_up(columns, kept_block) <= elements && columns == s.vocab) return columns;
  return std::min(elements / rows, columns) / segment_columns * segment_columns;
}

}  // namespace

void PortableEngine::describe(const Call& op, LinearCall* call, const DeviceInfo&) const {
  LinearShape& s = call->shape;
  call->kept.layout = kept_in_rows;
  s.kernels.takes_eights = true;
  // With a softcap every element of the smoothing's term has its own slope, so E cannot be used.
  if (s.smoothing && call->map.capped) {
    s.kernels.kept = Origin::again_dz;
    return;
  }
  if (s.dtype == DType::f16) keep_codes(call);
  if (!op.kept || s.tokens == 0) return;
  lay_out_kept(op, columns_in_rows(op, s), call);
  if (s.kernels.kept == Origin::dz_by_rows) s.kernels.kept = Origin::dz_in_panels;
}

bool Sm80Engine::serves(const Call& op, const LinearShape& s) const {
  constexpr int64_t most = 1 << 22;  // the kernel counts the bytes of 192 rows in 32 bits
  return s.dtype != DType::f32 && has_aligned_rows(op.weight, s) && s.hidden < most &&
         op.weight.stride[0] < most;
}

void PortableEngine::place(Lifetime lifetime, const LinearShape& s, const LinearPlan& p,
                           Arena* arena, LinearMemory* m) const {
  if (lifetime != Lifetime::call) return;
  m->library = arena->take<char>(matrix_library_bytes);
  m->logits = arena->take<float>(p.block_rows * p.block_columns);
  if (scales_apart(s, p)) {
    m->scaled = arena->take<char>(p.panel_rows * s.hidden_pitch() * size_of(s.dtype));
  }
  place_bias_slabs(s, p, std::max(p.stored_columns, p.remade_columns), arena, m);
}

DeviceSpeed PortableEngine::speed(const DeviceInfo& device) const {
  DeviceSpeed speed;
  speed.multiprocessors = device.multiprocessors;
  const double share = device.multiprocessors / 132.0;
  if (device.major != 9) {  // assumed: half of an H200's speed per multiprocessor
    speed.products *= share / 2;
    speed.memory *= share / 2;
  }
  return speed;
}

}  // namespace logitless::cuda

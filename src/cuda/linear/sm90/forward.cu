// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/sm90/engine.h"

#include <algorithm>
#include <cmath>

#include "src/cuda/linear/sm90/plain.cuh"
#include "src/cuda/linear/sm90/tensor_map.h"
#include "src/cuda/linear/sm90/weight_map.h"
#include "src/cuda/linear/sm90/whole_chip.cuh"
#include "src/cuda/linear/sm90/with_options.cuh"
#include "src/cuda/linear/tiled/teams.h"
#include "src/row/map.h"

namespace logitless::cuda::sm90 {
namespace {

using tiled::rows_of_tile;
using tiled::works_apart;

struct Operands {
  CUtensorMap input, weight;
};

// Rows of the input copied for a block's tile. With few tokens the plain kernel copies only those
// that exist, in groups of eight: TMA takes as long for rows that do not exist.
int32_t copied_rows(const LinearShape& s, const LinearPlan& plan) {
  const bool few = s.kernels.plain && works_apart(plan);
  return few ? static_cast<int32_t>(plan.token_chunk) : rows_of_tile(plan);
}

// The caller's own input, or null if the products do not read it.
InputRows input_rows(const LinearCall& call, const LinearPlan& plan) {
  const LinearShape& s = call.shape;
  if (!s.kernels.reads_input) return {};
  const TensorView& v = call.input;
  const int64_t stride = (s.tokens == 1 ? round_up(s.hidden, 8) : v.stride[0]) * size_of(s.dtype);
  return {static_cast<const char*>(v.data) + v.byte_offset, stride, static_cast<int32_t>(s.hidden),
          plan.copies_input};
}
CUtensorMap own_map(const InputRows& own, DType dtype, int64_t first, int64_t rows, int box_rows,
                    Stream* stream) {
  return make_map(own.data + first * own.stride, dtype, rows, own.hidden,
                  own.stride / size_of(dtype), box_rows, stream);
}
CUtensorMap compacted_map(const LinearWork& work) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  return make_map(m.input, call.shape.dtype, chunk.rows, call.shape.hidden_pitch(),
                  call.shape.hidden_pitch(), copied_rows(call.shape, plan), stream);
}

Operands make_operands(const LinearWork& work) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const LinearShape& s = call.shape;
  // If every token counts, compacted token k is token k, and products read the caller's rows.
  const CUtensorMap input = s.kernels.reads_input
                                ? own_map(input_rows(call, plan), s.dtype, chunk.first, chunk.rows,
                                          copied_rows(s, plan), stream)
                                : compacted_map(work);
  return {input, weight_map(work)};
}

// The map of kept E starts at the chunk's first row.
CUtensorMap panel_map_of(const LinearWork& work, const Arguments& arguments, int lines) {
  const Panel& panel = arguments.panel;
  const bool is_kept = work.call.shape.kept_columns > 0;
  const int64_t rows = panel.pitch - (is_kept ? work.chunk.first : 0);
  return make_panel_map(panel.data, work.call.shape.dtype, rows, panel.pitch,
                        arguments.panel_end / 64, lines, 1, work.stream);
}

template <class T, Mode kMode, Set kSet>
void launch_set(const LinearWork& work, const Arguments& arguments) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const Operands operands = make_operands(work);
  CUtensorMap panel_map{};
  if constexpr (kMode != Mode::sums) panel_map = panel_map_of(work, arguments, box_lines);
  stream->launch_config("sm90 forward", option_forward_kernel<T, kMode, kSet>, whole_chip(device),
                        operands.input, operands.weight, panel_map, arguments);
}

// Whether the call needs what only kernels with has_more have, besides maps per row.
template <Mode kMode>
bool needs_more(const Arguments& a) {
  if (kMode == Mode::sums && a.panel.data != nullptr) return true;  // z, for top-k
  return kMode != Mode::dz && (a.partials.squared != nullptr || a.partials.above != nullptr);
}

// Chooses the kernel for a single option, if there is one.
template <Mode kMode>
Set choose_set(const Arguments& a) {
  const TileOptions& o = a.options;
  const bool is_dz = kMode == Mode::dz;
  const bool weighted = is_dz ? o.smoothing : a.partials.weighted != nullptr;
  const Partials& p = a.partials;
  const bool entropy = is_dz ? o.entropy : p.shifted != nullptr || p.argmax != nullptr;
  const bool extra = needs_more<kMode>(a);
  const bool bias = o.bias != nullptr, map = !o.map.identity || o.row_map != nullptr;
  const bool alone = !extra && !entropy && bias + map + weighted == 1;
  if (extra || (o.row_map != nullptr && (!alone || o.map.capped))) {
    return o.map.capped ? Set::more_capped : Set::more;
  }
  if (!alone) return o.map.capped ? Set::any_capped : Set::any;
  if (bias) return Set::biased;
  if (weighted) return Set::smoothed;
  return o.map.capped ? Set::capped : Set::scaled;
}

template <class T, Mode kMode>
void launch_options(const LinearWork& work, const Arguments& arguments) {
  const auto launch_with = [&](auto set) { launch_set<T, kMode, set()>(work, arguments); };
  using enum Set;
  if constexpr (kMode == Mode::sums_kept) {
    launch_with(std::integral_constant<Set, any_capped>{});
  } else if constexpr (std::is_same_v<T, __half>) {
    // f16 has no kernels for single options.
    const bool more = arguments.options.row_map != nullptr || needs_more<kMode>(arguments);
    if constexpr (kMode != Mode::sums_e) {  // f16 keeps no E with a softcap
      if (arguments.options.map.capped) {
        if (more) return launch_with(std::integral_constant<Set, more_capped>{});
        return launch_with(std::integral_constant<Set, any_capped>{});
      }
    }
    if (more) return launch_with(std::integral_constant<Set, Set::more>{});
    launch_with(std::integral_constant<Set, any>{});
  } else {
    switch (choose_set<kMode>(arguments)) {
      case more:
        return launch_with(std::integral_constant<Set, more>{});
      case more_capped:
        return launch_with(std::integral_constant<Set, more_capped>{});
      case capped:
        return launch_with(std::integral_constant<Set, capped>{});
      case biased:
        return launch_with(std::integral_constant<Set, biased>{});
      case smoothed:
        return launch_with(std::integral_constant<Set, smoothed>{});
      case scaled:
        return launch_with(std::integral_constant<Set, scaled>{});
      case any:
        return launch_with(std::integral_constant<Set, any>{});
      case any_capped:
        return launch_with(std::integral_constant<Set, any_capped>{});
    }
  }
}

template <class T, Mode kMode>
void launch_plain(const LinearWork& work, Arguments arguments) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  // Zeros follow D, so that extra steps change nothing.
  arguments.depth_tiles = std::max(arguments.depth_tiles, 2 * split_steps<kMode>);
  const Operands operands = make_operands(work);
  const InputRows own = input_rows(call, plan);
  CUtensorMap panel_map{};
  if constexpr (kMode == Mode::sums) {
    // The kernel uses this map if some tokens do not count.
    if (own.copied) {
      panel_map = compacted_map(work);
    } else if (own.data != nullptr) {
      panel_map = own_map(own, call.shape.dtype, 0, call.shape.tokens, box_rows, stream);
    }
  } else {
    panel_map = panel_map_of(work, arguments, box_rows);
  }
  stream->launch_config("sm90 plain forward", plain_forward_kernel<T, kMode>, whole_chip(device),
                        operands.input, operands.weight, panel_map, own, arguments);
}

template <class T, Mode kMode>
void launch(const LinearWork& work, const Arguments& arguments) {
  const LinearCall& call = work.call;
  if (call.shape.kernels.plain) {
    launch_plain<T, kMode>(work, arguments);
  } else {
    launch_options<T, kMode>(work, arguments);
  }
}

Partials from_segment(Partials p, int64_t segment) {
  for (float** sums : {&p.maximum, &p.sum, &p.shifted, &p.weighted, &p.logits, &p.squared}) {
    if (*sums != nullptr) *sums += segment;
  }
  if (p.argmax != nullptr) p.argmax += segment;
  if (p.above != nullptr) p.above += segment;
  return p;
}

// The error of a sum grows with the distance of its anchor from the maximum, its bound
// (docs/semantics.md) with log2 of the vocabulary V. The limit is 2 (3 + log2 V) nats; it depends
// only on the shape, so that no plan changes a bit. Below 2^90 a row's sum over 2^31 columns is
// still finite.
float most_distance(int64_t vocab) {
  return std::min(90.0f, 2.885f * (3 + std::log2(static_cast<float>(vocab))));
}

// Small, because sum e^(z - m) (z - m) is the difference of two sums that grow with the distance.
constexpr float most_shifted_distance = 12;
// Squares have twice the exponents, which halves the distance.
constexpr float most_squared_distance = 40;

float distance_of(const LinearCall& call, const Partials& partials) {
  const float most = most_distance(call.shape.vocab);
  if (partials.shifted != nullptr) return most_shifted_distance;
  return partials.squared != nullptr ? std::min(most, most_squared_distance) : most;
}

// The part of the map that all rows share, if each row has its own map.
MapFactors map_of_all(const LinearCall& call) {
  if (!call.in.makes_maps) return call.map;
  if (!call.map.capped) return {};
  LossOptions options = call.in.options;
  options.temperature = 1;
  return map_factors(logit_map(options));
}

TileOptions make_options(const LinearCall& call, const LinearMemory& m) {
  const MapFactors map = map_of_all(call);
  TileOptions o{.map = map,
                .row_map = m.tokens.map,
                .row_slope = m.slope,
                .bias = m.bias_row,
                .class_weight = m.class_weights,
                .smoothing = call.shape.smoothing,
                .entropy = static_cast<bool>(call.in.grad_entropy),
                .small = 2 * most_of_small / map.inward,
                .near_cap = near_cap * std::fabs(map.outward),
                .terms = {},
                .large_terms = {}};
  std::ranges::copy(large_tanh, o.large_terms);
  const double half = 0.5 * map.inward;
  double factor = map.slope;
  float* to = o.terms;
  for (const float term : {tanh_3, tanh_5, tanh_7, tanh_9, tanh_11}) {
    factor *= half * half;
    *to++ = static_cast<float>(factor * term);
  }
  // The short polynomial is disabled if one of its coefficients is not a normal f32 number; the
  // long one has no such coefficients.
  if (!std::ranges::all_of(o.terms, [](float x) { return std::isnormal(x); })) o.small = -1;
  return o;
}

Arguments make_arguments(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
                         const Chunk& chunk, int64_t first, int64_t columns, const Panel& panel) {
  return {.chunk = chunk,
          .team = {works_apart(plan)},
          .left_rows = copied_rows(call.shape, plan),
          .partials = from_segment(m.partials, first / tile_columns),
          .target_logit = m.target_logit,
          .gradients = m.gradients,
          .target_gradient = m.target_gradient,
          .panel = panel,
          .first_column = first,
          .columns = columns,
          .panel_end = (panel.columns + 63) / 64 * 64,
          .depth_tiles = static_cast<int32_t>((call.shape.hidden + tile_depth - 1) / tile_depth),
          .most_sum = std::exp2(most_distance(call.shape.vocab)),
          .most_distance = distance_of(call, m.partials),
          .options = make_options(call, m)};
}

}  // namespace

bool has_code() { return LOGITLESS_HAS_SM90A; }

namespace {

void sum_once_more(const LinearWork& work, Arguments arguments) {
  arguments.panel = {};
  if (work.call.shape.dtype == DType::f16)
    return launch_options<__half, Mode::sums>(work, arguments);
  launch_options<__nv_bfloat16, Mode::sums>(work, arguments);
}

// The kernel has no room for some pairs of sums (exponentials above the target together with
// squares, logits together with the class-weighted sum). If both sums of a pair are requested, the
// forward runs once more for it. Returns the sums that are left to compute.
Partials make_second_sums(const LinearWork& work, Arguments arguments) {
  Partials& p = arguments.partials;
  Partials rest = p;
  if (p.mass_rows != 0 && p.squared != nullptr) {
    p.squared = nullptr;
    sum_once_more(work, arguments);
    rest.mass_rows = 0;
    p = rest;
  }
  if (p.logits == nullptr) return rest;
  p.weighted = p.logits;
  arguments.options.class_weight = nullptr;
  sum_once_more(work, arguments);
  return rest;
}

}  // namespace

void HopperEngine::logits(const LinearWork& work, int64_t first, int64_t columns,
                          const Panel& panel) const {
  const auto& [call, plan, m, device, stream, chunk] = work;
  Arguments arguments = make_arguments(call, plan, m, chunk, first, columns, panel);
  arguments.partials = make_second_sums(work, arguments);
  if (call.top) {
    arguments.panel = {reinterpret_cast<char*>(m.logits), plan.block_columns, first, columns};
  }
  if (call.shape.dtype == DType::f16) {
    if (panel.data == nullptr) return launch<__half, Mode::sums>(work, arguments);
    return launch<__half, Mode::sums_e>(work, arguments);
  }
  if (panel.data == nullptr) {
    launch<__nv_bfloat16, Mode::sums>(work, arguments);
  } else if (call.shape.kernels.kept == Origin::dz_in_place) {
    launch_options<__nv_bfloat16, Mode::sums_kept>(work, arguments);
  } else {
    launch<__nv_bfloat16, Mode::sums_e>(work, arguments);
  }
}

void HopperEngine::remake(const LinearWork& work, const Panel& panel) const {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const Arguments arguments =
      make_arguments(call, plan, m, chunk, panel.first, panel.columns, panel);
  if (call.shape.dtype == DType::f16) {
    launch<__half, Mode::dz>(work, arguments);
  } else {
    launch<__nv_bfloat16, Mode::dz>(work, arguments);
  }
}

}  // namespace logitless::cuda::sm90

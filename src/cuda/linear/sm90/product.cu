// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/sm90/engine.h"

#include <algorithm>

#include "src/cuda/linear/sm90/few_tokens.cuh"
#include "src/cuda/linear/sm90/join.cuh"
#include "src/cuda/linear/sm90/prepared.cuh"
#include "src/cuda/linear/sm90/product.cuh"
#include "src/cuda/linear/sm90/tensor_map.h"
#include "src/cuda/linear/sm90/whole_chip.cuh"
#include "src/cuda/linear/tiled/teams.h"

namespace logitless::cuda::sm90 {
namespace {

using tiled::Kept;
using tiled::tiled_part;

// Row clusters per group of a Schedule, like weight_group.
constexpr int input_group = 8;

template <Gradient kGradient>
void launch(const LinearWork& work, Prepared p) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const int clusters = device.multiprocessors / 2;
  constexpr bool is_input = kGradient == Gradient::input;
  p.a.team.apart = is_input && tiled::works_apart(plan);
  if (is_input) p.a.slot_parts = tiled::slot_rows(plan) / 64;
  use_teams<kGradient>(m, is_input ? tiled::teams_of(plan, clusters) : clusters,
                       is_input ? tiled_part(plan).slots : tiled::weight_slots(plan), &p);
  with_types(call.shape.dtype, p.out, [&](auto element, auto written) {
    stream->launch_config(is_input ? "sm90 grad_input" : "sm90 grad_weight",
                          product_kernel<decltype(element), kGradient, decltype(written)>,
                          whole_chip(device), p.operands, p.a);
  });
  // The host knows the number of rows of grad_weight, so no tile is cut if they fill the clusters.
  const int64_t tiles = (p.a.rows + cluster_rows - 1) / cluster_rows *
                        int64_t{(p.a.columns + tile_columns - 1) / tile_columns};
  if (tiled_part(plan).slots == 0 || (!is_input && tiles % clusters == 0)) return;
  join<kGradient>(work, p);
}

// Whether few_tokens.cuh computes grad_weight: it takes 3 to 7 % less time at 512 tokens and 28 %
// less at 64. TMA stores whole 16 bytes, so rows must end at a multiple, because the memory after
// them is not ours. No tile is cut, because none is deep.
constexpr int64_t few_tokens = 512;
bool takes_few(const LinearWork& work, const Prepared& p) {
  const ProductArguments& a = p.a;
  return work.chunk.rows <= few_tokens && p.out == work.call.shape.dtype && !a.add &&
         a.line == nullptr && reinterpret_cast<uintptr_t>(a.out) % 16 == 0 && a.stride % 8 == 0 &&
         a.columns % 8 == 0;
}
void launch_few(const LinearWork& work, Prepared p) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  use_teams<Gradient::weight>(m, device.multiprocessors / 2, 0, &p);
  const CUtensorMap out =
      make_map(p.a.out, p.out, p.a.rows, p.a.columns, p.a.stride, box_rows, stream);
  with_half(call.shape.dtype, [&](auto element) {
    stream->launch_config("sm90 grad_weight of few tokens", few_tokens_kernel<decltype(element)>,
                          whole_chip(device), p.operands, out, p.a);
  });
}

// The map of the right operand: `rows` rows along the depth, each with the output's columns
// contiguous.
CUtensorMap right_map(const LinearWork& work, const void* data, int64_t rows, int64_t columns,
                      int64_t stride, ProductArguments* a) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const BlockMap map = make_block_map(data, call.shape.dtype, rows, columns, stride, tile_depth / 2,
                                      tile_columns / 64, stream);
  a->right_boxes = map.boxes;
  return map.map;
}

Prepared input_product(const LinearWork& work, const Kept& kept, DType out, ProductArguments a) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const LinearShape& s = call.shape;
  const char* weight = s.copies_weight
                           ? m.weight
                           : static_cast<const char*>(call.weight.data) + call.weight.byte_offset;
  const int64_t stride = weight_stride(call);
  const auto map = [&](const Panel& panel) {
    const int64_t blocks = (panel.columns + 63) / 64;
    return make_map(panel.data, s.dtype, blocks * panel.pitch, 64, 64, tiled::rows_of_tile(plan),
                    stream);
  };
  // A part without columns has no address, so its map is that of the other part.
  const bool all_behind = kept.panel.columns == 0, none_behind = kept.behind.columns == 0;
  const Panel& first = all_behind ? kept.behind : kept.panel;
  a.depth = static_cast<int32_t>(kept.columns());
  a.steps_in_front = static_cast<int32_t>((first.columns + tile_depth - 1) / tile_depth);
  a.panel_rows = static_cast<int32_t>(first.pitch);
  a.group = input_group;
  a.left_rows = tiled::rows_of_tile(plan);
  Prepared p{.out = out};
  p.operands.left = map(first);
  if (!all_behind && !none_behind) p.operands.behind = map(kept.behind);
  p.operands.right =
      right_map(work, weight + first.first * stride * 2, kept.columns(), s.hidden, stride, &a);
  p.a = a;
  return p;
}

// Directs the product's output to f32 rows from `sums` on, at the input's pitch, without scaling.
void write_sums(float* sums, const LinearShape& shape, ProductArguments* a) {
  a->out = sums;
  a->stride = a->columns = static_cast<int32_t>(shape.hidden_pitch());
  a->wide = true;
}
// Directs the product's output to the caller's gradient from row `first` on.
void write_gradient(const TensorView& gradient, int64_t first, ProductArguments* a) {
  const int64_t size = size_of(gradient.dtype), stride = gradient.stride[0];
  char* out = static_cast<char*>(gradient.data) + gradient.byte_offset + first * stride * size;
  a->out = out;
  a->stride = stride;
  a->columns = static_cast<int32_t>(gradient.shape[1]);
  a->scaled = true;
  a->wide = reinterpret_cast<uintptr_t>(out) % (4 * size) == 0 && stride % 4 == 0 &&
            gradient.shape[1] % 4 == 0;
}

}  // namespace

template <Gradient kGradient>
void join(const LinearWork& work, const Prepared& p) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const LaunchShape shape{.blocks = static_cast<unsigned>(device.multiprocessors) * 6,
                          .threads = 128,
                          .early = call.launches_early};
  with_types(call.shape.dtype, p.out, [&](auto, auto written) {
    stream->launch_config("sm90 join", join_kernel<kGradient, decltype(written)>, shape, p.a);
  });
}

template void join<Gradient::input>(const LinearWork& work, const Prepared& p);

Prepared whole_input(const LinearWork& work, const Kept& kept, bool of_e) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  ProductArguments a{};
  a.chunk = chunk;
  if (of_e) a.factors = m.factors;
  write_gradient(call.grad_input, 0, &a);
  a.rows = chunk.rows;
  a.mapped = true;
  if (of_e) a.line = m.class_row;
  return input_product(work, kept, call.grad_input.dtype, a);
}

Prepared weight_product(const LinearWork& work, const Panel& panel, const char* rows, bool of_e,
                        bool add) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  ProductArguments a{};
  a.chunk = chunk;
  const TensorView& out = call.grad_weight;
  const bool sums = sums_grad_weight(call.shape, plan);
  if (plan.lent_sum_rows > 0) {
    write_sums(out.as<float>(), call.shape, &a);
    a.rest = m.grad_weight_sum;
    a.split = static_cast<int32_t>(plan.lent_sum_rows);
  } else if (sums) {
    write_sums(m.grad_weight_sum + panel.first * call.shape.hidden_pitch(), call.shape, &a);
  } else {
    write_gradient(out, panel.first, &a);
  }
  a.rows = static_cast<int32_t>(std::min(panel.columns, call.shape.rows_of_weight()));
  a.group = weight_group;
  a.left_rows = tile_rows;
  a.add = add;
  if (of_e) a.line = m.smoothed_row;
  if (m.class_weights != nullptr) a.class_weight = m.class_weights + panel.first;
  Prepared p{.out = sums ? DType::f32 : out.dtype};
  p.operands.left = make_panel_map(panel.data, call.shape.dtype, panel.pitch, panel.pitch,
                                   (panel.columns + 63) / 64, tile_depth, tile_rows / 64, stream);
  p.operands.right =
      right_map(work, rows, chunk.rows, call.shape.hidden_pitch(), call.shape.hidden_pitch(), &a);
  p.a = a;
  return p;
}

void HopperEngine::input_sums(const LinearWork& work, const Kept& kept, const Range& rows,
                              float* sums, bool of_e, bool add) const {
  const auto& [call, plan, m, device, stream, chunk] = work;
  ProductArguments a{};
  a.chunk = chunk;
  write_sums(sums, call.shape, &a);
  a.first_row = static_cast<int32_t>(rows.first);
  a.rows = static_cast<int32_t>(rows.count);
  a.add = add;
  if (of_e) a.factors = m.factors;
  if (of_e) a.line = m.class_row;
  launch<Gradient::input>(work, input_product(work, kept, DType::f32, a));
}

void HopperEngine::grad_input(const LinearWork& work, const Kept& kept, bool of_e) const {
  launch<Gradient::input>(work, whole_input(work, kept, of_e));
}

void HopperEngine::grad_weight(const LinearWork& work, const Panel& panel, const char* rows,
                               bool of_e, bool add) const {
  Prepared p = weight_product(work, panel, rows, of_e, add);
  if (takes_few(work, p)) return launch_few(work, p);
  launch<Gradient::weight>(work, p);
}

}  // namespace logitless::cuda::sm90

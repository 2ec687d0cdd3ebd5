// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/sm90/product.h"

#include "src/cuda/sm90/forward.h"
#include "src/cuda/sm90/product.cuh"
#include "src/cuda/sm90/tensor_map.h"

namespace logitless::cuda::sm90 {
namespace {

// The operands' dtype, as the kernels name it.
template <class F>
void with_half(DType dtype, F&& f) {
  if (dtype == DType::f16) {
    f(__half{});
  } else {
    f(__nv_bfloat16{});
  }
}

template <Gradient kGradient>
void launch(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m, DType out,
            const CUtensorMap& left, const CUtensorMap& right, ProductArguments a,
            const DeviceInfo& device, Stream* stream) {
  const unsigned blocks = static_cast<unsigned>(device.multiprocessors / 2 * 2);
  a.clusters = static_cast<int32_t>(blocks / 2);
  a.slots = m.slots;
  a.slot_count = plan.slots;
  constexpr bool is_input = kGradient == Gradient::input;
  const auto launch_both = [&](auto element, auto written) {
    using T = decltype(element);
    using Out = decltype(written);
    stream->launch_config(is_input ? "sm90 grad_input" : "sm90 grad_weight",
                          product_kernel<T, kGradient, Out>,
                          LaunchShape{blocks, block_threads, shared_bytes, 2}, left, right, a);
    // Rows of grad_weight are known here, so that nothing is cut where they fill the clusters.
    const int64_t tiles = (a.rows + cluster_rows - 1) / cluster_rows *
                          int64_t{(a.columns + tile_columns - 1) / tile_columns};
    if (plan.slots == 0 || (!is_input && tiles % a.clusters == 0)) return;
    stream->launch("sm90 join", join_kernel<kGradient, Out>, 4 * blocks, 128, a);
  };
  with_half(call.shape.dtype, [&](auto element) {
    // f16 keeps no E: its grad_input comes of f32 sums.
    if constexpr (!is_input || std::is_same_v<decltype(element), __nv_bfloat16>) {
      if (out != DType::f32) return launch_both(element, element);
    }
    launch_both(element, float{});
  });
}

// The right operand: `rows` of the depth axis, each with the output's columns along memory.
CUtensorMap right_map(const LinearCall& call, const void* data, int64_t rows, int64_t columns,
                      int64_t stride, ProductArguments* a, Stream* stream) {
  const BlockMap map = make_block_map(data, call.shape.dtype, rows, columns, stride, tile_depth / 2,
                                      tile_columns / 64, stream);
  a->right_boxes = map.boxes;
  return map.map;
}

void input_product(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
                   const Panel& panel, DType out, ProductArguments a, const DeviceInfo& device,
                   Stream* stream) {
  const LinearShape& s = call.shape;
  const char* weight = s.copies_weight
                           ? m.weight
                           : static_cast<const char*>(call.weight.data) + call.weight.byte_offset;
  const int64_t stride = weight_stride(call, plan);
  const int64_t blocks = (panel.columns + 63) / 64;
  const CUtensorMap left =
      make_map(panel.data, s.dtype, blocks * panel.pitch, 64, 64, tile_rows, stream);
  a.panel_rows = static_cast<int32_t>(panel.pitch);
  const CUtensorMap right = right_map(call, weight + panel.first * stride * 2, panel.columns,
                                      s.hidden, stride, &a, stream);
  launch<Gradient::input>(call, plan, m, out, left, right, a, device, stream);
}

constexpr int input_group = 8, weight_group = 2;  // measured: docs/kernels/hopper.md

// The whole of `sums`, or the caller's gradient from row `first` on.
void write_sums(float* sums, const LinearPlan& plan, ProductArguments* a) {
  a->out = sums;
  a->stride = a->columns = static_cast<int32_t>(plan.hidden_pitch);
  a->wide = true;
}
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

bool writes(const TensorView& gradient, DType inputs) {
  return (gradient.dtype == DType::f32 || gradient.dtype == inputs) &&
         (gradient.stride[1] == 1 || gradient.shape[1] == 1);
}

void input_sums(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
                const Chunk& chunk, const Panel& panel, int64_t row, int64_t rows, float* sums,
                bool of_e, bool add, const DeviceInfo& device, Stream* stream) {
  ProductArguments a{};
  a.chunk = chunk;
  write_sums(sums, plan, &a);
  a.first_row = static_cast<int32_t>(row);
  a.rows = static_cast<int32_t>(rows);
  a.depth = static_cast<int32_t>(panel.columns);
  a.group = input_group;
  a.add = add;
  if (of_e) a.factors = m.factors;
  if (of_e && panel.first == 0) a.line = m.class_row;  // once, of all of E's columns
  input_product(call, plan, m, panel, DType::f32, a, device, stream);
}

void grad_input(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
                const Chunk& chunk, const Panel& panel, bool of_e, const DeviceInfo& device,
                Stream* stream) {
  ProductArguments a{};
  a.chunk = chunk;
  if (of_e) a.factors = m.factors;
  write_gradient(call.grad_input, 0, &a);
  a.rows = chunk.rows;
  a.depth = static_cast<int32_t>(panel.columns);
  a.group = input_group;
  a.mapped = true;
  if (of_e) a.line = m.class_row;
  input_product(call, plan, m, panel, call.grad_input.dtype, a, device, stream);
}

void grad_weight(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
                 const Chunk& chunk, const Panel& panel, const char* rows, float* sums, bool of_e,
                 bool add, const DeviceInfo& device, Stream* stream) {
  ProductArguments a{};
  a.chunk = chunk;
  if (sums != nullptr) {
    write_sums(sums + panel.first * plan.hidden_pitch, plan, &a);
  } else {
    write_gradient(call.grad_weight, panel.first, &a);
  }
  a.rows = static_cast<int32_t>(panel.columns);
  a.group = weight_group;
  a.add = add;
  if (of_e) a.line = m.smoothed_row;
  if (m.class_weights != nullptr) a.class_weight = m.class_weights + panel.first;
  const CUtensorMap left =
      make_panel_map(panel.data, call.shape.dtype, panel.pitch, (panel.columns + 63) / 64,
                     tile_depth, tile_rows / 64, stream);
  const CUtensorMap right =
      right_map(call, rows, chunk.rows, plan.hidden_pitch, plan.hidden_pitch, &a, stream);
  launch<Gradient::weight>(call, plan, m, sums != nullptr ? DType::f32 : call.grad_weight.dtype,
                           left, right, a, device, stream);
}

}  // namespace logitless::cuda::sm90

// SPDX-License-Identifier: Apache-2.0
// c = a b^T is computed in tasks of 32 rows: b is packed once; a and a tile of c are in a thread's
// scratch. Every element is one chain of additions, so the number of threads changes no bit.
#include "examples/demo/product.h"

#include <algorithm>

#include "src/cpu/thread_pool.h"

namespace logitless::cli::demo {
namespace {

constexpr int64_t tile_rows = 32;  // a multiple of every engine's a_rows

cpu::Source source_of(Matrix<const float> m) {
  return {.data = reinterpret_cast<const char*>(m.data), .row_stride = m.columns};
}
cpu::Source transpose_of(Matrix<const float> m) {
  return {
      .data = reinterpret_cast<const char*>(m.data), .row_stride = 1, .column_stride = m.columns};
}

}  // namespace

void Products::pack(const cpu::Source& b, bool along_rows, int64_t columns, int64_t depth) {
  const cpu::Engine engine = cpu::choose_engine(DType::f32);
  packed_.resize(static_cast<size_t>(engine.b_bytes(columns, depth)) / sizeof(float));
  const int64_t width = engine.b_columns, panel = width * engine.padded_k(depth);
  const Executor& executor = cpu::default_executor();
  cpu::for_each_task(executor, executor.num_threads, engine.b_panels(columns),
                     [&](int64_t task, int64_t) {
                       const int64_t first = task * width;
                       const int64_t count = std::min(width, columns - first);
                       float* to = packed_.data() + task * panel;
                       if (along_rows) {
                         cpu::pack_b_along_rows(engine, b, 0, depth, first, count, to);
                       } else {
                         cpu::pack_b_along_columns(engine, b, first, count, 0, depth, to);
                       }
                     });
}

void Products::multiply(const cpu::Source& a, int64_t depth, bool add, Matrix<float> c) {
  const cpu::Engine engine = cpu::choose_engine(DType::f32);
  const int64_t panels = engine.b_panels(c.columns), width = panels * engine.b_columns;
  const int64_t block = tile_rows * engine.padded_k(depth), lane = block + tile_rows * width;
  const Executor& executor = cpu::default_executor();
  scratch_.resize(static_cast<size_t>(executor.num_threads * lane));
  cpu::for_each_task(executor, executor.num_threads, (c.rows + tile_rows - 1) / tile_rows,
                     [&](int64_t task, int64_t index) {
                       float* packed_a = scratch_.data() + index * lane;
                       float* tile = packed_a + block;  // [tile_rows, width]
                       const int64_t first = task * tile_rows,
                                     rows = std::min(tile_rows, c.rows - first);
                       cpu::pack_a_along_columns(engine, a, first, rows, 0, depth, packed_a);
                       cpu::multiply(engine, {.a = packed_a,
                                              .a_panel_stride = engine.a_bytes(1, depth),
                                              .a_panels = engine.a_panels(rows),
                                              .b = packed_.data(),
                                              .b_panel_stride = engine.b_bytes(1, depth),
                                              .b_panels = panels,
                                              .k = engine.padded_k(depth),
                                              .c = tile,
                                              .c_stride = width});
                       cpu::add_scaled(tile, width, 1, rows, c.columns, !add,
                                       c.data + first * c.columns, c.columns);
                     });
}

void Products::forward(Matrix<const float> x, Matrix<const float> w, bool add, Matrix<float> y) {
  pack(source_of(w), false, w.rows, w.columns);
  multiply(source_of(x), x.columns, add, y);
}

void Products::input_gradient(Matrix<const float> grad_y, Matrix<const float> w,
                              Matrix<float> grad_x) {
  pack(source_of(w), true, w.columns, w.rows);
  multiply(source_of(grad_y), grad_y.columns, false, grad_x);
}

void Products::weight_gradient(Matrix<const float> grad_y, Matrix<const float> x,
                               Matrix<float> grad_w) {
  pack(source_of(x), true, x.columns, x.rows);
  multiply(transpose_of(grad_y), grad_y.rows, false, grad_w);
}

}  // namespace logitless::cli::demo

// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/portable/products.h"

#include "src/cuda/linear/portable/engine.h"

namespace logitless::cuda {

int64_t HeadProducts::depth() const {
  return work_.call.shape.copies_weight ? work_.call.shape.hidden_pitch() : work_.call.shape.hidden;
}

void HeadProducts::multiply(Product* p, const float* alpha, bool add) const {
  p->alpha = alpha;
  p->beta = add ? one() : zero();
  p->tf32 = work_.call.in.options.allow_tf32;
  cuda::multiply(*p, work_.device, work_.m.library, work_.stream);
}

void HeadProducts::logits(const Logits& block) const {
  const Operand weight = weight_rows(work_.call, work_.m, block.column);
  const int64_t pitch = work_.call.shape.hidden_pitch(), element = size_of(work_.call.shape.dtype);
  Product p;
  p.in = work_.call.shape.dtype;
  p.rows = block.rows;
  p.columns = block.columns;
  p.depth = depth();
  p.a = {work_.m.input + block.row * pitch * element, pitch, 1};
  p.b = {weight.data, weight.column_stride, weight.row_stride};
  p.c = block.to;
  p.c_stride = block.pitch;
  p.most_rows = block.most_rows;
  p.most_columns = block.most_columns;
  const int64_t tail = work_.call.shape.on_cuda_cores ? 0 : p.columns % 8;
  if (tail > 0 && p.columns > 8) {
    // Tensor cores have only slow kernels for such a number of columns: the last 8 columns are
    // another product, and some columns are computed twice.
    Product last = p;
    last.columns = 8;
    last.b.data = weight_rows(work_.call, work_.m, block.column + p.columns - 8).data;
    last.c = block.to + p.columns - 8;
    multiply(&last, one(), false);
    p.columns -= tail;
  }
  multiply(&p, one(), false);
}

// If the vocabulary is no multiple of 8, its last columns are another product, padded with zeros:
// with a depth of 50257, cuBLASLt's kernels are hundreds of times slower.
void HeadProducts::grad_input(const Panel& panel, int64_t row, int64_t rows, float* sums,
                              bool add) const {
  const int64_t element = size_of(work_.call.shape.dtype);
  const int64_t tail = panel.columns % 8;
  Product p;
  p.in = work_.call.shape.dtype;
  p.rows = rows;
  p.columns = depth();
  p.depth = panel.columns - tail;
  p.a = {panel.data + row * panel.pitch * element, panel.pitch, 1};
  p.b = weight_rows(work_.call, work_.m, panel.first);
  p.c = sums;
  p.c_stride = work_.call.shape.hidden_pitch();
  if (lends_block(work_.call.shape, work_.plan)) {
    p.parts = work_.m.logits;
    p.parts_bytes = block_bytes(work_.plan);
  }
  if (p.depth > 0) {
    multiply(&p, one(), add);
    add = true;
  }
  if (tail == 0) return;
  p.parts_bytes = 0;
  p.a.data = panel.data + (row * panel.pitch + p.depth) * element;
  p.b = {work_.m.weight_tail, work_.call.shape.hidden_pitch(), 1};
  p.columns = work_.call.shape.hidden_pitch();
  p.depth = 8;
  multiply(&p, one(), add);
}

// If the vocabulary is no multiple of 8, the last rows of 16 bits or TF32 go through a sum of 8
// rows: tensor cores read whole 16 bytes. On the CUDA cores such 8 rows would take 2 % of the call.
void HeadProducts::grad_weight(const Panel& panel, const char* factor_rows, bool adds) const {
  const int64_t tail = work_.call.shape.on_cuda_cores ? 0 : panel.columns % 8;
  const int64_t pitch = work_.call.shape.hidden_pitch();
  Product p;
  p.in = work_.call.shape.dtype;
  p.rows = panel.columns - tail;
  // A multiple of 8, since zeros follow the rows of both operands.
  p.depth = (work_.chunk.rows + (work_.m.smoothed_row != nullptr ? 2 : 0) + 7) / 8 * 8;
  p.columns = pitch;
  p.a = {panel.data, 1, panel.pitch};
  p.b = {factor_rows, pitch, 1};
  p.c_stride = pitch;
  if (tail > 0) {
    Product last = p;
    last.rows = 8;
    last.a.data = panel.data + p.rows * size_of(p.in);
    last.c = work_.m.weight_tail_sum;
    multiply(&last, one(), adds);
  }
  if (sums_grad_weight(work_.call.shape, work_.plan)) {
    p.c = work_.m.grad_weight_sum + panel.first * pitch;
    return multiply(&p, one(), adds);
  }
  const TensorView& out = work_.call.grad_weight;
  p.out = out.dtype;
  p.columns = work_.call.shape.hidden;
  p.c = static_cast<char*>(out.data) + out.byte_offset +
        panel.first * out.stride[0] * size_of(out.dtype);
  p.c_stride = out.stride[0];
  multiply(&p, &work_.m.tokens.scalars->gradient_scale, work_.call.accumulate || adds);
}

}  // namespace logitless::cuda

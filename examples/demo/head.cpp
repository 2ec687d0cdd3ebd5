// SPDX-License-Identifier: Apache-2.0
// The demo calls the library here: it makes views, asks for a workspace and runs the op.
#include "examples/demo/head.h"

#include <algorithm>

#include "cli/text.h"
#include "src/cpu/row_kernels.h"

namespace logitless::cli::demo {

template <class Op>
Op Head::make_op(const Parameters& p, std::span<const float> hidden,
                 std::span<const Token> target) {
  const auto tokens = static_cast<int64_t>(target.size());
  const void* input = hidden.data();
  const void* weight = p.weight;
  if (dtype_ == DType::bf16) {
    hidden_.resize(hidden.size());
    cpu::store_from_f32(hidden.data(), static_cast<int64_t>(hidden.size()), DType::bf16,
                        hidden_.data());
    input = hidden_.data();
    weight = weight_.data();
  }
  Op op;
  op.input = matrix_view(input, dtype_, tokens, shape_.hidden);
  op.weight = matrix_view(weight, dtype_, shape_.vocab, shape_.hidden);
  op.bias = vector_view(p.bias, DType::f32, shape_.vocab);
  op.target = vector_view(target.data(), DType::i32, tokens);
  return op;
}

Head::Head(const Shape& shape, int64_t batch, DType dtype)
    : shape_(shape), batch_(batch), dtype_(dtype) {
  if (dtype == DType::bf16) weight_.resize(static_cast<size_t>(shape.vocab * shape.hidden));
  // The shapes alone determine the workspace, so the data pointers are still null.
  const TensorView matrix = matrix_view(nullptr, dtype, batch, shape.hidden);
  const TensorView weight = matrix_view(nullptr, dtype, shape.vocab, shape.hidden);
  const TensorView bias = vector_view(nullptr, DType::f32, shape.vocab);
  const LinearCrossEntropyForwardBackward op{
      .input = matrix,
      .weight = weight,
      .bias = bias,
      .target = vector_view(nullptr, DType::i32, batch),
      .loss = scalar_view(nullptr, DType::f32),
      .grad_input = matrix_view(nullptr, DType::f32, batch, shape.hidden),
      .grad_weight = matrix_view(nullptr, DType::f32, shape.vocab, shape.hidden),
      .grad_bias = bias};
  WorkspaceSize size;
  check(workspace(op, {}, &size));
  workspace_ = Buffer(size.recommended);
}

void Head::round_weight(const Parameters& p, int64_t first, int64_t count) {
  if (dtype_ != DType::bf16) return;
  cpu::store_from_f32(p.weight + first, count, DType::bf16, weight_.data() + first);
}

void Head::round_weight(const Parameters& p) { round_weight(p, 0, shape_.vocab * shape_.hidden); }

double Head::loss_and_gradients(const Parameters& p, std::span<const float> hidden,
                                std::span<const Token> target, Parameters* g) {
  const auto tokens = static_cast<int64_t>(target.size());
  float loss = 0;
  grad_hidden_.resize(hidden.size());
  auto op = make_op<LinearCrossEntropyForwardBackward>(p, hidden, target);
  op.loss = scalar_view(&loss, DType::f32);
  op.grad_input = matrix_view(grad_hidden_.data(), DType::f32, tokens, shape_.hidden);
  op.grad_weight = matrix_view(g->weight, DType::f32, shape_.vocab, shape_.hidden);
  op.grad_bias = vector_view(g->bias, DType::f32, shape_.vocab);
  check(run(op, workspace_.workspace(), {}));
  return loss;
}

std::vector<float> Head::losses(const Parameters& p, std::span<const float> hidden,
                                std::span<const Token> target, DeviceType device) {
  std::vector<float> loss(target.size());
  auto op = make_op<LinearCrossEntropyForward>(p, hidden, target);
  op.loss = vector_view(loss.data(), DType::f32, static_cast<int64_t>(loss.size()));
  op.options.reduction = Reduction::none;
  const Execution execution{.device = {device}};
  WorkspaceSize size;
  check(workspace(op, execution, &size));
  if (size.recommended > workspace_.bytes()) workspace_ = Buffer(size.recommended);
  check(run(op, workspace_.workspace(), execution));
  return loss;
}

}  // namespace logitless::cli::demo

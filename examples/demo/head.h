// SPDX-License-Identifier: Apache-2.0
// The demo's output layer and loss are the library's linear cross-entropy over the whole
// vocabulary.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cli/buffer.h"
#include "examples/demo/network.h"
#include "logitless/logitless.h"

namespace logitless::cli::demo {

class Head {
 public:
  // A call has at most `batch` tokens. The products are in `dtype`, f32 or bf16; parameters and
  // gradients are f32 all the same.
  Head(const Shape& shape, int64_t batch, DType dtype);

  // Updates the rounded copy of the weight that bf16 products read.
  void round_weight(const Parameters& parameters);
  // Updates elements [first, first + count) of that copy.
  void round_weight(const Parameters& parameters, int64_t first, int64_t count);

  // Returns the mean loss. Overwrites gradient.weight and gradient.bias, and grad_hidden() [N, D].
  double loss_and_gradients(const Parameters& parameters, std::span<const float> hidden,
                            std::span<const Token> target, Parameters* gradient);
  std::span<const float> grad_hidden() const { return grad_hidden_; }

  // Returns the loss of each token, [N]; on DeviceType::reference every sum is computed in double.
  std::vector<float> losses(const Parameters& parameters, std::span<const float> hidden,
                            std::span<const Token> target, DeviceType device = DeviceType::cpu);

  int64_t batch() const { return batch_; }
  uint64_t workspace_bytes() const { return workspace_.bytes(); }
  DType dtype() const { return dtype_; }

 private:
  template <class Op>
  Op make_op(const Parameters& parameters, std::span<const float> hidden,
             std::span<const Token> target);

  Shape shape_;
  int64_t batch_;
  DType dtype_;
  Buffer workspace_;
  std::vector<uint16_t> weight_;    // [V, D]  bf16
  std::vector<uint16_t> hidden_;    // [N, D]  bf16
  std::vector<float> grad_hidden_;  // [N, D]
};

}  // namespace logitless::cli::demo

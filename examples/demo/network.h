// SPDX-License-Identifier: Apache-2.0
// The demo's network is a log-bilinear language model plus a layer of rectified units.
//   e_k = embedding_scale * weight[word k before]          the output matrix gives the embeddings
//   x   = [e_1 ... e_K]                                                                     [K D]
//   a   = max(0, unit_weight x + unit_bias)                                                 [H]
//   h   = hidden_bias + sum_k position_k * e_k (element by element) + unit_output a         [D]
//   logits = weight h + bias, left to the library in training                               [V]
// With no units (H = 0) it is the log-bilinear model of Mnih and Hinton (2007) with diagonal
// position matrices. It sees a window of K words; ../transformer.h has attention over all earlier
// words, in plain loops and on the installed library alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "examples/demo/product.h"
#include "examples/demo/text.h"

namespace logitless::cli::demo {

inline constexpr float embedding_scale = 25;

struct Shape {
  int64_t vocab = 0;    // V
  int64_t hidden = 0;   // D
  int64_t context = 0;  // K
  int64_t units = 0;    // H
};

// One flat array with a view of each parameter; gradients and moments have the same form.
class Parameters {
 public:
  explicit Parameters(const Shape& shape);
  Parameters(const Parameters&) = delete;
  Parameters& operator=(const Parameters&) = delete;

  struct View {
    std::string name;
    std::vector<int64_t> shape;
    float* data;
    int64_t size() const;
  };

  std::vector<float> all;
  float* weight;            // [V, D]
  float* bias;              // [V]
  float* position;          // [K, D]
  float* hidden_bias;       // [D]
  float* unit_weight;       // [H, K D]
  float* unit_bias;         // [H]
  float* unit_output;       // [D, H]
  std::vector<View> views;  // of those that are not empty, in this order
};

// Sets small random embeddings, positions that average, and as bias the logarithm of each word's
// frequency.
void initialize(const Shape& shape, const std::vector<int64_t>& count, uint64_t seed,
                Parameters* parameters);

class Network {
 public:
  explicit Network(const Shape& shape) : shape_(shape) {}

  // `context` is [N, K], the nearest word first. The result, [N, D], stays valid until the next
  // call.
  std::span<const float> forward(const Parameters& parameters, std::span<const Token> context);

  // Computes the gradients of the last forward() from grad_hidden [N, D]. Adds the embeddings'
  // gradient to gradient.weight, which already holds the head's, leaves gradient.bias unchanged and
  // overwrites the rest.
  void backward(const Parameters& parameters, std::span<const Token> context,
                std::span<const float> grad_hidden, Parameters* gradient);

 private:
  void gather(const Parameters& parameters, std::span<const Token> context);
  void position_gradients(std::span<const float> grad_hidden, Parameters* gradient) const;
  void unit_gradients(const Parameters& parameters, std::span<const float> grad_hidden,
                      Parameters* gradient);
  void scatter(std::span<const Token> context, Parameters* gradient) const;

  Shape shape_;
  int64_t tokens_ = 0;  // N
  Products products_;
  std::vector<float> x_;       // [N, K D]
  std::vector<float> a_;       // [N, H]
  std::vector<float> h_;       // [N, D]
  std::vector<float> grad_x_;  // [N, K D]
  std::vector<float> grad_a_;  // [N, H]
};

}  // namespace logitless::cli::demo

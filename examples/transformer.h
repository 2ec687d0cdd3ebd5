// SPDX-License-Identifier: Apache-2.0
// A language model of one transformer block, its gradients and its optimizer, in plain loops; its
// head and loss are the library's. train.cpp trains it.
//   x0 = embedding[token] + position[place]                                             [N, D]
//   x1 = x0 + attention(norm(x0) qkv) out           causal, `heads` heads                [N, D]
//   x2 = x1 + silu(norm(x1) up) down                                                     [N, D]
//   h  = norm(x2)                                                                        [N, D]
//   loss = the mean of -log softmax(head h)[next token], whose logits [N, V] it never holds
// norm(x) = gain x / sqrt(mean x^2 + 1e-5) and silu(u) = u / (1 + exp(-u)), element by element. The
// model that demo/ trains sees a window of fixed length and mixes it by fixed positions; this one
// has attention over all earlier words. The templates of T are also tested in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "logitless/logitless.h"

namespace example {

struct Shape {
  int64_t vocab = 0, hidden = 64, heads = 4, context = 64;  // V, D, H and T
  bool tied = true;                                         // the embedding is the head's weight
  int64_t inner() const { return 4 * hidden; }              // units of the MLP's layer
};

// One flat array with a view of each parameter; gradients and moments have the same form.
// A weight's first axis is its input's, so that loops run along the memory.
template <class T>
struct Parameters {
  struct View {
    std::string name;
    T* data;
    int64_t size;
    T deviation;  // of the random initial values; 0: they are 1
  };

  explicit Parameters(const Shape& s) {
    const int64_t D = s.hidden, F = s.inner();
    const T narrow = T(1) / std::sqrt(T(D)), deep = T(0.5) / std::sqrt(T(F));
    views = {{"embedding", nullptr, s.vocab * D, T(0.02)},
             {"position", nullptr, s.context * D, T(0.02)},
             {"norm1", nullptr, D, 0},
             {"qkv", nullptr, D * 3 * D, narrow},
             {"out", nullptr, D * D, narrow / 2},
             {"norm2", nullptr, D, 0},
             {"up", nullptr, D * F, narrow},
             {"down", nullptr, F * D, deep},
             {"norm3", nullptr, D, 0},
             {"head", nullptr, s.tied ? 0 : s.vocab * D, T(0.02)}};
    int64_t size = 0;
    for (const View& view : views) size += view.size;
    all.resize(static_cast<size_t>(size));
    T** const pointers[] = {&embedding, &position, &norm1, &qkv,   &out,
                            &norm2,     &up,       &down,  &norm3, &head};
    T* next = all.data();
    for (size_t i = 0; i < views.size(); ++i) {
      *pointers[i] = views[i].data = next;
      next += views[i].size;
    }
    if (s.tied) head = embedding;
  }
  Parameters(const Parameters&) = delete;
  Parameters& operator=(const Parameters&) = delete;

  void draw(uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    for (const View& view : views) {
      for (int64_t i = 0; i < view.size; ++i) {
        view.data[i] = view.deviation > 0 ? static_cast<T>(normal(random)) * view.deviation : T(1);
      }
    }
  }

  std::vector<T> all;
  std::vector<View> views;
  T* embedding;  // [V, D]
  T* position;   // [T, D]
  T* norm1;      // [D]
  T* qkv;        // [D, 3 D]
  T* out;        // [D, D]
  T* norm2;      // [D]
  T* up;         // [D, F]
  T* down;       // [F, D]
  T* norm3;      // [D]
  T* head;       // [V, D]
};

// Computes y += a x.
template <class T>
void add(int64_t size, T a, const T* x, T* y) {
  for (int64_t i = 0; i < size; ++i) y[i] += a * x[i];
}

// Eight independent sums can be vectorized; one sum cannot, since additions keep their order.
template <class T>
T dot(int64_t size, const T* a, const T* b) {
  T sums[8] = {}, sum = 0;
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) {
    for (int64_t j = 0; j < 8; ++j) sums[j] += a[i + j] * b[i + j];
  }
  for (; i < size; ++i) sum += a[i] * b[i];
  for (const T s : sums) sum += s;
  return sum;
}

// Computes y [N, O] += x [N, I] w [I, O].
template <class T>
void multiply(int64_t N, int64_t I, int64_t O, const T* x, const T* w, T* y) {
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t i = 0; i < I; ++i) add(O, x[n * I + i], w + i * O, y + n * O);
  }
}

// Computes grad_x [N, I] = grad_y w^T and grad_w [I, O] += x^T grad_y.
template <class T>
void multiply_backward(int64_t N, int64_t I, int64_t O, const T* x, const T* w, const T* grad_y,
                       T* grad_x, T* grad_w) {
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t i = 0; i < I; ++i) {
      grad_x[n * I + i] = dot(O, grad_y + n * O, w + i * O);
      add(O, x[n * I + i], grad_y + n * O, grad_w + i * O);
    }
  }
}

// Computes y = norm(x) and `scale` [N], 1 / sqrt(mean x^2 + 1e-5).
template <class T>
void norm(int64_t N, int64_t D, const T* x, const T* gain, T* scale, T* y) {
  for (int64_t n = 0; n < N; ++n, x += D, y += D) {
    scale[n] = 1 / std::sqrt(dot(D, x, x) / static_cast<T>(D) + T(1e-5));
    for (int64_t d = 0; d < D; ++d) y[d] = gain[d] * x[d] * scale[n];
  }
}

// Adds norm's part to grad_x and to grad_gain.
template <class T>
void norm_backward(int64_t N, int64_t D, const T* x, const T* gain, const T* scale, const T* grad_y,
                   T* grad_x, T* grad_gain) {
  for (int64_t n = 0; n < N; ++n, x += D, grad_y += D, grad_x += D) {
    T sum = 0;
    for (int64_t d = 0; d < D; ++d) {
      sum += gain[d] * grad_y[d] * x[d];
      grad_gain[d] += grad_y[d] * x[d] * scale[n];
    }
    const T along = sum * scale[n] * scale[n] / static_cast<T>(D);
    for (int64_t d = 0; d < D; ++d) grad_x[d] += scale[n] * (gain[d] * grad_y[d] - along * x[d]);
  }
}

// The network from tokens to h, for sequences of T tokens one after another.
template <class T>
class Block {
 public:
  explicit Block(const Shape& shape) : shape_(shape) {}

  // Returns h [N, D], which stays valid until the next call.
  const std::vector<T>& forward(const Parameters<T>& p, const std::vector<int32_t>& tokens);
  // Adds the gradients of the last forward() to `g`, the head's excepted; grad_h is [N, D].
  void backward(const Parameters<T>& p, const std::vector<int32_t>& tokens,
                const std::vector<T>& grad_h, Parameters<T>* g);

 private:
  // Calls f(queries, keys, values, mixed, probabilities) for every sequence and head, with the
  // first token's places in qkv_, mixed_ and probabilities_.
  template <class F>
  void for_heads(F&& f) const {
    const int64_t D = shape_.hidden, S = D / shape_.heads, T_ = shape_.context;
    for (int64_t sequence = 0; sequence < tokens_ / T_; ++sequence) {
      for (int64_t head = 0; head < shape_.heads; ++head) {
        const int64_t q = sequence * T_ * 3 * D + head * S;
        f(q, q + D, q + 2 * D, sequence * T_ * D + head * S,
          (sequence * shape_.heads + head) * T_ * T_);
      }
    }
  }
  void attend();
  void attend_backward(const std::vector<T>& grad_mixed, std::vector<T>* grad_qkv) const;

  Shape shape_;
  int64_t tokens_ = 0;                       // N
  std::vector<T> x0_, x1_, x2_;              // [N, D]
  std::vector<T> n1_, n2_, h_;               // [N, D]
  std::vector<T> scale1_, scale2_, scale3_;  // [N]
  std::vector<T> qkv_;                       // [N, 3 D]
  std::vector<T> probabilities_;             // [N / T, H, T, T]
  std::vector<T> mixed_;                     // [N, D]
  std::vector<T> u_, a_;                     // [N, F]
};

template <class T>
void Block<T>::attend() {
  const int64_t D = shape_.hidden, S = D / shape_.heads, context = shape_.context;
  const T scale = 1 / std::sqrt(static_cast<T>(S));
  mixed_.assign(static_cast<size_t>(tokens_ * D), 0);
  probabilities_.assign(static_cast<size_t>(tokens_ * shape_.heads * context), 0);
  for_heads([&](int64_t q, int64_t k, int64_t v, int64_t mixed, int64_t at) {
    for (int64_t t = 0; t < context; ++t) {
      T* p = &probabilities_[static_cast<size_t>(at + t * context)];
      T largest = -INFINITY, sum = 0;
      for (int64_t s = 0; s <= t; ++s) {
        p[s] = scale * dot(S, &qkv_[q + t * 3 * D], &qkv_[k + s * 3 * D]);
        largest = std::max(largest, p[s]);
      }
      for (int64_t s = 0; s <= t; ++s) sum += p[s] = std::exp(p[s] - largest);
      for (int64_t s = 0; s <= t; ++s) {
        p[s] /= sum;
        add(S, p[s], &qkv_[v + s * 3 * D], &mixed_[mixed + t * D]);
      }
    }
  });
}

template <class T>
void Block<T>::attend_backward(const std::vector<T>& grad_mixed, std::vector<T>* grad_qkv) const {
  const int64_t D = shape_.hidden, S = D / shape_.heads, context = shape_.context;
  const T scale = 1 / std::sqrt(static_cast<T>(S));
  std::vector<T> grad_p(static_cast<size_t>(context));
  for_heads([&](int64_t q, int64_t k, int64_t v, int64_t mixed, int64_t at) {
    for (int64_t t = 0; t < context; ++t) {
      const T* p = &probabilities_[at + t * context];
      const T* grad = &grad_mixed[mixed + t * D];
      T mean = 0;
      for (int64_t s = 0; s <= t; ++s) {
        grad_p[s] = dot(S, grad, &qkv_[v + s * 3 * D]);
        mean += p[s] * grad_p[s];
        add(S, p[s], grad, &(*grad_qkv)[v + s * 3 * D]);
      }
      for (int64_t s = 0; s <= t; ++s) {
        const T grad_score = scale * p[s] * (grad_p[s] - mean);
        add(S, grad_score, &qkv_[k + s * 3 * D], &(*grad_qkv)[q + t * 3 * D]);
        add(S, grad_score, &qkv_[q + t * 3 * D], &(*grad_qkv)[k + s * 3 * D]);
      }
    }
  });
}

template <class T>
const std::vector<T>& Block<T>::forward(const Parameters<T>& p,
                                        const std::vector<int32_t>& tokens) {
  const int64_t D = shape_.hidden, F = shape_.inner(), N = static_cast<int64_t>(tokens.size());
  tokens_ = N;
  for (auto* x : {&x0_, &n1_, &n2_, &h_}) x->assign(static_cast<size_t>(N * D), 0);
  for (auto* scale : {&scale1_, &scale2_, &scale3_}) scale->resize(static_cast<size_t>(N));
  for (int64_t n = 0; n < N; ++n) {
    add(D, T(1), p.embedding + tokens[n] * D, &x0_[n * D]);
    add(D, T(1), p.position + n % shape_.context * D, &x0_[n * D]);
  }
  norm(N, D, x0_.data(), p.norm1, scale1_.data(), n1_.data());
  qkv_.assign(static_cast<size_t>(N * 3 * D), 0);
  multiply(N, D, 3 * D, n1_.data(), p.qkv, qkv_.data());
  attend();
  x1_ = x0_;
  multiply(N, D, D, mixed_.data(), p.out, x1_.data());

  norm(N, D, x1_.data(), p.norm2, scale2_.data(), n2_.data());
  u_.assign(static_cast<size_t>(N * F), 0);
  multiply(N, D, F, n2_.data(), p.up, u_.data());
  a_.resize(u_.size());
  for (size_t i = 0; i < u_.size(); ++i) a_[i] = u_[i] / (1 + std::exp(-u_[i]));
  x2_ = x1_;
  multiply(N, F, D, a_.data(), p.down, x2_.data());
  norm(N, D, x2_.data(), p.norm3, scale3_.data(), h_.data());
  return h_;
}

template <class T>
void Block<T>::backward(const Parameters<T>& p, const std::vector<int32_t>& tokens,
                        const std::vector<T>& grad_h, Parameters<T>* g) {
  const int64_t D = shape_.hidden, F = shape_.inner(), N = tokens_;
  std::vector<T> grad_x(x2_.size()), grad_n(x2_.size());
  norm_backward(N, D, x2_.data(), p.norm3, scale3_.data(), grad_h.data(), grad_x.data(), g->norm3);

  // grad_x is x2's gradient, and x1's through the residual sum.
  std::vector<T> grad_u(u_.size());
  multiply_backward(N, F, D, a_.data(), p.down, grad_x.data(), grad_u.data(), g->down);
  for (size_t i = 0; i < u_.size(); ++i) {
    const T sigmoid = 1 / (1 + std::exp(-u_[i]));
    grad_u[i] *= sigmoid * (1 + u_[i] * (1 - sigmoid));
  }
  multiply_backward(N, D, F, n2_.data(), p.up, grad_u.data(), grad_n.data(), g->up);
  norm_backward(N, D, x1_.data(), p.norm2, scale2_.data(), grad_n.data(), grad_x.data(), g->norm2);

  // grad_x is now x1's gradient, and x0's through the residual sum.
  std::vector<T> grad_mixed(mixed_.size()), grad_qkv(qkv_.size());
  multiply_backward(N, D, D, mixed_.data(), p.out, grad_x.data(), grad_mixed.data(), g->out);
  attend_backward(grad_mixed, &grad_qkv);
  multiply_backward(N, D, 3 * D, n1_.data(), p.qkv, grad_qkv.data(), grad_n.data(), g->qkv);
  norm_backward(N, D, x0_.data(), p.norm1, scale1_.data(), grad_n.data(), grad_x.data(), g->norm1);
  for (int64_t n = 0; n < N; ++n) {
    add(D, T(1), &grad_x[n * D], g->embedding + tokens[n] * D);
    add(D, T(1), &grad_x[n * D], g->position + n % shape_.context * D);
  }
}

// The head and its loss are the library's.
class Head {
 public:
  explicit Head(const Shape& shape) : shape_(shape) {}

  // Returns the mean loss. Computes grad_h [N, D], and overwrites g->head, which may be the
  // embedding's gradient.
  float loss_and_gradients(const Parameters<float>& p, const std::vector<float>& h,
                           const std::vector<int32_t>& target, std::vector<float>* grad_h,
                           Parameters<float>* g) {
    grad_h->resize(h.size());
    auto op = make<logitless::LinearCrossEntropyForwardBackward>(p, h, target);
    op.grad_input = matrix(grad_h->data(), static_cast<int64_t>(target.size()));
    op.grad_weight = matrix(g->head, shape_.vocab);
    return run(op);
  }
  float loss(const Parameters<float>& p, const std::vector<float>& h,
             const std::vector<int32_t>& target) {
    return run(make<logitless::LinearCrossEntropyForward>(p, h, target));
  }

 private:
  struct alignas(64) CacheLine {
    char bytes[64];
  };

  logitless::TensorView matrix(const float* data, int64_t rows) const {
    return logitless::matrix_view(data, logitless::DType::f32, rows, shape_.hidden);
  }
  template <class Op>
  Op make(const Parameters<float>& p, const std::vector<float>& h,
          const std::vector<int32_t>& target) {
    Op op;
    op.input = matrix(h.data(), static_cast<int64_t>(target.size()));
    op.weight = matrix(p.head, shape_.vocab);
    op.target = logitless::vector_view(target.data(), logitless::DType::i32, op.input.shape[0]);
    op.loss = logitless::scalar_view(&loss_, logitless::DType::f32);
    return op;
  }
  template <class Op>
  float run(const Op& op) {
    logitless::WorkspaceSize size;
    logitless::Status status = logitless::workspace(op, {}, &size);
    if (status.ok()) {
      if (memory_.size() * sizeof(CacheLine) < size.recommended) {
        memory_.resize(size.recommended / sizeof(CacheLine) + 1);
      }
      status = logitless::run(op, {memory_.data(), memory_.size() * sizeof(CacheLine)}, {});
    }
    if (!status.ok()) throw std::runtime_error(status.message());
    return loss_;
  }

  Shape shape_;
  std::vector<CacheLine> memory_;
  float loss_ = 0;
};

// AdamW of step 1, 2, ...: m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, and p -= rate (m' /
// (sqrt(v') + 1e-8) + decay p), where m' and v' are corrected for their bias towards 0.
template <class T>
void adamw(int64_t step, T rate, T decay, int64_t size, const T* g, T* m, T* v, T* p) {
  const T b1 = T(0.9), b2 = T(0.95);
  const T unbias_m = 1 / (1 - std::pow(b1, static_cast<T>(step)));
  const T unbias_v = 1 / (1 - std::pow(b2, static_cast<T>(step)));
  for (int64_t i = 0; i < size; ++i) {
    m[i] = b1 * m[i] + (1 - b1) * g[i];
    v[i] = b2 * v[i] + (1 - b2) * g[i] * g[i];
    p[i] -= rate * (unbias_m * m[i] / (std::sqrt(unbias_v * v[i]) + T(1e-8)) + decay * p[i]);
  }
}

class Model {
 public:
  Model(const Shape& shape, uint64_t seed)
      : parameters(shape),
        gradient(shape),
        first_(shape),
        second_(shape),
        block_(shape),
        head_(shape) {
    parameters.draw(seed);
  }

  // Returns the mean loss of sequences of T tokens with the token that follows each, and fills
  // `gradient`.
  float gradients(const std::vector<int32_t>& tokens, const std::vector<int32_t>& next) {
    std::fill(gradient.all.begin(), gradient.all.end(), 0.0f);
    const std::vector<float>& h = block_.forward(parameters, tokens);
    const float loss = head_.loss_and_gradients(parameters, h, next, &grad_h_, &gradient);
    block_.backward(parameters, tokens, grad_h_, &gradient);
    return loss;
  }
  float loss(const std::vector<int32_t>& tokens, const std::vector<int32_t>& next) {
    return head_.loss(parameters, block_.forward(parameters, tokens), next);
  }
  // Takes a step of AdamW; the norms' gains have no weight decay.
  void step(float rate) {
    ++steps_;
    for (size_t i = 0; i < parameters.views.size(); ++i) {
      const auto& view = parameters.views[i];
      adamw(steps_, rate, view.deviation > 0 ? 0.1f : 0.0f, view.size, gradient.views[i].data,
            first_.views[i].data, second_.views[i].data, view.data);
    }
  }

  Parameters<float> parameters, gradient;

 private:
  Parameters<float> first_, second_;
  Block<float> block_;
  Head head_;
  std::vector<float> grad_h_;  // [N, D]
  int64_t steps_ = 0;
};

}  // namespace example

// SPDX-License-Identifier: Apache-2.0
// The case table: ops, shapes and options. Each option of features() is tested alone and with each
// other that it can be combined with. The table has no Combine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "logitless/logitless.h"

namespace logitless::conformance {

enum class OpKind {
  softmax,
  forward,
  backward,
  forward_backward,
  linear_forward,
  linear_backward,
  linear_forward_backward,
  divergence_forward,
  divergence_backward,
  divergence_forward_backward,
};
const char* name_of(OpKind op);
const char* name_of(DType dtype);

// Calls f with an op of this kind's type; not for divergences.
template <class F>
decltype(auto) with_op(OpKind kind, F&& f) {
  switch (kind) {
    case OpKind::softmax:
      return f(Softmax{});
    case OpKind::forward:
      return f(CrossEntropyForward{});
    case OpKind::backward:
      return f(CrossEntropyBackward{});
    case OpKind::forward_backward:
      return f(CrossEntropyForwardBackward{});
    case OpKind::linear_forward:
      return f(LinearCrossEntropyForward{});
    case OpKind::linear_backward:
      return f(LinearCrossEntropyBackward{});
    default:
      break;
  }
  return f(LinearCrossEntropyForwardBackward{});
}
// The same for every kind, for tests that use no field by name.
template <class F>
decltype(auto) with_any_op(OpKind kind, F&& f) {
  switch (kind) {
    case OpKind::divergence_forward:
      return f(LinearDivergenceForward{});
    case OpKind::divergence_backward:
      return f(LinearDivergenceBackward{});
    case OpKind::divergence_forward_backward:
      return f(LinearDivergenceForwardBackward{});
    default:
      return with_op(kind, f);
  }
}

struct Shape {
  int64_t tokens, hidden, vocab;  // hidden only in linear ops
};

enum class Data {
  normal,
  peaked,    // the target's logit is far above the others, as in a trained model
  constant,  // constant rows of one sign, where rounding errors align
  large,     // |z| is in the thousands
};

// How tensors are laid out in memory.
enum class Placement {
  dense,
  padded,      // rows further apart than their length
  strided,     // gaps between the elements of every tensor
  transposed,  // columns are contiguous
  broadcast,   // most inputs have a stride of 0
  unaligned,   // addresses are aligned to one element only
};

enum class NormalizerKind { counted, f32, i64 };

struct Case {
  OpKind op = OpKind::softmax;
  Shape shape{9, 19, 37};
  DType dtype = DType::f32;        // of input and weight, or of logits
  DType grad_input = DType::f32;   // of grad_input, grad_logits or probabilities
  DType grad_weight = DType::f32;  // of grad_weight and grad_bias
  DType target = DType::i64;
  DType argmax = DType::i64;
  DType bias_dtype = DType::f32;
  Data data = Data::normal;
  Placement placement = Placement::dense;
  LossOptions options{};
  NormalizerKind normalizer = NormalizerKind::counted;
  double ignored = 0;  // the share of ignored tokens
  double outside = 0;  // the share of the tokens whose target is outside the vocabulary
  bool bias = false, token_weight = false, vocab_weight = false;
  bool statistics = false, fault = false;
  bool row_statistics = false;  // lse, target_logit and the row's state alone
  bool logprob = false, rank = false, sum_p_squared = false, mean_logit = false;
  bool max_logprob = false, mass_above = false;
  bool entropy = false;       // without the other statistics
  bool temperatures = false;  // one per token
  int64_t chosen = 0;         // chosen columns per token; not for divergences
  DType ids = DType::i64;     // of the chosen columns' ids
  bool lists = false;         // chosen columns as lists of about `chosen` ids
  bool only_chosen = false;   // in Backward: nothing else has a gradient
  double inactive = 0;        // the share of the tokens without upstream gradient
  bool wants_grad_input = true, wants_grad_weight = true;
  bool wants_grad_bias = false;  // with or without a bias
  bool grad_loss = false, grad_lse = false, grad_target_logit = false, grad_entropy = false;
  bool saved_state = false;  // Backward gets Forward's row state
  bool accumulate = false, in_place = false;
  // Divergences only. teacher_hidden is the teacher's D (0: the student's). If `near`, the
  // teacher's weight is the student's plus a little noise.
  DivergenceOptions divergence{};
  int64_t teacher_hidden = 0;
  bool teacher_logits = false, teacher_bias = false, teacher_temperatures = false;
  bool near = false, equal = false, no_target = false;
  // k of top-k, at most V; top_ids has the dtype of argmax.
  int64_t listed = 0;
  uint64_t seed = 1;
};
std::string describe(const Case& c);

bool is_linear(OpKind op);
bool diverges(OpKind op);
bool has_loss(OpKind op);     // every op but Softmax
bool has_forward(OpKind op);  // writes loss and statistics
bool has_gradient(OpKind op);

// One option of the contract, in use. Features that share a group cannot be combined.
struct Feature {
  const char* name;
  uint32_t groups;
  bool (*applies)(OpKind op, DType dtype);
  void (*apply)(Case& c);
};
const std::vector<Feature>& features();
bool combine(const Feature& a, const Feature& b);

// Every feature alone (i == j) and every pair of features, for this op and dtype.
struct Pair {
  size_t first, second;
};
std::vector<Pair> feature_pairs(OpKind op, DType dtype);
Case case_of(OpKind op, DType dtype, const Pair& pair);

// Shapes that cross internal boundaries: of lanes, tiles, chunks, blocks.
std::vector<Shape> shapes(OpKind op);

}  // namespace logitless::conformance

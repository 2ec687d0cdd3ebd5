// SPDX-License-Identifier: Apache-2.0
// The calls whose plans are recorded. They are public ops, so that they survive internal changes:
// first every well-known head with the options that change a plan, then random calls from a
// generator that is the same on every machine and with every standard library.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "logitless/logitless.h"

namespace logitless::guards {

using AnyOp = std::variant<Softmax, CrossEntropyForward, CrossEntropyBackward,
                           CrossEntropyForwardBackward, LinearCrossEntropyForward,
                           LinearCrossEntropyBackward, LinearCrossEntropyForwardBackward>;

// How a matrix lies in memory: dense and 16-byte aligned; without an address yet; one element past
// an aligned address; rows padded to a multiple of 16 bytes, or not to one; column-major.
enum class Place { dense, null, off, padded, odd, across };

// Options of a call besides its shape; kOptions in plan_calls.cpp says which ops have them.
enum Option : uint32_t {
  bias,
  bias_f32,
  softcap,
  low_softcap,
  smoothing,
  z_loss,
  scale,
  class_weights,
  token_weights,
  per_token,
  summed,
  normalizer,
  narrow_target,
  lse,
  entropy,
  argmax,
  weighted,
  state,
  no_loss,
  given_state,
  grad_lse,
  grad_entropy,
  grad_loss,
  shard,
  probabilities,
  in_place,
  no_grad_input,
  no_grad_weight,
  grad_bias,
  accumulate,
  option_count
};

struct Call {
  int32_t kind = LOGITLESS_SOFTMAX;
  int64_t tokens = 0, hidden = 0, vocab = 0;
  DType dtype = DType::bf16;
  // `grad` is the dtype of all other results
  DType grad = DType::bf16, grad_weight = DType::bf16;
  Place input = Place::dense, weight = Place::dense;  // `input` stands for logits too
  Place output = Place::dense, output_weight = Place::dense;
  uint32_t options = 0;  // bit i: Option i
  bool has(Option option) const { return options >> option & 1; }
  // Returns whether an address is missing that `run` would need: then there are sizes but no plan.
  bool lacks_address() const;
  std::string text() const;  // leaves out usual values
};

// Makes the op for a device type; every tensor has its own address and no memory.
AnyOp op_of(const Call& call, Device device);

// The generator splitmix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  bool once_in(int64_t n) { return below(n) == 0; }
  template <class T, size_t size>
  const T& of(const T (&all)[size]) {
    return all[below(size)];
  }

 private:
  uint64_t state_;
};

std::vector<Call> named_calls();
std::vector<Call> drawn_calls(int64_t count);

}  // namespace logitless::guards

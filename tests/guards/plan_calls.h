// SPDX-License-Identifier: Apache-2.0
// These are the calls whose plans are recorded: public ops alone, so that they outlive every change
// behind them. First comes every well-known head with the options that change a plan, then calls
// drawn from a generator of our own, which is the same on every machine and with every standard
// library.
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

// A matrix lies in one of these ways: dense at an address of 16 bytes; with no address yet; an
// element behind such an address; rows a multiple of 16 bytes apart, or not; columns first.
enum class Place { dense, null, off, padded, odd, across };

// A call may have these beside its shape; kOptions in plan_calls.cpp says which op has it.
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
  // `grad` is the dtype of every other result, too
  DType grad = DType::bf16, grad_weight = DType::bf16;
  Place input = Place::dense, weight = Place::dense;  // `input` stands for logits too
  Place output = Place::dense, output_weight = Place::dense;
  uint32_t options = 0;  // bit i stands for Option i
  bool has(Option option) const { return options >> option & 1; }
  // Returns whether an address that `run` would have is not there yet: sizes can be asked for then,
  // but no plan.
  bool lacks_address() const;
  std::string text() const;  // short: leaves out what is usual
};

// Makes the op for a device type; every tensor has memory of its own, which is not there.
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

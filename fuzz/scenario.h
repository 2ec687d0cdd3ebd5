// SPDX-License-Identifier: Apache-2.0
// An op described by bytes: sizes, options, dtypes, strides, presence, aliases, mistakes; every
// tensor has memory for exactly the bytes that its view reaches. When the input bytes run out, a
// generator that they seeded makes the choices.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "logitless/logitless.h"
#include "src/reference/numbers.h"
#include "src/rules.h"

namespace logitless::fuzz {

constexpr int64_t kMostBytes = 1 << 20;  // of one tensor; a larger view has no memory

struct Block {
  explicit Block(size_t size, size_t alignment = 16) : bytes(size) {
    void* memory = nullptr;
    if (posix_memalign(&memory, alignment, size) != 0) std::abort();
    data.reset(static_cast<char*>(memory));
    std::memset(data.get(), 0xA5, size);
  }
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> data;
  size_t bytes;
};

// Any number of random values from a few bytes of the input.
class Random {
 public:
  explicit Random(uint32_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  uint32_t bits() {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return static_cast<uint32_t>(state_ >> 32);
  }
  int64_t below(int64_t n) { return n > 0 ? static_cast<int64_t>(bits() % n) : 0; }
  double uniform() { return bits() * 0x1p-32; }
  double normal() { return uniform() + uniform() + uniform() + uniform() - 2; }

 private:
  uint64_t state_;
};

class Input {
 public:
  Input(const uint8_t* data, size_t size)
      : bytes_(data, size), random(bytes_.ConsumeIntegral<uint32_t>()) {}
  template <class T>
  T any() {
    if (bytes_.remaining_bytes() > 0) return bytes_.ConsumeIntegral<T>();
    return static_cast<T>(uint64_t{random.bits()} << 32 | random.bits());
  }
  int64_t between(int64_t least, int64_t most) {
    if (bytes_.remaining_bytes() > 0) return bytes_.ConsumeIntegralInRange(least, most);
    return least + random.below(most - least + 1);
  }
  bool coin() { return between(0, 1) == 1; }
  // Whether to make a mistake: most inputs have none.
  bool rarely() { return any<uint8_t>() == 0x5D; }
  template <class T, size_t n>
  T pick(const T (&choices)[n]) {
    return choices[between(0, n - 1)];
  }

 private:
  FuzzedDataProvider bytes_;

 public:
  Random random;
};

struct Sizes {
  int64_t tokens, vocab, hidden, vocab_total, shards, chosen;
  bool lists;   // chosen columns as a list per token
  DType dtype;  // of input and weight, or of logits
};

// Sets *extreme if one option is any number, so that products may leave f32's range.
inline LossOptions options_from(Input& in, bool* extreme) {
  LossOptions o;
  o.reduction = in.pick({Reduction::mean, Reduction::sum, Reduction::none, Reduction::mean});
  o.ignore_index = in.pick({int64_t{-100}, int64_t{0}, int64_t{2}, INT64_MAX});
  o.label_smoothing = in.pick({0.f, 0.1f, 1.f, 0.f});
  o.z_loss = in.pick({0.f, 1e-3f, 0.f, 0.f});
  o.logit_scale = in.pick({1.f, 0.7f, -2.f, 0.f});
  o.softcap = in.pick({0.f, 3.f, 30.f, 0.f});
  o.temperature = in.pick({1.f, 0.5f, 3.f, 1.f});
  o.out_of_range = in.pick({OutOfRange::error, OutOfRange::ignore});
  o.empty_mean = in.pick({EmptyMean::zero, EmptyMean::nan});
  o.input_kind =
      in.pick({InputKind::logits, InputKind::logits, InputKind::logits, InputKind::probabilities});
  o.probability_floor = in.pick({1e-9f, 0.f, 0.1f});
  o.normalizer = in.pick({0.0, 0.0, 0.0, 2.5});
  o.allow_tf32 = in.coin();
  if (!in.rarely()) return o;
  *extreme = true;
  const uint32_t bits = in.any<uint32_t>();
  float any;
  std::memcpy(&any, &bits, sizeof(any));
  switch (in.between(0, 9)) {
    case 0:
      o.label_smoothing = any;
      break;
    case 1:
      o.z_loss = any;
      break;
    case 2:
      o.logit_scale = any;
      break;
    case 3:
      o.softcap = any;
      break;
    case 4:
      o.temperature = any;
      break;
    case 5:
      o.probability_floor = any;
      break;
    case 6:
      o.normalizer = any;
      break;
    case 7:
      o.reduction = Reduction(static_cast<int32_t>(bits));
      break;
    case 8:
      o.out_of_range = OutOfRange(static_cast<int32_t>(bits));
      break;
    default:
      o.input_kind = InputKind(static_cast<int32_t>(bits));
  }
  return o;
}

inline TensorView plain_view(std::string_view name, const Sizes& s, Reduction reduction) {
  const auto is = [&](std::initializer_list<std::string_view> names) {
    for (std::string_view one : names) {
      if (one == name) return true;
    }
    return false;
  };
  if (is({"logits", "probabilities", "grad_logits"})) {
    return matrix_view(nullptr, name == "logits" ? s.dtype : DType::f32, s.tokens, s.vocab);
  }
  if (is({"input"})) return matrix_view(nullptr, s.dtype, s.tokens, s.hidden);
  if (is({"weight"})) return matrix_view(nullptr, s.dtype, s.vocab, s.hidden);
  if (is({"ids", "logits_at", "grad_logits_at"})) {
    const DType dtype = name == "ids" ? DType::i64 : DType::f32;
    if (s.lists) return vector_view(nullptr, dtype, s.tokens * s.chosen);
    return matrix_view(nullptr, dtype, s.tokens, s.chosen);
  }
  const int64_t listed = std::min(s.chosen, s.vocab_total);
  if (is({"top_logits"})) return matrix_view(nullptr, DType::f32, s.tokens, listed);
  if (is({"top_ids"})) return matrix_view(nullptr, DType::i64, s.tokens, listed);
  if (is({"shard_top_logits", "shard_top_ids"})) {
    const DType dtype = is({"shard_top_ids"}) ? DType::i64 : DType::f32;
    return matrix_view(nullptr, dtype, s.shards, s.tokens * listed);
  }
  if (is({"id_offsets"})) return vector_view(nullptr, DType::i64, s.tokens + 1);
  if (is({"grad_input"})) return matrix_view(nullptr, DType::f32, s.tokens, s.hidden);
  if (is({"grad_weight"})) return matrix_view(nullptr, DType::f32, s.vocab, s.hidden);
  if (is({"bias", "grad_bias"})) return vector_view(nullptr, DType::f32, s.vocab);
  if (is({"vocab_weight"})) return vector_view(nullptr, DType::f32, s.vocab_total);
  if (is({"normalizer"})) return scalar_view(nullptr, DType::f32);
  if (is({"loss", "grad_loss"}) && reduction != Reduction::none) {
    return scalar_view(nullptr, DType::f32);
  }
  if (is({"fault"})) return vector_view(nullptr, DType::i32, 1);
  if (name.starts_with("shard_")) {
    const DType dtype = is({"shard_argmax"}) ? DType::i64 : DType::f32;
    return matrix_view(nullptr, dtype, s.shards, s.tokens);
  }
  const DType dtype = is({"target", "argmax", "rank"}) ? DType::i64 : DType::f32;
  return vector_view(nullptr, dtype, s.tokens);
}

// Varies strides, dtype and offset; rarely to something that is not allowed.
inline void vary_view(Input& in, std::string_view name, bool written, TensorView* v) {
  const int layout = in.between(0, 7);
  if (v->rank == 2) {
    const int64_t rows = v->shape[0], columns = v->shape[1];
    if (layout == 1) v->stride[0] = columns + 3;
    if (layout == 2) v->stride = {1, rows};
    if (layout == 3) v->stride = {2 * columns + 1, 2};
    if (layout == 4) v->stride = {1, rows + 2};
    if (layout == 5 && !written) v->stride = {0, 1};
    if (layout == 6 && !written) v->stride = {1, 0};
  } else if (v->rank == 1) {
    if (layout == 1 || layout == 2) v->stride[0] = layout + 1;
    if (layout == 5 && !written) v->stride[0] = 0;
  }
  for (int32_t d = 0; d < v->rank; ++d) {  // no element uses this stride, so any number is allowed
    if (layout == 7 && v->shape[d] <= 1) v->stride[d] = INT64_MAX;
  }
  const int kind = in.between(0, 3);
  if (name.starts_with("grad_") && name != "grad_logits_at" && size_of(v->dtype) == 4 &&
      (v->rank == 2 || name == "grad_bias")) {
    v->dtype = std::array{DType::f32, DType::bf16, DType::f16, DType::f32}[kind];
  }
  if (name == "probabilities" && kind == 1) v->dtype = DType::bf16;
  if ((name == "target" || name == "argmax" || name == "rank" || name.ends_with("ids")) &&
      kind == 1)
    v->dtype = DType::i32;
  if (name == "normalizer" && kind == 1) v->dtype = DType::i64;
  if (v->rank == 0 && kind == 2) v->rank = 1, v->shape[0] = 1;
  v->byte_offset = in.between(0, 3) * size_of(v->dtype);
  if (!in.rarely()) return;
  const int64_t any = in.any<int64_t>();
  const int64_t small = in.between(-2, 9);
  const int64_t value = in.coin() ? small : any;
  const int dimension = in.between(0, 1);
  switch (in.between(0, 7)) {
    case 0:
      v->shape[dimension] = value;
      break;
    case 1:
      v->stride[dimension] = value;
      break;
    case 2:
      v->stride = {small, in.between(0, 9)};
      break;
    case 3:
      v->rank = static_cast<int32_t>(value);
      break;
    case 4:
      v->dtype = DType(static_cast<int32_t>(value));
      break;
    case 5:
      v->byte_offset = static_cast<uint64_t>(value);
      break;
    case 6:
      v->device.type = DeviceType(static_cast<int32_t>(value));
      break;
    default:
      v->device.index = static_cast<int32_t>(value);
  }
}

// Returns an element of an input: an ordinary number, sometimes subnormal or, if `wild`,
// sometimes NaN, infinite or extreme.
inline double value_of(std::string_view name, const Sizes& s, int64_t ignore_index, bool wild,
                       bool probabilities, bool saved, Random& random) {
  if (name == "target") {
    const int64_t draw = random.below(16);
    if (draw == 0 && std::abs(ignore_index) < 1000) return static_cast<double>(ignore_index);
    if (draw == 1 && wild) return static_cast<double>(s.vocab_total + random.below(2));
    return static_cast<double>(random.below(s.vocab_total));
  }
  if (name == "ids") {
    const int64_t draw = random.below(16);
    if (draw == 0 && wild) return static_cast<double>(s.vocab_total + random.below(2));
    return draw < 3 ? -1 : static_cast<double>(random.below(s.vocab_total));
  }
  if (name.starts_with("shard_top_")) return 0;  // lists in order
  if (name == "token_weight" || name == "vocab_weight") return random.below(5) * 0.5;
  if (name == "temperature") return wild && random.below(16) == 0 ? -1 : 0.5 + random.below(4);
  if (name == "normalizer") return 1 + random.below(4);
  if (name == "shard_argmax") return static_cast<double>(random.below(s.vocab_total));
  if (name == "shard_row_log_sum" || name == "shard_row_reference") {
    constexpr double odd[] = {-INFINITY, NAN, INFINITY};
    const bool reference = name == "shard_row_reference";
    if (wild && random.below(16) == 0) return odd[random.below(reference ? 3 : 2)];
    return 2 + random.normal();
  }
  if (name == "row_reference") return 2 + random.normal();
  if (name == "row_log_sum") return 1 + 2 * random.uniform();
  if (name == "logits" && probabilities) return random.uniform();
  if (wild && random.below(64) == 0) {
    // No subnormals together with infinities: if flushed to 0, their product would be NaN. +-1e30
    // only for logits: products of it would overflow, and with a saved row_reference, rounded to
    // f32, even the reference's probabilities would be wrong.
    constexpr double odd[] = {0, INFINITY, -INFINITY, NAN, 1e-30, 300, -300, 1e30, -1e30};
    return odd[random.below(name == "logits" && !saved ? 9 : 7)];
  }
  if (!wild && random.below(256) == 0) return 1e-40;
  return random.normal() * (name == "logits" ? 4 : 1);
}

inline bool has_memory(const TensorView& v) {
  return v.data != nullptr && size_of(v.dtype) != 0 && v.rank >= 0 && v.rank <= 2;
}

// Gives a view exactly the bytes that it reaches; none if that is too many or it reaches backwards.
inline void give_memory(TensorView* v, std::vector<Block>* blocks) {
  for (int d = 0; d < 2; ++d) {
    if (v->rank > d && (v->shape[d] < 0 || v->stride[d] < 0)) return;
  }
  int64_t bytes;
  if (v->rank < 0 || v->rank > 2 || !extent(*v, &bytes)) return;
  // A broadcast view of many rows needs few bytes but much time.
  const int64_t rows = v->rank >= 1 ? v->shape[0] : 1;
  if (rows > kMostBytes) return;
  if (v->rank == 2 && rows > 0 && v->shape[1] > kMostBytes / rows) return;
  if (bytes > kMostBytes || v->byte_offset > static_cast<uint64_t>(kMostBytes)) return;
  blocks->emplace_back(static_cast<size_t>(bytes) + v->byte_offset);
  v->data = blocks->back().data.get();
}

// Places one field in another's memory, if that is large enough.
inline void alias(TensorView* v, const TensorView& other) {
  int64_t mine, others;
  if (!has_memory(*v) || !has_memory(other) || !extent(*v, &mine) || !extent(other, &others))
    return;
  if (mine + static_cast<int64_t>(v->byte_offset) <=
      others + static_cast<int64_t>(other.byte_offset)) {
    v->data = other.data;
  }
}

}  // namespace logitless::fuzz

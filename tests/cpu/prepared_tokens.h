// SPDX-License-Identifier: Apache-2.0
// Helpers of the tests of tokens: views of vectors, guarded memory and a call of prepare_tokens.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "src/cpu/tokens.h"

namespace logitless::cpu {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline TensorView view(const std::vector<float>& v) {
  return vector_view(v.data(), DType::f32, v.size());
}
inline TensorView view(const std::vector<int32_t>& v) {
  return vector_view(v.data(), DType::i32, v.size());
}
inline TensorView view(const std::vector<int64_t>& v) {
  return vector_view(v.data(), DType::i64, v.size());
}

// Memory of exactly the promised size, between two guards.
class Memory {
 public:
  explicit Memory(int64_t tokens, bool with_places = false)
      : bytes_(tokens_bytes(tokens, with_places)), all_(bytes_ + 128, 0x5a) {}
  void* data() { return all_.data() + 64; }
  bool intact() const {
    for (size_t i = 0; i < 64; ++i) {
      if (all_[i] != 0x5a || all_[all_.size() - 1 - i] != 0x5a) return false;
    }
    return true;
  }

 private:
  uint64_t bytes_;
  std::vector<uint8_t> all_;
};

// The results of prepare_tokens, with copies of its arrays.
struct Prepared {
  Status status;
  Tokens tokens;
  std::vector<int64_t> row, target, place;
  std::vector<float> target_weight, token_weight, upstream;
};
template <class Op>
Prepared prepare(const Op& op, int64_t vocab) {
  Prepared p;
  Memory memory(op.target.shape[0], places(op));
  p.status = prepare_tokens(op, vocab, memory.data(), &p.tokens);
  EXPECT_TRUE(memory.intact());
  if (!p.status.ok()) return p;
  const Tokens& t = p.tokens;
  p.row.assign(t.row, t.row + t.valid);
  p.target.assign(t.target, t.target + t.valid);
  p.target_weight.assign(t.target_weight, t.target_weight + t.valid);
  p.token_weight.assign(t.token_weight, t.token_weight + t.valid);
  if constexpr (GradientOp<Op>) p.upstream.assign(t.upstream, t.upstream + t.valid);
  if (t.place != nullptr) p.place.assign(t.place, t.place + t.valid);
  p.tokens.row = p.row.data();  // `memory` is freed at return
  return p;
}

}  // namespace logitless::cpu

// SPDX-License-Identifier: Apache-2.0
#include "src/kept.h"

#include <algorithm>
#include <bit>

namespace logitless {
namespace {

// Increased when the layout of KeptRow or of any backend's `kept` changes.
constexpr uint64_t kept_version = 1;

// FNV-1a over the bytes of numbers.
class Hash {
 public:
  Hash& add(uint64_t x) {
    for (int byte = 0; byte < 8; ++byte, x >>= 8) state_ = (state_ ^ (x & 0xff)) * 0x100000001b3;
    return *this;
  }
  Hash& add(float x) { return add(uint64_t{std::bit_cast<uint32_t>(x)}); }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0xcbf29ce484222325;
};

}  // namespace

Kept kept_in(const Call& call, uint64_t bytes) {
  Kept kept;
  const int64_t tokens = call.tokens(), vocab = call.vocab(), rows = kept_rows_of(tokens);
  const int64_t whole = kept_blocks(call);
  const bool serves = keeps_logits(call) || !(call.diverges && call.shard());
  const bool keeps = tokens > 0 && serves;
  if (keeps) {
    const auto of_rows = static_cast<uint64_t>(tokens * kept_row_width) * sizeof(float);
    const auto of_block = static_cast<uint64_t>(rows * kept_block * size_of(call.input.dtype));
    const uint64_t room = bytes > of_rows ? (bytes - of_rows) / of_block : 0;
    int64_t blocks = whole;
    if (room < static_cast<uint64_t>(whole)) {
      blocks = call.diverges ? 0 : static_cast<int64_t>(room) / kept_group * kept_group;
    }
    if (blocks > 0) {
      kept.columns = std::min(blocks * kept_block, vocab);
      kept.shape = {blocks * rows, kept_block};
      kept.rows_shape = {tokens, kept_row_width};
      kept.bytes = of_rows + static_cast<uint64_t>(blocks) * of_block;
    }
  }
  kept.key = kept_key(call, kept.columns);
  return kept;
}

// The key leaves out options that do not change kept state, such as the reduction.
uint64_t kept_key(const Call& call, int64_t columns) {
  const LossOptions& o = call.options;
  Hash hash;
  for (const int64_t x :
       {int64_t{kept_version}, static_cast<int64_t>(call.execution.device.type),
        int64_t{call.execution.device.index}, static_cast<int64_t>(call.input.dtype), call.tokens(),
        call.vocab(), call.hidden(), columns, int64_t{static_cast<bool>(call.bias)},
        int64_t{static_cast<bool>(call.temperature)}, o.ignore_index,
        static_cast<int64_t>(o.out_of_range), int64_t{o.allow_tf32}, o.vocab_start,
        o.vocab_total}) {
    hash.add(static_cast<uint64_t>(x));
  }
  for (const float x : {o.label_smoothing, o.z_loss, o.logit_scale, o.softcap, o.temperature}) {
    hash.add(x);
  }
  if (keeps_logits(call)) {  // raw logits, which later calls map again
    hash.add(static_cast<uint64_t>(kept_blocks(call)));
    hash.add(uint64_t{static_cast<bool>(call.teacher_bias)});
    hash.add(uint64_t{static_cast<bool>(call.teacher_temperature)});
  }
  if (call.diverges) {
    const DivergenceOptions& d = call.divergence;
    hash.add(static_cast<uint64_t>(d.kind) + 1);
    for (const float x : {d.beta, d.label_weight, d.teacher_logit_scale, d.teacher_softcap,
                          d.teacher_temperature}) {
      hash.add(x);
    }
  }
  return std::max<uint64_t>(hash.value(), 1);  // 0 means no key
}

}  // namespace logitless

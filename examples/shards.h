// SPDX-License-Identifier: Apache-2.0
// This is a step of a language model's head whose vocabulary is split over ranks: each rank has
// some rows of the weight [V, D], and all have the same hidden states and targets. A collective
// library moves what the ranks exchange, in shards_mpi.cpp and shards_nccl.cu. The step
// is `step`; the rest of this file is its data and its tensors.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "logitless/logitless.h"
#include "memory.h"

namespace shards {

using namespace logitless;

struct Sizes {
  int64_t tokens = 97, hidden = 64, vocab = 1003;
  DType dtype = DType::bf16;
  int64_t steps = 1;  // timed, after one untimed step
  bool judge = true;  // checking costs tokens * hidden * vocab operations on one processor
};

inline const char* const kUsage =
    "[--tokens N] [--hidden D] [--vocab V] [--dtype f32|bf16] [--steps K] [--judge yes|no]";

// Sets *error to the wrong argument and what is allowed.
inline bool parse(int argc, char** argv, int ranks, Sizes* sizes, std::string* error) {
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    const auto refused = [&](const char* allowed) {
      *error = name + ": \"" + value + "\"; allowed: " + allowed;
      return false;
    };
    int64_t* number = name == "--tokens"   ? &sizes->tokens
                      : name == "--hidden" ? &sizes->hidden
                      : name == "--vocab"  ? &sizes->vocab
                      : name == "--steps"  ? &sizes->steps
                                           : nullptr;
    if (number != nullptr) {
      char* end = nullptr;
      *number = std::strtoll(value.c_str(), &end, 10);
      if (value.empty() || *end != 0 || *number < 1 || *number > 1 << 28) {
        return refused("an integer from 1 to 268435456");
      }
    } else if (name == "--dtype") {
      if (value != "f32" && value != "bf16") return refused("f32, bf16");
      sizes->dtype = value == "f32" ? DType::f32 : DType::bf16;
    } else if (name == "--judge") {
      if (value != "yes" && value != "no") return refused("yes, no");
      sizes->judge = value == "yes";
    } else {
      *error = name + ": no such option; allowed: " + kUsage;
      return false;
    }
  }
  // A rank without columns would make no call; its row state would be that of an empty sum, -inf
  // and 0. This example leaves out that case.
  if (sizes->vocab < ranks) {
    *error = "--vocab: " + std::to_string(sizes->vocab) + "; allowed: at least the ranks, " +
             std::to_string(ranks);
  } else if (sizes->tokens * sizes->hidden > (int64_t{1} << 30)) {  // MPI counts in int
    *error = "--tokens: " + std::to_string(sizes->tokens) + "; allowed: tokens * hidden <= 2^30";
  }
  return error->empty();
}

// A rank's columns of the vocabulary. Any division will do, if all ranks agree on it.
struct Columns {
  int64_t first = 0, count = 0;
};
inline Columns columns_of(int64_t vocab, int rank, int ranks) {
  const int64_t first = vocab * rank / ranks;
  return {first, vocab * (rank + 1) / ranks - first};
}

// Returns bits that depend only on the element's index in the whole tensor, so that the data are
// the same for any number of ranks.
inline uint64_t random_bits(uint64_t tensor, int64_t index) {
  uint64_t x = (tensor << 56) + static_cast<uint64_t>(index) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Returns `count` numbers of deviation `scale`, from the tensor's element `first` on, exactly
// representable in the dtype.
inline std::vector<float> numbers(uint64_t tensor, int64_t first, int64_t count, float scale,
                                  DType dtype) {
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t bits = random_bits(tensor, first + i);
    float sum = -2;
    for (int k = 0; k < 4; ++k) sum += static_cast<float>(bits >> 16 * k & 0xffff) / 65536;
    float& value = values[static_cast<size_t>(i)];
    value = sum * 1.7320508f * scale;
    if (dtype == DType::f32) continue;
    uint32_t word;
    std::memcpy(&word, &value, sizeof(word));
    word = (word + 0x7fff + (word >> 16 & 1)) & 0xffff0000u;  // bf16 is the upper half, rounded
    std::memcpy(&value, &word, sizeof(word));
  }
  return values;
}
inline std::vector<float> input_of(const Sizes& s) {
  return numbers(1, 0, s.tokens * s.hidden, 1, s.dtype);
}
// Logits have a deviation of 1.6 whatever D is.
inline std::vector<float> weight_of(const Sizes& s, Columns of) {
  const float scale = 1.6f / std::sqrt(static_cast<float>(s.hidden));
  return numbers(2, of.first * s.hidden, of.count * s.hidden, scale, s.dtype);
}
// One token of eight is ignored.
inline std::vector<int64_t> target_of(const Sizes& s) {
  std::vector<int64_t> target;  // [N]
  for (int64_t i = 0; i < s.tokens; ++i) {
    const uint64_t bits = random_bits(3, i);
    target.push_back(i % 8 == 5 ? -100 : static_cast<int64_t>(bits % uint64_t(s.vocab)));
  }
  return target;
}

// Returns the elements of `dtype` as they lie in memory.
inline std::vector<char> encode(const std::vector<float>& values, DType dtype) {
  const size_t size = static_cast<size_t>(size_of(dtype));
  std::vector<char> bytes(values.size() * size);
  for (size_t i = 0; i < values.size(); ++i) {
    const char* const from = reinterpret_cast<const char*>(&values[i]) + sizeof(float) - size;
    std::memcpy(bytes.data() + i * size, from, size);  // both lie with their low byte first
  }
  return bytes;
}

// A rank's tensors, allocated once for all steps.
struct Shard {
  Shard(const Place& where, const Sizes& of, int its_rank, int all_ranks)
      : place(where),
        sizes(of),
        own(columns_of(of.vocab, its_rank, all_ranks)),
        rank(its_rank),
        ranks(all_ranks) {}
  Memory floats(int64_t count) const {
    return {place, std::vector<float>(static_cast<size_t>(count))};
  }
  TensorView on_device(TensorView view) const {
    view.device = place.device;
    return view;
  }
  TensorView matrix(void* data, int64_t rows, int64_t columns, DType dtype = DType::f32) const {
    return on_device(matrix_view(data, dtype, rows, columns));
  }
  // Returns row `index` of a tensor [k, N].
  TensorView row_of(const Memory& memory, int64_t index) const {
    return on_device(vector_view(static_cast<float*>(memory.data()) + index * sizes.tokens,
                                 DType::f32, sizes.tokens));
  }
  // Returns row `index` of every rank's state, [P, N].
  TensorView of_ranks(int64_t index) const {
    TensorView view =
        matrix(static_cast<float*>(states.data()) + index * sizes.tokens, ranks, sizes.tokens);
    view.stride[0] = 3 * sizes.tokens;
    return view;
  }
  // `kept` holds both kept tensors, one after the other.
  TensorView kept_view() const {
    const auto [rows, columns] = kept_size.shape;
    return matrix(kept.data(), rows, columns, sizes.dtype);
  }
  TensorView kept_rows_view() const {
    const auto [rows, columns] = kept_size.rows_shape;
    TensorView view = matrix(kept.data(), rows, columns);
    view.byte_offset = kept_size.bytes - static_cast<uint64_t>(rows * columns) * sizeof(float);
    return view;
  }
  LinearCrossEntropyForward forward() const {
    return {.input = matrix(input.data(), sizes.tokens, sizes.hidden, sizes.dtype),
            .weight = matrix(weight.data(), own.count, sizes.hidden, sizes.dtype),
            .target = on_device(vector_view(target.data(), DType::i64, sizes.tokens)),
            .options = options};
  }

  Place place;
  Sizes sizes;
  Columns own;
  int rank, ranks;
  LossOptions options{
      .reduction = Reduction::mean, .vocab_start = own.first, .vocab_total = sizes.vocab};
  // Each rank adds up the parts of grad_input for its share of the tokens; the last may be padded.
  int64_t share_tokens = (sizes.tokens + ranks - 1) / ranks;
  int64_t share = share_tokens * sizes.hidden;  // elements

  Memory input{place, encode(input_of(sizes), sizes.dtype)};         // [N, D]
  Memory weight{place, encode(weight_of(sizes, own), sizes.dtype)};  // [V_p, D]
  Memory target{place, target_of(sizes)};                            // [N]
  Memory anchor = floats(sizes.tokens);                              // [N]
  Memory state = floats(3 * sizes.tokens);                           // [3, N]
  Memory states = floats(ranks * 3 * sizes.tokens);                  // [P, 3, N]
  Memory row = floats(2 * sizes.tokens);                             // [2, N]
  Memory loss = floats(1);                                           // []
  Memory parts = floats(ranks * share);                              // [P, N/P, D]
  Memory received = floats(ranks * share);                           // [P, N/P, D]
  Memory sum = floats(share);                                        // [N/P, D]
  Memory grad_input = floats(ranks * share);                         // [P, N/P, D]
  Memory grad_weight = floats(own.count * sizes.hidden);             // [V_p, D]
  Kept kept_size = size_of_kept();
  Scratch kept{place.device, static_cast<size_t>(kept_size.bytes), place.stream};

 private:
  Kept size_of_kept() const {
    Kept size;
    const Status status =
        logitless::kept_size(forward(), {.device = place.device}, UINT64_MAX, &size);
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.message());
    return size;
  }
};

// Runs an op in a workspace of its own. An error ends all ranks: the others wait in an exchange
// that this one will not come to.
template <class Op, class Ranks>
void call(const Op& op, const Shard& s, Ranks& ranks) {
  const Execution execution{.device = s.place.device, .stream = s.place.stream};
  WorkspaceSize size;
  Status status = workspace(op, execution, &size);
  if (status.ok()) {
    const Scratch scratch(s.place.device, size.recommended, s.place.stream);
    status = run(op, {scratch.data(), size.recommended}, execution);
  }
  if (!status.ok()) ranks.abort(status.message());
}

// One step: loss, grad_input and the shard's own grad_weight. All results but grad_weight have the
// same bits on every rank. docs/devices.md shows it word for word.
template <class Ranks>
void step(Shard& s, Ranks& ranks) {
  // The logit of a token's target is made by the shard that has its column, and is -inf elsewhere.
  LinearCrossEntropyForward forward = s.forward();
  forward.statistics = {.target_logit = s.row_of(s.anchor, 0)};
  call(forward, s, ranks);
  ranks.max(s.anchor, s.sizes.tokens);

  // Forward writes the state of the rank's own columns, and keeps what Backward needs of them.
  if (s.ranks > 1) forward.anchor = s.row_of(s.anchor, 0);  // the whole vocabulary takes none
  forward.statistics = {.target_logit = s.row_of(s.state, 2),
                        .row_reference = s.row_of(s.state, 0),
                        .row_log_sum = s.row_of(s.state, 1)};
  forward.kept = s.kept_view();
  forward.kept_rows = s.kept_rows_view();
  call(forward, s, ranks);
  ranks.gather(s.state, s.states, 3 * s.sizes.tokens);

  // Every rank combines all states in the vocabulary's order.
  const Combine combine{
      .target = forward.target,
      .shard_row_reference = s.of_ranks(0),
      .shard_row_log_sum = s.of_ranks(1),
      .shard_target_logit = s.of_ranks(2),
      .loss = s.on_device(scalar_view(s.loss.data(), DType::f32)),
      .options = s.options,
      .statistics = {.row_reference = s.row_of(s.row, 0), .row_log_sum = s.row_of(s.row, 1)}};
  call(combine, s, ranks);

  const LinearCrossEntropyBackward backward{
      .input = forward.input,
      .weight = forward.weight,
      .target = forward.target,
      .row_reference = combine.statistics.row_reference,
      .row_log_sum = combine.statistics.row_log_sum,
      .kept = forward.kept,
      .kept_rows = forward.kept_rows,
      .kept_key = s.kept_size.key,
      .consume_kept = true,
      .grad_input = s.matrix(s.parts.data(), s.sizes.tokens, s.sizes.hidden),
      .grad_weight = s.matrix(s.grad_weight.data(), s.own.count, s.sizes.hidden),
      .options = s.options};
  call(backward, s, ranks);

  // Each rank adds the parts of its share of the tokens in the ranks' order, as no all-reduce does.
  ranks.all_to_all(s.parts, s.received, s.share);
  ranks.add(s.received, s.sum, s.share);
  ranks.gather(s.sum, s.grad_input, s.share);
}

}  // namespace shards

// SPDX-License-Identifier: Apache-2.0
// Targets out of range, where that is an error, and an asynchronous backend's results for them
// ("Which tokens count" of the contract).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "memory.h"
#include "src/reference/reference.h"

namespace logitless::conformance {

// Reads integers that a double may not hold.
inline std::vector<int64_t> read_integers(const TensorView& view) {
  std::vector<int64_t> values(static_cast<size_t>(element_count(view)));
  const auto* first = static_cast<const std::byte*>(view.data) + view.byte_offset;
  for_each_element(view, [&](int64_t i, int64_t offset) {
    int32_t narrow;
    std::memcpy(&narrow, first + offset, sizeof(narrow));
    values[i] = narrow;
    if (view.dtype == DType::i64) std::memcpy(&values[i], first + offset, sizeof(int64_t));
  });
  return values;
}

template <class Op>
int64_t vocab_of(const Op& op) {
  if constexpr (LinearOp<Op>) {
    return op.weight.shape[0];
  } else if constexpr (CombiningOp<Op>) {
    return op.options.vocab_total;
  } else {
    return op.logits.shape[1];
  }
}

// The tokens whose target is an error, for an op on host memory.
template <class Op>
std::vector<size_t> tokens_outside(const Op& op) {
  std::vector<size_t> tokens;
  if constexpr (LossOp<Op>) {
    if (op.options.out_of_range != OutOfRange::error || !op.target) return tokens;
    const int64_t vocab = op.options.vocab_total ? op.options.vocab_total : vocab_of(op);
    const std::vector<int64_t> target = read_integers(op.target);
    for (size_t i = 0; i < target.size(); ++i) {
      const bool inside = target[i] >= 0 && target[i] < vocab;
      if (!inside && target[i] != op.options.ignore_index) tokens.push_back(i);
    }
  }
  return tokens;
}

// The token of each element of `ids`.
template <class Op>
std::vector<size_t> tokens_of_places(const Op& op) {
  std::vector<size_t> tokens;
  const std::vector<int64_t> offsets =
      op.id_offsets ? read_integers(op.id_offsets) : std::vector<int64_t>{};
  for (size_t i = 0; i < static_cast<size_t>(op.input.shape[0]); ++i) {
    const int64_t count = op.id_offsets ? offsets[i + 1] - offsets[i] : op.ids.shape[1];
    // The clamp is for invalid offsets.
    tokens.insert(tokens.end(), std::clamp<int64_t>(count, 0, element_count(op.ids)), i);
  }
  return tokens;
}

// The elements of `ids` that are an error, of tokens that count.
template <class Op>
std::vector<size_t> ids_outside(const Op& op) {
  std::vector<size_t> places;
  if constexpr (ChoosingOp<Op>) {
    if (op.options.out_of_range != OutOfRange::error || !op.ids) return places;
    const int64_t vocab = op.options.vocab_total ? op.options.vocab_total : vocab_of(op);
    const std::vector<int64_t> target = read_integers(op.target), ids = read_integers(op.ids);
    const std::vector<size_t> tokens = tokens_of_places(op);
    for (size_t place = 0; place < std::min(tokens.size(), ids.size()); ++place) {
      const int64_t t = target[tokens[place]];
      const bool counts = t != op.options.ignore_index && t >= 0 && t < vocab;
      if (counts && (ids[place] < -1 || ids[place] >= vocab)) places.push_back(place);
    }
  }
  return places;
}

// Evaluates the op without these ids: their logits become NaN, their gradients are left out.
template <class Op>
reference::Result evaluate_without(const std::vector<size_t>& places, Op op,
                                   const reference::BoundModel& model) {
  if constexpr (ChoosingOp<Op>) {
    if (places.empty()) return reference::evaluate(op, model);
    std::vector<int64_t> ids = read_integers(op.ids);
    for (const size_t place : places) ids[place] = -1;
    op.ids.data = ids.data(), op.ids.byte_offset = 0, op.ids.dtype = DType::i64;
    op.ids.stride = op.ids.rank == 1 ? std::array<int64_t, 2>{1, 0}
                                     : std::array<int64_t, 2>{op.ids.shape[1], 1};
    reference::Result want = reference::evaluate(op, model);
    const auto logits = want.outputs.find("logits_at");
    for (const size_t place : places) {
      if (logits != want.outputs.end()) logits->second.value[place] = NAN;
    }
    return want;
  } else {
    return reference::evaluate(op, model);
  }
}

// The loss and log-probability of a token out of range are NaN, and it may count in the normalizer;
// otherwise it is treated as ignored.
template <class Op>
reference::Result evaluate_outside(Op op, const reference::BoundModel& model) {
  const std::vector<size_t> outside = tokens_outside(op);
  std::vector<int64_t> target = read_integers(op.target);
  for (const size_t i : outside) target[i] = op.options.ignore_index;
  int64_t counted = 0;
  for (const int64_t t : target) counted += t != op.options.ignore_index;
  op.target = vector_view(target.data(), DType::i64, static_cast<int64_t>(target.size()));
  const bool counts = op.options.reduction == Reduction::mean && op.options.normalizer == 0 &&
                      !op.weights.normalizer;
  // Without class weights such a token counts as 1 in the normalizer, with them as 0.
  if (counts && !op.weights.vocab) {
    op.options.normalizer = static_cast<double>(counted) + static_cast<double>(outside.size());
  }
  reference::Result want = evaluate_without(ids_outside(op), op, model);
  if (const auto found = want.outputs.find("logprob"); found != want.outputs.end()) {
    for (const size_t i : outside) found->second.value[i] = NAN;
  }
  const auto loss = want.outputs.find("loss");
  if (loss == want.outputs.end()) return want;
  const bool one = op.options.reduction != Reduction::none;
  for (const size_t i : outside) loss->second.value[one ? 0 : i] = NAN;
  return want;
}

}  // namespace logitless::conformance

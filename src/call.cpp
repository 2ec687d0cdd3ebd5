// SPDX-License-Identifier: Apache-2.0
#include "src/call.h"

#include <cstring>

#include "src/row/statistics.h"

namespace logitless {
namespace {

template <class Op>
std::span<const TensorField> fields_of_op() {
  static const auto table = [] {
    std::array<TensorField, tensor_count<Op>> made{};
    static_assert(tensor_count<Op> <= std::tuple_size_v<decltype(Fields::field)>);
    const Op op{};
    logitless_op c{};
    Call call;
    const auto offset = [](const auto& whole, const auto& part) -> size_t {
      return reinterpret_cast<const char*>(&part) - reinterpret_cast<const char*>(&whole);
    };
    size_t i = 0;
    for_each_tensor(op, c, [&](const char* name, Access access, const auto&, const auto& field) {
      made[i++] = {name, access, 0, offset(c, field)};
    });
    i = 0;
    for_each_tensor(op, call, [&](const char*, Access, const auto&, const Tensor& view) {
      made[i++].in_call = offset(call, view);
    });
    return made;
  }();
  return table;
}

}  // namespace

static_assert([] {
  int32_t ops = 0;
  for_each_op([&](const auto&, int32_t) { ++ops; });
  return ops;
}() == kinds);

std::span<const TensorField> tensor_fields(int32_t kind) {
  static const auto table = [] {
    std::array<std::span<const TensorField>, kinds> made{};
    for_each_op([&]<class Op>(const Op&, int32_t of) { made[of] = fields_of_op<Op>(); });
    return made;
  }();
  return kind >= 0 && kind < kinds ? table[kind] : std::span<const TensorField>{};
}

Call::Call(int32_t of_kind, const Execution& on) : kind(of_kind), execution(on) {
  combines = kind == LOGITLESS_COMBINE;
  linear = kind >= LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD && !combines;
  diverges = kind >= LOGITLESS_LINEAR_DIVERGENCE_FORWARD;
  loss_op = kind != LOGITLESS_SOFTMAX;
  const bool backward = kind == LOGITLESS_CROSS_ENTROPY_BACKWARD ||
                        kind == LOGITLESS_LINEAR_CROSS_ENTROPY_BACKWARD ||
                        kind == LOGITLESS_LINEAR_DIVERGENCE_BACKWARD;
  const bool both = kind == LOGITLESS_CROSS_ENTROPY_FORWARD_BACKWARD ||
                    kind == LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD ||
                    kind == LOGITLESS_LINEAR_DIVERGENCE_FORWARD_BACKWARD;
  gradients = backward || both;
  forward = loss_op && !backward;
  // Kernels receive the options with their padding, which no member sets. Copying one constant
  // makes the padding the same for every call.
  static constexpr LossOptions defaults;
  std::memcpy(&options, &defaults, sizeof(options));
}

Fields Call::fields() const {
  Fields made;
  for (const TensorField& field : tensor_fields(kind)) {
    const std::string_view name = field.name;
    Access access = field.access;
    if (accumulate && (name == "grad_weight" || name == "grad_bias")) access = Access::read_write;
    if (sums_of_shard() && (name.ends_with("row_reference") || name.ends_with("row_log_sum") ||
                            name.starts_with("kept"))) {
      access = Access::read;
    }
    made.field[made.count++] = {field.name, access, &tensor_at(*this, field)};
  }
  return made;
}

SumSet Call::sums_of_statistics() const {
  SumSet sums;
  if (!forward) return sums;
  for (const Statistic& statistic : kStatistics) {
    if (this->*statistic.tensor) sums = sums | statistic.needs;
  }
  return sums;
}

SumSet Call::sums() const {
  const bool smooths = forward && options.label_smoothing > 0;
  return smooths ? sums_of_statistics() | SumKind::weighted : sums_of_statistics();
}

bool Call::targets_only() const {
  return linear && !diverges && forward && !gradients && (target_logit || logits_at) && !kept &&
         !loss && !top_logits && sums_of_statistics().empty();
}

TokenStatistics Call::statistics() const {
  TokenStatistics written;
  const auto take = [](const char*, Access, TensorView& to, const Tensor& from) { to = from; };
  if (forward && !sums_of_shard()) for_each_statistic(written, *this, take);
  return written;
}

const Tensor& Call::operator[](std::string_view name) const {
  static constexpr Tensor absent;
  for (const TensorField& field : tensor_fields(kind)) {
    if (field.name == name) return tensor_at(*this, field);
  }
  return absent;
}

}  // namespace logitless

// SPDX-License-Identifier: Apache-2.0
// Launches the kernel of logit_rows.cuh.
#include "src/cuda/rows/logit_rows.cuh"
#include "src/row/map.h"

namespace logitless::cuda {
namespace {

Columns columns_of(const RowsCall& call, const MapFactors& map) {
  if (call.map != nullptr || call.wants.has(RareSums<Narrow>::kinds)) return Columns::more;
  const bool smooths = call.scalars != nullptr && call.in.options.label_smoothing > 0;
  const bool plain = map.identity && !smooths && !call.wants.has(UsualSums<Narrow>::kinds) &&
                     !call.in.grad_entropy;
  return plain ? Columns::plain : Columns::options;
}

template <class T>
bool launch_of(const RowsCall& call, const DeviceInfo& device, Stream* stream) {
  const LossOptions options = call.scalars != nullptr ? call.in.options : LossOptions{};
  static_assert(most_row_threads == 32 * most_warps && rows_margin == tile_margin);
  const bool hopper = is_compiled_for_hopper(
      reinterpret_cast<const void*>(rows_kernel<T, Columns::plain>), device, stream);
  RowsArguments a{call,
                  plan_rows(call.logits.shape[1], sizeof(T), device.shared_bytes_per_block, hopper),
                  map_factors(logit_map(options))};
  const auto blocks = static_cast<unsigned>(call.logits.shape[0] * a.plan.cluster);
  // If the state is given, each block works alone.
  const int cluster = call.row_reference ? 1 : a.plan.cluster;
  const Columns columns = columns_of(call, a.map);
  const auto kernel = columns == Columns::plain     ? rows_kernel<T, Columns::plain>
                      : columns == Columns::options ? rows_kernel<T, Columns::options>
                                                    : rows_kernel<T, Columns::more>;
  const bool early = hopper && device.launches_early;
  const LaunchShape shape{blocks, a.plan.threads, static_cast<size_t>(a.plan.shared_bytes), cluster,
                          early && call.scalars != nullptr};
  stream->launch_config("rows", kernel, shape, a);
  return early;
}

}  // namespace

Status check_row_extents(const TensorView& logits) {
  if (logits.shape[0] <= most_rows && logits.shape[1] <= most_columns) return {};
  return error(StatusCode::not_supported,
               "cuda: logits has shape [%lld, %lld]; allowed: up to [%lld, %lld]",
               static_cast<long long>(logits.shape[0]), static_cast<long long>(logits.shape[1]),
               static_cast<long long>(most_rows), static_cast<long long>(most_columns));
}

bool launch_rows(const RowsCall& call, const DeviceInfo& device, Stream* stream) {
  if (call.logits.shape[0] == 0) return false;
  bool lets_next_start = false;
  with_dtype(call.logits.dtype, [&](auto element) {
    lets_next_start = launch_of<decltype(element)>(call, device, stream);
  });
  return lets_next_start;
}

}  // namespace logitless::cuda

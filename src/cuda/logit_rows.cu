// SPDX-License-Identifier: Apache-2.0
// The launches of logit_rows.cuh.
#include "src/cuda/logit_rows.cuh"

namespace logitless::cuda {
namespace {

// Whether the code that runs on the current device was compiled with clusters: PTX of an older
// architecture is not.
template <class T>
bool code_has_clusters(const DeviceInfo& device) {
  if (device.major < 9 || device.portable) return false;
  cudaFuncAttributes attributes;
  const auto* kernel = reinterpret_cast<const void*>(rows_kernel<T, true>);
  return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90;
}

// Nothing but the maximum, the sum and P p is wanted of a column.
bool is_plain(const RowsCall& call, const MapFactors& map) {
  const bool smooths = call.tokens.row != nullptr && call.in.options.label_smoothing > 0;
  return map.identity && !smooths && !call.wants_weighted_sum && !call.wants_entropy &&
         !call.wants_argmax && !call.in.grad_entropy;
}

template <class T>
void launch_of(const RowsCall& call, const DeviceInfo& device, Stream* stream) {
  const LossOptions options = call.tokens.row != nullptr ? call.in.options : LossOptions{};
  static_assert(most_row_threads == 32 * most_warps && rows_margin == tile_margin);
  RowsArguments a{call,
                  plan_rows(call.logits.shape[1], sizeof(T), device.shared_bytes_per_block,
                            code_has_clusters<T>(device)),
                  map_factors(options),
                  {call.wants_weighted_sum, call.wants_entropy, call.wants_argmax}};
  const auto blocks = static_cast<unsigned>(call.logits.shape[0] * a.plan.cluster);
  const int cluster = call.row_reference ? 1 : a.plan.cluster;  // each block on its own
  const auto kernel = is_plain(call, a.map) ? rows_kernel<T, true> : rows_kernel<T, false>;
  const LaunchShape shape{blocks, a.plan.threads, static_cast<size_t>(a.plan.shared_bytes),
                          cluster};
  stream->launch_config("rows", kernel, shape, a);
}

}  // namespace

Status check_row_extents(const TensorView& logits) {
  if (logits.shape[0] <= most_rows && logits.shape[1] <= most_columns) return {};
  return error(StatusCode::not_supported,
               "cuda: logits has shape [%lld, %lld]; allowed: up to [%lld, %lld]",
               static_cast<long long>(logits.shape[0]), static_cast<long long>(logits.shape[1]),
               static_cast<long long>(most_rows), static_cast<long long>(most_columns));
}

void launch_rows(const RowsCall& call, const DeviceInfo& device, Stream* stream) {
  if (call.logits.shape[0] == 0) return;
  with_dtype(call.logits.dtype,
             [&](auto element) { launch_of<decltype(element)>(call, device, stream); });
}

}  // namespace logitless::cuda

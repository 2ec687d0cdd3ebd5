// SPDX-License-Identifier: Apache-2.0
// How rows are cut, and the launches.
#include <algorithm>

#include "src/cuda/logit_rows.cuh"

namespace logitless::cuda {
namespace {

constexpr int64_t column_multiple = 64;  // so that every tile of a row has the row's alignment
// Of shared memory beside the tile: the kernel's own, and what the driver takes of a block.
constexpr int64_t other_shared_bytes = 1024, driver_shared_bytes = 1024;
constexpr int blocks_per_multiprocessor = 3;  // one loads while another computes or writes

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t rounded(int64_t columns) {
  return ceil_div(columns, column_multiple) * column_multiple;
}

// Whether the code that runs on the current device was compiled with clusters: PTX of an older
// architecture is not.
template <class T>
bool code_has_clusters(const DeviceInfo& device) {
  if (device.major < 9) return false;
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
  RowsArguments a{call,
                  plan_rows(call.logits.shape[1], sizeof(T), device.shared_bytes_per_block,
                            code_has_clusters<T>(device)),
                  map_factors(options),
                  {call.wants_weighted_sum, call.wants_entropy, call.wants_argmax}};
  const auto blocks = static_cast<unsigned>(call.logits.shape[0] * a.plan.cluster);
  const int cluster = call.row_reference ? 1 : a.plan.cluster;  // each block on its own
  const auto kernel = is_plain(call, a.map) ? rows_kernel<T, true> : rows_kernel<T, false>;
  stream->launch_config("rows", kernel, blocks, a.plan.threads,
                        static_cast<size_t>(a.plan.shared_bytes), cluster, a);
}

}  // namespace

RowsPlan plan_rows(int64_t columns, int64_t element_bytes, int64_t shared_bytes_per_block,
                   bool clusters) {
  const int64_t most = shared_bytes_per_block - other_shared_bytes - tile_margin;
  const int64_t fine = (shared_bytes_per_block + driver_shared_bytes) / blocks_per_multiprocessor -
                       driver_shared_bytes - other_shared_bytes - tile_margin;
  RowsPlan plan;
  int64_t slice = rounded(columns);
  while (clusters && plan.cluster < most_row_blocks && slice * element_bytes > fine) {
    plan.cluster *= 2;
    slice = rounded(ceil_div(columns, plan.cluster));
  }
  if (slice * element_bytes > most)
    plan.tiles = static_cast<int>(ceil_div(slice * element_bytes, fine));
  // Rounding up to whole tiles of 64 columns may pass `fine` by a little, never `most`.
  plan.tile = static_cast<int>(rounded(ceil_div(slice, plan.tiles)));
  while (plan.threads < most_row_threads && plan.threads * 16 < plan.tile) plan.threads *= 2;
  plan.shared_bytes = plan.tile * element_bytes + tile_margin;
  return plan;
}

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

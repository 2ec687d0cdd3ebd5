// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/sm90/tensor_map.h"

#include "src/cuda/runtime/driver.h"

namespace logitless::cuda::sm90 {
namespace {

template <int kRank>
CUtensorMap encode(const void* data, DType dtype, const cuuint64_t (&sizes)[kRank],
                   const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank],
                   Stream* stream) {
  return stream->answer<CUtensorMap>([&] {
    CUtensorMap map{};
    const Driver* driver;
    const Status status = find_driver(&driver);
    if (!status.ok()) {
      stream->fail(status);
      return map;
    }
    cuuint32_t steps[kRank];
    for (cuuint32_t& step : steps) step = 1;
    const CUresult code = driver->encode_tiled(
        &map,
        dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        kRank, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (code != CUDA_SUCCESS) {
      stream->fail(error(StatusCode::device_error, "cuda: cuTensorMapEncodeTiled returned %d",
                         static_cast<int>(code)));
    }
    return map;
  });
}

constexpr cuuint64_t unsign(int64_t extent) { return static_cast<cuuint64_t>(extent); }

}  // namespace

CUtensorMap make_map(const void* data, DType dtype, int64_t rows, int64_t columns, int64_t stride,
                     int box_rows, Stream* stream) {
  return encode<2>(data, dtype, {unsign(columns), unsign(rows)}, {unsign(stride * 2)},
                   {64, static_cast<cuuint32_t>(box_rows)}, stream);
}

BlockMap make_block_map(const void* data, DType dtype, int64_t rows, int64_t columns,
                        int64_t stride, int box_rows, int blocks, Stream* stream) {
  const auto lines = static_cast<cuuint32_t>(box_rows);
  if (columns % 64 != 0) {
    return {encode<3>(data, dtype, {unsign(columns), unsign(rows), 1},
                      {unsign(stride * 2), unsign(stride * 2)}, {64, lines, 1}, stream),
            blocks};
  }
  return {
      encode<3>(data, dtype, {64, unsign(rows), unsign(columns / 64)}, {unsign(stride * 2), 128},
                {64, lines, static_cast<cuuint32_t>(blocks)}, stream),
      1};
}

CUtensorMap make_panel_map(const void* data, DType dtype, int64_t rows, int64_t pitch,
                           int64_t count, int box_rows, int blocks, Stream* stream) {
  return encode<3>(data, dtype, {64, unsign(rows), unsign(count)}, {128, unsign(pitch * 128)},
                   {64, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(blocks)},
                   stream);
}

}  // namespace logitless::cuda::sm90

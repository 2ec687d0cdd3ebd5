// SPDX-License-Identifier: Apache-2.0
// Copies views to dense f32 and back, cut into dispatches that keep to a binding's limits.
#include <algorithm>
#include <utility>

#include "src/webgpu/run.h"

namespace logitless::webgpu {
namespace {

// As in gather.wgsl.
struct GatherParams {
  uint32_t rows = 0, columns = 0, padded_columns = 0, base = 0, row_stride = 0, column_stride = 0,
           result_base = 0, result_row_stride = 0, result_column_stride = 0;
};

// As in scatter.wgsl.
struct ScatterParams {
  uint32_t columns = 0, value_base = 0, value_row_stride = 0, base = 0, row_stride = 0,
           column_stride = 0, by_token = 0, first_token = 0;
};

constexpr int64_t kMostRows = 32768;
// The most columns that one row of workgroups copies.
constexpr int64_t kMostColumns = int64_t{kGroups} * 256;

// Binds a dense buffer from element dense.base on, rounded down to 256 bytes; *base gets the
// remainder.
Binding slice(const Dense& dense, uint64_t most, int64_t* base) {
  const uint64_t start = static_cast<uint64_t>(dense.base) * 4 / 256 * 256;
  *base = dense.base - static_cast<int64_t>(start / 4);
  return {dense.buffer, start, std::min(dense.bytes - start, most)};
}

// The halves of a part, cut by rows or by columns.
std::pair<Part, Part> cut(const Part& part, bool rows) {
  Part left = part, right = part;
  if (rows) {
    left.rows /= 2;
    right.first_row += left.rows;
    right.rows -= left.rows;
  } else {
    left.columns /= 2;
    right.first_column += left.columns;
    right.columns -= left.columns;
  }
  return {left, right};
}
Dense moved(Dense dense, int64_t rows, int64_t columns) {
  dense.base += rows * dense.row_stride + columns * dense.column_stride;
  return dense;
}

// Whether the dense rows of a part fit in one binding; for a chunk's rows the plan ensures it.
bool fits_dense(const Dense& dense, const Part& part, const Limits& limits) {
  const int64_t last = (part.rows - 1) * dense.row_stride + part.columns * dense.column_stride;
  return last * 4 + 256 <= static_cast<int64_t>(limits.storage_binding_bytes);
}

// Whether a part in f16 and its f32 copy are each one contiguous row from the start of their
// bindings. cast.wgsl requires that: a thread handles two halves, and writes words without atomics.
bool is_cast(const TensorView& v, const Part& part, const Dense& dense, int64_t base,
             int64_t dense_base) {
  return v.dtype == DType::f16 && v.rank == 2 && v.stride[1] == 1 && v.stride[0] == part.columns &&
         dense.column_stride == 1 && dense.row_stride == part.columns && base == 0 &&
         dense_base == 0;
}

// Whether a part that is too large for one dispatch is cut by rows rather than columns.
bool cut_rows(const TensorView& v, const Part& part) {
  if (part.columns <= 1) return true;
  return part.rows > 1 && (part.rows > kMostRows ||
                           (part.rows - 1) * v.stride[0] >= (part.columns - 1) * v.stride[1]);
}

}  // namespace

int64_t Run::extent_of(const TensorView& v, Part part) const {
  const int64_t column_stride = v.rank == 2 ? v.stride[1] : 0;
  const int64_t row_stride = v.rank >= 1 ? v.stride[0] : 0;
  return ((part.rows - 1) * row_stride + (part.columns - 1) * column_stride + 1) * size_of(v.dtype);
}

bool Run::fits(const TensorView& v, Part part) const {
  const auto most = static_cast<int64_t>(device_->limits().storage_binding_bytes);
  return extent_of(v, part) + 256 <= most;
}

Binding Run::bound(const TensorView& v, Part part, int64_t* base) const {
  const int64_t column_stride = v.rank == 2 ? v.stride[1] : 0;
  const int64_t row_stride = v.rank >= 1 ? v.stride[0] : 0;
  const int64_t first = part.first_row * row_stride + part.first_column * column_stride;
  const uint64_t start = v.byte_offset + static_cast<uint64_t>(first * size_of(v.dtype));
  const uint64_t aligned = start / 256 * 256;
  *base = static_cast<int64_t>(start - aligned) / size_of(v.dtype);
  const uint64_t end = start + static_cast<uint64_t>(extent_of(v, part));
  return {reinterpret_cast<Buffer>(v.data), aligned, (end - aligned + 3) / 4 * 4};
}

void Run::gather(const TensorView& v, Part part, const Dense& result, int64_t padded_columns,
                 bool counted_rows) {
  if (part.rows == 0 || padded_columns == 0) return;
  const bool dense_fits = counted_rows || fits_dense(result, part, device_->limits());
  const bool wide = padded_columns > kMostColumns;
  if (wide || !fits(v, part) || part.rows > kMostRows || !dense_fits) {
    const bool rows =
        !wide && !counted_rows && (cut_rows(v, part) || (!dense_fits && part.rows > 1));
    const auto [left, right] = cut(part, rows);
    const int64_t padded = rows ? padded_columns : left.columns;
    gather(v, left, result, padded, counted_rows);
    gather(v, right, moved(result, rows ? left.rows : 0, rows ? 0 : left.columns),
           rows ? padded : padded_columns - padded, counted_rows);
    return;
  }
  int64_t base, result_base;
  const Binding from = bound(v, part, &base);
  const Binding to = slice(result, device_->limits().storage_binding_bytes, &result_base);
  const int64_t count = part.rows * part.columns;
  if (!counted_rows && padded_columns == part.columns &&
      is_cast(v, part, result, base, result_base)) {
    const uint32_t groups = blocks(count, 512);
    recorder_.cast("f16_to_f32", u32(count), from, to, std::min(groups, kGroups),
                   blocks(groups, kGroups));
    return;
  }
  const GatherParams params{.rows = u32(part.rows),
                            .columns = u32(part.columns),
                            .padded_columns = u32(padded_columns),
                            .base = u32(base),
                            .row_stride = u32(v.stride[0]),
                            .column_stride = u32(v.rank == 2 ? v.stride[1] : 0),
                            .result_base = u32(result_base),
                            .result_row_stride = u32(result.row_stride),
                            .result_column_stride = u32(result.column_stride)};
  const Constant dtype{"dtype", static_cast<double>(v.dtype)};
  if (counted_rows) {
    recorder_.dispatch("gather", "gather_rows", {dtype}, params, {from, to, role(Role::counted)},
                       blocks(padded_columns, 256), u32(part.rows));
  } else {
    recorder_.dispatch("gather", "gather", {dtype}, params, {from, to}, blocks(padded_columns, 256),
                       u32(part.rows));
  }
}

void Run::gather_vector(const TensorView& v, int64_t first, int64_t count, const Dense& result) {
  const Part part{.first_row = first, .rows = count};
  if (count == 0) return;
  if (!fits(v, part) || !fits_dense(result, part, device_->limits())) {
    gather_vector(v, first, count / 2, result);
    gather_vector(v, first + count / 2, count - count / 2, moved(result, count / 2, 0));
    return;
  }
  int64_t base, result_base;
  const Binding from = bound(v, part, &base);
  const Binding to = slice(result, device_->limits().storage_binding_bytes, &result_base);
  const GatherParams params{.rows = u32(count),
                            .base = u32(base),
                            .row_stride = u32(v.rank == 0 ? 0 : v.stride[0]),
                            .result_base = u32(result_base),
                            .result_row_stride = u32(result.row_stride)};
  const uint32_t groups = blocks(count, 256);
  recorder_.dispatch("gather", "gather_column", {{"dtype", static_cast<double>(v.dtype)}}, params,
                     {from, to}, std::min(groups, kGroups), blocks(groups, kGroups));
}

void Run::scatter(const Dense& values, const TensorView& v, Part part, bool by_token,
                  int64_t first_token) {
  if (part.rows == 0 || part.columns == 0) return;
  const bool dense_fits = by_token || fits_dense(values, part, device_->limits());
  const bool wide = part.columns > kMostColumns;
  if (wide || !fits(v, part) || part.rows > kMostRows || !dense_fits) {
    const bool rows = !wide && (cut_rows(v, part) || (!dense_fits && part.rows > 1));
    const auto [left, right] = cut(part, rows);
    scatter(values, v, left, by_token, first_token);
    // Values indexed by token are found through the list of tokens, so they are not cut with the
    // rows.
    scatter(moved(values, rows && !by_token ? left.rows : 0, rows ? 0 : left.columns), v, right,
            by_token, first_token + (rows ? left.rows : 0));
    return;
  }
  int64_t base, value_base;
  const Binding to = bound(v, part, &base);
  const Binding from = slice(values, device_->limits().storage_binding_bytes, &value_base);
  const int64_t count = part.rows * part.columns;
  if (!by_token && count % 2 == 0 && is_cast(v, part, values, base, value_base)) {
    const uint32_t groups = blocks(count, 512);
    recorder_.cast("f32_to_f16", u32(count), from, to, std::min(groups, kGroups),
                   blocks(groups, kGroups));
    return;
  }
  const ScatterParams params{.columns = u32(part.columns),
                             .value_base = u32(value_base),
                             .value_row_stride = u32(values.row_stride),
                             .base = u32(base),
                             .row_stride = u32(v.stride[0]),
                             .column_stride = u32(v.rank == 2 ? v.stride[1] : 0),
                             .by_token = by_token ? 1u : 0u,
                             .first_token = u32(first_token)};
  const Binding tokens = by_token ? role(Role::rows) : zeros();
  const Constant dtype{"dtype", static_cast<double>(v.dtype)};
  if (v.dtype == DType::f32) {
    recorder_.dispatch("scatter", "scatter32", {dtype}, params, {from, tokens, to},
                       blocks(part.columns, 256), u32(part.rows));
  } else {
    recorder_.dispatch("scatter", "scatter16", {dtype}, params, {from, tokens, {}, to},
                       blocks(part.columns, 256), u32(part.rows));
  }
}

}  // namespace logitless::webgpu

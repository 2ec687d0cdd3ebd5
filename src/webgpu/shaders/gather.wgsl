// SPDX-License-Identifier: Apache-2.0
// Copies elements of a strided view of any dtype into dense f32:
//   gather       result[r, c] = source[r, c]
//   gather_rows  result[k, c] = source[counted[4 + k], c], and 0 for k from counted[0] on
// Columns from `columns` to padded_columns become 0.

struct Params {
  rows: u32,
  columns: u32,
  padded_columns: u32,
  base: u32,  // of the source; this and the next two in elements
  row_stride: u32,
  column_stride: u32,
  result_base: u32,
  result_row_stride: u32,
  result_column_stride: u32,
}

override dtype: u32 = 0u;  // 0 is f32, 1 f16, 2 bf16

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> source: array<u32>;
@group(0) @binding(2) var<storage, read_write> result: array<u32>;
// counted[0]: the number of rows; their tokens' indices from counted[4] on, in order.
@group(0) @binding(3) var<storage, read> counted: array<u32>;

// In integers, because a device's conversion may flush subnormals.
fn f16_to_f32(h: u32) -> u32 {
  let sign = (h & 0x8000u) << 16u;
  let exponent = (h >> 10u) & 31u;
  let mantissa = h & 0x3ffu;
  if (exponent == 31u) {
    return sign | 0x7f800000u | (mantissa << 13u);
  }
  if (exponent == 0u) {
    return sign | bitcast<u32>(f32(mantissa) * 5.9604644775390625e-8);
  }
  return sign | ((exponent + 112u) << 23u) | (mantissa << 13u);
}

fn load(i: u32) -> u32 {
  if (dtype == 0u) {
    return source[i];
  }
  let half = (source[i / 2u] >> (16u * (i % 2u))) & 0xffffu;
  if (dtype == 1u) {
    return f16_to_f32(half);
  }
  return half << 16u;
}

fn store(r: u32, c: u32, value: u32) {
  result[p.result_base + r * p.result_row_stride + c * p.result_column_stride] = value;
}

@compute @workgroup_size(256)
fn gather(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let c = group.x * 256u + thread;
  let r = group.y;
  if (c >= p.padded_columns) {
    return;
  }
  var value = 0u;
  if (c < p.columns) {
    value = load(p.base + r * p.row_stride + c * p.column_stride);
  }
  store(r, c, value);
}

// For a single column: one thread per row; gather would use one thread per workgroup.
@compute @workgroup_size(256)
fn gather_column(@builtin(workgroup_id) group: vec3<u32>,
                 @builtin(local_invocation_index) thread: u32) {
  let r = (group.y * 65535u + group.x) * 256u + thread;
  if (r < p.rows) {
    store(r, 0u, load(p.base + r * p.row_stride));
  }
}

@compute @workgroup_size(256)
fn gather_rows(@builtin(workgroup_id) group: vec3<u32>,
               @builtin(local_invocation_index) thread: u32) {
  let c = group.x * 256u + thread;
  let r = group.y;
  if (c >= p.padded_columns) {
    return;
  }
  var value = 0u;
  if (c < p.columns && r < counted[0]) {
    value = load(p.base + counted[4u + r] * p.row_stride + c * p.column_stride);
  }
  store(r, c, value);
}

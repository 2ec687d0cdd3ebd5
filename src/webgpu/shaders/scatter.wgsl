// SPDX-License-Identifier: Apache-2.0
// Writes f32 values to a strided view, rounded once to its dtype, to nearest, ties to even. With
// by_token, row i of the view is row rows[i].place of the values, or 0 if the token has none. Two
// 16-bit elements share a word: atomics clear and set one half and keep the other.
// Uses common: token.

struct Params {
  columns: u32,
  value_base: u32,
  value_row_stride: u32,
  base: u32,  // of the view; this and the next two in elements
  row_stride: u32,
  column_stride: u32,
  by_token: u32,
  first_token: u32,  // the token of the view's row 0
}

override dtype: u32 = 0u;  // 0 is f32, 1 f16, 2 bf16

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> values: array<u32>;
@group(0) @binding(2) var<storage, read> rows: array<State>;  // [tokens]
@group(0) @binding(3) var<storage, read_write> view32: array<u32>;
@group(0) @binding(4) var<storage, read_write> view16: array<atomic<u32>>;

fn round_bits(bits: u32, drop: u32) -> u32 {
  let half = (1u << (drop - 1u)) - 1u;
  return (bits + half + ((bits >> drop) & 1u)) >> drop;
}

fn to_bf16(bits: u32) -> u32 {
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return (bits >> 16u) | 0x40u;
  }
  return round_bits(bits, 16u);
}

fn to_f16(bits: u32) -> u32 {
  let sign = (bits >> 16u) & 0x8000u;
  let size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) {
    return sign | 0x7e00u;
  }
  if (size >= 0x477ff000u) {  // would round to 2^16: infinity
    return sign | 0x7c00u;
  }
  if (size >= 0x38800000u) {  // the f16 is a normal number
    return sign | round_bits(size - 0x38000000u, 13u);
  }
  if (size < 0x33000000u) {  // below half of the smallest subnormal: 0
    return sign;
  }
  let mantissa = (size & 0x007fffffu) | 0x00800000u;
  return sign | round_bits(mantissa, 126u - (size >> 23u));
}

fn value(i: u32, c: u32) -> u32 {
  var r = i;
  if (p.by_token != 0u) {
    r = rows[p.first_token + i].place;
  }
  if (r == none) {
    return 0u;
  }
  return values[p.value_base + r * p.value_row_stride + c];
}

fn place(i: u32, c: u32) -> u32 {
  return p.base + i * p.row_stride + c * p.column_stride;
}

@compute @workgroup_size(256)
fn scatter32(@builtin(workgroup_id) group: vec3<u32>,
             @builtin(local_invocation_index) thread: u32) {
  let c = group.x * 256u + thread;
  if (c < p.columns) {
    view32[place(group.y, c)] = value(group.y, c);
  }
}

@compute @workgroup_size(256)
fn scatter16(@builtin(workgroup_id) group: vec3<u32>,
             @builtin(local_invocation_index) thread: u32) {
  let c = group.x * 256u + thread;
  if (c >= p.columns) {
    return;
  }
  let bits = value(group.y, c);
  var half = 0u;
  if (dtype == 1u) {
    half = to_f16(bits);
  } else {
    half = to_bf16(bits);
  }
  let at = place(group.y, c);
  let shift = 16u * (at % 2u);
  atomicAnd(&view16[at / 2u], ~(0xffffu << shift));
  atomicOr(&view16[at / 2u], half << shift);
}

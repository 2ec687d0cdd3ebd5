// SPDX-License-Identifier: Apache-2.0
// Shared by product.wgsl and product_small.wgsl: operands, bounds, and how a sum is stored.

struct Params {
  // Offsets and strides are in vec4.
  rows: u32,     // m
  columns: u32,  // n rounded up to a multiple of 4; b_rows is n
  depth: u32,    // k
  a_stride: u32,
  b_base: u32,  // where b starts in its binding
  b_stride: u32,
  result_base: u32,
  result_stride: u32,
  adds: u32,          // not 0: the product is added to the result
  b_rows: u32,        // n of b [n, k] and of the bias
  slice_depth: u32,   // steps of k per workgroup; z selects the part
  slice_stride: u32,  // from one slice's result to the next
  block_depth: u32,   // the smallest part of k with its own sum
}

override a_transposed: bool = false;  // a is then [k, m]
override b_transposed: bool = true;   // b is then [n, k]
override has_bias: bool = false;
override bounded: u32 = 0u;  // counted[0] bounds the rows (1) or the depth (2)

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> a: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> b: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> result: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> counted: array<u32>;
@group(0) @binding(5) var<storage, read> bias: array<f32>;

// Loads four numbers of a, along k, or along m if a is transposed; 0 outside the matrix.
fn load_a(row: u32, column: u32, rows: u32, columns: u32) -> vec4<f32> {
  if (row < rows && column < columns) {
    return a[row * p.a_stride + column / 4u];
  }
  return vec4<f32>(0.0);
}
fn load_b(row: u32, column: u32, rows: u32, columns: u32) -> vec4<f32> {
  if (row < rows && column < columns) {
    return b[p.b_base + row * p.b_stride + column / 4u];
  }
  return vec4<f32>(0.0);
}

fn depth_of() -> u32 {
  if (bounded == 2u) {
    return min(p.depth, counted[0]);
  }
  return p.depth;
}
// Returns a block's length in steps of 16: a quarter of the depth, at least block_depth.
fn block_steps(depth: u32) -> u32 {
  return max((max(depth / 4u, p.block_depth) + 15u) / 16u, 1u);
}
fn rows_of() -> u32 {
  if (bounded == 1u) {
    return min(p.rows, counted[0]);
  }
  return p.rows;
}

fn store(slice: u32, row: u32, column: u32, value: vec4<f32>, adds: bool) {
  if (row >= p.rows || column >= p.columns) {
    return;
  }
  var v = value;
  if (has_bias && !adds) {
    for (var k = 0u; k < 4u; k++) {
      if (column + k < p.b_rows) {
        v[k] += bias[column + k];
      }
    }
  }
  let at = p.result_base + slice * p.slice_stride + row * p.result_stride + column / 4u;
  if (adds) {
    v += result[at];
  }
  result[at] = v;
}

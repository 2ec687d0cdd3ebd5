// SPDX-License-Identifier: Apache-2.0
// result[m, n] (+)= sum_k a(m, k) b(n, k) (+ bias[n]) in f32: the three products of a linear op.
//   logits       a = hidden  [m, k]   b = weight [n, k]        both with k beside k
//   grad_input   a = draw    [m, k]   b = weight [k, n]
//   grad_weight  a = draw    [k, m]   b = hidden [k, n]
// A workgroup makes a tile, 32 x 32, 64 x 64 or 128 x 128, 8 or 16 of k at a time through workgroup memory, where
// both operands lie [k][m] and [k][n]; a thread keeps 4 x 4 or 8 x 8 sums in registers, added along k
// in order whatever the tile. Rows of a and b are multiples of four numbers long, the last ones 0.
// Where `counted` bounds the rows (or, for grad_weight, k), what lies beyond is no work.
// Not subgroup broadcasts: on NVIDIA the workgroup memory feeds the same registers as fast.

struct Params {
  rows: u32,           // m
  columns: u32,        // n, a multiple of 4 but for bias
  depth: u32,          // k
  a_base: u32,         // in vec4, of the binding
  a_stride: u32,
  b_base: u32,
  b_stride: u32,
  result_base: u32,
  result_stride: u32,
  adds: u32,           // to what the result holds
  bias_base: u32,      // in words
  b_rows: u32,         // rows of b that there are: n of [n, k]
}

override a_transposed: bool = false;  // a is [k, m]
override b_transposed: bool = true;   // b is [n, k]
override has_bias: bool = false;
override bounded: u32 = 0u;           // by counted[0]: 1 the rows, 2 the depth

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> a: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> b: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> result: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> counted: array<u32>;
@group(0) @binding(5) var<storage, read> bias: array<f32>;

var<workgroup> tile_a: array<vec4<f32>, 512>;  // [16][m / 4]
var<workgroup> tile_b: array<vec4<f32>, 512>;  // [16][n / 4]
var<workgroup> small_a: array<vec4<f32>, 64>;  // [8][m / 4]
var<workgroup> small_b: array<vec4<f32>, 64>;  // [8][n / 4]

// Four numbers of a along k (or along m where it is transposed), 0 beyond its rows.
fn load_a(row: u32, column: u32, rows: u32, columns: u32) -> vec4<f32> {
  if (row < rows && column < columns) {
    return a[p.a_base + row * p.a_stride + column / 4u];
  }
  return vec4<f32>(0.0);
}
fn load_b(row: u32, column: u32, rows: u32, columns: u32) -> vec4<f32> {
  if (row < rows && column < columns) {
    return b[p.b_base + row * p.b_stride + column / 4u];
  }
  return vec4<f32>(0.0);
}

// Four rows of four along k, turned, into a tile of `quarter` vec4 a row.
fn turned(v0: vec4<f32>, v1: vec4<f32>, v2: vec4<f32>, v3: vec4<f32>) -> mat4x4<f32> {
  return transpose(mat4x4<f32>(v0, v1, v2, v3));
}

fn depth_of() -> u32 {
  if (bounded == 2u) {
    return min(p.depth, counted[0]);
  }
  return p.depth;
}
fn rows_of() -> u32 {
  if (bounded == 1u) {
    return min(p.rows, counted[0]);
  }
  return p.rows;
}

fn store(row: u32, column: u32, value: vec4<f32>) {
  if (row >= p.rows || column >= p.columns) {
    return;
  }
  var v = value;
  if (has_bias) {
    for (var k = 0u; k < 4u; k++) {
      if (column + k < p.b_rows) {
        v[k] += bias[p.bias_base + column + k];
      }
    }
  }
  let at = p.result_base + row * p.result_stride + column / 4u;
  if (p.adds != 0u) {
    v += result[at];
  }
  result[at] = v;
}

// For small products. Little workgroup memory: SwiftShader's compiler clears it word by word, which
// takes it half a millisecond a word.
@compute @workgroup_size(64)
fn product_32(@builtin(workgroup_id) group: vec3<u32>,
               @builtin(local_invocation_index) thread: u32) {
  let first_row = group.y * 32u;
  let first_column = group.x * 32u;
  let rows = rows_of();
  let depth = depth_of();
  if (first_row >= rows && p.adds != 0u) {
    return;
  }
  let tx = thread % 8u;
  let ty = thread / 8u;
  var s00 = vec4<f32>(0.0);
  var s10 = vec4<f32>(0.0);
  var s20 = vec4<f32>(0.0);
  var s30 = vec4<f32>(0.0);
  var steps = (depth + 7u) / 8u;
  if (first_row >= rows) {
    steps = 0u;
  }
  for (var step = 0u; step < steps; step++) {
    let k0 = step * 8u;
    if (step > 0u) {
      workgroupBarrier();
    }
    if (a_transposed) {
      small_a[thread] = load_a(k0 + thread / 8u, first_row + thread % 8u * 4u, depth, p.rows);
    } else if (thread < 16u) {
      let x = thread / 2u;
      let k = thread % 2u * 4u;
      let row = first_row + x * 4u;
      let v = turned(load_a(row, k0 + k, rows, p.depth), load_a(row + 1u, k0 + k, rows, p.depth),
                     load_a(row + 2u, k0 + k, rows, p.depth), load_a(row + 3u, k0 + k, rows, p.depth));
      small_a[k * 8u + x] = v[0];
      small_a[(k + 1u) * 8u + x] = v[1];
      small_a[(k + 2u) * 8u + x] = v[2];
      small_a[(k + 3u) * 8u + x] = v[3];
    }
    if (!b_transposed) {
      small_b[thread] = load_b(k0 + thread / 8u, first_column + thread % 8u * 4u, depth, p.columns);
    } else if (thread >= 16u && thread < 32u) {
      let x = (thread - 16u) / 2u;
      let k = (thread - 16u) % 2u * 4u;
      let row = first_column + x * 4u;
      let v = turned(load_b(row, k0 + k, p.b_rows, p.depth), load_b(row + 1u, k0 + k, p.b_rows, p.depth),
                     load_b(row + 2u, k0 + k, p.b_rows, p.depth), load_b(row + 3u, k0 + k, p.b_rows, p.depth));
      small_b[k * 8u + x] = v[0];
      small_b[(k + 1u) * 8u + x] = v[1];
      small_b[(k + 2u) * 8u + x] = v[2];
      small_b[(k + 3u) * 8u + x] = v[3];
    }
    workgroupBarrier();
    for (var k = 0u; k < 8u; k++) {
      let a0 = small_a[k * 8u + ty];
      let b0 = small_b[k * 8u + tx];
      s00 = fma(vec4<f32>(a0.x), b0, s00);
      s10 = fma(vec4<f32>(a0.y), b0, s10);
      s20 = fma(vec4<f32>(a0.z), b0, s20);
      s30 = fma(vec4<f32>(a0.w), b0, s30);
    }
  }
  store(first_row + 0u + ty * 4u, first_column + tx * 4u, s00);
  store(first_row + 1u + ty * 4u, first_column + tx * 4u, s10);
  store(first_row + 2u + ty * 4u, first_column + tx * 4u, s20);
  store(first_row + 3u + ty * 4u, first_column + tx * 4u, s30);
}

@compute @workgroup_size(256)
fn product_64(@builtin(workgroup_id) group: vec3<u32>,
               @builtin(local_invocation_index) thread: u32) {
  let first_row = group.y * 64u;
  let first_column = group.x * 64u;
  let rows = rows_of();
  let depth = depth_of();
  if (first_row >= rows && p.adds != 0u) {
    return;
  }
  let tx = thread % 16u;
  let ty = thread / 16u;
  var s00 = vec4<f32>(0.0);
  var s10 = vec4<f32>(0.0);
  var s20 = vec4<f32>(0.0);
  var s30 = vec4<f32>(0.0);
  var steps = (depth + 15u) / 16u;
  if (first_row >= rows) {
    steps = 0u;
  }
  for (var step = 0u; step < steps; step++) {
    let k0 = step * 16u;
    if (step > 0u) {
      workgroupBarrier();
    }
    if (a_transposed) {
      tile_a[thread] = load_a(k0 + thread / 16u, first_row + thread % 16u * 4u, depth, p.rows);
    } else if (thread < 64u) {
      let x = thread / 4u;
      let k = thread % 4u * 4u;
      let row = first_row + x * 4u;
      let v = turned(load_a(row, k0 + k, rows, p.depth), load_a(row + 1u, k0 + k, rows, p.depth),
                     load_a(row + 2u, k0 + k, rows, p.depth), load_a(row + 3u, k0 + k, rows, p.depth));
      tile_a[k * 16u + x] = v[0];
      tile_a[(k + 1u) * 16u + x] = v[1];
      tile_a[(k + 2u) * 16u + x] = v[2];
      tile_a[(k + 3u) * 16u + x] = v[3];
    }
    if (!b_transposed) {
      tile_b[thread] = load_b(k0 + thread / 16u, first_column + thread % 16u * 4u, depth, p.columns);
    } else if (thread >= 64u && thread < 128u) {
      let x = (thread - 64u) / 4u;
      let k = (thread - 64u) % 4u * 4u;
      let row = first_column + x * 4u;
      let v = turned(load_b(row, k0 + k, p.b_rows, p.depth), load_b(row + 1u, k0 + k, p.b_rows, p.depth),
                     load_b(row + 2u, k0 + k, p.b_rows, p.depth), load_b(row + 3u, k0 + k, p.b_rows, p.depth));
      tile_b[k * 16u + x] = v[0];
      tile_b[(k + 1u) * 16u + x] = v[1];
      tile_b[(k + 2u) * 16u + x] = v[2];
      tile_b[(k + 3u) * 16u + x] = v[3];
    }
    workgroupBarrier();
    for (var k = 0u; k < 16u; k++) {
      let a0 = tile_a[k * 16u + ty];
      let b0 = tile_b[k * 16u + tx];
      s00 = fma(vec4<f32>(a0.x), b0, s00);
      s10 = fma(vec4<f32>(a0.y), b0, s10);
      s20 = fma(vec4<f32>(a0.z), b0, s20);
      s30 = fma(vec4<f32>(a0.w), b0, s30);
    }
  }
  store(first_row + 0u + ty * 4u, first_column + 0u + tx * 4u, s00);
  store(first_row + 1u + ty * 4u, first_column + 0u + tx * 4u, s10);
  store(first_row + 2u + ty * 4u, first_column + 0u + tx * 4u, s20);
  store(first_row + 3u + ty * 4u, first_column + 0u + tx * 4u, s30);
}

@compute @workgroup_size(256)
fn product_128(@builtin(workgroup_id) group: vec3<u32>,
               @builtin(local_invocation_index) thread: u32) {
  let first_row = group.y * 128u;
  let first_column = group.x * 128u;
  let rows = rows_of();
  let depth = depth_of();
  if (first_row >= rows && p.adds != 0u) {
    return;
  }
  let tx = thread % 16u;
  let ty = thread / 16u;
  var s00 = vec4<f32>(0.0);
  var s01 = vec4<f32>(0.0);
  var s10 = vec4<f32>(0.0);
  var s11 = vec4<f32>(0.0);
  var s20 = vec4<f32>(0.0);
  var s21 = vec4<f32>(0.0);
  var s30 = vec4<f32>(0.0);
  var s31 = vec4<f32>(0.0);
  var s40 = vec4<f32>(0.0);
  var s41 = vec4<f32>(0.0);
  var s50 = vec4<f32>(0.0);
  var s51 = vec4<f32>(0.0);
  var s60 = vec4<f32>(0.0);
  var s61 = vec4<f32>(0.0);
  var s70 = vec4<f32>(0.0);
  var s71 = vec4<f32>(0.0);
  var steps = (depth + 15u) / 16u;
  if (first_row >= rows) {
    steps = 0u;
  }
  for (var step = 0u; step < steps; step++) {
    let k0 = step * 16u;
    if (step > 0u) {
      workgroupBarrier();
    }
    if (a_transposed) {
      tile_a[thread] = load_a(k0 + thread / 32u, first_row + thread % 32u * 4u, depth, p.rows);
      tile_a[(thread + 256u)] = load_a(k0 + (thread + 256u) / 32u, first_row + (thread + 256u) % 32u * 4u, depth, p.rows);
    } else if (thread < 128u) {
      let x = thread / 4u;
      let k = thread % 4u * 4u;
      let row = first_row + x * 4u;
      let v = turned(load_a(row, k0 + k, rows, p.depth), load_a(row + 1u, k0 + k, rows, p.depth),
                     load_a(row + 2u, k0 + k, rows, p.depth), load_a(row + 3u, k0 + k, rows, p.depth));
      tile_a[k * 32u + x] = v[0];
      tile_a[(k + 1u) * 32u + x] = v[1];
      tile_a[(k + 2u) * 32u + x] = v[2];
      tile_a[(k + 3u) * 32u + x] = v[3];
    }
    if (!b_transposed) {
      tile_b[thread] = load_b(k0 + thread / 32u, first_column + thread % 32u * 4u, depth, p.columns);
      tile_b[(thread + 256u)] = load_b(k0 + (thread + 256u) / 32u, first_column + (thread + 256u) % 32u * 4u, depth, p.columns);
    } else if (thread >= 128u && thread < 256u) {
      let x = (thread - 128u) / 4u;
      let k = (thread - 128u) % 4u * 4u;
      let row = first_column + x * 4u;
      let v = turned(load_b(row, k0 + k, p.b_rows, p.depth), load_b(row + 1u, k0 + k, p.b_rows, p.depth),
                     load_b(row + 2u, k0 + k, p.b_rows, p.depth), load_b(row + 3u, k0 + k, p.b_rows, p.depth));
      tile_b[k * 32u + x] = v[0];
      tile_b[(k + 1u) * 32u + x] = v[1];
      tile_b[(k + 2u) * 32u + x] = v[2];
      tile_b[(k + 3u) * 32u + x] = v[3];
    }
    workgroupBarrier();
    for (var k = 0u; k < 16u; k++) {
      let a0 = tile_a[k * 32u + ty];
      let a1 = tile_a[k * 32u + ty + 16u];
      let b0 = tile_b[k * 32u + tx];
      let b1 = tile_b[k * 32u + tx + 16u];
      s00 = fma(vec4<f32>(a0.x), b0, s00);
      s01 = fma(vec4<f32>(a0.x), b1, s01);
      s10 = fma(vec4<f32>(a0.y), b0, s10);
      s11 = fma(vec4<f32>(a0.y), b1, s11);
      s20 = fma(vec4<f32>(a0.z), b0, s20);
      s21 = fma(vec4<f32>(a0.z), b1, s21);
      s30 = fma(vec4<f32>(a0.w), b0, s30);
      s31 = fma(vec4<f32>(a0.w), b1, s31);
      s40 = fma(vec4<f32>(a1.x), b0, s40);
      s41 = fma(vec4<f32>(a1.x), b1, s41);
      s50 = fma(vec4<f32>(a1.y), b0, s50);
      s51 = fma(vec4<f32>(a1.y), b1, s51);
      s60 = fma(vec4<f32>(a1.z), b0, s60);
      s61 = fma(vec4<f32>(a1.z), b1, s61);
      s70 = fma(vec4<f32>(a1.w), b0, s70);
      s71 = fma(vec4<f32>(a1.w), b1, s71);
    }
  }
  store(first_row + 0u + ty * 4u, first_column + 0u + tx * 4u, s00);
  store(first_row + 0u + ty * 4u, first_column + 64u + tx * 4u, s01);
  store(first_row + 1u + ty * 4u, first_column + 0u + tx * 4u, s10);
  store(first_row + 1u + ty * 4u, first_column + 64u + tx * 4u, s11);
  store(first_row + 2u + ty * 4u, first_column + 0u + tx * 4u, s20);
  store(first_row + 2u + ty * 4u, first_column + 64u + tx * 4u, s21);
  store(first_row + 3u + ty * 4u, first_column + 0u + tx * 4u, s30);
  store(first_row + 3u + ty * 4u, first_column + 64u + tx * 4u, s31);
  store(first_row + 64u + ty * 4u, first_column + 0u + tx * 4u, s40);
  store(first_row + 64u + ty * 4u, first_column + 64u + tx * 4u, s41);
  store(first_row + 65u + ty * 4u, first_column + 0u + tx * 4u, s50);
  store(first_row + 65u + ty * 4u, first_column + 64u + tx * 4u, s51);
  store(first_row + 66u + ty * 4u, first_column + 0u + tx * 4u, s60);
  store(first_row + 66u + ty * 4u, first_column + 64u + tx * 4u, s61);
  store(first_row + 67u + ty * 4u, first_column + 0u + tx * 4u, s70);
  store(first_row + 67u + ty * 4u, first_column + 64u + tx * 4u, s71);
}

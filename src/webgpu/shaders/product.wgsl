// SPDX-License-Identifier: Apache-2.0
// Computes result[m, n] (+)= sum_k a(m, k) b(n, k) (+ bias[n]) in f32, for the three products of a
// linear op:
//   logits       a = hidden  [m, k]   b = weight [n, k]
//   grad_input   a = draw    [m, k]   b = weight [k, n]
//   grad_weight  a = draw    [k, m]   b = hidden [k, n]
// A workgroup computes a tile, 16 steps of k at a time. They go through workgroup memory, where the
// operands are [k][m] and [k][n]; the next 16 are loaded while these are multiplied. A thread keeps
// 8 x 8 sums in registers and adds along k in order, whatever the tile. A long k is added to the
// result in blocks: in a single long sum, small terms would be rounded to the precision of the
// large sum. With few tiles and a long k, workgroups with other z compute other slices of k, each
// with its own result, which slices.wgsl adds. Rows of a and b are padded with 0 to a multiple of
// four numbers. If `counted` bounds the rows (or, for grad_weight, k), nothing beyond is computed.
// Uses common: product.

override tile_m: u32 = 128u;  // 64 or 128
override tile_n: u32 = 128u;
override threads: u32 = 256u;  // tile_m tile_n / 64

var<workgroup> tile_a: array<vec4<f32>, 4u * tile_m>;  // [16][m / 4]
var<workgroup> tile_b: array<vec4<f32>, 4u * tile_n>;  // [16][n / 4]

// Loads a thread's part of a tile: four vec4 as they are in the tile or, for an operand whose rows
// run along k, four rows of four, which keep_a transposes.
fn fetch_a(thread: u32, first: u32, k0: u32, rows: u32, depth: u32) -> array<vec4<f32>, 4> {
  var v: array<vec4<f32>, 4>;
  if (a_transposed) {
    for (var i = 0u; i < 4u; i++) {
      let at = thread + i * threads;
      if (at < 4u * tile_m) {
        v[i] = load_a(k0 + at / (tile_m / 4u), first + at % (tile_m / 4u) * 4u, depth, p.rows);
      }
    }
  } else if (thread < tile_m) {
    for (var i = 0u; i < 4u; i++) {
      v[i] = load_a(first + thread / 4u * 4u + i, k0 + thread % 4u * 4u, rows, depth);
    }
  }
  return v;
}
fn keep_a(thread: u32, v: array<vec4<f32>, 4>) {
  if (a_transposed) {
    for (var i = 0u; i < 4u; i++) {
      if (thread + i * threads < 4u * tile_m) {
        tile_a[thread + i * threads] = v[i];
      }
    }
  } else if (thread < tile_m) {
    let turned = transpose(mat4x4<f32>(v[0], v[1], v[2], v[3]));
    for (var i = 0u; i < 4u; i++) {
      tile_a[(thread % 4u * 4u + i) * (tile_m / 4u) + thread / 4u] = turned[i];
    }
  }
}

// The last threads fetch b if its rows run along k, since the first threads fetch such an a.
fn fetch_b(thread: u32, first: u32, k0: u32, depth: u32) -> array<vec4<f32>, 4> {
  var v: array<vec4<f32>, 4>;
  let back = threads - 1u - thread;
  if (!b_transposed) {
    for (var i = 0u; i < 4u; i++) {
      let at = thread + i * threads;
      if (at < 4u * tile_n) {
        v[i] = load_b(k0 + at / (tile_n / 4u), first + at % (tile_n / 4u) * 4u, depth, p.columns);
      }
    }
  } else if (back < tile_n) {
    for (var i = 0u; i < 4u; i++) {
      v[i] = load_b(first + back / 4u * 4u + i, k0 + back % 4u * 4u, p.b_rows, depth);
    }
  }
  return v;
}
fn keep_b(thread: u32, v: array<vec4<f32>, 4>) {
  let back = threads - 1u - thread;
  if (!b_transposed) {
    for (var i = 0u; i < 4u; i++) {
      if (thread + i * threads < 4u * tile_n) {
        tile_b[thread + i * threads] = v[i];
      }
    }
  } else if (back < tile_n) {
    let turned = transpose(mat4x4<f32>(v[0], v[1], v[2], v[3]));
    for (var i = 0u; i < 4u; i++) {
      tile_b[(back % 4u * 4u + i) * (tile_n / 4u) + back / 4u] = turned[i];
    }
  }
}

@compute @workgroup_size(threads)
fn product(@builtin(workgroup_id) group: vec3<u32>,
           @builtin(local_invocation_index) thread: u32) {
  let first_row = group.y * tile_m;
  let first_column = group.x * tile_n;
  let rows = rows_of();
  if (first_row >= rows && p.adds != 0u) {
    return;
  }
  let begin = group.z * p.slice_depth;
  let end = min(depth_of(), begin + p.slice_depth);
  var steps = (max(end, begin) - begin + 15u) / 16u;
  if (first_row >= rows) {
    steps = 0u;
  }
  let tx = thread % (tile_n / 8u);
  let ty = thread / (tile_n / 8u);
  let row = first_row + ty * 4u;
  let column = first_column + tx * 4u;
  var next_a = fetch_a(thread, first_row, begin, rows, end);
  var next_b = fetch_b(thread, first_column, begin, end);
  var adds = p.adds != 0u;
  var step = 0u;
  loop {
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
    let block_end = min(steps, step + block_steps(max(end, begin) - begin));
    for (; step < block_end; step++) {
      if (step > 0u) {
        workgroupBarrier();
      }
      keep_a(thread, next_a);
      keep_b(thread, next_b);
      workgroupBarrier();
      if (step + 1u < steps) {
        next_a = fetch_a(thread, first_row, begin + (step + 1u) * 16u, rows, end);
        next_b = fetch_b(thread, first_column, begin + (step + 1u) * 16u, end);
      }
      for (var k = 0u; k < 16u; k++) {
        let a0 = tile_a[k * (tile_m / 4u) + ty];
        let a1 = tile_a[k * (tile_m / 4u) + ty + tile_m / 8u];
        let b0 = tile_b[k * (tile_n / 4u) + tx];
        let b1 = tile_b[k * (tile_n / 4u) + tx + tile_n / 8u];
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
    store(group.z, row, column, s00, adds);
    store(group.z, row, column + tile_n / 2u, s01, adds);
    store(group.z, row + 1u, column, s10, adds);
    store(group.z, row + 1u, column + tile_n / 2u, s11, adds);
    store(group.z, row + 2u, column, s20, adds);
    store(group.z, row + 2u, column + tile_n / 2u, s21, adds);
    store(group.z, row + 3u, column, s30, adds);
    store(group.z, row + 3u, column + tile_n / 2u, s31, adds);
    store(group.z, row + tile_m / 2u, column, s40, adds);
    store(group.z, row + tile_m / 2u, column + tile_n / 2u, s41, adds);
    store(group.z, row + tile_m / 2u + 1u, column, s50, adds);
    store(group.z, row + tile_m / 2u + 1u, column + tile_n / 2u, s51, adds);
    store(group.z, row + tile_m / 2u + 2u, column, s60, adds);
    store(group.z, row + tile_m / 2u + 2u, column + tile_n / 2u, s61, adds);
    store(group.z, row + tile_m / 2u + 3u, column, s70, adds);
    store(group.z, row + tile_m / 2u + 3u, column + tile_n / 2u, s71, adds);
    if (step >= steps) {
      break;
    }
    adds = true;
  }
}

// SPDX-License-Identifier: Apache-2.0
// Computes small products like product.wgsl and adds in the same order: tiles of 32 x 32, 8 steps
// of k at a time, 4 x 4 sums per thread. It uses little workgroup memory, because SwiftShader's
// compiler clears that word by word, in half a millisecond each.
// Uses common: product.

var<workgroup> tile_a: array<vec4<f32>, 64>;  // [8][m / 4]
var<workgroup> tile_b: array<vec4<f32>, 64>;  // [8][n / 4]

fn turned(v0: vec4<f32>, v1: vec4<f32>, v2: vec4<f32>, v3: vec4<f32>) -> mat4x4<f32> {
  return transpose(mat4x4<f32>(v0, v1, v2, v3));
}

@compute @workgroup_size(64)
fn product_small(@builtin(workgroup_id) group: vec3<u32>,
                 @builtin(local_invocation_index) thread: u32) {
  let first_row = group.y * 32u;
  let first_column = group.x * 32u;
  let rows = rows_of();
  let begin = group.z * p.slice_depth;
  let depth = min(depth_of(), begin + p.slice_depth);
  if (first_row >= rows && p.adds != 0u) {
    return;
  }
  let tx = thread % 8u;
  let ty = thread / 8u;
  var steps = (max(depth, begin) - begin + 7u) / 8u;
  if (first_row >= rows) {
    steps = 0u;
  }
  var adds = p.adds != 0u;
  var step = 0u;
  loop {
    var s00 = vec4<f32>(0.0);
    var s10 = vec4<f32>(0.0);
    var s20 = vec4<f32>(0.0);
    var s30 = vec4<f32>(0.0);
    // As long as a block of product.wgsl, whose steps are 16 of k.
    let block_end = min(steps, step + 2u * block_steps(max(depth, begin) - begin));
    for (; step < block_end; step++) {
      let k0 = begin + step * 8u;
      if (step > 0u) {
        workgroupBarrier();
      }
      if (a_transposed) {
        tile_a[thread] = load_a(k0 + thread / 8u, first_row + thread % 8u * 4u, depth, p.rows);
      } else if (thread < 16u) {
        let x = thread / 2u;
        let k = thread % 2u * 4u;
        let row = first_row + x * 4u;
        let v = turned(load_a(row, k0 + k, rows, depth), load_a(row + 1u, k0 + k, rows, depth),
                       load_a(row + 2u, k0 + k, rows, depth), load_a(row + 3u, k0 + k, rows, depth));
        tile_a[k * 8u + x] = v[0];
        tile_a[(k + 1u) * 8u + x] = v[1];
        tile_a[(k + 2u) * 8u + x] = v[2];
        tile_a[(k + 3u) * 8u + x] = v[3];
      }
      if (!b_transposed) {
        tile_b[thread] = load_b(k0 + thread / 8u, first_column + thread % 8u * 4u, depth, p.columns);
      } else if (thread >= 16u && thread < 32u) {
        let x = (thread - 16u) / 2u;
        let k = (thread - 16u) % 2u * 4u;
        let row = first_column + x * 4u;
        let v = turned(load_b(row, k0 + k, p.b_rows, depth), load_b(row + 1u, k0 + k, p.b_rows, depth),
                       load_b(row + 2u, k0 + k, p.b_rows, depth), load_b(row + 3u, k0 + k, p.b_rows, depth));
        tile_b[k * 8u + x] = v[0];
        tile_b[(k + 1u) * 8u + x] = v[1];
        tile_b[(k + 2u) * 8u + x] = v[2];
        tile_b[(k + 3u) * 8u + x] = v[3];
      }
      workgroupBarrier();
      for (var k = 0u; k < 8u; k++) {
        let a0 = tile_a[k * 8u + ty];
        let b0 = tile_b[k * 8u + tx];
        s00 = fma(vec4<f32>(a0.x), b0, s00);
        s10 = fma(vec4<f32>(a0.y), b0, s10);
        s20 = fma(vec4<f32>(a0.z), b0, s20);
        s30 = fma(vec4<f32>(a0.w), b0, s30);
      }
    }
    store(group.z, first_row + ty * 4u, first_column + tx * 4u, s00, adds);
    store(group.z, first_row + 1u + ty * 4u, first_column + tx * 4u, s10, adds);
    store(group.z, first_row + 2u + ty * 4u, first_column + tx * 4u, s20, adds);
    store(group.z, first_row + 3u + ty * 4u, first_column + tx * 4u, s30, adds);
    if (step >= steps) {
      break;
    }
    adds = true;
  }
}

// SPDX-License-Identifier: Apache-2.0
// Adds up the results of a product's slices (product.wgsl), in their order: result[r, c] (+)= their
// sum.

struct Params {
  row_length: u32,  // in vec4, of the result and of a slice
  slices: u32,
  slice_stride: u32,  // in vec4
  adds: u32,          // not 0: the slices are added to the result
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> slices: array<vec4<f32>>;  // [slices, rows, row_length]
@group(0) @binding(2) var<storage, read_write> result: array<vec4<f32>>;  // [rows, row_length]
@group(0) @binding(3) var<storage, read> counted: array<u32>;  // [0]: the number of rows that count

@compute @workgroup_size(64)
fn add_slices(@builtin(workgroup_id) group: vec3<u32>,
              @builtin(local_invocation_index) thread: u32) {
  let c = group.x * 64u + thread;
  if (c >= p.row_length || (group.y >= counted[0] && p.adds != 0u)) {
    return;
  }
  let at = group.y * p.row_length + c;
  var sum = slices[at];
  for (var k = 1u; k < p.slices; k++) {
    sum += slices[k * p.slice_stride + at];
  }
  if (p.adds != 0u) {
    sum += result[at];
  }
  result[at] = sum;
}

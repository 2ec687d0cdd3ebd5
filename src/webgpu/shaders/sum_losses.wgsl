// SPDX-License-Identifier: Apache-2.0
// One workgroup sums the losses of the rows in a fixed order, in a grid (1, 1, 1). Its three
// bindings are those of llm.istanbul's 07_loss.wgsl.
//   out_sum[0] = sum_s losses[s]
// Each thread sums blocks of 4 x 8 losses, then the blocks; the threads' sums are added in a tree.
// A loss goes through at most 18 + n / 8192 additions, so the rounding error of a long sum stays
// small.

@group(0) @binding(0) var<storage, read> losses: array<f32>;         // [n]
@group(0) @binding(1) var<storage, read_write> out_sum: array<f32>;  // [1]
@group(0) @binding(2) var<uniform> n: u32;

const WG = 256u;
const BLOCK = 8u;

var<workgroup> sums: array<f32, WG>;

fn load(first: u32) -> vec4<f32> {
  var x = vec4<f32>(0.0);
  for (var k = 0u; k < 4u; k++) {
    if (first + k * WG < n) {
      x[k] = losses[first + k * WG];
    }
  }
  return x;
}

@compute @workgroup_size(256, 1, 1)
fn sum_losses(@builtin(local_invocation_index) tid: u32) {
  var sum = vec4<f32>(0.0);
  for (var first = tid; first < n; first += 4u * BLOCK * WG) {
    var block = vec4<f32>(0.0);
    for (var k = 0u; k < BLOCK; k++) {
      block += load(first + 4u * k * WG);
    }
    sum += block;
  }
  sums[tid] = (sum.x + sum.y) + (sum.z + sum.w);
  for (var stride = WG / 2u; stride > 0u; stride /= 2u) {
    workgroupBarrier();
    if (tid < stride) {
      sums[tid] += sums[tid + stride];
    }
  }
  if (tid == 0u) {
    out_sum[0] = sums[0];
  }
}

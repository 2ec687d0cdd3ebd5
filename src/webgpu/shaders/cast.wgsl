// SPDX-License-Identifier: Apache-2.0
// Converts f32 to f16 and back, for mixed precision: n elements, two f16 per word, the first in the
// low half. One invocation handles a word (two elements), in workgroups of 256 and a grid (x, y, 1)
// with 512 x y >= n. An odd n leaves the high half of the last word 0. It computes with integers,
// because pack2x16float may round either way and leaves what is beyond f16's range undefined, and
// unpack2x16float may flush subnormals. Here f32 to f16 rounds to the nearest, ties to even, and
// overflows to infinity; f16 to f32 is exact; NaN stays NaN in both.

@group(0) @binding(0) var<storage, read> source: array<u32>;             // f32 [n] or f16 [n]
@group(0) @binding(1) var<storage, read_write> destination: array<u32>;  // f16 [n] or f32 [n]
@group(0) @binding(2) var<uniform> n: u32;

fn half_of(bits: u32) -> u32 {
  let sign = (bits >> 16u) & 0x8000u;
  let magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return sign | 0x7e00u;
  }
  if (magnitude >= 0x47800000u) {  // 2^16 and above: infinity
    return sign | 0x7c00u;
  }
  if (magnitude < 0x33000000u) {  // below half of the smallest subnormal: 0
    return sign;
  }
  let exponent = magnitude >> 23u;
  // A subnormal f16 counts units of 2^-24, so its significand is shifted further.
  let subnormal = exponent < 113u;
  let shift = select(13u, 126u - exponent, subnormal);
  let significand =
      select(magnitude - (112u << 23u), (magnitude & 0x7fffffu) | 0x800000u, subnormal);
  let kept = significand >> shift;
  let rest = significand & ((1u << shift) - 1u);
  let middle = 1u << (shift - 1u);
  let up = rest > middle || (rest == middle && (kept & 1u) == 1u);
  return sign | (kept + select(0u, 1u, up));
}

fn single_of(half: u32) -> u32 {
  let sign = (half & 0x8000u) << 16u;
  let exponent = (half >> 10u) & 31u;
  let fraction = half & 0x3ffu;
  if (exponent == 31u) {
    return sign | 0x7f800000u | (fraction << 13u);
  }
  if (exponent > 0u) {
    return sign | ((exponent + 112u) << 23u) | (fraction << 13u);
  }
  if (fraction == 0u) {
    return sign;
  }
  let first = firstLeadingBit(fraction);
  return sign | ((first + 103u) << 23u) | ((fraction << (23u - first)) & 0x7fffffu);
}

@compute @workgroup_size(256, 1, 1)
fn f32_to_f16(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
              @builtin(local_invocation_index) thread: u32) {
  let word = (group.x + group.y * groups.x) * 256u + thread;
  if (2u * word < n) {
    var packed = half_of(source[2u * word]);
    if (2u * word + 1u < n) {
      packed |= half_of(source[2u * word + 1u]) << 16u;
    }
    destination[word] = packed;
  }
}

@compute @workgroup_size(256, 1, 1)
fn f16_to_f32(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
              @builtin(local_invocation_index) thread: u32) {
  let word = (group.x + group.y * groups.x) * 256u + thread;
  if (2u * word < n) {
    destination[2u * word] = single_of(source[word] & 0xffffu);
    if (2u * word + 1u < n) {
      destination[2u * word + 1u] = single_of(source[word] >> 16u);
    }
  }
}

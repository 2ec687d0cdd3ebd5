// SPDX-License-Identifier: Apache-2.0
// This shader adds in a fixed order, a tree of 1024 at a time, and makes more of the sums:
//   tree                        sums[g] = sum of values[1024 g .. 1024 g + 1023]
//   normalize, normalize_sums   scalars: the normalizer, the gradients' common factor
//   finish, finish_sums         the loss of sum and mean of one value, or of up to 1024 that are
//                               summed before
//   columns                     result[j] (+)= sum over rows of the block's column j
// Uses common: token.

struct Params {
  count: u32,
  value_base: u32,
  result_base: u32,
  kind: u32,    // the normalizer is 0 none, 1 counted, 2 a number, 3 an f32 view, 4 an i64 view
  number: f32,  // the normalizer is number * 2^exponent, as far as the host's doubles go
  empty_is_nan: u32,
  nan: u32,
  view: u32,  // the normalizer's view is this word
  has_grad: u32,
  grad: u32,        // grad_loss is this word
  loss: u32,        // the loss is this word
  row_stride: u32,  // it counts words of the block
  adds: u32,
  exponent: i32,  // number is then in [1/2, 1); else it is 0
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> values: array<f32>;
@group(0) @binding(2) var<storage, read_write> sums: array<f32>;
@group(0) @binding(3) var<storage, read_write> scalars: Scalars;
@group(0) @binding(4) var<storage, read> normalizer: array<u32>;
@group(0) @binding(5) var<storage, read> grad_loss: array<u32>;
@group(0) @binding(6) var<storage, read_write> loss: array<u32>;
@group(0) @binding(7) var<storage, read> counted: array<u32>;
@group(0) @binding(8) var<storage, read_write> result: array<f32>;

var<workgroup> shared_sums: array<f32, 256>;
var<workgroup> last_sums: array<f32, 64>;

fn value(i: u32) -> f32 {
  if (i < p.count) {
    return values[p.value_base + i];
  }
  return 0.0;
}

@compute @workgroup_size(256)
fn tree(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let number = group.y * 65535u + group.x;
  let i = number * 1024u + thread;
  shared_sums[thread] = (value(i) + value(i + 256u)) + (value(i + 512u) + value(i + 768u));
  for (var step = 128u; step > 0u; step /= 2u) {
    workgroupBarrier();
    if (thread < step) {
      shared_sums[thread] += shared_sums[thread + step];
    }
  }
  if (thread == 0u && number * 1024u < p.count) {
    sums[p.result_base + number] = shared_sums[0];
  }
}

// Sums all values; the first thread of 64 has the sum.
fn sum_of_all(thread: u32) -> f32 {
  var sum = 0.0;
  for (var i = thread; i < p.count; i += 256u) {
    sum += (value(i) + value(i + 64u)) + (value(i + 128u) + value(i + 192u));
  }
  last_sums[thread] = sum;
  for (var step = 32u; step > 0u; step /= 2u) {
    workgroupBarrier();
    if (thread < step) {
      last_sums[thread] += last_sums[thread + step];
    }
  }
  return last_sums[0];
}

// Returns the number of a 64-bit integer's words, by its magnitude, whose words do not cancel.
fn number_of(low: u32, high: u32) -> f32 {
  if (high < 0x80000000u) {
    return f32(high) * 4294967296.0 + f32(low);
  }
  return -(f32(~high + select(0u, 1u, low == 0u)) * 4294967296.0 + f32(~low + 1u));
}

// Returns x * 2^exponent, rounded once.
fn scaled(x: f32, exponent: i32) -> f32 {
  var y = x;
  var left = clamp(exponent, -300, 300);  // there are 277 from the least f32 to the greatest
  while (left != 0) {
    let step = clamp(left, -100, 100);
    y *= bitcast<f32>(u32(127 + step) << 23u);
    left -= step;
  }
  return y;
}

// Returns x / (n * 2^exponent). No step of it overflows or vanishes where the result does not.
fn divided(x: f32, n: f32, exponent: i32) -> f32 {
  if (exponent > 0) {
    return scaled(x / (2.0 * n), 1 - exponent);
  }
  return scaled(x, -exponent) / n;
}

fn set_normalizer(counted: f32) {
  var n = 1.0;
  if (p.kind == 1u) {
    n = counted;
  } else if (p.kind == 2u) {
    n = p.number;
  } else if (p.kind == 3u) {
    n = bitcast<f32>(normalizer[p.view]);
  } else if (p.kind == 4u) {
    n = number_of(normalizer[p.view], normalizer[p.view + 1u]);
  }
  var g = 1.0;
  if (p.has_grad != 0u) {
    g = bitcast<f32>(grad_loss[p.grad]);
  }
  scalars.normalizer = n;
  scalars.exponent = p.exponent;
  scalars.upstream = bitcast<u32>(g);
  if (p.has_grad != 0u) {
    scalars.upstream = grad_loss[p.grad];
  }
  if (p.kind == 0u) {
    scalars.factor = g;
  } else if (n == 0.0) {
    scalars.factor = bitcast<f32>(select(0u, p.nan, p.empty_is_nan != 0u));
  } else {
    scalars.factor = divided(g, n, p.exponent);
  }
}

// The values are the counted normalizer.
@compute @workgroup_size(1)
fn normalize() {
  set_normalizer(value(0u));
}
@compute @workgroup_size(64)
fn normalize_sums(@builtin(local_invocation_index) thread: u32) {
  let sum = sum_of_all(thread);
  if (thread == 0u) {
    set_normalizer(sum);
  }
}

// values[value_base] is the sum over the vocabulary's weights.
@compute @workgroup_size(1)
fn keep_weight_sum() {
  scalars.weight_sum = values[p.value_base];
}

fn set_loss(sum: f32) {
  let n = scalars.normalizer;
  var bits = bitcast<u32>(sum);
  if (p.kind != 0u && (bits & 0x7fffffffu) <= 0x7f800000u) {
    if (n == 0.0) {
      bits = select(0u, p.nan, p.empty_is_nan != 0u);
    } else {
      bits = bitcast<u32>(divided(sum, n, scalars.exponent));
    }
  }
  loss[p.loss] = bits;
}

// The values are the tokens' losses.
@compute @workgroup_size(1)
fn finish() {
  set_loss(value(0u));
}
@compute @workgroup_size(64)
fn finish_sums(@builtin(local_invocation_index) thread: u32) {
  let sum = sum_of_all(thread);
  if (thread == 0u) {
    set_loss(sum);
  }
}

@compute @workgroup_size(64)
fn columns(@builtin(global_invocation_id) id: vec3<u32>) {
  let j = id.x;
  if (j >= p.count) {
    return;
  }
  // The sum takes blocks of 16 rows, because many small terms after a large one would each lose as
  // much as one of its size.
  var sum = 0.0;
  for (var first = 0u; first < counted[0]; first += 16u) {
    var part = 0.0;
    for (var r = first; r < min(first + 16u, counted[0]); r++) {
      part += values[p.value_base + r * p.row_stride + j];
    }
    sum += part;
  }
  if (p.adds != 0u) {
    sum += result[p.result_base + j];
  }
  result[p.result_base + j] = sum;
}

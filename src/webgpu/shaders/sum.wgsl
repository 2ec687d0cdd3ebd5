// SPDX-License-Identifier: Apache-2.0
// Adds numbers in a fixed order, 1024 at a time as a tree, and computes results from the sums:
//   tree              sums[g] = sum of values[1024 g .. 1024 g + 1023]
//   normalize         the normalizer and the gradients' common factor   -> scalars
//   keep_weight_sum   the sum of the class weights                      -> scalars
//   finish            the call's loss, of reduction sum or mean         -> loss
//   columns           result[j] (+)= sum over the rows of the block's column j
// normalize and finish read one value; normalize_sums and finish_sums add several first.
// Uses common: token.

struct Params {
  count: u32,
  value_base: u32,
  result_base: u32,
  kind: u32,    // normalizer: 0 none, 1 counted, 2 number, 3 f32 view, 4 i64 view
  number: f32,  // number 2^exponent is the given number, which may exceed f32
  empty_is_nan: u32,
  nan: u32,
  view: u32,  // index of the word in `normalizer`
  has_grad: u32,
  grad: u32,        // index of the word in `grad_loss`
  loss: u32,        // index of the word in `loss`
  row_stride: u32,  // of the block, in words
  adds: u32,
  exponent: i32,  // not 0: number is in [1/2, 1)
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

// Sums all values with 64 threads; only the first thread may use the result.
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

// Returns a signed 64-bit integer as f32. Uses its magnitude, because the words of a small negative
// number would cancel.
fn number_of(low: u32, high: u32) -> f32 {
  if (high < 0x80000000u) {
    return f32(high) * 4294967296.0 + f32(low);
  }
  return -(f32(~high + select(0u, 1u, low == 0u)) * 4294967296.0 + f32(~low + 1u));
}

// Returns x * 2^exponent, rounded once.
fn scaled(x: f32, exponent: i32) -> f32 {
  var y = x;
  var left = clamp(exponent, -300, 300);  // f32's exponents span 277
  while (left != 0) {
    let step = clamp(left, -100, 100);
    y *= bitcast<f32>(u32(127 + step) << 23u);
    left -= step;
  }
  return y;
}

// Returns x / (n * 2^exponent). No step overflows or underflows unless the result does.
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

// `values` has the counted normalizer; for normalize_sums, its parts. Only kind 1 uses it.
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

// `values` has the sum of the tokens' losses; for finish_sums, its parts.
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
  // In blocks of 16 rows: in a single long sum, small terms would be rounded to the precision of
  // the large sum.
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

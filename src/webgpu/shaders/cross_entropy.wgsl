// SPDX-License-Identifier: Apache-2.0
// Loss and gradient of one row of logits a workgroup, in place, behind the five bindings of
// llm.istanbul's 07_loss.wgsl, so that a program with that pipeline can take this file instead:
//   x_j = logits[s, j]    m = max_j x_j    lse = m + log sum_j exp(x_j - m)    t = tgts[s]
//   losses[s]    = lse - (1 - alpha) x_t - alpha mean_j x_j + beta_zl lse^2
//   logits[s, j] = inv_norm (p_j (1 + 2 beta_zl lse) - (1 - alpha) [j = t] - alpha inv_V)
// A target outside the vocabulary: loss 0, row 0. Grid (seq_len, 1, 1), or (x, y, 1) with
// x y >= seq_len where there are more rows than a grid is wide.
//
// A thread holds 16 columns at a time, maximum and sum formed in one pass: a row of up to 4096 stays
// in registers and is read once and written once, a longer one is read twice. alpha = 0 skips the
// sum of the logits. The target's logit is read before the first barrier: after the last one another
// invocation may have overwritten it already. The threads are brought together 16 by 16, with two
// barriers a time; workgroup memory is written before it is read, because on Mesa 22's lavapipe it
// starts with what it held.
//
// The language lets a compiler assume that no value is infinite or NaN, so logits are compared as
// whole numbers of the same order ("keys"): one NaN or +inf, or -inf alone, makes the row NaN; -inf
// is a probability of 0, and under smoothing a loss of +inf.

@group(0) @binding(0) var<storage, read_write> logits: array<f32>;  // [seq_len, vocab_size]
@group(0) @binding(1) var<storage, read> tgts: array<u32>;          // [seq_len]
@group(0) @binding(2) var<storage, read_write> losses: array<f32>;  // [seq_len]
@group(0) @binding(3) var<uniform> dims: vec4<u32>;    // seq_len, vocab_size, unused, unused
@group(0) @binding(4) var<uniform> params: vec4<f32>;  // inv_norm, alpha, beta_zl, inv_V

const WG = 256u;
const AT_ONCE = 16u * WG;  // columns
const LOWEST = -0x1.fffffep+127f;
const INFINITY_BITS = 0x7f800000u;
const MINUS_INFINITY_BITS = 0xff800000u;
const NAN_BITS = 0x7fc00000u;
const KEY_OF_MINUS_INFINITY = 0x007fffffu;
const KEY_OF_INFINITY = 0xff800000u;

var<workgroup> extremes: array<vec2<u32>, WG>;  // the largest key; of the smallest, less 1, the inverse
var<workgroup> sums: array<vec2<f32>, WG>;

// Below -200 the exponential is 0 in f32; clamped, so that no difference is infinite.
fn exp_below(x: vec4<f32>, reference: f32) -> vec4<f32> {
  return exp(max(x - reference, vec4<f32>(-200.0)));
}

// Which of columns v, v + 256, v + 512 and v + 768 there are.
fn inside(v: u32) -> vec4<bool> {
  return vec4<u32>(v) + vec4<u32>(0u, WG, 2u * WG, 3u * WG) < vec4<u32>(dims.y);
}

// exp(x - m) of 4 columns; 0 for -inf and beyond the row's end, also in a row of nothing but LOWEST.
fn weigh(x: vec4<f32>, v: u32, m: f32) -> vec4<f32> {
  let number = bitcast<vec4<u32>>(x) != vec4<u32>(MINUS_INFINITY_BITS);
  return select(vec4<f32>(0.0), exp_below(max(x, vec4<f32>(LOWEST)), m), inside(v) & number);
}

fn total(x: vec4<f32>) -> f32 {
  return (x.x + x.y) + (x.z + x.w);
}

fn load(row: u32, v: u32) -> vec4<f32> {
  var x = vec4<f32>(LOWEST);
  for (var k = 0u; k < 4u; k++) {
    if (v + k * WG < dims.y) {
      x[k] = logits[row + v + k * WG];
    }
  }
  return x;
}

fn store(row: u32, v: u32, grad: vec4<f32>) {
  for (var k = 0u; k < 4u; k++) {
    if (v + k * WG < dims.y) {
      logits[row + v + k * WG] = grad[k];
    }
  }
}

// In the order of the numbers, NaN above all of them; 0 for columns that are not there.
fn keys(x: vec4<f32>, v: u32) -> vec4<u32> {
  let bits = bitcast<vec4<u32>>(x);
  let sign = bitcast<vec4<u32>>(bitcast<vec4<i32>>(bits) >> vec4<u32>(31u));
  let ordered = bits ^ (sign | vec4<u32>(0x80000000u));
  let nan = (bits & vec4<u32>(0x7fffffffu)) > vec4<u32>(INFINITY_BITS);
  return select(vec4<u32>(0u), select(ordered, vec4<u32>(0xffffffffu), nan), inside(v));
}

fn number_of(key: u32) -> f32 {
  return bitcast<f32>(select(~key, key ^ 0x80000000u, (key >> 31u) == 1u));
}

fn largest(x: vec4<u32>) -> u32 {
  return max(max(x.x, x.y), max(x.z, x.w));
}

// The same of all threads.
fn reduce_extremes(tid: u32, mine: vec2<u32>) -> vec2<u32> {
  extremes[tid] = mine;
  workgroupBarrier();
  if (tid < 16u) {
    var most = mine;
    for (var k = 1u; k < 16u; k++) {
      most = max(most, extremes[tid + 16u * k]);
    }
    extremes[tid] = most;
  }
  workgroupBarrier();
  var most = extremes[0];
  for (var k = 1u; k < 16u; k++) {
    most = max(most, extremes[k]);
  }
  return most;
}

fn reduce_sums(tid: u32, mine: vec2<f32>) -> vec2<f32> {
  sums[tid] = mine;
  workgroupBarrier();
  if (tid < 16u) {
    var sum = mine;
    for (var k = 1u; k < 16u; k++) {
      sum += sums[tid + 16u * k];
    }
    sums[tid] = sum;
  }
  workgroupBarrier();
  var sum = sums[0];
  for (var k = 1u; k < 16u; k++) {
    sum += sums[k];
  }
  return sum;
}

// Of 4 columns, how far they are below the reference in sum; nothing beyond the row's end.
fn depth(x: vec4<f32>, v: u32, m: f32) -> f32 {
  return total(select(vec4<f32>(0.0), m - max(x, vec4<f32>(LOWEST)), inside(v)));
}

struct Gradient {
  m: f32,
  p_scale: f32,       // inv_norm (1 + 2 beta_zl lse) / s
  uniform_part: f32,  // inv_norm alpha / V
  target_part: f32,   // inv_norm (1 - alpha)
  poison: u32,        // NaN_BITS, or 0
}

fn gradient(g: Gradient, x: vec4<f32>, v: u32, t: u32) -> vec4<f32> {
  let columns = vec4<u32>(v, v + WG, v + 2u * WG, v + 3u * WG);
  let onehot = select(vec4<f32>(0.0), vec4<f32>(g.target_part), columns == vec4<u32>(t));
  let grad = weigh(x, v, g.m) * g.p_scale - onehot - g.uniform_part;
  return bitcast<vec4<f32>>(bitcast<vec4<u32>>(grad) | vec4<u32>(g.poison));
}

fn clear_row(s: u32, row: u32, tid: u32) {
  if (tid == 0u) {
    losses[s] = 0.0;
  }
  for (var v = tid; v < dims.y; v += 4u * WG) {
    store(row, v, vec4<f32>(0.0));
  }
}

// The loss of the row and what its gradient is made of. `below` is sum_j (m - x_j).
fn finish(tid: u32, s: u32, extreme: vec2<u32>, m: f32, sum: f32, below: f32, x_t: f32) -> Gradient {
  let alpha = params.y;
  let log_sum = log(sum);
  let lse = m + log_sum;
  let loss = log_sum + (1.0 - alpha) * (m - x_t) + alpha * below * params.w + params.z * lse * lse;
  let numberless = extreme.x >= KEY_OF_INFINITY || extreme.x <= KEY_OF_MINUS_INFINITY;
  let poison = select(0u, NAN_BITS, numberless);
  if (tid == 0u) {
    let masked = extreme.y == ~(KEY_OF_MINUS_INFINITY - 1u) && alpha > 0.0;
    let masked_target = alpha < 1.0 && bitcast<u32>(x_t) == MINUS_INFINITY_BITS;
    let bits = select(bitcast<u32>(loss), INFINITY_BITS, masked || masked_target);
    losses[s] = bitcast<f32>(bits | poison);
  }
  let p_scale = params.x * (1.0 + 2.0 * params.z * lse) / sum;
  return Gradient(m, p_scale, params.x * alpha * params.w, params.x * (1.0 - alpha), poison);
}

@compute @workgroup_size(256, 1, 1)
fn cross_entropy(@builtin(workgroup_id) group: vec3<u32>,
                 @builtin(num_workgroups) groups: vec3<u32>,
                 @builtin(local_invocation_index) tid: u32) {
  let s = group.x + group.y * groups.x;
  if (s >= dims.x) {
    return;
  }
  let row = s * dims.y;
  let t = tgts[s];
  if (t >= dims.y) {
    clear_row(s, row, tid);
    return;
  }
  let x_t = logits[row + t];
  var a = vec4<f32>(0.0);
  var b = vec4<f32>(0.0);
  var c = vec4<f32>(0.0);
  var d = vec4<f32>(0.0);
  var extreme = vec2<u32>(0u);
  var m = LOWEST;
  var sum = 0.0;
  for (var v = tid; v < dims.y; v += AT_ONCE) {
    a = load(row, v);
    b = load(row, v + 4u * WG);
    c = load(row, v + 8u * WG);
    d = load(row, v + 12u * WG);
    let ka = keys(a, v);
    let kb = keys(b, v + 4u * WG);
    let kc = keys(c, v + 8u * WG);
    let kd = keys(d, v + 12u * WG);
    extreme.x = max(extreme.x, largest(max(max(ka, kb), max(kc, kd))));
    if (params.y > 0.0) {
      // Key 0, of no column, wraps to the largest.
      let least = min(min(ka - 1u, kb - 1u), min(kc - 1u, kd - 1u));
      extreme.y = max(extreme.y, largest(~least));
    }
    let before = m;
    m = max(number_of(extreme.x), LOWEST);
    sum = sum * exp(max(before - m, -200.0)) +
          total((weigh(a, v, m) + weigh(b, v + 4u * WG, m)) +
                (weigh(c, v + 8u * WG, m) + weigh(d, v + 12u * WG, m)));
  }
  extreme = reduce_extremes(tid, extreme);
  let own = m;
  m = max(number_of(extreme.x), LOWEST);
  let short = dims.y <= AT_ONCE;
  var below = 0.0;
  if (params.y > 0.0) {
    for (var v = tid; v < dims.y; v += AT_ONCE) {
      if (!short) {
        a = load(row, v);
        b = load(row, v + 4u * WG);
        c = load(row, v + 8u * WG);
        d = load(row, v + 12u * WG);
      }
      below += (depth(a, v, m) + depth(b, v + 4u * WG, m)) +
               (depth(c, v + 8u * WG, m) + depth(d, v + 12u * WG, m));
    }
  }
  let all = reduce_sums(tid, vec2<f32>(sum * exp(max(own - m, -200.0)), below));

  let g = finish(tid, s, extreme, m, all.x, all.y, x_t);
  for (var v = tid; v < dims.y; v += AT_ONCE) {
    if (!short) {
      a = load(row, v);
      b = load(row, v + 4u * WG);
      c = load(row, v + 8u * WG);
      d = load(row, v + 12u * WG);
    }
    store(row, v, gradient(g, a, v, t));
    store(row, v + 4u * WG, gradient(g, b, v + 4u * WG, t));
    store(row, v + 8u * WG, gradient(g, c, v + 8u * WG, t));
    store(row, v + 12u * WG, gradient(g, d, v + 12u * WG, t));
  }
}

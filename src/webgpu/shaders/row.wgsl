// SPDX-License-Identifier: Apache-2.0
// Rows of up to 4096 columns, in the caller's matrix: maximum, sums, loss and draw at once, read once
// and written once (the formulas of docs/semantics.md). `row_threads` threads hold 16 columns each of
// a row, so a workgroup takes several short ones; they are brought together by `leaders` of them, with
// two barriers a time. Which of these is chosen by the number of columns alone.

struct Params {  // of a window, as in slots.wgsl
  rows: u32, columns: u32, row_stride: u32, base: u32, first_column: u32, slots: u32, flags: u32,
  nan: u32, slope: f32, cap_in: f32, cap_in_low: f32, cap_out: f32, cap_out_low: f32,
  smoothing: f32, smoothing_per_class: f32, z_loss: f32, floor: f32, classes: f32, weight_base: u32,
}

const has_vocab_weight = 1u;
const has_token_grad = 2u;  // grad_loss [N]
const has_entropy = 8u;  // entropy was given
const has_grad_lse = 16u;
const has_grad_target = 32u;
const has_grad_entropy = 64u;
const is_softmax = 128u;
const wants_gradient = 512u;

// How raw becomes z.
override capped: bool = false;
override scaled: bool = false;
override row_threads: u32 = 256u;  // a square: 16, 64 or 256
override leaders: u32 = 16u;       // its root

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> vocab_weight: array<f32>;  // [columns]
@group(0) @binding(2) var<storage, read_write> rows: array<u32>;    // [tokens, 16]
@group(0) @binding(3) var<storage, read> inputs: array<f32>;        // [tokens, 8]
@group(0) @binding(4) var<storage, read> scalars: array<u32>;
@group(0) @binding(5) var<storage, read_write> block: array<u32>;   // [tokens, row_stride]

// A token's words: state, target, c_t, a, m, log s, z_t, weighted sum, entropy, argmax, loss, the
// factors of p, one-hot, c_j and entropy, place in the block.
const words = 16u;
const state_nan = 256u;           // added to the state: the row's statistics are NaN
const state_gradient_nan = 512u;  // and its gradient is
const none = 0xffffffffu;
const lowest = -0x1.fffffep+127f;
const infinity_bits = 0x7f800000u;

fn is_nan(x: f32) -> bool {
  return (bitcast<u32>(x) & 0x7fffffffu) > infinity_bits;
}
fn is_infinite(x: f32) -> bool {
  return (bitcast<u32>(x) & 0x7fffffffu) == infinity_bits;
}
fn is_negative(x: f32) -> bool {
  return (bitcast<u32>(x) >> 31u) == 1u;
}

// exp(x) for x <= 0 to about an ulp; below 2^-126 it is 0.
fn exp_nonpositive(x: f32) -> f32 {
  let y = max(x, -104.0);
  let n = round(y * 1.44269504);
  let r = fma(n, -1.42860677e-6, fma(n, -0.693145752, y));
  var q = fma(1.98412698e-4, r, 1.38888889e-3);
  q = fma(q, r, 8.33333333e-3);
  q = fma(q, r, 4.16666667e-2);
  q = fma(q, r, 0.166666667);
  q = fma(q, r, 0.5);
  let e = 1.0 + (r + r * r * q);
  let exponent = i32(n) + 127;
  if (exponent <= 0 || x < -104.0) {
    return 0.0;
  }
  return e * bitcast<f32>(u32(exponent) << 23u);
}

// log(x) for a normal x > 0, to about an ulp wherever it is not tiny.
fn log_positive(x: f32) -> f32 {
  let shifted = bitcast<u32>(x) + (0x3f800000u - 0x3f3504f3u);
  let k = f32(i32(shifted >> 23u) - 127);
  let f = bitcast<f32>((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0;
  let s = f / (2.0 + f);
  let z = s * s;
  let w = z * z;
  let r = z * (0.66666662693 + w * 0.28498786688) + w * (0.40000972152 + w * 0.24279078841);
  let half = 0.5 * f * f;
  return (s * (half + r) + k * 9.0580006145e-6 - half) + f + k * 0.69313812256;
}

// tanh(x) for any x but NaN.
fn tanh_of(x: f32) -> f32 {
  let size = abs(x);
  if (size < 0.5) {
    let y = x * x;
    var q = fma(y, -1.45583438705e-3, 3.59212803657e-3);
    q = fma(q, y, -8.86323552990e-3);
    q = fma(q, y, 2.18694885361e-2);
    q = fma(q, y, -5.39682539683e-2);
    q = fma(q, y, 0.133333333333);
    q = fma(q, y, -0.333333333333);
    return fma(x * y, q, x);
  }
  let e = exp_nonpositive(max(-2.0 * size, -60.0));
  return select(1.0, -1.0, x < 0.0) * (1.0 - 2.0 * e / (1.0 + e));
}

// z, and tanh where there is a softcap.
struct Mapped {
  z: f32,
  t: f32,
}
fn map_raw(raw: f32) -> Mapped {
  if (capped) {
    if (is_nan(raw) || (is_infinite(raw) && p.cap_in == 0.0)) {
      return Mapped(bitcast<f32>(p.nan), bitcast<f32>(p.nan));
    }
    var x = 0.5 * fma(raw, p.cap_in, raw * p.cap_in_low);
    if (is_infinite(raw)) {
      x = select(1.0e4, -1.0e4, is_negative(raw) != (p.cap_in < 0.0));
    }
    let t = tanh_of(clamp(x, -1.0e4, 1.0e4));
    return Mapped(fma(t, p.cap_out, t * p.cap_out_low), t);
  }
  if (scaled) {
    return Mapped(raw * p.slope, 0.0);
  }
  return Mapped(raw, 0.0);
}

// What is known of a token, in the order of its words.
struct State {
  kind: u32,
  target_column: u32,
  class_weight: f32,
  token_weight: f32,
  m: f32,
  log_sum: f32,
  target_logit: f32,
  weighted: f32,
  entropy: f32,
  argmax: u32,
  loss: f32,
  probability: f32,
  onehot: f32,
  smoothing: f32,
  entropy_factor: f32,
}

fn class_weight_sum() -> f32 {
  return select(p.classes, bitcast<f32>(scalars[4]), (p.flags & has_vocab_weight) != 0u);
}

fn loss_of(s: State) -> f32 {
  let lse = s.m + s.log_sum;
  let onehot = (1.0 - p.smoothing) * s.class_weight;
  var loss = 0.0;
  if (onehot != 0.0) {
    loss = onehot * ((s.m - s.target_logit) + s.log_sum);
  }
  if (p.smoothing > 0.0) {
    loss += p.smoothing_per_class * (class_weight_sum() * lse - s.weighted);
  }
  loss *= s.token_weight;
  if (p.z_loss > 0.0) {
    // A token of weight 0 has no loss, though the square may overflow.
    loss += select(0.0, s.token_weight * p.z_loss * lse * lse, s.token_weight != 0.0);
  }
  return loss;
}

// The factors of the gradient's parts.
fn with_factors(token: u32, known: State) -> State {
  var s = known;
  let given = token * 8u;
  let usual = bitcast<f32>(scalars[3]);
  let ga = select(usual, inputs[given + 1u], (p.flags & has_token_grad) != 0u) * s.token_weight;
  var w = (1.0 - p.smoothing) * s.class_weight;
  if (p.smoothing > 0.0) {
    w += p.smoothing_per_class * class_weight_sum();
  }
  if (p.z_loss > 0.0) {
    w += 2.0 * p.z_loss * (s.m + s.log_sum);
  }
  s.probability = ga * w;
  s.onehot = ga * (1.0 - p.smoothing) * s.class_weight;
  s.smoothing = ga * p.smoothing_per_class;
  if ((p.flags & has_grad_lse) != 0u) {
    s.probability += inputs[given + 5u];
  }
  if ((p.flags & has_grad_target) != 0u) {
    s.onehot -= inputs[given + 6u];
  }
  if ((p.flags & has_grad_entropy) != 0u) {
    s.entropy_factor = inputs[given + 7u];
  }
  if (is_nan(s.probability) || is_nan(s.onehot) || is_nan(s.smoothing) || is_nan(s.entropy_factor)) {
    s.kind |= state_gradient_nan;
  }
  return s;
}

// The loss and the factors, from the row's sums.
fn completed(token: u32, known: State) -> State {
  var s = known;
  if ((p.flags & has_entropy) != 0u) {
    s.entropy = inputs[token * 8u + 4u];
  }
  if (is_nan(s.m) || is_nan(s.log_sum)) {
    s.kind |= state_nan;
  }
  if ((p.flags & is_softmax) != 0u) {
    s.probability = 1.0;
    return s;
  }
  s.loss = loss_of(s);
  if ((s.kind & state_nan) != 0u) {
    s.loss = bitcast<f32>(p.nan);
  }
  if ((p.flags & wants_gradient) != 0u) {
    return with_factors(token, s);
  }
  return s;
}

fn keep(token: u32, s: State) {
  let at = token * words;
  rows[at] = s.kind;
  rows[at + 4u] = bitcast<u32>(s.m);
  rows[at + 5u] = bitcast<u32>(s.log_sum);
  rows[at + 6u] = bitcast<u32>(s.target_logit);
  rows[at + 7u] = bitcast<u32>(s.weighted);
  rows[at + 8u] = bitcast<u32>(s.entropy);
  rows[at + 9u] = s.argmax;
  rows[at + 10u] = bitcast<u32>(s.loss);
  rows[at + 11u] = bitcast<u32>(s.probability);
  rows[at + 12u] = bitcast<u32>(s.onehot);
  rows[at + 13u] = bitcast<u32>(s.smoothing);
  rows[at + 14u] = bitcast<u32>(s.entropy_factor);
}

// draw of a column from its raw logit.
fn draw(s: State, raw: f32, column: u32, local: u32) -> u32 {
  if ((s.kind & (state_nan | state_gradient_nan)) != 0u) {
    return p.nan;
  }
  let mapped = map_raw(raw);
  if (is_nan(mapped.z)) {
    return p.nan;
  }
  var probability = 0.0;
  var log_p = 0.0;
  if (!(is_infinite(mapped.z) && is_negative(mapped.z))) {
    log_p = (mapped.z - s.m) - s.log_sum;
    // A state that was given need not be this row's: then p may pass 1.
    if (log_p > 0.0) {
      probability = exp(log_p);
    } else {
      probability = exp_nonpositive(log_p);
    }
  }
  var dz = s.probability * probability;
  if (p.smoothing > 0.0) {
    var c = 1.0;
    if ((p.flags & has_vocab_weight) != 0u) {
      c = vocab_weight[p.weight_base + local];
    }
    dz -= s.smoothing * c;
  }
  if (column == s.target_column) {
    dz -= s.onehot;
  }
  if ((p.flags & has_grad_entropy) != 0u && probability > 0.0) {
    dz -= s.entropy_factor * probability * (log_p + s.entropy);
  }
  if (capped) {
    dz *= p.slope * ((1.0 - mapped.t) * (1.0 + mapped.t));
  } else if (scaled) {
    dz *= p.slope;
  }
  return bitcast<u32>(dz);
}

// A whole number for x, in the order of the numbers from -inf to inf; NaN is above them, 0 is none.
fn key_of(x: f32) -> u32 {
  let key = bitcast<u32>(x) ^ select(0x80000000u, none, is_negative(x));
  return select(key, none, is_nan(x));
}
fn number_of(key: u32) -> f32 {
  return bitcast<f32>(select(~key, key ^ 0x80000000u, (key >> 31u) == 1u));
}

// sum, sum of e (z - m), weighted sum; the lowest column of the maximum.
fn joined(a: vec4<f32>, b: vec4<f32>) -> vec4<f32> {
  return vec4<f32>(a.xyz + b.xyz, min(a.w, b.w));
}

var<workgroup> largest: array<u32, 256>;
var<workgroup> sums: array<vec4<f32>, 256>;

// Of the threads from `first` on, which are those of a row.
fn reduce_largest(first: u32, lane: u32, own: u32) -> u32 {
  largest[first + lane] = own;
  workgroupBarrier();
  var most = own;
  if (lane < leaders) {
    for (var k = leaders; k < row_threads; k += leaders) {
      most = max(most, largest[first + lane + k]);
    }
    largest[first + lane] = most;
  }
  workgroupBarrier();
  most = largest[first];
  for (var k = 1u; k < leaders; k++) {
    most = max(most, largest[first + k]);
  }
  return most;
}
fn reduce_sums(first: u32, lane: u32, own: vec4<f32>) -> vec4<f32> {
  sums[first + lane] = own;
  workgroupBarrier();
  var all = own;
  if (lane < leaders) {
    for (var k = leaders; k < row_threads; k += leaders) {
      all = joined(all, sums[first + lane + k]);
    }
    sums[first + lane] = all;
  }
  workgroupBarrier();
  all = sums[first];
  for (var k = 1u; k < leaders; k++) {
    all = joined(all, sums[first + k]);
  }
  return all;
}

@compute @workgroup_size(256)
fn row(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let lane = thread % row_threads;
  let first = thread - lane;
  let number = group.x * (256u / row_threads) + thread / row_threads;
  let exists = number < p.rows;
  let token = min(number, p.rows - 1u);
  let at = p.base + token * p.row_stride;
  let place = token * words;
  var s = State();
  s.kind = rows[place];
  s.target_column = rows[place + 1u];
  s.class_weight = bitcast<f32>(rows[place + 2u]);
  s.token_weight = bitcast<f32>(rows[place + 3u]);
  let counts = exists && (s.kind & 255u) == 1u;
  let columns = select(0u, p.columns, counts);
  s.target_logit = bitcast<f32>(p.nan ^ 0x80400000u);  // -inf
  if (s.target_column < columns) {
    s.target_logit = map_raw(bitcast<f32>(block[at + s.target_column])).z;
  }

  var raw: array<f32, 16>;
  var own_largest = 0u;
  for (var k = 0u; k < 16u; k++) {
    let column = lane + k * row_threads;
    if (column < columns) {
      raw[k] = bitcast<f32>(block[at + column]);
      own_largest = max(own_largest, key_of(map_raw(raw[k]).z));
    }
  }
  s.m = number_of(reduce_largest(first, lane, own_largest));
  var own = vec4<f32>(0.0, 0.0, 0.0, 1.0e9);
  for (var k = 0u; k < 16u; k++) {
    let column = lane + k * row_threads;
    if (column < columns) {
      let z = map_raw(raw[k]).z;
      var c = 1.0;
      if ((p.flags & has_vocab_weight) != 0u) {
        c = vocab_weight[p.weight_base + column];
      }
      let d = max(z - s.m, -200.0);
      let e = exp_nonpositive(d);
      own = joined(own, vec4<f32>(e, e * d, select(0.0, c * z, c != 0.0),
                                  select(1.0e9, f32(column), z == s.m)));
    }
  }
  let all = reduce_sums(first, lane, own);
  s.log_sum = log_positive(max(all.x, 1.0));
  s.weighted = all.z;
  s.entropy = s.log_sum - all.y / max(all.x, 1.0);
  s.argmax = select(0u, u32(all.w), all.w < 1.0e8);
  if (is_nan(s.m) || is_infinite(s.m)) {
    s.log_sum = bitcast<f32>(p.nan);
    s.entropy = bitcast<f32>(p.nan);
  }
  s = completed(token, s);
  if (counts && lane == 0u) {
    keep(token, s);
  }
  for (var k = 0u; k < 16u; k++) {
    let column = lane + k * row_threads;
    if (exists && column < p.columns) {
      var result = 0u;
      if (counts) {
        result = draw(s, raw[k], column, column);
      }
      block[at + column] = result;
    }
  }
}

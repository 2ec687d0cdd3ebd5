// SPDX-License-Identifier: Apache-2.0
// raw -> draw in the block of a window, from the state of its rows (the formulas of
// docs/semantics.md). The block's rows are the tokens that count (`counted`).

struct Params {  // of a window, as in slots.wgsl
  rows: u32, columns: u32, row_stride: u32, base: u32, first_column: u32, slots: u32, flags: u32,
  nan: u32, slope: f32, cap_in: f32, cap_in_low: f32, cap_out: f32, cap_out_low: f32,
  smoothing: f32, smoothing_per_class: f32, z_loss: f32, floor: f32, classes: f32,
  weight_base: u32,
}

const has_vocab_weight = 1u;
const has_grad_entropy = 64u;

// How raw becomes z.
override capped: bool = false;
override scaled: bool = false;
override direct: bool = false;  // the block is the caller's own matrix, its rows are all tokens

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> counted: array<u32>;        // count, 3 unused, [count]
@group(0) @binding(2) var<storage, read> vocab_weight: array<f32>;   // [columns]
@group(0) @binding(3) var<storage, read> rows: array<u32>;           // [tokens, 16]
@group(0) @binding(4) var<storage, read_write> block: array<u32>;    // [rows, row_stride]

// A token's words: state, target, c_t, a, m, log s, z_t, weighted sum, entropy, argmax, loss, the
// factors of p, one-hot, c_j and entropy, place in the block.
const words = 16u;
const state_nan = 256u;           // added to the state: the row's statistics are NaN
const state_gradient_nan = 512u;  // and its gradient is
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

fn state_of(token: u32) -> State {
  let at = token * words;
  return State(rows[at], rows[at + 1u], bitcast<f32>(rows[at + 2u]), bitcast<f32>(rows[at + 3u]),
               bitcast<f32>(rows[at + 4u]), bitcast<f32>(rows[at + 5u]),
               bitcast<f32>(rows[at + 6u]), bitcast<f32>(rows[at + 7u]),
               bitcast<f32>(rows[at + 8u]), rows[at + 9u], bitcast<f32>(rows[at + 10u]),
               bitcast<f32>(rows[at + 11u]), bitcast<f32>(rows[at + 12u]),
               bitcast<f32>(rows[at + 13u]), bitcast<f32>(rows[at + 14u]));
}

@compute @workgroup_size(256)
fn gradient(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let r = group.y;
  let exists = r < counted[0];
  let s = state_of(select(0u, counted[4u + select(0u, r, exists)], exists));
  let counts = exists && (!direct || (s.kind & 255u) == 1u);
  for (var k = 0u; k < 4u; k++) {
    let local = group.x * 1024u + k * 256u + thread;
    // A block of the library's own has zeros after its columns.
    if (local >= select(p.row_stride, p.columns, direct)) {
      continue;
    }
    let at = p.base + r * p.row_stride + local;
    var result = 0u;
    if (counts && local < p.columns) {
      result = draw(s, bitcast<f32>(block[at]), p.first_column + local, local);
    }
    block[at] = result;
  }
}

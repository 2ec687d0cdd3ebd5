// SPDX-License-Identifier: Apache-2.0
// A thread a row: its slots in their order give its state, its loss and what its gradient is made of
// (the formulas of docs/semantics.md).

struct Params {  // of a window, as in slots.wgsl
  rows: u32, columns: u32, row_stride: u32, base: u32, first_column: u32, slots: u32, flags: u32,
  nan: u32, slope: f32, cap_in: f32, cap_in_low: f32, cap_out: f32, cap_out_low: f32,
  smoothing: f32, smoothing_per_class: f32, z_loss: f32, floor: f32, classes: f32,
  weight_base: u32,
}

const has_vocab_weight = 1u;
const has_token_grad = 2u;  // grad_loss [N]
const has_state = 4u;  // row_reference, row_log_sum were given
const has_entropy = 8u;  // entropy was given
const has_grad_lse = 16u;
const has_grad_target = 32u;
const has_grad_entropy = 64u;
const is_softmax = 128u;
const wants_gradient = 512u;

override direct: bool = false;  // the block is the caller's own matrix, its rows are all tokens

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> counted: array<u32>;     // count, 3 unused, [count]
@group(0) @binding(2) var<storage, read> partials: array<u32>;    // [rows, slots, 8]
@group(0) @binding(3) var<storage, read_write> rows: array<u32>;  // [tokens, 16]
@group(0) @binding(4) var<storage, read> inputs: array<f32>;      // [tokens, 8]
@group(0) @binding(5) var<storage, read> scalars: array<u32>;

// A token's words: state, target, c_t, a, m, log s, z_t, weighted sum, entropy, argmax, loss, the
// factors of p, one-hot, c_j and entropy, place in the block.
const words = 16u;
const state_nan = 256u;           // added to the state: the row's statistics are NaN
const state_gradient_nan = 512u;  // and its gradient is
const none = 0xffffffffu;
const slot_columns = 1024u;
const slot_words = 8u;
const lowest = -0x1.fffffep+127f;
const infinity_bits = 0x7f800000u;

const flag_nan = 1u;
const flag_infinite = 2u;  // +inf
const flag_number = 4u;    // something that is not -inf

fn is_nan(x: f32) -> bool {
  return (bitcast<u32>(x) & 0x7fffffffu) > infinity_bits;
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

// m, log s, z_t, weighted sum, entropy and argmax from the slots.
fn with_slots(r: u32, known: State) -> State {
  var s = known;
  let first = r * p.slots * slot_words;
  var m = lowest;
  var index = none;
  var flags = 0u;
  for (var k = 0u; k < p.slots; k++) {
    let slot = first + k * slot_words;
    let own = bitcast<f32>(partials[slot]);
    if (partials[slot + 4u] != none && (own > m || index == none)) {
      m = own;
      index = partials[slot + 4u];
    }
    flags |= partials[slot + 6u];
  }
  var sum = 0.0;
  var shifted = 0.0;
  var weighted = 0.0;
  for (var k = 0u; k < p.slots; k++) {
    let slot = first + k * slot_words;
    let by = max(bitcast<f32>(partials[slot]) - m, -200.0);
    let factor = exp_nonpositive(by);
    let own = bitcast<f32>(partials[slot + 1u]);
    sum += own * factor;
    shifted += (bitcast<f32>(partials[slot + 2u]) + own * by) * factor;
    weighted += bitcast<f32>(partials[slot + 3u]);
  }
  s.m = m;
  s.log_sum = log_positive(max(sum, 1.0));
  s.weighted = weighted;
  s.entropy = s.log_sum - shifted / max(sum, 1.0);
  s.argmax = select(index, 0u, index == none);
  s.target_logit = bitcast<f32>(p.nan ^ 0x80400000u);  // -inf
  if (s.target_column != none) {
    s.target_logit =
        bitcast<f32>(partials[first + s.target_column / slot_columns * slot_words + 5u]);
  }
  if ((flags & flag_nan) != 0u || (flags & flag_infinite) != 0u || (flags & flag_number) == 0u) {
    s.log_sum = bitcast<f32>(p.nan);
    s.entropy = bitcast<f32>(p.nan);
    let infinity = bitcast<f32>(select(p.nan ^ 0x80400000u, p.nan ^ 0x00400000u, (flags & flag_infinite) != 0u));
    s.m = select(infinity, bitcast<f32>(p.nan), (flags & flag_nan) != 0u);
  }
  return s;
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

@compute @workgroup_size(64)
fn combine(@builtin(global_invocation_id) id: vec3<u32>) {
  let r = id.x;
  if (r >= counted[0]) {
    return;
  }
  let token = counted[4u + r];
  let at = token * words;
  var s = State();
  s.kind = rows[at];
  if (direct && (s.kind & 255u) != 1u) {
    return;
  }
  s.target_column = rows[at + 1u];
  s.class_weight = bitcast<f32>(rows[at + 2u]);
  s.token_weight = bitcast<f32>(rows[at + 3u]);
  if ((p.flags & has_state) != 0u) {
    s.m = inputs[token * 8u + 2u];
    s.log_sum = inputs[token * 8u + 3u];
    // What shards combine to that have no probability to speak of: none of a column is 0.
    if (bitcast<u32>(s.m) == (infinity_bits | 0x80000000u)) {
      s.kind |= state_gradient_nan;
    }
  } else {
    s = with_slots(r, s);
  }
  keep(token, completed(token, s));
}

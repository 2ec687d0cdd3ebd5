// SPDX-License-Identifier: Apache-2.0
// From a block of raw logits to the state of its rows, their losses and, in place, draw (the
// formulas of docs/semantics.md).
//   slots     a workgroup a row and slot of 1024 columns: maximum, sums, argmax    -> partials
//   combine   a thread a row: its slots in their order; loss and gradient factors  -> rows
//   gradient  raw -> draw, in the block
//   row       the three at once for rows of up to 4096 columns: a workgroup a row, read once and
//             written once; 256 threads sum a slot in another order than the 64 of `slots`
// The block is [rows, row_stride] of one window of the vocabulary, its rows the tokens that count
// (`counted`); or, `direct`, it is the caller's own matrix and its rows are all tokens. A slot's
// columns, and in each of the two kernels the order of its sums, are the same in every plan; which of
// the two an op takes depends on its views and on V alone. The language lets a compiler assume that
// there is no NaN and no infinity, so those are told by their bits.

struct Params {
  rows: u32,                 // of the block
  columns: u32,              // of the window
  row_stride: u32,           // of the block
  base: u32,                 // of the block in its binding
  first_column: u32,         // of the window
  slots: u32,                // of a whole row
  flags: u32,
  nan: u32,                  // a NaN's bits: as a constant it would not compile
  slope: f32,                // logit_scale / temperature
  cap_in: f32,               // logit_scale / softcap, and what that lost
  cap_in_low: f32,
  cap_out: f32,              // softcap / temperature, and what that lost
  cap_out_low: f32,
  smoothing: f32,
  smoothing_per_class: f32,  // label_smoothing / vocab_total
  z_loss: f32,
  floor: f32,                // of probabilities given as input
  classes: f32,              // vocab_total
  weight_base: u32,          // of the window in vocab_weight
}

const has_vocab_weight = 1u;
const has_token_grad = 2u;     // grad_loss [N]
const has_state = 4u;          // row_reference, row_log_sum were given
const has_entropy = 8u;        // entropy was given
const has_grad_lse = 16u;
const has_grad_target = 32u;
const has_grad_entropy = 64u;
const is_softmax = 128u;
const of_probabilities = 256u;
const wants_gradient = 512u;

// How raw becomes z.
override capped: bool = false;
override scaled: bool = false;
override direct: bool = false;
override fused: bool = false;  // in `row`

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> block_in: array<u32>;              // [rows, row_stride]
@group(0) @binding(2) var<storage, read> counted: array<u32>;                // count, 3 unused, [count]
@group(0) @binding(3) var<storage, read> vocab_weight: array<f32>;          // [columns]
@group(0) @binding(4) var<storage, read> rows_in: array<u32>;               // [tokens, 16]
@group(0) @binding(5) var<storage, read_write> partials_out: array<u32>;    // [rows, slots, 8]
@group(0) @binding(6) var<storage, read> partials_in: array<u32>;
@group(0) @binding(7) var<storage, read_write> rows_out: array<u32>;
@group(0) @binding(8) var<storage, read> inputs: array<f32>;                // [tokens, 8]
@group(0) @binding(9) var<storage, read> scalars: array<u32>;
@group(0) @binding(10) var<storage, read_write> block_out: array<u32>;

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
    var x = fma(raw, p.cap_in, raw * p.cap_in_low);
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

// A slot is made by 64 threads of 16 columns each: little workgroup memory, which SwiftShader clears
// word by word in every thread, and few barriers.
const slot_threads = 64u;
const thread_columns = slot_columns / slot_threads;
var<workgroup> tree_max: array<f32, slot_threads>;
var<workgroup> tree_sum: array<vec4<f32>, slot_threads>;
var<workgroup> tree_index: array<u32, slot_threads>;
var<workgroup> slot_flags: atomic<u32>;
// Of `row`: its slots and its words.
var<workgroup> own_partials: array<u32, 32>;
var<workgroup> own_words: array<u32, 16>;

fn partial(at: u32) -> u32 {
  if (fused) {
    return own_partials[at];
  }
  return partials_in[at];
}
fn row_word(row: u32, k: u32) -> u32 {
  if (fused) {
    return own_words[k];
  }
  return rows_in[row + k];
}

const flag_nan = 1u;
const flag_infinite = 2u;  // +inf
const flag_number = 4u;    // something that is not -inf

@compute @workgroup_size(slot_threads)
fn slots(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let r = group.y;
  if (r >= counted[0]) {
    return;
  }
  // Not left to the language's zeros: not every driver keeps to them.
  if (thread == 0u) {
    atomicStore(&slot_flags, 0u);
  }
  workgroupBarrier();
  let first = group.x * slot_columns;
  let row = counted[4u + r] * words;
  if (direct && (rows_in[row] & 255u) != 1u) {
    return;
  }
  let target_column = rows_in[row + 1u];
  var z: array<f32, thread_columns>;
  var flags = 0u;
  var best = lowest;
  var index = none;
  var weighted = 0.0;
  for (var k = 0u; k < thread_columns; k++) {
    let local = first + k * slot_threads + thread;
    z[k] = bitcast<f32>(p.nan);  // none; every number may be a logit
    if (local >= p.columns) {
      continue;
    }
    let column = p.first_column + local;
    let x = map_raw(bitcast<f32>(block_in[p.base + r * p.row_stride + local])).z;
    var c = 1.0;
    if ((p.flags & has_vocab_weight) != 0u) {
      c = vocab_weight[p.weight_base + local];
    }
    if (c != 0.0) {
      weighted += c * x;
    }
    let slot = (r * p.slots + column / slot_columns) * slot_words;
    if (column == target_column) {
      partials_out[slot + 5u] = bitcast<u32>(x);
    }
    if (is_nan(x)) {
      flags |= flag_nan;
    } else if (is_infinite(x)) {
      if (!is_negative(x)) {
        flags |= flag_infinite;
        if (best < 3.4e38) {
          index = column;
        }
        best = 3.4e38;
      }
    } else {
      flags |= flag_number;
      z[k] = x;
      if (x > best || index == none) {
        best = x;
        index = column;
      }
    }
  }
  if (flags != 0u) {
    atomicOr(&slot_flags, flags);
  }
  tree_max[thread] = best;
  tree_index[thread] = index;
  for (var step = slot_threads / 2u; step > 0u; step /= 2u) {
    workgroupBarrier();
    if (thread < step) {
      let other = tree_max[thread + step];
      let mine = tree_max[thread];
      if (other > mine) {
        tree_max[thread] = other;
        tree_index[thread] = tree_index[thread + step];
      } else if (other == mine) {
        tree_index[thread] = min(tree_index[thread], tree_index[thread + step]);
      }
    }
  }
  workgroupBarrier();
  let m = tree_max[0];
  var sums = vec4<f32>(0.0, 0.0, weighted, 0.0);
  for (var k = 0u; k < thread_columns; k++) {
    if (!is_nan(z[k])) {
      let d = z[k] - m;
      let e = exp_nonpositive(d);
      sums.x += e;
      if (e > 0.0) {
        sums.y += e * d;
      }
    }
  }
  tree_sum[thread] = sums;
  for (var step = slot_threads / 2u; step > 0u; step /= 2u) {
    workgroupBarrier();
    if (thread < step) {
      tree_sum[thread] += tree_sum[thread + step];
    }
  }
  if (thread == 0u) {
    let slot = (r * p.slots + (p.first_column + first) / slot_columns) * slot_words;
    partials_out[slot] = bitcast<u32>(m);
    partials_out[slot + 1u] = bitcast<u32>(tree_sum[0].x);
    partials_out[slot + 2u] = bitcast<u32>(tree_sum[0].y);
    partials_out[slot + 3u] = bitcast<u32>(tree_sum[0].z);
    partials_out[slot + 4u] = tree_index[0];
    partials_out[slot + 6u] = atomicLoad(&slot_flags);
  }
}

// sum_j q_j log(p_j + floor) of a slot, q = (1 - smoothing) c_t [j = t] + smoothing_per_class c_j.
@compute @workgroup_size(slot_threads)
fn probability_slots(@builtin(workgroup_id) group: vec3<u32>,
                     @builtin(local_invocation_index) thread: u32) {
  let r = group.y;
  if (r >= counted[0]) {
    return;
  }
  let first = group.x * slot_columns;
  let row = counted[4u + r] * words;
  if (direct && (rows_in[row] & 255u) != 1u) {
    return;
  }
  var sum = 0.0;
  for (var k = 0u; k < thread_columns; k++) {
    let local = first + k * slot_threads + thread;
    if (local >= p.columns) {
      continue;
    }
    let q = expected(row, p.first_column + local, local);
    if (q != 0.0) {
      let x = bitcast<f32>(block_in[p.base + r * p.row_stride + local]) + p.floor;
      sum += q * log_of(x);
    }
  }
  tree_sum[thread] = vec4<f32>(sum, 0.0, 0.0, 0.0);
  for (var step = slot_threads / 2u; step > 0u; step /= 2u) {
    workgroupBarrier();
    if (thread < step) {
      tree_sum[thread] += tree_sum[thread + step];
    }
  }
  if (thread == 0u) {
    let slot = (r * p.slots + (p.first_column + first) / slot_columns) * slot_words;
    partials_out[slot + 3u] = bitcast<u32>(tree_sum[0].x);
  }
}

// log of any number: that of 0 is -inf, of a negative one NaN.
fn log_of(x: f32) -> f32 {
  if (is_nan(x) || (is_negative(x) && x != 0.0)) {
    return bitcast<f32>(p.nan);
  }
  if (is_infinite(x)) {
    return x;
  }
  if (x < 1.17549435e-38) {
    let bits = bitcast<u32>(x) & 0x7fffffffu;
    if (bits == 0u) {
      return bitcast<f32>(p.nan ^ 0x80400000u);
    }
    return log_positive(f32(bits)) - 149.0 * 0.69314718;
  }
  return log_positive(x);
}

fn expected(row: u32, column: u32, local: u32) -> f32 {
  var c = 1.0;
  if ((p.flags & has_vocab_weight) != 0u) {
    c = vocab_weight[p.weight_base + local];
  }
  var q = p.smoothing_per_class * c;
  if (column == row_word(row, 1u)) {
    q += (1.0 - p.smoothing) * bitcast<f32>(row_word(row, 2u));
  }
  return q;
}

fn word(row: u32, k: u32) -> f32 {
  return bitcast<f32>(rows_out[row + k]);
}
fn set_word(row: u32, k: u32, value: f32) {
  rows_out[row + k] = bitcast<u32>(value);
}

fn class_weight_sum() -> f32 {
  if ((p.flags & has_vocab_weight) != 0u) {
    return bitcast<f32>(scalars[4]);
  }
  return p.classes;
}

// m, log s, z_t, weighted sum, entropy and argmax from the slots.
fn combine_slots(r: u32, row: u32) {
  var first = 0u;
  if (!fused) {
    first = r * p.slots * slot_words;
  }
  var m = lowest;
  var index = none;
  var flags = 0u;
  for (var s = 0u; s < p.slots; s++) {
    let slot = first + s * slot_words;
    let own = bitcast<f32>(partial(slot));
    if (partial(slot + 4u) != none && (own > m || index == none)) {
      m = own;
      index = partial(slot + 4u);
    }
    flags |= partial(slot + 6u);
  }
  var sum = 0.0;
  var shifted = 0.0;
  var weighted = 0.0;
  for (var s = 0u; s < p.slots; s++) {
    let slot = first + s * slot_words;
    let by = max(bitcast<f32>(partial(slot)) - m, -200.0);
    let factor = exp_nonpositive(by);
    let own = bitcast<f32>(partial(slot + 1u));
    sum += own * factor;
    shifted += (bitcast<f32>(partial(slot + 2u)) + own * by) * factor;
    weighted += bitcast<f32>(partial(slot + 3u));
  }
  let log_sum = log_positive(max(sum, 1.0));
  set_word(row, 4u, m);
  set_word(row, 5u, log_sum);
  set_word(row, 7u, weighted);
  set_word(row, 8u, log_sum - shifted / max(sum, 1.0));
  rows_out[row + 9u] = select(index, 0u, index == none);
  if (rows_out[row + 1u] != none) {
    rows_out[row + 6u] = partial(first + rows_out[row + 1u] / slot_columns * slot_words + 5u);
  } else {
    rows_out[row + 6u] = infinity_bits | 0x80000000u;
  }
  if ((flags & flag_nan) != 0u || (flags & flag_infinite) != 0u || (flags & flag_number) == 0u) {
    rows_out[row] |= state_nan;
    rows_out[row + 5u] = p.nan;
    rows_out[row + 8u] = p.nan;
    if ((flags & flag_nan) != 0u) {
      rows_out[row + 4u] = p.nan;
    } else if ((flags & flag_infinite) != 0u) {
      rows_out[row + 4u] = infinity_bits;
    } else {
      rows_out[row + 4u] = infinity_bits | 0x80000000u;
    }
  }
}

fn combine_probabilities(r: u32, row: u32) {
  var sum = 0.0;
  for (var s = 0u; s < p.slots; s++) {
    sum += bitcast<f32>(partials_in[(r * p.slots + s) * slot_words + 3u]);
  }
  set_word(row, 10u, -word(row, 3u) * sum);
  set_word(row, 11u, -upstream(row) * word(row, 3u));
  if (is_nan(word(row, 11u))) {
    rows_out[row] |= state_gradient_nan;
  }
}

fn upstream(row: u32) -> f32 {
  if ((p.flags & has_token_grad) != 0u) {
    return inputs[row / 2u + 1u];
  }
  return bitcast<f32>(scalars[3]);
}

fn row_loss(row: u32) -> f32 {
  let m = word(row, 4u);
  let log_sum = word(row, 5u);
  let lse = m + log_sum;
  let onehot = (1.0 - p.smoothing) * word(row, 2u);
  var loss = 0.0;
  if (onehot != 0.0) {
    loss = onehot * ((m - word(row, 6u)) + log_sum);
  }
  if (p.smoothing > 0.0) {
    loss += p.smoothing_per_class * (class_weight_sum() * lse - word(row, 7u));
  }
  loss *= word(row, 3u);
  if (p.z_loss > 0.0) {
    // A token of weight 0 has no loss, though the square may overflow.
    let weight = word(row, 3u);
    loss += select(0.0, weight * p.z_loss * lse * lse, weight != 0.0);
  }
  return loss;
}

fn row_gradient(row: u32) {
  let given = row / 2u;
  let ga = upstream(row) * word(row, 3u);
  let target_weight = word(row, 2u);
  var w = (1.0 - p.smoothing) * target_weight;
  if (p.smoothing > 0.0) {
    w += p.smoothing_per_class * class_weight_sum();
  }
  if (p.z_loss > 0.0) {
    w += 2.0 * p.z_loss * (word(row, 4u) + word(row, 5u));
  }
  var probability = ga * w;
  var onehot = ga * (1.0 - p.smoothing) * target_weight;
  var entropy = 0.0;
  if ((p.flags & has_grad_lse) != 0u) {
    probability += inputs[given + 5u];
  }
  if ((p.flags & has_grad_target) != 0u) {
    onehot -= inputs[given + 6u];
  }
  if ((p.flags & has_grad_entropy) != 0u) {
    entropy = inputs[given + 7u];
  }
  let smoothing = ga * p.smoothing_per_class;
  set_word(row, 11u, probability);
  set_word(row, 12u, onehot);
  set_word(row, 13u, smoothing);
  set_word(row, 14u, entropy);
  if (is_nan(probability) || is_nan(onehot) || is_nan(smoothing) || is_nan(entropy)) {
    rows_out[row] |= state_gradient_nan;
  }
}

fn combine_row(r: u32, row: u32) {
  if ((p.flags & of_probabilities) != 0u) {
    combine_probabilities(r, row);
    return;
  }
  if ((p.flags & has_state) != 0u) {
    set_word(row, 4u, inputs[row / 2u + 2u]);
    set_word(row, 5u, inputs[row / 2u + 3u]);
  } else {
    combine_slots(r, row);
  }
  if ((p.flags & has_entropy) != 0u) {
    set_word(row, 8u, inputs[row / 2u + 4u]);
  }
  if (is_nan(word(row, 4u)) || is_nan(word(row, 5u))) {
    rows_out[row] |= state_nan;
  }
  if ((p.flags & is_softmax) != 0u) {
    set_word(row, 11u, 1.0);
    return;
  }
  set_word(row, 10u, row_loss(row));
  if ((rows_out[row] & state_nan) != 0u) {
    rows_out[row + 10u] = p.nan;
  }
  if ((p.flags & wants_gradient) != 0u) {
    row_gradient(row);
  }
}

@compute @workgroup_size(64)
fn combine(@builtin(global_invocation_id) id: vec3<u32>) {
  let r = id.x;
  if (r >= counted[0]) {
    return;
  }
  let row = counted[4u + r] * words;
  if (direct && (rows_out[row] & 255u) != 1u) {
    return;
  }
  combine_row(r, row);
}

fn draw(row: u32, raw: f32, column: u32, local: u32) -> u32 {
  if ((row_word(row, 0u) & (state_nan | state_gradient_nan)) != 0u) {
    return p.nan;
  }
  if ((p.flags & of_probabilities) != 0u) {
    let q = expected(row, column, local);
    return bitcast<u32>(bitcast<f32>(row_word(row, 11u)) * q / (raw + p.floor));
  }
  let mapped = map_raw(raw);
  if (is_nan(mapped.z)) {
    return p.nan;
  }
  var probability = 0.0;
  var log_p = 0.0;
  if (!(is_infinite(mapped.z) && is_negative(mapped.z))) {
    log_p = (mapped.z - bitcast<f32>(row_word(row, 4u))) - bitcast<f32>(row_word(row, 5u));
    // A state that was given need not be this row's: then p may pass 1.
    if (log_p > 0.0) {
      probability = exp(log_p);
    } else {
      probability = exp_nonpositive(log_p);
    }
  }
  var dz = bitcast<f32>(row_word(row, 11u)) * probability;
  if (p.smoothing > 0.0) {
    var c = 1.0;
    if ((p.flags & has_vocab_weight) != 0u) {
      c = vocab_weight[p.weight_base + local];
    }
    dz -= bitcast<f32>(row_word(row, 13u)) * c;
  }
  if (column == row_word(row, 1u)) {
    dz -= bitcast<f32>(row_word(row, 12u));
  }
  if ((p.flags & has_grad_entropy) != 0u && probability > 0.0) {
    dz -= bitcast<f32>(row_word(row, 14u)) * probability * (log_p + bitcast<f32>(row_word(row, 8u)));
  }
  if (capped) {
    dz *= p.slope * ((1.0 - mapped.t) * (1.0 + mapped.t));
  } else if (scaled) {
    dz *= p.slope;
  }
  return bitcast<u32>(dz);
}

@compute @workgroup_size(256)
fn gradient(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let r = group.y;
  let exists = r < counted[0];
  let row = select(0u, counted[4u + select(0u, r, exists)] * words, exists);
  let counts = exists && (!direct || (rows_in[row] & 255u) == 1u);
  for (var k = 0u; k < 4u; k++) {
    let local = group.x * slot_columns + k * 256u + thread;
    // A block of the library's own has zeros after its columns.
    if (local >= select(p.row_stride, p.columns, direct)) {
      continue;
    }
    let at = p.base + r * p.row_stride + local;
    var result = 0u;
    if (counts && local < p.columns) {
      result = draw(row, bitcast<f32>(block_out[at]), p.first_column + local, local);
    }
    block_out[at] = result;
  }
}

var<workgroup> four_max: array<vec4<f32>, 256>;  // a component a slot
var<workgroup> four_index: array<vec4<u32>, 256>;
var<workgroup> four_sum: array<vec4<f32>, 256>;

// The maxima of four slots, and the lowest of their columns, to the first thread's place.
fn reduce_maxima(thread: u32) {
  for (var step = 128u; step > 0u; step /= 2u) {
    workgroupBarrier();
    if (thread < step) {
      let other = four_max[thread + step];
      let mine = four_max[thread];
      let index = four_index[thread];
      let other_index = four_index[thread + step];
      four_index[thread] = select(select(index, min(index, other_index), other == mine), other_index, other > mine);
      four_max[thread] = max(mine, other);
    }
  }
  workgroupBarrier();
}

fn reduce_sums(thread: u32, own: vec4<f32>) -> vec4<f32> {
  four_sum[thread] = own;
  for (var step = 128u; step > 0u; step /= 2u) {
    workgroupBarrier();
    if (thread < step) {
      four_sum[thread] += four_sum[thread + step];
    }
  }
  workgroupBarrier();
  let sum = four_sum[0];
  workgroupBarrier();
  return sum;
}

@compute @workgroup_size(256)
fn row(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let r = group.x;
  let at = p.base + r * p.row_stride;
  let token = r * words;
  let counts = (rows_out[token] & 255u) == 1u;
  let target_column = rows_out[token + 1u];
  if (thread < 32u) {
    own_partials[thread] = 0u;
  }
  if (thread == 0u) {
    atomicStore(&slot_flags, 0u);
  }
  workgroupBarrier();
  var raw: array<vec4<f32>, 4>;  // [slot], a component a column
  var z: array<vec4<f32>, 4>;
  var best = vec4<f32>(lowest);
  var index = vec4<u32>(none);
  var weighted = vec4<f32>(0.0);
  var flags = 0u;
  for (var s = 0u; s < 4u; s++) {
    for (var k = 0u; k < 4u; k++) {
      let local = s * slot_columns + k * 256u + thread;
      z[s][k] = bitcast<f32>(p.nan);  // none, as in `slots`
      if (local >= p.columns) {
        continue;
      }
      raw[s][k] = bitcast<f32>(block_out[at + local]);
      let x = map_raw(raw[s][k]).z;
      var c = 1.0;
      if ((p.flags & has_vocab_weight) != 0u) {
        c = vocab_weight[p.weight_base + local];
      }
      if (c != 0.0) {
        weighted[s] += c * x;
      }
      if (local == target_column) {
        own_partials[s * slot_words + 5u] = bitcast<u32>(x);
      }
      if (is_nan(x)) {
        flags |= flag_nan;
      } else if (is_infinite(x)) {
        if (!is_negative(x)) {
          flags |= flag_infinite;
          if (best[s] < 3.4e38) {
            index[s] = local;
          }
          best[s] = 3.4e38;
        }
      } else {
        flags |= flag_number;
        z[s][k] = x;
        if (x > best[s] || index[s] == none) {
          best[s] = x;
          index[s] = local;
        }
      }
    }
  }
  if (flags != 0u) {
    atomicOr(&slot_flags, flags);
  }
  four_max[thread] = best;
  four_index[thread] = index;
  reduce_maxima(thread);
  let m = four_max[0];
  var sums = vec4<f32>(0.0);
  var shifted = vec4<f32>(0.0);
  for (var s = 0u; s < 4u; s++) {
    for (var k = 0u; k < 4u; k++) {
      if (!is_nan(z[s][k])) {
        let d = z[s][k] - m[s];
        let e = exp_nonpositive(d);
        sums[s] += e;
        if (e > 0.0) {
          shifted[s] += e * d;
        }
      }
    }
  }
  sums = reduce_sums(thread, sums);
  shifted = reduce_sums(thread, shifted);
  weighted = reduce_sums(thread, weighted);
  if (thread == 0u) {
    for (var s = 0u; s < 4u; s++) {
      let slot = s * slot_words;
      own_partials[slot] = bitcast<u32>(m[s]);
      own_partials[slot + 1u] = bitcast<u32>(sums[s]);
      own_partials[slot + 2u] = bitcast<u32>(shifted[s]);
      own_partials[slot + 3u] = bitcast<u32>(weighted[s]);
      own_partials[slot + 4u] = four_index[0][s];
      own_partials[slot + 6u] = atomicLoad(&slot_flags);
    }
    if (counts) {
      combine_row(r, token);
    }
    for (var k = 0u; k < words; k++) {
      own_words[k] = rows_out[token + k];
    }
  }
  workgroupBarrier();
  for (var s = 0u; s < 4u; s++) {
    for (var k = 0u; k < 4u; k++) {
      let local = s * slot_columns + k * 256u + thread;
      if (local < p.columns) {
        var result = 0u;
        if (counts) {
          result = draw(token, raw[s][k], local, local);
        }
        block_out[at + local] = result;
      }
    }
  }
}

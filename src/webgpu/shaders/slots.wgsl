// SPDX-License-Identifier: Apache-2.0
// The raw logits of a window of the vocabulary, 1024 columns of a row a workgroup: maximum, sums and
// argmax of each such slot.
// The block is [rows, row_stride], its rows the tokens that count (`counted`). A slot's columns and
// the order of its sums are the same in every plan. The language lets a compiler assume that there is
// no NaN and no infinity, so those are told by their bits.

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
  cap_in: f32,               // 2 logit_scale / softcap, which is never subnormal, and what that lost
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

// How raw becomes z.
override capped: bool = false;
override scaled: bool = false;
override direct: bool = false;  // the block is the caller's own matrix, its rows are all tokens

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> block: array<f32>;              // [rows, row_stride]
@group(0) @binding(2) var<storage, read> counted: array<u32>;            // count, 3 unused, [count]
@group(0) @binding(3) var<storage, read> vocab_weight: array<f32>;       // [columns]
@group(0) @binding(4) var<storage, read> rows: array<u32>;               // [tokens, 16]
@group(0) @binding(5) var<storage, read_write> partials: array<u32>;     // [rows, slots, 8]

// A token's words: state, target, c_t, a, m, log s, z_t, weighted sum, entropy, argmax, loss, the
// factors of p, one-hot, c_j and entropy, place in the block.
const words = 16u;
const none = 0xffffffffu;
// A slot's words: maximum, sum, sum of e (z - m), weighted sum, argmax, z_t, flags.
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

// A slot is made by 64 threads of 16 columns each: little workgroup memory, which SwiftShader clears
// word by word in every thread, and few barriers.
const slot_threads = 64u;
const thread_columns = slot_columns / slot_threads;
var<workgroup> tree_max: array<f32, slot_threads>;
var<workgroup> tree_sum: array<vec4<f32>, slot_threads>;
var<workgroup> tree_index: array<u32, slot_threads>;
var<workgroup> slot_flags: atomic<u32>;

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
  if (direct && (rows[row] & 255u) != 1u) {
    return;
  }
  let target_column = rows[row + 1u];
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
    let x = map_raw(block[p.base + r * p.row_stride + local]).z;
    var c = 1.0;
    if ((p.flags & has_vocab_weight) != 0u) {
      c = vocab_weight[p.weight_base + local];
    }
    if (c != 0.0) {
      weighted += c * x;
    }
    let slot = (r * p.slots + column / slot_columns) * slot_words;
    if (column == target_column) {
      partials[slot + 5u] = bitcast<u32>(x);
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
    partials[slot] = bitcast<u32>(m);
    partials[slot + 1u] = bitcast<u32>(tree_sum[0].x);
    partials[slot + 2u] = bitcast<u32>(tree_sum[0].y);
    partials[slot + 3u] = bitcast<u32>(tree_sum[0].z);
    partials[slot + 4u] = tree_index[0];
    partials[slot + 6u] = atomicLoad(&slot_flags);
  }
}

// SPDX-License-Identifier: Apache-2.0
// Loss and gradient of one row of logits a workgroup, in place, behind the five bindings of
// llm.istanbul's 07_loss.wgsl, so that a program with that pipeline can take this file instead:
//   x_j = logits[s, j]    m = max_j x_j    lse = m + log sum_j exp(x_j - m)    t = tgts[s]
//   losses[s]    = lse - (1 - alpha) x_t - alpha mean_j x_j + beta_zl lse^2
//   logits[s, j] = inv_norm (p_j (1 + 2 beta_zl lse) - (1 - alpha) [j = t] - alpha inv_V)
// A target outside the vocabulary: loss 0, row 0. Grid (seq_len, 1, 1), or (x, y, 1) with
// x y >= seq_len where there are more rows than a grid is wide.
//
// A thread holds 16 columns of a row of up to 4096, in quarters of 1024 a workgroup: they stay in
// registers between the passes, one read, one write, and a quarter that the row does not reach is no
// work, which for short rows is most of it. A longer row is read twice, its maximum and sum formed in
// one pass. alpha = 0 skips the pass over the sum of the logits. The target's logit is read before the
// first barrier: after the last one another invocation may have overwritten it already.
//
// The language lets a compiler assume that no value is infinite or NaN, so such logits are seen by
// their bits: one NaN or +inf, or -inf alone, makes the row NaN; -inf is a probability of 0, and
// under smoothing a loss of +inf.

@group(0) @binding(0) var<storage, read_write> logits: array<f32>;  // [seq_len, vocab_size]
@group(0) @binding(1) var<storage, read> tgts: array<u32>;          // [seq_len]
@group(0) @binding(2) var<storage, read_write> losses: array<f32>;  // [seq_len]
@group(0) @binding(3) var<uniform> dims: vec4<u32>;    // seq_len, vocab_size, unused, unused
@group(0) @binding(4) var<uniform> params: vec4<f32>;  // inv_norm, alpha, beta_zl, inv_V

const WG = 256u;
const QUARTER = 4u * WG;
const IN_REGISTERS = 4u * QUARTER;
const LOWEST = -0x1.fffffep+127f;
const INFINITY_BITS = 0x7f800000u;
const MINUS_INFINITY_BITS = 0xff800000u;
const NAN_BITS = 0x7fc00000u;
// What a thread has seen.
const POISON = 1u;  // NaN or +inf
const MASKED = 2u;  // -inf
const FINITE = 4u;

struct Columns {
  m: f32,      // maximum
  s: f32,      // sum of exp(x - m)
  sight: u32,  // of POISON, MASKED and FINITE
}

// Not an atomic for `sight`: on Mesa 22's lavapipe workgroup memory starts with what it held.
var<workgroup> parts: array<Columns, WG>;
var<workgroup> sums: array<f32, WG>;

fn inside(v: u32) -> vec4<bool> {
  return vec4<u32>(v) + vec4<u32>(0u, WG, 2u * WG, 3u * WG) < vec4<u32>(dims.y);
}

// exp(x - m) of 4 columns, 0 beyond the row's end. Below -200 it is 0 in f32, as it is of -inf.
fn weigh(x: vec4<f32>, v: u32, m: f32) -> vec4<f32> {
  return select(vec4<f32>(0.0), exp(max(x - m, vec4<f32>(-200.0))), inside(v));
}

fn total(x: vec4<f32>) -> f32 {
  return (x.x + x.y) + (x.z + x.w);
}

fn largest(x: vec4<f32>) -> f32 {
  return max(max(x.x, x.y), max(x.z, x.w));
}

// Columns v, v + 256, v + 512 and v + 768 of a row; LOWEST beyond its end.
fn load(row: u32, v: u32) -> vec4<f32> {
  var x = vec4<f32>(LOWEST);
  for (var k = 0u; k < 4u; k++) {
    if (v + k * WG < dims.y) {
      x[k] = logits[row + v + k * WG];
    }
  }
  return x;
}

fn seen(x: vec4<f32>, v: u32) -> u32 {
  let bits = bitcast<vec4<u32>>(x);
  let poison = (bits & vec4<u32>(0x7fffffffu)) > vec4<u32>(INFINITY_BITS);
  let infinite = (bits & vec4<u32>(0x7fffffffu)) == vec4<u32>(INFINITY_BITS);
  let negative = (bits >> vec4<u32>(31u)) == vec4<u32>(1u);
  return select(0u, POISON, any(poison | (infinite & !negative))) |
         select(0u, MASKED, any(infinite & negative)) |
         select(0u, FINITE, any(inside(v) & !poison & !infinite));
}

fn store(row: u32, v: u32, grad: vec4<f32>) {
  for (var k = 0u; k < 4u; k++) {
    if (v + k * WG < dims.y) {
      logits[row + v + k * WG] = grad[k];
    }
  }
}

fn merge(a: Columns, b: Columns) -> Columns {
  let m = max(a.m, b.m);
  let scale = exp(max(vec2<f32>(a.m - m, b.m - m), vec2<f32>(-200.0)));
  let s = select(a.s * scale.x, a.s, a.m == m) + select(b.s * scale.y, b.s, b.m == m);
  return Columns(m, s, a.sight | b.sight);
}

fn columns_of(raw: vec4<f32>, v: u32) -> Columns {
  let m = max(largest(raw), LOWEST);
  return Columns(m, total(weigh(raw, v, m)), seen(raw, v));
}

fn reduce(tid: u32, mine: Columns) -> Columns {
  parts[tid] = mine;
  for (var stride = WG / 2u; stride > 0u; stride /= 2u) {
    workgroupBarrier();
    if (tid < stride) {
      parts[tid] = merge(parts[tid], parts[tid + stride]);
    }
  }
  workgroupBarrier();
  return parts[0];
}

fn reduce_sum(tid: u32, mine: f32) -> f32 {
  sums[tid] = mine;
  for (var stride = WG / 2u; stride > 0u; stride /= 2u) {
    workgroupBarrier();
    if (tid < stride) {
      sums[tid] += sums[tid + stride];
    }
  }
  workgroupBarrier();
  return sums[0];
}

// Of 4 columns, how far they are below the maximum in sum; nothing beyond the row's end.
fn depth(x: vec4<f32>, v: u32, m: f32) -> f32 {
  return total(select(vec4<f32>(0.0), m - x, inside(v)));
}

struct Gradient {
  m: f32,
  p_scale: f32,  // inv_norm (1 + 2 beta_zl lse) / s
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
  for (var v = tid; v < dims.y; v += QUARTER) {
    store(row, v, vec4<f32>(0.0));
  }
}

// The loss of the row and what its gradient is made of. `below` is sum_j (m - x_j).
fn finish(tid: u32, s: u32, row: Columns, below: f32, x_t: f32) -> Gradient {
  let alpha = params.y;
  let log_sum = log(row.s);
  let lse = row.m + log_sum;
  let loss = log_sum + (1.0 - alpha) * (row.m - x_t) + alpha * below * params.w +
             params.z * lse * lse;
  let poison = select(0u, NAN_BITS, (row.sight & POISON) != 0u || (row.sight & FINITE) == 0u);
  if (tid == 0u) {
    let masked = (row.sight & MASKED) != 0u && alpha > 0.0;
    let masked_target = alpha < 1.0 && bitcast<u32>(x_t) == MINUS_INFINITY_BITS;
    let bits = select(bitcast<u32>(loss), INFINITY_BITS, masked || masked_target);
    losses[s] = bitcast<f32>(bits | poison);
  }
  let p_scale = params.x * (1.0 + 2.0 * params.z * lse) / row.s;
  return Gradient(row.m, p_scale, params.x * alpha * params.w, params.x * (1.0 - alpha), poison);
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
  var state = Columns(LOWEST, 0.0, 0u);
  var a = vec4<f32>(0.0);
  var b = vec4<f32>(0.0);
  var c = vec4<f32>(0.0);
  var d = vec4<f32>(0.0);
  let short = dims.y <= IN_REGISTERS;
  if (short) {
    a = load(row, tid);
    b = load(row, tid + QUARTER);
    c = load(row, tid + 2u * QUARTER);
    d = load(row, tid + 3u * QUARTER);
    let m = max(largest(max(max(a, b), max(c, d))), LOWEST);
    var sight = seen(a, tid);
    var e = weigh(a, tid, m);
    if (dims.y > QUARTER) {
      sight |= seen(b, tid + QUARTER);
      e += weigh(b, tid + QUARTER, m);
    }
    if (dims.y > 2u * QUARTER) {
      sight |= seen(c, tid + 2u * QUARTER) | seen(d, tid + 3u * QUARTER);
      e += weigh(c, tid + 2u * QUARTER, m) + weigh(d, tid + 3u * QUARTER, m);
    }
    state = Columns(m, total(e), sight);
  } else {
    for (var v = tid; v < dims.y; v += QUARTER) {
      state = merge(state, columns_of(load(row, v), v));
    }
  }
  state = reduce(tid, state);

  var below = 0.0;
  if (params.y > 0.0) {
    if (short) {
      below = (depth(a, tid, state.m) + depth(b, tid + QUARTER, state.m)) +
              (depth(c, tid + 2u * QUARTER, state.m) + depth(d, tid + 3u * QUARTER, state.m));
    } else {
      for (var v = tid; v < dims.y; v += QUARTER) {
        below += depth(load(row, v), v, state.m);
      }
    }
    below = reduce_sum(tid, below);
  }

  let g = finish(tid, s, state, below, x_t);
  if (short) {
    store(row, tid, gradient(g, a, tid, t));
    if (dims.y > QUARTER) {
      store(row, tid + QUARTER, gradient(g, b, tid + QUARTER, t));
    }
    if (dims.y > 2u * QUARTER) {
      store(row, tid + 2u * QUARTER, gradient(g, c, tid + 2u * QUARTER, t));
      store(row, tid + 3u * QUARTER, gradient(g, d, tid + 3u * QUARTER, t));
    }
  } else {
    for (var v = tid; v < dims.y; v += QUARTER) {
      store(row, v, gradient(g, load(row, v), v, t));
    }
  }
}

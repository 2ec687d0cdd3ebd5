// SPDX-License-Identifier: Apache-2.0
// Computes loss and gradient of rows of logits, in place. Its five bindings are those of
// llm.istanbul's 07_loss.wgsl, so that a program with that pipeline can take this file instead:
//   x_j = logits[s, j]    m = max_j x_j    lse = m + log sum_j exp(x_j - m)    t = tgts[s]
//   losses[s]    = lse - (1 - alpha) x_t - alpha mean_j x_j + beta_zl lse^2
//   logits[s, j] = inv_norm (p_j (1 + 2 beta_zl lse) - (1 - alpha) [j = t] - alpha inv_V)
// If a target is out of range, its loss and its row are 0. One workgroup handles a row, so the grid
// is (seq_len, 1, 1), or (x, y, 1) with x y >= seq_len if there are more rows than a grid's width.
//
// A thread holds 16 columns. Rows of up to 4096 columns stay in registers and take one read and one
// write. A short row does not need 256 threads: of 16 workgroups (V <= 256) or 4 (V <= 1024) the
// first handles all their rows, with 16 or 64 threads each, and the others return at once. A longer
// row is read twice. The second pass starts at its end, which a cache may still hold, in steps
// aligned to 32 columns of memory, even if the row is not: a warp's write across such a boundary
// costs two. Exponentials are of x minus the thread's own maximum, so that one reduction of maximum
// and sum is enough; if 16 threads handle a row, they are of x minus the row's maximum. alpha = 0
// skips the pass that sums the logits.
//
// WGSL lets a compiler assume that no value is infinite or NaN, so such logits are detected by
// their bits. A NaN or +inf, or a row of -inf, makes the row NaN. Any other -inf is a probability
// of 0, and with smoothing makes the loss +inf.

@group(0) @binding(0) var<storage, read_write> logits: array<f32>;  // [seq_len, vocab_size]
@group(0) @binding(1) var<storage, read> tgts: array<u32>;          // [seq_len]
@group(0) @binding(2) var<storage, read_write> losses: array<f32>;  // [seq_len]
// seq_len, vocab_size and two unused words.
@group(0) @binding(3) var<uniform> dims: vec4<u32>;
@group(0) @binding(4) var<uniform> params: vec4<f32>;  // inv_norm, alpha, beta_zl, inv_V

const WG = 256u;
const TURN = 16u * WG;  // columns per workgroup at a time
const LOWEST = -0x1.fffffep+127f;
const INFINITY_BITS = 0x7f800000u;
const MINUS_INFINITY_BITS = 0xff800000u;
const NAN_BITS = 0x7fc00000u;
const INFINITE = 0xff000000u;  // magnitude() of infinity; that of NaN is greater

// A part holds, for some columns, the maximum m (+inf if one of them makes the row NaN) and the sum
// of exp(x - m). Laid out as [16][17] to avoid bank conflicts.
var<workgroup> parts: array<vec2<f32>, 272>;
var<workgroup> target_logits: array<f32, 16>;  // one per row of the workgroup

fn total(x: vec4<f32>) -> f32 {
  return (x.x + x.y) + (x.z + x.w);
}
// Returns exp(x - m); below -200 it is 0 in f32, as for -inf.
fn weigh(x: vec4<f32>, m: f32) -> vec4<f32> {
  return exp(max(x - m, vec4<f32>(-200.0)));
}
fn weigh_one(x: f32, m: f32) -> f32 {
  return exp(max(x - m, -200.0));
}

// A thread's sixteen columns, v, v + lanes, v + 2 lanes, ..., in fours. There are 1 << shift lanes.
struct Columns {
  a: vec4<f32>,
  b: vec4<f32>,
  c: vec4<f32>,
  d: vec4<f32>,
}
fn four(v: u32, shift: u32) -> vec4<u32> {
  return vec4<u32>(v) + (vec4<u32>(0u, 1u, 2u, 3u) << vec4<u32>(shift));
}

// Unrolled instead of a loop: some compilers keep an indexed vector in memory.
fn load(row: u32, v: u32, shift: u32) -> vec4<f32> {
  let column = four(v, shift);
  var x = vec4<f32>(LOWEST);
  if (column.x < dims.y) {
    x.x = logits[row + column.x];
  }
  if (column.y < dims.y) {
    x.y = logits[row + column.y];
  }
  if (column.z < dims.y) {
    x.z = logits[row + column.z];
  }
  if (column.w < dims.y) {
    x.w = logits[row + column.w];
  }
  return x;
}
fn load_columns(row: u32, v: u32, shift: u32) -> Columns {
  let next = 4u << shift;
  return Columns(load(row, v, shift), load(row, v + next, shift), load(row, v + 2u * next, shift),
                 load(row, v + 3u * next, shift));
}

fn store(row: u32, v: u32, shift: u32, x: vec4<f32>) {
  let column = four(v, shift);
  if (column.x < dims.y) {
    logits[row + column.x] = x.x;
  }
  if (column.y < dims.y) {
    logits[row + column.y] = x.y;
  }
  if (column.z < dims.y) {
    logits[row + column.z] = x.z;
  }
  if (column.w < dims.y) {
    logits[row + column.w] = x.w;
  }
}
fn store_columns(row: u32, v: u32, shift: u32, x: Columns) {
  let next = 4u << shift;
  store(row, v, shift, x.a);
  store(row, v + next, shift, x.b);
  store(row, v + 2u * next, shift, x.c);
  store(row, v + 3u * next, shift, x.d);
}
fn fill_columns(row: u32, v: u32, shift: u32, bits: u32) {
  let x = vec4<f32>(bitcast<f32>(bits));
  store_columns(row, v, shift, Columns(x, x, x, x));
}

fn largest(x: Columns) -> f32 {
  let most = max(max(x.a, x.b), max(x.c, x.d));
  return max(max(most.x, most.y), max(most.z, most.w));
}
fn magnitude(x: Columns) -> u32 {
  let one = vec4<u32>(1u);
  let most = max(max(bitcast<vec4<u32>>(x.a) << one, bitcast<vec4<u32>>(x.b) << one),
                 max(bitcast<vec4<u32>>(x.c) << one, bitcast<vec4<u32>>(x.d) << one));
  return max(max(most.x, most.y), max(most.z, most.w));
}
fn weights(x: Columns, m: f32) -> Columns {
  return Columns(weigh(x.a, m), weigh(x.b, m), weigh(x.c, m), weigh(x.d, m));
}
// Returns the sum. After the row's end x is LOWEST, which adds nothing unless LOWEST is also the
// maximum: then each adds 1, which is subtracted.
fn sum_of(e: Columns, m: f32, v: u32, shift: u32) -> f32 {
  var s = total((e.a + e.b) + (e.c + e.d));
  if (m == LOWEST) {
    let inside = (max(dims.y, v) - v + (1u << shift) - 1u) >> shift;
    s -= f32(16u - min(inside, 16u));
  }
  return s;
}

// Merges `count` parts, `step` apart: first the maximum, then the sums, each times its weight.
fn merged(first: u32, step: u32, count: u32) -> vec2<f32> {
  var m = parts[first].x;
  for (var k = 1u; k < count; k++) {
    m = max(m, parts[first + k * step].x);
  }
  var s = 0.0;
  for (var k = 0u; k < count; k++) {
    let other = parts[first + k * step];
    s += other.y * weigh_one(other.x, m);
  }
  return vec2<f32>(m, s);
}
// Returns the sum of a thread's columns' distances below the maximum, and 1 if one of them is -inf.
fn depth(row: u32, lane: u32, shift: u32, m: f32) -> vec2<f32> {
  var below = 0.0;
  var masked = 0.0;
  for (var v = lane; v < dims.y; v += 4u << shift) {
    let x = load(row, v, shift);
    below += total(select(vec4<f32>(0.0), m - x, four(v, shift) < vec4<u32>(dims.y)));
    if (any(bitcast<vec4<u32>>(x) == vec4<u32>(MINUS_INFINITY_BITS))) {
      masked = 1.0;
    }
  }
  return vec2<f32>(below, masked);
}
fn summed(first: u32, step: u32, count: u32) -> vec2<f32> {
  var all = vec2<f32>(0.0);
  for (var k = 0u; k < count; k++) {
    all += parts[first + k * step];
  }
  return all;
}

// The values that a row's gradient needs.
struct Row {
  m: f32,
  scale: f32,    // of exp(x - m): inv_norm (1 + 2 beta_zl lse) / s
  filled: bool,  // the whole row is `filling`
  filling: u32,  // 0, or a NaN's bits
}
// Called by every thread of row s, number i of the workgroup; the first thread writes the loss.
// `below` is depth's result for the whole row.
fn finish(s: u32, rows: u32, lane: u32, i: u32, part: vec2<f32>, below: vec2<f32>) -> Row {
  let alpha = params.y;
  let log_sum = log(part.y);
  let lse = part.x + log_sum;
  // The maximum itself adds 1, so a sum below 1/2 is that of a row of -inf.
  let poisoned = bitcast<u32>(part.x) == INFINITY_BITS || part.y < 0.5;
  let poison = select(0u, NAN_BITS, poisoned);
  let ignored = tgts[min(s, rows - 1u)] >= dims.y;
  if (lane == 0u && s < rows) {
    let x_t = target_logits[i];
    let loss = log_sum + (1.0 - alpha) * (part.x - x_t) + alpha * below.x * params.w +
               params.z * lse * lse;
    let masked_target = alpha < 1.0 && bitcast<u32>(x_t) == MINUS_INFINITY_BITS;
    let bits = select(bitcast<u32>(loss), INFINITY_BITS, below.y > 0.0 || masked_target) | poison;
    losses[s] = select(bitcast<f32>(bits), 0.0, ignored);
  }
  return Row(part.x, params.x * (1.0 + 2.0 * params.z * lse) / part.y, ignored || poisoned,
             select(poison, 0u, ignored));
}

// Merges the parts of a row of 64 or 256 threads.
fn reduce(tid: u32, shift: u32, own: vec2<f32>) -> vec2<f32> {
  parts[tid % 16u * 17u + tid / 16u] = own;
  workgroupBarrier();
  if (tid < 16u) {
    parts[tid] = merged(tid, 17u, 16u);
  }
  workgroupBarrier();
  if (shift == 6u) {
    return merged((tid >> 6u) * 4u, 1u, 4u);
  }
  if (tid == 0u) {
    parts[16] = merged(0u, 1u, 16u);
  }
  workgroupBarrier();
  return parts[16];
}
fn reduce_depth(tid: u32, shift: u32, own: vec2<f32>) -> vec2<f32> {
  workgroupBarrier();  // until every thread has read the parts
  parts[tid % 16u * 17u + tid / 16u] = own;
  workgroupBarrier();
  if (tid < 16u) {
    parts[tid] = summed(tid, 17u, 16u);
  }
  workgroupBarrier();
  let count = 1u << (shift - 4u);  // each part is the sum of 16 threads
  return summed((tid >> shift) * count, 1u, count);
}
fn row_of(s: u32, rows: u32, row: u32, tid: u32, shift: u32, own: vec2<f32>) -> Row {
  let part = reduce(tid, shift, own);
  let lane = tid & ((1u << shift) - 1u);
  var below = vec2<f32>(0.0);
  if (params.y > 0.0) {
    below = reduce_depth(tid, shift, depth(row, lane, shift, part.x));
  }
  return finish(s, rows, lane, tid >> shift, part, below);
}

// Returns the maximum, or +inf if a value is NaN.
fn seen(m: f32, x: Columns) -> f32 {
  return bitcast<f32>(select(bitcast<u32>(m), INFINITY_BITS, magnitude(x) > INFINITE));
}
fn gradient(e: vec4<f32>, factor: f32) -> vec4<f32> {
  let uniform_part = params.x * params.y * params.w;
  return fma(e, vec4<f32>(factor), vec4<f32>(-uniform_part));
}
fn gradients(e: Columns, factor: f32) -> Columns {
  return Columns(gradient(e.a, factor), gradient(e.b, factor), gradient(e.c, factor),
                 gradient(e.d, factor));
}
// Called only by the thread that has stored this column, so the order of the two writes is certain.
fn store_target(at: u32, e: f32, factor: f32) {
  logits[at] = gradient(vec4<f32>(e), factor).x - params.x * (1.0 - params.y);
}

// Handles rows of up to 4096 columns, with 1 << shift threads each.
fn short_rows(first: u32, rows: u32, shift: u32, tid: u32) {
  let i = tid >> shift;
  let lane = tid & ((1u << shift) - 1u);
  let s = min(first + i, rows - 1u);
  let row = s * dims.y;
  let t = tgts[s];
  let x = load_columns(row, lane, shift);
  let owns_target = t < dims.y && lane == (t & ((1u << shift) - 1u));
  var x_t = 0.0;
  if (owns_target) {
    x_t = logits[row + t];
    target_logits[i] = x_t;
  }
  let m = max(largest(x), LOWEST);
  let e = weights(x, m);
  let own = vec2<f32>(seen(m, x), sum_of(e, m, lane, shift));
  let known = row_of(first + i, rows, row, tid, shift, own);
  if (first + i >= rows) {
    return;
  }
  if (known.filled) {
    fill_columns(row, lane, shift, known.filling);
    return;
  }
  let factor = known.scale * weigh_one(m, known.m);
  store_columns(row, lane, shift, gradients(e, factor));
  if (owns_target) {
    store_target(row + t, weigh_one(x_t, m), factor);
  }
}

fn long_row(s: u32, rows: u32, tid: u32) {
  let row = s * dims.y;
  let t = tgts[s];
  if (t < dims.y && tid == t % WG) {
    target_logits[0] = logits[row + t];
  }
  // Loads the next columns while computing with these.
  var own = vec2<f32>(LOWEST, 0.0);
  var worst = 0u;
  var next = load_columns(row, tid, 8u);
  for (var begin = 0u; begin < dims.y; begin += TURN) {
    let x = next;
    next = load_columns(row, tid + begin + TURN, 8u);
    let m = max(largest(x), own.x);
    own = vec2<f32>(m, own.y * weigh_one(own.x, m) + sum_of(weights(x, m), m, tid + begin, 8u));
    worst = max(worst, magnitude(x));
  }
  own.x = bitcast<f32>(select(bitcast<u32>(own.x), INFINITY_BITS, worst > INFINITE));
  let known = row_of(s, rows, row, tid, 8u, own);
  // All threads must have read the row before it is overwritten.
  storageBarrier();

  // The first aligned 32 columns may start before the row: v then wraps around to beyond its end.
  let before = row % 32u;
  let x_t = target_logits[0];
  let turns = (dims.y + before + TURN - 1u) / TURN;
  next = load_columns(row, tid - before + (turns - 1u) * TURN, 8u);
  for (var k = turns; k > 0u; k--) {
    let v = tid + (k - 1u) * TURN - before;
    let x = next;
    next = load_columns(row, select(dims.y, v - TURN, k > 1u), 8u);
    if (known.filled) {
      fill_columns(row, v, 8u, known.filling);
    } else {
      store_columns(row, v, 8u, gradients(weights(x, known.m), known.scale));
    }
  }
  if (!known.filled && tid == (t + before) % WG) {
    store_target(row + t, weigh_one(x_t, known.m), known.scale);
  }
}

var<workgroup> maxima: array<f32, 272>;
var<workgroup> sums: array<f32, 272>;
// Handles rows of up to 256 columns, with 16 threads each. Their maximum is found before the
// exponentials, which then need no weights.
fn rows_of_16(first: u32, rows: u32, tid: u32) {
  let i = tid / 16u;
  let lane = tid % 16u;
  let s = min(first + i, rows - 1u);
  let row = s * dims.y;
  let t = tgts[s];
  let x = load_columns(row, lane, 4u);
  let owns_target = t < dims.y && lane == (t & 15u);
  var x_t = 0.0;
  if (owns_target) {
    x_t = logits[row + t];
    target_logits[i] = x_t;
  }
  let cell = i * 17u;
  maxima[cell + lane] = seen(max(largest(x), LOWEST), x);
  workgroupBarrier();
  var m = maxima[cell];
  for (var k = 1u; k < 16u; k++) {
    m = max(m, maxima[cell + k]);
  }
  let e = weights(x, m);
  sums[cell + lane] = sum_of(e, m, lane, 4u);
  workgroupBarrier();
  var sum = 0.0;
  for (var k = 0u; k < 16u; k++) {
    sum += sums[cell + k];
  }
  var below = vec2<f32>(0.0);
  if (params.y > 0.0) {
    below = reduce_depth(tid, 4u, depth(row, lane, 4u, m));
  }
  let known = finish(first + i, rows, lane, i, vec2<f32>(m, sum), below);
  if (first + i >= rows) {
    return;
  }
  if (known.filled) {
    fill_columns(row, lane, 4u, known.filling);
    return;
  }
  store_columns(row, lane, 4u, gradients(e, known.scale));
  if (owns_target) {
    store_target(row + t, weigh_one(x_t, m), known.scale);
  }
}

@compute @workgroup_size(256, 1, 1)
fn cross_entropy(@builtin(workgroup_id) group: vec3<u32>,
                 @builtin(num_workgroups) groups: vec3<u32>,
                 @builtin(local_invocation_index) tid: u32) {
  let s = group.x + group.y * groups.x;
  // Comes first, because most workgroups do nothing else.
  if (dims.y <= 1024u && (s & select(3u, 15u, dims.y <= 256u)) != 0u) {
    return;
  }
  let rows = min(dims.x, groups.x * groups.y);
  if (s >= rows) {
    return;
  }
  // Each case is a separate call: a constant number of threads makes it up to a quarter faster.
  if (dims.y > TURN) {
    long_row(s, rows, tid);
  } else if (dims.y > 1024u) {
    short_rows(s, rows, 8u, tid);
  } else if (dims.y > 256u) {
    short_rows(s, rows, 6u, tid);
  } else {
    rows_of_16(s, rows, tid);
  }
}

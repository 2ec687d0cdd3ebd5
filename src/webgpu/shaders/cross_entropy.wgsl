// SPDX-License-Identifier: Apache-2.0
// Loss and gradient of rows of logits, in place, behind the five bindings of llm.istanbul's
// 07_loss.wgsl, so that a program with that pipeline can take this file instead:
//   x_j = logits[s, j]    m = max_j x_j    lse = m + log sum_j exp(x_j - m)    t = tgts[s]
//   losses[s]    = lse - (1 - alpha) x_t - alpha mean_j x_j + beta_zl lse^2
//   logits[s, j] = inv_norm (p_j (1 + 2 beta_zl lse) - (1 - alpha) [j = t] - alpha inv_V)
// A target outside the vocabulary: loss 0, row 0. Grid (seq_len, 1, 1), or (x, y, 1) with
// x y >= seq_len where there are more rows than a grid is wide: one workgroup a row.
//
// A thread holds 16 columns. Rows of up to 4096 columns stay in registers, one read and one write;
// 256 threads are much for a short one, so of 16 workgroups (V <= 256) or 4 (V <= 1024) the first
// takes all their rows, 16 or 64 threads each, and the others end at once. A longer row is read twice,
// the second time from where a warp's 32 columns begin, which the row need not: a write across that
// border costs two. Exponentials are of x minus the thread's own maximum, so that one reduction of
// maximum and sum is enough, with three barriers. alpha = 0 skips the pass over the sum of the logits.
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
const TURN = 16u * WG;  // columns of a workgroup at a time
const LOWEST = -0x1.fffffep+127f;
const INFINITY_BITS = 0x7f800000u;
const MINUS_INFINITY_BITS = 0xff800000u;
const NAN_BITS = 0x7fc00000u;
const INFINITE = 0xff000000u;  // as a magnitude; NaN is above

// Of columns.
struct Part {
  m: f32,  // maximum, LOWEST at the least; +inf of what makes the row NaN
  s: f32,  // sum of exp(x - m)
}

// [16][17]: in no step do two threads read one bank.
var<workgroup> maxima: array<f32, 272>;        // +inf of what makes the row NaN
var<workgroup> sums: array<f32, 272>;          // of exp(x - maximum)
var<workgroup> target_logits: array<f32, 16>;  // of a workgroup's rows

fn total(x: vec4<f32>) -> f32 {
  return (x.x + x.y) + (x.z + x.w);
}

// exp(x - m). Below -200 it is 0 in f32, as it is of -inf.
fn weigh(x: vec4<f32>, m: f32) -> vec4<f32> {
  return exp(max(x - m, vec4<f32>(-200.0)));
}
fn weigh_one(x: f32, m: f32) -> f32 {
  return exp(max(x - m, -200.0));
}

// Sixteen columns: v, v + lanes, v + 2 lanes, ...
struct Columns {
  a: vec4<f32>,
  b: vec4<f32>,
  c: vec4<f32>,
  d: vec4<f32>,
}

fn four(v: u32, shift: u32) -> vec4<u32> {
  return vec4<u32>(v) + (vec4<u32>(0u, 1u, 2u, 3u) << vec4<u32>(shift));
}

// Four by four, not in loops: some compilers keep a vector that is indexed in memory.
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
// Their sum. Beyond the row's end stands LOWEST, which weighs nothing, or 1 where it is the maximum.
fn sum_of(e: Columns, m: f32, v: u32, shift: u32) -> f32 {
  var s = total((e.a + e.b) + (e.c + e.d));
  if (m == LOWEST) {
    let inside = (max(dims.y, v) - v + (1u << shift) - 1u) >> shift;
    s -= f32(16u - min(inside, 16u));
  }
  return s;
}

// The maximum as others shall see it: +inf where one is NaN.
fn seen(m: f32, magnitude: u32) -> f32 {
  return bitcast<f32>(select(bitcast<u32>(m), INFINITY_BITS, magnitude > INFINITE));
}

fn put(at: u32, part: Part) {
  maxima[at] = part.m;
  sums[at] = part.s;
}

// `count` parts, `step` apart: first the maximum, then the sums, a weight each.
fn merged(first: u32, step: u32, count: u32) -> Part {
  var all = Part(maxima[first], 0.0);
  for (var k = 1u; k < count; k++) {
    all.m = max(all.m, maxima[first + k * step]);
  }
  for (var k = 0u; k < count; k++) {
    all.s += sums[first + k * step] * weigh_one(maxima[first + k * step], all.m);
  }
  return all;
}

// Of a row of 64 or 256 threads.
fn reduce(tid: u32, shift: u32, own: Part) -> Part {
  put(tid % 16u * 17u + tid / 16u, own);
  workgroupBarrier();
  if (tid < 16u) {
    put(tid, merged(tid, 17u, 16u));
  }
  workgroupBarrier();
  if (shift == 6u) {
    return merged(tid / 64u * 4u, 1u, 4u);
  }
  if (tid == 0u) {
    put(16u, merged(0u, 1u, 16u));
  }
  workgroupBarrier();
  return Part(maxima[16], sums[16]);
}

// Of a row of 16 threads: the maximum of all before the exponentials, so that none needs a weight.
fn largest_of_16(tid: u32, own: f32) -> f32 {
  let first = tid / 16u * 17u;
  maxima[first + tid % 16u] = own;
  workgroupBarrier();
  var m = maxima[first];
  for (var k = 1u; k < 16u; k++) {
    m = max(m, maxima[first + k]);
  }
  return m;
}
fn sum_of_16(tid: u32, own: f32) -> f32 {
  let first = tid / 16u * 17u;
  sums[first + tid % 16u] = own;
  workgroupBarrier();
  var s = 0.0;
  for (var k = 0u; k < 16u; k++) {
    s += sums[first + k];
  }
  return s;
}

// How far the columns of a thread are below the maximum, in sum (s); 1 where one of them is -inf (m).
fn depth(row: u32, lane: u32, shift: u32, m: f32) -> Part {
  var all = Part(0.0, 0.0);
  for (var v = lane; v < dims.y; v += 4u << shift) {
    let x = load(row, v, shift);
    all.s += total(select(vec4<f32>(0.0), m - x, four(v, shift) < vec4<u32>(dims.y)));
    if (any(bitcast<vec4<u32>>(x) == vec4<u32>(MINUS_INFINITY_BITS))) {
      all.m = 1.0;
    }
  }
  return all;
}
fn summed(first: u32, step: u32, count: u32) -> Part {
  var all = Part(0.0, 0.0);
  for (var k = 0u; k < count; k++) {
    all.m = max(all.m, maxima[first + k * step]);
    all.s += sums[first + k * step];
  }
  return all;
}
fn reduce_depth(tid: u32, shift: u32, own: Part) -> Part {
  workgroupBarrier();  // both arrays have been read
  put(tid % 16u * 17u + tid / 16u, own);
  workgroupBarrier();
  if (tid < 16u) {
    put(tid, summed(tid, 17u, 16u));
  }
  workgroupBarrier();
  let count = 1u << (shift - 4u);  // of 16 threads each
  return summed((tid >> shift) * count, 1u, count);
}

// What a row's gradient is made of.
struct Row {
  scale: f32,    // of p: inv_norm (1 + 2 beta_zl lse) / s
  filled: bool,  // the row is `filling` all over
  filling: u32,  // 0, or a NaN's bits
}

// Of row s, which is the workgroup's i-th and begins at `row`, by every thread of it; its first one
// writes the loss.
fn finish(i: u32, s: u32, rows: u32, row: u32, tid: u32, shift: u32, part: Part) -> Row {
  let lane = tid & ((1u << shift) - 1u);
  let alpha = params.y;
  var below = Part(0.0, 0.0);
  if (alpha > 0.0) {
    below = reduce_depth(tid, shift, depth(row, lane, shift, part.m));
  }
  let log_sum = log(part.s);
  let lse = part.m + log_sum;
  // The maximum weighs 1, so a smaller sum is of -inf alone.
  let poisoned = bitcast<u32>(part.m) == INFINITY_BITS || part.s < 0.5;
  let poison = select(0u, NAN_BITS, poisoned);
  let ignored = tgts[min(s, rows - 1u)] >= dims.y;
  if (lane == 0u && s < rows) {
    let x_t = target_logits[i];
    let loss = log_sum + (1.0 - alpha) * (part.m - x_t) + alpha * below.s * params.w +
               params.z * lse * lse;
    let masked_target = alpha < 1.0 && bitcast<u32>(x_t) == MINUS_INFINITY_BITS;
    let bits = select(bitcast<u32>(loss), INFINITY_BITS, below.m > 0.0 || masked_target) | poison;
    losses[s] = select(bitcast<f32>(bits), 0.0, ignored);
  }
  return Row(params.x * (1.0 + 2.0 * params.z * lse) / part.s, ignored || poisoned,
             select(poison, 0u, ignored));
}

fn gradient(e: vec4<f32>, factor: f32) -> vec4<f32> {
  let uniform_part = params.x * params.y * params.w;
  return fma(e, vec4<f32>(factor), vec4<f32>(-uniform_part));
}
fn gradients(e: Columns, factor: f32) -> Columns {
  return Columns(gradient(e.a, factor), gradient(e.b, factor), gradient(e.c, factor),
                 gradient(e.d, factor));
}
// By the thread that has stored this column already.
fn store_target(at: u32, e: f32, factor: f32) {
  logits[at] = gradient(vec4<f32>(e), factor).x - params.x * (1.0 - params.y);
}

// Rows of up to 4096 columns, 1 << shift threads each.
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
  var m = max(largest(x), LOWEST);
  let shown = seen(m, magnitude(x));
  if (shift == 4u) {
    m = largest_of_16(tid, shown);
  }
  let e = weights(x, m);
  var part = Part(m, sum_of(e, m, lane, shift));
  if (shift == 4u) {
    part.s = sum_of_16(tid, part.s);
  } else {
    part = reduce(tid, shift, Part(shown, part.s));
  }
  let known = finish(i, first + i, rows, row, tid, shift, part);
  if (first + i >= rows) {
    return;
  }
  if (known.filled) {
    fill_columns(row, lane, shift, known.filling);
    return;
  }
  let factor = known.scale * weigh_one(m, part.m);
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
  // The next columns are on their way while these are worked on.
  var own = Part(LOWEST, 0.0);
  var most = 0u;
  var next = load_columns(row, tid, 8u);
  for (var begin = 0u; begin < dims.y; begin += TURN) {
    let x = next;
    next = load_columns(row, tid + begin + TURN, 8u);
    let m = max(largest(x), own.m);
    own.s = own.s * weigh_one(own.m, m) + sum_of(weights(x, m), m, tid + begin, 8u);
    own.m = m;
    most = max(most, magnitude(x));
  }
  let part = reduce(tid, 8u, Part(seen(own.m, most), own.s));
  let known = finish(0u, s, rows, row, tid, 8u, part);
  // What is written from here on, other invocations have read.
  storageBarrier();

  // From the end, which the cache may still hold. What of the aligned 32 columns is before the row's
  // first wraps around to beyond its last.
  let before = row % 32u;
  let x_t = target_logits[0];
  var end = (dims.y + before + TURN - 1u) / TURN * TURN;
  next = load_columns(row, tid + end - TURN - before, 8u);
  for (; end > 0u; end -= TURN) {
    let v = tid + end - TURN - before;
    let x = next;
    next = load_columns(row, select(dims.y, v - TURN, end > TURN), 8u);
    if (known.filled) {
      fill_columns(row, v, 8u, known.filling);
    } else {
      store_columns(row, v, 8u, gradients(weights(x, part.m), known.scale));
    }
  }
  if (!known.filled && tid == (t + before) % WG) {
    store_target(row + t, weigh_one(x_t, part.m), known.scale);
  }
}

@compute @workgroup_size(256, 1, 1)
fn cross_entropy(@builtin(workgroup_id) group: vec3<u32>,
                 @builtin(num_workgroups) groups: vec3<u32>,
                 @builtin(local_invocation_index) tid: u32) {
  let s = group.x + group.y * groups.x;
  // Before anything else, for this is all that most workgroups do.
  if (dims.y <= 256u && s % 16u != 0u) {
    return;
  }
  let rows = min(dims.x, groups.x * groups.y);
  if (s >= rows) {
    return;
  }
  // A call each: where the compiler knows the number of threads this is up to a quarter faster.
  if (dims.y > TURN) {
    long_row(s, rows, tid);
  } else if (dims.y > 1024u) {
    short_rows(s, rows, 8u, tid);
  } else if (dims.y > 256u) {
    if (s % 4u == 0u) {
      short_rows(s, rows, 6u, tid);
    }
  } else {
    short_rows(s, rows, 4u, tid);
  }
}

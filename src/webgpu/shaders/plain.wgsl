// SPDX-License-Identifier: Apache-2.0
// Turns rows of logits into their gradient or softmax, in the caller's matrix, and writes their
// losses, for calls that ask for nothing else (docs/semantics.md has the formulas): no class or
// token weights, no smoothing, no softcap, no statistics and no gradient of one. Other calls take
// other shaders.
//
// A thread holds 16 columns. Rows of up to 4096 columns stay in registers of 16, 64 or 256 threads,
// and take one read and one write. A longer row is read twice by 256 threads. The second time goes
// in steps that are aligned to 32 columns of memory, as the row need not be: a warp's write across
// such a border costs two. Exponentials are of z minus the thread's own maximum, so that one
// reduction is enough; those of rows of 16 threads are of z minus the row's. WGSL's exp errs by 3 +
// 2 |x| units in the last place, which the contract allows.
// Uses common: numbers, token, target.

struct Params {
  rows: u32,
  columns: u32,
  row_stride: u32,
  base: u32,         // where the first row begins in its binding
  target_base: u32,  // in words
  target_stride: u32,
  wide: u32,  // 1: a target is two words
  ignore_low: u32,
  ignore_high: u32,
  flags: u32,
  nan: u32,    // a NaN's bits, since WGSL has no NaN literal
  slope: f32,  // logit_scale / temperature
  z_loss: f32,
}

override scaled: bool = false;           // slope is not 1
override own_temperature: bool = false;  // every token has its own slope, in its Extra

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> targets: array<u32>;
@group(0) @binding(2) var<storage, read> scalars: Scalars;
@group(0) @binding(3) var<storage, read_write> losses: array<u32>;  // [rows]
@group(0) @binding(4) var<storage, read_write> logits: array<f32>;  // [rows, row_stride]
@group(0) @binding(5) var<storage, read> extras: array<Extra>;      // [rows]

const workgroup_threads = 256u;
const turn = 16u * workgroup_threads;  // columns that a workgroup handles per step
const infinite = 0xff000000u;          // an infinity's magnitude(); a NaN's is above

// Some columns of a row.
struct Part {
  m: f32,  // their maximum, at least `lowest`; +inf if one of them makes the row NaN
  s: f32,  // the sum of exp(z - m) over them
}

// Parts, laid out [16][17], padded against bank conflicts.
var<workgroup> maxima: array<f32, 272>;
var<workgroup> sums: array<f32, 272>;
var<workgroup> target_logits: array<f32, 16>;  // of the workgroup's rows

fn target_of(i: u32) -> Target {
  let t = target_at(p.target_base + i * p.target_stride, p.columns);
  if (t.kind == counts && (p.flags & is_backward) != 0u && (scalars.upstream & 0x7fffffffu) == 0u) {
    return Target(ignored, none);
  }
  return t;
}

// Returns exp(x - m). It is 0 in f32 for x - m < -200, -inf included.
fn weigh(x: vec4<f32>, m: f32) -> vec4<f32> {
  return exp(max(x - m, vec4<f32>(-200.0)));
}
fn weigh_one(x: f32, m: f32) -> f32 {
  return exp(max(x - m, -200.0));
}

// A thread's sixteen columns, v, v + lanes, v + 2 lanes, ..., by fours. There are 1 << shift lanes.
struct Columns {
  a: vec4<f32>,
  b: vec4<f32>,
  c: vec4<f32>,
  d: vec4<f32>,
}
fn four(v: u32, shift: u32) -> vec4<u32> {
  return vec4<u32>(v) + (vec4<u32>(0u, 1u, 2u, 3u) << vec4<u32>(shift));
}

// The slope of the invocation's row; NaN where its temperature is not allowed.
var<private> own_slope: f32;

fn z_of(raw: f32) -> f32 {
  if (own_temperature) {
    return select(raw * own_slope, raw, own_slope == 1.0);
  }
  return select(raw, raw * p.slope, scaled);
}
fn set_slope(r: u32) {
  if (own_temperature) {
    own_slope = extras[r].slope;
  }
}
// Four by four, not in loops: some compilers keep a vector in memory if it is indexed.
fn load(row: u32, v: u32, shift: u32) -> vec4<f32> {
  let column = four(v, shift);
  var x = vec4<f32>(lowest);
  if (column.x < p.columns) {
    x.x = z_of(logits[row + column.x]);
  }
  if (column.y < p.columns) {
    x.y = z_of(logits[row + column.y]);
  }
  if (column.z < p.columns) {
    x.z = z_of(logits[row + column.z]);
  }
  if (column.w < p.columns) {
    x.w = z_of(logits[row + column.w]);
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
  if (column.x < p.columns) {
    logits[row + column.x] = x.x;
  }
  if (column.y < p.columns) {
    logits[row + column.y] = x.y;
  }
  if (column.z < p.columns) {
    logits[row + column.z] = x.z;
  }
  if (column.w < p.columns) {
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
// Returns the sum. Beyond the row's end z is `lowest`, whose exponential is 0, unless `lowest` is
// also the maximum: then each is 1, and is subtracted.
fn sum_of(e: Columns, m: f32, v: u32, shift: u32) -> f32 {
  let fours = (e.a + e.b) + (e.c + e.d);
  var s = (fours.x + fours.y) + (fours.z + fours.w);
  if (m == lowest) {
    let inside = (max(p.columns, v) - v + (1u << shift) - 1u) >> shift;
    s -= f32(16u - min(inside, 16u));
  }
  return s;
}

// Returns the maximum that other threads read: +inf if a column is NaN.
fn seen(m: f32, magnitude: u32) -> f32 {
  return bitcast<f32>(select(bitcast<u32>(m), infinity_bits, magnitude > infinite));
}
fn put(at: u32, part: Part) {
  maxima[at] = part.m;
  sums[at] = part.s;
}
// Merges `count` parts, `step` apart: first the maximum, then the sums, each with its weight.
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

// All 64 or 256 threads of a row call this.
fn reduce(thread: u32, shift: u32, own: Part) -> Part {
  put(thread % 16u * 17u + thread / 16u, own);
  workgroupBarrier();
  if (thread < 16u) {
    put(thread, merged(thread, 17u, 16u));
  }
  workgroupBarrier();
  if (shift == 6u) {
    return merged(thread / 64u * 4u, 1u, 4u);
  }
  if (thread == 0u) {
    put(16u, merged(0u, 1u, 16u));
  }
  workgroupBarrier();
  return Part(maxima[16], sums[16]);
}

// Returns the maximum of a row of 16 threads. If it is known before the exponentials, these need no
// weights.
fn largest_of_16(thread: u32, own: f32) -> f32 {
  let first = thread / 16u * 17u;
  maxima[first + thread % 16u] = own;
  workgroupBarrier();
  var m = maxima[first];
  for (var k = 1u; k < 16u; k++) {
    m = max(m, maxima[first + k]);
  }
  return m;
}
fn sum_of_16(thread: u32, own: f32) -> f32 {
  let first = thread / 16u * 17u;
  sums[first + thread % 16u] = own;
  workgroupBarrier();
  var s = 0.0;
  for (var k = 0u; k < 16u; k++) {
    s += sums[first + k];
  }
  return s;
}

// The values that a row's gradient needs.
struct Row {
  scale: f32,    // of exp(z - m)
  onehot: f32,   // subtracted at the target's column
  filled: bool,  // the whole row is `filling`
  filling: u32,  // 0, or a NaN's bits
}

// Called by every thread of row r, number i of the workgroup; the first thread writes the loss.
fn finish(i: u32, r: u32, first: bool, part: Part, kind: u32) -> Row {
  let sum = max(part.s, 1.0);
  let log_sum = log_positive(sum);
  let lse = part.m + log_sum;
  // The maximum itself adds 1, so a sum below 1/2 is that of a row of -inf.
  let slope = select(p.slope, own_slope, own_temperature);
  let poisoned = bitcast<u32>(part.m) == infinity_bits || part.s < 0.5 || is_nan(slope);
  var scale = 1.0;
  var onehot = 0.0;
  if ((p.flags & is_softmax) == 0u) {
    onehot = scalars.factor;
    scale = onehot;
    var loss = (part.m - target_logits[i]) + log_sum;
    if (p.z_loss > 0.0) {
      scale = onehot * (1.0 + 2.0 * p.z_loss * lse);
      loss += p.z_loss * lse * lse;
    }
    if (first && r < p.rows && (p.flags & has_loss) != 0u) {
      let bits = select(bitcast<u32>(loss), p.nan, poisoned || kind == outside);
      losses[r] = select(bits, 0u, kind == ignored);
    }
    scale *= slope;
    onehot *= slope;
  }
  let nan = poisoned || is_nan(scale) || is_nan(onehot);
  return Row(scale / sum, onehot, nan || kind != counts, select(0u, p.nan, kind == counts));
}

fn scaled_columns(e: Columns, factor: f32) -> Columns {
  return Columns(e.a * factor, e.b * factor, e.c * factor, e.d * factor);
}

// Handles rows of up to 4096 columns, with 1 << shift threads each.
fn short_rows(first: u32, shift: u32, thread: u32) {
  let i = thread >> shift;
  let lane = thread & ((1u << shift) - 1u);
  let r = min(first + i, p.rows - 1u);
  set_slope(r);
  let row = p.base + r * p.row_stride;
  let x = load_columns(row, lane, shift);
  let t = target_of(r);
  let owns_target = t.column < p.columns && lane == (t.column & ((1u << shift) - 1u));
  var z_t = 0.0;
  if (owns_target) {
    z_t = z_of(logits[row + t.column]);
    target_logits[i] = z_t;
  }
  var m = max(largest(x), lowest);
  let shown = seen(m, magnitude(x));
  if (shift == 4u) {
    m = largest_of_16(thread, shown);
  }
  let e = weights(x, m);
  var part = Part(m, sum_of(e, m, lane, shift));
  if (shift == 4u) {
    part.s = sum_of_16(thread, part.s);
  } else {
    part = reduce(thread, shift, Part(shown, part.s));
  }
  let known = finish(i, first + i, lane == 0u, part, t.kind);
  if (first + i >= p.rows) {
    return;
  }
  if (known.filled) {
    fill_columns(row, lane, shift, known.filling);
    return;
  }
  let factor = known.scale * weigh_one(m, part.m);
  store_columns(row, lane, shift, scaled_columns(e, factor));
  if (owns_target) {  // this thread stored the column: both writes are ordered
    logits[row + t.column] = weigh_one(z_t, m) * factor - known.onehot;
  }
}

fn long_row(r: u32, thread: u32) {
  set_slope(r);
  let row = p.base + r * p.row_stride;
  let t = target_of(r);
  if (t.column < p.columns && thread == t.column % workgroup_threads) {
    target_logits[0] = z_of(logits[row + t.column]);
  }
  // Loads the next columns while computing with these.
  var own = Part(lowest, 0.0);
  var most = 0u;
  var next = load_columns(row, thread, 8u);
  for (var begin = 0u; begin < p.columns; begin += turn) {
    let x = next;
    next = load_columns(row, thread + begin + turn, 8u);
    let m = max(largest(x), own.m);
    own.s = own.s * weigh_one(own.m, m) + sum_of(weights(x, m), m, thread + begin, 8u);
    own.m = m;
    most = max(most, magnitude(x));
  }
  let part = reduce(thread, 8u, Part(seen(own.m, most), own.s));
  let known = finish(0u, r, thread == 0u, part, t.kind);
  // All threads must have read the row before it is overwritten.
  storageBarrier();
  // The row is read from its end, which the cache may still hold. The first aligned 32 columns may
  // start before the row: v then wraps around to beyond its end.
  let before = row % 32u;
  var end = (p.columns + before + turn - 1u) / turn * turn;
  next = load_columns(row, thread + end - turn - before, 8u);
  for (; end > 0u; end -= turn) {
    let v = thread + end - turn - before;
    let x = next;
    next = load_columns(row, select(p.columns, v - turn, end > turn), 8u);
    if (known.filled) {
      fill_columns(row, v, 8u, known.filling);
    } else {
      store_columns(row, v, 8u, scaled_columns(weights(x, part.m), known.scale));
    }
  }
  if (!known.filled && t.column < p.columns &&
      thread == (t.column + before) % workgroup_threads) {
    logits[row + t.column] = weigh_one(target_logits[0], part.m) * known.scale - known.onehot;
  }
}

@compute @workgroup_size(workgroup_threads)
fn plain(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
         @builtin(local_invocation_index) thread: u32) {
  let number = group.x + group.y * groups.x;
  let first = number * select(select(1u, 4u, p.columns <= 1024u), 16u, p.columns <= 256u);
  if (first >= p.rows) {
    return;
  }
  // Each case is a separate call: a constant number of threads makes it up to a quarter faster.
  if (p.columns > turn) {
    long_row(first, thread);
  } else if (p.columns > 1024u) {
    short_rows(first, 8u, thread);
  } else if (p.columns > 256u) {
    short_rows(first, 6u, thread);
  } else {
    short_rows(first, 4u, thread);
  }
}

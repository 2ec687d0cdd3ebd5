// SPDX-License-Identifier: Apache-2.0
// Rows of logits to their gradient or softmax, in the caller's matrix, and their losses, where the call
// asks for nothing else: no class or token weights, smoothing, softcap, statistics, gradient of one
// (docs/semantics.md has the formulas). Everything else is done by row, slots, combine and gradient.
//
// A thread holds 16 columns. Rows of up to 4096 columns stay in registers, one read and one write, by
// 16, 64 or 256 threads. A longer row is read twice by 256, the second time from where a warp's 32
// columns begin, which the row need not: a write across that border costs two. The sums' order does not
// depend on it. Exponentials are of z minus the thread's own maximum, so that one reduction of maximum
// and sum is enough, with three barriers. The language's exp errs by 3 + 2 |x| units of its last place,
// which is what the contract grants.

struct Params {
  rows: u32,
  columns: u32,
  row_stride: u32,
  base: u32,           // of the first row in its binding
  target_base: u32,    // in words
  target_stride: u32,
  wide: u32,           // 1: a target is two words
  ignore_low: u32,
  ignore_high: u32,
  flags: u32,
  nan: u32,            // a NaN's bits: as a constant it would not compile
  slope: f32,          // logit_scale / temperature
  z_loss: f32,
}

const outside_is_ignored = 4u;
const is_softmax = 8u;  // no targets, no losses
const has_loss = 16u;

override scaled: bool = false;  // slope is not 1

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> targets: array<u32>;
@group(0) @binding(2) var<storage, read> scalars: array<u32>;        // 3: the gradient's common factor
@group(0) @binding(3) var<storage, read_write> losses: array<u32>;   // [rows]
@group(0) @binding(4) var<storage, read_write> logits: array<f32>;   // [rows, row_stride]

const workgroup_threads = 256u;
const turn = 16u * workgroup_threads;  // columns of a workgroup at a time
const lowest = -0x1.fffffep+127f;
const infinity_bits = 0x7f800000u;
const infinite = 0xff000000u;  // as a magnitude; NaN is above

// Of columns.
struct Part {
  m: f32,          // maximum, lowest at the least
  s: f32,          // sum of exp(z - m)
  magnitude: u32,  // the largest of their bits without a sign, shifted left
}

struct Row {
  part: Part,
  target_logit: f32,
  scale: f32,    // of exp(z - m)
  onehot: f32,   // of the target's column
  filled: u32,   // 1: the row is `filling` all over
  filling: u32,  // 0, or a NaN's bits
}

// [16][17]: in no step do two threads read one bank.
var<workgroup> parts: array<Part, 272>;
var<workgroup> known: array<Row, 16>;  // of a workgroup's rows

fn is_nan(x: f32) -> bool {
  return (bitcast<u32>(x) & 0x7fffffffu) > infinity_bits;
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

const ignored = 0u;
const counts = 1u;
const outside = 2u;

struct Target {
  kind: u32,
  column: u32,
}
fn target_of(i: u32) -> Target {
  if ((p.flags & is_softmax) != 0u) {
    return Target(counts, 0xffffffffu);
  }
  let at = p.target_base + i * p.target_stride;
  let low = targets[at];
  var high = select(0u, 0xffffffffu, (low >> 31u) == 1u);
  if (p.wide != 0u) {
    high = targets[at + 1u];
  }
  if (low == p.ignore_low && high == p.ignore_high) {
    return Target(ignored, 0xffffffffu);
  }
  if (high == 0u && low < p.columns) {
    return Target(counts, low);
  }
  return Target(select(outside, ignored, (p.flags & outside_is_ignored) != 0u), 0xffffffffu);
}

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

fn z_of(raw: f32) -> f32 {
  if (scaled) {
    return raw * p.slope;
  }
  return raw;
}

// Four by four, not in loops: some compilers keep a vector that is indexed in memory.
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
// Their sum. Beyond the row's end stands lowest, which weighs nothing, or 1 where it is the maximum.
fn sum_of(e: Columns, m: f32, v: u32, shift: u32) -> f32 {
  var s = total((e.a + e.b) + (e.c + e.d));
  if (m == lowest) {
    let inside = (max(p.columns, v) - v + (1u << shift) - 1u) >> shift;
    s -= f32(16u - min(inside, 16u));
  }
  return s;
}

fn merge(a: Part, b: Part) -> Part {
  let m = max(a.m, b.m);
  return Part(m, a.s * weigh_one(a.m, m) + b.s * weigh_one(b.m, m), max(a.magnitude, b.magnitude));
}

// Sixteen parts, `step` apart: first the maximum, then the sums, a weight each.
fn merged(first: u32, step: u32, count: u32) -> Part {
  var all = parts[first];
  for (var k = 1u; k < count; k++) {
    all.m = max(all.m, parts[first + k * step].m);
    all.magnitude = max(all.magnitude, parts[first + k * step].magnitude);
  }
  all.s = 0.0;
  for (var k = 0u; k < count; k++) {
    let other = parts[first + k * step];
    all.s += other.s * weigh_one(other.m, all.m);
  }
  return all;
}

// The loss of row r, and what its gradient is made of.
fn finish(i: u32, r: u32) {
  let part = known[i].part;
  let t = target_of(min(r, p.rows - 1u));
  let sum = max(part.s, 1.0);
  let log_sum = log_positive(sum);
  let lse = part.m + log_sum;
  // The maximum weighs 1, so a smaller sum is of -inf alone.
  let poisoned = part.magnitude > infinite || bitcast<u32>(part.m) == infinity_bits || part.s < 0.5;
  var scale = 1.0;
  var onehot = 0.0;
  if ((p.flags & is_softmax) == 0u) {
    onehot = bitcast<f32>(scalars[3]);
    scale = onehot;
    var loss = (part.m - known[i].target_logit) + log_sum;
    if (p.z_loss > 0.0) {
      scale = onehot * (1.0 + 2.0 * p.z_loss * lse);
      loss += p.z_loss * lse * lse;
    }
    if (r < p.rows && (p.flags & has_loss) != 0u) {
      let bits = select(bitcast<u32>(loss), p.nan, poisoned || t.kind == outside);
      losses[r] = select(bits, 0u, t.kind == ignored);
    }
    if (scaled) {
      scale *= p.slope;
      onehot *= p.slope;
    }
  }
  let nan = poisoned || is_nan(scale) || is_nan(onehot);
  known[i].scale = scale / sum;
  known[i].onehot = onehot;
  known[i].filled = select(0u, 1u, nan || t.kind != counts);
  known[i].filling = select(0u, p.nan, t.kind == counts);
}

// Of the rows from `first` on, 1 << shift threads each: everything in `known`.
fn reduce(thread: u32, shift: u32, first: u32, own: Part) {
  let cell = thread % 16u * 17u + thread / 16u;
  let count = 1u << (shift - 4u);  // of 16 threads each
  parts[cell] = own;
  workgroupBarrier();
  if (thread < 16u) {
    parts[thread] = merged(thread, 17u, 16u);
  }
  workgroupBarrier();
  if (thread < (workgroup_threads >> shift)) {
    known[thread].part = merged(thread * count, 1u, count);
    finish(thread, first + thread);
  }
  workgroupBarrier();
}

fn scaled_columns(e: Columns, factor: f32) -> Columns {
  return Columns(e.a * factor, e.b * factor, e.c * factor, e.d * factor);
}

// Rows of up to 4096 columns, 1 << shift threads each.
fn short_rows(first: u32, shift: u32, thread: u32) {
  let i = thread >> shift;
  let lane = thread & ((1u << shift) - 1u);
  let r = min(first + i, p.rows - 1u);
  let row = p.base + r * p.row_stride;
  let x = load_columns(row, lane, shift);
  let t = target_of(r).column;
  let owns_target = t < p.columns && lane == (t & ((1u << shift) - 1u));
  var z_t = 0.0;
  if (owns_target) {
    z_t = z_of(logits[row + t]);
    known[i].target_logit = z_t;
  }
  let m = max(largest(x), lowest);
  let e = weights(x, m);
  reduce(thread, shift, first, Part(m, sum_of(e, m, lane, shift), magnitude(x)));
  if (first + i >= p.rows) {
    return;
  }
  if (known[i].filled != 0u) {
    fill_columns(row, lane, shift, known[i].filling);
    return;
  }
  let factor = known[i].scale * weigh_one(m, known[i].part.m);
  store_columns(row, lane, shift, scaled_columns(e, factor));
  if (owns_target) {  // this thread has stored its column already
    logits[row + t] = weigh_one(z_t, m) * factor - known[i].onehot;
  }
}

fn long_row(r: u32, thread: u32) {
  let row = p.base + r * p.row_stride;
  let t = target_of(r).column;
  if (t < p.columns && thread == t % workgroup_threads) {
    known[0].target_logit = z_of(logits[row + t]);
  }
  // The next columns are on their way while these are worked on.
  var own = Part(lowest, 0.0, 0u);
  var next = load_columns(row, thread, 8u);
  for (var begin = 0u; begin < p.columns; begin += turn) {
    let x = next;
    next = load_columns(row, thread + begin + turn, 8u);
    let m = max(largest(x), own.m);
    own = merge(own, Part(m, sum_of(weights(x, m), m, thread + begin, 8u), magnitude(x)));
  }
  reduce(thread, 8u, r, own);
  // What is written from here on, other invocations have read.
  storageBarrier();

  let before = row % 32u;  // columns of the aligned 32 that are not this row's; the rest wraps around
  let m = known[0].part.m;
  let factor = known[0].scale;
  let filled = known[0].filled != 0u;
  next = load_columns(row, thread - before, 8u);
  for (var begin = 0u; begin < p.columns + before; begin += turn) {
    let v = thread + begin - before;
    let x = next;
    next = load_columns(row, v + turn, 8u);
    if (filled) {
      fill_columns(row, v, 8u, known[0].filling);
    } else {
      store_columns(row, v, 8u, scaled_columns(weights(x, m), factor));
    }
  }
  if (!filled && t < p.columns && thread == (t + before) % workgroup_threads) {
    logits[row + t] = weigh_one(known[0].target_logit, m) * factor - known[0].onehot;
  }
}

@compute @workgroup_size(workgroup_threads)
fn plain(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
         @builtin(local_invocation_index) thread: u32) {
  let number = group.x + group.y * groups.x;
  // A call each: where the compiler knows the number of threads this is up to a quarter faster.
  if (p.columns > turn) {
    if (number < p.rows) {
      long_row(number, thread);
    }
  } else if (p.columns > 1024u) {
    if (number < p.rows) {
      short_rows(number, 8u, thread);
    }
  } else if (p.columns > 256u) {
    if (4u * number < p.rows) {
      short_rows(4u * number, 6u, thread);
    }
  } else if (16u * number < p.rows) {
    short_rows(16u * number, 4u, thread);
  }
}

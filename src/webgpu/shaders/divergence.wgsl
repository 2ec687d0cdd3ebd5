// SPDX-License-Identifier: Apache-2.0
// Processes two heads' raw logits of a window of the vocabulary, once the states of both heads'
// rows are known:
//   sums        sums of a slot of 1024 columns, one workgroup each (PairSums)  -> partials
//   gradient    the student's logits become draw                               -> result
//   scale_kept  what Forward kept becomes draw                                 -> result
// Uses common: numbers, token, window, scale, map, heads.

// counted[0]: the number of rows; their tokens' indices from counted[4] on, in order.
@group(0) @binding(1) var<storage, read> counted: array<u32>;
@group(0) @binding(2) var<storage, read> block: array<f32>;                // [rows, row_stride]
@group(0) @binding(3) var<storage, read> teacher_block: array<f32>;        // [rows, row_stride]
@group(0) @binding(4) var<storage, read> rows: array<State>;               // [tokens]
@group(0) @binding(5) var<storage, read> teacher_rows: array<State>;       // [tokens]
@group(0) @binding(6) var<storage, read> extras: array<Extra>;             // [tokens]
@group(0) @binding(7) var<storage, read> teacher_extras: array<Extra>;     // [tokens]
@group(0) @binding(8) var<storage, read_write> partials: array<PairSums>;  // [rows, slots]
@group(0) @binding(9) var<storage, read_write> result: array<f32>;         // [rows, row_stride]

fn teacher_scale_of(token: u32) -> Scale {
  if ((p.flags & has_teacher_temperature) != 0u) {
    return Scale(teacher_extras[token].slope, teacher_extras[token].cap_out,
                 teacher_extras[token].cap_out_low);
  }
  return Scale(p.teacher_slope, p.teacher_cap_out, p.teacher_cap_out_low);
}

// Returns x. WGSL lets a compiler fuse a product with what is subtracted from it; then equal heads
// would not differ by exactly 0. No compiler knows that p.zero is 0, so none fuses through this.
fn rounded(x: f32) -> f32 {
  return bitcast<f32>(bitcast<u32>(x) ^ p.zero);
}
fn teacher_logit(raw: f32, scale: Scale) -> f32 {
  let map = Map((p.flags & has_teacher_softcap) != 0u, true,
                (p.flags & has_teacher_temperature) != 0u, p.teacher_cap_in, p.teacher_cap_in_low);
  return rounded(map_with(map, raw, scale).z);
}

const slot_threads = 64u;
const thread_columns = slot_columns / slot_threads;
var<workgroup> tree: array<vec3<f32>, slot_threads>;
var<workgroup> any_infinite: atomic<u32>;

@compute @workgroup_size(slot_threads)
fn sums(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let r = group.y;
  if (r >= counted[0]) {
    return;
  }
  // WGSL guarantees zeros at the start, but not every driver provides them.
  if (thread == 0u) {
    atomicStore(&any_infinite, 0u);
  }
  workgroupBarrier();
  let first = group.x * slot_columns;
  let token = counted[4u + r];
  let s = rows[token];
  let t = teacher_rows[token];
  let scale = scale_of(token);
  let teacher_scale = teacher_scale_of(token);
  var own = vec3<f32>(0.0);
  for (var k = 0u; k < thread_columns; k++) {
    let local = first + k * slot_threads + thread;
    if (local >= p.columns) {
      continue;
    }
    let at = p.base + r * p.row_stride + local;
    let z = rounded(map_raw(block[at], scale).z);
    let c = column_of(s, t, z, teacher_logit(teacher_block[at], teacher_scale));
    own.z += min(c.p, c.q);
    if (c.is_infinite) {
      atomicStore(&any_infinite, 1u);
      continue;
    }
    own.x += value_of(c);
    if (has_mean() && c.p > 0.0) {
      own.y += c.p * slope_at(c);
    }
  }
  tree[thread] = own;
  for (var step = slot_threads / 2u; step > 0u; step /= 2u) {
    workgroupBarrier();
    if (thread < step) {
      tree[thread] += tree[thread + step];
    }
  }
  if (thread == 0u) {
    let slot = r * p.slots + (p.first_column + first) / slot_columns;
    partials[slot] = PairSums(tree[0].x, tree[0].y, tree[0].z, atomicLoad(&any_infinite));
  }
}

fn draw_of(s: State, t: State, raw: f32, teacher_raw: f32, scale: Scale, teacher_scale: Scale,
           column: u32) -> f32 {
  let mapped = map_raw(raw, scale);
  let c = column_of(s, t, rounded(mapped.z), teacher_logit(teacher_raw, teacher_scale));
  var dz = derivative_of(c, s.entropy_factor);
  if (p.label_weight > 0.0) {
    dz += p.label_weight * (c.p - select(0.0, 1.0, column == s.target_column));
  }
  dz *= s.probability;
  if (capped) {
    dz *= (1.0 - mapped.t) * (1.0 + mapped.t);
  }
  if ((s.kind & state_large) != 0u) {
    dz *= large;
  }
  return dz;
}

// After the columns the block is 0 already, and its rows after those that count are not read.
@compute @workgroup_size(256)
fn gradient(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let r = group.y;
  if (r >= counted[0]) {
    return;
  }
  let token = counted[4u + r];
  let s = rows[token];
  let t = teacher_rows[token];
  let scale = scale_of(token);
  let teacher_scale = teacher_scale_of(token);
  for (var k = 0u; k < 4u; k++) {
    let local = group.x * 1024u + k * 256u + thread;
    if (local >= p.columns) {
      return;
    }
    let at = p.base + r * p.row_stride + local;
    var draw = bitcast<f32>(p.nan);
    if ((s.kind & state_gradient_nan) == 0u) {
      draw = draw_of(s, t, result[at], teacher_block[at], scale, teacher_scale,
                     p.first_column + local);
    }
    result[at] = draw;
  }
}

@compute @workgroup_size(256)
fn scale_kept(@builtin(workgroup_id) group: vec3<u32>,
              @builtin(local_invocation_index) thread: u32) {
  let r = group.y;
  if (r >= counted[0]) {
    return;
  }
  let s = rows[counted[4u + r]];
  for (var k = 0u; k < 4u; k++) {
    let local = group.x * 1024u + k * 256u + thread;
    if (local >= p.columns) {
      return;
    }
    let at = p.base + r * p.row_stride + local;
    var draw = bitcast<f32>(p.nan);
    if ((s.kind & state_gradient_nan) == 0u && !is_nan(result[at])) {
      draw = result[at] * s.probability;
      if ((s.kind & state_large) != 0u) {
        draw *= large;
      }
    }
    result[at] = draw;
  }
}

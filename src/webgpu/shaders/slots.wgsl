// SPDX-License-Identifier: Apache-2.0
// Each workgroup computes maximum, sums and argmax of a slot, 1024 columns of a row of raw logits.
// Uses common: numbers, token, window, scale, map, logit.

@group(0) @binding(1) var<storage, read> block: array<f32>;  // [rows, row_stride]
// counted[0]: the number of rows; their tokens' indices from counted[4] on, in order.
@group(0) @binding(2) var<storage, read> counted: array<u32>;
@group(0) @binding(3) var<storage, read> vocab_weight: array<f32>;     // [columns]
@group(0) @binding(4) var<storage, read_write> rows: array<State>;     // [tokens]
@group(0) @binding(5) var<storage, read_write> partials: array<Slot>;  // [rows, slots]
@group(0) @binding(6) var<storage, read> extras: array<Extra>;         // [tokens]

// 64 threads of 16 columns each need few barriers and little workgroup memory, which SwiftShader
// clears word by word in every thread.
const slot_threads = 64u;
const thread_columns = slot_columns / slot_threads;
var<workgroup> tree_max: array<f32, slot_threads>;
var<workgroup> tree_sum: array<vec4<f32>, slot_threads>;
var<workgroup> tree_index: array<u32, slot_threads>;
var<workgroup> slot_flags: atomic<u32>;

@compute @workgroup_size(slot_threads)
fn slots(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let r = group.y;
  if (r >= counted[0]) {
    return;
  }
  // WGSL guarantees zeros at the start, but not every driver provides them.
  if (thread == 0u) {
    atomicStore(&slot_flags, 0u);
  }
  workgroupBarrier();
  let first = group.x * slot_columns;
  let token = counted[4u + r];
  // A token that does not count gets 0 columns here instead of a return: WGSL refuses a barrier after
  // a return that depends on a read_write binding, which threads may read differently.
  let is_made = !direct || is_counted(rows[token].kind);
  let columns = select(0u, p.columns, is_made);
  let target_column = rows[token].target_column;
  let scale = scale_of(token);
  var z: array<f32, thread_columns>;
  var flags = 0u;
  var best = lowest;
  var index = none;
  var weighted = 0.0;
  var logit_sum = 0.0;
  for (var k = 0u; k < thread_columns; k++) {
    let local = first + k * slot_threads + thread;
    z[k] = bitcast<f32>(p.nan);  // no column, or an infinite or NaN logit
    if (local >= columns) {
      continue;
    }
    let column = p.first_column + local;
    let x = map_raw(block[p.base + r * p.row_stride + local], scale).z;
    let c = class_weight_of(local);
    if (c != 0.0) {
      weighted += c * x;
    }
    if (more_statistics) {
      logit_sum += x;
    }
    if (column == target_column) {
      rows[token].target_logit = x;
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
      if (more_statistics) {
        sums.w += e * e;
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
  if (more_statistics) {
    tree_max[thread] = logit_sum;  // all threads have read the maximum by now
    for (var step = slot_threads / 2u; step > 0u; step /= 2u) {
      workgroupBarrier();
      if (thread < step) {
        tree_max[thread] += tree_max[thread + step];
      }
    }
  }
  if (thread == 0u && is_made) {
    let slot = r * p.slots + (p.first_column + first) / slot_columns;
    partials[slot].m = m;
    partials[slot].sum = tree_sum[0].x;
    partials[slot].shifted = tree_sum[0].y;
    partials[slot].weighted = tree_sum[0].z;
    partials[slot].argmax = tree_index[0];
    partials[slot].flags = atomicLoad(&slot_flags);
    if (more_statistics) {
      partials[slot].squared = tree_sum[0].w;
      partials[slot].logit_sum = tree_max[0];
    }
  }
}

// SPDX-License-Identifier: Apache-2.0
// Counts the columns of a window whose logit is above the target's, which is already known, and
// sums their probabilities. A workgroup handles a row and adds to the earlier windows' results. The
// target's own column never counts.
// Uses common: numbers, token, window, scale, map.

@group(0) @binding(1) var<storage, read> block: array<f32>;  // [rows, row_stride]
// counted[0]: the number of rows; their tokens' indices from counted[4] on, in order.
@group(0) @binding(2) var<storage, read> counted: array<u32>;
@group(0) @binding(4) var<storage, read> rows: array<State>;          // [tokens]
@group(0) @binding(5) var<storage, read_write> extras: array<Extra>;  // [tokens]

var<workgroup> above: atomic<u32>;
var<workgroup> tree: array<f32, 256>;

@compute @workgroup_size(256)
fn rank(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let r = group.x;
  if (r >= counted[0]) {
    return;
  }
  let token = counted[4u + r];
  if (direct && !is_counted(rows[token].kind)) {
    return;
  }
  // WGSL guarantees zeros at the start, but not every driver provides them.
  if (thread == 0u) {
    atomicStore(&above, 0u);
  }
  workgroupBarrier();
  let m = rows[token].m;
  let log_sum = rows[token].log_sum;
  let target_logit = rows[token].target_logit;
  let target_column = rows[token].target_column;
  let scale = scale_of(token);
  let share = exp_nonpositive(max(-log_sum, -200.0));
  var own = 0u;
  var all = extras[token].mass_above;
  // Adds 1024 columns at a time. Windows start at multiples of 1024, so the sum does not depend on
  // how the vocabulary is divided into windows.
  for (var slot = 0u; slot < p.columns; slot += 1024u) {
    var mass = 0.0;
    for (var local = slot + thread; local < min(slot + 1024u, p.columns); local += 256u) {
      let z = map_raw(block[p.base + r * p.row_stride + local], scale).z;
      if (p.first_column + local != target_column && is_above(z, target_logit)) {
        own += 1u;
        mass += exp_nonpositive(max(z - m, -200.0));
      }
    }
    tree[thread] = mass;
    for (var step = 128u; step > 0u; step /= 2u) {
      workgroupBarrier();
      if (thread < step) {
        tree[thread] += tree[thread + step];
      }
    }
    workgroupBarrier();
    if (thread == 0u) {
      all = min(all + tree[0] * share, 1.0);
    }
    workgroupBarrier();
  }
  atomicAdd(&above, own);
  workgroupBarrier();
  if (thread == 0u) {
    extras[token].rank += atomicLoad(&above);
    extras[token].mass_above = select(all, log_sum, is_nan(log_sum));
  }
}

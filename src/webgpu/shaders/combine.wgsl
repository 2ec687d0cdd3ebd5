// SPDX-License-Identifier: Apache-2.0
// Each thread handles a row: from its slots, in order, it computes the row's state, its loss and
// the factors of its gradient (docs/semantics.md). For the op Combine the state comes from
// fold.wgsl.
// Uses common: numbers, token, window, scale, loss.

override folded: bool = false;

// counted[0]: the number of rows; their tokens' indices from counted[4] on, in order.
@group(0) @binding(1) var<storage, read> counted: array<u32>;
@group(0) @binding(2) var<storage, read> partials: array<Slot>;     // [rows, slots]
@group(0) @binding(3) var<storage, read_write> rows: array<State>;  // [tokens]
@group(0) @binding(4) var<storage, read> inputs: array<Given>;      // [tokens]
@group(0) @binding(5) var<storage, read> scalars: Scalars;
@group(0) @binding(6) var<storage, read_write> extras: array<Extra>;  // [tokens]

// Computes m, log s, weighted sum, entropy, argmax and more statistics from the slots.
fn with_slots(r: u32, token: u32, known: State) -> State {
  var s = known;
  let first = r * p.slots;
  var m = lowest;
  var index = none;
  var flags = 0u;
  for (var k = 0u; k < p.slots; k++) {
    let slot = partials[first + k];
    if (slot.argmax != none && (slot.m > m || index == none)) {
      m = slot.m;
      index = slot.argmax;
    }
    flags |= slot.flags;
  }
  var sum = 0.0;
  var shifted = 0.0;
  var weighted = 0.0;
  var squared = 0.0;
  var logit_sum = 0.0;
  for (var k = 0u; k < p.slots; k++) {
    let slot = partials[first + k];
    let by = max(slot.m - m, -200.0);
    let factor = exp_nonpositive(by);
    sum += slot.sum * factor;
    shifted += (slot.shifted + slot.sum * by) * factor;
    weighted += slot.weighted;
    if (more_statistics) {
      squared += slot.squared * factor * factor;
      logit_sum += slot.logit_sum;
    }
  }
  s.m = m;
  s.log_sum = log_positive(max(sum, 1.0));
  s.weighted = weighted;
  s.entropy = s.log_sum - shifted / max(sum, 1.0);
  s.argmax = select(index, 0u, index == none);
  if ((flags & flag_nan) != 0u || (flags & flag_infinite) != 0u || (flags & flag_number) == 0u) {
    s.log_sum = bitcast<f32>(p.nan);
    s.entropy = bitcast<f32>(p.nan);
    let infinity = bitcast<f32>(select(p.nan ^ 0x80400000u, p.nan ^ 0x00400000u, (flags & flag_infinite) != 0u));
    s.m = select(infinity, bitcast<f32>(p.nan), (flags & flag_nan) != 0u);
    squared = bitcast<f32>(p.nan);
  }
  if (more_statistics) {
    extras[token].sum_p_squared = squared / (max(sum, 1.0) * max(sum, 1.0));
    extras[token].mean_logit = logit_sum / p.classes;
  }
  return s;
}

@compute @workgroup_size(64)
fn combine(@builtin(global_invocation_id) id: vec3<u32>) {
  let r = id.x;
  if (r >= counted[0]) {
    return;
  }
  let token = counted[4u + r];
  var s = rows[token];
  if (direct && !is_counted(s.kind)) {
    return;
  }
  if (folded) {
    rows[token] = completed(token, s);
    return;
  }
  if ((p.flags & has_state) != 0u) {
    s.m = inputs[token].row_reference;
    s.log_sum = inputs[token].row_log_sum;
    // Shards may combine to a row of -inf, which has no probabilities: its gradient is NaN.
    if (bitcast<u32>(s.m) == (infinity_bits | 0x80000000u)) {
      s.kind |= state_gradient_nan;
    }
  } else {
    s = with_slots(r, token, s);
  }
  rows[token] = completed(token, s);
}

// SPDX-License-Identifier: Apache-2.0
// A thread a row: its slots in their order give its state, its loss and what its gradient is made of
// (the formulas of docs/semantics.md).
// Uses common: numbers, window, loss.

@group(0) @binding(1) var<storage, read> counted: array<u32>;     // count, 3 unused, [count]
@group(0) @binding(2) var<storage, read> partials: array<u32>;    // [rows, slots, 8]
@group(0) @binding(3) var<storage, read_write> rows: array<u32>;  // [tokens, 16]
@group(0) @binding(4) var<storage, read> inputs: array<f32>;      // [tokens, 8]
@group(0) @binding(5) var<storage, read> scalars: array<u32>;

// m, log s, z_t, weighted sum, entropy and argmax from the slots.
fn with_slots(r: u32, known: State) -> State {
  var s = known;
  let first = r * p.slots * slot_words;
  var m = lowest;
  var index = none;
  var flags = 0u;
  for (var k = 0u; k < p.slots; k++) {
    let slot = first + k * slot_words;
    let own = bitcast<f32>(partials[slot]);
    if (partials[slot + 4u] != none && (own > m || index == none)) {
      m = own;
      index = partials[slot + 4u];
    }
    flags |= partials[slot + 6u];
  }
  var sum = 0.0;
  var shifted = 0.0;
  var weighted = 0.0;
  for (var k = 0u; k < p.slots; k++) {
    let slot = first + k * slot_words;
    let by = max(bitcast<f32>(partials[slot]) - m, -200.0);
    let factor = exp_nonpositive(by);
    let own = bitcast<f32>(partials[slot + 1u]);
    sum += own * factor;
    shifted += (bitcast<f32>(partials[slot + 2u]) + own * by) * factor;
    weighted += bitcast<f32>(partials[slot + 3u]);
  }
  s.m = m;
  s.log_sum = log_positive(max(sum, 1.0));
  s.weighted = weighted;
  s.entropy = s.log_sum - shifted / max(sum, 1.0);
  s.argmax = select(index, 0u, index == none);
  s.target_logit = bitcast<f32>(p.nan ^ 0x80400000u);  // -inf
  if (s.target_column != none) {
    s.target_logit =
        bitcast<f32>(partials[first + s.target_column / slot_columns * slot_words + 5u]);
  }
  if ((flags & flag_nan) != 0u || (flags & flag_infinite) != 0u || (flags & flag_number) == 0u) {
    s.log_sum = bitcast<f32>(p.nan);
    s.entropy = bitcast<f32>(p.nan);
    let infinity = bitcast<f32>(select(p.nan ^ 0x80400000u, p.nan ^ 0x00400000u, (flags & flag_infinite) != 0u));
    s.m = select(infinity, bitcast<f32>(p.nan), (flags & flag_nan) != 0u);
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
  let at = token * words;
  var s = State();
  s.kind = rows[at];
  if (direct && (s.kind & 255u) != 1u) {
    return;
  }
  s.target_column = rows[at + 1u];
  s.class_weight = bitcast<f32>(rows[at + 2u]);
  s.token_weight = bitcast<f32>(rows[at + 3u]);
  if ((p.flags & has_state) != 0u) {
    s.m = inputs[token * 8u + 2u];
    s.log_sum = inputs[token * 8u + 3u];
    // What shards combine to that have no probability to speak of: none of a column is 0.
    if (bitcast<u32>(s.m) == (infinity_bits | 0x80000000u)) {
      s.kind |= state_gradient_nan;
    }
  } else {
    s = with_slots(r, s);
  }
  keep(token, completed(token, s));
}

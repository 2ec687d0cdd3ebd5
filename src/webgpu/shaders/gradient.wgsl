// SPDX-License-Identifier: Apache-2.0
// raw -> draw in the block of a window, from the state of its rows.
// Uses common: numbers, window, logit.

@group(0) @binding(1) var<storage, read> counted: array<u32>;        // count, 3 unused, [count]
@group(0) @binding(2) var<storage, read> vocab_weight: array<f32>;   // [columns]
@group(0) @binding(3) var<storage, read> rows: array<u32>;           // [tokens, 16]
@group(0) @binding(4) var<storage, read_write> block: array<u32>;    // [rows, row_stride]

fn state_of(token: u32) -> State {
  let at = token * words;
  return State(rows[at], rows[at + 1u], bitcast<f32>(rows[at + 2u]), bitcast<f32>(rows[at + 3u]),
               bitcast<f32>(rows[at + 4u]), bitcast<f32>(rows[at + 5u]),
               bitcast<f32>(rows[at + 6u]), bitcast<f32>(rows[at + 7u]),
               bitcast<f32>(rows[at + 8u]), rows[at + 9u], bitcast<f32>(rows[at + 10u]),
               bitcast<f32>(rows[at + 11u]), bitcast<f32>(rows[at + 12u]),
               bitcast<f32>(rows[at + 13u]), bitcast<f32>(rows[at + 14u]));
}

@compute @workgroup_size(256)
fn gradient(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let r = group.y;
  let exists = r < counted[0];
  let s = state_of(select(0u, counted[4u + select(0u, r, exists)], exists));
  let counts = exists && (!direct || (s.kind & 255u) == 1u);
  for (var k = 0u; k < 4u; k++) {
    let local = group.x * 1024u + k * 256u + thread;
    // A block of the library's own has zeros after its columns.
    if (local >= select(p.row_stride, p.columns, direct)) {
      continue;
    }
    let at = p.base + r * p.row_stride + local;
    var result = 0u;
    if (counts && local < p.columns) {
      result = draw(s, bitcast<f32>(block[at]), p.first_column + local, local);
    }
    block[at] = result;
  }
}

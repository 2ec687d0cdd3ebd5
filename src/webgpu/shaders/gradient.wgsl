// SPDX-License-Identifier: Apache-2.0
// Turns raw logits into draw, in the block of a window, from the states of its rows.
// Uses common: numbers, token, window, scale, map, logit.

// counted[0]: the number of rows; their tokens' indices from counted[4] on, in order.
@group(0) @binding(1) var<storage, read> counted: array<u32>;
@group(0) @binding(2) var<storage, read> vocab_weight: array<f32>;  // [columns]
@group(0) @binding(3) var<storage, read> rows: array<State>;        // [tokens]
@group(0) @binding(4) var<storage, read_write> block: array<u32>;   // [rows, row_stride]
@group(0) @binding(5) var<storage, read> extras: array<Extra>;      // [tokens]

@compute @workgroup_size(256)
fn gradient(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let r = group.y;
  let exists = r < counted[0];
  let token = select(0u, counted[4u + select(0u, r, exists)], exists);
  let s = rows[token];
  let scale = scale_of(token);
  let is_made = exists && (!direct || is_counted(s.kind));
  for (var k = 0u; k < 4u; k++) {
    let local = group.x * 1024u + k * 256u + thread;
    // A block of the library's has zeros after its columns; the caller's matrix does not.
    if (local >= select(p.row_stride, p.columns, direct)) {
      continue;
    }
    let at = p.base + r * p.row_stride + local;
    var result = 0u;
    if (is_made && local < p.columns) {
      result = draw(s, scale, bitcast<f32>(block[at]), p.first_column + local, local);
    }
    block[at] = result;
  }
}

// SPDX-License-Identifier: Apache-2.0
// A thread takes a chosen column of a token that counts, if the column is in the window:
//   logits     computes its z, adding in product.wgsl's order; also for the target's column
//   gradients  computes its gradient, with its upstream gradient, from its raw logit
//   put        writes that gradient over the one of gradient.wgsl
// Uses common: numbers, token, window, scale, map, logit.

// counted[0]: the number of rows; their tokens' indices from counted[4] on, in order.
@group(0) @binding(1) var<storage, read> counted: array<u32>;
@group(0) @binding(2) var<storage, read> ids: array<u32>;           // [tokens, chosen, id_words]
@group(0) @binding(3) var<storage, read_write> chosen: array<f32>;  // [tokens, chosen]
@group(0) @binding(4) var<storage, read> extras: array<Extra>;      // [tokens]
@group(0) @binding(5) var<storage, read> hidden: array<vec4<f32>>;  // [rows, depth]
@group(0) @binding(6) var<storage, read> weight: array<vec4<f32>>;  // [columns, weight_stride]
@group(0) @binding(7) var<storage, read> bias: array<f32>;          // [columns]
@group(0) @binding(8) var<storage, read> vocab_weight: array<f32>;  // [columns]
@group(0) @binding(9) var<storage, read_write> rows: array<State>;  // [tokens]
@group(0) @binding(10) var<storage, read_write> block: array<u32>;  // [rows, row_stride]

override has_bias: bool = false;
override with_target: bool = false;  // a token's last column is its target's

struct Place {
  row: u32,
  token: u32,
  k: u32,
  local: u32,  // column within the window, or none
}
fn place_of(i: u32) -> Place {
  let places = p.chosen + select(0u, 1u, with_target);
  let r = i / places;
  if (r >= counted[0]) {
    return Place(r, 0u, 0u, none);
  }
  let token = counted[4u + r];
  let k = i % places;
  var column = rows[token].target_column;
  if (k < p.chosen) {
    column = ids[(token * p.chosen + k) * p.id_words];
  }
  let local = column - p.first_column;
  return Place(r, token, k, select(none, local, local < p.columns));
}

@compute @workgroup_size(64)
fn logits(@builtin(global_invocation_id) id: vec3<u32>) {
  let at = place_of(id.x);
  if (at.local == none) {
    return;
  }
  var sum = 0.0;
  for (var d = 0u; d < p.depth; d++) {
    let a = hidden[at.row * p.depth + d];
    let b = weight[p.weight_first + at.local * p.weight_stride + d];
    sum = fma(a.x, b.x, sum);
    sum = fma(a.y, b.y, sum);
    sum = fma(a.z, b.z, sum);
    sum = fma(a.w, b.w, sum);
  }
  if (has_bias) {
    sum += bias[at.local];
  }
  let z = map_raw(sum, scale_of(at.token)).z;
  if (at.k == p.chosen) {
    rows[at.token].target_logit = z;
  } else {
    chosen[at.token * p.chosen + at.k] = z;
  }
}

@compute @workgroup_size(64)
fn gradients(@builtin(global_invocation_id) id: vec3<u32>) {
  let at = place_of(id.x);
  if (at.local == none) {
    return;
  }
  let column = p.first_column + at.local;
  let place = at.token * p.chosen + at.k;
  var s = rows[at.token];
  var part = by(wide(slope_of(at.token)), chosen[place]);
  if (part.m != 0.0 && part.e > 60 && (s.kind & state_large) == 0u) {
    s.kind |= state_large;
    s.probability *= 1.0 / large;
    s.onehot *= 1.0 / large;
    s.smoothing *= 1.0 / large;
    s.entropy_factor *= 1.0 / large;
  }
  if ((s.kind & state_large) != 0u) {
    part.e -= 60;
  }
  // draw() subtracts `onehot` at target_column; here that adds this column's gradient.
  s.onehot = select(0.0, s.onehot, column == s.target_column) - narrow(part);
  s.target_column = column;
  if (is_nan(s.onehot)) {
    s.kind |= state_gradient_nan;
  }
  let raw = bitcast<f32>(block[at.row * p.row_stride + at.local]);
  chosen[place] = bitcast<f32>(draw(s, scale_of(at.token), raw, column, at.local));
}

@compute @workgroup_size(64)
fn put(@builtin(global_invocation_id) id: vec3<u32>) {
  let at = place_of(id.x);
  if (at.local != none) {
    block[at.row * p.row_stride + at.local] = bitcast<u32>(chosen[at.token * p.chosen + at.k]);
  }
}

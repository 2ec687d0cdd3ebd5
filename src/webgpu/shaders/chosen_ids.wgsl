// SPDX-License-Identifier: Apache-2.0
// Each workgroup turns a token's ids into columns of the views, or none for an id without a column
// here. Forward's logits are initialized to the result of such an id: -inf, or NaN if it is an
// error. Backward adds up the gradients of equal columns, in their order, at the first of them.
// Uses common: numbers, token, target, chunk.

@group(0) @binding(2) var<storage, read_write> ids: array<u32>;     // [tokens, chosen, id_words]
@group(0) @binding(3) var<storage, read_write> chosen: array<f32>;  // [tokens, chosen]
@group(0) @binding(4) var<storage, read_write> rows: array<State>;  // [tokens]
@group(0) @binding(5) var<storage, read_write> fault: array<atomic<u32>>;

struct Id {
  column: u32,       // of the views, or none
  is_given: bool,    // not absent; some shard has the column
  is_outside: bool,  // an error
}
fn id_at(at: u32) -> Id {
  let low = ids[at];
  var high = select(0u, none, (low >> 31u) == 1u);
  if (p.id_words == 2u) {
    high = ids[at + 1u];
  }
  if (high != 0u || low >= p.vocab_total) {
    let is_absent = (low & high) == none;
    return Id(none, false, !is_absent && (p.flags & outside_is_ignored) == 0u);
  }
  let column = low - p.vocab_start;
  return Id(select(none, column, column < p.vocab), true, false);
}

var<workgroup> columns: array<u32, 64>;
var<workgroup> gradients: array<f32, 64>;
var<workgroup> sizes: array<u32, 64>;  // |gradient| as bits; 0 if not read

@compute @workgroup_size(64)
fn begin(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) k: u32) {
  let token = group.x;
  let at = token * p.chosen + k;
  let is_backward_call = (p.flags & is_backward) != 0u;
  var id = Id(none, false, false);
  if (k < p.chosen && target_at(p.base + token * p.stride, p.vocab_total).kind == counts) {
    id = id_at(at * p.id_words);
  }
  var gradient = 0.0;
  if (is_backward_call && id.is_given) {
    gradient = chosen[at];
  }
  columns[k] = id.column;
  gradients[k] = gradient;
  sizes[k] = bitcast<u32>(gradient) & 0x7fffffffu;
  workgroupBarrier();
  if (id.is_outside && (p.flags & has_fault) != 0u) {
    atomicOr(&fault[p.fault], 1u);
  }
  if (k == 0u) {
    // tokens.wgsl reads this bit before it starts the row.
    var all = 0u;
    for (var j = 0u; j < p.chosen; j++) {
      all |= sizes[j];
    }
    rows[token].kind = select(0u, state_chosen, all != 0u);
  }
  if (k >= p.chosen) {
    return;
  }
  if (!is_backward_call) {
    ids[at * p.id_words] = id.column;
    chosen[at] = bitcast<f32>(select(p.nan ^ 0x80400000u, p.nan, id.is_outside));
    return;
  }
  var is_first = true;
  for (var j = 0u; j < k; j++) {
    is_first = is_first && columns[j] != id.column;
  }
  for (var j = k + 1u; j < p.chosen; j++) {
    if (columns[j] == id.column) {
      gradient += gradients[j];
    }
  }
  ids[at * p.id_words] = select(none, id.column, is_first);
  chosen[at] = gradient;
}

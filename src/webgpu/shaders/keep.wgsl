// SPDX-License-Identifier: Apache-2.0
// Each thread handles a token's row of kept_rows (KeptRow of src/kept.h):
//   keep    writes Forward's state of the token                             -> kept_rows
//   check   a row that differs from the given state makes the gradient NaN  -> rows
//           if Backward consumes kept state, marks it as consumed           -> kept_rows
//   report  sets the fault if some row differed                            -> fault
// Numbers are copied and compared as bits.
// Uses common: token.

struct Params {
  tokens: u32,
  base: u32,     // of kept_rows, in words
  engine: u32,   // the bits of KeptRow::layout
  columns: u32,  // the bits of KeptRow::columns
  consumes: u32,
  fault: u32,     // index of the fault's word
  diverges: u32,  // not 0: a divergence, which keeps its gradient's divisor
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> rows: array<State>;     // [tokens]
@group(0) @binding(2) var<storage, read> inputs: array<Given>;         // [tokens]
@group(0) @binding(3) var<storage, read_write> kept_rows: array<u32>;  // [tokens, 8]
@group(0) @binding(4) var<storage, read_write> fault: array<atomic<u32>>;

// The words of a KeptRow that this backend uses; the others are 0.
const kept_words = 8u;
const kept_reference = 0u;
const kept_log_sum = 1u;
const kept_target_logit = 2u;
const kept_rest = 3u;
const kept_layout = 5u;
const kept_columns = 6u;

@compute @workgroup_size(256)
fn keep(@builtin(global_invocation_id) id: vec3<u32>) {
  let i = id.x;
  if (i >= p.tokens || !is_counted(rows[i].kind)) {
    return;
  }
  let at = p.base + i * kept_words;
  for (var k = 0u; k < kept_words; k++) {
    kept_rows[at + k] = 0u;
  }
  kept_rows[at + kept_reference] = bitcast<u32>(rows[i].m);
  kept_rows[at + kept_log_sum] = bitcast<u32>(rows[i].log_sum);
  kept_rows[at + kept_target_logit] = bitcast<u32>(rows[i].target_logit);
  if (p.diverges != 0u) {
    kept_rows[at + kept_rest] = bitcast<u32>(rows[i].smoothing);
  }
  kept_rows[at + kept_layout] = p.engine;
  kept_rows[at + kept_columns] = p.columns;
}

fn is_kept(i: u32) -> bool {
  let at = p.base + i * kept_words;
  let is_row = kept_rows[at + kept_reference] == bitcast<u32>(inputs[i].row_reference) &&
               kept_rows[at + kept_log_sum] == bitcast<u32>(inputs[i].row_log_sum);
  return (is_row || p.diverges != 0u) &&
         kept_rows[at + kept_layout] == p.engine && kept_rows[at + kept_columns] == p.columns;
}

@compute @workgroup_size(256)
fn check(@builtin(global_invocation_id) id: vec3<u32>) {
  let i = id.x;
  if (i >= p.tokens) {
    return;
  }
  if (is_counted(rows[i].kind) && !is_kept(i)) {
    rows[i].kind |= state_gradient_nan | state_not_kept;
  }
  if (p.diverges != 0u) {
    rows[i].smoothing = bitcast<f32>(kept_rows[p.base + i * kept_words + kept_rest]);
  }
  if (p.consumes != 0u) {
    kept_rows[p.base + i * kept_words + kept_layout] = 0u;
  }
}

@compute @workgroup_size(256)
fn report(@builtin(global_invocation_id) id: vec3<u32>) {
  let i = id.x;
  if (i < p.tokens && (rows[i].kind & state_not_kept) != 0u) {
    atomicOr(&fault[p.fault], 2u);
  }
}

// SPDX-License-Identifier: Apache-2.0
// For probabilities p as input, in place of the logits: computes loss and gradient of -sum_j q_j
// log(p_j + floor), with q = (1 - smoothing) c_t [j = t] + smoothing_per_class c_j.
//   slots     a workgroup per row and 1024 columns: sum_j q_j log(p_j + floor)
//   combine   a thread per row: the loss and the factor of the gradient
//   gradient  p -> its gradient, in the block
// Uses common: numbers, token, window.

@group(0) @binding(1) var<storage, read> block_in: array<f32>;  // [rows, row_stride]
// counted[0]: the number of rows; their tokens' indices from counted[4] on, in order.
@group(0) @binding(2) var<storage, read> counted: array<u32>;
@group(0) @binding(3) var<storage, read> vocab_weight: array<f32>;         // [columns]
@group(0) @binding(4) var<storage, read> rows_in: array<State>;            // [tokens]
@group(0) @binding(5) var<storage, read_write> partials_out: array<Slot>;  // [rows, slots]
@group(0) @binding(6) var<storage, read> partials_in: array<Slot>;
@group(0) @binding(7) var<storage, read_write> rows_out: array<State>;
@group(0) @binding(8) var<storage, read> inputs: array<Given>;  // [tokens]
@group(0) @binding(9) var<storage, read> scalars: Scalars;
@group(0) @binding(10) var<storage, read_write> block_out: array<u32>;

// Returns the logarithm of any number: -inf of 0, NaN of a negative one.
fn log_of(x: f32) -> f32 {
  if (is_nan(x) || (is_negative(x) && x != 0.0)) {
    return bitcast<f32>(p.nan);
  }
  if (is_infinite(x)) {
    return x;
  }
  if (x < 1.17549435e-38) {
    let bits = bitcast<u32>(x) & 0x7fffffffu;
    if (bits == 0u) {
      return bitcast<f32>(p.nan ^ 0x80400000u);
    }
    return log_positive(f32(bits)) - 149.0 * 0.69314718;
  }
  return log_positive(x);
}

// Returns q_j.
fn expected(token: u32, column: u32, local: u32) -> f32 {
  var c = 1.0;
  if ((p.flags & has_vocab_weight) != 0u) {
    c = vocab_weight[p.weight_base + local];
  }
  var q = p.smoothing_per_class * c;
  if (column == rows_in[token].target_column) {
    q += (1.0 - p.smoothing) * rows_in[token].class_weight;
  }
  return q;
}

const threads = 64u;
const thread_columns = slot_columns / threads;
var<workgroup> tree: array<f32, threads>;

@compute @workgroup_size(threads)
fn slots(@builtin(workgroup_id) group: vec3<u32>,
         @builtin(local_invocation_index) thread: u32) {
  let r = group.y;
  if (r >= counted[0]) {
    return;
  }
  let first = group.x * slot_columns;
  let token = counted[4u + r];
  if (direct && !is_counted(rows_in[token].kind)) {
    return;
  }
  var sum = 0.0;
  for (var k = 0u; k < thread_columns; k++) {
    let local = first + k * threads + thread;
    if (local >= p.columns) {
      continue;
    }
    let q = expected(token, p.first_column + local, local);
    if (q != 0.0) {
      let x = block_in[p.base + r * p.row_stride + local] + p.floor;
      sum += q * log_of(x);
    }
  }
  tree[thread] = sum;
  for (var step = threads / 2u; step > 0u; step /= 2u) {
    workgroupBarrier();
    if (thread < step) {
      tree[thread] += tree[thread + step];
    }
  }
  if (thread == 0u) {
    partials_out[r * p.slots + (p.first_column + first) / slot_columns].weighted = tree[0];
  }
}

@compute @workgroup_size(64)
fn combine(@builtin(global_invocation_id) id: vec3<u32>) {
  let r = id.x;
  if (r >= counted[0]) {
    return;
  }
  let token = counted[4u + r];
  if (direct && !is_counted(rows_out[token].kind)) {
    return;
  }
  var sum = 0.0;
  for (var s = 0u; s < p.slots; s++) {
    sum += partials_in[r * p.slots + s].weighted;
  }
  let token_weight = rows_out[token].token_weight;
  var upstream = scalars.factor;
  if ((p.flags & has_token_grad) != 0u) {
    upstream = inputs[token].grad_loss;
  }
  let factor = -upstream * token_weight;
  rows_out[token].loss = -token_weight * sum;
  rows_out[token].probability = factor;
  if (is_nan(factor)) {
    rows_out[token].kind |= state_gradient_nan;
  }
}

@compute @workgroup_size(256)
fn gradient(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let r = group.y;
  let exists = r < counted[0];
  let token = select(0u, counted[4u + select(0u, r, exists)], exists);
  let kind = rows_in[token].kind;
  let is_made = exists && (!direct || is_counted(kind));
  let is_nan_row = (kind & state_gradient_nan) != 0u;
  let factor = rows_in[token].probability;
  for (var k = 0u; k < 4u; k++) {
    let local = group.x * slot_columns + k * 256u + thread;
    // A block of the library's has zeros after its columns; the caller's matrix does not.
    if (local >= select(p.row_stride, p.columns, direct)) {
      continue;
    }
    let at = p.base + r * p.row_stride + local;
    var result = 0u;
    if (is_made && local < p.columns) {
      let raw = bitcast<f32>(block_out[at]);
      let q = expected(token, p.first_column + local, local);
      let share = by(wide(factor), q);
      let above = wide(raw + p.floor);
      let made = narrow(Wide(share.m / above.m, share.e - above.e));
      result = select(bitcast<u32>(made), p.nan, is_nan_row);
    }
    block_out[at] = result;
  }
}

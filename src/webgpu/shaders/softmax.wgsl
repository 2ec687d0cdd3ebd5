// SPDX-License-Identifier: Apache-2.0
// Computes the softmax of every column of a strided matrix, in place. Its two bindings are those of
// wgblas. One workgroup of 64 handles a column, in a grid (ncols, 1, 1), or (x, y, 1) with x y >=
// ncols.
//   in_out_mat[i, j] = exp(x_ij - m_j) / sum_i exp(x_ij - m_j)      m_j = max_i x_ij
// Element (i, j) lies at offset + i + j stride (column-major, the default) or, with row_major, at
// offset + i stride + j. Hosts other than wgblas can set more: over_rows makes every row sum to 1
// instead, with one workgroup per row and a grid (nrows, 1, 1); workgroup_size may be any power of
// two up to 256.
//
// One pass computes maximum and sum, so that an element takes two reads and one write. NaN and +inf
// are detected by their bits, since a compiler may assume that there are none: one of them, or a
// column of -inf, makes the column NaN. Any other -inf is a probability of 0.

// In wgblas' order. If the tensor has several matrices, only the first is processed.
struct Shape {
  nrows: u32,
  ncols: u32,
  nmats: u32,
  // In elements, from one column to the next, or with row_major from one row to the next.
  stride: u32,
  stride_mat: u32,
  offset: u32,  // of the first element
}

@group(0) @binding(0) var<uniform> shape: Shape;
@group(0) @binding(1) var<storage, read_write> in_out_mat: array<f32>;  // [nrows, ncols]

override row_major: bool = false;
override over_rows: bool = false;
override workgroup_size: u32 = 64u;

const LOWEST = -0x1.fffffep+127f;
const INFINITY_BITS = 0x7f800000u;
const MINUS_INFINITY_BITS = 0xff800000u;
const NAN_BITS = 0x7fc00000u;
const POISON = 1u;  // NaN or +inf was seen
const FINITE = 2u;

struct Part {
  m: f32,      // the maximum
  s: f32,      // the sum of exp(x - m)
  sight: u32,  // flags: POISON, FINITE
}

// `sight` is no atomic: workgroup memory does not start as 0 on Mesa 22's lavapipe.
var<workgroup> parts: array<Part, 256>;

// Returns the position of element i of vector j.
fn at(i: u32, j: u32) -> u32 {
  if (row_major == over_rows) {
    return shape.offset + i + j * shape.stride;
  }
  return shape.offset + i * shape.stride + j;
}

fn exp_below(x: f32, reference: f32) -> f32 {
  return exp(max(x - reference, -200.0));
}

// Returns what x adds to a sum whose maximum is m; -inf adds nothing, even if the maximum is
// LOWEST.
fn weigh(x: f32, m: f32) -> f32 {
  return select(exp_below(max(x, LOWEST), m), 0.0, bitcast<u32>(x) == MINUS_INFINITY_BITS);
}

fn merge(a: Part, b: Part) -> Part {
  let m = max(a.m, b.m);
  let s = select(a.s * exp_below(a.m, m), a.s, a.m == m) +
          select(b.s * exp_below(b.m, m), b.s, b.m == m);
  return Part(m, s, a.sight | b.sight);
}

fn seen(x: f32) -> u32 {
  let magnitude = bitcast<u32>(x) & 0x7fffffffu;
  if (magnitude < INFINITY_BITS) {
    return FINITE;
  }
  return select(0u, POISON, bitcast<u32>(x) != MINUS_INFINITY_BITS);
}

fn reduce(thread: u32, mine: Part) -> Part {
  parts[thread] = mine;
  for (var step = workgroup_size / 2u; step > 0u; step /= 2u) {
    workgroupBarrier();
    if (thread < step) {
      parts[thread] = merge(parts[thread], parts[thread + step]);
    }
  }
  workgroupBarrier();
  return parts[0];
}

@compute @workgroup_size(workgroup_size, 1, 1)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
  let j = group.x + group.y * groups.x;
  let vectors = select(shape.ncols, shape.nrows, over_rows);
  let length = select(shape.nrows, shape.ncols, over_rows);
  if (j >= vectors) {
    return;
  }
  var state = Part(LOWEST, 0.0, 0u);
  for (var i = thread; i < length; i += workgroup_size) {
    let x = in_out_mat[at(i, j)];
    let m = max(x, LOWEST);
    state = merge(state, Part(m, weigh(x, m), seen(x)));
  }
  state = reduce(thread, state);
  let poison = select(0u, NAN_BITS, (state.sight & POISON) != 0u || (state.sight & FINITE) == 0u);
  for (var i = thread; i < length; i += workgroup_size) {
    let p = weigh(in_out_mat[at(i, j)], state.m) / state.s;
    in_out_mat[at(i, j)] = bitcast<f32>(bitcast<u32>(p) | poison);
  }
}

// SPDX-License-Identifier: Apache-2.0
// Handles rows of up to 4096 columns, in the caller's matrix: computes maximum, sums, loss and draw
// at once, with one read and one write (docs/semantics.md). `row_threads` threads handle a row, 16
// columns each, so that a workgroup handles several short rows. A reduction has two barriers:
// `leaders` threads of a row reduce the others' numbers, then every thread reduces the leaders'.
// row_threads depends only on the number of columns, and so does the order of additions.
// Uses common: numbers, token, window, scale, map, logit, loss.

override row_threads: u32 = 256u;  // 16, 64 or 256
override leaders: u32 = 16u;       // the square root of row_threads

@group(0) @binding(1) var<storage, read> vocab_weight: array<f32>;  // [columns]
@group(0) @binding(2) var<storage, read_write> rows: array<State>;  // [tokens]
@group(0) @binding(3) var<storage, read> inputs: array<Given>;      // [tokens]
@group(0) @binding(4) var<storage, read> scalars: Scalars;
@group(0) @binding(5) var<storage, read_write> block: array<u32>;     // [tokens, row_stride]
@group(0) @binding(6) var<storage, read_write> extras: array<Extra>;  // [tokens]

// Returns an integer ordered like x from -inf to inf. NaN is above all, and no x gives 0.
fn key_of(x: f32) -> u32 {
  let key = bitcast<u32>(x) ^ select(0x80000000u, none, is_negative(x));
  return select(key, none, is_nan(x));
}
fn number_of(key: u32) -> f32 {
  return bitcast<f32>(select(~key, key ^ 0x80000000u, (key >> 31u) == 1u));
}

// Joins two of (sum of e, sum of e (z - m), weighted sum, lowest column with the maximum).
fn joined(a: vec4<f32>, b: vec4<f32>) -> vec4<f32> {
  return vec4<f32>(a.xyz + b.xyz, min(a.w, b.w));
}

var<workgroup> largest: array<u32, 256>;
var<workgroup> sums: array<vec4<f32>, 256>;

// `first` is the index of the row's first thread.
fn reduce_largest(first: u32, lane: u32, own: u32) -> u32 {
  largest[first + lane] = own;
  workgroupBarrier();
  var most = own;
  if (lane < leaders) {
    for (var k = leaders; k < row_threads; k += leaders) {
      most = max(most, largest[first + lane + k]);
    }
    largest[first + lane] = most;
  }
  workgroupBarrier();
  most = largest[first];
  for (var k = 1u; k < leaders; k++) {
    most = max(most, largest[first + k]);
  }
  return most;
}
fn reduce_sums(first: u32, lane: u32, own: vec4<f32>) -> vec4<f32> {
  sums[first + lane] = own;
  workgroupBarrier();
  var all = own;
  if (lane < leaders) {
    for (var k = leaders; k < row_threads; k += leaders) {
      all = joined(all, sums[first + lane + k]);
    }
    sums[first + lane] = all;
  }
  workgroupBarrier();
  all = sums[first];
  for (var k = 1u; k < leaders; k++) {
    all = joined(all, sums[first + k]);
  }
  return all;
}

@compute @workgroup_size(256)
fn row(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let lane = thread % row_threads;
  let first = thread - lane;
  let number = group.x * (256u / row_threads) + thread / row_threads;
  let exists = number < p.rows;
  let token = min(number, p.rows - 1u);
  let at = p.base + token * p.row_stride;
  var s = rows[token];
  let scale = scale_of(token);
  let is_made = exists && is_counted(s.kind);
  let columns = select(0u, p.columns, is_made);
  if (s.target_column < columns) {
    s.target_logit = map_raw(bitcast<f32>(block[at + s.target_column]), scale).z;
  }

  var raw: array<f32, 16>;
  var own_largest = 0u;
  for (var k = 0u; k < 16u; k++) {
    let column = lane + k * row_threads;
    if (column < columns) {
      raw[k] = bitcast<f32>(block[at + column]);
      own_largest = max(own_largest, key_of(map_raw(raw[k], scale).z));
    }
  }
  s.m = number_of(reduce_largest(first, lane, own_largest));
  var own = vec4<f32>(0.0, 0.0, 0.0, 1.0e9);
  // The sums of e^2 and of z, and the number of columns above the target's; mass.x is the sum of e
  // over these columns.
  var more = vec4<f32>(0.0);
  var mass = vec4<f32>(0.0);
  for (var k = 0u; k < 16u; k++) {
    let column = lane + k * row_threads;
    if (column < columns) {
      let z = map_raw(raw[k], scale).z;
      let c = class_weight_of(column);
      let d = max(z - s.m, -200.0);
      let e = exp_nonpositive(d);
      own = joined(own, vec4<f32>(e, e * d, select(0.0, c * z, c != 0.0),
                                  select(1.0e9, f32(column), z == s.m)));
      if (more_statistics) {
        let is_over = column != s.target_column && is_above(z, s.target_logit);
        more += vec4<f32>(e * e, z, select(0.0, 1.0, is_over), 0.0);
        mass.x += select(0.0, e, is_over);
      }
    }
  }
  let all = reduce_sums(first, lane, own);
  s.log_sum = log_positive(max(all.x, 1.0));
  s.weighted = all.z;
  s.entropy = s.log_sum - all.y / max(all.x, 1.0);
  s.argmax = select(0u, u32(all.w), all.w < 1.0e8);
  if (is_nan(s.m) || is_infinite(s.m)) {
    s.log_sum = bitcast<f32>(p.nan);
    s.entropy = bitcast<f32>(p.nan);
  }
  if (more_statistics) {
    workgroupBarrier();
    more = reduce_sums(first, lane, more);
    workgroupBarrier();
    mass = reduce_sums(first, lane, mass);
    if (is_made && lane == 0u) {
      let squared = more.x / (max(all.x, 1.0) * max(all.x, 1.0));
      extras[token].sum_p_squared = select(squared, s.log_sum, is_nan(s.log_sum));
      extras[token].mean_logit = more.y / p.classes;
      extras[token].rank = u32(more.z);
      let above = min(mass.x / max(all.x, 1.0), 1.0);
      extras[token].mass_above = select(above, s.log_sum, is_nan(s.log_sum));
    }
  }
  s = completed(token, s);
  if (is_made && lane == 0u) {
    rows[token] = s;
  }
  for (var k = 0u; k < 16u; k++) {
    let column = lane + k * row_threads;
    if (exists && column < p.columns) {
      var result = 0u;
      if (is_made) {
        result = draw(s, scale, raw[k], column, column);
      }
      block[at + column] = result;
    }
  }
}

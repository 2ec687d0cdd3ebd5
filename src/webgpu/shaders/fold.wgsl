// SPDX-License-Identifier: Apache-2.0
// Each thread handles a token and folds one more shard of the vocabulary into the state of the
// earlier shards (docs/semantics.md, "Combine"; src/row/shards.h does the same in the same order,
// in f64). WGSL has no f64, so a number is the sum of two f32, accurate to about 2^-45. The
// exponential of a difference is such a number times a power of two, so that a shard of almost no
// probability loses no bits.
// Uses common: numbers, token.

struct Params {
  argmax_base: u32,    // in words
  argmax_stride: u32,  // in words
  has_argmax: u32,
  is_first: u32,
  nan: u32,
  zero: u32,  // always 0, which no compiler can know (see rounded)
}

// A shard's values for a token, and the lower parts of the numbers so far; their upper parts are in
// State and Extra.
struct Fold {
  m: f32,
  log_sum: f32,
  target_logit: f32,
  weighted: f32,
  entropy: f32,
  sum_p_squared: f32,
  mean_logit: f32,
  max_logprob: f32,
  log_sum_low: f32,
  weighted_low: f32,
  entropy_low: f32,
  sum_p_squared_low: f32,
  mean_logit_low: f32,
  max_logprob_low: f32,
}

override more_statistics: bool = false;

@group(0) @binding(0) var<uniform> p: Params;
// counted[0]: the number of rows; their tokens' indices from counted[4] on, in order.
@group(0) @binding(1) var<storage, read> counted: array<u32>;
@group(0) @binding(2) var<storage, read_write> folds: array<Fold>;    // [tokens]
@group(0) @binding(3) var<storage, read_write> rows: array<State>;    // [tokens]
@group(0) @binding(4) var<storage, read_write> extras: array<Extra>;  // [tokens]
@group(0) @binding(5) var<storage, read> argmaxes: array<u32>;

const minus_infinity_bits = 0xff800000u;
fn is_minus_infinity(x: f32) -> bool {
  return bitcast<u32>(x) == minus_infinity_bits;
}
fn is_number(x: f32) -> bool {
  return !is_nan(x) && !is_infinite(x);
}

// A vec2 is a number of two f32: the sum of its parts; x is that sum, rounded.

// Returns x. WGSL lets a compiler replace (a + b) - a by b, as Mesa's does, but not through this.
fn rounded(x: f32) -> f32 {
  return bitcast<f32>(bitcast<u32>(x) ^ p.zero);
}
fn two_sum(a: f32, b: f32) -> vec2<f32> {
  let s = rounded(a + b);
  let of_b = rounded(s - a);
  return vec2<f32>(s, (a - (s - of_b)) + (b - of_b));
}
// Requires |a| >= |b|.
fn quick_sum(a: f32, b: f32) -> vec2<f32> {
  let s = rounded(a + b);
  return vec2<f32>(s, b - (s - a));
}
fn plus(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
  let s = two_sum(a.x, b.x);
  let t = two_sum(a.y, b.y);
  let r = quick_sum(s.x, s.y + t.x);
  return quick_sum(r.x, r.y + t.y);
}
// Every product of halves is exact, so it does not matter what a compiler fuses.
fn two_product(a: f32, b: f32) -> vec2<f32> {
  let a_high = high_half(a);
  let b_high = high_half(b);
  let a_low = rounded(a - a_high);
  let b_low = rounded(b - b_high);
  let s = two_sum(rounded(a_high * b_high), rounded(a_high * b_low));
  let t = two_sum(s.x, rounded(a_low * b_high));
  return quick_sum(t.x, (s.y + t.y) + a_low * b_low);
}
fn product(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
  let r = two_product(a.x, b.x);
  return quick_sum(r.x, r.y + (a.x * b.y + a.y * b.x));
}
fn quotient(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
  let first = a.x / b.x;
  var rest = plus(a, -product(b, vec2<f32>(first, 0.0)));
  let second = rest.x / b.x;
  rest = plus(rest, -product(b, vec2<f32>(second, 0.0)));
  return plus(quick_sum(first, second), vec2<f32>(rest.x / b.x, 0.0));
}
fn is_over(a: vec2<f32>, b: vec2<f32>) -> bool {
  return a.x > b.x || (a.x == b.x && a.y >= b.y);
}

// Returns a 2^n for n <= 0; 0, not NaN, if n is far below the exponents of f32.
fn scaled(a: vec2<f32>, n: i32) -> vec2<f32> {
  let first = max(n, -120);
  let second = max(n - first, -120);
  return (a * bitcast<f32>(u32(first + 127) << 23u)) * bitcast<f32>(u32(second + 127) << 23u);
}

struct Power {
  mantissa: vec2<f32>,  // in [sqrt(1/2), sqrt(2)]
  exponent: i32,
}

// Returns exp(x) for -200 <= x <= 0.
fn power_of(x: vec2<f32>) -> Power {
  let n = round(x.x * 1.44269504);
  // The first two parts of log 2 have 15 bits each, so their products with n are exact.
  var r = plus(x, vec2<f32>(-n * 0.693145752, 0.0));
  r = plus(r, vec2<f32>(-n * 1.42859062e-06, 0.0));
  r = plus(r, two_product(-n, 1.61985095e-11));
  // The series of exp; from the seventh power on, one f32 is enough.
  var tail = 1.60590444e-10;
  tail = fma(tail, r.x, 2.08767559e-09);
  tail = fma(tail, r.x, 2.50521079e-08);
  tail = fma(tail, r.x, 2.755732e-07);
  tail = fma(tail, r.x, 2.75573188e-06);
  tail = fma(tail, r.x, 2.48015876e-05);
  tail = fma(tail, r.x, 0.000198412701);
  var e = vec2<f32>(tail, 0.0);
  e = plus(product(e, r), vec2<f32>(0.00138888892, -3.36310944e-11));
  e = plus(product(e, r), vec2<f32>(0.00833333377, -4.34617203e-10));
  e = plus(product(e, r), vec2<f32>(0.0416666679, -1.24176347e-09));
  e = plus(product(e, r), vec2<f32>(0.166666672, -4.96705388e-09));
  e = plus(product(e, r), vec2<f32>(0.5, 0.0));
  e = plus(product(e, r), vec2<f32>(1.0, 0.0));
  e = plus(product(e, r), vec2<f32>(1.0, 0.0));
  return Power(e, i32(n));
}

// Returns log(1 + e) / 2^n, where e is e.mantissa 2^n <= 1: twice the series of atanh(e / (2 + e)).
fn log_one_plus(e: Power) -> vec2<f32> {
  let s = quotient(e.mantissa, plus(vec2<f32>(2.0, 0.0), scaled(e.mantissa, e.exponent)));
  let whole = scaled(s, e.exponent);
  let z = product(whole, whole);
  var tail = 0.0344827585;
  tail = fma(tail, z.x, 0.0370370373);
  tail = fma(tail, z.x, 0.0399999991);
  tail = fma(tail, z.x, 0.0434782617);
  tail = fma(tail, z.x, 0.0476190485);
  tail = fma(tail, z.x, 0.0526315793);
  tail = fma(tail, z.x, 0.0588235296);
  tail = fma(tail, z.x, 0.0666666701);
  tail = fma(tail, z.x, 0.0769230798);
  var sum = vec2<f32>(tail, 0.0);
  sum = plus(product(sum, z), vec2<f32>(0.0909090936, -2.70930212e-09));
  sum = plus(product(sum, z), vec2<f32>(0.111111112, -8.27842295e-10));
  sum = plus(product(sum, z), vec2<f32>(0.142857149, -6.386212e-09));
  sum = plus(product(sum, z), vec2<f32>(0.200000003, -2.98023228e-09));
  sum = plus(product(sum, z), vec2<f32>(0.333333343, -9.93410776e-09));
  sum = plus(product(sum, z), vec2<f32>(1.0, 0.0));
  return 2.0 * product(s, sum);
}

// Returns the sum of a pair and a number, either of which may be infinite or NaN.
fn plus_any(a: vec2<f32>, b: f32) -> vec2<f32> {
  let s = a.x + b;
  if (!is_number(a.x) || !is_number(b) || !is_number(s)) {
    return vec2<f32>(s, 0.0);
  }
  return plus(a, vec2<f32>(b, 0.0));
}

// The statistics that depend on the shards' probabilities.
struct Sums {
  log_sum: vec2<f32>,
  entropy: vec2<f32>,
  sum_p_squared: vec2<f32>,
  max_logprob: vec2<f32>,
}

// Returns share term 2^n, or the term itself if it is infinite or NaN.
fn part_of(share: vec2<f32>, term: vec2<f32>, n: i32) -> vec2<f32> {
  if (!is_number(term.x)) {
    return vec2<f32>(term.x, 0.0);
  }
  return scaled(product(share, term), n);
}
fn joined(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
  if (!is_number(a.x)) {
    return plus_any(a, b.x);
  }
  if (!is_number(b.x)) {
    return b;
  }
  return plus(a, b);
}

// Returns the greater one, or NaN if either is NaN.
fn greater(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
  if (is_nan(a.x) || (!is_nan(b.x) && is_over(a, b))) {
    return a;
  }
  return b;
}

// Folds two states whose log sums are relative to the same m, with over.log_sum >= under.log_sum.
fn folded(over: Sums, under: Sums) -> Sums {
  var apart = plus(under.log_sum, -over.log_sum);
  // Below this exp is 0 in f64, in which the other backends fold.
  if (apart.x < -745.0) {
    return over;
  }
  let log_ratio = apart;
  apart = select(apart, vec2<f32>(-200.0, 0.0), apart.x < -200.0);
  let e = power_of(apart);
  let n = e.exponent;
  let log_part = log_one_plus(e);
  let rest = scaled(log_part, n);
  // The shares of the two: the greater is 1 / (1 + e), the other is e times that.
  let one = vec2<f32>(1.0, 0.0);
  let most = quotient(one, plus(one, scaled(e.mantissa, n)));
  let least = product(e.mantissa, most);  // without 2^n, which part_of applies
  var all: Sums;
  all.log_sum = plus(over.log_sum, rest);
  all.entropy = joined(part_of(most, joined(over.entropy, rest), 0),
                       part_of(least, joined(under.entropy, plus(rest, -apart)), n));
  all.sum_p_squared = joined(part_of(product(most, most), over.sum_p_squared, 0),
                             part_of(product(least, least), under.sum_p_squared, 2 * n));
  all.max_logprob = greater(joined(over.max_logprob, -rest),
                            joined(under.max_logprob, plus(log_ratio, -rest)));
  return all;
}

// Returns x - m, at least -1e6 and so never infinite.
fn difference(x: f32, m: f32) -> vec2<f32> {
  if (x - m < -1.0e6) {
    return vec2<f32>(-1.0e6, 0.0);
  }
  return two_sum(x, -m);
}

@compute @workgroup_size(64)
fn fold(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= counted[0]) {
    return;
  }
  let token = counted[4u + id.x];
  var s = rows[token];
  let f = folds[token];
  var index = none;
  if (p.has_argmax != 0u) {
    index = argmaxes[p.argmax_base + token * p.argmax_stride];
  }
  if (p.is_first != 0u) {
    s.m = f.m;
    s.log_sum = f.log_sum;
    s.target_logit = f.target_logit;
    s.weighted = f.weighted;
    s.entropy = f.entropy;
    s.argmax = index;
    rows[token] = s;
    folds[token].log_sum_low = 0.0;
    folds[token].weighted_low = 0.0;
    folds[token].entropy_low = 0.0;
    folds[token].sum_p_squared_low = 0.0;
    folds[token].mean_logit_low = 0.0;
    folds[token].max_logprob_low = 0.0;
    if (more_statistics) {
      extras[token].sum_p_squared = f.sum_p_squared;
      extras[token].mean_logit = f.mean_logit;
      extras[token].max_logprob = f.max_logprob;
    }
    return;
  }
  var squared = 0.0;
  var highest = 0.0;
  if (more_statistics) {
    squared = extras[token].sum_p_squared;
    highest = extras[token].max_logprob;
    let mean = plus_any(vec2<f32>(extras[token].mean_logit, f.mean_logit_low), f.mean_logit);
    extras[token].mean_logit = mean.x;
    folds[token].mean_logit_low = mean.y;
  }
  if (!is_nan(s.target_logit) && !is_above(s.target_logit, f.target_logit)) {
    s.target_logit = f.target_logit;
  }
  let weighted = plus_any(vec2<f32>(s.weighted, f.weighted_low), f.weighted);
  s.weighted = weighted.x;
  folds[token].weighted_low = weighted.y;

  // A shard of -inf adds nothing to the statistics below.
  let minus_infinity = bitcast<f32>(p.nan ^ 0x80400000u);
  let m1 = select(s.m, minus_infinity, is_minus_infinity(s.log_sum));
  let m2 = select(f.m, minus_infinity, is_minus_infinity(f.log_sum));
  let is_same = bitcast<u32>(m1) == bitcast<u32>(m2) || (is_number(m1) && is_number(m2) && m1 == m2);
  let first_leads = is_above(m1, m2) || (is_same && !is_nan(m1));
  if (s.argmax == none || (index != none && !first_leads)) {
    s.argmax = index;
  }
  let first = Sums(vec2<f32>(s.log_sum, f.log_sum_low), vec2<f32>(s.entropy, f.entropy_low),
                   vec2<f32>(squared, f.sum_p_squared_low),
                   vec2<f32>(highest, f.max_logprob_low));
  let second = Sums(vec2<f32>(f.log_sum, 0.0), vec2<f32>(f.entropy, 0.0),
                    vec2<f32>(f.sum_p_squared, 0.0), vec2<f32>(f.max_logprob, 0.0));
  let first_empty = is_minus_infinity(m1);
  let second_empty = is_minus_infinity(m2);
  let first_bad = !first_empty && !(is_number(m1) && is_number(s.log_sum));
  let second_bad = !second_empty && !(is_number(m2) && is_number(f.log_sum));
  var all = first;
  s.m = select(m2, m1, first_leads || is_nan(m1));
  if (first_bad || second_bad || (first_empty && second_empty)) {
    let nan = vec2<f32>(bitcast<f32>(p.nan), 0.0);
    all = Sums(nan, nan, nan, nan);
  } else if (first_empty) {
    all = second;
  } else if (!second_empty) {
    var a = first;
    var b = second;
    if (first_leads) {
      b.log_sum = plus(difference(m2, m1), b.log_sum);
    } else {
      a.log_sum = plus(difference(m1, m2), a.log_sum);
    }
    if (is_over(a.log_sum, b.log_sum)) {
      all = folded(a, b);
    } else {
      all = folded(b, a);
    }
  }
  s.log_sum = all.log_sum.x;
  s.entropy = all.entropy.x;
  rows[token] = s;
  folds[token].log_sum_low = all.log_sum.y;
  folds[token].entropy_low = all.entropy.y;
  folds[token].sum_p_squared_low = all.sum_p_squared.y;
  folds[token].max_logprob_low = all.max_logprob.y;
  if (more_statistics) {
    extras[token].sum_p_squared = all.sum_p_squared.x;
    extras[token].max_logprob = all.max_logprob.x;
  }
}

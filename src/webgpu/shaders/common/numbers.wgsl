// SPDX-License-Identifier: Apache-2.0
// Detects NaN and infinities by their bits, since WGSL lets a compiler assume that there are none.
// Its exp, log and tanh are accurate to about an ulp except as noted; WGSL's own need not be.

const lowest = -0x1.fffffep+127f;
const infinity_bits = 0x7f800000u;

fn is_nan(x: f32) -> bool {
  return (bitcast<u32>(x) & 0x7fffffffu) > infinity_bits;
}
fn is_infinite(x: f32) -> bool {
  return (bitcast<u32>(x) & 0x7fffffffu) == infinity_bits;
}
fn is_negative(x: f32) -> bool {
  return (bitcast<u32>(x) >> 31u) == 1u;
}

// Returns x > y, for infinities too, and false for NaN.
fn is_above(x: f32, y: f32) -> bool {
  if (is_nan(x) || is_nan(y)) {
    return false;
  }
  if (is_infinite(x)) {
    return !is_negative(x) && bitcast<u32>(x) != bitcast<u32>(y);
  }
  if (is_infinite(y)) {
    return is_negative(y);
  }
  return x > y;
}

// Returns exp(y - n log 2) - 1, where n log 2 is the nearest multiple of log 2 to y.
fn exp_minus_one(y: f32, n: f32) -> f32 {
  let r = fma(n, -1.42860677e-6, fma(n, -0.693145752, y));
  var q = fma(1.98412698e-4, r, 1.38888889e-3);
  q = fma(q, r, 8.33333333e-3);
  q = fma(q, r, 4.16666667e-2);
  q = fma(q, r, 0.166666667);
  q = fma(q, r, 0.5);
  return r + r * r * q;
}

// Returns exp(x) for x <= 0 to about an ulp; below 2^-126 it is 0.
fn exp_nonpositive(x: f32) -> f32 {
  let y = max(x, -104.0);
  let n = round(y * 1.44269504);
  let e = 1.0 + exp_minus_one(y, n);
  let exponent = i32(n) + 127;
  if (exponent <= 0 || x < -104.0) {
    return 0.0;
  }
  return e * bitcast<f32>(u32(exponent) << 23u);
}

// An exponential e, and e - 1, which has more bits than e where e is near 1.
struct Exponential {
  s: f32,  // e - 1
  e: f32,
}
// Returns exp(x) for x <= 0; below -87 that of -87. s is accurate to about an ulp, and e to 1 + |x|
// / 2 ulp, because a compiler may add the two parts of log 2 before they are multiplied.
fn exponential_of(x: f32) -> Exponential {
  let y = max(x, -87.0);
  let n = round(y * 1.44269504);
  let small = exp_minus_one(y, n);
  let scale = bitcast<f32>(u32(i32(n) + 127) << 23u);
  return Exponential(scale * small + (scale - 1.0), scale * (1.0 + small));
}

// Returns log(2^k (1 + f)) for f between sqrt(1/2) - 1 and sqrt(2) - 1, to about an ulp.
fn log_of_parts(k: f32, f: f32) -> f32 {
  let s = f / (2.0 + f);
  let z = s * s;
  let w = z * z;
  let r = z * (0.66666662693 + w * 0.28498786688) + w * (0.40000972152 + w * 0.24279078841);
  let half = 0.5 * f * f;
  return (s * (half + r) + k * 9.0580006145e-6 - half) + f + k * 0.69313812256;
}

// Returns log(x) for a normal x > 0, to about an ulp where the result is not tiny.
fn log_positive(x: f32) -> f32 {
  let shifted = bitcast<u32>(x) + (0x3f800000u - 0x3f3504f3u);
  let k = f32(i32(shifted >> 23u) - 127);
  return log_of_parts(k, bitcast<f32>((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0);
}

// Returns log(x) of x = 1 + w, x >= 0, to about an ulp even where the result is tiny. It needs both
// arguments: near x = 1, w has more bits; near 0, x has.
fn log_beside_one(x: f32, w: f32) -> f32 {
  if (w > -0.29 && w < 0.41) {
    return log_of_parts(0.0, w);
  }
  return log_positive(max(x, 0x1p-126f));
}

// Returns a with only the upper 12 bits of its significand. Products of such halves are exact, so it
// does not matter whether a compiler fuses a product and a sum into an fma, as WGSL allows.
fn high_half(a: f32) -> f32 {
  return bitcast<f32>(bitcast<u32>(a) & 0xfffff000u);
}

// Returns a (b + b_low), rounded about once.
fn times(a: f32, b: f32, b_low: f32) -> f32 {
  let whole = a * b;
  if (is_infinite(whole)) {
    return whole;
  }
  // The halves' products may be as small as 2^-24 of the whole; a device may flush these to 0.
  let is_small = abs(whole) < 0x1p-60f && abs(a) < 0x1p60f;
  let raised = select(a, a * 0x1p60f, is_small);
  let a_high = high_half(raised);
  let b_high = high_half(b);
  let a_low = raised - a_high;
  let low = a_low * (b - b_high) + raised * b_low;
  let sum = a_high * b_high + ((a_high * (b - b_high) + a_low * b_high) + low);
  return select(sum, sum * 0x1p-60f, is_small);
}

// The number m 2^e, |m| in [1, 2): a product of several neither overflows nor vanishes in between,
// even on a device that flushes numbers below 2^-126 to 0. If the number is 0, infinite or NaN, m
// is the number itself.
struct Wide {
  m: f32,
  e: i32,
}
fn wide(x: f32) -> Wide {
  let size = bitcast<u32>(x) & 0x7fffffffu;
  if (size == 0u || size >= infinity_bits) {
    return Wide(x, 0);
  }
  let is_subnormal = size < 0x00800000u;
  let bits = select(size, bitcast<u32>(f32(size)), is_subnormal);
  let sign = bitcast<u32>(x) & 0x80000000u;
  return Wide(bitcast<f32>((bits & 0x007fffffu) | 0x3f800000u | sign),
              i32(bits >> 23u) - select(127, 276, is_subnormal));
}
// Returns a x. Its m may leave [1, 2).
fn by(a: Wide, x: f32) -> Wide {
  let b = wide(x);
  return Wide(a.m * b.m, a.e + b.e);
}
fn power_of_two(e: i32) -> f32 {
  return bitcast<f32>(u32(e + 127) << 23u);
}
// Returns the number; only the last step may overflow or underflow.
fn narrow(a: Wide) -> f32 {
  let first = clamp(a.e, -120, 120);
  let second = clamp(a.e - first, -120, 120);
  let third = clamp(a.e - first - second, -120, 120);
  return ((a.m * power_of_two(first)) * power_of_two(second)) * power_of_two(third);
}

// Returns tanh(x) for any x but NaN.
fn tanh_of(x: f32) -> f32 {
  let size = abs(x);
  if (size < 0.5) {
    let y = x * x;
    var q = fma(y, -1.45583438705e-3, 3.59212803657e-3);
    q = fma(q, y, -8.86323552990e-3);
    q = fma(q, y, 2.18694885361e-2);
    q = fma(q, y, -5.39682539683e-2);
    q = fma(q, y, 0.133333333333);
    q = fma(q, y, -0.333333333333);
    return fma(x * y, q, x);
  }
  // tanh is 1 - 2e / (1 + e), with e, the sum and the quotient in two parts each: rounded at every
  // step it would be off by 3 units of 2^-24, the whole bound of a logit.
  let exponent = max(-2.0 * size, -60.0);
  let n = round(exponent * 1.44269504);
  let s = exp_minus_one(exponent, n);
  let power = bitcast<f32>(u32(i32(n) + 127) << 23u);
  let e = (1.0 + s) * power;
  let e_low = ((1.0 - (1.0 + s)) + s) * power;
  let sum = 1.0 + e;
  let sum_low = ((1.0 - sum) + e) + e_low;
  let q = 2.0 * e / sum;
  let q_high = high_half(q);
  let sum_high = high_half(sum);
  let rest = (2.0 * e - q_high * sum_high) - (q_high * (sum - sum_high) + (q - q_high) * sum);
  let q_low = (rest + (2.0 * e_low - q * sum_low)) / sum;
  let t = 1.0 - q;
  return select(1.0, -1.0, x < 0.0) * (t + (((1.0 - t) - q) - q_low));
}

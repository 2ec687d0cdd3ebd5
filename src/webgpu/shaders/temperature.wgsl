// SPDX-License-Identifier: Apache-2.0
// Each thread computes the factors of one token's logits from the token's own temperature, with the
// bits that the host computes for a temperature shared by all tokens. WGSL's division may err by
// 2.5 units in the last place, so this divides whole numbers, to 53 bits as the host's double does,
// then rounds to f32.
// Uses common: token.

struct Params {
  tokens: u32,
  base: u32,  // where the temperatures begin, in words
  stride: u32,
  logit_scale: u32,  // an f32's bits
  softcap: u32,      // an f32's bits
  of_all: u32,       // not 0: every token gets factors, not only those that count
  has_fault: u32,
  fault: u32,  // index of the fault's word
  nan: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> temperatures: array<u32>;    // [tokens], strided
@group(0) @binding(2) var<storage, read> rows: array<State>;          // [tokens]
@group(0) @binding(3) var<storage, read_write> extras: array<Extra>;  // [tokens]
@group(0) @binding(4) var<storage, read_write> fault: array<atomic<u32>>;


// Represents (high 2^29 + low) 2^(e - 52); high has 24 bits.
struct Quotient {
  high: u32,
  low: u32,
  e: i32,
}
// Returns a / b rounded to a double's 53 bits; a and b are the bits of normal positive f32.
fn quotient_of(a: u32, b: u32) -> Quotient {
  let divisor = (b & 0x007fffffu) | 0x00800000u;
  var rest = (a & 0x007fffffu) | 0x00800000u;
  var q = Quotient(0u, 0u, i32(a >> 23u) - i32(b >> 23u));
  if (rest < divisor) {
    rest *= 2u;
    q.e -= 1;
  }
  for (var k = 0u; k < 53u; k++) {
    let bit = select(0u, 1u, rest >= divisor);
    rest = (rest - bit * divisor) * 2u;
    if (k < 24u) {
      q.high = q.high * 2u + bit;
    } else {
      q.low = q.low * 2u + bit;
    }
  }
  if (rest > divisor || (rest == divisor && (q.low & 1u) == 1u)) {
    q.low += 1u;
  }
  if (q.low == 0x20000000u) {
    q.low = 0u;
    q.high += 1u;
  }
  if (q.high == 0x01000000u) {
    q.high = 0x00800000u;
    q.e += 1;
  }
  return q;
}
fn is_normal(q: Quotient) -> bool {
  return q.e >= -126 && (q.e < 127 || (q.e == 127 && (q.high < 0x00ffffffu || q.low == 0u)));
}

// Returns the bits of m 2^e, rounded to nearest, ties to even.
fn f32_of(m: u32, e: i32) -> u32 {
  if (m == 0u) {
    return 0u;
  }
  // Drops bits until 24 are left; for a subnormal result, those below 2^-149.
  let drop = max(8 - i32(countLeadingZeros(m)), -149 - e);
  if (drop > 30) {
    return 0u;
  }
  var kept = m;
  var exponent = e;
  if (drop > 0) {
    let by = u32(drop);
    kept = (m + ((1u << (by - 1u)) - 1u) + ((m >> by) & 1u)) >> by;
    exponent += drop;
  }
  if (kept == 0u) {
    return 0u;
  }
  // Rounding may have carried to 2^24, which has 25 bits: then the shift is negative.
  let shift = 23 - (31 - i32(countLeadingZeros(kept)));
  let biased = exponent - shift + 150;
  if (biased < 1) {
    return kept << u32(exponent + 149);
  }
  let aligned = select(kept << u32(max(shift, 0)), kept >> 1u, shift < 0);
  return (u32(biased) << 23u) | (aligned & 0x007fffffu);
}

// Returns a quotient rounded to f32 and the rounding error, also an f32; both as bits.
fn rounded(q: Quotient) -> vec2<u32> {
  let half = 0x10000000u;
  if (q.low > half || (q.low == half && (q.high & 1u) == 1u)) {
    return vec2<u32>(f32_of(q.high + 1u, q.e - 23), 0x80000000u | f32_of(2u * half - q.low, q.e - 52));
  }
  return vec2<u32>(f32_of(q.high, q.e - 23), f32_of(q.low, q.e - 52));
}

fn is_usable(temperature: u32) -> bool {
  let exponent = temperature >> 23u;  // above 255 if the sign is set
  if (exponent == 0u || exponent >= 255u) {
    return false;
  }
  let scale = p.logit_scale & 0x7fffffffu;
  if (scale != 0u && !is_normal(quotient_of(scale, temperature))) {
    return false;
  }
  return p.softcap == 0u || (is_normal(quotient_of(p.softcap, temperature)) &&
                             is_normal(quotient_of(temperature, p.softcap)));
}

@compute @workgroup_size(256)
fn scale(@builtin(global_invocation_id) id: vec3<u32>) {
  let i = id.x;
  if (i >= p.tokens || (p.of_all == 0u && !is_counted(rows[i].kind))) {
    return;
  }
  let temperature = temperatures[p.base + i * p.stride];
  if (!is_usable(temperature)) {
    extras[i].slope = bitcast<f32>(p.nan);
    if (p.has_fault != 0u) {
      atomicOr(&fault[p.fault], 4u);
    }
    return;
  }
  var slope = p.logit_scale & 0x7fffffffu;
  if (slope != 0u) {
    slope = rounded(quotient_of(slope, temperature)).x;
  }
  extras[i].slope = bitcast<f32>(slope | (p.logit_scale & 0x80000000u));
  if (p.softcap != 0u) {
    let cap = rounded(quotient_of(p.softcap, temperature));
    extras[i].cap_out = bitcast<f32>(cap.x);
    extras[i].cap_out_low = bitcast<f32>(cap.y);
  }
}

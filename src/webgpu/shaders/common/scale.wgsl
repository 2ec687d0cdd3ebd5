// SPDX-License-Identifier: Apache-2.0
// The factors of a token's logits and gradient that depend on its temperature.

override capped: bool = false;
override scaled: bool = false;
override own_temperature: bool = false;  // every token has its own, whose factors are in `extras`

struct Scale {
  slope: f32,
  cap_out: f32,
  cap_out_low: f32,
}
fn scale_of(token: u32) -> Scale {
  if (own_temperature) {
    return Scale(extras[token].slope, extras[token].cap_out, extras[token].cap_out_low);
  }
  return Scale(p.slope, p.cap_out, p.cap_out_low);
}

// The slope multiplies the factors of a row's gradient, not its columns: a device may flush a small
// column to 0 before a steep slope enlarges it.
fn slope_of(token: u32) -> f32 {
  if (!capped && !scaled) {
    return 1.0;
  }
  return scale_of(token).slope;
}

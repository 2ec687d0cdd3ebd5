// SPDX-License-Identifier: Apache-2.0
// Maps a column's raw logit to z (docs/semantics.md). With a softcap, t is the tanh, which the
// gradient needs.

struct Mapped {
  z: f32,
  t: f32,
}

// The factors of a head's map that all of its tokens share.
struct Map {
  capped: bool,
  scaled: bool,
  own_temperature: bool,
  cap_in: f32,
  cap_in_low: f32,
}
fn map_with(map: Map, raw: f32, scale: Scale) -> Mapped {
  if (map.own_temperature && is_nan(scale.slope)) {
    return Mapped(bitcast<f32>(p.nan), bitcast<f32>(p.nan));
  }
  if (map.capped) {
    if (is_nan(raw) || (is_infinite(raw) && map.cap_in == 0.0)) {
      return Mapped(bitcast<f32>(p.nan), bitcast<f32>(p.nan));
    }
    var x = 0.5 * times(raw, map.cap_in, map.cap_in_low);
    if (is_infinite(raw)) {
      x = select(1.0e4, -1.0e4, is_negative(raw) != (map.cap_in < 0.0));
    }
    let t = tanh_of(clamp(x, -1.0e4, 1.0e4));
    return Mapped(times(t, scale.cap_out, scale.cap_out_low), t);
  }
  if (map.scaled && scale.slope != 1.0) {
    return Mapped(raw * scale.slope, 0.0);
  }
  return Mapped(raw, 0.0);
}
fn map_raw(raw: f32, scale: Scale) -> Mapped {
  return map_with(Map(capped, scaled, own_temperature, p.cap_in, p.cap_in_low), raw, scale);
}

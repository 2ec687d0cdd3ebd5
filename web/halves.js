// SPDX-License-Identifier: Apache-2.0
// f32 to f16 and back in JavaScript, for browsers without Float16Array; to the nearest, ties to even.

const one = new Float32Array(1);
const bits = new Uint32Array(one.buffer);

function half(value) {
  one[0] = value;
  const sign = (bits[0] >>> 16) & 0x8000;
  const magnitude = Math.abs(one[0]);
  if (!(magnitude < 65520)) return sign | (Number.isNaN(value) ? 0x7e00 : 0x7c00);
  const exponent = Math.max(-14, Math.floor(Math.log2(magnitude || 2 ** -24)));
  const scaled = magnitude * 2 ** (10 - exponent);  // the significand, exactly
  let whole = Math.floor(scaled);
  const rest = scaled - whole;
  if (rest > 0.5 || (rest === 0.5 && whole % 2 === 1)) whole++;
  return sign | (((exponent + 14) << 10) + whole);
}

function single(h) {
  const exponent = (h >> 10) & 31;
  const fraction = h & 1023;
  const sign = h & 0x8000 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
}

export const halves = (values) => Uint16Array.from(values, half);
export const singles = (values) => Float32Array.from(values, single);

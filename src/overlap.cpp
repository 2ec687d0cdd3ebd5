// SPDX-License-Identifier: Apache-2.0
// Element j of a row at p and element l of a row at q share a byte where
//   -element_a < (p + j s) - (q + l t) < element_b.
// That is a linear equation j s - l t = c for each of the few values between; the extended
// Euclidean algorithm finds one solution of each, and with it all bounded ones.
#include "src/overlap.h"

#include <algorithm>
#include <numeric>

namespace logitless {
namespace {

// Returns the width of the view's bytes modulo `period`, counted from the address, at most
// `period`. Strides of whole periods change no residue.
uint64_t window(const Footprint& f, uint64_t period) {
  uint64_t width = f.element;
  for (size_t d = 0; d < 2; ++d) {
    if (f.stride[d] % period != 0) width += f.last[d] * f.stride[d];
  }
  return std::min(width, period);
}

// Whether the two occupy disjoint bytes of every period, as column slices of one buffer do.
bool disjoint_modulo(const Footprint& a, const Footprint& b, uint64_t period) {
  const uint64_t ahead = (b.address % period + period - a.address % period) % period;
  return window(a, period) <= ahead && ahead + window(b, period) <= period;
}

int64_t residue(int64_t a, int64_t m) { return (a % m + m) % m; }

// Returns x with s x = 1 modulo m, for coprime s and m.
int64_t inverse(int64_t s, int64_t m) {
  int64_t a = residue(s, m), b = m, x = 1, y = 0;
  while (a != 0) {
    const int64_t q = b / a;
    b -= q * a, std::swap(a, b);
    y -= q * x, std::swap(x, y);
  }
  return residue(y, m);
}

// The offsets 0, step, ..., last * step.
struct Row {
  int64_t step, last;
};

// Whether j s - l t = c for some j of `one` and l of `other`. Steps and sizes are below 2^31
// (most_bytes), so that a product of two fits int64.
bool meet_at(Row one, Row other, int64_t c) {
  if (other.step == 0) other.last = 0;
  if (one.step == 0) {
    if (other.step == 0) return c == 0;
    return c <= 0 && -c % other.step == 0 && -c / other.step <= other.last;
  }
  if (other.step == 0) return c >= 0 && c % one.step == 0 && c / one.step <= one.last;
  const int64_t g = std::gcd(one.step, other.step);
  if (c % g != 0) return false;
  const int64_t s = one.step / g, t = other.step / g;
  c /= g;
  // All solutions are j + t k, l + s k: take the least j >= 0, then the least k that makes l >= 0.
  const int64_t j = residue(c, t) * inverse(s, t) % t, l = (j * s - c) / t;
  const int64_t k = l < 0 ? (-l + s - 1) / s : 0;
  return j + t * k <= one.last && l + s * k <= other.last;
}

// Returns the dimension with fewer steps, along which rows are compared one by one.
size_t outer(const Footprint& f) { return f.last[0] <= f.last[1] ? 0 : 1; }

constexpr uint64_t most_rows = uint64_t{1} << 14, most_bytes = uint64_t{1} << 31;

bool small(const Footprint& a, const Footprint& b) {
  return a.bytes < most_bytes && b.bytes < most_bytes && a.element <= 8 && b.element <= 8 &&
         (a.last[outer(a)] + 1) * (b.last[outer(b)] + 1) <= most_rows;
}

bool share_bytes(const Footprint& a, const Footprint& b) {
  const size_t oa = outer(a), ob = outer(b);
  const auto steps = [](const Footprint& f, size_t d) {
    return Row{static_cast<int64_t>(f.stride[d]), static_cast<int64_t>(f.last[d])};
  };
  const Row row_a = steps(a, 1 - oa), row_b = steps(b, 1 - ob);
  for (uint64_t i = 0; i <= a.last[oa]; ++i) {
    for (uint64_t k = 0; k <= b.last[ob]; ++k) {
      const auto apart =
          static_cast<int64_t>((b.address + k * b.stride[ob]) - (a.address + i * a.stride[oa]));
      for (int64_t x = 1 - static_cast<int64_t>(a.element); x < static_cast<int64_t>(b.element);
           ++x) {
        if (meet_at(row_a, row_b, apart + x)) return true;
      }
    }
  }
  return false;
}

// A dimension of stride 0 repeats one element, so its size becomes 1.
Footprint without_repetition(Footprint f) {
  for (size_t d = 0; d < 2; ++d) {
    if (f.stride[d] == 0) f.last[d] = 0;
  }
  return f;
}

}  // namespace

bool may_overlap(const Footprint& one, const Footprint& other) {
  const Footprint a = without_repetition(one), b = without_repetition(other);
  if (a.bytes == 0 || b.bytes == 0) return false;
  if (a.address + a.bytes <= b.address || b.address + b.bytes <= a.address) return false;
  for (const uint64_t s : {a.stride[0], a.stride[1], b.stride[0], b.stride[1]}) {
    for (const uint64_t t : {a.stride[0], a.stride[1], b.stride[0], b.stride[1]}) {
      const uint64_t period = std::gcd(s, t);
      if (period != 0 && disjoint_modulo(a, b, period)) return false;
    }
  }
  return !small(a, b) || share_bytes(a, b);
}

}  // namespace logitless

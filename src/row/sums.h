// SPDX-License-Identifier: Apache-2.0
// A row's sums over its columns: always its maximum m and the sum of exp(z - m). Every further sum
// is a struct with its value and a function that merges the values of two parts of a row:
//   Weighted  sum_j c_j z_j                    Logits   sum_j z_j
//   Shifted   sum_j exp(z_j - m) (z_j - m)     Squares  sum_j exp(z_j - m)^2
//   Argmax    the lowest column of m           Above    the columns above the target's logit
//   Mass      sum_j exp(z_j - m) of these columns
// If `maximum` is not wanted, m need only be near the row's maximum. Each backend adds the columns
// of a part in its own way.
#pragma once

#include <cstdint>

namespace logitless {

enum class SumKind : uint8_t {
  exponentials,
  maximum,
  weighted,
  shifted,
  argmax,
  logits,
  squares,
  above,
  mass  // only together with `above`
};

class SumSet {
 public:
  constexpr SumSet() = default;
  constexpr SumSet(SumKind kind) : bits_(1u << static_cast<unsigned>(kind)) {}  // NOLINT
  constexpr SumSet operator|(SumSet other) const {
    other.bits_ |= bits_;
    return other;
  }
  constexpr SumSet without(SumSet other) const {
    other.bits_ = bits_ & ~other.bits_;
    return other;
  }
  constexpr bool has(SumSet any) const { return (bits_ & any.bits_) != 0; }
  constexpr bool empty() const { return bits_ == 0; }
  constexpr bool operator==(const SumSet&) const = default;

 private:
  uint32_t bits_ = 0;
};
constexpr SumSet operator|(SumKind a, SumKind b) { return SumSet(a) | b; }

// Narrow types for a block of columns, wide ones for a row.
struct Narrow {
  using Real = float;
  using Index = int32_t;
};
struct Wide {
  using Real = double;
  using Index = int64_t;
};

// Rescales the sums of a part relative to the row's new maximum.
struct Rebase {
  double shift = 0;   // the part's maximum minus the new one
  double factor = 1;  // exp(shift)
  double sum = 0;     // the part's sum of exp(z - m), m its own maximum
};

// Two parts of a row to merge: all columns so far, and the next block.
struct Meeting {
  Rebase first{}, second{};
  // False if a part's exponentials no longer matter: the second has none, or the first has a NaN.
  bool exponentials = true;
  bool second_leads = false;  // its maximum is greater
  int64_t first_column = 0;   // of the second part
};

template <class N>
struct Weighted {
  static constexpr SumKind kind = SumKind::weighted;
  typename N::Real weighted;
  void merge(const auto& second, const Meeting&) { weighted += second.weighted; }
};

// With b the part's maximum and a the new one:
//   exp(z - a) (z - a) = exp(b - a) [ exp(z - b) (z - b) + exp(z - b) (b - a) ]
template <class N>
struct Shifted {
  static constexpr SumKind kind = SumKind::shifted;
  typename N::Real shifted;
  double rebased(const Rebase& by) const { return by.factor * (shifted + by.sum * by.shift); }
  void merge(const auto& second, const Meeting& m) {
    if (m.exponentials) shifted = rebased(m.first) + second.rebased(m.second);
  }
};

// -1 in a row without columns so far.
template <class N>
struct Argmax {
  static constexpr SumKind kind = SumKind::argmax;
  typename N::Index argmax;
  void merge(const auto& second, const Meeting& m) {
    if (argmax < 0 || m.second_leads) argmax = m.first_column + second.argmax;
  }
};

template <class N>
struct Logits {
  static constexpr SumKind kind = SumKind::logits;
  typename N::Real logits;
  void merge(const auto& second, const Meeting&) { logits += second.logits; }
};

template <class N>
struct Squares {
  static constexpr SumKind kind = SumKind::squares;
  typename N::Real squares;
  double rebased(const Rebase& by) const { return by.factor * by.factor * squares; }
  void merge(const auto& second, const Meeting& m) {
    if (m.exponentials) squares = rebased(m.first) + second.rebased(m.second);
  }
};

// The target's own column does not count.
template <class N>
struct Above {
  static constexpr SumKind kind = SumKind::above;
  typename N::Index above;
  void merge(const auto& second, const Meeting&) { above += second.above; }
};

template <class N>
struct Mass {
  static constexpr SumKind kind = SumKind::mass;
  typename N::Real mass;
  void merge(const auto& second, const Meeting& m) {
    if (m.exponentials) mass = m.first.factor * mass + m.second.factor * second.mass;
  }
};

template <class N, template <class> class... S>
struct Sums : S<N>... {
  static constexpr SumSet kinds = (SumSet() | ... | S<N>::kind);
  template <class M>
  void merge(const Sums<M, S...>& second, SumSet wants, const Meeting& meeting) {
    ((wants.has(S<N>::kind) ? S<N>::merge(static_cast<const S<M>&>(second), meeting) : void()),
     ...);
  }
};

// Only calls that ask for rare sums have memory for them.
template <class N>
using UsualSums = Sums<N, Weighted, Shifted, Argmax>;
template <class N>
using RareSums = Sums<N, Logits, Squares, Above, Mass>;

}  // namespace logitless

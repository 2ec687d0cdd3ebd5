// SPDX-License-Identifier: Apache-2.0
// dz_of makes dz of one column of a row, by the formula of docs/semantics.md, for whatever counts
// as a number: f32 and double on host and device, and the vectors of every instruction set of the
// CPU.
//   dz_j = own - s c_j - h p_j (log p_j + H)
// `own` is P p_j, and at the target P p_t - o, which gradient.h has in two forms that do not
// cancel. P, s, o, h and H are those of RowGradient; h_p = h p_j and information = log p_j + H. A
// term that is not asked for is not computed: 0 inf is no number. c may be a function without
// parameters, which is then not called either: a kernel loads no class weight that nothing is made
// of, and where the load stands in front of the call, ptxas spills registers. Minus subtracts a
// product. This file has no guard: gradient.h includes it, and src/cpu/row-inl.h once per
// instruction set, because a compiler inlines a function only into others of the same set.

template <class T, class C>
LOGITLESS_HOST_DEVICE inline T value_of(C c) {
  if constexpr (requires { c(); }) {
    return c();
  } else {
    return c;
  }
}

template <class Minus, class T, class C>
LOGITLESS_HOST_DEVICE inline T dz_of(T own, bool smooths, T s, C c, bool forgets, T h_p,
                                     T information) {
  T dz = own;
  if (smooths) dz = Minus()(dz, s, value_of<T>(c));
  if (forgets) dz = Minus()(dz, h_p, information);
  return dz;
}

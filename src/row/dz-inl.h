// SPDX-License-Identifier: Apache-2.0
// dz_of is dz of one column of a row (docs/semantics.md), for f32 and double on host and device and
// for the vectors of every instruction set of the CPU:
//   dz_j = own - s c_j - h p_j (log p_j + H)
// `own` is P p_j, and at the target P p_t - o, which gradient.h has in two forms that do not
// cancel. P, s, o, h and H are those of RowGradient; h_p = h p_j and information = log p_j + H. A
// term that is not asked for is not computed, because 0 times inf is NaN. c may be a function
// without parameters, called only if it is needed: a kernel then loads no class weight for nothing,
// and ptxas spills fewer registers than with a load before the call. Minus subtracts a product. No
// include guard: gradient.h includes this file, and src/cpu/row-inl.h once per instruction set,
// because a compiler inlines a function only into others of the same set.

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

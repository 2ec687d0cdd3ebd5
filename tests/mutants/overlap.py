# SPDX-License-Identifier: Apache-2.0
"""Whether two views share a byte: src/overlap.cpp."""

from mutants.mutant import mutant

OVERLAP = "src/overlap.cpp"

MUTANTS = [
    mutant(
        "overlap: no period but the views' own strides", OVERLAP,
        "const uint64_t period = std::gcd(s, t);", "const uint64_t period = s + 0 * t;", "overlap",
    ),
    mutant(
        "overlap: the last element of a row meets nothing", OVERLAP,
        "return j + t * k <= one.last && l + s * k <= other.last;",
        "return j + t * k < one.last && l + s * k <= other.last;", "overlap",
    ),
    mutant(
        "overlap: only elements that begin alike", OVERLAP,
        "for (int64_t x = 1 - static_cast<int64_t>(a.element);", "for (int64_t x = 0;", "overlap",
    ),
    mutant(
        "overlap: the last row is not walked", OVERLAP,
        "for (uint64_t i = 0; i <= a.last[oa]; ++i) {", "for (uint64_t i = 0; i < a.last[oa]; ++i) {", "overlap",
    ),
    mutant(
        "overlap: solutions before the first element count", OVERLAP,
        "const int64_t k = l < 0 ? (-l + s - 1) / s : 0;", "const int64_t k = 0;", "overlap",
    ),
    mutant(
        "overlap: a broadcast view is as large as its shape", OVERLAP,
        "    if (f.stride[d] == 0) f.last[d] = 0;\n", "", "overlap",
    ),
]  # fmt: skip

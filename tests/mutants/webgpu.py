# SPDX-License-Identifier: Apache-2.0
"""Mutants of src/webgpu: of its shaders and its dispatcher."""

from __future__ import annotations

from mutants.mutant import Edit, Mutant

_ROWS, _PRODUCT, _TOKENS, _SUM = (
    f"src/webgpu/shaders/{name}.wgsl" for name in ("rows", "product", "tokens", "sum")
)
_GATHER, _SCATTER = (f"src/webgpu/shaders/{name}.wgsl" for name in ("gather", "scatter"))

# googletest filters of webgpu_suite, by the group that a mutant names.
TESTS: dict[str, str] = {
    "rows": "*/Conformance.Every*/webgpu_forward*_f32:*/Conformance.Every*/webgpu_backward_f32"
    ":*/NonFinite.*_f32:*/Invariants.*_f32",
    "linear": "*/Conformance.Every*/webgpu_linear_*_f32:*/Edges.*/webgpu_linear*_f32",
    "dtypes": "*/Conformance.Every*/webgpu_*forward_*16"
    ":*/Conformance.Every*/webgpu_forward_backward_f32",
    "device": "WebGpu.*",
}


def _mutant(name: str, file: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(name, (Edit(file, old, new),), tuple(tests.split()))


MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "the last column is dropped",
        _ROWS,
        "    if (local >= p.columns) {\n      continue;\n    }\n    let column",
        "    if (local + 1u >= p.columns) {\n      continue;\n    }\n    let column",
        "rows",
    ),
    _mutant(
        "smoothing without its pass",
        _ROWS,
        "  if (p.smoothing > 0.0) {\n    loss +=",
        "  if (p.smoothing > 2.0) {\n    loss +=",
        "rows",
    ),
    _mutant(
        "a stale maximum",
        _ROWS,
        "by = max(bitcast<f32>(partial(slot)) - m, -200.0)",
        "by = max(bitcast<f32>(partial(first)) - m, -200.0)",
        "linear rows",
    ),
    _mutant(
        "a missing barrier of the maximum",
        _ROWS,
        "    workgroupBarrier();\n    if (thread < step) {\n      let other = tree_max",
        "    if (thread < step) {\n      let other = tree_max",
        "rows",
    ),
    _mutant(
        "a missing barrier of the product",
        _PRODUCT,
        "    workgroupBarrier();\n    for (var k = 0u; k < 16u; k++) {\n"
        "      let a0 = tile_a[k * 16u",
        "    for (var k = 0u; k < 16u; k++) {\n      let a0 = tile_a[k * 16u",
        "linear",
    ),
    _mutant(
        "NaN is not told by its bits",
        _ROWS,
        "return (bitcast<u32>(x) & 0x7fffffffu) > infinity_bits;",
        "return x != x && x > 0.0;",
        "rows",
    ),
    _mutant(
        "the z-loss has no gradient", _ROWS, "w += 2.0 * p.z_loss", "w += 0.0 * p.z_loss", "rows"
    ),
    _mutant(
        "the softcap's slope is that of one",
        _ROWS,
        "((1.0 - mapped.t) * (1.0 + mapped.t))",
        "((1.0 - mapped.t) * (1.0 - mapped.t))",
        "rows",
    ),
    _mutant(
        "the entropy's gradient forgets the entropy",
        _ROWS,
        "(log_p + bitcast<f32>(row_word(row, 8u)))",
        "(log_p)",
        "rows",
    ),
    _mutant(
        "the target's column is the next one",
        _ROWS,
        "  if (column == row_word(row, 1u)) {\n    dz",
        "  if (column == row_word(row, 1u) + 1u) {\n    dz",
        "rows",
    ),
    _mutant(
        "the hidden numbers start again after 16",
        _PRODUCT,
        "p.a_stride + column / 4u]",
        "p.a_stride + column / 4u % 4u]",
        "linear",
    ),
    _mutant(
        "the bias is added twice",
        _PRODUCT,
        "v[k] += bias[p.bias_base + column + k];",
        "v[k] += 2.0 * bias[p.bias_base + column + k];",
        "linear",
    ),
    _mutant(
        "a chunk overwrites grad_weight",
        "src/webgpu/outputs.cpp",
        "const bool adds = call_.accumulate || !chunk.is_first;",
        "const bool adds = call_.accumulate;",
        "linear",
    ),
    _mutant(
        "grad_input of the last window alone",
        "src/webgpu/outputs.cpp",
        ".adds = window.index > 0 ? 1u : 0u",
        ".adds = 0u",
        "device linear",
    ),
    _mutant(
        "an ignored token counts",
        _TOKENS,
        "return Target(ignored, 0u);",
        "return Target(counts, 0u);",
        "rows",
    ),
    _mutant(
        "the high word of ignore_index is not looked at",
        _TOKENS,
        "low == p.ignore_low && high == p.ignore_high",
        "low == p.ignore_low",
        "rows",
    ),
    _mutant(
        "the fault word is overwritten",
        _TOKENS,
        "    atomicOr(&fault[p.fault], 1u);\n  }\n}\n\nvar",
        "    atomicStore(&fault[p.fault], 0u);\n  }\n}\n\nvar",
        "rows edges",
    ),
    _mutant(
        "the mean is the sum",
        _SUM,
        "bits = bitcast<u32>(sum / n);",
        "bits = bitcast<u32>(sum);",
        "rows",
    ),
    _mutant(
        "a sum of 255",
        _SUM,
        "  if (i < p.count) {\n    own = values",
        "  if (i < p.count && thread < 255u) {\n    own = values",
        "linear rows",
    ),
    _mutant(
        "subnormal halves are zero",
        _GATHER,
        "f32(mantissa) * 5.9604644775390625e-8",
        "f32(mantissa) * 0.0",
        "dtypes halves",
    ),
    _mutant(
        "halves are cut, not rounded",
        _SCATTER,
        "(bits + half + ((bits >> drop) & 1u)) >> drop",
        "bits >> drop",
        "dtypes",
    ),
    _mutant(
        "the neighbour of a half is cleared",
        _SCATTER,
        "atomicAnd(&view16[at / 2u], ~(0xffffu << shift));",
        "atomicAnd(&view16[at / 2u], 0u);",
        "dtypes",
    ),
    _mutant(
        "the lowest number is no logit",
        _ROWS,
        "    if (!is_nan(z[k])) {",
        "    if (!is_nan(z[k]) && z[k] > lowest) {",
        "rows",
    ),
    _mutant(
        "the words of a negative normalizer cancel",
        _SUM,
        "  if (high < 0x80000000u) {\n    return f32(high)",
        "  if (true) {\n    return f32(bitcast<i32>(high))",
        "normalizers",
    ),
    _mutant(
        "a window's columns start at 0",
        "src/webgpu/chunk.cpp",
        "  p.first_column = u32(window.first);",
        "  p.first_column = 0;",
        "device",
    ),
)
TESTS["normalizers"] = "*/Edges.NormalizersOfAView/webgpu_forward_f32"
TESTS["edges"] = "*/Edges.TargetsOutside*/webgpu_forward*_f32"
TESTS["halves"] = "*/Conformance.EveryShape/webgpu_*_f16:*/Edges.*_f16"

# SPDX-License-Identifier: Apache-2.0
"""Bugs put into the divergences of two heads on WebGPU, for tests/mutants/webgpu.py."""

from __future__ import annotations

from mutants.mutant import Edit, Mutant

_SHADERS = "src/webgpu/shaders"
_PAIR, _ROWS, _HEADS, _NUMBERS = (
    f"{_SHADERS}/{name}.wgsl"
    for name in ("divergence", "divergence_rows", "common/heads", "common/numbers")
)
_KEEP = f"{_SHADERS}/keep.wgsl"
_RUN, _KEPT, _PLAN = (f"src/webgpu/{name}.cpp" for name in ("divergence", "kept", "plan"))


def _mutant(name: str, file: str, old: str, new: str, tests: str = "divergences") -> Mutant:
    return Mutant(f"{name}, of two heads", (Edit(file, old, new),), (tests,))


DIVERGENCES: tuple[Mutant, ...] = (
    _mutant(
        "what f32 has no number for is infinite",
        _HEADS,
        "divergence == forward_kl && no_p && c.q > 0.0",
        "divergence == forward_kl && no_p && c.q >= 0.0",
    ),
    _mutant(
        "the last column is dropped",
        _PAIR,
        "if (local >= p.columns) {\n      continue;",
        "if (local + 1u >= p.columns) {\n      continue;",
    ),
    _mutant(
        "the last column has no gradient",
        _PAIR,
        "    var draw = bitcast<f32>(p.nan);\n    if ((s.kind & state_gradient_nan) == 0u) {",
        "    var draw = 0.0;\n    if (local + 1u < p.columns) {",
    ),
    _mutant(
        "a missing barrier of the sums",
        _PAIR,
        "    workgroupBarrier();\n    if (thread < step) {\n      tree[thread] +=",
        "    if (thread < step) {\n      tree[thread] +=",
    ),
    _mutant(
        "the teacher's softcap is none",
        _PAIR,
        "Map((p.flags & has_teacher_softcap) != 0u",
        "Map(false",
    ),
    _mutant("the teacher has the student's map", _PAIR, "Scale(p.teacher_slope,", "Scale(p.slope,"),
    _mutant(
        "the student's temperatures for both",
        _PAIR,
        "Scale(teacher_extras[token].slope,",
        "Scale(extras[token].slope,",
    ),
    _mutant(
        "a slope of tanh left out", _PAIR, "    dz *= (1.0 - mapped.t) * (1.0 + mapped.t);\n", ""
    ),
    _mutant(
        "the label in every column", _PAIR, "select(0.0, 1.0, column == s.target_column)", "1.0"
    ),
    _mutant(
        "an infinite summand is left out", _PAIR, "      atomicStore(&any_infinite, 1u);\n", ""
    ),
    _mutant(
        "the mean of one slot",
        _ROWS,
        "sum += vec3<f32>(slot.value, slot.mean_slope, slot.acceptance);",
        "sum = vec3<f32>(slot.value, slot.mean_slope, slot.acceptance);",
    ),
    _mutant("the gradient is not centred", _ROWS, "  s.entropy_factor = sum.y;\n", ""),
    _mutant(
        "a gradient of an infinite divergence",
        _ROWS,
        "    if (divergence == reverse_kl) {\n      s.kind |= state_gradient_nan;\n    }\n",
        "",
    ),
    _mutant(
        "the teacher's NaN is not the pair's",
        _ROWS,
        "(((s.kind | teacher_rows[token].kind) & state_nan) != 0u)",
        "((s.kind & state_nan) != 0u)",
    ),
    _mutant(
        "the label's loss without its weight",
        _ROWS,
        "by(by(wide(p.label_weight), select",
        "by(by(wide(1.0), select",
    ),
    _mutant(
        "a loss without the token's weight",
        _ROWS,
        "narrow(by(wide(s.loss), s.token_weight))",
        "s.loss",
    ),
    _mutant("a kept gradient is not divided", _ROWS, "    factor.e -= exponent;\n", ""),
    _mutant(
        "a kept gradient is divided for good",
        _ROWS,
        "      factor = by(factor, s.smoothing);\n",
        "",
    ),
    _mutant(
        "p - q cancels",
        _HEADS,
        "    return -c.p * x.s;\n  }\n  return c.q * x.s;",
        "    return c.p - c.q;\n  }\n  return c.p - c.q;",
    ),
    _mutant(
        "a difference of both rows' sums forgotten",
        _HEADS,
        "(s.m - t.m) + (s.log_sum - t.log_sum)",
        "s.m - t.m",
    ),
    _mutant(
        "a masked column is like any other",
        _HEADS,
        "    c.d = -infinitely_far;\n",
        "    c.d = 0.0;\n",
    ),
    _mutant(
        "the mixture's other share",
        _HEADS,
        "log_of_mixture(p.beta, p.rest, c.d > 0.0, x)",
        "log_of_mixture(p.rest, p.beta, c.d > 0.0, x)",
    ),
    _mutant(
        "a mixture of the wrong ratio",
        _HEADS,
        "log_of_mixture(p.rest, p.beta, c.d <= 0.0, x)",
        "log_of_mixture(p.rest, p.beta, c.d > 0.0, x)",
    ),
    _mutant(
        "the mixture's gradient without 1 - beta",
        _HEADS,
        "    return p.rest * dz;",
        "    return dz;",
    ),
    _mutant(
        "a sign of 0",
        _HEADS,
        "select(select(0.0, -0.5, c.d < 0.0), 0.5, c.d > 0.0)",
        "select(-0.5, 0.5, c.d > 0.0)",
    ),
    _mutant(
        "a logarithm that cancels",
        _NUMBERS,
        "  if (w > -0.29 && w < 0.41) {\n    return log_of_parts(0.0, w);\n  }\n",
        "",
    ),
    _mutant(
        "an exponential that cancels",
        _NUMBERS,
        "Exponential(scale * small + (scale - 1.0),",
        "Exponential(scale * (1.0 + small) - 1.0,",
    ),
    _mutant(
        "a kept row's divisor is lost",
        _KEEP,
        "    kept_rows[at + kept_rest] = bitcast<u32>(rows[i].smoothing);\n",
        "",
    ),
    _mutant(
        "nobody's row is kept",
        _KEEP,
        "return (is_row || p.diverges != 0u) &&",
        "return (is_row || p.diverges != 0u) ||",
    ),
    _mutant("the teacher's bias for none", _RUN, ".bias = call_.teacher_bias,", ".bias = absent,"),
    _mutant(
        "the student's options for both",
        _RUN,
        "const LossOptions options = call_.teacher_options();",
        "const LossOptions options = options_;",
    ),
    _mutant(
        "no sums of a Backward",
        _RUN,
        "summed = call_.forward || has_mean;",
        "summed = call_.forward;",
    ),
    _mutant(
        "kept in f32 whatever there is room for",
        _KEPT,
        "    if (!problem_.diverges) view.dtype = DType::f32;\n",
        "    view.dtype = DType::f32;\n",
    ),
    _mutant(
        "a weight's copy has no room for a wider teacher",
        _PLAN,
        "copied = std::max(copied, round_up(p.teacher.hidden, 4));",
        "",
    ),
)

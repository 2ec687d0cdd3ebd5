# SPDX-License-Identifier: Apache-2.0
"""Bugs put into the chosen columns on WebGPU, for tests/mutants/webgpu.py."""

from __future__ import annotations

from mutants.mutant import Edit, Mutant

_SHADERS = "src/webgpu/shaders"
_IDS, _CHOSEN, _TOKENS = (f"{_SHADERS}/{name}.wgsl" for name in ("chosen_ids", "chosen", "tokens"))
_HOST, _CHUNK, _PLAN = (f"src/webgpu/{name}.cpp" for name in ("chosen", "chunk", "plan"))


def _mutant(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(f"{name}, of chosen columns", (Edit(file, old, new),), ("chosen",))


CHOSEN: tuple[Mutant, ...] = (
    _mutant(
        "equal columns are added from the last",
        _IDS,
        "for (var j = k + 1u; j < p.chosen; j++)",
        "for (var j = p.chosen - 1u; j > k; j--)",
    ),
    _mutant(
        "equal columns are added twice",
        _IDS,
        "is_first = is_first && columns[j] != id.column;",
        "is_first = is_first || columns[j] != id.column;",
    ),
    _mutant(
        "the last of equal columns is left out",
        _IDS,
        "j < p.chosen; j++) {\n    if",
        "j + 1u < p.chosen; j++) {\n    if",
    ),
    _mutant(
        "the high word of an id is not looked at", _IDS, "high = ids[at + 1u];", "high = high;"
    ),
    _mutant(
        "an absent id is an error",
        _IDS,
        "let is_absent = (low & high) == none;",
        "let is_absent = false;",
    ),
    _mutant(
        "an id outside that is ignored is an error",
        _IDS,
        "!is_absent && (p.flags & outside_is_ignored) == 0u",
        "!is_absent",
    ),
    _mutant(
        "an id outside has no logit",
        _IDS,
        "p.nan, id.is_outside)",
        "p.nan ^ 0x80400000u, id.is_outside)",
    ),
    _mutant(
        "an id outside is no fault",
        _IDS,
        "atomicOr(&fault[p.fault], 1u);",
        "atomicOr(&fault[p.fault], 0u);",
    ),
    _mutant("columns of a shard are those of the whole", _IDS, "low - p.vocab_start", "low"),
    _mutant(
        "another shard's gradient leaves its token inactive",
        _IDS,
        "is_backward_call && id.is_given",
        "is_backward_call && id.column != none",
    ),
    _mutant(
        "a gradient that is absent is read",
        _IDS,
        "is_backward_call && id.is_given",
        "is_backward_call && k < p.chosen",
    ),
    _mutant(
        "the first gradient alone makes a token active",
        _IDS,
        "all |= sizes[j];",
        "all |= sizes[0];",
    ),
    _mutant(
        "a gradient of -0 makes a token active",
        _IDS,
        "bitcast<u32>(gradient) & 0x7fffffffu",
        "bitcast<u32>(gradient)",
    ),
    _mutant(
        "ids of ignored tokens are looked at",
        _IDS,
        "k < p.chosen && target_at(p.base + token * p.stride, p.vocab_total).kind == counts",
        "k < p.chosen && target_at(p.base + token * p.stride, p.vocab_total).kind <= outside",
    ),
    _mutant(
        "a gradient of a chosen column does not make its token active",
        _TOKENS,
        "(rows[i].kind & state_chosen) != 0u",
        "(rows[i].kind & state_chosen) > state_chosen",
    ),
    _mutant(
        "the last numbers of the hidden row are dropped",
        _CHOSEN,
        "d < p.depth; d++",
        "d + 1u < p.depth; d++",
    ),
    _mutant(
        "a dot product in another order",
        _CHOSEN,
        "    sum = fma(a.x, b.x, sum);\n    sum = fma(a.y, b.y, sum);",
        "    sum = fma(a.y, b.y, sum);\n    sum = fma(a.x, b.x, sum);",
    ),
    _mutant(
        "the bias is left out", _CHOSEN, "sum += bias[at.local];", "sum += 0.0 * bias[at.local];"
    ),
    _mutant("the weight begins with its binding", _CHOSEN, "p.weight_first + at.local", "at.local"),
    _mutant(
        "the window's last column is none of it",
        _CHOSEN,
        "local < p.columns)",
        "local + 1u < p.columns)",
    ),
    _mutant(
        "a column behind the window is one of it",
        _CHOSEN,
        "local < p.columns)",
        "local < p.columns + 1u)",
    ),
    _mutant("raw logits are those chosen", _CHOSEN, "map_raw(sum, scale_of(at.token)).z", "sum"),
    _mutant(
        "the target's logit goes to the first place",
        _CHOSEN,
        "if (at.k == p.chosen) {",
        "if (at.k > p.chosen) {",
    ),
    _mutant("rows are tokens", _CHOSEN, "let token = counted[4u + r];", "let token = r;"),
    _mutant(
        "a gradient without the map's slope",
        _CHOSEN,
        "by(wide(slope_of(at.token)), chosen[place])",
        "wide(chosen[place])",
    ),
    _mutant("large gradients overflow", _CHOSEN, "part.e > 60 &&", "part.e > 600 &&"),
    _mutant("a large gradient is not divided", _CHOSEN, "    part.e -= 60;", "    part.e -= 0;"),
    _mutant("the others' factors are not divided", _CHOSEN, "    s.onehot *= 1.0 / large;\n", ""),
    _mutant(
        "a chosen target forgets its loss",
        _CHOSEN,
        "select(0.0, s.onehot, column == s.target_column)",
        "0.0",
    ),
    _mutant(
        "every chosen column is the target",
        _CHOSEN,
        "select(0.0, s.onehot, column == s.target_column)",
        "s.onehot",
    ),
    _mutant(
        "the block keeps its own gradients",
        _HOST,
        "  if (!call_.grad_logits_at) return;\n  recorder_",
        "  if (call_.grad_logits_at) return;\n  recorder_",
    ),
    _mutant(
        "words of an id lie one behind the other",
        _HOST,
        "{words * view.stride[0], words * view.stride[1]}",
        "{words * view.stride[0], view.stride[1]}",
    ),
    _mutant(
        "few of the places",
        _HOST,
        "(problem_.chosen + (with_target ? 1 : 0)), 64)",
        "problem_.chosen, 64)",
    ),
    _mutant(
        "a chunk's ids are the first ones",
        _HOST,
        "const Part part{.first_row = chunk.first,",
        "const Part part{.first_row = 0,",
    ),
    _mutant(
        "targets alone take no logits", _CHUNK, "call_.ids || problem_.targets_only", "call_.ids"
    ),
    _mutant("more columns than threads", _PLAN, "kMostChosen = 64;", "kMostChosen = 65;"),
)

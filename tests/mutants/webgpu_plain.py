# SPDX-License-Identifier: Apache-2.0
"""Bugs put into plain.wgsl, for tests/mutants/webgpu.py."""

from __future__ import annotations

from mutants.mutant import Edit, Mutant


def _plain(name: str, old: str, new: str) -> Mutant:
    edit = Edit("src/webgpu/shaders/plain.wgsl", old, new)
    return Mutant(f"{name}, in plain", (edit,), ("plain",))


PLAIN: tuple[Mutant, ...] = (
    _plain(
        "the last column is not read",
        "(column.w < p.columns) {\n    x",
        "(column.w + 1u < p.columns) {\n    x",
    ),
    _plain(
        "the last column is not written",
        "(column.w < p.columns) {\n    l",
        "(column.w + 1u < p.columns) {\n    l",
    ),
    _plain("a fold of the grid lost", "group.x + group.y * groups.x", "group.x"),
    _plain("a stale maximum", "own.s = own.s * weigh_one(own.m, m) +", "own.s = own.s +"),
    _plain("a stale maximum among threads", " * weigh_one(maxima[first + k * step], all.m);", ";"),
    _plain("a thread's own maximum", "known.scale * weigh_one(m, part.m);", "known.scale;"),
    _plain("16 threads do without the last's maximum", "m = max(m, maxima[first + k]);", ""),
    _plain(
        "16 threads do without the last's sum", "k < 16u; k++) {\n    s", "k < 15u; k++) {\n    s"
    ),
    _plain(
        "64 threads are 48",
        "merged(thread / 64u * 4u, 1u, 4u)",
        "merged(thread / 64u * 4u, 1u, 3u)",
    ),
    _plain("256 threads are 240", "merged(0u, 1u, 16u)", "merged(0u, 1u, 15u)"),
    _plain(
        "a missing barrier",
        "17u + thread / 16u, own);\n  workgroupBarrier();",
        "17u + thread / 16u, own);",
    ),
    _plain(
        "a missing barrier of 16 threads",
        "] = own;\n  workgroupBarrier();\n  var m",
        "] = own;\n  var m",
    ),
    _plain("the row's end weighs as the lowest number", "  if (m == lowest) {", "  if (false) {"),
    _plain("NaN is not seen", "magnitude > infinite)", "false)"),
    _plain("NaN is not seen in a long row", "most = max(most, magnitude(x));", ""),
    _plain("a mask is NaN", "magnitude > infinite)", "magnitude >= infinite)"),
    _plain("a row of -inf is a number", " || part.s < 0.5", ""),
    _plain(
        "rows that no workgroup takes",
        "select(1u, 4u, p.columns <= 1024u)",
        "select(1u, 5u, p.columns <= 1024u)",
    ),
    _plain(
        "the target of another thread",
        "thread == (t.column + before) % workgroup_threads",
        "thread == t.column % workgroup_threads",
    ),
    _plain("the aligned columns end too early", "(p.columns + before + turn", "(p.columns + turn"),
    _plain("the first columns are those before again", "v - turn, end > turn)", "v, end > turn)"),
    _plain("the z-loss has no gradient", "onehot * (1.0 + 2.0 * p.z_loss * lse)", "onehot"),
    _plain("an ignored row is NaN", "select(0u, p.nan, kind == counts)", "p.nan"),
    _plain("a target outside has a loss", "poisoned || kind == outside", "poisoned"),
    _plain("the slope of the target is left out", "    onehot *= slope;\n", ""),
)

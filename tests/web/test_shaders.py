# SPDX-License-Identifier: Apache-2.0
"""Every shader compiles with both compilers, at the default limits."""

from __future__ import annotations

import json
import os
import re

import pytest
import raw

# Values of `override` constants that hosts other than ours may choose.
CHOICES: dict[str, list[dict[str, float]]] = {
    "softmax.wgsl": [{}]
    + [
        {"row_major": row_major, "over_rows": over_rows, "workgroup_size": size}
        for row_major in (0, 1)
        for over_rows in (0, 1)
        for size in (1, 64, 256)
    ],
}
PUBLISHED = ["cast.wgsl", "cross_entropy.wgsl", "softmax.wgsl", "sum_losses.wgsl"]
ENTRY = re.compile(r"@compute[^{;]*?\bfn\s+(\w+)", re.DOTALL)
FILES = sorted(path.name for path in raw.SHADERS.glob("*.wgsl"))


def entries(file: str) -> set[str]:
    return set(ENTRY.findall((raw.SHADERS / file).read_text()))


def test_every_shader_is_compiled_in() -> None:
    assert sorted(path.name for path in raw.BUILT.glob("*.wgsl")) == FILES
    for file in PUBLISHED:  # each works alone
        assert (raw.BUILT / file).read_text() == (raw.SHADERS / file).read_text()


@pytest.mark.parametrize("file", PUBLISHED)
def test_every_published_entry_point_compiles(file: str, compiler: raw.Compiler) -> None:
    code = (raw.SHADERS / file).read_text()
    assert entries(file)
    for entry in sorted(entries(file)):
        for constants in CHOICES.get(file, [{}]):
            assert compiler.compile(code, entry, constants) == "", (entry, constants)


def every_pair(own: list[tuple[str, dict[str, float]]]) -> list[tuple[str, dict[str, float]]]:
    """A part of `own` that has, for any two constants, each pair of values that `own` has."""
    seen: set[object] = set()
    kept = []
    for entry, constants in own:
        values = sorted(constants.items())
        pairs = {(entry, a, b) for a in values for b in values} | {entry}
        if not pairs <= seen:
            kept.append((entry, constants))
        seen |= pairs
    return kept


@pytest.mark.parametrize("file", [file for file in FILES if file not in PUBLISHED])
def test_every_pipeline_of_the_planner_compiles(
    file: str, compiler: raw.Compiler, planned: list[str]
) -> None:
    """Naga compiles all pipelines; Tint, behind the slow SwiftShader, those of every_pair(), or all
    with LOGITLESS_TEST_FULL=1. Lines in a compiler's message are those of build/web/shaders."""
    code = (raw.BUILT / file).read_text()
    names = [name.split(", ", 2)[1:] for name in planned if name.startswith(f"{file}, ")]
    own = [(entry, json.loads(constants)) for entry, constants in names]
    assert {entry for entry, _ in own} == entries(file)  # a host uses every entry
    if isinstance(compiler, raw.Tint) and os.environ.get("LOGITLESS_TEST_FULL") != "1":
        own = every_pair(own)
    for entry, constants in own:
        assert compiler.compile(code, entry, constants) == "", (entry, constants)


def test_a_shader_that_does_not_compile_is_seen(compiler: raw.Compiler) -> None:
    code = "@compute @workgroup_size(1) fn main() { let a: u32 = 1.5; }"
    assert compiler.compile(code, "main", {}) != ""

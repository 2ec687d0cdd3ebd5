# SPDX-License-Identifier: Apache-2.0
"""Every shader compiles with both compilers, at the default limits."""

from __future__ import annotations

import json
import os
import re

import pytest
import raw

# Values of `override` constants that another host than ours may choose.
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


@pytest.mark.parametrize("file", PUBLISHED)
def test_every_published_entry_point_compiles(file: str, compiler: raw.Compiler) -> None:
    code = (raw.SHADERS / file).read_text()
    assert entries(file)
    for entry in sorted(entries(file)):
        for constants in CHOICES.get(file, [{}]):
            assert compiler.compile(code, entry, constants) == "", (entry, constants)


def every_pair(own: list[tuple[str, dict[str, float]]]) -> list[tuple[str, dict[str, float]]]:
    """As many of them as have every two values of two constants, where some pipeline has both."""
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
    """All with naga. Behind Tint is SwiftShader, which is slow: all with LOGITLESS_TEST_FULL=1."""
    code = (raw.SHADERS / file).read_text()
    names = [name.split(", ", 2)[1:] for name in planned if name.startswith(f"{file}, ")]
    own = [(entry, json.loads(constants)) for entry, constants in names]
    assert {entry for entry, _ in own} == entries(file)  # none is never asked for
    if isinstance(compiler, raw.Tint) and os.environ.get("LOGITLESS_TEST_FULL") != "1":
        own = every_pair(own)
    for entry, constants in own:
        assert compiler.compile(code, entry, constants) == "", (entry, constants)


# The steps of a row's loss: a file must be valid alone, so they repeat what they share.
STEPS = ("slots.wgsl", "combine.wgsl", "gradient.wgsl", "row.wgsl")
SHARED = re.compile(r"^(?:fn|struct) (\w+)\b.*?^}$", re.DOTALL | re.MULTILINE)


def test_what_the_steps_of_a_row_share_is_the_same_text() -> None:
    texts: dict[str, set[str]] = {}
    places: dict[str, int] = {}
    for file in (*STEPS, "plain.wgsl"):
        for found in SHARED.finditer((raw.SHADERS / file).read_text()):
            if found[1] != "Params":  # its comments are in slots.wgsl
                texts.setdefault(found[1], set()).add(found[0])
                places[found[1]] = places.get(found[1], 0) + 1
    assert {"exp_nonpositive", "map_raw", "draw", "completed"} <= {
        name for name, count in places.items() if count > 1
    }
    assert [name for name, found in texts.items() if len(found) > 1] == []


def fields(file: str) -> list[str]:
    text = (raw.SHADERS / file).read_text()
    body = text.split("struct Params {")[1].split("\n}")[0]
    return re.findall(r"(\w+: \w+),", re.sub(r"//.*", "", body))


def test_their_parameters_are_the_same() -> None:
    assert len(fields("slots.wgsl")) == 19
    for file in (*STEPS, "probabilities.wgsl"):
        assert fields(file) == fields("slots.wgsl")


def test_a_shader_that_does_not_compile_is_seen(compiler: raw.Compiler) -> None:
    code = "@compute @workgroup_size(1) fn main() { let a: u32 = 1.5; }"
    assert compiler.compile(code, "main", {}) != ""

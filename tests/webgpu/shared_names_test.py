#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the WebGPU dispatcher and the shaders both name is the same on both sides: the fields of
every uniform and their types, the flags of a call, the words of a token's state, what is given for
a token."""

from __future__ import annotations

import re
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src/webgpu"
TYPES = {"uint32_t": "u32", "int32_t": "i32", "float": "f32"}
UNIFORMS = {
    "run.h": {
        "TokenParams": "common/chunk",
        "RowParams": "common/window",
        "PlainParams": "plain",
        "SumParams": "sum",
        "ProductParams": "common/product",
        "SliceParams": "slices",
        "KeptParams": "keep",
        "FoldParams": "fold",
        "TemperatureParams": "temperature",
    },
    "copies.cpp": {"GatherParams": "gather", "ScatterParams": "scatter"},
}


def code(file: str) -> str:
    return re.sub(r"//.*", "", (SOURCE / file).read_text())


def shader(name: str) -> str:
    return code(f"shaders/{name}.wgsl")


def shader_fields(name: str, struct: str) -> list[tuple[str, str]]:
    """Name and type."""
    body = re.search(rf"struct {struct} {{(.*?)}}", shader(name), re.DOTALL)
    assert body, f"{name} has no {struct}"
    return re.findall(r"(\w+): (\w+),", body[1])


def host_fields(file: str, struct: str) -> list[tuple[str, str]]:
    body = re.search(rf"struct {struct} {{(.*?)}};", code(file), re.DOTALL)
    assert body, f"{file} has no {struct}"
    return [
        (name, TYPES[type_])
        for type_, names in re.findall(r"(\w+) ([^;]*);", body[1])
        for name in re.findall(r"(\w+) =", names)
    ]


def snake(name: str) -> str:
    return re.sub(r"(?!^)([A-Z])", r"_\1", name.removeprefix("k")).lower()


def flags(name: str) -> list[tuple[str, str]]:
    """The names and values of a shader's constants that are flags of a call."""
    found = re.findall(r"const (\w+) = (\d+)u;", shader(name))
    return [(n, value) for n, value in found if re.match("has_|is_|wants_|outside_is_", n)]


def differences() -> list[str]:
    pairs: list[tuple[str, object, object]] = [
        (struct, host_fields(file, struct), shader_fields(name, "Params"))
        for file, structs in UNIFORMS.items()
        for struct, name in structs.items()
    ]
    run_h, chunk = code("run.h"), code("chunk.cpp")
    host = re.search(r"enum Flag : uint32_t {(.*?)}", run_h, re.DOTALL)
    assert host
    pairs.append(
        (
            "Flag",
            [(snake(n), v) for n, v in re.findall(r"(\w+) = (\d+)", host[1])],
            flags("common/token"),
        )
    )
    state = [name for name, _ in shader_fields("common/token", "State")]
    host_words = code("statistics.h")
    words = re.search(r"enum class StateWord : uint32_t {\s*(\w+) = (\d+), ([^}]*)}", host_words)
    assert words
    named = [words[1], *re.findall(r"\w+", words[3])]
    pairs.append(("StateWord", named, state[int(words[2]) :][: len(named)]))
    numbers = re.findall(r"const (\w+)_word = (\d+)u;", shader("tokens"))
    pairs.append(("a word", [n for n, _ in numbers], [state[int(number)] for _, number in numbers]))
    given = re.search(r"kInputs\[\] = {(.*?)};", chunk, re.DOTALL)
    assert given
    pairs.append(
        (
            "kInputs",
            re.findall(r'{"(\w+)"', given[1]),
            [n for n, _ in shader_fields("common/token", "Given")],
        )
    )
    extra = [name for name, _ in shader_fields("common/token", "Extra")]
    words = re.search(r"enum class ExtraWord : uint32_t {\s*(\w+) = 0,([^}]*)}", host_words)
    assert words
    named = [words[1], *re.findall(r"\w+", words[2])]
    pairs.append(("ExtraWord", named, extra[: len(named)]))
    fold = [name for name, _ in shader_fields("fold", "Fold")]
    inputs = re.search(r"kFoldInputs\[\] = {(.*?)};", host_words, re.DOTALL)
    size = re.search(r"kFoldWords = (\d+);", host_words)
    assert inputs and size
    names = {"m": "row_reference", "log_sum": "row_log_sum", "weighted": "weighted_logit_sum"}
    given = re.findall(r'"shard_(\w+)"', inputs[1])
    pairs.append(("kFoldInputs", given, [names.get(n, n) for n in fold][: len(given)]))
    pairs.append(("kFoldWords", int(size[1]), len(fold)))
    counts = re.search(r"kStateWords = (\d+), kSlotWords = (\d+), kExtraWords = (\d+);", host_words)
    assert counts
    sizes = [len(state), len(shader_fields("common/window", "Slot")), len(extra)]
    pairs.append(
        ("the words of a State, a Slot, an Extra", [int(n) for n in counts.groups()], sizes)
    )
    return [f"{name}: {a} in C++, {b} in the shaders" for name, a, b in pairs if not a or a != b]


if __name__ == "__main__":
    wrong = differences()
    print(*wrong, sep="\n")
    print(f"{len(wrong)} differ")
    sys.exit(1 if wrong else 0)

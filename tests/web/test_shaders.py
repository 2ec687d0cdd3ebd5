# SPDX-License-Identifier: Apache-2.0
"""Every shader compiles with both compilers, at the default limits."""

from __future__ import annotations

import re

import pytest
import raw

# Values of `override` constants that the host chooses (test_module.py sees that there are no
# others) or, for softmax, that another host may choose.
DTYPES: list[dict[str, float]] = [{"dtype": dtype} for dtype in (0, 1, 2)]
CHOICES: dict[str, list[dict[str, float]]] = {
    "gather.wgsl": DTYPES,
    "scatter.wgsl": DTYPES,
    "product.wgsl": [
        {"a_transposed": 0, "b_transposed": 1, "has_bias": 0, "bounded": 1},
        {"a_transposed": 0, "b_transposed": 1, "has_bias": 1, "bounded": 1},
        {"a_transposed": 0, "b_transposed": 0, "has_bias": 0, "bounded": 1},
        {"a_transposed": 1, "b_transposed": 0, "has_bias": 0, "bounded": 2},
    ],
    "rows.wgsl": [
        {"capped": mapped, "scaled": mapped, "direct": direct, "fused": direct}
        for mapped in (0, 1)
        for direct in (0, 1)
    ],
    "softmax.wgsl": [{}]
    + [
        {"row_major": row_major, "over_rows": over_rows, "workgroup_size": size}
        for row_major in (0, 1)
        for over_rows in (0, 1)
        for size in (1, 64, 256)
    ],
}
# SwiftShader takes seconds for a pipeline with much workgroup memory; the text is product_32's.
SLOW = ("product_64", "product_128")
ENTRY = re.compile(r"@compute[^{;]*?\bfn\s+(\w+)", re.DOTALL)
FILES = sorted(path.name for path in raw.SHADERS.glob("*.wgsl"))


def test_there_are_shaders() -> None:
    assert {"cross_entropy.wgsl", "sum_losses.wgsl", "softmax.wgsl", "cast.wgsl"} <= set(FILES)


@pytest.mark.parametrize("file", FILES)
def test_every_entry_point_compiles(file: str, compiler: raw.Compiler) -> None:
    code = (raw.SHADERS / file).read_text()
    entries = ENTRY.findall(code)
    assert entries
    for entry in entries:
        choices = CHOICES.get(file, [{}])
        if entry in SLOW:
            choices = choices[-1:]
        for constants in choices:
            assert compiler.compile(code, entry, constants) == "", (entry, constants)


def test_a_shader_that_does_not_compile_is_seen(compiler: raw.Compiler) -> None:
    code = "@compute @workgroup_size(1) fn main() { let a: u32 = 1.5; }"
    assert compiler.compile(code, "main", {}) != ""

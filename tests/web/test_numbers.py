# SPDX-License-Identifier: Apache-2.0
"""exponential_of and log_beside_one of src/webgpu/shaders/common/numbers.wgsl, against numpy in
double. The divergences of two heads use both."""

from __future__ import annotations

import numpy as np
from raw import READ_ONLY, READ_WRITE, SHADERS, Compiler, Kernel

ULP = 2.0**-23
NUMBERS = (SHADERS / "common/numbers.wgsl").read_text()


class Function(Kernel):
    """An expression of x, for every x of a buffer."""

    @property
    def code(self) -> str:
        return f"""{NUMBERS}
@group(0) @binding(0) var<storage, read> source: array<f32>;
@group(0) @binding(1) var<storage, read_write> result: array<f32>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
  if (id.x < arrayLength(&source)) {{
    let x = source[id.x];
    result[id.x] = {self.file};
  }}
}}"""


def values_of(compiler: Compiler, expression: str, x: np.ndarray) -> np.ndarray:
    kernel = Function(expression, "main", (READ_ONLY, READ_WRITE))
    _, result = compiler.run(kernel, [x, np.zeros_like(x)], (-(-len(x) // 64), 1, 1))
    return result.astype(np.float64)


def error(got: np.ndarray, want: np.ndarray, x: np.ndarray | float = 0.0) -> float:
    """The largest error in units of the last place, divided by 1 + |x| / 2: Mesa's compiler adds
    the two parts of log 2 before it multiplies them, as WGSL allows. That costs |x| / 2 units."""
    assert (np.sign(got) == np.sign(want)).all()
    size = np.maximum(np.abs(want), np.finfo(np.float32).tiny)
    return float((np.abs(got - want) / (size * ULP * (1 + np.abs(x) / 2))).max())


def small_and_large(most: float) -> np.ndarray:
    generator = np.random.default_rng(7)
    sizes = np.exp(generator.uniform(np.log(1e-30), np.log(most), 20000))
    edges = [1e-37, 2.0**-24, 2.0**-23, 0.29, 0.3465, 0.3466, 0.41, 0.5, 1, most]
    return np.concatenate([sizes, edges])


def test_an_exponential_less_1(compiler: Compiler) -> None:
    x = -small_and_large(87).astype(np.float32)
    s = values_of(compiler, "exponential_of(x).s", x)
    e = values_of(compiler, "exponential_of(x).e", x)
    exact = x.astype(np.float64)
    assert error(s, np.expm1(exact)) < 1.5
    assert error(e, np.exp(exact), exact) < 1.5


def test_an_exponential_of_nothing_and_of_much(compiler: Compiler) -> None:
    x = np.array([0, -87, -1000, -1e30], np.float32)
    assert list(values_of(compiler, "exponential_of(x).s", x)) == [0, -1, -1, -1]
    e = values_of(compiler, "exponential_of(x).e", x)
    assert e[0] == 1
    assert error(e[1:], np.full(3, np.exp(-87.0)), 87.0) < 1.5


def test_a_logarithm_beside_1(compiler: Compiler) -> None:
    """log(1 + w): of the exact w if |w| < 0.3, else of the rounded sum 1 + w."""
    size = small_and_large(1e30)
    w = np.concatenate([size, -size[size < 0.99]]).astype(np.float32)
    got = values_of(compiler, "log_beside_one(1.0 + x, x)", w)
    exact = np.where(
        np.abs(w) < 0.3, np.log1p(w.astype(np.float64)), np.log((1 + w).astype(np.float64))
    )
    assert error(got, exact) < 2.5
    u = np.exp(-np.random.default_rng(8).uniform(0.5, 87, 5000)).astype(np.float32)
    assert (
        error(values_of(compiler, "log_beside_one(x, -1.0)", u), np.log(u.astype(np.float64))) < 2
    )
    assert values_of(compiler, "log_beside_one(1.0 + x, x)", np.zeros(1, np.float32))[0] == 0


def test_a_logarithm_of_nothing_is_that_of_the_least_number(compiler: Compiler) -> None:
    got = values_of(compiler, "log_beside_one(x, -1.0)", np.array([0, 1e-44], np.float32))
    assert error(got, np.full(2, -126 * np.log(2))) < 2

# SPDX-License-Identifier: Apache-2.0
"""softmax through a pipeline made from wgblas' description, and the casts, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from raw import READ_ONLY, READ_WRITE, UNIFORM, Compiler, Kernel

SOFTMAX = Kernel("softmax.wgsl", "main", (UNIFORM, READ_WRITE))
CASTS = {
    name: Kernel("cast.wgsl", name, (READ_ONLY, READ_WRITE, UNIFORM))
    for name in ("f32_to_f16", "f16_to_f32")
}
UNTOUCHED = np.float32(777)


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    z = x.astype(np.float64)
    e = np.exp(z - z.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def run(
    compiler: Compiler,
    x: np.ndarray,
    row_major: bool = False,
    over_rows: bool = False,
    workgroup_size: int = 64,
    gap: int = 0,
    offset: int = 0,
    folded: bool = False,
) -> np.ndarray:
    """Softmax of x; asserts that the memory between and around its vectors is unchanged."""
    rows, columns = x.shape
    lines = x if row_major else x.T
    memory = np.full((lines.shape[0], lines.shape[1] + gap), UNTOUCHED)
    memory[:, : lines.shape[1]] = lines
    memory = np.concatenate([np.full(offset, UNTOUCHED), memory.ravel(), np.full(5, UNTOUCHED)])
    stride = lines.shape[1] + gap
    shape = np.array([rows, columns, 1, stride, 0, offset, 0, 0], np.uint32)
    vectors = rows if over_rows else columns
    groups = (7, -(-vectors // 7), 1) if folded else (vectors, 1, 1)
    constants = {"row_major": row_major, "over_rows": over_rows, "workgroup_size": workgroup_size}
    if not (row_major or over_rows or workgroup_size != 64):
        constants = {}  # wgblas creates pipelines without constants
    _, after = compiler.run(SOFTMAX, [shape, memory], groups, constants)
    body = after[offset : len(after) - 5].reshape(lines.shape[0], stride)
    assert (after[:offset] == UNTOUCHED).all()
    assert (after[len(after) - 5 :] == UNTOUCHED).all()
    assert (body[:, lines.shape[1] :] == UNTOUCHED).all()
    p = body[:, : lines.shape[1]]
    return p if row_major else p.T


def check(compiler: Compiler, x: np.ndarray, **options: int) -> None:
    axis = 1 if options.get("over_rows") else 0
    want = softmax(x, axis)
    depth = np.abs(x - x.max(axis=axis, keepdims=True))
    bound = want * 4 * 2.0**-24 * (3 + depth + 8 + np.log2(x.shape[axis])) + 1.2e-38
    assert (np.abs(run(compiler, x, **options) - want) <= bound).all()


def matrix(rows: int, columns: int, scale: float = 4.0) -> np.ndarray:
    generator = np.random.default_rng(rows * 1000 + columns)
    return (scale * generator.standard_normal((rows, columns))).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 1000])
@pytest.mark.parametrize("columns", [1, 9])
def test_columns_of_a_column_major_matrix(compiler: Compiler, rows: int, columns: int) -> None:
    check(compiler, matrix(rows, columns))


@pytest.mark.parametrize("row_major", [False, True])
@pytest.mark.parametrize("over_rows", [False, True])
@pytest.mark.parametrize("workgroup_size", [1, 64, 128, 256])
def test_orders_directions_and_workgroups(
    compiler: Compiler, row_major: bool, over_rows: bool, workgroup_size: int
) -> None:
    options = {"row_major": row_major, "over_rows": over_rows, "workgroup_size": workgroup_size}
    check(compiler, matrix(37, 301), gap=3, offset=11, **options)
    check(compiler, matrix(300, 41), gap=1, offset=1, folded=True, **options)


def test_large_masked_and_nan_columns(compiler: Compiler) -> None:
    x = matrix(200, 6)
    x[:, 0] += 1e4
    x[:, 1] *= 1e28
    x[3:7, 2] = -np.inf
    x[5, 3] = np.nan
    x[6, 4] = np.inf
    x[:, 5] = -np.inf
    p = run(compiler, x)
    assert np.abs(p[:, :3] - softmax(x[:, :3], 0)).max() < 1e-5
    assert (p[3:7, 2] == 0).all()
    assert np.isnan(p[:, 3:]).all()


def test_the_lowest_number_is_a_logit(compiler: Compiler) -> None:
    x = np.full((200, 3), np.finfo(np.float32).min)
    x[5:, 1] = -np.inf
    x[7:9, 2] = 1.0
    want = np.zeros_like(x)
    want[:, 0], want[:5, 1], want[7:9, 2] = 1 / 200, 0.2, 0.5
    assert np.abs(run(compiler, x) - want).max() < 1e-6


def test_f16_of_f32_is_numpys(compiler: Compiler) -> None:
    """Every f16, every middle between two, and one f32 to each side of it, of both signs."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[1:] / 2 + halves[:-1] / 2).astype(np.float32)
    middles = np.append(middles, np.float32(65520))
    sides = [np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(0))]
    edges = np.array([1e-45, 1e-38, 1e5, 3e38, np.inf, np.nan, 2**-25, 65536], np.float32)
    values = np.concatenate([halves, middles, *sides, edges])
    # an odd number of values ends in the middle of a word
    values = np.concatenate([values, -values, np.float32([1.0])])
    n = len(values)
    words = -(-n // 2)
    out = np.full(words + 1, 0xABCDABCD, np.uint32)
    buffers = [values.view(np.uint32), out, np.array([n], np.uint32)]
    after = compiler.run(CASTS["f32_to_f16"], buffers, (13, -(-words // 256 // 13) + 1, 1))[1]
    with np.errstate(over="ignore"):
        want = values.astype(np.float16)
    got = after[:words].view(np.float16)
    assert np.array_equal(got[:n].view(np.uint16)[~np.isnan(values)],
                          want.view(np.uint16)[~np.isnan(values)])  # fmt: skip
    assert np.isnan(got[:n][np.isnan(values)]).all()
    assert after[words] == 0xABCDABCD
    assert after[words - 1] >> 16 == 0


@pytest.mark.parametrize("n", [65536, 65535, 1])
def test_f32_of_f16_is_exact(compiler: Compiler, n: int) -> None:
    halves = np.arange(65536, dtype=np.uint16)[::-1].copy()
    out = np.full(n + 1, 0xABCDABCD, np.uint32)
    buffers = [halves.view(np.uint32), out, np.array([n], np.uint32)]
    after = compiler.run(CASTS["f16_to_f32"], buffers, (128, 1, 1))[1]
    want = halves.view(np.float16)[:n].astype(np.float32)
    got = after[:n].view(np.float32)
    number = ~np.isnan(want)
    assert np.array_equal(got.view(np.uint32)[number], want.view(np.uint32)[number])
    assert np.isnan(got[~number]).all()
    assert after[n] == 0xABCDABCD

# SPDX-License-Identifier: Apache-2.0
"""cross_entropy and sum_losses through pipelines made from llm.istanbul's published binding tables,
against f64, element by element."""

from __future__ import annotations

import numpy as np
import pytest
from raw import READ_ONLY, READ_WRITE, UNIFORM, Compiler, Kernel, naga

CROSS_ENTROPY = Kernel(
    "cross_entropy.wgsl",
    "cross_entropy",
    (READ_WRITE, READ_ONLY, READ_WRITE, UNIFORM, UNIFORM),
)
SUM_LOSSES = Kernel("sum_losses.wgsl", "sum_losses", (READ_ONLY, READ_WRITE, UNIFORM))
U = 2.0**-24
Result = tuple[np.ndarray, np.ndarray]


def reference(x: np.ndarray, t: np.ndarray, inv_norm: float, alpha: float, beta: float) -> Result:
    """Loss [S] and gradient [S, V] in f64, from the published formulas."""
    rows, vocab = x.shape
    z = x.astype(np.float64)
    valid = t < vocab
    target = np.where(valid, t, 0)
    m = z.max(axis=1, initial=-np.inf, keepdims=True)
    e = np.exp(z - m)
    s = e.sum(axis=1, keepdims=True)
    log_s = np.log(s)
    lse = m + log_s
    at = np.take_along_axis(z, target[:, None], axis=1)
    loss = log_s + (1 - alpha) * (m - at) + alpha * (m - z).mean(axis=1, keepdims=True)
    loss += beta * lse**2
    grad = e / s * (1 + 2 * beta * lse) - alpha / vocab
    grad[np.arange(rows), target] -= 1 - alpha
    return np.where(valid, loss[:, 0], 0.0), np.where(valid[:, None], grad * inv_norm, 0.0)


def bounds(x: np.ndarray, t: np.ndarray, inv_norm: float, alpha: float, beta: float) -> Result:
    """What docs/semantics.md grants loss and gradient of given logits."""
    z = x.astype(np.float64)
    vocab = z.shape[1]
    m = z.max(axis=1, keepdims=True)
    e = np.exp(z - m)
    s = e.sum(axis=1, keepdims=True)
    p, log_s = e / s, np.log(s)
    lse = m + log_s
    error = 3 * U * np.abs(z)
    entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(axis=1, keepdims=True)
    b = 4 * U * (entropy + np.log2(vocab) + 3 + np.abs(log_s)) + U * np.abs(lse)
    b += (p * error).sum(axis=1, keepdims=True)
    target = np.where(t < vocab, t, 0)[:, None]
    z_t, e_t = np.take_along_axis(z, target, 1), np.take_along_axis(error, target, 1)
    loss, _ = reference(x, t, inv_norm, alpha, beta)
    bound = b + (1 - alpha) * (e_t + 2 * U * np.abs(z_t))
    spread = (error + U * (np.log2(vocab) + 2) * np.abs(z)).sum(axis=1, keepdims=True)
    bound += alpha / vocab * spread
    bound += beta * (2 * np.abs(lse) * b + 3 * U * lse**2)
    bound += 2 * U * np.abs(loss[:, None])
    # WGSL allows its log an absolute error of 2^-21 between 0.5 and 2.
    bound += np.where(s < 2, 2.0**-21, 0.0)
    weight = np.abs(1 + 2 * beta * lse)
    summands = weight * p + alpha / vocab
    np.put_along_axis(summands, target, np.take_along_axis(summands, target, 1) + 1 - alpha, 1)
    grad = weight * p * (error + b + 4 * U * (3 + np.abs(z - m))) + 2 * beta * p * b
    return bound[:, 0], inv_norm * (grad + 4 * U * summands) + 1.2e-38


def run(
    compiler: Compiler,
    x: np.ndarray,
    t: np.ndarray,
    inv_norm: float = 1.0,
    alpha: float = 0.0,
    beta: float = 0.0,
    groups: tuple[int, int, int] | None = None,
) -> Result:
    rows, vocab = x.shape
    buffers = [
        x,
        t.astype(np.uint32),
        np.full(rows, 777, np.float32),
        np.array([rows, vocab, 0, 0], np.uint32),
        np.array([inv_norm, alpha, beta, 1 / vocab], np.float32),
    ]
    grad, _, loss, _, _ = compiler.run(CROSS_ENTROPY, buffers, groups or (rows, 1, 1))
    return loss, grad


def check(
    compiler: Compiler,
    x: np.ndarray,
    t: np.ndarray,
    inv_norm: float = 1.0,
    alpha: float = 0.0,
    beta: float = 0.0,
    groups: tuple[int, int, int] | None = None,
) -> None:
    loss, grad = run(compiler, x, t, inv_norm, alpha, beta, groups)
    options = [float(np.float32(option)) for option in (inv_norm, alpha, beta)]
    want_loss, want_grad = reference(x, t, *options)
    loss_bound, grad_bound = bounds(x, t, *options)
    worst = (np.abs(loss - want_loss) / loss_bound).max()
    assert worst <= 1, f"loss off by {worst} bounds"
    worst = (np.abs(grad - want_grad) / grad_bound).max()
    assert worst <= 1, f"gradient off by {worst} bounds"


def logits(rows: int, vocab: int, scale: float = 3.0, seed: int = 0) -> Result:
    generator = np.random.default_rng(seed)
    x = (scale * generator.standard_normal((rows, vocab))).astype(np.float32)
    return x, generator.integers(0, vocab, rows)


# Sizes around one column and around what 16, 64 and 256 threads hold; with some of them rows start
# unaligned; one is GPT-2's vocabulary.
VOCABS = [
    1,
    2,
    3,
    255,
    256,
    257,
    1000,
    1023,
    1024,
    1025,
    2050,
    3000,
    4095,
    4096,
    4097,
    5121,
    12287,
    50257,
]


@pytest.mark.parametrize("vocab", VOCABS)
def test_loss_and_gradient(compiler: Compiler, vocab: int) -> None:
    check(compiler, *logits(5, vocab, seed=vocab))


@pytest.mark.parametrize("vocab", [2, 300, 4096, 4099])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("beta", [0.0, 1e-4, 0.5])
def test_smoothing_and_z_loss(compiler: Compiler, vocab: int, alpha: float, beta: float) -> None:
    check(compiler, *logits(4, vocab, seed=1), 1 / 3, alpha, beta)


@pytest.mark.parametrize("vocab", [100, 5000])
@pytest.mark.parametrize("target", [0, -1, "beyond", 2**32 - 1, 2**31])
def test_first_last_and_out_of_range_targets(
    compiler: Compiler, vocab: int, target: int | str
) -> None:
    x, t = logits(3, vocab, seed=2)
    t[1] = vocab if target == "beyond" else vocab - 1 if target == -1 else target
    check(compiler, x, t, 0.25, 0.1, 1e-3)
    loss, grad = run(compiler, x, t, 0.25, 0.1, 1e-3)
    if t[1] >= vocab:
        assert loss[1] == 0
        assert not grad[1].any()


@pytest.mark.parametrize("vocab", [700, 6000])
def test_large_offsets_cost_nothing(compiler: Compiler, vocab: int) -> None:
    x, t = logits(4, vocab, scale=1.0, seed=3)
    for offset in (1e4, -1e4, 1e30, -1e30):
        check(compiler, (x + np.float32(offset)).astype(np.float32), t, 1.0, 0.1)


@pytest.mark.parametrize("vocab", [512, 4608])
def test_rising_and_falling_rows(compiler: Compiler, vocab: int) -> None:
    x = np.stack([np.linspace(-60, 60, vocab), np.linspace(60, -60, vocab), np.zeros(vocab)])
    check(compiler, x.astype(np.float32), np.array([vocab - 1, vocab - 1, 7]))


@pytest.mark.parametrize("vocab", [200, 700, 3000, 5000])
def test_one_column_far_above(compiler: Compiler, vocab: int) -> None:
    """A logit so far above the others' maximum that exp of the distance overflows f32."""
    x, t = logits(17, vocab, seed=8)
    x[np.arange(17), np.arange(17) * 3] = 150
    check(compiler, x, t)


@pytest.mark.parametrize("vocab", [200, 600, 4700])
@pytest.mark.parametrize("alpha", [0.0, 0.2])
def test_masked_infinite_and_nan_logits(compiler: Compiler, vocab: int, alpha: float) -> None:
    x, t = logits(6, vocab, seed=4)
    t[:] = 11
    x[0, 5:9] = -np.inf
    x[1, vocab - 1] = np.nan
    x[2, vocab // 2] = np.inf
    x[3, :] = -np.inf
    x[4, 11] = -np.inf  # the target's logit
    x[5, 17] = np.nan
    t[5] = vocab  # row 5 does not count
    loss, grad = run(compiler, x, t, 1.0, alpha)
    with np.errstate(invalid="ignore", divide="ignore"):
        _, want = reference(x[:1], t[:1], 1.0, alpha, 0.0)
    assert np.isposinf(loss[0]) if alpha > 0 else np.isfinite(loss[0])
    assert np.abs(grad[0] - want[0]).max() < 1e-5
    assert np.isnan(loss[1:4]).all()
    assert np.isnan(grad[1:4]).all()
    assert np.isposinf(loss[4])
    assert np.isfinite(grad[4]).all()
    assert loss[5] == 0
    assert not grad[5].any()


@pytest.mark.parametrize("vocab", [200, 600, 4096, 4700])
def test_the_lowest_number_is_a_logit(compiler: Compiler, vocab: int) -> None:
    """Many programs mask with it: here a whole row, a row with -inf, and all but two columns."""
    x = np.full((3, vocab), np.finfo(np.float32).min)
    x[1, 5:] = -np.inf
    x[2, 7:9] = 1.0
    loss, grad = run(compiler, x, np.array([2, 2, 7]))
    assert np.abs(loss - np.log([vocab, 5, 2])).max() < 1e-5
    want = np.zeros_like(x)
    want[0], want[1, :5], want[2, 7:9] = 1 / vocab, 0.2, 0.5
    want[[0, 1, 2], [2, 2, 7]] -= 1
    assert np.abs(grad - want).max() < 1e-6


def test_a_grid_of_two_dimensions(compiler: Compiler) -> None:
    check(compiler, *logits(70, 300, seed=5), groups=(9, 8, 1))


def test_more_rows_than_one_dimension_of_the_grid_holds() -> None:
    """With naga alone: SwiftShader takes a minute."""
    check(naga(), *logits(66000, 3, seed=5), groups=(256, 258, 1))


def test_no_rows(compiler: Compiler) -> None:
    """Nothing is written by an empty grid, or by a workgroup beyond the last row."""
    x, t = logits(1, 8, seed=6)
    empty = np.array([0, 8, 0, 0], np.uint32)
    buffers = [x, t.astype(np.uint32), np.full(1, 777, np.float32), empty, np.ones(4, np.float32)]
    for groups in ((0, 1, 1), (1, 1, 1)):
        after = compiler.run(CROSS_ENTROPY, buffers, groups)
        assert np.array_equal(after[0], x)
        assert after[2][0] == 777


def test_the_same_bits_wherever_a_row_stands(compiler: Compiler) -> None:
    x, t = logits(1, 5000, seed=7)
    loss, grad = run(compiler, np.repeat(x, 9, axis=0), np.repeat(t, 9), 0.5, 0.1, 1e-3)
    again, _ = run(compiler, x, t, 0.5, 0.1, 1e-3)
    assert len({row.tobytes() for row in grad}) == 1
    assert set(loss.tolist()) == {float(again[0])}


@pytest.mark.parametrize("n", [0, 1, 2, 255, 256, 257, 1025, 8191, 8192, 8193, 100003])
def test_sum_of_losses(compiler: Compiler, n: int) -> None:
    losses = np.random.default_rng(n).uniform(0, 12, n).astype(np.float32)
    out = np.full(1, 777, np.float32)
    _, total, _ = compiler.run(SUM_LOSSES, [losses, out, np.array([n], np.uint32)], (1, 1, 1))
    steps = 8 + 8 + 2 + n / 8192
    assert abs(float(total[0]) - losses.sum(dtype=np.float64)) <= steps * U * losses.sum()

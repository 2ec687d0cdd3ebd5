# SPDX-License-Identifier: Apache-2.0
"""What JAX would narrow silently: 64-bit targets, constants beyond f32."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import numpy as np

import logitless.numpy as ln
from jax_support import platform, problem  # noqa: F401
from logitless.jax import linear_cross_entropy

BEYOND = [1 << 40, 1 << 31, (1 << 32) - 100, (1 << 32) + 1, -(1 << 31) - 1, -(1 << 63)]
enable_x64: Any = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


def batch(index: int) -> tuple[Any, Any, Any]:
    """NumPy's x [2, 6, 4], w [9, 4] and an int64 target [2, 6], ignored in some places."""
    x, w, _, t = (None if v is None else np.asarray(v) for v in problem((2, 6), 9, 4, ignored=0))
    t = t.astype(np.int64)
    t[0, 2] = t[1, 0] = t[1, 5] = index
    return x, w, t


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("index", BEYOND)
def test_an_ignore_index_beyond_int32_ignores(index: int, shift: int) -> None:
    x, w, t = batch(index)
    options: dict[str, Any] = {"ignore_index": index, "shift": shift}
    expected = ln.linear_cross_entropy(x, w, t, **options)
    np.testing.assert_allclose(linear_cross_entropy(x, w, t, **options), expected, rtol=1e-6)
    rows = ln.linear_cross_entropy(x, w, t, reduction="none", **options)
    mine = jax.jit(lambda x: linear_cross_entropy(x, w, t, reduction="none", **options))(x)
    np.testing.assert_allclose(mine, rows, rtol=1e-5, atol=1e-6)
    assert not np.asarray(mine)[rows == 0].any() and (rows == 0).sum() >= 3


def test_of_each_row_too() -> None:
    x, w, t = batch(1 << 40)
    t[1] = 1 << 40  # this row has no token that counts
    means = jax.vmap(lambda x: linear_cross_entropy(x, w, t[0], ignore_index=1 << 40))(x)
    for i in range(2):
        one = ln.linear_cross_entropy(x[i], w, t[0], ignore_index=1 << 40)
        np.testing.assert_allclose(means[i], one, rtol=1e-5)
    assert linear_cross_entropy(x[1], w, t[1], ignore_index=1 << 40) == 0


def test_a_target_beyond_int32_is_refused() -> None:
    x, w, t = batch(-100)
    t[1, 3] = (1 << 32) + 5  # the low 32 bits are a class
    with pytest.raises(
        ValueError,
        match=r"target\[1, 3\] \(flat: target\[9\]\) is 4294967301; allowed: .*jax_enable_x64",
    ) as e:
        linear_cross_entropy(x, w, t)
    assert e.value.status == "target_out_of_range"
    t[1, 3] = -(1 << 31)  # internally it stands for any ignore_index beyond int32
    with pytest.raises(ValueError, match=r"target\[1, 3\] \(flat: target\[9\]\) is -2147483648"):
        linear_cross_entropy(x, w, t, ignore_index=1 << 40)


def test_an_array_of_jax_that_cannot_hold_the_ignore_index_is_refused() -> None:
    x, w, t = batch(1 << 40)
    step = lambda t: linear_cross_entropy(x, w, t, ignore_index=1 << 40)  # noqa: E731
    for call in (lambda: step(jnp.asarray(t)), lambda: jax.jit(step)(t)):
        with pytest.raises(ValueError, match=r"ignore_index is 1099511627776; allowed: an int32"):
            call()


@pytest.mark.parametrize("index", BEYOND)
def test_with_64_bits_any_ignore_index_serves_any_target(index: int) -> None:
    x, w, t = batch(index)
    none = np.where(t == index, 0, t)  # for int32 targets, of which nothing is ignored
    with enable_x64(True):
        for shift in (0, 2):
            o: dict[str, Any] = {"ignore_index": index, "shift": shift}
            for given in (t, jnp.asarray(t), none.astype(np.int32), jnp.asarray(none, jnp.int32)):
                expected = ln.linear_cross_entropy(x, w, np.asarray(given), **o)
                mine = linear_cross_entropy(x, w, given, **o)
                np.testing.assert_allclose(mine, expected, rtol=1e-6)
        o = {"ignore_index": index, "weight": np.ones(9)}
        small = jnp.asarray(none, jnp.int32)
        means = jax.vmap(lambda x, t: linear_cross_entropy(x, w, t, **o))(x, small)
        for i in range(2):
            np.testing.assert_allclose(means[i], ln.linear_cross_entropy(x[i], w, none[i]), 1e-5)


def test_a_target_from_where_64_bits_were_enabled_is_not_cut() -> None:
    x, w, t = batch(1 << 40)
    with enable_x64(True):
        wide = jnp.asarray(t)
    for shift in (0, 2):
        o: dict[str, Any] = {"ignore_index": 1 << 40, "shift": shift}
        expected = ln.linear_cross_entropy(x, w, t, **o)
        np.testing.assert_allclose(linear_cross_entropy(x, w, wide, **o), expected, rtol=1e-6)
    with pytest.raises(TypeError, match="target is int64; allowed: int32 where jax_enable_x64"):
        jax.jit(lambda t: linear_cross_entropy(x, w, t))(wide)


def test_inputs_are_rounded_to_f32_as_jax_does_it() -> None:
    x, w, t = batch(-100)
    assert linear_cross_entropy(x.astype(float), w, t) == linear_cross_entropy(x, w, t)
    weights = np.random.default_rng(0).random(9)  # f64
    assert linear_cross_entropy(x, w, t, weight=weights) == linear_cross_entropy(
        x, w, t, weight=weights.astype(np.float32)
    )


@pytest.mark.parametrize("kind", ["complex", "normalizer"])
def test_constants_of_jax_lose_nothing(kind: str) -> None:
    x, w, t = batch(-100)
    if kind == "complex":
        for name, shape in (("token_weight", t.shape), ("weight", (9,)), ("normalizer", ())):
            with pytest.raises(TypeError, match=f"{name} is complex64; allowed: real numbers"):
                linear_cross_entropy(x, w, t, **{name: jnp.ones(shape, jnp.complex64)})
    else:
        with pytest.raises(TypeError, match="normalizer is bool"):
            linear_cross_entropy(x, w, t, normalizer=jnp.asarray(True))

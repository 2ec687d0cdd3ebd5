# SPDX-License-Identifier: Apache-2.0
"""A temperature of each token in JAX, the statistics that a caller names, and tokens without an
upstream gradient."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jax")
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import torch

import reference
from jax_support import (  # noqa: F401
    DTYPES,
    fields,
    leaves,
    platform,
    problem,
    same,
    to_jax,
    to_torch,
)
from logitless.jax import cross_entropy, linear_cross_entropy, linear_logprob

F32, F16, BF16 = DTYPES
SHAPE, VOCAB, HIDDEN = (3, 80), 1000, 16  # large enough for kept state
DIFFERENTIABLE = ("lse", "target_logit", "logprob", "entropy")
CONSTANT = ("argmax", "rank", "sum_p_squared", "mean_logit", "max_logprob", "mass_above")


def upstream(shape: Any, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def temperatures(shape: tuple[int, ...]) -> Any:
    return jnp.asarray(np.random.default_rng(1).random(shape).astype(np.float32) + 0.5)


def exact(x: Any, w: Any, t: Any, temperature: Any, up: Any) -> Any:
    """Log-probabilities, and the gradients of x and w."""
    given = leaves(x, w)
    options = {"temperature": to_torch(temperature)}
    s = reference.statistics(reference.logits_of(*given), to_torch(t), options)
    return s["logprob"], torch.autograd.grad(s["logprob"], given, to_torch(up).double())


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 80), BF16), ((240,), F32), ((3, 1), F32), ((), F32)], ids=str
)
def test_a_traced_temperature(dtype: Any, shape: tuple[int, ...]) -> None:
    """A temperature per token as an argument of a jitted gradient, with kept state."""
    x, w, _, t = problem(SHAPE, VOCAB, HIDDEN, dtype)
    given, up = temperatures(shape), upstream(SHAPE)
    each = given.reshape(SHAPE) if shape == (240,) else jnp.broadcast_to(given, SHAPE)
    theirs, grads = exact(x, w, t, each, up)

    def total(x: Any, w: Any, c: Any) -> Any:
        logprob = linear_logprob(x, w, t, temperature=c)
        return (logprob * up).sum(), logprob

    step = jax.jit(jax.grad(total, (0, 1), has_aux=True))
    ours, logprob = step(x, w, given)
    same(logprob, theirs)
    for a, e in zip(ours, grads):
        same(a, e, dtype)
    names = fields(step, x, w, given)
    assert len(names) == 2 and all("temperature" in f and "kept kept_rows" in f for f in names)


def test_equal_ones_give_the_numbers_bits_and_shift_moves_them() -> None:
    x, w, _, t = problem(SHAPE, VOCAB, HIDDEN)
    number = linear_logprob(x, w, t, temperature=0.7)
    for given in (jnp.float32(0.7), np.full(240, 0.7), jnp.full((3, 1), 0.7)):
        assert jnp.array_equal(linear_logprob(x, w, t, temperature=given), number)
    given = temperatures(SHAPE)
    ours = linear_logprob(x, w, t, temperature=given, shift=2)
    theirs = linear_logprob(x[:, :-2], w, t[:, 2:], temperature=given[:, 2:])
    assert jnp.array_equal(ours[:, :-2], theirs) and not ours[:, -2:].any()


def test_transforms() -> None:
    """vmap is one call of all tokens; the steps of a loop have temperatures of their
    own."""
    x, w, _, t = problem(SHAPE, VOCAB, HIDDEN)
    given, up = temperatures(SHAPE), upstream(SHAPE)
    _, grads = exact(x, w, t, given, up)

    def one(x: Any, w: Any, t: Any, c: Any, up: Any) -> Any:
        return (linear_logprob(x, w, t, temperature=c) * up).sum()

    def mapped(x: Any, w: Any) -> Any:
        return jax.vmap(one, (0, None, 0, 0, 0))(x, w, t, given, up).sum()

    def looped(x: Any, w: Any) -> Any:
        def step(total: Any, given: Any) -> Any:
            x, t, c, up = given
            return total + one(x, w, t, c, up), None

        return jax.lax.scan(step, jnp.float32(0), (x, t, given, up))[0]

    for function in (mapped, looped):
        for a, e in zip(jax.jit(jax.grad(function, (0, 1)))(x, w), grads):
            same(a, e)
    text = jax.jit(jax.grad(mapped, (0, 1))).lower(x, w).as_text()
    assert len(fields(jax.grad(mapped, (0, 1)), x, w)) == 2 and "while" not in text
    z = jnp.asarray(np.random.default_rng(2).standard_normal((3, 5, 9)).astype(np.float32))
    labels, degrees = jnp.zeros((3, 5), jnp.int32), temperatures((3, 5))
    ours = jax.vmap(lambda z, t, c: cross_entropy(z, t, temperature=c))(z, labels, degrees)
    for i in range(3):
        theirs = reference.loss(
            to_torch(z[i]).double(), to_torch(labels[i]).long(), temperature=to_torch(degrees[i])
        )
        same(ours[i], theirs)


def test_a_program_is_exported_with_its_temperature() -> None:
    x, w, _, t = problem(SHAPE, VOCAB, HIDDEN)
    disabled = [jax.export.DisabledSafetyCheck.custom_call("logitless_xla_run")]
    step = jax.jit(lambda x, w, c: linear_logprob(x, w, t, temperature=c))
    given = temperatures(SHAPE)
    exported = jax.export.export(step, platforms=["cpu"], disabled_checks=disabled)(x, w, given)
    assert "temperature" in exported.mlir_module()
    if jax.default_backend() == "cpu":
        assert jnp.array_equal(exported.call(x, w, given), step(x, w, given))


@pytest.mark.parametrize("kind", ["linear", "fused", "logits"])
def test_statistics_are_those_of_f64(kind: str) -> None:
    x, w, _, t = problem((3, 11), 53, 24)
    given = leaves(x, w)
    logits = reference.logits_of(*given)
    names = CONSTANT if kind == "fused" else (*DIFFERENTIABLE, *CONSTANT)

    def run(x: Any, w: Any) -> Any:
        if kind == "logits":
            z = to_jax(logits.float())
            return cross_entropy(z, t, return_statistics=names, temperature=0.7)
        return linear_cross_entropy(x, w, t, return_statistics=names, temperature=0.7)

    if kind == "fused":
        (_, s), _ = jax.value_and_grad(run, (0, 1), has_aux=True)(x, w)
    else:
        _, s = run(x, w)
    expected = reference.statistics(logits.float(), to_torch(t), {"temperature": 0.7})
    for name in names:
        assert getattr(s, name).dtype == ("int32" if name in ("argmax", "rank") else "float32")
        same(getattr(s, name), expected[name])
    assert jnp.array_equal(linear_logprob(x, w, t, temperature=0.7), linear_cross_entropy(
        x, w, t, return_statistics=("logprob", "entropy"), temperature=0.7)[1].logprob)  # fmt: skip


@pytest.mark.parametrize("detached", [False, True])
def test_a_detached_entropy(detached: bool) -> None:
    x, w, _, t = problem(SHAPE, VOCAB, HIDDEN)

    def total(x: Any, w: Any) -> Any:
        logprob, entropy = linear_logprob(x, w, t, entropy="detached" if detached else True)
        return (logprob + entropy).sum()

    step = jax.grad(total, (0, 1))
    assert [("grad_entropy" in names.split()) for names in fields(step, x, w)] == [
        False,
        not detached,
    ]
    if detached:
        alone = jax.jit(jax.grad(lambda x, w: linear_logprob(x, w, t).sum(), (0, 1)))(x, w)
        assert all(map(jnp.array_equal, jax.jit(step)(x, w), alone))


def test_the_gradient_of_target_logit_alone_needs_no_kept_state() -> None:
    x, w, _, t = problem(SHAPE, VOCAB, HIDDEN)

    def total(x: Any, w: Any) -> Any:
        return linear_cross_entropy(
            x, w, t, reduction="none", return_statistics="target_logit"
        )[1].target_logit.sum()  # fmt: skip

    names = fields(jax.grad(total, (0, 1)), x, w)
    assert "kept" not in names[-1].split()
    given = leaves(x, w)
    s = reference.statistics(reference.logits_of(*given), to_torch(t), {})
    theirs = torch.autograd.grad(s["target_logit"].sum(), given)
    for a, e in zip(jax.jit(jax.grad(total, (0, 1)))(x, w), theirs):
        same(a, e)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "jitted"), [(F32, False), (F32, True), (BF16, True)])
def test_tokens_without_a_gradient(dtype: Any, jitted: bool) -> None:
    """A NaN row of a token without an upstream gradient changes nothing, also if a second backward
    of the same Forward has another mask."""
    x, w, _, t = problem(SHAPE, VOCAB, HIDDEN, dtype)
    chance = np.random.default_rng(3)
    mask = jnp.asarray(chance.random(SHAPE) < 0.6)  # these tokens have no upstream gradient
    bad = jnp.where(mask[..., None], jnp.nan, x)
    given, up = temperatures(SHAPE), upstream(SHAPE)
    ups = [jnp.where(m, 0.0, up) for m in (mask, mask | (up > 0), mask)]

    def run(x: Any, w: Any) -> Any:
        _, pull = jax.vjp(lambda x, w: linear_logprob(x, w, t, temperature=given), x, w)
        return [pull(up) for up in ups]

    step = jax.jit(run) if jitted else run
    ours, theirs = step(bad, w), step(x, w)
    for (dx, dw), (ex, ew), up in zip(ours, theirs, ups):
        assert jnp.array_equal(dx, ex) and jnp.array_equal(dw, ew)
        assert not dx[mask].any()
        _, grads = exact(x, w, t, given, up)
        same(dx, grads[0], dtype)
        same(dw, grads[1], dtype)

    # the ratio is e where the mask is set
    old = linear_logprob(x, w, t) - jnp.where(mask, 1.0, 0.0)

    def clipped(x: Any, w: Any) -> Any:
        ratio = jnp.exp(linear_logprob(x, w, t) - old)
        return jnp.minimum(ratio, jnp.clip(ratio, 0.8, 1.2)).sum()

    dx, _ = jax.grad(clipped, (0, 1))(x, w)
    assert not dx[mask].any() and dx[~mask & (t != -100)].any(-1).all()

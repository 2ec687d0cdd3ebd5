# SPDX-License-Identifier: Apache-2.0
"""logitless.jax: values and gradients against f64, jit, vmap, donation, memory, sharding."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import numpy as np
import torch

import logitless.numpy as ln
import reference
from jax_support import (  # noqa: F401
    DTYPES,
    fields,
    kinds,
    leaves,
    memory,
    platform,
    problem,
    same,
    to_torch,
)
from logitless.jax import (
    cross_entropy,
    linear_cross_entropy,
    linear_logprob,
    softmax,
)
from test_linear import OPTIONS

F32, F16, BF16 = DTYPES
STATISTICS = ("lse", "target_logit", "logprob", "entropy", "argmax")
FORWARD, BACKWARD, BOTH = 4, 5, 6  # kinds of linear ops


def check(x: Any, w: Any, b: Any, t: Any, dtype: Any = F32, **options: Any) -> None:
    """Loss and gradients under jit, against the reference."""
    given = leaves(x, w, b)
    constants = {k: to_torch(v) if isinstance(v, jax.Array) else v for k, v in options.items()}
    expected = reference.loss(reference.logits_of(*given), to_torch(t), **constants)
    upstream = np.random.default_rng(0).standard_normal(expected.shape).astype(np.float32)

    def step(*v: Any) -> Any:
        def loss(x: Any, w: Any, b: Any) -> Any:
            return linear_cross_entropy(x, w, t, linear_bias=b, **options)

        value, pull = jax.vjp(loss, *v)
        return value, pull(jnp.asarray(upstream))

    actual, grads = jax.jit(step)(x, w, b)
    assert actual.dtype == F32
    same(actual, expected)
    wanted = [v for v in given if v is not None]
    theirs = torch.autograd.grad(expected, wanted, torch.from_numpy(upstream).double())
    for ours, grad in zip([g for g in grads if g is not None], theirs):
        assert ours.dtype == dtype
        same(ours, grad, dtype)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_are_those_of_f64(name: str, reduction: str) -> None:
    options = dict(OPTIONS[name], reduction=reduction)
    if reduction != "mean":
        options.pop("normalizer", None)
    x, w, b, t = problem((3, 11), 53, 24, bias=True)
    check(x, w, b, jnp.where(t == -100, options.get("ignore_index", -100), t), **options)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_dtype(reduction: str, dtype: Any) -> None:
    check(*problem((3, 11), 53, 24, dtype, bias=True), dtype, **OPTIONS["all"], reduction=reduction)


def test_weights_and_normalizers() -> None:
    rng = np.random.default_rng(1)
    classes = jnp.asarray(rng.random(53), F32)
    tokens = jnp.asarray(rng.random((3, 11)), F32)
    for reduction in ("mean", "none"):
        check(
            *problem((3, 11), 53, 24), reduction=reduction, weight=classes, token_weight=tokens,
            label_smoothing=0.1,
        )  # fmt: skip
    for normalizer in (5, 2.5, jnp.float32(2.5), jnp.int32(7)):
        check(*problem((9,), 20, 8), normalizer=normalizer)
    x, w, _, t = problem((9,), 20, 8)
    loss, grads = jax.value_and_grad(linear_cross_entropy, (0, 1))(x, w, t, normalizer=0)
    assert loss == 0 and not any(g.any() for g in grads)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (2, 3, 4), (300,)])
def test_shapes_and_edges(shape: tuple[int, ...]) -> None:
    x, w, b, t = problem(shape, 37, 9, bias=True, ignored=0)
    check(x, w, b, t, reduction="none")
    check(x, w, b, t, reduction="sum")
    ignored = jnp.full_like(t, -100)
    assert linear_cross_entropy(x, w, ignored) == 0
    assert jnp.isnan(linear_cross_entropy(x, w, ignored, empty_mean="nan"))


def test_shift() -> None:
    x, w, _, t = problem((3, 7), 19, 8)
    moved = jnp.concatenate([t[:, 2:], jnp.full((3, 2), -100)], 1)
    assert linear_cross_entropy(x, w, t, shift=2) == linear_cross_entropy(x, w, moved)
    assert linear_cross_entropy(x, w, t, shift=True) != linear_cross_entropy(x, w, t)
    with pytest.raises(
        ValueError, match=r"shift is 7 of targets \(3, 7\); .* which leaves a target"
    ):
        linear_cross_entropy(x, w, t, shift=7)


def test_a_weight_moves_with_its_label() -> None:
    x, w, _, t = problem((2, 5), 9, 6)
    weight = jnp.asarray(np.random.default_rng(0).random((2, 5)), jnp.float32)

    def each(x: Any, t: Any, weight: Any, **options: Any) -> Any:
        return linear_cross_entropy(x, w, t, token_weight=weight, reduction="none", **options)

    for given, shift in itertools.product((weight, np.asarray(weight, float)), (1, 3)):
        ours = each(x, t, given, shift=shift)
        expected = each(x[:, :-shift], t[:, shift:], weight[:, shift:])
        assert jnp.array_equal(ours[:, :-shift], expected) and not ours[:, -shift:].any()
    assert linear_cross_entropy(x[:, :1], w, t[:, :1], shift=True) == 0  # no next token


def test_statistics_and_their_gradients() -> None:
    x, w, b, t = problem((3, 11), 53, 24, bias=True)
    o: dict[str, Any] = {"softcap": 5.0, "temperature": 1.3}
    given = leaves(x, w, b)
    logits = reference.logits_of(*given)
    expected = reference.statistics(logits, to_torch(t), o)
    _, actual = linear_cross_entropy(x, w, t, linear_bias=b, return_statistics=STATISTICS, **o)
    for name in STATISTICS:
        same(getattr(actual, name), expected[name])
    factors = {n: torch.randn(3, 11).double() for n in STATISTICS[:4]}
    total = sum((factors[n] * expected[n]).sum() for n in factors)
    total = total + 3 * reference.loss(logits, to_torch(t), **o)

    def ours(x: Any, w: Any, b: Any) -> Any:
        loss, s = linear_cross_entropy(x, w, t, linear_bias=b, return_statistics=STATISTICS, **o)
        return 3 * loss + sum((jnp.asarray(factors[n].numpy(), F32) * getattr(s, n)).sum()
                              for n in factors)  # fmt: skip

    grads = jax.jit(jax.grad(ours, (0, 1, 2)))(x, w, b)
    for actual_grad, grad in zip(grads, torch.autograd.grad(total, given, retain_graph=True)):
        same(actual_grad, grad)
    for one in STATISTICS[:4]:  # each alone, without the loss

        def alone(x: Any, one: str = one) -> Any:
            _, s = linear_cross_entropy(x, w, t, linear_bias=b, return_statistics=one, **o)
            return getattr(s, one).sum()

        (grad,) = torch.autograd.grad(expected[one].sum(), given[:1], retain_graph=True)
        same(jax.jit(jax.grad(alone))(x), grad)


def test_logprob_and_entropy() -> None:
    x, w, _, t = problem((7,), 19, 8)
    given = leaves(x, w)
    s = reference.statistics(reference.logits_of(*given), to_torch(t), {"temperature": 0.5})
    (2 * s["logprob"].sum() + s["entropy"].sum()).backward()

    def both(x: Any, w: Any) -> Any:
        logprob, entropy = linear_logprob(x, w, t, temperature=0.5, entropy=True)
        return 2 * logprob.sum() + entropy.sum(), (logprob, entropy)

    grads, (logprob, entropy) = jax.grad(both, (0, 1), has_aux=True)(x, w)
    same(logprob, s["logprob"])
    same(entropy, s["entropy"])
    for ours, leaf in zip(grads, given):
        same(ours, leaf.grad)  # type: ignore[union-attr, arg-type]
    assert jnp.array_equal(linear_logprob(x, w, t, temperature=0.5), logprob)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_cross_entropy_of_logits(dtype: Any) -> None:
    x, w, _, t = problem((3, 11), 53, 24, dtype)
    z = (x @ w.T).astype(dtype)
    every: list[dict[str, Any]] = [OPTIONS["all"], {"reduction": "none"}, {"reduction": "sum"}]
    for options in every:
        (leaf,) = leaves(z)
        expected = reference.loss(leaf, to_torch(t), **options)  # type: ignore[arg-type]
        loss, grad = jax.value_and_grad(lambda z, o=options: cross_entropy(z, t, **o).sum())(z)
        same(loss, expected.sum())
        (theirs,) = torch.autograd.grad(expected.sum(), [leaf])  # type: ignore[list-item]
        assert grad.dtype == dtype
        same(grad, theirs, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax(axis: int) -> None:
    z = jax.random.normal(jax.random.key(0), (4, 6, 9))
    u = jax.random.normal(jax.random.key(1), z.shape)
    np.testing.assert_allclose(softmax(z, axis), jax.nn.softmax(z, axis), rtol=2e-6)
    np.testing.assert_allclose(
        jax.grad(lambda z: (u * softmax(z, axis)).sum())(z),
        jax.grad(lambda z: (u * jax.nn.softmax(z, axis)).sum())(z), atol=1e-6,
    )  # fmt: skip
    np.testing.assert_allclose(
        jax.vmap(lambda z: softmax(z, -1), 1, 1)(z), jax.nn.softmax(z, -1), rtol=2e-6
    )
    assert kinds(jax.vmap(softmax), z) == [0] and softmax(z[:0], axis).shape == (0, 6, 9)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_same_bits_as_numpy(reduction: str, platform: str) -> None:  # noqa: F811
    if platform != "cpu":
        return
    x, w, b, t = problem((5, 40), 1000, 64, bias=True)
    arrays = [np.asarray(v) for v in (x, w, t)]
    options = {"reduction": reduction, "label_smoothing": 0.1, "softcap": 9.0}
    theirs = ln.linear_cross_entropy(*arrays, linear_bias=np.asarray(b), **options)
    ours = jax.jit(lambda x, w, b: linear_cross_entropy(x, w, t, linear_bias=b, **options))
    assert np.array_equal(ours(x, w, b), theirs)
    if reduction == "none":
        return
    _, theirs = ln.linear_cross_entropy(
        *arrays, linear_bias=np.asarray(b), return_gradients=True, **options
    )
    for mine, their in zip(jax.jit(jax.grad(ours, (0, 1, 2)))(x, w, b), theirs):
        assert np.array_equal(mine, their)


def test_the_calls_a_program_makes() -> None:
    x, w, _, t = problem((9,), 20, 8)

    def step(x: Any, w: Any, **options: Any) -> Any:
        result = linear_cross_entropy(x, w, t, **options)
        loss, s = result if "return_statistics" in options else (result, None)
        return loss.mean() if s is None else loss + s.argmax.sum()

    def kinds_of(**options: Any) -> list[int]:
        return kinds(jax.value_and_grad(lambda *v: step(*v, **options), (0, 1)), x, w)

    assert kinds(step, x, w) == [FORWARD]
    assert kinds_of() == kinds_of(reduction="sum") == [BOTH]
    assert kinds_of(return_statistics="argmax") == [BOTH]
    assert kinds_of(reduction="none") == [FORWARD, BACKWARD]
    assert kinds_of(return_statistics=("lse", "argmax")) == [FORWARD, BACKWARD]
    for frozen, kept in ((1, "grad_input"), (0, "grad_weight")):  # only one is computed
        (names,) = fields(jax.grad(step, 1 - frozen), x, w)
        assert names == f"input weight target loss {kept}"
    text = jax.jit(jax.grad(step, (0, 1))).lower(x, w).compile().as_text()
    assert " multiply(" not in text, "an upstream gradient of 1 costs nothing"


def test_f16_gradients_are_rounded_after_the_upstream_factor() -> None:
    x, w, _, t = problem((64,), 512, 16, F16, ignored=0)

    def scaled(loss: Any) -> Any:
        return loss * 65536.0

    given = leaves(x, w)
    loss = scaled(reference.loss(reference.logits_of(*given), to_torch(t), normalizer=1e6))
    for step in (jax.jit, lambda f: f):
        grads = step(
            jax.grad(lambda x, w: scaled(linear_cross_entropy(x, w, t, normalizer=1e6)), (0, 1))
        )(x, w)
        for ours, theirs in zip(
            grads,
            torch.autograd.grad(loss, given, retain_graph=True),  # type: ignore[arg-type]
        ):
            assert ours.dtype == F16
            same(ours, theirs, F16)


def test_with_64_bits_enabled() -> None:
    enabled = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with enabled(True):
        x, w, b, t = problem((3, 11), 53, 24, bias=True)
        assert t.dtype == jnp.int64
        check(x, w, b, t, reduction="none")
        check(x, w, b, t, normalizer=np.int64(7))

        def entropy(x: Any) -> Any:
            return linear_cross_entropy(x, w, t, return_statistics="entropy")[1].entropy.sum()

        (leaf, head) = leaves(x, w)
        logits = reference.logits_of(leaf, head)  # type: ignore[arg-type]
        expected = reference.statistics(logits, to_torch(t), {})["entropy"].sum()
        same(jax.grad(entropy)(x), torch.autograd.grad(expected, [leaf])[0])  # type: ignore[list-item]
        means = jax.vmap(lambda x, t: linear_cross_entropy(x, w, t))(x, t)
        assert means.dtype == F32
        for i in range(3):
            np.testing.assert_allclose(
                means[i], linear_cross_entropy(x[i], w, t[i]), rtol=1e-6, atol=1e-6
            )
        with pytest.raises(TypeError, match="input is float64; allowed: float32"):
            linear_cross_entropy(x.astype(jnp.float64), w, t)

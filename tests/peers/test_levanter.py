# SPDX-License-Identifier: Apache-2.0
"""Our losses equal Levanter's, on haliax's NamedArrays. Only the file of Levanter's losses is read,
because its package imports a trainer, Ray and wandb."""

from __future__ import annotations

import importlib.util
import inspect
import os
import pathlib
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import pytest

hax = pytest.importorskip("haliax")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import fresh  # noqa: E402
from logitless.integrations import levanter as ours  # noqa: E402

B, T, D, V = (hax.Axis(*a) for a in (("batch", 3), ("position", 8), ("embed", 12), ("vocab", 37)))
LOSS = "fused_cross_entropy_loss_and_logsumexp_penalty"
REDUCTIONS = {
    "mean": {"reduction": hax.mean},
    "sum": {"reduction": hax.sum},
    "none": {"reduction": None},
    "mean of rows": {"reduction": hax.mean, "reduction_axis": "position"},
}


def levanter() -> Any:
    spec = importlib.util.find_spec("levanter")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("levanter is not installed")
    file = pathlib.Path(spec.submodule_search_locations[0], "models/loss.py")
    loading = importlib.util.spec_from_file_location("levanter_models_loss", file)
    assert loading is not None and loading.loader is not None
    module = importlib.util.module_from_spec(loading)
    loading.loader.exec_module(module)
    return module


theirs = levanter()


def problem(head: Any = (D, V), dtype: Any = jnp.float32) -> tuple[Any, Any, Any]:
    """Hidden states, the head and token numbers."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = hax.random.normal(keys[0], (B, T, D), dtype=dtype)
    w = hax.random.normal(keys[1], head, dtype=dtype)
    return x, w, hax.random.randint(keys[2], (B, T), 0, V.size)


def mask() -> Any:
    kept = np.arange(B.size * T.size).reshape(B.size, T.size) % 3 != 1
    return hax.named(jnp.asarray(kept), (B, T))


def made(loss: Callable[[Any, Any], Any], x: Any, w: Any) -> list[np.ndarray]:
    """The losses, and gradients of a sum of them in which each has another weight."""

    def total(x: Any, w: Any) -> tuple[Any, Any]:
        value = loss(x, w).array
        return (value * (1 + jnp.arange(value.size).reshape(value.shape))).sum(), value

    step = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, value), (grad_x, grad_w) = step(x, w)
    assert grad_x.axes == x.axes and grad_w.axes == w.axes
    return [np.asarray(a, np.float32) for a in (value, grad_x.array, grad_w.array)]


def same(ours: Any, theirs: Any, x: Any, w: Any, tolerance: float = 2e-5) -> None:
    found, expected = made(ours, x, w), made(theirs, x, w)
    for a, e in zip(found, expected, strict=True):
        assert a.shape == e.shape and np.abs(e).max() > 1e-3
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance * np.abs(e).max())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_the_loss_is_theirs(reduction: str, masked: bool, z_loss: float) -> None:
    x, w, target = problem()
    options: dict[str, Any] = {
        **REDUCTIONS[reduction], "where": mask() if masked else None,
        "logsumexp_weight": z_loss, "block_size": 10,
    }  # fmt: skip
    same(
        lambda x, w: getattr(ours, LOSS)(x, w, D, V, target, **options),
        lambda x, w: getattr(theirs, LOSS)(x, w, D, V, target, **options),
        x, w,
    )  # fmt: skip


def boolean_mean(a: Any, where: Any, axis: Any) -> Any:
    """hax.mean for an f32 mask of 0 and 1, as Levanter passes it; JAX 0.10 refuses such a mask."""
    return hax.mean(a, where=where != 0, axis=axis)


@pytest.mark.parametrize(
    ("block_size", "softcap"),
    [(None, None), (None, 3.0), (10, None)],  # not (10, 3.0): theirs lacks the softcap's derivative
)
@pytest.mark.parametrize("head", [(D, V), (V, D)], ids=["head", "tied"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_next_tokens_loss_is_theirs(
    block_size: int | None, softcap: float | None, head: Any, masked: bool
) -> None:
    x, w, ids = problem(head)
    options: dict[str, Any] = {
        "loss_mask": mask() if masked else None, "logsumexp_weight": 1e-3,
        "block_size": block_size, "logit_soft_cap": softcap,
    }  # fmt: skip
    same(
        lambda x, w: ours.maybe_fused_next_token_loss(T, D, V, x, w, ids, **options),
        lambda x, w: theirs.maybe_fused_next_token_loss(
            T, D, V, x, w, ids, reduction=boolean_mean, **options
        ),
        x, w,
    )  # fmt: skip


def test_16_bits_are_theirs_up_to_their_rounding() -> None:
    x, w, ids = problem(dtype=jnp.bfloat16)
    x, w = x * 0.3, w * 0.3
    same(
        lambda x, w: ours.maybe_fused_next_token_loss(T, D, V, x, w, ids),
        lambda x, w: theirs.maybe_fused_next_token_loss(
            T, D, V, x, w, ids, block_size=10, reduction=boolean_mean
        ),
        x, w, 2e-2,
    )  # fmt: skip


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_are_those_of_the_repository(reduction: str) -> None:
    """`weight` is in Levanter's repository, but in no release: means divide by the weights' sum."""
    x, w, target = problem()
    weight = hax.named(jnp.arange(24.0).reshape(3, 8) % 5, (B, T))

    def formula(x: Any, w: Any) -> Any:
        options: dict[str, Any] = {"reduction": None, "block_size": 10}
        losses = getattr(theirs, LOSS)(x, w, D, V, target, **options) * weight
        how = REDUCTIONS[reduction]
        axis = how.get("reduction_axis")
        if reduction == "none":
            return losses
        total = hax.sum(losses, axis=axis)
        return total if reduction == "sum" else total / hax.sum(weight, axis=axis)

    def call(x: Any, w: Any) -> Any:
        made = getattr(ours, LOSS)
        return made(x, w, D, V, target, weight=weight, **REDUCTIONS[reduction])

    same(call, formula, x, w)


@pytest.mark.parametrize("reduction", ["mean", "mean of rows"])
def test_a_mean_over_no_token_is_0(reduction: str) -> None:
    x, w, target = problem()
    weight = hax.zeros((B, T))
    for a in made(
        lambda x, w: getattr(ours, LOSS)(
            x, w, D, V, target, weight=weight, **REDUCTIONS[reduction]
        ),
        x, w,
    ):  # fmt: skip
        assert not a.any()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_reduced_loss_is_one_call_without_logits(reduction: str) -> None:
    x, w, ids = problem()

    def total(x: Any, w: Any) -> Any:
        how = REDUCTIONS[reduction]
        return ours.maybe_fused_next_token_loss(T, D, V, x, w, ids, **how).array

    text = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(x, w).compile().as_text()
    assert text is not None and text.count("logitless_xla_run") == 1
    assert "[3,8,37]" not in text and "[24,37]" not in text


@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGHEST])
def test_the_highest_precision_is_jax_s(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = ours.linear_cross_entropy, []

    def call(*args: Any, **options: Any) -> Any:
        seen.append(jax.config.jax_default_matmul_precision)
        return real(*args, **options)

    monkeypatch.setattr(ours, "linear_cross_entropy", call)
    x, w, target = problem()
    for given in (None, precision):
        getattr(ours, LOSS)(x, w, D, V, target, precision=given)
    assert seen == [None, "highest"]


def test_torch_is_not_needed() -> None:
    fresh.run("import sys; sys.modules['torch'] = None; import logitless.integrations.levanter")


def test_signatures() -> None:
    """Ours have Levanter's arguments in the same order. But loss_mask has its name in Levanter's
    repository, loss_weight (both are accepted), and `block_size` may be left out."""
    for name in (LOSS, "maybe_fused_next_token_loss"):
        own, other = (inspect.signature(getattr(m, name)).parameters for m in (ours, theirs))
        assert set(other) <= set(own)
        placed = [n for n, p in other.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        renamed = ["loss_weight" if n == "loss_mask" else n for n in placed]
        assert list(own)[: len(placed)] == renamed
        for n, parameter in other.items():
            if n != "block_size":
                assert own[n].default == parameter.default, n


@pytest.mark.parametrize(
    ("argument", "value"),
    [("dtype", jnp.bfloat16), ("precision", "default"), ("implementation", "xla")],
)
def test_what_has_no_counterpart_is_refused(argument: str, value: Any) -> None:
    x, w, target = problem()
    with pytest.raises(NotImplementedError, match=f"{argument} is "):
        getattr(ours, LOSS)(x, w, D, V, target, **{argument: value})


def test_errors_have_the_names_of_the_arguments() -> None:
    x, w, target = problem()
    with pytest.raises(ValueError, match="logsumexp_weight is -1"):
        getattr(ours, LOSS)(x, w, D, V, target, logsumexp_weight=-1.0)
    with pytest.raises(ValueError, match="logit_soft_cap is -1"):
        getattr(ours, LOSS)(x, w, D, V, target, logit_soft_cap=-1.0)

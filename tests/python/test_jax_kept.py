# SPDX-License-Identifier: Apache-2.0
"""What logitless.jax keeps from Forward to Backward: a residual whose size is a closed formula, and
which Backward may overwrite if it is not needed again."""

from __future__ import annotations

import re
from collections.abc import Callable
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
    memory,
    platform,
    problem,
    same,
    to_torch,
)
from logitless import _abi
from logitless.jax import linear_cross_entropy, linear_divergence, linear_logprob

F32, F16, BF16 = DTYPES


def per_token(x: Any, w: Any, t: Any, **options: Any) -> Any:
    return linear_cross_entropy(x, w, t, reduction="none", **options)


def pulled(x: Any, w: Any, t: Any, *upstreams: Any, **options: Any) -> Any:
    """The gradients of x and w for each upstream gradient, from one Forward."""
    _, pull = jax.vjp(lambda x, w: per_token(x, w, t, **options), x, w)
    return [pull(upstream) for upstream in upstreams]


def exact(x: Any, w: Any, t: Any, *upstreams: Any) -> Any:
    given = leaves(x, w)
    loss = reference.loss(reference.logits_of(*given), to_torch(t), reduction="none")
    return [
        torch.autograd.grad(loss, given, to_torch(u).double(), retain_graph=True) for u in upstreams
    ]


def upstream(shape: Any, seed: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def keeps(function: Any, *arguments: Any) -> list[bool]:
    """For each linear op of the program, whether it has kept state."""
    return ["kept kept_rows" in names for names in fields(function, *arguments)]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("jitted", [False, True])
def test_gradients_of_what_is_kept_are_those_of_f64(dtype: Any, jitted: bool) -> None:
    """Also if two Backwards use one Forward: kept state that is needed again is copied before it is
    overwritten."""
    x, w, _, t = problem((4, 80), 1000, 16, dtype)
    ups = [upstream((4, 80), seed) for seed in (0, 1)]
    run = jax.jit(pulled) if jitted else pulled
    for ours, theirs in zip(run(x, w, t, *ups), exact(x, w, t, *ups)):
        for mine, grad in zip(ours, theirs):
            same(mine, grad, dtype)
    assert keeps(pulled, x, w, t, ups[0]) == [True, True]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_entropys_gradient_and_a_statistic(dtype: Any) -> None:
    x, w, _, t = problem((4, 80), 1000, 16, dtype)
    given = leaves(x, w)
    s = reference.statistics(reference.logits_of(*given), to_torch(t), {})
    ups = [upstream((4, 80), seed) for seed in (0, 1)]

    def total(x: Any, w: Any) -> Any:
        logprob, entropy = linear_logprob(x, w, t, entropy=True)
        return (logprob * ups[0]).sum() + (entropy * ups[1]).sum()

    theirs = (s["logprob"] * to_torch(ups[0])).sum() + (s["entropy"] * to_torch(ups[1])).sum()
    for mine, grad in zip(
        jax.jit(jax.grad(total, (0, 1)))(x, w), torch.autograd.grad(theirs, given)
    ):
        same(mine, grad, dtype)


def test_where_nothing_is_kept() -> None:
    x, w, _, t = problem((4, 80), 1000, 16)
    up = upstream((4, 80), 0)

    def run(x: Any, w: Any, **options: Any) -> list[bool]:
        return keeps(lambda x, w, up: pulled(x, w, t, up, **options), x, w, up)

    assert run(x, w) == [True, True]
    assert run(x, w, memory="64MiB") == [False, False]
    assert run(x.astype(F16), w.astype(F16)) == [False, False]
    assert run(x.astype(BF16), w.astype(BF16), softcap=5.0) == [False, False]
    assert keeps(lambda x, w: per_token(x, w, t), x, w) == [False], "nothing is differentiated"


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_program_copies_nothing_and_takes_what_was_said(dtype: Any) -> None:
    x, w, _, t = problem((2048,), 4000, 64, dtype)
    up = upstream((2048,), 0)

    def step(x: Any, w: Any, up: Any) -> Any:
        return pulled(x, w, t, up)

    assert keeps(step, x, w, up) == [True, True]
    code = _abi.F32 if dtype is F32 else _abi.BF16
    bytes = _abi.whole_kept(2048, 4000, code)
    text = jax.jit(step).lower(x, w, up).compile().as_text()
    workspace = max(int(size) for size in re.findall(r"u8\[(\d+)\]", text))
    on_cpu = {device.platform for device in x.devices()} == {"cpu"}
    assert workspace < (bytes if on_cpu else 44 << 20)
    states = 1 << 20  # bytes for the states of the tokens
    assert memory(step, x, w, up).temp_size_in_bytes < bytes + workspace + states  # without a copy
    (rows, _), _ = _abi.kept_formula(2048, 4000, code, bytes)
    assert rows == 4032 // 64 * 2048  # every column is kept
    lines = [line for line in text.splitlines() if f"[{rows},64]" in line]
    assert lines and not any(" copy(" in line for line in lines)


LOSSES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "loss": lambda x, w, t: per_token(x, w, t).sum(),
    "logprob": lambda x, w, t: linear_logprob(x, w, t).sum(),
    "padding": lambda x, w, t: per_token(x[:, :70], w, t[:, :70]).sum(),
    "divergence": lambda x, w, t: linear_divergence(
        x, w, 2 * x, w, target=t, reduction="none"
    ).sum(),
}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_not_written_is_no_nan(name: str, dtype: Any) -> None:
    """jax_debug_nans raises for NaNs in arrays of floats alone. Kept state has rows that Forward
    does not write."""
    x, w, _, t = problem((4, 80), 1000, 16, dtype)
    t = jnp.where(jnp.arange(80) < 75, t, -100)

    def loss(x: Any, w: Any) -> Any:
        return LOSSES[name](x, w, t)

    expected = jax.grad(loss, (0, 1))(x, w)
    with jax.debug_nans(True):
        _, pull = jax.vjp(loss, x, w)
        kept = [leaf for leaf in jax.tree.leaves(pull) if 8 in leaf.shape or 64 in leaf.shape]
        assert {str(leaf.dtype) for leaf in kept} == {"uint32", f"uint{8 * w.itemsize}"}
        for grads in (pull(jnp.float32(1)), jax.jit(jax.grad(loss, (0, 1)))(x, w)):
            assert all(np.array_equal(ours, of) for ours, of in zip(grads, expected))
    # Kept state that was made under the check can be used without it.
    assert all(np.array_equal(ours, of) for ours, of in zip(pull(jnp.float32(1)), expected))


def test_transforms() -> None:
    """A loop whose steps keep state, vmap over gradients, and jax.checkpoint."""
    x, w, _, t = problem((3, 320), 1000, 16)
    ups = upstream((3, 320), 0)
    given = leaves(x, w)
    loss = reference.loss(reference.logits_of(*given), to_torch(t), reduction="none")
    theirs = torch.autograd.grad((loss * to_torch(ups)).sum(), given)

    def one(x: Any, w: Any, t: Any, up: Any) -> Any:
        return (per_token(x, w, t) * up).sum()

    def looped(x: Any, w: Any) -> Any:
        def step(total: Any, given: Any) -> Any:
            x, t, up = given
            return total + one(x, w, t, up), None

        return jax.lax.scan(step, jnp.float32(0), (x, t, ups))[0]

    def checkpointed(x: Any, w: Any) -> Any:
        return sum(jax.checkpoint(one)(x[i], w, t[i], ups[i]) for i in range(3))

    for function in (looped, checkpointed):
        for mine, grad in zip(jax.jit(jax.grad(function, (0, 1)))(x, w), theirs):
            same(mine, grad)
    each = jax.jit(jax.vmap(jax.grad(one, 1), (0, None, 0, 0)))(x, w, t, ups)  # [3, V, D]
    same(each.sum(0), theirs[1])


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_program_is_exported_for_each_platform(name: str) -> None:
    """The size of kept state does not depend on the device."""
    x, w, _, t = problem((4, 80), 1000, 16)
    step = jax.jit(lambda x, w, up: pulled(x, w, t, up))
    disabled = [jax.export.DisabledSafetyCheck.custom_call("logitless_xla_run")]
    if name == "cuda" and "gpu" not in [d.platform for d in jax.devices()]:
        pytest.skip("the library plans for CUDA where it is built with it")
    exported = jax.export.export(step, platforms=[name], disabled_checks=disabled)(
        x, w, upstream((4, 80), 0)
    )
    assert "kept kept_rows" in exported.mlir_module()


def test_nothing_is_kept_that_the_gpu_would_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a softcap and label smoothing CUDA's Backward makes the logits a second time."""
    if not _abi.keeps(_abi.CUDA, _abi.F32, _abi.Options()):
        pytest.skip("this library has no CUDA backend")
    x, w, _, t = problem((4, 80), 1000, 16)

    def residuals(**options: Any) -> int:
        _, pull = jax.vjp(lambda x, w: per_token(x, w, t, **options), x, w)
        return sum(leaf.size for leaf in jax.tree.leaves(pull))

    cases: list[dict[str, Any]] = [{}, {"softcap": 5.0}, {"softcap": 5.0, "label_smoothing": 0.1}]
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert min(residuals(**case) for case in cases) > 320 * 1000
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [residuals(**case) > 320 * 1000 for case in cases] == [True, True, False]

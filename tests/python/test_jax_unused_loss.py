# SPDX-License-Identifier: Apache-2.0
"""A loss of logitless.jax that is not differentiated, in a call with a statistic that is: whatever
the loss is divided by, it adds nothing to the gradients."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import numpy as np

import reference
from jax_support import leaves, platform, problem, same, to_torch  # noqa: F401
from logitless.jax import cross_entropy, linear_cross_entropy
from test_jax_devices import mesh_of

P = jax.sharding.PartitionSpec
SHAPE, VOCAB, HIDDEN = (4, 6), 24, 8
# Each option makes the mean NaN, and every gradient through the mean.
DIVIDED_BY_0: dict[str, dict[str, Any]] = {
    "classes": {"weight": jnp.zeros(VOCAB)},
    "a number": {"normalizer": 0},
    "an array": {"normalizer": jnp.zeros(())},
}


def plain(x: Any, w: Any, t: Any, **options: Any) -> Any:
    return linear_cross_entropy(x, w, t, return_statistics=("entropy", "logprob"), **options)


def total(made: Any) -> Any:
    """A sum over statistics of the pair (loss, Statistics); the loss is not used."""
    return (made[1].entropy + 2 * made[1].logprob).sum()


def in_scan(x: Any, w: Any, t: Any, **options: Any) -> Any:
    made = jax.lax.scan(lambda c, g: (c, plain(g[0], w, g[1], **options)), 0, (x, t))[1]
    return total(made)


def in_vmap(x: Any, w: Any, t: Any, **options: Any) -> Any:
    return total(jax.vmap(lambda x, t: plain(x, w, t, **options))(x, t))


def in_shard_map(x: Any, w: Any, t: Any, **options: Any) -> Any:
    """The statistics with the vocabulary split by jax.shard_map."""
    if len(jax.devices("cpu")) < 2:
        pytest.skip("needs 2 devices of the host")
    step = jax.shard_map(
        lambda x, w: plain(x, w, t, axis_name="tp", **options),
        mesh=mesh_of(tp=2), in_specs=(P(), P("tp")), out_specs=P(),
    )  # fmt: skip
    return total(step(x, w))


WAYS: dict[str, Any] = {
    "plain": lambda *given, **options: total(plain(*given, **options)),
    "jit": lambda *given, **options: total(jax.jit(lambda *g: plain(*g, **options))(*given)),
    "checkpoint": lambda x, w, t, **options: total(
        jax.checkpoint(lambda x, w: plain(x, w, t, **options))(x, w)
    ),
    "scan": in_scan,
    "vmap": in_vmap,
    "shard_map": in_shard_map,
    "logits": lambda x, w, t, **options: total(
        cross_entropy(
            jnp.matmul(x, w.T, precision="highest"),
            t,
            return_statistics=("entropy", "logprob"),
            **options,
        )
    ),
}


def expected(x: Any, w: Any, t: Any) -> Any:
    given = leaves(x, w)
    s = reference.statistics(reference.logits_of(*given), to_torch(t), {})  # type: ignore[arg-type]
    (s["entropy"] + 2 * s["logprob"]).sum().backward()  # type: ignore[no-untyped-call]
    return [leaf.grad for leaf in given if leaf is not None]


@pytest.mark.parametrize("name", DIVIDED_BY_0)
@pytest.mark.parametrize("way", WAYS)
def test_the_statistics_have_their_own_gradient(way: str, name: str) -> None:
    x, w, _, t = problem(SHAPE, VOCAB, HIDDEN)
    options = {"empty_mean": "nan", **DIVIDED_BY_0[name]}
    assert np.isnan(plain(x, w, t, **options)[0])
    ours = jax.grad(lambda x, w: WAYS[way](x, w, t, **options), (0, 1))(x, w)
    for mine, theirs in zip(ours, expected(x, w, t)):
        same(mine, theirs)


@pytest.mark.parametrize("layout", ["tokens", "vocabulary"])
def test_of_arrays_that_are_split(layout: str) -> None:
    from test_jax_jit import LAYOUTS

    if len(jax.devices("cpu")) < 4:
        pytest.skip("needs 4 devices of the host")
    x, w, b, t = problem(SHAPE, VOCAB, HIDDEN, bias=True)
    x, w, b, t = LAYOUTS[layout].put_all(x, w, b, t)
    step = jax.jit(
        jax.grad(lambda x, w: total(plain(x, w, t, empty_mean="nan", normalizer=0)), (0, 1))
    )
    for mine, theirs in zip(step(x, w), expected(x, w, t)):
        same(mine, theirs)


def test_a_loss_made_with_its_gradients_adds_nothing_either() -> None:
    """A statistic without a gradient is computed with the loss and its gradients in one call."""
    x, w, _, t = problem(SHAPE, VOCAB, HIDDEN)

    def step(x: Any, w: Any) -> Any:
        return linear_cross_entropy(
            x, w, t, empty_mean="nan", normalizer=0, return_statistics="sum_p_squared"
        )[1].sum_p_squared.sum()

    for gradient in jax.grad(step, (0, 1))(x, w):
        assert not np.asarray(gradient).any()

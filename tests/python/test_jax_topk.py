# SPDX-License-Identifier: Apache-2.0
"""linear_topk of logitless.jax: on one device against f64, and on 8 devices of the host."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import numpy as np

import logitless.numpy as of_numpy
from jax_support import DTYPES, platform, problem  # noqa: F401
from logitless.jax import linear_cross_entropy, linear_logprobs_at, linear_topk
from test_jax_devices import mesh_of
from test_jax_logprobs_at import LAYOUTS, hosts, needs_partitioner, placed  # noqa: F401

P = jax.sharding.PartitionSpec
ROWS = ("lse", "entropy", "argmax", "sum_p_squared", "mean_logit", "max_logprob")


def near(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(
        np.asarray(ours, np.float32), np.asarray(theirs, np.float32), atol=2e-5, rtol=2e-5
    )


def same_list(ours: Any, theirs: Any) -> None:
    near(ours[0], theirs[0])
    assert np.array_equal(ours[1], theirs[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 3, 37])
@pytest.mark.parametrize("jitted", [False, True])
def test_the_largest_in_order(platform: str, dtype: Any, k: int, jitted: bool) -> None:  # noqa: F811
    x, w, b, _ = problem((3, 11), 37, 16, dtype, bias=True)
    options = {"temperature": 0.7, "softcap": 5.0, "logit_scale": 0.9}
    call = functools.partial(linear_topk, k=k, **options)
    logprobs, ids = (jax.jit(call) if jitted else call)(x, w, linear_bias=b)
    assert logprobs.shape == ids.shape == (3, 11, k)
    assert logprobs.dtype == jnp.float32 and ids.dtype == jnp.int32
    assert (np.diff(logprobs) <= 0).all()
    assert all(len(set(row)) == k for row in np.asarray(ids).reshape(-1, k).tolist())
    near(logprobs, linear_logprobs_at(x, w, ids, linear_bias=b, **options))
    z = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T + np.asarray(b, np.float64)
    z = 5 * np.tanh(z * 0.9 / 5) / 0.7
    logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
    near(logprobs, -np.sort(-logp)[..., :k])


def test_it_has_the_bits_of_numpy(platform: str) -> None:  # noqa: F811
    if platform != "cpu":
        pytest.skip("NumPy runs on the CPU")
    x, w, b, _ = problem((2, 9), 61, 16, jnp.float32, bias=True)
    ours = linear_topk(x, w, 8, linear_bias=b)
    theirs = of_numpy.linear_topk(np.asarray(x), np.asarray(w), 8, linear_bias=np.asarray(b))
    assert np.array_equal(ours[0], theirs[0]) and np.array_equal(ours[1], theirs[1])


def test_statistics_and_temperatures(platform: str) -> None:  # noqa: F811
    x, w, _, _ = problem((2, 5), 19, 16, jnp.float32)
    temperature = np.linspace(0.5, 2, 10, dtype=np.float32).reshape(2, 5)
    logprobs, ids, made = linear_topk(x, w, 4, temperature=temperature, return_statistics=ROWS)
    _, wanted = linear_cross_entropy(
        x, w, jnp.zeros((2, 5), jnp.int32), temperature=temperature, return_statistics=ROWS
    )
    for name in ROWS:
        near(getattr(made, name), getattr(wanted, name))
    assert np.array_equal(ids[..., 0], made.argmax) and made.rank is None
    same_list(linear_topk(x, w, 4, temperature=temperature), (logprobs, ids))
    near(logprobs[..., 0], made.max_logprob)


def test_equal_masked_and_nan_classes() -> None:
    x, w = np.ones((4, 6), np.float32), np.ones((9, 6), np.float32)
    assert np.array_equal(linear_topk(x, w, 9)[1], np.broadcast_to(np.arange(9), (4, 9)))
    mask = np.full(9, -np.inf, np.float32)
    mask[[3, 7]] = 0
    logprobs, ids = linear_topk(x, w, 4, linear_bias=mask)
    assert np.array_equal(ids[0], [3, 7, 0, 1]) and np.isneginf(logprobs[:, 2:]).all()
    x[2, 1] = np.nan
    logprobs, ids = linear_topk(x, w, 4)
    assert np.array_equal(np.isnan(logprobs).any(-1), [False, False, True, False])
    assert np.isnan(logprobs[2]).all() and (ids >= 0).all() and (ids < 9).all()


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (2, 3, 4)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    x, w, _, _ = problem(shape, 9, 16, jnp.float32)
    logprobs, ids, made = linear_topk(x, w, 4, return_statistics="lse")
    assert logprobs.shape == ids.shape == (*shape, 4) and made.lse.shape == shape


def test_vmap_scan_and_checkpoint() -> None:
    x, w, _, _ = problem((3, 7), 9, 16, jnp.float32)
    whole = linear_topk(x, w, 4)
    same_list(jax.vmap(lambda x: linear_topk(x, w, 4))(x), whole)
    same_list(jax.lax.map(jax.checkpoint(lambda x: linear_topk(x, w, 4)), x), whole)
    across = jax.vmap(lambda w: linear_topk(x[0], w, 2))(jnp.stack([w, w[::-1]]))
    same_list((across[0][0], across[1][0]), linear_topk(x[0], w, 2))


def test_gradients_go_past_it() -> None:
    x, w, b, t = problem((5,), 9, 16, jnp.float32, bias=True)

    def both(x: Any, w: Any, b: Any, temperature: Any) -> Any:
        logprobs, _, made = linear_topk(
            x, w, 2, linear_bias=b, temperature=temperature, return_statistics="entropy"
        )
        return linear_cross_entropy(x, w, t) + logprobs.sum() + made.entropy.sum()

    ours = jax.jit(jax.grad(both, argnums=(0, 1, 2, 3)))(x, w, b, jnp.ones(5))
    alone = jax.grad(lambda x, w: linear_cross_entropy(x, w, t), argnums=(0, 1))(x, w)
    assert all(map(np.array_equal, ours, alone))
    assert not np.any(ours[2]) and not np.any(ours[3])


@pytest.mark.parametrize("jitted", [False, True])
def test_a_list_of_rows_as_the_vocabulary(jitted: bool) -> None:
    x, w, b, _ = problem((2, 5), 37, 16, jnp.float32, bias=True)
    ids = np.array([31, 2, 17, 5, 8], np.int32)
    call = functools.partial(linear_topk, k=3, return_statistics="argmax")
    made = (jax.jit(call) if jitted else call)(x, w, linear_bias=b, vocab_ids=ids)
    order = np.sort(ids)
    alone = linear_topk(x, w[order], 3, linear_bias=b[order])
    assert np.array_equal(made[0], alone[0]) and np.array_equal(made[1], order[alone[1]])
    assert np.array_equal(made[2].argmax, made[1][..., 0])
    with pytest.raises(ValueError, match=r"^k is 6; allowed: 1 to 5, the least of V and 256$"):
        linear_topk(x, w, 6, vocab_ids=ids)


@pytest.mark.parametrize("k", [0, -1, 10, 257, True])
def test_no_such_k(k: Any) -> None:
    x, w, _, _ = problem((2, 5), 9, 16, jnp.float32)
    with pytest.raises(ValueError, match=rf"^k is {k}; allowed: 1 to 9, the least of V and 256$"):
        linear_topk(x, w, k)


def test_bad_arguments() -> None:
    x, w, _, _ = problem((2, 5), 300, 16, jnp.float32)
    with pytest.raises(TypeError, match=r"^k is a float; allowed: a Python int$"):
        linear_topk(x, w, 2.5)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"^return_statistics is 'rank'; allowed: 'lse', "):
        linear_topk(x, w, 2, return_statistics="rank")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"^temperature is a str; allowed: a Python number$"):
        linear_topk(x, w, 2, temperature="2")
    with pytest.raises(ValueError, match=r"^linear_weight has shape \(300,\)"):
        linear_topk(x, w[:, 0], 2)
    assert linear_topk(x, w, 256)[1].shape == (2, 5, 256)


# --- several devices ---


@pytest.mark.parametrize("k", [1, 5, 48])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_a_vocabulary_split_over_an_axis(hosts: None, k: int, size: int, checked: bool) -> None:  # noqa: F811
    x, w, b, _ = problem((13,), 48, 16, jnp.float32, bias=True)

    def call(x: Any, w: Any, b: Any) -> Any:
        return linear_topk(
            x, w, k, linear_bias=b, axis_name="tp", return_statistics=("lse", "argmax")
        )

    split = jax.shard_map(
        call, mesh=mesh_of(tp=size), in_specs=(P(), P("tp"), P("tp")), out_specs=P(),
        check_vma=checked,
    )  # fmt: skip
    logprobs, ids, made = jax.jit(split)(x, w, b)
    whole = linear_topk(x, w, k, linear_bias=b, return_statistics=("lse", "argmax"))
    same_list((logprobs, ids), whole[:2])
    near(made.lse, whole[2].lse)
    assert np.array_equal(made.argmax, whole[2].argmax)
    equal = jax.jit(split)(x, jnp.ones_like(w), jnp.zeros_like(b))
    assert np.array_equal(equal[1], np.broadcast_to(np.arange(k), (13, k)))
    # Among classes without probability the lowest ids come first, over all devices.
    mask = jnp.full(48, -jnp.inf).at[jnp.array([1, 47])].set(0)
    masked = jax.jit(split)(x, w, mask)
    assert np.array_equal(masked[1], linear_topk(x, w, k, linear_bias=mask)[1])


@needs_partitioner
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("jitted", [False, True])
def test_sharded_arrays(hosts: None, layout: str, jitted: bool) -> None:  # noqa: F811
    x, w, b, _ = problem((8, 16), 48, 16, jnp.float32, bias=True)

    def call(x: Any, w: Any, b: Any) -> Any:
        return linear_topk(x, w, 13, linear_bias=b, return_statistics="entropy")

    given = placed(layout, x, w, b)
    logprobs, ids, made = (jax.jit(call) if jitted else call)(*given)
    whole = call(x, w, b)
    same_list((logprobs, ids), whole[:2])
    near(made.entropy, whole[2].entropy)


@needs_partitioner
def test_tokens_that_the_devices_do_not_divide(hosts: None) -> None:  # noqa: F811
    x, w, _, _ = problem((13,), 48, 16, jnp.float32)
    mesh = mesh_of(dp=4)
    spread = jax.jit(
        lambda x, w: linear_topk(
            jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, P("dp"))), w, 3
        )
    )
    same_list(spread(x, w), linear_topk(x, w, 3))

# SPDX-License-Identifier: Apache-2.0
"""linear_logprobs_at of logitless.jax: log-probabilities of chosen columns, and their gradients,
against f64 of the whole logits; the bits of linear_logprob; on one device, and on 8 on the CPU."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_support import (
    DTYPES,
    fields,
    host_mesh,
    platform,  # noqa: F401
    problem,
    products,
    same,
    to_jax,
    to_torch,
)
from logitless.jax import _functions, _parallel, _partition, linear_logprob, linear_logprobs_at
from test_jax_devices import mesh_of
from test_linear import F32
from test_logprobs_at import exact, ids_of

P = jax.sharding.PartitionSpec
NAN = math.nan
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.6},
    "softcap": {"softcap": 2.0, "logit_scale": 0.7},
    "memory": {"memory": "8MiB"},
}


def given(
    shape: tuple[int, ...], vocab: int, columns: int, dtype: Any = jnp.float32, **how: Any
) -> tuple[Any, Any, Any, Any, Any]:
    """Input, weight, bias, ids and upstream gradients, NaN where an id is absent."""
    x, w, b, _ = problem(shape, vocab, 16, dtype, bias=True)
    ids = ids_of(shape, vocab, columns, **how)
    g = torch.randn(ids.shape).masked_fill(ids == -1, NAN)
    return x, w, b, to_jax(ids.int()), to_jax(g)


def pulled(call: Any, g: Any, *primals: Any) -> tuple[Any, Any]:
    """The value, and the gradients for the upstream gradient g."""
    made, pull = jax.vjp(call, *primals)
    return made, pull(g)


def compare(
    made: Any,
    grads: Any,
    arrays: tuple[Any, ...],
    options: dict[str, Any],
    dtype: Any = jnp.float32,
) -> None:
    x, w, b, ids, g = (to_torch(a) for a in arrays)
    theirs, leaves = exact(x, w, b, ids, options)
    absent = ids == -1
    made = to_torch(made)
    assert torch.equal(made.isneginf(), absent) and made.dtype is F32 and made.shape == ids.shape
    same(made.masked_fill(absent, 0), theirs[0].detach().masked_fill(absent, 0))
    expected = torch.autograd.grad(theirs[0], leaves, g.masked_fill(absent, 0).double())
    for ours, of, leaf in zip(grads, expected, arrays):
        assert ours.dtype == leaf.dtype
        same(ours, of, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("columns", [1, 2, 7])
@pytest.mark.parametrize("jitted", [False, True])
def test_values_and_gradients_are_those_of_f64(
    dtype: Any, name: str, columns: int, jitted: bool
) -> None:
    arrays = given((3, 11), 37, columns, dtype)
    *primals, ids, g = arrays

    def call(x: Any, w: Any, b: Any) -> Any:
        return linear_logprobs_at(x, w, ids, linear_bias=b, **OPTIONS[name])

    made, grads = pulled(jax.jit(call) if jitted else call, g, *primals)
    compare(made, grads, arrays, OPTIONS[name], dtype)


@pytest.mark.parametrize("columns", [1, 3])
def test_it_has_the_bits_of_linear_logprob(platform: str, columns: int) -> None:  # noqa: F811
    x, w, _, ids, _ = given((5, 7), 211, columns, absent=0)
    g = to_jax(torch.randn(5, 7))
    last = ids[..., -1]
    wanted, theirs = pulled(lambda *a: linear_logprob(*a, last), g, x, w)
    made, ours = pulled(lambda *a: linear_logprobs_at(*a, ids)[..., -1], g, x, w)
    same(made, to_torch(wanted).double())
    if platform == "cpu" or columns == 1:
        assert np.array_equal(made, wanted)
    if columns == 1:
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("columns", [1, 3])
def test_statistics_and_temperatures(columns: int) -> None:
    x, w, _, ids, g = given((3, 11), 37, columns)
    names = ("lse", "entropy", "argmax", "max_logprob")
    temperature = to_jax(0.5 + torch.rand(3, 11))

    def call(x: Any, w: Any) -> Any:
        made, s = linear_logprobs_at(x, w, ids, temperature=temperature, return_statistics=names)
        assert s.rank is s.logprob is None
        return made, s.lse, s.entropy

    outputs, pull = jax.vjp(call, x, w)
    ones = jnp.ones((3, 11))
    grads = pull((g, ones, ones))
    options = {"temperature": to_torch(temperature)}
    theirs, leaves = exact(
        *(to_torch(a) for a in (x, w)), None, to_torch(ids), options, ("lse", "entropy")
    )
    for ours, of in zip(outputs[1:], theirs[1:]):
        same(ours, of.detach())
    one = torch.ones(3, 11).double()
    expected = torch.autograd.grad(theirs, leaves, [to_torch(g).nan_to_num().double(), one, one])
    for ours, of in zip(grads, expected):
        same(ours, of)
    with pytest.raises(ValueError, match=r"^return_statistics is 'rank'; allowed: 'lse', "):
        linear_logprobs_at(x, w, ids, return_statistics="rank")


@pytest.mark.parametrize("columns", [1, 4])
def test_vmap_over_tokens_inside_and_around_grad(columns: int) -> None:
    arrays = given((3, 11), 37, columns)
    x, w, b, ids, g = arrays

    def call(x: Any, w: Any, b: Any) -> Any:
        return jax.vmap(lambda x, i: linear_logprobs_at(x, w, i, linear_bias=b))(x, ids)

    made, grads = pulled(call, g, x, w, b)
    compare(made, grads, arrays, {})

    def of_one(x: Any, i: Any, g: Any) -> Any:
        return pulled(lambda x: linear_logprobs_at(x, w, i, linear_bias=b), g, x)[1][0]

    for ours, theirs in zip(jax.vmap(of_one)(x, ids, g), grads[0]):
        same(ours, to_torch(theirs).double())


@pytest.mark.parametrize("shape", [(), (1,), (2, 0), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("columns", [1, 3, 1024])
def test_any_shape(shape: tuple[int, ...], columns: int) -> None:
    arrays = given(shape, 19, columns, absent=0)
    *primals, ids, g = arrays
    made, grads = pulled(lambda x, w, b: linear_logprobs_at(x, w, ids, linear_bias=b), g, *primals)
    compare(made, grads, arrays, {})


def test_rows_without_ids_are_not_read() -> None:
    for columns in (1, 2, 5):
        x, w, _, ids, g = given((70,), 37, columns, absent=0.5)
        x = jnp.where((ids == -1).all(-1)[:, None], NAN, x)
        made, grads = pulled(lambda x, w, i=ids: linear_logprobs_at(x, w, i), g, x, w)
        assert not any(np.isnan(a).any() for a in (made, *grads))


def test_it_takes_three_products() -> None:
    x, w, b, ids, g = given((3, 64), 640, 5)

    def step(x: Any, w: Any, b: Any) -> Any:
        return pulled(lambda *a: linear_logprobs_at(*a[:2], ids, linear_bias=a[2]), g, x, w, b)[1]

    assert products(fields(step, x, w, b)) == 3
    forward = fields(lambda *a: linear_logprobs_at(*a, ids), x, w)
    assert products(forward) == 1 and not any("kept" in call for call in forward)


def test_it_is_differentiated_once() -> None:
    x, w, _, ids, _ = given((4,), 9, 3)
    with pytest.raises(NotImplementedError, match="differentiated once only"):
        jax.hessian(lambda w: linear_logprobs_at(x, w, ids, linear_bias=None)[0, 0])(w)


def test_checkpoint_and_scan() -> None:
    x, w, b, ids, g = arrays = given((4, 9), 37, 3)

    @jax.checkpoint
    def one(w: Any, b: Any, row: Any) -> Any:
        return linear_logprobs_at(row[0], w, row[1], linear_bias=b)

    def call(x: Any, w: Any, b: Any) -> Any:
        return jax.lax.scan(lambda c, row: (c, one(w, b, row)), 0, (x, ids))[1]

    made, grads = pulled(jax.jit(call), g, x, w, b)
    compare(made, grads, arrays, {})


# --- errors ---


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("wrong", [9, -2, -100, 1 << 20])
def test_wrong_ids(platform: str, columns: int, wrong: int) -> None:  # noqa: F811
    x, w, _, _ = problem((2, 5), 9, 6)
    ids, last = np.zeros((2, 5, columns), np.int64), columns - 1
    ids[1, 3, last] = wrong
    at = rf"^ids\[1, 3, {last}\] \(flat: ids\[8, {last}\]\) is {wrong}; .* or -1 for none$"
    with pytest.raises(ValueError, match=at):
        linear_logprobs_at(x, w, ids)
    if platform == "cpu":
        with pytest.raises(Exception, match=rf"\[8(, 2)?\] is {wrong}; allowed: 0 to 8"):
            jax.jit(linear_logprobs_at)(x, w, jnp.asarray(ids, jnp.int32)).block_until_ready()
    else:
        made = jax.jit(linear_logprobs_at)(x, w, jnp.asarray(ids, jnp.int32))
        assert np.isnan(made).sum() == 1 and np.isnan(made[1, 3, last])


def test_ids_that_32_bits_cannot_hold() -> None:
    x, w, _, _ = problem((2, 5), 9, 6)
    ids = np.zeros((2, 5, 3), np.int64)
    ids[0, 1, 2] = 1 << 32
    with pytest.raises(ValueError, match=r"^ids\[.* is 4294967296; allowed: "):
        linear_logprobs_at(x, w, ids)


@pytest.mark.parametrize(
    "shape", [(2, 5), (2, 5, 0), (2, 5, 1025), (5, 2, 3), (10, 3), (2, 5, 3, 1), ()], ids=str
)
def test_ids_of_another_shape(shape: tuple[int, ...]) -> None:
    x, w, _, _ = problem((2, 5), 9, 6)
    with pytest.raises(ValueError, match=r"^ids has shape .*; allowed: \(2, 5, K\), .* 1 to 1024"):
        linear_logprobs_at(x, w, np.zeros(shape, np.int32))


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.bool_])
def test_ids_of_another_dtype(dtype: Any) -> None:
    x, w, _, _ = problem((2, 5), 9, 6)
    with pytest.raises(TypeError, match=f"^ids is {np.dtype(dtype)}; allowed: int32, int64"):
        linear_logprobs_at(x, w, np.zeros((2, 5, 3), dtype))


# --- several devices ---


@pytest.fixture
def hosts(platform: str) -> None:  # noqa: F811
    if platform != "cpu" or len(jax.devices("cpu")) < 8:
        pytest.skip("needs 8 devices of the host")


@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
def test_a_vocabulary_split_over_an_axis(
    hosts: None, columns: int, size: int, checked: bool, dtype: Any
) -> None:
    arrays = given((13,), 48, columns, dtype)
    *primals, ids, g = arrays

    def call(x: Any, w: Any, b: Any) -> Any:
        return linear_logprobs_at(
            x, w, ids, linear_bias=b, axis_name="tp", upstream=None if checked else "parts"
        )

    whole = jax.shard_map(
        call, mesh=mesh_of(tp=size), in_specs=(P(), P("tp"), P("tp")), out_specs=P(),
        check_vma=checked,
    )  # fmt: skip
    made, grads = pulled(jax.jit(whole), g, *primals)
    compare(made, grads, arrays, {}, dtype)
    assert np.array_equal(made[..., :1] == -np.inf, ids[..., :1] == -1)


LAYOUTS: dict[str, tuple[dict[str, int], Any, Any]] = {
    "tokens": ({"dp": 4}, "dp", None),
    "vocabulary": ({"tp": 4}, None, "tp"),
    "both": ({"dp": 2, "tp": 4}, "dp", "tp"),
    "replicated": ({"dp": 2, "tp": 2}, None, None),
}
needs_partitioner = pytest.mark.skipif(
    not _partition.partitions(), reason="needs a JAX whose partitioner is Shardy"
)


def placed(layout: str, *arrays: Any) -> list[Any]:
    axes, tokens, vocab = LAYOUTS[layout]
    mesh = mesh_of(**axes)
    specs = (P(tokens), P(vocab), P(vocab), P(tokens), P(tokens))
    return [jax.device_put(a, jax.sharding.NamedSharding(mesh, s)) for a, s in zip(arrays, specs)]


@needs_partitioner
@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("jitted", [False, True])
def test_sharded_arrays(hosts: None, columns: int, layout: str, jitted: bool) -> None:
    arrays = given((8, 16), 48, columns)

    def step(x: Any, w: Any, b: Any, ids: Any, g: Any) -> Any:
        return pulled(lambda x, w, b: linear_logprobs_at(x, w, ids, linear_bias=b), g, x, w, b)

    made, grads = (jax.jit(step) if jitted else step)(*placed(layout, *arrays))
    compare(made, grads, arrays, {})


@needs_partitioner
@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("row", [1, 6])
@pytest.mark.parametrize("ignored", [False, True])
def test_a_wrong_id_is_an_error_of_every_device(
    hosts: None, columns: int, row: int, ignored: bool
) -> None:
    """Every device fails, even if no other device has a token that counts."""
    x, w, b, ids, _ = given((8, 4), 48, columns, absent=0)
    ids = np.full(ids.shape, -1, np.int32) if ignored else np.array(ids)
    ids[row, 2, columns - 1] = 48
    x, w, b, ids = placed("tokens", x, w, b, jnp.asarray(ids))
    step = jax.jit(
        jax.value_and_grad(lambda w, i: jnp.where(i < 0, 0, linear_logprobs_at(x, w, i)).sum())
    )
    with pytest.raises(Exception, match="is 48; allowed: 0 to 47"):
        jax.block_until_ready(step(w, ids))


@needs_partitioner
def test_a_mesh_of_explicit_axes(hosts: None) -> None:
    if not hasattr(jax.sharding, "AxisType"):
        pytest.skip("this JAX has no explicit axes")
    arrays = given((8, 4), 48, 3)
    mesh = host_mesh((2, 4), ("dp", "tp"))
    with jax.sharding.set_mesh(mesh):
        specs = (P("dp"), P("tp"), P("tp"), P("dp"), P("dp"))
        x, w, b, ids, g = (
            jax.device_put(a, jax.sharding.NamedSharding(mesh, s)) for a, s in zip(arrays, specs)
        )
        step = jax.jit(
            lambda x, w, b: pulled(
                lambda *a: linear_logprobs_at(*a[:2], ids, linear_bias=a[2]), g, x, w, b
            )
        )
        made, grads = step(x, w, b)
        compare(made, grads, arrays, {})


# --- mutants: bugs that these tests find ---


def _other_sign(there: Any, upstream: Any) -> Any:
    to_logits, to_lse, *rest = _functions._logprobs_at_backward(there, upstream)
    return to_logits, -to_lse, *rest


def _reads_absent(there: Any, upstream: Any) -> Any:
    return _functions._logprobs_at_backward(jnp.ones_like(there), upstream)


def _as_they_are(start: Any, columns: Any, total: int) -> Any:
    inside = (columns >= 0) & (columns < total)
    return (_from(start, columns, total)[0] if columns.ndim == 1 else columns), inside


_from = _parallel._from


@pytest.mark.parametrize("mutant", [_other_sign, _reads_absent], ids=lambda m: m.__name__)
def test_a_known_bug_makes_a_check_fail(mutant: Any) -> None:
    changed = jax.custom_vjp(_functions._logprobs_at.fun)
    changed.defvjp(_functions._logprobs_at_forward, mutant)
    with mock.patch.object(_functions, "_logprobs_at", changed), pytest.raises(AssertionError):
        test_values_and_gradients_are_those_of_f64(jnp.float32, "nothing", 7, False)


def test_ids_that_are_not_a_devices_own_make_a_check_fail(hosts: None) -> None:
    with mock.patch.object(_parallel, "_from", _as_they_are), pytest.raises(AssertionError):
        test_a_vocabulary_split_over_an_axis(None, 4, 4, True, jnp.float32)

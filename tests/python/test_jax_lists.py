# SPDX-License-Identifier: Apache-2.0
"""linear_logprobs_at of logitless.jax over the ids alone, and of lists of any length: values and
gradients against f64 of the whole logits; the bits of PyTorch; on one device, and on 8 CPU
devices."""

from __future__ import annotations

import functools
import itertools
import math
import re
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import numpy as np
import torch

import logitless.torch  # noqa: F401  its ops
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
from logitless.jax import _functions, _lists, _run, linear_logprobs_at
from logitless.torch import linear_logprobs_at as of_torch
from test_jax_devices import mesh_of
from test_jax_logprobs_at import LAYOUTS, hosts, needs_partitioner, placed, pulled  # noqa: F401
from test_lists import OPTIONS, exact, listed
from test_logprobs_at import ids_of

P = jax.sharding.PartitionSpec
INFINITY, NAN = math.inf, math.nan
OVER = pytest.mark.parametrize("over", ["vocab", "ids"])
HOSTS = pytest.mark.usefixtures("hosts")
JITTED = pytest.mark.parametrize("jitted", [False, True])
OF_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)


def lists_of(ids: Any, offsets: Any) -> list[list[int]]:
    ends = np.asarray(offsets).tolist()
    return [np.asarray(ids)[s:e].tolist() for s, e in itertools.pairwise(ends)]


def joined(offsets: Any, places: int) -> Any:
    """The offsets of all elements' lists joined; each element has `places` ids."""
    starts = places * np.arange(len(offsets))[:, None]
    return np.append(offsets[:, :-1] + starts, places * len(offsets))


def given(
    shape: tuple[int, ...], columns: int, dtype: Any = jnp.float32, lists: bool = True, **how: Any
) -> tuple[Any, ...]:
    """Input, weight, bias, ids, offsets, and upstream gradients that are NaN at an absent id."""
    x, w, b, _ = problem(shape, 37, 16, dtype, bias=True)
    ids, offsets = ids_of(shape, 37, columns, **how), None
    if lists:
        ids, offsets = listed(ids)
        offsets = to_jax(offsets.int())
    g = torch.randn(ids.shape).masked_fill(ids == -1, NAN)
    return x, w, b, to_jax(ids.int()), offsets, to_jax(g)


def compare(
    made: Any, grads: Any, arrays: tuple[Any, ...], over: str, options: dict[str, Any],
    dtype: Any = jnp.float32,
) -> None:  # fmt: skip
    *primals, ids, offsets, g = arrays
    lists = ids.reshape(-1, ids.shape[-1]).tolist() if offsets is None else lists_of(ids, offsets)
    x, w, b = map(to_torch, primals)
    theirs, leaves = exact(x, w, b, lists, over, options)
    assert made.shape == ids.shape and made.dtype == jnp.float32
    absent, made = to_torch(ids == -1).flatten(), to_torch(made).flatten()
    assert torch.equal(made.isneginf(), absent) and not bool((made > 0).any())
    same(made.masked_fill(absent, 0), theirs.detach().masked_fill(absent, 0))
    upstream = to_torch(g).flatten().masked_fill(absent, 0).double()
    for ours, of, leaf in zip(grads, torch.autograd.grad(theirs, leaves, upstream), primals):
        assert ours.dtype == leaf.dtype
        same(ours, of, dtype)


@OF_DTYPE
@OVER
@pytest.mark.parametrize("of", OPTIONS)
@JITTED
def test_lists(dtype: Any, over: Any, of: str, jitted: bool) -> None:
    arrays = given((3, 7), 6, dtype)
    *primals, ids, offsets, g = arrays

    def call(x: Any, w: Any, b: Any, ids: Any, offsets: Any) -> Any:
        return linear_logprobs_at(
            x, w, ids, linear_bias=b, over=over, offsets=offsets, **OPTIONS[of]
        )

    wrapped = jax.jit(call) if jitted else call
    made, grads = pulled(lambda *a: wrapped(*a, ids, offsets), g, *primals)
    compare(made, grads, arrays, over, OPTIONS[of], dtype)


@OF_DTYPE
@pytest.mark.parametrize("columns", [1, 2, 31])
@JITTED
def test_among_the_ids(dtype: Any, columns: int, jitted: bool) -> None:
    arrays = given((3, 7), columns, dtype, lists=False)
    *primals, ids, _, g = arrays
    temperature = to_jax(0.5 + torch.rand(3, 7))
    options = {"softcap": 5.0, "logit_scale": 0.8}

    def call(x: Any, w: Any, b: Any, ids: Any, temperature: Any) -> Any:
        return linear_logprobs_at(
            x, w, ids, linear_bias=b, over="ids", temperature=temperature, **options
        )

    wrapped = jax.jit(call) if jitted else call
    made, grads = pulled(lambda *a: wrapped(*a, ids, temperature), g, *primals)
    compare(made, grads, arrays, "ids", options | {"temperature": to_torch(temperature)}, dtype)


@OVER
@pytest.mark.parametrize("lists", [False, True])
def test_ids_of_64_bits(over: Any, lists: bool) -> None:
    """int64 arrays: NumPy's if JAX has no 64-bit types (x64 off), and JAX's under x64."""
    arrays = given((9,), 4, lists=lists)
    *primals, ids, offsets, g = arrays
    wide = [None if a is None else np.asarray(a, np.int64) for a in (ids, offsets)]

    def call(x: Any, w: Any, b: Any, ids: Any, offsets: Any) -> Any:
        return linear_logprobs_at(x, w, ids, linear_bias=b, over=over, offsets=offsets)

    made, grads = pulled(lambda *a: call(*a, *wide), g, *primals)
    compare(made, grads, arrays, over, {})
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        held = [None if a is None else jnp.asarray(a) for a in wide]
        assert held[0].dtype == jnp.int64
        again, of_wide = pulled(jax.jit(lambda *a: call(*a, *held)), g, *primals)
        assert again.dtype == jnp.float32 and np.array_equal(again, made)
        for mine, of in zip(of_wide, grads):
            same(mine, to_torch(of).double())


# --- bits ---


@pytest.mark.slow
@OVER
def test_the_bits_of_rows(platform: str, over: Any) -> None:  # noqa: F811
    """Lists of one length give what rows of ids give: over the vocabulary on a CPU, to the bit."""
    x, w, _, ids, _, g = given((9,), 4, lists=False, absent=0.0)
    offsets = np.arange(0, 37, 4)
    of_rows, theirs = pulled(lambda *a: linear_logprobs_at(*a, ids, over=over), g, x, w)
    of_lists, ours = pulled(
        lambda *a: linear_logprobs_at(*a, ids.flatten(), over=over, offsets=offsets),
        g.flatten(), x, w,
    )  # fmt: skip
    if over == "vocab" and platform == "cpu":  # on CUDA the anchor is another id's logit
        assert np.array_equal(of_rows.flatten(), of_lists)
    same(of_lists, to_torch(of_rows).double().flatten())
    for mine, of in zip(ours, theirs):
        same(mine, to_torch(of).double())


@OF_DTYPE
@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("lists", [False, True])
def test_the_bits_of_pytorch(platform: str, dtype: Any, columns: int, lists: bool) -> None:  # noqa: F811
    if platform != "cpu":
        pytest.skip("PyTorch's own switches decide about a GPU's products")
    *primals, ids, offsets, g = given((3, 7), columns, dtype, lists)
    g = jnp.where(ids == -1, 0, g)
    options: dict[str, Any] = {"softcap": 3.0, "logit_scale": 0.9, "temperature": 0.7}
    tensors = [to_torch(a) for a in primals]
    index = [None if a is None else to_torch(a).long() for a in (ids, offsets)]
    leaves = [t.requires_grad_() for t in tensors]
    theirs = of_torch(*leaves[:2], index[0], linear_bias=leaves[2], offsets=index[1], **options)  # type: ignore[arg-type,call-overload]
    made, grads = pulled(
        lambda x, w, b: linear_logprobs_at(
            x, w, ids, linear_bias=b, offsets=offsets, **options
        ), g, *primals,
    )  # fmt: skip
    assert torch.equal(to_torch(made), theirs)
    for mine, of in zip(grads, torch.autograd.grad(theirs, leaves, to_torch(g))):
        assert torch.equal(to_torch(mine), of)
    # Over the ids, both calls run the same op, and each takes the softmax of its logits.
    given_options = {"reduction": "none", "ignore_index": -1, **options}

    def logits(x: Any, w: Any, b: Any) -> Any:
        rows, target = {"input": x, "weight": w, "bias": b}, jnp.zeros((3, 7), jnp.int32)
        return _functions._loss(
            rows, target, ("logits_at",), ids=ids, offsets=offsets, **given_options
        )["logits_at"]

    made, grads = pulled(logits, g, *primals)
    alone = torch.ops.logitless.logits_at(*leaves, None, *index, 0.9, 3.0, 0.7, None, None, 7)
    assert torch.equal(to_torch(made), alone)
    for mine, of in zip(grads, torch.autograd.grad(alone, leaves, to_torch(g))):
        assert torch.equal(to_torch(mine), of)


def test_the_sum_of_a_list_has_its_bits_wherever_it_lies() -> None:
    values = np.random.default_rng(0).lognormal(0, 4, 500).astype(np.float32)
    values[1::2] *= -1
    ends = np.array([0, 3, 3, 100, 498, 500])
    made = _lists.sums(values, ends)
    wanted = [np.float32(values[s:e].astype(np.float64).sum()) for s, e in itertools.pairwise(ends)]
    assert made.tolist() == wanted  # exact: rounded once
    for before in (1, 5, 40):
        more = np.append(np.full(before, NAN, np.float32), values)
        moved = _lists.sums(more, np.append(0, ends + before))
        assert np.isnan(moved[0]) and moved.tolist()[1:] == made.tolist()
    alone = [_lists.sums(values[s:e], np.array([0, e - s])) for s, e in itertools.pairwise(ends)]
    assert made.tolist() == np.concatenate(alone).tolist()


@OVER
def test_a_list_of_every_class_is_summed_exactly(over: Any) -> None:
    x, w, b, _ = problem((1,), 20000, 16, bias=True)
    ids, offsets = np.arange(20000), np.array([0, 20000])
    g = jnp.full(20000, 0.1)
    _, (ours,) = pulled(
        lambda b: linear_logprobs_at(x, w, ids, linear_bias=b, over=over, offsets=offsets), g, b
    )
    theirs, leaves = exact(*map(to_torch, (x, w, b)), [ids.tolist()], over, {})
    of = torch.autograd.grad(theirs, leaves, to_torch(g).double())[2]
    scale = 2000 * theirs.detach().exp() + 0.1  # the size of each element's terms
    assert float(((to_torch(ours) - of).abs() / scale).max()) < 2e-6


# --- what is computed ---


@pytest.mark.parametrize("lists", [False, True])
def test_over_the_ids_it_takes_no_product(lists: bool) -> None:
    x, w, b, ids, offsets, g = given((3, 64), 5, lists=lists)

    def call(x: Any, w: Any, b: Any) -> Any:
        return linear_logprobs_at(x, w, ids, linear_bias=b, over="ids", offsets=offsets)

    def step(x: Any, w: Any, b: Any) -> Any:
        return pulled(call, g, x, w, b)

    forward, backward = fields(step, x, w, b)
    inputs = "input weight bias target ids" + " id_offsets" * lists
    assert forward == f"{inputs} logits_at"
    assert backward == f"{inputs} grad_logits_at grad_input grad_weight grad_bias"
    text = jax.jit(step).lower(x, w, b).as_text()
    assert len(re.findall(r"only_chosen = 1 : i32", text)) == 1
    assert fields(call, x, w, b) == [forward]


def test_lists_over_the_vocabulary_take_three_products() -> None:
    x, w, b, ids, offsets, g = given((3, 64), 5)

    def step(x: Any, w: Any, b: Any) -> Any:
        return pulled(
            lambda *a: linear_logprobs_at(*a[:2], ids, linear_bias=a[2], offsets=offsets),
            g, x, w, b,
        )[1]  # fmt: skip

    assert products(fields(step, x, w, b)) == 3
    assert "only_chosen" not in jax.jit(step).lower(x, w, b).as_text()


@OVER
@JITTED
def test_what_is_not_asked_of_is_not_read(over: Any, jitted: bool) -> None:
    """Tokens without ids are not read; with over="ids", nor are rows of the weight without ids."""
    x, w, _, _ = problem((5,), 37, 16)
    offsets, ids = np.array([0, 2, 2, 5, 6, 6]), np.array([3, 7, 7, 1, 36, -1])
    x = x.at[jnp.array([1, 3, 4])].set(jnp.array([NAN, INFINITY, NAN])[:, None])
    if over == "ids":
        w = w.at[20].set(NAN)

    def call(x: Any, w: Any, ids: Any, offsets: Any) -> Any:
        return linear_logprobs_at(x, w, ids, over=over, offsets=offsets)

    wrapped = jax.jit(call) if jitted else call
    g = jnp.ones(6).at[5].set(NAN)
    made, (of_x, of_w) = pulled(lambda *a: wrapped(*a, ids, offsets), g, x, w)
    assert np.isfinite(made[:5]).all() and made[5] == -INFINITY
    assert np.isfinite(of_x).all() and np.isfinite(of_w).all()
    assert not of_x[np.array([1, 3, 4])].any() and (over == "vocab" or not of_w[20].any())


@OVER
@pytest.mark.parametrize("lists", [False, True])
@JITTED
def test_a_token_without_an_upstream_gradient_is_not_read(
    over: Any, lists: bool, jitted: bool
) -> None:
    x, w, b, ids, offsets, g = given((9,), 4, lists=lists)
    token = np.repeat(np.arange(9), 4).reshape(9, 4)
    if lists:
        token = np.repeat(np.arange(9), np.diff(np.asarray(offsets)))
    clipped = np.arange(9) % 3 == 1
    g = jnp.where(clipped[token] & (ids != -1), 0, g)

    def step(x: Any, w: Any, b: Any) -> Any:
        return pulled(
            lambda *a: linear_logprobs_at(
                *a[:2], ids, linear_bias=a[2], over=over, offsets=offsets
            ), g, x, w, b,
        )  # fmt: skip

    run = jax.jit(step) if jitted else step
    _, expected = run(x, w, b)
    for value in (NAN, INFINITY):
        made, grads = run(jnp.where(clipped[:, None], value, x), w, b)
        assert np.isnan(made).any()
        assert not grads[0][clipped].any()
        assert all(np.array_equal(ours, of) for ours, of in zip(grads, expected))


@OVER
@pytest.mark.parametrize("lists", [False, True])
def test_tokens_without_ids_make_no_nan(over: Any, lists: bool) -> None:
    x, w, _, _ = problem((3,), 37, 16)
    ids, offsets = jnp.array([[0, 1], [-1, -1], [4, -1]]), None
    if lists:
        ids, offsets = ids.flatten(), jnp.array([0, 2, 4, 6])

    def total(x: Any, w: Any) -> Any:
        made = linear_logprobs_at(x, w, ids, over=over, offsets=offsets)
        return jnp.where(ids == -1, 0, made).sum()

    with jax.debug_nans(True):
        assert np.isfinite(total(x, w))
        of_x, of_w = jax.grad(total, (0, 1))(x, w)
    assert of_x[0].any() and of_w.any() and not of_x[1].any()


@OVER
def test_any_arrays_gradient_alone(over: Any) -> None:
    x, w, b, ids, offsets, g = given((9,), 4)

    def call(x: Any, w: Any, b: Any) -> Any:
        return linear_logprobs_at(x, w, ids, linear_bias=b, over=over, offsets=offsets)

    grads = pulled(call, g, x, w, b)[1]
    for i, primal in enumerate((x, w, b)):
        rest = [x, w, b]

        def of_one(a: Any, i: int = i, rest: Any = rest) -> Any:
            return call(*rest[:i], a, *rest[i + 1 :])

        same(pulled(of_one, g, primal)[1][0], to_torch(grads[i]).double())


def test_columns_of_infinite_logits() -> None:
    x, w, b, ids, offsets, _ = given((9,), 4)
    b = b.at[ids[0]].set(-INFINITY)
    for ends in (offsets, None):
        columns = ids if ends is not None else jnp.stack([ids[:9], ids[1:10]], -1)
        made = linear_logprobs_at(x, w, columns, linear_bias=b, over="ids", offsets=ends)
        hidden = columns == ids[0]
        assert hidden.any() and (np.asarray(made)[hidden] == -INFINITY).all()
        alone = (np.asarray(columns) != -1) & ~hidden
        assert np.isfinite(np.asarray(made)[alone]).all()


@OVER
def test_more_than_1024_ids_of_a_token(over: Any) -> None:
    x, w, _, _ = problem((2,), 3001, 16)
    ids = np.append(np.arange(3001), [5, 6])
    made = linear_logprobs_at(x, w, ids, over=over, offsets=np.array([0, 3001, 3003]))
    whole = (to_torch(x).double() @ to_torch(w).double().T).log_softmax(-1)
    same(made[:3001], whole[0])


@OVER
@pytest.mark.parametrize("shape", [(0,), (4,), (2, 0, 3), ()], ids=str)
@JITTED
def test_nothing(over: Any, shape: tuple[int, ...], jitted: bool) -> None:
    x, w, _, _ = problem(shape, 9, 16)
    offsets, ids = np.zeros(math.prod(shape) + 1, np.int32), np.zeros(0, np.int32)

    def call(x: Any, w: Any, ids: Any, offsets: Any) -> Any:
        return linear_logprobs_at(x, w, ids, over=over, offsets=offsets)

    wrapped = jax.jit(call) if jitted else call
    made, grads = pulled(lambda *a: wrapped(*a, ids, offsets), jnp.zeros(0), x, w)
    assert made.shape == (0,) and not any(np.any(g) for g in grads)
    if 0 in shape:
        none = linear_logprobs_at(x, w, np.zeros((*shape, 3), np.int32), over=over)
        assert none.shape == (*shape, 3)


def test_statistics_beside_lists() -> None:
    x, w, _, ids, offsets, g = given((3, 7), 4)
    names = ("lse", "entropy", "argmax", "max_logprob")

    def call(x: Any, w: Any) -> Any:
        made, s = linear_logprobs_at(x, w, ids, offsets=offsets, return_statistics=names)
        assert s.rank is s.logprob is None and s.argmax.dtype == jnp.int32
        return made, s.lse, s.entropy, s.argmax

    made, *rest = call(x, w)
    some = np.array([any(j != -1 for j in row) for row in lists_of(ids, offsets)]).reshape(3, 7)
    assert some.any() and not some.all()
    z = to_torch(x).double() @ to_torch(w).double().T
    p = z.softmax(-1)
    wanted = (z.logsumexp(-1), -(p * p.log()).sum(-1), z.argmax(-1))
    for ours, of in zip(rest, wanted):
        assert ours.shape == (3, 7)
        same(np.asarray(ours)[some], of[torch.tensor(some)].to(to_torch(ours).dtype).double())
        assert not (np.asarray(ours)[~some] > 0).any()
    same(made, to_torch(linear_logprobs_at(x, w, ids, offsets=offsets)).double())
    ones = jnp.ones((3, 7))
    no = np.zeros((3, 7), jax.dtypes.float0)
    grads = jax.vjp(call, x, w)[1]((g, ones, 2 * ones, no))
    parts = [
        jax.vjp(call, x, w)[1](upstream)
        for upstream in (
            (g, 0 * ones, 0 * ones, no), (jnp.zeros_like(g), ones, 0 * ones, no),
            (jnp.zeros_like(g), 0 * ones, 2 * ones, no),
        )
    ]  # fmt: skip
    for mine, *of in zip(grads, *parts):
        same(mine, sum(to_torch(a).double() for a in of))


@JITTED
def test_a_statistic_alone_has_a_gradient_beside_lists(jitted: bool) -> None:
    x, w, _, ids, offsets, _ = given((9,), 4)

    def lse(x: Any, w: Any) -> Any:
        return linear_logprobs_at(x, w, ids, offsets=offsets, return_statistics="lse")[1].lse.sum()

    graded = jax.grad(lse, (0, 1))
    some = np.array([any(j != -1 for j in row) for row in lists_of(ids, offsets)])
    leaves = [to_torch(a).double().requires_grad_() for a in (x, w)]
    theirs = (leaves[0] @ leaves[1].T).logsumexp(-1)[torch.tensor(some)].sum()
    for ours, of in zip(
        (jax.jit(graded) if jitted else graded)(x, w), torch.autograd.grad(theirs, leaves)
    ):
        same(ours, of)


# --- transforms ---


@pytest.mark.slow
@OVER
def test_vmap_of_lists_inside_and_around_grad(over: Any) -> None:
    x, w, b, _, _, _ = given((3, 7), 4)
    ids = to_jax(ids_of((3, 20), 37, 1, absent=0.1).squeeze(-1).int())  # 20 ids per element
    offsets = jnp.array([[0, 3, 3, 9, 12, 18, 20, 20], [0, 0, 0, 0, 5, 6, 7, 20], [0, *[20] * 7]])
    g = jnp.where(ids == -1, NAN, to_jax(torch.randn(3, 20)))
    arrays = (x, w, b, ids.flatten(), joined(offsets, 20), g.flatten())

    def one(x: Any, w: Any, b: Any, ids: Any, offsets: Any) -> Any:
        return linear_logprobs_at(x, w, ids, linear_bias=b, over=over, offsets=offsets)

    def call(x: Any, w: Any, b: Any) -> Any:
        return jax.vmap(one, (0, None, None, 0, 0))(x, w, b, ids, offsets)

    made, grads = pulled(call, g, x, w, b)
    compare(made.flatten(), grads, arrays, over, {})
    # Each element has its own ids, all in the same lists.
    alike = jax.vmap(one, (0, None, None, 0, None))(x, w, b, ids, offsets[0])
    alone = one(x[1], w, b, ids[1], offsets[0])
    same(np.exp(alike[1]), to_torch(np.exp(alone)).double())

    def of_one(x: Any, ids: Any, offsets: Any, g: Any) -> Any:
        return pulled(lambda x: one(x, w, b, ids, offsets), g, x)[1][0]

    for ours, theirs in zip(jax.vmap(of_one)(x, ids, offsets, g), grads[0]):
        same(ours, to_torch(theirs).double())


def test_vmap_of_rows_is_one_call() -> None:
    x, w, b, ids, _, g = arrays = given((3, 7), 4, lists=False)

    def call(x: Any, w: Any, b: Any) -> Any:
        return jax.vmap(lambda x, i: linear_logprobs_at(x, w, i, linear_bias=b, over="ids"))(x, ids)

    made, grads = pulled(call, g, x, w, b)
    compare(made, grads, arrays, "ids", {})
    assert len(fields(lambda *a: pulled(call, g, *a), x, w, b)) == 2


@OVER
@pytest.mark.parametrize("lists", [False, True])
def test_checkpoint_scan_and_memory(over: Any, lists: bool) -> None:
    x, w, b, ids, offsets, g = arrays = given((9,), 4, lists=lists)

    @jax.checkpoint
    def one(x: Any, w: Any, b: Any) -> Any:
        return linear_logprobs_at(
            x, w, ids, linear_bias=b, over=over, offsets=offsets, memory="8MiB"
        )

    def call(x: Any, w: Any, b: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c, one(x, w, b)), 0, None, length=2)[1]

    made, grads = pulled(jax.jit(call), jnp.stack([g, jnp.zeros_like(g)]), x, w, b)
    compare(made[0], grads, arrays, over, {})
    assert np.array_equal(made[0], made[1])


@OVER
def test_it_is_differentiated_once(over: Any) -> None:
    x, w, _, ids, offsets, _ = given((9,), 4, absent=0.0)

    def call(w: Any) -> Any:
        return linear_logprobs_at(x, w, ids, over=over, offsets=offsets)[0]

    with pytest.raises(NotImplementedError, match="differentiated once only"):
        jax.hessian(call)(w)


# --- errors ---

WRONG_OFFSETS = pytest.mark.parametrize(
    ("offsets", "at", "text"),
    [
        ([0, 2, 1, 4], 2, "1; allowed: 2 to 4"),
        ([1, 2, 3, 4], 0, "1; allowed: 0 to 0"),
        ([-1, 2, 3, 4], 0, "-1; allowed: 0 to 0"),
        ([0, 2, 3, 3], 3, "3; allowed: 4 to 4"),
        ([0, 2, 3, 5], 3, "5; allowed: 4 to 4"),
        ([0, 9, 3, 4], 1, "9; allowed: 0 to 4"),
        ([0, -5, 3, 4], 1, "-5; allowed: 0 to 4"),
    ],
)


@WRONG_OFFSETS
@OVER
def test_wrong_offsets(platform: str, offsets: list[int], at: int, text: str, over: Any) -> None:  # noqa: F811
    x, w, _, _ = problem((3,), 9, 16)
    message = rf"offsets\[{at}\] is {re.escape(text)}"
    held = [np.array(offsets), np.array(offsets, np.int32)]
    if platform == "cpu":
        held.append(jnp.array(offsets))
    for ends in held:
        with pytest.raises(ValueError, match=rf"^{message}$"):
            linear_logprobs_at(x, w, np.arange(4), over=over, offsets=ends)

    @jax.jit
    def call(ends: Any) -> Any:
        return linear_logprobs_at(x, w, np.arange(4), over=over, offsets=ends)

    if platform == "cpu":
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(call(jnp.array(offsets)))
        return
    made = np.asarray(call(jnp.array(offsets)))
    latest, inside = -1, []
    for begin, end in itertools.pairwise(offsets):
        if begin >= max(latest, 0) and begin <= end <= 4:
            inside += range(begin, end)
        latest = max(latest, begin)
    assert np.isnan(np.delete(made, inside)).all()
    assert over == "ids" or np.isfinite(made[inside]).all()


def test_offsets_that_nobody_looks_at() -> None:
    """Wrong offsets are made non-decreasing and kept within the places."""
    values = jnp.arange(1.0, 8)
    for offsets in ([0, 9, 3, 12], [-5, 2, -1, 7], [3, 3, 3, 3], [1 << 30, 0, 0, -(1 << 30)]):
        ends = jnp.array(offsets)
        held = np.asarray(_lists.ends_of(ends, 7)).tolist()
        assert held == sorted(held) and held[0] >= 0 and held[-1] <= 7
        lists = list(itertools.pairwise(held))
        assert _lists.sums(values, ends).tolist() == [float(values[s:e].sum()) for s, e in lists]
        of_tokens = _lists.spread(jnp.arange(3.0), ends, 7)
        for token, (s, e) in enumerate(lists):
            assert (of_tokens[s:e] == token).all()
        assert np.isfinite(of_tokens).all()
        outside = values.at[: held[0]].set(NAN).at[held[-1] :].set(NAN)
        apart = _lists.log_softmax(outside, ends, jnp.zeros(7, bool))
        assert np.isfinite(apart[held[0] : held[-1]]).all()  # ids outside of all lists are not read
        assert _lists.any_of(values > 3, ends).tolist() == [
            bool((values[s:e] > 3).any()) for s, e in lists
        ]


@OVER
@pytest.mark.parametrize("lists", [False, True])
def test_wrong_ids(platform: str, over: Any, lists: bool) -> None:  # noqa: F811
    x, w, _, _ = problem((3,), 9, 16)
    ids, offsets = np.array([[0, 1], [9, 2], [-2, 3]]), None
    at, flat = r"1, 0", r"ids\[1, 0\]"
    if lists:
        ids, offsets, at, flat = ids.flatten(), np.array([0, 2, 4, 6]), "2", r"ids\[2\]"
    with pytest.raises(ValueError, match=rf"^ids\[{at}\] is 9; allowed: 0 to 8, or -1 for none$"):
        linear_logprobs_at(x, w, ids, over=over, offsets=offsets)
    if platform == "cpu":
        with pytest.raises(Exception, match=rf"{flat} is 9; allowed: 0 to 8, or -1 for none"):
            jax.block_until_ready(
                jax.jit(lambda i: linear_logprobs_at(x, w, i, over=over, offsets=offsets))(
                    jnp.asarray(ids)
                )
            )
        return
    g = jnp.ones(ids.shape)
    made, grads = pulled(
        jax.jit(lambda x: linear_logprobs_at(x, w, jnp.asarray(ids), over=over, offsets=offsets)),
        g, x,
    )  # fmt: skip
    wrong = np.isnan(np.asarray(made).reshape(3, 2))
    assert wrong.tolist() == [[False] * 2, [True, over == "ids"], [True, over == "ids"]]
    assert over == "ids" or np.isfinite(grads[0]).all()


@OVER
def test_bad_arguments(over: Any) -> None:
    x, w, _, _ = problem((3,), 9, 16)
    ids, offsets = np.arange(4), np.array([0, 2, 3, 4])
    call: Any = functools.partial(linear_logprobs_at, x, w)
    with pytest.raises(
        ValueError, match=r"^ids has shape \(4, 1\); allowed beside offsets: \(M,\)$"
    ):
        call(ids[:, None], over=over, offsets=offsets)
    for wrong in (offsets[:3], offsets[:, None]):
        with pytest.raises(ValueError, match=r"^offsets has shape .*; allowed: \(4,\), N \+ 1 of"):
            call(ids, over=over, offsets=wrong)
    with pytest.raises(
        ValueError, match=r"^ids has shape \(4,\); allowed beside no tokens: \(0,\)$"
    ):
        linear_logprobs_at(x[:0], w, ids, over=over, offsets=offsets[:1])
    for dtype in (np.float32, np.uint8, bool):
        with pytest.raises(
            TypeError, match=f"^offsets is {np.dtype(dtype)}; allowed: int32, int64"
        ):
            call(ids, over=over, offsets=offsets.astype(dtype))
    with pytest.raises(TypeError, match=r"^offsets is a list; allowed: an array$"):
        call(ids, over=over, offsets=offsets.tolist())
    with pytest.raises(ValueError, match=r"^offsets\[3\] is 4294967296; allowed: 4 to 4$"):
        call(ids, over=over, offsets=np.array([0, 2, 3, 1 << 32]))
    with pytest.raises(ValueError, match=r"^over is 'all'; allowed: 'vocab', 'ids'$"):
        call(ids, over="all")
    with pytest.raises(ValueError, match=r"^upstream is 'whole' without axis_name$"):
        call(ids, over=over, offsets=offsets, upstream="whole")
    with pytest.raises(NotImplementedError, match=r"^return_statistics is \('lse',\) with over="):
        call(ids[:3, None], over="ids", return_statistics=("lse",))
    given: dict[str, Any] = {"offsets": offsets} if over == "vocab" else {}
    with pytest.raises(
        NotImplementedError, match=r"^(over='ids'|offsets) is given, and axis_name is 'tp'; allowed"
    ):
        call(ids if given else ids[:3, None], over=over, axis_name="tp", **given)
    with pytest.raises(NotImplementedError, match=r"^vocab_ids is given with over='ids'; "):
        call(ids, over="ids", offsets=offsets, vocab_ids=ids)


@JITTED
def test_a_list_of_rows_beside_lists(platform: str, jitted: bool) -> None:  # noqa: F811
    x, w, _, _ = problem((3,), 9, 16)
    offsets, rows = jnp.array([0, 2, 3, 4]), jnp.array([3, 1, 0, 2])

    def call(x: Any, w: Any, ids: Any) -> Any:
        return linear_logprobs_at(
            x, w, ids, offsets=offsets, vocab_ids=rows, return_statistics="argmax"
        )

    wrapped: Any = jax.jit(call) if jitted else call
    made, s = wrapped(x, w, jnp.arange(4))
    theirs, _ = exact(to_torch(x), to_torch(w[:4]), None, [[0, 1], [2], [3]], "vocab", {})
    same(made, theirs.detach())
    same(s.argmax, to_torch(jnp.argmax(x @ w[:4].T, -1)).double())
    if platform == "cpu":
        with pytest.raises(Exception, match=r"^ids\[2\] is 5, which is not in vocab_ids; "):
            call(x, w, jnp.array([0, 1, 5, 2]))


# --- several devices ---


def step_of(over: Any, offsets: Any = None) -> Any:
    def step(x: Any, w: Any, b: Any, ids: Any, g: Any) -> Any:
        return pulled(
            lambda x, w, b: linear_logprobs_at(
                x, w, ids, linear_bias=b, over=over, offsets=offsets
            ), g, x, w, b,
        )  # fmt: skip

    return step


def of_48(shape: tuple[int, ...], columns: int) -> tuple[Any, ...]:
    """Like `given` without lists, with a vocabulary of 48, which devices can divide."""
    x, w, b, _ = problem(shape, 48, 16, bias=True)
    ids = ids_of(shape, 48, columns)
    g = torch.randn(ids.shape).masked_fill(ids == -1, NAN)
    return x, w, b, to_jax(ids.int()), None, to_jax(g)


@HOSTS
@needs_partitioner
@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("layout", ["tokens", "replicated", "fsdp"])
@JITTED
def test_tokens_split_over_the_ids(columns: int, layout: str, jitted: bool) -> None:
    x, w, b, ids, _, g = arrays = of_48((8, 16), columns)
    step = step_of("ids")
    with mock.patch.dict(LAYOUTS, {"fsdp": ({"dp": 4}, "dp", "dp")}):
        held = placed(layout, x, w, b, ids, g)
    compare(*(jax.jit(step) if jitted else step)(*held), arrays, "ids", {})


@HOSTS
@needs_partitioner
@pytest.mark.parametrize("columns", [1, 4])
def test_tokens_over_the_ids_that_an_axis_does_not_divide(columns: int) -> None:
    x, w, b, ids, _, g = arrays = of_48((7, 16), columns)
    mesh = mesh_of(dp=4)
    split, whole = (jax.sharding.NamedSharding(mesh, P(*spec)) for spec in (("dp",), ()))

    def step(x: Any, w: Any, b: Any, ids: Any, g: Any) -> Any:
        put = functools.partial(jax.lax.with_sharding_constraint, shardings=split)
        return step_of("ids")(put(x), w, b, put(ids), put(g))

    held = [jax.device_put(a, whole) for a in (x, w, b, ids, g)]
    compare(*jax.jit(step)(*held), arrays, "ids", {})


@HOSTS
@needs_partitioner
@pytest.mark.parametrize("layout", ["vocabulary", "both"])
@JITTED
def test_a_split_vocabulary_is_refused(layout: str, jitted: bool) -> None:
    x, w, b, ids, _, g = of_48((8, 16), 4)
    step = step_of("ids")
    with pytest.raises(
        Exception,
        match=r"over='ids' is given, and linear_weight is split over the mesh axes \['tp'",
    ):
        (jax.jit(step) if jitted else step)(*placed(layout, x, w, b, ids, g))


SPLITS: dict[
    str, tuple[dict[str, int], tuple[Any, ...], Any]
] = {  # the mesh, and the axes of the tokens and of the vocabulary
    "replicated": ({"dp": 2, "tp": 2}, (), None),
    "sequences": ({"dp": 4}, ("dp",), None),
    "places in sequences": ({"dp": 4}, (None, "dp"), None),
    "both": ({"dp": 2, "sp": 4}, ("dp", "sp"), None),
    "fsdp": ({"dp": 4}, ("dp",), "dp"),
}


def split_lists(layout: str, wrong: Any = None) -> tuple[tuple[Any, ...], list[Any]]:
    """Lists of [8, 16] tokens, whole and as they are placed; `wrong` changes ids and offsets."""
    x, w, b, _ = problem((8, 16), 48, 16, bias=True)
    ids, offsets = listed(ids_of((8, 16), 48, 4))
    ids, offsets = ids.int().numpy(), offsets.int().numpy()
    if wrong is not None:
        wrong(ids, offsets)
    g = torch.randn(ids.shape).masked_fill(torch.tensor(ids == -1), NAN)
    arrays = (x, w, b, jnp.asarray(ids), jnp.asarray(offsets), to_jax(g))
    axes, tokens, vocab = {**SPLITS, "vocabulary": ({"tp": 4}, (), "tp")}[layout]
    specs = (tokens, (vocab,), (vocab,), (), (), ())
    at = mesh_of(**axes)
    held = [
        jax.device_put(a, jax.sharding.NamedSharding(at, P(*spec)))
        for a, spec in zip(arrays, specs)
    ]
    return arrays, held


def of_lists(over: Any, **options: Any) -> Any:
    def step(x: Any, w: Any, b: Any, ids: Any, offsets: Any, g: Any) -> Any:
        return pulled(
            lambda x, w, b: linear_logprobs_at(
                x, w, ids, linear_bias=b, over=over, offsets=offsets, **options
            ), g, x, w, b,
        )  # fmt: skip

    return step


@HOSTS
@needs_partitioner
@OVER
@pytest.mark.parametrize("layout", SPLITS)
@JITTED
def test_lists_of_split_tokens(over: Any, layout: str, jitted: bool) -> None:
    arrays, held = split_lists(layout)
    step = of_lists(over, temperature=0.8)
    compare(
        *(jax.jit(step) if jitted else step)(*held), arrays, over, {"temperature": 0.8}
    )  # fmt: skip


@HOSTS
@needs_partitioner
@OVER
@pytest.mark.parametrize("statistics", [(), ("lse",)], ids=str)
def test_empty_lists_of_split_tokens(over: Any, statistics: Any) -> None:
    if statistics and over == "ids":
        pytest.skip("the other columns are not computed")
    x, w, _, _ = problem((8,), 48, 16)
    split = jax.device_put(x, jax.sharding.NamedSharding(mesh_of(dp=4), P("dp")))
    ids, offsets = np.zeros(0, np.int32), np.zeros(9, np.int32)

    def call(x: Any, w: Any, offsets: Any) -> Any:
        made = linear_logprobs_at(
            x, w, ids, over=over, offsets=offsets, return_statistics=statistics
        )
        return made if statistics else (made,)

    made = jax.jit(call)(split, w, offsets)
    assert made[0].shape == (0,)
    if not statistics:
        return
    assert not np.any(made[1].lse), "tokens without an id are not computed"
    wrong = offsets.copy()
    wrong[4] = 2
    with pytest.raises(Exception, match="id_offsets"):
        jax.block_until_ready(jax.jit(call)(split, w, wrong))


@HOSTS
@needs_partitioner
def test_lists_of_split_tokens_are_of_a_devices_own_hidden_states() -> None:
    _, held = split_lists("sequences")
    text = jax.jit(of_lists("vocab")).lower(*held).compile().as_text()
    assert "f32[2,16,16]" in text and "f32[8,16,16]" not in text


@HOSTS
@needs_partitioner
@OVER
@pytest.mark.parametrize(("shape", "spec"), [((7, 3), ("dp",)), ((3, 7), (None, "dp"))], ids=str)
def test_lists_of_tokens_that_an_axis_does_not_divide(over: Any, shape: Any, spec: Any) -> None:
    x, w, b, ids, offsets, g = arrays = given(shape, 4)
    mesh = mesh_of(dp=4)
    split, whole = (jax.sharding.NamedSharding(mesh, P(*of)) for of in (spec, ()))

    def step(x: Any, *rest: Any) -> Any:
        return of_lists(over)(jax.lax.with_sharding_constraint(x, split), *rest)

    held = [jax.device_put(a, whole) for a in (x, w, b, ids, offsets, g)]
    compare(*jax.jit(step)(*held), arrays, over, {})


@HOSTS
@needs_partitioner
def test_statistics_of_split_tokens_beside_lists() -> None:
    arrays, held = split_lists("both")

    def call(x: Any, w: Any, ids: Any, offsets: Any) -> Any:
        return linear_logprobs_at(x, w, ids, offsets=offsets, return_statistics=("lse", "argmax"))

    whole = call(*(arrays[i] for i in (0, 1, 3, 4)))
    split = jax.jit(call)(*(held[i] for i in (0, 1, 3, 4)))
    assert np.array_equal(whole[0], split[0])
    assert np.array_equal(whole[1].lse, split[1].lse)
    assert np.array_equal(whole[1].argmax, split[1].argmax)


def _an_id(at: int) -> Any:
    def change(ids: Any, offsets: Any) -> None:
        ids[at] = 48

    return change


def _an_offset(at: int, value: int) -> Any:
    def change(ids: Any, offsets: Any) -> None:
        offsets[at] = value

    return change


def _a_short_end(ids: Any, offsets: Any) -> None:
    offsets[-1] -= 1


@HOSTS
@needs_partitioner
@OVER
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (_an_id(1), "is 48; allowed: 0 to 47"),
        (_an_id(-1), "is 48; allowed: 0 to 47"),
        (_an_offset(0, 1), r"id_offsets\[0\] is 1; allowed: 0 to 0"),
        (_an_offset(70, 3), r"id_offsets\[.*\] is 3; allowed"),
        (_an_offset(70, 1 << 20), r"id_offsets\[.*\] is 1048576; allowed"),
        (_a_short_end, r"id_offsets\[.*\] is .*; allowed"),
        (_an_offset(-1, 1 << 20), r"id_offsets\[.*\] is 1048576; allowed"),
    ],
)
def test_what_is_wrong_in_a_list_is_an_error_of_every_device(
    over: Any, wrong: Any, text: str
) -> None:
    _, held = split_lists("sequences", wrong)
    with pytest.raises(Exception, match=text):
        jax.block_until_ready(jax.jit(of_lists(over))(*held))


def test_parts_of_lists() -> None:
    offsets = jnp.array([0, 3, 3, 7, 9])
    place, ends = _lists.part_of(offsets, 9, jnp.array([2, 0, 4]))
    assert place.tolist() == [3, 4, 5, 6, 0, 1, 2, 9, 9] and ends.tolist() == [0, 4, 7, 9]
    for wrong, lists in (
        ([0, 9, 3, 12, 9], [[*range(9)], [], [], []]),
        ([-2, 2, 4, 4, 9], [[], [2, 3], [], [4, 5, 6, 7, 8]]),
        ([0, 2, 1, 4, 20], [[0, 1], [], [], []]),
        ([-(1 << 31), (1 << 31) - 1, 0, 1, 1], [[], [], [], []]),
    ):
        for token, inside in enumerate(lists):
            place, ends = _lists.part_of(jnp.array(wrong), 9, jnp.array([token]))
            assert place.tolist() == inside + [9] * (9 - len(inside)) and ends.tolist() == [0, 9]


@HOSTS
@needs_partitioner
@OVER
@JITTED
def test_lists_of_a_split_vocabulary_are_refused(over: Any, jitted: bool) -> None:
    _, held = split_lists("vocabulary")
    step = of_lists(over)
    with pytest.raises(
        Exception, match=r"offsets is given, and linear_weight is split .* \['tp'\] by"
    ):
        (jax.jit(step) if jitted else step)(*held)


@HOSTS
@needs_partitioner
@OVER
def test_ids_and_offsets_of_lists_may_be_split(over: Any) -> None:
    """XLA gathers them or splits the work on them by itself."""
    x, w, b, _ = problem((11,), 37, 16, bias=True)
    ids = to_jax(ids_of((48,), 37, 1, absent=0.1).squeeze(-1).int())
    offsets = jnp.array([0, 5, 5, 11, 13, 14, 30, 47, 47, 48, 48, 48])
    g = jnp.where(ids == -1, NAN, to_jax(torch.randn(48)))
    mesh = mesh_of(dp=4)
    put = lambda a, *spec: jax.device_put(a, jax.sharding.NamedSharding(mesh, P(*spec)))  # noqa: E731
    held = (put(x), put(w), put(b), put(ids, "dp"), put(g, "dp"))
    made, grads = jax.jit(lambda ends, *a: step_of(over, ends)(*a))(put(offsets, "dp"), *held)
    compare(made, grads, (x, w, b, ids, offsets, g), over, {})


@HOSTS
@needs_partitioner
@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("row", [1, 6])
def test_a_wrong_id_is_an_error_of_every_device(columns: int, row: int) -> None:
    x, w, b, ids, _, g = of_48((8, 4), columns)
    ids = np.array(ids)
    ids[row, 2, columns - 1] = 48
    held = placed("tokens", x, w, b, jnp.asarray(ids), g)
    with pytest.raises(Exception, match="is 48; allowed: 0 to 47"):
        jax.block_until_ready(jax.jit(step_of("ids"))(*held))


@HOSTS
@OVER
def test_each_devices_own_lists_inside_of_shard_map(over: Any) -> None:
    x, w, b, _ = problem((8,), 37, 16, bias=True)
    ids = to_jax(ids_of((4, 5), 37, 1, absent=0.1).squeeze(-1).int())
    offsets = jnp.array([[0, 3, 5], [0, 0, 5], [0, 5, 5], [0, 1, 5]])
    g = jnp.where(ids == -1, NAN, to_jax(torch.randn(4, 5)))

    def call(x: Any, w: Any, b: Any, ids: Any, offsets: Any) -> Any:
        return linear_logprobs_at(
            x, w, ids[0], linear_bias=b, over=over, offsets=offsets[0]
        )[None]  # fmt: skip

    own = P("dp")
    whole = jax.shard_map(
        call, mesh=mesh_of(dp=4), in_specs=(own, P(), P(), own, own), out_specs=own,
        check_vma=False,
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"pass check_vma=False to jax\.shard_map"):
        jax.shard_map(
            call, mesh=mesh_of(dp=4), in_specs=(own, P(), P(), own, own), out_specs=own
        )(x, w, b, ids, offsets)  # fmt: skip
    made, grads = pulled(jax.jit(lambda *a: whole(*a, ids, offsets)), g, x, w, b)
    arrays = (x, w, b, ids.flatten(), joined(offsets, 5), g.flatten())
    compare(made.flatten(), grads, arrays, over, {})


@HOSTS
@needs_partitioner
@pytest.mark.parametrize("lists", [False, True])
def test_a_mesh_of_explicit_axes(lists: bool) -> None:
    if not hasattr(jax.sharding, "AxisType"):
        pytest.skip("this JAX has no explicit axes")
    arrays = given((8, 4), 3, lists=lists)
    x, w, b, ids, offsets, g = arrays
    mesh = host_mesh((2, 4), ("dp", "tp"))
    of_tokens = P() if lists else P("dp")
    with jax.sharding.set_mesh(mesh):
        put = lambda a, spec: jax.device_put(a, jax.sharding.NamedSharding(mesh, spec))  # noqa: E731
        held = (put(x, of_tokens), put(w, P()), put(b, P()), put(ids, of_tokens), put(g, of_tokens))
        ends = None if offsets is None else put(offsets, P())
        compare(*jax.jit(step_of("ids", ends))(*held), arrays, "ids", {})


# --- mutants: bugs that these tests find ---


def _all_in_one(offsets: Any, places: int) -> Any:
    return jnp.zeros(places, jnp.int32)


def _rounded(x: Any, y: Any) -> Any:
    return x[0] + y[0], x[1]


def _from_the_first(offsets: Any, places: int) -> Any:
    return jnp.zeros_like(_ends_of(offsets, places)).at[-1].set(places)


_ends_of = _lists.ends_of


def _with_their_own_sum(kept: Any, upstream: Any) -> Any:
    made, _, absent = kept
    upstream = jnp.where(absent, 0, upstream)
    return upstream - jnp.exp(made) * upstream.sum(), None, None


def test_a_known_bug_makes_a_check_fail() -> None:
    changed = jax.custom_vjp(_lists.log_softmax.fun)
    changed.defvjp(_lists._log_softmax_forward, _with_their_own_sum)
    with mock.patch.object(_lists, "log_softmax", changed), pytest.raises(AssertionError):
        test_lists(jnp.float32, "ids", "none", False)
    with mock.patch.object(_lists, "_token_of", _all_in_one), pytest.raises(AssertionError):
        test_lists(jnp.float32, "vocab", "none", False)
    with mock.patch.object(_lists, "_added", _rounded), pytest.raises(AssertionError):
        test_the_sum_of_a_list_has_its_bits_wherever_it_lies()
    jax.clear_caches()
    with mock.patch.object(_lists, "ends_of", _from_the_first), pytest.raises(AssertionError):
        test_the_sum_of_a_list_has_its_bits_wherever_it_lies()
    with mock.patch.object(_run, "only_chosen", lambda names: False), pytest.raises(AssertionError):
        jax.clear_caches()
        test_over_the_ids_it_takes_no_product(False)
    jax.clear_caches()

# SPDX-License-Identifier: Apache-2.0
"""linear_logprobs_at of a vocabulary that is split over the ranks of a group: values and
gradients against f64 and one process, the same bits on every rank, errors on all of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ranks
from logitless.torch import Split, linear_logprob, linear_logprobs_at
from logitless.torch._split import combine, rule
from logitless.torch._split import ranks as _ranks
from ranks import Rank
from reference import close
from test_devices import bounds_of, near_rows
from test_linear import BF16, F32
from test_logprobs_at import exact, ids_of

Results = Mapping[str, Any]
CASES: dict[str, Callable[[Rank], Results]] = {}


def case(function: Callable[[Rank], Results]) -> Callable[[Rank], Results]:
    CASES[function.__name__] = function
    return function


def head(
    shape: tuple[int, ...] = (3, 8), vocab: int = 37, dtype: torch.dtype = F32
) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and bias, the same on every rank."""
    x, w = torch.randn(*shape, 16).to(dtype), (torch.randn(vocab, 16) / 4).to(dtype)
    return x, w, torch.randn(vocab).to(dtype)


def leaves_of(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def check(
    me: Rank, columns: int = 4, cut: str = "uneven", dtype: torch.dtype = F32, names: Any = (),
    shape: tuple[int, ...] = (3, 8), compiled: bool = False, absent: float = 0.2, **options: Any,
) -> Results:  # fmt: skip
    x, w, b = head(shape, dtype=dtype)
    ids = ids_of(shape, 37, columns, absent=absent)
    g = torch.randn(ids.shape).masked_fill(ids == -1, math.nan)
    (start, stop), total = bounds_of(cut, me.size, 37)[me.rank], 37
    mine = leaves_of(x, w[start:stop], b[start:stop])
    group = Split(dist.group.WORLD, start=start, total=total)
    call: Any = (
        torch.compile(linear_logprobs_at, fullgraph=True) if compiled else linear_logprobs_at
    )
    made = call(
        mine[0], mine[1], ids, linear_bias=mine[2], group=group, return_statistics=names, **options
    )
    made, more = (made[0], {n: getattr(made[1], n) for n in names}) if names else (made, {})
    outputs = [made, *(v for v in more.values() if v.requires_grad)]
    upstream = [g, *(torch.ones_like(v) for v in outputs[1:])]
    grads = torch.autograd.grad(outputs, mine, upstream)
    theirs, leaves = exact(x, w, b, ids, options, tuple(names))
    hidden = ids == -1
    assert torch.equal(made.isneginf(), hidden)
    close(made.masked_fill(hidden, 0), theirs[0].masked_fill(hidden, 0))
    expected = torch.autograd.grad(
        [theirs[0], *(t for n, t in zip(names, theirs[1:]) if more[n].requires_grad)],
        leaves, [u.double().masked_fill(u.isnan(), 0) for u in upstream],
    )  # fmt: skip
    for n, of in zip(names, theirs[1:]):
        close(more[n], of)
    close(grads[0], expected[0], dtype)
    for part, whole in zip(grads[1:], expected[1:]):
        near_rows(part, whole, slice(start, stop), dtype)
    return {"logprobs": made, **more, "grad_input": grads[0]}


def checked(name: str, **how: Any) -> None:
    CASES[name] = functools.partial(check, **how)


for _cut in ("even", "uneven", "first empty", "last empty", "one has all"):
    for _columns in (1, 4):
        checked(f"{_cut}, {_columns}", cut=_cut, columns=_columns)
checked("bf16", dtype=BF16)
checked("statistics", names=("lse", "entropy", "argmax", "max_logprob"))
checked("statistics beside one id", columns=1, names=("lse", "argmax"))
checked("softcap, temperature", softcap=2.0, temperature=0.7, logit_scale=0.9)
checked("memory", memory="1MiB" if ranks.BACKEND == "gloo" else "8MiB")
checked("many columns", columns=300)
checked("compiled", compiled=True)
checked("no tokens", shape=(0,), absent=0.0)
checked("seven tokens", shape=(7,))


@case
def rows_without_ids_are_not_read(me: Rank) -> Results:
    x, w, _ = head((9,), 4 * me.size)
    ids = ids_of((9,), 4 * me.size, 3, absent=0.5)
    x = x.masked_fill((ids == -1).all(-1)[:, None], math.nan)
    mine = leaves_of(x, w[4 * me.rank : 4 * me.rank + 4])
    made = linear_logprobs_at(*mine, ids, group=dist.group.WORLD)
    g = torch.randn(ids.shape).masked_fill(ids == -1, math.nan)
    grads = torch.autograd.grad(made, mine, g)
    assert not made.isnan().any() and not any(g.isnan().any() for g in grads)
    return {"logprobs": made, "grad_input": grads[0]}


def tokens_case(me: Rank, local_tokens: bool, columns: int) -> Results:
    """The input's tokens are split over the ranks too."""
    x, w, _ = head((2, 4 * me.size), 4 * me.size)
    ids = ids_of((2, 4 * me.size), 4 * me.size, columns)
    temperature = 0.5 + torch.rand(2, 4 * me.size)
    own = slice(4 * me.rank, 4 * me.rank + 4)
    mine = leaves_of(x[:, own], w[own])
    g = torch.randn(ids.shape).masked_fill(ids == -1, math.nan)
    given, by, upstream = ids, temperature, g
    if local_tokens:
        given, by, upstream = ids[:, own], temperature[:, own], g[:, own]
    split = Split(dist.group.WORLD, sequence_dim=1, local_tokens=local_tokens)
    made, s = linear_logprobs_at(
        *mine, given, temperature=by, group=split, return_statistics=("lse", "entropy")
    )
    # lse has no upstream gradient on rank 0, nor anywhere without local_tokens.
    outputs, upstreams = [made, s.entropy], [upstream, torch.ones_like(s.entropy)]
    if local_tokens and me.rank:
        outputs, upstreams = [*outputs, s.lse], [*upstreams, torch.ones_like(s.lse)]
    grads = torch.autograd.grad(outputs, mine, upstreams)
    theirs, leaves = exact(x, w, None, ids, {"temperature": temperature}, ("lse", "entropy"))
    of_lse = torch.ones_like(theirs[1])
    of_lse[:, :4] = 0
    expected = torch.autograd.grad(
        theirs, leaves,
        [g.nan_to_num().double(), of_lse * local_tokens, torch.ones_like(theirs[2])],
    )  # fmt: skip
    whole = theirs[0][:, own] if local_tokens else theirs[0]
    absent = given == -1
    assert made.shape == given.shape and torch.equal(made.isneginf(), absent)
    close(made.masked_fill(absent, 0), whole.masked_fill(absent, 0))
    close(grads[0], expected[0][:, own])
    near_rows(grads[1], expected[1], own)
    return {} if local_tokens else {"logprobs": made}


for _local in (False, True):
    for _columns in (1, 3):
        CASES[f"tokens split, local {_local}, {_columns}"] = functools.partial(
            tokens_case, local_tokens=_local, columns=_columns
        )


@case
def the_same_bits_for_any_number_of_ranks(me: Rank) -> Results:
    if me.size == 3:
        return {}
    for vocab, columns, options in ((1003, 5, {}), (5, 3, {"softcap": 3.0}), (300, 1, {})):
        x, w, b = head((13,), vocab)
        ids = ids_of((13,), vocab, columns)
        g = torch.randn(ids.shape)
        width = -(-vocab // 8)
        start = min(me.rank * 8 // me.size * width, vocab)
        stop = min(start + 8 // me.size * width, vocab)
        made = []
        for rows, split in (
            (slice(None), Split(blocks=8)),
            (slice(start, stop), Split(dist.group.WORLD, total=vocab, blocks=8)),
        ):
            mine = leaves_of(x, w[rows], b[rows])
            y, s = linear_logprobs_at(
                mine[0], mine[1], ids, linear_bias=mine[2], group=split,
                return_statistics=("lse", "argmax"), **options,
            )  # fmt: skip
            made.append((y, *s, *torch.autograd.grad((y, s.lse), mine, (g, g[..., 0]))))
        one, many = made
        for ours, theirs in zip(many, (*one[:-2], one[-2][start:stop], one[-1][start:stop])):
            assert ours is theirs is None or torch.equal(ours, theirs)
    return {}


@case
def a_single_id_has_the_bits_of_linear_logprob(me: Rank) -> Results:
    x, w, _ = head((9,), 4 * me.size)
    t = torch.randint(0, 4 * me.size, (9,))
    mine = leaves_of(x, w[4 * me.rank : 4 * me.rank + 4])
    wanted = linear_logprob(*mine, t, group=dist.group.WORLD)
    one = linear_logprobs_at(*mine, t[:, None], group=dist.group.WORLD)
    two = linear_logprobs_at(*mine, torch.stack((t, t // 2), -1), group=dist.group.WORLD)
    assert torch.equal(one[:, 0], wanted) and torch.equal(two[:, 0], wanted)
    for ours, theirs in zip(
        torch.autograd.grad(one.sum(), mine), torch.autograd.grad(wanted.sum(), mine)
    ):
        assert torch.equal(ours, theirs)
    return {}


@case
def dtensors_say_what_is_split(me: Rank) -> Results:
    if me.size != 2:
        return {}
    mesh = init_device_mesh(ranks.DEVICE, (2,))
    x, w, b = head((2, 8), 20)
    rows = [distribute_tensor(v, mesh, [Shard(0)]).requires_grad_() for v in (w, b)]
    for columns in (1, 3):
        ids = ids_of((2, 8), 20, columns)
        g = torch.randn(ids.shape).masked_fill(ids == -1, math.nan)
        theirs, leaves = exact(x, w, b, ids, {})
        expected = torch.autograd.grad(theirs[0], leaves, g.double().masked_fill(ids == -1, 0))
        own = slice(4 * me.rank, 4 * me.rank + 4)
        for given, part in ((ids, slice(None)), (distribute_tensor(ids, mesh, [Shard(1)]), own)):
            hidden = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
            made = linear_logprobs_at(hidden, rows[0], given, linear_bias=rows[1])
            assert type(made) is Tensor
            absent = ids[:, part] == -1
            assert torch.equal(made.isneginf(), absent)
            close(made.masked_fill(absent, 0), theirs[0][:, part].masked_fill(absent, 0))
            grads = torch.autograd.grad(made, (hidden, *rows), g[:, part])
            for ours, of in zip(grads, expected):
                close(ours.full_tensor(), of)
        last = distribute_tensor(ids_of((2, 8), 20, 4), mesh, [Shard(2)])
        with pytest.raises(NotImplementedError, match=r"^ids is a DTensor split along dimension 2"):
            linear_logprobs_at(hidden, rows[0], last)
    return {}


@case
def ranks_that_are_compared(me: Rank) -> Results:
    x, w, _ = head((6,), 4 * me.size)
    ids = ids_of((6,), 4 * me.size, 3)
    own = w[4 * me.rank : 4 * me.rank + 4].clone().requires_grad_()
    with mock.patch.object(_ranks, "ON", True):
        linear_logprobs_at(x, own, ids, group=dist.group.WORLD).nan_to_num().sum().backward()
        wrong = ids.clone()
        wrong[5, 1] = me.rank
        with pytest.raises(ValueError, match=r"LOGITLESS_CHECK_RANKS: ids's values on rank"):
            linear_logprobs_at(x, own, wrong, group=dist.group.WORLD)
    return {}


@case
def errors_are_those_of_all_ranks(me: Rank) -> Results:
    x, w, _ = head((2, 4), 4 * me.size)
    own = w[4 * me.rank : 4 * me.rank + 4]
    vocab = 4 * me.size
    for columns in (1, 3):
        ids = torch.zeros(2, 4, columns, dtype=torch.int64)
        ids[1, 2, columns - 1] = vocab
        where = rf"^ids\[1, 2, {columns - 1}\] \(flat: ids\[6, {columns - 1}\]\) is {vocab}; "
        with pytest.raises(ValueError, match=where):
            linear_logprobs_at(x, own, ids, group=dist.group.WORLD)
        split = Split(dist.group.WORLD, sequence_dim=1, local_tokens=True)
        wrong = ids if me.rank == 1 else ids.clamp(max=0)
        with pytest.raises(
            ValueError, match=rf"^ids\[1, 2, {columns - 1}\] .* on rank 1 is {vocab}"
        ):
            linear_logprobs_at(x, own, wrong, group=split)
    ids = torch.zeros(2, 4, 2 + me.rank, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^the number of ids of a token is \[2, 3"):
        linear_logprobs_at(x, own, ids, group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"^ids has shape \(2, 3, 2\); allowed: \(2, 4, K\)"):
        linear_logprobs_at(x, own, ids[:, :3, :2], group=dist.group.WORLD)
    whole = Split(dist.group.WORLD, sequence_dim=1)
    with pytest.raises(ValueError, match=rf"^ids has shape .*allowed: \(2, {4 * me.size}, K\)"):
        linear_logprobs_at(x, own, ids[..., :2], group=whole)
    names = ("entropie",) if me.rank == 0 else ()
    with pytest.raises(ValueError, match=r"return_statistics is .entropie."):
        linear_logprobs_at(x, own, ids[..., :2], group=dist.group.WORLD, return_statistics=names)
    return {}


def _summed(states: Tensor, *rest: Any) -> Any:
    """A bug: chosen logits are summed over the shards, and a shard without the id has -inf."""
    columns = rest[-1].shape[1] if rest[-1] is not None else 0
    if columns:
        states = states.clone()
        states[:, -columns:] = states[:, -columns:].sum(0)
    return _combine(states, *rest)


def _own_for_all(constants: Any, shard: Any, dim: int) -> Any:
    ids = torch.cat([constants.ids] * shard.size, dim)
    return _gathered(constants, shard, dim)._replace(ids=ids)


_combine, _gathered = combine.combine, rule._gathered
MUTANTS: dict[str, tuple[Any, str, Any, str]] = {
    "the sum of the shards' logits": (combine, "combine", _summed, "even, 4"),
    "a rank's ids for all": (rule, "_gathered", _own_for_all, "tokens split, local True, 3"),
}


def run(me: Rank, name: str) -> Results:
    return CASES[name](me)


def mutated(me: Rank, name: str) -> Results:
    where, function, mutant, of = MUTANTS[name]
    with mock.patch.object(where, function, mutant), pytest.raises(AssertionError):
        run(me, of)
    return {}


@pytest.mark.parametrize("size", ranks.SIZES)
@pytest.mark.parametrize("name", CASES)
def test_ranks(groups: dict[int, ranks.Group], size: int, name: str) -> None:
    if name == "errors_are_those_of_all_ranks" and ranks.BACKEND != "gloo":
        pytest.skip("this is about ranks on the CPU")
    groups[size].call(run, name)


@pytest.mark.parametrize("size", ranks.SIZES)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_bug_makes_a_check_fail(
    groups: dict[int, ranks.Group], size: int, name: str
) -> None:
    groups[size].call(mutated, name)

# SPDX-License-Identifier: Apache-2.0
"""vocab_ids of a vocabulary that is split over the ranks of a group, of which one may have
none of the ids: against f64 and one process, the same bits on every rank, errors on all of them."""

from __future__ import annotations

import functools
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
from logitless.torch import (
    LinearCrossEntropyHead,
    Split,
    _vocabulary,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs_at,
)
from logitless.torch._split import ranks as _ranks
from ranks import Rank
from reference import close
from test_devices import bounds_of, near_rows
from test_devices_logprobs_at import leaves_of
from test_linear import BF16, F32
from test_vocab_ids import exact, in_list, targets_of

Results = Mapping[str, Any]
CASES: dict[str, Callable[[Rank], Results]] = {}
VOCAB = 40


def case(function: Callable[[Rank], Results]) -> Callable[[Rank], Results]:
    CASES[function.__name__] = function
    return function


def head(shape: tuple[int, ...] = (3, 8), dtype: torch.dtype = F32) -> tuple[Tensor, ...]:
    """Input, weight and bias, the same on every rank."""
    x, w = torch.randn(*shape, 16).to(dtype), (torch.randn(VOCAB, 16) / 4).to(dtype)
    return x, w, torch.randn(VOCAB).to(dtype)


LISTS: dict[str, Callable[[], Tensor]] = {
    "any": lambda: torch.randperm(VOCAB)[:13],
    "the last has none": lambda: torch.randperm(VOCAB // 4)[:7],
    "the first has none": lambda: VOCAB - 1 - torch.randperm(VOCAB // 4)[:7],
    "one": lambda: torch.tensor([17]),
    "all": lambda: torch.randperm(VOCAB),
}


def check(
    me: Rank, given: str = "any", cut: str = "even", dtype: torch.dtype = F32, padding: int = 0,
    smoothed: bool = True,
) -> Results:  # fmt: skip
    x, w, b = head(dtype=dtype)
    ids = LISTS[given]()
    t = targets_of(ids, (3, 8))
    options: dict[str, Any] = {"reduction": "none"}
    if smoothed:
        options |= {"label_smoothing": 0.1, "weight": 0.5 + torch.rand(VOCAB), "z_loss": 0.01}
    start, stop = bounds_of(cut, me.size, VOCAB)[me.rank]
    more = padding if me.rank == me.size - 1 else 0
    rows = [torch.cat((v[start:stop], v.new_full((more, *v.shape[1:]), torch.nan))) for v in (w, b)]
    mine = leaves_of(x, *rows)
    group = Split(dist.group.WORLD, start=start, total=VOCAB)
    loss, s = linear_cross_entropy(
        mine[0], mine[1], t, linear_bias=mine[2], group=group, vocab_ids=ids,
        return_statistics=("lse", "argmax", "entropy"), **options,
    )  # fmt: skip
    g = torch.randn(3, 8)
    grads = torch.autograd.grad(loss, mine, g)
    theirs, leaves = exact(x, w, b, t, ids, options)
    close(loss, theirs)
    expected = torch.autograd.grad(theirs, leaves, g.double())
    close(grads[0], expected[0], dtype)
    for part, whole in zip(grads[1:], expected[1:]):
        near_rows(part[: stop - start], whole, slice(start, stop), dtype)
        others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, ids, False)[start:stop]
        assert not part[: stop - start][others].any() and not part[stop - start :].any()
    _, of_one = linear_cross_entropy(
        x, w, t, linear_bias=b, vocab_ids=ids, return_statistics="argmax"
    )
    assert s.argmax is not None and torch.equal(s.argmax, of_one.argmax)
    return {"loss": loss, "lse": s.lse, "entropy": s.entropy, "grad_input": grads[0]}


def checked(name: str, **how: Any) -> None:
    CASES[name] = functools.partial(check, **how)


for _list in LISTS:
    checked(f"list: {_list}", given=_list)
for _cut in ("uneven", "first empty", "last empty", "one has all"):
    checked(f"cut: {_cut}", cut=_cut)
checked("bf16", dtype=BF16)
checked("padding", padding=3)
checked("padding, none of the last", padding=3, given="the last has none", smoothed=False)


@case
def the_order_of_the_list_changes_no_bit(me: Rank) -> Results:
    x, w, b = head()
    ids = LISTS["any"]()
    t = targets_of(ids, (3, 8))
    start, stop = bounds_of("even", me.size, VOCAB)[me.rank]
    split = Split(dist.group.WORLD, start=start, total=VOCAB)
    made = []
    for order in (ids, ids.flip(0), ids.sort().values.int()):
        mine = leaves_of(x, w[start:stop], b[start:stop])
        loss = linear_cross_entropy(
            mine[0], mine[1], t, linear_bias=mine[2], group=split, vocab_ids=order
        )
        made.append((loss, *torch.autograd.grad(loss, mine)))
    for one in made[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(one, made[0]))
    return {"loss": made[0][0]}


@case
def chosen_ids(me: Rank) -> Results:
    x, w, b = head()
    results = {}
    for given in ("any", "the last has none"):
        ids = LISTS[given]()
        for columns in (1, 3):
            chosen = targets_of(ids, (3, 8, columns)).clamp(min=-1)
            start, stop = bounds_of("even", me.size, VOCAB)[me.rank]
            split = Split(dist.group.WORLD, start=start, total=VOCAB)
            mine = leaves_of(x, w[start:stop], b[start:stop])
            made = linear_logprobs_at(
                mine[0], mine[1], chosen, linear_bias=mine[2], group=split,
                vocab_ids=ids,
            )  # fmt: skip
            whole = leaves_of(x, w, b)
            theirs = linear_logprobs_at(
                whole[0], whole[1], chosen, linear_bias=whole[2], vocab_ids=ids
            )
            absent = chosen == -1
            assert torch.equal(made.isneginf(), absent)
            close(made.masked_fill(absent, 0), theirs.detach().double().masked_fill(absent, 0))
            g = torch.randn(chosen.shape)
            grads = torch.autograd.grad(made, mine, g)
            expected = [v.double() for v in torch.autograd.grad(theirs, whole, g)]
            close(grads[0], expected[0])
            for part, of in zip(grads[1:], expected[1:]):
                near_rows(part, of, slice(start, stop))
            results[f"{given}, {columns}"] = made
    return results


def tokens_case(me: Rank, local_tokens: bool) -> Results:
    """The input's tokens are split over the ranks too."""
    x, w, _ = head((2, 4 * me.size))
    ids = LISTS["the last has none"]()
    t = targets_of(ids, (2, 4 * me.size))
    start, stop = bounds_of("even", me.size, VOCAB)[me.rank]
    own = slice(4 * me.rank, 4 * me.rank + 4)
    mine = leaves_of(x[:, own], w[start:stop])
    given = t[:, own] if local_tokens else t
    split = Split(
        dist.group.WORLD, start=start, total=VOCAB, sequence_dim=1, local_tokens=local_tokens
    )
    loss = linear_cross_entropy(*mine, given, group=split, vocab_ids=ids, reduction="sum")
    grads = torch.autograd.grad(loss, mine)
    theirs, leaves = exact(x, w, None, t, ids, {"reduction": "sum"})
    part = exact(x[:, own], w, None, t[:, own], ids, {"reduction": "sum"})[0]
    close(loss, part if local_tokens else theirs)
    expected = torch.autograd.grad(theirs, leaves)
    close(grads[0], expected[0][:, own])
    near_rows(grads[1], expected[1], slice(start, stop))
    return {} if local_tokens else {"loss": loss}


for _local in (False, True):
    CASES[f"tokens split, local {_local}"] = functools.partial(tokens_case, local_tokens=_local)


@case
def divergences_of_both_heads(me: Rank) -> Results:
    x, w, b = head()
    teacher, rows = torch.randn(3, 8, 8), torch.randn(VOCAB, 8)
    start, stop = bounds_of("even", me.size, VOCAB)[me.rank]
    split = Split(dist.group.WORLD, start=start, total=VOCAB)
    results = {}
    for given, kind in (("any", "tv"), ("the last has none", "jsd"), ("the first has none", "tv")):
        ids = LISTS[given]()
        t = targets_of(ids, (3, 8))
        for logits in (False, True):
            of: dict[str, Any] = {"teacher_input": teacher, "teacher_weight": rows}
            own = of | {"teacher_weight": rows[start:stop]}
            if logits:
                of = {"teacher_logits": teacher @ rows.T}
                own = {"teacher_logits": of["teacher_logits"][..., start:stop]}
            options: dict[str, Any] = {"kind": kind, "target": t, "label_weight": 0.2}
            mine, whole = leaves_of(x, w[start:stop], b[start:stop]), leaves_of(x, w, b)
            loss, s = linear_divergence(
                mine[0], mine[1], linear_bias=mine[2], group=split, vocab_ids=ids,
                return_statistics=("acceptance", "logprob"), **own, **options,
            )  # fmt: skip
            theirs, by = linear_divergence(
                whole[0], whole[1], linear_bias=whole[2], vocab_ids=ids,
                return_statistics=("acceptance", "logprob"), **of, **options,
            )  # fmt: skip
            for ours, one in zip((loss, s.acceptance, s.logprob), (theirs, by[2], by[3])):
                close(ours, one.detach().double())
            grads = torch.autograd.grad(loss, mine)
            expected = [v.double() for v in torch.autograd.grad(theirs, whole)]
            close(grads[0], expected[0])
            for part, of_all in zip(grads[1:], expected[1:]):
                near_rows(part, of_all, slice(start, stop))
            results |= {f"{given}, {logits}": loss, f"{given}, {logits}, x": grads[0]}
    return results


@case
def a_divergence_whose_tokens_are_split(me: Rank) -> Results:
    x, w, _ = head((2, 4 * me.size))
    teacher, rows = torch.randn(2, 4 * me.size, 8), torch.randn(VOCAB, 8)
    ids = LISTS["the last has none"]()
    t = targets_of(ids, (2, 4 * me.size))
    start, stop = bounds_of("even", me.size, VOCAB)[me.rank]
    own = slice(4 * me.rank, 4 * me.rank + 4)
    whole = leaves_of(x, w)
    options: dict[str, Any] = {"kind": "jsd", "reduction": "none", "vocab_ids": ids}
    theirs = linear_divergence(*whole, teacher, rows, target=t, **options)
    expected = [v.double() for v in torch.autograd.grad(theirs.sum(), whole)]
    for local in (False, True):
        mine = leaves_of(x[:, own], w[start:stop])
        split = Split(
            dist.group.WORLD, start=start, total=VOCAB, sequence_dim=1, local_tokens=local
        )
        given, part = (t[:, own], theirs[:, own]) if local else (t, theirs)
        loss = linear_divergence(
            *mine, teacher[:, own], rows[start:stop], target=given, group=split, **options
        )
        close(loss, part.detach().double())
        grads = torch.autograd.grad(loss.sum(), mine)
        close(grads[0], expected[0][:, own])
        near_rows(grads[1], expected[1], slice(start, stop))
    return {}


@case
def dtensors_say_what_is_split(me: Rank) -> Results:
    if me.size != 2:
        return {}
    mesh = init_device_mesh(ranks.DEVICE, (2,))
    x, w, b = head()
    ids = LISTS["any"]()
    t = targets_of(ids, (3, 8))
    rows = [distribute_tensor(v, mesh, [Shard(0)]).requires_grad_() for v in (w, b)]
    hidden = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    loss = linear_cross_entropy(hidden, rows[0], t, linear_bias=rows[1], vocab_ids=ids)
    theirs, leaves = exact(x, w, b, t, ids, {})
    close(loss, theirs)
    grads = torch.autograd.grad(loss, (hidden, *rows))
    for ours, of in zip(grads, torch.autograd.grad(theirs, leaves)):
        close(ours.full_tensor(), of)
    with pytest.raises(NotImplementedError, match=r"^vocab_ids is a DTensor; allowed: a plain"):
        placed = distribute_tensor(ids[:12], mesh, [Shard(0)])
        linear_cross_entropy(hidden, rows[0], t, vocab_ids=placed)
    return {"loss": loss}


@case
def a_head_whose_tokens_are_sharded(me: Rank) -> Results:
    x, w, _ = head((2 * me.size, 4))
    ids = LISTS["the last has none"]()
    t = targets_of(ids, (2 * me.size, 4), 0)
    module: LinearCrossEntropyHead[Tensor] = LinearCrossEntropyHead(16, VOCAB, vocab_ids=ids)
    with torch.no_grad():
        module.weight.copy_(w)
    module.parallelize(init_device_mesh(ranks.DEVICE, (me.size,)), tokens="sharded")
    own = slice(2 * me.rank, 2 * me.rank + 2)
    loss = module(x[own], t[own])
    loss.backward()
    theirs, leaves = exact(x, w, None, t, ids, {})
    close(loss, exact(x[own], w, None, t[own], ids, {})[0])
    grad: Any = module.weight.grad
    close(grad.full_tensor(), torch.autograd.grad(theirs, leaves[1])[0])
    with torch.no_grad():
        seen = module(x[own]).isneginf().logical_not().flatten(0, 1)
    assert torch.equal(seen.any(0).nonzero()[:, 0], ids.sort().values)
    return {}


@case
def a_group_of_one_is_the_call_without(me: Rank) -> Results:
    alone = [dist.new_group([rank]) for rank in range(me.size)][me.rank]
    x, w, b = head()
    ids = LISTS["any"]()
    t = targets_of(ids, (3, 8))
    results = []
    for rows, group in ((VOCAB, None), (VOCAB + 2, Split(alone, start=0, total=VOCAB))):
        padded = [torch.cat((v, v.new_zeros(2, *v.shape[1:])))[:rows] for v in (w, b)]
        mine = leaves_of(x, *padded)
        loss = linear_cross_entropy(
            mine[0], mine[1], t, linear_bias=mine[2], vocab_ids=ids, group=group
        )
        results.append((loss, *(g[:VOCAB] for g in torch.autograd.grad(loss, mine))))
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs)
    return {}


@case
def what_does_not_go_with_it(me: Rank) -> Results:
    x, w, _ = head()
    start, stop = bounds_of("even", me.size, VOCAB)[me.rank]
    own, ids, world = w[start:stop], LISTS["any"](), dist.group.WORLD
    t = targets_of(ids, (3, 8))
    by_start = Split(world, start=start, total=VOCAB)
    if me.size != 3:
        blocks = Split(world, total=VOCAB, blocks=4)
        with pytest.raises(
            NotImplementedError, match=r"^Split\.blocks is given; allowed beside vo"
        ):
            linear_cross_entropy(x, own, t, group=blocks, vocab_ids=ids)
    with pytest.raises(NotImplementedError, match=r"^teacher_vocab_ids is given with a group"):
        linear_divergence(x, own, x, own, group=by_start, teacher_vocab_ids=ids)
    compiled = torch.compile(linear_cross_entropy, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"vocab_ids is given with a group under torch\.compile"):
        compiled(x, own, t, group=by_start, vocab_ids=ids)
    return {}


@case
def errors_are_those_of_all_ranks(me: Rank) -> Results:
    x, w, _ = head((2, 4))
    start, stop = bounds_of("even", me.size, VOCAB)[me.rank]
    own, ids = w[start:stop], torch.tensor([7, 2, 30, 11])
    split = Split(dist.group.WORLD, start=start, total=VOCAB)
    t = torch.full((2, 4), 7)
    t[1, 2] = 8
    said = "is 8, which is not in vocab_ids; allowed: an id of the list, or "
    for given in (t, t.clamp(max=7 + (me.rank == 1))):  # wrong on all ranks, and on one
        with pytest.raises(ValueError, match=rf"^target\[1, 2\] \(flat: target\[6\]\) {said}ignor"):
            linear_cross_entropy(x, own, given, group=split, vocab_ids=ids)
        with pytest.raises(ValueError, match=rf"^target\[1, 2\] \(flat: target\[6\]\) {said}ignor"):
            linear_divergence(x, own, x, own, target=given, group=split, vocab_ids=ids)
        with pytest.raises(ValueError, match=rf"^ids\[1, 2, 0\] \(flat: ids\[6, 0\]\) {said}-1"):
            linear_logprobs_at(x, own, given[..., None], group=split, vocab_ids=ids)
    local = Split(dist.group.WORLD, start=start, total=VOCAB, sequence_dim=1, local_tokens=True)
    of_one = t.clamp(max=7 + (me.rank == 1))
    for call in (
        lambda: linear_cross_entropy(x, own, of_one, group=local, vocab_ids=ids),
        lambda: linear_divergence(x, own, x, own, target=of_one, group=local, vocab_ids=ids),
    ):
        with pytest.raises(ValueError, match=rf"^target\[1, 2\] .* {said}.* \(on rank 1\)$"):
            call()
    wrong = ids.clone()
    wrong[3] = 2 if me.rank == 1 else 11
    with pytest.raises(ValueError, match=r"^vocab_ids\[3\] is 2, as vocab_ids\[1\] is; allowed: e"):
        linear_cross_entropy(x, own, t.clamp(max=7), group=split, vocab_ids=wrong)
    with pytest.raises(ValueError, match=r"^Split\.total is \[4, 3"):
        linear_cross_entropy(
            x, own, t.clamp(max=7), group=split, vocab_ids=ids[: 4 - (me.rank == 1)]
        )
    return {}


@case
def ranks_that_are_compared(me: Rank) -> Results:
    x, w, _ = head((6,))
    start, stop = bounds_of("even", me.size, VOCAB)[me.rank]
    own, ids = w[start:stop].clone().requires_grad_(), torch.tensor([7, 2, 30, 11])
    split = Split(dist.group.WORLD, start=start, total=VOCAB)
    t = torch.full((6,), 7)
    with mock.patch.object(_ranks, "ON", True):
        linear_cross_entropy(x, own, t, group=split, vocab_ids=ids).backward()
        ids[1] += me.rank
        with pytest.raises(ValueError, match=r"LOGITLESS_CHECK_RANKS: vocab_ids's values on rank"):
            linear_cross_entropy(x, own, t, group=split, vocab_ids=ids)
    return {}


def _at_the_start(ids: Any, weight: Tensor, shard: Any = None) -> Any:
    vocabulary, own = _listed(ids, weight, shard)
    return vocabulary, own if own is None else own._replace(start=0)


def _of_its_own(ids: Any, weight: Tensor, shard: Any = None) -> Any:
    vocabulary, own = _listed(ids, weight, shard)
    return vocabulary._replace(rows=vocabulary.rows.clamp(max=0)), own


_listed = _vocabulary.listed
MUTANTS: dict[str, tuple[Any, str]] = {
    "every rank's ids are the first": (_at_the_start, "list: any"),
    "each rank takes its first row": (_of_its_own, "list: any"),
}


def run(me: Rank, name: str) -> Results:
    return CASES[name](me)


def mutated(me: Rank, name: str) -> Results:
    mutant, of = MUTANTS[name]
    with (
        mock.patch.object(_vocabulary, "listed", mutant),
        pytest.raises((AssertionError, ValueError)),
    ):
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


def test_places_are_those_of_the_whole_list() -> None:
    ids, t = torch.tensor([7, 2, 30, 11]), torch.tensor([30, 7, -100])
    assert in_list(t, ids).tolist() == [3, 1, -100]

# SPDX-License-Identifier: Apache-2.0
"""linear_topk of a vocabulary that is split over the ranks of a group: the list of one
process, the same bits on every rank, errors on all of them."""

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
from logitless.torch import Split, linear_cross_entropy, linear_logprob, linear_topk
from logitless.torch._split import combine
from logitless.torch._split import ranks as _ranks
from ranks import Rank
from reference import close
from test_devices import bounds_of
from test_devices_logprobs_at import head
from test_linear import BF16, F32

ROWS = ("lse", "entropy", "argmax", "sum_p_squared", "mean_logit", "max_logprob")
Results = Mapping[str, Any]
CASES: dict[str, Callable[[Rank], Results]] = {}


def case(function: Callable[[Rank], Results]) -> Callable[[Rank], Results]:
    CASES[function.__name__] = function
    return function


def check(
    me: Rank, k: int = 5, cut: str = "uneven", dtype: torch.dtype = F32, names: Any = (),
    shape: tuple[int, ...] = (3, 8), compiled: bool = False, equal: bool = False, **options: Any,
) -> Results:  # fmt: skip
    """Ranks' linear_topk against one process's. `equal`: all classes are equally likely."""
    x, w, b = head(shape, dtype=dtype)
    if equal:  # small whole numbers, whose sums are exact in any order
        x, w, b = (4 * x).round(), torch.ones_like(w), torch.zeros_like(b)
    start, stop = bounds_of(cut, me.size, 37)[me.rank]
    split = Split(dist.group.WORLD, start=start, total=37)
    call: Any = torch.compile(linear_topk, fullgraph=True, backend="aot_eager")
    made = (call if compiled else linear_topk)(
        x, w[start:stop], k, linear_bias=b[start:stop], group=split, return_statistics=names,
        **options,
    )  # fmt: skip
    whole = linear_topk(x, w, k, linear_bias=b, return_statistics=names, **options)
    close(made[0], whole[0])
    assert torch.equal(made[1], whole[1])
    assert made[0].shape == (*shape, k) and made[1].dtype is torch.int64
    if equal:
        assert torch.equal(made[1], torch.arange(k).expand(*shape, k))
    more = {name: getattr(made[2], name) for name in names}
    for name, value in more.items():
        close(value, getattr(whole[2], name))
    return {"logprobs": made[0], "ids": made[1], **more}


def checked(name: str, **how: Any) -> None:
    CASES[name] = functools.partial(check, **how)


for _cut in ("even", "uneven", "first empty", "last empty", "one has all"):
    checked(_cut, cut=_cut)
    checked(f"{_cut}, all of them", cut=_cut, k=37)
    checked(f"{_cut}, equal", cut=_cut, k=20, equal=True)
checked("one", k=1)
checked("bf16", dtype=BF16)
checked("statistics", names=ROWS)
checked("statistics of many", names=("lse", "argmax"), k=36, cut="first empty")
checked("softcap, temperature", softcap=2.0, temperature=0.7, logit_scale=0.9)
checked("memory", memory="1MiB" if ranks.BACKEND == "gloo" else "8MiB")
checked("compiled", compiled=True, names=("entropy", "argmax"))
checked("no tokens", shape=(0,))
checked("seven tokens", shape=(7,))
checked("one token", shape=())


@case
def masked_and_nan_classes(me: Rank) -> Results:
    """Of classes without probability the lowest ids come first, over all ranks. A NaN in one rank's
    classes makes every rank's list NaN."""
    vocab = 4 * me.size
    own = slice(4 * me.rank, 4 * me.rank + 4)
    x, w, _ = head((6,), vocab)
    mask = torch.full((vocab,), -math.inf)
    mask[[1, vocab - 1]] = 0
    group = dist.group.WORLD
    made = linear_topk(x, w[own], vocab, linear_bias=mask[own], group=group)
    rest = [c for c in range(vocab) if c not in (1, vocab - 1)]
    assert made[0][:, 2:].isneginf().all() and made[1][:, 2:].tolist() == [rest] * 6
    # A rank without columns cannot name one of its classes.
    start, stop = bounds_of("first empty", me.size, vocab)[me.rank]
    split = Split(group, start=start, total=vocab)
    again = linear_topk(x, w[start:stop], vocab, linear_bias=mask[start:stop], group=split)
    assert torch.equal(again[1], made[1])
    bad = w.clone()
    bad[vocab - 2, 3] = math.nan
    logprobs, ids = linear_topk(x, bad[own], 3, group=group)
    assert logprobs.isnan().all() and ((ids >= 0) & (ids < vocab)).all()
    return {"logprobs": made[0], "ids": made[1]}


@case
def a_list_of_rows_as_the_vocabulary(me: Rank) -> Results:
    vocab = 4 * me.size
    own = slice(4 * me.rank, 4 * me.rank + 4)
    x, w, b = head((6,), vocab)
    for ids in (torch.tensor([vocab - 1, 0, 2]), torch.tensor([1, 3, 0, 2])):
        made = linear_topk(
            x, w[own], 3, linear_bias=b[own], group=dist.group.WORLD, vocab_ids=ids,
            return_statistics="argmax",
        )  # fmt: skip
        whole = linear_topk(x, w, 3, linear_bias=b, vocab_ids=ids)
        close(made[0], whole[0])
        assert torch.equal(made[1], whole[1]) and torch.equal(made[2].argmax, whole[1][..., 0])
    return {"logprobs": made[0], "ids": made[1]}


def tokens_case(me: Rank, local_tokens: bool) -> Results:
    """The input's tokens are split over the ranks too."""
    x, w, _ = head((2, 4 * me.size), 4 * me.size)
    temperature = 0.5 + torch.rand(2, 4 * me.size)
    own = slice(4 * me.rank, 4 * me.rank + 4)
    split = Split(dist.group.WORLD, sequence_dim=1, local_tokens=local_tokens)
    by = temperature[:, own] if local_tokens else temperature
    made = linear_topk(
        x[:, own], w[own], 4, temperature=by, group=split, return_statistics=("lse", "argmax")
    )
    whole = linear_topk(x, w, 4, temperature=temperature, return_statistics=("lse", "argmax"))
    part = own if local_tokens else slice(None)
    close(made[0], whole[0][:, part])
    assert torch.equal(made[1], whole[1][:, part])
    close(made[2].lse, whole[2].lse[:, part])
    assert torch.equal(made[2].argmax, whole[2].argmax[:, part])
    return {} if local_tokens else {"logprobs": made[0], "ids": made[1]}


for _local in (False, True):
    CASES[f"tokens split, local {_local}"] = functools.partial(tokens_case, local_tokens=_local)


@case
def the_same_bits_for_any_number_of_ranks(me: Rank) -> Results:
    if me.size == 3:
        return {}
    for vocab, k in ((1003, 7), (5, 5), (300, 256)):
        x, w, b = head((13,), vocab)
        width = -(-vocab // 8)
        start = min(me.rank * 8 // me.size * width, vocab)
        stop = min(start + 8 // me.size * width, vocab)
        made = []
        for rows, split in (
            (slice(None), Split(blocks=8)),
            (slice(start, stop), Split(dist.group.WORLD, total=vocab, blocks=8)),
        ):
            logprobs, ids, s = linear_topk(
                x, w[rows], k, linear_bias=b[rows], group=split, return_statistics=("lse", "argmax")
            )
            made.append((logprobs, ids, s.lse, s.argmax))
        assert all(map(torch.equal, *made))
    return {}


@case
def dtensors_say_what_is_split(me: Rank) -> Results:
    if me.size != 2:
        return {}
    mesh = init_device_mesh(ranks.DEVICE, (2,))
    x, w, b = head((2, 8), 20)
    rows = [distribute_tensor(v, mesh, [Shard(0)]) for v in (w, b)]
    hidden = distribute_tensor(x, mesh, [Shard(1)])
    whole = linear_topk(x, w, 3, linear_bias=b)
    own = slice(4 * me.rank, 4 * me.rank + 4)
    for split, part in ((None, slice(None)), (Split(local_tokens=True), own)):
        made = linear_topk(hidden, rows[0], 3, linear_bias=rows[1], group=split)
        assert type(made[0]) is Tensor
        close(made[0], whole[0][:, part])
        assert torch.equal(made[1], whole[1][:, part])
    return {}


@case
def ranks_that_are_compared(me: Rank) -> Results:
    x, w, _ = head((6,), 4 * me.size)
    own = w[4 * me.rank : 4 * me.rank + 4]
    with mock.patch.object(_ranks, "ON", True):
        linear_topk(x, own, 3, group=dist.group.WORLD)
        x[5, 1] += me.rank
        with pytest.raises(ValueError, match=r"LOGITLESS_CHECK_RANKS: input's values on rank"):
            linear_topk(x, own, 3, group=dist.group.WORLD)
    return {}


@case
def errors_are_those_of_all_ranks(me: Rank) -> Results:
    vocab = 4 * me.size
    x, w, _ = head((2, 4), vocab)
    own = w[4 * me.rank : 4 * me.rank + 4]
    with pytest.raises(ValueError, match=rf"^k is {vocab + 1}; allowed: 1 to {vocab}, the least"):
        linear_topk(x, own, vocab + 1, group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"^(on rank 1: )?k is 0; allowed: 1 to "):
        linear_topk(x, own, 0 if me.rank == 1 else 2, group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"^what is asked for, in bits, is \["):
        linear_topk(x, own, 2 + me.rank, group=dist.group.WORLD)
    wrong = me.rank == 1
    with pytest.raises(TypeError, match="k is a float; allowed: an int"):
        linear_topk(x, own, 2.0 if wrong else 2, group=dist.group.WORLD)  # type: ignore[arg-type]
    names: Any = ("rank",) if wrong else ()
    with pytest.raises(ValueError, match="return_statistics is 'rank'; allowed: "):
        linear_topk(x, own, 2, group=dist.group.WORLD, return_statistics=names)
    t = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="return_statistics is 'rank' with a group"):
        linear_cross_entropy(x, own, t, group=dist.group.WORLD, return_statistics=names)
    entropy: Any = "detach" if wrong else "detached"
    with pytest.raises(ValueError, match="entropy is 'detach'; allowed: "):
        linear_logprob(x, own, t, group=dist.group.WORLD, entropy=entropy)
    return {}


def _first_alone(states: Tensor, indices: Any, *rest: Any) -> Any:
    """A bug: the first shard's list is used for that of all shards."""
    k = indices.shape[1]
    states, indices = states.clone(), indices.clone()
    states[1:, -k:], indices[1:] = -math.inf, -1
    return _combine(states, indices, *rest)


def _nobodys(like: Tensor, wanted: int) -> Tensor:
    """A bug: the state of a shard without columns is that of a logit of 0."""
    return _empty_state(like, wanted).nan_to_num(neginf=0.0)


_combine, _empty_state = combine.combine, combine.empty_state
MUTANTS: dict[str, tuple[Any, str, Any, str]] = {
    "the first shard's list": (combine, "combine", _first_alone, "even"),
    "a shard without columns has some": (combine, "empty_state", _nobodys, "first empty"),
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

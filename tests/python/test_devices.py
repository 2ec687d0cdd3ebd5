# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that is split over the ranks of a group: values and gradients against f64 of
the whole vocabulary and against one process, the same bits on every rank, errors on all of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

import ranks
import reference
from logitless.torch import (
    Split,
    Statistics,
    _kept,
    _run,
    linear_logprobs_at,
    linear_topk,
)
from logitless.torch._split import blocks as of_blocks
from logitless.torch._split import combine, exchange, peers, shards
from logitless.torch._split import ranks as _ranks
from ranks import Rank
from reference import close
from splits import FIELDS, linear_cross_entropy, linear_logprob

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INFINITY, NAN = float("inf"), float("nan")
DIFFERENTIABLE = ("lse", "target_logit", "logprob", "entropy")
STATISTICS = (*DIFFERENTIABLE, "argmax", "sum_p_squared", "mean_logit", "max_logprob")
Results = Mapping[str, Any]
Bounds = Sequence[tuple[int, int]]

CASES: dict[str, Callable[[Rank], Results]] = {}


def case(function: Callable[[Rank], Results]) -> Callable[[Rank], Results]:
    CASES[function.__name__] = function
    return function


# --- the problem, equal on every rank ---


class Problem(NamedTuple):
    x: Tensor
    w: Tensor
    b: Any  # [V], or None
    t: Tensor


def bounds_of(cut: str, size: int, vocab: int) -> Bounds:
    """The columns of each rank."""
    shares = {
        "even": [1] * size,
        "uneven": [2 * rank + 1 for rank in range(size)],
        "first empty": [0] + [1] * (size - 1),
        "last empty": [1] * (size - 1) + [0],
        "one has all": [0] * (size - 1) + [1],
    }[cut]
    ends = [vocab * sum(shares[: rank + 1]) // sum(shares) for rank in range(size)]
    return list(zip([0, *ends], ends))


def targets_of(kind: str, shape: tuple[int, ...], vocab: int, bounds: Bounds) -> Tensor:
    t = torch.randint(0, vocab, shape)
    if kind == "mixed":
        return t.where(torch.rand(shape) >= 0.25, torch.full_like(t, -100))
    if kind == "ignored":
        return torch.full_like(t, -100)
    if kind == "every shard":
        firsts = [start for start, stop in bounds if stop > start]
        flat = t.view(-1)
        flat[: len(firsts)] = torch.tensor(firsts)
    if kind == "one shard":
        start, stop = max(bounds, key=lambda both: both[1] - both[0])
        t = start + t % (stop - start)
    return t


def problem(
    size: int, shape: tuple[int, ...] = (3, 5), vocab: int = 37, hidden: int = 16,
    dtype: torch.dtype = F32, bias: bool = False, targets: str = "mixed", cut: str = "uneven",
) -> tuple[Problem, Bounds]:  # fmt: skip
    bounds = bounds_of(cut, size, vocab)
    x = torch.randn(*shape, hidden).to(dtype)
    w = (torch.randn(vocab, hidden) / hidden**0.5).to(dtype)
    b = torch.randn(vocab).to(dtype) if bias else None
    return Problem(x, w, b, targets_of(targets, shape, vocab, bounds)), bounds


def leaf(x: Tensor) -> Any:
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_()


class Made(NamedTuple):
    loss: Tensor
    statistics: dict[str, Tensor]
    grad_input: Tensor
    grad_weight: Tensor
    grad_bias: Tensor | None

    def replicated(self) -> dict[str, Tensor]:
        return {"loss": self.loss, **self.statistics, "grad_input": self.grad_input}


def made_by(
    call: Callable[..., Any], p: Problem, names: Sequence[str], upstreams: Sequence[Tensor],
    keep_layout: bool = False,
) -> Made:  # fmt: skip
    """Results and gradients of `call(x, w, b)`, which returns (loss, Statistics). `upstreams` are
    for the loss and the differentiable statistics."""
    x = p.x.requires_grad_() if keep_layout else leaf(p.x)
    w, b = leaf(p.w), None if p.b is None else leaf(p.b)
    loss, statistics = call(x, w, b)
    found = {name: getattr(statistics, name) for name in names}
    outputs = [loss, *(found[name] for name in names if name in DIFFERENTIABLE)]
    leaves = [v for v in (x, w, b) if v is not None]
    grads = torch.autograd.grad(
        outputs, leaves, [u.to(o.dtype) for u, o in zip(upstreams, outputs)]
    )
    return Made(loss, found, grads[0], grads[1], grads[2] if b is not None else None)


def of_reference(p: Problem, options: Mapping[str, Any]) -> Callable[..., Any]:
    o = {k: v for k, v in options.items() if k not in ("memory", "empty_mean", "reduce_dtype")}

    def call(x: Tensor, w: Tensor, b: Tensor | None) -> Any:
        logits = reference.logits_of(x, w, b)
        found = reference.statistics(logits, p.t, o)
        return reference.loss(logits, p.t, **o), Statistics(**{n: found[n] for n in STATISTICS})

    return call


def near(actual: Tensor | None, expected: Tensor | None, dtype: torch.dtype = F32) -> None:
    """Like close, and infinities are equal."""
    if actual is None or expected is None:
        assert actual is expected
        return
    infinite = expected.isinf()
    assert torch.equal(actual.isinf(), infinite)
    assert torch.equal(actual[infinite].double(), expected[infinite].double())
    close(actual.masked_fill(infinite, 0), expected.masked_fill(infinite, 0), dtype)


def compare(actual: Made, expected: Made, dtype: torch.dtype, rows: slice) -> None:
    """`actual` has the gradients of the weight's and bias's `rows` alone."""
    near(actual.loss, expected.loss)
    for name, value in actual.statistics.items():
        near(value, expected.statistics[name])
    near(actual.grad_input, expected.grad_input, dtype)
    for grad, whole in zip(actual[3:], expected[3:]):
        near_rows(grad, whole, rows, dtype)


def near_rows(
    part: Tensor | None, whole: Tensor | None, rows: slice, dtype: torch.dtype = F32
) -> None:
    """An error is relative to the largest element of all rows."""
    if part is None or whole is None:
        assert part is whole
        return
    filled = whole.detach().clone()
    filled[rows] = part.to(whole.dtype)
    near(filled, whole, dtype)


def rows_of(tensor: Tensor | None, bounds: Bounds, rank: int, padding: int = 0) -> Any:
    """A rank's rows; the last rank's are followed by `padding` rows of NaN."""
    if tensor is None:
        return None
    start, stop = bounds[rank]
    own = tensor.detach()[start:stop]
    if padding and rank == len(bounds) - 1:
        own = torch.cat((own, own.new_full((padding, *own.shape[1:]), NAN)))
    return own.clone()


def sharded(
    me: Rank, p: Problem, bounds: Bounds, names: Sequence[str], upstreams: Sequence[Tensor],
    padding: int = 0, keep_layout: bool = False, group: Any = None, **options: Any,
) -> Made:  # fmt: skip
    rank = me.rank
    own = Problem(
        p.x,
        rows_of(p.w, bounds, rank, padding),
        rows_of(p.b, bounds, rank, padding),
        p.t,
    )

    def call(x: Tensor, w: Tensor, b: Tensor | None) -> Any:
        found = linear_cross_entropy(
            x, w, p.t, linear_bias=b, group=group or dist.group.WORLD, vocab_start=bounds[rank][0],
            vocab_total=bounds[-1][1], return_statistics=names, **options,
        )  # fmt: skip
        return found if names else (found, Statistics())

    return made_by(call, own, names, upstreams, keep_layout)


def upstreams_of(p: Problem, names: Sequence[str], reduction: str, factor: float) -> list[Tensor]:
    shape = p.t.shape if reduction == "none" else ()
    loss = factor * torch.randn(shape) if reduction == "none" else torch.tensor(factor)
    return [loss, *(torch.randn(p.t.shape) for name in names if name in DIFFERENTIABLE)]


def check(
    me: Rank, *, names: Sequence[str] = (), change: Callable[[Problem, Bounds], Any] | None = None,
    padding: int = 0, factor: float = 1.0, plain_only: bool = False, keep_layout: bool = False,
    given: Callable[[Problem], Mapping[str, Any]] | None = None,
    of: Mapping[str, Any] | None = None,
    **options: Any,
) -> Results:  # fmt: skip
    """A call of all ranks against f64 and one process. `of`: arguments of problem(); `change`
    changes the problem; `given` returns options that are tensors."""
    p, bounds = problem(me.size, **(of or {}))
    if change is not None:
        p = change(p, bounds) or p
    options |= given(p) if given else {}
    dtype = p.x.dtype
    upstreams = upstreams_of(p, names, options.get("reduction", "mean"), factor)

    def one_process(x: Tensor, w: Tensor, b: Tensor | None) -> Any:
        alone = {k: v for k, v in options.items() if k != "reduce_dtype"}
        found = linear_cross_entropy(x, w, p.t, linear_bias=b, return_statistics=names, **alone)
        return found if names else (found, Statistics())

    actual = sharded(me, p, bounds, names, upstreams, padding, keep_layout, **options)
    plain = made_by(one_process, p, names, upstreams)
    start, stop = bounds[me.rank]
    missing = actual.grad_weight.shape[0] - (stop - start)
    if missing:
        assert not actual.grad_weight[stop - start :].any()
        assert actual.grad_bias is None or not actual.grad_bias[stop - start :].any()
        actual = actual._replace(
            grad_weight=actual.grad_weight[: stop - start],
            grad_bias=None if actual.grad_bias is None else actual.grad_bias[: stop - start],
        )
    assert actual.grad_weight.dtype is dtype and actual.grad_input.dtype is dtype
    compare(actual, plain, dtype, slice(start, stop))
    if not plain_only:
        expected = made_by(of_reference(p, options), p, names, upstreams)
        compare(actual, expected, dtype, slice(start, stop))
    return actual.replicated()


def checked(name: str, **how: Any) -> None:
    """Adds the case `name`, a call of check."""
    assert name not in CASES
    CASES[name] = functools.partial(check, **how)


# --- shards and targets ---

for _cut in ("even", "uneven", "first empty", "last empty", "one has all"):
    checked(f"shards: {_cut}", of={"cut": _cut, "bias": True}, names=STATISTICS)
    checked(
        f"shards: {_cut}, none", of={"cut": _cut}, reduction="none", label_smoothing=0.1,
        names=("entropy",),
    )  # fmt: skip
for _targets in ("every shard", "one shard", "mixed"):
    checked(f"targets: {_targets}", of={"targets": _targets}, names=STATISTICS)
checked("targets: ignored", of={"targets": "ignored"}, names=STATISTICS, plain_only=True)
checked(
    "targets: ignored, empty_mean nan", of={"targets": "ignored"}, empty_mean="nan", plain_only=True
)
checked("empty_mean nan, some tokens", empty_mean="nan")
checked("targets: i32", change=lambda p, _: p._replace(t=p.t.int()), names=("argmax",))
for _n in (1, 7, 8):
    checked(f"tokens: {_n}", of={"shape": (_n,), "targets": "none ignored"}, reduction="sum")
checked("tokens: 0", of={"shape": (0,)}, reduction="sum", plain_only=True)
checked("tokens: one without dimensions", of={"shape": (), "targets": "none ignored"})
checked("hidden size 1", of={"hidden": 1})
checked("larger", of={"shape": (67,), "vocab": 1003, "hidden": 96}, names=("entropy", "argmax"))


def _shard_of_minus_infinity(p: Problem, bounds: Bounds) -> Problem:
    assert p.b is not None
    start, stop = bounds[0]
    p.b[start:stop] = -INFINITY
    return p._replace(t=torch.where((p.t >= start) & (p.t < stop), stop, p.t))


def _input_nan(p: Problem, _: Bounds) -> None:
    p.x.view(-1, p.x.shape[-1])[4] = NAN


def _weight_nan(p: Problem, bounds: Bounds) -> None:
    p.w[bounds[-1][0], 3] = NAN


def _none_ignored(p: Problem, _: Bounds) -> Problem:
    return p._replace(t=p.t.clamp(min=0))


checked(
    "a shard of -inf", of={"bias": True}, change=_shard_of_minus_infinity, reduction="none",
    names=("lse", "logprob", "entropy", "argmax", "sum_p_squared"), plain_only=True,
)  # fmt: skip
checked(
    "a shard of -inf against f64", of={"bias": True}, change=_shard_of_minus_infinity,
    names=("lse", "logprob"),
)  # fmt: skip
checked(
    "a shard of -inf, smoothing", of={"bias": True}, change=_shard_of_minus_infinity,
    reduction="none", label_smoothing=0.1, plain_only=True,
)  # fmt: skip
checked(
    "a row of NaN", of={"targets": "none ignored"}, change=_input_nan, reduction="none",
    names=("lse", "entropy"),
)  # fmt: skip
checked("a shard's weight of NaN", of={"targets": "none ignored"}, change=_weight_nan)
checked(
    "a shard's weight of NaN, none", of={"targets": "none ignored"}, change=_weight_nan,
    reduction="none", names=("lse", "logprob"),
)  # fmt: skip


@case
def a_row_of_minus_infinity(me: Rank) -> Results:
    """Every logit of a token is -inf: only its loss is NaN."""
    p, bounds = problem(me.size, (5,), targets="none ignored")
    p.x[:] = p.x.abs()
    p.w[:] = -p.w.abs()
    p.x[2] = INFINITY
    upstreams = upstreams_of(p, (), "none", 1.0)
    made = sharded(me, p, bounds, (), upstreams, reduction="none")
    assert made.loss.isnan().tolist() == [False, False, True, False, False]
    assert not made.grad_input[[0, 1, 3, 4]].isnan().any()
    return made.replicated()


# --- options ---


def _class_weight(p: Problem) -> dict[str, Any]:
    return {"weight": torch.rand(p.w.shape[0])}


def _token_weight(p: Problem) -> dict[str, Any]:
    return {"token_weight": torch.rand(p.t.shape)}


def _temperatures(p: Problem) -> dict[str, Any]:
    return {"temperature": 0.5 + torch.rand(p.t.shape)}


def _all_tensors(p: Problem) -> dict[str, Any]:
    return {**_class_weight(p), **_token_weight(p), **_temperatures(p)}


OPTIONS: dict[str, dict[str, Any]] = {
    "smoothing": {"label_smoothing": 0.2},
    "smoothing of 1": {"label_smoothing": 1.0},
    "class weights": {"given": _class_weight},
    "token weights": {"given": _token_weight},
    "z_loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 2.0},
    "logit_scale": {"logit_scale": 0.3},
    "temperature": {"temperature": 0.6},
    "temperatures": {"given": _temperatures},
    "bias": {"of": {"bias": True}},
    "ignore_index": {"ignore_index": 3, "of": {"targets": "none ignored"}},
    "smoothing, class weights": {"label_smoothing": 0.2, "given": _class_weight},
    "z_loss, token weights": {"z_loss": 1e-2, "given": _token_weight},
    "softcap, temperatures, bias": {
        "softcap": 2.0, "given": _temperatures, "of": {"bias": True},
    },
    "everything": {
        "label_smoothing": 0.2, "z_loss": 1e-3, "logit_scale": 0.5, "softcap": 3.0,
        "given": _all_tensors, "of": {"bias": True}, "names": ("lse", "entropy", "target_logit"),
    },
}  # fmt: skip
for _name, _how in OPTIONS.items():
    for _reduction in ("none", "sum", "mean"):
        checked(f"options: {_name}, {_reduction}", **_how, reduction=_reduction, factor=-1.5)
checked("normalizer: a number", normalizer=7.0, factor=2.0)
checked("normalizer: f32", given=lambda p: {"normalizer": torch.tensor(7.5)})
checked("normalizer: i64", given=lambda p: {"normalizer": torch.tensor(7)}, names=("entropy",))
checked("normalizer: 0", normalizer=0.0, plain_only=True)
checked("normalizer: 0, nan", normalizer=0.0, empty_mean="nan", plain_only=True)
for _name in STATISTICS:
    checked(f"statistics: {_name}", names=(_name,), reduction="none")
    checked(f"statistics: {_name}, softcap", names=(_name,), softcap=1.5, temperature=0.7)
checked("statistics: all, bias", names=STATISTICS, of={"bias": True}, reduction="sum", factor=0.0)
for _dtype in (BF16, F16):
    _of = {"dtype": _dtype, "bias": True, "shape": (2, 9)}
    _text = str(_dtype)[6:]
    checked(f"{_text}", of=_of)
    checked(f"{_text}, none", of=_of, reduction="none", names=("entropy",), label_smoothing=0.1)
    checked(f"{_text}, reduce_dtype input", of=_of, reduce_dtype="input")
checked("f16, a scaled loss", of={"dtype": F16}, factor=1024.0)
checked("reduce_dtype input", reduce_dtype="input")
checked("memory: 64MiB", memory="64MiB", names=("entropy",), of={"bias": True})
checked("padding", padding=3, of={"bias": True}, names=STATISTICS, label_smoothing=0.1)
checked("padding of a shard that is empty", padding=4, of={"bias": True, "cut": "last empty"})
checked("sentinel that is a padded column", padding=3, ignore_index=37, change=lambda p, _: (
    p._replace(t=torch.where(p.t < 0, 37, p.t))
))  # fmt: skip


@case
def padding_by_the_default_split(me: Rank) -> Results:
    """With a total and no start, ranks have torch.chunk's shares; later rows are padding."""
    p, _ = problem(me.size, vocab=37, cut="even")
    each = -(-37 // me.size)
    ends = [min(37, each * (rank + 1)) for rank in range(me.size)]
    bounds = list(zip([0, *ends], ends))
    start, stop = bounds[me.rank]
    x = leaf(p.x)
    w = torch.full((each, p.w.shape[1]), NAN)
    w[: stop - start] = p.w[start:stop]
    w.requires_grad_()
    loss = linear_cross_entropy(x, w, p.t, group=dist.group.WORLD, vocab_total=37)
    loss.backward()
    one, whole = leaf(p.x), leaf(p.w)
    linear_cross_entropy(one, whole, p.t).backward()
    assert w.grad is not None and whole.grad is not None and not w.grad[stop - start :].any()
    close(x.grad, one.grad)
    close(w.grad[: stop - start], whole.grad[start:stop])
    return {"loss": loss, "grad": x.grad}


@case
def equal_shards_with_padding(me: Rank) -> Results:
    """As Megatron pads: ranks have 16 rows each; the last ranks' are partly or all padding."""
    vocab = 5 + 16 * max(me.size - 2, 1)
    p, _ = problem(me.size, vocab=vocab)
    padded = torch.full((16 * me.size, p.w.shape[1]), NAN)
    padded[:vocab] = p.w
    x = leaf(p.x)
    plain = linear_cross_entropy(x, p.w, p.t)
    plain.backward()
    results = {}
    how: dict[str, Any]
    for how in ({}, {"vocab_start": 16 * me.rank}):
        own_x, own = leaf(p.x), leaf(padded.chunk(me.size)[me.rank])
        loss = linear_cross_entropy(
            own_x, own, p.t, group=dist.group.WORLD, vocab_total=vocab, **how
        )
        loss.backward()
        close(loss, plain)
        close(own_x.grad, x.grad)
        assert own.grad is not None and not own.grad.isnan().any()
        results[str(how.keys())] = own_x.grad
    return results


@case
def equal_shards_by_default(me: Rank) -> Results:
    p, bounds = problem(me.size, vocab=12 * me.size, cut="even")
    own = rows_of(p.w, bounds, me.rank)
    loss = linear_cross_entropy(p.x, own, p.t, group=dist.group.WORLD)
    close(loss, linear_cross_entropy(p.x, p.w, p.t))
    name = dist.group.WORLD.group_name
    by_name = linear_cross_entropy(p.x, own, p.t, group=name)
    assert torch.equal(loss, by_name)
    return {"loss": loss}


# --- layouts ---


def _transposed(p: Problem, _: Bounds) -> Problem:
    return p._replace(x=p.x.movedim(-1, 0).contiguous().movedim(0, -1))


def _sliced(p: Problem, _: Bounds) -> Problem:
    wide = torch.randn(*p.x.shape[:-1], 2 * p.x.shape[-1])
    return p._replace(x=wide[..., ::2])


def _expanded(p: Problem, _: Bounds) -> Problem:
    return p._replace(x=p.x[:1].expand_as(p.x))


def _shifted_rows(p: Problem, _: Bounds) -> Problem:
    """A slice as in next-token prediction: [B, T, D] is no matrix of rows without a copy."""
    return p._replace(x=torch.randn(3, 6, p.x.shape[-1])[:, :-1])


for _name, _change in {
    "transposed": _transposed, "sliced": _sliced, "expanded": _expanded, "rows cut": _shifted_rows,
}.items():  # fmt: skip
    checked(f"layout: {_name}", change=_change, keep_layout=True)
    checked(f"layout: {_name}, none", change=_change, keep_layout=True, reduction="none")
    checked(f"layout: {_name}, input", change=_change, keep_layout=True, reduce_dtype="input")


@case
def a_transposed_weight_and_upstreams_of_other_layouts(me: Rank) -> Results:
    p, bounds = problem(me.size, bias=True)
    start, stop = bounds[me.rank]
    x, w = leaf(p.x), rows_of(p.w, bounds, me.rank).t().contiguous().t().requires_grad_()
    one, whole = leaf(p.x), leaf(p.w)
    losses = linear_cross_entropy(
        x, w, p.t, group=dist.group.WORLD, vocab_start=start, vocab_total=37, reduction="none"
    )
    expected = linear_cross_entropy(one, whole, p.t, reduction="none")
    upstream = torch.randn(5, 3).t()
    losses.backward(upstream)
    expected.backward(upstream)
    close(x.grad, one.grad)
    near_rows(w.grad, whole.grad, slice(start, stop))
    return {"losses": losses, "grad": x.grad}


# --- autograd ---


def call_own(me: Rank, p: Problem, bounds: Bounds, **options: Any) -> Any:
    """The result, and the leaves of input and weight."""
    x, w = leaf(p.x), rows_of(p.w, bounds, me.rank).requires_grad_()
    options = {"group": dist.group.WORLD, "vocab_start": bounds[me.rank][0], **options}
    loss = linear_cross_entropy(x, w, p.t, vocab_total=bounds[-1][1], **options)
    return loss, x, w


@case
def two_backwards(me: Rank) -> Results:
    p, bounds = problem(me.size)
    loss, x, w = call_own(me, p, bounds)
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    second = torch.autograd.grad(3 * loss, (x, w), retain_graph=True)
    loss.backward()
    assert torch.equal(first[0], x.grad) and torch.equal(first[1], w.grad)
    close(second[0], 3 * first[0])
    close(second[1], 3 * first[1])
    return {"first": first[0], "second": second[0]}


def replays_of_a_graph(me: Rank) -> Results:
    """A CUDA graph of loss and gradients with their collectives, replayed many times."""
    p, bounds = problem(me.size)
    start, stop = bounds[me.rank]
    x, w = leaf(p.x), leaf(p.w[start:stop])
    options = {"group": dist.group.WORLD, "vocab_start": start, "vocab_total": bounds[-1][1]}

    def call() -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(x, w, p.t, **options)
        return loss.detach(), *torch.autograd.grad(loss, (x, w))

    expected = call()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    for _ in range(100):
        for tensor in made:
            tensor.fill_(float("nan"))
        graph.replay()
        for tensor, before in zip(made, expected, strict=True):
            assert torch.equal(tensor, before)
    return {"loss": made[0], "grad": made[1]}


if ranks.BACKEND == "nccl":
    case(replays_of_a_graph)


@case
def a_result_used_twice(me: Rank) -> Results:
    p, bounds = problem(me.size)
    loss, x, _ = call_own(me, p, bounds)
    (loss * loss + loss).backward()
    one = leaf(p.x)
    plain = linear_cross_entropy(one, p.w, p.t)
    (plain * plain + plain).backward()
    close(x.grad, one.grad)
    return {"grad": x.grad}


@case
def gradients_of_some_inputs_only(me: Rank) -> Results:
    p, bounds = problem(me.size)
    start, stop = bounds[me.rank]
    where: dict[str, Any] = {"group": dist.group.WORLD, "vocab_start": start, "vocab_total": 37}
    x, own = leaf(p.x), p.w[start:stop]
    linear_cross_entropy(x, own, p.t, **where).backward()
    w = leaf(own)
    linear_cross_entropy(p.x, w, p.t, **where).backward()
    loss, both, weight = call_own(me, p, bounds)
    loss.backward()
    assert torch.equal(x.grad, both.grad) and torch.equal(w.grad, weight.grad)
    return {"grad": x.grad}


@case
def create_graph(me: Rank) -> Results:
    """Gradients of gradients are an error, whichever gradients were asked for."""
    p, bounds = problem(me.size)
    start, stop = bounds[me.rank]
    where: dict[str, Any] = {"group": dist.group.WORLD, "vocab_start": start, "vocab_total": 37}
    x, frozen = leaf(p.x), p.w[start:stop]
    loss = linear_cross_entropy(x, frozen, p.t, **where)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once only"):
        grad.square().sum().backward()
    loss, x, w = call_own(me, p, bounds)
    _, of_weight = torch.autograd.grad(loss, (x, w), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once only"):
        (of_weight.square().sum() + 0 * x.sum()).backward()
    return {"grad": grad}


@case
def no_grad(me: Rank) -> Results:
    p, bounds = problem(me.size)
    with torch.no_grad():
        loss, *_ = call_own(me, p, bounds, reduction="none")
    assert not loss.requires_grad
    with torch.inference_mode():
        again, *_ = call_own(me, p, bounds, reduction="none")
    assert torch.equal(loss, again)
    close(loss, linear_cross_entropy(p.x, p.w, p.t, reduction="none"))
    return {"loss": loss}


@case
def inputs_changed_before_backward(me: Rank) -> Results:
    p, bounds = problem(me.size)
    loss, x, _ = call_own(me, p, bounds)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()
    return {"loss": loss}


@case
def autocast(me: Rank) -> Results:
    """Products in bf16, gradients in the parameters' f32: not rounded on the way."""
    p, bounds = problem(me.size, bias=True)
    own = p._replace(b=None)
    with torch.autocast("cpu", BF16):
        loss, x, w = call_own(me, own, bounds)
        one, whole = leaf(p.x), leaf(p.w)
        plain = linear_cross_entropy(one, whole, p.t)
    loss.backward()
    plain.backward()
    close(loss, plain, BF16)
    close(x.grad, one.grad, BF16)
    start, stop = bounds[me.rank]
    near_rows(w.grad, whole.grad, slice(start, stop), BF16)
    for grad in (x.grad, w.grad):
        assert grad is not None and grad.dtype is F32
        assert not torch.equal(grad, grad.bfloat16().float())
    return {"loss": loss, "grad": x.grad}


class _ToAll(Function):
    """The sum over ranks, whose upstream is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@case
def tied_weight(me: Rank) -> Results:
    """The embedding's rows are the head's: one gradient, the sum of both uses."""
    p, bounds = problem(me.size)
    start, stop = bounds[me.rank]
    words = torch.randint(0, 37, p.t.shape)
    w = leaf(p.w[start:stop])
    here = (words >= start) & (words < stop)
    apply: Any = _ToAll.apply
    own = torch.nn.functional.embedding((words - start).where(here, torch.zeros_like(words)), w)
    x = apply(own * here[..., None])
    loss = linear_cross_entropy(
        x, w, p.t, group=dist.group.WORLD, vocab_start=start, vocab_total=37
    )
    loss.backward()
    whole = leaf(p.w)
    linear_cross_entropy(torch.nn.functional.embedding(words, whole), whole, p.t).backward()
    near_rows(w.grad, whole.grad, slice(start, stop))
    return {"loss": loss}


@case
def parts_of_grad_input(me: Rank) -> Results:
    """With reduce_input_grad=False, the ranks' parts add up to the reduced gradient."""
    p, bounds = problem(me.size, (4, 7), bias=False)
    loss, x, w = call_own(me, p, bounds)
    loss.backward()
    partial, px, pw = call_own(me, p, bounds, reduce_input_grad=False)
    partial.backward()
    assert px.grad is not None and torch.equal(pw.grad, w.grad)
    assert not torch.allclose(px.grad, x.grad)
    dist.all_reduce(px.grad)
    close(px.grad, x.grad)
    return {"loss": partial, "grad": x.grad}


@case
def the_same_bits_in_20_runs(me: Rank) -> Results:
    p, bounds = problem(me.size, (23,), vocab=301, hidden=48)
    runs = []
    for _ in range(20):
        loss, x, w = call_own(me, p, bounds, return_statistics=("entropy",), reduction="none")
        (loss[0] + loss[1].entropy).sum().backward()
        runs.append((loss[0], loss[1].entropy, x.grad, w.grad))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))
    return {"loss": runs[0][0], "entropy": runs[0][1], "grad": runs[0][2]}


@case
def a_row_does_not_depend_on_the_others(me: Rank) -> Results:
    """Loss, entropy and, on a CPU, grad_input of a row alone have the bits of that row among
    others."""
    gpu = ranks.BACKEND != "gloo"  # f32 products on a GPU have no fixed bits
    dtype = BF16 if gpu else F32
    p, bounds = problem(me.size, (9,), targets="none ignored", dtype=dtype)
    names = ("entropy",)

    def run(rows: slice) -> Made:
        some = Problem(p.x[rows], p.w, None, p.t[rows])
        upstreams = [torch.ones_like(some.t) * 0.7, torch.ones_like(some.t) * -0.3]
        return sharded(me, some, bounds, names, upstreams, reduction="none")

    whole = run(slice(0, 9))
    for row in (0, 4, 8):
        one = run(slice(row, row + 1))
        assert torch.equal(one.loss, whole.loss[row : row + 1])
        assert torch.equal(one.statistics["entropy"], whole.statistics["entropy"][row : row + 1])
        assert gpu or torch.equal(one.grad_input, whole.grad_input[row : row + 1])
    return whole.replicated()


@case
def checkpointed(me: Rank) -> Results:
    """The checkpoint's backward runs the forward again, with its collectives, on all ranks."""
    p, bounds = problem(me.size)
    loss, x, w = call_own(me, p, bounds)
    loss.backward()
    own = [leaf(x), leaf(w)]
    where: dict[str, Any] = {
        "group": dist.group.WORLD,
        "vocab_start": bounds[me.rank][0],
        "vocab_total": 37,
    }

    def head(x: Tensor, w: Tensor) -> Any:
        return linear_cross_entropy(x, w, p.t, **where)

    again: Any = torch.utils.checkpoint.checkpoint(head, *own, use_reentrant=False)
    again.backward()
    for ours, theirs in zip([again, *(t.grad for t in own)], (loss, x.grad, w.grad)):
        close(ours, theirs.double())
    return {"loss": again, "grad": own[0].grad}


@case
def a_loss_that_is_scaled(me: Rank) -> Results:
    """f16 with a scaler's factor. A gradient must not be rounded before it is scaled."""
    p, bounds = problem(me.size, dtype=F16)
    loss, x, w = call_own(me, p, bounds)
    (loss * 2.0**15).backward()
    one, whole = leaf(p.x), leaf(p.w)
    (linear_cross_entropy(one, whole, p.t) * 2.0**15).backward()
    close(x.grad, one.grad, F16)
    near_rows(w.grad, whole.grad, slice(*bounds[me.rank]), F16)
    return {"loss": loss, "grad": x.grad}


# --- log-probabilities ---


def _logprob(me: Rank, entropy: Any, **options: Any) -> Results:
    p, bounds = problem(me.size, bias=True)
    start, stop = bounds[me.rank]
    x, w, b = leaf(p.x), leaf(p.w[start:stop]), leaf(p.b[start:stop])
    one, whole, biases = leaf(p.x), leaf(p.w), leaf(p.b)
    where: dict[str, Any] = {"group": dist.group.WORLD, "vocab_start": start, "vocab_total": 37}
    made = linear_logprob(x, w, p.t, linear_bias=b, entropy=entropy, **where, **options)
    plain = linear_logprob(one, whole, p.t, linear_bias=biases, entropy=entropy, **options)
    made, plain = (made, plain) if entropy else ((made,), (plain,))
    ups = [torch.randn(p.t.shape) for t in made if t.requires_grad]
    assert len(ups) == (2 if entropy is True else 1)
    assert [t.requires_grad for t in made] == [t.requires_grad for t in plain]
    torch.autograd.backward(made[: len(ups)], ups)
    torch.autograd.backward(plain[: len(ups)], ups)
    for ours, theirs in zip(made, plain):
        close(ours, theirs)
    close(x.grad, one.grad)
    near_rows(w.grad, whole.grad, slice(start, stop))
    near_rows(b.grad, biases.grad, slice(start, stop))
    found = reference.statistics(reference.logits_of(p.x, p.w, p.b), p.t, options)
    close(made[0], found["logprob"])
    if entropy:
        close(made[1], found["entropy"])
    assert (made[0] <= 0).all()
    return {"grad": x.grad, **{str(i): t for i, t in enumerate(made)}}


for _entropy in (False, True, "detached"):
    for _name, _how in {
        "plain": {}, "temperature": {"temperature": 0.7}, "softcap": {"softcap": 2.0},
    }.items():  # fmt: skip
        CASES[f"linear_logprob: entropy {_entropy}, {_name}"] = functools.partial(
            _logprob, entropy=_entropy, **_how
        )


# --- hidden states split along a dimension of tokens ---


def own_of(x: Tensor, me: Rank, dim: int) -> Tensor:
    return x.chunk(me.size, dim)[me.rank].clone()


def _sequence(
    me: Rank, dim: int, local: bool, reduction: str, names: Sequence[str] = (),
    given: Callable[[Problem], Mapping[str, Any]] | None = None, dtype: torch.dtype = F32,
    unused: bool = False, **options: Any,
) -> Results:  # fmt: skip
    """A case of hidden states split along `dim`. `unused`: rank 0 does not use its loss."""
    size = me.size
    shape = (2 * size, 3) if dim == 0 else (3, 2 * size)
    p, bounds = problem(size, shape, bias=True, dtype=dtype)
    start, stop = bounds[me.rank]
    options |= given(p) if given else {}
    options |= {"reduction": reduction}
    # Each rank has its own factor if its outputs are those of its own tokens.
    factors = torch.tensor([(rank + 2.0) if local else 1.5 for rank in range(size)])
    if unused:
        factors[0] = 0
    of_token = factors.repeat_interleave(2).view((-1, 1) if dim == 0 else (1, -1)).expand(shape)
    weights = [torch.randn(shape) for _ in range(1 + len(names))]

    own_x: Any = leaf(own_of(p.x, me, dim))
    own_w, own_b = leaf(p.w[start:stop]), leaf(p.b[start:stop])
    mine: dict[str, Any] = dict(options)
    t = own_of(p.t, me, dim) if local else p.t
    if local:
        for name in ("token_weight", "temperature"):
            if isinstance(mine.get(name), Tensor):
                mine[name] = own_of(mine[name], me, dim)
    found = linear_cross_entropy(
        own_x, own_w, t, linear_bias=own_b, group=dist.group.WORLD, vocab_start=start,
        vocab_total=37, sequence_dim=dim if local else dim - 3, local_tokens=local,
        return_statistics=names, **mine,
    )  # fmt: skip
    loss, statistics = found if names else (found, Statistics())
    scale = factors[me.rank]
    own_weights = [own_of(v, me, dim) if local else v for v in weights]
    total = scale * (loss * own_weights[0] if reduction == "none" else loss).sum()
    if unused and me.rank == 0:
        total = 0
    for name, weight in zip(names, own_weights[1:]):
        total = total + scale * (getattr(statistics, name) * weight).sum()
    total.backward()

    def expected(function: Callable[..., Any]) -> Any:
        """Gradients of the ranks' totals together, and the loss of each token."""
        x, w, b = leaf(p.x), leaf(p.w), leaf(p.b)
        losses, others = function(x, w, b)
        by: Any = 1.0
        if reduction == "mean":
            by = options.get("normalizer")
            if by is None:
                c = options.get("weight", torch.ones(37))
                by = (c[p.t.clamp(min=0)] * (p.t >= 0)).sum()
        value = (losses * (weights[0] if reduction == "none" else 1 / by) * of_token).sum()
        for name, weight in zip(names, weights[1:]):
            value = value + (getattr(others, name) * weight * of_token).sum()
        value.backward()
        return losses, others, by, x.grad, w.grad, b.grad

    alone = {k: v for k, v in options.items() if k not in ("normalizer", "reduction")}
    f64 = {**options, "reduction": "none"}

    def one_process(x: Tensor, w: Tensor, b: Tensor) -> Any:
        result = linear_cross_entropy(
            x, w, p.t, linear_bias=b, reduction="none", return_statistics=names, **alone
        )
        return result if names else (result, Statistics())

    results: dict[str, Tensor] = {}
    for function in (of_reference(p, f64), one_process):
        losses, others, by, grad_x, grad_w, grad_b = expected(function)
        want = own_of(losses, me, dim) if local else losses
        if reduction != "none":
            want = want.sum() / by
        close(loss, want)
        for name in names:
            whole = getattr(others, name)
            close(getattr(statistics, name), own_of(whole, me, dim) if local else whole)
        close(own_x.grad, own_of(grad_x, me, dim), dtype)
        near_rows(own_w.grad, grad_w, slice(start, stop), dtype)
        near_rows(own_b.grad, grad_b, slice(start, stop), dtype)
    assert own_x.grad is not None and own_x.grad.shape == own_x.shape
    if local and reduction != "none":  # each rank has its own tokens' part of the loss
        both = loss.detach().clone()
        dist.all_reduce(both)
        close(both, losses.sum() / by)
    if not local:
        results = {"loss": loss, **{name: getattr(statistics, name) for name in names}}
    return results


for _local in (False, True):
    for _dim in (0, 1):
        for _reduction in ("none", "sum", "mean"):
            _text = f"sequence_dim {_dim}{', local_tokens' if _local else ''}, {_reduction}"
            CASES[_text] = functools.partial(
                _sequence, dim=_dim, local=_local, reduction=_reduction
            )
            CASES[f"{_text}, statistics"] = functools.partial(
                _sequence, dim=_dim, local=_local, reduction=_reduction, names=DIFFERENTIABLE
            )
    _text = f"sequence_dim{', local_tokens' if _local else ''}"
    CASES[f"{_text}, tensors"] = functools.partial(
        _sequence, dim=1, local=_local, reduction="mean", given=_all_tensors, label_smoothing=0.1,
        z_loss=1e-3,
    )  # fmt: skip
    CASES[f"{_text}, class weights, none"] = functools.partial(
        _sequence, dim=0, local=_local, reduction="none", given=_class_weight
    )
    CASES[f"{_text}, normalizer"] = functools.partial(
        _sequence, dim=1, local=_local, reduction="mean", normalizer=7.0
    )
    CASES[f"{_text}, normalizer a tensor"] = functools.partial(
        _sequence, dim=1, local=_local, reduction="mean",
        given=lambda p: {"normalizer": torch.tensor(7.0)},
    )  # fmt: skip
    CASES[f"{_text}, bf16"] = functools.partial(
        _sequence, dim=1, local=_local, reduction="mean", dtype=BF16
    )
CASES["local_tokens, a rank's loss unused"] = functools.partial(
    _sequence, dim=1, local=True, reduction="sum", names=("logprob", "entropy"), unused=True
)


@case
def local_tokens_all_ignored(me: Rank) -> Results:
    """First no token of rank 0 counts, then no token of any rank."""
    p, bounds = problem(me.size, (2, 2 * me.size), targets="none ignored")
    t = p.t.clone()
    t[:, :2] = -100
    for targets, empty in ((t, "zero"), (torch.full_like(t, -100), "zero"),
                           (torch.full_like(t, -100), "nan")):  # fmt: skip
        own = leaf(own_of(p.x, me, 1))
        some = p._replace(x=own, t=own_of(targets, me, 1))
        loss, x, _ = call_own(me, some, bounds, sequence_dim=1, local_tokens=True, empty_mean=empty)
        loss.backward()
        whole = leaf(p.x)
        plain = linear_cross_entropy(whole, p.w, targets, empty_mean=empty)
        plain.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if empty == "nan":
            assert loss.isnan() and not x.grad.isnan().any()
        else:
            close(total, plain)
            close(x.grad, own_of(whole.grad, me, 1))
    return {}


@case
def linear_logprob_of_local_tokens(me: Rank) -> Results:
    p, bounds = problem(me.size, (2, 2 * me.size))
    start, stop = bounds[me.rank]
    x, w = leaf(own_of(p.x, me, 1)), leaf(p.w[start:stop])
    logprob, entropy = linear_logprob(
        x, w, own_of(p.t, me, 1), group=dist.group.WORLD, vocab_start=start, vocab_total=37,
        sequence_dim=1, local_tokens=True, entropy=True,
    )  # fmt: skip
    one, whole = leaf(p.x), leaf(p.w)
    plain, theirs = linear_logprob(one, whole, p.t, entropy=True)
    weights = torch.randn(2, *p.t.shape)
    own = own_of(weights, me, 2)
    (logprob * own[0] + entropy * own[1]).sum().backward()
    (plain * weights[0] + theirs * weights[1]).sum().backward()
    close(logprob, own_of(plain, me, 1))
    close(entropy, own_of(theirs, me, 1))
    close(x.grad, own_of(one.grad, me, 1))
    near_rows(w.grad, whole.grad, slice(start, stop))
    return {}


@case
def shift(me: Rank) -> Results:
    """The targets of all tokens move before anything is split."""
    p, bounds = problem(me.size, (2, 2 * me.size))
    plain = linear_cross_entropy(p.x, p.w, p.t, shift=True)
    loss, *_ = call_own(me, p, bounds, shift=True)
    split, *_ = call_own(me, p._replace(x=own_of(p.x, me, 1)), bounds, shift=True, sequence_dim=1)
    close(loss, plain)
    close(split, plain)
    return {"loss": loss, "split": split}


# --- groups ---


@case
def a_group_of_one(me: Rank) -> Results:
    """The results have the bits of the call without a group."""
    groups = [dist.new_group([rank]) for rank in range(me.size)]
    p, _ = problem(1, bias=True)

    def run(**options: Any) -> list[Tensor]:
        x, w, b = leaf(p.x), leaf(p.w), leaf(p.b)
        if options.pop("padded", False):
            w = leaf(torch.cat((p.w, p.w.new_full((2, p.w.shape[1]), NAN))))
            b = leaf(torch.cat((p.b, p.b.new_full((2,), NAN))))
        found = linear_cross_entropy(x, w, p.t, linear_bias=b, **options)
        loss, rest = found if isinstance(found, tuple) else (found, ())
        loss.sum().backward()
        grads = [x.grad, w.grad, b.grad]
        return [loss, *(t for t in rest if t is not None), *grads]

    one = {"group": groups[me.rank]}
    ours: dict[str, Any]
    for options in ({}, {"reduction": "none", "label_smoothing": 0.1},
                    {"return_statistics": ("entropy", "rank", "argmax")}):  # fmt: skip
        plain = run(**options)
        for ours in ({}, {"vocab_total": 37}, {"vocab_start": 0, "vocab_total": 37},
                     {"sequence_dim": 1}, {"sequence_dim": 0, "local_tokens": True},
                     {"reduce_dtype": "input"}):  # fmt: skip
            for a, b in zip(run(**one, **ours, **options), plain):
                assert torch.equal(a, b)
        padded = run(**one, padded=True, vocab_total=37, **options)
        for a, b in zip(padded, plain):
            assert torch.equal(a[:37] if a.shape[:1] == (39,) else a, b)
        assert not padded[-1][37:].any() and not padded[-2][37:].any()
    assert torch.equal(linear_logprob(p.x, p.w, p.t, **one), linear_logprob(p.x, p.w, p.t))
    with pytest.raises(ValueError, match="vocabulary"):
        run(vocab_start=0, vocab_total=40, **one)
    return {}


@case
def a_part_of_the_world(me: Rank) -> Results:
    """All ranks but the first are a group; the first raises an error that names the group."""
    group = dist.new_group(list(range(1, me.size)))
    p, bounds = problem(me.size - 1)
    if me.rank == 0:
        with pytest.raises(ValueError, match="group"):
            call_own(me, p, bounds, group=group)
        return {}
    inner = Rank(me.rank - 1, me.size - 1)
    upstreams = [torch.tensor(1.0)]
    made = sharded(inner, p, bounds, (), upstreams, group=group)
    start, stop = bounds[inner.rank]
    expected = made_by(of_reference(p, {}), p, (), upstreams)
    compare(made, expected, F32, slice(start, stop))
    return made.replicated()


@case
def an_input_where_the_group_exchanges_nothing(me: Rank) -> Results:
    """On the CPU, with a group that has collectives of GPUs alone."""
    p, bounds = problem(me.size)
    p = Problem(*(None if t is None else t.cpu() for t in p))
    real, dist.get_backend_config = dist.get_backend_config, lambda group: "cuda:nccl"
    try:
        with pytest.raises(RuntimeError, match=r"input is on cpu; allowed: cuda, .*\(cuda:nccl\)"):
            call_own(me, p, bounds)
    finally:
        dist.get_backend_config = real
    return {}


@case
def a_mesh_of_two_dimensions(me: Rank) -> Results:
    """Two replicas have different tokens, and the normalizer counts the tokens of both."""
    if me.size != 4:
        return {}
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    p, bounds = problem(2, (4, 6))
    dp, tp = divmod(me.rank, 2)
    count = int((p.t >= 0).sum())
    own = p._replace(x=p.x[2 * dp : 2 * dp + 2], t=p.t[2 * dp : 2 * dp + 2])
    loss, x, w = call_own(Rank(tp, 2), own, bounds, group=groups[dp], normalizer=float(count))
    loss.backward()
    both, grad_w = loss.detach().clone(), w.grad.clone()
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])][tp]
    dist.all_reduce(both, group=columns)
    dist.all_reduce(grad_w, group=columns)
    one, whole = leaf(p.x), leaf(p.w)
    plain = linear_cross_entropy(one, whole, p.t)
    plain.backward()
    close(both, plain)
    close(x.grad, one.grad[2 * dp : 2 * dp + 2])
    close(grad_w, whole.grad[slice(*bounds[tp])])
    return {"loss": both, f"loss {dp}": loss, f"grad {dp}": x.grad}


# --- errors: the same on every rank, and no rank hangs ---


def refusal(
    kind: type[Exception] | tuple[type[Exception], ...], match: str, call: Callable[[], Any]
) -> Tensor:
    with pytest.raises(kind, match=match) as raised:
        call()
    text = f"{type(raised.value).__name__}: {raised.value}"
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _refused(
    me: Rank, kind: type[Exception], match: str, change: Callable[[Problem, Bounds], Any] | None,
    of: Mapping[str, Any], options: Mapping[str, Any],
) -> Results:  # fmt: skip
    p, bounds = problem(me.size, **of)
    if change is not None:
        p = change(p, bounds) or p
    text = refusal(kind, match, lambda: call_own(me, p, bounds, **options))
    loss, *_ = call_own(me, problem(me.size)[0], bounds_of("uneven", me.size, 37))
    return {"text": text, "loss": loss.detach() * 0}  # no rank is out of step


def refused(
    name: str, kind: type[Exception], match: str,
    change: Callable[[Problem, Bounds], Any] | None = None, of: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:  # fmt: skip
    assert name not in CASES
    CASES[name] = functools.partial(
        _refused, kind=kind, match=match, change=change, of=of or {}, options=options
    )


def _target(value: int) -> Callable[[Problem, Bounds], None]:
    def change(p: Problem, _: Bounds) -> None:
        p.t.view(-1)[3] = value

    return change


for _cut in ("uneven", "first empty", "last empty"):
    _of = {"cut": _cut}
    refused(f"target too large, {_cut}", ValueError, r"^target\[0, 3\] .*is 37", _target(37), _of)
    refused(f"target negative, {_cut}", ValueError, r"^target\[0, 3\] .*is -1", _target(-1), _of)
    refused(f"memory too small, {_cut}", ValueError, "memory is 1 bytes", None, _of, memory=1)
    refused(f"bad option, {_cut}", ValueError, "label_smoothing", None, _of, label_smoothing=1.5)
    refused(
        f"normalizer of a sum, {_cut}", ValueError, "normalizer", None, _of, normalizer=2.0,
        reduction="sum",
    )  # fmt: skip
    refused(f"normalizer below 0, {_cut}", ValueError, "normalizer", None, _of, normalizer=-1.0)
    refused(f"input of f64, {_cut}", TypeError, "f64|float64",
            lambda p, _: p._replace(x=p.x.double()), _of)  # fmt: skip
    refused(f"class weights of a shard, {_cut}", ValueError, "weight has shape", None, _of,
            weight=torch.ones(5))  # fmt: skip
refused("rank statistic", NotImplementedError, "rank", return_statistics=("rank",))
refused("mass statistic", NotImplementedError, "mass_above", return_statistics=("mass_above",))
refused("sequence_dim out of range", ValueError, "sequence_dim is 2 of an input", sequence_dim=2)
refused("sequence_dim too small", ValueError, "sequence_dim is -4", sequence_dim=-4)
refused("sequence_dim of the hidden size", ValueError, "sequence_dim is -1", sequence_dim=-1)
refused("local_tokens alone", ValueError, "local_tokens is True without", local_tokens=True)
refused("reduce_dtype", ValueError, "reduce_dtype is 'f32'; allowed", reduce_dtype="f32")
refused("parts with sequence_dim", ValueError, "reduce_input_grad is False", sequence_dim=1,
        reduce_input_grad=False)  # fmt: skip
refused("a group that is a list", ValueError, "group is a list; allowed", group=[0, 1])
refused("shift of local tokens", ValueError, "shift", shift=True, sequence_dim=1, local_tokens=True)


@case
def vocab_start_without_vocab_total(me: Rank) -> Results:
    p, bounds = problem(me.size)
    where: dict[str, Any] = {"group": dist.group.WORLD, "vocab_start": bounds[me.rank][0]}
    return {
        "text": refusal(
            ValueError,
            "without Split.total",
            lambda: linear_cross_entropy(p.x, p.w, p.t, **where),
        )
    }


@case
def a_split_with_a_gap_or_an_overlap(me: Rank) -> Results:
    """Every rank raises an error, even if only one rank's share is wrong."""
    p, bounds = problem(me.size)
    texts = {}
    for name, change in (("gap", -1), ("overlap", 1)):
        start, stop = bounds[me.rank]
        stop += change if me.rank == 0 else 0
        texts[name] = refusal(
            ValueError, "vocabulary",
            lambda start=start, stop=stop: linear_cross_entropy(
                p.x, p.w[start:stop], p.t, group=dist.group.WORLD, vocab_start=start,
                vocab_total=37,
            ),
        )  # fmt: skip
    each = -(-37 // me.size)
    rows = 1 if me.rank == 0 else each  # fewer than torch.chunk would give
    texts["chunk"] = refusal(
        ValueError, "vocabulary",
        lambda: linear_cross_entropy(
            p.x, p.w[:rows], p.t, group=dist.group.WORLD, vocab_total=37
        ),
    )  # fmt: skip
    texts["order"] = refusal(
        ValueError, "vocabulary",
        lambda: linear_cross_entropy(
            p.x, p.w[:each], p.t, group=dist.group.WORLD, vocab_total=me.size * each,
            vocab_start=(me.size - 1 - me.rank) * each,
        ),
    )  # fmt: skip
    return texts


@case
def a_sequence_that_cannot_be_split(me: Rank) -> Results:
    """One rank has a token more than the others."""
    p, bounds = problem(me.size, (2, 2 * me.size + 1))
    length = 3 if me.rank == 0 else 2
    x = p.x[:, :length]
    whole = p._replace(x=x)
    refusal(ValueError, "sequence_dim", lambda: call_own(me, whole, bounds, sequence_dim=1))
    own = p._replace(x=x, t=p.t[:, :length])
    text = refusal(
        ValueError, "tokens",
        lambda: call_own(me, own, bounds, sequence_dim=1, local_tokens=True),
    )  # fmt: skip
    return {"text": text}


def _wrong_on_one_rank(me: Rank, local: bool, name: str, value: Any, match: str) -> Results:
    """An argument is wrong on the last rank only; every rank raises an error."""
    p, bounds = problem(me.size, (2, 2 * me.size))
    where = {"sequence_dim": 1, "local_tokens": True} if local else {}
    own = p._replace(x=own_of(p.x, me, 1), t=own_of(p.t, me, 1)) if local else p
    wrong = {name: value} if me.rank == me.size - 1 else {}
    call = functools.partial(call_own, me, own, bounds, **where, **wrong)
    text = refusal((ValueError, TypeError), match, call)
    loss, *_ = call_own(me, own, bounds, reduction="sum", **where)
    return {"text": text, "loss": loss.detach() * 0}  # no rank is out of step


for _local in (False, True):
    for _name, _value, _match in (
        (
            "temperature",
            torch.full((1,), 1e-60, dtype=torch.float64),
            r"^temperature\[0\] is 1e-60",
        ),
        ("token_weight", torch.ones(7), r"^token_weight has shape \(7,\)"),
        ("normalizer", "all", "^normalizer is a str"),
        ("reduction", "avg", "^reduction is 'avg'"),
        ("memory", "much", '^memory is "much"'),
        ("shift", -1, r"^shift is -1|^shift moves targets"),
        ("return_statistics", ("entropie",), "^return_statistics "),
        ("z_loss", None, "^z_loss is a NoneType"),
        ("label_smoothing", "a", "^label_smoothing is a str"),
        ("ignore_index", 1.5, "^ignore_index is 1.5"),
        ("ignore_index", 2**63, "^ignore_index is 9223372036854775808"),
    ):
        _where = "one rank, local tokens" if _local else "one rank"
        CASES[f"a wrong {_name} ({type(_value).__name__}) on {_where}"] = functools.partial(
            _wrong_on_one_rank, local=_local, name=_name, value=_value, match=_match
        )


def _least(call: Callable[..., Any]) -> int:
    """The least memory that the call takes."""
    with pytest.raises(ValueError, match="memory is 1 bytes; allowed: >= ") as raised:
        call(memory=1)
    return int(str(raised.value).split(">= ")[1].split()[0])


@case
def memory_that_is_enough_for_some_ranks(me: Rank) -> Results:
    """The largest shard needs more than is allowed, and every rank says so."""
    p, _ = problem(me.size, (8,), vocab=30000, hidden=4, targets="none ignored")
    ends = [64 * (rank + 1) for rank in range(me.size - 1)] + [30000]
    bounds = list(zip([0, *ends], ends))
    t = p.t.clamp(max=63)
    small, large = (
        _least(functools.partial(linear_cross_entropy, p.x, p.w[:rows], t, reduction="none"))
        for rows in (64, ends[-1] - 64 * (me.size - 1))
    )
    assert small < large
    memory = (small + large) // 2
    text = refusal(
        ValueError, f"memory is {memory} bytes", lambda: call_own(me, p, bounds, memory=memory)
    )
    return {"text": text}


@case
def memory_that_is_enough_for_forward_only(me: Rank) -> Results:
    p, bounds = problem(me.size)
    """Forward asks for what Backward takes, on every rank the first that has too little."""
    memory = 0
    for _ in range(me.size + 1):
        try:
            loss, *_ = call_own(me, p, bounds, memory=memory)
            break
        except ValueError as error:
            found = re.match(rf"memory is {memory} bytes; allowed: >= (\d+)", str(error))
            assert found is not None and int(found[1]) > memory
            memory = int(found[1])
    for _ in range(2):
        loss.backward(retain_graph=True)
    return {"memory": torch.tensor(memory), "loss": loss.detach()}


@case
def a_bias_that_is_a_scalar(me: Rank) -> Results:
    p, bounds = problem(me.size)
    rows = bounds[me.rank][1] - bounds[me.rank][0]
    text = rf"^linear_bias has shape \(\); allowed: \({rows},\)"
    refusal(ValueError, text, lambda: call_own(me, p, bounds, linear_bias=torch.tensor(1.0)))
    loss, *_ = call_own(me, p, bounds)
    return {"loss": loss.detach() * 0}  # no rank is out of step


@case
def a_bias_beside_padding(me: Rank) -> Results:
    """If one rank's bias is too long, every rank's error names the length with padding."""
    x, w, t = torch.ones(3, 4), torch.ones(6, 4), torch.zeros(3, dtype=torch.int64)
    call = functools.partial(
        linear_cross_entropy, x, w, t, group=dist.group.WORLD, vocab_total=6 * me.size - 2
    )
    text = r"^linear_bias has shape \(7,\); allowed: \(6,\)$"
    refusal(ValueError, text, lambda: call(linear_bias=torch.ones(6 + (me.rank == me.size - 1))))
    return {"loss": call(linear_bias=torch.ones(6))}


def _backward_is_refused(me: Rank, loss: Tensor) -> None:
    """Every rank raises the error of rank 1."""

    def fails(*_: Any) -> Any:
        raise ValueError("no backward today")

    mine = fails if me.rank == 1 else of_blocks.local_gradients
    raised = pytest.raises((ValueError, RuntimeError), match="no backward today")
    with mock.patch.object(of_blocks, "local_gradients", mine), raised:
        loss.backward()


@case
def one_rank_is_refused(me: Rank) -> Results:
    """An error of one rank alone is raised on every rank, in forward and in backward."""
    p, bounds = problem(me.size, bias=True)
    rows = bounds[me.rank][1] - bounds[me.rank][0]
    bias = torch.zeros(rows + (me.rank == 1))
    texts = {"bias": refusal(ValueError, "bias",
                             lambda: call_own(me, p, bounds, linear_bias=bias))}  # fmt: skip
    loss, *_ = call_own(me, p, bounds)
    _backward_is_refused(me, loss)
    return texts


# --- common bugs of such code: each must make a check fail ---


def _of_states(change: Callable[[Tensor, int], None]) -> Callable[[Any], Any]:
    """A mutant that calls `change(states [S, k, N], row of weighted_logit_sum)` first."""

    def make(real: Any) -> Any:
        def combine(states: Tensor, argmax: Any, tokens: Any, options: Any, *bits: int) -> Any:
            states = states.clone()
            change(states, 3 + bool(bits[0] & _run.ENTROPY))
            return real(states, argmax, tokens, options, *bits)

        return combine

    return make


def _local_smoothing(states: Tensor, weighted: int) -> None:
    """A bug: the mean of the logits divides by a shard's number of columns."""
    states[:, weighted] *= dist.get_world_size()


def _smoothing_of_one(states: Tensor, weighted: int) -> None:
    """A bug: the weighted sum of one shard is used for that of all."""
    states[1:, weighted] = 0


def _log_of_size(states: Tensor, _: int) -> None:
    states[:, 1] += torch.tensor(len(states)).log()


def _any_target(states: Tensor, _: int) -> None:
    """A bug: the target's logit is taken from the last shard, which may not have it."""
    states[:, 2] = states[-1, 2].clone()


def _of_options(change: Callable[[Any, Any], dict[str, Any]]) -> Callable[[Any], Any]:
    """A mutant that combines with options changed by `change(tokens, options)`."""

    def make(real: Any) -> Any:
        def combine(states: Tensor, argmax: Any, tokens: Any, options: Any, *bits: int) -> Any:
            options = options._replace(**change(tokens, options))
            return real(states, argmax, tokens, options, *bits)

        return combine

    return make


def _sentinel_counts(tokens: Any, options: Any) -> dict[str, Any]:
    return {"ignore_index": -12345}


def _divided(tokens: Any, options: Any) -> dict[str, Any]:
    return {"normalizer": float((~tokens.ignored(options)).sum()) / dist.get_world_size()}


def _local_argmax(real: Any) -> Any:
    def combine(states: Tensor, argmax: Tensor, *rest: Any) -> Any:
        return real(states, argmax[dist.get_rank()].expand_as(argmax).contiguous(), *rest)

    return combine


def _unreduced(real: Any) -> Any:
    return lambda part, shard, shape, dtype: part.to(dtype).view(shape)


def _doubled(real: Any) -> Any:
    return lambda *args: dist.get_world_size() * real(*args)


def _copy_reduced(real: Any) -> Any:
    """A bug: a buffer that is not contiguous is reduced in a copy, which is then dropped."""

    def reduce(part: Tensor, *rest: Any) -> Any:
        if part.is_contiguous():
            return real(part, *rest)
        real(part, *rest)
        return part.to(rest[2]).view(rest[1])

    return reduce


class Mutant(NamedTuple):
    where: Any
    name: str
    make: Callable[[Any], Any]
    case: str


MUTANTS = {
    "smoothing over the shard's columns": Mutant(
        combine, "combine", _of_states(_local_smoothing), "options: smoothing, mean"
    ),
    "smoothing of one shard's logits": Mutant(
        combine, "combine", _of_states(_smoothing_of_one), "options: smoothing, mean"
    ),
    "grad_input not reduced": Mutant(
        exchange, "reduce_grad_input", _unreduced, "shards: uneven, none"
    ),
    "grad_input reduced twice": Mutant(
        exchange, "reduce_grad_input", _doubled, "shards: uneven, none"
    ),
    "a copy reduced": Mutant(
        exchange, "reduce_grad_input", _copy_reduced, "layout: transposed"
    ),
    "a sentinel that counts": Mutant(
        combine, "combine", _of_options(_sentinel_counts), "sentinel that is a padded column"
    ),
    "padding that counts": Mutant(
        shards, "columns", lambda real: lambda shard, *both: both, "padding"
    ),
    "loss + log(P)": Mutant(
        combine, "combine", _of_states(_log_of_size), "shards: even"
    ),
    "target's logit of another shard": Mutant(
        combine, "combine", _of_states(_any_target), "shards: even"
    ),
    "normalizer divided by P": Mutant(
        combine, "combine", _of_options(_divided), "shards: even"
    ),
    "argmax of the shard": Mutant(combine, "combine", _local_argmax, "statistics: argmax"),
    "upstream of one rank": Mutant(
        exchange, "gather_tokens",
        lambda real: lambda x, shard, dim: torch.cat([x] * shard.size, dim)
        if dim == 2 else real(x, shard, dim),
        "sequence_dim 1, local_tokens, none",
    ),
}  # fmt: skip


def mutated(me: Rank, name: str) -> Results:
    """The case fails on some rank, or two ranks have other bits."""
    where, attribute, make, against = MUTANTS[name]
    try:
        with (
            mock.patch.object(where, attribute, make(getattr(where, attribute))),
            # test_devices_peers.py has mutants of the exchange that replaces these collectives.
            mock.patch.object(peers, "exchange_of", lambda *_: None),
        ):
            results = CASES[against](me)
        found = str({name: ranks.bits_of(value) for name, value in results.items()})
    except (AssertionError, ValueError) as error:
        found = f"red: {error}"
    every: list[Any] = [None] * me.size
    dist.all_gather_object(every, found)
    red = any(text.startswith("red") for text in every) or len(set(every)) > 1
    assert red, f"{name} is not seen by {against}"
    return {}


# --- the tests ---


def run(me: Rank, name: str) -> Results:
    return CASES[name](me)


@case
def an_ignore_index_beyond_what_targets_hold(rank: Rank) -> Results:
    """Such an index ignores no token; cut to 32 bits it would be class 1."""
    x, w, t = torch.randn(3, 8), torch.randn(4 * rank.size, 8), torch.tensor([0, 1, 2])
    own = w.view(rank.size, 4, 8)[rank.rank]
    options: dict[str, Any] = {"ignore_index": 2**32 + 1, "reduction": "none"}
    ours = linear_cross_entropy(x, own, t.int(), group=dist.group.WORLD, **options)
    close(ours, linear_cross_entropy(x, w, t, **options).double())
    return {"loss": ours}


@case
def results_may_be_changed_in_place(rank: Rank) -> Results:
    x = torch.randn(5, 8).requires_grad_()
    w, t = torch.randn(4, 8), torch.arange(5) % 4
    where: dict[str, Any] = {"group": dist.group.WORLD}
    total = linear_cross_entropy(x, w, t, reduction="sum", **where)
    total /= 4
    logprob, entropy = linear_logprob(x, w, t, entropy=True, **where)
    logprob.mul_(2), entropy.mul_(3)
    (total + logprob.sum() + entropy.sum()).backward()
    y = x.detach().clone().requires_grad_()
    other, other_entropy = linear_logprob(y, w, t, entropy=True, **where)
    whole = linear_cross_entropy(y, w, t, reduction="sum", **where) / 4
    (whole + 2 * other.sum() + 3 * other_entropy.sum()).backward()
    close(grad_of(x), grad_of(y).double())
    return {"grad": grad_of(x)}


def grad_of(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


@case
def ranks_that_ask_for_other_things(rank: Rank) -> Results:
    x, w, t = torch.randn(4, 8), torch.randn(8, 8), torch.arange(4)
    names = ("lse", "entropy") if rank.rank else ("lse",)
    with pytest.raises(ValueError, match="what is asked for"):
        linear_cross_entropy(x, w, t, group=dist.group.WORLD, return_statistics=names)
    if rank.size == 2:
        with pytest.raises(ValueError, match=r"^Split\.blocks is \[2, 4\] on the ranks"):
            linear_cross_entropy(x, w, t, group=dist.group.WORLD, vocab_blocks=2 + 2 * rank.rank)
        with pytest.raises(ValueError, match=r"allowed with Split\.blocks 4 of 10 columns"):
            linear_cross_entropy(  # torch.chunk's split
                x, w[:5], t, group=dist.group.WORLD, vocab_start=5 * rank.rank, vocab_total=10,
                vocab_blocks=4,
            )  # fmt: skip
    return {}


# --- blocks of the vocabulary ---


def blocks_of_one(p: Problem, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients of one process in eight blocks."""
    leaves = [t.detach().clone().requires_grad_() for t in (p.x, p.w, p.b)]
    return blocks_of(leaves, p.t, **options), [
        leaf.grad for leaf in leaves if leaf.grad is not None
    ]


def blocks_of(leaves: Sequence[Tensor], t: Tensor, **options: Any) -> list[Tensor]:
    x, w, b = leaves
    loss, made = linear_cross_entropy(
        x, w, t, linear_bias=b, vocab_blocks=8, return_statistics=STATISTICS, **options
    )
    (loss.sum() * 0.7 + sum(getattr(made, name).sum() for name in DIFFERENTIABLE)).backward()
    return [loss, *(value for value in made if value is not None)]


BLOCKS: Sequence[tuple[int, torch.dtype, dict[str, Any]]] = (
    (1003, F32, {}),
    (256, BF16, {"label_smoothing": 0.1, "z_loss": 1e-2, "reduction": "none"}),
    (5, F32, {"reduction": "sum"}),  # fewer columns than blocks
    (300, F16, {"softcap": 9.0, "memory": "1MiB"}),
)


@case
def ranks_whose_inputs_have_other_gradients(rank: Rank) -> Results:
    """The rank with a gradient would wait for ever for the others' parts of it."""
    x, w, t = torch.randn(4, 8), torch.randn(8, 8).requires_grad_(), torch.arange(4)
    with pytest.raises(ValueError, match="whether the input has a gradient is"):
        linear_cross_entropy(x.requires_grad_(rank.rank == 0), w, t, group=dist.group.WORLD)
    return {}


def subsets(count: int) -> list[tuple[bool, ...]]:
    """Every choice of tensors, of `count`, that require a gradient; at least one does."""
    return list(itertools.product((False, True), repeat=count))[1:]


def gradients_of(
    p: Problem, needs: Sequence[bool], temperature: Any, **options: Any
) -> list[Tensor | None]:
    """The needed gradients of input, weight and bias, for a sum of a loss and a statistic."""
    leaves = [t.detach().clone().requires_grad_(n) for t, n in zip((p.x, p.w, p.b), needs)]
    x, w, b = leaves
    loss, s = linear_cross_entropy(
        x, w, p.t, linear_bias=b, return_statistics="lse", temperature=temperature, **options
    )
    (loss * 0.7 + s.lse.square().sum()).backward()
    return [leaf.grad for leaf in leaves]


@case
def any_tensors_gradient_alone(rank: Rank) -> Results:
    """Any subset of gradients is right, also where shards or blocks have no columns."""
    for cut, blocks in (
        ("uneven", None), ("first empty", None), ("last empty", None), ("one has all", None),
        ("blocks", 8),
    ):  # fmt: skip
        if blocks and blocks % rank.size:
            continue
        vocab = 19
        shares = "even" if blocks else cut
        p, bounds = problem(rank.size, vocab=vocab, hidden=4, bias=True, cut=shares)
        if blocks:
            width = -(-vocab // blocks) * (blocks // rank.size)
            ends = [min((r + 1) * width, vocab) for r in range(rank.size)]
            bounds = list(zip([0, *ends], ends))
        start, stop = bounds[rank.rank]
        own = p._replace(w=p.w[start:stop], b=p.b[start:stop])
        where: dict[str, Any] = {"group": dist.group.WORLD, "vocab_blocks": blocks}
        where |= {"vocab_start": start, "vocab_total": vocab}
        for needs in subsets(3):
            for temperature in (1.0, torch.rand(3, 5) + 0.5):
                expected = gradients_of(p, needs, temperature)
                found = gradients_of(own, needs, temperature, **where)
                near(found[0], expected[0])
                near_rows(found[1], expected[1], slice(start, stop))
                near_rows(found[2], expected[2], slice(start, stop))
    return {}


@case
def a_loss_that_nobody_uses(rank: Rank) -> Results:
    """The mean divides by 0 and is NaN, but a statistic's gradient is not."""
    p, bounds = problem(rank.size, bias=True, targets="none ignored")
    made = {}
    for name, options in (
        ("nan", {"normalizer": 0, "empty_mean": "nan"}), ("none", {"reduction": "none"}),
    ):  # fmt: skip
        own, start = p._replace(x=leaf(p.x)), bounds[rank.rank][0]
        w = leaf(p.w[slice(*bounds[rank.rank])])
        _, s = linear_cross_entropy(
            own.x, w, p.t, group=dist.group.WORLD, vocab_start=start, vocab_total=37,
            return_statistics=("entropy", "lse"), **options,
        )  # fmt: skip
        (s.entropy.sum() + s.lse.square().sum()).backward()
        made[name] = grad_of(own.x), grad_of(w)
    for a, b in zip(made["nan"], made["none"], strict=True):
        assert b.isfinite().all()
        close(a, b.double())
    return {"grad_input": made["nan"][0]}


@case
def one_rank_is_refused_in_backward(rank: Rank) -> Results:
    """Whichever tensors have gradients, every rank raises the error of rank 1."""
    p, bounds = problem(rank.size, bias=True)
    rows = slice(*bounds[rank.rank])
    for needs in subsets(3):
        x, w, b = (
            t.detach().clone().requires_grad_(n) for t, n in zip((p.x, p.w[rows], p.b[rows]), needs)
        )
        loss = linear_cross_entropy(
            x, w, p.t, linear_bias=b, group=dist.group.WORLD, vocab_start=bounds[rank.rank][0],
            vocab_total=37,
        )  # fmt: skip
        _backward_is_refused(rank, loss)
    return {}


@case
def ranks_of_which_one_has_no_gradient(rank: Rank) -> Results:
    """A rank without a gradient would not take part in the other ranks' backward."""
    for dtype in (F32, F16):  # f16 keeps nothing for backward
        x, w, t = torch.randn(4, 8).to(dtype), torch.randn(8, 8).to(dtype), torch.arange(4)
        w.requires_grad_(rank.rank == 0)
        with pytest.raises(
            ValueError, match=r"whether (state is kept for Backward|anything has a gradient) "
        ):
            linear_cross_entropy(x, w, t, group=dist.group.WORLD)
    return {}


@case
def a_token_weight_elsewhere(rank: Rank) -> Results:
    """A token_weight on another device is refused, also after a call of this shape was planned."""
    x, w, t = torch.randn(4, 8), torch.randn(8, 8), torch.arange(4)
    where: dict[str, Any] = {"group": dist.group.WORLD, "reduction": "none"}
    for _ in range(2):
        with pytest.raises(RuntimeError, match="token_weight is on meta; allowed: "):
            elsewhere = torch.ones(4, device="meta")
            linear_cross_entropy(x, w, t, token_weight=elsewhere, **where)
        linear_cross_entropy(x, w, t, token_weight=torch.ones(4), **where)
    return {}


@case
def a_head_elsewhere(rank: Rank) -> Results:
    """On meta the results would be memory that nobody has written."""
    x, w, b, t = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8), torch.arange(4)
    given = {"linear_weight": w, "linear_bias": b}
    for name in given:
        for everywhere in (True, False):
            moved = {**given}
            if everywhere or rank.rank == 1:
                moved[name] = given[name].to("meta")
            with pytest.raises(RuntimeError, match=f"^{name} is on meta; allowed: cpu"):
                linear_cross_entropy(x, target=t, group=dist.group.WORLD, **moved)
    return {}


@case
def tokens_that_one_rank_gives_in_another_way(rank: Rank) -> Results:
    """What is gathered would have another size or order on rank 0, and be read as something
    else."""
    first = rank.rank == 0
    w, t = torch.randn(8, 8), torch.arange(6).view(2, 3)
    one = torch.ones(2, 3)
    own = {"sequence_dim": 1, "local_tokens": True, "group": dist.group.WORLD}
    x = torch.randn(2, 3, 8)
    changes: Sequence[tuple[str, dict[str, Any]]] = (
        (r"token_weight's dtype .* \[float32, None", {"token_weight": one}),
        (r"temperature's dtype .* \[float32, None", {"temperature": one}),
        (r"target's dtype .* \[int32, int64", {"target": t.int()}),
        (r"input's dtype is \[bfloat16, float32",
         {"input": x.bfloat16(), "linear_weight": w.bfloat16()}),
        (r"the product of .* before sequence_dim is \[3, 2",
         {"input": x.view(3, 2, 8), "target": t.view(3, 2)}),
        (r"Split\.local_tokens is \[0, 1",
         {"local_tokens": False, "target": torch.zeros(2, 3 * rank.size, dtype=torch.int64)}),
        (r"whether Split\.sequence_dim is given is \[0, 1",
         {"local_tokens": False, "sequence_dim": None}),
        (r"whether Split\.reduce_dtype is 'float32' is \[0, 1", {"reduce_dtype": "input"}),
        ("what is asked for, in bits, is ", {"label_smoothing": 0.1}),
    )  # fmt: skip
    for match, change in changes:
        call = {"input": x, "linear_weight": w, "target": t, **own, **(change if first else {})}
        with pytest.raises(ValueError, match=f"^{match}"):
            linear_cross_entropy(**call)
    ids = torch.zeros(2, 3, 2, dtype=torch.int32 if first else torch.int64)
    split = Split(dist.group.WORLD, sequence_dim=1, local_tokens=True)
    with pytest.raises(ValueError, match=r"^ids's dtype .* \[int32, int64"):
        linear_logprobs_at(x, w, ids, group=split)
    return {}


@case
def a_split_of_other_types(rank: Rank) -> Results:
    x, w, t = torch.randn(4, 8), torch.randn(8, 8), torch.arange(4)
    total = 8 * rank.size
    for name, value in (("start", "0"), ("total", 8.5), ("sequence_dim", "x")):
        fields = {"start": 8 * rank.rank, "total": total, name: value}
        with pytest.raises(TypeError, match=rf"^Split\.{name} is {value!r}; allowed: None, or an"):
            linear_cross_entropy(x, w, t, group=Split(dist.group.WORLD, **fields))
    numbers = {"start": np.int64(8 * rank.rank), "total": np.int64(total)}
    return {"loss": linear_cross_entropy(x, w, t, group=Split(dist.group.WORLD, **numbers))}


@case
def an_unforeseen_error_of_one_rank(rank: Rank) -> Results:
    """No rank waits for the one that it came from, whatever raised it."""
    p, bounds = problem(rank.size)

    def fails(*_: Any) -> Any:
        raise KeyError("nobody thought of it")

    mine = fails if rank.rank == 1 else _kept.serves
    raised = pytest.raises((KeyError, RuntimeError), match="nobody thought of it")
    with mock.patch.object(_kept, "serves", mine), raised:
        call_own(rank, p, bounds)
    return {"loss": call_own(rank, p, bounds)[0].detach()}


@case
def an_input_without_tokens_dimensions(rank: Rank) -> Results:
    """A call of one token, [D] and []."""
    p, bounds = problem(rank.size, ())
    x, w = leaf(p.x), rows_of(p.w, bounds, rank.rank)
    y, t = leaf(p.x), torch.tensor(5)
    split = Split(dist.group.WORLD, start=bounds[rank.rank][0], total=37)
    made: dict[str, Tensor] = {}
    calls: dict[str, Callable[..., Any]] = {
        "loss": lambda *of, **k: linear_cross_entropy(*of, t, reduction="none", **k),
        "mean": lambda *of, **k: linear_cross_entropy(*of, t, **k),
        "logprob": lambda *of, **k: linear_logprob(*of, t, entropy=True, **k)[1],
        "at": lambda *of, **k: linear_logprobs_at(*of, torch.tensor([3, 30]), **k),
        "one": lambda *of, **k: linear_logprobs_at(*of, torch.tensor([3]), **k),
        "topk": lambda *of, **k: linear_topk(*of, 3, **k)[1],
    }
    for name, call in calls.items():
        ours, theirs = call(x, w, group=split), call(y, p.w)
        assert ours.shape == theirs.shape, name
        close(ours, theirs.double())
        made[name] = ours.detach()
        if ours.requires_grad:
            (grad,) = torch.autograd.grad(ours.sum(), x)
            (whole,) = torch.autograd.grad(theirs.sum(), y)
            close(grad, whole.double())
            made[f"{name}, gradient"] = grad
    return made


@case
def ranks_without_columns_exchange_in_compiled_code(rank: Rank) -> Results:
    """Their gradients need nothing that was exchanged. Dropped there, an exchange of the others
    would not end."""
    for cut, local, needs in (
        ("last empty", True, (True, False, False)), ("last empty", True, (False, True, True)),
        ("first empty", False, (True, False, False)), ("one has all", True, (True, True, True)),
    ):  # fmt: skip
        p, bounds = problem(rank.size, (2 * rank.size,), hidden=4, bias=True, cut=cut)
        start, stop = bounds[rank.rank]
        split = Split(dist.group.WORLD, start=start, total=37)
        x, t = p.x, p.t
        if local:
            split = dataclasses.replace(split, sequence_dim=0, local_tokens=True)
            x, t = own_of(x, rank, 0), own_of(t, rank, 0)
        given = (x, p.w[start:stop], p.b[start:stop])
        by = torch.linspace(0.5, 1.5, t.numel())

        def loss(x: Tensor, w: Tensor, b: Tensor, split: Split = split, t: Tensor = t,
                 by: Tensor = by) -> Any:  # fmt: skip
            return linear_cross_entropy(x, w, t, linear_bias=b, temperature=by, group=split)

        torch.compiler.reset()
        compiled = torch.compile(loss, fullgraph=True, backend=ranks.comparing())
        found = []
        for call in (loss, compiled):
            leaves = [v.detach().clone().requires_grad_(n) for v, n in zip(given, needs)]
            made = call(*leaves)
            wanted = [v for v in leaves if v.requires_grad]
            found.append([made.detach(), *torch.autograd.grad(made, wanted)])
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b), (cut, local, needs)
    return {}


@case
def the_same_bits_for_any_number_of_ranks(rank: Rank) -> Results:
    """All results have the bits of one process with as many blocks, and are near those without."""
    if rank.size == 3:
        with pytest.raises(ValueError, match=r"^Split\.blocks is 8 with 3 ranks"):
            x, w, t = torch.ones(2, 4), torch.ones(4, 4), torch.ones(2).long()
            linear_cross_entropy(x, w, t, group=dist.group.WORLD, vocab_blocks=8)
        return {}
    for vocab, dtype, options in BLOCKS:
        x, w, b = (torch.randn(*shape).to(dtype) for shape in ((13, 16), (vocab, 16), (vocab,)))
        t = torch.randint(0, vocab, (13,))
        t[3] = -100
        whole, grads = blocks_of_one(Problem(x, w, b, t), **options)
        width = -(-vocab // 8)
        start = min(rank.rank * 8 // rank.size * width, vocab)
        stop = min(start + 8 // rank.size * width, vocab)
        own = [v.detach().clone().requires_grad_() for v in (x, w[start:stop], b[start:stop])]
        made = blocks_of(own, t, group=dist.group.WORLD, vocab_total=vocab, **options)
        for ours, theirs in zip(made, whole):
            assert torch.equal(ours, theirs), (vocab, dtype)
        for leaf, theirs in zip(own, (grads[0], grads[1][start:stop], grads[2][start:stop])):
            assert torch.equal(leaf.grad, theirs), (vocab, dtype)
        plain = linear_cross_entropy(x, w, t, linear_bias=b, **options)
        close(whole[0], plain.double())
    return {}


@case
def a_split_that_is_not_of_whole_blocks_is_refused(rank: Rank) -> Results:
    if rank.size != 2:
        return {}
    x, w, t = torch.ones(2, 4), torch.ones(20, 4), torch.ones(2).long()
    with pytest.raises(ValueError, match=r"allowed with Split\.blocks 4 of 40 columns"):
        linear_cross_entropy(
            x,
            torch.ones(19 + 2 * rank.rank, 4),
            t,
            group=dist.group.WORLD,
            vocab_start=19 * rank.rank,
            vocab_total=40,
            vocab_blocks=4,
        )
    for blocks in (3, 0, True, 1):
        with pytest.raises(ValueError, match=r"^Split\.blocks is "):
            linear_cross_entropy(x, w, t, group=dist.group.WORLD, vocab_blocks=blocks)
    with pytest.raises(ValueError, match="reduce_dtype 'input', whose sum has no order"):
        linear_cross_entropy(x, w, t, group=dist.group.WORLD, vocab_blocks=4, reduce_dtype="input")
    return {}


# Ranks exchange errors only on the CPU, and some cases are about the CPU.
ON_THE_CPU = {
    "autocast", "memory_that_is_enough_for_some_ranks", "memory_that_is_enough_for_forward_only",
    "one_rank_is_refused", "ranks_that_ask_for_other_things", "a_sequence_that_cannot_be_split",
    "a_bias_beside_padding", "a_head_elsewhere", "tokens_that_one_rank_gives_in_another_way",
    "an_unforeseen_error_of_one_rank",
    "ranks_whose_inputs_have_other_gradients", "ranks_of_which_one_has_no_gradient",
    "one_rank_is_refused_in_backward",
    "a_split_with_a_gap_or_an_overlap", "a_split_that_is_not_of_whole_blocks_is_refused",
}  # fmt: skip


@pytest.mark.parametrize("size", ranks.SIZES)
@pytest.mark.parametrize("name", CASES)
def test_ranks(groups: dict[int, ranks.Group], size: int, name: str) -> None:
    host = name in ON_THE_CPU or getattr(CASES[name], "func", None) in (
        _refused,
        _wrong_on_one_rank,
    )
    if host and ranks.BACKEND != "gloo":
        pytest.skip("this is about ranks on the CPU")
    groups[size].call(run, name)


@pytest.mark.parametrize("size", ranks.SIZES)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_bug_makes_a_check_fail(
    groups: dict[int, ranks.Group], size: int, name: str
) -> None:
    if name == "padding that counts" and ranks.BACKEND != "gloo":
        pytest.skip("one rank refuses it, which a GPU's ranks do not tell each other")
    groups[size].call(mutated, name)


@pytest.mark.parametrize(
    "name, value",
    [
        ("vocab_start", 0), ("vocab_total", 7), ("sequence_dim", 0), ("local_tokens", True),
        ("reduce_input_grad", False), ("reduce_dtype", "input"),
    ],
)  # fmt: skip
def test_what_is_about_a_group_without_one(name: str, value: Any) -> None:
    x, w, t = torch.ones(2, 4), torch.ones(10, 4), torch.zeros(2, dtype=torch.int64)
    for more in ({}, {"vocab_blocks": 2}):
        given: dict[str, Any] = {name: value, **more}
        field = FIELDS[name]
        with pytest.raises(ValueError, match=rf"^Split\.{field} is given without a group"):
            linear_cross_entropy(x, w, t, **given)


@pytest.mark.parametrize("name", ["input", "linear_weight", "linear_bias"])
def test_a_lazy_minus_sign_in_blocks(name: str) -> None:
    """A view of which torch remembers that it is negative: its memory holds the other sign."""
    t = torch.arange(6) % 10
    given = {
        "input": torch.randn(6, 4), "linear_weight": torch.randn(10, 4),
        "linear_bias": torch.randn(10),
    }  # fmt: skip
    lazy = {**given, name: torch._neg_view(-given[name])}
    assert lazy[name].is_neg()
    found = []
    for tensors in (given, lazy):
        leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
        loss = linear_cross_entropy(**leaves, target=t, vocab_blocks=2)
        found.append([loss, *torch.autograd.grad(loss, list(leaves.values()))])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["linear_weight", "linear_bias"])
def test_a_head_on_meta_in_blocks(name: str, compiled: bool) -> None:
    given = {"linear_weight": torch.ones(10, 4), "linear_bias": torch.ones(10)}
    given[name] = given[name].to("meta")
    split, t = Split(blocks=2), torch.zeros(6, dtype=torch.int64)

    def loss(x: Tensor, linear_weight: Tensor, linear_bias: Tensor) -> Any:
        return linear_cross_entropy(x, linear_weight, t, linear_bias=linear_bias, group=split)

    torch.compiler.reset()
    call: Any = torch.compile(loss, backend="aot_eager") if compiled else loss
    with pytest.raises(RuntimeError, match=f"^{name} is on meta; allowed: cpu"):
        call(torch.ones(6, 4), **given)


@pytest.mark.parametrize("value", [1.5, "a", 2**63], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_a_wrong_ignore_index_in_blocks_is_that_of_a_plain_call(value: Any, grad: bool) -> None:
    x, w = torch.ones(6, 4, requires_grad=grad), torch.ones(10, 4)
    said = []
    for group in (None, Split(blocks=2)):
        with pytest.raises((TypeError, ValueError), match=r"^ignore_index is ") as raised:
            linear_cross_entropy(x, w, torch.arange(6), ignore_index=value, group=group)
        said.append((raised.type, str(raised.value)))
    assert said[0] == said[1]


@pytest.mark.parametrize("name", ["input", "linear_weight"])
def test_a_sparse_tensor_in_blocks_is_refused_as_in_a_plain_call(name: str) -> None:
    given = {"input": torch.ones(6, 4), "linear_weight": torch.ones(10, 4)}
    given[name] = given[name].to_sparse()
    for group in (None, Split(blocks=2)):
        with pytest.raises(RuntimeError, match=rf"^{name} has layout torch\.sparse_coo; allowed: "):
            linear_cross_entropy(**given, target=torch.arange(6), group=group)


def test_an_input_without_tokens_dimensions_in_blocks() -> None:
    x, w, t = torch.randn(4), torch.randn(10, 4), torch.tensor(3)
    loss = linear_cross_entropy(x, w, t, reduction="none", group=Split(blocks=2))
    close(loss, linear_cross_entropy(x, w, t, reduction="none").double())
    assert loss.shape == ()


def test_meta_tensors_in_blocks() -> None:
    x, w = torch.ones(6, 4, device="meta"), torch.ones(10, 4, device="meta")
    loss = linear_cross_entropy(
        x, w, torch.ones(6, dtype=torch.int64, device="meta"), vocab_blocks=2
    )
    assert loss.is_meta and loss.shape == ()


@pytest.mark.parametrize("vocab", [1, 5, 17, 19, 49])
@pytest.mark.parametrize("needs", subsets(3), ids=str)
def test_any_tensors_gradient_alone_beside_empty_blocks(
    vocab: int, needs: tuple[bool, ...]
) -> None:
    p, _ = problem(1, vocab=vocab, hidden=4, bias=True, cut="even")
    for temperature in (1.0, torch.rand(3, 5) + 0.5):
        expected = gradients_of(p, needs, temperature)
        for blocks in (2, 8, 64):
            found = gradients_of(p, needs, temperature, vocab_blocks=blocks)
            for a, e in zip(found, expected, strict=True):
                near(a, e)


@pytest.mark.parametrize("length", [1, 5, 9, 11, 16])
@pytest.mark.parametrize("blocks", [1, 2, 8], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_a_bias_of_another_length_than_all_blocks(length: int, blocks: int, grad: bool) -> None:
    """The error has the length that was given, not that of a block's part."""
    x, t = torch.ones(6, 4), torch.zeros(6, dtype=torch.int64)
    w, b = torch.ones(10, 4, requires_grad=grad), torch.ones(length)
    said = rf"^linear_bias has shape \({length},\); allowed: \(10,\)$"
    for call in (linear_cross_entropy, linear_logprob):
        with pytest.raises(ValueError, match=said):
            call(x, w, t, linear_bias=b, vocab_blocks=blocks)


def test_a_later_group_of_the_same_name_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """After destroy_process_group torch gives the same names again."""

    class Group:
        group_name = "0"

    made: list[Any] = []
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0])
    monkeypatch.setattr(dist, "new_group", lambda *a, **k: made.append(Group()) or made[-1])
    before = len(_ranks._gloo)
    first, second = Group(), Group()
    assert _ranks._waiting(first) is _ranks._waiting(first) is made[0]
    assert _ranks._waiting(second) is made[1] and made[1] is not made[0]
    del first, second
    assert len(_ranks._gloo) == before


def test_a_group_before_torch_has_one() -> None:
    x, w, t = torch.ones(2, 4), torch.ones(3, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"group is given, but torch\.distributed is not init"):
        linear_cross_entropy(x, w, t, group="tp")

# SPDX-License-Identifier: Apache-2.0
"""linear_divergence with the vocabulary split over the ranks of a group: values and gradients
against f64 of the whole vocabulary, the same bits on every rank, errors on all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ranks
from logitless._errors import wrong_device
from logitless.torch import LinearDivergenceLoss, Split, linear_divergence
from logitless.torch._split import divergence as of_ranks
from logitless.torch._split import ranks as _ranks
from logitless.torch._split import rule
from ranks import Rank
from reference import TOLERANCE
from test_devices import bounds_of, near
from test_divergence import KINDS, OPTIONS, STATISTICS, VOCAB, Heads, expected, heads

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CUTS = ("even", "uneven", "first empty", "last empty", "one has all")
Results = Mapping[str, Tensor]
CASES: dict[str, Callable[[Rank], Results]] = {}


def case(function: Callable[[Rank], Results]) -> Callable[[Rank], Results]:
    CASES[function.__name__] = function
    return function


class Shard:
    """A rank's rows of both heads, and the call on them."""

    def __init__(self, h: Heads, me: Rank, cut: str = "uneven", padding: int = 0) -> None:
        start, stop = bounds_of(cut, me.size, VOCAB)[me.rank]
        self.rows = slice(start, stop)
        self.padding = padding if me.rank == me.size - 1 else 0  # after the last columns
        self.split = Split(dist.group.WORLD, start=start, total=VOCAB)
        self.input = h.input.detach().clone().requires_grad_(h.input.requires_grad)
        self.weight = self.own(h.weight).requires_grad_(h.weight.requires_grad)
        self.bias = self.own(h.bias).requires_grad_(h.weight.requires_grad)
        self.teacher = (h.teacher_input, self.own(h.teacher_weight))

    def own(self, t: Tensor, dim: int = 0) -> Tensor:
        """The shard's columns of t, followed by padding of NaN."""
        part = t.detach().movedim(dim, 0)[self.rows]
        pad = part.new_full((self.padding, *part.shape[1:]), float("nan"))
        return torch.cat((part, pad)).movedim(0, dim).clone()

    def __call__(self, **options: Any) -> Any:
        given: Any = self.teacher
        for name, of in (("linear_bias", self.bias), ("teacher_bias", None)):
            if options.get(name) is not None:
                options[name] = self.own(options[name]) if of is None else of
        if "teacher_logits" in options:
            given, options["teacher_logits"] = (None, None), self.own(options["teacher_logits"], -1)
        return linear_divergence(
            self.input, self.weight, *given, **{"group": self.split, **options}
        )


def of_gradient(actual: Tensor, whole: Tensor, dtype: torch.dtype) -> None:
    """In f32 the bound is larger than in one process, because the ranks' parts cancel."""
    largest = whole.abs().max().item()
    worst = (actual.double() - whole).abs().max().item()
    assert worst <= (4 if dtype is F32 else 1) * TOLERANCE[dtype] * largest, worst / largest


def agree(
    me: Rank, h: Heads, cut: str = "uneven", dtype: torch.dtype = F32, padding: int = 0,
    **options: Any,
) -> Results:  # fmt: skip
    names = STATISTICS if options.get("target") is not None else STATISTICS[:3]
    shard = Shard(h, me, cut, padding)
    ours, statistics = shard(**options, return_statistics=names)
    theirs, known = expected(h, **options)
    near(ours, theirs, F32 if dtype is F32 else dtype)
    for name in names:
        near(getattr(statistics, name), known[name], dtype)
        assert not getattr(statistics, name).requires_grad
    upstream = torch.randn(theirs.shape)
    has_bias = "linear_bias" in options
    leaves = h.leaves if has_bias else h.leaves[:2]
    own = (shard.input, shard.weight, *((shard.bias,) if has_bias else ()))
    grads = torch.autograd.grad(ours, own, upstream, retain_graph=True)
    again = torch.autograd.grad(ours, own, upstream)
    wanted = torch.autograd.grad(theirs, leaves, upstream.double())
    of_gradient(grads[0], wanted[0], dtype)
    for grad, whole in zip(grads[1:], wanted[1:]):
        rows = shard.rows.stop - shard.rows.start
        filled = whole.clone()
        filled[shard.rows] = grad[:rows].double()
        of_gradient(filled, whole, dtype)
        assert not grad[rows:].any()
    for grad, second in zip(grads, again):
        assert grad.dtype is dtype and torch.equal(grad, second)
    results = {"loss": ours, "grad_input": grads[0]}
    return results | {name: getattr(statistics, name) for name in names}


@case
def every_kind_and_cut(me: Rank) -> Results:
    results: dict[str, Tensor] = {}
    for kind, options in KINDS.items():
        for cut in CUTS:
            for reduction in ("none", "sum", "mean"):
                made = agree(me, heads(), cut, **options, reduction=reduction)
                results |= {f"{kind} {cut} {reduction} {n}": v for n, v in made.items()}
    return results


@case
def every_option(me: Rank) -> Results:
    results: dict[str, Tensor] = {}
    for kind, options in KINDS.items():
        for name, of in OPTIONS.items():
            h = heads()
            made = agree(me, h, **options, **of(h), reduction="none")
            results |= {f"{kind} {name} {n}": v for n, v in made.items()}
    return results


@case
def what_is_kept(me: Rank) -> Results:
    """On GPUs the logits of a rank's columns, unless `memory` is given."""
    results: dict[str, Tensor] = {}
    of_run, sizes = of_ranks.run, []

    def kept_logits_like(*args: Any) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = like(*args)
        sizes.append(made[0].numel())
        return made

    like = of_run.kept_logits_like
    for memory in (None, "64MiB"):
        with mock.patch.object(of_run, "kept_logits_like", kept_logits_like):
            made = agree(me, heads(), kind="reverse_kl", memory=memory)
        results |= {f"{memory} {n}": v for n, v in made.items()}
        assert len(sizes) == 1 and bool(sizes.pop()) == (memory is None and ranks.BACKEND == "nccl")
    return results


@case
def sixteen_bits(me: Rank) -> Results:
    results: dict[str, Tensor] = {}
    for dtype in (F16, BF16):
        for kind, options in KINDS.items():
            h = heads(dtype=dtype)
            given = h.options("linear_bias", "target")
            made = agree(me, h, dtype=dtype, **options, **given)
            results |= {f"{dtype} {kind} {n}": v for n, v in made.items()}
    return results


@case
def logits_of_a_teacher_and_a_normalizer(me: Rank) -> Results:
    h = heads()
    logits = torch.randn(*h.target.shape, VOCAB)
    made = agree(me, h, kind="jsd", teacher_logits=logits, target=h.target, normalizer=7.0)
    shard = Shard(h, me)
    for_all = shard(target=h.target, normalizer=torch.tensor(7.0))
    near(for_all, expected(h, target=h.target, normalizer=7.0)[0])
    return made


@case
def rows_of_padding(me: Rank) -> Results:
    h = heads()
    given = h.options("linear_bias", "teacher_bias", "target")
    agree(me, h, padding=3, kind="reverse_kl", **given)
    logits = torch.randn(*h.target.shape, VOCAB)
    return agree(me, h, "last empty", padding=2, kind="reverse_kl", teacher_logits=logits)


@case
def equal_heads_give_exactly_zero(me: Rank) -> Results:
    h = heads()
    for kind, options in KINDS.items():
        shard = Shard(h, me)
        shard.teacher = (shard.input.detach(), shard.weight.detach())
        loss = shard(**options, reduction="none")
        loss.sum().backward()
        for made in (loss, shard.input.grad, shard.weight.grad):
            assert made is not None and not made.any(), kind
    return {}


@case
def what_is_not_finite_stays_in_its_row(me: Rank) -> Results:
    results: dict[str, Tensor] = {}
    for kind, options in KINDS.items():
        for value in (float("nan"), float("inf")):
            h = heads()
            logits = torch.randn(*h.target.shape, VOCAB)
            logits[1, 2, 4] = value  # in one shard
            shard = Shard(h, me)
            loss, statistics = shard(
                **options, teacher_logits=logits, reduction="none", return_statistics=STATISTICS[:3]
            )
            loss.sum().backward()
            bad = torch.zeros_like(loss, dtype=torch.bool)
            bad[1, 2] = True
            assert torch.equal(loss.isnan(), bad), kind
            assert torch.equal(statistics.acceptance.isnan(), bad)
            grad: Any = shard.input.grad
            assert torch.equal(grad.isnan().any(-1), bad)
            assert not statistics.entropy.isnan().any()
            results[f"{kind} {value}"] = loss
    return results


@case
def a_shard_without_probability(me: Rank) -> Results:
    """The first rank's columns are masked by biases of -inf, in one head or in both."""
    results: dict[str, Tensor] = {}
    for kind, options in KINDS.items():
        for masked in ("student", "teacher", "both"):
            h = heads(trains=False)
            start, stop = bounds_of("uneven", me.size, VOCAB)[0]
            if masked != "teacher":
                h.bias[start:stop] = -float("inf")
            if masked != "student":
                h.teacher_bias[start:stop] = -float("inf")
            given = h.options("linear_bias", "teacher_bias")
            alone, found = linear_divergence(
                *h[:4], **options, **given, reduction="none", return_statistics=STATISTICS[:3]
            )
            loss, statistics = Shard(h, me)(
                **options, **given, reduction="none", return_statistics=STATISTICS[:3]
            )
            near(loss, alone)
            for ours, theirs in zip(statistics[:3], found[:3]):
                near(ours, theirs)
            results[f"{kind} {masked}"] = loss
    return results


def _own_tokens(t: Tensor, me: Rank, dim: int) -> Tensor:
    return t.detach().chunk(me.size, dim)[me.rank].clone()


def _shape_of_tokens(me: Rank) -> tuple[int, ...]:
    return (2 * me.size, 3 * me.size)


def _teacher_logits(h: Heads) -> dict[str, Tensor]:
    return {"teacher_logits": torch.randn(*h.target.shape, VOCAB)}


@case
def hidden_states_split_over_the_sequence(me: Rank) -> Results:
    """Only hidden states are a rank's own: targets, options and results are of all tokens."""
    results: dict[str, Tensor] = {}
    for i, (kind, options) in enumerate(KINDS.items()):
        for j, (name, of) in enumerate((*OPTIONS.items(), ("logits", _teacher_logits))):
            dim, reduction = (0, 1, -2)[(i + j) % 3], ("none", "mean")[(i + j) % 2]
            h = heads(shape=_shape_of_tokens(me))
            given = {**options, **of(h), "reduction": reduction}
            whole, own = Shard(h, me, padding=2), Shard(h, me, padding=2)
            own.input = _own_tokens(h.input, me, dim).requires_grad_()
            own.teacher = (_own_tokens(h.teacher_input, me, dim), own.teacher[1])
            own.split = dataclasses.replace(own.split, sequence_dim=dim)
            made, wanted = own(**given), whole(**given)
            assert torch.equal(made, wanted)
            upstream = torch.rand_like(made)
            made.backward(upstream), wanted.backward(upstream)
            grads: Any = (own.input.grad, own.weight.grad, whole.input.grad, whole.weight.grad)
            assert torch.equal(grads[0], _own_tokens(grads[2], me, dim))
            assert torch.equal(grads[1], grads[3])
            results[f"{kind} {name}"] = made
    return results


@case
def tokens_of_a_rank_alone(me: Rank) -> Results:
    """With local_tokens, tensors and results are of the rank's tokens; means add up over ranks."""
    for options in KINDS.values():
        for dim in (0, 1):
            for reduction in ("none", "sum", "mean"):
                h = heads(shape=_shape_of_tokens(me))
                shape = h.input.shape[:-1]
                of_tokens: dict[str, Any] = {
                    "target": h.target, "token_weight": torch.rand(shape),
                    "temperature": 0.5 + torch.rand(shape),
                    "teacher_temperature": 0.5 + torch.rand(shape),
                }  # fmt: skip
                common: dict[str, Any] = {
                    **options, "reduction": reduction, "label_weight": 0.3,
                    "return_statistics": STATISTICS,
                }  # fmt: skip
                whole, own = Shard(h, me), Shard(h, me)
                own.input = _own_tokens(h.input, me, dim).requires_grad_()
                own.teacher = (_own_tokens(h.teacher_input, me, dim), own.teacher[1])
                own.split = dataclasses.replace(own.split, sequence_dim=dim, local_tokens=True)
                wanted, known = whole(**common, **of_tokens)
                made, found = own(
                    **common, **{k: _own_tokens(v, me, dim) for k, v in of_tokens.items()}
                )
                for name in STATISTICS:
                    theirs = _own_tokens(getattr(known, name), me, dim)
                    assert torch.equal(getattr(found, name), theirs), name
                if reduction == "none":
                    assert torch.equal(made, _own_tokens(wanted, me, dim))
                    upstream = torch.randn(shape)
                    made.backward(_own_tokens(upstream, me, dim)), wanted.backward(upstream)
                else:
                    parts = made.detach().clone()
                    dist.all_reduce(parts)
                    near(parts, wanted)
                    made.backward(), wanted.backward()
                near(own.input.grad, _own_tokens(whole.input.grad, me, dim))
                near(own.weight.grad, whole.weight.grad)
    return {}


@case
def ranks_with_upstream_gradients_of_their_own(me: Rank) -> Results:
    h = heads(shape=_shape_of_tokens(me))
    whole, own = Shard(h, me), Shard(h, me)
    own.input = _own_tokens(h.input, me, 1).requires_grad_()
    own.teacher = (_own_tokens(h.teacher_input, me, 1), own.teacher[1])
    own.split = dataclasses.replace(own.split, sequence_dim=1, local_tokens=True)
    own(kind="jsd").backward(torch.tensor(1.0 + me.rank))
    factors = torch.arange(1.0, 1 + me.size).repeat_interleave(3) / h.target.numel()
    whole(kind="jsd", reduction="none").backward(factors.expand(h.target.shape))
    near(own.input.grad, _own_tokens(whole.input.grad, me, 1))
    near(own.weight.grad, whole.weight.grad)
    return {}


@case
def the_module_takes_a_group(me: Rank) -> Results:
    h = heads()
    shard = Shard(h, me)
    module: Any = LinearDivergenceLoss("jsd", beta=0.3, return_statistics="acceptance")
    loss, statistics = module(shard.input, shard.weight, *shard.teacher, group=shard.split)
    wanted, known = Shard(h, me)(kind="jsd", beta=0.3, return_statistics="acceptance")
    assert torch.equal(loss, wanted)
    assert torch.equal(statistics.acceptance, known.acceptance)
    return {"loss": loss}


@case
def without_gradients(me: Rank) -> Results:
    h = heads(trains=False)
    shard = Shard(h, me)
    loss = shard(kind="reverse_kl")
    assert not loss.requires_grad
    near(loss, expected(h, kind="reverse_kl")[0])
    h = heads()
    for i in range(3):
        shard = Shard(h, me)
        leaves = [shard.input, shard.weight, shard.bias]
        for j, leaf in enumerate(leaves):
            leaf.requires_grad_(i == j)
        shard(kind="jsd", linear_bias=h.bias).backward()
        assert [leaf.grad is not None for leaf in leaves] == [i == j for j in range(3)]
    return {"loss": loss}


@case
def a_group_of_one_is_the_call_without(me: Rank) -> Results:
    h = heads()
    own = [dist.new_group([rank]) for rank in range(me.size)][me.rank]
    options: dict[str, Any] = {"kind": "jsd", "target": h.target, "label_weight": 0.3}
    alone = linear_divergence(*h[:4], **options)
    wanted = torch.autograd.grad(alone, h.leaves[:2])
    for padding in (0, 2):
        weight, teacher = h.weight.detach(), h.teacher_weight
        if padding:
            weight, teacher = (
                torch.cat((t, torch.full_like(t[:padding], float("nan"))))
                for t in (weight, teacher)
            )
        weight.requires_grad_()
        loss = linear_divergence(
            h.input, weight, h.teacher_input, teacher, group=Split(own, total=VOCAB), **options
        )
        grads = torch.autograd.grad(loss, (h.input, weight))
        assert torch.equal(loss, alone) and torch.equal(grads[0], wanted[0])
        assert torch.equal(grads[1][:VOCAB], wanted[1]) and not grads[1][VOCAB:].any()
    return {"loss": alone}


@case
def a_part_of_a_sum(me: Rank) -> Results:
    h = heads()
    whole = torch.autograd.grad(expected(h, kind="jsd")[0], h.input)[0]
    shard = Shard(h, me)
    start, stop = shard.rows.start, shard.rows.stop
    shard.split = Split(dist.group.WORLD, start=start, total=VOCAB, reduce_input_grad=False)
    shard(kind="jsd").backward()
    part: Any = shard.input.grad
    dist.all_reduce(part)
    near(part, whole)
    shard = Shard(h, me)
    shard.split = Split(dist.group.WORLD, start=start, total=VOCAB, reduce_dtype="input")
    shard(kind="jsd").backward()
    near(shard.input.grad, whole)
    del stop
    return {}


@case
def autocast_and_checkpoint(me: Rank) -> Results:
    h = heads()
    shard = Shard(h, me)
    with torch.autocast("cpu", BF16):
        loss = shard(kind="reverse_kl", target=h.target)
    loss.backward()
    low = heads(dtype=BF16)
    for name in ("input", "weight", "teacher_input", "teacher_weight"):
        getattr(low, name).data.copy_(getattr(h, name).detach())
    theirs = Shard(low, me)
    same = theirs(kind="reverse_kl", target=h.target)
    assert torch.equal(loss, same) and shard.weight.grad is not None
    assert shard.weight.grad.dtype is F32
    results = {"loss": loss, "grad": shard.input.grad}
    plain, again = Shard(h, me), Shard(h, me)
    plain(kind="jsd", reduction="none").sum().backward()
    of: Any = checkpoint(lambda: again(kind="jsd", reduction="none"), use_reentrant=False)
    of.sum().backward()
    for a, b in ((plain.input, again.input), (plain.weight, again.weight)):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
    return results  # type: ignore[return-value]


@case
def torch_compile(me: Rank) -> Results:
    h = heads()
    for kind in ("forward_kl", "reverse_kl"):
        for reduction in ("none", "mean"):
            torch._dynamo.reset()
            eager, traced = Shard(h, me), Shard(h, me)
            if kind == "reverse_kl":  # each rank has its own tokens
                for one in (eager, traced):
                    one.split = dataclasses.replace(one.split, sequence_dim=1, local_tokens=True)
            options: dict[str, Any] = {
                "kind": kind, "reduction": reduction, "target": h.target, "label_weight": 0.3,
                "return_statistics": ("acceptance", "logprob"), "group": eager.split,
            }  # fmt: skip

            def of(x: Tensor, w: Tensor, y: Tensor, v: Tensor, o: Any = options) -> Any:
                return linear_divergence(x, w, y, v, **o)

            compiled = torch.compile(of, backend="aot_eager", fullgraph=True)
            loss, statistics = of(eager.input, eager.weight, *eager.teacher)
            made, found = compiled(traced.input, traced.weight, *traced.teacher)
            upstream = torch.rand_like(loss)
            loss.backward(upstream), made.backward(upstream)
            assert torch.equal(loss, made) and torch.equal(statistics.logprob, found.logprob)
            for a, b in ((eager.input, traced.input), (eager.weight, traced.weight)):
                assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
    return {"loss": made}


@case
def memory_that_is_enough_for_forward_only(me: Rank) -> Results:
    h = heads()
    for memory, error in ((1, ValueError), (1 << 24, None)):
        shard = Shard(h, me)
        if error is None:
            shard(memory=memory).backward()
            continue
        with pytest.raises(error, match=r"^memory is 1 bytes"):
            shard(memory=memory)
    return {}


@case
def gradients_once_only(me: Rank) -> Results:
    shard = Shard(heads(), me)
    loss = shard(kind="jsd")
    (grad,) = torch.autograd.grad(loss, shard.input, create_graph=True)
    with pytest.raises(NotImplementedError, match="once only"):
        grad.sum().backward()
    return {}


@case
def errors_on_every_rank(me: Rank) -> Results:
    h = heads()
    last = me.rank == me.size - 1

    def refused(words: str, **changes: Any) -> None:
        shard = Shard(h, me)
        with pytest.raises((ValueError, TypeError, IndexError), match=words):
            shard(**{"kind": "jsd", **(changes if last else {})})

    refused(r"^kind is 'kl'", kind="kl")
    refused(r"^beta is 1\.5", beta=1.5)
    refused(r"^token_weight", token_weight=torch.ones(3))
    refused(r"^what is asked for", return_statistics="acceptance")
    refused(r"^what is asked for", kind="forward_kl")  # its gradient subtracts no mean
    shard = Shard(h, me)
    if last:
        shard.teacher = (shard.teacher[0], shard.teacher[1][:-1])
    with pytest.raises(ValueError, match=r"^teacher_weight has shape"):
        shard()
    elsewhere = mock.Mock(side_effect=wrong_device("teacher_input is on cuda:0; allowed: cpu"))
    with (
        mock.patch.object(rule, "check_devices", elsewhere if last else mock.Mock()),
        pytest.raises(RuntimeError, match=r"^teacher_input is on cuda:0"),
    ):
        Shard(h, me)()
    bad = h.target.clone()
    bad[1, 0] = VOCAB
    said = rf"^target\[1, 0\] \(flat: target\[5\]\) is {VOCAB}; allowed: 0 to {VOCAB - 1}"
    with pytest.raises(ValueError, match=said):
        Shard(h, me)(target=bad)
    return {}


@case
def what_a_split_has_not(me: Rank) -> Results:
    h = heads()
    with pytest.raises(NotImplementedError, match=rf"^Split\.blocks is {me.size}; allowed"):
        Shard(h, me)(group=Split(dist.group.WORLD, blocks=me.size))
    h = heads(shape=_shape_of_tokens(me))
    split = Split(dist.group.WORLD, sequence_dim=0)

    def refused(words: str, kind: type[Exception] = ValueError, **options: Any) -> None:
        shard = Shard(h, me)
        own = _own_tokens(h.input, me, 0), _own_tokens(h.teacher_input, me, 0)
        teacher: Any = (own[1], h.teacher_weight)
        if "teacher_logits" in options:
            teacher = (None, None)
        with pytest.raises(kind, match=words):
            linear_divergence(own[0], shard.weight, *teacher, **{"group": split, **options})

    logits = torch.randn(*h.target.shape, VOCAB)
    refused(
        r"^teacher_logits has shape .*, the tokens of all ranks",
        teacher_logits=_own_tokens(logits, me, 0),
    )
    refused(r"the whole input, which is split equally", target=_own_tokens(h.target, me, 0))
    local = dataclasses.replace(split, local_tokens=True)
    refused(r"^target has shape", target=h.target, group=local)
    refused(
        r"^reduce_input_grad is False", group=dataclasses.replace(split, reduce_input_grad=False)
    )
    refused(r"^sequence_dim is 2 of an input", group=dataclasses.replace(split, sequence_dim=2))
    if ranks.BACKEND != "gloo":
        return {}  # a GPU's host does not see a target's value
    bad = h.target.clone()
    bad[0, 1] = VOCAB
    with pytest.raises(ValueError, match=rf"^target\[0, 1\] .* is {VOCAB}; allowed"):
        shard = Shard(h, me)
        shard.input, shard.teacher = _own_tokens(h.input, me, 0), (
            _own_tokens(h.teacher_input, me, 0), shard.teacher[1],
        )  # fmt: skip
        shard(group=dataclasses.replace(shard.split, sequence_dim=0), target=bad)
    return {}


@case
def tensors_that_one_rank_gives(me: Rank) -> Results:
    """Every rank must give token weights or none, teacher's states of the same width, and the same
    dtypes and order of tokens."""
    h = heads(shape=_shape_of_tokens(me))
    for changed in ("token_weight", "teacher"):
        shard = Shard(h, me)
        target = _own_tokens(h.target, me, 0)
        rows, options = _own_tokens(h.teacher_input, me, 0), {"target": target}
        if me.rank == 0 and changed == "teacher":
            rows = rows[..., :-1]
            shard.teacher = (rows, shard.teacher[1][:, :-1])
        if me.rank == 0 and changed == "token_weight":
            options["token_weight"] = torch.ones_like(target, dtype=F32)
        shard.input, shard.teacher = _own_tokens(h.input, me, 0), (rows, shard.teacher[1])
        split = dataclasses.replace(shard.split, sequence_dim=0, local_tokens=True)
        words = "^token_weight's dtype" if changed == "token_weight" else "^the teacher's hidden"
        with pytest.raises(ValueError, match=words):
            shard(group=split, **options)
    first = me.rank == 0
    for changed, words in (
        ("target", r"^target's dtype .* \[int32, int64"), ("order", "^the product of the input's"),
    ):  # fmt: skip
        x, y, target = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.zeros(2, 3).long()
        if first and changed == "target":
            target = target.int()
        elif first:
            x, y, target = x.view(3, 2, 8), y.view(3, 2, 8), target.view(3, 2)
        split = Split(dist.group.WORLD, sequence_dim=1, local_tokens=True)
        with pytest.raises(ValueError, match=words):
            w = torch.randn(4, 8)
            linear_divergence(x, w, y, w, target=target, group=split)
    x, w = torch.randn(4, 8), torch.randn(4, 8)
    target = torch.zeros(4).long() if first else None
    with pytest.raises(ValueError, match=r"^target's dtype .* \[int64, None"):
        linear_divergence(x, w, x, w, target=target, group=dist.group.WORLD)
    return {}


@case
def an_input_without_tokens_dimensions(me: Rank) -> Results:
    h = heads(shape=())
    return agree(me, h, target=h.target, reduction="none")


@case
def ranks_without_columns_exchange_in_compiled_code(me: Rank) -> Results:
    """Their states and gradients need nothing that was exchanged; see test_devices.py."""
    h = heads(shape=_shape_of_tokens(me))
    for cut, needs in (("last empty", (True, False)), ("one has all", (False, True))):
        shard = Shard(h, me, cut)
        split = dataclasses.replace(shard.split, sequence_dim=0, local_tokens=True)
        x, y, target = (_own_tokens(v, me, 0) for v in (h.input, h.teacher_input, h.target))

        def loss(x: Tensor, w: Tensor, y: Tensor, v: Tensor, split: Split = split,
                 target: Tensor = target) -> Any:  # fmt: skip
            return linear_divergence(x, w, y, v, kind="reverse_kl", target=target, group=split)

        torch.compiler.reset()
        compiled = torch.compile(loss, fullgraph=True, backend=ranks.comparing())
        found = []
        for call in (loss, compiled):
            leaves = [
                v.detach().clone().requires_grad_(n) for v, n in zip((x, shard.weight), needs)
            ]
            made = call(*leaves, y, shard.teacher[1])
            grads = torch.autograd.grad(made, [v for v in leaves if v.requires_grad])
            found.append([made.detach(), *grads])
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b), (cut, needs)
    return {}


@case
def ranks_that_are_compared(me: Rank) -> Results:
    h = heads()
    before, _ranks.ON = _ranks.ON, True
    try:
        Shard(h, me)(kind="jsd", reduction="none").sum().backward()
        other = h.target.roll(1, -1) if me.rank == 0 else h.target
        with pytest.raises(ValueError, match="LOGITLESS_CHECK_RANKS: target's values on rank"):
            Shard(h, me)(target=other)
        beta = 0.3 if me.rank == 0 else 0.4
        with pytest.raises(ValueError, match=r"LOGITLESS_CHECK_RANKS: beta: 0\.\d+ on rank"):
            Shard(h, me)(kind="jsd", beta=beta)
        shard = Shard(h, me)
        loss = shard(reduction="none")
        with pytest.raises(ValueError, match="the upstream gradient of loss's values on rank"):
            loss.backward(torch.full_like(loss, float(me.rank == 0)))
    finally:
        _ranks.ON = before
    return {}


def _of_one_rank(name: str) -> Any:
    """A bug: this rank's own states or sums are used for those of all ranks."""
    gather = of_ranks.exchange.all_gather

    def own(x: Tensor, shard: Any) -> Tensor:
        found = gather(x, shard)
        rows = {"states": 4, "sums": 2}[name]
        return x.expand_as(found) if x.dim() == 3 and x.shape[1] == rows else found

    return own


MUTANTS = ("states", "sums", "mean", "start")


def mutated(me: Rank, name: str) -> Results:
    patch = pytest.MonkeyPatch()
    try:
        if name in ("states", "sums"):
            patch.setattr(of_ranks.exchange, "all_gather", _of_one_rank(name))
        elif name == "mean":
            patch.setattr(of_ranks, "_own_gradients", _without_a_mean)
        else:
            patch.setattr(of_ranks, "_arguments", _at_the_start)
        h = heads()
        options: dict[str, Any] = {"kind": "reverse_kl", "target": h.target, "label_weight": 0.5}
        if name in ("states", "sums"):
            options = {"kind": "reverse_kl"}
            wrong = Shard(h, me)(**options)
            with pytest.raises(AssertionError):
                near(wrong, expected(h, **options)[0])
        else:
            shard = Shard(h, me)
            shard(**options).backward()
            whole = torch.autograd.grad(expected(h, **options)[0], h.input)[0]
            with pytest.raises(AssertionError):
                near(shard.input.grad, whole)
    finally:
        patch.undo()
    return {}


_gradients, _arguments = of_ranks._own_gradients, of_ranks._arguments


def _without_a_mean(shard: Any, *rest: Any) -> Any:
    *others, mean = rest[:6]
    return _gradients(shard, *others, torch.zeros_like(mean), *rest[6:])


def _at_the_start(own: Any, asked: Any, shard: Any) -> Any:
    return _arguments(own._replace(start=0), asked, shard)


def run(me: Rank, name: str) -> Results:
    return CASES[name](me)


ON_THE_CPU = (
    "errors_on_every_rank", "ranks_that_are_compared", "autocast_and_checkpoint",
    "tensors_that_one_rank_gives",
)  # fmt: skip


@pytest.mark.parametrize("size", ranks.SIZES)
@pytest.mark.parametrize("name", CASES)
def test_ranks(groups: dict[int, ranks.Group], size: int, name: str) -> None:
    if name in ON_THE_CPU and ranks.BACKEND != "gloo":
        pytest.skip("this is about ranks on the CPU")
    groups[size].call(run, name)


@pytest.mark.parametrize("size", ranks.SIZES)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_bug_makes_a_check_fail(
    groups: dict[int, ranks.Group], size: int, name: str
) -> None:
    groups[size].call(mutated, name)


def test_a_group_before_torch_has_one() -> None:
    h = heads()
    with pytest.raises(ValueError, match=r"group is given, but torch\.distributed is not init"):
        linear_divergence(*h[:4], group="tp")

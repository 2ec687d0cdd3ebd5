# SPDX-License-Identifier: Apache-2.0
"""The other libraries' signatures for a vocabulary that is split over two processes: losses
and gradients against f64 of the whole vocabulary, who reduces the hidden states' gradient, and the
mistakes that must make a case fail. No other library is needed; tests/peers has them."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ranks
import reference
from logitless.integrations import cce, liger, megatron, nemo_rl, torchtitan, verl
from logitless.torch import Split
from ranks import Rank
from reference import close

SIZE = 2
TOKENS, VOCAB, HIDDEN = 12, 36, 16
Results = Mapping[str, Tensor]
CASES: dict[str, Callable[[Rank], Results]] = {}


def case(name: str, **how: Any) -> Callable[[Callable[..., Results]], Callable[..., Results]]:
    """A decorator that adds the function, with these arguments, as a case."""

    def add(function: Callable[..., Results]) -> Callable[..., Results]:
        assert name not in CASES
        CASES[name] = functools.partial(function, **how)
        return function

    return add


# --- the problem, the same on every rank ---


class Problem(NamedTuple):
    x: Tensor
    w: Tensor
    t: Tensor
    b: Any = None

    def rows(self, me: Rank) -> slice:
        each = -(-self.w.shape[0] // me.size)
        return slice(me.rank * each, min((me.rank + 1) * each, self.w.shape[0]))


def problem(
    shape: tuple[int, ...] = (TOKENS,), vocab: int = VOCAB, bias: bool = False, ignored: bool = True
) -> Problem:
    t = torch.randint(0, vocab, shape)
    if ignored:
        t = t.where(torch.rand(shape) >= 0.25, torch.full_like(t, -100))
    w = torch.randn(vocab, HIDDEN) / HIDDEN**0.5
    return Problem(torch.randn(*shape, HIDDEN), w, t, torch.randn(vocab) if bias else None)


def leaf(x: Tensor) -> Any:
    return x.detach().clone().requires_grad_()


class Made(NamedTuple):
    outputs: list[Tensor]
    x: Tensor
    w: Tensor
    b: Tensor | None = None
    logits: Tensor | None = None  # the gradient of the logits

    def part(self, p: Problem, rows: slice) -> Tensor:
        """What the columns `rows` add to the gradient of x."""
        assert self.logits is not None
        return self.logits[..., rows] @ p.w.double()[rows]


def made_of(call: Callable[..., Any], p: Problem, upstreams: list[Tensor] | None = None) -> Made:
    """Outputs and gradients of `call(x, w, b)`, which returns one output or several."""
    x, w, b = leaf(p.x), leaf(p.w), None if p.b is None else leaf(p.b)
    found = call(x, w, b)
    outputs = list(found) if isinstance(found, tuple) else [found]
    given = upstreams or [torch.ones(())] * len(outputs)
    torch.autograd.backward(outputs, [u.to(o.dtype).expand_as(o) for u, o in zip(given, outputs)])
    return Made(outputs, x.grad, w.grad, None if b is None else b.grad)


def dense(
    outputs_of: Callable[[Tensor], Any], p: Problem, upstreams: list[Tensor] | None = None
) -> Made:
    """made_of in f64 on all columns; `outputs_of(logits)` returns the outputs."""
    kept = []

    def call(x: Tensor, w: Tensor, b: Tensor | None) -> Any:
        logits = reference.logits_of(x, w, b)
        logits.retain_grad()
        kept.append(logits)
        return outputs_of(logits)

    doubled = Problem(*(v.double() if i != 2 and v is not None else v for i, v in enumerate(p)))
    made = made_of(call, doubled, upstreams)
    return made._replace(logits=kept[0].grad)


def same(actual: Made, expected: Made, p: Problem, rows: slice, partial: bool = False) -> None:
    """`partial`: the gradient of x is this rank's part of the sum over the ranks."""
    for ours, theirs in zip(actual.outputs, expected.outputs):
        assert ours.dtype is torch.float32
        close(ours, theirs)
    close(actual.x, expected.part(p, rows) if partial else expected.x)
    close(actual.w, expected.w[rows])
    if actual.b is not None and expected.b is not None:
        close(actual.b, expected.b[rows])


def own(p: Problem, rows: slice, x: Tensor | None = None) -> Problem:
    """The problem of a rank: its rows of weight and bias, and x."""
    b = None if p.b is None else p.b[rows]
    return Problem(p.x if x is None else x, p.w[rows], p.t, b)


def replicated(made: Made, with_x: bool = True) -> Results:
    """The results that have the same bits on every rank."""
    outputs = {f"output {i}": value for i, value in enumerate(made.outputs)}
    return outputs | ({"grad_input": made.x} if with_x else {})


# --- verl ---


def logprob_and_entropy(p: Problem, **options: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def outputs(logits: Tensor) -> tuple[Tensor, Tensor]:
        s = reference.statistics(logits, p.t, options)
        return s["logprob"].reshape(-1), s["entropy"].reshape(-1)

    return outputs


@case("verl")
def of_verl(me: Rank) -> Results:
    """Megatron's hidden states are [s, 1, h] and its packed labels [1, s]; verl's kernel leaves the
    gradient of the hidden states to its caller."""
    p = problem((TOKENS, 1), ignored=False)
    rows = p.rows(me)
    upstreams = [torch.randn(TOKENS), torch.randn(TOKENS)]

    def call(x: Tensor, w: Tensor, _: Any) -> Any:
        group = dist.group.WORLD
        return verl.linear_cross_entropy(x, w, p.t.reshape(1, -1), 0.7, "none", group)

    actual = made_of(call, own(p, rows), upstreams)
    same(actual, dense(logprob_and_entropy(p, temperature=0.7), p, upstreams), p, rows, True)
    return replicated(actual, with_x=False)


class Gathered(torch.autograd.Function):
    """Megatron's gather_from_sequence_parallel_region: a reduce-scatter in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


@case("verl under sequence parallelism")
def of_verls_caller(me: Rank) -> Results:
    p = problem((TOKENS, 1), ignored=False)
    rows = p.rows(me)

    def call(x: Tensor, w: Tensor, _: Any) -> Any:
        gather: Any = Gathered.apply
        return verl.linear_cross_entropy(gather(x), w, p.t, 1.0, "none", dist.group.WORLD)

    actual = made_of(call, own(p, rows, p.x.chunk(me.size)[me.rank]))
    expected = dense(logprob_and_entropy(p), p)
    expected = expected._replace(x=expected.x.chunk(me.size)[me.rank])
    same(actual, expected, p, rows)
    return replicated(actual, with_x=False)


# --- NeMo-RL ---


@case("nemo-rl", outside=True)
@case("nemo-rl, of the k tokens alone", outside=False)
def of_nemo_rl(me: Rank, outside: bool) -> Results:
    """Ids are of both ranks' rows; the hidden states' gradient is the sum over both ranks."""
    p = problem((2, TOKENS), ignored=False)
    rows = p.rows(me)
    ids = torch.rand(2, TOKENS, VOCAB).topk(5, -1).indices
    teacher = torch.randn(2, TOKENS, 5)
    upstreams = [torch.randn(2, TOKENS - 1, 5), torch.randn(2, TOKENS - 1)]

    def call(x: Tensor, w: Tensor, _: Any) -> Any:
        student, _, entropy = nemo_rl.get_distillation_topk_logprobs(
            x, w, teacher, ids, outside, True, me.rank, dist.group.WORLD
        )
        return (student, entropy) if outside else student

    def outputs(logits: Tensor) -> Any:
        log_p = logits.log_softmax(-1)[:, :-1]
        student, entropy = log_p.gather(-1, ids[:, :-1]), (log_p.exp() * log_p).sum(-1)
        return (student, entropy) if outside else student.log_softmax(-1)

    actual = made_of(call, own(p, rows), upstreams)
    same(actual, dense(outputs, p, upstreams), p, rows)
    return replicated(actual)


# --- Cut Cross Entropy ---


@case("cce, mean", reduction="mean")
@case("cce, none", reduction="none", shift=1)
@case("cce, sum, gradient in parts", reduction="sum", reduce_e_grad=False)
@case("cce, its own options", reduction="mean", foreign=True)
def of_cce(
    me: Rank, reduction: str, shift: int = 0, reduce_e_grad: bool = True, foreign: bool = False
) -> Results:
    """37 columns are split into 19 and 18. `foreign`: options that lack vocab_size."""
    p = problem((3, 7), vocab=37, bias=True)
    given: Any = cce.VocabParallelOptions.from_vocab(37, None, reduce_e_grad)
    rows = slice(given.start, given.stop)
    if foreign:
        names = ("start", "stop", "group", "reduce_e_grad")
        given = types.SimpleNamespace(**{name: getattr(given, name) for name in names})
    length = p.t.shape[1] - shift
    upstream = torch.randn(3, length) if reduction == "none" else torch.tensor(1.7)
    upstreams = [upstream, torch.randn(3, length)]

    def call(x: Tensor, w: Tensor, b: Tensor | None) -> Any:
        return cce.linear_cross_entropy(
            x, w, p.t, b, softcap=5.0, reduction=reduction, shift=shift, return_lse=True,
            vocab_parallel_options=given,
        )  # fmt: skip

    def outputs(logits: Tensor) -> Any:
        z, t = logits[:, :length], p.t[:, shift:]
        lse = reference.statistics(z, t, {"softcap": 5.0})["lse"]
        return reference.loss(z, t, softcap=5.0, reduction=reduction), lse

    actual = made_of(call, own(p, rows), upstreams)
    same(actual, dense(outputs, p, upstreams), p, rows, partial=not reduce_e_grad)
    return replicated(actual, with_x=reduce_e_grad)


# --- Liger ---


@case("liger", entropy=True)
@case("liger, loss alone", entropy=False)
def of_liger(me: Rank, entropy: bool) -> Results:
    p = problem()
    rows = p.rows(me)
    upstreams = [torch.randn(TOKENS), torch.randn(TOKENS)][: 1 + entropy]

    def call(x: Tensor, w: Tensor, _: Any) -> Any:
        apply = liger.LigerFusedLinearScaledCrossEntropyTPFunction.apply
        return apply(x, w, p.t, None, 0.7, return_entropy=entropy)

    def outputs(logits: Tensor) -> Any:
        s = reference.statistics(logits, p.t, {"temperature": 0.7})
        return (-s["logprob"], s["entropy"])[: 1 + entropy]

    actual = made_of(call, own(p, rows), upstreams)
    same(actual, dense(outputs, p, upstreams), p, rows)
    return replicated(actual)


# --- Megatron-Core ---


@case("megatron", reduction="none")
@case("megatron, mean", reduction="mean")
@case("megatron, sum, sequence parallel", reduction="sum", split=True)
@case("megatron, sequence parallel", reduction="none", split=True)
def of_megatron(me: Rank, reduction: str, split: bool = False) -> Results:
    p = problem((4, 3))
    rows = p.rows(me)
    upstreams = [torch.randn(12) if reduction == "none" else torch.tensor(1.7)]
    x = p.x.chunk(me.size)[me.rank] if split else p.x

    def call(x: Tensor, w: Tensor, _: Any) -> Any:
        group = dist.group.WORLD
        return megatron.linear_cross_entropy(x, w, p.t, group, reduction, -100, split)

    def outputs(logits: Tensor) -> Tensor:
        loss = reference.loss(logits, p.t, reduction=reduction)
        return loss.reshape(-1) if reduction == "none" else loss

    actual = made_of(call, own(p, rows, x), upstreams)
    expected = dense(outputs, p, upstreams)
    if split:
        expected = expected._replace(x=expected.x.chunk(me.size)[me.rank])
    same(actual, expected, p, rows)
    return replicated(actual, with_x=not split)


class ColumnParallelLinear(torch.nn.Module):
    """A stand-in for Megatron-Core's class."""

    def __init__(self, weight: Any, bias: Any, group: Any, **more: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.tp_group = weight, bias, group
        self.skip_bias_add = self.sequence_parallel = self.disable_grad_reduce = False
        self.config = types.SimpleNamespace(defer_embedding_wgrad_compute=False)
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, input_: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        return input_ @ (self.weight if weight is None else weight).T, None


def layer_of(weight: Any, bias: Any, group: Any, **more: Any) -> Any:
    plain = torch.nn.Parameter
    held = (None if v is None else v if v.requires_grad else plain(v) for v in (weight, bias))
    return megatron.module_of(ColumnParallelLinear)(*held, group, **more)


def given_to(layer: Any, w: Tensor, b: Tensor | None) -> Any:
    """The layer with the leaves instead of its parameters."""
    del layer.weight, layer.bias
    object.__setattr__(layer, "weight", w)
    object.__setattr__(layer, "bias", b)
    return layer


@case("megatron's module")
@case("megatron's module, mean", reduction="mean")
@case("megatron's module, sequence parallel", sequence_parallel=True)
@case("megatron's module, gradient left in parts", disable_grad_reduce=True)
def of_module(me: Rank, reduction: str = "none", **flags: Any) -> Results:
    """Hidden states are [s, b, h], labels and losses [b, s]."""
    p = problem((4, 3), bias=True)
    rows, split = p.rows(me), "sequence_parallel" in flags
    upstreams = [torch.randn(3, 4) if reduction == "none" else torch.tensor(1.7)]
    x = p.x.chunk(me.size)[me.rank] if split else p.x

    def call(x: Tensor, w: Tensor, b: Any) -> Any:
        layer = given_to(layer_of(None, None, dist.group.WORLD, **flags), w, b)
        assert layer(x)[0].shape == (*x.shape[:2], w.shape[0])  # without labels it returns logits
        return layer(x, labels=p.t.T, reduction=reduction)

    def outputs(logits: Tensor) -> Tensor:
        loss = reference.loss(logits, p.t, reduction=reduction)
        return loss.T if reduction == "none" else loss

    actual = made_of(call, own(p, rows, x), upstreams)
    expected = dense(outputs, p, upstreams)
    if split:
        expected = expected._replace(x=expected.x.chunk(me.size)[me.rank])
    partial = "disable_grad_reduce" in flags
    same(actual, expected, p, rows, partial)
    return replicated(actual, with_x=not split and not partial)


@case("megatron's output_processor")
@case("megatron's output_processor, sum", reduction="sum")
@case("megatron's output_processor, mean", reduction="mean", normalizer=31.0)
def of_processor(me: Rank, **reduced: Any) -> Results:
    """A tied weight, MuP's scale, and the context's z-loss. Only a reduced loss takes the mask."""
    p = problem((4, 3))
    rows, mask = p.rows(me), (torch.rand(4, 3) > 0.3).float()
    upstreams = [torch.tensor(1.7) if reduced else torch.randn(3, 4)]
    config = types.SimpleNamespace(use_mup=True, mup_output_mult=0.5)
    called = []

    def call(x: Tensor, w: Tensor, _: Any) -> Any:
        layer = ColumnParallelLinear(None, None, dist.group.WORLD)
        layer.register_forward_pre_hook(lambda *_: called.append(1))
        loss = megatron.output_processor(
            hidden_states=x, output_layer=layer, output_weight=w, labels=p.t.T, loss_mask=mask.T,
            context={"z_loss": 1e-2, **reduced}, config=config, input_ids=None, scale_logits=None,
        )  # fmt: skip
        assert "forward" not in layer.__dict__
        return loss

    def outputs(logits: Tensor) -> Tensor:
        options = {"reduction": "none", "z_loss": 1e-2, "logit_scale": 0.5, **reduced}
        loss = reference.loss(logits, p.t, token_weight=mask if reduced else None, **options)
        return loss if reduced else loss.T

    actual = made_of(call, own(p, rows), upstreams)
    assert called
    same(actual, dense(outputs, p, upstreams), p, rows)
    return replicated(actual)


@case("the last stage's group alone")
def on_one_stage(me: Rank) -> Results:
    """Rank 0 is the first pipeline stage: it has no head and calls nothing. The group of the last
    stage is not the world, in which rank 1 would wait for it."""
    stage = dist.new_group([1])
    if me.rank == 0:
        return {}
    p = problem((4, 3))
    layer = ColumnParallelLinear(None, None, stage)

    def call(x: Tensor, w: Tensor, _: Any) -> Any:
        return megatron.output_processor(
            hidden_states=x, output_layer=layer, output_weight=w, labels=p.t.T
        )

    every = slice(0, VOCAB)
    same(made_of(call, p), dense(lambda z: reference.loss(z, p.t, reduction="none").T, p), p, every)
    return {}


# --- torchtitan ---


class SplitHead(torchtitan.HeadLoss):
    """A rank's weight is a plain tensor of its rows, as under torchtitan's spmd_types."""

    global_vocab_size = 37

    def tp_group(self) -> Any:
        return dist.group.WORLD


def head_of(w: Any) -> Any:
    head = torch.nn.Linear(HIDDEN, w.shape[0], bias=False)
    head.weight = torch.nn.Parameter(w.detach().clone())
    return head


@case("torchtitan", divisor=None)
@case("torchtitan, mean", divisor=torch.tensor(31))
def of_titan(me: Rank, divisor: Any) -> Results:
    p = problem((3, 7), vocab=37)
    rows = p.rows(me)
    loss_of = SplitHead()
    head = head_of(p.w[rows])
    loss_of.set_lm_head(head)
    x = leaf(p.x)
    loss, metrics = loss_of(x, p.t, divisor, positions=None)
    assert metrics == {}
    loss.backward()
    reduced = {"reduction": "sum"} if divisor is None else {"normalizer": divisor}
    expected = dense(lambda z: reference.loss(z, p.t, **reduced), p)
    same(Made([loss], x.grad, head.weight.grad), expected, p, rows, partial=True)
    return {"loss": loss}


@case("torchtitan, DTensor", whole=False)
@case("torchtitan, DTensor, hidden states too", whole=True)
def of_titans_dtensors(me: Rank, whole: bool) -> Results:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    p = problem((3, 7), vocab=37)
    rows = p.rows(me)
    mesh = init_device_mesh(ranks.DEVICE, (me.size,), mesh_dim_names=("tp",))
    head = head_of(p.w)
    head.weight = torch.nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))
    loss_of = torchtitan.HeadLoss()
    loss_of.set_lm_head(head)
    x = leaf(p.x)
    pred = DTensor.from_local(x, mesh, [Replicate()], run_check=False) if whole else x
    loss, _ = loss_of(pred, p.t, torch.tensor(31.0))
    loss.backward()
    expected = dense(lambda z: reference.loss(z, p.t, normalizer=31.0), p)
    grad: Any = head.weight.grad
    actual = Made([loss], x.grad, grad.to_local())
    same(actual, expected, p, rows)
    return replicated(actual)


@case("torchtitan, FSDP, tokens of each rank")
def of_titans_data_parallel(me: Rank) -> Results:
    """Ranks have different tokens, and different numbers that count. Their losses add up to the
    mean over all tokens, and FSDP takes the mean of the ranks' weight gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    p = problem((4, 7), vocab=37)
    p.t[:2] = -100
    p.t[:2, 0] = 3
    head = head_of(p.w)
    fully_shard(head, mesh=init_device_mesh(ranks.DEVICE, (me.size,)))
    loss_of = torchtitan.HeadLoss()
    loss_of.set_lm_head(head)
    x, t = leaf(p.x.chunk(me.size)[me.rank]), p.t.chunk(me.size)[me.rank]
    count = (t != -100).sum()
    dist.all_reduce(count)
    loss, _ = loss_of(x, t, count)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    expected = dense(lambda z: reference.loss(z, p.t), p)
    close(total, expected.outputs[0])
    close(x.grad, expected.x.chunk(me.size)[me.rank])
    grad: Any = head.weight.grad
    close(grad.full_tensor() * me.size, expected.w)
    return {"total": total}


# --- mutants: each must make a case fail ---


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A mutant: the option `name` of the call is changed."""

    def mutant(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            return real(*args, **{**options, name: change(options.get(name))})

        return call

    return mutant


class Mutant(NamedTuple):
    where: Any
    attribute: str
    make: Callable[[Any], Any]
    against: str


def reduced(here: bool) -> Callable[[Any], Any]:
    """A mutant: reduce_input_grad is `here`, which is not the adapter's value."""

    def of(group: Any) -> Split:
        split = group if isinstance(group, Split) else Split(group)
        return dataclasses.replace(split, reduce_input_grad=here)

    return changed("group", of)


twice, never = reduced(True), reduced(False)
own_count = changed("normalizer", lambda _: None)
MUTANTS = {
    "verl: reduced twice": Mutant(verl, "linear_logprob", twice, "verl under sequence parallelism"),
    "verl: not a part": Mutant(verl, "linear_logprob", twice, "verl"),
    "nemo-rl: not reduced": Mutant(nemo_rl, "linear_logprobs_at", never, "nemo-rl"),
    "cce: not reduced": Mutant(cce, "_linear_cross_entropy", never, "cce, mean"),
    "cce: reduced twice": Mutant(
        cce, "_linear_cross_entropy", twice, "cce, sum, gradient in parts"
    ),
    "cce: mean of the ranks": Mutant(
        cce, "_linear_cross_entropy", changed("normalizer", lambda _: 21.0), "cce, mean"
    ),
    "liger: not reduced": Mutant(liger, "linear_cross_entropy", never, "liger"),
    "megatron: not reduced": Mutant(megatron, "_linear_cross_entropy", never, "megatron"),
    "megatron's module: not reduced": Mutant(
        megatron, "_linear_cross_entropy", never, "megatron's module"
    ),
    "megatron's module: reduced twice": Mutant(
        megatron, "_linear_cross_entropy", twice, "megatron's module, gradient left in parts"
    ),
    "megatron: mean of its own tokens": Mutant(
        megatron, "_linear_cross_entropy", own_count, "megatron's output_processor, mean"
    ),
    "megatron: count divided by P": Mutant(
        megatron, "_linear_cross_entropy", changed("normalizer", lambda n: n / SIZE),
        "megatron's output_processor, mean",
    ),
    "torchtitan: reduced twice": Mutant(torchtitan, "linear_cross_entropy", twice, "torchtitan"),
    "torchtitan: mean of its own tokens": Mutant(
        torchtitan, "linear_cross_entropy", own_count, "torchtitan, FSDP, tokens of each rank"
    ),
}  # fmt: skip


def mutated(me: Rank, name: str) -> Results:
    """The case fails on every rank: none is left in a collective."""
    where, attribute, make, against = MUTANTS[name]
    with mock.patch.object(where, attribute, make(getattr(where, attribute))):
        try:
            CASES[against](me)
        except AssertionError:
            return {}
    raise AssertionError(f"{name} is not seen by {against}")


def run(me: Rank, name: str) -> Results:
    return CASES[name](me)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ranks.Group]:
    made = ranks.Group(SIZE, tmp_path_factory.mktemp("adapters"))
    yield made
    made.stop()


@pytest.mark.parametrize("name", CASES)
def test_adapter(group: ranks.Group, name: str) -> None:
    group.call(run, name)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_mistake_makes_a_case_fail(group: ranks.Group, name: str) -> None:
    group.call(mutated, name)


# --- refused, by name ---


def layer(**more: Any) -> Any:
    return layer_of(torch.zeros(6, 4), None, None, **more)


@pytest.mark.parametrize(
    "error, match, call",
    [
        (NotImplementedError, "^is_expert is set",
         lambda x, t: layer(is_expert=True)(x, labels=t)),
        (NotImplementedError, "^defer_embedding_wgrad_compute is set",
         lambda x, t: layer(
             config=types.SimpleNamespace(defer_embedding_wgrad_compute=True))(x, labels=t)),
        (ValueError, "^labels is None", lambda x, t: layer()(x, output_cross_entropy_loss=True)),
        (ValueError, "^weight is None", lambda x, t: layer_of(None, None, None)(x, labels=t)),
        (ValueError, "^reduction is 'mean' without normalizer",
         lambda x, t: megatron.output_processor(
             hidden_states=x, output_layer=layer(), labels=t, context={"reduction": "mean"})),
        (ValueError, "^lm_head is None", lambda x, t: torchtitan.HeadLoss()(x, t)),
        (NotImplementedError, "^tiles_per_reduce is 3",
         lambda x, t: liger.LigerFusedLinearScaledCrossEntropyTPFunction.apply(
             x, torch.zeros(6, 4), t, None, tiles_per_reduce=3)),
        (ValueError, r"^c has shape \(6, 4\)", lambda x, t: cce.linear_cross_entropy(
            x, torch.zeros(6, 4), t, vocab_parallel_options=cce.VocabParallelOptions(0, 5))),
        (ValueError, "^group is given, but torch.distributed is not", lambda x, t:
         verl.linear_cross_entropy(x, torch.zeros(6, 4), t, dist_process_group="tp")),
    ],
)  # fmt: skip
def test_what_is_refused(error: Any, match: str, call: Any) -> None:
    with pytest.raises(error, match=match):
        call(torch.zeros(2, 3, 4), torch.zeros(3, 2, dtype=torch.int64).T.contiguous().T)


def test_the_classes_that_import_their_library() -> None:
    """The modules make them in `__getattr__`, which must refuse other names."""
    for module in (megatron, torchtitan):
        with pytest.raises(AttributeError, match="no attribute 'Unknown'"):
            module.Unknown  # noqa: B018


def test_a_forward_of_the_modules_own_stays() -> None:
    """torchtitan may set `forward` on the module itself; the loss must put it back."""
    head = head_of(torch.randn(6, HIDDEN))
    head.forward = own_forward = lambda x: x
    loss_of = torchtitan.HeadLoss()
    loss_of.set_lm_head(head)
    loss, _ = loss_of(torch.randn(2, HIDDEN), torch.tensor([1, 2]))
    assert loss.shape == () and head.forward is own_forward

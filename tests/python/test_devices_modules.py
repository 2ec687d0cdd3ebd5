# SPDX-License-Identifier: Apache-2.0
"""DTensors, a head that is split over a mesh, torch.compile, FSDP2 and LOGITLESS_CHECK_RANKS: two
and four processes, on gloo or on GPUs (ranks.py), which are started once for all tests here."""

from __future__ import annotations

import copy
import datetime
import io
import pathlib
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ranks
import reference
from logitless.torch import (
    LinearCrossEntropyHead,
    LinearCrossEntropyLoss,
)

if not torch.distributed.is_available():
    pytest.skip("torch.distributed is not there", allow_module_level=True)

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from logitless.torch._split import ranks as _ranks
from logitless.torch.parallel import HeadParallel
from splits import linear_cross_entropy, linear_logprob

TP = 2
PROCESSES = 4 if 4 in ranks.SIZES else TP  # NCCL needs a GPU for each
SECONDS = 60  # how long a process waits for another
WHOLE = 400  # how long pytest waits for all
TOKENS, HIDDEN = (2, 4), 8
Case = Callable[[Any], None]
CASES: dict[str, tuple[int, Case]] = {}


def processes(count: int) -> Callable[[Case], Case]:
    """A decorator of a case for `count` processes, which gets the mesh ("tp",) or ("dp", "tp")."""

    def add(case: Case) -> Case:
        CASES[case.__name__] = (count, case)
        return case

    return add


# --- what cases share ---


def problem(vocab: int = 19, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input [2, 4, 8], weight, bias and target, the same on every rank."""
    generator = ranks.generator(seed)
    x = torch.randn(*TOKENS, HIDDEN, generator=generator)
    w, b = torch.randn(vocab, HIDDEN, generator=generator), torch.randn(vocab, generator=generator)
    t = torch.randint(vocab, TOKENS, generator=generator)
    t[0, 1] = -100
    return x, w, b, t


def leaf(tensor: Any) -> Any:
    return tensor.detach().clone().requires_grad_()


def rows_of(tensor: Tensor, rank: int) -> Any:
    return leaf(tensor.tensor_split(TP)[rank])


def own(tensor: Tensor, dim: int, rank: int) -> Tensor:
    return tensor.chunk(TP, dim)[rank]


def full(tensor: Any) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def close(actual: Any, expected: Any, off: float = 2e-6) -> None:
    torch.testing.assert_close(full(actual), full(expected), rtol=off, atol=off)


def same(actual: Any, expected: Any) -> None:
    """Asserts that types, placements and bits are equal."""
    assert type(actual) is type(expected)
    if isinstance(actual, (tuple, list)):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected):
            same(a, e)
    elif isinstance(actual, DTensor):
        assert actual.placements == expected.placements and actual.shape == expected.shape
        assert torch.equal(actual.to_local(), expected.to_local())
    elif actual is not None:
        assert torch.equal(actual, expected)


def equal_on_ranks(tensor: Tensor, mesh: Any) -> None:
    every = [torch.empty_like(tensor) for _ in range(mesh.size())]
    dist.all_gather(every, tensor.detach().contiguous(), mesh.get_group())
    for other in every:
        assert torch.equal(other, every[0])


def refused(words: str, call: Callable[[], Any], kind: type[Exception] = Exception) -> None:
    try:
        call()
    except kind as error:
        for word in words.split("|"):
            assert word in str(error), f"{word!r} is not in: {error}"
    else:
        raise AssertionError(f"no error, which should say {words}")


def exact(
    x: Tensor, w: Tensor, b: Tensor | None, t: Tensor, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients in f64 of the whole vocabulary."""
    leaves = [t.detach().double().requires_grad_() for t in (x, w, b) if t is not None]
    logits = reference.logits_of(*leaves)
    loss = reference.loss(logits, t, **options)
    return loss.detach().float(), [g.float() for g in torch.autograd.grad(loss.sum(), leaves)]


# --- DTensors ---


@processes(2)
def dtensors_say_what_is_split(mesh: Any) -> None:
    for vocab in (20, 19, 3, 1):  # with 1 row, one rank has none
        x, w, b, t = problem(vocab)
        loss, (gx, gw, gb) = exact(x, w, b, t, label_smoothing=0.1)
        for placement in (Replicate(), Shard(0), Shard(1), None):
            weight = leaf(distribute_tensor(w, mesh, [Shard(0)]))
            bias = leaf(distribute_tensor(b, mesh, [Shard(0)]))
            input, options = leaf(x), {"group": mesh.get_group()}
            if placement is not None:
                input, options = leaf(distribute_tensor(x, mesh, [placement])), {}
            made = linear_cross_entropy(
                input, weight, t, linear_bias=bias, label_smoothing=0.1, **options
            )
            assert type(made) is Tensor
            close(made, loss)
            equal_on_ranks(made, mesh)
            made.backward()
            for tensor, expected in ((input, gx), (weight, gw), (bias, gb)):
                grad = tensor.grad
                assert type(grad) is type(tensor.data)
                if isinstance(tensor, DTensor):
                    assert grad.placements == tensor.placements and grad.shape == tensor.shape
                    assert grad.to_local().shape == tensor.to_local().shape
                close(grad, expected)


@processes(2)
def a_logprob_of_dtensors(mesh: Any) -> None:
    x, w, b, t = problem()
    split = [distribute_tensor(v, mesh, [Shard(0)]) for v in (w, b)]
    alone = linear_logprob(x, w, t, linear_bias=b, entropy=True, temperature=0.7)
    input = leaf(distribute_tensor(x, mesh, [Shard(1)]))
    made = linear_logprob(input, split[0], t, linear_bias=split[1], entropy=True, temperature=0.7)
    for actual, expected in zip(made, alone):
        assert type(actual) is Tensor and actual.shape == t.shape
        close(actual, expected)
    refused("linear_weight is a DTensor with Shard(dim=1)|hidden", lambda: linear_logprob(
        input, distribute_tensor(w, mesh, [Shard(1)]), t))  # fmt: skip


@processes(2)
def rows_behind_vocab_total_are_padding(mesh: Any) -> None:
    for vocab, total in ((20, 17), (20, 9)):  # with 9 the second rank has none
        x, w, _, t = problem(vocab)
        t = t.clamp(max=total - 1)
        loss, (gx, gw) = exact(x, w[:total], None, t)
        w[total:] = float("nan")
        weight = leaf(distribute_tensor(w, mesh, [Shard(0)]))
        input = leaf(distribute_tensor(x, mesh, [Replicate()]))
        made = linear_cross_entropy(input, weight, t, vocab_total=total)
        made.backward()
        close(made, loss)
        close(input.grad, gx)
        close(full(weight.grad)[:total], gw)
        assert not full(weight.grad)[total:].any()


@processes(2)
def constants_that_are_dtensors(mesh: Any) -> None:
    x, w, _, t = problem()
    rank = mesh.get_local_rank()
    classes, tokens = torch.rand(19) + 0.5, torch.rand(TOKENS) + 0.5
    for tensor in (classes, tokens):
        dist.broadcast(tensor, 0, mesh.get_group())
    degrees, count = tokens + 0.3, torch.tensor(3.0)
    everything = (t, tokens, degrees)
    weight = distribute_tensor(w, mesh, [Shard(0)])

    def loss(input: Any, weight: Any, given: Any, classes: Any, count: Any, **more: Any) -> Any:
        return linear_cross_entropy(
            input, weight, given[0], token_weight=given[1], temperature=given[2],
            weight=classes, normalizer=count, return_statistics=("lse",), **more,
        )  # fmt: skip

    alone, statistics = loss(x, w, everything, classes, count)
    for placement in (Replicate(), Shard(1)):
        input = distribute_tensor(x, mesh, [Shard(1)])
        given = [distribute_tensor(v, mesh, [placement]) for v in everything]
        one, two = (distribute_tensor(v, mesh, [Replicate()]) for v in (classes, count))
        made, s = loss(input, weight, given, one, two)
        lse = statistics.lse
        if placement != Replicate():  # each rank has the part of its own tokens
            dist.all_reduce(made, group=mesh.get_group())
            lse = own(lse, 1, rank)
        close(made, alone)
        close(s.lse, lse)
    for at, name in enumerate(("target", "token_weight", "temperature")):
        mixed = list(everything)
        mixed[at] = distribute_tensor(mixed[at], mesh, [Shard(0)])
        refused(f"{name} is a DTensor split along dimension 0|split along 1", lambda m=mixed: loss(
            input, weight, m, classes, count))  # fmt: skip
        if at:
            some = [distribute_tensor(everything[0], mesh, [Shard(1)]), *everything[1:]]
            some[at] = distribute_tensor(some[at], mesh, [Replicate()])
            refused(f"{name} is replicated", lambda m=some: loss(
                input, weight, m, classes, count))  # fmt: skip
    refused("weight is a DTensor with Shard(dim=0)", lambda: loss(
        input, weight, everything, distribute_tensor(classes, mesh, [Shard(0)]), count,
    ))  # fmt: skip


@processes(2)
def a_part_of_the_inputs_gradient_is_partial(mesh: Any) -> None:
    x, w, _, t = problem()
    _, (gx, _) = exact(x, w, None, t)
    weight = distribute_tensor(w, mesh, [Shard(0)])
    input = leaf(distribute_tensor(x, mesh, [Replicate()]))
    linear_cross_entropy(input, weight, t, reduce_input_grad=False).backward()
    assert input.grad.placements == (Partial(),)
    close(input.grad, gx)


@processes(2)
def placements_that_are_refused(mesh: Any) -> None:
    x, w, b, t = problem()
    rank, group = mesh.get_local_rank(), mesh.get_group()
    weight = distribute_tensor(w, mesh, [Shard(0)])
    input = distribute_tensor(x, mesh, [Replicate()])
    of = linear_cross_entropy
    partial = DTensor.from_local(w, mesh, [Partial()])
    refused("linear_weight|Partial", lambda: of(input, partial, t), NotImplementedError)
    hidden = distribute_tensor(w, mesh, [Shard(1)])
    refused("linear_weight|Shard(dim=1)|hidden dimension", lambda: of(input, hidden, t))
    whole = distribute_tensor(w, mesh, [Replicate()])
    refused("linear_weight|replicated on every mesh dimension", lambda: of(input, whole, t))
    refused("input|hidden dimension", lambda: of(
        distribute_tensor(x, mesh, [Shard(2)]), weight, t))  # fmt: skip
    refused("input|Partial", lambda: of(DTensor.from_local(x, mesh, [Partial()]), weight, t))
    refused("input has shape|share equally", lambda: of(
        distribute_tensor(x[:, :3], mesh, [Shard(1)]), weight, t[:, :3]))  # fmt: skip
    # indistinguishable from an FSDP shard
    refused("a DTensor is sharded over mesh dimension 'tp'|plain|FSDP|Head|group=", lambda: of(
        x, weight, t), NotImplementedError)  # fmt: skip
    refused("linear_bias is a plain tensor", lambda: of(
        input, weight, t, linear_bias=own(b, 0, rank)))  # fmt: skip
    bias = distribute_tensor(b, mesh, [Shard(0)])
    refused("linear_bias is a DTensor beside a plain", lambda: of(
        x, own(w, 0, rank), t, linear_bias=bias, group=group))  # fmt: skip
    refused("linear_weight is a plain tensor|without a group", lambda: of(input, w, t))
    refused("Split.start is 3", lambda: of(input, weight, t, vocab_start=3, vocab_total=19))
    refused("Split.total is 20", lambda: of(input, weight, t, vocab_total=20))
    refused("sequence_dim is 0|placements", lambda: of(input, weight, t, sequence_dim=0))
    uneven = DTensor.from_local(
        w[:5] if rank == 0 else w[5:], mesh, [Shard(0)], shape=w.shape, stride=w.stride()
    )
    refused("linear_weight is a DTensor of 19 rows|torch.chunk", lambda: of(input, uneven, t))


@processes(2)
def a_plain_weight_beside_an_input_that_is_a_dtensor(mesh: Any) -> None:
    x, w, _, t = problem(20)
    loss, (gx, gw) = exact(x, w, None, t)
    weight = rows_of(w, mesh.get_local_rank())
    for placement in (Replicate(), Shard(1)):
        input = leaf(distribute_tensor(x, mesh, [placement]))
        weight.grad = None
        made = linear_cross_entropy(input, weight, t, group=mesh.get_group())
        made.backward()
        close(made, loss)
        close(input.grad, gx)
        close(weight.grad, own(gw, 0, mesh.get_local_rank()))


# --- the head ---


def head_of(vocab: int = 19, **options: Any) -> LinearCrossEntropyHead:
    _, w, b, _ = problem(vocab)
    head = LinearCrossEntropyHead(HIDDEN, vocab, bias=True, **options)
    with torch.no_grad():
        head.weight.copy_(w)
        head.bias.copy_(b)
    return head


@processes(2)
def a_head_learns_as_it_does_alone(mesh: Any) -> None:
    alone = head_of(label_smoothing=0.1)
    head = copy.deepcopy(alone)
    assert head.parallelize(mesh) is head
    pairs = ((head, torch.optim.AdamW), (alone, torch.optim.AdamW))
    optimizers = [kind(h.parameters(), lr=1e-2, eps=1e-3) for h, kind in pairs]
    for step in range(4):
        x, _, _, t = problem(seed=step)
        losses, norms, grads = [], [], []
        for (h, _), optimizer in zip(pairs, optimizers):
            input = leaf(x)
            loss = h(input, t)
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(h.parameters(), 0.5))
            grads.append(input.grad)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        assert type(losses[0]) is Tensor
        equal_on_ranks(losses[0], mesh)
        equal_on_ranks(grads[0], mesh)
        close(*losses)
        close(*norms)
        close(*grads)
    for name, parameter in head.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.placements == (Shard(0),)
        assert isinstance(parameter, torch.nn.Parameter)
        close(parameter, alone.get_parameter(name), 2e-5)


@processes(2)
def the_first_ranks_values_win(mesh: Any) -> None:
    rank = mesh.get_local_rank()
    _, w, _, _ = problem()
    head = LinearCrossEntropyHead(HIDDEN, 19)
    head.weight.requires_grad_(False)
    with torch.no_grad():
        head.weight.copy_(w + rank)
    mixed = copy.deepcopy(head)
    head.parallelize(mesh)
    assert torch.equal(full(head.weight), w) and not head.weight.requires_grad
    assert not w.requires_grad and head.bias is None
    parallelize_module(mixed, mesh, HeadParallel(), src_data_rank=None)
    assert torch.equal(mixed.weight.to_local(), own(w + rank, 0, rank))


@processes(2)
def a_heads_state_is_saved_copied_and_loaded(mesh: Any) -> None:
    x, _, _, t = problem()
    head = head_of().parallelize(mesh)
    loss = head(x, t)
    state = head.state_dict()
    assert set(state) == {"weight", "bias"}
    assert all(isinstance(v, DTensor) and v.placements == (Shard(0),) for v in state.values())
    other = LinearCrossEntropyHead(HIDDEN, 19, bias=True).parallelize(mesh)
    assert not torch.equal(other(x, t), loss)
    other.load_state_dict(state)
    same(other(x, t), loss)
    same(copy.deepcopy(head)(x, t), loss)
    meta = LinearCrossEntropyHead(HIDDEN, 19, bias=True, device="meta").parallelize(mesh)
    meta.load_state_dict(state, assign=True)
    same(meta(x, t), loss)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    same(saved["weight"], state["weight"])


@processes(2)
def a_head_without_targets(mesh: Any) -> None:
    x, _, _, t = problem()
    alone = head_of(logit_scale=0.5, softcap=3.0, temperature=0.7)
    head = copy.deepcopy(alone).parallelize(mesh)
    rank = mesh.get_local_rank()
    refused("target is None|HeadParallel|eval mode", lambda: head(x), NotImplementedError)
    with torch.no_grad():
        logits = head(x)
        assert type(logits) is Tensor
        close(logits, alone(x))
    split = head_of().parallelize(mesh, sequence_dim=1).eval()
    input = leaf(own(x, 1, rank))
    logits = split(input)
    logits.square().sum().backward()
    exactly = leaf(x)
    expected = head_of().eval()(exactly)
    expected.square().sum().backward()
    close(logits, expected)
    close(input.grad, own(exactly.grad, 1, rank), 2e-5)
    with torch.no_grad():
        close(split(distribute_tensor(x, mesh, [Replicate()])), expected)
    colwise = parallelize_module(head_of(), mesh, ColwiseParallel())
    refused("target is None|HeadParallel", lambda: colwise(x, t), NotImplementedError)
    refused("sharded|HeadParallel", lambda: colwise(x, target=t), NotImplementedError)


@processes(2)
def what_a_head_refuses(mesh: Any) -> None:
    head = head_of().parallelize(mesh)
    refused("DTensors|split once", lambda: head.parallelize(mesh), ValueError)
    main = head_of(grad_accumulation="main_grad")
    refused("main_grad", lambda: main.parallelize(mesh), NotImplementedError)
    assert type(main.weight) is torch.nn.Parameter
    refused("local_tokens", lambda: head_of().parallelize(mesh, local_tokens=True), ValueError)
    refused("HeadParallel is given a Linear|from_linear", lambda: parallelize_module(
        torch.nn.Linear(HIDDEN, 19), mesh, HeadParallel()))  # fmt: skip
    refused("input_layouts is|Partial", lambda: HeadParallel(input_layouts=Partial()))


class Model(torch.nn.Module):
    """A Linear layer and a norm before the head, which is called with hidden states, targets and a
    normalizer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = torch.nn.Linear(HIDDEN, HIDDEN)
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.lm_head = LinearCrossEntropyHead(HIDDEN, 19, bias=True, **options)

    def forward(self, x: Tensor, target: Tensor, normalizer: Any = None) -> Any:
        hidden = self.norm(torch.tanh(self.body(x)))
        return self.lm_head(hidden, target, normalizer=normalizer)


@processes(2)
def a_parallelize_plan_hands_the_targets_on(mesh: Any) -> None:
    x, _, _, t = problem()
    rank = mesh.get_local_rank()
    alone = Model()
    expected = alone(x, t, 5.0)
    expected.backward()
    plans: dict[str, dict[str, Any]] = {
        "replicated": {"lm_head": HeadParallel()},
        "a norm that is split": {"norm": SequenceParallel(), "lm_head": HeadParallel()},
        "plain and split": {
            "norm": SequenceParallel(use_local_output=True),
            "lm_head": HeadParallel(input_layouts=Shard(1)),
        },
    }
    for name, plan in plans.items():
        model = parallelize_module(Model(), mesh, plan)
        input = x if name == "replicated" else own(x, 1, rank)
        loss = model(input, t, 5.0)
        loss.backward()
        close(loss, expected)
        for parameter, other in zip(model.lm_head.parameters(), alone.lm_head.parameters()):
            assert parameter.grad.placements == (Shard(0),)
            close(parameter.grad, other.grad, 1e-5)
        body = model.body.weight.grad.clone()
        if name != "replicated":  # each rank has the part of its own tokens
            dist.all_reduce(body, group=mesh.get_group())
        close(body, alone.body.weight.grad, 1e-5)
    each = Model(reduction="none")
    style = HeadParallel(input_layouts=Shard(1), local_tokens=True)
    assert "Shard(dim=1)" in repr(style) and "local_tokens=True" in repr(style)
    parallelize_module(each, mesh, {"lm_head": style})
    losses = each(own(x, 1, rank), own(t, 1, rank))
    close(losses, own(Model(reduction="none")(x, t), 1, rank))


# --- torch.compile ---


def compiled_as_eager(
    function: Callable[..., Any], tensors: list[Any], *more: Any, backend: str = "aot_eager"
) -> None:
    """Compiled as one graph, outputs and gradients have the bits of the eager call."""
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)

    def run(call: Any) -> tuple[Any, Any]:
        outputs = call(*tensors, *more)
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        given = [o for o in several if o.requires_grad]
        total = sum((o * torch.linspace(1, 2, o.numel()).view(o.shape)).sum() for o in given)
        return several, torch.autograd.grad(total, [v for v in tensors if v.requires_grad])

    expected, actual = run(function), run(compiled)
    same(actual, expected)


@processes(2)
def compiled_functions_have_the_same_bits(mesh: Any) -> None:
    x, w, b, t = problem(20)
    rank, group = mesh.get_local_rank(), mesh.get_group()
    weight, bias = rows_of(w, rank), rows_of(b, rank)
    for one in (group, group.group_name):
        compiled_as_eager(
            lambda x, w, b, t, one=one: linear_cross_entropy(
                x, w, t, linear_bias=b, group=one, label_smoothing=0.1, z_loss=1e-3, shift=True
            ),
            [leaf(x), weight, bias], t,
        )  # fmt: skip
    compiled_as_eager(
        lambda x, w, t: linear_logprob(x, w, t, group=group, entropy=True), [leaf(x), weight], t
    )

    def everything(x: Tensor, w: Tensor, t: Tensor, by: Tensor) -> Any:
        loss, s = linear_cross_entropy(
            x, w, t, group=group, sequence_dim=1, local_tokens=True, token_weight=by,
            temperature=by + 0.5, softcap=5.0,
            return_statistics=("entropy", "lse", "argmax", "sum_p_squared"),
        )  # fmt: skip
        return loss, *(v for v in s if v is not None)

    mine = [own(v, 1, rank) for v in (x, t, torch.linspace(0.5, 2, 8).view(TOKENS))]
    compiled_as_eager(everything, [leaf(mine[0]), weight], *mine[1:])

    def cast(x: Tensor, w: Tensor, t: Tensor) -> Any:
        with torch.autocast(ranks.DEVICE, torch.bfloat16):
            return linear_cross_entropy(x, w, t, group=group, reduction="none")

    compiled_as_eager(cast, [leaf(x), weight], t)
    weight = leaf(distribute_tensor(problem()[1], mesh, [Shard(0)]))
    for placement in (Replicate(), Shard(1)):
        input = leaf(distribute_tensor(x, mesh, [placement]))
        compiled_as_eager(linear_cross_entropy, [input, weight], problem()[3])


@processes(2)
def compiled_heads_have_the_same_bits(mesh: Any) -> None:
    x, _, _, t = problem()
    for input, options in ((x, {}), (own(x, 1, mesh.get_local_rank()), {"sequence_dim": 1})):
        head = head_of().parallelize(mesh, **options)
        torch.compiler.reset()
        compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
        found = []
        for call in (head, compiled):
            given = leaf(input)
            loss = call(given, t)
            loss.backward()
            found.append([loss.detach(), given.grad, *(p.grad for p in head.parameters())])
            head.zero_grad()
        same(*found)


@processes(2)
def dynamic_sizes_compile_once(mesh: Any) -> None:
    compiles_once(mesh)


@processes(2)
def dynamic_sizes_of_local_tokens_compile_once(mesh: Any) -> None:
    compiles_once(mesh, sequence_dim=0, local_tokens=True, weight=torch.linspace(0.5, 1.5, 20))


def compiles_once(mesh: Any, **options: Any) -> None:
    import torch._dynamo.testing

    _, w, _, _ = problem(20)
    weight, name = rows_of(w, mesh.get_local_rank()), mesh.get_group().group_name
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def loss(x: Tensor, w: Tensor, t: Tensor) -> Any:
        return linear_cross_entropy(x, w, t, group=name, **options)

    compiled = torch.compile(loss, fullgraph=True, backend=counter, dynamic=True)
    first = 0
    for tokens in (3, 4, 7, 9, 1100):
        generator = ranks.generator(tokens)
        x = torch.randn(tokens, HIDDEN, generator=generator, requires_grad=True)
        t = torch.randint(20, (tokens,), generator=generator)
        found = []
        for call in (loss, compiled):
            made = call(x, weight, t)
            found.append((made.detach(), *torch.autograd.grad(made, (x, weight))))
        same(*found)
        first = first or counter.frame_count
    assert counter.frame_count == first


@processes(2)
def inductor_runs_it(mesh: Any) -> None:
    x, w, _, t = problem(20)
    weight, group = rows_of(w, mesh.get_local_rank()), mesh.get_group()
    loss, (gx, gw) = exact(x, w, None, t)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x, w, t: linear_cross_entropy(x, w, t, group=group), fullgraph=True
    )
    input = leaf(x)
    made = compiled(input, weight, t)
    made.backward()
    close(made, loss)
    close(input.grad, gx)
    close(weight.grad, own(gw, 0, mesh.get_local_rank()))
    equal_on_ranks(made, mesh)
    equal_on_ranks(input.grad, mesh)


# --- LOGITLESS_CHECK_RANKS ---


class Checked:
    """Turns LOGITLESS_CHECK_RANKS on within a `with` block."""

    def __init__(self, seconds: float = 30) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        self.before = _ranks.ON, _ranks.SECONDS
        _ranks.ON, _ranks.SECONDS = True, self.seconds

    def __exit__(self, *_: object) -> None:
        _ranks.ON, _ranks.SECONDS = self.before


@processes(2)
def ranks_that_agree_pass(mesh: Any) -> None:
    x, w, b, t = problem()
    rank, group = mesh.get_local_rank(), mesh.get_group()
    with Checked():
        head = head_of(label_smoothing=0.1).parallelize(mesh)
        head(leaf(x), t, normalizer=5.0).backward()
        head(leaf(x), t, token_weight=torch.ones(TOKENS), normalizer=torch.tensor(5)).backward()
        weight, bias = rows_of(w, rank), rows_of(b, rank)
        where = {"group": group, "vocab_start": 10 * rank, "vocab_total": 19}
        split = {**where, "sequence_dim": 1, "local_tokens": True}
        mine, targets = leaf(own(x, 1, rank)), own(t, 1, rank)
        for reduction in ("none", "mean"):  # each rank's tokens have their own gradients
            losses = linear_cross_entropy(
                mine, weight, targets, linear_bias=bias, reduction=reduction, **split
            )
            (losses.sum() * (rank + 1)).backward()
        call = linear_cross_entropy(leaf(x).bfloat16(), weight.bfloat16(), t, **where)
        call.backward()
        compiled_as_eager(
            lambda x, w, t: linear_cross_entropy(x, w, t, **where), [leaf(x), weight], t
        )
        empty = linear_cross_entropy(leaf(x[:0]), weight, t[:0], **where)
        empty.backward()
        backend = dist.get_backend
        dist.get_backend = lambda group: "nccl"  # then a second group, of gloo, does the waiting
        try:
            linear_cross_entropy(leaf(x), weight, t, **where).backward()
        finally:
            dist.get_backend = backend
        beside = _ranks._gloo[group]
        assert len(_ranks._gloo) == 1 and beside is not group and beside.size() == TP


@processes(2)
def ranks_that_differ_are_named(mesh: Any) -> None:
    x, w, b, t = problem()
    rank, group = mesh.get_local_rank(), mesh.get_group()
    weight = rows_of(w, rank)
    where = {"group": group, "vocab_start": 10 * rank, "vocab_total": 19}

    def wrong(words: str, **changes: Any) -> None:
        """An error on both ranks where the second has `changes`."""
        given: dict[str, Any] = {"input": leaf(x), "linear_weight": weight, "target": t, **where}
        if rank == 1:
            given |= changes
        refused("LOGITLESS_CHECK_RANKS|" + words, lambda: linear_cross_entropy(**given), ValueError)

    other = t.clone()
    other[1, 2], other[1, 3] = t[1, 3], t[1, 2]
    assert not torch.equal(other, t)
    with Checked():
        wrong("target's values on rank 1 differ from those on rank 0", target=other)
        wrong("target's dtype and shape: int32 (2, 4) on rank 1, int64 (2, 4) on rank 0",
              target=t.int())  # fmt: skip
        wrong("reduction: 'sum' on rank 1, 'mean' on rank 0", reduction="sum")
        wrong("label_smoothing: 0.1 on rank 1, 0.0 on rank 0", label_smoothing=0.1)
        wrong("temperature: 2.0 on rank 1, 1.0 on rank 0", temperature=2.0)
        wrong("ignore_index: -1 on rank 1", ignore_index=-1)
        wrong("normalizer: 2.0 on rank 1", normalizer=2.0)
        wrong("the outputs: loss, lse on rank 1, loss on rank 0", return_statistics=["lse"])
        wrong("input's values on rank 1 differ", input=leaf(x + 1))
        wrong("input's dtype and shape: float32 (1, 4, 8) on rank 1", input=x[:1], target=t[:1])
        wrong("input.requires_grad: False on rank 1, True on rank 0", input=x)
        wrong("linear_weight's dtype: bfloat16 on rank 1", linear_weight=weight.bfloat16(),
              input=leaf(x.bfloat16()))  # fmt: skip
        wrong("linear_bias's dtype: float32 on rank 1, None on rank 0", linear_bias=b[10:])
        wrong("weight's dtype and shape: float32 (19,) on rank 1, None", weight=torch.ones(19))
        wrong("token_weight's dtype and shape", token_weight=torch.ones(TOKENS))
        wrong("reduce_dtype: 'input' on rank 1, 'float32' on rank 0", reduce_dtype="input")
        wrong("reduce_input_grad: False on rank 1", reduce_input_grad=False)
        wrong("Split.total: 20 on rank 1, 19 on rank 0", vocab_total=20)
        wrong("Split.start is 9 on rank 1, and the ranks before it end at 10", vocab_start=9)
        wrong("Split.start is 11 on rank 1, and the ranks before it end at 10", vocab_start=11)
        wrong("Split.total is 19, and the columns of all ranks end at 18",
              linear_weight=weight[:8])  # fmt: skip
        each = linear_cross_entropy(leaf(x), weight, t, reduction="none", **where)
        by = torch.ones(TOKENS)
        by[0, 0] += rank
        refused("the upstream gradient of loss's values on rank 1 differ from those on rank 0",
                lambda: each.backward(by), ValueError)  # fmt: skip
        loss = linear_cross_entropy(leaf(x), weight, t, **where)
        if rank:
            refused("the call: forward on rank 1, backward on rank 0", lambda: (
                linear_cross_entropy(leaf(x), weight, t, **where)), ValueError)  # fmt: skip
        else:
            refused("the call: forward on rank 1, backward on rank 0", loss.backward, ValueError)


@processes(2)
def a_rank_that_does_not_come_is_named(mesh: Any) -> None:
    x, w, _, t = problem(20)
    rank = mesh.get_local_rank()
    group = dist.new_group([0, 1], use_local_synchronization=True)  # timeouts break a group
    weight = rows_of(w, rank)
    with Checked(2):
        loss = linear_cross_entropy(leaf(x), weight, t, group=group)
        start = time.monotonic()
        if rank == 0:
            words = "LOGITLESS_CHECK_RANKS: rank 1 of the group did not come to the backward"
            refused(words, loss.backward, RuntimeError)
            assert time.monotonic() - start < 20
        dist.barrier(mesh.get_group())


# --- FSDP2 ---


def trained(model: Any, batches: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """The losses of the steps and the first step's gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses, grads = [], []
    for x, t in batches:
        loss = model(x, t)
        loss.backward()
        grads = grads or [full(p.grad) for p in model.parameters()]
        torch.nn.utils.clip_grad_norm_(model.lm_head.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, grads


def batch(seed: int) -> tuple[Tensor, Tensor]:
    x, _, _, t = problem(seed=seed)
    t[0, 1] = 3  # equal numbers of tokens per rank
    return x, t


def as_alone(model: Any, mesh: Any, off: float) -> None:
    """A model under FSDP, with its share of each batch, learns as one process with all of it."""
    dp = mesh["dp"]
    batches = [batch(seed) for seed in range(4)]
    mine = [tuple(own(v, 0, dp.get_local_rank()) for v in pair) for pair in batches]
    alone = Model()
    losses, grads = trained(model, mine)
    expected, exactly = trained(alone, batches)
    for loss, other in zip(losses, expected):
        total = loss.clone()
        dist.all_reduce(total, group=dp.get_group())
        close(total / dp.size(), other, off)
        equal_on_ranks(loss, mesh["tp"])
    for grad, other in zip(grads, exactly):
        assert (grad - other).norm() <= off * other.norm()
    for parameter, other in zip(model.parameters(), alone.parameters()):
        close(parameter, other, 10 * off)


@processes(4)
def fsdp_around_a_head_that_is_split(mesh: Any) -> None:
    for kinds in ({}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}):
        for apart in (True, False):
            model = parallelize_module(Model(), mesh["tp"], {"lm_head": HeadParallel()})
            for part in (*[model.lm_head] * apart, model):
                fully_shard(part, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(**kinds))
            as_alone(model, mesh, 3e-2 if kinds else 1e-5)
    x, t = batch(0)
    model.reshard()
    refused("sharded on mesh dimension 'dp' and mesh dimension 'tp'|FSDP", lambda: (
        linear_cross_entropy(x, model.lm_head.weight, t)), NotImplementedError)  # fmt: skip


@processes(4)
def fsdp_around_a_split_head_that_is_compiled(mesh: Any) -> None:
    torch.compiler.reset()
    model = parallelize_module(Model(), mesh["tp"], {"lm_head": HeadParallel()})
    for part in (model.lm_head, model):
        fully_shard(part, mesh=mesh["dp"])
    x, t = batch(0)
    found = []
    for _ in range(2):  # eager, compiled
        loss = model(x, t)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
        model.zero_grad()
        model.lm_head.compile(backend="aot_eager")
    same(*found)


@processes(4)
def fsdp_around_an_ordinary_head(mesh: Any) -> None:
    model = Model()
    for part in (model.lm_head, model):
        fully_shard(part, mesh=mesh["dp"])
    as_alone(model, mesh, 1e-5)
    x, t = batch(0)
    model.lm_head.reshard()
    weight = model.lm_head.weight
    refused("a DTensor is sharded over mesh dimension 'dp'|Head|FSDP", lambda: (
        linear_cross_entropy(x, weight, t)), NotImplementedError)  # fmt: skip
    refused("group is not that of mesh dimension 'dp'|FSDP", lambda: (
        linear_cross_entropy(x, weight, t, group=mesh.get_group("tp"))))  # fmt: skip


@processes(4)
def meshes_of_two_dimensions(mesh: Any) -> None:
    x, w, _, t = problem()
    loss, (gx, gw) = exact(x, w, None, t)
    weight = leaf(distribute_tensor(w, mesh, [Replicate(), Shard(0)]))
    for where, placements in (
        (mesh, [Replicate(), Replicate()]),
        (mesh, [Replicate(), Shard(1)]),
        (mesh["tp"], [Shard(1)]),
    ):
        input = leaf(distribute_tensor(x, where, placements))
        weight.grad = None
        made = linear_cross_entropy(input, weight, t)
        made.backward()
        close(made, loss)
        close(input.grad, gx)
        close(weight.grad, gw)
        assert weight.grad.placements == weight.placements
    input = distribute_tensor(x, mesh, [Shard(0), Replicate()])
    refused("input is a DTensor with Shard(dim=0) on mesh dimension 'dp'", lambda: (
        linear_cross_entropy(input, weight, t)), NotImplementedError)  # fmt: skip
    both = distribute_tensor(w, mesh, [Shard(0), Shard(0)])
    refused("sharded on mesh dimension 'dp' and mesh dimension 'tp'", lambda: (
        linear_cross_entropy(x, both, t)), NotImplementedError)  # fmt: skip
    refused("group is not that of mesh dimension 'tp'", lambda: linear_cross_entropy(
        x, weight, t, group=mesh.get_group("dp")), NotImplementedError)  # fmt: skip
    made = linear_cross_entropy(x, weight, t, group=mesh.get_group("tp"))
    close(made, loss)
    refused("mesh has 2 dimensions|one", lambda: head_of().parallelize(mesh), ValueError)


# --- the processes ---


def work(rank: int, folder: str, names: Collection[str]) -> None:
    """Runs the cases `names`; the rank's file gets their errors. Ranks meet after each case, so
    that a case which fails on all ranks does not disturb the next."""
    ranks.join(rank, PROCESSES, f"{folder}/meeting", SECONDS)
    mesh = init_device_mesh(ranks.DEVICE, (PROCESSES // TP, TP), mesh_dim_names=("dp", "tp"))
    hosts = dist.new_group(backend="gloo")
    results: dict[str, str] = {}
    path = pathlib.Path(folder) / f"rank{rank}.pt"
    for name, (count, case) in CASES.items():
        if name not in names:
            continue
        start = time.monotonic()
        results[name] = ""
        if rank < count <= PROCESSES:
            try:
                case(mesh if count == 4 else mesh["tp"])
            except BaseException:
                results[name] = traceback.format_exc()
        results[f"{name}, seconds"] = f"{time.monotonic() - start:.1f}"
        torch.save(results, path)
        try:
            dist.monitored_barrier(hosts, timeout=datetime.timedelta(seconds=SECONDS))
        except RuntimeError:
            break
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[list[dict[str, str]]]:
    folder = str(tmp_path_factory.mktemp("gloo"))
    names = {
        item.callspec.params["case"]
        for item in request.session.items
        if getattr(item, "function", None) is test_on_several_devices
    }
    start = torch.multiprocessing.start_processes
    context = start(work, (folder, names), nprocs=PROCESSES, join=False, start_method="spawn")
    end = time.monotonic() + WHOLE
    try:
        while not context.join(max(end - time.monotonic(), 0)):
            if time.monotonic() >= end:
                break
    finally:
        for process in context.processes:
            process.kill()
    paths = [pathlib.Path(folder) / f"rank{rank}.pt" for rank in range(PROCESSES)]
    yield [torch.load(path) if path.exists() else {} for path in paths]


@pytest.mark.parametrize("case", CASES)
def test_on_several_devices(case: str, results: list[dict[str, str]]) -> None:
    if CASES[case][0] > PROCESSES:
        pytest.skip(f"needs {CASES[case][0]} GPUs")
    failed = [f"rank {rank}: {r[case]}" for rank, r in enumerate(results) if r.get(case)]
    assert not failed, "\n".join(failed)
    for rank, found in enumerate(results):
        assert case in found, f"a case before it failed, or rank {rank} was too slow"


# --- without other processes ---


def test_the_switch_is_read_of_the_environment() -> None:
    assert _ranks.switch({}) == (False, 60) and not _ranks.switch({"LOGITLESS_CHECK_RANKS": "0"})[0]
    found = _ranks.switch({"LOGITLESS_CHECK_RANKS": "1", "LOGITLESS_CHECK_RANKS_TIMEOUT": "2.5"})
    assert found == (True, 2.5)
    for wrong in ("soon", "0", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match=f"_TIMEOUT is '{wrong}'; allowed"):
            _ranks.switch({"LOGITLESS_CHECK_RANKS_TIMEOUT": wrong})


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.float32, torch.int64], ids=str)
def test_a_digest_follows_every_element_and_its_place(dtype: torch.dtype) -> None:
    x = torch.arange(12).remainder(5).to(dtype)
    seen = {_ranks.digest(x)}
    for place in range(11):
        swapped = x.clone()
        swapped[place], swapped[place + 1] = x[place + 1], x[place]
        if not torch.equal(swapped, x):
            seen.add(_ranks.digest(swapped))
    assert len(seen) == 1 + sum(bool(x[i] != x[i + 1]) for i in range(11))
    assert _ranks.digest(x.view(3, 4)) == _ranks.digest(x) == _ranks.digest(x.clone())
    assert _ranks.digest(x.view(3, 4).T.contiguous().T) == _ranks.digest(x)


def test_a_digest_goes_on_behind_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(25)
    whole = _ranks.digest(x)
    monkeypatch.setattr(_ranks, "_CHUNK", 8)
    assert _ranks.digest(x) == whole


def test_the_odd_rank_out_is_named() -> None:
    a, b = {"the call": "forward", "x": "1", "y": "#a"}, {"the call": "forward", "x": "2"}
    assert _ranks.differences([a, a]) == []
    found = _ranks.differences([a, b, a, a])
    assert found == ["x: 2 on rank 1, 1 on ranks 0, 2, 3", "y on rank 1 differ from those on ranks "
                     "0, 2, 3"]  # fmt: skip
    other = _ranks.differences([{**a, "the call": "backward"}, b])
    assert other == ["the call: forward on rank 1, backward on rank 0"]


def test_columns_that_leave_a_gap_or_overlap_are_named() -> None:
    assert _ranks.gaps([(0, 5, 9), (5, 5, 9), (5, 9, 9)]) == []
    assert "Split.start is 6 on rank 1" in _ranks.gaps([(0, 5, 9), (6, 9, 9)])[0]
    assert "Split.start is 4 on rank 1" in _ranks.gaps([(0, 5, 9), (4, 9, 9)])[0]
    assert "end at 8" in _ranks.gaps([(0, 5, 9), (5, 8, 9)])[0]


def test_a_head_that_is_not_split_has_its_options() -> None:
    head = LinearCrossEntropyHead(4, 5)
    assert head.sequence_dim is None and head._place(None, None) == {}
    assert isinstance(head.loss, LinearCrossEntropyLoss)

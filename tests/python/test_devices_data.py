# SPDX-License-Identifier: Apache-2.0
"""The head over the data-parallel group, `parallelize(mesh, tokens="sharded")`, against FSDP2
around everything: two, three and four processes, on gloo or on GPUs (ranks.py)."""

from __future__ import annotations

import copy
import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import logitless
import ranks
from logitless.torch import LinearCrossEntropyHead
from ranks import Rank

if not torch.distributed.is_available():
    pytest.skip("torch.distributed is not there", allow_module_level=True)

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from logitless.torch._split import exchange, rule, sums
from logitless.torch._split import ranks as _ranks
from logitless.torch.parallel import head_costs

HIDDEN, VOCAB = 8, 19  # 19 is not divisible by any number of ranks
BF16 = torch.bfloat16
Results = dict[str, Tensor]
CASES: dict[str, tuple[tuple[int, ...], Callable[[Rank], Results | None]]] = {}


def sizes(*counts: int) -> Callable[[Any], Any]:
    """A decorator that adds a case for these numbers of ranks."""

    def add(case: Any) -> Any:
        CASES[case.__name__] = (counts, case)
        return case

    return add


# --- shared by the cases ---


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    names = ("dp",) if len(shape) == 1 else ("replicas", "shards")
    return init_device_mesh(ranks.DEVICE, shape, mesh_dim_names=names)


def meshes(size: int) -> list[DeviceMesh]:
    """A mesh of shards only and, for an even size, one of two replicas."""
    return [mesh_of(size), *([mesh_of(2, size // 2)] if size % 2 == 0 else [])]


def full(tensor: Any) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def close(actual: Any, expected: Any, off: float = 2e-6) -> None:
    torch.testing.assert_close(actual, expected, rtol=off, atol=off)


def refused(words: str, call: Callable[[], Any], kind: type[Exception] = Exception) -> None:
    with pytest.raises(kind) as found:
        call()
    for word in words.split("|"):
        assert word in str(found.value), f"{word!r} is not in: {found.value}"


def batch(rank: int, step: int = 0, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """A rank's own hidden states [2, 4, 8] and targets [2, 4], of which rank + 1 are ignored."""
    generator = ranks.generator(100 * step + rank)
    x = torch.randn(2, 4, HIDDEN, generator=generator)
    t = torch.randint(vocab, (2, 4), generator=generator)
    t.view(-1)[: rank + 1] = -100
    return x, t


def head_of(vocab: int = VOCAB, **options: Any) -> LinearCrossEntropyHead:
    """A head with the same values on every rank."""
    torch.manual_seed(5)
    return LinearCrossEntropyHead(HIDDEN, vocab, bias=True, **options)


class Model(torch.nn.Module):
    """A trunk, and a head of ours or an ordinary one with PyTorch's loss."""

    def __init__(self, ordinary: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = torch.nn.Linear(HIDDEN, HIDDEN)
        self.norm = torch.nn.LayerNorm(HIDDEN)
        kind: Any = torch.nn.Linear if ordinary else LinearCrossEntropyHead
        self.lm_head = kind(HIDDEN, VOCAB, bias=True)

    def forward(self, x: Tensor, target: Tensor, normalizer: Any = None) -> Tensor:
        hidden = self.norm(torch.tanh(self.body(x)))
        if isinstance(self.lm_head, LinearCrossEntropyHead):
            loss: Tensor = self.lm_head(hidden, target, normalizer=normalizer)
            return loss
        logits, flat = self.lm_head(hidden).flatten(0, -2), target.flatten()
        if normalizer is None:
            return functional.cross_entropy(logits.float(), flat)
        return functional.cross_entropy(logits.float(), flat, reduction="sum") / normalizer


def with_fsdp(model: Model, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> Model:
    """The model under FSDP2. A head of ours is split by parallelize and left out of FSDP."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    left_out: set[Any] = set()
    if isinstance(model.lm_head, LinearCrossEntropyHead):
        model.lm_head.parallelize(mesh, tokens="sharded", param_dtype=dtype)
        left_out = set(model.lm_head.parameters())
    fully_shard(model.body, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=left_out)
    return model


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def trained(
    me: Rank, model: Model, optimizer: Any, steps: range, normalized: bool = True
) -> dict[str, list[Tensor]]:
    """Each step is two micro-batches, with a normalizer and an upstream gradient of the rank."""
    losses, norms = [], []
    for step in steps:
        for micro in (0, 1):
            x, t = batch(me.rank, 2 * step + micro)
            loss = model(x, t, 3.0 + me.rank if normalized else None)
            (loss * (0.5 + me.rank)).backward()
            losses.append(loss.detach())
        norms.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    weights = [full(p) for p in model.parameters()]
    return {"losses": losses, "norms": norms, "weights": weights}


# --- training ---


def learns_as_fsdp(
    me: Rank, mesh: DeviceMesh, normalized: bool = True, dtype: torch.dtype | None = None
) -> None:
    pair = [with_fsdp(Model(ordinary), mesh, dtype) for ordinary in (False, True)]
    ours, theirs = [trained(me, m, optimizer_of(m), range(3), normalized) for m in pair]
    off = 2e-6 if dtype is None else 2e-3
    for name in theirs:  # after all collectives, so that a failure leaves no rank waiting
        for a, e in zip(ours[name], theirs[name], strict=True):
            close(a, e, off)


@sizes(2, 3, 4)
def a_model_learns_as_under_fsdp(me: Rank) -> None:
    for mesh, normalized in zip(meshes(me.size), (True, False), strict=False):
        learns_as_fsdp(me, mesh, normalized)


@sizes(2, 4)
def a_model_learns_as_under_fsdp_in_bf16(me: Rank) -> None:
    learns_as_fsdp(me, meshes(me.size)[1], dtype=BF16)


# --- gradients ---


def expected_of(
    me: Rank, head: LinearCrossEntropyHead, inputs: list[Tensor], loss: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the whole head: of each rank's input, and the ranks' mean for parameters."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    total = sum(loss(head, rank, x) for rank, x in enumerate(leaves))
    grads = torch.autograd.grad(total, [*leaves, head.weight, head.bias])
    return list(grads[: me.size]), [g / me.size for g in grads[me.size :]]


def gradients_as(me: Rank, mesh: DeviceMesh, vocab: int, loss: Any, **options: Any) -> None:
    whole = head_of(vocab, **options)
    head = copy.deepcopy(whole).parallelize(mesh, tokens="sharded")
    inputs = [batch(rank)[0] for rank in range(me.size)]
    own = inputs[me.rank].requires_grad_()
    value = loss(head, me.rank, own)
    value.backward()
    made = [full(p.grad) for p in head.parameters()]
    assert all(p.grad.placements == p.placements for p in head.parameters())
    inputs[me.rank] = own.detach()
    of_inputs, of_head = expected_of(me, whole, inputs, loss)
    close(value, loss(whole, me.rank, own))
    close(own.grad, of_inputs[me.rank])
    for a, e in zip(made, of_head, strict=True):
        close(a, e)


@sizes(2, 3, 4)
def gradients_are_those_of_the_mean_of_the_ranks(me: Rank) -> None:
    def mean(head: Any, rank: int, x: Tensor) -> Any:
        t = batch(rank, vocab=head.out_features)[1]
        return head(x, t) * (rank + 0.5)

    for mesh in meshes(me.size):
        for vocab in (VOCAB, 20, 5, 1):  # with 5 on four ranks the last one is empty
            gradients_as(me, mesh, vocab, mean, label_smoothing=0.1)


@sizes(2, 3)
def every_option_is_of_the_own_tokens(me: Rank) -> None:
    by = torch.linspace(0.5, 1.5, 8).view(2, 4)

    def everything(head: Any, rank: int, x: Tensor) -> Any:
        t = batch(rank)[1]
        loss, s = head(x, t, token_weight=by + rank, temperature=by.flip(0) + rank)
        more = s.entropy * by * (rank + 1) + s.lse * by + s.logprob * rank
        return (loss * by * (rank + 1)).sum() + more.sum()

    options = {"return_statistics": ("entropy", "lse", "logprob"), "z_loss": 1e-2, "softcap": 5.0}
    gradients_as(me, mesh_of(me.size), VOCAB, everything, reduction="none", **options)

    def shifted(head: Any, rank: int, x: Tensor) -> Any:
        return head(x, batch(rank)[1], normalizer=torch.tensor(2.0 + rank))

    classes = torch.rand(VOCAB, generator=ranks.generator(1)) + 0.5
    gradients_as(me, mesh_of(me.size), VOCAB, shifted, shift=True, weight=classes)

    def summed(head: Any, rank: int, x: Tensor) -> Any:  # one rank has only ignored tokens
        t = batch(rank)[1] if rank else torch.full((2, 4), -100)
        return head(x, t)

    for reduction in ("sum", "mean"):
        gradients_as(me, mesh_of(me.size), VOCAB, summed, reduction=reduction)


@sizes(2)
def shapes_may_differ_where_counts_do_not(me: Rank) -> None:
    mesh = mesh_of(2)

    def flat(head: Any, rank: int, x: Tensor) -> Any:
        t = batch(rank)[1]
        if rank:
            x, t = x.view(8, HIDDEN), t.view(8)
        losses = head(x, t)
        assert losses.shape == t.shape
        return losses.square().sum()

    gradients_as(me, mesh, VOCAB, flat, reduction="none")

    def one(head: Any, rank: int, x: Tensor) -> Any:
        losses = head(x[1, 3], torch.tensor(rank))
        assert losses.shape == ()
        return losses

    gradients_as(me, mesh, VOCAB, one, reduction="none")
    head = head_of().parallelize(mesh, tokens="sharded")
    count = 8 - 2 * me.rank
    words = "the number of the input's tokens is [8, 6] on the ranks|pad with tokens"
    if ranks.BACKEND == "gloo":  # on GPUs, ranks do not exchange errors
        x = torch.randn(count, HIDDEN)
        refused(words, lambda: head(x, torch.zeros(count).long()), ValueError)
    empty = head(torch.randn(0, 4, HIDDEN), torch.zeros(0, 4).long())
    empty.backward()
    assert empty == 0 and not full(head.weight.grad).any()


@sizes(2, 4)
def a_divide_factor_takes_the_place_of_the_number_of_ranks(me: Rank) -> None:
    found = []
    for mesh in (mesh_of(2),) if me.size == 2 else (mesh_of(2, 2),):
        for factor in (None, 1.0, 6.0):
            head = head_of().parallelize(mesh, tokens="sharded", gradient_divide_factor=factor)
            other = fully_shard(head_of(), mesh=mesh)
            if factor is not None:
                other.set_gradient_divide_factor(factor)
                other.set_force_sum_reduction_for_comms(True)  # gloo cannot scale in a reduction
            for h in (head, other):
                h(*batch(me.rank)).backward()
                found.append(full(h.weight.grad))
    for ours, theirs in zip(found[::2], found[1::2], strict=True):
        close(ours, theirs)


@sizes(2)
def one_shard_without_replicas_is_the_plain_call(me: Rank) -> None:
    alone, x = head_of(), batch(me.rank)[0]
    head = copy.deepcopy(alone).parallelize(mesh_of(2, 1)["shards"], tokens="sharded")
    found = []
    for h in (head, alone):
        loss = h(x, batch(me.rank)[1])
        loss.backward()
        found.append((loss.detach(), *(full(p.grad) for p in h.parameters())))
    for a, e in zip(*found, strict=True):
        assert torch.equal(a, e)


@sizes(2)
def a_frozen_head_has_the_inputs_gradient_and_logits(me: Rank) -> None:
    whole = head_of().requires_grad_(False)
    head = copy.deepcopy(whole).parallelize(mesh_of(2), tokens="sharded")
    x, t = batch(me.rank)
    found = []
    for h in (head, whole):
        input = x.clone().requires_grad_()
        h(input, t).backward()
        h(input).square().sum().backward()
        found.append(input.grad)
    close(*found, 2e-5)
    assert head.weight.grad is None


@sizes(2)
def gradients_of_16_bits_are_rounded_once(me: Rank) -> None:
    whole = head_of().bfloat16()
    head = copy.deepcopy(whole).parallelize(mesh_of(2), tokens="sharded")
    x, t = batch(me.rank)
    own = x.bfloat16().requires_grad_()
    head(own, t).backward()
    assert head.weight.grad.dtype is BF16 and own.grad.dtype is BF16
    made, exact = full(head.weight.grad), copy.deepcopy(whole).double().float()
    for rank in range(2):
        x, t = batch(rank)
        (exact(x.bfloat16().float(), t) / 2).backward()
    assert (made.float() - exact.weight.grad).norm() < 4e-3 * exact.weight.grad.norm()


# --- the weight in the dtype of the products ---


def true_loss(head: Any, x: Tensor, t: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    """The loss of the head's present weights, with the products' operands in `dtype`."""
    weight = full(head.weight).to(dtype).float()
    logits = x.to(dtype).float() @ weight.T + full(head.bias)
    return functional.cross_entropy(logits.flatten(0, -2), t.flatten())


Scaled = Callable[[Any, float], Any]


def _foreach_mul(head: Any, by: float) -> None:
    """Changes the parameters in place by an op that does not move a DTensor's version counter."""
    with torch.no_grad():
        torch._foreach_mul_(list(head.parameters()), by)


def _data_mul(head: Any, by: float) -> None:
    for parameter in head.parameters():
        parameter.data.mul_(by)


def _local_mul(head: Any, by: float) -> None:
    for parameter in head.parameters():
        parameter.to_local().detach().mul_(by)


def _loaded(head: Any, by: float) -> None:
    head.load_state_dict({name: value * by for name, value in head.state_dict().items()})


WRITES: list[Scaled] = [_foreach_mul, _data_mul, _local_mul, _loaded]
OPTIMIZERS: list[dict[str, bool]] = [{}, {"foreach": True}, {"fused": True}]
ZEROED: list[bool | None] = [None, True, False]  # set_to_none; None: no zero_grad


def losses_are_true(me: Rank, head: Any, optimizer: Any, zeroed: bool | None, late: bool) -> None:
    """Steps of a loop that zeroes gradients before the loss or, if `late`, after it, each followed
    by an evaluation: all losses are those of the present weights."""
    x, t = batch(me.rank)

    def zero() -> None:
        if zeroed is not None:
            optimizer.zero_grad(set_to_none=zeroed)

    for _ in range(2):
        if not late:
            zero()
        loss = head(x, t)
        close(loss, true_loss(head, x, t), 2e-3)
        if late:
            zero()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            close(head(x, t), true_loss(head, x, t), 2e-3)


@sizes(2)
def every_loss_is_of_the_weights_that_are_there(me: Rank) -> None:
    for how in OPTIMIZERS:
        for zeroed in ZEROED:
            for late in (False, True):
                head = head_of().parallelize(mesh_of(2), tokens="sharded", param_dtype=BF16)
                optimizer = torch.optim.AdamW(head.parameters(), lr=0.1, **how)
                losses_are_true(me, head, optimizer, zeroed, late)


@sizes(2)
def every_way_to_write_weights_is_seen(me: Rank) -> None:
    x, t = batch(me.rank)
    for dtype in (BF16, None):  # by param_dtype or by autocast
        head = head_of().parallelize(mesh_of(2), tokens="sharded", param_dtype=dtype)
        for write in WRITES:
            for trains in (False, True):
                with torch.set_grad_enabled(trains), torch.autocast(ranks.DEVICE, BF16):
                    close(head(x, t), true_loss(head, x, t), 2e-3)
                    write(head, 1.5)
                    loss = head(x, t)
                    close(loss, true_loss(head, x, t), 2e-3)
                if trains:
                    loss.backward()
        copied = copy.deepcopy(head)
        with torch.no_grad():
            assert torch.equal(copied(x, t), head(x, t))
            with torch.autocast(ranks.DEVICE, torch.float16):  # overrides param_dtype
                close(head(x, t), true_loss(head, x, t, torch.float16), 2e-3)


@sizes(2)
def gradients_are_of_the_weights_that_are_there(me: Rank) -> None:
    x, t = batch(me.rank)
    found = []
    for changed in (True, False):
        head = head_of().parallelize(mesh_of(2), tokens="sharded", param_dtype=BF16)
        if changed:
            head(x, t).backward()
            _foreach_mul(head, 1.5)
            head.zero_grad(set_to_none=False)
        else:
            _foreach_mul(head, 1.5)
        own = x.clone().requires_grad_()
        head(own, t).backward()
        found.append([own.grad, *(full(p.grad) for p in head.parameters())])
    for a, e in zip(*found, strict=True):
        assert torch.equal(a, e)


@sizes(2)
def parameters_of_inference_mode_are_cast(me: Rank) -> None:
    with torch.inference_mode():
        head = head_of().parallelize(mesh_of(2), tokens="sharded", param_dtype=BF16)
        x, t = batch(me.rank)
        found = head(x, t)
    with torch.no_grad():  # DTensor.full_tensor fails in inference mode with torch 2.11
        expected = true_loss(head, x, t)
        close(found, expected, 2e-3)
        close(head(x, t), expected, 2e-3)


# --- checkpoints ---


@sizes(2, 4)
def a_run_is_resumed(me: Rank) -> None:
    for mesh, whole in ((meshes(me.size)[-1], False), (mesh_of(me.size), True)):
        options = StateDictOptions(full_state_dict=whole)
        model = with_fsdp(Model(), mesh, BF16)
        optimizer = optimizer_of(model)
        trained(me, model, optimizer, range(2))
        state = copy.deepcopy(get_model_state_dict(model, options=options))
        inner = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
        assert set(state) == set(Model(ordinary=True).state_dict())
        assert whole or state["lm_head.weight"].placements == model.lm_head.weight.placements
        expected = trained(me, model, optimizer, range(2, 4))
        fsdps = with_fsdp(Model(ordinary=True), mesh, BF16)
        set_model_state_dict(fsdps, state, options=options)
        assert torch.equal(full(fsdps.lm_head.weight), full(state["lm_head.weight"]))
        other = with_fsdp(Model(), mesh, BF16)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.5)
        other(*batch(me.rank)).backward()
        other.zero_grad()
        resumed = optimizer_of(other)
        set_model_state_dict(other, state, options=options)
        set_optimizer_state_dict(other, resumed, inner, options=options)
        found = trained(me, other, resumed, range(2, 4))
        for name, tensors in expected.items():
            for a, e in zip(found[name], tensors, strict=True):
                assert torch.equal(a, e), name


@sizes(2)
def logits_are_of_the_own_tokens(me: Rank) -> None:
    options: dict[str, Any] = {"softcap": 3.0, "temperature": 0.7}
    whole, x = head_of(**options), batch(me.rank)[0][: 1 + me.rank]
    for dtype in (None, BF16):
        head = head_of(**options).parallelize(mesh_of(2), tokens="sharded", param_dtype=dtype)
        with torch.no_grad():
            close(head(x).float(), whole(x), 2e-6 if dtype is None else 3e-2)
    refused("target is None|no_grad", lambda: head.eval()(x), NotImplementedError)


# --- what is refused ---


@sizes(2)
def tied_embeddings_are_refused_by_name(me: Rank) -> None:
    embedding = torch.nn.Embedding(VOCAB, HIDDEN)
    head = LinearCrossEntropyHead(HIDDEN, VOCAB)
    head.weight = embedding.weight
    words = "'weight' of a Embedding too (tied embeddings)"
    refused(words, lambda: head.parallelize(mesh_of(2), tokens="sharded"), NotImplementedError)
    assert head.weight is embedding.weight
    del embedding
    head.parallelize(mesh_of(2), tokens="sharded")
    model = Model(ordinary=True)
    model.lm_head = LinearCrossEntropyHead.from_linear(model.lm_head)
    model.lm_head.parallelize(mesh_of(2), tokens="sharded")
    model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN))
    refused("plain tensor|tying it again", lambda: model(*batch(me.rank)), NotImplementedError)


@sizes(2)
def what_is_refused(me: Rank) -> None:
    mesh, sharded = mesh_of(2), {"tokens": "sharded"}
    of = head_of().parallelize
    refused("tokens is 'split'; allowed", lambda: of(mesh, tokens="split"), ValueError)
    refused("sequence_dim is given", lambda: of(mesh, sequence_dim=0, **sharded), ValueError)
    refused("param_dtype is given without", lambda: of(mesh, param_dtype=BF16), ValueError)
    refused("gradient_divide_factor is given without", lambda: of(
        mesh, gradient_divide_factor=2.0), ValueError)  # fmt: skip
    refused("gradient_divide_factor is 0", lambda: of(
        mesh, gradient_divide_factor=0, **sharded), ValueError)  # fmt: skip
    deep = init_device_mesh(ranks.DEVICE, (1, 1, 2))
    refused("mesh has 3 dimensions; allowed: one, or two", lambda: of(deep, **sharded), ValueError)
    main = head_of(grad_accumulation="main_grad")
    refused("main_grad", lambda: main.parallelize(mesh, **sharded), NotImplementedError)
    head = head_of().parallelize(mesh, **sharded)
    x, t = batch(me.rank)
    placed = distribute_tensor(x, mesh, [Shard(0)])
    refused("input is a DTensor|to_local()", lambda: head(placed, t), NotImplementedError)
    goal = distribute_tensor(t, mesh, [Replicate()])
    refused("target is a DTensor|to_local()", lambda: head(x, goal), NotImplementedError)
    if ranks.BACKEND == "gloo":  # every rank raises the first rank's error
        t[1, 1] = VOCAB + me.rank
        named = f"target[5] on rank 0 is {VOCAB}; allowed: 0 to {VOCAB - 1}"
        refused(named, lambda: head(x, t), ValueError)
    around = fully_shard(Model(), mesh=mesh)
    refused("DTensors|split once", lambda: around.lm_head.parallelize(mesh, **sharded), ValueError)
    forgotten = Model()
    forgotten.lm_head.parallelize(mesh, **sharded)
    refused("overlapping meshes", lambda: fully_shard(forgotten, mesh=mesh))


@sizes(2)
def a_head_on_meta_is_refused(me: Rank) -> None:
    x, t = batch(me.rank)
    for tokens in ("sharded", "replicated"):
        head = LinearCrossEntropyHead(HIDDEN, VOCAB, device="meta")
        head.parallelize(mesh_of(2), tokens=tokens, src_data_rank=None)
        refused("head.weight is on meta; allowed: ", lambda head=head: head(x, t), RuntimeError)


# --- torch.compile and LOGITLESS_CHECK_RANKS ---


@sizes(3)
def a_compiled_head_with_fewer_rows_than_ranks(me: Rank) -> None:
    """The last rank has none, and takes part in every exchange."""
    head = head_of(4).parallelize(mesh_of(3), tokens="sharded")
    torch.compiler.reset()
    found = []
    for call in (head, torch.compile(head, fullgraph=True, backend=ranks.comparing())):
        x, t = batch(me.rank, vocab=4)
        x.requires_grad_()
        loss = call(x, t)
        loss.backward()
        found.append([loss.detach(), x.grad, *(full(p.grad) for p in head.parameters())])
        head.zero_grad()
    for a, e in zip(*found, strict=True):
        assert torch.equal(a, e)


@sizes(2)
def a_compiled_head_has_the_same_bits(me: Rank) -> None:
    options: dict[str, Any] = {"tokens": "sharded", "param_dtype": BF16}
    for mesh in meshes(2):
        head = head_of(label_smoothing=0.1).parallelize(mesh, **options)
        torch.compiler.reset()
        found = []
        for call in (head, torch.compile(head, fullgraph=True, backend="aot_eager")):
            x, t = batch(me.rank)
            x.requires_grad_()
            loss = call(x, t, normalizer=2.0 + me.rank)
            (loss * (1 + me.rank)).backward()
            found.append([loss.detach(), x.grad, *(full(p.grad) for p in head.parameters())])
            head.zero_grad()
        for a, e in zip(*found, strict=True):
            assert torch.equal(a, e)


@sizes(2)
def ranks_are_compared_but_for_what_is_their_own(me: Rank) -> None:
    head = head_of().parallelize(mesh_of(2), tokens="sharded")
    x, t = batch(me.rank)
    before, _ranks.ON = _ranks.ON, True
    try:
        head(x, t, normalizer=2.0 + me.rank).backward()
        head(x, t, normalizer=torch.tensor(2.0 + me.rank)).backward()
        refused("temperature: 2.0 on rank 1, 1.0 on rank 0", lambda: head(
            x, t, temperature=1.0 + me.rank), ValueError)  # fmt: skip
    finally:
        _ranks.ON = before


# --- mutants: each makes the case of its name fail ---


def _summed(real: Any) -> Any:
    return lambda grad, shard: real(grad, shard._replace(divisor=1.0))


def _not_replicated(real: Any) -> Any:
    return lambda grad, shard: real(grad, shard._replace(replicas=""))


def _own_upstream(real: Any) -> Any:
    """A bug: a rank's own upstream gradients (gathered along dimension 1) stand for all."""

    def gather(x: Tensor, shard: Any, dim: int) -> Tensor:
        return torch.cat([x] * shard.size, dim) if dim == 1 else real(x, shard, dim)

    return gather


def _mean_of_all(real: Any) -> Any:
    """A bug: the mean divides by the number of tokens of all ranks."""

    def divisor(tokens: Any, options: Any) -> Tensor:
        by: Tensor = real(tokens, options).clone()
        dist.all_reduce(by)
        return by

    return divisor


def _stale(real: Any) -> Any:
    """A bug: the first cast of a weight is used for ever."""
    kept: dict[Any, Tensor] = {}

    def cast(tensor: Tensor, dtype: Any) -> Tensor:
        if tensor.shape[0] in (10, 9) and dtype is BF16:  # VOCAB's rows on two shards
            return kept.setdefault(tensor.shape, real(tensor, dtype))
        made: Tensor = real(tensor, dtype)
        return made

    return cast


MUTANTS = {
    "grad_weight is the ranks' sum": (rule, "_mean", _summed),
    "replicas are not reduced": (rule, "_mean", _not_replicated),
    "upstream of one rank": (exchange, "gather_tokens", _own_upstream),
    "a mean over all tokens": (sums, "divisor", _mean_of_all),
    "a cast that is kept for ever": (rule, "cast", _stale),
}


def mutated(me: Rank, name: str) -> Results:
    where, attribute, make = MUTANTS[name]
    dtype, red = BF16 if make is _stale else None, False
    try:
        with mock.patch.object(where, attribute, make(getattr(where, attribute))):
            learns_as_fsdp(me, mesh_of(2, 2), make is not _mean_of_all, dtype)
    except AssertionError:
        red = True
    every: list[Any] = [None] * me.size
    dist.all_gather_object(every, red)
    assert any(every), f"{name} is not seen"
    return {}


# --- the tests ---


def run(me: Rank, name: str) -> Results:
    return CASES[name][1](me) or {}


@pytest.mark.parametrize(
    ("size", "name"),
    [(size, name) for size in ranks.SIZES for name in CASES if size in CASES[name][0]],
)
def test_tokens_move(size: int, name: str, groups: dict[int, ranks.Group]) -> None:
    groups[size].call(run, name)


@pytest.mark.skipif(4 not in ranks.SIZES, reason="needs four GPUs")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_seen(name: str, groups: dict[int, ranks.Group]) -> None:
    groups[4].call(mutated, name)


# --- without other processes ---


def test_no_result_depends_on_a_version_counter() -> None:
    """Fused and foreach ops change DTensors without changing the counter."""
    files = sorted(pathlib.Path(logitless.__file__).parent.rglob("*.py"))
    assert len(files) > 20
    assert [str(f) for f in files if re.search(r"\._version\b", f.read_text())] == []


def test_what_moves_is_counted() -> None:
    """head_costs for Llama-3's head on eight ranks of 2048 tokens."""
    costs = head_costs(2048, 4096, 128256, 8)
    x = 7 * 2048 * 4096 * 2
    assert costs.tokens.moved == 3 * x + 12 * 7 * 2048 + 16 * 7 * 8 * 2048
    shard = 128256 // 8 * 4096
    assert costs.weight.moved == 7 * shard * (2 + 4)
    kept = 8 * 2048 * 128256 // 8
    assert costs.tokens.peak == 8 * 2048 * 4096 * (2 + 8) + 2 * shard + 2 * kept
    assert costs.weight.peak == 8 * shard * (2 + 2 + 4)
    assert costs.cheaper() == "tokens"
    even = head_costs(128256 // 8, 4096, 128256, 8)  # as many tokens as a shard's columns
    assert 0 < even.tokens.moved - even.weight.moved < 0.01 * even.weight.moved
    many = head_costs(32768, 4096, 128256, 8)
    assert many.tokens.moved > many.weight.moved and many.cheaper() == "weight"
    exact = head_costs(2048, 4096, 128256, 8, dtype=torch.float32)
    assert exact.weight.moved == 7 * shard * (4 + 4)
    assert (
        exact.tokens.peak == 8 * 2048 * 4096 * (4 + 8) + 4 * kept
    )  # the products read the shard itself
    alone = head_costs(2048, 4096, 128256, 1)
    assert alone.tokens == alone.weight and alone.tokens.moved == 0
    with pytest.raises(ValueError, match="ranks is 0; allowed: >= 1"):
        head_costs(1, 1, 1, 0)

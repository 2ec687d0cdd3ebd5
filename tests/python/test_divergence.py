# SPDX-License-Identifier: Apache-2.0
"""linear_divergence against its definition in f64 with plain torch, whose gradients are autograd's;
what runs when, what is kept, what is refused; and the same in logitless.numpy."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import logitless.numpy
from logitless import LogitlessError, LogitlessNotSupportedError, _abi
from logitless.torch import (
    DivergenceStatistics,
    LinearDivergenceLoss,
    _divergence_ops,
    _divergence_run,
    _run,
    default_memory,
    linear_cross_entropy,
    linear_divergence,
)
from reference import close
from test_compile import Counter
from test_second_derivatives import PassThrough

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FORWARD, BACKWARD, BOTH = (
    _abi.LINEAR_DIVERGENCE_FORWARD,
    _abi.LINEAR_DIVERGENCE_BACKWARD,
    _abi.LINEAR_DIVERGENCE_FORWARD_BACKWARD,
)
SHAPE, VOCAB, HIDDEN, TEACHERS = (2, 5), 37, 8, 6
STATISTICS = ("entropy", "teacher_entropy", "acceptance", "logprob")
KINDS: dict[str, dict[str, Any]] = {
    "forward_kl": {"kind": "forward_kl"},
    "reverse_kl": {"kind": "reverse_kl"},
    "jsd": {"kind": "jsd"},
    "jsd 0.1": {"kind": "jsd", "beta": 0.1},
    "skew_kl": {"kind": "skew_kl", "beta": 0.3},
    "tv": {"kind": "tv"},
}


class Heads(NamedTuple):
    """A student that trains, and a teacher."""

    input: Tensor
    weight: Tensor
    teacher_input: Tensor
    teacher_weight: Tensor
    bias: Tensor
    teacher_bias: Tensor
    target: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.input, self.weight, self.bias

    def options(self, *names: str) -> dict[str, Tensor]:
        """The tensors of these names, as keywords of linear_divergence."""
        known = {
            "linear_bias": self.bias, "teacher_bias": self.teacher_bias, "target": self.target,
        }  # fmt: skip
        return {name: known[name] for name in names}


def heads(
    device: str | None = None, dtype: torch.dtype = F32, shape: tuple[int, ...] = SHAPE,
    vocab: int = VOCAB, trains: bool = True,
) -> Heads:  # fmt: skip
    def made(*size: int, of: bool = False) -> Tensor:
        return torch.randn(size, device=device).to(dtype).requires_grad_(of)

    target = torch.randint(0, vocab, shape, device=device)
    target.view(-1)[1::4] = -100
    return Heads(
        made(*shape, HIDDEN, of=trains), made(vocab, HIDDEN, of=trains), made(*shape, TEACHERS),
        made(vocab, TEACHERS), made(vocab, of=trains), made(vocab), target,
    )  # fmt: skip


def logits_of(rows: Tensor, scale: float, cap: float, temperature: Any) -> Tensor:
    u = rows.double() * scale
    if isinstance(temperature, Tensor):
        temperature = temperature.double()[..., None]
    return (cap * torch.tanh(u / cap) if cap else u) / temperature


def divergence_of(p: Tensor, q: Tensor, kind: str, beta: float) -> Tensor:
    """The divergence [...] of log-probabilities [..., V] of student and teacher."""
    m = torch.logaddexp(p + np.log1p(-beta), q + np.log(beta)) if 0 < beta < 1 else p
    if kind == "forward_kl":
        return (q.exp() * (q - p)).sum(-1)
    if kind == "reverse_kl":
        return (p.exp() * (p - q)).sum(-1)
    if kind == "jsd":
        return (beta * q.exp() * (q - m) + (1 - beta) * p.exp() * (p - m)).sum(-1)
    if kind == "skew_kl":
        return (q.exp() * (q - m)).sum(-1)
    return 0.5 * (p.exp() - q.exp()).abs().sum(-1)


def expected(h: Heads, **o: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the statistics in f64. `shift` must have been applied to the target already."""
    raw = h.input.double() @ h.weight.double().T
    if o.get("linear_bias") is not None:
        raw = raw + h.bias.double()
    temperature = o.get("temperature", 1.0)
    z = logits_of(raw, o.get("logit_scale", 1.0), o.get("softcap", 0.0), temperature)
    given = o.get("teacher_logits")
    if given is None:
        given = h.teacher_input.double() @ h.teacher_weight.double().T
        if o.get("teacher_bias") is not None:
            given = given + h.teacher_bias.double()
    others = o.get("teacher_temperature")
    others = temperature if others is None else others
    y = logits_of(given, o.get("teacher_logit_scale", 1.0), o.get("teacher_softcap", 0.0), others)
    p, q = z.log_softmax(-1), y.detach().log_softmax(-1)
    token = divergence_of(p, q, o.get("kind", "forward_kl"), o.get("beta", 0.5))
    target = o.get("target")
    valid = torch.ones_like(token, dtype=torch.bool)
    logprob = torch.zeros_like(token)
    if target is not None:
        valid = target != o.get("ignore_index", -100)
        safe = target.where(valid, torch.zeros_like(target)).long()
        logprob = p.gather(-1, safe[..., None])[..., 0]
        token = token - o.get("label_weight", 0.0) * logprob
    if o.get("token_weight") is not None:
        token = token * o["token_weight"].double()
    statistics = {
        "entropy": -(p.exp() * p).sum(-1),
        "teacher_entropy": -(q.exp() * q).sum(-1),
        "acceptance": torch.minimum(p.exp(), q.exp()).sum(-1),
        "logprob": logprob,
    }
    nothing = torch.zeros_like(token)
    statistics = {name: s.detach().where(valid, nothing) for name, s in statistics.items()}
    token = token.where(valid, nothing)
    reduction = o.get("reduction", "mean")
    if reduction == "none":
        return token, statistics
    normalizer = o.get("normalizer")
    count = valid.sum() if normalizer is None else normalizer
    return token.sum() if reduction == "sum" else token.sum() / count, statistics


def agree(h: Heads, dtype: torch.dtype = F32, given: Any = None, **options: Any) -> None:
    """The loss, its gradients and every statistic are those of f64. `given`: options that replace
    the reference's in the call of the function."""
    names = STATISTICS if options.get("target") is not None else STATISTICS[:3]
    ours, statistics = linear_divergence(
        h.input, h.weight,
        *((None, None) if "teacher_logits" in options else (h.teacher_input, h.teacher_weight)),
        **{**options, **(given or {})}, return_statistics=names,
    )  # fmt: skip
    theirs, known = expected(h, **options)
    close(ours, theirs, dtype)
    for name in names:
        close(getattr(statistics, name), known[name], dtype)
        assert not getattr(statistics, name).requires_grad
    upstream = torch.randn(theirs.shape, device=theirs.device)
    leaves = h.leaves if "linear_bias" in options else h.leaves[:2]
    grads = torch.autograd.grad(ours, leaves, upstream, retain_graph=True)
    again = torch.autograd.grad(ours, leaves, upstream)
    for grad, second, e in zip(
        grads, again, torch.autograd.grad(theirs, leaves, upstream.double())
    ):
        close(grad, e, dtype)
        assert grad.dtype is dtype and torch.equal(grad, second)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_that_of_f64(device: str, kind: str, reduction: str) -> None:
    agree(heads(device), **KINDS[kind], reduction=reduction)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_16_bits(device: str, kind: str, reduction: str, dtype: torch.dtype) -> None:
    h = heads(device, dtype)
    agree(h, dtype, **KINDS[kind], reduction=reduction, **h.options("linear_bias", "target"))


OPTIONS: dict[str, Any] = {
    "targets": lambda h: h.options("target"),
    "labels": lambda h: {**h.options("target"), "label_weight": 0.7},
    "ignore_index": lambda h: {"target": h.target.where(h.target >= 0, 3), "ignore_index": 3},
    "i32": lambda h: {"target": h.target.int(), "label_weight": 0.2},
    "biases": lambda h: h.options("linear_bias", "teacher_bias"),
    "scales": lambda h: {"logit_scale": 0.5, "teacher_logit_scale": 1.7},
    "softcaps": lambda h: {"softcap": 2.0, "teacher_softcap": 5.0},
    "a temperature": lambda h: {"temperature": 2.5},
    "temperatures": lambda h: {"temperature": 2.5, "teacher_temperature": 0.8},
    "of tokens": lambda h: {
        "temperature": torch.rand_like(h.target, dtype=F32) + 0.5,
        "teacher_temperature": torch.rand_like(h.target, dtype=F32) + 0.5,
    },
    "one of tokens": lambda h: {"temperature": torch.rand_like(h.target, dtype=F32) + 0.5},
    "the teacher's of tokens": lambda h: {
        "temperature": 1.5, "teacher_temperature": torch.rand_like(h.target, dtype=F32) + 0.5,
    },
    "token weights": lambda h: {"token_weight": torch.rand_like(h.target, dtype=F32) - 0.3},
    "everything": lambda h: {
        **h.options("target", "linear_bias", "teacher_bias"),
        "label_weight": 0.3, "softcap": 4.0, "teacher_softcap": 9.0, "logit_scale": 1.2,
        "temperature": 1.5, "teacher_temperature": 2.0,
        "token_weight": torch.rand_like(h.target, dtype=F32),
    },
}  # fmt: skip


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_option_is_that_of_f64(device: str, kind: str, name: str, reduction: str) -> None:
    h = heads(device)
    agree(h, **KINDS[kind], **OPTIONS[name](h), reduction=reduction)


@pytest.mark.parametrize("normalizer", [7, 7.5, torch.tensor(7), torch.tensor(0.5)], ids=str)
def test_a_normalizer(device: str, normalizer: Any) -> None:
    h = heads(device)
    if isinstance(normalizer, Tensor):
        normalizer = normalizer.to(device)
    agree(h, target=h.target, normalizer=normalizer)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_of_logits(device: str, kind: str, dtype: torch.dtype) -> None:
    """Teacher logits of any dtype, with their own scale, softcap and temperature."""
    h = heads(device)
    logits = (3 * torch.randn(*SHAPE, VOCAB, device=device)).to(dtype)
    for reduction in ("none", "mean"):
        agree(
            h, **KINDS[kind], teacher_logits=logits, teacher_logit_scale=0.5, teacher_softcap=3.0,
            teacher_temperature=1.3, reduction=reduction,
        )  # fmt: skip


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 0), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_any_number_of_leading_dimensions(
    device: str, shape: tuple[int, ...], reduction: str
) -> None:
    h = heads(device, shape=shape)
    theirs, _ = expected(h, reduction=reduction, normalizer=max(1, h.target.numel()))
    loss = linear_divergence(
        h.input, h.weight, h.teacher_input, h.teacher_weight, reduction=reduction
    )
    close(loss, theirs)
    grads = torch.autograd.grad(loss.sum(), (h.input, h.weight))
    for grad, e in zip(grads, torch.autograd.grad(theirs.sum(), (h.input, h.weight))):
        close(grad, e)


@pytest.mark.parametrize("shift", [True, 2])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_shift_moves_what_belongs_to_a_label(device: str, reduction: str, shift: Any) -> None:
    """Position i gets the target, weight and temperatures of i + k; the last k positions do not
    count, not even in the mean's divisor."""
    h = heads(device)
    by = int(shift)
    weights, own, others = (torch.rand(SHAPE, device=device) + 0.5 for _ in range(3))

    def moved(values: Tensor, rest: float) -> Tensor:
        return torch.cat([values[:, by:], torch.full_like(values[:, :by], rest)], 1)

    given = {
        "target": h.target, "token_weight": weights, "temperature": own,
        "teacher_temperature": others, "shift": shift,
    }  # fmt: skip
    agree(
        h, target=moved(h.target, -100), token_weight=moved(weights, 1.0), label_weight=0.5,
        temperature=moved(own, 1.0), teacher_temperature=moved(others, 1.0), reduction=reduction,
        given=given,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(10,), (2, 1), (1, 5), ()], ids=str)
def test_temperatures_flat_or_broadcastable(device: str, shape: tuple[int, ...]) -> None:
    h = heads(device)
    temperature = torch.rand(shape, device=device) + 0.5
    whole = temperature.view(SHAPE) if shape == (10,) else temperature.expand(SHAPE)
    call = lambda t: linear_divergence(  # noqa: E731
        h.input, h.weight, h.teacher_input, h.teacher_weight, temperature=2.0,
        teacher_temperature=t, reduction="none",
    )  # fmt: skip
    assert torch.equal(call(temperature), call(whole))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_heads_are_exactly_0(device: str, kind: str) -> None:
    """Both heads share a weight, whose gradient, as the student's, is 0 too."""
    h = heads(device)
    x = h.input.detach().clone().requires_grad_()
    for reduction in ("none", "mean"):
        loss = linear_divergence(
            x, h.weight, x, h.weight, **KINDS[kind], linear_bias=h.bias, teacher_bias=h.bias,
            reduction=reduction, temperature=0.7,
        )  # fmt: skip
        assert not loss.any()
        for grad in torch.autograd.grad(loss.sum(), (x, h.weight, h.bias)):
            assert not grad.any()


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_teacher_has_no_gradient(device: str, reduction: str) -> None:
    h = heads(device)
    teacher = [t.requires_grad_() for t in (h.teacher_input, h.teacher_weight, h.teacher_bias)]

    def call(x: Tensor) -> Tensor:
        return linear_divergence(
            x, h.weight.detach(), *teacher[:2], teacher_bias=teacher[2], reduction=reduction
        )

    call(h.input).sum().backward()
    assert h.input.grad is not None and all(t.grad is None for t in teacher)
    assert not call(h.input.detach()).requires_grad  # only the teacher's tensors require gradients
    logits = torch.randn(*SHAPE, VOCAB, device=device, requires_grad=True)
    loss = linear_divergence(h.input, h.weight, teacher_logits=logits, reduction=reduction)
    loss.sum().backward()
    assert logits.grad is None


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("of", ["input", "weight", "bias"])
def test_a_frozen_side_pays_nothing(
    device: str, of: str, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    h = heads(device)
    for name in {"input", "weight", "bias"} - {of}:
        getattr(h, name).requires_grad_(False)
    asked: list[set[str]] = []
    real = _run.launch

    def spy(kind: int, names: Any, tensors: Any, *rest: Any, **how: Any) -> Any:
        asked.append({n for n, t in zip(names, tensors) if t is not None and n[:5] == "grad_"})
        return real(kind, names, tensors, *rest, **how)

    monkeypatch.setattr(_run, "launch", spy)
    loss = linear_divergence(
        h.input, h.weight, h.teacher_input, h.teacher_weight, linear_bias=h.bias,
        reduction=reduction,
    )  # fmt: skip
    loss.sum().backward()
    assert asked[-1] - {"grad_loss"} == {f"grad_{of}"}
    assert [t.grad is not None for t in h.leaves] == [of == n for n in ("input", "weight", "bias")]


def test_what_runs_when(device: str, launched: list[int]) -> None:
    h = heads(device)

    def run(reduction: str, again: bool = False, **how: Any) -> list[int]:
        launched.clear()
        loss = linear_divergence(*h[:4], reduction=reduction, **how)
        if loss.requires_grad:
            for retain in [True, False] if again else [False]:
                torch.autograd.grad(loss.sum(), h.leaves[:2], retain_graph=retain)
        return list(launched)

    assert run("mean") == run("sum") == [BOTH]
    assert run("mean", again=True) == [BOTH, BOTH]
    assert run("none") == [FORWARD, BACKWARD]
    assert run("none", again=True) == [FORWARD, BACKWARD, BACKWARD]
    with torch.no_grad():
        assert run("mean") == run("none") == [FORWARD]


class Ran(NamedTuple):
    kind: int
    kept: bool
    teacher: bool
    bytes: int  # kept state and workspace together


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Ran]:
    calls: list[Ran] = []
    real = _abi.Plan.run

    def spy(plan: _abi.Plan, *given: Any, **how: Any) -> None:
        op, bytes = plan._call.op, plan.bytes
        for name in ("kept", "kept_rows"):
            if getattr(op, name):
                t = getattr(op, name).contents
                bytes += (4 if t.dtype == _abi.F32 else 2) * t.shape[0] * t.shape[1]
        teacher = bool(op.teacher_weight) or bool(op.teacher_logits)
        calls.append(Ran(op.kind, bool(op.kept), teacher, bytes))
        real(plan, *given, **how)

    monkeypatch.setattr(_abi.Plan, "run", spy)
    return calls


def kept_and_teacher(ran: list[Ran]) -> list[tuple[bool, bool]]:
    return [(r.kept, r.teacher) for r in ran]


KEPT = [(True, True), (True, False)]  # Backward from kept state needs no teacher
NOTHING_KEPT = [(False, True), (False, True)]


@pytest.mark.parametrize("kind", KINDS)
def test_dz_is_kept_for_any_upstream_gradient(device: str, kind: str, ran: list[Ran]) -> None:
    """A second backward uses kept dz again. Tokens with an upstream gradient of 0 add nothing."""
    h = heads(device)
    options = {**KINDS[kind], **h.options("target", "linear_bias"), "label_weight": 0.4}
    loss = linear_divergence(*h[:4], **options, reduction="none")
    theirs, _ = expected(h, **options, reduction="none")
    upstream = torch.randn(SHAPE, device=device)
    upstream[0, 2:] = 0
    for factor in (1.0, -3.0):
        grads = torch.autograd.grad(loss, h.leaves, factor * upstream, retain_graph=True)
        wanted = torch.autograd.grad(theirs, h.leaves, factor * upstream.double(), True)
        for grad, e in zip(grads, wanted):
            close(grad, e)
        assert not grads[0][0, 2:].any()
    assert kept_and_teacher(ran) == [*KEPT, KEPT[1]]


def test_an_upstream_of_zeros_is_a_gradient_of_zeros(device: str) -> None:
    h = heads(device)
    with torch.no_grad():
        h.input[0, 0] = float("nan")
    loss = linear_divergence(*h[:4], reduction="none")
    upstream = torch.ones_like(loss)
    upstream[0, 0] = 0
    for grad in torch.autograd.grad(loss, h.leaves[:2], upstream):
        assert not grad.isnan().any()


def test_hooks_and_checkpointing_keep_nothing(device: str, ran: list[Ran]) -> None:
    h = heads(device)
    call = lambda *t: linear_divergence(*t, reduction="none").sum()  # noqa: E731
    expect = torch.autograd.grad(call(*h[:4]), h.leaves[:2])
    assert kept_and_teacher(ran) == KEPT
    ran.clear()
    with torch.autograd.graph.save_on_cpu():
        loss = call(*h[:4])
    grads = torch.autograd.grad(loss, h.leaves[:2])
    assert kept_and_teacher(ran) == NOTHING_KEPT
    ran.clear()
    again = torch.autograd.grad(checkpoint(call, *h[:4], use_reentrant=False), h.leaves[:2])
    assert not any(r.kept for r in ran) and [r.kind for r in ran] == [FORWARD, FORWARD, BACKWARD]
    for grad, other, e in zip(grads, again, expect):
        close(grad, e)
        close(other, e)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_checkpointing_gives_the_same_bits(device: str, reduction: str, reentrant: bool) -> None:
    h = heads(device)
    call = lambda *t: linear_divergence(*t, reduction=reduction, kind="jsd").sum()  # noqa: E731
    call(*h[:4]).backward()
    plain = [t.grad.clone() for t in h.leaves[:2]]  # type: ignore[union-attr]
    for t in h.leaves:
        t.grad = None
    checkpoint(call, *h[:4], use_reentrant=reentrant).backward()
    for t, e in zip(h.leaves, plain):
        close(t.grad, e)  # type: ignore[arg-type]


def test_memory_bounds_what_is_kept_with_the_workspaces(device: str, ran: list[Ran]) -> None:
    """All of dz is kept if it fits beside the larger workspace, otherwise nothing. If `memory` is
    too small for either call, forward raises."""
    h = heads(device)

    def bytes_in(memory: Any) -> int:
        ran.clear()
        loss = linear_divergence(*h[:4], reduction="none", memory=memory)
        torch.autograd.grad(loss.sum(), h.leaves[:2])
        return max(r.bytes for r in ran)

    with pytest.raises(ValueError, match=r"^memory is 1 bytes; allowed: >= \d+") as caught:
        linear_divergence(*h[:4], reduction="none", memory=1)
    least = int(str(caught.value).split(">= ")[1].split()[0].strip(";"))
    assert bytes_in(least) <= least and kept_and_teacher(ran) == NOTHING_KEPT
    with pytest.raises(ValueError, match=r"^memory is"):
        linear_divergence(*h[:4], reduction="none", memory=least - 1)
    bytes_in(None)
    assert kept_and_teacher(ran) == KEPT
    tokens, columns = 64, 64  # padded
    kept = 4 * tokens * columns + 32 * h.target.numel()
    for memory in range(least, least + 2 * kept, kept // 3):
        assert bytes_in(memory) <= memory
    assert bytes_in(least + 2 * kept) <= least + 2 * kept and kept_and_teacher(ran) == KEPT
    with default_memory(least):
        assert bytes_in(None) <= least and kept_and_teacher(ran) == NOTHING_KEPT
    with default_memory(1), pytest.raises(ValueError, match=r"^memory, that of default_memory, is"):
        linear_divergence(*h[:4], reduction="none")
    assert bytes_in(_abi.Room(1)) >= least - 1  # a Room may be exceeded
    for reduction in ("mean", "sum"):
        with pytest.raises(ValueError, match=r"^memory is 1 bytes"):
            linear_divergence(*h[:4], reduction=reduction, memory=1)  # type: ignore[arg-type]
        linear_divergence(*h[:4], reduction=reduction, memory="64MiB")  # type: ignore[arg-type]


def test_kept_state_is_used_after_the_switch_of_tf32(device: str) -> None:
    """Backward computes the key of kept state itself, with the TF32 switch as it is then."""
    h = heads(device)
    loss = linear_divergence(*h[:4], reduction="none")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        torch.autograd.grad(loss.sum(), h.leaves[:2])
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_casts_both_heads(device: str, reduction: str, ran: list[Ran]) -> None:
    """The loss is f32, an f32 bias is not cast, and gradients have the dtype of the uncast
    parameters."""
    h = heads(device)
    bias = h.options("linear_bias", "teacher_bias")
    with torch.autocast(device, BF16):
        loss = linear_divergence(*h[:4], **bias, reduction=reduction)
    low = [t.detach().to(BF16) for t in h[:4]]
    rounded = linear_divergence(*low, **bias, reduction=reduction)
    assert loss.dtype is F32 and torch.equal(loss, rounded)
    grads = torch.autograd.grad(loss.sum(), h.leaves, retain_graph=True)
    again = torch.autograd.grad(loss.sum(), h.leaves)
    assert all(grad.dtype is F32 and torch.equal(grad, g) for grad, g in zip(grads, again))
    wide = Heads(*[t.float().requires_grad_() for t in low], *h[4:])  # type: ignore[arg-type]
    theirs, _ = expected(wide, **bias, reduction=reduction)
    leaves = wide.leaves
    for grad, e in zip(grads, torch.autograd.grad(theirs.sum(), leaves)):
        close(grad, e, BF16)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_f16_gradients_are_rounded_after_the_upstream_factor(device: str, reduction: str) -> None:
    """With a GradScaler's factor, gradients are right that would be 0 in f16 without it."""
    h = heads(device, F16)
    with torch.no_grad():
        h.weight.mul_(1e-4)
    scale = 2.0**16
    loss = linear_divergence(*h[:4], reduction=reduction, teacher_logit_scale=1e-3)
    (grad,) = torch.autograd.grad(loss.sum() * scale, h.input)
    theirs, _ = expected(h, reduction=reduction, teacher_logit_scale=1e-3)
    (e,) = torch.autograd.grad(theirs.sum() * scale, h.input)
    assert grad.dtype is F16
    close(grad, e, F16)


COMPILED: dict[str, Any] = {
    "mean": lambda h: {},
    "sum": lambda h: {"reduction": "sum", "kind": "jsd", "beta": 0.2},
    "none": lambda h: {"reduction": "none", "kind": "reverse_kl"},
    "everything": lambda h: {
        **OPTIONS["everything"](h), "reduction": "none", "shift": True, "kind": "tv",
    },
    "temperatures": OPTIONS["of tokens"],
    "in a memory": lambda h: {"reduction": "none", "memory": "64MiB"},
    "logits": lambda h: {
        "teacher_logits": torch.randn(*SHAPE, VOCAB, device=h.input.device), "kind": "skew_kl",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_is_eager_to_the_bit(device: str, name: str) -> None:
    """One graph, with the eager bits of loss, statistics and the gradients of two backwards."""
    h = heads(device)
    options = COMPILED[name](h)
    teacher = (None, None) if "teacher_logits" in options else h[2:4]

    def call(x: Tensor, w: Tensor) -> Any:
        return linear_divergence(
            x, w, *teacher, **options, return_statistics=("acceptance", "entropy")
        )

    counter = Counter()
    results = []
    for run in (call, counter.compile(call)):
        loss, statistics = run(h.input, h.weight)
        total = (loss * 0.75).sum()
        grads = torch.autograd.grad(total, h.leaves[:2], retain_graph=run is call)
        results.append([loss, statistics.acceptance, statistics.entropy, *grads])
    assert counter.graphs.frame_count == 1
    for a, b in zip(*results):
        assert torch.equal(a, b)


def test_one_compiled_graph_serves_every_number_of_tokens(device: str, ran: list[Ran]) -> None:
    """dz is kept for every number of tokens."""
    counter = Counter()
    call = counter.compile(
        lambda x, w, y, v: linear_divergence(x, w, y, v, reduction="none").sum(), dynamic=True
    )
    frames = []
    for tokens in (9, 70, 11, 64):
        h = heads(device, shape=(tokens,))
        ran.clear()
        grads = torch.autograd.grad(call(*h[:4]), h.leaves[:2])
        assert kept_and_teacher(ran) == KEPT
        theirs = expected(h, reduction="none")[0].sum()
        for grad, e in zip(grads, torch.autograd.grad(theirs, h.leaves[:2])):
            close(grad, e)
        frames.append(counter.graphs.frame_count)
    # The first call makes the graphs; other numbers of tokens may add none.
    assert frames == frames[:1] * len(frames)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_under_autocast(device: str, reduction: str) -> None:
    h = heads(device)
    teacher = (h.teacher_input, h.teacher_weight)
    call = lambda x, w: linear_divergence(x, w, *teacher, reduction=reduction).sum()  # noqa: E731
    results = []
    for run in (call, Counter().compile(call)):
        with torch.autocast(device, BF16):
            loss = run(h.input, h.weight)
        results.append([loss, *torch.autograd.grad(loss, h.leaves[:2])])
    for a, b in zip(*results):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_trace_has_gradients(reduction: Any) -> None:
    h = heads()
    call = lambda x, w: linear_divergence(x, w, *h[2:4], reduction=reduction)  # noqa: E731
    traced = torch.jit.trace(call, (h.input, h.weight), check_trace=False)
    results = [torch.autograd.grad(f(*h[:2]).sum(), h.leaves[:2]) for f in (call, traced)]
    for grad, e in zip(*results):
        close(grad, e)


def op_arguments(h: Heads, reduction: int, wanted: int) -> tuple[Any, ...]:
    inputs = _divergence_run.Inputs(*h.leaves, h.target, None, None, None, *h[2:4])
    options = _abi.Divergence(reduction=reduction, kind=_abi.JSD, label_weight=0.1)
    return _divergence_ops.arguments(inputs, options, None, None, wanted)


@pytest.mark.parametrize(
    ("reduction", "bits"), [(0, 0), (0, _divergence_run.KEEP), (2, _divergence_run.FUSED), (1, 0)]
)
def test_opcheck(device: str, reduction: int, bits: int) -> None:
    wanted = sum(_divergence_run.BITS.values()) | sum(_divergence_run.OF_TENSORS) | bits
    args = op_arguments(heads(device), reduction, wanted)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.logitless.divergence, args, test_utils=tests)
    if bits & _divergence_run.FUSED or not bits:
        torch.library.opcheck(torch.ops.logitless.divergence, args)


def test_opcheck_of_backward(device: str) -> None:
    h = heads(device, trains=False)
    args = op_arguments(h, 0, sum(_divergence_run.OF_TENSORS))
    grad_loss = torch.randn(SHAPE, device=device)
    torch.library.opcheck(torch.ops.logitless.divergence_backward, (*args, grad_loss, None, None))


def test_meta_and_fake_tensors_have_shapes(device: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    h = heads(device)
    meta = [t.detach().to("meta") for t in h[:4]]
    assert linear_divergence(*meta).shape == ()
    each, statistics = linear_divergence(*meta, reduction="none", return_statistics="acceptance")
    assert each.is_meta and each.shape == SHAPE and statistics.acceptance.shape == SHAPE  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"^teacher_input is on .*; allowed: meta, the"):
        linear_divergence(meta[0], meta[1], h[2], meta[3])
    with FakeTensorMode():
        x, w = torch.randn(4, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
        loss = linear_divergence(x, w, torch.randn(4, 6), torch.randn(30, 6), reduction="none")
        loss.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize("fake", [False, True], ids=["meta", "fake"])
def test_what_is_wrong_with_meta_and_fake_tensors_is_said(fake: bool) -> None:
    """The error is that of a call with real tensors. Errors about a tensor's values or layout,
    about memory or about beta's type are left out."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    apart = {"a target outside", "a moved target outside", "memory", "layout", "beta, a tensor"}
    mode = FakeTensorMode()
    empty = mode.from_tensor if fake else lambda t: t.to("meta")
    h = heads()
    for name, (changed, kind, message) in wrong(h).items():
        if name in apart:
            continue
        given: dict[str, Any] = {
            "input": h.input, "linear_weight": h.weight, "teacher_input": h.teacher_input,
            "teacher_weight": h.teacher_weight, **changed,
        }  # fmt: skip
        given = {n: empty(v) if isinstance(v, torch.Tensor) else v for n, v in given.items()}
        with pytest.raises(kind, match=message), mode if fake else contextlib.nullcontext():
            linear_divergence(**given)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, PassThrough], ids=["plain", "dispatched"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_second_derivative(device: str, reduction: str, mode: Any) -> None:
    h = heads(device)
    with mode():
        loss = linear_divergence(*h[:4], reduction=reduction).sum()
        expect = torch.autograd.grad(loss, h.leaves[:2], retain_graph=True)
        grads = torch.autograd.grad(loss, h.leaves[:2], create_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(grads, expect))
        for leaf in h.leaves[:2]:
            with pytest.raises(LogitlessNotSupportedError, match="differentiated once"):
                torch.autograd.grad(grads[0].square().sum(), leaf, retain_graph=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_transforms_are_refused_by_name(reduction: Any) -> None:
    h = heads()

    def call(x: Tensor, y: Tensor) -> Tensor:
        return linear_divergence(
            x, h.weight.detach(), y, h.teacher_weight, reduction=reduction
        ).sum()

    x, y = h.input.detach(), h.teacher_input
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(LogitlessNotSupportedError, match=r"torch\.func"):
            transform(call)(x, y)
    loss = call(h.input, y)
    with pytest.raises(LogitlessNotSupportedError, match=r"torch\.func"):
        torch.autograd.grad(loss, h.input, torch.ones(3), is_grads_batched=True)
    tangent = torch.autograd.forward_ad
    with tangent.dual_level(), pytest.raises(LogitlessNotSupportedError, match="forward-mode"):
        call(tangent.make_dual(x, torch.ones_like(x)), y)


def test_gradients_are_handed_over_not_copied(device: str) -> None:
    """Gradients computed with the loss are scaled in place and become .grad."""
    h = heads(device)
    loss = linear_divergence(*h[:4])
    node: Any = loss.grad_fn
    made = [g.data_ptr() for g in node.grads]
    (loss * 2).backward()
    assert [t.grad.data_ptr() for t in h.leaves[:2]] == made[:2]  # type: ignore[union-attr]
    assert node.grads is None


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_accumulate_over_micro_batches(device: str, reduction: str) -> None:
    h = heads(device, shape=(8,))
    for part in (slice(0, 4), slice(4, 8)):
        linear_divergence(
            h.input[part], h.weight, h.teacher_input[part], h.teacher_weight, reduction=reduction,
            normalizer=torch.tensor(8, device=device) if reduction == "mean" else None,
        ).sum().backward()  # fmt: skip
    theirs = expected(h, reduction=reduction)[0].sum()
    for t, e in zip(h.leaves, torch.autograd.grad(theirs, h.leaves[:2])):
        close(t.grad, e)  # type: ignore[arg-type]


@pytest.mark.parametrize("empty_mean", ["zero", "nan"])
def test_a_mean_over_no_token(device: str, empty_mean: Any) -> None:
    h = heads(device)
    nothing = torch.full_like(h.target, -100)
    loss = linear_divergence(*h[:4], target=nothing, empty_mean=empty_mean)
    assert loss.isnan() if empty_mean == "nan" else loss == 0
    for grad in torch.autograd.grad(loss, h.leaves[:2]):
        assert not grad.any()


def test_ignored_rows_are_not_read(device: str) -> None:
    h = heads(device)
    agree(h, **h.options("target"))
    clean, _ = linear_divergence(
        *h[:4], target=h.target, reduction="none", return_statistics=STATISTICS
    )
    with torch.no_grad():
        for rows in (h.input, h.teacher_input):
            rows[h.target == -100] = float("nan")
    loss, statistics = linear_divergence(
        *h[:4], target=h.target, reduction="none", return_statistics=STATISTICS
    )
    assert torch.equal(loss, clean)
    for s in statistics:
        assert s is not None and s.dtype is F32 and not s[h.target == -100].any()
    grads = torch.autograd.grad(loss.sum(), h.leaves[:2])
    assert not any(grad.isnan().any() for grad in grads) and not grads[0][h.target == -100].any()


def test_the_label_term_is_the_cross_entropy(device: str) -> None:
    h = heads(device)
    both = linear_divergence(*h[:4], target=h.target, label_weight=2.0, reduction="none")
    alone = linear_divergence(*h[:4], target=h.target, reduction="none")
    close(both - alone, 2 * linear_cross_entropy(*h[:2], h.target, reduction="none"))


def test_beta_is_not_looked_at_by_other_kinds(device: str) -> None:
    h = heads(device)
    for kind in ("forward_kl", "reverse_kl", "tv"):
        for beta in (-1.0, float("nan"), None):
            loss = linear_divergence(*h[:4], kind=kind, beta=beta)  # type: ignore[arg-type]
            assert torch.equal(loss, linear_divergence(*h[:4], kind=kind))  # type: ignore[arg-type]
    ends = {("jsd", 0.0): "forward_kl", ("jsd", 1.0): "reverse_kl", ("skew_kl", 0.0): "forward_kl"}
    for (kind, end), same in ends.items():
        loss = linear_divergence(*h[:4], kind=kind, beta=end)  # type: ignore[arg-type]
        assert torch.equal(loss, linear_divergence(*h[:4], kind=same))  # type: ignore[arg-type]
    assert linear_divergence(*h[:4], kind="skew_kl", beta=1.0) == 0


def test_none_has_the_values_of_the_sum(device: str) -> None:
    h = heads(device)
    for kind in KINDS.values():
        each = linear_divergence(*h[:4], **kind, reduction="none")
        close(linear_divergence(*h[:4], **kind, reduction="sum"), each.double().sum())


def wrong(h: Heads) -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    y, v = h.teacher_input, h.teacher_weight
    logits = torch.randn(*SHAPE, VOCAB)
    weights, ranks = torch.ones(SHAPE), torch.ones(3)
    value, kind = ValueError, TypeError
    return {
        "kind": ({"kind": "kl"}, value, r"^kind is 'kl'; allowed: 'forward_kl', .*'tv'$"),
        "beta": ({"kind": "jsd", "beta": 1.5}, value, r"^beta is 1\.5; allowed: 0, or 2\^-90 to 1"),
        "beta, too small": ({"kind": "jsd", "beta": 1e-60}, value, r"^beta is 1e-60; allowed: 0, "),
        "beta, a tensor": ({"kind": "jsd", "beta": ranks}, kind, r"^beta is a Tensor; allowed"),
        "group": ({"group": object()}, value, r"^group is given, but torch\.distributed"),
        "reduction": ({"reduction": "avg"}, value, r"^reduction is 'avg'; allowed"),
        "label_weight": (
            {"target": h.target, "label_weight": -1.0}, value, r"^label_weight is -1; allowed"
        ),
        "label_weight alone": (
            {"label_weight": 0.5}, value, r"^target is missing; label_weight needs it"
        ),
        "logprob alone": (
            {"return_statistics": "logprob"}, value, r"^target is missing; logprob needs it"
        ),
        "shift alone": ({"shift": True}, value, r"^target is missing; shift needs it"),
        "shift": ({"target": h.target, "shift": 9}, value, r"^shift is 9 of targets \(2, 5\)"),
        "statistics": (
            {"return_statistics": ("lse",)}, value, r"^return_statistics is 'lse'; allowed: 'entro"
        ),
        "no teacher": (
            {"teacher_input": None, "teacher_weight": None}, value,
            r"^teacher_weight is missing, and so is teacher_logits; allowed: one of logits and a",
        ),
        "half a teacher": (
            {"teacher_weight": None}, value,
            r"^teacher_input is given without teacher_weight; allowed: both or neither",
        ),
        "the other half": (
            {"teacher_input": None}, value,
            r"^teacher_weight is given without teacher_input; allowed: both or neither",
        ),
        "half a teacher beside logits": (
            {"teacher_input": None, "teacher_logits": logits}, value,
            r"^teacher_weight is given without teacher_input; allowed: both or neither",
        ),
        "no input": ({"input": None}, kind, r"^input is a NoneType; allowed: a"),
        "no weight": ({"linear_weight": None}, kind, r"^linear_weight is a NoneType; allowed: a"),
        "two teachers": (
            {"teacher_logits": logits}, value, r"^teacher_logits is given beside teacher_weight"
        ),
        "a bias beside logits": (
            {"teacher_input": None, "teacher_weight": None, "teacher_logits": logits,
             "teacher_bias": v[:, 0]},
            value, r"^teacher_logits is given beside teacher_bias",
        ),
        "V": (
            {"teacher_weight": torch.randn(VOCAB + 3, TEACHERS)}, value,
            r"^teacher_weight has shape \[40, 6\] and linear_weight V = 37; .*teacher_weight\[:37",
        ),
        "V of logits": (
            {"teacher_input": None, "teacher_weight": None, "teacher_logits": logits[..., 1:]},
            value, r"^teacher_logits has shape \[10, 36\]; allowed: \[10, 37\]",
        ),
        "D": (
            {"linear_weight": torch.randn(VOCAB, 9)}, value,
            r"^linear_weight has shape \[37, 9\]; allowed: \[V, 8\]",
        ),
        "D of the teacher": (
            {"teacher_weight": torch.randn(VOCAB, 9)}, value,
            r"^teacher_weight has shape \[37, 9\]; allowed: \[37, 6\]",
        ),
        "a vector": ({"teacher_weight": v[0]}, value, r"^teacher_weight has shape \(6,\); allowed"),
        "tokens": ({"teacher_input": y[:1]}, value, r"^teacher_input has shape \(1, 5, 6\); allo"),
        "tokens of logits": (
            {"teacher_logits": logits[0]}, value, r"^teacher_logits has shape \(5, 37\); allowed"
        ),
        "a bias": (
            {"teacher_bias": torch.ones(5)}, value, r"^teacher_bias has shape \[5\]; allowed: \[37"
        ),
        "a bias's rank": ({"teacher_bias": v}, value, r"^teacher_bias has shape \(37, 6\); allo"),
        "the student's bias": (
            {"linear_bias": torch.ones(5)}, value, r"^linear_bias has shape \[5\]; allowed: \[37\]"
        ),
        "another dtype": (
            {"teacher_input": y.half(), "teacher_weight": v.half()}, kind,
            r"^teacher_input is float16; allowed: float32, the dtype of input \(torch.autocast cas",
        ),
        "the weight's": (
            {"teacher_weight": v.bfloat16()}, kind,
            r"^teacher_weight is bfloat16; .*teacher_weight\.to\(input\.dtype\)",
        ),
        "f64": ({"teacher_weight": v.double()}, kind, r"^teacher_weight is float64; allowed"),
        "logits of i64": (
            {"teacher_input": None, "teacher_weight": None, "teacher_logits": logits.long()}, kind,
            r"^teacher_logits is int64; allowed",
        ),
        "no tensor": ({"teacher_weight": np.ones((37, 6))}, kind, r"^teacher_weight is a ndarray"),
        "temperature": ({"temperature": 0.0}, value, r"^temperature is 0; allowed"),
        "teacher_temperature": (
            {"teacher_temperature": -2.0}, value, r"^teacher_temperature is -2; allowed"
        ),
        "its shape": (
            {"teacher_temperature": ranks}, value, r"^teacher_temperature has shape \(3,\); allowed"
        ),
        "its type": (
            {"teacher_temperature": "hot"}, kind, r"^teacher_temperature is a str; allowed: a num"
        ),
        "its gradient": (
            {"teacher_temperature": weights.clone().requires_grad_()}, value,
            r"^teacher_temperature requires grad",
        ),
        "teacher_softcap": (
            {"teacher_softcap": -1.0}, value, r"^teacher_softcap is -1; allowed: 0 \(none\)"
        ),
        "teacher_softcap, too small": (
            {"teacher_softcap": 1e-60}, value, r"^teacher_softcap is 1e-60; allowed: 0, or"
        ),
        "teacher_logit_scale": (
            {"teacher_logit_scale": float("inf")}, value, r"^teacher_logit_scale is inf; allowed"
        ),
        "a string": ({"softcap": "3"}, kind, r"^softcap is a str; allowed: a Python number"),
        "token_weight": (
            {"token_weight": ranks}, value, r"^token_weight has shape \(3,\); allowed: \(2, 5\)"
        ),
        "normalizer": ({"normalizer": -1.0}, value, r"^normalizer is -1; allowed"),
        "target": ({"target": h.target[0]}, value, r"^target has shape \(5,\); allowed: \(2, 5\)"),
        "soft targets": ({"target": weights}, NotImplementedError, r"^target is float32 of shape"),
        "a target outside": (
            {"target": h.target.where(h.target >= 0, 99)}, value,
            r"^target\[0, 1\] \(flat: target\[1\]\) is 99; allowed: 0 to 36",
        ),
        "a moved target outside": (
            {"target": h.target.where(h.target >= 0, 99), "shift": 1}, value,
            r"^target\[0, 1\] \(flat: target\[1\]\) is 99; allowed: 0 to 36",
        ),
        "memory": ({"memory": -1}, value, r"^memory is -1; allowed: bytes"),
        "layout": (
            {"teacher_weight": v.to_sparse()}, RuntimeError, r"^teacher_weight has layout"
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", wrong(heads()))
def test_errors_name_the_argument(name: str) -> None:
    h = heads()
    changed, kind, message = wrong(h)[name]
    given = {
        "input": h.input, "linear_weight": h.weight, "teacher_input": h.teacher_input,
        "teacher_weight": h.teacher_weight, **changed,
    }  # fmt: skip
    with pytest.raises(kind, match=message) as caught:
        linear_divergence(**given)
    assert isinstance(caught.value, LogitlessError)


def test_another_devices_tensor_is_named() -> None:
    h = heads(trains=False)
    with pytest.raises(RuntimeError, match=r"^teacher_weight is on meta"):
        linear_divergence(*h[:3], h.teacher_weight.to("meta"))


def test_results_are_tuples_with_names() -> None:
    h = heads(trains=False)
    loss, statistics = linear_divergence(*h[:4], return_statistics={"acceptance", "entropy"})
    assert isinstance(statistics, DivergenceStatistics) and statistics._fields == STATISTICS
    assert statistics.teacher_entropy is None and statistics.logprob is None
    assert loss.shape == () and statistics.acceptance is not None
    assert statistics.acceptance.shape == SHAPE
    assert isinstance(linear_divergence(*h[:4], return_statistics=()), Tensor)
    assert "`acceptance`: sum min(p, q)" in (DivergenceStatistics.__doc__ or "")


def test_the_module_holds_every_option(device: str) -> None:
    """All but the arguments of forward. Temperatures stay f32 and are not in the state_dict."""
    function, module = (
        inspect.signature(f).parameters for f in (linear_divergence, LinearDivergenceLoss)
    )
    of_call = set(inspect.signature(LinearDivergenceLoss.forward).parameters) - {"self"}
    of_call -= {"temperature", "teacher_temperature"}
    held = {name: p.default for name, p in function.items() if name not in of_call}
    assert {name: p.default for name, p in module.items()} == held
    h = heads(device)
    options: dict[str, Any] = {
        "beta": 0.2, "label_weight": 0.3, "shift": True, "logit_scale": 0.5, "softcap": 3.0,
        "teacher_logit_scale": 0.7, "teacher_softcap": 4.0, "temperature": 1.5, "memory": "64MiB",
        "teacher_temperature": torch.rand(SHAPE, device=device) + 0.5, "ignore_index": -100,
        "return_statistics": "acceptance", "empty_mean": "nan",
    }  # fmt: skip
    loss = LinearDivergenceLoss("jsd", "none", **options)
    assert not loss.state_dict() and loss.to(BF16).teacher_temperature.dtype is F32
    call = h.options("target", "linear_bias", "teacher_bias")
    expect = linear_divergence(*h[:4], kind="jsd", reduction="none", **options, **call)
    for m in (loss, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        made, statistics = m(*h[:4], **call)
        assert torch.equal(made, expect[0])
        assert torch.equal(statistics.acceptance, expect[1].acceptance)
    other = loss(*h[:4], **call, temperature=2.0, teacher_temperature=1.0)[0]
    options |= {"temperature": 2.0, "teacher_temperature": 1.0}
    again = linear_divergence(*h[:4], kind="jsd", reduction="none", **options, **call)[0]
    assert torch.equal(other, again)
    assert repr(LinearDivergenceLoss("tv")).startswith("LinearDivergenceLoss(kind='tv', reduction=")


def test_a_shape_is_planned_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    h = heads(device)

    def step(kind: Any) -> None:
        loss = linear_divergence(*h[:4], reduction="none", kind=kind, memory="64MiB")
        loss.sum().backward()

    step("tv")
    count = 0
    real = _abi.Plan.__init__

    def spy(*args: Any, **how: Any) -> None:
        nonlocal count
        count += 1
        real(*args, **how)

    monkeypatch.setattr(_abi.Plan, "__init__", spy)
    step("tv")
    assert count == 0
    step("jsd")
    assert count


NUMPY = ("none", "sum", "mean")


@pytest.mark.parametrize("reduction", NUMPY)
@pytest.mark.parametrize("name", OPTIONS)
def test_numpy_has_the_bits_of_torch(name: str, reduction: Any) -> None:
    h = heads()
    options = {**OPTIONS[name](h), "kind": "jsd", "beta": 0.3, "reduction": reduction}
    if "target" in options:
        options["shift"] = True
    names = STATISTICS if "target" in options else STATISTICS[:3]
    ours, statistics = linear_divergence(*h[:4], **options, return_statistics=names)
    held = {n: v.detach().numpy() if isinstance(v, Tensor) else v for n, v in options.items()}
    arrays = [t.detach().numpy() for t in h[:4]]
    call = logitless.numpy.linear_divergence
    loss, found = call(*arrays, **held, return_statistics=names)
    assert np.array_equal(loss, ours.detach().numpy()) and loss.dtype == np.float32
    for n in names:
        assert np.array_equal(getattr(found, n), getattr(statistics, n).numpy())
    if reduction == "none":
        with pytest.raises(ValueError, match=r"^reduction is 'none'; allowed with gradients"):
            call(*arrays, **held, return_gradients=True)
        return
    (again, _), grads = call(*arrays, **held, return_statistics=names, return_gradients=True)
    assert np.array_equal(again, loss)
    biased = "linear_bias" in options
    leaves = h.leaves if biased else h.leaves[:2]
    for grad, e in zip(grads, torch.autograd.grad(ours, leaves)):
        assert np.array_equal(grad, e.numpy())
    assert (grads.linear_bias is not None) is biased
    loss, grads = call(*arrays, **held, return_gradients=True)
    assert isinstance(loss, np.float32) and grads.input.shape == (*SHAPE, HIDDEN)


def test_numpy_of_logits_and_of_its_errors() -> None:
    h = heads(trains=False)
    x, w, y, v = (t.numpy() for t in h[:4])
    logits = np.random.default_rng(0).standard_normal((*SHAPE, VOCAB)).astype(np.float16)
    call = logitless.numpy.linear_divergence
    ours = linear_divergence(h.input, h.weight, teacher_logits=torch.from_numpy(logits), kind="tv")
    assert call(x, w, teacher_logits=logits, kind="tv") == ours.item()
    assert call(x, w, y, v, memory="1MiB") == linear_divergence(*h[:4]).item()
    for changed, kind, message in (
        ({"shift": 1}, ValueError, "^target is missing; shift needs it"),
        ({"kind": "kl"}, ValueError, "^kind is 'kl'; allowed"),
        ({"teacher_weight": None}, ValueError, "^teacher_input is given without teacher_weight"),
        ({"teacher_logits": logits}, ValueError, "^teacher_logits is given beside teacher_weight"),
        ({"teacher_weight": v[1:]}, ValueError, r"^teacher_weight has shape \[36, 6\] and linear_"),
        ({"teacher_input": y[0]}, ValueError, r"^teacher_input has shape \(5, 6\); allowed: \(2, "),
        (
            {"teacher_input": y.astype(np.float16)},
            TypeError,
            r".*teacher_input.astype\(input.dtype",
        ),
        ({"target": np.full(SHAPE, 99)}, ValueError, r"^target\[0, 0\] .*is 99; allowed: 0 to 36"),
        (
            {"teacher_temperature": np.ones(3)},
            ValueError,
            r"^teacher_temperature has shape|^temper",
        ),
        ({"input": np.float32(3)}, ValueError, r"^input has shape \(\); allowed"),
        ({"linear_weight": v[0]}, ValueError, r"^linear_weight has shape \(6,\); allowed"),
        ({"memory": 1}, ValueError, r"^memory is 1 bytes"),
    ):
        given: Any = {"input": x, "linear_weight": w, "teacher_input": y, "teacher_weight": v}
        with pytest.raises(kind, match=message):
            call(**{**given, **changed})


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_cuda_graph_captures_a_step(reduction: Any) -> None:
    """No part of the step waits for the device."""
    h = heads("cuda")

    def step() -> tuple[Tensor, ...]:
        loss = linear_divergence(*h[:4], reduction=reduction, target=h.target)
        return (loss, *torch.autograd.grad(loss.sum(), h.leaves[:2]))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda.set_sync_debug_mode("error")
        try:
            expect = [t.clone() for t in step()]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    graph.replay()
    for a, e in zip(results, expect):
        assert torch.equal(a, e)

# SPDX-License-Identifier: Apache-2.0
"""Our functions equal Liger's. Of its tensor-parallel function, which refuses tensors that are not
on CUDA, the fallback in torch is called, in two processes. Of its divergences of two heads, the one
in Triton is called with a stand-in for its kernel, and the chunked one as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import both
import ranks
from logitless.integrations import liger
from ranks import Rank
from reference import close

theirs = pytest.importorskip("liger_kernel.ops.fused_linear_scaled_cross_entropy")
OURS = liger.LigerFusedLinearScaledCrossEntropyTPFunction


def case(me: Rank, entropy: bool) -> dict[str, Tensor]:
    x, w, t = both.problem(me)
    x, t, group = x.flatten(0, 1), t.flatten(), dist.group.WORLD
    t[::3] = -100
    both.same(
        lambda x, w: OURS.apply(x, w, t, group, 0.7, return_entropy=entropy),
        lambda x, w: theirs._apply_tp_fallback(x, w, t, 0.7, -100, entropy, group), (x, w),
    )  # fmt: skip
    return {}


@pytest.mark.parametrize("entropy", [False, True])
def test_function(pair: ranks.Group, entropy: bool) -> None:
    pair.call(case, entropy)


def test_signature() -> None:
    name = OURS.__name__
    both.takes_what(OURS.apply, getattr(theirs, name).apply)


jsd = pytest.importorskip("liger_kernel.ops.fused_linear_jsd")
jsd_module = pytest.importorskip("liger_kernel.transformers.fused_linear_jsd")
chunked = pytest.importorskip("liger_kernel.chunked_loss")


def heads() -> tuple[Tensor, ...]:
    """Hidden states and heads of a student and a teacher, biases, and labels, some ignored."""
    torch.manual_seed(0)
    labels = torch.randint(0, 37, (64,))
    labels[::3] = -100
    student = torch.randn(64, 8).requires_grad_(), torch.randn(37, 8).requires_grad_()
    bias = torch.randn(37).requires_grad_()
    return *student, torch.randn(64, 6), torch.randn(37, 6), bias, torch.randn(37), labels


def agree(ours: Tensor, other: Tensor, leaves: Any) -> None:
    made, theirs = (torch.autograd.grad(loss, leaves) for loss in (ours, other))
    for a, e in zip((ours, *made), (other, *theirs)):  # each within a bound of its own size
        torch.testing.assert_close(a, e, rtol=0, atol=2e-5 * float(e.abs().max()))


def kernel(
    op: str, x: Tensor, y: Tensor, labels: Any, beta: float, ignored: int, count: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """In place of Liger's kernel: each element's loss, and its derivative with respect to x."""
    assert op == "jsd_loss_and_grad"
    p, q = y.exp(), x.exp()
    if beta == 0:
        loss, grad = p * (y - x), -p
    elif beta == 1:
        loss, grad = q * (x - y), q * (x - y) + q
    else:
        m = (beta * p + (1 - beta) * q).log()
        loss, grad = beta * p * (y - m) + (1 - beta) * q * (x - m), (1 - beta) * q * (x - m)
    counts = 1.0 if labels is None else (labels != ignored)[:, None]
    return loss * counts / count, grad * counts / count


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_jsd(beta: float, labels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsd, "dispatch", kernel)
    x, w, y, u, *_, t = heads()
    given = (x, w, y, u, t if labels else None)
    ours = liger.LigerFusedLinearJSD(beta, temperature=0.7)(*given)
    agree(ours, jsd_module.LigerFusedLinearJSD(beta, temperature=0.7)(*given), (x, w))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_chunked_jsd(beta: float, weights: tuple[float, float], temperature: float) -> None:
    x, w, y, u, b, c, t = heads()
    options: Any = {"temperature": temperature, "compiled": False, "chunk_size": 16}
    given = (x, w, y, u, t, b, c)
    other = chunked.LigerFusedLinearJSDLoss(*weights, beta, **options)(*given)
    agree(liger.LigerFusedLinearJSDLoss(*weights, beta, **options)(*given), other, (x, w, b))


def test_parts_of_chunked_jsd() -> None:
    x, w, y, u, b, c, t = heads()
    options: Any = {"return_soft_hard_loss": True, "compiled": False}
    made = liger.LigerFusedLinearJSDLoss(**options)(x, w, y, u, t, b, c)
    other = chunked.LigerFusedLinearJSDLoss(**options)(x, w, y, u, t, b, c)
    assert len(made) == len(other) == 3
    for a, e in zip(made, other):
        close(a, e.double())


def test_signatures_of_divergences() -> None:
    both.takes_what(
        liger.LigerFusedLinearJSDFunction.apply, jsd.LigerFusedLinearJSDFunction.forward, skip=1
    )
    for ours, other in (
        (liger.LigerFusedLinearJSD, jsd_module.LigerFusedLinearJSD),
        (liger.LigerFusedLinearJSDLoss, chunked.LigerFusedLinearJSDLoss),
    ):
        both.takes_what(ours, other)
        both.takes_what(ours.forward, other.forward)

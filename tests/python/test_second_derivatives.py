# SPDX-License-Identifier: Apache-2.0
"""The gradients have no gradient of their own. Asking for one is an error, whichever way the call
went through torch: a second derivative is never silently left out of a sum."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from logitless import LogitlessNotSupportedError
from logitless.torch import LinearCrossEntropyHead, cross_entropy, linear_cross_entropy
from test_linear import problem


class PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return f(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    """A tensor class that redefines nothing."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="eager")


MODES: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "flop counter": lambda: FlopCounterMode(display=False),
    "dispatch mode": PassThrough,
    "function mode": BaseTorchFunctionMode,
}
LOSSES: dict[str, Callable[..., Tensor]] = {
    "mean": lambda x, w, b, t: linear_cross_entropy(x, w, t, linear_bias=b),
    "none": lambda x, w, b, t: linear_cross_entropy(x, w, t, linear_bias=b, reduction="none").sum(),
    "logits": lambda x, w, b, t: cross_entropy(torch.nn.functional.linear(x, w, b), t),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("way", [*MODES, "subclass", "compiled"])
def test_no_second_derivative_is_silently_left_out(device: str, way: str, name: str) -> None:
    """A second derivative by a leaf or the loss's factor is an error, also with allow_unused."""
    *leaves, t = problem((9,), 17, 8, device=device, bias=True)
    if way == "subclass":
        leaves = [v.detach().as_subclass(Subclass).requires_grad_() for v in leaves]  # type: ignore[union-attr]
    factor = torch.tensor(1.5, device=device, requires_grad=True)
    make = compiled(LOSSES[name]) if way == "compiled" else LOSSES[name]
    with MODES.get(way, contextlib.nullcontext)():
        loss = make(*leaves, t) * factor
        for first in leaves:
            (grad,) = torch.autograd.grad(loss, first, create_graph=True)  # type: ignore[arg-type]
            assert grad.requires_grad
            total = loss + grad.square().sum()
            for second in (*leaves, factor):
                with pytest.raises(RuntimeError, match="differentiated once"):
                    torch.autograd.grad(total, second, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
        with pytest.raises(LogitlessNotSupportedError, match="differentiated once"):
            total.backward()


@pytest.mark.parametrize("way", [*MODES, "compiled"])
def test_the_first_derivative_under_create_graph_is_as_ever(device: str, way: str) -> None:
    x, w, b, t = problem((9,), 17, 8, device=device, bias=True)
    leaves: Any = (x, w, b)
    expected = torch.autograd.grad(LOSSES["mean"](*leaves, t) * 3, leaves)
    make = compiled(LOSSES["mean"]) if way == "compiled" else LOSSES["mean"]
    with MODES.get(way, contextlib.nullcontext)():
        grads = torch.autograd.grad(make(*leaves, t) * 3, leaves, create_graph=True)
    for a, e in zip(grads, expected):
        torch.testing.assert_close(a, e, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("trunk", [False, True], ids=["head alone", "with a trunk"])
def test_main_grad_under_create_graph_is_refused_before_it_is_added_to(
    device: str, reduction: str, trunk: bool
) -> None:
    """main_grad is outside the graph, so its derivative would be silently lost."""
    head = LinearCrossEntropyHead(
        8, 17, device=device, grad_accumulation="main_grad", reduction=reduction
    )
    weight: Any = head.weight
    x, _, _, t = problem((9,), 17, 8, device=device)
    x.requires_grad_(trunk)
    loss = head(x, t).sum()
    with pytest.raises(NotImplementedError, match=r"main_grad.*create_graph"):
        loss.backward(create_graph=True)
    assert not weight.main_grad.any()
    loss = head(x, t).sum()
    loss.backward()
    assert weight.main_grad.any() and weight.grad is None

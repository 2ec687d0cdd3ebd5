# SPDX-License-Identifier: Apache-2.0
"""What every function of PyTorch's binding refuses, on every way to the core: plain calls, calls
through torch's dispatcher, lists of rows as the vocabulary, lists of ids."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from logitless.torch import (
    linear_cross_entropy,
    linear_divergence,
    linear_logprob,
    linear_logprobs_at,
    linear_topk,
)

TOKENS, HIDDEN, VOCAB = 6, 4, 7
Call = Callable[..., Any]


def _ids() -> Tensor:
    return torch.arange(2 * TOKENS).view(TOKENS, 2) % VOCAB


def _offsets() -> Tensor:
    return torch.arange(0, 2 * TOKENS + 1, 2)


def _target() -> Tensor:
    return torch.arange(TOKENS) % VOCAB


def _loss(x: Tensor, w: Tensor, **how: Any) -> Any:
    return linear_cross_entropy(x, w, _target(), **how)


def _logprob(x: Tensor, w: Tensor, **how: Any) -> Any:
    return linear_logprob(x, w, _target(), **how)


def _columns(x: Tensor, w: Tensor, **how: Any) -> Any:
    return linear_logprobs_at(x, w, _ids(), **how)


def _lists(x: Tensor, w: Tensor, **how: Any) -> Any:
    return linear_logprobs_at(x, w, _ids().view(-1), offsets=_offsets(), **how)


def _among(x: Tensor, w: Tensor, **how: Any) -> Any:
    return linear_logprobs_at(x, w, _ids(), over="ids", **how)


def _among_lists(x: Tensor, w: Tensor, **how: Any) -> Any:
    ids = _ids().view(-1)
    return linear_logprobs_at(x, w, ids, offsets=_offsets(), over="ids", **how)


def _top(x: Tensor, w: Tensor, **how: Any) -> Any:
    return linear_topk(x, w, 2, **how)


def _divergence(x: Tensor, w: Tensor, **how: Any) -> Any:
    of_teacher = torch.ones(TOKENS, HIDDEN), torch.ones(VOCAB, HIDDEN)
    return linear_divergence(x, w, *of_teacher, target=_target(), **how)


def _listed(of: Call) -> Call:
    """The same with a list of rows as the vocabulary."""

    def call(x: Tensor, w: Tensor, **how: Any) -> Any:
        return of(x, w, vocab_ids=torch.arange(VOCAB), **how)

    return call


CALLS = {
    "loss": _loss, "logprob": _logprob, "columns": _columns, "lists": _lists, "among": _among,
    "among lists": _among_lists, "top": _top, "divergence": _divergence,
}  # fmt: skip
CALLS |= {f"{n}, vocab_ids": _listed(of) for n, of in CALLS.items() if not n.startswith("among")}
ROUTES: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "dispatched": lambda: FlopCounterMode(display=False),
}
EVERY = pytest.mark.parametrize("name", CALLS)
ROUTE = pytest.mark.parametrize("route", ROUTES)


def _head() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN, requires_grad=True)


@EVERY
@ROUTE
def test_a_tensor_on_meta_is_named(name: str, route: str) -> None:
    x, w = _head()
    bias = torch.zeros(VOCAB, device="meta")
    with ROUTES[route]():
        CALLS[name](x, w)
        with pytest.raises(RuntimeError, match=r"linear_weight is on meta|allowed: meta"):
            CALLS[name](x, w.detach().to("meta"))
        with pytest.raises(RuntimeError, match="linear_bias is on meta"):
            CALLS[name](x, w, linear_bias=bias)


@EVERY
def test_a_compiled_call_with_a_weight_on_meta_is_no_number(name: str) -> None:
    x, w = _head()
    compiled = torch.compile(CALLS[name], backend="eager")
    with pytest.raises(Exception, match="meta"):
        compiled(x, w.detach().to("meta"))


@EVERY
@ROUTE
@pytest.mark.parametrize("option", ["logit_scale", "softcap"])
def test_an_option_is_a_number(name: str, route: str, option: str) -> None:
    """A tensor would silently get no gradient."""
    x, w = _head()
    for value in (torch.tensor(2.0, requires_grad=True), "a"):
        with ROUTES[route](), pytest.raises(TypeError, match=f"^{option} is a "):
            CALLS[name](x, w, **{option: value})


SHIFTED = pytest.mark.parametrize("name", ["loss", "logprob", "divergence", "loss, vocab_ids"])


@SHIFTED
@pytest.mark.parametrize("shift", [0.5, 1.5, "1", None])
def test_a_shift_is_an_integer(name: str, shift: Any) -> None:
    with pytest.raises(TypeError, match=r"^shift is a .*; allowed: a bool or an int$"):
        CALLS[name](*_head(), shift=shift)


@SHIFTED
@pytest.mark.parametrize("shift", [1, True, np.int64(1), np.True_])
def test_a_shift_may_be_numpys_number(name: str, shift: Any) -> None:
    assert torch.equal(CALLS[name](*_head(), shift=shift), CALLS[name](*_head(), shift=1))


@EVERY
def test_a_sparse_weight_is_named(name: str) -> None:
    x, w = _head()
    with pytest.raises((RuntimeError, TypeError), match=r"linear_weight.* layout"):
        CALLS[name](x, w.detach().to_sparse())


@EVERY
def test_transforms_are_refused_by_name(name: str) -> None:
    x, w = _head()
    many = w.detach().expand(2, VOCAB, HIDDEN)
    with pytest.raises(NotImplementedError, match=r"^torch.func transforms"):
        torch.func.vmap(lambda one: CALLS[name](x, one))(many)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(w.detach(), w.detach())
        with pytest.raises(NotImplementedError, match=r"^forward-mode derivatives"):
            CALLS[name](x, dual)


@EVERY
def test_a_parameter_of_zero_3_is_held_for_backward(name: str) -> None:
    """DeepSpeed takes a parameter's memory away between forward and backward."""
    x, _ = _head()
    x.requires_grad_()
    wanted: list[Tensor] = []
    for is_zero in (False, True):
        w: Any = torch.nn.Parameter(_head()[1].detach().clone())
        if is_zero:
            w.ds_status = SimpleNamespace(name="AVAILABLE")
        made = CALLS[name](x, w)
        if name.startswith("top"):
            wanted.append(made[0])
            continue
        if is_zero:
            w.data = torch.empty(0)
        wanted.append(torch.autograd.grad(made.sum(), x)[0])
    assert torch.equal(*wanted)
    w.ds_status = SimpleNamespace(name="NOT_AVAILABLE")
    with pytest.raises(NotImplementedError, match="ZeRO-3 that is not whole here"):
        CALLS[name](x, w)


@pytest.mark.parametrize("lists", ["vocab_ids", "teacher_vocab_ids"])
def test_a_teacher_of_zero_3_beside_lists(lists: str) -> None:
    x, w = _head()
    teacher: Any = torch.nn.Parameter(torch.empty(0))
    teacher.ds_status = SimpleNamespace(name="NOT_AVAILABLE")
    with pytest.raises(NotImplementedError, match="teacher_weight is a parameter of DeepSpeed"):
        linear_divergence(x, w, x, teacher, **{lists: torch.arange(VOCAB)})

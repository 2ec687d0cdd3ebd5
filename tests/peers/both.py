# SPDX-License-Identifier: Apache-2.0
"""Compares a call of ours with one of another library on the same tensors, on every rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ranks import Rank
from reference import close

SHAPE, VOCAB, HIDDEN = (6, 2), 36, 16  # [s, b] tokens


def problem(me: Rank, vocab: int = VOCAB) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [s, b, h], the rank's rows of the weight, labels [s, b], none ignored."""
    x = torch.randn(*SHAPE, HIDDEN)
    w = torch.randn(vocab, HIDDEN) / HIDDEN**0.5
    t = torch.randint(0, vocab, SHAPE)
    return x, w.chunk(me.size)[me.rank].clone(), t


def run(call: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Outputs and gradients, of upstream gradients that are the same for every call and rank."""
    leaves: list[Any] = [t.detach().clone().requires_grad_() for t in tensors]
    found = call(*leaves)
    outputs = list(found) if isinstance(found, tuple) else [found]
    torch.manual_seed(1)
    torch.autograd.backward(outputs, [torch.randn(o.shape).to(o.dtype) for o in outputs])
    return [*(o.detach() for o in outputs), *(leaf.grad for leaf in leaves)]


def same(ours: Callable[..., Any], theirs: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
    found, expected = run(ours, tensors), run(theirs, tensors)
    assert len(found) == len(expected)
    for a, e in zip(found, expected):
        close(a, e.double())


def takes_what(ours: Callable[..., Any], theirs: Callable[..., Any], skip: int = 0) -> None:
    """Asserts that `ours` has the arguments of `theirs` in the same order, with the same defaults;
    it may have more after them. The first `skip` of `theirs`, such as ctx, do not count."""
    own, other = (list(inspect.signature(f).parameters.values()) for f in (ours, theirs))
    other = other[skip:]
    given = [(p.name, p.default) for p in other]
    assert [(p.name, p.default) for p in own[: len(other)]] == given

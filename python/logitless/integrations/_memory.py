# SPDX-License-Identifier: Apache-2.0
"""The default `memory` of functions that stand in for others which are chosen for the little memory
that they take: as much as those take beyond their inputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless._abi import Room
from logitless.torch import _memory, _ops
from logitless.torch._functions import _autocast_dtype


class Sizes(NamedTuple):
    """Of a call on this rank."""

    tokens: int
    width: int
    vocab: int  # rows of the weight
    size: int  # bytes of an element of the products' operands
    gradients: bool  # whether there will be any
    f32_sums: int  # bytes of f32 sums beside the gradients in 16 bits, of input and weight
    f32_weight_sums: int  # those of the weight alone


def _sums(tensor: Tensor) -> int:
    return 4 * tensor.numel() if tensor.requires_grad and tensor.element_size() < 4 else 0


def frugal(
    memory: int | str | None, hidden: Any, weight: Any, peak: Callable[[Sizes], int],
    tokens: int | None = None,
) -> Any:  # fmt: skip
    """The `memory` of a call: what its caller says, or default_memory, or else as many bytes as the
    function takes at most in whose name the call is made, `peak` of hidden [..., D] and weight
    [V, D], but no more than all logits in 16 bits, or a third of them in f32, beside the sums: a
    chunk of a small call may be most of it. And the least that the call takes where that is more.
    `tokens`: where they are not those of hidden. Where sizes are symbols of a compiler it is the
    least."""
    if memory is not None or _memory.default() is not None:
        return memory
    call = _sizes(hidden, weight, tokens)
    if not isinstance(call, Sizes):
        return call
    most = 4 * call.tokens * call.vocab // (2 if call.size < 4 else 3)
    return Room(min(peak(call), most + call.f32_sums))


def frugal_beside(
    memory: int | str | None, hidden: Any, weight: Any, peak: Callable[[Sizes], int], held: int
) -> Any:
    """The same of a divergence: a twentieth more than the other function takes, less the bytes
    `held` that are taken beside the call, such as copies of weights, and without the bound: it is
    meant for one head's logits."""
    if memory is not None or _memory.default() is not None:
        return memory
    call = _sizes(hidden, weight)
    return Room(peak(call) * 21 // 20 - held) if isinstance(call, Sizes) else call


def _sizes(hidden: Any, weight: Any, tokens: int | None = None) -> Any:
    """Sizes, or the `memory` where there are none."""
    if not (isinstance(hidden, Tensor) and isinstance(weight, Tensor)):
        return None  # the call itself says what is wrong
    hidden, weight = (t.to_local() if hasattr(t, "to_local") else t for t in (hidden, weight))
    if hidden.dim() == 0 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        return None
    vocab, width = weight.shape
    if not _ops.are_numbers((hidden.numel(), vocab, width)):
        return Room(1)
    count = hidden.numel() // max(width, 1) if tokens is None else tokens
    dtype = _autocast_dtype(hidden) or hidden.dtype
    gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    sums = (_sums(hidden), _sums(weight)) if gradients else (0, 0)
    return Sizes(count, width, vocab, dtype.itemsize, gradients, sum(sums), sums[1])

# SPDX-License-Identifier: Apache-2.0
"""The default `memory` of drop-in functions: the bytes that the replaced function needs beyond its
inputs and gradients. Users chose that function because it needs little memory, so a replacement
must not need more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless._abi import Room
from logitless.torch import _memory, _ops
from logitless.torch._functions import _autocast_dtype


class Sizes(NamedTuple):
    """The sizes of a call on this rank."""

    tokens: int
    width: int
    vocab: int  # rows of the weight
    size: int  # bytes of an element of the products' operands
    gradients: bool  # whether gradients will be computed
    f32_sums: int  # bytes of f32 sums of the 16-bit gradients of input and weight
    f32_weight_sums: int  # the weight's part of these


def _sums(tensor: Tensor) -> int:
    return 4 * tensor.numel() if tensor.requires_grad and tensor.element_size() < 4 else 0


def frugal(
    memory: int | str | None, hidden: Any, weight: Any, peak: Callable[[Sizes], int],
    tokens: int | None = None,
) -> Any:  # fmt: skip
    """The `memory` of a call: the caller's, or that of default_memory, or else `peak`, the largest
    number of bytes that the replaced function needs for hidden [..., D] and weight [V, D]. This is
    bounded by the bytes of all logits in 16 bits (in f32, of a third of the logits) plus those of
    f32 sums, because in a small call one chunk may be most of the logits. If the call's minimum is
    more, the call gets its minimum. `tokens`: the number of tokens, if it is not that of `hidden`.
    If sizes are symbolic, in a compiler, the call gets its minimum."""
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
    """Like frugal, for a divergence: 5 % more than the replaced function needs, minus the bytes
    `held` outside of the call, such as copies of weights. The bound of frugal is not applied,
    because it is for one head's logits."""
    if memory is not None or _memory.default() is not None:
        return memory
    call = _sizes(hidden, weight)
    return Room(peak(call) * 21 // 20 - held) if isinstance(call, Sizes) else call


def _sizes(hidden: Any, weight: Any, tokens: int | None = None) -> Any:
    """The Sizes, or the `memory` to use if they are unknown."""
    if not (isinstance(hidden, Tensor) and isinstance(weight, Tensor)):
        return None  # the call itself raises
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

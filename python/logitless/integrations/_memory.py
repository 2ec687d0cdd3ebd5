# SPDX-License-Identifier: Apache-2.0
"""The default `memory` of drop-in functions: what the function that they replace takes beyond its
inputs and gradients, since that is chosen for taking little."""

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
    gradients: bool  # whether there will be any
    f32_sums: int  # bytes of f32 sums beside the 16-bit gradients of input and weight
    f32_weight_sums: int  # the weight's part of these


def _sums(tensor: Tensor) -> int:
    return 4 * tensor.numel() if tensor.requires_grad and tensor.element_size() < 4 else 0


def frugal(
    memory: int | str | None, hidden: Any, weight: Any, peak: Callable[[Sizes], int],
    tokens: int | None = None,
) -> Any:  # fmt: skip
    """The `memory` of a call: its caller's, or default_memory's, or else `peak` of hidden [..., D]
    and weight [V, D], the most bytes that the replaced function takes. That is bounded by all
    logits in 16 bits, or a third of them in f32, plus the sums, because in a small call one chunk
    may be most of the logits; and it gives way to the call's own minimum. `tokens`: their number,
    if it is not that of hidden. If sizes are a compiler's symbols, the minimum is taken."""
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
    """The same for a divergence: a twentieth more than the replaced function takes, less the bytes
    `held` outside the call, such as copies of weights; without the bound, which is meant for one
    head's logits."""
    if memory is not None or _memory.default() is not None:
        return memory
    call = _sizes(hidden, weight)
    return Room(peak(call) * 21 // 20 - held) if isinstance(call, Sizes) else call


def _sizes(hidden: Any, weight: Any, tokens: int | None = None) -> Any:
    """The Sizes, or the `memory` to take if there are none."""
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

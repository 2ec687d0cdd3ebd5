# SPDX-License-Identifier: Apache-2.0
"""Sums over a vocabulary that is split over ranks, in an order that is the same on every rank, and
the loss of a rank's own tokens. Nothing here communicates."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless import _abi
from logitless._abi import Options


def ordered_sum(values: Tensor) -> Tensor:
    """[...]: the sum of [P, ...] in the order of the first dimension."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


Carries = list[tuple[int, Tensor]]  # sums of 2^level neighbours, of falling levels


def carry(carries: Carries, part: Tensor) -> None:
    """Adds the next part to a balanced tree, which may then overwrite it; at most log2(parts) + 1
    sums are held."""
    level = 0
    while carries and carries[-1][0] == level:
        part = carries.pop()[1].add_(part)
        level += 1
    carries.append((level, part))


def tree_of(carries: Carries) -> Tensor:
    """The sum of all parts, whose number is a power of two."""
    ((_, total),) = carries
    return total


_BLOCK = 1024


def tree_sum(values: Tensor) -> Tensor:
    """[]: the sum of [N] in a fixed order (torch.sum's depends on the number of threads), with an
    error that grows like log N. Zeros fill the tree."""
    size: Any = values.shape[0]
    if isinstance(size, int):
        return _halved(_lengthened(values, 1 << max(size - 1, 0).bit_length())).clone()
    # If N is a symbol, the tree has the levels for 2^30 values, so that one graph serves every N.
    for _ in range(3):
        blocks = values.shape[0] // _BLOCK + 2  # sizes 0 and 1 would make other graphs
        values = _halved(_lengthened(values, blocks * _BLOCK).view(blocks, _BLOCK))
    return values[0] + values[1]


def _lengthened(values: Tensor, size: Any) -> Tensor:
    return torch.cat((values, values.new_zeros(size - values.shape[0])))


def _halved(values: Tensor) -> Tensor:
    """[...]: sums of [..., 2^k], by adding neighbours, then the sums of neighbours."""
    while values.shape[-1] > 1:
        values = values[..., ::2] + values[..., 1::2]
    return values[..., 0]


class Tokens(NamedTuple):
    """What the loss needs of the tokens, in addition to their states."""

    target: Tensor  # [N]
    token_weight: Tensor | None  # [N]
    vocab_weight: Tensor | None  # [V]  of the whole vocabulary
    normalizer: Tensor | None  # []

    def ignored(self, options: Options) -> Tensor:
        return self.target.long() == options.ignore_index  # beyond int32 too

    def target_weight(self, options: Options) -> Tensor | None:
        """[N] f32: c_t."""
        if self.vocab_weight is None:
            return None
        return self.vocab_weight[self.target.clamp(0, options.vocab_total - 1).long()]


def divisor(tokens: Tokens, options: Options) -> Tensor:
    """[] f32: what a mean divides by."""
    if tokens.normalizer is not None:
        return tokens.normalizer.float()
    if options.normalizer:
        return tokens.target.new_full((), options.normalizer, dtype=torch.float32)
    valid = ~tokens.ignored(options)
    weight = tokens.target_weight(options)
    if weight is None:
        return valid.sum().float()
    return tree_sum(torch.where(valid, weight, 0.0))


def reduced(losses: Tensor, tokens: Tokens, options: Options) -> Tensor:
    """The reduced loss [], or the losses [N] with reduction "none"."""
    if options.reduction == _abi.REDUCTION_NONE:
        return losses
    total = tree_sum(losses)
    if options.reduction == _abi.REDUCTION_SUM:
        return total
    return mean_of(total, tokens, options)


def mean_of(total: Tensor, tokens: Tokens, options: Options) -> Tensor:
    """`total` divided by a mean's divisor, or the value of empty_mean if that is 0."""
    by = divisor(tokens, options)
    empty = float("nan") if options.empty_mean == _abi.EMPTY_MEAN_NAN else 0.0
    return torch.where(by == 0, empty, total / torch.where(by == 0, 1.0, by))

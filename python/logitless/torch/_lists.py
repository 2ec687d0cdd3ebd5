# SPDX-License-Identifier: Apache-2.0
"""Sums over lists: M values of N tokens, where token i has those from offsets[i] to
offsets[i + 1] - 1. The host does not read offsets on a GPU; even if they are wrong, nothing outside
[M] and [N] is read or written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless.torch._dispatch import define


def ends_of(offsets: Tensor, places: Any) -> Tensor:
    """[N + 1]: the offsets, made non-decreasing and within [0, M]."""
    return offsets.long().clamp(0, places).cummax(0)[0]


def token_of(offsets: Tensor, places: Any) -> Tensor:
    """[M]: the token of each place."""
    ends = ends_of(offsets, places)
    at = torch.arange(places, device=offsets.device)
    return torch.searchsorted(ends[1:], at, right=True).clamp(max=offsets.shape[0] - 2)


def sums(values: Tensor, offsets: Tensor) -> Tensor:
    """[N]: sums of each token's values [M], in a fixed order, without atomics."""
    op: Any = torch.ops.logitless.list_sums
    summed: Tensor = op(values, offsets)
    return summed


def any_of(values: Tensor, offsets: Tensor) -> Tensor:
    """[N] bool: whether any of a token's values [M] is true."""
    return sums(values.float(), offsets) > 0


def log_softmax(logits: Tensor, offsets: Tensor) -> Tensor:
    """[M]: the log-softmax over each token's logits. Not differentiable."""
    ends, token = ends_of(offsets, logits.shape[0]), token_of(offsets, logits.shape[0])
    none = -float("inf")
    most = torch.segment_reduce(logits, "max", offsets=ends, unsafe=True, initial=none)
    shifted = logits - most[token]
    return shifted - _summed(shifted.exp(), ends).log().float()[token]


def _sums(values: Tensor, offsets: Tensor) -> Tensor:
    return _summed(values, ends_of(offsets, values.shape[0])).float()


def _summed(values: Tensor, ends: Tensor) -> Tensor:
    """The sums of lists, in f64, because a list may have all classes, and the CPU adds one value
    after another."""
    return torch.segment_reduce(values.double().contiguous(), "sum", offsets=ends, unsafe=True)


define(
    "list_sums(Tensor values, Tensor offsets) -> Tensor",
    _sums, lambda values, offsets: values.new_empty(offsets.shape[0] - 1),
)  # fmt: skip

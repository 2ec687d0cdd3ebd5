# SPDX-License-Identifier: Apache-2.0
"""Sums of a vocabulary or of tokens that are split over devices, in an order that every device
shares, and what a mean divides by. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from logitless.jax._run import Array


def ordered_sum(values: Sequence[Array]) -> Array:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def tree_sum(values: Array) -> Array:
    """[]: the sum of [N] in a fixed order, with an error that grows like log N."""
    if not values.shape[0]:
        return jnp.zeros((), values.dtype)
    while values.shape[0] > 1:
        values = jnp.pad(values, (0, values.shape[0] % 2))
        half = values.shape[0] // 2
        values = values[:half] + values[half:]
    return values[0]


class Tokens(NamedTuple):
    """What decides which tokens count."""

    target: Array  # [N]  of the whole vocabulary
    ignore_index: int
    vocab: int  # V
    vocab_weight: Array | None = None  # [V]

    def ignored(self) -> Array:
        return self.target == self.ignore_index

    def outside(self) -> Array:
        """Which targets are errors. The CPU raises; a GPU's rows are NaN."""
        inside = (self.target >= 0) & (self.target < self.vocab)
        return ~inside & ~self.ignored()


def divisor(tokens: Tokens) -> Array:
    """[]: what a mean divides by."""
    valid = ~tokens.ignored()
    if tokens.vocab_weight is None:
        count: Array = valid.sum(dtype=jnp.int32).astype(jnp.float32)
        return count
    weight = tokens.vocab_weight[jnp.clip(tokens.target, 0, tokens.vocab - 1)]
    return tree_sum(jnp.where(valid, weight, 0.0))

# SPDX-License-Identifier: Apache-2.0
"""Sums over a vocabulary or tokens that are split over devices, in an order that is the same on
every device, and the divisor of a mean. Nothing here communicates."""

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
    """The facts that decide which tokens count."""

    target: Array  # [N]  of the whole vocabulary
    ignore_index: int
    vocab: int  # V
    vocab_weight: Array | None = None  # [V]

    def ignored(self) -> Array:
        return self.target == self.ignore_index

    def outside(self) -> Array:
        """Which targets are out of range. The CPU raises for them; on a GPU their rows are NaN."""
        inside = (self.target >= 0) & (self.target < self.vocab)
        return ~inside & ~self.ignored()


def divisor(tokens: Tokens) -> Array:
    """[]: the divisor of a mean."""
    valid = ~tokens.ignored()
    if tokens.vocab_weight is None:
        count: Array = valid.sum(dtype=jnp.int32).astype(jnp.float32)
        return count
    weight = tokens.vocab_weight[jnp.clip(tokens.target, 0, tokens.vocab - 1)]
    return tree_sum(jnp.where(valid, weight, 0.0))

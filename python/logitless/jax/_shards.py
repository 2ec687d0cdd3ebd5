# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of a vocabulary that is split over devices: what the shards' states come to, the loss,
and sums in an order that every device shares. Nothing here communicates, and every device that is
given the same states gets the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from logitless import _abi
from logitless._abi import Options
from logitless.jax._run import Array


class State(NamedTuple):
    """Of each token [N], f32: of a shard, or of the whole vocabulary. None where not asked for."""

    row_reference: Array
    row_log_sum: Array
    target_logit: Array  # -inf where another shard has the target
    entropy: Array | None = None
    weighted_logit_sum: Array | None = None
    sum_p_squared: Array | None = None
    mean_logit: Array | None = None

    def lse(self) -> Array:
        whole = self.row_reference + self.row_log_sum
        return jnp.where(self.row_reference == -jnp.inf, jnp.nan, whole)  # of -inf alone

    def logprob(self) -> Array:
        """Never above 0; a NaN stays."""
        x = (self.target_logit - self.row_reference) - self.row_log_sum
        return jnp.where(x > 0, 0.0, x)


def _given(x: Array | None) -> Array:
    assert x is not None
    return x


def fold(states: Sequence[State]) -> State:
    """The whole vocabulary's state, of the shards' in their order, by the formulas of
    logitless/combine.h in f32. One shard's is the whole one, to the bit."""
    if len(states) == 1:
        return states[0]
    m = states[0].row_reference
    for state in states[1:]:
        m = jnp.maximum(m, state.row_reference)  # a NaN stays
    # The log of a shard's sum relative to m. A shard whose logits are all -inf has no probability.
    logs = [
        jnp.where(s.row_reference == -jnp.inf, -jnp.inf, (s.row_reference - m) + s.row_log_sum)
        for s in states
    ]
    log_sum = jnp.log(ordered_sum([jnp.exp(log) for log in logs]))
    target_logit = states[0].target_logit
    for state in states[1:]:
        target_logit = jnp.maximum(target_logit, state.target_logit)
    ratios = [log - log_sum for log in logs]  # the log of each shard's probability
    entropy = squares = weighted = mean = None
    if states[0].entropy is not None:
        entropy = _weighted([_given(s.entropy) - r for s, r in zip(states, ratios)], ratios, 1)
    if states[0].sum_p_squared is not None:
        squares = _weighted([_given(s.sum_p_squared) for s in states], ratios, 2)
    if states[0].weighted_logit_sum is not None:
        weighted = ordered_sum([_given(s.weighted_logit_sum) for s in states])
    if states[0].mean_logit is not None:
        mean = ordered_sum([_given(s.mean_logit) for s in states])
    return State(m, log_sum, target_logit, entropy, weighted, squares, mean)


def _weighted(values: Sequence[Array], ratios: Sequence[Array], power: int) -> Array:
    """Sum of probability^power times value in the shards' order; of a probability of 0 nothing."""
    terms = []
    for value, ratio in zip(values, ratios):
        p = jnp.exp(ratio * power)
        terms.append(jnp.where(p == 0, 0.0, p * value))
    return ordered_sum(terms)


def first_of_largest(states: Sequence[State], indices: Sequence[Array]) -> Array:
    """[N] i32: the index of the first of the shards whose maximum is the largest."""
    best, index = states[0].row_reference, indices[0]
    for state, other in zip(states[1:], indices[1:]):
        better = state.row_reference > best
        index = jnp.where(better, other, index)
        best = jnp.where(better, state.row_reference, best)
    return index


def ordered_sum(values: Sequence[Array]) -> Array:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def tree_sum(values: Array) -> Array:
    """[] of [N] in a fixed order, whose error grows like log N."""
    if not values.shape[0]:
        return jnp.zeros((), values.dtype)
    while values.shape[0] > 1:
        values = jnp.pad(values, (0, values.shape[0] % 2))
        half = values.shape[0] // 2
        values = values[:half] + values[half:]
    return values[0]


class Tokens(NamedTuple):
    """What the loss takes of each token beside its state. `options.vocab_total` is V."""

    target: Array  # [N]  of the whole vocabulary
    token_weight: Array | None  # [N]
    vocab_weight: Array | None  # [V]
    normalizer: Array | None  # []

    def ignored(self, options: Options) -> Array:
        return self.target == options.ignore_index

    def outside(self, options: Options) -> Array:
        """Targets that are errors. The CPU raises; a GPU's rows are NaN."""
        inside = (self.target >= 0) & (self.target < options.vocab_total)
        return ~inside & ~self.ignored(options)

    def target_weight(self, options: Options) -> Array | None:
        """[N]: c_t."""
        if self.vocab_weight is None:
            return None
        return self.vocab_weight[jnp.clip(self.target, 0, options.vocab_total - 1)]


def token_losses(state: State, tokens: Tokens, options: Options) -> Array:
    """[N], by the formula of docs/semantics.md; 0 for ignored tokens."""
    whole = state.lse()
    onehot = jnp.full_like(whole, 1 - options.label_smoothing)
    weight = tokens.target_weight(options)
    if weight is not None:
        onehot = onehot * weight
    # 0 times the inf of a masked target is 0; a NaN of the row stays.
    nll = (state.row_reference - state.target_logit) + state.row_log_sum
    loss = jnp.where(onehot == 0, 0 * whole, onehot * nll)
    if options.label_smoothing > 0:
        each = options.label_smoothing / options.vocab_total
        classes: Array | float = float(options.vocab_total)
        if tokens.vocab_weight is not None:
            classes = tree_sum(tokens.vocab_weight)
        loss = loss + each * (classes * whole - _given(state.weighted_logit_sum))
    if options.z_loss > 0:
        loss = loss + options.z_loss * whole * whole
    if tokens.token_weight is not None:
        loss = loss * tokens.token_weight
    loss = jnp.where(tokens.outside(options), jnp.nan, loss)
    return jnp.where(tokens.ignored(options), 0.0, loss)


def divisor(tokens: Tokens, options: Options) -> Array:
    """[]: what a mean divides by."""
    if tokens.normalizer is not None:
        return tokens.normalizer
    if options.normalizer:
        return jnp.full((), options.normalizer, jnp.float32)
    valid = ~tokens.ignored(options)
    weight = tokens.target_weight(options)
    if weight is None:
        count: Array = valid.sum(dtype=jnp.int32).astype(jnp.float32)
        return count
    return tree_sum(jnp.where(valid, weight, 0.0))


def reduced(losses: Array, tokens: Tokens, options: Options) -> Array:
    """[] or [N]."""
    if options.reduction == _abi.REDUCTION_NONE:
        return losses
    total = tree_sum(losses)
    if options.reduction == _abi.REDUCTION_SUM:
        return total
    by = divisor(tokens, options)
    empty = jnp.nan if options.empty_mean == _abi.EMPTY_MEAN_NAN else 0.0
    mean: Array = jnp.where(by == 0, empty, total / jnp.where(by == 0, 1.0, by))
    return mean

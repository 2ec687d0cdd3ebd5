# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of a vocabulary that is split over ranks: what the ranks' states come to, the loss,
and sums in an order that every rank shares. Nothing here communicates, and every rank that is given
the same states gets the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless import _abi
from logitless._abi import Options

_INFINITY = float("inf")


class State(NamedTuple):
    """Of each token [N], f32: of a shard, or of the whole vocabulary. None where not asked for."""

    row_reference: Tensor
    row_log_sum: Tensor
    target_logit: Tensor  # -inf where another shard has the target
    entropy: Tensor | None = None
    weighted_logit_sum: Tensor | None = None
    sum_p_squared: Tensor | None = None
    mean_logit: Tensor | None = None

    def lse(self) -> Tensor:
        """NaN of a row whose logits are all -inf."""
        whole = self.row_reference + self.row_log_sum
        return torch.where(self.row_reference == -_INFINITY, float("nan"), whole)

    def logprob(self) -> Tensor:
        """Never above 0; a NaN stays."""
        x = (self.target_logit - self.row_reference) - self.row_log_sum
        return torch.where(x > 0, 0.0, x)


def empty_state(tokens: int, like: Tensor, wanted: Sequence[bool]) -> Tensor:
    """[k, N]: the state of a shard without columns."""
    state = like.new_zeros((3 + sum(wanted), tokens), dtype=torch.float32)
    state[0] = -_INFINITY
    state[2] = -_INFINITY
    return state


def fold(states: Sequence[State]) -> State:
    """The whole vocabulary's state, of the shards' in their order, by the formulas of
    logitless/combine.h in f64. One shard's is the whole one, to the bit."""
    if len(states) == 1:
        return states[0]
    m = states[0].row_reference
    for state in states[1:]:
        m = torch.maximum(m, state.row_reference)  # a NaN stays
    # log of a shard's sum relative to m. A shard whose logits are all -inf has no probability.
    wide = m.double()
    logs = [
        torch.where(
            s.row_reference == -_INFINITY,
            -_INFINITY,
            (s.row_reference.double() - wide) + s.row_log_sum.double(),
        )
        for s in states
    ]
    total = logs[0].exp()
    for log in logs[1:]:
        total = total + log.exp()
    log_sum = total.log()
    target_logit = states[0].target_logit
    for state in states[1:]:
        target_logit = torch.maximum(target_logit, state.target_logit)
    ratios = [log - log_sum for log in logs]  # the log of each shard's probability
    entropy = squares = None
    if states[0].entropy is not None:
        entropy = _weighted(
            [_given(s.entropy).double() - r for s, r in zip(states, ratios)], ratios, 1
        )
    if states[0].sum_p_squared is not None:
        squares = _weighted([_given(s.sum_p_squared).double() for s in states], ratios, 2)
    return State(
        m,
        log_sum.float(),
        target_logit,
        entropy,
        _sum([s.weighted_logit_sum for s in states]),
        squares,
        _sum([s.mean_logit for s in states]),
    )


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _weighted(values: Sequence[Tensor], ratios: Sequence[Tensor], power: int) -> Tensor:
    """Sum of probability^power times value in the shards' order; of a probability of 0 nothing."""
    total = None
    for value, ratio in zip(values, ratios):
        p = (ratio * power).exp()
        term = torch.where(p == 0, 0.0, p * value)
        total = term if total is None else total + term
    return _given(total).float()


def _sum(values: Sequence[Tensor | None]) -> Tensor | None:
    if values[0] is None:
        return None
    total = values[0].double()
    for value in values[1:]:
        total = total + _given(value).double()
    return total.float()


def ordered_sum(values: Tensor) -> Tensor:
    """[...] of [P, ...], in the order of the first dimension."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


Carries = list[tuple[int, Tensor]]  # sums of 2^level neighbours, of falling levels


def carry(carries: Carries, part: Tensor) -> None:
    """Adds the next part, which becomes the tree's, to a balanced tree, of which at most log2 + 1
    sums are held."""
    level = 0
    while carries and carries[-1][0] == level:
        part = carries.pop()[1].add_(part)
        level += 1
    carries.append((level, part))


def tree_of(carries: Carries) -> Tensor:
    """The sum of a power of two of parts."""
    ((_, total),) = carries
    return total


def tree_sum(values: Tensor) -> Tensor:
    """[] of [N] in a fixed order, whose error grows like log N: that of torch.sum follows the
    number of threads. An op, because the order would tie a compiled graph to N."""
    op: Any = torch.ops.logitless.tree_sum
    total: Tensor = op(values)
    return total


def _tree_sum(values: Tensor) -> Tensor:
    if values.shape[0] < 2:
        return values.sum()  # an op's result is no view of what it is given
    while values.shape[0] > 1:
        if values.shape[0] % 2:
            values = torch.cat((values, values.new_zeros(1)))
        values = values[::2] + values[1::2]
    return values[0].clone()


_make_library: Any = torch.library.Library
_library = _make_library("logitless", "FRAGMENT")
_library.define("tree_sum(Tensor values) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("tree_sum", _tree_sum, "CompositeExplicitAutograd")
torch.library.register_fake(
    "logitless::tree_sum", lambda values: values.new_empty(()), lib=_library
)


class Tokens(NamedTuple):
    """What the loss takes of each token beside its state."""

    target: Tensor  # [N]
    token_weight: Tensor | None  # [N]
    vocab_weight: Tensor | None  # [V]  of the whole vocabulary
    normalizer: Tensor | None  # []

    def ignored(self, options: Options) -> Tensor:
        return self.target.long() == options.ignore_index  # beyond int32 too

    def outside(self, options: Options) -> Tensor:
        """Targets that are errors. The CPU raises; a GPU's rows are NaN."""
        out = (self.target < 0) | (self.target >= options.vocab_total)
        return out & ~self.ignored(options)

    def target_weight(self, options: Options) -> Tensor | None:
        """[N] f32: c_t."""
        if self.vocab_weight is None:
            return None
        return self.vocab_weight[self.target.clamp(0, options.vocab_total - 1).long()]


def token_losses(state: State, tokens: Tokens, options: Options) -> Tensor:
    """[N] f32, by the formula of docs/semantics.md; 0 for ignored tokens."""
    whole = state.lse()
    one_minus = 1 - options.label_smoothing
    weight = tokens.target_weight(options)
    onehot = whole.new_full((), one_minus) if weight is None else one_minus * weight
    # 0 times the inf of a masked target is 0; a NaN of the row stays.
    nll = (state.row_reference - state.target_logit) + state.row_log_sum
    loss = torch.where(onehot == 0, 0 * whole, onehot * nll)
    if options.label_smoothing > 0:
        each = options.label_smoothing / options.vocab_total
        classes: Tensor | float = float(options.vocab_total)
        if tokens.vocab_weight is not None:
            classes = tree_sum(tokens.vocab_weight.double()).float()
        loss = loss + each * (classes * whole - _given(state.weighted_logit_sum))
    if tokens.token_weight is not None:
        loss = loss * tokens.token_weight
    if options.z_loss > 0:
        square = options.z_loss * whole * whole
        loss = loss + (square if tokens.token_weight is None else tokens.token_weight * square)
    loss = torch.where(tokens.outside(options), float("nan"), loss)
    return torch.where(tokens.ignored(options), 0.0, loss)


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
    """[] or [N]."""
    if options.reduction == _abi.REDUCTION_NONE:
        return losses
    total = tree_sum(losses)
    if options.reduction == _abi.REDUCTION_SUM:
        return total
    return mean_of(total, tokens, options)


def mean_of(total: Tensor, tokens: Tokens, options: Options) -> Tensor:
    """`total` by what a mean divides by; what empty_mean says where that is 0."""
    by = divisor(tokens, options)
    empty = float("nan") if options.empty_mean == _abi.EMPTY_MEAN_NAN else 0.0
    return torch.where(by == 0, empty, total / torch.where(by == 0, 1.0, by))

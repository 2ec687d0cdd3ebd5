# SPDX-License-Identifier: Apache-2.0
"""Lists: M places in all, of N tokens; those of token i are offsets[i] to offsets[i + 1] - 1. The
values of traced offsets cannot be checked: whatever they are, nothing outside [M] and [N] is
touched.

A token's values are folded by doubling: after k rounds every place has the fold of the last 2^k
places of its list up to and including itself. So no atomics are needed, and a sum's bits do not
depend on other lists or on where its list begins. Sums are pairs of f32 (a sum and its rounding
error), because a list may have every class; PyTorch sums in f64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from logitless.jax._run import Array


def ends_of(offsets: Array, places: int) -> Array:
    """[N + 1]: the offsets, made non-decreasing and within [0, M]."""
    return lax.cummax(jnp.clip(offsets, 0, places))


def _token_of(ends: Array, places: int) -> Array:
    """[M]: the token of each place."""
    at = jnp.arange(places, dtype=ends.dtype)
    return jnp.minimum(jnp.searchsorted(ends[1:], at, side="right"), ends.shape[0] - 2)


@functools.partial(jax.jit, static_argnums=(2,))
def _folded(values: Any, offsets: Array, combine: Callable[[Any, Any], Any], none: Any) -> Any:
    """[N]: each token's values, out of `values` [M], combined; `none` for a token without places.
    Values may be tuples of arrays."""
    places, tokens = jax.tree.leaves(values)[0].shape[0], offsets.shape[0] - 1
    if not places:
        return jax.tree.map(lambda x: jnp.full(tokens, none, x.dtype), values)
    ends = ends_of(offsets, places)
    begin = ends[_token_of(ends, places)]  # [M]
    at = jnp.arange(places, dtype=ends.dtype)

    def doubled(k: Any, folded: Any) -> Any:
        before = at - jnp.left_shift(1, k)
        earlier = jax.tree.map(lambda x: x[jnp.maximum(before, 0)], folded)
        both = combine(earlier, folded)
        return jax.tree.map(lambda x, y: jnp.where(before >= begin, x, y), both, folded)

    folded = lax.fori_loop(0, (places - 1).bit_length(), doubled, values)
    some, last = ends[1:] > ends[:-1], jnp.maximum(ends[1:] - 1, 0)
    return jax.tree.map(lambda x: jnp.where(some, x[last], none), folded)


def _added(x: tuple[Array, Array], y: tuple[Array, Array]) -> tuple[Array, Array]:
    """The sum of two sums. Each is a pair: the sum, and what its rounding lost."""
    (a, lost_a), (b, lost_b) = x, y
    total = a + b
    of_b = total - a
    lost = (a - (total - of_b)) + (b - of_b)
    return total, jnp.where(jnp.isfinite(total), lost_a + lost_b + lost, 0)


def sums(values: Array, offsets: Array) -> Array:
    """[N]: the sum of each token's values, out of `values` [M], rounded once."""
    total, lost = _folded((values, jnp.zeros_like(values)), offsets, _added, 0.0)
    summed: Array = total + lost
    return summed


def any_of(values: Array, offsets: Array) -> Array:
    """[N]: whether any of each token's values, out of `values` [M], is true."""
    found: Array = _folded(values, offsets, jnp.logical_or, False)
    return found


def part_of(offsets: Array, places: int, tokens: Array) -> tuple[Array, Array]:
    """The lists of these `tokens` [n] alone, one after another in an array of M places. Returns
    which of the original places each of the M places is, or M if it is not used, and the new
    offsets [n + 1], the last of which is M. A token number of N or more has no places, and a list
    with wrong offsets is empty."""
    begin, end = offsets[:-1], offsets[1:]
    right = (begin >= jnp.maximum(lax.cummax(offsets)[:-1], 0)) & (end >= begin) & (end <= places)
    own = jnp.minimum(tokens, begin.shape[0] - 1)
    length = jnp.where((tokens < begin.shape[0]) & right[own], (end - begin)[own], 0)
    ends = jnp.append(0, jnp.cumsum(length)).astype(offsets.dtype)
    of, at = _token_of(ends, places), jnp.arange(places, dtype=offsets.dtype)
    place = jnp.where(at < ends[-1], begin[own][of] + at - ends[of], places)
    return place, ends.at[-1].set(places)


def first_wrong(offsets: Array, places: int) -> tuple[Array, Array]:
    """Whether any of the offsets is wrong, and the first that is."""
    wrong = (offsets < jnp.append(0, offsets[:-1])) | (offsets > places)
    wrong = wrong.at[-1].set(wrong[-1] | (offsets[-1] != places))
    wrong = wrong.at[0].set(offsets[0] != 0)
    return wrong.any(), offsets[jnp.argmax(wrong)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def spread(values: Array, offsets: Array, places: int) -> Array:
    """[M]: at each place the value of its token, out of `values` [N]."""
    return jnp.take(values, _token_of(ends_of(offsets, places), places), mode="clip")


def _spread_forward(values: Array, offsets: Array, places: int) -> Any:
    return spread(values, offsets, places), offsets


def _spread_backward(places: int, offsets: Array, upstream: Array) -> Any:
    return sums(upstream, offsets), None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def log_softmax(logits: Array, offsets: Array, absent: Array) -> Array:
    """[M]: the log-softmax over each token's logits, in which those that are `absent` are -inf. The
    gradient of a token is exactly 0 if its upstream gradient is, whatever its logits are."""
    places = logits.shape[0]
    some = spread(any_of(~absent, offsets), offsets, places)
    # 0 if all are absent, because -inf - (-inf) is NaN.
    logits = jnp.where(absent & ~some, 0, logits)
    most = _folded(logits, offsets, jnp.maximum, -jnp.inf)
    shifted = logits - spread(most, offsets, places)
    of_tokens = jnp.log(sums(jnp.exp(shifted), offsets))
    return jnp.where(absent, -jnp.inf, shifted - spread(of_tokens, offsets, places))


def _log_softmax_forward(logits: Array, offsets: Array, absent: Array) -> Any:
    made = log_softmax(logits, offsets, absent)
    return made, (made, offsets, absent)


def _log_softmax_backward(kept: Any, upstream: Array) -> Any:
    made, offsets, absent = kept
    upstream = jnp.where(absent, 0, upstream)
    total = spread(sums(upstream, offsets), offsets, made.shape[0])
    some = spread(any_of(upstream != 0, offsets), offsets, made.shape[0])
    return jnp.where(some, upstream - jnp.exp(made) * total, 0), None, None


log_softmax.defvjp(_log_softmax_forward, _log_softmax_backward)

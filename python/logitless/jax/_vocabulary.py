# SPDX-License-Identifier: Apache-2.0
"""A list of rows as the vocabulary: turns a call's arguments into those of a call on a copy of the
listed rows alone, and the ids in its results into ids of the whole vocabulary. The contract is
docs/semantics.md, "A list of rows as the vocabulary". Arrays whose values can be read are checked;
errors in others become NaN."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from logitless import _vocabulary
from logitless._arrays import places_in, sorted_list
from logitless._errors import not_supported, wrong_dtype
from logitless._vocabulary import ABSENT
from logitless.jax._run import Array, explicit_sharding


@jax.custom_vjp
def _rows(tensor: Array, rows: Array, wrong: Array) -> Array:
    """These `rows` of an array; the first of them is NaN if the list is `wrong`."""
    made = jnp.take(tensor, rows, axis=0, mode="clip")
    return made.at[0].set(jnp.where(wrong, jnp.asarray(jnp.nan, made.dtype), made[0]))


def _rows_forward(tensor: Array, rows: Array, wrong: Array) -> Any:
    return _rows(tensor, rows, wrong), (rows, tensor.shape[0])


def _rows_backward(kept: Any, grad: Array) -> Any:
    rows, vocab = kept
    whole = jnp.zeros((vocab, *grad.shape[1:]), grad.dtype)
    return whole.at[rows].set(grad, unique_indices=True), None, None


_rows.defvjp(_rows_forward, _rows_backward)


class Listed:
    """A list of rows of a vocabulary of `vocab` rows. `looked_at`: its ids as a NumPy array, or
    None if their values cannot be read. `rows`: the number of ids that the list must have; the
    listed rows then keep the order of `ids`, and are in ascending order otherwise."""

    def __init__(
        self, name: str, ids: Array, looked_at: Any, vocab: int, rows: int | None = None
    ) -> None:
        _vocabulary.check_list(name, str(ids.dtype), ids.shape, vocab, rows)
        self.name, self.vocab = name, vocab
        self.host = None if looked_at is None else sorted_list(name, looked_at, vocab)
        order = jnp.argsort(ids, stable=True)
        ordered = ids[order]
        twice = (ordered[1:] == ordered[:-1]).any()
        self.wrong = (ordered[0] < 0) | (ordered[-1] >= vocab) | twice
        self.ordered = jnp.clip(ordered, 0, vocab - 1)
        self.rows, self.order = jnp.clip(ids, 0, vocab - 1), order
        if rows is None:
            self.rows, self.order = self.ordered, jnp.arange(len(ids))

    def of(self, name: str, tensor: Array | None, axis: int = 0) -> Any:
        """The listed rows of a weight, a bias or class weights or, along the last axis, logits."""
        if tensor is None:
            return None
        if tensor.ndim == 0 or tensor.shape[axis] != self.vocab:
            raise _vocabulary.wrong_extent(name, tensor.shape, self.vocab, axis < 0)
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise wrong_dtype(f"{name} is {tensor.dtype}; allowed: float32, float16, bfloat16")
        if explicit_sharding(tensor) is not None:
            raise not_supported(
                f"{name} is sharded over a mesh of explicit axes; allowed beside {self.name}: an "
                "array that is whole there, as of jax.sharding.reshard"
            )
        made = _rows(jnp.moveaxis(tensor, axis, 0), self.rows, self.wrong)
        return jnp.moveaxis(made, 0, axis)

    def check(self, looked_at: Any, ignored: int, shift: int, name: str) -> None:
        """Raises if a target or id (`looked_at`) is not in the list, provided that the values of
        both can be read."""
        if self.host is not None and looked_at is not None:
            places_in(looked_at, *self.host, ignored, shift, name, self.name)

    def places(self, target: Array, ignored: Any) -> Array:
        """The place of each target, or id, in the list: ABSENT if it is `ignored`, and the list's
        length if the list does not have it. In a wrong list it is the first place, whose row is
        NaN."""
        last = self.ordered.shape[0] - 1
        at = jnp.minimum(jnp.searchsorted(self.ordered, target), last)
        made = jnp.where(self.ordered[at] == target, self.order[at], last + 1)
        made = jnp.where(self.wrong, 0, made)
        return jnp.where(target == ignored, ABSENT, made).astype(target.dtype)

    def whole(self, places: Array) -> Array:
        """The ids of the whole vocabulary at these `places` in ascending order; negative values are
        kept."""
        made: Array = jnp.where(places < 0, places, self.ordered[jnp.maximum(places, 0)])
        return made.astype(places.dtype)


def refuse_axes(name: str, axis_name: Any) -> None:
    if axis_name is not None:
        raise not_supported(
            f"axis_name is {axis_name!r}; allowed with {name}: None, because the number of ids "
            "on a device is unknown when the program is compiled (use sharded arrays under jax.jit)"
        )


def host_of(value: Any) -> Any:
    """A list's ids if they are a vector of NumPy's; None otherwise. (A list of another shape is
    refused elsewhere.)"""
    return value if isinstance(value, np.ndarray) and value.ndim == 1 else None

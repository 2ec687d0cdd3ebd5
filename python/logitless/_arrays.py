# SPDX-License-Identifier: Apache-2.0
"""Checks of NumPy arrays, and their conversion to f32, for the bindings that take NumPy arrays. A
number that would become 0 or infinite in f32 is an error."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from logitless import _vocabulary
from logitless._abi import F32_RANGE
from logitless._errors import error_of, invalid, placed, wrong_dtype


def check_unmasked(name: str, value: Any) -> None:
    """Refuses a masked array, whose mask would be ignored."""
    if isinstance(value, np.ma.MaskedArray):
        raise wrong_dtype(f"{name} is a masked array; allowed: an array without a mask (filled())")


def check_real(name: str, dtype: np.dtype[Any]) -> None:
    """Refuses complex numbers, strings and objects, which f32 cannot represent."""
    # ml_dtypes' types have another kind, but can be cast.
    if dtype.kind not in "biuf" and not np.can_cast(dtype, np.float32):
        raise wrong_dtype(f"{name} is {dtype}; allowed: real numbers")


def with_cast(message: str) -> str:
    """The message; if it is about two different dtypes, it also says how to cast."""
    if not message.endswith("the dtype of input"):
        return message
    return f"{message}; use {message.split(' ', 1)[0]}.astype(input.dtype)"


def check_range(target: NDArray[Any], vocab: int, ignore_index: int, shift: int = 0) -> None:
    """Raises if a target [...] is neither a class nor `ignore_index`. The first `shift`
    targets of a sequence are not read, and so not checked."""
    wrong = (target != ignore_index) & ((target < 0) | (target >= vocab))
    if shift and wrong.ndim:
        wrong[..., :shift] = False
    if wrong.any():
        at = int(wrong.argmax())
        raise error_of(
            8,
            placed(
                f"target[{at}] is {target.flat[at]}; allowed: 0 to {vocab - 1}, or ignore_index "
                f"{ignore_index}",
                target.shape,
            ),
        )


def as_f32(name: str, value: Any) -> NDArray[np.float32]:
    """Real numbers, rounded to f32. A number that would round to 0 or infinity is refused, because
    a weight of 0 does not mean the same as a small one."""
    check_unmasked(name, value)
    given = np.asarray(value)
    check_real(name, given.dtype)
    with np.errstate(over="ignore", under="ignore"):
        held = given.astype(np.float32)
    if given.dtype.kind == "f" and given.itemsize > 4:
        lost = ((held == 0) != (given == 0)) | (np.isinf(held) & ~np.isinf(given))
        if lost.any():
            first = np.unravel_index(int(lost.argmax()), lost.shape)
            place = f"[{', '.join(map(str, map(int, first)))}]" if first else ""
            raise invalid(f"{name}{place} is {given[first]}; allowed: {F32_RANGE}")
    return held


def sorted_list(
    name: str, ids: NDArray[Any], vocab: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A list of rows in ascending order, and each row's place in the given list. Raises for an id
    that is outside the vocabulary or given twice."""
    outside = (ids < 0) | (ids >= vocab)
    if outside.any():
        place = int(outside.argmax())
        raise _vocabulary.wrong_id(name, place, int(ids[place]), vocab)
    order = np.argsort(ids, kind="stable")
    ordered = ids[order].astype(np.int64)
    twice = ordered[1:] == ordered[:-1]
    if twice.any():
        again = int(twice.argmax())
        first, place = int(order[again]), int(order[again + 1])
        raise _vocabulary.given_twice(name, place, first, int(ids[place]))
    return ordered, order


def places_in(
    target: NDArray[Any], ordered: NDArray[np.int64], order: NDArray[np.int64], ignored: int,
    shift: int, name: str, listed: str,
) -> NDArray[np.int64]:  # fmt: skip
    """The place of each target (or id) in a list of rows, from the result of sorted_list; ABSENT
    for targets that are `ignored`. `name` and `listed` are the names of both in messages."""
    at = np.searchsorted(ordered, target).clip(max=len(ordered) - 1)
    counts = target != ignored
    missing = counts & (ordered[at] != target)
    if shift:  # the shift drops the first targets, so they are not read
        missing[..., :shift] = False
    if missing.any():
        place = int(missing.argmax())
        value = int(target.flat[place])
        raise _vocabulary.not_listed(name, place, value, target.shape, listed, ignored)
    return np.where(counts, order[at], _vocabulary.ABSENT)

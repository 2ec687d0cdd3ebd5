# SPDX-License-Identifier: Apache-2.0
"""A list of rows as the vocabulary: checks and errors that all bindings share. The contract is
docs/semantics.md, "A list of rows as the vocabulary"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from logitless._errors import (
    LogitlessError,
    error_of,
    invalid,
    not_supported,
    placed,
    wrong_dtype,
    wrong_shape,
)

ABSENT = -1  # an absent id; in a call on listed rows also an ignored target


def check_list(name: str, dtype: str, shape: Sequence[int], vocab: Any, rows: Any = None) -> None:
    """Checks the dtype and shape of a list of rows. `rows`: the number of ids that it must have, if
    not None."""
    if dtype not in ("int32", "int64"):
        raise wrong_dtype(f"{name} is {dtype}; allowed: int32, int64")
    if rows is not None and tuple(shape) != (rows,):
        raise wrong_shape(
            f"{name} has shape {tuple(shape)}; allowed: ({rows},), an id for each row of "
            "linear_weight"
        )
    if len(shape) != 1 or not 1 <= shape[0] <= vocab:
        raise wrong_shape(
            f"{name} has shape {tuple(shape)}; allowed: (V',), of 1 to {vocab} ids, each once"
        )


def wrong_id(name: str, place: int, value: int, vocab: int) -> LogitlessError:
    return invalid(f"{name}[{place}] is {value}; allowed: 0 to {vocab - 1}, each once")


def given_twice(name: str, place: int, first: int, value: int) -> LogitlessError:
    return invalid(f"{name}[{place}] is {value}, as {name}[{first}] is; allowed: each id once")


def not_listed(
    name: str, place: int, value: int, shape: Sequence[int], listed: str, ignored: int
) -> LogitlessError:
    """The error about an element that is not in the list. `place` is its flat index in a target, or
    in ids [..., K], of this `shape`."""
    none = f"ignore_index ({ignored})"
    where = f"{name}[{place}]"
    if name == "ids":
        none = "-1 for none"
        row, column = divmod(place, shape[-1])
        where, shape = f"ids[{row}, {column}]", shape[:-1]
    message = f"{where} is {value}, which is not in {listed}; allowed: an id of the list, or {none}"
    return error_of(8, placed(message, shape, name=name))


def check_over(over: Any) -> bool:
    """Whether `over` means a softmax over the chosen ids alone; raises if it is not allowed."""
    if over not in ("vocab", "ids"):
        raise invalid(f"over is {over!r}; allowed: 'vocab', 'ids'")
    return bool(over == "ids")


def refuse_beside_ids(vocab_ids: Any, return_statistics: Any) -> None:
    """Refuses arguments that are not allowed with a softmax over the chosen ids alone."""
    if vocab_ids is not None:
        raise not_supported(
            "vocab_ids is given with over='ids'; allowed: None, because ids alone count"
        )
    if return_statistics not in ((), [], None):
        raise not_supported(
            f"return_statistics is {return_statistics!r} with over='ids'; allowed: (), because "
            "the other columns are not computed"
        )


def both_given() -> LogitlessError:
    return invalid(
        "vocab_ids and teacher_vocab_ids are both given; allowed: one of them: the first "
        "chooses rows of both heads; with the second, linear_weight holds the chosen rows already"
    )


def no_teacher() -> LogitlessError:
    return invalid(
        "teacher_vocab_ids is given without a teacher's head; allowed: teacher_weight or "
        "teacher_logits, whose rows or columns it chooses"
    )


def wrong_extent(name: str, shape: Sequence[int], vocab: Any, last: bool = False) -> LogitlessError:
    """The error about a tensor whose vocabulary dimension is not V. The core cannot find this
    error, because it gets only the listed rows."""
    of = "last" if last else "first"
    return wrong_shape(
        f"{name} has shape {tuple(shape)}; allowed: {vocab} in its {of} dimension, the vocabulary's"
    )

# SPDX-License-Identifier: Apache-2.0
"""The statistics of a token, in one table for all bindings. docs/semantics.md defines them."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from logitless._errors import invalid, wrong_dtype

A = TypeVar("A")


class Statistic(NamedTuple):
    """What the bindings must know about a statistic."""

    formula: str
    differentiable: bool = False
    indexes: bool = False  # an integer, not f32
    extra: bool = False  # Combine needs it from each shard, besides what every loss needs
    of_whole_rows: bool = False  # not available for a shard of the vocabulary
    of_target: bool = False  # it needs a target


STATISTICS = {
    "lse": Statistic("log of the sum of exp(logits)", differentiable=True),
    "target_logit": Statistic("the target's logit", differentiable=True, of_target=True),
    "logprob": Statistic("target_logit - lse, at most 0", differentiable=True, of_target=True),
    "entropy": Statistic("-sum p log p", differentiable=True, extra=True),
    "argmax": Statistic("the lowest column of the largest logit", indexes=True),
    "rank": Statistic(
        "how many logits exceed the target's", indexes=True, of_whole_rows=True, of_target=True
    ),
    "sum_p_squared": Statistic("sum p^2", extra=True),
    "mean_logit": Statistic("the logits' mean", extra=True),
    "max_logprob": Statistic("the largest logit - lse", extra=True),
    "mass_above": Statistic(
        "sum p of the columns that rank counts", of_whole_rows=True, of_target=True
    ),
}
OF_ROWS = {name: statistic for name, statistic in STATISTICS.items() if not statistic.of_target}


def listed(table: Mapping[str, Statistic]) -> str:
    """A table of statistics as a list for a docstring."""
    return "\n".join(f"- `{name}`: {formula_of(statistic)}" for name, statistic in table.items())


def formula_of(statistic: Statistic) -> str:
    return f"{statistic.formula}{'; differentiable' if statistic.differentiable else ''}"


def describe(cls: Any, table: Mapping[str, Statistic]) -> None:
    """Sets the docstrings of the fields of `cls`, a NamedTuple of statistics."""
    for name, statistic in table.items():
        getattr(cls, name).__doc__ = formula_of(statistic)


StatisticName: TypeAlias = Literal[
    "lse", "target_logit", "logprob", "entropy", "argmax", "rank", "sum_p_squared", "mean_logit",
    "max_logprob", "mass_above",
]  # fmt: skip

# The statistics that a call without targets can return.
RowStatisticName: TypeAlias = Literal[
    "lse", "entropy", "argmax", "sum_p_squared", "mean_logit", "max_logprob"
]

if TYPE_CHECKING:

    class Statistics(NamedTuple, Generic[A]):
        lse: A | None = None
        target_logit: A | None = None
        logprob: A | None = None
        entropy: A | None = None
        argmax: A | None = None
        rank: A | None = None
        sum_p_squared: A | None = None
        mean_logit: A | None = None
        max_logprob: A | None = None
        mass_above: A | None = None

else:
    # Python 3.10 has no NamedTuple of a type variable.
    Statistics = collections.namedtuple(
        "Statistics", STATISTICS, defaults=(None,) * len(STATISTICS), module=__name__
    )
    Statistics.__class_getitem__ = classmethod(lambda cls, _: cls)
    Statistics.__doc__ = (
        "Statistics of every token, in the shape of the tokens; None where not asked for. argmax "
        "and rank are integers, int64 or in JAX int32; the others are f32.\n\n"
    ) + listed(STATISTICS)
    describe(Statistics, STATISTICS)


def names_of(names: Any, table: Mapping[str, Statistic] = STATISTICS) -> tuple[str, ...]:
    """The names of statistics that the caller asks for, each once, in the table's order."""
    if isinstance(names, str):
        names = (names,)
    allowed = ", ".join(map(repr, table))
    if not isinstance(names, (tuple, list, set, frozenset)):
        raise wrong_dtype(
            f"return_statistics is {names!r}; allowed: {allowed}, or a tuple of these"
        )
    for name in names:
        if not isinstance(name, str) or name not in table:
            raise invalid(f"return_statistics is {name!r}; allowed: {allowed}")
    return tuple(name for name in table if name in names)


def names_where(field: str) -> Sequence[str]:
    """The statistics for which that field of the table is true."""
    return [name for name, statistic in STATISTICS.items() if getattr(statistic, field)]

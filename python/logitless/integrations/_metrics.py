# SPDX-License-Identifier: Apache-2.0
"""Metrics of a patched model's calls: means of statistics over the tokens that count.

They are kept as sums of each sequence, in f64 and without a wait for the device: a Trainer adds
those of many calls, weighed by tokens, and drops sequences that a process was given twice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from logitless._errors import invalid
from logitless._statistics import StatisticName
from logitless.torch import cross_entropy
from logitless.torch._functions import _moved

# The statistic from which each is made. Accuracy is not rank 0, which all of several equal largest
# logits have: the first of them is predicted, as by torch's argmax.
METRICS: dict[str, StatisticName] = {
    "accuracy": "argmax", "entropy": "entropy", "logprob": "logprob", "rank": "rank",
}  # fmt: skip
COUNT = "tokens"
_MOST = 256  # calls in a Trainer's step; what others make is not kept for ever


def names_of(metrics: Any) -> tuple[str, ...]:
    """The metrics asked for, each once, in the order of METRICS."""
    allowed = ", ".join(map(repr, METRICS))
    given = (metrics,) if isinstance(metrics, str) else metrics
    if not isinstance(given, (tuple, list, set, frozenset)):
        raise invalid(f"metrics is {metrics!r}; allowed: a tuple of {allowed}")
    for name in given:
        if not isinstance(name, str) or name not in METRICS:
            raise invalid(f"metrics has {name!r}; allowed: {allowed}")
    return tuple(name for name in METRICS if name in given)


class Tally:
    """The sums that a model's calls made, until its Trainer takes them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.watched = False
        self.made: deque[Tensor] = deque(maxlen=_MOST)
        self.last: Tensor | None = None

    def __reduce__(self) -> Any:
        """Copies begin anew: nobody watches them."""
        return Tally, (self.names,)

    def add(self, sums: Tensor) -> None:
        if torch.compiler.is_compiling():
            self.last = sums  # compiled code that only writes is not compiled anew
        elif self.watched:
            self.made.append(sums)

    def take(self) -> list[Tensor]:
        made, self.made = self.made, deque(maxlen=_MOST)
        last, self.last = self.last, None
        return [*made, *(() if last is None else (last,))]


def target_of(labels: Tensor, shifted: bool, ignore_index: int) -> Tensor:
    """The token after each position, [B, T]; `shifted`: the labels are that already."""
    return labels if shifted else _moved(labels, 1, ignore_index)


def sums_of(statistics: Any, target: Tensor, ignore_index: int, names: Sequence[str]) -> Tensor:
    """[B, 1 + K] f64: how many tokens of each sequence count, and the sum of each metric."""
    counts = target != ignore_index
    made = [counts]
    for name in names:
        value = getattr(statistics, METRICS[name])
        made.append((value == target) & counts if name == "accuracy" else value * counts)
    rows = target.shape[0] if target.dim() > 1 else 1
    return torch.stack([v.reshape(rows, -1).sum(-1, dtype=torch.float64) for v in made], -1)


def of_logits(
    logits: Tensor, target: Tensor, ignore_index: int, names: Sequence[str]
) -> Tensor:  # fmt: skip
    """The sums of a call that made its logits."""
    with torch.no_grad():
        _, statistics = cross_entropy(
            logits.detach(), target.to(logits.device), reduction="sum", ignore_index=ignore_index,
            return_statistics=[METRICS[name] for name in names],
        )  # fmt: skip
        return sums_of(statistics, target.to(logits.device), ignore_index, names)


def means_of(sums: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """The metrics [] f32 of a call, and how many tokens they are means of; NaN if none is."""
    count, *totals = sums.sum(0)
    return {name: (total / count).float() for name, total in zip(names, totals)} | {
        COUNT: count.float()
    }


def _values_of(output: Any) -> dict[str, Any]:
    return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}


def _reduce(output: Any) -> Any:
    """By the class that it was made of: this one has no name that pickle would find."""
    return _made, (type(output).__mro__[1], _values_of(output))


def _made(cls: type, values: dict[str, Any]) -> Any:
    return with_metrics(cls)(**values)


@functools.cache
def _class_with_metrics(cls: Any) -> Any:
    return dataclasses.make_dataclass(
        cls.__name__, [("metrics", Any, None)], bases=(cls,),
        namespace={"__reduce__": _reduce, "__doc__": cls.__doc__, "__module__": cls.__module__},
    )  # fmt: skip


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator,unused-ignore]
def with_metrics(cls: Any) -> Any:
    """The class of outputs with one more field. A field, because what only is an attribute or a key
    is lost or refused where outputs are taken apart and put together (FSDP, DDP, pytrees)."""
    return _class_with_metrics(cls)


def added(output: Any, metrics: dict[str, Tensor]) -> Any:
    """The output with them."""
    return with_metrics(type(output))(**_values_of(output), metrics=metrics)

# SPDX-License-Identifier: Apache-2.0
"""Metrics of a patched model's calls: means of statistics over the tokens that count.

They are stored as sums over each sequence, in f64, on the device, so that the host never waits. A
Trainer adds the sums of many calls, so that every token has the same weight, and drops sequences
that a sampler repeated.
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

# The statistic from which each metric is computed. Accuracy does not use rank 0, which all of
# several equal largest logits have: only the first of them is predicted, as with torch's argmax.
METRICS: dict[str, StatisticName] = {
    "accuracy": "argmax", "entropy": "entropy", "logprob": "logprob", "rank": "rank",
}  # fmt: skip
COUNT = "tokens"
_MOST = 256  # calls in a Trainer's step, at most; a bound, in case nobody takes the sums


def names_of(metrics: Any) -> tuple[str, ...]:
    """The names of metrics that the caller asks for, each once, in the order of METRICS."""
    allowed = ", ".join(map(repr, METRICS))
    given = (metrics,) if isinstance(metrics, str) else metrics
    if not isinstance(given, (tuple, list, set, frozenset)):
        raise invalid(f"metrics is {metrics!r}; allowed: a tuple of {allowed}")
    for name in given:
        if not isinstance(name, str) or name not in METRICS:
            raise invalid(f"metrics has {name!r}; allowed: {allowed}")
    return tuple(name for name in METRICS if name in given)


class Tally:
    """The sums of a model's calls, until its Trainer takes them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.watched = False
        self.made: deque[Tensor] = deque(maxlen=_MOST)
        self.last: Tensor | None = None

    def __reduce__(self) -> Any:
        """A copy is empty and is not watched."""
        return Tally, (self.names,)

    def add(self, sums: Tensor) -> None:
        if torch.compiler.is_compiling():
            self.last = sums  # only written, which never makes torch recompile
        elif self.watched:
            self.made.append(sums)

    def take(self) -> list[Tensor]:
        made, self.made = self.made, deque(maxlen=_MOST)
        last, self.last = self.last, None
        return [*made, *(() if last is None else (last,))]


def target_of(labels: Tensor, shifted: bool, ignore_index: int) -> Tensor:
    """The token after each position, [B, T]. `shifted`: the labels already are these tokens."""
    return labels if shifted else _moved(labels, 1, ignore_index)


def sums_of(statistics: Any, target: Tensor, ignore_index: int, names: Sequence[str]) -> Tensor:
    """[B, 1 + K] f64: for each sequence the number of tokens that count, and the sum of each of K
    metrics."""
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
    """The sums of a call whose logits exist."""
    with torch.no_grad():
        _, statistics = cross_entropy(
            logits.detach(), target.to(logits.device), reduction="sum", ignore_index=ignore_index,
            return_statistics=[METRICS[name] for name in names],
        )  # fmt: skip
        return sums_of(statistics, target.to(logits.device), ignore_index, names)


def means_of(sums: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """The metrics of a call, [] f32 each, and the number of tokens that they are means of. The
    metrics are NaN if no token counts."""
    count, *totals = sums.sum(0)
    return {name: (total / count).float() for name, total in zip(names, totals)} | {
        COUNT: count.float()
    }


def _values_of(output: Any) -> dict[str, Any]:
    return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}


def _reduce(output: Any) -> Any:
    """Pickles an output by the class that with_metrics was called with, because pickle cannot find
    the class that it made."""
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
    """The class of outputs with the additional field `metrics`. A mere attribute or key would be
    lost or refused when outputs are taken apart and rebuilt (by FSDP, DDP, pytrees)."""
    return _class_with_metrics(cls)


def added(output: Any, metrics: dict[str, Tensor]) -> Any:
    """The output with these metrics."""
    return with_metrics(type(output))(**_values_of(output), metrics=metrics)

# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing: every contender once a round; each follows each other equally often."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# Idle OpenMP workers spin for milliseconds and would slow down the next contender.
PAUSE_SECONDS = 0.02


class TooSlow(Exception):
    pass


@contextmanager
def cap(seconds: float) -> Iterator[None]:
    """Raises TooSlow once Python code runs after `seconds`; one long native call is not cut."""

    def stop(_signal: int, _frame: Any) -> None:
        raise TooSlow

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def nothing() -> None:
    pass


@dataclass
class Contender:
    name: str
    call: Callable[[], float | None]  # timed; returns the loss if there is one
    prepare: Callable[[], None] = nothing  # before each call, not timed
    release: Callable[[], None] = nothing  # after each call, not timed
    compiles: bool = False  # whether its first call compiles
    facts: dict[str, Any] = field(default_factory=dict)
    status: str = "ok"
    samples: list[float] = field(default_factory=list)  # seconds
    loss: float | None = None

    @property
    def ok(self) -> bool:
        return self.status == "ok" and bool(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def once(self, seconds: float) -> float:
        """Makes one call, at most about `seconds` long, and returns its seconds."""
        self.prepare()
        time.sleep(PAUSE_SECONDS)
        try:
            with cap(seconds):
                start = time.perf_counter()
                self.loss = self.call()
                took = time.perf_counter() - start
        finally:
            self.release()
        if took > seconds:
            raise TooSlow
        return took


def balanced_orders(count: int, rounds: int) -> list[list[int]]:
    """Rows of a Williams design: in `count` rounds (twice that where it is odd) every contender
    takes every place, and follows every other, equally often."""
    first = [0]
    for step in range(1, count):
        first.append((step + 1) // 2 if step % 2 else count - step // 2)
    rows = [[(place + shift) % count for place in first] for shift in range(count)]
    if count % 2:
        rows += [row[::-1] for row in rows]
    return [rows[i % len(rows)] for i in range(rounds)]


def in_turns(
    names: Iterable[str], rounds: int, sample: Callable[[str], float]
) -> dict[str, list[float]]:
    """The samples of each contender, taken in balanced orders."""
    every = list(names)
    samples: dict[str, list[float]] = {name: [] for name in every}
    for order in balanced_orders(len(every), rounds):
        for i in order:
            samples[every[i]].append(sample(every[i]))
    return samples


def _attempt(contender: Contender, seconds: float) -> float | None:
    try:
        return contender.once(seconds)
    except TooSlow:
        contender.status = f"too slow: more than {seconds:.0f} s"
    except Exception as failure:  # a peer may fail in any way; the others go on
        text = str(failure).strip() or "no message"
        contender.status = f"failed: {type(failure).__name__}: {text.splitlines()[0][:160]}"
    return None


def measure(
    contenders: list[Contender], rounds: int, budget: float, cap_seconds: float, least: int = 3
) -> int:
    """Fills the contenders' samples; returns the rounds run: as many as fit `budget` seconds, from
    `least` to `rounds`. A contender that fails or passes the cap is left out and says so."""
    total = 0.0
    for c in contenders:
        if c.status != "ok":
            continue
        first = _attempt(c, max(cap_seconds, 300.0) if c.compiles else cap_seconds)
        if first is not None and c.compiles:
            first = _attempt(c, cap_seconds)
        total += first or 0.0
    alive = [c for c in contenders if c.status == "ok"]
    rounds = max(min(least, rounds), min(rounds, int(budget / max(total, 1e-3))))
    for order in balanced_orders(len(alive), rounds):
        for c in (alive[i] for i in order):
            if c.status != "ok":
                continue
            seconds = _attempt(c, cap_seconds)
            if seconds is not None:
                c.samples.append(seconds)
    return rounds

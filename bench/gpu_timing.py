# SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of calls that are enqueued on one device's stream.

Bursts: as many calls as fill some milliseconds, contenders interleaved in balanced orders, the
median of the rounds. Steady: each contender alone in a loop of seconds, at the clocks the power
limit leaves it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from timing import TooSlow, balanced_orders, cap

MIB = 1 << 20


@dataclass
class Contender:
    name: str
    call: Callable[[], object]
    base: str = ""  # name of the contender that the ratio is relative to
    ours: bool = False
    facts: dict[str, object] = field(default_factory=dict)
    repeats: int = 1
    samples: list[float] = field(default_factory=list)  # milliseconds a call

    @property
    def ms(self) -> float:
        return statistics.median(self.samples)


class Clock:
    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def __call__(self, call: Callable[[], object], repeats: int = 1) -> float:
        """Milliseconds a call, by the device's own clock."""
        if not self.cuda:
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            return (time.perf_counter() - start) * 1e3 / repeats
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(repeats):
            call()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / repeats

    def peak(self, call: Callable[[], object]) -> int | None:
        """Bytes PyTorch's allocator holds at most beyond what it held before the call."""
        if not self.cuda:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def reason(failure: Exception) -> str:
    """The failure as one line."""
    text = str(failure).strip() or "no message"
    return f"{type(failure).__name__}: {text.splitlines()[0][:200]}"


def first_calls(clock: Clock, contender: Contender, seconds: float, burst: float) -> str | None:
    """The contender's first calls, within about `seconds`. Returns why they failed, or None."""
    try:
        with cap(seconds):
            start = time.perf_counter()
            contender.call()
            clock.synchronize()
            contender.facts["first_call_s"] = time.perf_counter() - start
            contender.repeats = max(1, round(burst * 1e3 / max(clock(contender.call), 1e-3)))
    except TooSlow:
        return f"no result within {seconds:.0f} s"
    except Exception as failure:  # a peer may fail in any way; the others go on
        return reason(failure)
    return None


def bursts(clock: Clock, contenders: list[Contender], rounds: int) -> None:
    for order in balanced_orders(len(contenders), rounds):
        for c in (contenders[i] for i in order):
            c.samples.append(clock(c.call, c.repeats))


def steady(clock: Clock, call: Callable[[], object], seconds: float) -> float:
    """Milliseconds a call in a loop of `seconds`, after a quarter of that to warm up."""
    each = max(clock(call), 1e-3)
    each = clock(call, max(1, round(seconds * 250 / each)))
    return clock(call, max(2, round(seconds * 1e3 / max(each, 1e-3))))

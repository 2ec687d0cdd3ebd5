# SPDX-License-Identifier: Apache-2.0
"""The time and memory of one LM head on random data, of three contenders: this library, the matrix
products that cannot be avoided, and torch.compile of the formula. They take turns in bursts of
calls, in an order that is reversed every round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.torch import linear_cross_entropy, linear_logprob

MIB = 1 << 20
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
SECTIONS = {  # the number of matrix products whose time each one is compared with
    "loss + gradients": 3,
    "none + gradients": 3,
    "log-probability + entropy": 3,
    "loss": 1,
}
Calls = dict[str, Callable[[], None]]
Figures = dict[str, dict[str, Any]]


class Head(NamedTuple):
    name: str
    dtype: str
    tokens: int
    hidden: int
    vocab: int


def _mean(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy((x @ w.t()).float(), t)


def _none(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy((x @ w.t()).float(), t, reduction="none")


def _logprob(x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax((x @ w.t()).float(), -1)
    return logp.gather(-1, t[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


class Bench:
    """The operands of a head, and its contenders."""

    def __init__(self, head: Head, device: str) -> None:
        dtype = DTYPES[head.dtype]
        torch.manual_seed(0)
        x = torch.randn(head.tokens, head.hidden, device=device)
        w = torch.randn(head.vocab, head.hidden, device=device) / head.hidden**0.5
        self.x, self.w = x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()
        self.t = torch.randint(0, head.vocab, (head.tokens,), device=device)
        self.upstream = [torch.randn(head.tokens, device=device) for _ in range(2)]
        # A loss scale for f16, as training uses it: without it the gradients of a mean's logits are
        # 0 in f16 except at the targets, and products of zeros take less power and time.
        self.factor = torch.tensor(2.0**16 if head.dtype == "f16" else 1.0, device=device)
        padded = (head.vocab + 63) // 64 * 64
        self.padded = torch.zeros(padded, head.hidden, device=device, dtype=dtype)
        self.padded[: head.vocab] = self.w.detach()

    def products(self, count: int) -> None:
        input = self.x.detach()
        logits = input @ self.padded.t()
        if count == 3:
            logits @ self.padded
            logits.t() @ input

    def _both(self, loss: Callable[..., Any], *upstream: Tensor) -> None:
        self.x.grad = self.w.grad = None
        outputs = loss(self.x, self.w, self.t)
        torch.autograd.backward(outputs if isinstance(outputs, tuple) else (outputs,), upstream)

    def _alone(self, loss: Callable[..., Any]) -> None:
        with torch.no_grad():
            loss(self.x, self.w, self.t)

    def ours(self) -> Calls:
        def none(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
            return linear_cross_entropy(x, w, t, reduction="none")

        def logprob(x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            return linear_logprob(x, w, t, entropy=True)

        return self._calls("ours", linear_cross_entropy, none, logprob)

    def compiled(self) -> Calls:
        torch._dynamo.reset()  # after eight shapes torch.compile would silently run eagerly
        return self._calls("compile", *map(torch.compile, (_mean, _none, _logprob)))

    def _calls(self, who: str, mean: Any, none: Any, logprob: Any) -> Calls:
        calls: Calls = {
            "loss + gradients": lambda: self._both(mean, self.factor),
            "none + gradients": lambda: self._both(none, self.upstream[0]),
            "log-probability + entropy": lambda: self._both(logprob, *self.upstream),
            "loss": lambda: self._alone(mean),
        }
        return {f"{section}, {who}": call for section, call in calls.items()}

    def floors(self) -> Calls:
        return {f"{n} products": lambda n=n: self.products(n) for n in (3, 1)}  # type: ignore[misc]

    def wait(self) -> None:
        if self.x.is_cuda:
            torch.cuda.synchronize()

    def burst(self, call: Callable[[], None], seconds: float) -> float:
        """Milliseconds per call, as the mean over the calls that fit into `seconds`, at least
        two."""
        self.wait()
        start, count = time.perf_counter(), 0
        while count < 2 or time.perf_counter() - start < seconds:
            call()
            count += 1
            if count % 8 == 0:
                self.wait()
        self.wait()
        return (time.perf_counter() - start) * 1e3 / count

    def peak(self, call: Callable[[], None]) -> float | None:
        """The largest number of MiB that torch has allocated during a call, beyond the inputs and
        their gradients; None on the CPU."""
        if not self.x.is_cuda:
            return None
        self.x.grad = self.w.grad = None
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        self.wait()
        grads = [v.grad for v in (self.x, self.w) if v.grad is not None]
        held = sum(g.numel() * g.element_size() for g in grads)
        return (torch.cuda.max_memory_allocated() - before - held) / MIB


def measure(bench: Bench, calls: Calls, rounds: int, seconds: float) -> Figures:
    """{"ms", "samples", "mib"} for each contender: the median of the times of `rounds` rounds, the
    times, and the memory of a call before them. {"failed"} for a contender that raises."""
    figures: Figures = {}
    taken: dict[str, list[float]] = {}
    for name, call in calls.items():
        try:
            call()
            call()
            figures[name] = {"mib": bench.peak(call)}
            taken[name] = []
        except torch.OutOfMemoryError:
            figures[name] = {"failed": "does not fit"}
        except Exception as failure:  # torch.compile may raise any exception
            figures[name] = {"failed": type(failure).__name__}
        if "failed" in figures[name] and bench.x.is_cuda:
            torch.cuda.empty_cache()
    for i in range(rounds):
        for name in list(taken)[:: 1 if i % 2 == 0 else -1]:
            taken[name].append(bench.burst(calls[name], seconds))
    for name, times in taken.items():
        figures[name]["ms"] = statistics.median(times)
        figures[name]["samples"] = times
    return figures


def of_sections(calls: Calls, sections: Iterable[str]) -> Calls:
    """Those of the calls that belong to these sections."""
    chosen = tuple(sections)
    return {name: call for name, call in calls.items() if name.rpartition(", ")[0] in chosen}


def ratio(figures: Figures, section: str, who: str) -> float | None:
    """The time of a contender, divided by that of the section's matrix products."""
    found = figures.get(f"{section}, {who}", {}).get("ms")
    floor = figures.get(f"{SECTIONS[section]} products", {}).get("ms")
    return found / floor if found and floor else None

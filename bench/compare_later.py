# SPDX-License-Identifier: Apache-2.0
"""Gradients that arrive after the loss, beside the mean whose gradient is known: ours with state
kept between forward and backward (the default), in less memory, without it, and torch.compile.

    LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python python bench/compare_later.py \
        --shapes 8192x4096x128256,8192x2048x151936

`--only TEXT` picks contenders; then the log-probability with a temperature, with other statistics
and with an upstream gradient for a quarter of the rows at random is among them too.

One process; all take turns in bursts, in an order that turns round every round; medians of
`--rounds`, by the host's clock around bursts that are waited for. bf16, random data and upstream
gradients. Beside them three bare cuBLAS products of the same operands (V to a multiple of 64). MiB:
the allocator's peak beyond the inputs and their gradients. Needs a GPU; `--shapes 64x32x300` tries
it anywhere, and its figures mean nothing."""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitless import torch as logitless

MIB = 1 << 20


class Head:
    def __init__(self, tokens: int, hidden: int, vocab: int, device: str) -> None:
        torch.manual_seed(0)
        self.input = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_()
        weight = torch.randn(vocab, hidden, device=device) / hidden**0.5
        self.weight = weight.bfloat16().requires_grad_()
        self.target = torch.randint(0, vocab, (tokens,), device=device)
        self.upstream = [torch.randn(tokens, device=device) for _ in range(2)]
        some = torch.rand(tokens, device=device) < 0.25
        self.quarter = [upstream * some for upstream in self.upstream]
        self.temperature = torch.full((tokens,), 0.7, device=device)
        padded = (vocab + 63) // 64 * 64
        self.padded = torch.zeros(padded, hidden, device=device, dtype=torch.bfloat16)
        self.padded[:vocab] = self.weight.detach()

    def backward(self, results: Any, upstream: list[Tensor] | None = None) -> None:
        outputs = results if isinstance(results, tuple) else (results,)
        torch.autograd.backward(outputs, (upstream or self.upstream)[: len(outputs)])

    def products(self) -> None:
        input = self.input.detach()
        logits = input @ self.padded.t()
        logits @ self.padded
        logits.t() @ input


def compiled_logprob(entropy: bool) -> Callable[[Tensor, Tensor, Tensor], Any]:
    def call(input: Tensor, weight: Tensor, target: Tensor) -> Any:
        logp = torch.log_softmax((input @ weight.t()).float(), -1)
        logprob = logp.gather(1, target[:, None])[:, 0]
        return (logprob, -(logp.exp() * logp).sum(-1)) if entropy else logprob

    return torch.compile(call)


def contenders(head: Head, less: int) -> dict[str, Callable[[], None]]:
    x, w, t = head.input, head.weight, head.target
    compiled = {entropy: compiled_logprob(entropy) for entropy in (False, True)}

    def fresh(call: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            x.grad = w.grad = None
            call()

        return run

    def logprob(memory: int | None, entropy: bool) -> None:
        head.backward(logitless.linear_logprob(x, w, t, entropy=entropy, memory=memory))

    def warm(temperature: float | Tensor) -> None:
        head.backward(logitless.linear_logprob(x, w, t, temperature=temperature))

    def quarter(memory: int | None, entropy: bool) -> None:
        results = logitless.linear_logprob(x, w, t, entropy=entropy, memory=memory)
        head.backward(results, head.quarter)

    def detached() -> None:
        results = logitless.linear_logprob(x, w, t, entropy="detached")
        head.backward(results[0])

    def statistics_alone(*names: str) -> None:
        with torch.no_grad():
            logitless.linear_cross_entropy(x, w, t, reduction="none", return_statistics=names)

    def forward_alone() -> None:
        with torch.no_grad():
            logitless.linear_logprob(x, w, t, entropy=True)

    return {
        "three cuBLAS products": head.products,
        "mean": fresh(lambda: logitless.linear_cross_entropy(x, w, t).backward()),
        "none": fresh(
            lambda: head.backward(logitless.linear_cross_entropy(x, w, t, reduction="none"))
        ),
        "log-probability": fresh(lambda: logprob(None, False)),
        "log-probability + entropy": fresh(lambda: logprob(None, True)),
        f"the same in {less // MIB} MiB": fresh(lambda: logprob(less, True)),
        "the same, forward alone": fresh(forward_alone),
        "temperature 0.7": fresh(lambda: warm(0.7)),
        "a temperature of each token": fresh(lambda: warm(head.temperature)),
        "entropy detached": fresh(detached),
        "a quarter of the rows": fresh(lambda: quarter(None, False)),
        "a quarter, + entropy": fresh(lambda: quarter(None, True)),
        f"a quarter in {less // MIB} MiB": fresh(lambda: quarter(less, False)),
        "forward alone, log-probability": fresh(lambda: statistics_alone("logprob")),
        "forward alone, rank": fresh(lambda: statistics_alone("logprob", "rank")),
        "forward alone, sum_p_squared": fresh(lambda: statistics_alone("logprob", "sum_p_squared")),
        "forward alone, all": fresh(
            lambda: statistics_alone("logprob", "entropy", "rank", "sum_p_squared", "mean_logit")
        ),
        "torch.compile, log-probability": fresh(lambda: head.backward(compiled[False](x, w, t))),
        "torch.compile, both": fresh(lambda: head.backward(compiled[True](x, w, t))),
    }


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def burst(call: Callable[[], None], seconds: float, device: str) -> float:
    """Milliseconds of one call, of as many as fill the burst."""
    wait(device)
    start, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - start < seconds:
        call()
        count += 1
        if count % 4 == 0:
            wait(device)
    wait(device)
    return (time.perf_counter() - start) * 1e3 / count


def peak(head: Head, call: Callable[[], None]) -> float:
    head.input.grad = head.weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    grads = sum(
        t.numel() * t.element_size() for t in (head.input, head.weight) if t.grad is not None
    )
    return (torch.cuda.max_memory_allocated() - before - grads) / MIB


LATER = 7  # these 7 contenders run in every comparison

def chosen(calls: dict[str, Callable[[], None]], only: str) -> dict[str, Callable[[], None]]:
    basis = ("three cuBLAS products", "mean")
    later = [*list(calls)[:LATER], *(name for name in calls if name.startswith("torch.compile"))]
    if not only:
        return {name: calls[name] for name in later}
    return {name: call for name, call in calls.items() if name in basis or re.search(only, name)}


def compare(shape: str, device: str, rounds: int, seconds: float, only: str) -> None:
    tokens, hidden, vocab = (int(extent) for extent in shape.split("x"))
    head = Head(tokens, hidden, vocab, device)
    calls = chosen(contenders(head, 64 * MIB + 4 * tokens * hidden), only)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    memory = {}
    for name, call in calls.items():
        for _ in range(2):
            call()
        memory[name] = peak(head, call) if device == "cuda" else 0.0
    for i in range(rounds):
        for name in list(calls)[:: 1 if i % 2 == 0 else -1]:
            taken[name].append(burst(calls[name], seconds, device))
    median = {name: statistics.median(times) for name, times in taken.items()}
    base = median["three cuBLAS products"]
    print(f"{shape}{'':20s} {'ms':>9s} {'x three':>8s} {'x mean':>7s} {'MiB':>7s}")
    for name, ms in median.items():
        row = f"  {name:32s} {ms:9.3f} {ms / base:8.3f} {ms / median['mean']:7.3f}"
        print(f"{row} {memory[name]:7.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="8192x4096x128256,8192x2048x151936")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", default="", help="a regular expression of contenders' names")
    parser.add_argument("--burst", type=float, default=0.25, help="seconds")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, N x D x V, bf16")
    for shape in arguments.shapes.split(","):
        torch._dynamo.reset()
        compare(shape, device, arguments.rounds, arguments.burst, arguments.only)


if __name__ == "__main__":
    main()

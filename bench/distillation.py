# SPDX-License-Identifier: Apache-2.0
"""The recipe of docs/rl.md for a teacher's likeliest tokens on one GPU, compared with the
cross-entropy alone and with logits in chunks of 1024 tokens under torch.utils.checkpoint; loss and
gradients in bf16.

    LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python:examples/python \\
        python bench/distillation.py

Random data; all ways of a head take turns in bursts, in an order that is reversed every round;
medians. x: to three cuBLAS products. MiB: the allocator's peak beyond inputs and gradients."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import rl
import sweep
import torch
from torch.utils.checkpoint import checkpoint

from logitless.torch import linear_cross_entropy

HEADS = [(8192, 4096, 128256), (8192, 2048, 151936)]
CHUNK = 1024


def ways(bench: sweep.Bench, k: int) -> dict[str, Callable[[], Any]]:
    x, w, t = bench.x, bench.w, bench.t
    tokens, vocab = len(x), len(w)
    p = torch.rand(tokens, k, device="cuda").softmax(-1)
    top = torch.randint(0, vocab, (tokens, k), device="cuda")

    def in_chunks() -> Any:
        def part(x: Any, p: Any, top: Any) -> Any:
            return -(p * (x @ w.t()).float().log_softmax(-1).gather(-1, top)).sum()

        rows = zip(x.split(CHUNK), p.split(CHUNK), top.split(CHUNK))
        return sum(checkpoint(part, *each, use_reentrant=False) for each in rows) / tokens

    def both(loss: Callable[[], Any]) -> Callable[[], None]:
        def call() -> None:
            x.grad = w.grad = None
            loss().backward()

        return call

    return {
        "three products": bench.contenders()["3 products"],
        "the plain loss": both(lambda: linear_cross_entropy(x, w, t)),
        "distillation": both(lambda: rl.distillation(x[None], w, t[None], top[None], p[None])),
        f"logits in chunks of {CHUNK}": both(in_chunks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--k", type=int, default=64, help="the teacher's tokens")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    for tokens, hidden, vocab in HEADS:
        print(f"N {tokens}, D {hidden}, V {vocab}, k {given.k}")
        bench = sweep.Bench(sweep.Head("", "bf16", tokens, hidden, vocab), "cuda")
        calls = ways(bench, given.k)
        taken: dict[str, list[float]] = {name: [] for name in calls}
        peaks = {name: bench.peak(call) for name, call in calls.items()}
        for i in range(given.rounds):
            for name in list(calls)[:: 1 if i % 2 == 0 else -1]:
                taken[name].append(bench.burst(calls[name], 0.1))
        ms = {name: statistics.median(times) for name, times in taken.items()}
        for name, time_ in ms.items():
            x = time_ / ms["three products"]
            print(f"  {name:24s} {time_:7.2f} ms  x {x:.3f}  {peaks[name]:6.0f} MiB", flush=True)


if __name__ == "__main__":
    main()

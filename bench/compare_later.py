# SPDX-License-Identifier: Apache-2.0
"""Gradients that arrive after the loss, compared with the mean, whose gradient is known beforehand:
ours with state kept between forward and backward (the default), in less memory, and forward alone,
torch.compile, and the peers of peers_later.py that `--peers` names.

    LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python python bench/compare_later.py \
        --shapes 8192x4096x128256,8192x2048x151936 --peers verl,trl,cce

`--peers-from FOLDER` says where their packages are, unless they are installed. A peer that is
absent or fails is left out, with one line that says so.

`--only TEXT` picks contenders by name, also from those that are left out by default: temperatures,
other statistics, and upstream gradients that are 0 except for a random quarter of the rows.

One process; all take turns in bursts, in an order that is reversed every round; medians of
`--rounds`, by the host's clock around bursts that are waited for. bf16, random data and upstream
gradients. The base is three bare cuBLAS products of the same operands (V to a multiple of 64). MiB:
the allocator's peak beyond the inputs and their gradients. The last column is the relative
difference of a peer's gradient of the input from ours. Needs a GPU; `--shapes 64x32x300` tries it
anywhere, and its figures mean nothing."""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import peers_later
import torch
from torch import Tensor

from logitless import torch as logitless

MIB = 1 << 20
LOGPROB, BOTH = "log-probability", "log-probability + entropy"


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

    def fresh(self, call: Callable[[], None]) -> Callable[[], None]:
        """The call, after dropping the last call's gradients: autograd would add to them."""

        def run() -> None:
            self.input.grad = self.weight.grad = None
            call()

        return run

    def backward(self, results: Any, upstream: list[Tensor] | None = None) -> None:
        outputs = results if isinstance(results, tuple) else (results,)
        torch.autograd.backward(outputs, (upstream or self.upstream)[: len(outputs)])

    def products(self) -> None:
        input = self.input.detach()
        logits = input @ self.padded.t()
        logits @ self.padded
        logits.t() @ input


def contenders(head: Head, less: int) -> dict[str, Callable[[], None]]:
    x, w, t = head.input, head.weight, head.target
    fresh = head.fresh

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

    def forward_alone(entropy: bool) -> None:
        with torch.no_grad():
            logitless.linear_logprob(x, w, t, entropy=entropy)

    return {
        "three cuBLAS products": head.products,
        "mean": fresh(lambda: logitless.linear_cross_entropy(x, w, t).backward()),
        "none": fresh(
            lambda: head.backward(logitless.linear_cross_entropy(x, w, t, reduction="none"))
        ),
        LOGPROB: fresh(lambda: logprob(None, False)),
        BOTH: fresh(lambda: logprob(None, True)),
        f"the same in {less // MIB} MiB": fresh(lambda: logprob(less, True)),
        "the same, forward alone": fresh(lambda: forward_alone(True)),
        "log-probability, forward alone": fresh(lambda: forward_alone(False)),
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
    }


def of_a_peer(head: Head, name: str, peer: peers_later.Peer) -> dict[str, Callable[[], None]]:
    tensors = head.input, head.weight, head.target

    def train(call: peers_later.Call) -> None:
        head.backward(call(*tensors))

    def forward_alone(call: peers_later.Call) -> None:
        with torch.no_grad():
            call(*tensors)

    calls = {}
    for what, call in (("log-probability", peer.logprob), ("both", peer.both)):
        if call is not None:
            calls[f"{name}, {what}"] = head.fresh(partial(train, call))
            calls[f"{name}, {what}, forward alone"] = head.fresh(partial(forward_alone, call))
    return calls


def peers(head: Head, names: list[str]) -> dict[str, Callable[[], None]]:
    calls = of_a_peer(head, "torch.compile", peers_later.compiled())
    for name in names:
        try:
            calls |= of_a_peer(head, name, peers_later.PEERS[name]())
        except Exception as error:  # packages raise many types if something is missing
            left_out(name, error)
    return calls


def left_out(name: str, error: Exception) -> None:
    text = (str(error).splitlines() or [""])[0]
    print(f"  {name} is left out: {type(error).__name__}: {text[:160]}", flush=True)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def burst(call: Callable[[], None], seconds: float, device: str) -> float:
    """Milliseconds per call, over a burst of calls."""
    wait(device)
    start, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - start < seconds:
        call()
        count += 1
        if count % 4 == 0:
            wait(device)
    wait(device)
    return (time.perf_counter() - start) * 1e3 / count


def medians(
    calls: dict[str, Callable[[], None]], rounds: int, seconds: float, device: str
) -> dict[str, float]:
    """The median milliseconds of each call. They take turns; every other round is reversed."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in list(calls)[:: 1 if i % 2 == 0 else -1]:
            taken[name].append(burst(calls[name], seconds, device))
    return {name: statistics.median(times) for name, times in taken.items()}


def peak(head: Any, call: Callable[[], None]) -> float:
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


LATER = 8  # contenders, from the first, that run without `--only`


def chosen(calls: dict[str, Callable[[], None]], only: str) -> dict[str, Callable[[], None]]:
    basis = ("three cuBLAS products", "mean")
    return {name: call for name, call in calls.items() if name in basis or re.search(only, name)}


class Warm:
    """Contenders that have run twice, with their memory and the difference of their gradients."""

    def __init__(self, head: Head, device: str) -> None:
        self.head, self.device = head, device
        self.calls: dict[str, Callable[[], None]] = {}
        self.mib: dict[str, float] = {}
        self.off: dict[str, float] = {}  # relative difference from our gradients
        self._gradients: dict[str, Tensor] = {}

    def add(self, name: str, call: Callable[[], None]) -> None:
        for _ in range(2):
            call()
        self._compare(name)
        self.mib[name] = peak(self.head, call) if self.device == "cuda" else 0.0
        self.calls[name] = call

    def add_peer(self, name: str, call: Callable[[], None]) -> None:
        try:
            self.add(name, call)
        except Exception as error:  # out of memory, an unsupported shape, ...
            left_out(name, error)
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _compare(self, name: str) -> None:
        gradient = self.head.input.grad
        if gradient is None:
            return
        if name in (LOGPROB, BOTH):
            self._gradients[name] = gradient.clone()
        what = LOGPROB if name.endswith(", log-probability") else BOTH
        if name.endswith((", log-probability", ", both")) and what in self._gradients:
            ours = self._gradients[what].float()
            self.off[name] = ((gradient.float() - ours).norm() / ours.norm()).item()


def compare(shape: str, device: str, given: argparse.Namespace) -> None:
    tokens, hidden, vocab = (int(extent) for extent in shape.split("x"))
    head = Head(tokens, hidden, vocab, device)
    ours = contenders(head, 64 * MIB + 4 * tokens * hidden)
    if not given.only:
        ours = dict(list(ours.items())[:LATER])
    warm = Warm(head, device)
    for name, call in chosen(ours, given.only).items():
        warm.add(name, call)
    for name, call in chosen(peers(head, given.peers), given.only).items():
        warm.add_peer(name, call)
    median = medians(warm.calls, given.rounds, given.burst, device)
    base = median["three cuBLAS products"]
    print(f"{shape:48s} {'ms':>9s} {'x three':>8s} {'x mean':>7s} {'MiB':>7s} {'off':>8s}")
    for name, ms in median.items():
        row = f"  {name:46s} {ms:9.3f} {ms / base:8.3f} {ms / median['mean']:7.3f}"
        off = f"{warm.off[name]:8.1e}" if name in warm.off else ""
        print(f"{row} {warm.mib[name]:7.0f} {off}".rstrip(), flush=True)


def peer_names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := sorted(set(names) - set(peers_later.PEERS)):
        allowed = ", ".join(peers_later.PEERS)
        raise argparse.ArgumentTypeError(f"no peer {unknown[0]!r}; allowed: {allowed}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="8192x4096x128256,8192x2048x151936")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", default="", help="a regular expression of contenders' names")
    parser.add_argument("--burst", type=float, default=0.25, help="seconds")
    parser.add_argument("--peers", type=peer_names, default=[], help="of verl, trl, cce")
    parser.add_argument("--peers-from", default="", help="a folder that holds their packages")
    arguments = parser.parse_args()
    if arguments.peers_from:
        sys.path.insert(0, arguments.peers_from)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, N x D x V, bf16")
    for shape in arguments.shapes.split(","):
        torch._dynamo.reset()
        compare(shape, device, arguments)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""TRL's function of log-probabilities and ours in its place (`patch_trl`), on one head in bf16:

    LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python python bench/compare_trl.py \
        --shape 8192x4096x151936

One process; the two take turns, and which is first changes with every round; medians of `--rounds`.
Random data and upstream gradients; the times are the host's, around calls that are waited for.
Memory is the allocator's peak beyond the inputs: the gradients, too. Three bare products of the
same operands stand beside them. Needs a GPU and TRL 1.16; `--shape 64x32x300` tries it anywhere,
and its figures mean nothing."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import trl.trainer.utils

from logitless.integrations import patch_trl

MIB = 1 << 20
# Each trainer asks for these (trl.trainer, 1.16); the flag says whether the entropy has a gradient
# there.
TRAINERS: dict[str, tuple[tuple[str, ...], bool]] = {
    "log-probability alone": (("log_probs",), False),
    "SFT": (("log_probs", "entropy", "is_top1"), False),
    "GRPO, entropy bonus": (("log_probs", "entropy"), True),
    "KTO": (("log_probs", "entropy", "mean_logits"), False),
    "DPO, weighting": (("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"), False),
}


class Head:
    def __init__(self, tokens: int, hidden: int, vocab: int, device: str) -> None:
        torch.manual_seed(0)
        self.cuda = device == "cuda"
        self.input = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_()
        weight = torch.randn(vocab, hidden, device=device) / hidden**0.5
        self.weight = weight.bfloat16().requires_grad_()
        self.target = torch.randint(0, vocab, (tokens,), device=device)
        self.upstream = [torch.randn(tokens, device=device) for _ in range(2)]

    def run(self, trainer: str, backward: bool) -> None:
        outputs, entropy_gradient = TRAINERS[trainer]
        self.input.grad = self.weight.grad = None
        # the function is TRL's own, or the patch's
        function = trl.trainer.utils._ChunkedLogProbFunction
        with torch.set_grad_enabled(backward):
            results = function.apply(
                self.input, self.weight, None, self.target, 1.0, 32768, None, 1.0, outputs
            )
        if backward:
            count = 2 if entropy_gradient else 1
            torch.autograd.backward(results[:count], self.upstream[:count])

    def products(self) -> None:
        input, weight = self.input.detach(), self.weight.detach()
        logits = input @ weight.t()
        logits @ weight
        logits.t() @ input

    def time(self, call: Callable[[], None]) -> tuple[float, float]:
        """(milliseconds, MiB at the peak beyond what there was)"""
        if not self.cuda:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3, 0.0
        self.input.grad = self.weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        milliseconds = (time.perf_counter() - start) * 1e3
        return milliseconds, (torch.cuda.max_memory_allocated() - before) / MIB


def compare(head: Head, trainer: str, backward: bool, rounds: int) -> str:
    samples: dict[str, list[tuple[float, float]]] = {"trl": [], "logitless": []}

    def ours() -> None:
        with patch_trl():
            head.run(trainer, backward)

    contenders = {"trl": lambda: head.run(trainer, backward), "logitless": ours}
    for i in range(rounds + 2):
        for name in sorted(contenders, reverse=i % 2 == 0):
            sample = head.time(contenders[name])
            if i >= 2:  # both have warmed up by then
                samples[name].append(sample)
    ms = {name: statistics.median(t for t, _ in taken) for name, taken in samples.items()}
    mib = {name: max(m for _, m in taken) for name, taken in samples.items()}
    what = "forward + backward" if backward else "forward"
    return (
        f"{trainer:22s} {what:19s} {ms['trl']:8.2f} {mib['trl']:7.0f} {ms['logitless']:9.2f} "
        f"{mib['logitless']:7.0f} {ms['logitless'] / ms['trl']:7.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8192x4096x151936", help="tokens x hidden x vocab")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    shape = [int(extent) for extent in arguments.shape.split("x")]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = Head(*shape, device)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, N x D x V {arguments.shape}, bf16")
    products = statistics.median(head.time(head.products)[0] for _ in range(arguments.rounds + 2))
    print(f"three products {products:.2f} ms")
    print(f"{'':42s} {'TRL ms':>8s} {'MiB':>7s} {'ours ms':>9s} {'MiB':>7s} {'ours/TRL':>7s}")
    for trainer in TRAINERS:
        for backward in (False, True):
            print(compare(head, trainer, backward, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()

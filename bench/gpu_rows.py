# SPDX-License-Identifier: Apache-2.0
"""Ops on given logits, compared with a copy of as many bytes: cross-entropy with its gradient, in
place and not, and softmax. `logitless_cuda_rows_bench` has more shapes, and CUDA graphs."""

from __future__ import annotations

import native
import torch
from gpu_sections import Bench
from gpu_timing import Contender, bursts

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def shapes(cuda: bool) -> list[tuple[int, int]]:
    return [(8192, 128256), (8192, 50257), (8192, 32000)] if cuda else [(64, 4099)]


def contenders(bench: Bench, tokens: int, vocab: int, dtype: torch.dtype) -> list[Contender]:
    """A copy, then the ops, on logits [N, V] of a dtype."""
    device = bench.library.device
    logits = torch.randn(tokens, vocab, device=device).mul_(2).to(dtype)  # [N, V]
    other, inside = torch.empty_like(logits), logits.clone()
    target = torch.randint(0, vocab, (tokens,), device=device)
    loss = torch.empty((), device=device)

    def both(name: str, source: torch.Tensor, into: torch.Tensor) -> Contender:
        tensors = {"logits": source, "target": target, "loss": loss, "grad_logits": into}
        call = bench.library.prepare(native.CROSS_ENTROPY_FORWARD_BACKWARD, tensors)
        return Contender(name, call.with_workspace(), ours=True)

    softmax = bench.library.prepare(native.SOFTMAX, {"logits": logits, "probabilities": other})
    return [
        Contender("copy", lambda: other.copy_(logits)),
        both("cross-entropy, in place", inside, inside),
        both("cross-entropy, out of place", logits, other),
        Contender("softmax", softmax.with_workspace(), ours=True),
    ]


def rows(bench: Bench) -> None:
    for tokens, vocab in shapes(bench.clock.cuda):
        for name, dtype in DTYPES.items():
            if not bench.report.time_for(f"rows {vocab} {name}", 3 if bench.clock.cuda else 0):
                return
            some = [c for c in contenders(bench, tokens, vocab, dtype) if bench.ready(c)]
            bursts(bench.clock, some, bench.arguments.rounds)
            copy, moved = some[0].ms, 2 * tokens * vocab * dtype.itemsize
            for c in some:
                bench.report.record(
                    f"  {tokens} x {vocab} {name:5s} {c.name:28s} {c.ms:8.4f} ms  "
                    f"{copy / c.ms:6.3f} of the copy's rate, {1e-6 * moved / c.ms:7.1f} GB/s",
                    section="rows", shape=(tokens, vocab), dtype=name, contender=c.name, ms=c.ms,
                    share=copy / c.ms, samples=c.samples,
                )  # fmt: skip
            del some
    bench.report.save()

# SPDX-License-Identifier: Apache-2.0
"""An older library and this one on CUDA in one process: each head's loss and gradients at three
memories, its loss alone, with statistics, and ops of given logits.

PYTHONPATH=bench python bench/two_libraries.py OLD NEW

Both are called in bursts in balanced orders; the medians, and NEW's as a ratio to OLD's. Code of a
kernel or a planner may be moved only if no ratio is above 1.01 in both of two runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import native
import torch
from gpu_head import HEADS
from gpu_native import Library
from gpu_timing import Clock, Contender, bursts

BURST = 0.03  # seconds
ROUNDS = 10
STATISTICS = ("lse", "entropy", "logprob", "sum_p_squared", "mean_logit")
GIVEN = ((4096, 50257), (8192, 128256))
MEMORIES = (0, 1 << 30, None)  # bytes; None: the recommended ones
# A name, the op's kind, its tensors, and the workspace sizes that it runs in.
Case = tuple[str, int, dict[str, torch.Tensor], tuple[int | None, ...]]


def statistics(tokens: int) -> dict[str, torch.Tensor]:
    found = {name: torch.empty(tokens, device="cuda") for name in STATISTICS}
    return found | {"rank": torch.empty(tokens, device="cuda", dtype=torch.int64)}


def of_heads() -> Iterator[Case]:
    for name, (tokens, hidden, vocab) in HEADS.items():
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5
        target = torch.randint(0, vocab, (tokens,), device="cuda")
        base = {"input": x, "weight": w, "target": target, "loss": torch.empty(1, device="cuda")}
        grads = {"grad_input": torch.empty_like(x), "grad_weight": torch.empty_like(w)}
        forward = native.LINEAR_CROSS_ENTROPY_FORWARD
        both = native.LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD
        yield f"{name}, loss and gradients", both, base | grads, MEMORIES
        yield f"{name}, loss", forward, base, (None,)
        yield f"{name}, loss and statistics", forward, base | statistics(tokens), (None,)


def of_logits() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, vocab in GIVEN:
            z = torch.randn(tokens, vocab, device="cuda").to(dtype)
            target = torch.randint(0, vocab, (tokens,), device="cuda")
            base = {"logits": z, "target": target, "loss": torch.empty(1, device="cuda")}
            grads = {"grad_logits": torch.empty_like(z)}
            name = f"logits {tokens} x {vocab} {dtype}".replace("torch.", "")
            forward = native.CROSS_ENTROPY_FORWARD
            both = native.CROSS_ENTROPY_FORWARD_BACKWARD
            yield f"{name}, loss and gradient", both, base | grads, (None,)
            yield f"{name}, statistics", forward, base | statistics(tokens), (None,)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old")
    parser.add_argument("new")
    arguments = parser.parse_args()
    libraries = [Library(arguments.old), Library(arguments.new)]
    print(torch.cuda.get_device_name(), torch.version.cuda)
    torch.manual_seed(0)
    clock, worst = Clock("cuda"), 0.0
    for cases in (of_heads(), of_logits()):
        for name, kind, tensors, memories in cases:
            calls = [library.prepare(kind, tensors) for library in libraries]
            for memory in memories:
                contenders = [
                    Contender(which, call.with_workspace(memory))
                    for which, call in zip(("old", "new"), calls, strict=True)
                ]
                for c in contenders:
                    clock(c.call, 2)
                repeats = max(1, round(BURST * 1e3 / max(clock(contenders[0].call), 1e-3)))
                for c in contenders:
                    c.repeats = min(repeats, 300)
                bursts(clock, contenders, ROUNDS)
                old, new = (c.ms for c in contenders)
                worst = max(worst, new / old)
                size = "recommended" if memory is None else f"{memory >> 20} MiB"
                print(f"{name:48} {size:>12} {old:9.3f} {new:9.3f} ms {new / old:7.3f}", flush=True)
            del calls, contenders, tensors
            torch.cuda.empty_cache()
    print(f"the largest ratio: {worst:.3f}")


if __name__ == "__main__":
    main()

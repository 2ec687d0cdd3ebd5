# SPDX-License-Identifier: Apache-2.0
"""Seconds of the first loss and gradients in this process: the driver, the tensors and PyTorch are
up, the contender is not yet loaded. One JSON line. compare_gpu.py starts it; by hand:
    python bench/first_call.py --library build/release/liblogitless.so [--contender compile]"""

from __future__ import annotations

import argparse
import json
import time

import torch
from gpu_head import HEADS, TINY

START = time.perf_counter()


def tensors(shape: tuple[int, int, int], device: str) -> dict[str, torch.Tensor]:
    tokens, hidden, vocab = shape
    make = {"device": device, "dtype": torch.bfloat16}
    out = {
        "input": torch.randn(tokens, hidden, **make),
        "weight": torch.randn(vocab, hidden, **make),
    }
    out["target"] = torch.randint(0, vocab, (tokens,), device=device)
    out |= {
        "grad_input": torch.empty_like(out["input"]),
        "grad_weight": torch.empty_like(out["weight"]),
    }
    return out | {"loss": torch.empty((), device=device)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--contender", default="ours", help="ours, or a peer of gpu_peers.py")
    parser.add_argument("--head", default="llama3")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--warmup", action="store_true", help="call logitless_warmup first, timed too"
    )
    a = parser.parse_args()
    t = tensors((HEADS | TINY)[a.head], a.device)

    def wait() -> float:
        if a.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    begin = wait()
    if a.contender == "ours":
        import native
        from gpu_native import Library

        library = Library(a.library, a.device)
        if a.warmup:
            library.warmup()
        loaded = wait()
        call = library.prepare(native.LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD, t).with_workspace()
    else:
        from gpu_peers import Peer

        call = Peer(a.contender, t["input"], t["weight"], t["target"]).train
        loaded = wait()
    call()
    first = wait()
    call()
    second = wait()
    print(json.dumps({"contender": a.contender, "head": a.head, "load_s": loaded - begin,
                      "first_s": first - loaded, "second_s": second - first,
                      "process_s": second - START}))  # fmt: skip


if __name__ == "__main__":
    main()

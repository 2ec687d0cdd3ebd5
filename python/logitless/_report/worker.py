# SPDX-License-Identifier: Apache-2.0
"""One part of a report, in its own process, because the library reads only once which kernels to
use, and because a crash then does not end other parts. Each record is a line of JSON on stdout."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import logitless
from logitless._report import conformance, heads

HEADS = [
    heads.Head("Llama 3 8B", "bf16", 8192, 4096, 128256),
    heads.Head("Qwen 3 1.7B", "bf16", 8192, 2048, 151936),
    heads.Head("Qwen 2.5 7B", "bf16", 8192, 3584, 152064),
    heads.Head("GPT-2", "bf16", 4096, 768, 50257),
    heads.Head("Phi 2", "f16", 8192, 2560, 51200),
]
CPU_HEADS = [heads.Head("GPT-2", "f32", 1024, 768, 50257)]
TINY_HEADS = [heads.Head("tiny", "bf16", 64, 32, 300), heads.Head("tiny", "f32", 40, 16, 301)]
SECTIONS = ("loss + gradients", "log-probability + entropy", "loss")


def say(kind: str, **values: Any) -> None:
    print(json.dumps({"record": kind, **values}), flush=True)


def _of_nvidia_smi(fields: list[str]) -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    command.append("--id=0" if uuid is None else f"--id=GPU-{uuid}")
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (value.strip() for value in told.stdout.strip().split(","))))


def machine(device: str) -> dict[str, Any]:
    """Facts about this machine, without the names of people, hosts and folders."""
    library = Path(logitless.library_path()).read_bytes()
    facts: dict[str, Any] = {
        "logitless": logitless.__version__,
        "library_sha256": hashlib.sha256(library).hexdigest()[:16],
        "python": platform.python_version(), "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }  # fmt: skip
    if device == "cpu":
        return facts | {"device": logitless.describe_backend("cpu")}
    properties = torch.cuda.get_device_properties(0)
    return facts | {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_mib": properties.total_memory // heads.MIB,
        "l2_mib": getattr(properties, "L2_cache_size", 0) / heads.MIB,
        "cuda": torch.version.cuda,
        **_of_nvidia_smi(["driver_version", "power.limit", "clocks.max.sm", "clocks.max.memory"]),
    }


def _that_fits(head: heads.Head) -> heads.Head:
    """The head, with its tokens halved until it fits into 90 % of the GPU's free memory or 512 are
    left."""
    size: int = heads.DTYPES[head.dtype].itemsize
    free, _ = torch.cuda.mem_get_info()
    while head.tokens > 512:
        # Three tensors of the weight's size (weight, gradient, padded copy), three of the input's
        # size, and in the next condition two of the size of the logits.
        need = size * (3 * head.vocab * head.hidden + 3 * head.tokens * head.hidden)
        if need + 2 * size * head.tokens * head.vocab <= 0.9 * free:
            break
        head = head._replace(tokens=head.tokens // 2)
    return head


def measure_heads(
    device: str, chosen: list[heads.Head], compiled: bool, burst: float, left: Callable[[], float]
) -> None:
    longest = 0.0
    for head in chosen:
        start = left()
        if start < longest:
            say("left out", head=head, reason="time")
            continue
        head = _that_fits(head) if device == "cuda" else head
        try:
            bench = heads.Bench(head, device)
        except torch.OutOfMemoryError:
            say("left out", head=head, reason="memory")
            continue
        calls = bench.ours() | (bench.compiled() if compiled else {})
        calls = bench.floors() | heads.of_sections(calls, SECTIONS)
        say("head", head=head, figures=heads.measure(bench, calls, 3, burst))
        longest = max(longest, start - left())
        del bench, calls
        if device == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["machine", "conformance", "heads"])
    parser.add_argument("--device", required=True, choices=["cpu", "cuda"])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    a = parser.parse_args()
    end = time.monotonic() + float(a.seconds)

    def left() -> float:
        return end - time.monotonic()

    if a.part == "machine":
        say("machine", **machine(a.device))
    elif a.part == "conformance":
        for row in conformance.run(a.device, 1 if a.quick else 20, left):
            if row.cases > 0:
                say("conformance", **dataclasses.asdict(row))
            else:
                say("left out", part=f"{row.function} in {row.dtype}", reason="time")
    else:
        chosen = TINY_HEADS if a.quick else HEADS if a.device == "cuda" else CPU_HEADS
        measure_heads(a.device, chosen, a.compiled, 0.002 if a.quick else 0.1, left)


if __name__ == "__main__":
    main()

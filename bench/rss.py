# SPDX-License-Identifier: Apache-2.0
"""Peak growth of the resident set during one call of ours, as JSON: a process of its own, so that
nothing else is counted. Inputs and outputs are touched beforehand, the workspace is fresh from mmap,
so the growth should be the workspace's bytes, except the scratch of threads that do not run: the
recommended workspace has room for at least eight threads."""

from __future__ import annotations

import argparse
import json
import mmap
import re
from pathlib import Path

import native
import numpy as np

# bytes: 4 for f32; bf16 is stored as its bits
ELEMENTS = {"f32": (native.F32, np.float32), "bf16": (native.BF16, np.uint16)}


def status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"/proc/self/status has no {name}")
    return int(found[1]) * 1024


def random_array(shape: tuple[int, int], dtype: str, bound: float) -> np.ndarray:
    """A repeated block of random numbers: only the memory matters here."""
    values = np.random.default_rng(0).uniform(-bound, bound, 1 << 18).astype(np.float32)
    if dtype == "bf16":
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    out = np.empty(shape, ELEMENTS[dtype][1])
    flat = out.reshape(-1)
    for start in range(0, flat.size, values.size):
        part = flat[start : start + values.size]
        part[:] = values[: part.size]
    return out


class Call:
    """One linear cross-entropy with its tensors, outputs touched."""

    def __init__(self, tokens: int, hidden: int, vocab: int, dtype: str, gradients: bool) -> None:
        code = ELEMENTS[dtype][0]
        target = np.arange(tokens, dtype=np.int64) % vocab  # [N]
        arrays = {
            "input": (random_array((tokens, hidden), dtype, 1.0), code),  # [N, D]
            "weight": (random_array((vocab, hidden), dtype, hidden**-0.5), code),  # [V, D]
            "target": (target, native.I64),
            "loss": (np.ones(1, np.float32), native.F32),
        }
        if gradients:
            arrays |= {
                "grad_input": (np.full((tokens, hidden), 1, np.float32), native.F32),
                "grad_weight": (np.full((vocab, hidden), 1, np.float32), native.F32),
            }
        self.arrays = arrays
        kind = (
            native.LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD
            if gradients
            else native.LINEAR_CROSS_ENTROPY_FORWARD
        )
        self.op = native.make_op(
            kind,
            {name: native.tensor(a.ctypes.data, c, a.shape) for name, (a, c) in arrays.items()},
        )


def fresh_memory(size: int) -> tuple[mmap.mmap, int]:
    """Untouched small pages: a huge page would count bytes that were not asked for."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory, np.frombuffer(memory, np.uint8).ctypes.data


def untouched_bytes(library: native.Library, op: native.Op) -> int:
    """The scratch that the recommended workspace holds for threads that do not run."""
    sizes = {}
    for count in (8, 16):
        library.set_threads(count)
        sizes[count] = library.workspace(op).recommended
    library.set_threads(library.threads)
    return max(8 - library.threads, 0) * (sizes[16] - sizes[8]) // 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("threads", type=int)
    parser.add_argument("shape", type=int, nargs=3, metavar=("N", "D", "V"))
    parser.add_argument("--dtype", choices=ELEMENTS, default="f32")
    parser.add_argument("--loss-only", action="store_true")
    parser.add_argument("--minimum", action="store_true", help="the smallest workspace")
    arguments = parser.parse_args()
    library = native.Library(arguments.library, arguments.threads)
    tokens, hidden, vocab = arguments.shape

    # Starts the thread pool and touches code and stacks.
    warm = Call(
        min(tokens, 64), min(hidden, 64), min(vocab, 1024), arguments.dtype, not arguments.loss_only
    )
    size = library.workspace(warm.op).recommended
    memory, address = fresh_memory(size)
    library.run(warm.op, address, size)

    call = Call(tokens, hidden, vocab, arguments.dtype, not arguments.loss_only)
    sizes = library.workspace(call.op)
    size = sizes.minimum if arguments.minimum else sizes.recommended
    memory, address = fresh_memory(size)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status_bytes("VmRSS")
    library.run(call.op, address, size)
    growth = status_bytes("VmHWM") - before
    untouched = 0 if arguments.minimum else untouched_bytes(library, call.op)
    print(json.dumps({"workspace_bytes": size - untouched, "growth_bytes": growth}))
    del memory


if __name__ == "__main__":
    main()

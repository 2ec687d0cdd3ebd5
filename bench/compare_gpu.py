# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend compared with its peers and with the bare products that every way needs, in one
run and, except for the section `first`, in one process.

On heads: bf16, mean loss, data as of a trained head (gpu_head.py). Contenders are interleaved in
balanced order; figures are medians; memory is what is taken beyond inputs and gradients; errors are
against double, over all of both gradients. It reports; it does not judge. bench/README.md describes
the sections.
    python bench/compare_gpu.py --library build/device/liblogitless.so --out bench/results/gpu-DATE
    python bench/compare_gpu.py --library build/release/liblogitless.so --device cpu  # tiny"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import gpu_frontier
import torch
from gpu_first import first
from gpu_head import HEADS, TINY, Head
from gpu_native import Library
from gpu_peers import PEERS, STRONG
from gpu_report import Report
from gpu_rows import rows
from gpu_sections import HEAD_SECTIONS, Bench, run_head
from gpu_tables import tables
from gpu_timing import Clock

OTHER_SECTIONS: dict[str, tuple[str, Callable[[Bench], None]]] = {
    "rows": ("given logits beside a copy", rows),
    "first": ("first call in a fresh process", first),
    "tables": ("the published comparisons", tables),
}
SECTIONS = (*HEAD_SECTIONS, *OTHER_SECTIONS)


def words(allowed: tuple[str, ...], text: str) -> list[str]:
    """Comma-separated words of `allowed`, or "all" or "none"."""
    chosen = list(allowed) if text == "all" else [] if text in ("none", "") else text.split(",")
    for word in chosen:
        if word not in allowed:
            raise argparse.ArgumentTypeError(f'"{word}"; allowed: all, none, {", ".join(allowed)}')
    return chosen


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--library", required=True, help="liblogitless.so")
    add(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: tiny shapes, to try this program",
    )
    add(
        "--sections",
        type=functools.partial(words, SECTIONS),
        default=list(SECTIONS),
        help=", ".join(SECTIONS),
    )
    add("--heads", type=functools.partial(words, (*HEADS, *TINY)), help=", ".join(HEADS))
    add(
        "--peers",
        type=functools.partial(words, tuple(PEERS)),
        default=list(STRONG),
        help=", ".join(PEERS),
    )
    add("--steady-peers", type=functools.partial(words, tuple(PEERS)), default=["compile", "quack"])
    add("--first-peers", type=functools.partial(words, tuple(PEERS)), default=[],
        help="peers whose first call is measured too, side by side")  # fmt: skip
    add("--rounds", type=int, default=5)
    add("--burst", type=float, default=0.07, help="seconds of calls at a time (0.07)")
    add("--steady", type=float, default=1.5, help="seconds of a loop of section steady (1.5)")
    add("--budgets", type=int, default=8, help="points of section frontier (8)")
    add("--cli", type=Path, help="the command line `logitless` with CUDA, for the predicted times")
    add("--cap", type=float, default=90, help="seconds for the first call of a contender (90)")
    add(
        "--limit",
        type=float,
        default=420,
        help="seconds; what does not fit is left out and said (420)",
    )
    add("--out", type=Path, help="prefix of a .txt and a .json file")
    arguments = parser.parse_args()
    if arguments.budgets < 2:
        parser.error(f"--budgets: {arguments.budgets}; allowed: 2 or more")
    tiny = arguments.device == "cpu"
    if arguments.heads is None:
        arguments.heads = list(TINY if tiny else HEADS)
    if tiny != all(head in TINY for head in arguments.heads):
        parser.error(
            f"--heads: allowed on {arguments.device}: {', '.join(TINY if tiny else HEADS)}"
        )
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "compare_gpu: PyTorch sees no CUDA device; --device cpu tries the program without one"
        )
    report = Report(arguments.device, arguments.out, arguments.limit)
    library = Library(arguments.library, arguments.device)
    report.say(
        f"ours: {library.describe()}; {arguments.rounds} rounds of {arguments.burst * 1e3:.0f} ms; "
        "x: to three products (V padded to 64), loss only to one; MiB beyond inputs and gradients"
    )
    if arguments.cli and (why := gpu_frontier.trouble(arguments.cli)):
        report.say(f"--cli {arguments.cli}: no predictions: {why}")
        arguments.cli = None
    bench = Bench(arguments, library, Clock(arguments.device), report)
    if "first" in arguments.sections:  # before the process fills the device
        report.say(f"\nfirst call in a fresh process, {arguments.heads[0]}")
        first(bench)
    for name in arguments.heads:
        if set(arguments.sections) & set(HEAD_SECTIONS):
            run_head(bench, Head(library, name, (HEADS | TINY)[name]), arguments.sections)
    for section in ("rows", "tables"):
        what, function = OTHER_SECTIONS[section]
        if section in arguments.sections:
            report.say(f"\n{section}: {what}")
            function(bench)
    report.say(f"\n{report.elapsed():.0f} s")
    report.save()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
r"""Many heads, from PyTorch at the default memory: loss and gradients, per-token losses with a
random upstream, log-probability and entropy with random ones, and the loss alone, compared
with torch.compile of the same and with bare cuBLAS products.

    LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python \
        python bench/sweep.py --out PREFIX
    python bench/sweep.py --draw PREFIX.json        # PREFIX.svg; needs matplotlib and no GPU

One process; all contenders of a head take turns in bursts, in an order that is reversed every
round; medians. x: to the products of the same dtype (three, or one for the loss alone), V to a
multiple of 64. Gradients of f16 are of 2^16 times the mean, as a GradScaler has them. MiB: the
allocator's peak beyond inputs and gradients. Random data. `--only TEXT` picks heads by a regular
expression; `--limit` ends the run, and says what was left out. `--one-thread` runs backward in the
caller's thread (torch.autograd.set_multithreading_enabled), which matters with few tokens."""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path

import torch

from logitless._report import heads
from logitless._report.heads import SECTIONS, Bench, Figures, Head, ratio

HEADS = [
    Head("Llama 3 8B", "bf16", 8192, 4096, 128256),
    Head("Llama 3.2 1B", "bf16", 8192, 2048, 128256),
    Head("Qwen 2.5 0.5B", "bf16", 4096, 896, 151936),
    Head("Qwen 2.5 0.5B", "bf16", 16384, 896, 151936),
    Head("Qwen 2.5 1.5B", "bf16", 8192, 1536, 151936),
    Head("Qwen 3 1.7B", "bf16", 8192, 2048, 151936),
    Head("Qwen 2.5 7B", "bf16", 8192, 3584, 152064),
    Head("Qwen 3 32B", "bf16", 4096, 5120, 151936),
    Head("Gemma 2 2B", "bf16", 8192, 2304, 256000),
    Head("Gemma 3 1B", "bf16", 4096, 1152, 262144),
    Head("Mistral 7B v0.3", "bf16", 8192, 4096, 32768),
    Head("Phi 3 mini", "bf16", 8192, 3072, 32064),
    Head("DeepSeek V3", "bf16", 4096, 7168, 129280),
    Head("GPT-OSS 20B", "bf16", 4096, 2880, 201088),
    Head("GPT-2", "bf16", 1024, 768, 50257),
    Head("GPT-2", "bf16", 4096, 768, 50257),
    Head("GPT-2", "bf16", 20480, 768, 50257),
    Head("GPT-2", "bf16", 65536, 768, 50257),
    Head("Llama 3 8B", "bf16", 1, 4096, 128256),
    Head("Llama 3 8B", "bf16", 64, 4096, 128256),
    Head("Llama 3 8B", "bf16", 256, 4096, 128256),
    Head("Llama 3 8B", "bf16", 1024, 4096, 128256),
    Head("Llama 3 8B", "f16", 8192, 4096, 128256),
    Head("Qwen 3 1.7B", "f16", 8192, 2048, 151936),
    Head("Llama 2 7B", "f16", 4096, 4096, 32000),
    Head("Phi 2", "f16", 8192, 2560, 51200),
    Head("GPT-2", "f16", 8192, 768, 50257),
    Head("Qwen 3 0.6B", "bf16", 8192, 1024, 151936),
    Head("Qwen 3 1.7B", "bf16", 100, 2048, 151936),
    Head("GPT-2 medium", "f32", 4096, 1024, 50257),
    Head("GPT-2 large", "f32", 4096, 1280, 50257),
    Head("GPT-2 XL", "f32", 2048, 1600, 50257),
    Head("Llama 2 7B", "f32", 2048, 4096, 32000),
]


def measure(head: Head, device: str, rounds: int, seconds: float) -> Figures:
    bench = Bench(head, device)
    calls = bench.floors() | bench.ours() | bench.compiled()
    return heads.measure(bench, calls, rounds, seconds)


def line(head: Head, figures: Figures) -> str:
    text = f"{head.name:16s} {head.dtype:4s} {head.tokens:6d} {head.hidden:5d} {head.vocab:6d}"
    for section in SECTIONS:
        for who in ("ours", "compile"):
            times, mib = ratio(figures, section, who), figures[f"{section}, {who}"].get("mib")
            cell = f"{times:6.3f} [{mib or 0:5.0f}]" if times else "does not fit"
            text += f" | {cell:14s}"
    return text


def shortened(title: str) -> str:
    for long, short in (("gradients", "g"), ("log-probability + entropy", "lp + ent")):
        title = title.replace(long, short)
    return title[:14]


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text in the SVG
    from matplotlib import pyplot

    records = json.loads(path.read_text())["heads"]
    figure, axes = pyplot.subplots(1, len(SECTIONS), figsize=(18, 8), sharey=True)
    for axis, (section, count) in zip(axes, SECTIONS.items()):
        for who, mark in (("ours", "o"), ("compile", "x")):
            found = [(ratio(r["figures"], section, who), i) for i, r in enumerate(records)]
            at = [point for point in found if point[0]]
            axis.plot(*zip(*at), mark, label="logitless" if who == "ours" else "torch.compile")
        axis.axvline(1, color="gray", linewidth=0.8)
        axis.set_title(section)
        axis.set_xlabel(f"x {count} cuBLAS product{'s' if count > 1 else ''}")
        axis.set_xlim(0.7, 3.6)
        axis.grid(axis="y", linewidth=0.3)
    shapes = [Head(*r["head"]) for r in records]
    names = [f"{h.name}, {h.dtype}, {h.tokens} x {h.hidden} x {h.vocab}" for h in shapes]
    axes[0].set_yticks(list(range(len(records))), names)
    axes[0].invert_yaxis()
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path.with_suffix(".svg"))


def run(arguments: argparse.Namespace) -> None:
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else "cpu, where figures mean nothing"
    where = ", backward in the caller's thread" if arguments.one_thread else ""
    titles = [f"{section}, {who}" for section in SECTIONS for who in ("ours", "compile")]
    day = time.strftime("%Y-%m-%d")
    lines = [f"{device}, torch {torch.__version__}, {day}{where}; x products [MiB]"]
    lines.append(f"{'':42s} | " + " | ".join(shortened(title).ljust(14) for title in titles))
    print(*lines, sep="\n", flush=True)
    records, start = [], time.perf_counter()
    for head in HEADS:
        if not re.search(arguments.only, f"{head.name} {head.dtype} {head.tokens}"):
            continue
        if not cuda:
            head = head._replace(tokens=64, hidden=32, vocab=300)
        if time.perf_counter() - start > arguments.limit:
            lines.append(f"left out for time: {head}")
        else:
            figures = measure(head, "cuda" if cuda else "cpu", arguments.rounds, arguments.burst)
            records.append({"head": head, "figures": figures})
            lines.append(line(head, figures))
            if cuda:
                torch.cuda.empty_cache()
        print(lines[-1], flush=True)
        if arguments.out:
            told = {"device": device, "torch": torch.__version__,
                    "one_thread": arguments.one_thread, "heads": records}  # fmt: skip
            Path(f"{arguments.out}.json").write_text(json.dumps(told, indent=1))
            Path(f"{arguments.out}.txt").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=float, default=0.08, help="seconds")
    parser.add_argument("--limit", type=float, default=540, help="seconds")
    parser.add_argument("--only", default="", help="a regular expression of heads")
    parser.add_argument("--one-thread", action="store_true", help="backward in the caller's thread")
    parser.add_argument("--out", help="prefix of a .json and a .txt")
    parser.add_argument("--draw", type=Path, help="the .json of a run: its picture beside it")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(arguments.draw)
    else:
        with torch.autograd.set_multithreading_enabled(not arguments.one_thread):
            run(arguments)


if __name__ == "__main__":
    main()

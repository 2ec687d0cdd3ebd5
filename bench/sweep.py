# SPDX-License-Identifier: Apache-2.0
r"""Many heads, from PyTorch at the default memory: loss and gradients, per-token losses with a
random upstream, and the loss alone, beside torch.compile of the same and bare cuBLAS products.

    LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python \
        python bench/sweep.py --out PREFIX
    python bench/sweep.py --draw PREFIX.json        # PREFIX.svg; needs matplotlib and no GPU

One process; all contenders of a head take turns in bursts, in an order that turns round every
round; medians. x: to the products of the same dtype (three, or one for the loss alone), V to a
multiple of 64. Gradients of f16 are of 2^16 times the mean, as a GradScaler has them. MiB: the
allocator's peak beyond inputs and gradients. Random data. `--only TEXT` picks heads by a regular
expression; `--limit` ends the run, and says what was left out."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MIB = 1 << 20


class Head(NamedTuple):
    name: str
    dtype: str
    tokens: int
    hidden: int
    vocab: int


HEADS = [
    Head("Llama 3 8B", "bf16", 8192, 4096, 128256),
    Head("Llama 3.2 1B", "bf16", 8192, 2048, 128256),
    Head("Qwen 2.5 0.5B", "bf16", 4096, 896, 151936),
    Head("Qwen 2.5 0.5B", "bf16", 16384, 896, 151936),
    Head("Qwen 2.5 1.5B", "bf16", 8192, 1536, 151936),
    Head("Qwen 3 1.7B", "bf16", 8192, 2048, 151936),
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
    Head("GPT-2", "f16", 8192, 768, 50257),
    Head("GPT-2 medium", "f32", 4096, 1024, 50257),
    Head("GPT-2 XL", "f32", 2048, 1600, 50257),
    Head("Llama 2 7B", "f32", 2048, 4096, 32000),
]
SECTIONS = {  # of a head: the products of its ratio, then ours and torch.compile's
    "loss + gradients": 3,
    "none + gradients": 3,
    "loss": 1,
}


class Bench:
    """The contenders of one head."""

    def __init__(self, head: Head) -> None:
        import torch

        self.torch = torch
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[head.dtype]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        x = torch.randn(head.tokens, head.hidden, device=device)
        w = torch.randn(head.vocab, head.hidden, device=device) / head.hidden**0.5
        self.x, self.w = x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()
        self.t = torch.randint(0, head.vocab, (head.tokens,), device=device)
        self.up = torch.randn(head.tokens, device=device)
        # Without a scaler's factor the dz of a mean is 0 in f16 except at the targets, and products
        # of zeros take less power and time.
        self.factor = torch.tensor(2.0**16 if head.dtype == "f16" else 1.0, device=device)
        padded = (head.vocab + 63) // 64 * 64
        self.padded = torch.zeros(padded, head.hidden, device=device, dtype=dtype)
        self.padded[: head.vocab] = self.w.detach()

    def contenders(self) -> dict[str, Callable[[], Any]]:
        torch = self.torch
        from logitless.torch import linear_cross_entropy

        def theirs(reduction: str) -> Any:
            def call(x: Any, w: Any, t: Any) -> Any:
                logits = (x @ w.t()).float()
                return torch.nn.functional.cross_entropy(logits, t, reduction=reduction)

            return torch.compile(call)

        mean, none = theirs("mean"), theirs("none")
        x, w, t = self.x, self.w, self.t

        def products(count: int) -> None:
            input = x.detach()
            logits = input @ self.padded.t()
            if count == 3:
                logits @ self.padded
                logits.t() @ input

        def both(loss: Callable[..., Any], *upstream: Any, **options: Any) -> None:
            x.grad = w.grad = None
            loss(x, w, t, **options).backward(*upstream)

        def alone(loss: Callable[..., Any]) -> None:
            with torch.no_grad():
                loss(x, w, t)

        return {
            "3 products": lambda: products(3),
            "loss + gradients, ours": lambda: both(linear_cross_entropy, self.factor),
            "loss + gradients, compile": lambda: both(mean, self.factor),
            "none + gradients, ours": lambda: both(linear_cross_entropy, self.up, reduction="none"),
            "none + gradients, compile": lambda: both(none, self.up),
            "1 products": lambda: products(1),
            "loss, ours": lambda: alone(linear_cross_entropy),
            "loss, compile": lambda: alone(mean),
        }

    def wait(self) -> None:
        if self.x.is_cuda:
            self.torch.cuda.synchronize()

    def burst(self, call: Callable[[], Any], seconds: float) -> float:
        """Milliseconds per call, over a burst of calls."""
        self.wait()
        start, count = time.perf_counter(), 0
        while count < 2 or time.perf_counter() - start < seconds:
            call()
            count += 1
            if count % 8 == 0:
                self.wait()
        self.wait()
        return (time.perf_counter() - start) * 1e3 / count

    def peak(self, call: Callable[[], Any]) -> float:
        if not self.x.is_cuda:
            return 0.0
        cuda, inputs = self.torch.cuda, (self.x, self.w)
        self.x.grad = self.w.grad = None
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        call()
        cuda.synchronize()
        grads = sum(v.numel() * v.element_size() for v in inputs if v.grad is not None)
        return (cuda.max_memory_allocated() - before - grads) / MIB


def measure(head: Head, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    import torch

    torch._dynamo.reset()  # after eight shapes it silently falls back to eager
    bench = Bench(head)
    figures: dict[str, dict[str, float]] = {}
    taken: dict[str, list[float]] = {}
    calls = bench.contenders()
    for name, call in list(calls.items()):
        try:
            call()
            call()
            figures[name] = {"mib": bench.peak(call)}
            taken[name] = []
        except torch.OutOfMemoryError:
            del calls[name]
    for i in range(rounds):
        for name in list(calls)[:: 1 if i % 2 == 0 else -1]:
            taken[name].append(bench.burst(calls[name], seconds))
    for name, times in taken.items():
        figures[name]["ms"] = statistics.median(times)
    return figures


def line(head: Head, figures: dict[str, dict[str, float]]) -> str:
    text = f"{head.name:16s} {head.dtype:4s} {head.tokens:6d} {head.hidden:5d} {head.vocab:6d}"
    for section, count in SECTIONS.items():
        base = figures[f"{count} products"]["ms"]
        for who in ("ours", "compile"):
            found = figures.get(f"{section}, {who}")
            cell = f"{found['ms'] / base:6.3f} [{found['mib']:5.0f}]" if found else "does not fit"
            text += f" | {cell:14s}"
    return text


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text in the SVG
    from matplotlib import pyplot

    records = json.loads(path.read_text())["heads"]
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 8), sharey=True)
    places = range(len(records))
    for axis, (section, count) in zip(axes, SECTIONS.items()):
        for who, mark in (("ours", "o"), ("compile", "x")):
            at = [
                (
                    r["figures"][f"{section}, {who}"]["ms"]
                    / r["figures"][f"{count} products"]["ms"],
                    i,
                )
                for i, r in zip(places, records)
                if f"{section}, {who}" in r["figures"]
            ]
            axis.plot(*zip(*at), mark, label="logitless" if who == "ours" else "torch.compile")
        axis.axvline(1, color="gray", linewidth=0.8)
        axis.set_title(section)
        axis.set_xlabel(f"x {count} cuBLAS product{'s' if count > 1 else ''}")
        axis.set_xlim(0.85, 2)
        axis.grid(axis="y", linewidth=0.3)
    heads = [Head(*r["head"]) for r in records]
    names = [f"{h.name}, {h.dtype}, {h.tokens} x {h.hidden} x {h.vocab}" for h in heads]
    axes[0].set_yticks(list(places), names)
    axes[0].invert_yaxis()
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path.with_suffix(".svg"))


def run(arguments: argparse.Namespace) -> None:
    import torch

    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else "cpu, where figures mean nothing"
    titles = [f"{section}, {who}" for section in SECTIONS for who in ("ours", "compile")]
    lines = [f"{device}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; x products [MiB]"]
    lines.append(
        f"{'':42s} | "
        + " | ".join(title.replace("gradients", "g")[:14].ljust(14) for title in titles)
    )
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
            figures = measure(head, arguments.rounds, arguments.burst)
            records.append({"head": head, "figures": figures})
            lines.append(line(head, figures))
            if cuda:
                torch.cuda.empty_cache()
        print(lines[-1], flush=True)
        if arguments.out:
            told = {"device": device, "torch": torch.__version__, "heads": records}
            Path(f"{arguments.out}.json").write_text(json.dumps(told, indent=1))
            Path(f"{arguments.out}.txt").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=float, default=0.08, help="seconds")
    parser.add_argument("--limit", type=float, default=540, help="seconds")
    parser.add_argument("--only", default="", help="a regular expression of heads")
    parser.add_argument("--out", help="prefix of a .json and a .txt")
    parser.add_argument("--draw", type=Path, help="the .json of a run: its picture beside it")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(arguments.draw)
    else:
        run(arguments)


if __name__ == "__main__":
    main()

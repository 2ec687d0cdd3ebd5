# SPDX-License-Identifier: Apache-2.0
"""The picture of time against memory from the JSON of compare_gpu.py, sections heads and frontier:
loss and gradients of one head, ours as a line over the memory it is given, every peer as a point.
Writes PREFIX.svg and PREFIX-dark.svg, for a dark page, and prints the same figures, with what the
plan predicts and what is allowed.

    python bench/frontier_chart.py bench/results/gpu-DATE.json --out docs/pictures/time-memory

`--head` takes another head than the first of the run. `--cli LOGITLESS` asks the plan for
predictions that the run did not have; it needs no GPU. Needs matplotlib."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import gpu_frontier
import numpy as np
import picture
from matplotlib import pyplot

MIB = 1 << 20
Records = list[dict[str, Any]]
WORDS = {  # names of compare_gpu.py's contenders in the picture
    "torch eager": "PyTorch",
    "QuACK, older path, untuned": "QuACK, older path",
    "Liger SM90 CuTe": "Liger, CuTe",
    "Liger FLSCE SM90": "Liger, FLSCE",
    "Liger (Triton)": "Liger, Triton",
    "Liger (Triton), f32 sums": "Liger, Triton, f32 sums",
    "CCE": "Cut Cross-Entropy",
    "CCE exact": "Cut Cross-Entropy, exact",
}
HEADS = {"llama3": "Llama 3", "qwen": "Qwen", "gemma": "Gemma 2", "deepseek": "DeepSeek V3"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="JSON of compare_gpu.py")
    parser.add_argument("--head", help="llama3, ...; default: the run's first with a frontier")
    parser.add_argument("--cli", type=Path, help="the command line `logitless`, built with CUDA")
    parser.add_argument("--out", type=Path, help="prefix; default: the JSON's name and -frontier")
    arguments = parser.parse_args()
    results: Path = arguments.results
    arguments.out = arguments.out or results.with_name(results.stem + "-frontier")
    return arguments


def peers(records: Records, head: str) -> Records:
    """The peers' points; peak memory was measured in the same run."""
    mine = [r for r in records if r.get("section") == "heads" and r.get("head") == head]
    mine = [r for r in mine if not r["ours"] and isinstance(r.get("mib"), float)]
    return [r for r in mine if "loss only" not in r["contender"]]


def lines(head: str, points: Records, others: Records) -> list[str]:
    shape, floor = " x ".join(map(str, points[0]["shape"])), points[0]["floor_ms"]
    out = [f"{head}, N x D x V = {shape}; floor (three products) {floor:.3f} ms"]
    out.append(
        f"  {'MiB':>9s} {'ms':>9s} {'x floor':>8s} {'allowed':>9s} {'predicted':>10s} {'of it':>7s}"
    )
    for p in points:
        predicted = p["predicted_ms"]
        asked = (
            f"{predicted:10.3f} {p['ms'] / predicted:7.3f}"
            if predicted
            else f"{'-':>10s} {'-':>7s}"
        )
        numbers = f"{p['bytes'] / MIB:9.1f} {p['ms']:9.3f} {p['ratio']:8.3f} {p['bound_ms']:9.3f}"
        out.append(f"  {numbers} {asked}{'' if p['ms'] <= p['bound_ms'] else '  beyond'}")
    out += [f"  {r['mib']:9.1f} {r['ms']:9.3f} {r['ratio']:8.3f}  {r['contender']}" for r in others]
    return out


def memory(mib: float) -> str:
    return f"{mib:.0f} MiB" if mib < 1000 else f"{mib / 1024:.1f} GiB".replace(".0 ", " ")


class Labels:
    """Labels of points. They are moved away from the curve and from earlier labels, and have a line
    to their point."""

    def __init__(self, axes: pyplot.Axes, line: str, curve: Any) -> None:
        self.axes, self.taken = axes, list[Any]()
        # the line between two points is straight in page coordinates
        corners = axes.transData.transform(curve)
        share = np.linspace(0, 1, 100)[:, None]
        self.curve = np.concatenate([a + share * (b - a) for a, b in itertools.pairwise(corners)])
        self.line = {"arrowstyle": "-", "color": line, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4}

    def put(
        self, at: tuple[float, float], words: str, side: str, push: int = 1, **how: Any
    ) -> None:
        right = side == "right"
        label = self.axes.annotate(
            words, at, (14 if right else -14, 0), textcoords="offset points", va="center",
            ha="left" if right else "right", arrowprops={**self.line, "relpos": (not right, 0.5)},
            **{"fontsize": 10, **how},
        )  # fmt: skip
        renderer = self.axes.figure.canvas.get_renderer()

        def place() -> Any:  # of the words alone, without their line
            label.update_positions(renderer)
            return pyplot.Text.get_window_extent(label, renderer)

        while any(box.overlaps(place()) for box in self.taken) or self.covers(place()):
            x, y = label.xyann
            label.xyann = (x, y + push)
        self.taken.append(place())

    def covers(self, box: Any) -> bool:
        """Whether the curve runs through the words, or closer to them than a point is wide."""
        return bool(box.padded(9).count_contains(self.curve))


def draw(theme: picture.Theme, points: Records, others: Records, facts: dict[str, str]) -> Any:
    figure, axes = pyplot.subplots(figsize=(9, 5.6))
    size, ms = [p["bytes"] / MIB for p in points], [p["ms"] for p in points]
    floor, least = points[0]["floor_ms"], min(1, *(r["mib"] for r in others), *size)
    high = 1.04 * max(*ms, *(r["ms"] for r in others if r["ms"] < 1.6 * floor))
    slow = sorted((r for r in others if r["ms"] > high), key=lambda r: r["ms"])
    each = 0.08 * (high - floor)  # slower contenders are stacked in a band above
    axes.set(
        xscale="log", xlim=(0.75 * least, 6 * max(8192, *(r["mib"] for r in others))),
        ylim=(0.95 * floor, high + each * (len(slow) + 1)),
        xlabel="memory beyond inputs and gradients", ylabel="milliseconds",
    )  # fmt: skip
    ticks = [4**i for i in range(8) if 4**i >= least]
    axes.set_xticks(ticks, [memory(tick) for tick in ticks], minor=False)
    axes.minorticks_off()
    step = 5 if high - floor < 40 else 10
    axes.set_yticks([y for y in range(0, 1000, step) if 0.95 * floor < y < high])
    axes.grid(axis="both", linewidth=0.4, alpha=0.4)
    axes.set_axisbelow(True)
    across, small = axes.get_yaxis_transform(), {"color": theme.faint, "fontsize": 9}
    if slow:
        axes.axhline(high, color=theme.faint, linewidth=0.7, linestyle=":")
        axes.text(0.99, high, "slower than this scale", transform=across, ha="right", va="bottom",
                  **small)  # fmt: skip
    axes.axhline(floor, color=theme.faint, linewidth=1, linestyle="--")
    axes.text(0.01, floor - 0.1 * each, "the three matrix products alone, cuBLAS", va="top",
              transform=across, **small)  # fmt: skip
    axes.plot(size, ms, "o-", color=theme.ours, linewidth=2.5, markersize=7, zorder=3)
    tokens, hidden, vocab = points[0]["shape"]
    head = HEADS.get(points[0]["head"], points[0]["head"])
    axes.set_title(
        f"Loss and gradients of {head}'s output layer: time against memory", loc="left",
        fontsize=13, weight="bold", pad=26,
    )  # fmt: skip
    axes.text(
        0, 1.03, f"{tokens} tokens, {hidden} wide, {vocab} words, bf16, one {facts['device']}, "
        f"{facts['date']}; lower and further left is better", transform=axes.transAxes,
        color=theme.faint, fontsize=10,
    )  # fmt: skip
    figure.tight_layout()  # fixes the page coordinates
    labels = Labels(axes, theme.faint, list(zip(size, ms)))
    middle = (len(size) - 1) // 2
    labels.put((size[middle], ms[middle]), "Logitless, in the memory you give it", "left",
               push=-1, color=theme.ours, weight="bold", fontsize=11)  # fmt: skip
    for r in sorted(others, key=lambda r: r["ms"]):
        beyond = r in slow
        at = (r["mib"], high + each * (slow.index(r) + 1) if beyond else r["ms"])
        axes.plot(*at, "^" if beyond else "s", color=theme.other, markersize=7, zorder=4)
        crowded = beyond if r["mib"] > size[0] else r["mib"] > 16
        name = WORDS.get(r["contender"], r["contender"])
        words = f"{name}, {r['ms']:.{0 if beyond else 1}f} ms"
        labels.put(at, words, "left" if crowded else "right")
    return figure


def main() -> None:
    arguments = parse()
    run = json.loads(arguments.results.read_text())
    records: Records = run["records"]
    points = [r for r in records if r.get("section") == "frontier" and "bytes" in r]
    heads = list(dict.fromkeys(p["head"] for p in points))
    if not heads:
        raise SystemExit(f"frontier_chart: {arguments.results} has no record of section frontier")
    head = arguments.head or heads[0]
    if head not in heads:
        raise SystemExit(f"frontier_chart: --head: {head!r}; allowed: {', '.join(heads)}")
    mine, others = [p for p in points if p["head"] == head], peers(records, head)
    if not others:
        raise SystemExit(
            f"frontier_chart: {arguments.results} has no peers of {head}; allowed: a run of "
            "compare_gpu.py with --sections heads,frontier"
        )
    if arguments.cli and not all(p["predicted_ms"] for p in mine):
        sizes = [p["bytes"] for p in mine]
        predicted = gpu_frontier.predict(arguments.cli, tuple(mine[0]["shape"]), sizes)
        for p, ms in zip(mine, predicted, strict=True):
            p["predicted_ms"] = ms
    text = [", ".join(f"{k} {v}" for k, v in run["machine"].items())]
    text += ["", *lines(head, mine, others)]
    picture.both(arguments.out, lambda theme: draw(theme, mine, others, run["machine"]))
    print("\n".join(text))


if __name__ == "__main__":
    main()

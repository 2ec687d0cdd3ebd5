# SPDX-License-Identifier: Apache-2.0
"""The chart of time against workspace from the JSON of compare_gpu.py: ours at each budget, what
the plan predicts, what is allowed, and every peer's point. Writes PREFIX.png and the same
numbers in PREFIX.txt.
    python bench/frontier_chart.py bench/results/gpu-DATE.json [more.json] --cli LOGITLESS
`--cli` asks the plan for predictions the run did not have; it needs no GPU. Needs matplotlib."""

from __future__ import annotations

import argparse
import json
from itertools import cycle
from pathlib import Path
from typing import Any

import gpu_frontier
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

MIB = 1 << 20
Records = list[dict[str, Any]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="JSON of compare_gpu.py")
    parser.add_argument("--cli", type=Path, help="the command line `logitless`, built with CUDA")
    parser.add_argument(
        "--out", type=Path, help="prefix; default: the first JSON's name and -frontier"
    )
    arguments = parser.parse_args()
    first: Path = arguments.results[0]
    arguments.out = arguments.out or first.with_name(first.stem + "-frontier")
    return arguments


def peers(records: Records, head: str) -> Records:
    """Their points; peak memory was measured in the same run."""
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


def draw(axes: pyplot.Axes, head: str, points: Records, others: Records) -> None:
    size, floor = [p["bytes"] / MIB for p in points], points[0]["floor_ms"]
    axes.plot(
        size, [p["ratio"] for p in points], "o-", color="tab:blue", label="Logitless, measured"
    )
    if all(p["predicted_ms"] for p in points):
        predicted = [p["predicted_ms"] / floor for p in points]
        axes.plot(size, predicted, "x--", color="tab:cyan", label="Logitless, predicted")
    axes.plot(size, [p["bound_ms"] / floor for p in points], ":", color="tab:gray", label="allowed")
    highest = 1.5 * max(p["ratio"] for p in points)
    others = sorted(others, key=lambda r: r["ratio"])
    for r, marker in zip(others, cycle("sDv^P*<>X"), strict=False):
        place = (max(r["mib"], size[0] / 2), min(r["ratio"], highest))
        name = r["contender"]  # the figures that are off the chart stand beside the name
        name += f", x {r['ratio']:.1f}" if r["ratio"] > highest else ""
        name += f", {r['mib']:.0f} MiB" if r["mib"] < place[0] else ""
        axes.plot(*place, marker, markersize=6, alpha=0.8, label=name)
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set(
        xscale="log",
        title=head,
        xlabel="MiB beyond inputs and gradients",
        ylabel="time / three products",
    )
    axes.set_ylim(0.9, highest * 1.05)
    axes.legend(fontsize=7)


def main() -> None:
    arguments = parse()
    runs = [json.loads(path.read_text()) for path in arguments.results]
    records: Records = [r for run in runs for r in run["records"]]
    points = [r for r in records if r.get("section") == "frontier" and "bytes" in r]
    heads = list(dict.fromkeys(p["head"] for p in points))
    if not heads:
        raise SystemExit(
            "frontier_chart: no record of section frontier in "
            + ", ".join(map(str, arguments.results))
        )
    text = [", ".join(f"{k} {v}" for k, v in runs[0]["machine"].items())]
    figure, panels = pyplot.subplots(1, len(heads), figsize=(5 * len(heads), 4.5), squeeze=False)
    for axes, head in zip(panels[0], heads, strict=True):
        mine = [p for p in points if p["head"] == head]
        if arguments.cli and not all(p["predicted_ms"] for p in mine):
            shape = tuple(mine[0]["shape"])
            for p, ms in zip(
                mine,
                gpu_frontier.predict(arguments.cli, shape, [p["bytes"] for p in mine]),
                strict=True,
            ):
                p["predicted_ms"] = ms
        others = peers(records, head)
        text += ["", *lines(head, mine, others)]
        draw(axes, head, mine, others)
    machine = runs[0]["machine"]
    figure.suptitle(
        f"Loss and gradients, bf16: time against memory, {machine['device']}, {machine['date']}"
    )
    figure.tight_layout()
    figure.savefig(arguments.out.with_suffix(".png"), dpi=110)
    arguments.out.with_suffix(".txt").write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()

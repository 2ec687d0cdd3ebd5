# SPDX-License-Identifier: Apache-2.0
"""The picture of a run of compare_cpu.py: time of ours and of PyTorch's ways as bars, with the
memory that each holds beyond inputs and gradients. Writes PREFIX.svg and PREFIX-dark.svg.

    python bench/cpu_picture.py bench/results/cpu-DATE.json --out docs/pictures/cpu

Needs matplotlib."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import picture
from matplotlib import pyplot

MIB = 1 << 20
KINDS = {"gradients": "loss and gradients", "loss": "loss alone"}
WORDS = {  # contenders' names in the picture
    "ours": "Logitless",
    "torch eager": "PyTorch, eager",
    "torch.compile": "torch.compile",
    "F.linear_cross_entropy, default": "F.linear_cross_entropy",
    "F.linear_cross_entropy, auto chunks": "the same, auto chunks",
}
CHUNKED = "F.linear_cross_entropy, "  # followed by the rows of a chunk


def word_of(name: str) -> str | None:
    if name in WORDS:
        return WORDS[name]
    return "the same, " + name.removeprefix(CHUNKED) if name.startswith(CHUNKED) else None


def bars_of(group: dict[str, Any]) -> list[tuple[str, float, int | None]]:
    """(name, ms, bytes) of those that were measured, ours first."""
    found = []
    for c in group["contenders"]:
        word = word_of(c["name"])
        if word is None or c["status"] != "ok":
            continue
        found.append((word, c["ms"]["median"], c.get("workspace_bytes", c.get("growth_bytes"))))
    return found


def groups_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The measurements of the run's first shape, which is drawn."""
    groups = [g for g in run["groups"] if g["kind"] in KINDS]
    shape = [groups[0][k] for k in ("tokens", "hidden", "vocab")]
    return [g for g in groups if [g[k] for k in ("tokens", "hidden", "vocab")] == shape]


def draw(theme: picture.Theme, run: dict[str, Any]) -> pyplot.Figure:
    groups = groups_of(run)
    tokens, hidden, vocab = (groups[0][k] for k in ("tokens", "hidden", "vocab"))
    heights = [len(bars_of(g)) + 1.2 for g in groups]
    figure, axes = pyplot.subplots(
        len(groups), 1, figsize=(8, 0.34 * sum(heights) + 0.8), squeeze=False,
        gridspec_kw={"height_ratios": heights}, layout="constrained",
    )  # fmt: skip
    for axis, group in zip(axes[:, 0], groups, strict=True):
        bars = bars_of(group)
        for place, (word, ms, held) in enumerate(bars):
            ours = word == "Logitless"
            axis.barh(-place, ms, color=theme.ours if ours else theme.faint, height=0.72)
            memory = f", {held / MIB:.0f} MiB" if held is not None else ""
            axis.text(ms, -place, f"  {ms:.0f} ms{memory}", va="center", color=theme.text)
        axis.set_yticks([-n for n in range(len(bars))], [word for word, _, _ in bars])
        axis.set_xlim(0, max(ms for _, ms, _ in bars) * 1.35)
        axis.tick_params(left=False, bottom=False, labelbottom=False)
        axis.spines[["left", "bottom"]].set_visible(False)
        axis.set_title(f"{KINDS[group['kind']]}, {group['dtype']}", loc="left", fontsize=11)
    cores = run["machine"]["cores"]
    figure.suptitle(
        f"N {tokens}, D {hidden}, V {vocab} on {cores} cores of {run['machine']['cpu']}",
        x=0.01, ha="left", fontsize=12,
    )  # fmt: skip
    return figure


def draw_run(run: dict[str, Any], prefix: Path) -> list[Path]:
    return picture.both(prefix, lambda theme: draw(theme, run))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="JSON of compare_cpu.py")
    parser.add_argument("--out", type=Path, help="prefix; default: the JSON's name")
    arguments = parser.parse_args()
    run = json.loads(arguments.results.read_text())
    for path in draw_run(run, arguments.out or arguments.results.with_suffix("")):
        print(path)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""bench/frontier_chart.py and cpu_picture.py: the pictures that they make of a run's figures."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHAPE = [8192, 4096, 128256]
PEERS = [  # (contender, milliseconds, MiB); four are close together
    ("torch.compile", 40.4, 2004.0), ("QuACK", 42.2, 2073.0), ("Liger SM90 CuTe", 41.3, 2068.0),
    ("QuACK, older path, untuned", 40.9, 3006.0), ("torch eager", 49.7, 10958.0),
    ("Liger (Triton)", 56.6, 62.7), ("CCE", 162.2, 1.3), ("CCE exact", 204.2, 2068.0),
]  # fmt: skip


def a_run(peers: list[tuple[str, float, float]]) -> dict[str, Any]:
    head = {"head": "llama3", "shape": SHAPE}
    points = [
        {**head, "section": "frontier", "bytes": mib << 20, "ms": ms, "floor_ms": 37.4,
         "ratio": ms / 37.4, "bound_ms": 50.0, "predicted_ms": None}
        for mib, ms in ((164, 47.8), (451, 44.9), (1240, 41.6), (2054, 37.7))
    ]  # fmt: skip
    others = [
        {**head, "section": "heads", "contender": name, "ms": ms, "mib": mib, "ratio": ms / 37.4,
         "ours": False}
        for name, ms, mib in peers
    ]  # fmt: skip
    machine = {"device": "NVIDIA H200", "date": "2026-11-26"}
    return {"machine": machine, "records": points + others}


def chart(folder: pathlib.Path, run: dict[str, Any], *options: str) -> Any:
    (folder / "run.json").write_text(json.dumps(run))
    command = [sys.executable, "-W", "error", str(ROOT / "bench/frontier_chart.py")]
    command += [str(folder / "run.json"), "--out", str(folder / "picture"), *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_run_is_drawn_for_both_pages_and_always_the_same(tmp_path: pathlib.Path) -> None:
    pages = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        done = chart(folder, a_run(PEERS))
        assert done.returncode == 0, done.stderr
        assert all(name in done.stdout for name, _, _ in PEERS)
        pages.append([(folder / f"picture{page}.svg").read_text() for page in ("", "-dark")])
    assert pages[0] == pages[1]
    assert pages[0][0] != pages[0][1]
    for text in pages[0]:
        for words in ("Llama 3", "NVIDIA H200", "Cut Cross-Entropy, exact, 204 ms", "Logitless"):
            assert words in text


def runs_through(box: Any, axes: Any) -> bool:
    """Whether the curve runs through the box, or closer to it than its points are wide: a
    browser's letters are not as wide as those that were measured."""
    curve = max(axes.get_lines(), key=lambda line: len(line.get_xdata()))
    return bool(
        curve.get_transform().transform_path(curve.get_path()).intersects_bbox(box.padded(7))
    )


@pytest.mark.parametrize("committed", [False, True])
def test_words_of_points_beside_each_other_do_not_overlap(
    committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    frontier_chart = pytest.importorskip("frontier_chart")
    import picture
    from matplotlib import pyplot

    run = a_run(PEERS)
    if committed:
        run = json.loads((ROOT / "bench/results/gpu-2026-11-26-frontier.json").read_text())
    points = [r for r in run["records"] if r.get("section") == "frontier" and "bytes" in r]
    others = frontier_chart.peers(run["records"], "llama3")
    figure = frontier_chart.draw(picture.LIGHT, points, others, run["machine"])
    renderer = figure.canvas.get_renderer()
    whole = figure.bbox
    boxes = [
        pyplot.Text.get_window_extent(text, renderer)
        for text in figure.axes[0].texts
        if " ms" in text.get_text() or "Logitless" in text.get_text()
    ]
    assert len(boxes) == len(others) + 1
    for i, box in enumerate(boxes):
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 <= whole.y1
        assert not any(box.overlaps(other) for other in boxes[:i])
        assert not runs_through(box, figure.axes[0])
    pyplot.close(figure)


@pytest.mark.parametrize(
    "change, options, message",
    [
        (lambda run: run["records"].clear(), (), "has no record of section frontier"),
        (lambda run: run.update(a_run([])), (), "has no peers of llama3; allowed: a run"),
        (lambda run: None, ("--head", "gpt2"), "--head: 'gpt2'; allowed: llama3"),
    ],
)
def test_a_run_that_gives_no_picture_is_refused(
    change: Any, options: tuple[str, ...], message: str, tmp_path: pathlib.Path
) -> None:
    run = a_run(PEERS)
    change(run)
    done = chart(tmp_path, run, *options)
    assert done.returncode != 0 and message in done.stderr


def test_the_cpus_run_is_drawn_with_those_that_were_measured(tmp_path: pathlib.Path) -> None:
    def contender(name: str, ms: float, **facts: Any) -> dict[str, Any]:
        return {"name": name, "status": "ok", "ms": {"median": ms}, **facts}

    shape = {"tokens": 1024, "hidden": 768, "vocab": 50257}
    groups = [
        {**shape, "kind": "logits", "dtype": "f32",
         "contenders": [contender("ours, in place", 7)]},
        {**shape, "kind": "gradients", "dtype": "f32", "contenders": [
            contender("ours", 514, workspace_bytes=114 << 20),
            contender("ours, half ignored", 257, workspace_bytes=114 << 20),
            contender("torch.compile", 1257, growth_bytes=193 << 20),
            {"name": "torch eager", "status": "too slow: more than 6 s"},
            contender("F.linear_cross_entropy, 256-row chunks", 1304),
        ]},
        {**shape, "tokens": 8, "kind": "loss", "dtype": "f32",
         "contenders": [contender("ours", 60)]},
    ]  # fmt: skip
    run = {"groups": groups, "machine": {"cores": 2, "cpu": "AMD EPYC"}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    command = [sys.executable, "-W", "error", str(ROOT / "bench/cpu_picture.py")]
    command += [str(tmp_path / "run.json"), "--out", str(tmp_path / "picture")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in ("", "-dark"):
        text = (tmp_path / f"picture{page}.svg").read_text()
        for words in (
            "Logitless",
            "514 ms, 114 MiB",
            "1257 ms, 193 MiB",
            "1304 ms",
            "256-row chunks",
        ):
            assert words in text
        for words in ("eager", "257 ms", "60 ms", "7 ms,"):
            assert f">{words}" not in text and f" {words}" not in text

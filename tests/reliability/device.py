# SPDX-License-Identifier: Apache-2.0
"""Rows of a machine with a GPU: make reliability-device writes them into a file, which make
reliability puts into its table as they are, with their own date."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

from reliability import divergences
from reliability.calls import worst
from reliability.common import (
    OUT,
    ROOT,
    NotHere,
    NotKept,
    Row,
    Settings,
    figures,
    number,
    run,
)  # fmt: skip

RESULTS = OUT / "reliability-device.json"
ABSENT = [
    ("Every element lies within its bound of the reference (CUDA)", "`logitless check`"),
    ("The conformance suite and what is CUDA's own", "`make test-device`"),
    ("memcheck, racecheck, initcheck and synccheck are clean", "`make sanitize-device`"),
    ("The same call gives the same bits (CUDA)", "1 000 runs, other processes"),
    divergences.promise("CUDA"),
]


def gpu(settings: Settings) -> str:
    done = run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], 60)
    if done.returncode != 0 or not done.stdout.strip():
        raise NotHere("no NVIDIA GPU on this machine")
    return done.stdout.splitlines()[0].strip()


def library_path() -> dict[str, str]:
    path = run([ROOT / "scripts/device-library-path"], 60).stdout.strip()
    return {"LD_LIBRARY_PATH": path} if path else {}


def conformance(settings: Settings) -> list[Row]:
    cases = "6" if settings.short else "60"
    done = run(
        [settings.cli, "check", "--json", "--device", "cuda", "--cases", cases], 300, library_path()
    )
    if not done.stdout:
        raise NotKept(f"check ended with {done.returncode}: {done.stderr.strip()}")
    result = json.loads(done.stdout)
    return [
        Row(
            *ABSENT[0],
            f"{number(result['cases'])} cases, {result['failures']} failed; largest error / bound:"
            f" {worst(result['rows'], 'dtype')}",
            result["failures"] == 0 and result["cases"] > 0,
        )
    ]


def suite(settings: Settings) -> list[Row]:
    done = run([ROOT / "scripts/test-device", settings.build], 1200)
    found = re.search(r"test-device: PASSED, (\d+) parts", done.stdout)
    if found is None:
        raise NotKept((done.stdout.strip() or done.stderr.strip()).splitlines()[-1][:300])
    figure = f"{found.group(1)} parts passed, the device's own kernels and the portable ones"
    return [Row(*ABSENT[1], figure)]


def sanitizers(settings: Settings) -> list[Row]:
    done = run([ROOT / "scripts/sanitize-device", settings.build], 1800)
    verdicts = re.findall(r"^(\w+)\.\S+ +(clean|FAILED)", done.stdout, re.M)
    tools = sorted({tool for tool, _ in verdicts})
    counts = ", ".join(
        f"{tool} {sum(v == (tool, 'clean') for v in verdicts)} /"
        f" {sum(t == tool for t, _ in verdicts)} runs clean"
        for tool in tools
    )
    kernels = re.search(r"(\d+) kernels seen", done.stdout)
    if not verdicts:
        raise NotHere((done.stdout.strip() or done.stderr.strip() or "no word").splitlines()[-1])
    figure = counts + (f"; {kernels.group(1)} kernels seen" if kernels else "")
    return [Row(*ABSENT[2], figure, done.returncode == 0)]


def bits(settings: Settings) -> list[Row]:
    runs = 16 if settings.short else 1000
    first = figures(settings, "bits", 900, "--runs", runs, "--device", 1)
    others = [figures(settings, "bits", 300, "--runs", 2, "--device", 1) for _ in range(4)]
    differing = sum(other["digest"] != first["digest"] for other in others)
    figure = (
        f"{number(runs)} runs of {first['cases']} calls, {differing} of 4 other processes differ"
    )
    return [Row(*ABSENT[3], figure, differing == 0)]


def random_divergences(settings: Settings) -> list[Row]:
    calls = 2_000 if settings.short else 20_000
    return divergences.random_calls(settings, calls, 1, library_path())


def save(rows: list[Row], path: Path = RESULTS) -> None:
    """Writes the rows, and keeps the earlier rows of parts that did not run."""
    promises = {row.promise for row in rows}
    if path.is_file():
        before = [Row(**row) for row in json.loads(path.read_text())]
        rows = [row for row in before if row.promise not in promises] + rows
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def saved(settings: Settings) -> list[Row]:
    """The rows that make reliability-device wrote; without its file, rows that say "not run"."""
    if not RESULTS.is_file():
        return [Row(promise, how, "not run here", None) for promise, how in ABSENT]
    return [Row(**row) for row in json.loads(RESULTS.read_text())]

# SPDX-License-Identifier: Apache-2.0
"""The promises about calls of the library: bounds, bits, memory, and refusals."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from reliability.common import NotKept, Row, Settings, figures, number, run


def worst(rows: list[dict[str, Any]], key: str) -> str:
    ratios: dict[str, float] = defaultdict(float)
    for row in rows:
        ratios[row[key]] = max(ratios[row[key]], row["worst_ratio"])
    return ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())


def conformance(settings: Settings) -> list[Row]:
    """Each element of each output against the reference in double, by `logitless check`."""
    options = ["--cases", "6"] if settings.short else ["--cases", "150", "--every-isa"]
    done = run([settings.cli, "check", "--json", "--device", "cpu", *options], 900)
    if done.returncode not in (0, 1) or not done.stdout:
        raise NotKept(f"check ended with {done.returncode}: {done.stderr.strip()}")
    result = json.loads(done.stdout)
    rows = result["rows"]
    sets = {row["isa"] for row in rows if row["isa"]}
    where = f" on each of {', '.join(sorted(sets))}" if sets else ""
    return [
        Row(
            "Every element lies within its bound of the reference (CPU)",
            f"`logitless check`: options alone and in pairs, and shapes{where}",
            f"{number(result['cases'])} cases, {result['failures']} failed; largest error / bound:"
            f" {worst(rows, 'dtype')}",
            result["failures"] == 0 and result["cases"] > 0,
        )
    ]


def bits(settings: Settings) -> list[Row]:
    runs, processes = (16, 2) if settings.short else (1000, 8)
    first = figures(settings, "bits", 1200, "--runs", runs)
    others = [figures(settings, "bits", 300, "--runs", 2) for _ in range(processes)]
    differing = sum(other["digest"] != first["digest"] for other in others)
    return [
        Row(
            "The same call gives the same bits",
            "every op except divergences and Combine, in every dtype, on 1 to 8 threads; every second"
            " run beside other load; other processes",
            f"{number(runs)} runs of {first['cases']} calls and {processes} other processes:"
            f" {number(int(first['bytes']) // 2**20)} MiB compared, {differing} processes differ",
            differing == 0,
        )
    ]


def soak(settings: Settings) -> list[Row]:
    calls = 30_000 if settings.short else 1_000_000
    got = figures(settings, "soak", 1200, "--calls", calls, "--threads", 2)
    return [
        Row(
            "Calls leave nothing behind",
            "random ops and sizes from two threads, an eighth refused; memory, threads and open"
            " files after the first tenth and at the end",
            f"{number(got['calls'])} calls: heap + {number(got['heap growth'])} bytes, resident +"
            f" {int(got['resident growth']) // 1024} KiB, no thread and no file more",
        )
    ]


def malformed(settings: Settings) -> list[Row]:
    calls = 30_000 if settings.short else 200_000
    got = figures(settings, "malformed", 600, "--calls", calls)
    return [
        Row(
            "A malformed call is refused with a status and writes nothing",
            "one to three random mistakes in the structs of a call; every byte of inputs, outputs"
            " and guards compared",
            f"{number(got['calls'])} calls tried, {number(got['refused'])} refused, by"
            f" {got['kinds of status']} kinds of status",
            got["calls"] == got["refused"],
        )
    ]


def hostile(settings: Settings) -> list[Row]:
    got = figures(settings, "hostile", 900, "--step", 13 if settings.short else 1)
    return [
        Row(
            "Hostile inputs have defined results, a field at a time",
            "NaN and infinities in every floating input, targets far outside; sizes, strides and"
            " offsets near 2^31 and 2^56; every address of 64",
            f"{got['fields']} fields: {number(got['values'])} values within the reference's word,"
            f" {number(got['extents'])} extents refused, {number(got['misalignments'])} addresses"
            " refused off their element and right on it",
        )
    ]

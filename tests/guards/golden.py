#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares what every planner decides now with what was recorded, call by call.

    plans.py [--all] [--record] PROGRAM

PROGRAM is guard_plans. Says how many lines differ and in what, then the first of them (all with
--all); --record writes what it says now to plans.txt.xz. Exit code 1: something differs."""

from __future__ import annotations

import argparse
import lzma
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

GOLDEN = Path(__file__).with_name("plans.txt.xz")
SKIPPED = 77  # the program's own code: this build does not have what is planned for
SHOWN = 20

Facts = dict[str, str]


def parse(text: str) -> dict[str, Facts]:
    """By "call | device | memory" the decision's keys and values."""
    lines = (line.rpartition(" | ") for line in text.splitlines())
    return {
        place: dict(fact.split("=", 1) for fact in decision.split(" "))
        for place, _, decision in lines
    }


def change(old: Facts, new: Facts) -> Facts:
    """What differs, as "old -> new"; what is left out of a line is as usual."""
    keys = dict.fromkeys([*old, *new])
    return {
        key: f"{old.get(key, '(usual)')} -> {new.get(key, '(usual)')}"
        for key in keys
        if old.get(key) != new.get(key)
    }


def compare(old: dict[str, Facts], new: dict[str, Facts], shown: int | None) -> list[str]:
    """A report, empty where nothing differs."""
    changes = {place: change(old[place], new[place]) for place in old.keys() & new.keys()}
    changes = {place: what for place, what in sorted(changes.items()) if what}
    missing, added = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    if not changes and not missing and not added:
        return []
    report = [
        f"{len(changes)} of {len(old)} lines differ; {len(missing)} are gone, {len(added)} are new"
    ]
    devices: dict[str, Counter[str]] = defaultdict(Counter)
    for place, what in changes.items():
        devices[" ".join(sorted(what))][place.split(" | ")[1]] += 1
    for keys, counts in sorted(devices.items(), key=lambda item: -item[1].total())[:shown]:
        where = ", ".join(f"{device} {count}" for device, count in counts.most_common())
        report.append(f"{counts.total():7} in {keys}  ({where})")
    if shown is not None and len(devices) > shown:
        report.append(f"        and {len(devices) - shown} other sets of keys")
    for place, what in list(changes.items())[:shown]:
        report += [place, *(f"    {key}: {values}" for key, values in what.items())]
    report += [f"gone: {place}" for place in missing[:shown]]
    report += [f"new: {place}" for place in added[:shown]]
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every line that differs")
    parser.add_argument("--record", action="store_true", help="writes the new golden")
    parser.add_argument("program", type=Path)
    arguments = parser.parse_args()
    done = subprocess.run([arguments.program], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print(done.stdout or f"{arguments.program} failed")
        return SKIPPED if done.returncode == SKIPPED else 1
    golden = lzma.decompress(GOLDEN.read_bytes()).decode() if GOLDEN.exists() else ""
    if done.stdout == golden:
        print(f"plans: {golden.count(chr(10))} lines as recorded")
        return 0
    report = compare(parse(golden), parse(done.stdout), None if arguments.all else SHOWN)
    print("\n".join(report or ["the lines stand in another order"]))
    if arguments.record:
        GOLDEN.write_bytes(lzma.compress(done.stdout.encode(), preset=9 | lzma.PRESET_EXTREME))
        print(f"recorded: {GOLDEN.name}, {GOLDEN.stat().st_size} bytes")
        return 0
    print(
        "Where this is meant: scripts/compare-plans --record, and say in the commit what changed."
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares what every planner decides now, or what every call launches, with what was recorded.

    golden.py [--all] [--record] [--old OLD] PROGRAM

PROGRAM is guard_plans or guard_launches, NAME.txt.xz beside this file what was recorded. Says how
many lines differ and in what, then the first of them (all with --all), and of launches their
transcript: as a difference from OLD's, the same program of an older build. --record writes what
PROGRAM says now. Exit code 1: something differs."""

from __future__ import annotations

import argparse
import difflib
import lzma
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

SKIPPED = 77  # the program exits with it where this build does not have what is planned for
SHOWN = 20
TRANSCRIPTS = 3

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


def transcripts(places: list[str], program: Path, old: Path | None) -> list[str]:
    """What guard_launches writes down of these calls; against OLD's where that is given."""

    def ask(one: Path, place: str) -> list[str]:
        done = subprocess.run([one, place], stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.splitlines()

    report = []
    for place in places:
        new = ask(program, place)
        if old is None:
            report += new
        else:
            report += difflib.unified_diff(ask(old, place), new, "recorded", "now", lineterm="")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every line that differs")
    parser.add_argument("--record", action="store_true", help="writes what is said now")
    parser.add_argument("--old", type=Path, help="the same program of an older build")
    parser.add_argument("program", type=Path)
    arguments = parser.parse_args()
    name = arguments.program.name.removeprefix("guard_")
    recorded = Path(__file__).with_name(name + ".txt.xz")
    done = subprocess.run([arguments.program], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print(done.stdout or f"{arguments.program} failed")
        return SKIPPED if done.returncode == SKIPPED else 1
    golden = lzma.decompress(recorded.read_bytes()).decode() if recorded.exists() else ""
    if done.stdout == golden:
        print(f"{name}: {golden.count(chr(10))} lines as recorded")
        return 0
    old, new = parse(golden), parse(done.stdout)
    report = compare(old, new, None if arguments.all else SHOWN)
    print("\n".join(report or ["the lines stand in another order"]))
    if arguments.record:
        recorded.write_bytes(lzma.compress(done.stdout.encode(), preset=9 | lzma.PRESET_EXTREME))
        print(f"recorded: {recorded.name}, {recorded.stat().st_size} bytes")
        return 0
    if name == "launches":
        places = sorted(place for place in old.keys() & new.keys() if old[place] != new[place])
        print("\n".join(transcripts(places[:TRANSCRIPTS], arguments.program, arguments.old)))
    print(
        f"Where this is meant: scripts/compare-golden {name} --record, and say in the commit what"
        " changed."
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())

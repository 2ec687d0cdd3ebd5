#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares what every planner decides now, or what every call launches, with what was recorded.

    golden.py [--all] [--record] [--old OLD] PROGRAM

PROGRAM is guard_plans or guard_launches. NAME.txt.xz beside this file has two hashes for each call:
of its name and of everything that PROGRAM said of it when that was recorded. Names the calls that
differ (the first of them, all with --all) and prints what is said of them now; with OLD, the same
program of an older build, what changed instead. --record writes what PROGRAM says now. Exit
code 1: something differs."""

from __future__ import annotations

import argparse
import difflib
import hashlib
import lzma
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

SKIPPED = 77  # exit code where this build lacks kernels
SHOWN = 20
TRANSCRIPTS = 3

Facts = dict[str, str]


def by_call(text: str) -> dict[str, str]:
    """All lines about a call, by the call's text."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in text.splitlines():
        found[line.partition(" | ")[0]].append(line)
    return {call: "\n".join(lines) for call, lines in found.items()}


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def digests(calls: dict[str, str]) -> dict[str, str]:
    """The hash of a call's lines, by the hash of its name."""
    found = {short_hash(call): short_hash(lines) for call, lines in calls.items()}
    assert len(found) == len(calls), "two calls have one hash: make it longer"
    return found


def differing(recorded: dict[str, str], calls: dict[str, str]) -> tuple[list[str], int]:
    """The calls that are new or not as recorded, and how many recorded ones are gone."""
    now = digests(calls)
    changed = [call for call in calls if recorded.get(key := short_hash(call)) != now[key]]
    return sorted(changed), len(recorded.keys() - now.keys())


def parse(text: str) -> dict[str, Facts]:
    """The decision's keys and values, by "call | device | memory"."""
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


def read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    lines = lzma.decompress(path.read_bytes()).decode().splitlines()
    return dict(line.split(" ") for line in lines)


def write(path: Path, calls: dict[str, str]) -> None:
    text = "".join(f"{key} {value}\n" for key, value in sorted(digests(calls).items()))
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"recorded: {path.name}, {path.stat().st_size} bytes")


def said_by(program: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program], stdout=subprocess.PIPE, text=True)


def report_of(arguments: argparse.Namespace, text: str, changed: list[str]) -> list[str]:
    """What is said of the changed calls, as differences from OLD where that is given."""
    calls, shown = by_call(text), None if arguments.all else SHOWN
    if arguments.old is None:
        report = [line for call in changed[:shown] for line in calls[call].splitlines()]
        if not arguments.all and len(changed) > SHOWN:
            report.append(f"and {len(changed) - SHOWN} other calls")
        report.append("--old PROGRAM, the same program of an older build, shows what changed")
        places = [line.rpartition(" | ")[0] for call in changed for line in calls[call].split("\n")]
    else:
        old, new = parse(said_by(arguments.old).stdout), parse(text)
        report = compare(old, new, shown)
        places = sorted(place for place in old.keys() & new.keys() if old[place] != new[place])
    if arguments.program.name == "guard_launches":
        report += transcripts(places[:TRANSCRIPTS], arguments.program, arguments.old)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every call that differs")
    parser.add_argument("--record", action="store_true", help="writes what is said now")
    parser.add_argument("--old", type=Path, help="the same program of an older build")
    parser.add_argument("program", type=Path)
    arguments = parser.parse_args()
    name = arguments.program.name.removeprefix("guard_")
    path = Path(__file__).with_name(name + ".txt.xz")
    done = said_by(arguments.program)
    if done.returncode != 0:
        print(done.stdout or f"{arguments.program} failed")
        return SKIPPED if done.returncode == SKIPPED else 1
    calls, recorded = by_call(done.stdout), read(path)
    changed, gone = differing(recorded, calls)
    if not changed and not gone:
        print(f"{name}: {len(calls)} calls as recorded")
        return 0
    print(f"{len(changed)} of {len(calls)} calls are new or differ; {gone} recorded ones are gone")
    print("\n".join(report_of(arguments, done.stdout, changed)))
    if arguments.record:
        write(path, calls)
        return 0
    print(
        f"Where this is meant: scripts/compare-golden {name} --record, and say in the commit what"
        " changed."
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The files that a call passes from the C entry to what it launches, beside the table of
docs/design.md, "The way of one call".
    way_test.py PROGRAM ADDR2LINE DESIGN
PROGRAM (guard_way.cpp) runs every op on every backend and prints which calls were open at each
launch, ADDR2LINE says in which files these are. A column's last file tells which launches it
means: those of the linear forward that end there pass the column's files and no other.
No launch of any op passes more than five. Files that the section names under "Not counted" pass on
what they are given; behind those under "It ends" lies the launch itself.
Exit code 1: the table differs, or a backend lacks an op; 77: this build lacks kernels."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

MOST = 5
FILE = re.compile(r"`(src/[\w./-]+)`")


class Section:
    """What the page says."""

    def __init__(self, page: str) -> None:
        text = page.split("## The way of one call\n", 1)[1].split("\n## ", 1)[0]
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in text.splitlines()
            if line.startswith("|")
        ]
        names = [re.findall(r"`(\w+)`", cell) for cell in rows[0][1:]]
        self.columns: dict[str, list[str]] = {name: [] for (name,) in names}
        for row in rows[2:]:
            for (name,), cell in zip(names, row[1:]):
                self.columns[name] += FILE.findall(cell)
        self.passed_on = self.files_of(text, "Not counted")
        self.ends = self.files_of(text, "It ends")

    @staticmethod
    def files_of(text: str, opening: str) -> set[str]:
        paragraph = next(p for p in text.split("\n\n") if p.startswith(opening))
        return set(FILE.findall(paragraph))


def files_at(program: str, addr2line: str, addresses: Iterable[str]) -> dict[str, list[str]]:
    """The source files of each address, innermost first: several where calls were inlined."""
    asked = sorted(addresses)
    answer = subprocess.run(
        [addr2line, "-e", program, "-a", "-i"],
        input="\n".join(asked), stdout=subprocess.PIPE, text=True, check=True,
    ).stdout  # fmt: skip
    found: dict[str, list[str]] = {}
    here: list[str] = []
    for line in answer.splitlines():
        if line.startswith("0x"):
            here = found[f"{int(line, 16):x}"] = []
            continue
        parts: list[str] = []
        for part in line.rsplit(":", 1)[0].split("/"):
            if part == "..":
                parts.pop()
            elif part != ".":
                parts.append(part)
        at = len(parts) - 1 - parts[::-1].index("src") if "src" in parts else len(parts)
        here.append("/".join(parts[at:]) or "/".join(parts))
    return found


def way_of(frames: list[str], section: Section) -> list[str]:
    """Files in the order in which they are come to, from the C entry to the launch."""
    way: list[str] = []
    for file in reversed(frames):
        if file in section.ends:
            break
        own = file.startswith("src/") or (file == "??" and way)
        if own and file not in section.passed_on and file not in way:
            way.append(file)
    return way


def main() -> int:
    program, addr2line, page = sys.argv[1:]
    section = Section(Path(page).read_text())
    run = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode != 0:
        print("\n".join(line for line in run.stdout.splitlines() if " | " not in line))
        return run.returncode
    launches = [line.split(" | ") for line in run.stdout.splitlines()]
    addresses = {address for _, frames in launches for address in frames.split()}
    files = files_at(program, addr2line, addresses)
    ways: dict[str, set[tuple[str, ...]]] = {}  # the key is a call, the value its ways
    for call, frames in launches:
        inlined = [file for address in frames.split() for file in files[address]]
        ways.setdefault(call, set()).add(tuple(way_of(inlined, section)))

    wrong = []
    for name, column in section.columns.items():
        known = {
            way
            for call, all_of_call in ways.items()
            for way in all_of_call
            if call.startswith(f"{name} lin-forward ") and way and way[-1] == column[-1]
        }
        if known != {tuple(column)}:
            found = "; ".join(", ".join(way) for way in sorted(known)) or "no launch ends there"
            wrong.append(f"{name}: the page says {', '.join(column)}\n  found: {found}")
    for call, all_of_call in ways.items():
        for way in sorted(all_of_call):
            if len(way) > MOST or "??" in way:
                wrong.append(f"{call}: {len(way)} files: {', '.join(way)}")
    for line in wrong:
        print(line)
    print(f"{len(launches)} ways of {len(ways)} calls, {len(wrong)} not as {page} says")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

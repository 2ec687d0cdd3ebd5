# SPDX-License-Identifier: Apache-2.0
"""Which branches and lines the host tests take, of the files below. llvm-cov counts a branch once
for every instantiation of a template and every instruction set; here the same place in the source
is one branch, each of whose two outcomes is taken if any of them took it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reliability.common import ROOT

SCOPE = re.compile(r"include/.*|src/[^/]+\.(?:cpp|h)|src/(?:cpu|reference|row)/.*|cli/safetensors[^/]*")
LEAST_BRANCHES = 90  # percent
Place = tuple[int, int, int, int]  # first line and column, last line and column


@dataclass
class FileCounts:
    lines: dict[int, bool] = field(default_factory=dict)
    # For each branch: whether it was ever taken, and whether it was ever not taken.
    branches: dict[Place, list[bool]] = field(default_factory=dict)
    # Branches only in instruction sets that never ran.
    absent: set[Place] = field(default_factory=set)

    def outcomes(self) -> tuple[int, int]:
        """Covered and all outcomes of branches."""
        return sum(map(sum, self.branches.values())), 2 * len(self.branches)


@dataclass
class Coverage:
    files: dict[str, FileCounts] = field(default_factory=dict)
    absent_sets: set[str] = field(default_factory=set)

    def branches(self) -> tuple[int, int]:
        pairs = [counts.outcomes() for counts in self.files.values()]
        return sum(p[0] for p in pairs), sum(p[1] for p in pairs)

    def lines(self) -> tuple[int, int]:
        every = [taken for counts in self.files.values() for taken in counts.lines.values()]
        return sum(every), len(every)


def instruction_set(function: str) -> str | None:
    """Highway puts each set's code into a namespace of its name."""
    found = re.search(r"(\d+)(N_\w+)", function)  # a mangled name starts with its length
    return found.group(2)[2 : int(found.group(1))] if found else None


def in_scope(name: str) -> str | None:
    try:
        relative = str(Path(name).resolve().relative_to(ROOT))
    except ValueError:
        return None
    return relative if SCOPE.fullmatch(relative) else None


def add_function(function: dict[str, Any], coverage: Coverage, absent: bool) -> None:
    names = [in_scope(name) for name in function["filenames"]]
    # Code regions have (line, column) ends and a count; the innermost one decides whether a place
    # was reached.
    code = [r for r in function["regions"] if r[7] == 0]
    for region in code:
        name = names[region[5]]
        if name is None or absent:
            continue
        lines = coverage.files.setdefault(name, FileCounts()).lines
        for line in range(region[0], region[2] + 1):
            lines.setdefault(line, False)
    for line, taken, name in line_counts(code, names):
        if not absent:
            lines = coverage.files.setdefault(name, FileCounts()).lines
            lines[line] = lines.get(line, False) or taken
    for branch in function["branches"]:
        name = names[branch[6]]
        if name is None:
            continue
        counts = coverage.files.setdefault(name, FileCounts())
        place: Place = tuple(branch[:4])
        if absent:
            counts.absent.add(place)
            continue
        taken, not_taken = branch[4] > 0, branch[5] > 0
        if not taken and not not_taken and reached(code, branch):
            continue  # constant in this instantiation, so no branch
        outcomes = counts.branches.setdefault(place, [False, False])
        outcomes[0] |= taken
        outcomes[1] |= not_taken


def line_counts(code: list[list[int]], names: list[str | None]) -> Iterable[tuple[int, bool, str]]:
    """Each line of a function with whether it ran: by the innermost region that covers it."""
    innermost: dict[tuple[int, int], list[int]] = {}
    for region in code:
        for line in range(region[0], region[2] + 1):
            known = innermost.get((region[5], line))
            if known is None or size(region) <= size(known):
                innermost[region[5], line] = region
    for (file, line), region in innermost.items():
        name = names[file]
        if name is not None:
            yield line, region[4] > 0, name


def size(region: list[int]) -> tuple[int, int]:
    return region[2] - region[0], region[3] - region[1]


def reached(code: list[list[int]], branch: list[int]) -> bool:
    start = (branch[0], branch[1])
    around = [
        r for r in code
        if r[5] == branch[6] and (r[0], r[1]) <= start and (r[2], r[3]) >= (branch[2], branch[3])
    ]  # fmt: skip
    if not around:
        return False
    return min(around, key=size)[4] > 0


def merge(exports: Iterable[dict[str, Any]]) -> Coverage:
    """Of exports of llvm-cov, one a program, over the same profile."""
    functions = [f for export in exports for d in export["data"] for f in d["functions"]]
    ran: dict[str, bool] = {}
    for function in functions:
        name = instruction_set(function["name"])
        if name is not None:
            ran[name] = ran.get(name, False) or function["count"] > 0
    coverage = Coverage(absent_sets={name for name, did in ran.items() if not did})
    for function in functions:
        absent = instruction_set(function["name"]) in coverage.absent_sets
        add_function(function, coverage, absent)
    for counts in coverage.files.values():
        counts.absent -= counts.branches.keys()
    return coverage


def percent(pair: tuple[int, int]) -> float:
    return 100 * pair[0] / pair[1] if pair[1] else 100.0


def write_list(coverage: Coverage, path: Path) -> None:
    """Writes each file's share of lines and branches, and every branch outcome that no test takes,
    by line and column."""
    text = ["# What the host tests do not reach", ""]
    text += ["| file | lines | branches |", "|---|---|---|"]
    for name, counts in sorted(coverage.files.items()):
        lines = (sum(counts.lines.values()), len(counts.lines))
        text.append(f"| {name} | {percent(lines):.1f} % | {percent(counts.outcomes()):.1f} % |")
    text += ["", "Outcomes of branches that no test takes (file:line:column: outcome):"]
    for name, counts in sorted(coverage.files.items()):
        source = (ROOT / name).read_text().splitlines()
        for place, outcomes in sorted(counts.branches.items()):
            missing = " and ".join(w for w, o in zip(("true", "false"), outcomes) if not o)
            if missing:
                piece = source[place[0] - 1][
                    place[1] - 1 : place[3] - 1 if place[0] == place[2] else None
                ]
                text.append(f"- {name}:{place[0]}:{place[1]}: {missing}: `{piece}`")
    if coverage.absent_sets:
        names = ", ".join(sorted(coverage.absent_sets))
        text += ["", f"Instruction sets absent on this machine: {names}. Branches in them alone:"]
        apart = [(n, len(c.absent)) for n, c in sorted(coverage.files.items()) if c.absent]
        text += [f"- {name}: {count}" for name, count in apart] or ["- none"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text) + "\n")


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content

# SPDX-License-Identifier: Apache-2.0
"""Where $LOGITLESS_TEST_SEED is set (scripts/test: the number of commits), a test function with
more than SWEPT parameter sets runs a third of them, with more than MANY a sixth, and with the next
seeds the others. Tests marked `slow` run at one seed of three. All run without it, and with
LOGITLESS_TEST_FULL=1. What ran is in the last lines of pytest, and a line of
$LOGITLESS_TEST_COUNTS, if that names a file."""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Container

import pytest

PARTS = 3
SWEPT = 3
MANY = 12
COUNTED = pytest.StashKey[tuple[int, int]]()


def hash_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def part(names: list[str], seed: int, slow: Container[str] = ()) -> set[str]:
    """The node ids that run. They are sorted by hash, because neighbours share a dtype or an op.
    A function's hash moves its parts, so that no commit gets the larger part of every function.
    """
    functions: dict[str, list[str]] = {}
    for name in names:
        functions.setdefault(name.partition("[")[0], []).append(name)
    chosen: set[str] = set()
    for function, every in functions.items():
        every.sort(key=lambda name: (hash_of(name), name))
        if len(every) <= SWEPT:
            chosen.update(n for n in every if n not in slow or (seed + hash_of(n)) % PARTS == 0)
            continue
        parts = PARTS if len(every) <= MANY else 2 * PARTS
        chosen.update(every[(seed + hash_of(function)) % parts :: parts])
    return chosen


def rotate(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For pytest_collection_modifyitems."""
    seed = os.environ.get("LOGITLESS_TEST_SEED")
    if seed is None or os.environ.get("LOGITLESS_TEST_FULL") == "1":
        return
    slow = {item.nodeid for item in items if item.get_closest_marker("slow")}
    chosen = part([item.nodeid for item in items], int(seed), slow)
    counted = len(chosen), len(items)
    if hasattr(config, "workeroutput"):  # one of pytest-xdist's processes; each collects everything
        config.workeroutput["rotation"] = counted
    else:
        config.stash[COUNTED] = counted
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def node_down(node: object) -> None:
    """For pytest_testnodedown, in the process that has no tests of its own."""
    output = getattr(node, "workeroutput", {})  # a process that crashed has none
    if "rotation" in output:
        node.config.stash[COUNTED] = tuple(output["rotation"])  # type: ignore[attr-defined]


def report(terminal: pytest.TerminalReporter) -> None:
    """For pytest_terminal_summary."""
    counted = terminal.config.stash.get(COUNTED, None)
    if counted is None:
        return
    terminal.write_line(f"{counted[0]:,} of {counted[1]:,} cases; LOGITLESS_TEST_FULL=1 runs all")
    if file := os.environ.get("LOGITLESS_TEST_COUNTS"):
        with pathlib.Path(file).open("a") as counts:
            counts.write(f"{counted[0]} {counted[1]}\n")

# SPDX-License-Identifier: Apache-2.0
"""Rows of the page, the settings of a run, and how a part runs a program."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
OUT = ROOT / "out"


@dataclass
class Row:
    """One line of the table. `kept` is None where nothing was tried here."""

    promise: str
    how: str
    figure: str
    kept: bool | None = True
    where: str = ""  # date and machine; empty for this run


@dataclass
class Settings:
    build: Path  # the folder of the programs
    short: bool = False
    seconds_left: float = 0.0  # for fuzzing and mutants, which can use any amount
    notes: list[str] = field(default_factory=list)  # paragraphs under the table

    def program(self, name: str) -> Path:
        return self.build / "tests" / f"reliability_{name}"

    @property
    def cli(self) -> Path:
        return self.build / "cli/logitless"


class NotKept(Exception):
    """A promise is broken; the text is the figure of its row."""


class NotHere(Exception):
    """What a part needs is not on this machine or in this build; the text says what."""


def run(
    command: Sequence[str | Path], timeout: float, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [str(word) for word in command], check=False, capture_output=True, text=True,
            errors="replace", timeout=timeout, stdin=subprocess.DEVNULL, cwd=ROOT,
            env={**os.environ, "LOGITLESS_WEBGPU_LIBRARY": "none", **(environment or {})},
        )  # fmt: skip
    except FileNotFoundError:
        raise NotHere(f"there is no {Path(command[0]).name} here") from None
    except subprocess.TimeoutExpired:
        raise NotKept(f"{Path(command[0]).name} did not end in {timeout:.0f} s") from None


def succeed(
    command: Sequence[str | Path], timeout: float, environment: dict[str, str] | None = None
) -> str:
    done = run(command, timeout, environment)
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        reason = lines[-1] if lines else "no word"
        raise NotKept(f"{Path(command[0]).name} ended with {done.returncode}: {reason}")
    return done.stdout


def figures(settings: Settings, name: str, timeout: float, *options: str | int) -> dict[str, str]:
    """The lines "name: value" of a program of tests/reliability."""
    text = succeed([settings.program(name), *map(str, options)], timeout)
    return dict(re.findall(r"^([a-z ]+): (\w+)$", text, re.M))


def number(value: str | int) -> str:
    return f"{int(value):,}".replace(",", " ")


def ctest(build: Path, expression: str, timeout: float, *options: str) -> tuple[int, int]:
    """How many tests of that name passed, and how many have a program in this build."""
    done = run(
        ["ctest", "--test-dir", build, "--tests-regex", expression, "--parallel",
         str(len(os.sched_getaffinity(0))), *options],
        timeout,
    )  # fmt: skip
    # CMake 4 leaves out the number of failures if there are none.
    found = re.search(r"% tests passed(?:, (\d+) tests? failed)? out of (\d+)", done.stdout)
    if found is None:
        return 0, 0
    failed, total = int(found.group(1) or 0), int(found.group(2))
    absent = done.stdout.count("***Not Run")
    return total - failed, total - absent


def cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown CPU"
    found = re.search(r"^model name\s*: (.*)$", text, re.M)
    return found.group(1).strip() if found else "unknown CPU"


def machine() -> str:
    return f"{len(os.sched_getaffinity(0))} cores, {cpu_name()}"

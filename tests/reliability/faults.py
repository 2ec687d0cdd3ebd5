# SPDX-License-Identifier: Apache-2.0
"""Faults that are put in and must be survived."""

from __future__ import annotations

import re

from reliability.common import NotHere, Row, Settings, ctest, figures, number, run

# Faults that tests of the suite cover: the fault, how it is made, and the tests, by their ctest
# name or as a program and its filter.
TESTED = [
    (
        "A device that is lost is a status, and the next call makes another",
        "WebGPU on a software adapter, the device destroyed under the library",
        "webgpu.device",
    ),
    (
        "A driver or a device that is absent, too old or silent is a status (CUDA)",
        "machines that answer as the test says, in place of the driver and of cuBLASLt",
        ("cuda_recorded_test", "CudaMachines.*"),
    ),
    (
        "A question to the driver that fails is a status before anything is launched (CUDA)",
        "every answer of every call's questions made an error in turn",
        ("cuda_recorded_test", "*CudaRecorded.AnyQuestion*"),
    ),
    (
        "A WebGPU library that is absent, late or silent is a status",
        "a library that answers as the test says",
        "webgpu_library_test",
    ),
    (
        "A file truncated while it is read, a full disk, SIGINT in the middle of writing:"
        " one line, and no file half written or left behind",
        "the command line under each of them",
        "cli_files",
    ),
]


def injected(settings: Settings) -> list[Row]:
    """tests/reliability/faults.cpp: a process for each fault."""
    got = figures(settings, "faults", 1200, "--forks", 40 if settings.short else 1000)
    entries = got["entry points"]
    return [
        Row(
            "A failed allocation is a status, nothing is written, the next call is right",
            f"each allocation of each of {entries} entry points fails in a process of its own,"
            " alone and with all that follow",
            f"{number(got['allocation failures'])} faults injected, all survived",
        ),
        Row(
            "A thread that cannot start costs time, not the result",
            f"each start of a thread in each of {entries} entry points fails likewise",
            f"{number(got['thread failures'])} faults injected, all survived",
        ),
        Row(
            "A forked child uses the library whatever its parent's threads were doing",
            "fork while two other threads are inside calls; the child makes three of its own",
            f"{number(got['forks'])} forks, all children right",
        ),
        Row(
            "A backend that is absent is a status with the reason",
            "`describe_backend` and `warmup` of CUDA and WebGPU here",
            f"{got['absent backends']} absent backends, each with a reason",
        ),
    ]


def tested(settings: Settings) -> list[Row]:
    rows = []
    for promise, how, which in TESTED:
        try:
            figure, kept = (
                by_program(settings, *which)
                if isinstance(which, tuple)
                else by_name(settings, which)
            )
        except NotHere:
            figure, kept = "not in this build", None
        rows.append(Row(promise, how, figure, kept))
    return rows


def by_name(settings: Settings, name: str) -> tuple[str, bool]:
    passed, total = ctest(settings.build, f"^{re.escape(name)}$", 900)
    if total == 0:
        raise NotHere(name)
    return f"`ctest -R {name}`: {'passed' if passed == total else 'FAILED'}", passed == total


def by_program(settings: Settings, program: str, expression: str) -> tuple[str, bool]:
    done = run([settings.build / "tests" / program, f"--gtest_filter={expression}"], 900)
    ran = re.search(r"(\d+) tests? from .* ran\.", done.stdout)
    passed = re.search(r"\[  PASSED  \] (\d+) test", done.stdout)
    total = int(ran.group(1)) if ran else 0
    count = int(passed.group(1)) if passed else 0
    figure = f"`{program} --gtest_filter={expression}`: {count} of {total} passed"
    return figure, done.returncode == 0 and count == total > 0

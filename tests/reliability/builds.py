# SPDX-License-Identifier: Apache-2.0
"""What needs builds of its own: sanitizers, fuzzing, coverage, mutants. Minutes each."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

from reliability import coverage
from reliability.common import (
    OUT,
    ROOT,
    NotHere,
    NotKept,
    Row,
    Settings,
    ctest,
    number,
    run,
    succeed,
)

BUILD_SECONDS = 2400
# The programs of the build "test" that the parts run, and that faults.TESTED asks ctest for.
OWN = ("bits", "divergences", "soak", "malformed", "hostile", "faults")
PROGRAMS_RUN = ["logitless", "logitless_cli", *(f"reliability_{name}" for name in OWN)]
PROGRAMS_RUN += ["webgpu_device_test", "webgpu_library_test", "cuda_recorded_test"]
# Tests left out of the coverage build: other tests reach what they reach of the files counted.
NOT_FOR_COVERAGE = r"^(webgpu|Demo|cli_bench|cli_demo|example|mutants|sass)"
PROFILES = ROOT / "build/coverage/profiles"
# Coverage counts the library, the files' parser, and a program that instantiates the headers.
PROGRAMS = ["liblogitless.so", "cli/logitless", "tests/shards_test"]


def build(preset: str, *targets: str) -> Path:
    """What a preset builds, or those of the targets that it has on this machine."""
    folder = ROOT / "build" / preset
    succeed(["cmake", "--preset", preset], 300)
    command: list[str | Path] = ["cmake", "--build", "--preset", preset]
    if targets:
        known = succeed([*command, "--target", "help"], 60)
        targets = tuple(t for t in targets if re.search(rf"^(\.\.\. )?{t}\b", known, re.M))
        command += ["--target", *targets]
    succeed(command, BUILD_SECONDS)
    return folder


def sanitizer(preset: str, what: str, how: str, *options: str) -> list[Row]:
    folder = build(preset)
    passed, total = ctest(folder, ".*", BUILD_SECONDS, *options)
    figure = f"{number(passed)} of {number(total)} tests passed, no report"
    return [Row(what, how, figure, passed == total and total > 0)]


def address(settings: Settings) -> list[Row]:
    return sanitizer(
        "asan",
        "No access outside memory and no undefined behaviour",
        "the host tests under AddressSanitizer and UndefinedBehaviorSanitizer",
    )


def threads(settings: Settings) -> list[Row]:
    return sanitizer(
        "tsan", "No race", "the tests of what runs on several threads under ThreadSanitizer",
        "--label-regex", "threads",
    )  # fmt: skip


def fuzz(settings: Settings) -> list[Row]:
    """In the build that `address` made."""
    programs = sorted((ROOT / "build/asan/fuzz").glob("*_fuzz"))
    if not programs:
        raise NotHere("no fuzzers in build/asan")
    seconds = max(20, int(settings.seconds_left / len(programs)))
    done = run([ROOT / "scripts/fuzz", str(seconds)], seconds * len(programs) + 300)
    text = done.stdout + done.stderr
    if done.returncode != 0:
        found = re.findall(r"out/fuzz/\S+", text)
        raise NotKept(f"a fuzzer failed: {found[-1] if found else text[-200:]}")
    units = sum(map(int, re.findall(r"number_of_executed_units:\s*(\d+)", text)))
    hours = seconds * len(programs) / 3600
    return [
        Row(
            "No input crashes the C interface or the file parser, or makes it say anything wrong",
            f"{', '.join(p.name for p in programs)} (libFuzzer, sanitizers on), judged against the"
            " reference",
            f"{hours:.2f} hours in this run, {number(units)} inputs, no find",
            units > 0,
        )
    ]


def host_coverage(settings: Settings) -> list[Row]:
    if shutil.which("llvm-cov-19") is None:
        raise NotHere("no llvm-cov-19: scripts/setup reliability")
    folder = build("coverage")
    shutil.rmtree(PROFILES, ignore_errors=True)
    os.environ["LLVM_PROFILE_FILE"] = str(PROFILES / "%p.profraw")
    os.environ["LOGITLESS_TEST_EIGHTH"] = "1"
    try:
        passed, total = ctest(folder, ".*", BUILD_SECONDS, "--exclude-regex", NOT_FOR_COVERAGE)
    finally:
        del os.environ["LLVM_PROFILE_FILE"], os.environ["LOGITLESS_TEST_EIGHTH"]
    result = export(folder)
    listed = OUT / "reliability-uncovered.md"
    coverage.write_list(result, listed)
    branches, lines = result.branches(), result.lines()
    absent = ", ".join(sorted(result.absent_sets)) or "none"
    return [
        Row(
            "The tests reach the code: include, src, src/cpu, src/reference, cli/safetensors",
            f"llvm-cov over {number(passed)} host tests; a branch counts once over all"
            " instantiations and instruction sets",
            f"{coverage.percent(branches):.1f} % of {number(branches[1])} outcomes of branches,"
            f" {coverage.percent(lines):.1f} % of {number(lines[1])} lines; instruction sets absent"
            f" here: {absent}; what is not reached: {listed.relative_to(ROOT)}",
            # Tests that limit file sizes fail here because of the profile's own message; they pass
            # in the sanitizers' row.
            coverage.percent(branches) >= coverage.LEAST_BRANCHES and passed > 0.9 * total,
        )
    ]


def export(folder: Path) -> coverage.Coverage:
    profile = PROFILES / "all.profdata"
    raw = sorted(PROFILES.glob("*.profraw"))
    if not raw:
        raise NotKept("the coverage build left no profile")
    succeed(["llvm-profdata-19", "merge", "--sparse", "-o", profile, *raw], 600)

    def one(program: str) -> Path:
        path = PROFILES / (program.replace("/", "-") + ".json")
        text = succeed(
            ["llvm-cov-19", "export", f"-instr-profile={profile}", folder / program], 600
        )
        path.write_text(text)
        return path

    return coverage.merge(coverage.load(one(program)) for program in PROGRAMS)


def mutants(settings: Settings) -> list[Row]:
    """A sample, drawn anew each day: the whole list is make mutants, hours long."""
    if settings.seconds_left < 240:
        raise NotHere("no time was left; make mutants runs them all")
    seconds = int(settings.seconds_left)
    done = run(
        [sys.executable, ROOT / "scripts/mutants.py", "--seconds", str(seconds)], seconds + 600
    )
    verdicts = re.findall(r"^(\S.*?) +\d+ s  (caught|SURVIVED)", done.stdout, re.M)
    if done.returncode not in (0, 1) or not verdicts:
        raise NotKept(f"the mutants ended with {done.returncode}: {done.stdout[-300:]}")
    made: Counter[str] = Counter()
    caught: Counter[str] = Counter()
    for name, verdict in verdicts:
        folder = folder_of(name)
        made[folder] += 1
        caught[folder] += verdict == "caught"
    figure = ", ".join(f"{folder} {caught[folder]} / {made[folder]}" for folder in sorted(made))
    survivors = [name for name, verdict in verdicts if verdict == "SURVIVED"]
    if survivors:
        figure += f"; survived: {', '.join(survivors)}"
    return [
        Row(
            "A bug in the code fails a test",
            "bugs put in on purpose, a sample of `make mutants`: caught / made, by folder",
            figure,
            not survivors,
        )
    ]


def folder_of(name: str) -> str:
    from mutants import MUTANTS  # tests/mutants

    for mutant in MUTANTS:
        if mutant.name == name:
            return str(Path(mutant.edits[0].file).parent)
    return "src (validation)"

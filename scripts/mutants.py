#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts bugs in on purpose and demands that a test fails: a mutant survives if no test does.

Every mutant is an exact piece of text and what replaces it (tests/mutants/*.py), or one rule of the
validation switched off (generated from src/validate*.cpp). It is applied to a scratch copy of the
tree under out/mutants, never to the tree itself, built there and given to the tests that it names.
Exit code 0: all caught. 1: survivors. 2: a mutant whose text is gone, or that does not compile, or
tests that fail without any mutant."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import queue
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
sys.dont_write_bytecode = True

from mutants import MUTANTS, TESTS, Mutant
from mutants.validation import rewrite_validation

SCRATCH = ROOT / "out/mutants"
# A mutant may hang, or wait for a thread that has ended.
SECONDS_PER_TEST = 300
# With a time limit, this many mutants are drawn, and run as time allows.
SAMPLE = 16
T = TypeVar("T")


class Broken(Exception):
    """The check itself cannot go on: no verdict about any test."""


@dataclass
class Verdict:
    name: str
    caught_by: str | None = None  # None: the mutant survived
    error: str | None = None
    seconds: float = 0.0


def say(text: str) -> None:
    print(text, flush=True)


@dataclass
class Copy:
    """A scratch copy of the tree with a build of its own. `some`: few instruction sets, quick to
    compile; `all`: those of the release build, for mutants of one of them."""

    place: Path
    targets: str
    jobs: int
    configured: bool = False
    originals: dict[str, str] = field(default_factory=dict)

    @property
    def tree(self) -> Path:
        return self.place / "tree"

    @property
    def build(self) -> Path:
        return self.place / "build"

    def sync(self) -> None:
        """Makes the copy equal to the working tree, touching only files that differ."""
        listed = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            check=True, capture_output=True, text=True,
        ).stdout.split("\0")  # fmt: skip
        files = {name for name in listed if name and (ROOT / name).is_file()}
        files |= {str(p.relative_to(ROOT)) for p in (ROOT / "third_party").glob("*.tar.gz")}
        for name in files:
            source, target = ROOT / name, self.tree / name
            if target.is_file() and target.read_bytes() == source.read_bytes():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            shutil.copymode(source, target)
        for path in [p for p in self.tree.rglob("*") if p.is_file()]:
            if str(path.relative_to(self.tree)) not in files:
                path.unlink()

    def run(self, command: list[str], **how: object) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "CCACHE_BASEDIR": str(self.place),  # copies share the compiler's cache
            "CCACHE_NOHASHDIR": "1",
            **how.pop("environment", {}),  # type: ignore[arg-type]
        }
        return subprocess.run(
            command, check=False, env=environment, text=True, errors="replace", stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how)  # type: ignore[call-overload]  # fmt: skip

    def configure(self) -> None:
        self.sync()
        command = ["cmake", "-S", str(self.tree), "-B", str(self.build), "-G", "Ninja"]
        command += ["-DCMAKE_BUILD_TYPE=Release", "-DLOGITLESS_BUILD_CLI=OFF", "-DLOGITLESS_BUILD_TESTS=ON"]
        command += [f"-DLOGITLESS_CPU_TARGETS={self.targets}"]
        # Discovers tests when ctest runs, not by running each program after its link.
        command += ["-DCMAKE_GTEST_DISCOVER_TESTS_DISCOVERY_MODE=PRE_TEST"]
        done = self.run(command)
        if done.returncode != 0:
            raise Broken(f"the copy cannot be configured:\n{done.stdout[-3000:]}")
        self.configured = True

    def compile(self, programs: Iterable[str]) -> str | None:
        done = self.run(["ninja", "-C", str(self.build), f"-j{self.jobs}", *sorted(set(programs))])
        return None if done.returncode == 0 else done.stdout[-3000:]

    def apply(self, mutant: Mutant) -> None:
        for edit in mutant.edits:
            path = self.tree / edit.file
            text = path.read_text()
            count = text.count(edit.old)
            if count != 1:
                self.restore()
                raise Broken(
                    f"{mutant.name}: its text is {count} times in {edit.file}; allowed: once"
                )
            self.originals.setdefault(edit.file, text)
            path.write_text(text.replace(edit.old, edit.new))

    def restore(self) -> None:
        for name, text in self.originals.items():
            (self.tree / name).write_text(text)
        self.originals.clear()

    def first_failure(self, tests: Iterable[str], switch: str | None = None) -> str | None:
        """The name of the first test program that fails, of `program` or `program:filter`."""
        for test in tests:
            program, _, chosen = test.partition(":")
            command = [str(self.build / "tests" / program), "--gtest_fail_fast", "--gtest_brief=1"]
            if chosen:
                command.append(f"--gtest_filter={chosen}")
            environment = {"LOGITLESS_MUTANT": switch} if switch else {}
            try:
                done = self.run(
                    command,
                    timeout=SECONDS_PER_TEST,
                    environment=environment,
                    preexec_fn=with_little_memory if switch else without_core_files,
                )
            except subprocess.TimeoutExpired:
                return f"{program} (no end after {SECONDS_PER_TEST} s)"
            if done.returncode == 0 and (
                "0 tests from 0 test suites ran" in done.stdout
                or "[  PASSED  ] 0 tests" in done.stdout
            ):
                raise Broken(f"{test}: no such test")
            if done.returncode != 0:
                return failed_test(done.stdout) or f"{program} (exit code {done.returncode})"
        return None


def without_core_files() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def with_little_memory() -> None:
    """Limits memory: a call that is no longer refused may ask for any amount."""
    without_core_files()
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))


def failed_test(output: str) -> str | None:
    for line in output.splitlines():
        if line.startswith("[  FAILED  ]") and "." in line:
            return line.split("]", 1)[1].split(",")[0].split("(")[0].strip()
    return None


def tests_of(mutant: Mutant) -> list[str]:
    return [test for group in mutant.tests for test in TESTS[group]]


def programs_of(tests: Iterable[str]) -> list[str]:
    return sorted({test.partition(":")[0] for test in tests})


def judge(copy: Copy, mutant: Mutant) -> Verdict:
    start = datetime.datetime.now()
    verdict = Verdict(mutant.name)
    tests = tests_of(mutant)
    try:
        copy.apply(mutant)
        for test in tests:  # most are caught by the first, so programs are linked one at a time
            failure = copy.compile(programs_of([test]))
            if failure is not None:
                verdict.error = f"does not compile:\n{failure}"
                break
            verdict.caught_by = copy.first_failure([test])
            if verdict.caught_by is not None:
                break
    except Broken as broken:
        verdict.error = str(broken)
    finally:
        copy.restore()
    verdict.seconds = (datetime.datetime.now() - start).total_seconds()
    return verdict


def judge_validation(copy: Copy, only: str, deadline: float = math.inf) -> list[Verdict]:
    """Every rule is compiled in with a switch, and switched off in turn."""
    tests = TESTS["validation"]
    switches = rewrite_validation(copy.tree, copy.originals)
    names = [name for name in switches if only in name]
    if deadline < math.inf:
        names = shuffled(names)
    verdicts: list[Verdict] = []
    try:
        if not names:
            return []
        say(f"compiling {len(names)} switches into the validation")
        failure = copy.compile(programs_of(tests))
        if failure is not None:
            raise Broken(f"the validation with switches does not compile:\n{failure}")
        if (failure := copy.first_failure(tests)) is not None:
            raise Broken(f"{failure} fails with every rule on")
        for name in names:
            if time.monotonic() > deadline:
                break
            start = datetime.datetime.now()
            verdict = Verdict(name, copy.first_failure(tests, switch=name))
            verdict.seconds = (datetime.datetime.now() - start).total_seconds()
            show(verdict)
            verdicts.append(verdict)
    finally:
        copy.restore()
    return verdicts


def show(verdict: Verdict) -> None:
    if verdict.error is not None:
        text = f"ERROR     {verdict.error}"
    elif verdict.caught_by is None:
        text = "SURVIVED"
    else:
        text = f"caught    {verdict.caught_by}"
    say(f"{verdict.name:56} {verdict.seconds:5.0f} s  {text}")


def prepare(copy: Copy, tests: list[str]) -> None:
    """Builds the unchanged copy and demands that its tests pass: else nothing can be said."""
    say(f"building the unchanged tree in {copy.place.relative_to(ROOT)}")
    copy.configure()
    failure = copy.compile(programs_of(tests))
    if failure is not None:
        raise Broken(f"the unchanged tree does not build:\n{failure}")
    if (failure := copy.first_failure(tests)) is not None:
        raise Broken(f"{failure} fails without any mutant")


def work(
    copies: dict[str, Copy],
    todo: queue.Queue[Mutant],
    verdicts: list[Verdict],
    deadline: float = math.inf,
) -> None:
    while time.monotonic() < deadline:
        try:
            mutant = todo.get_nowait()
        except queue.Empty:
            return
        verdict = judge(copies[mutant.targets], mutant)
        show(verdict)
        verdicts.append(verdict)


def has_amx() -> bool:
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the names and leave")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree worked on at once")
    parser.add_argument(
        "--seconds", type=float, default=0.0,
        help="a random sample, another each day: none is begun after that time; 0: all of them",
    )  # fmt: skip
    return parser.parse_args()


def shuffled(items: list[T]) -> list[T]:
    return random.Random(datetime.date.today().toordinal()).sample(items, len(items))


def main() -> int:
    arguments = parse()
    begun = time.monotonic()
    deadline = begun + arguments.seconds if arguments.seconds > 0 else math.inf
    chosen = [m for m in MUTANTS if arguments.only in m.name]
    if arguments.list:
        for mutant in chosen:
            print(mutant.name)
        for name in rewrite_validation(ROOT, None):
            if arguments.only in name:
                print(name)
        return 0
    # With a time limit one build is made, and at most SAMPLE mutants are drawn.
    if arguments.seconds > 0:
        chosen = shuffled([m for m in chosen if m.targets == "some"])[:SAMPLE]
    without = [m.name for m in chosen if m.targets == "all" and not has_amx()]
    chosen = [m for m in chosen if m.name not in without]
    jobs = max(1, arguments.jobs)
    cores = max(1, len(os.sched_getaffinity(0)) // jobs)
    workers = [
        {t: Copy(SCRATCH / f"{t}-{i}", t, cores) for t in ("some", "all")} for i in range(jobs)
    ]
    verdicts: list[Verdict] = []
    try:
        for copies in workers:
            for targets, copy in copies.items():
                tests = sorted({t for m in chosen if m.targets == targets for t in tests_of(m)})
                if tests:
                    prepare(copy, tests)
        todo: queue.Queue[Mutant] = queue.Queue()
        for mutant in chosen:
            todo.put(mutant)
        end = begun + 0.7 * (deadline - begun)
        threads = [threading.Thread(target=work, args=(c, todo, verdicts, end)) for c in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        copy = workers[0]["some"]
        if any(arguments.only in name for name in rewrite_validation(ROOT, None)):
            if not copy.configured:
                copy.configure()
            verdicts += judge_validation(copy, arguments.only, deadline)
    except Broken as broken:
        print(f"mutants: {broken}", file=sys.stderr)
        return 2
    return conclude(verdicts, without)


def conclude(verdicts: list[Verdict], without: list[str]) -> int:
    errors = [v for v in verdicts if v.error is not None]
    survivors = [v for v in verdicts if v.error is None and v.caught_by is None]
    caught = len(verdicts) - len(errors) - len(survivors)
    if without:
        say(f"mutants: not run, this CPU has no AMX: {', '.join(without)}")
    if not verdicts:
        print("mutants: no mutant of that name", file=sys.stderr)
        return 2
    say(f"mutants: {caught} of {len(verdicts)} caught")
    for v in survivors:
        say(f"mutants: SURVIVED {v.name}")
    for v in errors:
        say(f"mutants: ERROR {v.name}: {(v.error or '').splitlines()[0]}")
    return 2 if errors else 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

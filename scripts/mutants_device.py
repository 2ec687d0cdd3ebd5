#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bugs put into src/cuda on purpose (tests/mutants/cuda.py), which the device's tests must catch.

`check` looks whether each one's text is still in its file and fits a switch. `build` compiles all
of them at once into a copy of the tree under out/mutants-device, each behind a switch, and leaves
one program. `run` needs that program, scripts/ and tests/mutants alone, on a machine with a GPU:
the tests must pass with every switch off. With each one on they must fail, or take over ten times
as long and over a minute.
Exit code 0: all caught, or no GPU. 1: survivors. 2: a text that is gone, no build, no verdict."""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
sys.dont_write_bytecode = True

from mutants.cuda import MUTANTS, NAMED_KERNELS, TESTS, CudaMutant

SCRATCH = ROOT / "out/mutants-device"
PROGRAM = SCRATCH / "run/device_suite"
SKIPPED = 77
START_SECONDS = 2  # of a process
PART_SECONDS = 15  # of its tests

SWITCH_H = """
// Of the copy with mutants alone: which one is on, on the host and in this file's kernels.
namespace logitless::cuda {
int mutant_on_host();
void switch_mutants();
struct MutantFile {
  const void* symbol;
  MutantFile* next;
  explicit MutantFile(const void* s) : symbol(s), next(first()) { first() = this; }
  static MutantFile*& first() {
    static MutantFile* list = nullptr;
    return list;
  }
};
#ifdef __CUDACC__
namespace {
__device__ int mutant_on_device;
MutantFile mutants_of_this_file(reinterpret_cast<const void*>(&mutant_on_device));
}  // namespace
__host__ __device__ inline bool mutant(int n) {
#ifdef __CUDA_ARCH__
  return mutant_on_device == n;
#else
  return mutant_on_host() == n;
#endif
}
#else
inline bool mutant(int n) { return mutant_on_host() == n; }
#endif
}  // namespace logitless::cuda
"""

SWITCH_CPP = """
#include <cuda_runtime.h>

#include <cstdlib>
#include <mutex>

#include "src/cuda/runtime/kernel_file.h"

namespace logitless::cuda {
int mutant_on_host() {
  static const int number = [] {
    const char* text = std::getenv("LOGITLESS_MUTANT");
    return text == nullptr ? 0 : std::atoi(text);
  }();
  return number;
}
void switch_mutants() {
  static std::once_flag once;
  std::call_once(once, [] {
    const int number = mutant_on_host();
    for (const MutantFile* file = MutantFile::first(); file != nullptr; file = file->next) {
      if (cudaMemcpyToSymbol(file->symbol, &number, sizeof(number)) != cudaSuccess) std::abort();
    }
  });
}
}  // namespace logitless::cuda
"""


class Broken(Exception):
    """No verdict about any test."""


def edited(text: str, mutants: list[tuple[int, CudaMutant]]) -> str:
    """The file's text with a switch for each mutant; several may be at one place."""
    places: dict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
    for number, m in mutants:
        first, last = m.marked.index("@{"), m.marked.index("}@")
        old = m.marked[first + 2 : last]
        plain = m.marked[:first] + old + m.marked[last + 2 :]
        count = text.count(plain)
        if count != 1:
            raise Broken(f"{m.name}: its text is {count} times in src/cuda/{m.file}; allowed: once")
        start = text.index(plain) + first
        places[start, start + len(old)].append((number, m.new))
    end = len(text)
    for (start, stop), switches in sorted(places.items(), reverse=True):
        if stop > end:
            raise Broken(f"mutants {[n for n, _ in switches]} overlap others")
        old = text[start:stop]
        for number, new in switches:
            if text[start:stop].rstrip().endswith(";"):
                old = f"if (mutant({number})) {{ {new} }} else {{ {old} }}"
            else:
                old = f"(mutant({number}) ? ({new}) : ({old}))"
        text = text[:start] + old + text[stop:]
        end = start
    return text


def write(path: Path, text: str) -> None:
    """Writes only if it differs, so that unchanged files are not compiled again."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def by_file() -> dict[str, list[tuple[int, CudaMutant]]]:
    found: dict[str, list[tuple[int, CudaMutant]]] = defaultdict(list)
    for number, m in enumerate(MUTANTS, 1):
        found[f"src/cuda/{m.file}"].append((number, m))
    return found


def cannot_switch(m: CudaMutant) -> str:
    """Why the mutant's text would not compile as `edited` writes it; empty where it may."""
    first, last = m.marked.index("@{"), m.marked.index("}@")
    before, old = m.marked[:first], m.marked[first + 2 : last].strip()
    if before.rsplit("\n", 1)[-1].count('"') % 2:
        return "is inside a string"
    for text in (old, m.new.strip()):
        if any(text.count(a) != text.count(b) for a, b in ("()", "[]", "{}")):
            return "has brackets that do not match"
        if re.match(r"(&&|\|\||[=<>/%,?:)])", text):
            return "begins with an operator"
    if old.endswith(";"):
        if before.strip() and not re.search(r"[;{})]\s*$|//[^\n]*\n\s*$", before):
            return "ends a statement that begins before it"
    elif not m.new.strip():
        return "is an expression, and nothing stands in its place"
    return ""


def check() -> int:
    for m in MUTANTS:
        if why := cannot_switch(m):
            raise Broken(f"{m.name}: its text in src/cuda/{m.file} {why}")
    for name, mutants in by_file().items():
        edited((ROOT / name).read_text(), mutants)
    print(f"mutants-device: the texts of {len(MUTANTS)} mutants are there")
    return 0


def copy_tree(tree: Path) -> None:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    mutants = by_file()
    for name in listed:
        source = ROOT / name
        if not name or not source.is_file():
            continue
        if name in mutants or name in (
            "src/cuda/runtime/kernel_file.h",
            "src/cuda/runtime/runtime.h",
        ):
            text = edited(source.read_text(), mutants[name])
            if name == "src/cuda/runtime/kernel_file.h":
                text += SWITCH_H
            else:  # after the licence's line
                text = text.replace("\n", '\n#include "src/cuda/runtime/kernel_file.h"\n', 1)
            if name == "src/cuda/runtime/runtime.h":
                old = "stream_(static_cast<cudaStream_t>(stream)) {}"
                if text.count(old) != 1:
                    raise Broken("src/cuda/runtime/runtime.h has no place for the switch")
                text = text.replace(old, old.replace("{}", "{ switch_mutants(); }"))
            write(tree / name, text)
        elif not (tree / name).is_file() or (tree / name).read_bytes() != source.read_bytes():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, tree / name)
    for path in (ROOT / "third_party").glob("*.tar.gz"):
        target = tree / "third_party" / path.name
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    write(tree / "src/cuda/mutant.cpp", SWITCH_CPP)


def build(jobs: int) -> int:
    tree, place = SCRATCH / "tree", SCRATCH / "build"
    copy_tree(tree)
    for command in (
        ["cmake", "-S", str(tree), "-B", str(place), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
         "-DLOGITLESS_BUILD_CLI=OFF", "-DLOGITLESS_BUILD_TESTS=ON",
         "-DLOGITLESS_CPU_TARGETS=baseline", "-DLOGITLESS_CUDA=ON",
         "-DLOGITLESS_CUDA_ARCHITECTURES=90a-real", "-DLOGITLESS_INSTALL=OFF"],
        ["ninja", "-C", str(place), f"-j{jobs}", "device_suite"],
    ):  # fmt: skip
        done = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)  # fmt: skip
        if done.returncode != 0:
            raise Broken(f"{command[0]} failed:\n{done.stdout[-6000:]}")
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["strip", "-o", str(PROGRAM), str(place / "tests/device_suite")], check=True)
    print(f"mutants-device: {len(MUTANTS)} mutants in {PROGRAM} "
          f"({PROGRAM.stat().st_size / 2**20:.1f} MiB)")  # fmt: skip
    return 0


@functools.cache
def library_path() -> str:
    """LD_LIBRARY_PATH with cuBLASLt's folder."""
    done = subprocess.run([str(ROOT / "scripts/device-library-path")], check=True, text=True,
                          stdout=subprocess.PIPE)  # fmt: skip
    return done.stdout.strip()


class Part(NamedTuple):
    """One of the parts that googletest deals a group's tests to."""

    verdict: str  # "passed" | "failed" | "late" | "skipped"
    note: str  # the first failure or the reason
    seconds: float
    tests: int


def test(
    number: int, group: str, limit: float, part: int = 0, parts: int = 1, chosen: str = ""
) -> Part:
    environment = {
        **os.environ,
        "LOGITLESS_MUTANT": str(number),
        "LOGITLESS_TEST_DEVICES": "cuda",
        "LOGITLESS_CUDA_KERNELS": group if group in NAMED_KERNELS else "",
        "LD_LIBRARY_PATH": library_path(),
        "GTEST_TOTAL_SHARDS": str(parts),
        "GTEST_SHARD_INDEX": str(part),
    }
    command = [
        str(PROGRAM),
        f"--gtest_filter={chosen or TESTS[group]}",
        "--gtest_fail_fast",
        "--gtest_brief=1",
    ]
    start = time.monotonic()
    try:
        done = subprocess.run(command, check=False, env=environment, text=True, errors="replace",
                              timeout=limit, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)  # fmt: skip
    except subprocess.TimeoutExpired:
        return Part("late", f"no end in {limit:.0f} s", limit, 0)
    seconds = time.monotonic() - start
    ran = re.search(r"\[==========\] (\d+) tests? from", done.stdout)
    tests = int(ran.group(1)) if ran else 0
    if done.returncode == SKIPPED:
        return Part("skipped", done.stdout.splitlines()[0], seconds, tests)
    if done.returncode == 0:
        return Part("passed", "", seconds, tests)
    failed = re.search(r"\[  FAILED  \] ([^,\s]+)", done.stdout)
    note = failed.group(1) if failed else f"exit code {done.returncode}"
    return Part("failed", note, seconds, tests)


def without_mutant(pool: ThreadPoolExecutor, group: str, jobs: int, limit: float) -> float:
    """The seconds that all tests of a group take, one after the other; they must pass."""
    parts = list(pool.map(lambda p: test(0, group, limit, p, jobs), range(jobs)))
    seconds = sum(max(0, p.seconds - START_SECONDS) for p in parts)
    wrong = next((p for p in parts if p.verdict != "passed"), None)
    print(f"{'no mutant, ' + group:64} {seconds:5.0f} s  {wrong or 'passed'}", flush=True)
    if wrong:
        raise Broken(f"the tests of {group} do not pass without any mutant: {wrong.note}")
    if not any(p.tests for p in parts):
        raise Broken(f"{TESTS[group]}: no such test")
    return seconds


class Judged:
    """A mutant's tests, in as many parts as their length asks for; one that fails is enough."""

    def __init__(self, pool: ThreadPoolExecutor, number: int, group: str, seconds: float) -> None:
        self.number, self.group, self.caught = number, group, ""
        self.parts = min(16, max(1, round(seconds / PART_SECONDS)))
        self.limit = max(60, 10 * seconds / self.parts)
        self.seconds = 0.0
        self.jobs = [pool.submit(self.judge, part) for part in range(self.parts)]

    def judge(self, part: int) -> None:
        if self.caught:
            return
        done = test(self.number, self.group, self.limit, part, self.parts)
        self.seconds += done.seconds
        if done.verdict != "passed":
            self.caught = done.note

    def wait(self) -> str:
        for job in self.jobs:
            job.result()
        return self.caught


def run(only: list[str], jobs: int, limit: float) -> int:
    if not PROGRAM.is_file():
        raise Broken(f"no {PROGRAM}: `build` first")
    first = test(0, "", limit, chosen="*/Edges.NoTokens/cuda_softmax_f32")
    if first.verdict == "skipped":
        print(f"mutants-device: {first.note}")
        return 0
    chosen = [(n, m) for n, m in enumerate(MUTANTS, 1) if any(text in m.name for text in only)]
    if not chosen:
        raise Broken("no mutant of that name")
    survivors = []
    with ThreadPoolExecutor(jobs) as pool:
        groups = sorted({m.tests for _, m in chosen})
        seconds = {group: without_mutant(pool, group, jobs, limit) for group in groups}
        judged = [Judged(pool, n, m.tests, seconds[m.tests]) for n, m in chosen]
        for (_, m), mutant in zip(chosen, judged, strict=True):
            note = mutant.wait()
            words = f"caught    {note}" if note else "SURVIVED"
            print(f"{m.name:64} {mutant.seconds:5.0f} s  {words}", flush=True)
            if not note:
                survivors.append(m.name)
    print(f"mutants-device: {len(chosen) - len(survivors)} of {len(chosen)} caught")
    for name in survivors:
        print(f"mutants-device: SURVIVED {name}")
    return 1 if survivors else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["list", "check", "build", "run", "all"])
    parser.add_argument("--only", action="append", help="mutants whose name contains this")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--limit", type=float, default=500, help="seconds for a part of a group's tests"
    )
    arguments = parser.parse_args()
    try:
        if arguments.what == "list":
            for number, m in enumerate(MUTANTS, 1):
                print(number, m.name)
        if arguments.what == "check":
            return check()
        if arguments.what in ("build", "all"):
            build(arguments.jobs)
        if arguments.what in ("run", "all"):
            return run(arguments.only or [""], arguments.jobs, arguments.limit)
    except Broken as broken:
        print(f"mutants-device: {broken}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

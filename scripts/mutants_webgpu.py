#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bugs put into src/webgpu on purpose (tests/mutants/webgpu.py), which the suite on a software
adapter must catch. Each is built alone in a copy of the tree under out/mutants-webgpu: a shader is
text, so that takes seconds. Exit code 0: all caught. 1: survivors. 2: a text that is gone, no build,
or tests that fail without a mutant."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
sys.dont_write_bytecode = True

from mutants.mutant import Mutant
from mutants.webgpu import MUTANTS, TESTS

TREE = ROOT / "out/mutants-webgpu/tree"
BUILD = ROOT / "out/mutants-webgpu/build"


def run(*command: str | Path) -> bool:
    return subprocess.run(list(map(str, command)), capture_output=True).returncode == 0


def copy_tree() -> None:
    """Copies the tree as it is now; third_party only once."""
    TREE.mkdir(parents=True, exist_ok=True)
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        source, target = ROOT / name, TREE / name
        if not source.is_file():
            continue
        if target.is_file() and target.read_bytes() == source.read_bytes():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)  # with a new timestamp, so that the build sees the change
    third_party = TREE / "third_party"
    if not third_party.exists():
        shutil.copytree(ROOT / "third_party", third_party)


def build() -> bool:
    configured = run(
        "cmake", "-S", TREE, "-B", BUILD, "-G", "Ninja", "-D", "LOGITLESS_CUDA=OFF",
        "-D", "LOGITLESS_WEBGPU=ON", "-D", "LOGITLESS_CPU_TARGETS=baseline",
        "-D", "LOGITLESS_BUILD_TESTS=ON",
    )  # fmt: skip
    return configured and run("cmake", "--build", BUILD, "--target", "webgpu_suite")


def tests_pass(groups: tuple[str, ...]) -> bool:
    drivers = sorted(Path("/usr/share/vulkan/icd.d").glob("lvp_icd.*.json"))
    library = TREE / "third_party/webgpu/libwgpu_native-release.so"
    environment = os.environ | {
        "LOGITLESS_TEST_DEVICES": "webgpu",
        "LOGITLESS_WEBGPU_LIMITS": "default",
        "LOGITLESS_TEST_EIGHTH": "1",
        "LOGITLESS_WEBGPU_LIBRARY": str(library),
    }
    if drivers:
        environment |= {"VK_DRIVER_FILES": str(drivers[0]), "VK_ICD_FILENAMES": str(drivers[0])}
    for group in groups:
        command = [
            BUILD / "tests/webgpu_suite", "--gtest_brief=1", "--gtest_fail_fast",
            f"--gtest_filter={TESTS[group]}:-*EveryInstructionSet*",
        ]  # fmt: skip
        own = environment | ({"LOGITLESS_TEST_FLUSH": "1"} if group == "faint" else {})
        try:
            done = subprocess.run(command, env=own, capture_output=True, timeout=600)
        except subprocess.TimeoutExpired:
            return False
        if done.returncode != 0:
            return False
    return True


def apply(mutant: Mutant) -> bool:
    for edit in mutant.edits:
        path = TREE / edit.file
        text = path.read_text()
        if text.count(edit.old) != 1:
            print(f"{mutant.name}: its text stands {text.count(edit.old)} times in {edit.file}")
            return False
        path.write_text(text.replace(edit.old, edit.new))
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose name holds this text")
    chosen = [m for m in MUTANTS if parser.parse_args().only in m.name]
    copy_tree()
    if not build():
        print("no build")
        return 2
    if not tests_pass(tuple(TESTS)):
        print("the tests fail without a mutant")
        return 2
    caught_count, survivors, broken = 0, [], False
    for mutant in chosen:
        before = {edit.file: (TREE / edit.file).read_text() for edit in mutant.edits}
        applied = apply(mutant)
        built = applied and build()
        broken |= not built
        caught = built and not tests_pass(mutant.tests)
        if built:
            print(f"{'caught' if caught else 'SURVIVED'}: {mutant.name}", flush=True)
        elif applied:
            print(f"no build: {mutant.name}", flush=True)
        caught_count += caught
        if built and not caught:
            survivors.append(mutant.name)
        for file, text in before.items():
            (TREE / file).write_text(text)
    print(f"{caught_count} of {len(chosen)} caught")
    return 2 if broken else 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

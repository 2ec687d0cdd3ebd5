# SPDX-License-Identifier: Apache-2.0
"""How coverage is counted: a place in the source once, over instantiations and instruction sets."""

from __future__ import annotations

import sys
import unittest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.dont_write_bytecode = True

from reliability.common import ROOT
from reliability.coverage import Coverage, in_scope, instruction_set, merge

FILE = "src/row/loss.h"


def function(
    name: str, count: int, branches: list[tuple[int, int, int]], file: str = FILE
) -> dict[str, Any]:
    """Lines 1 to 9, entered `count` times; branches as (line, times true, times false)."""
    return {
        "name": name,
        "count": count,
        "filenames": [str(ROOT / file)],
        "regions": [[1, 1, 9, 2, count, 0, 0, 0]],
        "branches": [[line, 5, line, 9, true, false, 0, 0, 4] for line, true, false in branches],
    }


def merged(*functions: dict[str, Any]) -> Coverage:
    return merge([{"data": [{"functions": [f]}]} for f in functions])


class CoverageTest(unittest.TestCase):
    def test_instantiations_are_one_branch(self) -> None:
        got = merged(function("f<int>", 1, [(3, 1, 0)]), function("f<long>", 1, [(3, 0, 1)]))
        self.assertEqual(got.branches(), (2, 2))

    def test_an_outcome_that_nobody_took_is_missing(self) -> None:
        got = merged(function("f<int>", 2, [(3, 2, 0)]), function("f<long>", 1, [(3, 1, 0)]))
        self.assertEqual(got.branches(), (1, 2))

    def test_a_function_that_never_ran_misses_both(self) -> None:
        got = merged(function("f", 0, [(3, 0, 0)]))
        self.assertEqual(got.branches(), (0, 2))
        self.assertEqual(got.lines(), (0, 9))

    def test_a_constant_condition_is_no_branch(self) -> None:
        self.assertEqual(merged(function("f", 1, [(3, 0, 0)])).branches(), (0, 0))

    def test_a_set_that_never_ran_is_apart(self) -> None:
        got = merged(
            function("_ZN9logitless6N_AVX21fEv", 1, [(3, 1, 1)]),
            function("_ZN9logitless10N_AVX3_SPR1fEv", 0, [(3, 0, 0), (4, 0, 0)]),
        )
        self.assertEqual(got.absent_sets, {"AVX3_SPR"})
        self.assertEqual(got.branches(), (2, 2))
        self.assertEqual(len(got.files[FILE].absent), 1)

    def test_instruction_sets_are_told_by_their_namespaces(self) -> None:
        self.assertEqual(instruction_set("_ZN9logitless3cpu6N_SSE212_GLOBAL__N_14rowsEv"), "SSE2")
        self.assertEqual(instruction_set("_ZN9logitless3cpu11N_AVX3_ZEN44rowsEv"), "AVX3_ZEN4")
        self.assertIsNone(instruction_set("_ZN9logitless12_GLOBAL__N_14rowsEv"))

    def test_only_the_files_named_count(self) -> None:
        for name in ("include/logitless/c.h", "src/c_api.cpp", "src/cpu/plan.cpp",
                     "src/reference/row.cpp", "cli/safetensors_write.cpp"):  # fmt: skip
            self.assertEqual(in_scope(str(ROOT / name)), name)
        for name in ("src/cuda/linear/plan.cpp", "cli/loss.cpp", "tests/support/judge.cpp"):
            self.assertIsNone(in_scope(str(ROOT / name)))
        self.assertIsNone(in_scope("/usr/include/c++/12/vector"))


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""golden.py names the calls whose lines differ from what was recorded; scripts stand in for
guard_plans and guard_launches."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

LINES = [
    "a 1x2 | cpu | min | kind=whole chunk=8",
    "a 1x2 | cpu | sizes | min=1 rec=2",
    "b 3x4 | cpu | sizes | min=5 rec=6",
]


class Golden(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        shutil.copy(Path(__file__).with_name("golden.py"), self.folder)
        self.run_golden(LINES, "--record")

    def program(self, lines: list[str], folder: str = ".") -> Path:
        path = self.folder / folder / "guard_plans"
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
        path.chmod(0o755)
        return path

    def run_golden(self, lines: list[str], *options: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-B", self.folder / "golden.py", *options, self.program(lines)],
            stdout=subprocess.PIPE,
            text=True,
        )
        return done.returncode, done.stdout

    def test_the_same_lines_pass(self) -> None:
        self.assertEqual(self.run_golden(LINES), (0, "plans: 2 calls as recorded\n"))

    def test_a_fact_that_changed_is_shown_with_its_line(self) -> None:
        code, text = self.run_golden([LINES[0].replace("8", "16"), *LINES[1:]])
        self.assertEqual(code, 1)
        self.assertIn("1 of 2 calls are new or differ; 0 recorded ones are gone", text)
        self.assertIn("a 1x2 | cpu | min | kind=whole chunk=16", text)
        self.assertNotIn("b 3x4", text)

    def test_an_older_program_says_what_it_was(self) -> None:
        old = self.program(LINES, "old")
        code, text = self.run_golden([LINES[0].replace("8", "16"), *LINES[1:]], "--old", str(old))
        self.assertEqual(code, 1)
        self.assertIn("chunk: 8 -> 16", text)

    def test_new_gone_and_further_lines_are_told(self) -> None:
        for lines, said in (
            (LINES[:2], "0 of 1 calls are new or differ; 1 recorded ones are gone"),
            ([*LINES, "c 5x6 | cpu | sizes | min=1"], "1 of 3 calls are new or differ; 0"),
            ([*LINES, "b 3x4 | cpu | min | kind=whole"], "1 of 2 calls are new or differ; 0"),
        ):
            code, text = self.run_golden(lines)
            self.assertEqual(code, 1)
            self.assertIn(said, text)

    def test_recording_makes_it_pass(self) -> None:
        changed = [LINES[0].replace("8", "16"), *LINES[1:]]
        self.run_golden(changed, "--record")
        self.assertEqual(self.run_golden(changed)[0], 0)
        self.assertEqual(self.run_golden(LINES)[0], 1)


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/reading_length.py counts each header of this repository once, however it is included, and
fails if there are more headers or lines than allowed. By default it counts those of Hopper's plain
forward kernel, which stays within the limits."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREE = {
    "src/kernel.cuh": '#pragma once\n#include <cuda.h>\n#include "src/a.h"\n#include "b.h"\n',
    "src/a.h": '#pragma once\n#include "src/b.h"\n  #  include "public.h"\n',
    "src/b.h": '#pragma once\n#include "src/a.h"\n// #include "src/unread.h"\n',
    "include/public.h": "#pragma once\n",
    "src/unread.h": "#pragma once\n",
}


class ReadingTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        for name, text in TREE.items():
            (self.root / name).parent.mkdir(exist_ok=True)
            (self.root / name).write_text(text)

    def said(self, headers: int, lines: int, file: str = "src/kernel.cuh") -> tuple[int, list[str]]:
        script = ROOT / "scripts/reading_length.py"
        options = [f"--root={self.root}", f"--headers={headers}", f"--lines={lines}"]
        ran = subprocess.run(
            [sys.executable, "-B", script, file, *options],
            capture_output=True,
            text=True,
            check=False,
        )
        return ran.returncode, (ran.stdout + ran.stderr).splitlines()

    def test_each_header_counts_once_with_what_brought_it_in(self) -> None:
        code, lines = self.said(3, 11)
        self.assertEqual(code, 0, lines)
        self.assertEqual(
            [line.split() for line in lines[:-1]],
            [
                ["4", "src/kernel.cuh"],
                ["3", "src/a.h", "by", "src/kernel.cuh"],
                ["3", "src/b.h", "by", "src/kernel.cuh"],
                ["1", "include/public.h", "by", "src/a.h"],
            ],
        )
        self.assertIn("3 headers beside it (at most 3), 11 lines (at most 11)", lines[-1])

    def test_too_much_to_read_fails(self) -> None:
        self.assertEqual(self.said(2, 11)[0], 1)
        self.assertEqual(self.said(3, 10)[0], 1)

    def test_a_header_that_is_nowhere_is_an_error(self) -> None:
        (self.root / "src/b.h").write_text('#include "src/gone.h"\n')
        code, lines = self.said(9, 99)
        self.assertNotEqual(code, 0)
        self.assertIn("src/b.h includes src/gone.h: no such header", lines[-1])

    def test_hoppers_plain_forward_is_read_in_fifteen_headers_and_2000_lines(self) -> None:
        script = [sys.executable, "-B", str(ROOT / "scripts/reading_length.py")]
        ran = subprocess.run(script, capture_output=True, text=True, check=False)
        self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)


if __name__ == "__main__":
    unittest.main()

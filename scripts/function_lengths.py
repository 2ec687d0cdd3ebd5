#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Names every function of more than 60 lines, from its name to its closing brace, that is not a
GPU's (__global__ or __device__). lizard reads C++, CUDA and JavaScript as they stand. clang-tidy's
readability-function-size compiles every source first, for minutes, CUDA's with a toolkit that clang
has to know, and does not read JavaScript."""

import re
import subprocess
import sys
from pathlib import Path

import lizard

LIMIT = 60
PATTERNS = [f"*.{name}" for name in ("h", "c", "cpp", "cu", "cuh", "js")]


def declaration(lines: list[str], name: int) -> str:
    """The text before a function's name, with the name's line, whose index is `name`."""
    first = name
    while first > 0 and not re.search(r"^\s*(//|#|$)|[;{}]\s*(//.*)?$", lines[first - 1]):
        first -= 1
    return " ".join(lines[first : name + 1])


def too_long(file: str) -> list[str]:
    text = Path(file).read_text()
    named = f"{file}.cpp" if file.endswith((".cu", ".cuh")) else file  # lizard goes by the ending
    return [
        f"{file}:{f.start_line}: {f.name} has {f.length} lines; at most {LIMIT}"
        for f in lizard.analyze_file.analyze_source_code(named, text).function_list
        if f.length > LIMIT
        and not re.search("__(global|device)__", declaration(text.splitlines(), f.start_line - 1))
    ]


def main() -> int:
    files = subprocess.check_output(["git", "ls-files", *PATTERNS], text=True).splitlines()
    breaches = [line for file in files for line in too_long(file)]
    print(*breaches, sep="\n", end="\n" if breaches else "")
    return int(bool(breaches))


if __name__ == "__main__":
    sys.exit(main())

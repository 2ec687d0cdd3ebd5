#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""reading_length.py [FILE]: how much of our own code one reads to read FILE from top to bottom,
that is FILE and every header of this repository that it includes, and those that these include.
It prints each with its lines and the one that brought it in, and fails above --headers or --lines.
FILE is by default the plain forward kernel of Hopper, where the kernel itself stands. forward.cu,
which launches it, brings in the kernels with options and the host's side of a launch too, which
nobody has to read for it."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNEL = "src/cuda/linear/sm90/plain.cuh"


def included(file: Path, root: Path) -> list[Path]:
    """The headers that a file names in quotes, which are ours; the others are in <>."""
    found = []
    for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', file.read_text(), re.MULTILINE):
        places = [folder / name for folder in (file.parent, root, root / "include")]
        header = next((place for place in places if place.is_file()), None)
        if header is None:
            raise FileNotFoundError(f"{file.relative_to(root)} includes {name}: no such header")
        found.append(header.resolve())
    return found


def reading(file: Path, root: Path) -> dict[Path, Path | None]:
    """All files that one reads, nearest first, and the file that includes each."""
    root = root.resolve()
    brought: dict[Path, Path | None] = {(root / file).resolve(): None}
    queue = list(brought)
    while queue:
        read = queue.pop(0)
        for header in included(read, root):
            if header not in brought:
                brought[header] = read
                queue.append(header)
    return brought


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", default=KERNEL, help=f"default: {KERNEL}")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--headers", type=int, default=15, help="most, beside FILE; default 15")
    parser.add_argument("--lines", type=int, default=2000, help="most, FILE's too; default 2000")
    given = parser.parse_args()
    root = given.root.resolve()
    brought = reading(Path(given.file), root)
    total = 0
    for file, by in brought.items():
        lines = len(file.read_text().splitlines())
        total += lines
        came = f"  by {by.relative_to(root)}" if by else ""
        print(f"{lines:6} {file.relative_to(root)}{came}")
    headers = len(brought) - 1
    print(f"{headers} headers beside it (at most {given.headers}),", end=" ")
    print(f"{total} lines (at most {given.lines})")
    return int(headers > given.headers or total > given.lines)


if __name__ == "__main__":
    sys.exit(main())

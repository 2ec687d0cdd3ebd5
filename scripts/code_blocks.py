#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/code_blocks.py [FILE...] tells of code blocks in Markdown that a wrapping editor would
destroy, or that no test can judge: an indented one, one that names no language, one that does not
end. Without files it looks at all of this repository; exit code 1 if there is one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the document on which that begins."""

    language: str
    text: str
    line: int


def scan(document: str) -> tuple[list[Block], list[tuple[int, str]]]:
    """The fenced blocks of a document, and what is wrong with its blocks: a line and a sentence."""
    blocks: list[Block] = []
    breaches: list[tuple[int, str]] = []
    language, begin = None, 0
    lines = document.splitlines()
    for number, line in enumerate(lines, 1):
        fence = line.lstrip().startswith("```")
        if language is None and fence:
            language, begin = line.strip().strip("`"), number
            if not language:
                breaches.append((number, "a code block names no language; text is one"))
        elif language is not None and fence:
            text = "".join(f"{inner}\n" for inner in lines[begin : number - 1])
            blocks.append(Block(language, text, begin + 1))
            language = None
        elif language is None and line.startswith(("    ", "\t")) and line.strip():
            breaches.append((number, "an indented line outside of a fence (```sh, ```python, ...)"))
    if language is not None:
        breaches.append((begin, "a code block that does not end"))
    return blocks, breaches


def main(files: list[str]) -> int:
    listed = files or subprocess.check_output(["git", "ls-files", "*.md"], text=True).splitlines()
    found = 0
    for file in listed:
        for line, sentence in scan(Path(file).read_text())[1]:
            print(f"{file}:{line}: {sentence}")
            found = 1
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

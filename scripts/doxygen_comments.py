#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/doxygen_comments.py HEADER prints a public header with its comments as Doxygen reads
them. The headers themselves have none of Doxygen's marks, which help nobody who reads the source.

    // text      before a declaration   ///  text
    int x;  // text                     int x;  ///< text
The same of /* */ in c.h. The comment at a file's head, behind its licence, is the file's."""

from __future__ import annotations

import re
import sys
from pathlib import Path

TRAILING = re.compile(r"^(?P<code>\s*[^\s/#}].*?)(?P<mark>//|/\*) ")
LEADING = re.compile(r"^(?P<space>\s*)(?P<mark>//|/\*) ?")


def escaped(text: str) -> str:
    """Escapes what Doxygen would take for a command, a tag or a link."""
    return re.sub(r"[\\@<#]", lambda found: "\\" + found[0], text)


def converted(line: str, inside: bool) -> str:
    if inside:  # a comment of several lines
        return escaped(line)
    if found := LEADING.match(line):
        mark = {"//": "/// ", "/*": "/** "}[found["mark"]]
        return found["space"] + mark + escaped(line[found.end() :])
    if found := TRAILING.match(line):
        mark = {"//": "///< ", "/*": "/**< "}[found["mark"]]
        return found["code"] + mark + escaped(line[found.end() :])
    return line


def main(header: str) -> None:
    inside = False
    for number, line in enumerate(Path(header).read_text().splitlines()):
        if number == 0 and "SPDX" in line:
            print(re.sub(r"SPDX.*", r"\\file", line).replace("//", "///").replace("/*", "/**"))
        else:
            print(converted(line, inside))
        opens, closes = line.rfind("/*"), line.rfind("*/")
        inside = opens > closes or (inside and closes < 0)


if __name__ == "__main__":
    main(sys.argv[1])

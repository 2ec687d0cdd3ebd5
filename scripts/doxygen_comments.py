#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/doxygen_comments.py HEADER prints a public header with its comments as Doxygen reads
them. The headers themselves have none of Doxygen's marks, which help nobody who reads the source.

    // text      before a declaration   ///  text
    int x;  // text                     int x;  ///< text
The same of /* */ in c.h. The comment at a file's head, after its licence, is the file's.

With --check in the place of a header it reads Doxygen's warnings and fails, naming each, where a
struct, a class or a function of the C interface has no comment, or where a comment has something in
`backquotes` that no header declares."""

from __future__ import annotations

import re
import sys
from pathlib import Path

TRAILING = re.compile(r"^(?P<code>\s*[^\s/#}].*?)(?P<mark>//|/\*) ")
LEADING = re.compile(r"^(?P<space>\s*)(?P<mark>//|/\*) ?")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# Fields, constructors and enumerators need no comment.
BARE = re.compile(r"(Compound \S+|Member \S+\(.*\) \(function\) of file \S+) is not documented")
HEADERS = Path(__file__).resolve().parents[1] / "include/logitless"


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


def unknown_names(texts: dict[str, str]) -> list[str]:
    """What comments name in `backquotes` and no text declares, and backquotes that are not
    closed, as "FILE:LINE: ..."."""
    declared = {
        word for text in texts.values() for word in re.findall(r"\w+", COMMENT.sub("", text))
    }
    found = []
    for file, text in texts.items():
        for comment in COMMENT.finditer(text):
            line = text.count("\n", 0, comment.start()) + 1
            if comment[0].count("`") % 2:
                found.append(f"{file}:{line}: a ` of a comment is not closed")
            for quoted in re.findall(r"`([^`\n]+)`", comment[0]):
                unknown = [w for w in re.findall(r"[A-Za-z_]\w*", quoted) if w not in declared]
                found += [
                    f"{file}:{line}: a comment names `{w}`, which is nowhere" for w in unknown
                ]
    return found


def without_comment(warnings: str) -> list[str]:
    """Doxygen's warnings about what ought to have a comment."""
    return [line for line in warnings.splitlines() if BARE.search(line)]


def check() -> int:
    texts = {
        str(path.relative_to(HEADERS.parents[1])): path.read_text()
        for path in sorted(HEADERS.glob("*.h"))
    }
    warnings = sys.stdin.read()
    complaints = without_comment(warnings.replace(f"{HEADERS.parents[1]}/", "")) + unknown_names(
        texts
    )
    if "is not documented" not in warnings:  # many fields have no comment
        complaints.append("docs: Doxygen did not look: " + warnings)
    print("\n".join(complaints), end="\n" if complaints else "", file=sys.stderr)
    return 1 if complaints else 0


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
    if sys.argv[1] == "--check":
        sys.exit(check())
    main(sys.argv[1])

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a program is compiled against and finds in the shared library: the sizes and offsets of
every struct of include/logitless/c.h, the value of every enumerator, every function's type, and the
exported symbols, compared with tests/guards/abi.txt.
    abi_test.py [--record] HEADER LIBRARY CC NM
The names come out of the header, what they mean from the compiler. --record: writes abi.txt anew.
Exit code 1: something differs, or cannot be read."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

RECORD = Path(__file__).resolve().parent / "abi.txt"
WIDEST = 8  # bytes: the largest alignment of a field
ADVICE = """What programs are compiled against has changed. Structs and enums grow at their ends
alone, and no function changes or goes. If it is meant, commit abi.txt with it and say why:"""


class Broken(Exception):
    """The header is not written as this program reads it."""


def asked(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def fields_of(body: str) -> list[tuple[str, str]]:
    """(name, type) of each member."""
    found = []
    for declaration in filter(None, (" ".join(part.split()) for part in body.split(";"))):
        if function := re.fullmatch(r"\w+ \(\*(\w+)\)\(.*\)", declaration):
            found.append((function[1], declaration.replace(f"*{function[1]}", "*")))
            continue
        parts = re.fullmatch(r"((?:const )?\w+(?:\* const(?=\*))?)(.*)", declaration)
        for declarator in parts[2].split(",") if parts else []:
            member = re.fullmatch(r"\s*(\**) ?(\w+)(\[\d+\])?", declarator)
            if parts is None or member is None:
                raise Broken(f"cannot read the member {declaration!r}")
            found.append((member[2], f"{parts[1]}{member[1]}{member[3] or ''}"))
    return found


def layout(header: Path, compiler: str) -> list[str]:
    """The lines of abi.txt that the header decides: structs, enumerators, functions."""
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    structs = re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", text, flags=re.DOTALL)
    opaque = re.findall(r"typedef struct (\w+) \1;", text)
    enums = [re.findall(r"(\w+) = \d+", body) for body in re.findall(r"enum \{(.*?)\}", text, re.S)]
    functions = re.findall(r"^LOGITLESS_API (.*?);", text, flags=re.DOTALL | re.MULTILINE)
    for found, keyword in (
        (structs + opaque, r"\bstruct "),
        (enums, r"\benum\b"),
        (functions, r"^LOGITL.*\("),
    ):
        if len(found) != len(re.findall(keyword, text, flags=re.MULTILINE)):
            raise Broken(f"cannot read everything that has {keyword!r}")
    prints = []
    for name, body in structs:
        prints.append(f'printf("struct {name}: %zu bytes\\n", sizeof({name}));')
        for field, kind in fields_of(body):
            place = f"offsetof({name}, {field}), sizeof((({name}*)0)->{field})"
            prints.append(f'printf("  %zu %zu {field}: {kind}\\n", {place});')
    for names in enums:
        prints.append('printf("enum\\n");')
        prints += [f'printf("  {name} = %d\\n", (int){name});' for name in names]
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "abi.c"), Path(folder, "abi")
        lines = [f'#include "{header}"', "#include <stdio.h>", "int main(void) {", *prints, "}", ""]
        source.write_text("\n".join(lines))
        asked(compiler, "-std=c11", "-o", program, source)
        printed = asked(program).splitlines()
    without_gaps(printed)
    # Parameter names are left out, because no caller depends on them.
    bare = [re.sub(r"(?<=[\w*]) (\**)\w+(?=[,)])", r"\1", " ".join(f.split())) for f in functions]
    return printed + [f"function {kind}" for kind in bare]


def without_gaps(lines: list[str]) -> None:
    """No member was forgotten: each begins where the last ended, but for its alignment."""
    end = size = 0
    for line in [*lines, "struct : 0 bytes"]:
        if struct := re.fullmatch(r"struct (\w*): (\d+) bytes", line):
            if not end <= size < end + WIDEST:
                raise Broken(f"members end at {end} of {size} bytes, before {line!r}")
            end, size = 0, int(struct[2])
        elif member := re.match(r"  (\d+) (\d+) ", line):
            if not end <= int(member[1]) < end + WIDEST:
                raise Broken(f"there is a gap before{line}")
            end = int(member[1]) + int(member[2])


def exported(library: Path, nm: str) -> list[str]:
    lines = asked(nm, "-D", "--defined-only", library).splitlines()
    return sorted(f"symbol {line.split()[-1]}" for line in lines)


def main() -> int:
    record = sys.argv[1] == "--record"
    header, library, compiler, nm = sys.argv[1 + record :]
    try:
        now = [*layout(Path(header).resolve(), compiler), *exported(Path(library), nm)]
    except (Broken, subprocess.CalledProcessError) as reason:
        print(f"no verdict: {reason}")
        return 1
    if record:
        RECORD.write_text("\n".join(now) + "\n")
        print(f"written: {RECORD}")
        return 0
    before = RECORD.read_text().splitlines()
    changes = list(difflib.unified_diff(before, now, "abi.txt", "this build", lineterm="", n=1))
    if changes:
        print(*changes, ADVICE, sep="\n")
        print(f"  python3 {sys.argv[0]} --record {header} {library} {compiler} {nm}")
        return 1
    print(f"{len(now)} lines, as recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main())

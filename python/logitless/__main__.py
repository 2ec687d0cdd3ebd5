# SPDX-License-Identifier: Apache-2.0
"""`python -m logitless report`: checks that the library is right and fast on this machine."""

from __future__ import annotations

import sys

from logitless._report import command

USAGE = """usage: python -m logitless report [--help]

report    checks a sample of calls and times five heads on this machine: one JSON file, a table"""


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["report"]:
        return command.main(arguments[1:])
    asked = arguments[:1] in (["--help"], ["-h"])
    print(USAGE, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

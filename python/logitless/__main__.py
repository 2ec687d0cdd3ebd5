# SPDX-License-Identifier: Apache-2.0
"""`python -m logitless COMMAND`: what an installed package can say of itself and this machine."""

from __future__ import annotations

import sys

from logitless._report import command, tools

USAGE = """usage: python -m logitless {info,plan,selftest,report} [--help]

info      the version, the library's file, and each backend or why it is not available
plan      the memory that a head's loss needs:  plan TOKENS HIDDEN VOCAB
selftest  checks random calls on the CPU and the GPU, in a minute
report    checks a sample of calls and times five heads on this machine: one JSON file, a table"""

COMMANDS = {
    "info": tools.info,
    "plan": tools.plan,
    "selftest": tools.selftest,
    "report": command.main,
}


def main(arguments: list[str]) -> int:
    asked = COMMANDS.get(arguments[0]) if arguments else None
    if asked is not None:
        return asked(arguments[1:])
    wants_help = arguments[:1] in (["--help"], ["-h"])
    print(USAGE, file=sys.stdout if wants_help else sys.stderr)
    return 0 if wants_help else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

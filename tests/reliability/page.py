# SPDX-License-Identifier: Apache-2.0
"""The page: one table, dated."""

from __future__ import annotations

from reliability.common import Row

HEAD = """# Reliability

What is promised, how each promise is tried, and the figure of the last run. `make reliability`
writes this page, `make reliability-device` the rows of a machine with a GPU, and `make test` runs
`scripts/reliability --short`. No figure is written by hand. What the promises mean is in
[semantics.md](semantics.md).
"""


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def render(rows: list[Row], where: str, notes: list[str]) -> str:
    lines = [HEAD, "| promised | tried by | figure | when, where |", "|---|---|---|---|"]
    for row in rows:
        figure = row.figure if row.kept is not False else f"**BROKEN**: {row.figure}"
        place = row.where or (where if row.kept is not None else "")
        lines.append("| " + " | ".join(map(cell, (row.promise, row.how, figure, place))) + " |")
    for note in notes:
        lines += ["", note]
    return "\n".join(lines) + "\n"

# SPDX-License-Identifier: Apache-2.0
"""The text of out/reliability.md: one table, dated."""

from __future__ import annotations

from reliability.common import Row

HEAD = """# Reliability

This page lists what is promised, how each promise is tested, and the figures of the last run. `make reliability` writes
the page, and `make reliability-device` the rows of a machine with a GPU. `make test` runs
`scripts/reliability --short`. [semantics.md](semantics.md) says what the promises mean.
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

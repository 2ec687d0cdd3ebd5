# SPDX-License-Identifier: Apache-2.0
"""Pictures for documents: one SVG on a light page and one on a dark page, the same bytes each time
that the same figures are drawn. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


class Theme(NamedTuple):
    page: str
    text: str
    faint: str  # for lines behind the data and less important words
    ours: str
    other: str


LIGHT = Theme("#ffffff", "#1f2328", "#6e7781", "#0a58ca", "#9a6700")
DARK = Theme("#0d1117", "#e6edf3", "#8d96a0", "#58a6ff", "#d29922")


def both(prefix: Path, draw: Callable[[Theme], pyplot.Figure]) -> list[Path]:
    """Writes PREFIX.svg and PREFIX-dark.svg, which `draw` draws in the colours of a page."""
    written = []
    for theme, suffix in ((LIGHT, ""), (DARK, "-dark")):
        colours = dict.fromkeys(
            ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor"),
            theme.text,
        )
        pages = dict.fromkeys(("figure.facecolor", "axes.facecolor"), theme.page)
        settings = {
            **colours, **pages, "axes.edgecolor": theme.faint, "grid.color": theme.faint,
            "axes.spines.top": False, "axes.spines.right": False, "font.size": 11,
            "svg.fonttype": "none",  # text stays text
            "svg.hashsalt": "logitless",  # else the names of clips are random
        }  # fmt: skip
        path = prefix.with_name(f"{prefix.name}{suffix}.svg")
        with matplotlib.rc_context(settings):
            figure = draw(theme)
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata={"Date": None})
            pyplot.close(figure)
        written.append(path)
    return written

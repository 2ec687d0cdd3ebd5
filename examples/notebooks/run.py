# SPDX-License-Identifier: Apache-2.0
"""Runs the code of a notebook without Jupyter.

    python examples/notebooks/run.py distil.ipynb

Pictures are written into the working folder.
"""

from __future__ import annotations

import argparse
import json
import linecache
import os
import pathlib
from typing import Any


def run(notebook: pathlib.Path) -> dict[str, Any]:
    """Runs the cells one after the other, and returns the names that they have defined."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(cells, 1):
        if cell["cell_type"] == "code":
            code = "".join(cell["source"])
            place = f"{notebook.name}, cell {number}"
            linecache.cache[place] = (len(code), None, code.splitlines(keepends=True), place)
            exec(compile(code, place, "exec"), names)
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("notebook", type=pathlib.Path, help="a file, or a name in this folder")
    given = parser.parse_args().notebook
    beside = pathlib.Path(__file__).parent / given
    os.environ.setdefault("MPLBACKEND", "Agg")
    run(given if given.exists() else beside)


if __name__ == "__main__":
    main()

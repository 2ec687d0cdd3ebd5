#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/python_reference.py FOLDER makes the pages of the Python package from its docstrings, by
pdoc; exit code 1 if pdoc warns or a docstring is wrong (docstrings.py says what that is).
scripts/docs calls it where pdoc and the frameworks are."""

from __future__ import annotations

import importlib
import sys
import typing
import warnings
from pathlib import Path

import docstrings
import pdoc

# These modules need haliax and Tunix, which are not installed here.
_ABSENT = ("!logitless.integrations.levanter", "!logitless.integrations.tunix")
MODULES = (*docstrings.MODULES, *_ABSENT)


def import_with_types() -> None:
    """The options of a call are types that only a type checker sees; pdoc does not find them when
    another module names them."""
    importlib.import_module("logitless")
    typing.TYPE_CHECKING = True
    importlib.import_module("logitless._call")
    typing.TYPE_CHECKING = False


def resolve_names() -> None:
    """Imports what is imported at its first use, so that pdoc finds it. Resolves the types of a
    NamedTuple's fields, which are otherwise looked up in another module than the class's."""
    for name in docstrings.MODULES:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", []):
            setattr(module, public, getattr(module, public))
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "logitless":
            continue
        for value in list(vars(module).values()):
            if isinstance(value, type) and issubclass(value, tuple) and value is not tuple:
                value.__new__.__annotations__ = typing.get_type_hints(value)


def main(folder: str) -> int:
    import_with_types()
    resolve_names()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pdoc.pdoc(*MODULES, output_directory=Path(folder))
    said = [f"{warning.filename}:{warning.lineno}: {warning.message}" for warning in told]
    said += docstrings.complaints_of_all()
    for line in said:
        print(f"docs: {line}", file=sys.stderr)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

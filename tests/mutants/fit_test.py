#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every mutant of the host's code, of WebGPU, of the published shaders and of the JavaScript, and
every switch of the validation, still fits the source it changes: one that does not would be found
only after hours of make mutants. scripts/mutants_device.py check does this for CUDA's mutants."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tests"))

from mutants import MUTANTS
from mutants.validation import rewrite_validation
from mutants.webgpu import MUTANTS as WEBGPU_MUTANTS


def web_mutants() -> list[tuple[str, Path, str]]:
    """Name, file and text; those of tests/web are tuples of a script of their own."""
    spec = importlib.util.spec_from_file_location("web_mutants", ROOT / "tests/web/mutants.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    shaders = ROOT / "src/webgpu/shaders"
    return [
        (name, ROOT / "web" / file if "." in file else shaders / f"{file}.wgsl", text)
        for name, file, text, *_ in script.MUTANTS
    ]


def main() -> int:
    every = [
        (m.name, ROOT / edit.file, edit.old)
        for m in (*MUTANTS, *WEBGPU_MUTANTS)
        for edit in m.edits
    ] + web_mutants()
    wrong = 0
    for name, file, text in every:
        count = file.read_text().count(text)
        if count != 1:
            print(
                f"{name}: its text stands {count} times in {file.relative_to(ROOT)}; once is meant"
            )
            wrong += 1
    try:
        switches = len(rewrite_validation(ROOT, None))
    except ValueError as error:
        print(f"the validation's switches do not fit: {error}")
        wrong, switches = wrong + 1, 0
    print(f"{len(every) - wrong} of {len(every)} texts fit, {switches} switches of the validation")
    return 1 if wrong or len(every) < 250 or switches < 100 else 0


if __name__ == "__main__":
    sys.exit(main())

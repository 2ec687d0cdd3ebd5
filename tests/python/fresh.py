# SPDX-License-Identifier: Apache-2.0
"""Code in a process of its own: where nothing was imported, called or kept before it."""

from __future__ import annotations

import os
import subprocess
import sys


def environment() -> dict[str, str]:
    """This environment, with this process's import paths in PYTHONPATH."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def attempt(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )


def run(code: str) -> str:
    """The output of the code. A failure of the code is an AssertionError."""
    done = attempt(code)
    assert done.returncode == 0, done.stderr
    return done.stdout

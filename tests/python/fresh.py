# SPDX-License-Identifier: Apache-2.0
"""Code in a process of its own: where nothing was imported, called or kept before it."""

from __future__ import annotations

import os
import subprocess
import sys


def environment() -> dict[str, str]:
    """Where the package and the tests' own modules are found as here."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def attempt(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )


def run(code: str) -> str:
    """What it prints; fails where it fails."""
    done = attempt(code)
    assert done.returncode == 0, done.stderr
    return done.stdout

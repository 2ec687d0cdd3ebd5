# SPDX-License-Identifier: Apache-2.0
"""Where the package and its library are: this checkout's python/ and build/release (or
$LOGITLESS_LIBRARY), and the ranks and references of tests/python. scripts/test-peers runs each
file with the one library that it tests."""

from __future__ import annotations

import os
import pathlib
import sys
import warnings
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
os.environ.setdefault("LOGITLESS_LIBRARY", str(ROOT / "build/release/liblogitless.so"))
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests/python")]
warnings.filterwarnings("ignore")

import pytest  # noqa: E402

import ranks  # noqa: E402


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ranks.Group]:
    """Two gloo processes."""
    made = ranks.Group(2, tmp_path_factory.mktemp("peers"))
    yield made
    made.stop()

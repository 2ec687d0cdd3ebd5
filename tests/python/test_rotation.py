# SPDX-License-Identifier: Apache-2.0
"""Which tests run for a commit (tests/support/rotation.py)."""

from __future__ import annotations

import collections
import os
import pathlib
import re
import subprocess
import sys

import pytest

import rotation

NAMES = ["f.py::alone", "f.py::few[a]", "f.py::few[b]"]
NAMES += [f"f.py::Class::many[{op}-{d}]" for op in range(7) for d in ("f32", "f16", "bf16")]
NAMES += [f"f.py::third[{i}]" for i in range(rotation.MANY)]
NAMES += [f"g.py::third[{i}]" for i in range(rotation.SWEPT + 1)]
SLOW = ["f.py::slow", "g.py::slow[a]", "g.py::slow[b]"]


@pytest.mark.parametrize("first", [0, 944])
def test_six_commits_run_every_case(first: int) -> None:
    parts = [rotation.part(NAMES + SLOW, seed, SLOW) for seed in range(first, first + 6)]
    runs = collections.Counter(name for part in parts for name in part)
    times = {"many": 1, "third": 2, "slow": 2}
    kinds = {name: re.search("many|third|slow", name) for name in NAMES + SLOW}
    assert runs == {name: times[kind[0]] if kind else 6 for name, kind in kinds.items()}
    functions = {name.partition("[")[0] for name in NAMES}
    for own in parts:
        assert {name.partition("[")[0] for name in own if name not in SLOW} == functions


def test_pytest_runs_everything_unless_a_seed_is_set(tmp_path: pathlib.Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import rotation\n"
        "def pytest_collection_modifyitems(config, items): rotation.rotate(config, items)\n"
        "def pytest_terminal_summary(terminalreporter): rotation.report(terminalreporter)\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.parametrize('i', range(9))\ndef test_it(i): pass\n"
        "@pytest.mark.slow\ndef test_slowly(): pass\n"
    )

    def ran(**environment: str) -> str:
        own = {k: v for k, v in os.environ.items() if not k.startswith("LOGITLESS_TEST")}
        own["PYTHONPATH"] = str(pathlib.Path(rotation.__file__).parent)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path]
        done = subprocess.run(command, env=own | environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    counts = tmp_path / "counts"
    assert "10 passed" in ran() and "cases" not in ran()
    assert "10 passed" in ran(LOGITLESS_TEST_SEED="1", LOGITLESS_TEST_FULL="1")
    said = ran(LOGITLESS_TEST_SEED="1", LOGITLESS_TEST_COUNTS=str(counts))
    assert "3 passed" in said and "3 of 10 cases; LOGITLESS_TEST_FULL=1 runs all" in said
    assert counts.read_text() == "3 10\n"

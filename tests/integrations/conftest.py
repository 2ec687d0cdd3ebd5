# SPDX-License-Identifier: Apache-2.0
"""Where the package and its library are: this checkout's python/ and build/release (or
$LOGITLESS_LIBRARY). Tests of frameworks count our calls, because a hook that is never used would
fail nothing else."""

from __future__ import annotations

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
os.environ.setdefault("LOGITLESS_LIBRARY", str(ROOT / "build/release/liblogitless.so"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(ROOT / "python"))

import pytest  # noqa: E402
import torch  # noqa: E402

import support  # noqa: E402

# Files whose tests share nothing that is slow to make.
APART = ("test_causal_lms.py", "test_peft.py", "test_peft_heads.py", "test_device_map.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For --dist loadgroup: the tests of other files stay in one process."""
    for item in items:
        if item.path.name not in APART:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False  # accelerate leaves it on
    torch.set_num_threads(1)  # for such small models two threads are slower


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> support.Calls:
    """Counts the losses of a head that are computed in this process."""
    return support.Calls(monkeypatch.setattr)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(support.versions())

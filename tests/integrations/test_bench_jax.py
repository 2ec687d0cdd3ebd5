# SPDX-License-Identifier: Apache-2.0
"""Runs bench/jax_heads.py at a tiny shape on the CPU, and checks its records."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench/jax_heads.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_all_make_the_same_loss_and_gradients(tmp_path: pathlib.Path) -> None:
    done = bench(
        "--shapes", "64x32x300", "--rounds", "2", "--burst", "0.01", "--out", str(tmp_path / "jax")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads((tmp_path / "jax.json").read_text())["records"]
    names = [record["contender"] for record in records]
    assert names == ["three products", "XLA, log_softmax", "optax", "ours", "ours, 512 MiB"]
    expected = records[1]["loss"]
    for record in records:
        assert len(record["samples"]) == 2 and record["ms"] > 0 and record["mib"] > 0
        assert record["contender"] in done.stdout
    for record in records[1:]:
        assert record["loss"] == pytest.approx(expected, abs=1e-3)
        assert record["off"] < 1e-2


def test_a_shape_that_is_none_is_refused() -> None:
    done = bench("--shapes", "3x4")
    assert done.returncode != 0 and "--shapes: '3x4'; allowed: 8192x4096x128256" in done.stderr

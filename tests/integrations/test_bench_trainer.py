# SPDX-License-Identifier: Apache-2.0
"""Runs bench/trainer.py at tiny shapes on the CPU, and checks its records and pictures."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench/trainer.py"
WARMUP, STEPS, ROUNDS = 2, 2, 2
WAYS = ("unpatched", "compile", "liger", "ours", "ours-512", "ours-compile")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH), "--device", "cpu", "--tiny", *arguments]
    environment = {"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, str]:
    """A run with Liger's head, which fails here for want of a GPU, or of Liger."""
    folder = tmp_path_factory.mktemp("trainer")
    done = bench(
        "--models", "tiny, tied", "--batches", "4x32", "--ways", ",".join(WAYS),
        "--warmup", str(WARMUP), "--steps", str(STEPS), "--rounds", str(ROUNDS),
        "--out", str(folder),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def records(ran: tuple[pathlib.Path, str]) -> dict[str, Any]:
    whole = json.loads((ran[0] / "trainer.json").read_text())
    return {record["way"]: record for record in whole["records"]}


def test_every_way_is_in_the_table_and_one_that_fails_says_why(
    ran: tuple[pathlib.Path, str], records: dict[str, Any]
) -> None:
    assert tuple(records) == WAYS
    assert "failed" in records["liger"] and "ms" not in records["liger"]
    for record in records.values():
        assert record["title"] in ran[1]
    assert records["liger"]["failed"] in ran[1]


def test_ways_learn_the_same_from_the_same_weights_and_tokens(records: dict[str, Any]) -> None:
    own = records["unpatched"]["losses"]
    assert own[0] == own[1], "a turn does not begin where the one before has begun"
    assert own[0][-1] < own[0][0] - 0.01, "nothing was learnt"
    for way in ("compile", "ours", "ours-512", "ours-compile"):
        assert records[way]["losses"][0] == pytest.approx(own[0], abs=2e-3)
        assert 0 < records[way]["off"] < 2e-3


def test_every_step_counts_once(records: dict[str, Any]) -> None:
    for way in ("unpatched", "compile", "ours", "ours-512", "ours-compile"):
        assert len(records[way]["samples"]) == ROUNDS * STEPS
        heads = ROUNDS * (WARMUP + STEPS) if way.startswith("ours") else 0
        assert records[way]["heads"] == heads


def test_the_run_draws_its_picture_for_both_pages(ran: tuple[pathlib.Path, str]) -> None:
    pytest.importorskip("matplotlib")
    for name in ("trainer.svg", "trainer-dark.svg"):
        text = (ran[0] / name).read_text()
        assert "Logitless" in text and "4 x 32 tokens" in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--ways", "theirs"), "--ways: 'theirs'; allowed: unpatched"),
        (("--models", "large"), "--models: 'large'; allowed: tiny, tied; tiny"),
        (("--batches", "4"), "--batches: '4'; allowed: 8x2048"),
        (("--rounds", "0"), "--rounds: 0; allowed: 1 or more"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments: tuple[str, ...], message: str) -> None:
    done = bench(*arguments)
    assert done.returncode != 0 and message in done.stderr

# SPDX-License-Identifier: Apache-2.0
"""DDP and FSDP2 in two processes on gloo, compared with one process that has the whole batch and
transformers' own loss."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
import torch

import support
import workers
from support import STEPS, same_parameters, same_run


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process gave, for every case. The processes are started once: that is slow."""
    folder = str(tmp_path_factory.mktemp("gloo"))
    torch.multiprocessing.spawn(workers.work, (folder,), nprocs=workers.WORLD)
    return [torch.load(pathlib.Path(folder) / f"rank{rank}.pt") for rank in range(workers.WORLD)]


@functools.lru_cache
def alone(tied: bool, accumulated: int, adapter: str) -> dict[str, Any]:
    """One process, the whole batch, transformers' own loss."""
    calls = support.Calls(lambda *_: None)
    case = workers.Case("plain", tied=tied, accumulated=accumulated, adapter=adapter)
    return workers.train(case, calls)


def of(results: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """What each process has of a case."""
    failed = [r[name]["failed"] for r in results if "failed" in r.get(name, {})]
    assert not failed, failed[0]
    assert all(name in r for r in results), "a case before it failed"
    return [r[name] for r in results]


@pytest.mark.parametrize("case", workers.CASES, ids=str)
def test_two_processes_learn_as_one_does(case: workers.Case, results: list[dict[str, Any]]) -> None:
    expected = alone(case.tied, case.accumulated, case.adapter)
    assert len(expected["gradients"]) == len(expected["parameters"]) or case.adapter
    for actual in of(results, str(case)):
        assert actual["calls"] == STEPS * case.accumulated
        same_run(actual["losses"], expected["losses"], case.bf16)
        assert actual["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            off = (actual["gradients"][name] - gradient).norm() / gradient.norm()
            assert off <= (0.05 if case.bf16 else 2e-5), name
        same_parameters(
            actual["parameters"].items(), expected["parameters"].items(),
            3e-2 if case.bf16 else 2e-5,
        )  # fmt: skip


@pytest.mark.parametrize("case", workers.MEASURED, ids=str)
def test_metrics_are_those_of_the_logits(case: workers.Case, results: list[dict[str, Any]]) -> None:
    for actual in of(results, f"{case} metrics"):
        for found, expected in zip(actual["found"], actual["expected"], strict=True):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_the_function_refuses_a_sharded_weight(results: list[dict[str, Any]]) -> None:
    for actual in of(results, "sharded weight"):
        assert "DTensor is sharded" in actual["error"] and "Head" in actual["error"]

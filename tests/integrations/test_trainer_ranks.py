# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer in two processes on gloo, patched beside unpatched."""

from __future__ import annotations

from typing import Any

import pytest

import support
import trainer_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return trainer_ranks.run(str(tmp_path_factory.mktemp("trainer")), False)


@pytest.mark.parametrize("name", trainer_ranks.ON_ANY)
def test_two_processes_learn_the_same_without_logits(
    name: str, ranks: list[dict[Any, Any]]
) -> None:
    settings = trainer_ranks.ON_ANY[name]
    for rank in ranks:
        own, ours = (rank.get((name, patched), {}) for patched in (False, True))
        assert "failed" not in own | ours, (own | ours)["failed"]
        assert own["calls"] == 0
        assert ours["calls"] == support.STEPS * settings.get("gradient_accumulation_steps", 1)
        bf16 = "bf16" in settings
        support.same_run(ours["losses"], own["losses"], bf16)
        support.same_parameters(
            ours["parameters"].items(), own["parameters"].items(), 2e-2 if bf16 else 2e-5
        )

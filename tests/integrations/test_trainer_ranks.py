# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer in two processes on gloo learns the same with the patch as without."""

from __future__ import annotations

from typing import Any

import pytest

import trainer_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return trainer_ranks.run(str(tmp_path_factory.mktemp("trainer")), False)


@pytest.mark.parametrize("name", trainer_ranks.ON_ANY)
def test_two_processes_learn_the_same_without_logits(
    name: str, ranks: list[dict[Any, Any]]
) -> None:
    for rank in ranks:
        trainer_ranks.check(rank, name)

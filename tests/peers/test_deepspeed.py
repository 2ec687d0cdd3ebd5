# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's engine with ZeRO in two processes on gloo: in 20 steps a patched model learns the
same as one with its own loss."""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "integrations"))

import ranks

os.environ.setdefault("DS_ACCELERATOR", ranks.DEVICE)

pytest.importorskip("deepspeed")

import support
from logitless.integrations import patch_transformers
from ranks import Rank

_calls: list[support.Calls] = []  # in this process


def engine_of(me: Rank, model: Any, stage: int, bf16: bool) -> Any:
    os.environ |= {
        "RANK": str(me.rank), "LOCAL_RANK": str(me.rank), "WORLD_SIZE": str(me.size),
        "LOCAL_SIZE": str(me.size), "MASTER_ADDR": "localhost", "MASTER_PORT": "0",
    }  # fmt: skip
    import deepspeed

    # Compiling its shared-memory collective would take a minute; gloo's is enough.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bf16},
        "steps_per_print": 1 << 30,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(me: Rank, patched: bool, stage: int, tied: bool, bf16: bool) -> dict[str, Tensor]:
    """Losses of the whole batch, our calls, and the parameters in the end."""
    import deepspeed

    model = support.llama(tie_word_embeddings=tied)
    if patched:
        patch_transformers(model)
    engine = engine_of(me, model, stage, bf16)
    if not _calls:
        _calls.append(support.Calls())
    _calls[0].taken()
    losses = []
    for step in range(support.STEPS):
        batch = support.batch(step)
        tokens = (batch["labels"][:, 1:] != -100).sum()
        mine = {name: value[me.rank :: me.size] for name, value in batch.items()}
        loss = engine(**mine, num_items_in_batch=tokens / me.size).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().float() / me.size
        dist.all_reduce(total)
        losses.append(total)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        made = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    engine.destroy()
    return {"losses": torch.stack(losses), "calls": torch.tensor(_calls[0].taken()), **made}


def case(me: Rank, stage: int, tied: bool, bf16: bool) -> dict[str, Tensor]:
    theirs, ours = (train(me, patched, stage, tied, bf16) for patched in (False, True))
    assert theirs.pop("calls") == 0 and ours.pop("calls") == support.STEPS
    losses = ours.pop("losses")
    support.same_run(losses.tolist(), theirs.pop("losses").tolist(), bf16)
    support.same_parameters(ours.items(), theirs.items(), 3e-2 if bf16 else 2e-5)
    return {"losses": losses}


@pytest.mark.parametrize(
    ("stage", "tied", "bf16"),
    [(1, False, False), (2, True, False), (3, False, False), (3, True, False), (3, False, True)],
)
def test_zero_learns_the_same(pair: ranks.Group, stage: int, tied: bool, bf16: bool) -> None:
    pair.call(case, stage, tied, bf16)

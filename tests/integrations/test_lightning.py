# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer: a LightningModule whose head, or whose function, makes the loss, in one
process and in two on gloo, by DDP and by FSDP 2."""

from __future__ import annotations

import os
import pathlib
import socket
import traceback
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import support
from logitless.torch import LinearCrossEntropyHead, linear_cross_entropy
from support import STEPS, Calls, same_parameters, same_run

WORLD = 2
# How two processes train, which API makes the loss, and over how many batches gradients are
# accumulated. "function" passes the weight itself, of which FSDP holds a part per process.
CASES = [
    ("ddp", "head", 1), ("ddp", "head", 2), ("ddp", "function", 1), ("fsdp", "head", 1),
    ("fsdp", "head", 2),
]  # fmt: skip


class Module(lightning.LightningModule):
    """A tiny Llama's backbone and a head, whose loss is made in one of three ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        model = support.llama()
        self.kind = kind
        self.backbone, self.head = model.model, model.lm_head
        if kind == "head":
            self.head = LinearCrossEntropyHead.from_linear(self.head, shift=True)
        self.losses: list[float] = []
        self.held_out: list[float] = []

    def configure_model(self) -> None:
        """Shards the modules under ModelParallelStrategy, which leaves this to the module."""
        if self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            for part in (*self.backbone.layers, self.backbone, self.head):
                fully_shard(part, mesh=mesh)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.backbone(batch["input_ids"]).last_hidden_state
        labels = batch["labels"]
        if self.kind == "head":
            return self.head(hidden, labels)
        if self.kind == "function":
            return linear_cross_entropy(hidden, self.head.weight, labels, shift=True)
        logits = self.head(hidden)[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.held_out.append(self.loss(batch).item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def strategy_of(name: str) -> Any:
    if name != "fsdp":
        return name
    return ModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1)


def train(
    kind: str, folder: pathlib.Path, precision: str, accumulated: int, strategy: str = "auto"
) -> Module:
    world = 1 if strategy == "auto" else WORLD
    module = Module(kind)
    trainer = lightning.Trainer(
        accelerator="cpu" if support.ON_CPU else "gpu", devices=world,
        strategy=strategy_of(strategy), max_steps=STEPS, precision=precision, logger=False,
        accumulate_grad_batches=accumulated, default_root_dir=folder, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    rows = [support.example(i) for i in range(4 * world * accumulated * STEPS)]
    held_out = [support.example(i) for i in range(100, 100 + 8 * world)]
    trainer.fit(
        module,
        torch.utils.data.DataLoader(rows, batch_size=4),
        torch.utils.data.DataLoader(held_out, batch_size=4),
    )
    return module


@pytest.mark.parametrize("kind", ["head", "function"])
@pytest.mark.parametrize(
    "precision, accumulated", [("32-true", 1), ("32-true", 2), ("bf16-mixed", 1)], ids=str
)
def test_lightning_learns_the_same_without_logits(
    kind: str, precision: str, accumulated: int, tmp_path: pathlib.Path, calls: Calls
) -> None:
    own = train("plain", tmp_path, precision, accumulated)
    assert calls.taken() == 0
    ours = train(kind, tmp_path, precision, accumulated)
    assert calls.taken() == STEPS * accumulated + len(ours.held_out)
    bf16 = precision != "32-true"
    same_run(ours.losses, own.losses, bf16, STEPS * accumulated)
    assert len(own.held_out) == 2
    assert ours.held_out == pytest.approx(own.held_out, rel=2e-2 if bf16 else 1e-5)
    same_parameters(ours.named_parameters(), own.named_parameters(), 2e-2 if bf16 else 2e-5)


def whole(parameter: Any) -> Tensor:
    """A parameter; of one that FSDP has shared out, all of it."""
    tensor: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return tensor.detach().clone()


def work(rank: int, folder: str, port: int) -> None:
    """Every case, ours and without us; what each gave, or how it failed, is in the file of the
    rank."""
    torch.set_num_threads(1)
    os.environ |= {  # with a rank set, Lightning starts no processes
        "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)
    }  # fmt: skip
    calls = Calls()
    results: dict[Any, Any] = {}
    plain = [(strategy, "plain", accumulated) for strategy, _, accumulated in CASES]
    for case in dict.fromkeys((*plain, *CASES)):
        strategy, kind, accumulated = case
        calls.taken()
        try:
            module = train(kind, pathlib.Path(folder), "32-true", accumulated, strategy)
            results[case] = {
                "losses": module.losses,
                "held out": module.held_out,
                "calls": calls.taken(),
                "sharded": sum(hasattr(p, "full_tensor") for p in module.parameters()),
                "parameters": {name: whole(p) for name, p in module.named_parameters()},
            }
        except Exception:  # reported at once: the other process may wait for this one
            results[case] = {"failed": traceback.format_exc()}
            break
    torch.save(results, pathlib.Path(folder) / f"rank{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each process gave, for every case."""
    folder = str(tmp_path_factory.mktemp("lightning"))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (folder, port), nprocs=WORLD)
    return [torch.load(pathlib.Path(folder) / f"rank{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize(("strategy", "kind", "accumulated"), CASES)
def test_two_processes_learn_the_same_without_logits(
    strategy: str, kind: str, accumulated: int, ranks: list[dict[Any, Any]]
) -> None:
    pairs = [
        (r.get((strategy, "plain", accumulated), {}), r.get((strategy, kind, accumulated), {}))
        for r in ranks
    ]
    for own, ours in pairs:
        assert "failed" not in own | ours, (own | ours)["failed"]
        assert own["calls"] == 0 and len(own["held out"]) == 2
        assert ours["calls"] == STEPS * accumulated + len(ours["held out"])
        assert bool(ours["sharded"]) == bool(own["sharded"]) == (strategy == "fsdp")
        same_run(ours["losses"], own["losses"], steps=STEPS * accumulated)
        assert ours["held out"] == pytest.approx(own["held out"], rel=1e-5)
        same_parameters(ours["parameters"].items(), own["parameters"].items(), 2e-5)
    first, second = (ours for _, ours in pairs)
    assert first["losses"] != second["losses"]  # each process has other sequences
    same_parameters(first["parameters"].items(), second["parameters"].items(), 0)

# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer: a LightningModule whose head, or whose function, makes the loss."""

from __future__ import annotations

import pathlib
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor

import support
from logitless.torch import LinearCrossEntropyHead, linear_cross_entropy
from support import STEPS, Calls, same_parameters, same_run


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


def train(kind: str, folder: pathlib.Path, precision: str, accumulated: int) -> Module:
    module = Module(kind)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, precision=precision, logger=False,
        accumulate_grad_batches=accumulated, default_root_dir=folder, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
    )  # fmt: skip
    rows = [support.example(i) for i in range(4 * accumulated * STEPS)]
    held_out = [support.example(i) for i in range(100, 108)]
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

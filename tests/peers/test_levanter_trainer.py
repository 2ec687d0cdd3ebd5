# SPDX-License-Identifier: Apache-2.0
"""Levanter's own program, levanter.main.train_lm: a tiny Llama in its Trainer, with our loss in the
place of Levanter's beside the same run without, in a JAX that Levanter's loss still runs in."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
# The test takes half as long where XLA does not spend its time on faster code.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import numpy as np
import pytest

pytest.importorskip("levanter", exc_type=ImportError)

import haliax as hax
import jax
import jax.numpy as jnp
import jmp
from levanter.callbacks.watch import WatchConfig
from levanter.checkpoint import CheckpointerConfig
from levanter.data import ListAsyncDataset
from levanter.data.text import LMTaskConfig
from levanter.distributed import DistributedConfig, RayConfig
from levanter.main import train_lm
from levanter.models import lm_model
from levanter.models.llama import LlamaConfig
from levanter.optim import AdamConfig
from levanter.tracker import TrackerConfig
from levanter.tracker.tracker import NoopTracker
from levanter.trainer import Trainer, TrainerConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from logitless.integrations.levanter import maybe_fused_next_token_loss

STEPS, BATCH, LENGTH, VOCAB = 20, 4, 12, 61


def tokenizer() -> Any:
    """Words of one character, whose bytes the evaluation counts."""
    words = WordLevel({chr(ord("!") + i): i for i in range(VOCAB)}, unk_token="!")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))


def examples(Pos: Any, count: int, first: int = 0) -> Any:
    """Sequences of which something can be learnt; a third of the tokens of some do not count."""
    made = []
    for i in range(first, first + count):
        ids = (np.arange(LENGTH) * (i % 3 + 1) + 7 * i) % VOCAB
        counts = np.arange(LENGTH) % 3 != (i % 4)
        made.append(
            lm_model.LmExample.causal(
                hax.named(jnp.asarray(ids, jnp.int32), Pos),
                loss_mask=hax.named(jnp.asarray(counts, jnp.int32), Pos),
            )
        )
    return ListAsyncDataset(made, is_complete=True)


@dataclasses.dataclass(frozen=True)
class InMemory(LMTaskConfig):
    """Data that are neither fetched nor cached."""

    @property
    def the_tokenizer(self) -> Any:  # type: ignore[override]
        return tokenizer()

    def train_set(self, Pos: Any, batch_schedule: Any, *_: Any, **__: Any) -> Any:
        return examples(Pos, STEPS * BATCH)

    def tagged_eval_sets(self, Pos: Any, monitors: Any = True) -> Any:
        return [(examples(Pos, 2 * BATCH, 1000), ["held out"])]

    def train_sets(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    validation_sets = build_caches = train_sets
    sources = property(train_sets)


class Logged(NoopTracker):
    """What Levanter logs of losses, in training and in the evaluation."""

    def __init__(self) -> None:
        self.of: dict[str, dict[int, float]] = {"train/loss": {}, "eval/loss": {}}

    def log(self, metrics: Any, *, step: Any, commit: Any = None) -> None:
        for name in self.of.keys() & metrics.keys():
            self.of[name][step] = float(metrics[name])


@dataclasses.dataclass(frozen=True)
class Losses(TrackerConfig):
    tracker: Logged

    def init(self, run_id: Any) -> Any:
        return self.tracker


class Kept(Trainer):
    """Levanter's Trainer; its program drops the state that it has in the end."""

    model: Any

    def train(self, state: Any, train_loader: Any) -> Any:
        info = super().train(state, train_loader)
        Kept.model = info.state.model
        return info


def train(folder: pathlib.Path, tied: bool, bf16: bool, accumulated: int, z_loss: float) -> Any:
    """The losses, the parameters in the end, and how often the program of a step calls us."""
    logged = Logged()
    config = train_lm.TrainLmConfig(
        data=InMemory(),
        trainer=TrainerConfig(
            seed=7, id="run", tracker=Losses(logged), log_dir=folder, require_accelerator=False,
            mp=jmp.get_policy("p=f32,c=bf16" if bf16 else "f32"), train_batch_size=BATCH,
            per_device_parallelism=BATCH // accumulated, num_train_steps=STEPS,
            steps_per_eval=STEPS, load_checkpoint=False, ray=RayConfig(auto_start_cluster=False),
            distributed=DistributedConfig(initialize_jax_distributed=False),
            checkpointer=CheckpointerConfig(str(folder / "saved")),
            watch=WatchConfig(watch_targets=[]), log_jaxprs=False,  # for they compile once more
        ),
        model=LlamaConfig(
            seq_len=LENGTH, hidden_dim=16, intermediate_dim=24, num_layers=1, num_heads=2,
            num_kv_heads=1, initializer_range=0.2, tie_word_embeddings=tied,
            reference_checkpoint=None, tokenizer=tokenizer(),  # type: ignore[arg-type]
        ),
        optimizer=AdamConfig(learning_rate=3e-3, lr_schedule="constant"),
        z_loss_weight=z_loss,
    )  # fmt: skip
    train_lm.main(config)
    texts = [path.read_text() for path in folder.rglob("train_step*.hlo.txt")]
    assert texts, "the Trainer writes the step that it compiles"
    calls = max(text.count("logitless_xla_run") for text in texts)
    return logged.of, jax.tree.leaves(Kept.model), calls


@pytest.mark.parametrize(
    ("tied", "bf16", "accumulated", "z_loss"),
    [(False, False, 1, 0.0), (True, False, 1, 1e-3), (False, False, 2, 0.0), (False, True, 1, 0.0)],
    ids=["f32", "tied with z-loss", "accumulated", "bf16"],
)
def test_train_lm_learns_the_same_without_logits(
    tied: bool, bf16: bool, accumulated: int, z_loss: float, tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(train_lm, "Trainer", Kept)
    expected, own, none = train(tmp_path / "own", tied, bf16, accumulated, z_loss)
    reductions = set()

    def loss(*args: Any, **options: Any) -> Any:
        reductions.add(options["reduction"])
        return maybe_fused_next_token_loss(*args, **options)

    monkeypatch.setattr(lm_model, "maybe_fused_next_token_loss", loss)
    actual, made, calls = train(tmp_path / "ours", tied, bf16, accumulated, z_loss)
    assert none == 0 and calls == 1, "loss and gradients are one call of every step"
    assert reductions == {hax.mean, None}, "both training and evaluation ask for a loss here"
    assert len(actual["train/loss"]) == STEPS and actual["eval/loss"]
    tolerance = 2e-2 if bf16 else 1e-5
    for name, losses in expected.items():
        a, e = (np.array([run[step] for step in losses]) for run in (actual[name], losses))
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance)
    learnt = list(actual["train/loss"].values())
    assert sum(learnt[-3:]) < sum(learnt[:3])
    for a, e in zip(made, own, strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=3e-2 if bf16 else 2e-5)

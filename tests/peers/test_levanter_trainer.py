# SPDX-License-Identifier: Apache-2.0
"""Levanter's own program, levanter.main.train_lm: a tiny Llama in its Trainer learns the same with
our loss as with Levanter's, in a JAX that is old enough for Levanter's loss."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import pathlib
from typing import Any, NamedTuple

os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}

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


class Case(NamedTuple):
    tied: bool = False
    bf16: bool = False
    accumulated: int = 1
    z_loss: float = 0.0
    devices: int = 1
    split: bool = False  # the devices split the vocabulary, not the data


CASES = {
    "f32": Case(),
    "tied, accumulated, with z-loss": Case(tied=True, accumulated=2, z_loss=1e-3),
    "bf16": Case(bf16=True),
    "data over two devices": Case(devices=2),
    "vocabulary over two devices": Case(devices=2, split=True),
}


def tokenizer() -> Any:
    """Words of one character, whose bytes the evaluation counts."""
    words = WordLevel({chr(ord("!") + i): i for i in range(VOCAB)}, unk_token="!")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))


def examples(count: int, first: int = 0) -> Any:
    """Sequences of which something can be learnt; a third of the tokens of some do not count."""
    made = []
    Pos = hax.Axis("position", LENGTH)
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

    rows: Any = None
    held_out: Any = None

    @property
    def the_tokenizer(self) -> Any:  # type: ignore[override]
        return tokenizer()

    def train_set(self, Pos: Any, batch_schedule: Any, *_: Any, **__: Any) -> Any:
        return self.rows

    def tagged_eval_sets(self, Pos: Any, monitors: Any = True) -> Any:
        return [(self.held_out, ["held out"])]

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
    """Levanter's Trainer, which keeps the trained model: train_lm.main drops it."""

    model: Any

    def train(self, state: Any, train_loader: Any) -> Any:
        info = super().train(state, train_loader)
        Kept.model = info.state.model
        return info


def train(folder: pathlib.Path, case: Case) -> Any:
    """The losses, the parameters in the end, and how often the program of a step calls us."""
    logged = Logged()
    config = train_lm.TrainLmConfig(
        data=InMemory(rows=examples(STEPS * BATCH), held_out=examples(2 * BATCH, 1000)),
        trainer=TrainerConfig(
            seed=7, id="run", tracker=Losses(logged), log_dir=folder, require_accelerator=False,
            mp=jmp.get_policy("p=f32,c=bf16" if case.bf16 else "f32"), train_batch_size=BATCH,
            per_device_parallelism=BATCH // case.accumulated // (1 if case.split else case.devices),
            tensor_parallel_axes=["vocab"] if case.split else None,
            model_axis_size=case.devices if case.split else 1, num_train_steps=STEPS,
            steps_per_eval=STEPS, load_checkpoint=False, ray=RayConfig(auto_start_cluster=False),
            distributed=DistributedConfig(initialize_jax_distributed=False),
            checkpointer=CheckpointerConfig(str(folder / "saved")),
            watch=WatchConfig(watch_targets=[]), log_jaxprs=False,  # these would compile again
        ),
        model=LlamaConfig(
            seq_len=LENGTH, hidden_dim=16, intermediate_dim=24, num_layers=1, num_heads=2,
            num_kv_heads=1, initializer_range=0.2, tie_word_embeddings=case.tied,
            reference_checkpoint=None, tokenizer=tokenizer(),  # type: ignore[arg-type]
        ),
        optimizer=AdamConfig(learning_rate=3e-3, lr_schedule="constant"),
        z_loss_weight=case.z_loss,
    )  # fmt: skip
    train_lm.main(config)
    texts = [path.read_text() for path in folder.rglob("train_step*.hlo.txt")]
    assert texts, "the Trainer writes the step that it compiles"
    head = Kept.model.get_lm_head()
    shape = dict(zip((axis.name for axis in head.axes), head.array.addressable_data(0).shape))
    vocab, embed = (62 // case.devices, 16) if case.split else (VOCAB, 16 // case.devices)
    assert shape == {"vocab": vocab, "embed": embed}, "a device has its part of the head"
    # On several devices the call is still inside a CustomSPMDPartitioning, which XLA splits later.
    name = "logitless_xla_run" if case.devices == 1 else "@CustomSPMDPartitioning"
    calls = max(text.count(name) for text in texts)
    return logged.of, [np.asarray(leaf) for leaf in jax.tree.leaves(Kept.model)], calls


def both(folder: pathlib.Path, case: Case) -> Any:
    """Two runs, without us and with us, and which reductions were asked of us."""
    assert jax.device_count() == case.devices
    train_lm.Trainer = Kept
    own = train(folder / "own", case)
    reductions = set()

    def loss(*args: Any, **options: Any) -> Any:
        reductions.add(getattr(options["reduction"], "__name__", None))
        return maybe_fused_next_token_loss(*args, **options)

    lm_model.maybe_fused_next_token_loss = loss
    return own, train(folder / "ours", case), reductions


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_train_lm_learns_the_same_without_logits(
    case: Case, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without XLA's optimizations the test takes half as long.
    flags = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count="
    monkeypatch.setenv("XLA_FLAGS", f"{flags}{case.devices}")
    spawn = multiprocessing.get_context("spawn")  # XLA reads its flags once per process
    with concurrent.futures.ProcessPoolExecutor(1, spawn) as process:
        own, ours, reductions = process.submit(both, tmp_path, case).result(timeout=300)
    (expected, theirs, none), (actual, made, calls) = own, ours
    assert none == 0 and calls == 1, "loss and gradients are one call of every step"
    assert reductions == {"mean", None}, "both training and evaluation ask for a loss here"
    assert len(expected["train/loss"]) == len(actual["train/loss"]) == STEPS
    assert expected["eval/loss"] and expected["eval/loss"].keys() == actual["eval/loss"].keys()
    tolerance = 2e-2 if case.bf16 else 1e-5
    for name, losses in expected.items():
        a, e = (np.array([run[step] for step in losses]) for run in (actual[name], losses))
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance)
    learnt = list(actual["train/loss"].values())
    assert sum(learnt[-3:]) < sum(learnt[:3])
    if case.bf16:
        # Where a gradient is less than its rounding error, Adam moves a parameter either way.
        apart = np.concatenate([(a - e).ravel() for a, e in zip(made, theirs, strict=True)])
        assert np.sqrt(np.mean(apart**2)) < 2e-3  # of steps that add up to 6e-2
        assert np.mean(abs(apart) > 6e-3) < 0.01
        return
    for a, e in zip(made, theirs, strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=2e-5)

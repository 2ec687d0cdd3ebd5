# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO-3 in transformers' Trainer and in TRL's, in two processes on gloo, patched and
not: the head's parameter is gathered only for the head's call, and is trained."""

from __future__ import annotations

import gc
import os
import pathlib
import sys
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "integrations"))

import ranks

os.environ.setdefault("DS_ACCELERATOR", ranks.DEVICE)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytest.importorskip("deepspeed")

import accelerate
import transformers

import support
from logitless.integrations import patch_transformers, patch_trl
from ranks import Rank

NAMES = ("accuracy", "entropy", "logprob", "rank")
STEPS = 6
EVALUATED = 10  # sequences, of which the sampler repeats two in the last batch
_calls: list[support.Calls] = []  # of this process


def zero(me: Rank) -> dict[str, Any]:
    """The arguments of a Trainer with ZeRO-3, in a process that may have had others."""
    torch.set_default_device(None)  # DataLoader shuffles on the CPU
    os.environ |= {
        "RANK": str(me.rank), "LOCAL_RANK": str(me.rank), "WORLD_SIZE": str(me.size),
        "LOCAL_WORLD_SIZE": str(me.size), "LOCAL_SIZE": str(me.size),
        "MASTER_ADDR": "localhost", "MASTER_PORT": "0",
    }  # fmt: skip
    import deepspeed

    # Compiling DeepSpeed's shared-memory collective would take a minute; gloo's is enough.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    gc.collect()  # frees the last Trainer's configuration, by which new models are sharded
    accelerate.state.AcceleratorState._reset_state(True)
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": "auto"},
        "steps_per_print": 1 << 30,
    }
    return {
        "deepspeed": config, "use_cpu": support.ON_CPU, "ddp_backend": ranks.BACKEND, "seed": 7,
        "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "learning_rate": 3e-3,
        "max_steps": STEPS, "optim": "adamw_torch",
    }  # fmt: skip


def parameters(model: Any) -> dict[str, Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: p.detach().float().clone() for name, p in model.named_parameters()}


def numbers(trainer: Any) -> list[dict[str, float]]:
    """What was logged, except times."""
    timed = ("runtime", "per_second", "step_time")
    return [
        {k: v for k, v in entry.items() if not any(word in k for word in timed)}
        for entry in trainer.state.log_history
    ]


def taken() -> int:
    if not _calls:
        _calls.append(support.Calls())
    return _calls[0].taken()


def sums_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The number of tokens that count, and the sum of each metric, by the formulas in f64."""
    target = labels[:, 1:]
    counts = target != -100
    z = logits.detach()[:, :-1].double()
    logp = z.log_softmax(-1)
    of_target = z.gather(-1, target.clamp(min=0)[..., None])
    made = {
        "tokens": counts, "accuracy": z.argmax(-1) == target,
        "entropy": -(logp.exp() * logp).sum(-1),
        "logprob": logp.gather(-1, target.clamp(min=0)[..., None])[..., 0],
        "rank": (z > of_target).sum(-1),
    }  # fmt: skip
    return torch.stack([(v.double() * counts).sum() for v in made.values()])


def means_of(sums: Tensor) -> dict[str, float]:
    count, *totals = sums.tolist()
    return {name: total / count for name, total in zip(NAMES, totals)}


def evaluated_metrics(given: Any) -> dict[str, float]:
    """A Trainer's compute_metrics, of the logits of every sequence of the dataset, once each."""
    assert len(given.predictions) == EVALUATED
    return means_of(sums_of(*map(torch.from_numpy, (given.predictions, given.label_ids))))


class Measuring(transformers.Trainer):  # type: ignore[misc]
    """Logs the metrics of its model's logits in training, in f64."""

    sums: Any = None

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any
    ) -> Any:
        loss, output = super().compute_loss(model, inputs, return_outputs=True, **options)
        if model.training:
            sums = sums_of(output.logits, inputs["labels"])
            self.sums = sums if self.sums is None else self.sums + sums
        return (loss, output) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            dist.all_reduce(self.sums)
            logs |= means_of(self.sums)
            self.sums = None
        super().log(logs, *args, **kwargs)


def train(me: Rank, patched: bool, settings: dict[str, Any]) -> tuple[Any, int, dict[str, Tensor]]:
    """What a Trainer logged, our calls, and the parameters in the end."""
    tied, metrics = settings.get("tied", False), settings.get("metrics", ())
    accumulated = settings.get("accumulated", 1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, per_device_eval_batch_size=2,
            gradient_accumulation_steps=accumulated, bf16=settings.get("bf16", False),
            eval_strategy="steps", eval_steps=STEPS // 2, **zero(me),
        )  # fmt: skip
        model = support.llama(tie_word_embeddings=tied)
        if patched:
            patch_transformers(model, metrics=metrics)
        kind, more = transformers.Trainer, {}
        if metrics and not patched:
            kind, more = Measuring, {"compute_metrics": evaluated_metrics}
        trainer = kind(
            model=model, args=arguments,
            eval_dataset=[support.example(i) for i in range(EVALUATED)],
            train_dataset=[support.example(i) for i in range(4 * accumulated * STEPS)], **more,
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        taken()
        trainer.train()
        trainer.evaluate()
    return numbers(trainer), taken(), parameters(trainer.model)


def compare(ours: Any, theirs: Any, bf16: bool = False) -> None:
    """What two runs logged, and their parameters."""
    # Adam moves an element by as much where its gradient is almost zero, as one of 384 is on a GPU.
    rel, atol = (2e-2, 3e-2) if bf16 else (1e-4, 2e-5 if support.ON_CPU else 5e-4)
    assert len(ours[0]) == len(theirs[0])
    for actual, expected in zip(ours[0], theirs[0]):
        assert actual == pytest.approx(expected, rel=rel, abs=atol)
    support.same_parameters(ours[-1].items(), theirs[-1].items(), atol)
    losses = [entry["loss"] for entry in ours[0] if "loss" in entry]
    assert len(losses) == STEPS


def trainer_case(me: Rank, settings: dict[str, Any]) -> dict[str, Tensor]:
    theirs, ours = (train(me, patched, settings) for patched in (False, True))
    evaluated = 3 * 3  # two evaluations in the training and one after it, of three batches each
    assert (theirs[1], ours[1]) == (0, STEPS * settings.get("accumulated", 1) + evaluated)
    compare(ours, theirs, settings.get("bf16", False))
    before = dict(support.llama(tie_word_embeddings=settings.get("tied", False)).named_parameters())
    head = "model.embed_tokens.weight" if settings.get("tied") else "lm_head.weight"
    assert (ours[-1][head] - before[head]).abs().max() > 1e-3
    if settings.get("metrics"):
        assert set(NAMES) <= set(ours[0][0])
        logged = [entry for entry in ours[0] if "eval_loss" in entry]
        assert len(logged) == 3
        for entry in logged:
            assert {f"eval_{name}" for name in NAMES} <= set(entry)
            assert 0 < entry["eval_accuracy"] < 1
    return ours[-1]


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulated": 2},
        {"tied": True},
        {"bf16": True},
        {"metrics": NAMES},
    ],
    ids=str,
)
def test_transformers_trainer(pair: ranks.Group, settings: dict[str, Any]) -> None:
    pair.call(trainer_case, settings)


# Calls of a head in a step, for the policy and for the reference, or for both models together.
OF_TRL = {"sft": 1, "dpo": 2, "kto": 4, "grpo": 2, "rloo": 3, "distillation": 1}


def train_trl(
    me: Rank, kind: str, folder: str, settings: dict[str, Any]
) -> tuple[Any, dict[str, Tensor]]:
    import datasets
    import trl

    import test_trl

    more: dict[str, Any] = {}
    if kind in ("grpo", "rloo"):
        more = {"reward_funcs": test_trl.reward}
    name = "Distillation" if kind == "distillation" else kind.upper()
    options = dict(test_trl.SETTINGS.get(kind, {"max_completion_length": 6}))
    if kind == "sft":
        options |= {"eval_strategy": "steps", "eval_steps": STEPS // 2}
        more = {
            "eval_dataset": datasets.Dataset.from_list([test_trl.ROWS["sft"](i) for i in range(6)])
        }
    arguments = getattr(trl, f"{name}Config")(
        output_dir=f"{folder}/out", per_device_train_batch_size=4, gradient_checkpointing=False,
        per_device_eval_batch_size=3, bf16=settings.get("bf16", False), **options, **zero(me),
    )  # fmt: skip
    if kind == "distillation":
        teacher = support.llama(seed=3)
        teacher.generation_config.eos_token_id = 1
        more = {"teacher_model": teacher.eval()}
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    row = test_trl.ROWS.get(kind, test_trl.ROWS["grpo"])
    trainer = getattr(trl, f"{name}Trainer")(
        model=model, args=arguments, processing_class=test_trl.tokenizer(),
        train_dataset=datasets.Dataset.from_list([row(i) for i in range(24)]), **more,
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return numbers(trainer), parameters(trainer.model)


def trl_case(me: Rank, kind: str, settings: dict[str, Any], folder: str) -> dict[str, Tensor]:
    theirs = train_trl(me, kind, folder, settings)
    with patch_trl() as patch:
        ours = train_trl(me, kind, folder, settings)
        evaluated = 2 * 1 if kind == "sft" else 0
        assert patch.calls == OF_TRL[kind] * STEPS + evaluated
    compare(ours, theirs, settings.get("bf16", False))
    head = "model.embed_tokens.weight" if settings.get("tied") else "lm_head.weight"
    before = support.llama(tie_word_embeddings=settings.get("tied", False)).state_dict()
    assert (ours[-1][head] - before[head]).abs().max() > 1e-3
    return ours[-1]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, {}) for kind in OF_TRL),
        ("sft", {"tied": True}),
        ("distillation", {"tied": True}),
        ("sft", {"bf16": True}),
    ],
    ids=str,
)
def test_trl(
    pair: ranks.Group, kind: str, settings: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    support.llama(tie_word_embeddings=settings.get("tied", False)).save_pretrained(tmp_path)
    pair.call(trl_case, kind, settings, str(tmp_path))

# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer and loops with accelerate, through patch_transformers."""

from __future__ import annotations

import copy
import inspect
import pathlib
import warnings
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch._dynamo.utils import counters

import support
from logitless.integrations import patch_transformers
from support import STEPS, Calls, same_parameters, same_run

# Traces as inductor does, without generating code, which takes most of inductor's time.
BACKEND = "aot_eager"
EVAL_STEPS = 7


def train(model: Any, folder: pathlib.Path, model_init: Any = None, **settings: Any) -> list[float]:
    """The losses of 20 steps of the Trainer, and of an evaluation at their end. `model` may be None
    where `model_init` makes one."""
    accumulated = settings.get("gradient_accumulation_steps", 1)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=support.ON_CPU, seed=7, max_steps=STEPS, logging_steps=1,
        per_device_train_batch_size=4, per_device_eval_batch_size=4, learning_rate=3e-3,
        save_strategy="no", report_to="none", disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=arguments, model_init=model_init,
        train_dataset=[support.example(i) for i in range(4 * accumulated * STEPS)],
        eval_dataset=[support.example(i) for i in range(100, 110)],
    )  # fmt: skip
    trainer.train()
    evaluated = trainer.evaluate(metric_key_prefix="held_out")["held_out_loss"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, evaluated]


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}, {"bf16": True}],
    ids=["f32", "accumulation", "checkpointing", "bf16"],
)
def test_trainer_learns_the_same_without_logits(
    settings: dict[str, Any], tmp_path: pathlib.Path, calls: Calls
) -> None:
    bf16 = "bf16" in settings
    own, ours = support.llama(), support.llama()
    *expected, held_out = train(own, tmp_path, **settings)
    assert calls.taken() == 0
    patch_transformers(ours)
    *actual, our_held_out = train(ours, tmp_path, **settings)
    evaluations = 3  # 10 sequences in batches of 4
    assert calls.taken() == STEPS * settings.get("gradient_accumulation_steps", 1) + evaluations
    same_run(actual, expected, bf16)
    assert our_held_out == pytest.approx(held_out, rel=2e-2 if bf16 else 1e-5)
    same_parameters(ours.named_parameters(), own.named_parameters(), 2e-2 if bf16 else 2e-5)


def train_compiled(model: Any, folder: pathlib.Path, **settings: Any) -> tuple[list[float], int]:
    """What `train` gives under torch_compile=True with evaluations between the steps, which the
    Trainer does not compile, and how many graphs were made of it."""
    torch._dynamo.reset()  # dynamo's limit is eight compilations per function
    counters.clear()
    losses = train(
        model, folder, torch_compile=True, torch_compile_backend=BACKEND, eval_strategy="steps",
        eval_steps=EVAL_STEPS, **settings,
    )  # fmt: skip
    assert not counters["graph_break"]
    return losses, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "settings",
    [{"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True, "bf16": True}],
    ids=["accumulation", "checkpointing, bf16"],
)
def test_trainer_compiles_the_patched_model_as_often(
    settings: dict[str, Any], tmp_path: pathlib.Path, calls: Calls
) -> None:
    """The Trainer passes another num_items_in_batch at each step, which must not recompile."""
    # On a GPU accelerate enables TF32 for compiled f32 models.
    rounds = "bf16" in settings or not support.ON_CPU
    own, ours = support.llama(), support.llama()
    (*expected, held_out), own_graphs = train_compiled(own, tmp_path, **settings)
    assert calls.taken() == 0
    patch = patch_transformers(ours)
    (*actual, our_held_out), our_graphs = train_compiled(ours, tmp_path, **settings)
    evaluations = 3 * (STEPS // EVAL_STEPS + 2)  # the Trainer evaluates again after the last step
    assert patch.calls == evaluations, "the model that was trained is not compiled"
    trained = STEPS * settings.get("gradient_accumulation_steps", 1)
    assert calls.taken() == trained + evaluations
    assert our_graphs == own_graphs == 1
    same_run(actual, expected, rounds)
    assert our_held_out == pytest.approx(held_out, rel=2e-2 if rounds else 1e-5)
    same_parameters(ours.named_parameters(), own.named_parameters(), 2e-2 if rounds else 2e-5)


def test_label_smoothing_of_trainer_and_of_the_patch(tmp_path: pathlib.Path, calls: Calls) -> None:
    """The Trainer computes its smoothed loss from logits; the patch smooths instead."""
    own, ours = support.llama(), support.llama()
    expected = train(own, tmp_path, label_smoothing_factor=0.1)[:-1]
    patch_transformers(ours, label_smoothing=0.1)
    actual = train(ours, tmp_path)[:-1]
    assert calls.taken() == STEPS + 3
    same_run(actual, expected)
    lost = support.llama()
    patch_transformers(lost)
    with pytest.warns(UserWarning, match="without labels"):
        train(lost, tmp_path, label_smoothing_factor=0.1)
    assert calls.taken() == 0, "nobody has told us how to serve that; if so, say it in the docs"


def test_a_model_that_the_trainer_makes_is_patched_by_its_class(
    tmp_path: pathlib.Path, calls: Calls
) -> None:
    config = support.llama().config

    def made() -> Any:
        return transformers.AutoModelForCausalLM.from_config(config)

    expected = train(None, tmp_path, made)
    assert calls.taken() == 0
    patch = patch_transformers(transformers.LlamaForCausalLM)
    with patch:
        actual = train(None, tmp_path, made)
    assert calls.taken() == patch.calls == STEPS + 3
    same_run(actual[:-1], expected[:-1])
    assert actual[-1] == pytest.approx(expected[-1], rel=1e-5)


def loop(model: Any, precision: str) -> list[float]:
    """20 steps as accelerate's documentation writes them."""
    accelerator = accelerate.Accelerator(cpu=support.ON_CPU, mixed_precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = [support.example(i) for i in range(4 * STEPS)]
    batches = torch.utils.data.DataLoader(rows, batch_size=4)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loop_with_accelerate_learns_the_same(precision: str, calls: Calls) -> None:
    accelerate.state.AcceleratorState._reset_state(True)
    own, ours = support.llama(), support.llama()
    expected = loop(own, precision)
    assert calls.taken() == 0
    patch_transformers(ours)
    actual = loop(ours, precision)
    assert calls.taken() == STEPS
    same_run(actual, expected, precision == "bf16")


def prepared(patch_first: bool) -> tuple[Any, Any, Any]:
    """(accelerator, model, patch), of a model whose forward accelerate has wrapped in autocast."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=support.ON_CPU, mixed_precision="bf16")
    model = support.llama()
    patch = patch_transformers(model) if patch_first else None
    model = accelerator.prepare(model)
    return accelerator, model, patch or patch_transformers(model)


@pytest.mark.parametrize("patch_first", [True, False], ids=["patched first", "prepared first"])
def test_a_copy_of_a_prepared_model_uses_its_own_weights(patch_first: bool, calls: Calls) -> None:
    _, model, _ = prepared(patch_first)
    batch = support.batch(0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        before = other(**batch).loss
        for p in model.parameters():
            p.zero_()
        assert torch.equal(other(**batch).loss, before)
        assert calls.taken() == 2


@pytest.mark.parametrize("patch_first", [True, False], ids=["patched first", "prepared first"])
def test_unwrapping_leaves_the_patch(patch_first: bool, calls: Calls) -> None:
    accelerator, model, patch = prepared(patch_first)
    plain, batch = support.llama(), support.batch(0)
    names = list(inspect.signature(plain.forward).parameters)
    assert list(inspect.signature(model.forward).parameters) == names
    if patch_first:
        model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        assert list(inspect.signature(model.forward).parameters) == names
        output = model(**batch)
        assert output.logits is None and calls.taken() == 1
        # the unwrapped model is in f32 again
        torch.testing.assert_close(output.loss, plain(**batch).loss)
    patch.unpatch()
    assert model(**batch).logits is not None and calls.taken() == 0


def test_unpatching_leaves_autocast(calls: Calls) -> None:
    _, model, patch = prepared(patch_first=True)
    batch = support.batch(0)
    in_bf16 = model(**batch).loss
    patch.unpatch()
    with torch.autocast(support.DEVICE, torch.bfloat16):
        expected = support.llama()(**batch).loss
    assert torch.equal(model(**batch).loss, expected)
    assert calls.taken() == 1
    with patch_transformers(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(**batch).loss, in_bf16)
        assert calls.taken() == 1
    assert model(**batch).logits is not None

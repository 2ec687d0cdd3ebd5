# SPDX-License-Identifier: Apache-2.0
"""The trainers of ms-swift and axolotl: their own compute_loss, read from their files, gives the
same for a patched model as for an unpatched one. Neither is imported: ms-swift wants
modelscope, transformers below 5.20 and TRL below 1.0; axolotl Python 3.12 and transformers
5.20.1."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "integrations"))

import transformers

import support
from logitless.integrations import patch_transformers

Case = Callable[[Any, dict[str, Any], Any], Any]


def function(package: str, file: str, name: str, **names: Any) -> Any:
    """A function of a file that is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse(pathlib.Path(spec.submodule_search_locations[0], file).read_text())
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name]
    found[0].decorator_list = []
    found[0].returns = None
    for argument in found[0].args.args:
        argument.annotation = None
    for node in ast.walk(found[0]):  # `super()` needs its class
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "super"
        ):
            node.func.id = "parent"
    exec(compile(ast.Module([found[0]], []), file, "exec"), names)
    return names[name]


def swift(model: Any, inputs: dict[str, Any], items: Any) -> Any:
    sft = function("swift", "template/base.py", "compute_sft_loss")
    compute = function(
        "swift", "trainers/seq2seq_trainer.py", "compute_loss", Callable=Callable, torch=torch,
        is_peft_available=lambda: False,
    )  # fmt: skip
    template = types.SimpleNamespace(sequence_parallel_size=1, padding_free=False)
    template.compute_sft_loss = lambda *a, **k: sft(template, *a, **k)
    arguments = types.SimpleNamespace(
        enable_dft_loss=False, enable_channel_loss=False, tuner_backend="peft",
        average_tokens_across_devices=False, past_index=-1,
    )  # fmt: skip
    trainer = types.SimpleNamespace(
        label_smoother=None, args=arguments, template=template, model=model,
        _compute_acc=lambda *a, **k: None,
    )  # fmt: skip
    return compute(trainer, model, inputs, num_items_in_batch=items)


def axolotl(model: Any, inputs: dict[str, Any], items: Any) -> Any:
    arguments = types.SimpleNamespace(
        include_tkps=False, sample_packing=False, orpo_alpha=None, label_smoothing_factor=0
    )
    trainer: Any = types.SimpleNamespace(
        args=arguments, _model_type="llama", _maybe_inject_mm_token_type_ids=lambda inputs: None,
        _deepspeed_sequence_parallel_group=lambda: None, model_accepts_loss_kwargs=True,
        label_smoother=None, compute_loss_func=None, model=model,
    )  # fmt: skip
    of_transformers = types.SimpleNamespace(
        compute_loss=lambda *a, **k: transformers.Trainer.compute_loss(trainer, *a, **k)
    )
    compute = function(
        "axolotl", "core/trainers/base.py", "compute_loss", parent=lambda: of_transformers
    )
    trainer.accelerator = types.SimpleNamespace(unwrap_model=lambda model, **_: model)
    trainer.args.past_index, trainer.args.average_tokens_across_devices = -1, False
    return compute(trainer, model, inputs, num_items_in_batch=items)


@pytest.mark.parametrize("call", [swift, axolotl], ids=["ms-swift", "axolotl"])
def test_its_loss_is_made_here(call: Case) -> None:
    own, model = support.llama(), support.llama()
    patch = patch_transformers(model)
    for step in range(3):
        batch = support.batch(step)
        items = 2 * (batch["labels"][:, 1:] != -100).sum()
        expected, found = (call(m, dict(batch), items) for m in (own, model))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        ours, theirs = (torch.autograd.grad(loss, list(m.parameters()))
                        for loss, m in ((found, model), (expected, own)))  # fmt: skip
        for a, e in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-6)
    assert patch.calls == 3


def test_a_scaled_loss_of_swift_has_logits_and_a_warning() -> None:
    """With loss_scale, ms-swift removes the labels from the batch and uses the logits."""
    per_token = function("swift", "trainers/utils.py", "per_token_loss_func", torch=torch,
                         F=torch.nn.functional)  # fmt: skip
    model, batch = support.llama(), support.batch(0)
    patch = patch_transformers(model)
    labels = batch.pop("labels")
    with pytest.warns(UserWarning, match="has no effect"):
        output = model(**batch)
    assert per_token(output, labels).shape == (labels.numel(),) and patch.calls == 0

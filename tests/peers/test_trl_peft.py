# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers with PEFT learn the same patched as unpatched if the head is in modules_to_save.
An adapter on the head is refused by TRL itself."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

import test_transformers  # noqa: E402
import test_trl  # noqa: E402
import test_trl_distillation as distillation  # noqa: E402
from logitless.integrations import patch_trl  # noqa: E402

STEPS = 6
CALLS = {**test_trl.CALLS, "distillation": 1}
KINDS = {
    "saved head": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]},
    "attention": {"target_modules": ["q_proj", "v_proj"]},
}


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    for module in (test_trl, distillation):
        monkeypatch.setattr(module, "STEPS", STEPS)
    test_transformers.model_and_batch("llama")[0].save_pretrained(tmp_path)
    return tmp_path


def config_of(**options: Any) -> Any:
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, **options)


def train(kind: str, folder: pathlib.Path, config: Any) -> Any:
    """What a trainer has learnt with the adapters of `config`, and its logs."""
    if kind == "distillation":
        return distillation.train(folder, "cpu", peft_config=config, beta=0.5, temperature=0.8)
    return test_trl.train(kind, folder, "cpu", peft_config=config)


@pytest.mark.parametrize(
    "kind, name",
    [
        *((kind, "saved head") for kind in CALLS),
        ("sft", "attention"),
        ("distillation", "attention"),
    ],
)
def test_a_trainer_learns_the_same(kind: str, name: str, folder: pathlib.Path) -> None:
    own, expected = train(kind, folder, config_of(**KINDS[name]))
    with patch_trl() as patch:
        ours, logs = train(kind, folder, config_of(**KINDS[name]))
        assert patch.calls == CALLS[kind] * STEPS
    assert len(logs) == len(expected) == STEPS
    atol = 1e-7 if kind == "distillation" else 1e-5  # its losses are only 3e-3
    for a, e in zip(logs, expected):
        assert a["loss"] == pytest.approx(e["loss"], rel=1e-4, abs=atol)
    theirs, trained = dict(own.named_parameters()), set()
    for key, value in ours.named_parameters():
        torch.testing.assert_close(value, theirs[key], rtol=0, atol=2e-5)
        if value.requires_grad:
            trained.add("lm_head" in key)
            if "lora_B" in key:  # which starts as zeros
                assert value.abs().max() > 1e-3
            elif "lm_head" in key:
                start = theirs[key.replace("modules_to_save.default", "original_module")]
                assert (value - start).abs().max() > 1e-3
    assert trained == ({True, False} if name == "saved head" else {False})


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("kind", CALLS)
def test_an_adapter_on_the_head_is_an_error_of_trls(
    kind: str, patched: bool, folder: pathlib.Path
) -> None:
    options = config_of(target_modules=["q_proj", "lm_head"])
    patch = patch_trl()
    if not patched:
        patch.unpatch()
    try:
        with pytest.raises(ValueError, match="PEFT adapter to `lm_head` is not supported"):
            train(kind, folder, options)
        assert patch.calls == 0
    finally:
        patch.unpatch()

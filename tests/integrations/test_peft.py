# SPDX-License-Identifier: Apache-2.0
"""PEFT's adapters on the lm_head and on other layers, through patch_transformers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import peft
import pytest
import torch

import support
from logitless.integrations import Patch, patch_transformers
from support import STEPS, Calls, same_parameters, same_run

ATTENTION = ["q_proj", "v_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ATTENTION},
    "saved head": {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]},
    "head": {"target_modules": [*ATTENTION, "lm_head"]},
    "head alone": {"target_modules": ["lm_head"], "use_rslora": True},
    "dropout": {"target_modules": ["lm_head"], "lora_dropout": 0.2},
    "bias": {"target_modules": ["lm_head"], "bias": "all"},
}


def with_adapter(name: str, patch_first: Any, **model_options: Any) -> Any:
    """A PeftModel whose LoRA's B is not zero. `patch_first`: True patches the model before PEFT
    wraps it, False after that, "wrapper" patches the PeftModel; None: it is not patched."""
    model = support.llama(**model_options)
    if name == "bias":
        model.lm_head.bias = torch.nn.Parameter(torch.randn(support.VOCAB).to(support.DEVICE) * 0.1)
    if patch_first is True:
        patch_transformers(model)
    torch.manual_seed(1)
    options = {"r": 4, "lora_alpha": 6, **CONFIGS[name]}
    made = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for key, value in made.named_parameters():
            if "lora_B" in key:
                value.normal_(std=0.1)
    if patch_first is False:
        patch_transformers(made.get_base_model())
    if patch_first == "wrapper":
        patch_transformers(made)
    return made.train()


def train(model: Any) -> list[float]:
    torch.manual_seed(2)  # the seed fixes the dropout
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = model(**support.batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def loss_and_gradients(model: Any, autocast: bool = False) -> tuple[torch.Tensor, dict[str, Any]]:
    torch.manual_seed(3)
    model.zero_grad()
    with torch.autocast(support.DEVICE, torch.bfloat16, enabled=autocast):
        output = model(**support.batch(0))
    output.loss.backward()
    return output.loss, {k: p.grad for k, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    "patch_first", [True, False, "wrapper"], ids=["patched first", "adapter first", "wrapper"]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_learn_the_same_without_logits(name: str, patch_first: Any, calls: Calls) -> None:
    own, ours = with_adapter(name, None), with_adapter(name, patch_first)
    plain_loss, expected = loss_and_gradients(own)
    assert calls.taken() == 0
    loss, gradients = loss_and_gradients(ours)
    assert calls.taken() == 1
    torch.testing.assert_close(loss, plain_loss, rtol=2e-6, atol=1e-6)
    assert set(gradients) == set(expected)
    assert any("lm_head" in key for key in gradients) == (name != "attention")
    for key, gradient in gradients.items():
        assert gradient is not None and gradient.any(), key
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=2e-6)
    start = copy.deepcopy(dict(ours.named_parameters()))
    losses = train(own)
    assert calls.taken() == 0
    same_run(train(ours), losses)
    assert calls.taken() == STEPS
    same_parameters(ours.named_parameters(), own.named_parameters(), 2e-5)
    for key, value in ours.named_parameters():
        assert torch.equal(value, start[key]) == (not value.requires_grad), key


@pytest.mark.parametrize("patch_first", [True, False], ids=["patched first", "adapter first"])
@pytest.mark.parametrize("name", ["saved head", "head"])
def test_adapters_in_one_compiled_graph(name: str, patch_first: bool, calls: Calls) -> None:
    if name == "head" and patch_first and support.TORCH < (2, 13):
        pytest.skip("torch before 2.13 cannot trace the patch of a LoRA that came after it")
    own, ours = with_adapter(name, None), with_adapter(name, patch_first)
    loss, expected = loss_and_gradients(own)
    ours.compile(fullgraph=True, backend="eager")
    actual, gradients = loss_and_gradients(ours)
    assert calls.taken() == 1
    torch.testing.assert_close(actual, loss, rtol=2e-6, atol=1e-6)
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", ["saved head", "head"])
def test_adapters_under_autocast(name: str, calls: Calls) -> None:
    own, ours = with_adapter(name, None), with_adapter(name, True)
    loss, expected = loss_and_gradients(own, autocast=True)
    actual, gradients = loss_and_gradients(ours, autocast=True)
    assert calls.taken() == 1
    torch.testing.assert_close(actual, loss, rtol=5e-3, atol=5e-3)
    for key, gradient in gradients.items():
        assert (gradient - expected[key]).norm() <= 0.05 * expected[key].norm(), key


def test_an_adapter_in_f32_on_a_model_in_bf16(calls: Calls) -> None:
    """PEFT keeps an adapter in f32 by default."""
    own, ours = with_adapter("head", None), with_adapter("head", True)
    for model in (own, ours):
        for key, value in model.named_parameters():
            if "lora" not in key:
                value.data = value.data.bfloat16()
    loss, expected = loss_and_gradients(own)
    actual, gradients = loss_and_gradients(ours)
    assert calls.taken() == 1
    torch.testing.assert_close(actual, loss.float(), rtol=2e-2, atol=2e-2)
    for key, gradient in gradients.items():
        assert gradient.dtype is torch.float32
        assert (gradient - expected[key]).norm() <= 0.1 * expected[key].norm(), key


@pytest.mark.parametrize("patch_first", [True, False], ids=["patched first", "adapter first"])
@pytest.mark.parametrize("name", ["saved head", "head"])
def test_adapters_switched_merged_and_taken_off(name: str, patch_first: bool, calls: Calls) -> None:
    """Whatever PEFT does with its adapters, the loss is that of the logits."""
    own, ours = with_adapter(name, None), with_adapter(name, patch_first)
    batch = support.batch(1)
    seen = []

    def same() -> None:
        with torch.no_grad():
            expected = own(**batch).loss
            assert calls.taken() == 0
            output = ours(**batch)
        assert calls.taken() == 1 and output.logits is None
        torch.testing.assert_close(output.loss, expected, rtol=5e-6, atol=2e-6)
        seen.append(expected.item())

    same()
    with own.disable_adapter(), ours.disable_adapter():
        same()
    for model in (own, ours):
        torch.manual_seed(4)
        model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", r=2, **CONFIGS[name]))
        model.set_adapter("other")
        with torch.no_grad():
            for key, value in model.named_parameters():
                if "other" in key:
                    value.add_(torch.randn_like(value) * 0.1)
    same()
    for model in (own, ours):
        model.set_adapter("default")
    same()
    if name == "head":
        for model in (own, ours):
            model.base_model.set_adapter(["default", "other"])
        same()
        for model in (own, ours):
            model.merge_adapter()
        same()
        for model in (own, ours):
            model.unmerge_adapter()
        same()
    own, ours = own.merge_and_unload(), ours.merge_and_unload()
    same()
    assert len(set(seen)) >= 3, "the adapters make a difference"
    Patch(ours).unpatch()
    with torch.no_grad():
        assert ours(**batch).logits is not None and calls.taken() == 0
    assert not any("_logitless" in key for module in ours.modules() for key in vars(module))


def test_a_tied_head_in_modules_to_save(calls: Calls) -> None:
    """PEFT unties the head: its copy is trained, the embedding is not."""
    own = with_adapter("saved head", None, tie_word_embeddings=True)
    ours = with_adapter("saved head", True, tie_word_embeddings=True)
    losses = train(own)
    same_run(train(ours), losses)
    assert calls.taken() == STEPS
    same_parameters(ours.named_parameters(), own.named_parameters(), 2e-5)


def test_prompt_tuning(calls: Calls) -> None:
    """PEFT puts its tokens before the sequence, and labels to ignore with them."""
    runs = []
    for patched in (False, True):
        model = support.llama()
        if patched:
            patch_transformers(model)
        torch.manual_seed(1)
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        runs.append(train(peft.get_peft_model(model, config)))
        assert calls.taken() == STEPS * patched
    same_run(runs[1], runs[0])


def test_another_adapter_for_every_sequence_is_refused(calls: Calls) -> None:
    model = with_adapter("head", True)
    names = ["default", "__base__", "default", "__base__"]
    model.eval()
    with torch.no_grad(), pytest.raises(NotImplementedError, match="adapter_names"):
        model(**support.batch(0), adapter_names=names)
    assert calls.taken() == 0


def test_a_patched_peft_model_counts_and_is_restored(calls: Calls) -> None:
    model = with_adapter("saved head", None)
    patch = patch_transformers(model)
    with patch as patched:
        assert patched is model
        loss_and_gradients(model)
        assert patch.calls == Patch(model).calls == calls.taken() == 1
    assert model(**support.batch(0)).logits is not None and calls.taken() == 0
    assert not any("_logitless" in key for module in model.modules() for key in vars(module))


def test_the_backbone_within_adapters_is_not_taken_for_one_by_itself() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*logitless")
        for patch_first in (True, False, "wrapper"):
            loss_and_gradients(with_adapter("attention", patch_first))

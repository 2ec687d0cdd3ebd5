# SPDX-License-Identifier: Apache-2.0
"""PEFT's kinds of adapters for a layer, on the lm_head of a patched model: trained as without the
patch if the adapter is a matrix, otherwise refused."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

import support
from logitless.integrations import Patch, patch_transformers
from support import Calls

HEAD = ["lm_head"]
ATTENTION = ["q_proj", "v_proj"]
VOCAB = 64  # some kinds want a number with divisors

# By name: PEFT's type, and the options of its configuration.
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LORA", {"r": 4}),
    "LoRA with a bias": ("LORA", {"r": 4, "lora_bias": True}),
    "DoRA": ("LORA", {"r": 4, "use_dora": True}),
    "QA-LoRA": ("LORA", {"r": 4, "use_qalora": True, "qalora_group_size": 8}),
    "BD-LoRA": (
        "LORA", {"r": 4, "use_bdlora": peft.BdLoraConfig(target_modules_bd_a=HEAD, nblocks=2)}
    ),
    "KaSA": ("LORA", {"r": 4, "kasa_config": peft.KasaConfig()}),
    "MiCA": ("LORA", {"r": 4, "init_lora_weights": "mica"}),
    "VeLoRA, random": (
        "LORA",
        {"r": 4, "velora_config": peft.VeloraConfig(init_type="random", num_groups=4)},
    ),
    "LoRA on the parameter": (
        "LORA", {"r": 4, "target_modules": [], "target_parameters": ["lm_head.weight"]}
    ),
    "tokens beside LoRA": (
        "LORA", {"target_modules": ATTENTION, "trainable_token_indices": {"lm_head": [1, 2]}}
    ),
    "tied tokens": ("LORA", {"target_modules": ATTENTION, "trainable_token_indices": [1, 2, 7]}),
    "tokens": ("TRAINABLE_TOKENS", {"token_indices": [1, 2, 5]}),
    "AdaLoRA": ("ADALORA", {"total_step": 50, "init_r": 4, "target_r": 2}),
    "AdaMSS": ("ADAMSS", {"r": 8, "num_subspaces": 2}),
    "BEFT": ("BEFT", {}),
    "BOFT": ("BOFT", {"boft_block_size": 4}),
    "BOFT, dropout of blocks": ("BOFT", {"boft_block_size": 4, "boft_dropout": 0.5}),
    "C3A": ("C3A", {"block_size": 1}),
    "DeFT": ("DEFT", {"r": 4}),
    "DeFT, QR": ("DEFT", {"r": 4, "decomposition_method": "qr"}),
    "DeLoRA": ("DELORA", {"r": 4}),
    "FourierFT": ("FOURIERFT", {"n_frequency": 50}),
    "FRoD": ("FROD", {"progressbar": False}),
    "GLoRA": ("GLORA", {"r": 4}),
    "GraLoRA": ("GRALORA", {"r": 4, "gralora_k": 1}),
    "HiRA": ("HIRA", {"r": 4}),
    "HRA": ("HRA", {"r": 4}),
    "HRA, orthogonal": ("HRA", {"r": 4, "apply_GS": True}),
    "IA3": ("IA3", {"feedforward_modules": []}),
    "IA3 before the head": ("IA3", {"feedforward_modules": HEAD}),
    "LN tuning": ("LN_TUNING", {}),
    "LoHa": ("LOHA", {"r": 4}),
    "LoHa, dropout of rows": ("LOHA", {"r": 4, "rank_dropout": 0.3}),
    "LoHa, dropout of all": (
        "LOHA", {"r": 4, "module_dropout": 0.5, "target_modules": [*ATTENTION, *HEAD]}
    ),
    "LoKr": ("LOKR", {"r": 4}),
    "LoKr, both": ("LOKR", {"r": 2, "decompose_both": True}),
    "LoKr, dropout of rows": ("LOKR", {"r": 4, "rank_dropout": 0.3, "rank_dropout_scale": True}),
    "MiSS": ("MISS", {"r": 4}),
    "MiSS, Bat": ("MISS", {"r": 4, "init_weights": "bat"}),
    "OFT": ("OFT", {"oft_block_size": 4}),
    "OFT, dropout of blocks": ("OFT", {"oft_block_size": 4, "module_dropout": 0.5}),
    "OFT, constrained": ("OFT", {"oft_block_size": 4, "coft": True}),
    "OSF": ("OSF", {}),
    "PEANuT": ("PEANUT", {"r": 4}),
    "PEANuT, deep": ("PEANUT", {"r": 4, "depth": 2}),
    "PSOFT": ("PSOFT", {"r": 4}),
    "RandLoRA": ("RANDLORA", {"r": 4}),
    "RoAd": ("ROAD", {"group_size": 2}),
    "RoAd 4": ("ROAD", {"group_size": 2, "variant": "road_4"}),
    "SHiRA": ("SHIRA", {"r": 4}),
    "Supertuning": ("SUPERTUNING", {}),
    "TinyLoRA": ("TINYLORA", {}),
    "Uni-LoRA": ("UNILORA", {}),
    "VB-LoRA": ("VBLORA", {"vector_length": 1, "num_vectors": 8}),
    "VeRA": ("VERA", {"r": 8}),
    "WaveFT": ("WAVEFT", {"n_frequency": 50}),
}  # fmt: skip
OF_TOKENS = "draws random numbers.*dropout.*eval mode"
NO_MATRIX = (
    "whose (logits are no matrix|gradients are not those of a matrix) times the hidden states"
)
KEEPS = "keeps something of a call"
# By name: PEFT's type, its options, what the error says, whether patching it already raises.
REFUSED: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "DoRA, dropout": ("LORA", {"use_dora": True, "lora_dropout": 0.1}, OF_TOKENS, False),
    "AdaLoRA, dropout": ("ADALORA", {"total_step": 50, "lora_dropout": 0.1}, OF_TOKENS, False),
    "DeLoRA, dropout": ("DELORA", {"r": 4, "module_dropout": 0.5}, OF_TOKENS, False),
    "VeRA, dropout": ("VERA", {"r": 8, "vera_dropout": 0.1}, OF_TOKENS, False),
    "PVeRA": ("PVERA", {"r": 8}, OF_TOKENS, False),
    "activated LoRA": ("LORA", {"alora_invocation_tokens": [3, 4]}, "ALoraLinearVariant", True),
    "VeLoRA": ("LORA", {"velora_config": peft.VeloraConfig()}, KEEPS, False),
    "VeLoRA, once": (
        "LORA", {"velora_config": peft.VeloraConfig(init_type="batch_average_once")}, KEEPS, False
    ),
    "MonteCLoRA": ("LORA", {"r": 4, "monteclora_config": peft.MontecloraConfig()}, KEEPS, True),
    "LiLy": ("LILY", {"r": 4}, NO_MATRIX, True),
    "Poly": ("POLY", {"r": 4, "n_tasks": 2}, "hidden states alone|more than its input", True),
}  # fmt: skip
# Types that do not go on the head; each has a test below.
ELSEWHERE = {
    "PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE",
    "ADAPTION_PROMPT", "SHADOW", "XLORA",
}  # fmt: skip


@pytest.fixture(autouse=True)
def vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "VOCAB", VOCAB)


def config_of(kind: str, options: dict[str, Any]) -> Any:
    config = PEFT_TYPE_TO_CONFIG_MAPPING[getattr(peft.PeftType, kind)]
    return config(task_type="CAUSAL_LM", **{"target_modules": list(HEAD), **options})


def built(
    kind: str, options: dict[str, Any], patch_first: bool | None, spread: float = 0.05,
    tied: bool = False, dtype: torch.dtype = torch.float32,
) -> Any:  # fmt: skip
    """A PeftModel whose adapter does something, patched before or after it was made, or not."""
    model = support.llama(tie_word_embeddings=tied).to(dtype)
    if patch_first:
        patch_transformers(model)
    torch.manual_seed(1)
    made = peft.get_peft_model(model, config_of(kind, options))
    if patch_first is False:
        patch_transformers(made)
    spread_out(made, spread)
    return made.train()


def spread_out(model: Any, spread: float) -> None:
    torch.manual_seed(5)
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(torch.randn_like(value) * spread)


def trained(model: Any, steps: int = 3, **more: Any) -> tuple[list[float], dict[str, Any]]:
    """The losses, and the gradients of the last step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(9 + step)
        loss = model(**support.batch(step), **more).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {k: p.grad for k, p in model.named_parameters() if p.requires_grad}


def test_every_type_of_pefts_is_in_a_table() -> None:
    tables = [*SERVED.values(), *REFUSED.values()]
    assert {kind for kind, *_ in tables} | ELSEWHERE == {
        kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING
    }


@pytest.mark.parametrize("patch_first", [True, False], ids=["patched first", "adapter first"])
@pytest.mark.parametrize("name", SERVED)
def test_what_is_a_matrix_is_trained_the_same(name: str, patch_first: bool, calls: Calls) -> None:
    tied = name == "tied tokens"
    own, ours = (built(*SERVED[name], first, tied=tied) for first in (None, patch_first))
    expected, gradients = trained(own)
    assert calls.taken() == 0
    losses, actual = trained(ours)
    assert calls.taken() == 3
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=2e-6)
    assert any("lm_head" in key for key, grad in gradients.items() if grad is not None) or tied
    assert set(actual) == set(gradients)
    for key, gradient in gradients.items():
        assert (gradient is None) == (actual[key] is None), key
        if gradient is not None:
            bound = 1e-5 * gradient.norm() + 1e-7
            assert (actual[key] - gradient).norm() <= bound, key
    with torch.no_grad(), ours.disable_adapter():
        plain = ours(**support.batch(2)).loss
    assert abs(plain.item() - losses[2]) > 2e-6, "the adapter makes a difference"


@pytest.mark.parametrize("patch_first", [True, False], ids=["patched first", "adapter first"])
@pytest.mark.parametrize("spread", [0.0, 0.05], ids=["as it begins", "trained"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_matrix_is_refused(
    name: str, spread: float, patch_first: bool, calls: Calls
) -> None:
    kind, options, message, by_patch = REFUSED[name]
    said = f"(?s){message}.*"
    tasks = torch.tensor([0, 1, 0, 1], device=support.DEVICE)
    more = {"task_ids": tasks} if kind == "POLY" else {}
    if by_patch and not patch_first:
        with pytest.raises(NotImplementedError, match=said):
            built(kind, options, False, spread)
        return
    model = built(kind, options, patch_first, spread)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=said):
            model(**support.batch(0), **more)
    assert calls.taken() == 0
    Patch(model.get_base_model()).unpatch()
    assert model(**support.batch(0), **more).logits is not None


@pytest.mark.parametrize(
    "name", [name for name, (*_, said, _) in REFUSED.items() if said == OF_TOKENS]
)
def test_a_dropout_of_tokens_is_none_in_evaluation(name: str, calls: Calls) -> None:
    kind, options, *_ = REFUSED[name]
    own, ours = (built(kind, options, first).eval() for first in (None, True))
    with torch.no_grad():
        expected = own(**support.batch(0)).loss
        torch.testing.assert_close(ours(**support.batch(0)).loss, expected, rtol=2e-6, atol=2e-6)
    assert calls.taken() == 1


def can(model: Any, what: str) -> bool:
    torch.manual_seed(6)  # some draw their dropout when they merge
    try:
        getattr(model, what)()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("name", SERVED)
def test_switched_merged_and_taken_off(name: str, calls: Calls) -> None:
    tied = name == "tied tokens"
    own, ours = (built(*SERVED[name], first, tied=tied).eval() for first in (None, True))
    batch, seen = support.batch(1), []

    def same() -> None:
        with torch.no_grad():
            expected = own(**batch).loss
            assert calls.taken() == 0
            output = ours(**batch)
        assert calls.taken() == 1 and output.logits is None
        torch.testing.assert_close(output.loss, expected, rtol=2e-5, atol=5e-6)
        seen.append(expected.item())

    same()
    with own.disable_adapter(), ours.disable_adapter():
        same()
    same()
    second = config_of(*SERVED[name])
    try:
        for model in (own, ours):
            torch.manual_seed(4)
            model.add_adapter("other", second)
            model.set_adapter("other")
            spread_out(model, 0.1)
            model.eval()
    except (KeyError, ValueError):  # PEFT allows one such adapter
        own, ours = (built(*SERVED[name], first, tied=tied).eval() for first in (None, True))
    else:
        same()
        for model in (own, ours):
            model.set_adapter("default")
        same()
    if can(own, "merge_adapter"):
        assert can(ours, "merge_adapter")
        same()
        if can(own, "unmerge_adapter"):
            assert can(ours, "unmerge_adapter")
            same()
            torch.manual_seed(6)
            own = own.merge_and_unload()
            torch.manual_seed(6)
            ours = ours.merge_and_unload()
            same()
    assert len(set(seen)) >= 2, "the adapter makes a difference"
    Patch(ours).unpatch()
    with torch.no_grad():
        assert ours(**batch).logits is not None and calls.taken() == 0


SOME = ["DoRA", "AdaLoRA", "LoHa", "LoKr", "OFT", "BOFT", "IA3", "HRA", "VeRA", "tokens", "RoAd"]


@pytest.mark.parametrize("name", SOME)
def test_two_adapters_at_once(name: str, calls: Calls) -> None:
    models = []
    for patch_first in (None, True):
        model = built(*SERVED[name], patch_first)
        options = {**SERVED[name][1]}
        if name == "tokens":
            options["token_indices"] = [3, 9]
        torch.manual_seed(4)
        try:
            model.add_adapter("other", config_of(SERVED[name][0], options))
            model.base_model.set_adapter(["default", "other"])
        except ValueError as error:
            pytest.skip(f"PEFT: {error}")
        spread_out(model, 0.05)
        models.append(trained(model))
    torch.testing.assert_close(models[1][0], models[0][0], rtol=2e-6, atol=2e-6)
    for key, gradient in models[0][1].items():
        torch.testing.assert_close(models[1][1][key], gradient, rtol=1e-4, atol=1e-6)
    assert calls.taken() == 3


@pytest.mark.parametrize("name", [name for name in SOME if name != "AdaLoRA"])  # PEFT's own fails
def test_weights_that_are_loaded_after_the_patch(
    name: str, calls: Calls, tmp_path: pathlib.Path
) -> None:
    own = built(*SERVED[name], None).eval()
    own.save_pretrained(tmp_path)
    model = support.llama()
    patch_transformers(model)
    ours = peft.PeftModel.from_pretrained(model, tmp_path).eval()
    other = built(*SERVED[name], True, spread=0.3).eval()
    other.load_adapter(tmp_path, "default")
    with torch.no_grad():
        expected = own(**support.batch(0)).loss
        for loaded in (ours, other):
            actual = loaded(**support.batch(0)).loss
            torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)
    assert calls.taken() == 2


# Kinds whose layer runs in 16 bits on a CPU, unpatched.
@pytest.mark.parametrize("name", [*SOME, "LoRA with a bias", "VB-LoRA", "MiSS", "tied tokens"])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "16 bits"])
def test_in_16_bits(name: str, autocast: bool, calls: Calls) -> None:
    """Beside a 16-bit model PEFT keeps its adapter in f32."""
    dtype = torch.float32 if autocast else torch.bfloat16
    found = []
    for patch_first in (None, True):
        model = built(*SERVED[name], patch_first, dtype=dtype, tied=name == "tied tokens")
        with torch.autocast(support.DEVICE, torch.bfloat16, enabled=autocast):
            loss = model(**support.batch(0)).loss
        loss.backward()
        found.append((loss, {k: p.grad for k, p in model.named_parameters() if p.requires_grad}))
    (expected, gradients), (loss, actual) = found
    assert calls.taken() == 1
    torch.testing.assert_close(loss.float(), expected.float(), rtol=1e-2, atol=1e-2)
    for key, gradient in gradients.items():
        assert actual[key].dtype is gradient.dtype
        assert (actual[key] - gradient).norm() <= 0.1 * gradient.norm(), key


# How far parameters are moved for an adapter that is less than the weight's rounding in bf16.
SMALL = {"LoHa": 0.005, "VeRA": 0.003, "DoRA": 0.0005}


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "16 bits"])
@pytest.mark.parametrize("name", SMALL)
def test_what_16_bits_of_the_weight_would_lose_is_not_lost(
    name: str, autocast: bool, dtype: torch.dtype
) -> None:
    """An adapter that changes no weight by as much as its rounding changes the loss as in f32."""

    def changed(model: Any, on: bool) -> float:
        hidden = torch.randn(1, 12, support.HIDDEN, generator=torch.Generator().manual_seed(0))
        made = transformers.modeling_outputs.BaseModelOutputWithPast(
            last_hidden_state=hidden.to(dtype).to(model.dtype).to(support.DEVICE)
        )
        model.get_base_model().model.forward = lambda *_, **__: made
        batch = {name: value[:1] for name, value in support.batch(0).items()}
        with torch.no_grad(), torch.autocast(support.DEVICE, dtype, enabled=on):
            with_it = model(**batch).loss.item()
            with model.disable_adapter():
                return with_it - float(model(**batch).loss.item())

    kind, options = SERVED[name]
    exact, rounded = (
        built(kind, options, True, spread, dtype=used).eval()
        for spread, used in ((SMALL[name], torch.float32), (0.0, dtype))
    )
    weight = exact.get_base_model().lm_head.base_layer.weight
    with torch.no_grad():
        weight.copy_(weight.to(dtype))
    if autocast:
        rounded = copy.deepcopy(exact)
    for key, value in rounded.named_parameters():
        if value.requires_grad:
            assert value.dtype is torch.float32
            value.data.copy_(exact.get_parameter(key))
    units = torch.eye(support.HIDDEN, device=weight.device)
    with torch.no_grad():
        moved = (exact.get_base_model().lm_head(units) - units @ weight.T).abs().mean()
    assert 0 < moved < 0.5 * (torch.finfo(dtype).eps / 2 * weight.detach().abs()).mean()
    expected = changed(exact, False)
    assert abs(expected) > 1e-5
    rounding = 3 * 2.0**-21  # of two losses of about 4
    assert changed(rounded, autocast) == pytest.approx(expected, rel=0.05, abs=rounding)


def test_it_is_not_served_in_compiled_code(calls: Calls) -> None:
    if support.TORCH < (2, 13):
        pytest.skip("torch before 2.13 cannot trace the patch of an adapter that came after it")
    model = built(*SERVED["LoHa"], True)
    model.compile(fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"peft\.tuners\.loha\.layer\.Linear in compiled code"):
        model(**support.batch(0))
    assert calls.taken() == 0


def test_switching_to_an_adapter_that_is_no_matrix(calls: Calls) -> None:
    """What a call of one adapter has shown says nothing of another."""
    model = built(*SERVED["DoRA"], True, spread=0.0)
    trained(model, 1)
    dropout = config_of("LORA", {"r": 4, "use_dora": True, "lora_dropout": 0.2})
    model.add_adapter("dropout", dropout)
    model.set_adapter("dropout")
    model.train()
    with pytest.raises(NotImplementedError, match=OF_TOKENS):
        model(**support.batch(0))
    model.set_adapter("default")
    model(**support.batch(0))
    assert calls.taken() == 2


def saved(tmp_path: pathlib.Path, targets: list[str]) -> list[str]:
    """Paths of two LoRAs."""
    paths = [str(tmp_path / str(i)) for i in range(2)]
    for i, path in enumerate(paths):
        torch.manual_seed(i)
        config = config_of("LORA", {"r": 4, "target_modules": targets})
        made = peft.get_peft_model(support.llama(), config)
        spread_out(made, 0.1)
        made.save_pretrained(path, save_embedding_layers=False)
    return paths


@pytest.mark.parametrize("patch_first", [True, False], ids=["patched first", "adapter first"])
def test_arrow_chooses_by_the_token_and_is_refused(
    patch_first: bool, tmp_path: pathlib.Path
) -> None:
    model = support.llama()
    if patch_first:
        patch_transformers(model)
    arrow = peft.tuners.lora.arrow.create_arrow_model(
        model, saved(tmp_path, HEAD), peft.ArrowConfig(top_k=1)
    )
    with pytest.raises(
        NotImplementedError, match=r"ArrowLinearVariant.*another head for every token"
    ):
        if not patch_first:
            patch_transformers(arrow)
        arrow(**support.batch(0))


@pytest.mark.parametrize("patch_first", [True, False], ids=["patched first", "adapter first"])
def test_xlora_beside_the_head(patch_first: bool, calls: Calls, tmp_path: pathlib.Path) -> None:
    """X-LoRA over adapters of the attention: PEFT 0.21 cannot load adapters of the head into it."""
    paths = saved(tmp_path, ATTENTION)
    config = peft.XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=support.HIDDEN, xlora_depth=1,
        adapters={str(i): path for i, path in enumerate(paths)},
    )  # fmt: skip
    runs = []
    for first in (None, patch_first):
        model = support.llama()
        model.config.use_cache = False
        if first:
            patch_transformers(model)
        torch.manual_seed(1)
        made = peft.get_peft_model(model, config)
        if first is False:
            patch_transformers(made)
        runs.append(trained(made.train()))
    torch.testing.assert_close(runs[1][0], runs[0][0], rtol=2e-6, atol=2e-6)
    for key, gradient in runs[0][1].items():
        torch.testing.assert_close(runs[1][1][key], gradient, rtol=1e-4, atol=1e-6)
    assert calls.taken() >= 3


OFF_THE_HEAD: dict[str, Any] = {
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "multitask": lambda: peft.MultitaskPromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, num_tasks=2
    ),
    "p": lambda: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8
    ),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "cartridge": lambda: peft.CartridgeConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "adaption": lambda: peft.AdaptionPromptConfig(
        task_type="CAUSAL_LM", adapter_len=2, adapter_layers=1
    ),
    "shadow": lambda: peft.ShadowConfig(task_type="CAUSAL_LM", r=2, shadow_dropout=0.0),
}


@pytest.mark.parametrize("patch_first", [True, False], ids=["patched first", "adapter first"])
@pytest.mark.parametrize("name", OFF_THE_HEAD)
def test_kinds_that_leave_the_head_alone(name: str, patch_first: bool, calls: Calls) -> None:
    runs = []
    more = {}
    if name == "multitask":
        more["task_ids"] = torch.tensor([0, 1, 0, 1], device=support.DEVICE)
    for first in (None, patch_first):
        model = support.llama()
        if first:
            patch_transformers(model)
        torch.manual_seed(1)
        made = peft.get_peft_model(model, OFF_THE_HEAD[name]())
        if first is False and name == "adaption":
            with pytest.raises(NotImplementedError, match="has taken its forward before the patch"):
                patch_transformers(made)
            return
        if first is False:
            patch_transformers(made)
        runs.append(trained(made.train(), **more))
    torch.testing.assert_close(runs[1][0], runs[0][0], rtol=2e-6, atol=2e-6)
    for key, gradient in runs[0][1].items():
        torch.testing.assert_close(runs[1][1][key], gradient, rtol=1e-4, atol=1e-6)
    assert calls.taken() >= 3


def test_cpt_makes_its_own_loss_of_the_logits() -> None:
    config = peft.CPTConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, cpt_token_ids=[1, 2, 3], cpt_mask=[1, 1, 1],
        cpt_tokens_type_mask=[1, 1, 1],
    )  # fmt: skip
    model = support.llama()
    patch_transformers(model)
    made = peft.get_peft_model(model, config)
    with pytest.raises(NotImplementedError, match=r"CPT makes its own loss.*skip_logits=False"):
        made(**support.batch(0))
    assert made(**support.batch(0), skip_logits=False).logits is not None


def test_copies_of_a_patched_model_have_its_adapter(calls: Calls) -> None:
    model = built(*SERVED["LoHa"], True)
    expected = trained(copy.deepcopy(model))
    torch.testing.assert_close(trained(model)[0], expected[0], rtol=0, atol=0)
    assert calls.taken() == 6

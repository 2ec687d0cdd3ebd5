# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models under patch_transformers."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import io
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from logitless.integrations import (
    Patch,
    patch_transformers,
)

transformers = pytest.importorskip("transformers")
import causal_lms  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, final_logit_softcapping=2.0)
    ),
    "cohere": lambda: transformers.CohereForCausalLM(
        transformers.CohereConfig(**SIZES, logit_scale=0.3)
    ),
    "granite": lambda: transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**SIZES, logits_scaling=3.0)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **SIZES, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=1.0
        )
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=61, n_positions=32, n_embd=16, n_layer=2, n_head=2,
                                resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    ),
}  # fmt: skip


def model_and_batch(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    model = MODELS[name]().train()
    ids = torch.randint(1, 61, (2, 9))
    labels = ids.clone()
    labels[0, :3] = -100
    return model, {"input_ids": ids, "labels": labels}


def gradients(model: Any, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """The results of the calls, which run at the same time in a thread each."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [made.result(timeout=60) for made in [pool.submit(call) for call in calls]]


def meeting(module: Any) -> Any:
    """A hook: two threads wait for each other at the end of the module's forward."""
    barrier = threading.Barrier(2, timeout=30)

    def meet(*_: Any) -> None:
        barrier.wait()

    return module.register_forward_hook(meet)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("extra", [{}, {"num_items_in_batch": 20}], ids=["mean", "items"])
def test_a_patched_model_has_the_same_loss_and_gradients(
    name: str, extra: dict[str, Any], monkeypatch: Any
) -> None:
    model, batch = model_and_batch(name)
    plain = model(**batch, **extra)
    expected = gradients(model, plain.loss)
    shapes = []
    real = torch.nn.functional.linear
    with patch_transformers(model) as patched:
        assert patched is model
        monkeypatch.setattr(
            torch.nn.functional, "linear",
            lambda *a: shapes.append((tuple(a[1].shape), a[0].shape)) or real(*a),
        )  # fmt: skip
        outputs = [model(**batch, **extra) for _ in range(2)]
        monkeypatch.undo()
        output = outputs[-1]
        assert output.logits is None and torch.equal(outputs[0].loss, output.loss)
        of_head = [given for weight, given in shapes if weight == (61, 16)]
        assert of_head == [(3, 16)], "three states' logits, of the first call alone"
        torch.testing.assert_close(output.loss, plain.loss, rtol=2e-6, atol=1e-6)
        for a, e in zip(gradients(model, output.loss), expected):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=2e-6)
        as_tuple = model(**batch, **extra, return_dict=False)
        assert torch.equal(as_tuple[0], output.loss)
        without = model(input_ids=batch["input_ids"])
        assert without.loss is None and torch.equal(without.logits, plain.logits)
    assert "forward" not in vars(model) and "forward" not in vars(model.get_output_embeddings())
    again = model(**batch, **extra)
    assert torch.equal(again.loss, plain.loss) and again.logits is not None


def test_a_patch_called_once_stays_and_is_taken_away() -> None:
    model, batch = model_and_batch("llama")
    patch = patch_transformers(model, label_smoothing=0.1)
    smoothed = model(**batch).loss
    told = (
        r"model is patched already, with other options \({'label_smoothing': 0.1}\); .*Patch\(model"
    )
    with pytest.raises(ValueError, match=told):
        patch_transformers(model)
    patch.unpatch()
    patch.unpatch()
    assert model(**batch).loss < smoothed


@pytest.mark.parametrize("of_class", [False, True], ids=["model", "class"])
def test_an_equal_second_patch_is_the_first(of_class: bool) -> None:
    """A notebook's cell may run twice."""
    weight = torch.rand(61)
    options = {"label_smoothing": 0.1, "weight": weight, "eval_logits": True}
    model, batch = model_and_batch("llama")
    patched = type(model) if of_class else model
    first = patch_transformers(patched, **options)
    second = patch_transformers(patched, **options)
    for other in ({}, {**options, "z_loss": 0.1}, {**options, "weight": weight.clone()}):
        with pytest.raises(ValueError, match="is patched already, with other options"):
            patch_transformers(patched, **other)
    made = MODELS["llama"]().train() if of_class else model
    assert made(**batch).logits is None and first.calls == second.calls == 1
    second.unpatch()
    first.unpatch()
    assert made(**batch).logits is not None
    assert not any("logitless" in key for key in (*vars(made), *vars(type(made))))


@pytest.mark.parametrize("of_class", [False, True], ids=["model", "class"])
def test_the_end_of_a_second_patch_leaves_the_first(of_class: bool) -> None:
    model, batch = model_and_batch("llama")
    patched = type(model) if of_class else model
    with patch_transformers(patched) as first:
        made = MODELS["llama"]().train() if of_class else model
        with patch_transformers(patched) as second:
            assert second is first is patched and made(**batch).logits is None
        assert made(**batch).logits is None
    assert made(**batch).logits is not None
    patch_transformers(patched)
    patch_transformers(patched).unpatch()
    assert not any("logitless" in key for key in (*vars(made), *vars(type(made))))


@pytest.mark.parametrize("items", [np.int64(20), np.float32(20)], ids=["int64", "float32"])
def test_a_number_of_items_of_numpy(items: Any) -> None:
    model, batch = model_and_batch("llama")
    plain = model(**batch, num_items_in_batch=items).loss
    with patch_transformers(model):
        loss = model(**batch, num_items_in_batch=items).loss
    torch.testing.assert_close(loss, plain, rtol=2e-6, atol=1e-6)


def test_a_patch_says_what_it_is_of() -> None:
    model, batch = model_and_batch("llama")
    with patch_transformers(model, label_smoothing=0.1):
        model(**batch)
        said = "<Patch of LlamaForCausalLM, label_smoothing=0.1, calls=1>"
        assert repr(Patch(model)) == said
    patch = patch_transformers(type(model), z_loss=0.5)
    assert repr(patch) == "<Patch of LlamaForCausalLM, z_loss=0.5, calls=0>"
    patch.unpatch()


@pytest.mark.parametrize("of_class", [False, True], ids=["model", "class"])
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"memory": "lots"}, ValueError, 'memory is "lots"; allowed'),
        ({"label_smoothing": -1.0}, ValueError, "label_smoothing is -1"),
        ({"logit_scale": float("nan")}, ValueError, "logit_scale is nan"),
        ({"softcap": -3.0}, ValueError, "softcap is -3"),
        ({"temperature": 0.0}, ValueError, "temperature is 0"),
        ({"weight": torch.ones(61, 2)}, ValueError, "weight has "),
        ({"empty_mean": "one"}, ValueError, "empty_mean is 'one'; allowed"),
        ({"vocab_size": 0}, ValueError, "vocab_size is 0; allowed: 1 to "),
    ],
)
def test_a_bad_option_is_refused_when_patching(
    options: dict[str, Any], kind: Any, message: str, of_class: bool
) -> None:
    model, _ = model_and_batch("llama")
    with pytest.raises(kind, match=message):
        patch_transformers(type(model) if of_class else model, **options)
    assert not any("logitless" in key for key in (*vars(model), *vars(type(model))))


def test_a_model_in_f64_is_refused_when_patching() -> None:
    model, _ = model_and_batch("llama")
    with pytest.raises(
        TypeError, match=r"lm_head.weight is float64; allowed: float32, float16, bfl"
    ):
        patch_transformers(model.double())
    with pytest.raises(
        ValueError, match="vocab_size is 62; allowed: 1 to 61, the rows of the lm_h"
    ):
        patch_transformers(model.float(), vocab_size=62)
    assert "forward" not in vars(model)


class Codes(torch.Tensor):
    """An int8 weight that claims its scale's dtype, like torchao's."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, op: Any, _: Any, arguments: Any, __: Any = None) -> Any:
        if op is torch.ops.aten.detach.default:
            return cls(arguments[0].codes, arguments[0].scale)
        raise NotImplementedError(op)


@pytest.mark.parametrize("kind", ["int8", "its own"])
def test_a_quantized_head_is_refused_with_the_way_out(kind: str) -> None:
    model, _ = model_and_batch("llama")
    codes = torch.ones(model.lm_head.weight.shape, dtype=torch.int8)
    weight = codes if kind == "int8" else Codes(codes, torch.ones(1))
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    said = "is int8; allowed" if kind == "int8" else r"is a test_transformers\.Codes; allowed"
    with pytest.raises(TypeError if kind == "int8" else NotImplementedError, match=said) as caught:
        patch_transformers(model)
    assert 'skip_modules=["lm_head"]' in str(caught.value)


@pytest.mark.parametrize("when", ["before the patch", "after the patch", "before, and appended"])
def test_hooks_of_accelerate_on_the_head_run(when: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    ran: list[str] = []

    class Hook(hooks.ModelHook):  # type: ignore[misc,name-defined]
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            ran.append("before")
            return args, kwargs

        def post_forward(self, module: Any, output: Any) -> Any:
            ran.append("after")
            return output

    model, batch = model_and_batch("llama")
    expected = model(**batch).loss
    head = model.lm_head
    if when != "after the patch":
        hooks.add_hook_to_module(head, Hook())
    patch = patch_transformers(model)
    if when != "before the patch":
        hooks.add_hook_to_module(head, Hook(), append="appended" in when)
    for _ in range(2):
        ran.clear()
        output = model(**batch)
        assert output.logits is None
        assert sorted(ran) == sorted(["before", "after"] * (1 + ("appended" in when)))
        torch.testing.assert_close(output.loss, expected, rtol=2e-6, atol=1e-6)
    patch.unpatch()
    ran.clear()
    plain = model(**batch)
    assert plain.logits is not None and "before" in ran and torch.equal(plain.loss, expected)
    assert not any("logitless" in key for key in vars(head))
    hooks.remove_hook_from_module(head)
    assert torch.equal(model(**batch).loss, expected)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_head_whose_weight_is_elsewhere_until_it_is_called_is_served(when: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, batch = model_and_batch("llama")
    expected = model(**batch).loss
    if when == "after":
        patch_transformers(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    if when == "before":
        patch_transformers(model)
    assert model.lm_head.weight.is_meta
    for _ in range(2):
        output = model(**batch)
        assert output.logits is None
        torch.testing.assert_close(output.loss, expected, rtol=2e-6, atol=1e-6)


class Trained:
    """A transformers Trainer with a metric of logits, and how often that was called."""

    def __init__(self, model: Any, folder: Any, **settings: Any) -> None:
        self.asked = 0
        steps = {"max_steps": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
        kwargs = {"save_strategy": "no", "per_device_eval_batch_size": 4, **steps, **settings}
        data = [{"input_ids": torch.arange(9) + i, "labels": torch.arange(9) + i} for i in range(8)]
        self.trainer = transformers.Trainer(
            model, transformers.TrainingArguments(str(folder), **kwargs), train_dataset=data,
            eval_dataset=data, compute_metrics=self.metric,
        )  # fmt: skip

    def metric(self, given: Any) -> dict[str, float]:
        self.asked += 1
        return {"size": 0.0 if given.predictions is None else float(given.predictions.size)}


@pytest.mark.parametrize("what", ["train", "evaluate", "predict", "train, compiled"])
def test_a_trainer_that_will_ask_for_logits_is_told_before_it_trains(
    what: str, tmp_path: Any
) -> None:
    pytest.importorskip("accelerate")
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
    if "," in what:
        settings |= {"torch_compile": True, "torch_compile_backend": "eager"}
    model, _ = model_and_batch("llama")
    given = patch_transformers(model)
    trained = Trained(model, tmp_path, **settings)
    call = getattr(trained.trainer, what.partition(",")[0])
    data = (trained.trainer.eval_dataset,) if what == "predict" else ()
    with pytest.raises(NotImplementedError, match="pass eval_logits=True to patch_transformers"):
        call(*data)
    assert trained.asked == 0 and trained.trainer.state.global_step == 0
    given.unpatch()
    with patch_transformers(model, eval_logits=True) as patched:
        call(*data)
        if what != "train, compiled":
            assert (Patch(patched).calls > 0) == (what == "train")
        assert trained.trainer.evaluate()["eval_size"] == 8 * 9 * 61


def test_a_trainer_whose_metrics_need_no_logits(tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    model, _ = model_and_batch("llama")
    with patch_transformers(model, eval_logits=False):
        trained = Trained(model, tmp_path)
        trained.trainer.train()
    with patch_transformers(model):
        trained = Trained(model, tmp_path, prediction_loss_only=True)
        trained.trainer.train()
        trained.trainer.evaluate()
        trained.trainer.compute_metrics = None
        trained.trainer.args.prediction_loss_only = False
        assert trained.trainer.evaluate()["eval_loss"] > 0
    with patch_transformers(model):
        trained = Trained(model, tmp_path)  # never evaluates by itself
        trained.trainer.train()
        with pytest.raises(NotImplementedError, match="pass eval_logits=True to patch"):
            trained.trainer.evaluate()


def test_configurations_that_change_are_followed() -> None:
    model, batch = model_and_batch("gemma2")
    own = copy.deepcopy(model)
    patch_transformers(model)
    for softcap in (2.0, 0.5, None):
        for each in (own, model):
            each.config.final_logit_softcapping = softcap
        torch.testing.assert_close(model(**batch).loss, own(**batch).loss, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_that_pad_the_vocabulary_are_no_words(bias: bool, softcap: float) -> None:
    """Padding rows do not change the loss, and their gradients are 0."""

    class Padded(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            logits = self.lm_head(self.model(input_ids=input_ids)[0])[..., :50]
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=50, **kwargs)
            return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    config = transformers.LlamaConfig(**SIZES)
    config.unpadded_vocab_size, config.final_logit_softcapping = 50, softcap
    model = Padded(config).train()
    model.lm_head = torch.nn.Linear(16, 61, bias=bias)
    with torch.no_grad():
        model.lm_head.weight[50:] = 1e4
    ids = torch.randint(1, 50, (2, 9))
    batch = {"input_ids": ids, "labels": ids}
    plain = model(**batch)
    expected = gradients(model, plain.loss)
    with patch_transformers(model):
        for given in (batch, {**batch, "num_items_in_batch": 20}):
            output = model(**given)
        loss = model(**batch).loss
        torch.testing.assert_close(loss, plain.loss, rtol=2e-6, atol=1e-6)
        for a, e in zip(gradients(model, loss), expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=2e-6)
        output.loss.backward()
        assert not model.lm_head.weight.grad[50:].any() and output.logits is None
        with pytest.raises(ValueError, match="55; allowed"):
            model(input_ids=ids, labels=ids.masked_fill(ids == ids[0, 3], 55))


# Chosen for their different uses of logits; tests/integrations covers every class of transformers.
TWELVE = {
    "gemma2": "served", "cohere": "served", "granite": "served", "hyperclovax": "served",
    "minicpm3": "served", "falcon_h1": "served", "inkling_text": "served", "xlstm": "served",
    "roberta": "served", "nanochat": "served", "bamba": "refused: BambaForCausalLM makes more of",
    "prophetnet": "refused: labels has shape",
}  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", TWELVE)
def test_a_model_of_another_kind_is_served_right_or_refused(kind: str, compiled: bool) -> None:
    if kind not in causal_lms.kinds():
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    assert causal_lms.state(kind, compiled).startswith(TWELVE[kind])


def test_shift_labels_and_all_ignored() -> None:
    model, batch = model_and_batch("llama")
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    none = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    with patch_transformers(model):
        loss = model(**batch).loss
        assert torch.equal(model(**batch, shift_labels=shifted).loss, loss)
        assert model(**none).loss.isnan()  # the model without the patch gives NaN too
    assert model(**none).loss.isnan()


def test_eval_logits() -> None:
    model, batch = model_and_batch("llama")
    model.eval()
    with patch_transformers(model, eval_logits=True), torch.no_grad():
        assert model(**batch).logits is not None
    with patch_transformers(model), torch.no_grad():
        assert model(**batch).logits is None


def test_a_patched_model_keeps_its_signature_and_copies() -> None:
    model, batch = model_and_batch("llama")
    signature = inspect.signature(model.forward)
    with patch_transformers(model):
        assert inspect.signature(model.forward) == signature
        other = copy.deepcopy(model)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(0.5)
        assert model(**batch).loss != other(**batch).loss and other(**batch).logits is None
        assert set(other.state_dict()) == set(model.state_dict())


def test_a_patched_model_saved_and_loaded_is_patched() -> None:
    model, batch = model_and_batch("llama")
    patch_transformers(model, label_smoothing=0.1)
    expected = model(**batch).loss
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    output = other(**batch)
    assert torch.equal(output.loss, expected) and output.logits is None
    with pytest.raises(ValueError, match="patched already"):
        patch_transformers(other)
    Patch(other).unpatch()
    assert set(vars(other)) == set(vars(MODELS["llama"]()))
    plain = other(**batch)
    assert plain.logits is not None and plain.loss < expected
    assert model(**batch).logits is None


def test_replicas_of_a_patched_model_are_patched(monkeypatch: Any) -> None:
    model, batch = model_and_batch("llama")
    half = copy.deepcopy(model)
    with torch.no_grad():
        for p in half.parameters():
            p.mul_(0.5)
    expected = [model(**batch).loss, half(**batch).loss]
    patch_transformers(model)
    module = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(  # a broadcast without GPUs, to unequal copies
        module, "_broadcast_coalesced_reshape",
        lambda tensors, *_, **__: [
            [t * (factor if t.requires_grad else 1) for t in tensors] for factor in (1.0, 0.5)
        ],
    )  # fmt: skip
    for replica, e in zip(module.replicate(model, [0, 1]), expected):
        output = replica(**batch)
        assert output.logits is None
        torch.testing.assert_close(output.loss, e, rtol=2e-6, atol=1e-6)
        output.loss.backward()
    assert model(**batch).logits is None and model.lm_head.weight.grad is not None


def test_hooks_around_the_head_run() -> None:
    model, batch = model_and_batch("llama")
    ran: list[str] = []
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda *_: ran.append("before"))
    head.register_forward_hook(lambda *_: ran.append("after"))
    with patch_transformers(model):
        model(**batch).loss.backward()
    assert ran == ["before", "after"] and head.weight.grad is not None


def test_hooks_on_the_heads_output_run_before_the_losss_gradients() -> None:
    """In such hooks FSDP gathers the weights that it has freed since the forward pass."""
    model, batch = model_and_batch("llama")
    ran: list[Any] = []
    head = model.get_output_embeddings()

    def after(_: Any, __: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _: ran.append("logits"))

    head.register_forward_hook(after)
    head.weight.register_hook(lambda _: ran.append("weight"))
    with patch_transformers(model):
        model(**batch).loss.backward()
        assert ran == ["logits", "weight"]
        none = torch.full_like(batch["labels"], -100)
        model(input_ids=batch["input_ids"], labels=none).loss.backward()
        assert ran[2:] == ["logits", "weight"]


def test_a_wrapper_around_the_forward_is_bound_to_copies() -> None:
    """accelerate wraps the method's function and binds the result to the module again."""
    model, batch = model_and_batch("llama")
    names = list(inspect.signature(model.forward).parameters)
    patch = patch_transformers(model)
    inner = model.forward.__func__
    ran: list[int] = []

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        ran.append(1)
        return inner(*args, **kwargs)

    model.forward = types.MethodType(outer, model)
    assert list(inspect.signature(model.forward).parameters) == names
    other = copy.deepcopy(model)
    expected = other(**batch).loss
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    output = other(**batch)
    assert torch.equal(output.loss, expected) and output.logits is None and len(ran) == 2
    patch.unpatch()
    assert model(**batch).logits is not None and len(ran) == 3, "the wrapper is not ours to take"
    with patch_transformers(model):
        assert model(**batch).logits is None and len(ran) == 4
    assert model(**batch).logits is not None


class Lora(torch.nn.Module):
    """Stands for PEFT's lora Linear with one adapter."""

    merged = False

    def __init__(self, base: torch.nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base_layer = base
        made = torch.nn.ModuleDict
        self.lora_A = made({"default": torch.nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = made({"default": torch.nn.Linear(rank, base.out_features, bias=False)})
        self.lora_dropout = made({"default": torch.nn.Identity()})
        self.scaling = {"default": 1.5}
        self.active_adapters = ["default"]
        self.disable_adapters = False
        base.requires_grad_(False)

    def _cast_input_dtype(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.base_layer(x)
        if not self.disable_adapters:
            a, b = self.lora_A["default"], self.lora_B["default"]
            made = made + b(a(x)) * self.scaling["default"]
        return made


@pytest.mark.parametrize("patch_first", [True, False], ids=["patched first", "adapter first"])
def test_a_lora_on_the_head_is_served(patch_first: bool, monkeypatch: Any) -> None:
    """With stand-ins for PEFT's classes; tests/integrations tests with PEFT itself."""
    layer = types.SimpleNamespace(Linear=Lora)
    monkeypatch.setitem(sys.modules, "peft.tuners.lora.layer", layer)
    model, batch = model_and_batch("llama")
    lora = Lora(model.lm_head)
    own = copy.deepcopy(model)
    own.lm_head = copy.deepcopy(lora)
    if patch_first:
        patch_transformers(model)
    model.lm_head = lora
    if not patch_first:
        patch_transformers(model)
    for off in (False, True):
        own.lm_head.disable_adapters = lora.disable_adapters = off
        plain, output = own(**batch), model(**batch)
        assert output.logits is None
        torch.testing.assert_close(output.loss, plain.loss, rtol=2e-6, atol=1e-6)
        for m, made in ((own, plain), (model, output)):
            m.zero_grad()
            made.loss.backward()
        for a, e in zip(model.parameters(), own.parameters(), strict=True):
            assert (a.grad is None) == (e.grad is None)
            if e.grad is not None:
                torch.testing.assert_close(a.grad, e.grad, rtol=1e-4, atol=2e-6)
    lora.lora_variant = {"default": object()}  # type: ignore[assignment]
    torch.testing.assert_close(model(**batch).loss, output.loss)  # the adapter is off here
    own.lm_head.disable_adapters = lora.disable_adapters = False
    torch.testing.assert_close(model(**batch).loss, own(**batch).loss, rtol=2e-6, atol=1e-6)
    lora.lora_B["default"].register_forward_hook(lambda module, given, made: made.square())
    with pytest.raises(NotImplementedError, match="no matrix times the hidden states"):
        model(**batch)


def batches() -> list[dict[str, torch.Tensor]]:
    """Batches of different lengths, so that labels of another thread do not fit."""
    ids = [torch.randint(1, 61, (2, length)) for length in (9, 7)]
    return [{"input_ids": i, "labels": i} for i in ids]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("how", ["", "checkpointed", "checkpointed, reentrant"])
def test_two_threads_in_one_model_are_as_one_after_the_other(name: str, how: str) -> None:
    """Both threads leave the backbone before either reaches the head, and make their losses before
    either begins its backward, which runs a checkpointed layer again."""
    model, _ = model_and_batch(name)
    if how:
        kwargs = {"use_reentrant": "reentrant" in how}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        model.enable_input_require_grads()
    patch = patch_transformers(model)
    lost = threading.Barrier(2, timeout=30)
    together = False

    def step(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        loss = model(**batch).loss
        if together:
            lost.wait()
        if "reentrant" not in how:
            return [loss, *gradients(model, loss)]
        loss.backward()  # autograd.grad is not allowed, and threads share .grad
        return [loss]

    def of_both(run: Callable[..., list[Any]]) -> list[torch.Tensor]:
        model.zero_grad()
        made = [t for found in run(*[functools.partial(step, b) for b in batches_]) for t in found]
        return made + [p.grad for p in model.parameters() if "reentrant" in how]

    batches_ = batches()
    expected = of_both(lambda *calls: [call() for call in calls])
    together = True
    meeting(model.base_model)
    found = of_both(in_threads)
    if "reentrant" in how:  # two gradients are added in any order
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    else:
        same(found, expected)
    assert patch.calls == 4


@pytest.mark.parametrize("eval_logits", [False, True], ids=["without labels", "eval_logits"])
def test_a_thread_that_asks_for_logits_gets_them_while_another_makes_a_loss(
    eval_logits: bool,
) -> None:
    model, _ = model_and_batch("llama")
    first, second = batches()
    before = model(**second)
    if not eval_logits:
        del second["labels"]
    patch = patch_transformers(model, eval_logits=eval_logits)
    expected = model(**first).loss
    settled = threading.Event()

    def logits() -> Any:
        if not eval_logits:
            with torch.no_grad():
                return model(**second)
        settled.wait(30)  # until the other thread's forward has read the mode
        return model.eval()(**second)

    model.model.register_forward_pre_hook(lambda *_: settled.set())
    meeting(model.model)
    output, plain = in_threads(lambda: model(**first), logits)
    assert torch.equal(output.loss, expected) and output.logits is None
    assert torch.equal(plain.logits, before.logits) and patch.calls == 2
    assert plain.loss is None if not eval_logits else torch.equal(plain.loss, before.loss)


def test_a_model_that_is_run_again_in_backward_while_another_thread_is_in_it() -> None:
    model, _ = model_and_batch("llama")
    first, second = batches()
    patch_transformers(model)
    expected = [gradients(model, model(**batch).loss) for batch in (first, second)]
    loss = checkpoint(lambda: model(**first).loss, use_reentrant=False)
    meeting(model.model)
    found = in_threads(
        lambda: gradients(model, loss), lambda: gradients(model, model(**second).loss)
    )
    for a, b in zip(found, expected, strict=True):
        same(a, b)


@pytest.mark.slow
def test_two_threads_in_one_compiled_model() -> None:
    """The graph breaks between the labels and the head."""
    model, _ = model_and_batch("llama")
    patch_transformers(model)
    both = batches()
    expected = [model(**batch).loss.detach() for batch in both]
    forward = model.model.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        torch._dynamo.graph_break()
        return output

    model.model.forward = broken
    compiled = torch.compile(model, backend="eager")
    for batch in both:
        compiled(**batch)
    found = in_threads(*[lambda b=b: [compiled(**b).loss for _ in range(3)] for b in both])
    for losses, e in zip(found, expected, strict=True):
        for loss in losses:
            torch.testing.assert_close(loss.detach(), e, rtol=2e-6, atol=1e-6)


def test_a_function_that_the_model_is_given_since_is_its_own_again() -> None:
    model, batch = model_and_batch("llama")
    real = model.loss_function
    expected = model(**batch).loss

    @functools.wraps(real)
    def given(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs) + 1

    with patch_transformers(model, eval_logits=True):
        assert model.loss_function.__name__ == real.__name__
        assert inspect.signature(model.loss_function) == inspect.signature(real)
        model.loss_function = given
        output = model(**batch)
        assert output.logits is None
        torch.testing.assert_close(output.loss, expected, rtol=2e-6, atol=1e-6)
        model.eval()
        assert torch.equal(model(**batch).loss, expected + 1)
    assert model.loss_function is given
    with patch_transformers(model.train()):
        assert model(**batch).logits is None
    assert model.loss_function is given


def test_a_loss_type_that_the_model_is_given_since_is_refused() -> None:
    model, batch = model_and_batch("llama")
    patch = patch_transformers(model, eval_logits=True)
    model.loss_type = "ForMaskedLM"
    for mode in (True, False):
        with pytest.raises(
            NotImplementedError,
            match="loss_type of LlamaForCausalLM is 'ForMaskedLM'; allowed: 'ForCausalLM'",
        ):
            model.train(mode)(**batch)
    patch.unpatch()
    assert model.loss_function.__name__ == "ForMaskedLMLoss"


def test_generation_still_works() -> None:
    model, batch = model_and_batch("llama")
    with patch_transformers(model), torch.no_grad():
        made = model.generate(batch["input_ids"], max_new_tokens=3, do_sample=False)
    assert made.shape == (2, 12)


def changed_llama(change: Any) -> Any:
    """A Llama that changes its logits in a way that its configuration does not tell."""

    class Changed(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = change(output.logits)
            if labels is not None:
                output.loss = self.loss_function(
                    logits=output.logits, labels=labels, vocab_size=self.vocab_size
                )
            return output

    return Changed(transformers.LlamaConfig(**SIZES))


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda z: 30 * torch.tanh(z / 30), {"softcap": 30.0}),
        (lambda z: 1e3 * torch.tanh(z / 1e3), {"softcap": 1e3}),
        (lambda z: 30 * torch.tanh(z * 0.9 / 30), {"softcap": 30.0, "logit_scale": 0.9}),
        (lambda z: z * 1.01, {"logit_scale": 1.01}),
        (lambda z: z + 0.01, None),
        (lambda z: z.clamp(min=-50), None),
        (lambda z: z[..., :1], None),
    ],
)
@pytest.mark.parametrize("hidden", [1.0, 1e-3])  # a cap does not change the loss of small logits
def test_an_unknown_change_of_the_logits_is_noticed(
    change: Any, options: dict[str, float] | None, hidden: float
) -> None:
    model, (_, batch) = changed_llama(change), model_and_batch("llama")
    with torch.no_grad():
        model.model.norm.weight.mul_(hidden)
    told = {} if options is None else options
    for less in ({k: v for k, v in told.items() if k != left_out} for left_out in told or ("",)):
        with patch_transformers(model, **less):
            for _ in range(2):  # a second call must give the same
                with pytest.raises(NotImplementedError, match="changes its logits"):
                    model(**batch)
    if options is not None:
        expected = model(**batch).loss
        with patch_transformers(model, **options):
            for _ in range(2):
                torch.testing.assert_close(model(**batch).loss, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "granite"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_check_of_the_logits_holds_in_16_bits(name: str, dtype: torch.dtype) -> None:
    model, batch = model_and_batch(name)
    model.to(dtype)
    expected = model(**batch).loss
    with patch_transformers(model), torch.autocast("cpu", dtype=dtype):
        torch.testing.assert_close(model(**batch).loss, expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "none"}, "reduction is 'none'; allowed: 'mean', 'sum'"),
        ({"ignore_index": 3}, "ignore_index is no option; allowed: weight, "),
        ({"shift": False}, "shift is no option"),
        ({"return_statistics": ("lse",)}, "return_statistics is no option"),
        ({"smoothing": 0.1}, "smoothing is no option"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    model, _ = model_and_batch("llama")
    with pytest.raises(ValueError, match=message):
        patch_transformers(model, **options)
    assert "forward" not in vars(model)


def test_a_model_with_another_loss_is_refused() -> None:
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=61,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
    )
    sizes = {"vocab_size": 61, "emb_dim": 16, "n_layers": 1, "n_heads": 2}
    xlm = transformers.XLMWithLMHeadModel(transformers.XLMConfig(**sizes))
    for model, what in (
        (bert, "ForMaskedLMLoss"),
        (t5, "by a cross-entropy of its own"),
        (xlm, "XLMPredLayer makes its loss in its forward"),
    ):
        with pytest.raises(NotImplementedError, match=what):
            patch_transformers(model)
        assert "forward" not in vars(model)


def test_a_loss_that_is_hidden_in_a_helper_is_refused_in_the_first_forward() -> None:
    class Hidden(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def own_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            return torch.nn.functional.cross_entropy(*flat)

        def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            if labels is not None:
                output.loss = self.own_loss(output.logits, labels)
            return output

    model, (_, batch) = Hidden(transformers.LlamaConfig(**SIZES)), model_and_batch("llama")
    with (
        patch_transformers(model),
        pytest.raises(NotImplementedError, match="Hidden does not make its loss by its loss_fun"),
    ):
        model(**batch)
    assert "_loss_function" not in vars(model)
    assert model(**batch).logits is not None


def test_a_loss_function_of_ones_own_is_refused() -> None:
    model, batch = model_and_batch("llama")
    with patch_transformers(model):
        model(**batch)
        model.loss_function = lambda logits, labels, **_: logits.sum()
        with pytest.raises(NotImplementedError, match="loss_function of LlamaForCausalLM is <lam"):
            model(**batch)
        assert model.loss_function.__name__ == "<lambda>"
    with pytest.raises(NotImplementedError, match="loss_function of LlamaForCausalLM is <lam"):
        patch_transformers(model)


@pytest.mark.parametrize(
    "changed",
    [
        lambda k: {"labels": k["labels"].roll(1, -1)},
        lambda k: {"labels": k["labels"][:, 1:]},
        lambda k: {"shift_labels": k["labels"]},
        lambda k: {"ignore_index": 7},
        lambda k: {"num_items_in_batch": None},
    ],
)
def test_a_model_that_changes_what_its_loss_is_given_is_noticed(changed: Any) -> None:
    class Changing(transformers.LlamaForCausalLM):  # type: ignore[misc]
        @property
        def loss_function(self) -> Any:
            own = super().loss_function
            inner = functools.wraps(own)
            return inner(lambda logits, **k: own(logits, **{**k, **changed(k)}))

    model, (_, batch) = Changing(transformers.LlamaConfig(**SIZES)), model_and_batch("llama")
    patch_transformers(model)
    with pytest.raises(NotImplementedError, match="the model gives its loss another"):
        model(**batch, num_items_in_batch=20)


def test_what_cannot_be_patched_says_so() -> None:
    with pytest.raises(ValueError, match="no output embeddings"):
        patch_transformers(torch.nn.Linear(3, 4))

    class Adapter(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    model, _ = model_and_batch("llama")
    model.lm_head = Adapter(16, 61, bias=False)
    with pytest.raises(NotImplementedError, match=r"lm_head is a \S*Adapter; allowed: a plain"):
        patch_transformers(model)


def test_labels_may_be_given_by_position() -> None:
    model, batch = model_and_batch("llama")
    names = list(inspect.signature(model.forward).parameters)
    place = names.index("labels")
    given = [batch["input_ids"], *[None] * (place - 1), batch["labels"]]
    with patch_transformers(model):
        output = model(*given)
        assert output.logits is None
        assert torch.equal(output.loss, model(**batch).loss)
        with pytest.raises(TypeError, match="multiple values for argument 'labels'"):
            model(*given, labels=batch["labels"])


def test_the_model_that_a_peft_model_wraps_is_patched() -> None:
    """With stand-ins for PEFT's classes; tests/integrations tests with PEFT itself."""
    model, batch = model_and_batch("llama")

    class PeftModelForCausalLM(torch.nn.Module):
        """Like peft's: attributes that it lacks are those of the model that it wraps."""

        peft_config: Any = None

        def __init__(self) -> None:
            super().__init__()
            self.base_model = model

        def get_base_model(self) -> Any:
            return self.base_model

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name) if name == "base_model" else getattr(model, name)

        def forward(self, **kwargs: Any) -> Any:
            return model(**kwargs)

    wrapper = PeftModelForCausalLM()
    patch = patch_transformers(wrapper)
    with patch as patched:
        assert patched is wrapper
        assert wrapper(**batch).logits is None and model(**batch).logits is None
        assert patch.calls == Patch(wrapper).calls == Patch(model).calls == 2
        with pytest.raises(ValueError, match="patched already"):
            patch_transformers(model, z_loss=1e-4)
    assert wrapper(**batch).logits is not None and "forward" not in vars(model)
    assert patch.calls == 2


def test_calls_are_those_that_made_a_loss_here() -> None:
    model, batch = model_and_batch("llama")
    patch = patch_transformers(model, eval_logits=True)
    assert patch.calls == 0
    model(**batch)
    model(**batch).loss.backward()
    assert patch.calls == 2
    with torch.no_grad():
        model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False)
        model.eval()(**batch)
    with pytest.raises(ValueError, match="labels has shape"):
        model.train()(input_ids=batch["input_ids"], labels=batch["labels"][:, 1:])
    assert patch.calls == 2
    other = copy.deepcopy(model)
    other(**batch)
    assert patch.calls == 2 and Patch(other).calls == 3, "a copy counts by itself"
    patch.unpatch()
    model(**batch)
    assert patch.calls == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "when, longer, items, programs",
    [("before", 0, torch.tensor, 1), ("after", 0, int, 2), ("before", 1, None, 2)],
    ids=["items in tensors", "items in numbers", "lengths"],
)
def test_calls_do_not_compile_a_program_each(
    when: str, longer: int, items: Any, programs: int
) -> None:
    """There are as many programs as for an unpatched model, in which changed numbers and lengths
    become symbols. Losses that are not compiled, as in an evaluation, come between."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    plain, _ = model_and_batch("llama")
    model = copy.deepcopy(plain)
    patch = patch_transformers(model) if when == "before" else None
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    patch = patch or patch_transformers(compiled)
    for step in range(4):
        ids = torch.randint(1, 61, (2, 9 + step * longer))
        batch = {"input_ids": ids, "labels": ids}
        given = {} if items is None else {"num_items_in_batch": items(16 + step)}
        loss, expected = compiled(**batch, **given).loss, plain(**batch, **given).loss
        torch.testing.assert_close(loss, expected, rtol=2e-6, atol=1e-6)
        for a, e in zip(gradients(model, loss), gradients(plain, expected)):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=2e-6)
        with torch.no_grad():
            model(**batch)
    assert len(graphs) == programs
    assert patch.calls == 4, "those of compiled code are not counted"


@pytest.mark.parametrize("name", ["llama", "cohere", "gpt2"])
def test_a_patched_class_makes_patched_models(name: str) -> None:
    """Models made from a configuration, as trainers make them, are patched."""
    before, batch = model_and_batch(name)
    cls, own = type(before), type(before).__init__
    signature = inspect.signature(cls)
    patch = patch_transformers(cls, label_smoothing=0.1)
    with patch as patched:
        assert patched is cls and inspect.signature(cls) == signature
        model = transformers.AutoModelForCausalLM.from_config(before.config).train()
        model.load_state_dict(before.state_dict())
        output = model(**batch)
        assert output.logits is None and before(**batch).logits is not None
        with patch_transformers(before, label_smoothing=0.1):
            assert torch.equal(before(**batch).loss, output.loss)
        for again in (cls, model):
            with pytest.raises(ValueError, match="patched already"):
                patch_transformers(again)
        other = MODELS[name]().train()
        assert other(**batch).logits is None and patch.calls == 2
    patch.unpatch()
    assert cls.__init__ is own and not any("logitless" in key for key in vars(cls))
    for restored in (model, other, MODELS[name]().train()):
        assert restored(**batch).logits is not None and set(vars(restored)) == set(vars(before))
    assert patch.calls == 2


def test_a_patched_class_loads_patched_models(tmp_path: Any) -> None:
    model, batch = model_and_batch("gemma2")
    model.save_pretrained(tmp_path)
    expected = model(**batch).loss
    with patch_transformers(type(model)):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
        output = loaded(**batch)
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected, rtol=2e-6, atol=1e-6)


def test_a_class_that_inherits_its_init_is_patched_alone() -> None:
    class Own(transformers.LlamaForCausalLM):  # type: ignore[misc]
        pass

    batch = model_and_batch("llama")[1]
    with patch_transformers(Own):
        model = Own(transformers.LlamaConfig(**SIZES))
        assert model(**batch).logits is None
        assert MODELS["llama"]()(**batch).logits is not None
    assert "__init__" not in vars(Own)
    with patch_transformers(transformers.LlamaForCausalLM):
        assert Own(transformers.LlamaConfig(**SIZES))(**batch).logits is None


@pytest.mark.parametrize("inner_first", [False, True])
@pytest.mark.parametrize("own_init", [False, True])
def test_a_class_and_one_derived_of_it_are_patched_once_each(
    inner_first: bool, own_init: bool
) -> None:
    """The nearest patch holds, in whatever order they come and go."""

    class Inner(transformers.LlamaForCausalLM):  # type: ignore[misc]
        pass

    class Outer(Inner):
        if own_init:

            def __init__(self, config: Any) -> None:
                super().__init__(config)
                self.lm_head = torch.nn.Linear(16, 61)  # with a bias

    def loss(cls: Any, smoothing: float | None) -> Any:
        torch.manual_seed(1)
        model = cls(transformers.LlamaConfig(**SIZES)).train()
        made, expected = model(**batch), None
        if smoothing is None:
            assert made.logits is not None
            return model
        assert made.logits is None
        plain = copy.deepcopy(model)
        Patch(plain).unpatch()
        with patch_transformers(plain, label_smoothing=smoothing):
            expected = plain(**batch).loss
        assert torch.equal(made.loss, expected)
        return model

    batch = model_and_batch("llama")[1]
    given = [(Inner, 0.1), (Outer, 0.2)]
    patches = {
        cls: patch_transformers(cls, label_smoothing=smoothing)
        for cls, smoothing in (given if inner_first else given[::-1])
    }
    inner, outer = loss(Inner, 0.1), loss(Outer, 0.2)
    assert patches[Inner].calls == 1 and patches[Outer].calls == 1
    patches[Inner].unpatch()
    assert inner(**batch).logits is not None and outer(**batch).logits is None
    loss(Inner, None)
    loss(Outer, 0.2)
    patches[Outer].unpatch()
    assert outer(**batch).logits is not None
    loss(Outer, None)
    with patch_transformers(Inner, label_smoothing=0.3):
        loss(Outer, 0.3)
    loss(Outer, None)
    assert all("logitless" not in key for cls in (Inner, Outer) for key in vars(cls))


class Added(torch.nn.Linear):
    """A head whose forward is not that of a Linear."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


def of_another_head(base: Any) -> Any:
    class AnotherHead(base):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.lm_head = Added(16, 61, bias=False)

    return AnotherHead


def of_another_loss_type(base: Any) -> Any:
    class AnotherType(base):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.loss_type = "ForMaskedLM"

    return AnotherType


def of_a_loss_of_its_own(base: Any) -> Any:
    class OwnLoss(base):  # type: ignore[misc]
        def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            if labels is not None:
                flat = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
                output.loss = torch.nn.functional.cross_entropy(*flat)
            return output

    return OwnLoss


def of_a_head_by_another_name(base: Any) -> Any:
    class AnotherName(base):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            del self.lm_head
            self.out = Added(16, 61, bias=False)

        def get_output_embeddings(self) -> Any:
            return self.out

        def forward(self, input_ids: Any, labels: Any = None) -> Any:
            logits = self.out(self.model(input_ids=input_ids)[0])
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=61)
            return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    return AnotherName


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("derive", "why"),
    [
        (of_another_head, r"the lm_head is a \S*Added; allowed: a plain"),
        (of_another_loss_type, "loss_function of AnotherType is ForMaskedLMLoss; allowed"),
        (of_a_loss_of_its_own, "OwnLoss makes its loss in its forward, by a cross-entropy"),
        (of_a_head_by_another_name, r"the lm_head is a \S*Added; allowed: a plain"),
    ],
)
def test_a_class_derived_of_a_patched_one_works_as_ever_where_it_cannot_be_served(
    derive: Any, why: str, compiled: bool
) -> None:
    cls, batch = derive(transformers.LlamaForCausalLM), model_and_batch("llama")[1]

    def run() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = cls(transformers.LlamaConfig(**SIZES)).train()
        called = torch.compile(model, backend="eager") if compiled else model
        output = called(**batch)
        return [output.loss, output.logits, *gradients(model, output.loss)]

    expected = run()
    patch = patch_transformers(transformers.LlamaForCausalLM)
    with patch, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        same(run(), expected)
        same(run(), expected)
        said = [w for w in ours(seen) if "derived from LlamaForCausalLM, which logitless has" in w]
        assert len(said) == len(ours(seen)) == 1 and cls.__qualname__ in said[0]
        assert re.search(f"is left unpatched: .*{why}", said[0])
        assert patch.calls == 0
    same(run(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_class_derived_of_a_patched_one_is_served_as_its_init_leaves_it(compiled: bool) -> None:
    class OwnForCausalLM(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.layers = self.model.layers[:1]
            self.lm_head = torch.nn.Linear(16, 61)

    batch = model_and_batch("llama")[1]
    with (
        patch_transformers(transformers.LlamaForCausalLM),
        warnings.catch_warnings(record=True) as seen,
    ):
        model = OwnForCausalLM(transformers.LlamaConfig(**SIZES)).train()
        called = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        for _ in range(2):
            output = called(**batch)
            assert output.logits is None and ours(seen) == []
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).loss, output.loss, rtol=2e-6, atol=1e-6)
    assert not {key for key in vars(model) if "logitless" in key or key == "_loss_function"}


def test_a_class_that_cannot_be_patched_says_so() -> None:
    for name in ("AutoModelForCausalLM", "LlamaModel", "BertForMaskedLM"):
        with pytest.raises(ValueError, match=f"{name} is no class of models that generate; allow"):
            patch_transformers(getattr(transformers, name))
    with pytest.raises(NotImplementedError, match="T5ForConditionalGeneration makes its loss in"):
        patch_transformers(transformers.T5ForConditionalGeneration)
    with pytest.raises(ValueError, match="smoothing is no option"):
        patch_transformers(transformers.LlamaForCausalLM, smoothing=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_model_within_a_compiled_one_is_patched(when: str) -> None:
    model, batch = model_and_batch("llama")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected = compiled(**batch).loss if when == "after" else model(**batch).loss
    with patch_transformers(compiled) as patched, torch.no_grad():
        assert patched is compiled and compiled(**batch).logits is None
        torch.testing.assert_close(compiled(**batch).loss, expected, rtol=2e-6, atol=1e-6)
    assert compiled(**batch).logits is not None


def test_the_model_within_data_parallelism_is_patched() -> None:
    model, batch = model_and_batch("llama")
    parallel = torch.nn.DataParallel(model)
    with patch_transformers(parallel):
        assert parallel(**batch).logits is None
    assert parallel(**batch).logits is not None


def ours(seen: list[Any]) -> list[str]:
    return [str(w.message) for w in seen if "logitless" in str(w.message)]


@pytest.mark.parametrize("alone", [False, True], ids=["without labels", "backbone was called by"])
def test_a_patch_that_is_of_no_use_in_training_is_warned_of_once(alone: bool) -> None:
    """Trainers with a loss of their own ask for logits or, like TRL's, for hidden states."""
    model, batch = model_and_batch("llama")
    called = model.model if alone else model
    ids = batch["input_ids"]
    patch = patch_transformers(model)
    with patch, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model(**batch)
        model(*[batch.get(name) for name in ("input_ids", "attention_mask")], labels=ids)
        with torch.no_grad():
            called(input_ids=ids)
        called.eval()(input_ids=ids)
        assert ours(seen) == []
        hidden = called.train()(input_ids=ids)
        called(input_ids=ids)
        (said,) = ours(seen)
        assert ("its backbone was called by itself" if alone else "without labels") in said
        assert patch.calls == 2
    again = called(input_ids=ids)
    assert torch.equal(again[0], hidden[0]) and len(ours(seen)) == 1
    assert not any("logitless" in key for module in model.modules() for key in vars(module))


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_backbone_is_warned_of_by_itself_alone(fullgraph: bool) -> None:
    """A backbone that its model calls is not warned of, whichever of them is compiled."""
    model, batch = model_and_batch("llama")
    expected = model(**batch)
    gradients_ = gradients(model, expected.loss)
    ids = batch["input_ids"]
    patch_transformers(model)
    compiled = torch.compile(model.model, backend="eager", fullgraph=fullgraph)
    model.model = compiled
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for called in (model, torch.compile(model, backend="eager", fullgraph=fullgraph)):
            for _ in range(2):
                output = called(**batch)
                assert output.logits is None
                torch.testing.assert_close(output.loss, expected.loss, rtol=2e-6, atol=1e-6)
                for a, e in zip(gradients(model, output.loss), gradients_, strict=True):
                    torch.testing.assert_close(a, e, rtol=1e-4, atol=2e-6)
        with torch.no_grad():
            compiled(input_ids=ids)
        assert ours(seen) == []
        for _ in range(2):
            compiled(input_ids=ids)
        (said,) = ours(seen)
        assert "its backbone was called by itself" in said
        model(**batch)
        assert len(ours(seen)) == 1


@pytest.mark.parametrize("alone", [False, True])
def test_a_thread_is_warned_of_what_it_does_itself(alone: bool) -> None:
    """A thread inside the model does not hide that another one calls the backbone by itself."""
    model, batch = model_and_batch("llama")
    patch_transformers(model)
    arrived, left = threading.Event(), threading.Event()
    late = threading.Thread(target=model, kwargs=batch)

    def hold(*_: Any) -> None:
        if threading.current_thread() is late:
            arrived.set()
            left.wait(30)

    model.model.register_forward_pre_hook(hold)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        late.start()
        arrived.wait(30)
        model.model(input_ids=batch["input_ids"]) if alone else model(**batch)
        left.set()
        late.join()
    assert len(ours(seen)) == alone


def test_a_patch_that_is_of_no_use_in_compiled_training_is_warned_of() -> None:
    model, batch = model_and_batch("llama")
    patch_transformers(model)
    model.compile(fullgraph=True, backend="eager")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model(**batch)
        model.eval()(input_ids=batch["input_ids"])
        assert ours(seen) == []
        for _ in range(3):
            model.train()(input_ids=batch["input_ids"])
        (said,) = ours(seen)
        assert "without labels" in said


def test_a_backbone_within_another_module_is_not_by_itself() -> None:
    class Around(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            inner = super().__getattr__("inner")
            return inner if name == "inner" else getattr(inner, name)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    model, batch = model_and_batch("llama")
    patch_transformers(model)
    model.model = Around(model.model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model(**batch)
        assert ours(seen) == []
        model.model(input_ids=batch["input_ids"])
        assert len(ours(seen)) == 1

# SPDX-License-Identifier: Apache-2.0
"""TRL patched: its function, its fused heads and its trainers."""

from __future__ import annotations

import pathlib
import sys
import types
import warnings
from typing import Any

import pytest
import torch
import trl
import trl.trainer.utils
from torch import Tensor

import reference
import test_transformers
from logitless.integrations import patch_transformers, patch_trl
from reference import close
from test_linear import problem
from test_transformers import transformers

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
DIFFERENTIABLE = ("log_probs", "entropy")
OPTIONS: dict[str, dict[str, float]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "scale": {"logit_scale": 0.3},
    "softcap": {"softcap": 3.0},
    "all": {"temperature": 1.3, "logit_scale": 2.0, "softcap": 3.0},
}


def fused(x: Tensor, w: Tensor, b: Any, t: Tensor, outputs: Any = OUTPUTS, **o: float) -> Any:
    """The function that TRL's trainers call, patched or not; its outputs by name."""
    values = trl.trainer.utils._ChunkedLogProbFunction.apply(
        x, w, b, t, o.get("temperature", 1.0), 7, o.get("softcap"), o.get("logit_scale", 1.0),
        outputs,
    )  # fmt: skip
    return dict(zip(("log_probs", *OUTPUTS), values))


def expected_of(x: Tensor, w: Tensor, b: Any, t: Tensor, **o: float) -> dict[str, Tensor]:
    s = reference.statistics(reference.logits_of(x, w, b), t, o)
    return {
        "log_probs": s["logprob"],
        "entropy": s["entropy"],
        "log_sum_sq_probs": s["z"].softmax(-1).square().sum(-1).log(),
        "mean_logits": s["z"].mean(-1),
        "is_top1": s["argmax"] == t,
    }


def some_predicted(x: Tensor, w: Tensor, b: Any, t: Tensor) -> Tensor:
    best = reference.logits_of(x, w, b).argmax(-1)
    return t.where(torch.arange(len(t), device=t.device) % 3 != 0, best)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_output_and_gradient_is_that_of_f64(
    device: str, name: str, bias: bool, dtype: torch.dtype
) -> None:
    x, w, b, t = problem((23,), 17, 8, dtype, device, bias, ignored=0)
    t = some_predicted(x, w, b, t)
    leaves = [v for v in (x, w, b) if v is not None]
    expected = expected_of(x, w, b, t, **OPTIONS[name])
    upstream = [torch.randn(23, device=device) for _ in DIFFERENTIABLE]
    with patch_trl() as patch:
        results = [fused(x, w, b, t, **OPTIONS[name])]
        assert patch.calls == 1
    # In f32 TRL's results must match too, which shows that the formulas are TRL's. Otherwise its
    # logits have 16 bits.
    if dtype is torch.float32:
        results.append(fused(x, w, b, t, **OPTIONS[name]))
    for actual in results:
        assert torch.equal(actual["is_top1"], expected["is_top1"])
        for key in ("log_probs", *OUTPUTS[:3]):
            assert actual[key].dtype is torch.float32
            assert actual[key].requires_grad == (key in DIFFERENTIABLE)
            close(actual[key], expected[key])
        for keys in (DIFFERENTIABLE, DIFFERENTIABLE[:1], DIFFERENTIABLE[1:]):
            ours, theirs = (
                torch.autograd.grad(
                    [values[key] for key in keys], leaves,
                    [g.to(values[key].dtype) for key, g in zip(keys, upstream)], retain_graph=True,
                )
                for values in (actual, expected)
            )  # fmt: skip
            for a, e, leaf in zip(ours, theirs, leaves):
                assert a.dtype is leaf.dtype
                close(a, e, dtype)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("outputs", [(), *[(name,) for name in OUTPUTS]], ids=str)
def test_what_is_not_asked_for_is_none_and_changes_nothing(
    outputs: tuple[str, ...], name: str
) -> None:
    x, w, b, t = problem((9,), 17, 8, bias=True, ignored=0)
    with patch_trl():
        every = fused(x, w, b, t, **OPTIONS[name])
        some = fused(x, w, b, t, ("log_probs", *outputs), **OPTIONS[name])
    for name in OUTPUTS:
        if name in outputs:
            assert torch.equal(some[name], every[name])
        else:
            assert some[name] is None
    assert torch.equal(some["log_probs"], every["log_probs"])


@pytest.mark.parametrize("name", OPTIONS)
def test_every_output_is_of_one_call(name: str, launched: list[int]) -> None:
    x, w, b, t = problem((9,), 17, 8, bias=True, ignored=0)
    t[4] = -100
    with patch_trl():
        launched.clear()  # the patch checks TRL's formulas first
        found = fused(x, w, b, t, **OPTIONS[name])
    assert len(launched) == 1
    assert not any(value[4] for value in found.values())


def test_of_equal_logits_the_first_is_the_top() -> None:
    x, w, _, _ = problem((2,), 6, 8, ignored=0)
    w = torch.cat((w, w)).detach()
    best = (x @ w[:6].T).argmax(-1)
    x, t = x.repeat(2, 1), torch.cat((best, best + 6))
    for patched in (False, True):
        with patch_trl() if patched else torch.no_grad():
            assert fused(x, w, None, t)["is_top1"].tolist() == [True, True, False, False]


def test_large_common_offsets_cost_little() -> None:
    x, w, b, t = problem((9,), 17, 8, bias=True, ignored=0)
    assert b is not None
    b = (b + 1000).detach()
    expected = expected_of(x, w, b, t)
    with patch_trl():
        actual = fused(x, w, b, t)
    for name in ("log_probs", "entropy", "log_sum_sq_probs"):
        torch.testing.assert_close(
            actual[name].double(), expected[name].double(), rtol=0, atol=5e-4
        )


@pytest.mark.parametrize("name", OPTIONS)
def test_no_token_at_all(name: str) -> None:
    """A batch without a label has no tokens."""
    x, w, b, t = problem((0,), 17, 8, bias=True)
    with patch_trl():
        actual = fused(x, w, b, t, **OPTIONS[name])
    assert all(value.shape == (0,) for value in actual.values())
    (actual["log_probs"].sum() + actual["entropy"].sum()).backward()
    assert x.grad is not None and w.grad is not None and not w.grad.any()


@pytest.mark.parametrize("dtypes", [("f32", "bf16"), ("bf16", "f32"), ("f16", "f32")], ids=str)
def test_hidden_states_and_weight_of_two_dtypes(dtypes: tuple[str, str]) -> None:
    """TRL's cast_lm_head_to_fp32 makes such heads."""
    names = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    hidden, weight = (names[d] for d in dtypes)
    x, w, b, t = problem((23,), 17, 8, bias=True, ignored=0)
    assert b is not None
    x, w, b = (v.detach().bfloat16().to(d) for v, d in ((x, hidden), (w, weight), (b, weight)))
    leaves = [v.requires_grad_() for v in (x, w, b)]
    expected = expected_of(x, w, b, t)
    with patch_trl():
        actual = fused(x, w, b, t)
    for key in ("log_probs", *OUTPUTS[:3]):
        close(actual[key], expected[key])
    upstream = torch.randn(23)
    ours = torch.autograd.grad(actual["log_probs"], leaves, upstream)
    theirs = torch.autograd.grad(expected["log_probs"], leaves, upstream.double())
    for a, e, leaf in zip(ours, theirs, leaves):
        assert a.dtype is leaf.dtype
        # Kept logits, and so dz, have the dtype of the hidden states.
        close(a, e, leaf.dtype if hidden is torch.float32 and leaf is b else hidden)


def test_autocast() -> None:
    x, w, b, t = problem((23,), 17, 8, bias=True, ignored=0)
    assert b is not None
    rounded = [v.detach().bfloat16() for v in (x, w)]
    expected = expected_of(*rounded, b, t)
    with patch_trl(), torch.autocast("cpu", torch.bfloat16):
        actual = fused(x, w, b, t)
    for key in ("log_probs", *OUTPUTS[:3]):
        close(actual[key], expected[key])
    grads = torch.autograd.grad(actual["log_probs"].sum(), (x, w, b))
    assert all(grad.dtype is torch.float32 for grad in grads)


def test_compiled() -> None:
    x, w, b, t = problem((9,), 17, 8, bias=True, ignored=0)
    with patch_trl():
        actual = torch.compile(fused, fullgraph=True, backend="eager")(x, w, b, t, softcap=3.0)
        for key, value in fused(x, w, b, t, softcap=3.0).items():
            assert torch.equal(actual[key], value)


def test_memory_is_handed_on() -> None:
    x, w, _, t = problem((9,), 17, 8, ignored=0)
    with patch_trl(memory=0), pytest.raises(ValueError, match=r"^memory is 0 bytes"):
        fused(x, w, None, t)
    with pytest.raises(ValueError, match="memory"):
        patch_trl(memory="much")
    assert fused(x, w, None, t)["log_probs"] is not None


def test_a_patch_is_one_and_is_taken_away() -> None:
    own = trl.trainer.utils._ChunkedLogProbFunction
    patch = patch_trl()
    assert trl.trainer.utils._ChunkedLogProbFunction is patch
    with pytest.raises(ValueError, match="patched already"):
        patch_trl()
    patch.unpatch()
    assert trl.trainer.utils._ChunkedLogProbFunction is own
    with patch_trl():
        patch.unpatch()  # a second time does nothing
        assert trl.trainer.utils._ChunkedLogProbFunction is not own
    assert trl.trainer.utils._ChunkedLogProbFunction is own


def test_what_is_not_known_raises() -> None:
    x, w, _, t = problem((9,), 17, 8, ignored=0)
    with patch_trl():
        with pytest.raises(ValueError, match="outputs has 'rank'; allowed: log_probs, entropy"):
            fused(x, w, None, t, ("rank",))
        with pytest.raises(ValueError, match="final_logit_softcapping is 0"):
            fused(x, w, None, t, softcap=0.0)
        with pytest.raises(ValueError, match="hidden"):
            fused(x[0], w, None, t)
        w.ds_status = types.SimpleNamespace(name="NOT_AVAILABLE")  # type: ignore[attr-defined]
        with pytest.raises(NotImplementedError, match=r"weight is .* ZeRO-3 that is not whole"):
            fused(x, w, None, t)


@pytest.mark.parametrize("entropy", [False, True])
def test_a_parameter_that_deepspeed_takes_away_before_backward_is_kept(entropy: bool) -> None:
    """ZeRO-3 gives a parameter another memory after its module's forward."""
    x, w, b, t = problem((9,), 17, 8, bias=True, ignored=0)
    assert b is not None
    outputs = ("log_probs", "entropy") if entropy else ("log_probs",)

    def gradients(away: bool) -> Any:
        weight, bias = (torch.nn.Parameter(v.detach().clone()) for v in (w, b))
        for p in (weight, bias):
            p.ds_status = types.SimpleNamespace(name="AVAILABLE")  # type: ignore[attr-defined]
        found = fused(x, weight, bias, t, outputs)
        total = sum(found[name].square().sum() for name in outputs)
        if away:
            weight.data, bias.data = torch.zeros_like(weight), torch.zeros_like(bias)
        return torch.autograd.grad(total, (x, weight, bias))

    with patch_trl():
        for a, e in zip(gradients(True), gradients(False)):
            assert torch.equal(a, e)


def forward_of_two(ctx: Any, hidden: Any, weight: Any) -> None: ...


def forward_of_more_outputs(
    ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any, temperature: Any, chunk_size: Any,
    final_logit_softcapping: Any = None, logit_scale: Any = 1.0, outputs: Any = (*OUTPUTS, "rank"),
) -> None: ...  # fmt: skip


@pytest.mark.parametrize(
    "function, message",
    [
        (None, "has no trl.trainer.utils._ChunkedLogProbFunction"),
        (types.SimpleNamespace(forward=forward_of_two), "of hidden, weight instead of hidden, w"),
        (types.SimpleNamespace(forward=forward_of_more_outputs), "'rank'.* instead of"),
    ],
    ids=["none", "arguments", "outputs"],
)
def test_another_trl_is_an_error_that_names_it(
    function: Any, message: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", function)
    with pytest.raises(NotImplementedError, match=f"TRL {trl.__version__} .*{message}"):
        patch_trl()


@pytest.mark.parametrize("name", ["temperature", "softcap", "scale", "squares"])
def test_a_trl_of_another_formula_is_an_error(name: str, monkeypatch: Any) -> None:
    theirs = trl.trainer.utils._ChunkedLogProbFunction

    def apply(*a: Any) -> Any:
        if name == "squares":
            made = theirs.apply(*a)
            return (*made[:2], made[2].exp(), *made[3:])
        at, value = {"temperature": (4, 1.0), "softcap": (6, None), "scale": (7, 1.0)}[name]
        return theirs.apply(*a[:at], value, *a[at + 1 :])

    other = types.SimpleNamespace(forward=theirs.forward, apply=apply)
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", other)
    with pytest.raises(
        NotImplementedError, match="_ChunkedLogProbFunction that computes something"
    ):
        patch_trl()


def test_a_trl_that_does_not_call_its_function_is_an_error(monkeypatch: Any) -> None:
    monkeypatch.setattr("inspect.getsource", lambda _: "")
    with pytest.raises(NotImplementedError, match="does not call _ChunkedLogProbFunction"):
        patch_trl()


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "granite", "mixtral"])
def test_a_fused_head_is_that_of_the_models_logits(name: str) -> None:
    """The models and labels include ignored labels, a scale, a softcap and a router's loss."""
    model, batch = test_transformers.model_and_batch(name)
    parameters = list(model.parameters())
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    plain = model(**batch).loss
    labels = batch["labels"][:, 1:]
    valid = labels != -100
    s = reference.statistics(logits, labels, {"temperature": 0.9})
    grads = torch.autograd.grad(plain, parameters, allow_unused=True)
    trl.trainer.utils.add_fused_lm_head(model, outputs=("log_probs", *OUTPUTS))
    with patch_trl() as patch:
        loss = model(**batch, fused_lm_head=True).loss
        ours = torch.autograd.grad(loss, parameters, allow_unused=True)
        trl.trainer.utils.add_fused_lm_head(model, 0.9, outputs=("log_probs", *OUTPUTS))
        output = model(**batch, fused_lm_head=True)
        assert patch.calls == 2
    torch.testing.assert_close(loss, plain, rtol=2e-6, atol=1e-6)
    for a, e in zip(ours, grads):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=2e-6)
    expected = {
        "log_probs": s["logprob"],
        "entropy": s["entropy"],
        "log_sum_sq_probs": s["z"].softmax(-1).square().sum(-1).log() * valid,
        "mean_logits": s["z"].mean(-1) * valid,
        "is_top1": (s["argmax"] == labels) & valid,
    }
    for key, value in expected.items():
        actual = getattr(output, key)
        torch.testing.assert_close(actual.to(value.dtype), value, rtol=1e-5, atol=3e-6)


WORDS = "the cat sat on a mat and saw the red bird fly over blue water in to old town".split()


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *dict.fromkeys(WORDS)])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return test_transformers.transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def text(start: int, count: int) -> str:
    return "".join(" " + WORDS[(start * 5 + i) % len(WORDS)] for i in range(count))


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of token ids that are even."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


STEPS = 20
ROWS: dict[str, Any] = {
    "sft": lambda i: {"text": text(i, 6 + i % 5)},
    "dpo": lambda i: {"prompt": text(i, 3), "chosen": text(i + 3, 5), "rejected": text(i + 1, 4)},
    "kto": lambda i: {"prompt": text(i, 3), "completion": text(i + 3, 5), "label": i % 3 > 0},
    "grpo": lambda i: {"prompt": text(i, 3)},
    "rloo": lambda i: {"prompt": text(i, 3)},
}
GENERATING = {"num_generations": 4, "max_completion_length": 6, "beta": 0.04}
SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {"use_weighting": True},
    "kto": {},
    "grpo": {**GENERATING, "entropy_coef": 0.01, "temperature": 0.9},
    "rloo": GENERATING,
}
# Calls of the head per step, for the policy and the reference model together.
CALLS = {"sft": 1, "dpo": 2, "kto": 4, "grpo": 2, "rloo": 3}


def train(
    kind: str, folder: pathlib.Path, device: str, by_name: bool = False, **options: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """The model in `folder` after 20 steps, and what was logged at each. `by_name`: the
    trainer loads it itself. `options` are the trainer's."""
    import datasets

    model: Any = str(folder)
    if not by_name:
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
    config = getattr(trl, f"{kind.upper()}Config")(
        output_dir=str(folder / "out"), use_cpu=device == "cpu", bf16=False, seed=7,
        max_steps=STEPS, logging_steps=1, per_device_train_batch_size=4, learning_rate=3e-3,
        save_strategy="no", report_to="none", gradient_checkpointing=False, disable_tqdm=True,
        **SETTINGS[kind],
    )  # fmt: skip
    more = options | ({"reward_funcs": reward} if kind in ("grpo", "rloo") else {})
    trainer = getattr(trl, f"{kind.upper()}Trainer")(
        model=model, args=config, processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_list([ROWS[kind](i) for i in range(24)]), **more,
    )  # fmt: skip
    trainer.train()
    return trainer.model, [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", ROWS)
def test_a_trainer_learns_the_same_without_logits(
    kind: str, device: str, tmp_path: pathlib.Path
) -> None:
    start = test_transformers.model_and_batch("llama")[0]
    start.save_pretrained(tmp_path)
    own, expected = train(kind, tmp_path, device)
    with patch_trl() as patch:
        ours, actual = train(kind, tmp_path, device)
    assert patch.calls == CALLS[kind] * STEPS
    assert len(actual) == len(expected) == STEPS
    # The loss, rewards, entropies, norms of gradients, ...
    for a, e in zip(actual, expected):
        assert {**a, "step_time": 0} == pytest.approx({**e, "step_time": 0}, rel=1e-4, abs=1e-5)
    start.to(device)
    for a, e, s in zip(ours.parameters(), own.parameters(), start.parameters()):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-5)
        assert not torch.allclose(a, s, rtol=0, atol=1e-4)


def test_a_model_that_the_trainer_loads_is_served(device: str, tmp_path: pathlib.Path) -> None:
    test_transformers.model_and_batch("llama")[0].save_pretrained(tmp_path)
    _, expected = train("sft", tmp_path, device, by_name=True)
    with patch_trl() as patch:
        _, actual = train("sft", tmp_path, device, by_name=True)
    assert patch.calls == CALLS["sft"] * STEPS
    losses = ([entry["loss"] for entry in run] for run in (actual, expected))
    assert next(losses) == pytest.approx(next(losses), rel=1e-4)


def test_the_patch_of_a_model_says_that_trl_does_not_come_there(tmp_path: pathlib.Path) -> None:
    test_transformers.model_and_batch("llama")[0].save_pretrained(tmp_path)
    with patch_transformers(transformers.LlamaForCausalLM), patch_trl() as of_trl:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*logitless")
            train("sft", tmp_path, "cpu")
        assert of_trl.calls == CALLS["sft"] * STEPS
    patch = patch_transformers(transformers.LlamaForCausalLM)
    with patch, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train("sft", tmp_path, "cpu", by_name=True)
    (said,) = (str(w.message) for w in seen if "logitless" in str(w.message))
    assert "its backbone was called by itself" in said and "use patch_trl()" in said
    assert patch.calls == 0


def test_a_model_whose_forward_a_trainer_has_replaced_is_told_of_patch_trl() -> None:
    model, _ = test_transformers.model_and_batch("llama")
    trl.trainer.utils.add_fused_lm_head(model)
    before = dict(vars(model))
    for given in (model, types.SimpleNamespace(peft_config={}, get_base_model=lambda: model)):
        with pytest.raises(
            NotImplementedError, match=r"a trainer of TRL has replaced .* use patch_trl"
        ):
            patch_transformers(given)
    assert dict(vars(model)) == before


def test_where_there_is_no_trl_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match=r"patch_trl needs TRL 1.16: pip install trl"):
        patch_trl()

# SPDX-License-Identifier: Apache-2.0
"""Metrics of patched models, without logits: in outputs, in what a Trainer logs and evaluates, in
what its compute_metrics is given; and those that TRL's trainers log."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import io
import json
import multiprocessing
import os
import pathlib
import socket
from typing import Any

import pytest
import torch
from torch import Tensor

from logitless.integrations import Patch, patch_transformers, patch_trl
from logitless.integrations._metrics import METRICS
from logitless.torch import linear_cross_entropy
from logitless.torch._functions import measured

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import test_transformers  # noqa: E402
from test_transformers import MODELS, SIZES, gradients  # noqa: E402

NAMES = ("accuracy", "entropy", "logprob", "rank")


def some_predicted(model: Any, ids: Tensor) -> Tensor:
    """Labels of which every third is the likeliest token, and some are ignored."""
    with torch.no_grad():
        best = model(input_ids=ids).logits.argmax(-1)
    labels = ids.clone()
    labels[:, 1:] = torch.where(torch.arange(1, ids.shape[1]) % 3 == 0, best[:, :-1], ids[:, 1:])
    labels[0, :3] = -100
    labels[-1, -1] = -100
    return labels


def model_and_batch(name: str) -> tuple[Any, dict[str, Tensor]]:
    model, batch = test_transformers.model_and_batch(name)
    return model, {**batch, "labels": some_predicted(model, batch["input_ids"])}


def sums_of(logits: Tensor, target: Tensor, ignored: int = -100) -> dict[str, float]:
    """The sum of each metric and the number of tokens that count, by the formulas in f64."""
    counts = target != ignored
    z, t = logits.detach()[counts].double(), target[counts]
    logp = z.log_softmax(-1)
    own = z.gather(-1, t[:, None])
    made = {
        "accuracy": z.argmax(-1) == t,
        "entropy": -(logp.exp() * logp).sum(-1),
        "logprob": logp.gather(-1, t[:, None])[:, 0],
        "rank": (z > own).sum(-1),
    }
    return {**{name: float(v.sum()) for name, v in made.items()}, "tokens": float(counts.sum())}


def means_of(*sums: dict[str, float]) -> dict[str, float]:
    tokens = sum(s["tokens"] for s in sums)
    return {name: sum(s[name] for s in sums) / tokens for name in NAMES}


def shifted(labels: Tensor, ignored: int = -100) -> Tensor:
    return torch.nn.functional.pad(labels, (0, 1), value=ignored)[:, 1:]


def expected_of(logits: Tensor, labels: Tensor) -> dict[str, float]:
    return means_of(sums_of(logits, shifted(labels)))


def check(found: dict[str, Any], expected: dict[str, float], tokens: int | None = None) -> None:
    assert list(found)[:-1] == [n for n in NAMES if n in found] and list(found)[-1] == "tokens"
    for name, value in found.items():
        assert value.shape == () and value.dtype is torch.float32 and not value.requires_grad
        if name != "tokens":
            assert float(value) == pytest.approx(expected[name], rel=1e-5, abs=1e-6)
    assert tokens is None or found["tokens"] == tokens


# Within one call.


@pytest.mark.parametrize("how", ["train", "eval", "shift_labels", "items"])
@pytest.mark.parametrize("name", MODELS)
def test_metrics_are_those_of_the_logits(name: str, how: str) -> None:
    model, batch = model_and_batch(name)
    model.train(how != "eval")
    plain = model(**batch)
    expected = expected_of(plain.logits, batch["labels"])
    assert 0 < expected["accuracy"] < 1 and expected["rank"] > 1
    more: dict[str, Any] = {"num_items_in_batch": 3} if how == "items" else {}
    if how == "shift_labels":
        more["shift_labels"] = shifted(batch["labels"])
    with patch_transformers(model, metrics=NAMES):
        output = model(**batch, **more)
    tokens = int((batch["labels"][:, 1:] != -100).sum())
    check(output.metrics, expected, tokens)
    assert output.logits is None


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_and_gradients_are_those_without_metrics_in_one_call(
    reduction: str, launched: list[int]
) -> None:
    """If a statistic could have a gradient, a mean would need a second call."""
    model, batch = model_and_batch("llama")
    with patch_transformers(model, reduction=reduction):
        before = model(**batch).loss
        expected = gradients(model, before)
    with patch_transformers(model, reduction=reduction, metrics=NAMES):
        launched.clear()
        loss = model(**batch).loss
        found = gradients(model, loss)
        assert len(launched) == 1
    torch.testing.assert_close(loss, before, rtol=1e-6, atol=0)
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_statistics_that_are_measured_have_no_gradient(reduction: str) -> None:
    """Statistics have none, even if the loss's are computed later, as with reduction="none"."""
    x, w = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    names = [METRICS[name] for name in NAMES]
    loss, found = measured(x, w, torch.arange(5), names, reduction=reduction)
    assert loss.requires_grad
    assert not any(getattr(found, name).requires_grad for name in names)
    expected = linear_cross_entropy(x, w, torch.arange(5), reduction=reduction)
    for a, e in zip(*(torch.autograd.grad(v.sum(), (x, w)) for v in (loss, expected))):
        torch.testing.assert_close(a, e)


def test_of_equal_logits_the_first_is_predicted_and_all_have_rank_0() -> None:
    model, _ = test_transformers.model_and_batch("llama")
    with torch.no_grad():
        model.lm_head.weight[31:] = model.lm_head.weight[1:31]
        ids = torch.randint(1, 61, (2, 9))
        best = model(input_ids=ids).logits[..., 1:31].argmax(-1)[:, :-1] + 1
        model.lm_head.weight[0] = 0
    assert (model(input_ids=ids).logits.argmax(-1)[:, :-1] == best).all()
    with patch_transformers(model, metrics=("rank", "accuracy")):
        for add, right in ((0, 1.0), (30, 0.0)):
            labels = torch.nn.functional.pad(best + add, (1, 0), value=-100)
            output = model(input_ids=ids, labels=labels)
            assert output.metrics["accuracy"] == right and output.metrics["rank"] == 0


def test_an_index_of_its_own_that_is_ignored_does_not_count() -> None:
    """With ignore_index=-1, which is also the core's argmax and rank of an ignored token."""
    model, batch = model_and_batch("llama")
    labels = batch["labels"].masked_fill(batch["labels"] == -100, -1)
    expected = expected_of(model(input_ids=batch["input_ids"]).logits, batch["labels"])
    with patch_transformers(model, metrics=NAMES):
        for skips in (None, False):
            output = model(
                input_ids=batch["input_ids"], labels=labels, ignore_index=-1, skip_logits=skips
            )
            check(output.metrics, expected, int((labels[:, 1:] != -1).sum()))


def test_metrics_of_no_token_are_nan() -> None:
    model, batch = model_and_batch("llama")
    with patch_transformers(model, metrics=NAMES):
        found = model(**{**batch, "labels": torch.full_like(batch["labels"], -100)}).metrics
    assert all(found[name].isnan() for name in NAMES) and found["tokens"] == 0


@pytest.mark.parametrize("metrics", ["rank", ["rank"], ("rank", "rank"), {"rank"}])
def test_only_what_is_asked_for_is_made(metrics: Any) -> None:
    model, batch = model_and_batch("llama")
    with patch_transformers(model, metrics=metrics):
        assert list(model(**batch).metrics) == ["rank", "tokens"]
    with patch_transformers(model, metrics=()):
        output = model(**batch)
        assert "metrics" not in output and not hasattr(output, "metrics")
        assert "train" not in vars(model)


@pytest.mark.parametrize(
    "metrics, message",
    [
        (("acuracy",), r"metrics has 'acuracy'; allowed: 'accuracy', 'entropy', 'logprob', 'rank'"),
        (("rank", 3), "metrics has 3; allowed: 'accuracy'"),
        (5, "metrics is 5; allowed: a tuple of 'accuracy'"),
        ("lse", "metrics has 'lse'; allowed"),
    ],
)
@pytest.mark.parametrize("of_class", [False, True], ids=["model", "class"])
def test_an_unknown_metric_is_refused_when_patching(
    metrics: Any, message: str, of_class: bool
) -> None:
    model, _ = test_transformers.model_and_batch("llama")
    with pytest.raises(ValueError, match=message):
        patch_transformers(type(model) if of_class else model, metrics=metrics)
    assert not any("logitless" in key for key in (*vars(model), *vars(type(model))))


def test_a_second_patch_asks_for_the_same_metrics() -> None:
    model, batch = model_and_batch("llama")
    patch = patch_transformers(model, metrics=["rank", "accuracy"])
    assert "metrics=('accuracy', 'rank')" in repr(patch)
    patch_transformers(model, metrics=("accuracy", "rank"))
    with pytest.raises(ValueError, match="patched already, with other options"):
        patch_transformers(model, metrics=("rank",))
    patch.unpatch()
    assert "train" not in vars(model) and "metrics" not in model(**batch)
    with patch_transformers(type(model), metrics="rank"):
        made = MODELS["llama"]()
        assert list(made(**batch).metrics) == ["rank", "tokens"]


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value)


def test_the_output_is_the_models_own_with_a_field_more() -> None:
    model, batch = model_and_batch("mixtral")
    own = type(model(**batch))
    patch_transformers(model, metrics=NAMES)
    output = model(**batch)
    assert isinstance(output, own) and output["metrics"] is output.metrics
    assert list(output)[-1] == "metrics" and "loss" in output and output.aux_loss is not None
    as_tuple = model(**batch, return_dict=False)
    assert torch.equal(as_tuple[0], output.loss)
    same(as_tuple[-1], output.metrics)
    assert type(model(**batch)) is type(output)
    assert "metrics" not in own.__dataclass_fields__


def pickled(output: Any) -> Any:
    file = io.BytesIO()
    torch.save(output, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def taken_apart(output: Any) -> Any:
    """The output taken apart and rebuilt, as FSDP, DDP and compiled code do."""
    leaves, spec = torch.utils._pytree.tree_flatten(output)
    return torch.utils._pytree.tree_unflatten(leaves, spec)


def in_f32(output: Any) -> Any:
    """The output cast as accelerate does after a forward in mixed precision."""
    operations = importlib.import_module("accelerate.utils.operations")
    return operations.convert_to_fp32(output)


def of_mapping(output: Any) -> Any:
    """The output rebuilt as DataParallel does."""
    return type(output)((key, output[key]) for key in output)


@pytest.mark.parametrize(
    "through", [pickled, taken_apart, in_f32, of_mapping, copy.deepcopy, dataclasses.replace]
)
def test_metrics_survive(through: Any) -> None:
    model, batch = model_and_batch("llama")
    model.config.use_cache = False
    with patch_transformers(model, metrics=NAMES), torch.no_grad():
        output = model(**batch)
    other = through(output)
    assert type(other) is type(output) and list(other) == list(output) == ["loss", "metrics"]
    same(other.metrics, output.metrics)
    same(other["metrics"], output.metrics)


def test_outputs_of_replicas_are_gathered(monkeypatch: Any) -> None:
    model, batch = model_and_batch("llama")
    model.config.use_cache = False
    patch_transformers(model, metrics=NAMES)
    module = importlib.import_module("torch.nn.parallel.scatter_gather")
    monkeypatch.setattr(module.Gather, "apply", lambda _, __, *tensors: torch.stack(tensors))
    found = module.gather([model(**batch), model(**batch)], "cpu")
    assert found.loss.shape == (2,) and found.metrics["rank"].shape == (2,)
    assert torch.equal(found.metrics["rank"][0], model(**batch).metrics["rank"])


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_compiled_model_has_the_same_metrics_and_compiles_once(mode: str) -> None:
    model, batch = model_and_batch("llama")
    model.train(mode == "train")
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    patch_transformers(model, metrics=NAMES)
    expected = model(**batch)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(3):
        output = compiled(**batch)
        for name in expected.metrics:
            torch.testing.assert_close(output.metrics[name], expected.metrics[name])
    assert len(graphs) == 1
    (sums,) = model._logitless_patch.tally.take()  # as a Trainer does
    assert sums[:, 0].sum() == output.metrics["tokens"] and sums.shape == (2, 5)
    if mode == "train":
        for a, e in zip(gradients(model, output.loss), gradients(model, expected.loss)):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_gradient_checkpointing(reentrant: bool) -> None:
    model, batch = model_and_batch("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    expected = expected_of(model(**batch).logits, batch["labels"])
    with patch_transformers(model, metrics=NAMES):
        output = model(**batch)
        output.loss.backward()
    check(output.metrics, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_metrics_are_of_logits_in_f32(dtype: torch.dtype) -> None:
    model, batch = model_and_batch("llama")
    hidden = model.to(dtype).model(input_ids=batch["input_ids"])[0].float()
    expected = expected_of(hidden @ model.lm_head.weight.float().T, batch["labels"])
    with patch_transformers(model, metrics=NAMES):
        check(model(**batch).metrics, expected)


# The switch for a single call.


@pytest.mark.parametrize("metrics", [(), NAMES], ids=["", "metrics"])
def test_a_call_may_ask_for_its_logits(metrics: Any) -> None:
    model, batch = model_and_batch("gemma2")
    plain = model(**batch)
    expected = gradients(model, plain.loss)
    with patch_transformers(model, metrics=metrics) as patched:
        output = model(**batch, skip_logits=False)
        assert torch.equal(output.logits, plain.logits) and torch.equal(output.loss, plain.loss)
        assert all(map(torch.equal, gradients(model, output.loss), expected))
        assert ("metrics" in output) == bool(metrics) and Patch(patched).calls == 0
        if metrics:
            check(output.metrics, expected_of(plain.logits, batch["labels"]))
            as_tuple = model(**batch, skip_logits=False, return_dict=False)
            assert torch.equal(as_tuple[1], plain.logits)
            same(as_tuple[-1], output.metrics)
        assert model(**batch, skip_logits=True).logits is None
        assert model(**batch).logits is None
        without = model(input_ids=batch["input_ids"], skip_logits=False)
        assert torch.equal(without.logits, plain.logits)
        with pytest.raises(ValueError, match="skip_logits is True, but labels is None; allowed"):
            model(input_ids=batch["input_ids"], skip_logits=True)


def test_a_call_may_leave_out_the_logits_of_an_evaluation() -> None:
    model, batch = model_and_batch("llama")
    model.eval()
    plain = model(**batch)
    with patch_transformers(model, metrics=NAMES, eval_logits=True), torch.no_grad():
        output = model(**batch)
        assert torch.equal(output.logits, plain.logits) and torch.equal(output.loss, plain.loss)
        check(output.metrics, expected_of(plain.logits, batch["labels"]))
        less = model(**batch, skip_logits=True)
        assert less.logits is None
        check(less.metrics, expected_of(plain.logits, batch["labels"]))
        assert model.train()(**batch).logits is None


# transformers' Trainer.

LENGTHS = (9, 7, 4, 8, 5, 6, 6, 3, 9, 8)  # of the sequences


def rows_of(model: Any, count: int = 10) -> list[dict[str, Tensor]]:
    """Sequences of unequal lengths, of whose labels unequal parts are ignored."""
    made = []
    for i in range(count):
        drawn = torch.Generator().manual_seed(100 + i)
        ids = torch.randint(1, 61, (1, LENGTHS[i % len(LENGTHS)]), generator=drawn)
        labels = some_predicted(model, ids)[0]
        labels[: i % 4] = -100
        made.append({"input_ids": ids[0], "labels": labels})
    return made


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The rows padded on the right to the longest of them."""
    padded = torch.nn.utils.rnn.pad_sequence
    ids = padded([row["input_ids"] for row in rows], batch_first=True)
    labels = padded([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels}


def trainer_of(
    model: Any, folder: Any, data: Any, given: dict[str, Any] | None = None,
    kind: Any = transformers.Trainer, **settings: Any,
) -> tuple[Any, list[dict[str, Tensor]]]:  # fmt: skip
    """A Trainer that learns nothing, so that its metrics are those of one model, and its
    batches."""
    batches: list[dict[str, Tensor]] = []

    def collator(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batches.append(collate(rows))
        return batches[-1]

    defaults = {
        "max_steps": 4, "logging_steps": 2, "save_strategy": "no", "learning_rate": 0.0,
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, **{**defaults, **settings}
    )
    trainer = kind(
        model, arguments, data_collator=collator, train_dataset=data, eval_dataset=data,
        **(given or {}),
    )  # fmt: skip
    return trainer, batches


def sums_over(model: Any, batch: dict[str, Tensor]) -> dict[str, float]:
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits
    return sums_of(logits, shifted(batch["labels"]))


def over(model: Any, rows: list[dict[str, Tensor]]) -> dict[str, float]:
    """The means over all tokens of a dataset."""
    return means_of(*(sums_over(model, collate([row])) for row in rows))


def near(found: dict[str, Any], expected: dict[str, float], prefix: str = "") -> None:
    for name in NAMES:
        assert type(found[prefix + name]) is float
        assert found[prefix + name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("how", ["", "accumulation", "compiled", "compiled, accumulation"])
def test_a_trainer_logs_means_over_the_tokens_since_its_last_log(how: str, tmp_path: Any) -> None:
    model, _ = test_transformers.model_and_batch("llama")
    own, data = copy.deepcopy(model), rows_of(model, 16)  # one epoch at most
    accumulated = 2 if "accumulation" in how else 1
    settings: dict[str, Any] = {"gradient_accumulation_steps": accumulated}
    if "compiled" in how:
        settings |= {"torch_compile": True, "torch_compile_backend": "eager"}
    patch_transformers(model, metrics=NAMES)
    trainer, batches = trainer_of(model, tmp_path, data, **settings)
    assert all(name not in model(**collate(data[:2])) for name in NAMES)  # not a Trainer's call
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2
    each = 2 * accumulated
    for i, entry in enumerate(logs):
        window = batches[i * each : (i + 1) * each]
        sums = [sums_over(own, batch) for batch in window]
        assert len({s["tokens"] for s in sums}) > 1, "else a mean of means would pass"
        near(entry, means_of(*sums))
    assert not any(name in trainer.state.log_history[-1] for name in NAMES)


class Seen(transformers.TrainerCallback):  # type: ignore[misc]
    """Records what a callback that reports is given."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.evaluated: list[dict[str, Any]] = []

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        self.logs.append(dict(logs))

    def on_evaluate(self, *_: Any, metrics: Any = None, **__: Any) -> None:
        self.evaluated.append(dict(metrics))


class Copying(transformers.Trainer):  # type: ignore[misc]
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs}, *args, **kwargs)


@pytest.mark.parametrize("count", [8, 10])
@pytest.mark.parametrize("eval_logits", [None, True])
def test_a_trainer_evaluates_over_all_tokens(
    count: int, eval_logits: bool | None, tmp_path: Any
) -> None:
    """The mean is over tokens, not over batches, which have unequal numbers of them."""
    model, _ = test_transformers.model_and_batch("llama")
    own, data = copy.deepcopy(model), rows_of(model, count)
    patch_transformers(model, metrics=NAMES, eval_logits=eval_logits)
    trainer, _ = trainer_of(model, tmp_path, data, eval_strategy="steps", eval_steps=2)
    trainer.add_callback(seen := Seen())
    expected = over(own, data)
    means = [means_of(sums_over(own, collate(data[i : i + 4]))) for i in range(0, count, 4)]
    assert sum(m["entropy"] for m in means) / len(means) != pytest.approx(expected["entropy"])
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(logged) == len(seen.evaluated) == 2
    for entry in (*logged, *seen.evaluated, *(e for e in seen.logs if "eval_loss" in e)):
        near(entry, expected, "eval_")
        assert "accuracy" not in entry, "those of training are not of it"
    for entry in (e for e in seen.logs if "loss" in e):
        assert set(NAMES) <= set(entry)
    json.dumps(trainer.state.log_history)
    near(trainer.evaluate(), expected, "eval_")
    near(trainer.evaluate(data[:5], metric_key_prefix="train"), over(own, data[:5]), "train_")
    several = trainer.evaluate({"a": data[:5], "b": data[5:]})
    near(several, over(own, data[:5]), "eval_a_")
    near(several, over(own, data[5:]), "eval_b_")
    if eval_logits:
        found = trainer.predict(data)
        near(found.metrics, expected, "test_")
        assert found.predictions.shape[-1] == 61, "the logits alone, not the metrics"


def test_a_log_that_is_copied_gives_them_too(tmp_path: Any) -> None:
    model, _ = test_transformers.model_and_batch("llama")
    own, data = copy.deepcopy(model), rows_of(model)
    patch_transformers(model, metrics=NAMES)
    made, _ = trainer_of(model, tmp_path, data)
    trainer = Copying(model, made.args, data_collator=collate, eval_dataset=data)
    near(trainer.evaluate(), over(own, data), "eval_")
    near(trainer.state.log_history[-1], over(own, data), "eval_")


def test_the_best_model_may_be_that_of_a_metric(tmp_path: Any) -> None:
    model, _ = test_transformers.model_and_batch("llama")
    data = rows_of(model)
    patch_transformers(model, metrics=NAMES)
    trainer, _ = trainer_of(
        model, tmp_path, data, eval_strategy="steps", eval_steps=2,
        metric_for_best_model="accuracy", save_strategy="best",
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_metric == trainer.state.log_history[-2]["eval_accuracy"] > 0


def test_calls_that_are_not_the_trainers_are_not_logged(tmp_path: Any) -> None:
    model, _ = test_transformers.model_and_batch("llama")
    own, data = copy.deepcopy(model), rows_of(model)
    patch_transformers(model, metrics=NAMES)

    class Calls(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            model(**collate(data[:1]))

    trainer, batches = trainer_of(model, tmp_path, data, {"callbacks": [Calls()]})
    trainer.evaluate()
    batches.clear()
    trainer.train()
    near(trainer.state.log_history[-2], means_of(*(sums_over(own, b) for b in batches[2:4])))
    model(**collate(data[:1]))
    near(trainer.evaluate(), over(own, data), "eval_")


def test_a_metric_of_no_token_is_not_logged(tmp_path: Any) -> None:
    model, _ = test_transformers.model_and_batch("llama")
    data = rows_of(model)
    for row in data:
        row["labels"] = torch.full_like(row["labels"], -100)
    patch_transformers(model, metrics=NAMES)
    trainer, _ = trainer_of(model, tmp_path, data)
    assert not any("accuracy" in name for name in trainer.evaluate())


def test_an_unpatched_model_is_not_logged(tmp_path: Any) -> None:
    model, _ = test_transformers.model_and_batch("llama")
    data = rows_of(model)
    trainer, _ = trainer_of(model, tmp_path, data)
    with patch_transformers(model, metrics=NAMES):
        assert "eval_accuracy" in trainer.evaluate()
        other = copy.deepcopy(model)
    assert "eval_accuracy" not in trainer.evaluate()
    again, _ = trainer_of(other, tmp_path, data)
    assert "eval_accuracy" in again.evaluate(), "a copy is logged by its own Trainer"


# compute_metrics.


def both_shapes(logits: Any, labels: Any) -> Any:
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


ARGMAX = {
    "method": lambda logits, labels: logits.argmax(-1),
    "function": lambda logits, labels: torch.argmax(logits, dim=-1),
    "last": lambda logits, labels: logits.float().argmax(2),
    "kept": lambda logits, labels: logits.detach().argmax(-1, keepdim=True)[..., 0],
    "sliced": lambda logits, labels: logits[:, :-1].cpu().argmax(-1),
    "tuples": both_shapes,
}


def predictions(given: Any) -> dict[str, float]:
    """A metric of all that compute_metrics is given, ignored positions too."""
    ids, labels = given.predictions, given.label_ids
    assert ids.ndim == labels.ndim == 2 and len(ids) == len(labels)
    weights = range(1, ids.size + 1)
    return {"ids": float((ids.reshape(-1) * weights).sum()), "labels": float(labels.sum())}


@pytest.mark.parametrize(
    "how, name, eval_logits",
    [
        *((how, "llama", None) for how in ARGMAX), ("method", "gemma2", None),
        ("method", "mixtral", None), ("function", "llama", False),
    ],
)  # fmt: skip
def test_compute_metrics_of_the_likeliest_tokens_needs_no_logits(
    how: str, name: str, eval_logits: bool | None, tmp_path: Any
) -> None:
    model, _ = test_transformers.model_and_batch(name)
    data = [{k: v[-3:] for k, v in row.items()} for row in rows_of(model)]  # equally long
    given = {"compute_metrics": predictions, "preprocess_logits_for_metrics": ARGMAX[how]}
    if name == "mixtral":
        model.config.output_router_logits = False
    expected = trainer_of(model, tmp_path, data, given)[0].evaluate()
    metrics = () if how == "method" else NAMES
    with patch_transformers(model, metrics=metrics, eval_logits=eval_logits) as patched:
        trainer, _ = trainer_of(model, tmp_path, data, given, eval_strategy="steps", eval_steps=2)
        trainer.train()
        found = trainer.evaluate()
        assert Patch(patched).calls == 4 + 3 * 3
        assert (trainer.predict(data).predictions < 61).all()
    for key in ("eval_ids", "eval_labels"):
        assert found[key] == expected[key]
    assert ("eval_rank" in found) == bool(metrics)


@pytest.mark.parametrize(
    "function",
    [
        lambda logits, labels: logits.softmax(-1),
        lambda logits, labels: logits.argmax(1),
        lambda logits, labels: logits.argmax(),
        lambda logits, labels: logits[..., :5].argmax(-1),
        lambda logits, labels: logits.max(-1).values,
        lambda logits, labels: logits,
    ],
)
def test_what_makes_more_of_the_logits_is_an_error_that_says_so(
    function: Any, tmp_path: Any
) -> None:
    model, _ = test_transformers.model_and_batch("llama")
    given = {"compute_metrics": lambda _: {}, "preprocess_logits_for_metrics": function}
    trainer, _ = trainer_of(model, tmp_path, rows_of(model), given)
    with patch_transformers(model), pytest.raises(NotImplementedError, match="eval_logits=True"):
        trainer.evaluate()


def test_without_a_function_the_error_names_one(tmp_path: Any) -> None:
    model, _ = test_transformers.model_and_batch("llama")
    trainer, _ = trainer_of(model, tmp_path, rows_of(model), {"compute_metrics": predictions})
    told = r"eval_logits=True .*preprocess_logits_for_metrics=lambda logits"
    with (
        patch_transformers(model, metrics=NAMES),
        pytest.raises(NotImplementedError, match=told),
    ):
        trainer.evaluate()


# Several processes.

RANKS = 2


def in_a_process(rank: int, folder: str, port: int, state: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip
    model = llama_of(state)
    data = rows_of(model)
    patch_transformers(model, metrics=NAMES)
    given = {"compute_metrics": words_of, "preprocess_logits_for_metrics": ARGMAX["method"]}
    trainer, batches = trainer_of(
        model, folder, data, given, Sampling, ddp_backend="gloo", per_device_eval_batch_size=3
    )
    trainer.train()
    made = {
        "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
        "batches": batches[:4],
        "evaluated": [trainer.evaluate(data[:n]) for n in (7, 10, 6)],
        "streamed": [trainer.evaluate(Stream(alike(data[:n]))) for n in (5, 7, 8)],
    }
    torch.save(made, pathlib.Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc]
    """A stream of rows, whose number a Trainer does not know beforehand."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def alike(rows: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Rows of one length, as a stream's must be."""
    batch = collate(rows)
    return [{name: values[i] for name, values in batch.items()} for i in range(len(rows))]


class Sampling(transformers.Trainer):  # type: ignore[misc]
    """Looks at samples in the middle of a step and of an evaluation, in its first process alone."""

    def _sample(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(input_ids=torch.zeros(1, 3, dtype=torch.int64))

    def compute_loss(self, *given: Any, **more: Any) -> Any:
        made = super().compute_loss(*given, **more)
        if self.model.training and self.is_world_process_zero():
            self._sample()
            self.model.train()
        return made

    def prediction_step(self, *given: Any, **more: Any) -> Any:
        if self.is_world_process_zero():
            self._sample()
        return super().prediction_step(*given, **more)


def test_what_a_trainer_samples_ends_no_sum(tmp_path: Any) -> None:
    model, _ = test_transformers.model_and_batch("llama")
    own, data = copy.deepcopy(model), rows_of(model)
    patch_transformers(model, metrics=NAMES)

    def metrics(_: Any) -> dict[str, float]:
        model.eval()
        return {"accuracy": -7.0}

    given = {"compute_metrics": metrics, "preprocess_logits_for_metrics": ARGMAX["method"]}
    trainer, batches = trainer_of(model, tmp_path, data, given, Sampling)
    trainer.train()
    near(trainer.state.log_history[0], means_of(*(sums_over(own, b) for b in batches[:2])))
    found = trainer.evaluate()
    assert found["eval_accuracy"] == -7, "the Trainer's own"
    near(found | {"eval_accuracy": over(own, data)["accuracy"]}, over(own, data), "eval_")


def test_a_teacher_in_the_trainer_is_not_logged(tmp_path: Any) -> None:
    model, _ = test_transformers.model_and_batch("llama")
    own, data = copy.deepcopy(model), rows_of(model)
    teacher = copy.deepcopy(model)
    with torch.no_grad():
        teacher.lm_head.weight.neg_()
    patch_transformers(model, metrics=NAMES)
    patch_transformers(teacher, metrics=NAMES)

    class Distils(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
            teacher.eval()
            with torch.no_grad():
                teacher(**inputs)
            return super().compute_loss(model, inputs, *given, **more)

        def training_step(self, *given: Any, **more: Any) -> Any:
            teacher.train()
            return super().training_step(*given, **more)

    trainer, batches = trainer_of(model, tmp_path, data, None, Distils)
    trainer.train()
    near(trainer.state.log_history[0], means_of(*(sums_over(own, b) for b in batches[:2])))
    near(trainer.evaluate(), over(own, data), "eval_")


def test_an_evaluation_that_failed_is_not_logged_later(tmp_path: Any) -> None:
    model, _ = test_transformers.model_and_batch("llama")
    patch_transformers(model, metrics=NAMES)
    fails = True

    def metrics(_: Any) -> dict[str, float]:
        if fails:
            raise RuntimeError("no metric")
        return {}

    given = {"compute_metrics": metrics, "preprocess_logits_for_metrics": ARGMAX["method"]}
    trainer, _ = trainer_of(model, tmp_path, rows_of(model), given)
    with pytest.raises(RuntimeError, match="no metric"):
        trainer.evaluate()
    fails = False
    trainer.train()
    assert not any("rank" in name for name in trainer.state.log_history[-1])


def test_nothing_is_kept_after_a_training(tmp_path: Any) -> None:
    model, batch = test_transformers.model_and_batch("llama")
    patch_transformers(model, metrics=NAMES)
    trainer, _ = trainer_of(model, tmp_path, rows_of(model))
    tally = trainer.model.__dict__["_logitless_patch"].tally
    for use in (trainer.train, trainer.evaluate):
        use()
        model(**batch)
        assert not tally.made and tally.last is None
    tally.watched = True
    model(**batch)
    copied = copy.deepcopy(tally)
    assert tally.made and not copied.made and not copied.watched and copied.names == tally.names


def test_the_items_of_a_replica_are_one_number() -> None:
    """For DataParallel the Trainer passes num_items_in_batch as [n, 1]; each replica gets a row."""
    model, batch = test_transformers.model_and_batch("llama")
    patch_transformers(model, metrics=NAMES)
    items = torch.tensor(13.0)
    losses = [model(**batch, num_items_in_batch=n).loss for n in (items, items.reshape(1, 1))]
    assert torch.equal(losses[0].flatten(), losses[1].flatten())


def llama_of(state: Any) -> Any:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, use_cache=False))
    model.load_state_dict(state)
    return model


def words_of(given: Any) -> dict[str, float]:
    """A metric of the predictions at labels, which does not depend on padding."""
    at, labels = given.predictions[:, :-1], given.label_ids[:, 1:]
    counts = labels != -100
    return {"share": float((at == labels)[counts].mean()), "sum": float(at[counts].sum())}


@pytest.mark.slow
def test_two_processes_log_and_evaluate_every_token_once(tmp_path: Any) -> None:
    """With 3 sequences at a time on each process, the sampler repeats some in the last batch."""
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, use_cache=False))
    data = rows_of(model)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    state = model.state_dict()
    workers = [
        context.Process(target=in_a_process, args=(rank, str(tmp_path), port, state))
        for rank in range(RANKS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
    for worker in workers:
        worker.kill()
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * RANKS
    found = [torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in range(RANKS)]
    for window in (0, 1):
        batches = [b for made in found for b in made["batches"][2 * window : 2 * window + 2]]
        expected = means_of(*(sums_over(model, batch) for batch in batches))
        for made in found:
            near(made["logs"][window], expected)
    for i, count in enumerate((7, 10, 6)):
        for made in found:
            evaluated = made["evaluated"][i]
            near(evaluated, over(model, data[:count]), "eval_")
            assert evaluated["eval_share"] == pytest.approx(evaluated["eval_accuracy"])
    for i, count in enumerate((5, 7, 8)):
        for made in found:
            near(made["streamed"][i], over(model, alike(data[:count])), "eval_")


# TRL's trainers.


def trl_logs(kind: str, folder: pathlib.Path) -> list[dict[str, Any]]:
    """What a trainer logs of two steps and an evaluation."""
    import datasets
    import trl

    import test_trl

    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    config = getattr(trl, f"{kind.upper()}Config")(
        output_dir=str(folder / "out"), use_cpu=True, bf16=False, seed=7, max_steps=2,
        logging_steps=1, per_device_train_batch_size=4, per_device_eval_batch_size=4,
        learning_rate=1e-3, save_strategy="no", report_to="none", gradient_checkpointing=False,
        disable_tqdm=True,
    )  # fmt: skip
    rows = datasets.Dataset.from_list([test_trl.ROWS[kind](i) for i in range(10)])
    trainer = getattr(trl, f"{kind.upper()}Trainer")(
        model=model, args=config, processing_class=test_trl.tokenizer(), train_dataset=rows,
        eval_dataset=rows,
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    return [e for e in trainer.state.log_history if "loss" in e or "eval_loss" in e]


# Metrics of TRL that need more than the labels' log-probabilities.
OF_TRL = {
    "sft": ("entropy", "mean_token_accuracy"),
    "dpo": ("entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected", "logps/chosen"),
    "kto": ("entropy", "logits/chosen", "logits/rejected", "logps/chosen"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_TRL)
def test_what_trl_logs_comes_from_here(kind: str, tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    pytest.importorskip("trl")
    test_transformers.model_and_batch("llama")[0].save_pretrained(tmp_path)
    expected = trl_logs(kind, tmp_path)
    wide: list[Any] = []
    with patch_trl() as patch:
        real = torch.nn.functional.linear
        monkeypatch.setattr(
            torch.nn.functional, "linear",
            lambda *a: wide.append(a[1].shape) or real(*a),
        )  # fmt: skip
        found = trl_logs(kind, tmp_path)
        monkeypatch.undo()
    assert wide and not any(shape[0] == 61 for shape in wide), "logits were made"
    assert patch.calls and len(found) == len(expected) == 3
    for a, e in zip(found, expected):
        prefix = "eval_" if "eval_loss" in e else ""
        for name in OF_TRL[kind]:
            assert a[prefix + name] == pytest.approx(e[prefix + name], rel=1e-5, abs=1e-6)
            assert e[prefix + name] != 0 or "accuracy" in name

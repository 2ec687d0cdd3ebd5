# SPDX-License-Identifier: Apache-2.0
"""The modules: the functions with their options kept, copies, pickles, hooks, main_grad."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import reference
from logitless.torch import (
    CrossEntropyLoss,
    LinearCrossEntropyHead,
    LinearCrossEntropyLoss,
    cross_entropy,
    linear_cross_entropy,
)
from reference import close
from test_linear import BF16, problem

OPTIONS: dict[str, Any] = {
    "reduction": "sum", "ignore_index": 3, "label_smoothing": 0.1, "z_loss": 0.01,
    "logit_scale": 0.5, "softcap": 4.0, "temperature": 1.5, "return_statistics": ("lse",),
}  # fmt: skip


def targets(device: str = "cpu") -> Any:
    x, w, b, t = problem((4, 6), 17, 8, device=device, bias=True)
    return x, w, b, t.where(t != -100, torch.full_like(t, 3))


def test_losses_pass_every_option_on(device: str) -> None:
    x, w, b, t = targets(device)
    classes = torch.rand(17, device=device)
    loss, s = LinearCrossEntropyLoss(classes, **OPTIONS, shift=True, memory="64MiB")(
        x, w, t, linear_bias=b
    )
    expected, es = linear_cross_entropy(
        x, w, t, linear_bias=b, weight=classes, shift=True, **OPTIONS
    )
    assert torch.equal(loss, expected) and torch.equal(s.lse, es.lse)
    logits = torch.nn.functional.linear(x, w, b)
    ours = CrossEntropyLoss(classes, **OPTIONS)(logits, t)
    assert torch.equal(ours[0], cross_entropy(logits, t, weight=classes, **OPTIONS)[0])
    assert CrossEntropyLoss(empty_mean="nan")(logits[:0], t[:0]).isnan()


def test_every_option_of_the_functions_is_a_modules() -> None:
    import inspect

    for function, module in (
        (cross_entropy, CrossEntropyLoss()),
        (linear_cross_entropy, LinearCrossEntropyLoss()),
    ):
        tensors = {"linear_bias", "token_weight", "normalizer"}
        names = {
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        }
        # A group belongs to a head's weight, and `options` may only be None.
        assert names - tensors - {"group", "options"} == set(module._options())


def test_head_is_the_lm_head(device: str) -> None:
    x, _, _, t = targets(device)
    linear = torch.nn.Linear(8, 17, device=device)
    head = LinearCrossEntropyHead.from_linear(linear, ignore_index=3)
    assert head.weight is linear.weight and head.bias is linear.bias
    assert torch.equal(head(x), linear(x))
    head(x, t).backward()
    logits = reference.logits_of(x, linear.weight, linear.bias)
    loss = reference.loss(logits, t, ignore_index=3)
    close(head(x, t), loss)
    parameters = (linear.weight, linear.bias)
    for p, e in zip(parameters, torch.autograd.grad(loss, parameters)):
        close(p.grad, e)  # type: ignore[arg-type]
    assert set(head.state_dict()) == {"weight", "bias"}


def test_heads_logits_have_its_scale_cap_and_temperature() -> None:
    x, *_ = targets()
    head = LinearCrossEntropyHead(8, 17, logit_scale=0.5, softcap=2.0, temperature=1.5)
    u = 0.5 * torch.nn.functional.linear(x, head.weight)
    torch.testing.assert_close(head(x), torch.tanh(u / 2) * 2 / 1.5)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_modules_copy_and_pickle(how: str) -> None:
    x, _, _, t = targets()
    head = LinearCrossEntropyHead(8, 17, bias=True, ignore_index=3, label_smoothing=0.2)
    head(x, t).backward()
    if how == "deepcopy":
        other = copy.deepcopy(head)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(head))
    else:
        file = io.BytesIO()
        torch.save(head, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert other.weight is not head.weight and torch.equal(other(x, t), head(x, t))
    pickle.loads(pickle.dumps(LinearCrossEntropyLoss(torch.rand(17))))


def test_one_statistic_may_be_named_by_a_text() -> None:
    x, w, _, t = problem((5,), 17, 8)
    head = LinearCrossEntropyHead(8, 17, return_statistics="lse")
    with torch.no_grad():
        head.weight.copy_(w)
    _, expected = linear_cross_entropy(x, w, t, return_statistics="lse")
    for _, statistics in (
        CrossEntropyLoss(return_statistics="lse")(x @ w.T, t),
        LinearCrossEntropyLoss(return_statistics="lse")(x, w, t), head(x, t),
    ):  # fmt: skip
        torch.testing.assert_close(statistics.lse, expected.lse)
        assert statistics.entropy is None


def test_a_tied_embedding_gets_both_gradients() -> None:
    embedding = torch.nn.Embedding(17, 8)
    head = LinearCrossEntropyHead(8, 17)
    head.weight = embedding.weight
    ids = torch.randint(0, 17, (3, 6))
    head(embedding(ids), ids).backward()
    exact = embedding.weight.detach().double().requires_grad_()
    hidden = torch.nn.functional.embedding(ids, exact)
    (expected,) = torch.autograd.grad(reference.loss(hidden @ exact.T, ids), exact)
    close(embedding.weight.grad, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_main_grad_says_it_was_added_to_when_it_was(reduction: str) -> None:
    head = LinearCrossEntropyHead(8, 17, grad_accumulation="main_grad", reduction=reduction)
    weight: Any = head.weight
    x, _, _, t = problem((9,), 17, 8)
    weight.grad_added_to_main_grad = False
    with torch.no_grad():
        head(x, t)
    loss = head(x, t).sum()
    assert weight.grad_added_to_main_grad is False
    for _ in range(2):
        weight.grad_added_to_main_grad = False
        loss.backward(retain_graph=True)
        assert weight.grad_added_to_main_grad is True


def test_main_grad_is_made_for_training_only() -> None:
    head = LinearCrossEntropyHead(8, 17, grad_accumulation="main_grad")
    weight: Any = head.weight
    x, _, _, t = problem((9,), 17, 8)
    with torch.inference_mode():
        head(x.detach(), t)
        with torch.enable_grad():
            head._main_grad()
    assert not weight.main_grad.is_inference()
    del weight.main_grad
    with torch.no_grad():
        head(x, t)
    assert not hasattr(weight, "main_grad")
    head(x, t).backward()
    assert weight.main_grad.abs().sum() > 0


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_main_grad_adds_up_in_f32(device: str, reduction: str, dtype: torch.dtype) -> None:
    head = LinearCrossEntropyHead(
        8, 17, bias=True, device=device, dtype=dtype, grad_accumulation="main_grad",
        reduction=reduction,
    )  # fmt: skip
    exact = torch.zeros(17, 8, dtype=torch.float64, device=device)
    before = torch.randn(17, 8, device=device)
    head.weight.main_grad = before.clone()  # type: ignore[attr-defined]
    for factor in (1.0, 0.5):
        x, _, _, t = problem((9,), 17, 8, dtype, device)
        loss = head(x, t).mean()
        (loss * factor).backward(retain_graph=True)
        (loss * factor).backward()  # a second backward accumulates
        w = head.weight.detach().double().requires_grad_()
        logits = x.double() @ w.T + head.bias.double()
        theirs = reference.loss(logits, t, reduction=reduction).mean()
        exact += 2 * factor * torch.autograd.grad(theirs, w)[0]
        assert x.grad is not None
    assert head.weight.grad is None and head.bias.grad is not None
    close(head.weight.main_grad - before, exact, dtype)  # type: ignore[attr-defined, operator]


def test_main_grad_makes_its_buffer_and_checks_it() -> None:
    head = LinearCrossEntropyHead(8, 17, grad_accumulation="main_grad")
    x, _, _, t = problem((9,), 17, 8)
    head.weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    head(x, t).backward()
    assert head.weight.main_grad.dtype is torch.float32  # type: ignore[union-attr]
    assert head.weight.grad_added_to_main_grad is True  # type: ignore[comparison-overlap]
    head.weight.main_grad = torch.zeros(17, 8, dtype=BF16)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="main_grad is bfloat16"):
        head(x, t)
    with pytest.raises(ValueError, match="grad_accumulation"):
        LinearCrossEntropyHead(8, 17, grad_accumulation="other")


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of one process."""
    from torch.distributed.tensor import init_device_mesh

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_ddp_sees_the_heads_gradients(mesh: Any) -> None:
    head = LinearCrossEntropyHead(8, 17)
    model = torch.nn.parallel.DistributedDataParallel(head)
    x, _, _, t = problem((9,), 17, 8)
    model(x, t).backward()
    assert head.weight.grad is not None and head.weight.grad.any()


def test_fsdp_gathers_the_head_and_shards_its_gradient(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    head = LinearCrossEntropyHead(8, 17)
    w = head.weight.detach().clone().requires_grad_()
    fully_shard(head, mesh=mesh)
    x, _, _, t = problem((9,), 17, 8)
    loss = head(x, t)
    loss.backward()
    expected = reference.loss(reference.logits_of(x, w), t)
    close(loss, expected)
    sharded: Any = head.weight.grad
    close(sharded.full_tensor(), torch.autograd.grad(expected, w)[0])


def test_fsdp_around_a_patched_model(mesh: Any) -> None:
    transformers = pytest.importorskip("transformers")
    from torch.distributed.fsdp import fully_shard

    from logitless.integrations import patch_transformers

    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 61, (2, 9))
    plain = model(input_ids=ids, labels=ids).loss
    (expected,) = torch.autograd.grad(plain, model.lm_head.weight)
    patch_transformers(model)
    fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    close(loss, plain.double())
    close(model.lm_head.weight.grad.full_tensor(), expected.double())


def test_a_sharded_weight_is_a_clear_error(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    x, w, _, t = problem((9,), 17, 8)
    for placement in (Shard(0), Replicate()):
        sharded = DTensor.from_local(w.detach(), mesh, [placement])
        with pytest.raises(NotImplementedError, match="LinearCrossEntropyHead"):
            linear_cross_entropy(x, sharded, t)
    with pytest.raises(ValueError, match="FSDP"):
        linear_cross_entropy(x, w.detach().reshape(-1), t)


def test_a_target_that_tensor_parallelism_dropped_is_missed(mesh: Any) -> None:
    """torch's ColwiseParallel passes on only the first positional argument, so the head would
    return logits instead of the loss."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    head = LinearCrossEntropyHead(8, 17)
    x, _, _, t = problem((9,), 17, 8)
    expected = head(x).detach()
    parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))
    with pytest.raises(NotImplementedError, match=r"target is None.*ColwiseParallel"):
        head(x, t)
    with pytest.raises(NotImplementedError, match="sharded"):
        head(x, target=t)  # ColwiseParallel passes keywords on
    with torch.no_grad():
        torch.testing.assert_close(head(x), expected)  # without a target the head serves generation
    torch.testing.assert_close(head.eval()(x), expected)


def test_a_heads_checkpoint_is_a_linears() -> None:
    classes = torch.rand(11)
    head = LinearCrossEntropyHead(4, 11, weight=classes.clone())
    linear = torch.nn.Linear(4, 11, False)
    assert set(head.state_dict()) == {"weight"}
    head.load_state_dict(linear.state_dict())
    linear.load_state_dict(head.state_dict())
    assert torch.equal(head.loss.weight, classes)
    model = torch.nn.ModuleDict({"lm_head": head})
    old = {**model.state_dict(), "lm_head.loss.weight": classes + 1}  # from an older version
    model.load_state_dict(old)
    assert torch.equal(head.loss.weight, classes + 1) and "lm_head.loss.weight" in old
    old["lm_head.loss.weight"].zero_()
    assert torch.equal(head.loss.weight, classes + 1)
    with pytest.raises(RuntimeError, match=r"loss.weight has shape \(12,\); allowed: \(11,\)"):
        model.load_state_dict({**old, "lm_head.loss.weight": torch.ones(12)})
    with pytest.raises(RuntimeError, match="Unexpected"):  # the head would ignore it
        LinearCrossEntropyHead(4, 11).load_state_dict(
            {**linear.state_dict(), "loss.weight": classes}
        )
    copied = copy.deepcopy(head)
    assert torch.equal(copied.loss.weight, head.loss.weight)
    # torch's own losses of given logits save class weights in checkpoints
    for mine, theirs in ((CrossEntropyLoss, torch.nn.CrossEntropyLoss),):
        mine(classes).load_state_dict(theirs(classes).state_dict())
        theirs(classes).load_state_dict(mine(classes).state_dict())


@pytest.mark.parametrize("kind", ["head", "linear", "logits"])
def test_class_weights_and_temperatures_stay_what_they_are(kind: str) -> None:
    """Both stay in f32, and keep their values in to_empty()."""
    classes, degrees = torch.rand(11), torch.rand(6) + 0.5
    options: dict[str, Any] = {"weight": classes, "temperature": degrees}

    def made(**more: Any) -> Any:
        if kind == "head":
            return LinearCrossEntropyHead(4, 11, **options | more)
        loss = LinearCrossEntropyLoss if kind == "linear" else CrossEntropyLoss
        return loss(**options)

    def loss_of(module: Any) -> Any:
        return module.loss if kind == "head" else module

    for change in ("half", "bfloat16", "double", "to_empty", "share_memory"):
        module = made(device="meta") if kind == "head" and change == "to_empty" else made()
        module.to_empty(device="cpu") if change == "to_empty" else getattr(module, change)()
        assert torch.equal(loss_of(module).weight, classes), change
        assert torch.equal(loss_of(module).temperature, degrees), change


def test_what_is_made_on_meta_is_nan_until_it_is_written() -> None:
    with torch.device("meta"):
        head = LinearCrossEntropyHead(8, 19, weight=torch.ones(19), temperature=torch.ones(6))
    head.to_empty(device="cpu")
    torch.nn.init.ones_(head.weight)
    x, t = torch.ones(6, 8), torch.arange(6)
    assert head(x, t).isnan()
    head.loss.temperature.fill_(1.0)
    assert head(x, t).isnan()
    head.loss.weight.fill_(1.0)
    assert head(x, t).isfinite()
    with torch.device("meta"):
        head = LinearCrossEntropyHead(8, 19, weight=torch.ones(19))
    head.load_state_dict({"weight": torch.ones(19, 8), "loss.weight": torch.ones(19)}, assign=True)
    assert head(x, t).isfinite()


def test_torchs_name_of_a_module_that_holds_the_head() -> None:
    with pytest.raises(TypeError, match=r"^weight is 16; allowed: .*LinearCrossEntropyHead\("):
        LinearCrossEntropyLoss(16, 31)  # type: ignore[arg-type]
    for kind in (LinearCrossEntropyLoss, CrossEntropyLoss):
        with pytest.raises(TypeError, match=r"^weight is a list; allowed: a tensor"):
            kind([1.0])  # type: ignore[arg-type]


def test_a_linear_without_a_weight_that_is_a_tensor() -> None:
    linear = torch.nn.Linear(4, 11)
    linear.weight = None  # type: ignore[assignment]
    linear.__dict__["weight"] = lambda: torch.ones(11, 4)
    for other in (linear, torch.nn.ReLU()):
        with pytest.raises(TypeError, match=r"no tensor; allowed: a torch.nn.Linear"):
            LinearCrossEntropyHead.from_linear(other)  # type: ignore[arg-type]

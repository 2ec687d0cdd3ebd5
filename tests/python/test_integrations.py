# SPDX-License-Identifier: Apache-2.0
"""Functions with other libraries' signatures, such as Liger's and Cut Cross Entropy's."""

from __future__ import annotations

import enum
import inspect
from typing import Any

import pytest
import torch

import reference
from logitless.integrations import (
    FusedLinearCrossEntropyFunction,
    LigerFusedLinearCrossEntropyLoss,
    cce,
    prime_rl,
    unsloth,
    verl,
)
from reference import close
from test_linear import problem


def test_liger_module_takes_the_weight_first() -> None:
    x, w, b, t = problem((12,), 17, 8, bias=True)
    assert b is not None
    classes = torch.rand(17)
    module = LigerFusedLinearCrossEntropyLoss(
        ce_weight=classes, ignore_index=3, label_smoothing=0.1, reduction="sum", softcap=9.0
    )
    t = t.where(t != -100, torch.full_like(t, 3))
    loss = module(w, x, t, b)
    expected = reference.loss(
        reference.logits_of(x, w, b), t, weight=classes, ignore_index=3, label_smoothing=0.1,
        reduction="sum", softcap=9.0,
    )  # fmt: skip
    close(loss, expected)
    for a, e in zip(torch.autograd.grad(loss, (x, w, b)), torch.autograd.grad(expected, (x, w, b))):
        close(a, e)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_liger_function_and_its_statistics(reduction: str) -> None:
    x, w, b, t = problem((12,), 17, 8, bias=True)
    best = reference.logits_of(x, w, b).argmax(-1)
    # so that some tokens are predicted correctly
    t = t.where((torch.arange(12) % 2 == 0) | (t == -100), best)
    output = FusedLinearCrossEntropyFunction.apply(
        x, w, t, b, None, -100, 1e-2, 0.0, reduction, None, True, torch.float32, False, True, True
    )
    logits = reference.logits_of(x, w, b)
    s = reference.statistics(logits, t, {})
    close(output.loss, reference.loss(logits, t, reduction=reduction, z_loss=1e-2))
    z = 1e-2 * s["lse"] ** 2
    hits = (s["argmax"] == t).double()
    count = s["valid"].sum()
    assert output.z_loss is not None and output.token_accuracy is not None
    if reduction == "none":
        close(output.z_loss, z)
        close(output.token_accuracy, hits)
    else:
        close(output.z_loss, z.sum() if reduction == "sum" else z.sum() / count)
        close(output.token_accuracy, hits.sum() / count)
    assert torch.equal(output.predicted_tokens, s["argmax"])  # type: ignore[arg-type]


def test_ligers_choice_of_kernels_and_chunks() -> None:
    """Newer Ligers pass the last three by position: they choose kernels and change no result."""
    x, w, _, t = problem((6,), 50, 16)
    more = (None, None, -100, 0.0, 0.0, "mean", None, False, None, False, False, False)
    apply: Any = FusedLinearCrossEntropyFunction.apply
    assert torch.equal(apply(x, w, t, *more, None, None, 1).loss, apply(x, w, t).loss)
    with pytest.raises(NotImplementedError, match=r"^ce_impl is 'cutile'"):
        apply(x, w, t, *more, "cutile", None, 1)


def test_liger_token_scaling() -> None:
    x, w, _, t = problem((12,), 17, 8)
    loss = LigerFusedLinearCrossEntropyLoss(use_token_scaling=True)(w, x, t)
    logits = reference.logits_of(x, w)
    p = reference.statistics(logits, t, {})["logprob"].exp().detach()
    expected = reference.loss(logits, t, token_weight=p)
    close(loss, expected)
    close(torch.autograd.grad(loss, w)[0], torch.autograd.grad(expected, w)[0])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("scaling", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_ligers_z_loss_is_the_z_part_of_the_loss(
    reduction: str, scaling: bool, weighted: bool
) -> None:
    """As in Liger's kernel, token weights scale the z-loss, class weights do not."""
    x, w, b, t = problem((12,), 17, 8, bias=True)
    assert b is not None
    classes = torch.rand(17) + 0.5 if weighted else None
    logits = reference.logits_of(x, w, b)
    s = reference.statistics(logits, t, {})
    p = s["logprob"].exp().detach() if scaling else torch.ones_like(s["lse"])
    squares = 0.1 * p * s["lse"] ** 2
    z = {"none": squares, "sum": squares.sum(), "mean": squares.sum() / s["valid"].sum()}[reduction]
    cross_entropy = reference.loss(
        logits, t, weight=classes, token_weight=p, reduction=reduction, label_smoothing=0.1
    )
    options: dict[str, Any] = {
        "ce_weight": classes, "lse_square_scale": 0.1, "label_smoothing": 0.1,
        "reduction": reduction, "use_token_scaling": scaling,
    }  # fmt: skip
    output = LigerFusedLinearCrossEntropyLoss(**options, return_z_loss=True)(w, x, t, b)
    alone = LigerFusedLinearCrossEntropyLoss(**options)(w, x, t, b)
    close(output.z_loss, z)
    expected = torch.autograd.grad((cross_entropy + z).sum(), (x, w, b))
    for loss in (output.loss, alone):
        close(loss, cross_entropy + z)
        for a, e in zip(torch.autograd.grad(loss.sum(), (x, w, b)), expected):
            close(a, e)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shift", [0, True, 2])
def test_cce(reduction: str, shift: Any) -> None:
    x, w, b, t = problem((3, 7), 17, 8, bias=True)
    loss, lse = cce.linear_cross_entropy(
        x, w, t, b, softcap=5.0, reduction=reduction, shift=shift, return_lse=True
    )
    count = int(shift)
    logits = reference.logits_of(x, w, b)[:, : 7 - count]
    expected = reference.loss(logits, t[:, count:], softcap=5.0, reduction=reduction)
    close(loss, expected)
    close(lse, reference.statistics(logits, t[:, count:], {"softcap": 5.0})["lse"])
    close(torch.autograd.grad(loss.sum(), w)[0], torch.autograd.grad(expected.sum(), w)[0])
    with pytest.raises(ValueError, match="shift"):
        cce.linear_cross_entropy(x, w, t, shift=7)


class Impl(enum.IntEnum):
    """As Cut Cross Entropy's enumeration of its implementations."""

    CCE = enum.auto()
    TORCH_COMPILE = enum.auto()
    CCE_KAHAN_FULL_C = enum.auto()


@pytest.mark.parametrize(
    "impl",
    [
        "cce", "cce_exact", "CCE_EXACT", "cce_kahan", "cce_kahan_full", "cce_kahan_full_c",
        "cce_kahan_full_e", "cce_kahan_full_c_full_e", Impl.CCE, Impl.CCE_KAHAN_FULL_C,
    ],
    ids=str,
)  # fmt: skip
def test_cces_presets(impl: Any) -> None:
    """Whichever preset is named, the result is exact."""
    x, w, b, t = problem((3, 7), 17, 8, bias=True)
    loss = cce.linear_cross_entropy(x, w, t, b, shift=1, impl=impl)
    expected = reference.loss(reference.logits_of(x, w, b)[:, :-1], t[:, 1:])
    close(loss, expected)
    for a, e in zip(torch.autograd.grad(loss, (x, w, b)), torch.autograd.grad(expected, (x, w, b))):
        close(a, e)


@pytest.mark.parametrize("impl", ["cce_fast", "torch_compile", Impl.TORCH_COMPILE, "", None, 3])
def test_other_implementations_of_cce_are_refused_with_the_list(impl: Any) -> None:
    x, w, _, t = problem((6,), 17, 8)
    with pytest.raises(NotImplementedError, match=r"^impl is .*; allowed: 'cce', 'cce_exact', .*"):
        cce.linear_cross_entropy(x, w, t, impl=impl)


def test_every_parameter_of_cce() -> None:
    """Parameters that only choose Cut Cross Entropy's kernels do not change the loss."""
    x, w, b, t = problem((6,), 17, 8, bias=True)
    given: dict[str, Any] = {
        "filter_eps": None, "accum_e_fp32": True, "accum_c_fp32": True, "filter_e_grad": False,
        "filter_c_grad": False, "impl": "cce_kahan_full_c", "vocab_parallel_options": None,
    }  # fmt: skip
    rest = {"e", "c", "targets", "bias", "ignore_index", "softcap", "reduction", "shift"}
    names = set(inspect.signature(cce.linear_cross_entropy).parameters)
    assert names == {*given, *rest, "return_lse", "memory"}
    plain = cce.linear_cross_entropy(x, w, t, b, -100, 9.0, "sum", 0)
    close(cce.linear_cross_entropy(x, w, t, b, -100, 9.0, "sum", 0, **given), plain.double())


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_verl(reduction: str) -> None:
    x, w, _, t = problem((3, 7), 17, 8, ignored=0)
    logprobs, entropy = verl.linear_cross_entropy(x, w, t, 0.7, reduction)
    s = reference.statistics(reference.logits_of(x, w), t, {"temperature": 0.7})
    expected = s["logprob"].reshape(-1)
    expected = {"none": expected, "sum": expected.sum(), "mean": expected.mean()}[reduction]
    close(logprobs, expected)
    close(entropy, s["entropy"].reshape(-1))
    ours, theirs = logprobs.sum() + entropy.sum(), expected.sum() + s["entropy"].sum()
    for a, e in zip(torch.autograd.grad(ours, (x, w)), torch.autograd.grad(theirs, (x, w))):
        close(a, e)


def test_verls_function_and_module() -> None:
    x, w, _, t = problem((3, 7), 17, 8, ignored=0)
    s = reference.statistics(reference.logits_of(x, w), t, {"temperature": 0.7})
    flat = verl.LinearCrossEntropy.apply(x, w, t, 0.7, "none", None)
    shaped = verl.FusedLinearForPPO(chunk_size=4)(x, w, t.int(), temperature=0.7)
    theirs = torch.autograd.grad(s["logprob"].sum() + s["entropy"].sum(), (x, w))
    for logprobs, entropy in (flat, shaped):
        close(logprobs.reshape(3, 7), s["logprob"])
        close(entropy.reshape(3, 7), s["entropy"])
        for a, e in zip(torch.autograd.grad(logprobs.sum() + entropy.sum(), (x, w)), theirs):
            close(a, e)
    assert shaped[0].shape == shaped[1].shape == (3, 7)
    with pytest.raises(ValueError, match=r"^vocab_weights"):
        verl.FusedLinearForPPO()(x, w[0], t)


@pytest.mark.parametrize("temperatures", [(0.7,), (0.5, 1.0, 1.3)], ids=str)
def test_prime_rl(temperatures: tuple[float, ...]) -> None:
    x, w, _, t = problem((3, 7), 17, 8)
    head = prime_rl.FusedOutputLinear(8, 17, chunk_size=4)
    head.weight = torch.nn.Parameter(w.detach())
    temperature = torch.tensor(temperatures)[torch.arange(21) % len(temperatures)].reshape(3, 7)
    logits = reference.logits_of(x, w) / temperature.double()[..., None]
    s = reference.statistics(logits, t, {})
    output = head(x, labels=t, temperature=temperature)
    close(output["logprobs"], s["logprob"])
    close(output["entropy"], s["entropy"])
    upstream = torch.randn(2, 3, 7)
    ours = torch.autograd.grad(
        (output["logprobs"], output["entropy"]), (x, head.weight), upstream.unbind()
    )
    theirs = torch.autograd.grad((s["logprob"], s["entropy"]), (x, w), upstream.double().unbind())
    for a, e in zip(ours, theirs):
        close(a, e)


def test_prime_rl_without_tokens_or_labels() -> None:
    head = prime_rl.FusedOutputLinear(8, 17, 4)
    none = torch.zeros(1, 0)
    output = head(torch.zeros(1, 0, 8), none.long(), none)
    assert output["logprobs"].shape == output["entropy"].shape == (1, 0)
    with pytest.raises(ValueError, match="labels or temperature is None"):
        head(torch.zeros(1, 2, 8), torch.zeros(1, 2).long())
    with pytest.raises(ValueError, match="temperature has shape"):
        head(torch.zeros(1, 2, 8), torch.zeros(1, 2).long(), torch.ones(1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logit_scale_multiply": 0.3, "temperature": 0.7},
        {"logit_scale_divide": 3.0, "logit_softcapping": 2.0, "temperature": 1.3, "chunks": 2},
    ],
    ids=str,
)
def test_unsloth(options: dict[str, Any]) -> None:
    x, w, _, t = problem((3, 7), 17, 8, ignored=0)
    scale = options.get("logit_scale_multiply", 1.0) / options.get("logit_scale_divide", 1.0)
    s = reference.statistics(
        reference.logits_of(x, w), t,
        {"logit_scale": scale, "softcap": options.get("logit_softcapping", 0.0),
         "temperature": options.get("temperature", 1.0)},
    )  # fmt: skip
    actual = unsloth.chunked_hidden_states_selective_log_softmax(x, w, t, **options)
    close(actual, s["logprob"])
    upstream = torch.randn(3, 7)
    theirs = torch.autograd.grad(s["logprob"], (x, w), upstream.double())
    for a, e in zip(torch.autograd.grad(actual, (x, w), upstream), theirs):
        close(a, e)
    # the first argument is logits, not hidden states
    with pytest.raises(ValueError, match=r"^lm_head has shape"):
        unsloth.chunked_hidden_states_selective_log_softmax(x @ w.T, w, t)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, t: LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.bfloat16),
        lambda x, w, t: cce.linear_cross_entropy(x, w, t, filter_eps="high"),
        lambda x, w, t: cce.linear_cross_entropy(x, w, t, filter_eps=1e-3),
        lambda x, w, t: cce.linear_cross_entropy(x, w, t, impl="torch_compile"),
        lambda x, w, t: cce.linear_cross_entropy(x, w, t, vocab_parallel_options=object()),
    ],
)
def test_what_has_no_counterpart_raises(call: Any) -> None:
    x, w, _, t = problem((12,), 17, 8)
    with pytest.raises(NotImplementedError, match="no counterpart here; allowed"):
        call(x, w, t)


def test_unknown_reductions_raise() -> None:
    x, w, _, t = problem((12,), 17, 8)
    for reduction in ("batch", 3):
        with pytest.raises(ValueError, match=rf"^reduction is {reduction!r}; allowed: 'none', 'su"):
            verl.linear_cross_entropy(x, w, t, reduction=reduction)  # type: ignore[arg-type]


def test_verls_errors_are_about_its_arguments() -> None:
    x, w, _, t = problem((3, 7), 17, 8, ignored=0)
    wrong = t.clone()
    wrong[1, 2] = 17
    at = r"^labels\[1, 2\] \(flat: labels\[9\]\) is 17; allowed: 0 to 16"
    with pytest.raises(ValueError, match=at):
        verl.linear_cross_entropy(x, w, wrong)
    at = r"^temperature has shape \(3,\); allowed: \(3, 7\) as labels, \(21,\), or what"
    with pytest.raises(ValueError, match=at):
        verl.linear_cross_entropy(x, w, t, torch.ones(3))
    with pytest.raises(ValueError, match=r"^hidden has shape \(\); allowed: \[\.\.\., D\]"):
        verl.linear_cross_entropy(torch.ones(()), w, t)
    with pytest.raises(TypeError, match=r"^labels is a list; allowed: a tensor"):
        verl.linear_cross_entropy(x, w, t.tolist())

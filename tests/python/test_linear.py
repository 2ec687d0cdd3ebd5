# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy and linear_logprob: values and gradients against f64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import reference
from logitless.torch import (
    LinearCrossEntropyHead,
    LinearCrossEntropyLoss,
    cross_entropy,
    linear_cross_entropy,
    linear_logprob,
    workspace_size,
)
from reference import close

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
STATISTICS = ("lse", "target_logit", "logprob", "entropy", "argmax")


def problem(
    shape: tuple[int, ...], vocab: int, hidden: int, dtype: torch.dtype = F32, device: str = "cpu",
    bias: bool = False, ignored: float = 0.2,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Input, weight, bias (leaves) and a target of which some are ignored."""
    x = torch.randn(*shape, hidden, device=device).to(dtype).requires_grad_()
    w = (torch.randn(vocab, hidden, device=device) / hidden**0.5).to(dtype).requires_grad_()
    b = torch.randn(vocab, device=device).to(dtype).requires_grad_() if bias else None
    t = torch.randint(0, vocab, shape, device=device)
    t = t.where(torch.rand(shape, device=device) >= ignored, torch.full_like(t, -100))
    return x, w, b, t


def check(
    x: Tensor, w: Tensor, b: Tensor | None, t: Tensor, dtype: torch.dtype = F32, **options: Any
) -> None:
    """Loss and gradients of linear_cross_entropy against the reference."""
    leaves = [v for v in (x, w, b) if v is not None]
    actual = linear_cross_entropy(x, w, t, linear_bias=b, **options)
    expected = reference.loss(reference.logits_of(x, w, b), t, **options)
    close(actual, expected)
    assert actual.dtype is F32
    upstream = torch.randn(actual.shape, device=x.device)
    grads = torch.autograd.grad(actual, leaves, upstream)
    for ours, theirs in zip(grads, torch.autograd.grad(expected, leaves, upstream.double())):
        assert ours.dtype is dtype
        close(ours, theirs, dtype)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "logit_scale": {"logit_scale": 0.3},
    "softcap": {"softcap": 5.0},
    "temperature": {"temperature": 1.7},
    "ignore_index": {"ignore_index": 3},
    "normalizer": {"normalizer": 7.0},
    "all": {
        "label_smoothing": 0.2, "z_loss": 1e-3, "logit_scale": 0.5, "softcap": 8.0,
        "temperature": 0.7,
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_are_those_of_f64(
    device: str, name: str, reduction: str, dtype: torch.dtype
) -> None:
    options = dict(OPTIONS[name], reduction=reduction)
    if reduction != "mean":
        options.pop("normalizer", None)
    x, w, b, t = problem((3, 11), 53, 24, dtype, device, bias=True)
    t = t.where(t != -100, torch.full_like(t, options.get("ignore_index", -100)))
    check(x, w, b, t, dtype, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_and_token_weights(device: str, reduction: str) -> None:
    x, w, b, t = problem((3, 11), 53, 24, device=device)
    check(
        x, w, b, t, reduction=reduction, weight=torch.rand(53, device=device),
        token_weight=torch.rand(3, 11, device=device), label_smoothing=0.1,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [float, "f32", "i64", "f64"])
def test_a_normalizer_divides_the_sum(device: str, kind: Any) -> None:
    x, w, _, t = problem((9,), 20, 8, device=device)
    dtypes = {"f32": F32, "i64": torch.int64, "f64": torch.float64}
    value = 5.0 if kind is float else torch.tensor(5, dtype=dtypes[kind], device=device)
    close(
        linear_cross_entropy(x, w, t, normalizer=value),
        reference.loss(reference.logits_of(x, w), t, reduction="sum") / 5,
    )


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.float32, np.float64])
def test_a_normalizer_may_be_numpys_number(device: str, kind: Any) -> None:
    """As a trainer's count of tokens may be."""
    x, w, _, t = problem((9,), 37, 16, device=device)
    same = linear_cross_entropy(x, w, t, normalizer=7)
    assert torch.equal(linear_cross_entropy(x, w, t, normalizer=kind(7)), same)


def test_a_normalizer_of_zero_gives_zero(device: str) -> None:
    x, w, _, t = problem((9,), 20, 8, device=device)
    loss = linear_cross_entropy(x, w, t, normalizer=0)
    loss.backward()
    assert loss.item() == 0 and not x.grad.any() and not w.grad.any()  # type: ignore[union-attr]


def test_all_tokens_ignored(device: str) -> None:
    x, w, _, t = problem((4,), 20, 8, device=device, ignored=1.1)
    loss = linear_cross_entropy(x, w, t)
    loss.backward()
    assert loss.item() == 0 and not x.grad.any() and not w.grad.any()  # type: ignore[union-attr]
    assert linear_cross_entropy(x, w, t, empty_mean="nan").isnan()


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_no_token_at_all(device: str, shape: tuple[int, ...]) -> None:
    x, w, _, t = problem(shape, 20, 8, device=device)
    loss = linear_cross_entropy(x, w, t)
    loss.backward()
    assert loss.item() == 0 and x.grad is not None and x.grad.shape == x.shape
    assert w.grad is not None and not w.grad.any()
    assert linear_cross_entropy(x, w, t, reduction="none").shape == shape


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (2, 3, 4), (1, 1, 1, 2)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_any_leading_shape(device: str, shape: tuple[int, ...], reduction: str) -> None:
    check(*problem(shape, 17, 5, device=device, ignored=0), reduction=reduction)


@pytest.mark.parametrize("shift", [1, 2, 5])
def test_shift_moves_the_targets(device: str, shift: int) -> None:
    x, w, _, t = problem((3, 6), 17, 5, device=device)
    moved = torch.full_like(t, -100)
    moved[:, :-shift] = t[:, shift:]
    for reduction in ("mean", "none"):
        a = linear_cross_entropy(x, w, t, shift=shift, reduction=reduction)
        assert torch.equal(a, linear_cross_entropy(x, w, moved, reduction=reduction))
    if shift == 1:
        close(linear_cross_entropy(x, w, t, shift=True), a.double().sum() / (moved != -100).sum())


@pytest.mark.parametrize("shift", [1, 2, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_shift_moves_what_belongs_to_a_label(device: str, shift: int, reduction: str) -> None:
    """Token weights and temperatures move with their labels, class weights do not."""
    x, w, _, t = problem((3, 6), 17, 5, device=device, ignored=0)
    given: dict[str, Any] = {
        "token_weight": torch.rand(3, 6, device=device), "temperature": torch.rand(3, 6) + 0.5,
    }  # fmt: skip
    given["temperature"] = given["temperature"].to(device)
    options: dict[str, Any] = {"reduction": reduction, "weight": torch.rand(17, device=device)}
    options |= {"label_smoothing": 0.1, "z_loss": 1e-2}
    for names in (["token_weight"], ["temperature"], ["token_weight", "temperature"]):
        own = {name: given[name] for name in names}
        found = linear_cross_entropy(x, w, t, shift=shift, **own, **options)
        upstream = torch.rand(3, 6, device=device) if reduction == "none" else torch.tensor(1.5)
        grads = torch.autograd.grad(found, (x, w), upstream.to(device))
        moved = {name: value[:, shift:] for name, value in own.items()}
        exact = linear_cross_entropy(x[:, :-shift], w, t[:, shift:], **moved, **options)
        part = upstream[:, :-shift] if reduction == "none" else upstream
        expected = torch.autograd.grad(exact, (x, w), part.to(device))
        found = found[:, :-shift] if reduction == "none" else found
        for ours, theirs in zip((found, *grads), (exact, *expected), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_shift_does_not_copy_the_hidden_states(launched: list[int]) -> None:
    x, w, _, t = problem((3, 6), 17, 5)
    seen = []
    real = torch.Tensor.reshape
    try:
        torch.Tensor.reshape = lambda s, *a: seen.append((s, real(s, *a))) or seen[-1][1]  # type: ignore
        linear_cross_entropy(x, w, t, shift=True)
    finally:
        torch.Tensor.reshape = real  # type: ignore[method-assign]
    rows = [after for before, after in seen if before is x]
    assert len(rows) == 1 and rows[0].data_ptr() == x.data_ptr() and len(launched) == 1


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_statistics(device: str, dtype: torch.dtype) -> None:
    options = {"softcap": 9.0, "temperature": 0.8, "logit_scale": 0.6}
    x, w, b, t = problem((3, 7), 31, 12, dtype, device, bias=True)
    _, s = linear_cross_entropy(x, w, t, linear_bias=b, return_statistics=STATISTICS, **options)
    expected = reference.statistics(reference.logits_of(x, w, b), t, options)
    for name in STATISTICS:
        close(getattr(s, name), expected[name])
        assert getattr(s, name).shape == t.shape
    assert s.argmax.dtype is torch.int64


def test_only_the_statistics_asked_for() -> None:
    x, w, _, t = problem((7,), 31, 12)
    _, s = linear_cross_entropy(x, w, t, return_statistics=("logprob", "argmax"))
    assert s.logprob is not None and s.argmax is not None
    assert s.lse is None and s.target_logit is None and s.entropy is None


@pytest.mark.parametrize("names", [(n,) for n in STATISTICS[:4]] + [STATISTICS[:4]], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_statistics_are_differentiable(device: str, names: tuple[str, ...], reduction: str) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "reduction": reduction}
    x, w, b, t = problem((3, 7), 31, 12, device=device, bias=True)
    assert b is not None
    loss, s = linear_cross_entropy(x, w, t, linear_bias=b, return_statistics=names, **options)
    logits = reference.logits_of(x, w, b)
    stats = reference.statistics(logits, t, options)
    for with_loss in (True, False):
        ours = loss.sum() * 0.5 if with_loss else torch.zeros((), device=device)
        theirs = reference.loss(logits, t, **options).sum() * 0.5 if with_loss else 0.0
        for name in names:
            factor = torch.randn(t.shape, device=device)
            ours = ours + (getattr(s, name) * factor).sum()
            theirs = theirs + (stats[name] * factor).sum()
        a = torch.autograd.grad(ours, (x, w, b), retain_graph=True)
        e = torch.autograd.grad(theirs, (x, w, b), retain_graph=True)  # type: ignore[arg-type]
        for left, right in zip(a, e):
            close(left, right)


@pytest.mark.parametrize("entropy", [False, True])
def test_logprob_and_entropy(device: str, entropy: bool) -> None:
    x, w, b, t = problem((3, 7), 31, 12, device=device, bias=True)
    assert b is not None
    result = linear_logprob(x, w, t, linear_bias=b, temperature=1.3, entropy=entropy)
    logprob, h = result if entropy else (result, None)
    s = reference.statistics(reference.logits_of(x, w, b), t, {"temperature": 1.3})
    close(logprob, s["logprob"])
    ours, theirs = (logprob * logprob.detach()).sum(), (s["logprob"] * s["logprob"].detach()).sum()
    if entropy:
        close(h, s["entropy"])
        ours, theirs = ours + h.sum(), theirs + s["entropy"].sum()
    grads = torch.autograd.grad(ours, (x, w, b))
    for a, e in zip(grads, torch.autograd.grad(theirs, (x, w, b))):
        close(a, e)


def test_logprob_keeps_its_digits_under_a_large_offset(device: str) -> None:
    x, w, b, t = problem((8,), 31, 12, device=device, bias=True, ignored=0)
    assert b is not None
    with torch.no_grad():
        b += 8192.0
        expected = reference.statistics(reference.logits_of(x, w, b), t, {})["logprob"]
        _, s = linear_cross_entropy(x, w, t, linear_bias=b, return_statistics=("logprob",))
    assert (s.logprob - expected).abs().max() < 4e-3  # logits near 8192 are rounded by as much
    plain = linear_logprob(x, w, t, linear_bias=b)
    assert (plain - s.logprob).abs().max() < 1e-5  # the lse adds no rounding of its own


@given(
    tokens=st.integers(1, 33), vocab=st.integers(1, 130), hidden=st.integers(1, 40),
    reduction=st.sampled_from(["mean", "sum", "none"]), smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    softcap=st.sampled_from([0.0, 3.0]), scale=st.sampled_from([1.0, -0.5]), bias=st.booleans(),
    dtype=st.sampled_from([F32, BF16]), seed=st.integers(0, 1 << 20),
)  # fmt: skip
def test_any_shape_and_options(
    tokens: int, vocab: int, hidden: int, reduction: str, smoothing: float, softcap: float,
    scale: float, bias: bool, dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    x, w, b, t = problem((tokens,), vocab, hidden, dtype, bias=bias, ignored=0.1)
    if vocab > 1:
        t[0] = vocab - 1  # so that one token counts
        check(x, w, b, t, dtype, reduction=reduction, label_smoothing=smoothing, softcap=softcap,
              logit_scale=scale)  # fmt: skip
    else:
        assert linear_cross_entropy(x, w, t, linear_bias=b, reduction="sum").item() == 0


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "permuted"])
def test_any_strides(device: str, layout: str) -> None:
    x, w, _, t = problem((4, 6), 17, 8, device=device)
    with torch.no_grad():
        if layout == "transposed":
            x, w = x.detach(), w.detach().T.contiguous().T
        elif layout == "sliced":
            x = torch.randn(4, 9, 20, device=device)[:, 1:7, ::2][..., :8]
            w = torch.randn(34, 11, device=device)[::2, 3:]
        elif layout == "expanded":
            x, w = x.detach()[:1].expand(4, 6, 8), w.detach()[:, :1].expand(17, 8)
        else:
            x, w = torch.randn(6, 4, 8, device=device).transpose(0, 1), w.detach()
    x, w = x.requires_grad_(), w.requires_grad_()
    check(x, w, None, t)


def test_int32_targets(device: str) -> None:
    x, w, _, t = problem((9,), 17, 8, device=device)
    assert torch.equal(linear_cross_entropy(x, w, t.int()), linear_cross_entropy(x, w, t))


@pytest.mark.parametrize("memory", ["1MiB", 10**9, "0.5 GB"])
def test_the_result_does_not_leave_its_bounds_with_memory(device: str, memory: Any) -> None:
    if memory == "1MiB" and device == "cuda":
        memory = "64MiB"  # 1 MiB is less than the minimum workspace with gradients
    x, w, b, t = problem((300,), 2000, 16, device=device)
    check(x, w, b, t, memory=memory)


def test_memory_is_what_the_workspace_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, _, t = problem((300,), 60000, 16)
    taken = []
    real = torch.empty

    def empty(*shape: Any, **options: Any) -> Tensor:
        if options.get("dtype") is torch.uint8:
            taken.append(shape[0])
        return real(*shape, **options)

    monkeypatch.setattr(torch, "empty", empty)
    linear_cross_entropy(x, w, t, memory="9MiB")
    linear_cross_entropy(x, w, t, memory="1TB")
    assert workspace_size(x, w, t, memory=9e6) == workspace_size(x, w, t, memory=9_000_000)
    linear_cross_entropy(x, w, t)
    with torch.no_grad():
        linear_cross_entropy(x, w, t)
    assert taken[0] == 9 << 20 and taken[0] < taken[1] < 1 << 30
    assert taken[:3] == [workspace_size(x, w, t, memory=m) for m in ("9MiB", "1TB", None)]
    assert taken[3] == workspace_size(x, w, t, gradients=False)


def test_a_bias_of_minus_infinity_masks_a_column(device: str) -> None:
    x, w, _, t = problem((7,), 40, 8, device=device, ignored=0)
    t = t % 25
    bias = torch.zeros(40, device=device)
    bias[25:] = -torch.inf
    leaves = (x, w)
    alone = linear_cross_entropy(x, w[:25], t)
    expected = torch.autograd.grad(alone, leaves)
    assert not expected[1][25:].any()
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(x, w, t, linear_bias=bias, reduction=reduction).mean()
        torch.testing.assert_close(loss, alone)
        for ours, theirs in zip(torch.autograd.grad(loss, leaves), expected):
            torch.testing.assert_close(ours, theirs)


def test_a_temperature_is_learned_as_a_divisor_of_the_input(device: str) -> None:
    x, w, _, t = problem((7,), 40, 8, device=device)
    learned = torch.tensor(1.7, device=device, requires_grad=True)
    loss = linear_cross_entropy(x / learned, w, t)
    torch.testing.assert_close(loss, linear_cross_entropy(x, w, t, temperature=1.7))
    expected = reference.loss(reference.logits_of(x, w) / learned.double(), t)
    (grad,) = torch.autograd.grad(loss, learned)
    close(grad, torch.autograd.grad(expected, learned)[0])


@pytest.mark.parametrize("which", ["input", "weight", "bias", "token_weight", "class", "upstream"])
def test_a_lazy_minus_sign_is_carried_out(device: str, which: str) -> None:
    def negated(*shape: int) -> Tensor:
        value = torch.randn(*shape, dtype=torch.complex64, device=device).conj().imag
        assert value.is_neg()
        return value

    x, w, b, t = problem((7,), 9, 4, device=device, bias=True)
    options: dict[str, Any] = {"reduction": "none"}
    x = negated(7, 4) if which == "input" else x
    w = negated(9, 4) if which == "weight" else w
    b = negated(9) if which == "bias" else b
    if which == "token_weight":
        options["token_weight"] = negated(7)
    if which == "class":
        options["weight"] = negated(9)
    upstream = negated(7) if which == "upstream" else torch.randn(7, device=device)
    loss = linear_cross_entropy(x, w, t, linear_bias=b, **options)
    expected = reference.loss(reference.logits_of(x, w, b), t, **options)
    close(loss, expected)
    leaves = [v for v in (x, w, b) if v is not None and v.requires_grad]
    grads = torch.autograd.grad(loss, leaves, upstream)
    exact = torch.autograd.grad(expected, leaves, upstream.double())
    for ours, theirs in zip(grads, exact):
        close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "index", [-100, (1 << 31) - 1, 1 << 31, (1 << 53) + 1, (1 << 63) - 1, -(1 << 63)]
)
def test_shift_with_any_ignore_index(device: str, index: int, dtype: torch.dtype) -> None:
    x, w, _, t = problem((2, 6), 9, 4, device=device, ignored=0)
    t = t.to(dtype)
    loss = linear_cross_entropy(x, w, t, shift=2, ignore_index=index)
    close(loss, reference.loss(reference.logits_of(x[:, :-2], w), t[:, 2:].long()))


@pytest.mark.parametrize("binding", ["torch", "numpy", "jax", "module"])
@pytest.mark.parametrize("shift", [False, True])
def test_none_is_the_default_of_ignore_index_and_softcap(binding: str, shift: bool) -> None:
    """torch's own function allows None as ignore_index, and configurations of models as softcap."""
    x, w, _, t = (v if v is None else v.detach() for v in problem((2, 9), 17, 8))
    assert (t == -100).any()
    expected = linear_cross_entropy(x, w, t, shift=shift)
    none: Any = {"ignore_index": None, "softcap": None}
    if binding == "torch":
        loss = linear_cross_entropy(x, w, t, shift=shift, **none)
        close(linear_logprob(x, w, t, **none), linear_logprob(x, w, t).double())
        logits = torch.nn.functional.linear(x, w)
        close(cross_entropy(logits, t, **none), cross_entropy(logits, t).double())
    elif binding == "module":
        loss = LinearCrossEntropyLoss(shift=shift, **none)(x, w, t)
        head = LinearCrossEntropyHead(8, 17, shift=shift, **none)
        assert head(x).shape == (2, 9, 17)
        head.weight.data.copy_(w)
        assert torch.equal(head(x, t), loss)
    else:
        module = pytest.importorskip(f"logitless.{binding}")
        arrays = (v.numpy() for v in (x, w, t.int()))
        loss = torch.tensor(float(module.linear_cross_entropy(*arrays, shift=shift, **none)))
    close(loss, expected.double())

# SPDX-License-Identifier: Apache-2.0
"""Which C call is made when, and what gradients promise beyond their values."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fresh
import reference
from logitless import _abi
from logitless.torch import (
    LinearCrossEntropyHead,
    Statistics,
    _run,
    cross_entropy,
    cross_entropy_,
)
from reference import close
from splits import linear_cross_entropy, linear_logprob
from test_linear import BF16, F16, F32, problem

FORWARD = _abi.LINEAR_CROSS_ENTROPY_FORWARD
BACKWARD = _abi.LINEAR_CROSS_ENTROPY_BACKWARD
BOTH = _abi.LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("names", [(), ("argmax",)])
def test_a_reduced_loss_is_one_call(
    device: str, launched: list[int], reduction: str, names: tuple[str, ...]
) -> None:
    x, w, _, t = problem((9,), 17, 8, device=device)
    result = linear_cross_entropy(x, w, t, reduction=reduction, return_statistics=names)
    (result[0] if names else result).backward()
    assert launched == [BOTH]


def test_reduction_none_is_forward_then_backward(device: str, launched: list[int]) -> None:
    x, w, _, t = problem((9,), 17, 8, device=device)
    linear_cross_entropy(x, w, t, reduction="none").sum().backward()
    linear_logprob(x, w, t).sum().backward()
    assert launched == [FORWARD, BACKWARD] * 2


@pytest.mark.parametrize("name", ["lse", "target_logit", "logprob", "entropy"])
def test_a_differentiable_statistic_is_forward_then_backward(
    device: str, launched: list[int], name: str
) -> None:
    x, w, _, t = problem((9,), 17, 8, device=device)
    loss, _ = linear_cross_entropy(x, w, t, return_statistics=(name,))
    loss.backward()
    assert launched == [FORWARD, BACKWARD]


def test_no_grad_computes_the_loss_only(device: str, launched: list[int]) -> None:
    x, w, _, t = problem((9,), 17, 8, device=device)
    with torch.no_grad():
        assert not linear_cross_entropy(x, w, t).requires_grad
    with torch.inference_mode():
        linear_cross_entropy(x, w, t)
    linear_cross_entropy(x.detach(), w.detach(), t)
    assert launched == [FORWARD] * 3


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", ["head", "trunk"])
def test_a_frozen_side_pays_nothing(
    monkeypatch: pytest.MonkeyPatch, frozen: str, reduction: str
) -> None:
    x, w, _, t = problem((9,), 17, 8)
    (w if frozen == "head" else x).requires_grad_(False)
    allocated = []
    real = _run._grad_of

    def spy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        allocated.append(tuple(tensor.shape))
        return real(tensor, dtype)

    monkeypatch.setattr(_run, "_grad_of", spy)
    linear_cross_entropy(x, w, t, reduction=reduction).sum().backward()
    assert (tuple(w.shape) in allocated) == (frozen == "trunk")
    assert (tuple(x.shape) in allocated) == (frozen == "head")
    assert (w.grad is None) == (frozen == "head") and (x.grad is None) == (frozen == "trunk")


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_a_second_backward_is_the_first_again(
    device: str, launched: list[int], dtype: torch.dtype
) -> None:
    x, w, b, t = problem((9,), 17, 8, dtype, device, bias=True)
    loss = linear_cross_entropy(x, w, t, linear_bias=b, label_smoothing=0.1)
    first = torch.autograd.grad(loss * 3, (x, w, b), retain_graph=True)
    second = torch.autograd.grad(loss * 3, (x, w, b), retain_graph=True)
    third = torch.autograd.grad(loss * 0.5, (x, w, b))
    # On CUDA, gradients of f16 wait for the gradient scaler's factor.
    once = [FORWARD, BACKWARD] if dtype is F16 and device == "cuda" else [BOTH]
    assert launched == [*once, *once[-1:] * 2]
    expected = reference.loss(reference.logits_of(x, w, b), t, label_smoothing=0.1)
    exact = torch.autograd.grad(expected, (x, w, b))
    for a, s, h, e in zip(first, second, third, exact):
        close(a, e * 3, dtype)
        close(s, e * 3, dtype)
        close(h, e * 0.5, dtype)
        # With f16 on CUDA, the first backward read state kept in 16 bits.
        assert torch.equal(a, s) or once != [BOTH]


def test_a_second_backward_without_retain_graph_is_torchs_error(device: str) -> None:
    x, w, _, t = problem((9,), 17, 8, device=device)
    loss = linear_cross_entropy(x, w, t)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_double_backward_is_a_clear_error(device: str, reduction: str) -> None:
    x, w, _, t = problem((9,), 17, 8, device=device)
    loss = linear_cross_entropy(x, w, t, reduction=reduction).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    expected = reference.loss(reference.logits_of(x, w), t, reduction=reduction).sum()
    close(grad, torch.autograd.grad(expected, x)[0])
    with pytest.raises(RuntimeError, match="differentiated once"):
        grad.square().sum().backward()


def test_gradients_are_handed_over_not_copied(device: str) -> None:
    x, w, _, t = problem((9,), 17, 8, device=device)
    loss = linear_cross_entropy(x, w, t)
    held = [g.data_ptr() for g in loss.grad_fn.grads if g is not None]
    (loss * 0.25).backward()
    assert x.grad is not None and w.grad is not None
    assert held == [x.grad.data_ptr(), w.grad.data_ptr()]


def test_gradients_accumulate_over_micro_batches(device: str) -> None:
    x, w, _, t = problem((4, 8), 17, 8, device=device)
    count = (t != -100).sum()
    for i in range(4):
        linear_cross_entropy(x[i], w, t[i], normalizer=count).backward()
    expected = torch.autograd.grad(reference.loss(reference.logits_of(x, w), t), (x, w))
    close(x.grad, expected[0])  # type: ignore[arg-type]
    close(w.grad, expected[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_f16_gradients_are_rounded_after_the_upstream_factor(device: str, reduction: str) -> None:
    x = (torch.randn(64, 32, device=device) * 1e-3).half().requires_grad_()
    w = (torch.randn(512, 32, device=device) * 1e-3).half().requires_grad_()
    t = torch.randint(0, 512, (64,), device=device)
    scale = 65536.0
    loss = linear_cross_entropy(x, w, t, reduction=reduction)
    total = loss if reduction == "mean" else loss.mean()
    grads = torch.autograd.grad(total * scale, (x, w))
    exact = [v.detach().double().requires_grad_() for v in (x, w)]
    theirs = reference.loss(reference.logits_of(*exact), t)
    for ours, e in zip(grads, torch.autograd.grad(theirs, exact)):

        def wrong(grad: torch.Tensor, e: torch.Tensor = e) -> bool:
            bound = 2e-3 * e.abs() + 2e-4 * e.abs().max()
            return bool(((grad.double() / scale - e).abs() > bound).any())

        assert not wrong(ours)
        assert wrong(e.half() * scale), "the case would not notice gradients rounded first"


def test_grad_scaler_and_autocast(device: str) -> None:
    dtype = BF16 if device == "cpu" else F16
    x, w, _, t = problem((16,), 50, 8, device=device)
    scaler = torch.amp.GradScaler(device, init_scale=65536.0)
    with torch.autocast(device, dtype=dtype):
        loss = linear_cross_entropy(x, w, t)
    assert loss.dtype is F32
    scaler.scale(loss).backward()
    x16, w16 = x.detach().to(dtype), w.detach().to(dtype)
    exact = [v.double().requires_grad_() for v in (x16, w16)]
    theirs = reference.loss(reference.logits_of(*exact), t)
    close(loss, theirs)
    for ours, e in zip((x, w), torch.autograd.grad(theirs, exact)):
        assert ours.grad is not None and ours.grad.dtype is F32
        close(ours.grad / 65536, e, dtype)


def test_autocast_second_backward_and_no_grad(device: str) -> None:
    x, w, b, t = problem((16,), 50, 8, device=device, bias=True)
    with torch.autocast(device, dtype=BF16):
        loss = linear_cross_entropy(x, w, t, linear_bias=b)
        with torch.no_grad():
            assert torch.equal(linear_cross_entropy(x, w, t, linear_bias=b), loss)
    first = torch.autograd.grad(loss, (x, w, b), retain_graph=True)
    for a, s in zip(first, torch.autograd.grad(loss, (x, w, b))):
        assert a.dtype is F32
        close(a, s, BF16)


def test_an_input_changed_in_place_is_noticed(device: str) -> None:
    x, w, _, t = problem((9,), 17, 8, device=device)
    loss = linear_cross_entropy(x, w, t, reduction="none")
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_the_same_bits_again_and_from_any_thread(device: str) -> None:
    x, w, _, t = problem((64,), 500, 32, device=device)
    first = linear_cross_entropy(x, w, t)
    first.backward()
    assert x.grad is not None and w.grad is not None
    wrong = []

    def again() -> None:
        for _ in range(20):
            a, b = x.detach().requires_grad_(), w.detach().requires_grad_()
            loss = linear_cross_entropy(a, b, t)
            loss.backward()
            pairs = ((loss, first), (a.grad, x.grad), (b.grad, w.grad))
            if not all(torch.equal(*pair) for pair in pairs):  # type: ignore[arg-type]
                wrong.append(loss)

    threads = [threading.Thread(target=again) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_library_follows_torchs_number_of_threads() -> None:
    import logitless

    x, w, _, t = problem((9,), 17, 8)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            linear_cross_entropy(x, w, t)
            assert logitless.num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_checkpointing_recomputes_the_loss(device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    x, w, _, t = problem((9,), 17, 8, device=device)
    loss = checkpoint(linear_cross_entropy, x, w, t, use_reentrant=False)
    loss.backward()
    expected = torch.autograd.grad(reference.loss(reference.logits_of(x, w), t), (x, w))
    close(x.grad, expected[0])  # type: ignore[arg-type]
    close(w.grad, expected[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [9, 4000])
def test_a_default_device_changes_nothing(device: str, tokens: int) -> None:
    """Neither with a small workspace, which is reused, nor with a large one."""
    x, w, _, t = problem((tokens,), 170, 8, device=device)
    expected = linear_cross_entropy(x, w, t)
    grads = torch.autograd.grad(expected, (x, w))
    per_token = linear_cross_entropy(x, w, t, reduction="none")
    _run._scratch.clear()
    with torch.device("meta"):
        torch.autograd.grad(per_token.sum(), (x, w))
        loss = linear_cross_entropy(x, w, t)
        made = torch.autograd.grad(loss, (x, w))
        none = linear_cross_entropy(x, w, t, reduction="none", normalizer=None)
    assert torch.equal(loss, expected) and none.device == x.device
    for a, e in zip(made, grads):
        assert torch.equal(a, e)


def test_a_default_device_leaves_the_eager_path_alone() -> None:
    from torch.overrides import BaseTorchFunctionMode

    x, w, _, t = problem((9,), 17, 8)
    plain = type(linear_cross_entropy(x, w, t).grad_fn)
    assert "FusedLoss" in plain.__name__
    with torch.device("cpu"):
        assert type(linear_cross_entropy(x, w, t).grad_fn) is plain
        with BaseTorchFunctionMode():  # such a mode must see the op
            assert type(linear_cross_entropy(x, w, t).grad_fn) is not plain
    torch.set_default_device("cpu")
    try:
        assert type(linear_cross_entropy(x, w, t).grad_fn) is plain
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("shape", [(), (9,), (3, 4)])
def test_results_may_be_changed_in_place(device: str, shape: tuple[int, ...]) -> None:
    """torch allows this only for results that are not views made inside the function."""
    names = Statistics._fields
    x, w, _, t = problem(shape, 17, 8, device=device, ignored=0)
    expected = linear_cross_entropy(x, w, t, reduction="none")
    loss, s = linear_cross_entropy(x, w, t, reduction="none", return_statistics=names)
    for result in (loss, *s):
        assert result.shape == t.shape and not result._is_view()
        if result is not s.entropy:  # torch reports that backward reads the entropy
            result.mul_(2)
    grads = torch.autograd.grad(loss.sum(), (x, w))
    for ours, theirs in zip(grads, torch.autograd.grad(expected.sum(), (x, w))):
        close(ours, 2 * theirs.double())
    constant = ("argmax", "rank", "sum_p_squared", "mean_logit", "max_logprob", "mass_above")
    _, s = linear_cross_entropy(x, w, t, return_statistics=constant)
    for result in (getattr(s, name) for name in constant):
        assert result.shape == t.shape and not result._is_view()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_loss_kept_for_the_log_keeps_nothing_else(device: str, reduction: str) -> None:
    x, w, _, t = problem((9,), 17, 8, device=device)
    token_weight = torch.rand(9, device=device)
    result = linear_cross_entropy(
        x, w, t, token_weight=token_weight, reduction=reduction, return_statistics=("argmax",)
    )
    held = [weakref.ref(v) for v in (t, token_weight, result[1].argmax)]
    loss = result[0]
    loss.sum().backward()
    del t, token_weight, result
    assert [ref() for ref in held] == [None] * 3 and loss.grad_fn is not None


TF32_SETTINGS = {
    "": False,
    "torch.set_float32_matmul_precision('high')": True,
    "torch.set_float32_matmul_precision('medium')": True,
    "torch.backends.cuda.matmul.allow_tf32 = True": True,
}
if hasattr(torch.backends, "fp32_precision"):  # since torch 2.9
    TF32_SETTINGS |= {
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'": True,
        "torch.backends.cuda.matmul.fp32_precision = 'ieee'": False,
        "torch.backends.fp32_precision = 'tf32'": True,
        "torch.backends.cudnn.conv.fp32_precision = 'tf32'": False,
    }


def test_every_switch_of_tf32_is_followed() -> None:
    """Each switch is set in a process of its own, because a switch cannot be undone. The process is
    a fork, so that torch is imported once."""
    code = f"""
import os, torch
for setting in {list(TF32_SETTINGS)}:
    if (child := os.fork()) == 0:
        exec(setting)
        from logitless.torch._device import allows_tf32
        print(setting, allows_tf32(), sep=": ", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    told = dict(line.rsplit(": ", 1) for line in fresh.run(code).splitlines())
    assert told == {setting: str(allowed) for setting, allowed in TF32_SETTINGS.items()}


def test_gradcheck_against_finite_differences() -> None:
    x, w, b, t = problem((4,), 6, 3, bias=True)
    for reduction in ("mean", "none"):
        torch.autograd.gradcheck(
            lambda *v, r=reduction: linear_cross_entropy(
                v[0], v[1], t, linear_bias=v[2], reduction=r, label_smoothing=0.1
            ),
            (x, w, b), eps=1e-2, atol=2e-3, rtol=1e-2, nondet_tol=0.0,
        )  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_vmap_over_backward_is_refused_by_name(reduction: str) -> None:
    x, w, _, t = problem((6,), 17, 8)
    grads = torch.autograd.grad
    with pytest.raises(NotImplementedError, match=r"torch\.func .*is_grads_batched"):
        loss = linear_cross_entropy(x, w, t, reduction=reduction)
        grads(loss, x, torch.ones(3, *loss.shape), is_grads_batched=True)
    with pytest.raises(NotImplementedError, match=r"torch\.func .*vectorize=True"):
        torch.autograd.functional.jacobian(
            lambda x: linear_cross_entropy(x, w, t, reduction=reduction), x.detach(), vectorize=True
        )
    loss = linear_cross_entropy(x, w, t, reduction=reduction, vocab_blocks=2)
    upstream = torch.randn(3, *loss.shape)
    (batched,) = grads(loss, x, upstream, is_grads_batched=True, retain_graph=True)
    for one, u in zip(batched, upstream, strict=True):
        torch.testing.assert_close(one, *grads(loss, x, u, retain_graph=True))


EMPTY: dict[str, dict[str, Any]] = {  # the mean divides by 0 or NaN
    "class weights": {"weight": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0])},
    "a number": {"normalizer": 0},
    "a tensor": {"normalizer": torch.tensor(0.0)},
    "an integer": {"normalizer": torch.tensor(0)},
    "NaN": {"normalizer": torch.tensor(float("nan"))},
}
WAYS = ("linear", "memory", "main_grad", "given logits", "in place", "blocks", "dispatcher")


@pytest.mark.parametrize("statistic", ["lse", "target_logit", "logprob", "entropy"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("empty", EMPTY)
def test_a_loss_that_nobody_uses_has_no_part_in_gradients(
    empty: str, way: str, statistic: str
) -> None:
    """With empty_mean="nan" a mean over nothing and its gradient are NaN, but not the gradient of a
    statistic of the same call."""
    x, w, t = torch.randn(5, 6), torch.randn(7, 6), torch.tensor([0, 1, 2, 3, 4])
    found = []
    for options in ({**EMPTY[empty], "empty_mean": "nan"}, {"reduction": "none"}):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        options["return_statistics"] = (statistic,)
        if way == "main_grad":
            head = LinearCrossEntropyHead(6, 7, grad_accumulation="main_grad", **{
                k: v for k, v in options.items() if k != "normalizer"})  # fmt: skip
            head.weight = torch.nn.Parameter(w.clone())
            _, s = head(a, t, normalizer=options.get("normalizer"))
        elif way == "given logits":
            _, s = cross_entropy(a @ b.T, t, **options)
        elif way == "in place":
            _, s = cross_entropy_(a @ b.T, t, **options)
        elif way == "dispatcher":
            with FlopCounterMode(display=False):
                _, s = linear_cross_entropy(a, b, t, **options)
        else:
            more: dict[str, Any] = {"memory": "1MiB"} if way == "memory" else {}
            more |= {"vocab_blocks": 4} if way == "blocks" else {}
            _, s = linear_cross_entropy(a, b, t, **options, **more)
        getattr(s, statistic).sum().backward()
        found.append((a.grad, head.weight.main_grad if way == "main_grad" else b.grad))
    for ours, expected in zip(*found, strict=True):
        assert expected.isfinite().all() and expected.any()
        torch.testing.assert_close(ours, expected)

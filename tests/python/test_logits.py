# SPDX-License-Identifier: Apache-2.0
"""Given logits: cross_entropy, cross_entropy_ in place, softmax_."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from logitless.torch import cross_entropy, cross_entropy_, softmax_
from reference import close
from test_linear import BF16, F16, F32, OPTIONS


def problem(
    shape: tuple[int, ...], vocab: int, dtype: torch.dtype = F32, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    z = (torch.randn(*shape, vocab, device=device) * 3).to(dtype).requires_grad_()
    t = torch.randint(0, vocab, shape, device=device)
    return z, t.where(torch.rand(shape, device=device) >= 0.2, torch.full_like(t, -100))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("in_place", [False, True])
def test_loss_and_gradients_are_those_of_f64(
    device: str, name: str, reduction: str, dtype: torch.dtype, in_place: bool
) -> None:
    options: dict[str, Any] = dict(OPTIONS[name], reduction=reduction)
    if reduction != "mean":
        options.pop("normalizer", None)
    z, t = problem((3, 11), 53, dtype, device)
    t = t.where(t != -100, torch.full_like(t, options.get("ignore_index", -100)))
    expected = reference.loss(z, t, **options)
    upstream = torch.randn(expected.shape, device=device)
    (exact,) = torch.autograd.grad(expected, z, upstream.double())
    if in_place:
        middle = z * 1
        loss = cross_entropy_(middle, t, **options)
        close(loss, expected)
        loss.backward(upstream)
        close(middle.detach(), exact, dtype)
        close(z.grad, exact, dtype)  # type: ignore[arg-type]
    else:
        loss = cross_entropy(z, t, **options)
        close(loss, expected)
        close(torch.autograd.grad(loss, z, upstream)[0], exact, dtype)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 3, 4)])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_any_leading_shape(device: str, shape: tuple[int, ...], reduction: str) -> None:
    z, t = problem(shape, 7, device=device)
    loss = cross_entropy(z, t, reduction=reduction)
    expected = reference.loss(z, t, reduction=reduction)
    close(loss, expected)
    close(*torch.autograd.grad(loss.sum(), z), *torch.autograd.grad(expected.sum(), z))


def test_statistics(device: str) -> None:
    z, t = problem((3, 5), 9, device=device)
    names = ("lse", "target_logit", "logprob", "entropy", "argmax")
    _, s = cross_entropy(z, t, return_statistics=names, temperature=0.7)
    for name, value in reference.statistics(z, t, {"temperature": 0.7}).items():
        if name in names:
            close(getattr(s, name), value)


LAYOUTS: dict[str, Any] = {
    "shifted": lambda z: z[:, :-1],
    "transposed": lambda z: z.transpose(0, 1),
    "columns": lambda z: z[..., 3:],
    "every second": lambda z: z[::2, ::2],
    "vocab first": lambda z: z.permute(1, 2, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_place_of_logits_that_are_no_matrix(device: str, layout: str) -> None:
    z, _ = problem((4, 7), 9, device=device)
    shape = LAYOUTS[layout](z).shape
    t = torch.randint(0, shape[-1], shape[:-1], device=device)
    expected = reference.loss(LAYOUTS[layout](z), t)
    (exact,) = torch.autograd.grad(expected, z)
    full = z * 1
    logits = LAYOUTS[layout](full)
    loss = cross_entropy_(logits, t)
    close(loss, expected)
    loss.backward()
    close(z.grad, exact)  # type: ignore[arg-type]
    close(logits.detach(), LAYOUTS[layout](exact))


def test_in_place_needs_no_second_matrix(device: str, monkeypatch: Any) -> None:
    from logitless.torch import _run

    z, t = problem((64,), 501, device=device)
    logits = z * 1
    asked: list[object] = []
    real = _run._grad_of
    monkeypatch.setattr(_run, "_grad_of", lambda v, d: asked.append(v) or real(v, d))
    seen = []
    logits.register_hook(lambda g: seen.append(g.data_ptr()))
    cross_entropy_(logits, t).backward()
    assert seen == [logits.data_ptr()] and not asked


def test_in_place_is_noticed_by_whoever_else_needs_the_logits(device: str) -> None:
    z, t = problem((4,), 9, device=device)
    logits = z.exp()  # exp's backward reads its result
    loss = cross_entropy_(logits, t)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    logits = z * 1
    loss = cross_entropy_(logits, t)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_refuses_a_leaf_and_takes_no_grad(device: str) -> None:
    z, t = problem((4,), 9, device=device)
    with pytest.raises(ValueError, match="leaf"):
        cross_entropy_(z, t)
    before = z.detach().clone()
    with torch.no_grad():
        close(cross_entropy_(z, t), reference.loss(z, t))
    assert torch.equal(z, before)


VIEWS: dict[str, Any] = {
    "view": lambda leaf: leaf.view(4, 9),
    "rows": lambda leaf: leaf[1:],
    "view of a view": lambda leaf: leaf.view(36).view(4, 9)[:2],
    "unbind": lambda leaf: leaf.view(1, 4, 9).unbind(0)[0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_in_place_refuses_a_view_of_a_leaf(device: str, name: str) -> None:
    """As torch's in-place functions do; otherwise a parameter would become its own gradient."""
    z, _ = problem((4,), 9, device=device)
    before = z.detach().clone()
    logits = VIEWS[name](z)
    t = torch.zeros(logits.shape[0], dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="logits is a view of a leaf that requires grad"):
        cross_entropy_(logits, t)
    with torch.no_grad():
        close(cross_entropy_(logits, t), reference.loss(logits, t))
    assert torch.equal(z, before)
    frozen = z.detach()
    cross_entropy_(VIEWS[name](frozen) * torch.ones((), device=device, requires_grad=True), t)


def test_in_place_refuses_logits_that_overlap_when_it_is_called(device: str) -> None:
    z, t = problem((4,), 9, device=device)
    with pytest.raises(ValueError, match=r"logits has shape .4, 9. and strides .0, 1.: elements"):
        cross_entropy_((z[:1] * 1).expand(4, 9), t)
    with torch.no_grad():
        cross_entropy_(z[:1].expand(4, 9), t)  # without a gradient nothing is written


def test_in_place_compiles_as_a_call_that_is_not(device: str) -> None:
    z, t = problem((4,), 9, device=device)
    step = torch.compile(
        lambda z, t: cross_entropy_((z * 1)[:], t), backend="eager", fullgraph=True
    )
    expected = reference.loss(z, t)
    loss = step(z, t)
    close(loss, expected)
    close(*torch.autograd.grad(loss, z), *torch.autograd.grad(expected, z))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize(
    ("shape", "dim"), [((5,), 0), ((4, 7), -1), ((4, 7), 0), ((2, 3, 7), 2), ((0, 3), 1)]
)
def test_softmax_in_place(device: str, shape: tuple[int, ...], dim: int, dtype: Any) -> None:
    z = torch.randn(shape, device=device).to(dtype)
    expected = z.double().softmax(dim)
    version = z._version
    assert softmax_(z, dim) is z
    close(z, expected, dtype)
    assert not z.numel() or z._version > version


def test_softmax_refuses_what_it_cannot_do(device: str) -> None:
    with pytest.raises(ValueError, match="no gradient"):
        softmax_(torch.randn(3, 4, device=device, requires_grad=True))
    with pytest.raises(ValueError, match="without a copy"):
        softmax_(torch.randn(3, 4, 5, device=device), dim=1)


def test_softmax_of_a_lazy_minus_sign(device: str) -> None:
    """The imaginary part of a conjugate: its memory holds the numbers with the other sign."""
    z = torch.randn(3, 4, dtype=torch.complex64, device=device).conj().imag
    assert z.is_neg()
    expected = torch.softmax(z.double(), -1)
    assert softmax_(z) is z
    close(z, expected)


def test_softmax_names_its_argument_where_elements_overlap(device: str) -> None:
    with pytest.raises(ValueError, match=r"^logits has shape .*elements overlap"):
        softmax_(torch.randn(1, 5, device=device).expand(4, 5))

# SPDX-License-Identifier: Apache-2.0
"""Divergences of two heads with the signatures of Liger and Unsloth, against their formulas in f64;
and the default memory of these functions and of TRL's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from frugal import CASES, check_default_is_enough
from logitless._abi import Room
from logitless.integrations import LigerFusedLinearJSD, _divergence, liger, unsloth
from logitless.integrations import trl as trl_module
from logitless.integrations._memory import Sizes
from logitless.torch import default_memory
from reference import close
from test_divergence import BF16, F16, F32, Heads, Ran, divergence_of, expected, heads, ran

__all__ = ["ran"]  # a fixture, used by importing it

MIB = 1 << 20
BETAS = [0.0, 0.1, 0.5, 1.0]
OF_BETA = {0.0: "forward_kl", 1.0: "reverse_kl"}


def known(h: Heads, beta: float, **options: Any) -> Tensor:
    kind = OF_BETA.get(beta, "jsd")
    return expected(h, kind=kind, beta=beta, **options)[0]


def same(made: Tensor, theirs: Tensor, leaves: Any, dtype: torch.dtype = F32) -> None:
    """The value, and the gradients for an upstream gradient of 3, are those of `theirs`."""
    assert made.shape == () and made.dtype is F32
    close(made, theirs)
    grads = torch.autograd.grad(3 * made, leaves)
    of_theirs = torch.autograd.grad(3 * theirs, leaves, retain_graph=True)
    for a, e, leaf in zip(grads, of_theirs, leaves):
        assert a.dtype is leaf.dtype
        close(a, e, dtype)


# --- Liger ---


def ligers_formula(h: Heads, labels: Tensor | None, beta: float, temperature: float) -> Tensor:
    """As liger_kernel/ops/jsd.py says: X the student's log-probabilities, Y the teacher's, a sum
    over the rows whose label is not ignored, divided by their number."""
    x = (h.input.double() @ h.weight.double().T / temperature).log_softmax(-1)
    y = (h.teacher_input.double() @ h.teacher_weight.double().T / temperature).log_softmax(-1)
    if beta == 0:
        loss = y.exp() * (y - x)
    elif beta == 1:
        loss = x.exp() * (x - y)
    else:
        m = (beta * y.exp() + (1 - beta) * x.exp()).log()
        loss = beta * y.exp() * (y - m) + (1 - beta) * x.exp() * (x - m)
    if labels is None:
        return loss.sum() / len(loss)
    counts = labels != -100
    return loss[counts].sum() / counts.sum().clamp(min=1)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("labels", [False, True], ids=["", "labels"])
@pytest.mark.parametrize("beta", BETAS)
def test_ligers_loss_is_its_formula(
    beta: float, labels: bool, dtype: torch.dtype, device: str
) -> None:
    h = heads(device, dtype, (12,))
    target = h.target if labels else None
    theirs = ligers_formula(h, target, beta, 0.7)
    same(LigerFusedLinearJSD(beta, temperature=0.7)(*h[:4], target), theirs, h.leaves[:2], dtype)
    made = liger.LigerFusedLinearJSDFunction.apply(*h[:4], target, beta, -100, 0.7, F32, None, None)
    same(made, theirs, h.leaves[:2], dtype)


def test_ligers_labels_say_which_tokens_count_and_no_more() -> None:
    """Labels are not read as classes: they may exceed the vocabulary, and 0 may be ignored."""
    h = heads(shape=(12,))
    labels = torch.arange(12) % 4 * 1000
    made = LigerFusedLinearJSD(ignore_index=0)(*h[:4], labels)
    same(made, ligers_formula(h, labels.where(labels > 0, -100), 0.5, 1.0), h.leaves[:2])


@pytest.mark.parametrize("apply", [LigerFusedLinearJSD(), liger.LigerFusedLinearJSDFunction.apply])
def test_ligers_loss_of_no_token_is_nothing(apply: Any) -> None:
    h = heads(shape=(12,))
    made = apply(*h[:4], torch.full((12,), -100))
    assert made == 0
    assert not any(g.any() for g in torch.autograd.grad(made, h.leaves[:2]))


def test_what_liger_has_and_we_do_not_raises() -> None:
    h = heads(shape=(12,))
    apply = liger.LigerFusedLinearJSDFunction.apply
    with pytest.raises(NotImplementedError, match=r"^jsd_impl is 'nvidia-cutile'"):
        apply(*h[:4], jsd_impl="nvidia-cutile")
    with pytest.raises(NotImplementedError, match=r"^jsd_mode is 'default'"):
        apply(*h[:4], jsd_mode="default")
    with pytest.raises(NotImplementedError, match=r"^accum_dtype is torch.bfloat16"):
        LigerFusedLinearJSD(accum_dtype=BF16)
    with pytest.raises(ValueError, match=r"^shift_labels has shape \(11,\)"):
        apply(*h[:4], h.target[1:])
    with pytest.raises(ValueError, match=r"^jsd_beta is -1"):
        apply(*h[:4], None, -1.0)
    with pytest.raises(ValueError, match="student_weight"):
        apply(h.input, h.weight[:, 1:], *h[2:4])
    with pytest.raises(ValueError, match="temperature"):
        LigerFusedLinearJSD(temperature=0.0)(*h[:4], None)


def chunked_formula(h: Heads, hard: float, soft: float, beta: float, temperature: float) -> Any:
    """As liger_kernel/chunked_loss says: the labels' cross-entropy is of logits before the
    temperature; both are means over the tokens that count."""
    z = h.input.double() @ h.weight.double().T + h.bias.double()
    y = h.teacher_input.double() @ h.teacher_weight.double().T + h.teacher_bias.double()
    counts = h.target != -100
    n = counts.sum().clamp(min=1)
    labels = torch.nn.functional.cross_entropy(z, h.target, reduction="sum") / n
    p, q = (v.div(temperature).log_softmax(-1)[counts] for v in (z, y))
    of = divergence_of(p, q, OF_BETA.get(beta, "jsd"), beta).sum() / n
    return hard * labels + soft * of, of, labels


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.1, 2.0), (0.0, 1.0), (1.0, 0.0)], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_ligers_chunked_loss_is_its_formula(
    beta: float, temperature: float, weights: tuple[float, float], device: str, ran: list[Ran]
) -> None:
    h = heads(device, shape=(12,))
    made = liger.LigerFusedLinearJSDLoss(*weights, beta, temperature=temperature)(
        *h[:4], h.target, h.bias, h.teacher_bias
    )
    assert len(ran) == (2 if all(weights) and temperature != 1 else 1)
    same(made, chunked_formula(h, *weights, beta, temperature)[0], h.leaves)


def test_the_parts_of_ligers_chunked_loss() -> None:
    h = heads(shape=(12,))
    made = liger.LigerFusedLinearJSDLoss(0.2, 0.8, return_soft_hard_loss=True)(
        *h[:4], h.target, h.bias, h.teacher_bias
    )
    theirs = chunked_formula(h, 0.2, 0.8, 0.5, 1.0)
    same(made[0], theirs[0], h.leaves)
    for a, e in zip(made[1:], theirs[1:]):
        close(a, e)
        assert not a.requires_grad


def test_ligers_chunked_loss_of_sequences_and_of_another_ignored_label() -> None:
    h = heads(shape=(3, 4))
    for weights in ((0.5, 0.5), (0.0, 1.0)):
        loss = liger.LigerFusedLinearJSDLoss(*weights, ignore_index=0, compiled=False)
        made = loss(*h[:4], h.target.where(h.target > 0, 0), h.bias, h.teacher_bias)
        flat = Heads(*(t.flatten(0, 1) if t.dim() == 3 else t for t in h[:6]), h.target.flatten())
        flat = flat._replace(target=flat.target.where(flat.target > 0, -100))
        same(made, chunked_formula(flat, *weights, 0.5, 1.0)[0], h.leaves)


def test_a_label_that_is_no_class_is_an_error_in_ligers_words() -> None:
    h = heads(shape=(12,))
    with pytest.raises(ValueError, match="true_labels"):
        liger.LigerFusedLinearJSDLoss()(*h[:4], h.target[1:])


WRONG: dict[str, tuple[Callable[[Heads], dict[str, Any]], type[Exception], str]] = {
    "tokens": (
        lambda h: {"teacher_input": h.teacher_input[1:]}, ValueError, r"^teacher_input has shape"
    ),
    "D": (lambda h: {"teacher_input": h.teacher_input[:, 1:]}, ValueError, "^teacher_weight has"),
    "V": (lambda h: {"teacher_weight": h.teacher_weight[1:]}, ValueError, "^teacher_"),
    "a bias": (lambda h: {"teacher_bias": h.teacher_bias[1:]}, ValueError, "^teacher_bias has"),
    "its teacher": (lambda h: {"teacher_weight": None}, TypeError, "^teacher_weight is a NoneTy"),
    "its input": (lambda h: {"student_input": None}, TypeError, "^student_input is a NoneType"),
    "its labels": (lambda h: {"true_labels": None}, TypeError, "^true_labels is a NoneType"),
    "temperature": (lambda _: {"temperature": -1.0}, ValueError, "^temperature is -1"),
    "no temperature": (lambda _: {"temperature": 0.0}, ValueError, "^temperature is 0"),
    "beta": (lambda _: {"beta": 1.5}, ValueError, r"^beta is 1\.5; allowed: 0, or 2\^-90 to 1"),
}  # fmt: skip


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.0, 1.0), (1.0, 0.0)], ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_ligers_chunked_loss_refuses_alike_with_all_weights(
    name: str, weights: tuple[float, float], temperature: float
) -> None:
    """Errors do not depend on the weights, though a loss of weight 0 may not be computed here."""
    h = heads(shape=(12,))
    made, kind, message = WRONG[name]
    given: dict[str, Any] = {
        "student_input": h.input, "student_weight": h.weight, "teacher_input": h.teacher_input,
        "teacher_weight": h.teacher_weight, "true_labels": h.target, "student_bias": h.bias,
        "teacher_bias": h.teacher_bias,
    }  # fmt: skip
    options = {"temperature": temperature, "beta": 0.3}
    for argument, value in made(h).items():
        (options if argument in options else given)[argument] = value
    with pytest.raises(kind, match=message):
        liger.LigerFusedLinearJSDLoss(*weights, **options)(**given)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.0, 1.0), (1.0, 0.0)], ids=str)
def test_ligers_chunked_loss_adds_biases_of_another_dtype_and_of_one_row(
    weights: tuple[float, float], temperature: float
) -> None:
    h = heads(shape=(12,))
    bias, teachers = (b.detach().bfloat16() for b in (h.bias, h.teacher_bias))
    rows = bias[None].requires_grad_(), teachers[None]
    loss = liger.LigerFusedLinearJSDLoss(*weights, temperature=temperature)
    made = loss(*h[:4], h.target, *rows)
    h = h._replace(bias=bias.requires_grad_(), teacher_bias=teachers)
    theirs = chunked_formula(h, *weights, 0.5, temperature)[0]
    close(made, theirs)
    grads = torch.autograd.grad(made, (*h.leaves[:2], rows[0]))
    exact = torch.autograd.grad(theirs, h.leaves)
    assert grads[2].dtype is BF16
    for a, e in zip(grads, exact):
        close(a.view(e.shape), e, a.dtype)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.0, 1.0), (1.0, 0.0)], ids=str)
@pytest.mark.parametrize("teacher", [BF16, F32])
def test_ligers_chunked_loss_multiplies_in_the_dtype_of_the_states(
    weights: tuple[float, float], temperature: float, teacher: torch.dtype
) -> None:
    """In both terms: the student's states are bf16 and its head f32; the teacher's states are bf16,
    then f32."""
    h = heads(shape=(12,))
    x = h.input.detach().bfloat16().requires_grad_()
    rounded = h.weight.detach().bfloat16().float().requires_grad_()
    y, u = h.teacher_input.detach().to(teacher), h.teacher_weight.detach()
    made = liger.LigerFusedLinearJSDLoss(*weights, temperature=temperature)(
        x, h.weight, y, u, h.target
    )
    u = u.to(teacher).float()  # in bf16 too, beside states of bf16
    exact = Heads(
        x, rounded, y, u, torch.zeros_like(h.bias), torch.zeros_like(h.teacher_bias), h.target
    )
    theirs = chunked_formula(exact, *weights, 0.5, temperature)[0]
    close(made, theirs)
    grads = torch.autograd.grad(made, (x, h.weight))
    assert grads[1].dtype is F32
    for a, e in zip(grads, torch.autograd.grad(theirs, (x, rounded))):
        close(a, e, BF16)


def test_ligers_labels_that_are_no_tensor_are_refused() -> None:
    h = heads(shape=(12,))
    with pytest.raises(TypeError, match=r"^shift_labels is a list; allowed: a tensor"):
        LigerFusedLinearJSD()(*h[:4], [1] * 12)  # type: ignore[arg-type]


# --- Unsloth ---


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_unsloths_loss(beta: float, dtype: torch.dtype, device: str) -> None:
    h = heads(device, dtype)
    same(unsloth.fused_linear_jsd(*h[:4], beta=beta), known(h, beta), h.leaves[:2], dtype)
    scales = {
        "logit_scale": 0.5,
        "softcap": 3.0,
        "teacher_logit_scale": 2.0,
        "teacher_softcap": 1.5,
    }
    made = unsloth.fused_linear_jsd(
        *h[:4], labels=h.target, beta=beta, temperature=1.3, student_bias=h.bias,
        teacher_bias=h.teacher_bias, student_logit_scale=0.5, student_logit_softcapping=3.0,
        teacher_logit_scale=2.0, teacher_logit_softcapping=1.5,
    )  # fmt: skip
    bias = h.options("target", "linear_bias", "teacher_bias")
    theirs = known(h, beta, temperature=1.3, **bias, **scales)
    same(made, theirs, h.leaves, dtype)


@pytest.mark.parametrize(
    "items", [None, 7, 7.0, torch.tensor(7), torch.tensor([7.0, 1.0])], ids=str
)
def test_unsloths_tokens_count_by_mask_and_labels(items: Any, device: str) -> None:
    h = heads(device)
    mask = (torch.arange(10, device=device).view(2, 5) % 3).float()
    made = unsloth.fused_linear_jsd(
        *h[:4], mask=mask, labels=h.target * 1000, ignore_index=-100_000, num_items_in_batch=items
    )
    target = h.target.where(mask != 0, -100)
    assert 0 < (target != -100).sum() < min((h.target != -100).sum(), (mask != 0).sum())
    same(made, known(h, 0.5, target=target, normalizer=None if items is None else 7), h.leaves[:2])


@pytest.mark.parametrize("items", [0, torch.tensor(0), torch.zeros(1)], ids=str)
def test_unsloths_divisor_of_0_is_1(items: Any) -> None:
    h = heads()
    made = unsloth.fused_linear_jsd(*h[:4], num_items_in_batch=items)
    same(made, known(h, 0.5, reduction="sum"), h.leaves[:2])
    nothing = unsloth.fused_linear_jsd(*h[:4], mask=torch.zeros(2, 5), num_items_in_batch=items)
    assert nothing == 0 and unsloth.fused_linear_jsd(*h[:4], mask=torch.zeros(2, 5)) == 0


def test_unsloths_other_arguments_change_nothing() -> None:
    h = heads()
    plain = unsloth.fused_linear_jsd(*h[:4])
    more: dict[str, Any] = {
        "scaling": torch.tensor(1024.0), "student_logit_scale": 0, "teacher_logit_scale": None,
        "student_logit_softcapping": None,
    }  # fmt: skip
    made = unsloth.fused_linear_jsd(*h[:4], **more)
    assert torch.equal(plain, made)
    for a, e in zip(*(torch.autograd.grad(loss, h.leaves[:2]) for loss in (made, plain))):
        assert torch.equal(a, e)


def test_unsloth_multiplies_in_the_dtype_of_the_heads() -> None:
    """The student's states are f32 and its head bf16; the teacher's head is bf16, then f32."""
    h = heads(shape=(12,))
    rounded = [t.detach().bfloat16() for t in h[:4]]
    leaves = [rounded[0].float().requires_grad_(), rounded[1].requires_grad_()]
    for teacher, products in ((BF16, BF16), (F32, F32)):
        given = (*leaves, rounded[2], rounded[3].to(teacher))
        theirs = known(Heads(*given, *h[4:]), 0.5)  # type: ignore[arg-type]
        same(unsloth.fused_linear_jsd(*given), theirs, leaves[:1], products)
        same(unsloth.fused_linear_jsd(*given), theirs, leaves[1:], BF16)


def test_unsloth_rounds_hidden_states_to_the_heads_dtype_beside_a_wider_teacher() -> None:
    h = heads(shape=(12,))
    w, x = h.weight.detach().bfloat16().requires_grad_(), h.input
    rounded = x.detach().bfloat16().float().requires_grad_()
    theirs = known(h._replace(input=rounded, weight=w), 0.5)
    made = unsloth.fused_linear_jsd(x, w, *h[2:4])
    close(made, theirs)
    close(torch.autograd.grad(made, x)[0], torch.autograd.grad(theirs, rounded)[0])


def test_unsloth_takes_numbers_as_tensors_and_a_bias_of_any_shape() -> None:
    h = heads()
    options: dict[str, Any] = {
        "beta": 0.3, "temperature": 1.3, "student_logit_scale": 0.5,
        "teacher_logit_softcapping": 3.0,
    }  # fmt: skip
    theirs = known(
        h, 0.3, temperature=1.3, logit_scale=0.5, teacher_softcap=3.0,
        **h.options("linear_bias", "teacher_bias"),
    )  # fmt: skip
    for kind in (
        torch.tensor,
        str,
        lambda n: torch.tensor([n]),
        lambda n: torch.tensor(n).double(),
    ):
        made = unsloth.fused_linear_jsd(
            *h[:4], student_bias=h.bias[None], teacher_bias=h.teacher_bias[:, None],
            **{name: kind(number) for name, number in options.items()},
        )  # fmt: skip
        same(made, theirs, h.leaves)


def test_unsloths_errors_are_in_its_words() -> None:
    h = heads()
    call = unsloth.fused_linear_jsd
    with pytest.raises(ValueError, match=r"^beta is 2"):
        call(*h[:4], beta=2.0)
    with pytest.raises(ValueError, match="temperature"):
        call(*h[:4], temperature=-1.0)
    with pytest.raises(ValueError, match=r"teacher_hidden has shape \(5, 6\)"):
        call(*h[:2], h.teacher_input[0], h.teacher_weight)
    with pytest.raises(ValueError, match="teacher_weight"):
        call(*h[:3], h.teacher_weight[1:])
    with pytest.raises(ValueError, match="student_logit_softcapping is -1"):
        call(*h[:4], student_logit_softcapping=-1.0)
    tokens = tuple(h.input.shape[:-1])
    for name in ("mask", "labels"):
        for shape in ((1,), (), (3,), (*tokens, 1, 2)):
            with pytest.raises(ValueError) as caught:
                call(*h[:4], **{name: torch.ones(shape, dtype=torch.int64)})
            allowed = f"{tokens}, the tokens of student_hidden, or as many elements in another"
            assert f"{name} has shape {shape}; allowed: {allowed}" in str(caught.value)
        with pytest.raises(TypeError, match=f"^{name} is a list; allowed: a tensor"):
            call(*h[:4], **{name: [1]})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^student_hidden has shape \(\); allowed: \[\.\.\., D\]"):
        call(torch.ones(()), *h[1:4])
    with pytest.raises(ValueError, match=r"^num_items_in_batch has shape \(0,\); allowed: one"):
        call(*h[:4], num_items_in_batch=torch.ones(0))
    with pytest.raises(ValueError, match=r"^beta has shape \(2,\); allowed: one element"):
        call(*h[:4], beta=torch.ones(2))
    with pytest.raises(TypeError, match=r"^temperature is a str; allowed: a number"):
        call(*h[:4], temperature="warm")
    with pytest.raises(TypeError, match=r"^beta is a NoneType; allowed: a number"):
        call(*h[:4], beta=None)
    with pytest.raises(TypeError, match=r"^teacher_weight is a NoneType; allowed: a tensor"):
        call(*h[:3], None)
    with pytest.raises(ValueError, match=r"^student_bias has shape \(2, 37\)"):
        call(*h[:4], student_bias=torch.ones(2, 37))


# --- memory ---

Call = Callable[..., Tensor]


def trls(x: Tensor, w: Tensor, y: Tensor, u: Tensor, memory: Any = None) -> Tensor:
    patch = trl_module.TrlPatch(memory)
    return patch.divergence.apply(x, w, None, y, u, None, 0.5)[0]


def chunked(x: Tensor, w: Tensor, y: Tensor, u: Tensor, **more: Any) -> Tensor:
    loss: Tensor = liger.LigerFusedLinearJSDLoss(0.0, 1.0, chunk_size=64, **more)(
        x, w, y, u, torch.zeros(len(x), dtype=torch.long)
    )
    return loss


# Each adapter, and the bytes that the function it replaces takes beyond inputs and gradients, as a
# formula of (N, D, V, element size) that follows its chunks.
ADAPTERS: dict[str, tuple[Call, Callable[[int, int, int, int], int]]] = {
    "trl": (trls, lambda n, d, v, s: 8 * n * 32768 + (s * n * v + 4 * (n + v) * d) * (s < 4)),
    "liger": (
        lambda x, w, y, u, **more: LigerFusedLinearJSD(**more)(x, w, y, u, None),
        lambda n, d, v, s: 9 * 4 * 4 * v,
    ),
    "liger, f32 sums": (
        lambda x, w, y, u, **more: LigerFusedLinearJSD(accum_dtype=F32, **more)(x, w, y, u, None),
        lambda n, d, v, s: 9 * 4 * 4 * v + 4 * v * d * (s < 4),
    ),
    "liger's chunked": (chunked, lambda n, d, v, s: s * (3 * 67 * v + v * d)),
    "unsloth": (
        lambda x, w, y, u, **more: unsloth.fused_linear_jsd(x, w, y, u, rows_per_chunk=64, **more),
        lambda n, d, v, s: 64 * v * (8 + s) + (4 * v * d - s * v * d) * (s < 4),
    ),
}  # fmt: skip


def given(dtype: torch.dtype, n: int = 600, d: int = 16, v: int = 2500) -> list[Tensor]:
    x, w, y, u = (torch.randn(size).to(dtype) for size in ((n, d), (v, d), (n, 24), (v, 24)))
    return [x.requires_grad_(), w.requires_grad_(), y, u]


def taken(ran: list[Ran], call: Call, tensors: list[Tensor], **more: Any) -> int:
    """The most bytes that one call of the library took for kept state and workspace together."""
    ran.clear()
    loss = call(*tensors, **more)
    if loss.requires_grad:
        loss.backward(torch.randn(loss.shape))
    return max(r.bytes for r in ran)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ADAPTERS)
def test_takes_what_the_other_takes(
    name: str, dtype: torch.dtype, ran: list[Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, peak = ADAPTERS[name]
    tensors = given(dtype)
    (n, d), v, size = tensors[0].shape, len(tensors[1]), dtype.itemsize
    allowed = 1.1 * peak(n, d, v, size)
    with monkeypatch.context() as nothing:
        nothing.setattr(_divergence, "frugal_beside", lambda *_: Room(1))
        least = taken(ran, call, tensors)
    found = taken(ran, call, tensors)
    assert least <= found <= max(allowed, least)
    with default_memory("1TiB"):
        whole = taken(ran, call, tensors)
    assert least < whole, "else the case shows nothing"
    if least < allowed < whole:
        assert found > 0.6 * allowed, "what is allowed is used"
    assert taken(ran, call, tensors, memory=1 << 40) == whole
    with torch.no_grad():
        assert taken(ran, call, tensors) <= max(allowed, least)


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize(("dtype", "sizes"), CASES, ids=str)
def test_a_divergences_default_is_never_too_small(name: str, dtype: Any, sizes: Any) -> None:
    check_default_is_enough(ADAPTERS[name][0], *given(dtype, *sizes))


def test_copies_of_weights_are_part_of_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[int] = []
    real = _divergence.frugal_beside

    def spy(*args: Any) -> Any:
        room = real(*args)
        rooms.append(room.bytes)
        return room

    monkeypatch.setattr(_divergence, "frugal_beside", spy)
    x, w, y, u = given(F32)
    trls(x, w, y, u)
    with torch.autocast("cpu", BF16):
        trls(x, w, y, u)
    trls(x, w, y.bfloat16(), u.bfloat16())
    tiles = 8 * 600 * 32768
    of_16_bits = tiles + 2 * 600 * 2500
    assert rooms == [
        tiles * 21 // 20,
        of_16_bits * 21 // 20 - 2 * 2500 * (16 + 24),
        tiles * 21 // 20 - 4 * 2500 * 24,
    ]


# Memory that the replaced functions take with gradients, in MiB: measured in bf16 on an H100
# (bench/results/gpu-2026-11-28-divergence.txt), at N 8192 and these D and V.
MEASURED: dict[str, tuple[Callable[[Sizes], int], tuple[int, int]]] = {
    "trl": (trl_module._divergence_peak, (3390, 2438)),
    "liger": (liger._jsd_peak, (1127, 669)),
    "unsloth": (lambda call: unsloth._jsd_peak(call, None), (2004, 1187)),
}


@pytest.mark.parametrize("name", MEASURED)
def test_peaks_are_those_that_were_measured(name: str) -> None:
    peak, measured = MEASURED[name]
    for (d, v), mib in zip(((4096, 128256), (2048, 151936)), measured):
        found = peak(Sizes(8192, d, v, 2, True, 4 * (8192 + v) * d, 4 * v * d)) / MIB
        assert found == pytest.approx(mib, rel=0.01)

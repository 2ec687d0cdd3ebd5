# SPDX-License-Identifier: Apache-2.0
"""vocab_ids: a list of rows as the vocabulary. Against f64 of the listed rows' logits, and bit by
bit against the same call on these rows given by hand. A vocabulary split over ranks is tested in
test_devices_vocab_ids.py, JAX in test_jax_vocab_ids.py, NumPy in test_numpy.py."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import reference
from logitless.torch import (
    LinearCrossEntropyHead,
    LinearCrossEntropyLoss,
    LinearDivergenceLoss,
    _vocabulary,
    linear_cross_entropy,
    linear_divergence,
    linear_logprob,
    linear_logprobs_at,
    workspace_size,
)
from reference import close
from test_linear import BF16, F16, F32, problem

NAN = math.nan
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
BOTH = pytest.mark.parametrize("compiled", [False, True])
VOCAB, LISTED = 41, 13


def list_of(vocab: int = VOCAB, listed: int = LISTED, device: str = "cpu") -> Tensor:
    """A list of ids in random order."""
    return torch.randperm(vocab, device=device)[:listed]


def targets_of(ids: Tensor, shape: tuple[int, ...], ignored: float = 0.2) -> Tensor:
    """Targets from the list, some of them ignored."""
    target = ids[torch.randint(0, ids.shape[0], shape, device=ids.device)].long()
    return target.masked_fill(torch.rand(shape, device=ids.device) < ignored, -100)


def in_list(target: Tensor, ids: Tensor, ignored: int = -100) -> Tensor:
    """The place of each target in the sorted list."""
    ordered = ids.long().sort().values
    return (ordered[None] == target.reshape(-1, 1)).int().argmax(-1).view_as(target).masked_fill(
        target == ignored, ignored
    )  # fmt: skip


def bits(x: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().contiguous().view(integers[x.element_size()])


def same(ours: Any, theirs: Any) -> None:
    for mine, of in zip(ours, theirs, strict=True):
        assert (mine is None) == (of is None)
        assert mine is None or torch.equal(bits(mine), bits(of))


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2, "reduction": "sum"},
    "softcap": {"softcap": 2.0, "logit_scale": 0.7, "temperature": 0.8},
    "none": {"reduction": "none"},
    "classes": {"weight": VOCAB, "label_smoothing": 0.2},
    "tokens": {"token_weight": (3, 11), "temperature": (3, 11), "normalizer": 7.0},
    "memory": {"memory": "8MiB", "reduction": "none"},
}


def options_of(name: str, device: str) -> dict[str, Any]:
    """The options of this name. Shapes become random tensors."""
    made = dict(OPTIONS[name])
    for option in ("weight", "token_weight", "temperature"):
        if isinstance(made.get(option), (int, tuple)):
            made[option] = 0.5 + torch.rand(made[option], device=device)
    return made


def exact(
    x: Tensor, w: Tensor, b: Tensor | None, t: Tensor, ids: Tensor, options: dict[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    """The loss in f64 from the listed columns of all logits, and the leaves."""
    leaves = [v.detach().double().requires_grad_() for v in (x, w, b) if v is not None]
    ordered = ids.long().sort().values
    given = {name: v for name, v in options.items() if name != "memory"}
    if given.get("weight") is not None:
        given["weight"] = given["weight"][ordered]
    logits = reference.logits_of(*leaves)[..., ordered]
    return reference.loss(logits, in_list(t, ids), **given), leaves


@DTYPES
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_are_those_of_f64(device: str, dtype: torch.dtype, name: str) -> None:
    x, w, b, _ = problem((3, 11), VOCAB, 16, dtype, device, bias=True)
    assert b is not None
    ids = list_of(device=device)
    t, options = targets_of(ids, (3, 11)), options_of(name, device)
    ours = linear_cross_entropy(x, w, t, linear_bias=b, vocab_ids=ids, **options)
    theirs, leaves = exact(x, w, b, t, ids, options)
    close(ours, theirs)
    upstream = torch.randn(ours.shape, device=device)
    grads = torch.autograd.grad(ours, (x, w, b), upstream)
    others = torch.ones(VOCAB, dtype=torch.bool, device=device).index_fill(0, ids, False)
    for mine, of in zip(grads, torch.autograd.grad(theirs, leaves, upstream.double())):
        assert mine.dtype is dtype
        close(mine, of, dtype)
    assert not grads[1][others].any() and not grads[2][others].any()


NAMES = ("lse", "logprob", "entropy", "argmax", "rank", "mean_logit", "max_logprob", "mass_above")


@DTYPES
@pytest.mark.parametrize("name", OPTIONS)
@BOTH
def test_it_has_the_bits_of_the_same_rows_by_hand(
    device: str, dtype: torch.dtype, name: str, compiled: bool
) -> None:
    x, w, b, _ = problem((3, 11), VOCAB, 16, dtype, device, bias=True)
    assert b is not None
    ids = list_of(device=device)
    ordered = ids.sort().values
    t, options = targets_of(ids, (3, 11)), options_of(name, device)
    call = torch.compile(linear_cross_entropy, fullgraph=True) if compiled else linear_cross_entropy
    mine = [v.detach()[ordered].requires_grad_() for v in (w, b)]
    by_hand = dict(options)
    if "weight" in options:
        by_hand["weight"] = options["weight"][ordered]
    theirs, s = call(
        x, mine[0], in_list(t, ids), linear_bias=mine[1], return_statistics=NAMES, **by_hand
    )
    upstream = torch.randn(theirs.shape, device=device)
    expected = torch.autograd.grad(theirs, (x, *mine), upstream)
    for given in (ids, ids.flip(0), ids.int()):
        ours, found = call(
            x, w, t, linear_bias=b, return_statistics=NAMES, vocab_ids=given, **options
        )
        grads = torch.autograd.grad(ours, (x, w, b), upstream)
        ids_of = torch.where(s.argmax < 0, s.argmax, ordered[s.argmax.clamp(min=0)])
        same((ours, *found), (theirs, *s._replace(argmax=ids_of)))
        same((grads[0], grads[1][ordered], grads[2][ordered]), expected)


@pytest.mark.slow
@BOTH
def test_chosen_ids_are_those_of_the_whole_vocabulary(device: str, compiled: bool) -> None:
    call = torch.compile(linear_logprobs_at, fullgraph=True) if compiled else linear_logprobs_at
    for columns in (1, 4):
        x, w, _, _ = problem((2, 5), VOCAB, 16, device=device)
        ids = list_of(device=device)
        chosen = targets_of(ids, (2, 5, columns)).clamp(min=-1)
        ours, s = call(x, w, chosen, vocab_ids=ids, return_statistics=("lse", "argmax"))
        hand = w.detach()[ids.sort().values].requires_grad_()
        theirs, of = call(x, hand, in_list(chosen, ids, -1), return_statistics=("lse", "argmax"))
        same((ours, s.lse), (theirs, of.lse))
        assert set(s.argmax.flatten().tolist()) <= {*ids.tolist(), -1}
        g = torch.randn(ours.shape, device=device)
        grads = torch.autograd.grad(ours, (x, w), g)
        expected = torch.autograd.grad(theirs, (x, hand), g)
        same((grads[0], grads[1][ids.sort().values]), expected)
    t = targets_of(ids, (2, 5))
    made = linear_logprob(x, w, t, entropy=True, vocab_ids=ids)
    same(made, linear_logprob(x, hand, in_list(t, ids), entropy=True))


def test_nothing_of_other_rows_is_read(device: str) -> None:
    x, w, b, _ = problem((3, 11), VOCAB, 16, device=device, bias=True)
    assert b is not None
    ids = list_of(device=device)
    t = targets_of(ids, (3, 11))
    others = torch.ones(VOCAB, dtype=torch.bool, device=device).index_fill(0, ids, False)
    w, b = (v.detach().clone() for v in (w, b))
    w[others], b[others] = NAN, NAN
    w.requires_grad_(), b.requires_grad_()
    loss = linear_cross_entropy(x, w, t, linear_bias=b, vocab_ids=ids, label_smoothing=0.1)
    grads = torch.autograd.grad(loss, (x, w, b))
    assert loss.isfinite() and all(g.isfinite().all() for g in grads)
    assert not grads[1][others].any() and not grads[2][others].any()


@pytest.mark.parametrize("ignored", [0, 5, 1 << 40])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ignore_index_stays_what_it_is(device: str, ignored: int, dtype: torch.dtype) -> None:
    """ignore_index may be equal to a place in the list, or beyond 32 bits."""
    x, w, _, _ = problem((40,), VOCAB, 16, device=device)
    if dtype is torch.int32:
        ignored %= 1 << 31
    ids = list_of(device=device)
    if ignored == 5:
        ids = ids[ids != 5]
    t = targets_of(ids, (40,), 0)
    t[::3] = ignored
    counts = t != ignored
    ours = linear_logprob(x, w, t.to(dtype), ignore_index=ignored, vocab_ids=ids)
    theirs, _ = exact(x, w, None, t.masked_fill(~counts, -100), ids, {"reduction": "none"})
    close(-ours, theirs)
    assert not ours[~counts].any() and ours[counts].all()


def test_shift_moves_the_targets_and_leaves_the_first_unread(device: str) -> None:
    x, w, _, _ = problem((3, 11), VOCAB, 16, device=device)
    ids = list_of(device=device)
    t = targets_of(ids, (3, 11))
    t[:, :2] = 1 << 20
    ours = linear_cross_entropy(x, w, t, shift=2, vocab_ids=ids)
    theirs, _ = exact(x[:, :-2], w, None, t[:, 2:], ids, {})
    close(ours, theirs)


@BOTH
def test_a_frozen_head_has_no_gradient(device: str, compiled: bool) -> None:
    x, w, _, _ = problem((70,), VOCAB, 16, device=device)
    ids = list_of(device=device)
    t = targets_of(ids, (70,))
    call = torch.compile(linear_cross_entropy, fullgraph=True) if compiled else linear_cross_entropy
    w.requires_grad_(False)
    loss = call(x, w, t, vocab_ids=ids)
    (grad,) = torch.autograd.grad(loss, x)
    theirs, leaves = exact(x, w, None, t, ids, {})
    close(grad, torch.autograd.grad(theirs, leaves[0])[0])
    with torch.no_grad():
        assert torch.equal(call(x, w, t, vocab_ids=ids), loss)


@pytest.mark.parametrize("listed", [1, VOCAB])
def test_any_number_of_ids(device: str, listed: int) -> None:
    x, w, _, _ = problem((7,), VOCAB, 16, device=device)
    ids = list_of(listed=listed, device=device)
    t = targets_of(ids, (7,))
    ours = linear_cross_entropy(x, w, t, vocab_ids=ids)
    if listed == VOCAB:
        assert torch.equal(ours, linear_cross_entropy(x, w, t))
    else:
        assert ours == 0
    grads = torch.autograd.grad(ours, (x, w))
    theirs, leaves = exact(x, w, None, t, ids, {})
    for mine, of in zip(grads, torch.autograd.grad(theirs, leaves)):
        close(mine, of)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (2, 1, 3)], ids=str)
def test_tokens_have_any_shape(device: str, shape: tuple[int, ...]) -> None:
    x, w, _, _ = problem(shape, VOCAB, 8, device=device)
    ids = list_of(device=device)
    t = targets_of(ids, shape, 0)
    loss = linear_cross_entropy(x, w, t, vocab_ids=ids, reduction="none")
    theirs, leaves = exact(x, w, None, t, ids, {"reduction": "none"})
    close(loss, theirs)
    grads = torch.autograd.grad(loss.sum(), (x, w))
    for mine, of in zip(grads, torch.autograd.grad(theirs.sum(), leaves)):
        close(mine, of)


def test_noncontiguous_tensors(device: str) -> None:
    x, w, _, _ = problem((4, 6), VOCAB, 16, device=device)
    ids = torch.stack((list_of(device=device),) * 2, -1)[:, 0]
    t = targets_of(ids, (6, 4)).t()
    turned = w.detach().t().contiguous().t().requires_grad_()
    assert not turned.is_contiguous() and not ids.is_contiguous() and not t.is_contiguous()
    ours = linear_cross_entropy(x, turned, t, vocab_ids=ids)
    theirs = linear_cross_entropy(x, w, t.contiguous(), vocab_ids=ids.contiguous())
    assert torch.equal(ours, theirs)
    same(torch.autograd.grad(ours, (x, turned)), torch.autograd.grad(theirs, (x, w)))


# --- functions that call it ---


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_serves_other_sizes(device: str, dynamic: bool) -> None:
    compiled = torch.compile(
        lambda x, w, t, i: linear_cross_entropy(
            x, w, t, vocab_ids=i, return_statistics=("lse", "argmax")
        ),
        fullgraph=True, dynamic=dynamic,
    )  # fmt: skip
    for shape, listed in (((2, 5), 13), ((3, 7), 17)):
        x, w, _, _ = problem(shape, VOCAB, 8, device=device)
        ids = list_of(listed=listed, device=device)
        t = targets_of(ids, shape)
        ours, s = compiled(x, w, t, ids)
        plain, of = linear_cross_entropy(
            x, w, t, vocab_ids=ids, return_statistics=("lse", "argmax")
        )
        same((ours, *s), (plain, *of))
        for mine, by in zip(torch.autograd.grad(ours, (x, w)), torch.autograd.grad(plain, (x, w))):
            close(mine, by.double())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_makes_it_again(device: str, reentrant: bool) -> None:
    x, w, _, _ = problem((6, 50), VOCAB, 16, device=device)
    ids = list_of(device=device)
    t = targets_of(ids, (6, 50))

    def call(x: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(x, w, t, vocab_ids=ids)

    ours = checkpoint(call, x, w, use_reentrant=reentrant)
    ours.backward()
    theirs, leaves = exact(x, w, None, t, ids, {})
    close(ours, theirs)
    for mine, of in zip((x.grad, w.grad), torch.autograd.grad(theirs, leaves)):
        assert mine is not None
        close(mine, of)


def test_autocast_casts_the_rows(device: str) -> None:
    x, w, b, _ = problem((3, 11), VOCAB, 16, device=device, bias=True)
    ids = list_of(device=device)
    t = targets_of(ids, (3, 11))
    with torch.autocast(device, BF16):
        ours = linear_cross_entropy(x, w, t, linear_bias=b, vocab_ids=ids)
    theirs = linear_cross_entropy(x.bfloat16(), w.bfloat16(), t, linear_bias=b, vocab_ids=ids)
    assert torch.equal(ours, theirs)
    (grad,) = torch.autograd.grad(ours, w)
    assert grad.dtype is F32 and grad.shape == w.shape


def test_meta_and_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for mode in (torch.device("meta"), FakeTensorMode()):
        with mode:
            x, w = torch.randn(2, 5, 8, requires_grad=True), torch.randn(19, 8, requires_grad=True)
            ids, t = torch.zeros(4, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64)
            loss, s = linear_cross_entropy(x, w, t, vocab_ids=ids, return_statistics="argmax")
            assert loss.shape == () and s.argmax.shape == (2, 5)
            loss.backward()
            assert w.grad is not None and w.grad.shape == w.shape
            with pytest.raises(ValueError, match=r"^vocab_ids has shape \(20,\); .* 1 to 19 ids"):
                linear_cross_entropy(x, w, t, vocab_ids=torch.zeros(20, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_its_ops_are_what_they_say_of_themselves(device: str, dtype: torch.dtype) -> None:
    ids = torch.stack((list_of(device=device),) * 2, -1)[:, 0].to(dtype)
    ordered, order, wrong = torch.ops.logitless.sort_list(ids, VOCAB, "vocab_ids")
    torch.library.opcheck(torch.ops.logitless.sort_list.default, (ids, VOCAB, "vocab_ids"))
    t = targets_of(ids, (6, 4)).to(dtype).t()
    torch.library.opcheck(
        torch.ops.logitless.places.default,
        (t, ordered, order, wrong, -100, 1, "target", "vocab_ids"),
    )


def test_it_is_differentiated_once() -> None:
    x, w, _, t = problem((4,), 9, 6, ignored=0)
    made = linear_cross_entropy(x, w, t, vocab_ids=torch.arange(9))
    (grad,) = torch.autograd.grad(made, w, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated once only"):
        grad.sum().backward()


def test_transforms_are_refused() -> None:
    x, w, _, t = problem((4,), 9, 6, ignored=0)
    with pytest.raises(NotImplementedError, match=r"torch\.func transforms"):
        torch.func.grad(
            lambda w: linear_cross_entropy(x.detach(), w, t, vocab_ids=torch.arange(9))
        )(w.detach())


def test_workspace_size_counts_the_copy() -> None:
    x, w, b, t = problem((6, 50), 700, 16, bias=True)
    ids = list_of(700, 100)
    assert b is not None
    hand = w.detach()[ids].requires_grad_()
    bias = b.detach()[ids].requires_grad_()
    by_hand = workspace_size(x, hand, t, linear_bias=bias, reduction="none")
    copied = workspace_size(x, w, t, linear_bias=b, reduction="none", vocab_ids=ids) - by_hand
    assert copied == 2 * hand.nbytes + 24 * 100
    w.requires_grad_(False)
    hand.requires_grad_(False)
    classes = torch.rand(700)
    frozen = workspace_size(x, w, t, weight=classes, vocab_ids=ids)
    assert frozen - workspace_size(x, hand, t, weight=classes[ids]) == hand.nbytes + 24 * 100


@pytest.mark.parametrize("bias", [False, True])
def test_a_module_keeps_the_list(bias: bool) -> None:
    x, w, _, _ = problem((3, 11), VOCAB, 16)
    ids = list_of()
    t = targets_of(ids, (3, 11))
    module = LinearCrossEntropyLoss(vocab_ids=ids, label_smoothing=0.1)
    wanted = linear_cross_entropy(x, w, t, vocab_ids=ids, label_smoothing=0.1)
    assert torch.equal(copy.deepcopy(module)(x, w, t), wanted)
    head: LinearCrossEntropyHead[Tensor] = LinearCrossEntropyHead(16, VOCAB, bias, vocab_ids=ids)
    head = copy.deepcopy(head.bfloat16())
    assert head.loss.vocab_ids is not None and head.loss.vocab_ids.dtype is torch.int64
    assert set(head.state_dict()) == {"weight", "bias"} - (set() if bias else {"bias"})
    loss = head(x.bfloat16(), t)
    logits = head(x.bfloat16())
    assert torch.equal(logits.isneginf().logical_not().any(0).any(0).nonzero()[:, 0], ids.sort()[0])
    close(loss, torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), t.flatten()), BF16)


def test_a_module_from_the_meta_device_has_no_list_until_it_is_written() -> None:
    with torch.device("meta"):
        head = LinearCrossEntropyHead(4, 9, vocab_ids=torch.zeros(3, dtype=torch.int64))
    head = head.to_empty(device="cpu")
    torch.nn.init.zeros_(head.weight)
    with pytest.raises(ValueError, match=r"^vocab_ids\[0\] is -1; allowed: 0 to 8"):
        head(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    assert head.loss.vocab_ids is not None
    head.loss.vocab_ids.copy_(torch.tensor([0, 4, 2]))
    close(head(torch.zeros(2, 4), torch.zeros(2).long()), torch.tensor(3.0).double().log())


def test_main_grad_is_refused() -> None:
    head = LinearCrossEntropyHead(4, 9, vocab_ids=torch.arange(3), grad_accumulation="main_grad")
    with pytest.raises(NotImplementedError, match=r'^grad_accumulation is "main_grad"; allowed'):
        head(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))


# --- errors ---


def wrong_lists(device: str = "cpu") -> dict[str, tuple[Any, str]]:
    ids = torch.tensor([7, 2, 30, 11], device=device)
    return {
        "beyond": (ids.where(ids != 30, 41), r"vocab_ids\[2\] is 41; allowed: 0 to 40, each once"),
        "negative": (ids.where(ids != 2, -1), r"vocab_ids\[1\] is -1; allowed: 0 to 40, each once"),
        "twice": (ids.where(ids != 11, 2), r"vocab_ids\[3\] is 2, as vocab_ids\[1\] is; allowed: "),
        "empty": (ids[:0], r"vocab_ids has shape \(0,\); allowed: \(V',\), of 1 to 41 ids, each "),
        "more": (torch.arange(42, device=device), r"vocab_ids has shape \(42,\); allowed: \(V',\)"),
        "a matrix": (ids[None], r"vocab_ids has shape \(1, 4\); allowed: \(V',\), of 1 to 41 ids"),
        "floats": (ids.float(), r"vocab_ids is float32; allowed: int32, int64"),
        "bytes": (ids.byte(), r"vocab_ids is uint8; allowed: int32, int64"),
        "a Python list": ([1, 2], r"vocab_ids is a list; allowed: a tensor"),
        "elsewhere": (ids.to("meta"), rf"vocab_ids is on meta; allowed: {device}.*linear_weight"),
    }


FOUND = ("beyond", "negative", "twice")  # errors found only by reading the list


# For what is known without the elements, the compiler wraps our message in its own.
@pytest.mark.parametrize(
    ("name", "compiled"), [*((n, False) for n in wrong_lists()), *((n, True) for n in FOUND)]
)
def test_a_wrong_list_is_named(name: str, compiled: bool) -> None:
    x, w, _, _ = problem((2, 5), VOCAB, 6)
    ids, message = wrong_lists()[name]
    t = torch.full((2, 5), 7)
    call = torch.compile(linear_cross_entropy, fullgraph=True) if compiled else linear_cross_entropy
    kind = TypeError if name in ("floats", "bytes", "a Python list") else (ValueError, RuntimeError)
    with pytest.raises(kind, match=f"^{message}"):
        call(x, w, t, vocab_ids=ids)
    if not compiled:
        with pytest.raises(kind, match=f"^{message}"):
            linear_logprobs_at(x, w, t[..., None], vocab_ids=ids)


@pytest.mark.parametrize("value", [8, 0, 3, -5, VOCAB, 1 << 40])
@BOTH
def test_a_target_that_is_not_listed_has_the_callers_index(value: int, compiled: bool) -> None:
    x, w, _, _ = problem((2, 5), VOCAB, 6)
    ids = torch.tensor([7, 2, 30, 11])
    call = torch.compile(linear_cross_entropy, fullgraph=True) if compiled else linear_cross_entropy
    t = torch.full((2, 5), 7)
    t[1, 3] = value
    said = rf"is {value}, which is not in vocab_ids; allowed: an id of the list, or ignore_index "
    with pytest.raises(ValueError, match=rf"^target\[1, 3\] \(flat: target\[8\]\) {said}\(-100\)$"):
        call(x, w, t, vocab_ids=ids)
    with pytest.raises(ValueError, match=rf"^target\[1, 3\] \(flat: target\[8\]\) {said}"):
        call(x, w, t, vocab_ids=ids, shift=True)
    at = torch.compile(linear_logprobs_at, fullgraph=True) if compiled else linear_logprobs_at
    chosen = torch.stack((torch.full((2, 5), 7), t), -1)
    said = rf"is {value}, which is not in vocab_ids; allowed: an id of the list, or -1 for none"
    with pytest.raises(ValueError, match=rf"^ids\[1, 3, 1\] \(flat: ids\[8, 1\]\) {said}$"):
        at(x, w, chosen, vocab_ids=ids)


def test_what_the_core_would_not_see_is_checked() -> None:
    x, w, b, _ = problem((2, 5), VOCAB, 6, bias=True)
    assert b is not None
    ids, t = torch.tensor([7, 2, 30, 11]), torch.full((2, 5), 7)
    for given, message in (
        ({"linear_bias": b[:-1]}, r"linear_bias has shape \(40,\); allowed: 41 in its first"),
        ({"weight": torch.ones(4)}, r"weight has shape \(4,\); allowed: 41 in its first dimens"),
        ({"ignore_index": 1 << 64}, r"ignore_index is 18446744073709551616; allowed: a 64-bit"),
        ({"weight": torch.ones(41, requires_grad=True)}, "weight requires grad"),
        ({"shift": 5}, r"shift is 5 of targets \(2, 5\); allowed"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            linear_cross_entropy(x, w, t, vocab_ids=ids, **given)
    with pytest.raises(TypeError, match=r"^target is int16; allowed: int32, int64"):
        linear_cross_entropy(x, w, t.short(), vocab_ids=ids)
    with pytest.raises(RuntimeError, match=r"^target is on meta; allowed: cpu, where linear_we"):
        linear_cross_entropy(x, w, t.to("meta"), vocab_ids=ids)
    with pytest.raises(ValueError, match=r"linear_weight has shape .*; allowed"):
        linear_cross_entropy(x, w[:, :-1], t, vocab_ids=ids)


# --- where no error can be raised ---


def unseen() -> Any:
    """Makes the CPU treat wrong ids as a GPU does: it raises nothing."""
    return mock.patch.multiple(
        torch.ops.logitless, sort_list=_vocabulary._sort_list, places=_vocabulary._places
    )


@pytest.mark.parametrize("name", FOUND)
def test_of_a_wrong_list_everything_is_nan(name: str) -> None:
    x, w, b, _ = problem((2, 5), VOCAB, 6, bias=True)
    assert b is not None
    ids, _ = wrong_lists()[name]
    t = torch.tensor([[7, 2, 30, 11, -100], [7, 7, 7, 7, 40]])
    counts = t != -100
    names = ("lse", "target_logit", "logprob", "entropy", "sum_p_squared", "mean_logit",
             "max_logprob", "mass_above")  # fmt: skip
    with unseen():
        loss, s = linear_cross_entropy(
            x, w, t, linear_bias=b, reduction="none", vocab_ids=ids, return_statistics=names
        )
        grads = torch.autograd.grad(loss.sum(), (x, w, b))
        mean = linear_cross_entropy(x, w, t, vocab_ids=ids)
        at = linear_logprobs_at(x, w, torch.stack((t, t), -1).clamp(min=-1), vocab_ids=ids)
    for made in (loss, *(getattr(s, n) for n in names)):
        assert made[counts].isnan().all() and not made[~counts].any()
    assert mean.isnan() and at[counts].isnan().all() and at[~counts].isneginf().all()
    assert grads[0][counts].isnan().all() and not grads[0][~counts].any()
    inside = ids.clamp(0, 40)
    assert grads[1][inside].isnan().all() and grads[2][inside].isnan().all()


def test_a_target_that_is_not_listed_is_out_of_range_where_nobody_waits() -> None:
    ids, t = torch.tensor([7, 2, 30, 11]), torch.tensor([7, 8, -100, 41])
    assert _vocabulary.listed(ids, torch.zeros(41, 2))[0].ordered.tolist() == [2, 7, 11, 30]
    with unseen():
        vocabulary, _ = _vocabulary.listed(ids, torch.zeros(41, 2))
        assert vocabulary.places(t, None, 0, "target").tolist() == [1, 4, -1, 4]


@pytest.mark.cuda
def test_on_a_gpu_wrong_ids_are_nan() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    x, w, _, _ = problem((5,), VOCAB, 16, BF16, "cuda")
    t = torch.tensor([7, 2, 30, 11, 8], device="cuda")
    ids = torch.tensor([7, 2, 30, 11], device="cuda")
    loss = linear_cross_entropy(x, w, t, vocab_ids=ids, reduction="none")
    assert loss[:4].isfinite().all() and loss[4].isnan()
    grads = torch.autograd.grad(loss[:4].sum(), (x, w))
    assert all(g.isfinite().all() for g in grads) and not grads[0][4].any()
    for name in FOUND:
        wrong, _ = wrong_lists("cuda")[name]
        loss = linear_cross_entropy(x, w, t, vocab_ids=wrong, reduction="none")
        grads = torch.autograd.grad(loss.sum(), (x, w))
        assert loss.isnan().all() and grads[0].isnan().all()
        assert grads[1][wrong.clamp(0, 40)].isnan().all()


@pytest.mark.cuda
def test_a_cuda_graph_replays_it_and_the_host_never_waits() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    x, w, _, _ = problem((70,), 211, 64, BF16, "cuda")
    ids = list_of(211, 50, "cuda")
    t = targets_of(ids, (70,))

    def step() -> tuple[Tensor, ...]:
        loss, s = linear_cross_entropy(x, w, t, vocab_ids=ids, return_statistics="argmax")
        assert s.argmax is not None
        return loss, s.argmax, *torch.autograd.grad(loss, (x, w))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    fresh = list_of(211, 50, "cuda")
    t.copy_(targets_of(fresh, (70,)))
    ids.copy_(fresh)
    graph.replay()
    same(replayed, step())


# --- divergences ---


DIVERGENCES: dict[str, dict[str, Any]] = {
    "forward_kl": {"label_weight": 0.3, "shift": True},
    "reverse_kl": {"reduction": "none"},
    "jsd": {"beta": 0.3, "softcap": 3.0, "teacher_temperature": 0.7},
    "skew_kl": {"token_weight": (3, 11), "reduction": "sum"},
    "tv": {},
}
OF_DIVERGENCE = ("entropy", "teacher_entropy", "acceptance", "logprob")


def of_list(teacher: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """The listed rows of the teacher's head, or columns of its logits."""
    chosen = {"teacher_weight": 0, "teacher_bias": 0, "teacher_logits": -1}
    return {n: v.index_select(chosen[n], rows) if n in chosen else v for n, v in teacher.items()}


def teacher_of(logits: bool, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    x, w, b, _ = problem((3, 11), VOCAB, 8, dtype, device, bias=True)
    assert b is not None
    if logits:
        return {"teacher_logits": (x @ w.t()).detach()}
    return {"teacher_input": x, "teacher_weight": w, "teacher_bias": b}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_divergence_has_the_bits_of_the_same_rows_by_hand(
    device: str, dtype: torch.dtype, kind: Any, logits: bool, compiled: bool
) -> None:
    call: Any = linear_divergence
    if compiled:
        call = torch.compile(linear_divergence, fullgraph=True)
    x, w, b, _ = problem((3, 11), VOCAB, 16, dtype, device, bias=True)
    assert b is not None
    teacher, ids = teacher_of(logits, dtype, device), list_of(device=device)
    ordered, t = ids.sort().values, targets_of(ids, (3, 11))
    options = dict(DIVERGENCES[kind], kind=kind, return_statistics=OF_DIVERGENCE)
    if "token_weight" in options:
        options["token_weight"] = torch.rand(3, 11, device=device)
    mine = [v.detach()[ordered].requires_grad_() for v in (w, b)]
    theirs, s = call(
        x, mine[0], linear_bias=mine[1], target=in_list(t, ids),
        **of_list(teacher, ordered), **options,
    )  # fmt: skip
    upstream = torch.randn(theirs.shape, device=device)
    expected = torch.autograd.grad(theirs, (x, *mine), upstream)
    others = torch.ones(VOCAB, dtype=torch.bool, device=device).index_fill(0, ids, False)
    for given in (ids, ids.flip(0)):
        ours, found = call(x, w, linear_bias=b, target=t, vocab_ids=given, **teacher, **options)
        grads = torch.autograd.grad(ours, (x, w, b), upstream)
        same((ours, *found), (theirs, *s))
        same((grads[0], grads[1][ordered], grads[2][ordered]), expected)
        assert not grads[1][others].any() and not grads[2][others].any()


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("logits", [False, True])
@BOTH
def test_rows_of_a_draft_head_belong_to_the_teachers_in_the_lists_order(
    device: str, kind: Any, logits: bool, compiled: bool
) -> None:
    call: Any = linear_divergence
    if compiled:
        call = torch.compile(linear_divergence, fullgraph=True)
    x, w, b, _ = problem((3, 11), LISTED, 16, device=device, bias=True)
    assert b is not None
    teacher, ids = teacher_of(logits, F32, device), list_of(device=device)
    t = targets_of(ids, (3, 11))
    options = dict(DIVERGENCES[kind], kind=kind, return_statistics=OF_DIVERGENCE)
    if "token_weight" in options:
        options["token_weight"] = torch.rand(3, 11, device=device)
    at = (ids[None] == t.reshape(-1, 1)).int().argmax(-1).view_as(t).masked_fill(t == -100, -100)
    theirs, s = call(x, w, linear_bias=b, target=at, **of_list(teacher, ids), **options)
    upstream = torch.randn(theirs.shape, device=device)
    expected = torch.autograd.grad(theirs, (x, w, b), upstream)
    ours, found = call(x, w, linear_bias=b, target=t, teacher_vocab_ids=ids, **teacher, **options)
    same((ours, *found), (theirs, *s))
    same(torch.autograd.grad(ours, (x, w, b), upstream), expected)
    order = torch.randperm(LISTED, device=device)  # the order must not matter
    again, _ = call(
        x, w[order], linear_bias=b[order], target=t, teacher_vocab_ids=ids[order], **teacher,
        **options,
    )  # fmt: skip
    close(again, ours.detach().double())


def test_without_a_target_nothing_is_mapped(device: str) -> None:
    x, w, _, _ = problem((3, 11), VOCAB, 16, device=device)
    teacher, ids = teacher_of(False, F32, device), list_of(device=device)
    ordered = ids.sort().values
    ours = linear_divergence(x, w, vocab_ids=ids, kind="tv", **teacher)
    theirs = linear_divergence(x, w[ordered], kind="tv", **of_list(teacher, ordered))
    assert torch.equal(ours, theirs)
    module = LinearDivergenceLoss("tv", vocab_ids=ids)
    assert torch.equal(copy.deepcopy(module)(x, w, **teacher), theirs)
    assert not module.state_dict()
    draft = w.detach()[:LISTED]
    paired = LinearDivergenceLoss("tv", teacher_vocab_ids=ids)
    assert torch.equal(
        paired(x, draft, **teacher),
        linear_divergence(x, draft, kind="tv", teacher_vocab_ids=ids, **teacher),
    )


@pytest.mark.slow
@BOTH
def test_wrong_lists_of_a_divergence_are_named(compiled: bool) -> None:
    call: Any = linear_divergence
    if compiled:
        call = torch.compile(linear_divergence, fullgraph=True)
    x, w, _, _ = problem((3, 11), VOCAB, 16)
    teacher, ids = teacher_of(False, F32, "cpu"), list_of()
    draft, t = w.detach()[:LISTED], targets_of(ids, (3, 11), 0)
    twice = ids.clone()
    twice[4] = ids[1]
    same_as = rf"teacher_vocab_ids\[4\] is {ids[1]}, as teacher_vocab_ids\[1\] is; allowed: each "
    with pytest.raises(ValueError, match=f"^{same_as}"):
        call(x, draft, teacher_vocab_ids=twice, **teacher)
    wrong = t.clone()
    wrong[1, 3] = missing = next(i for i in range(VOCAB) if i not in ids.tolist())
    for name, head in (("vocab_ids", w), ("teacher_vocab_ids", draft)):
        where = r"target\[1, 3\] \(flat: target\[14\]\)"
        with pytest.raises(ValueError, match=rf"^{where} is {missing}, which is not in {name}; al"):
            call(x, head, target=wrong, shift=True, **{name: ids}, **teacher)
    if compiled:
        return
    flat = {n: v[0] if n == "teacher_input" else v for n, v in teacher.items()}
    with pytest.raises(ValueError, match=rf"^target\[3\] is {missing}, which is not in vocab_ids"):
        call(x[0], w, target=wrong[1], shift=True, vocab_ids=ids, **flat)
    short = teacher | {"teacher_bias": teacher["teacher_bias"][1:]}
    head = teacher["teacher_weight"]
    for given, more, message in (
        (w, {"vocab_ids": ids, "teacher_vocab_ids": ids}, "vocab_ids and teacher_vocab_ids are "),
        (w, {"teacher_vocab_ids": ids}, r"teacher_vocab_ids has shape \(13,\); allowed: \(41,\)"),
        (w, {"vocab_ids": ids, **short}, r"teacher_bias has shape \(40,\); allowed: 41 in its f"),
        (w, {"vocab_ids": ids, "teacher_weight": head[1:]}, r"teacher_weight has shape \(40, 8\);"),
        (w[1:], {"vocab_ids": ids}, r"(teacher_weight|vocab_ids\[\d\]) "),
        (w, {"vocab_ids": ids, "linear_bias": ids}, r"linear_bias has shape \(13,\); allowed: 41"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call(x, given, **{**teacher, **more})
    with pytest.raises(ValueError, match=r"^teacher_vocab_ids is given without a teacher"):
        call(x, draft, teacher_vocab_ids=ids)
    with pytest.raises(
        ValueError, match=r"^teacher_logits has shape \(3, 11, 40\); allowed: 41 in"
    ):
        call(x, w, vocab_ids=ids, teacher_logits=torch.zeros(3, 11, 40))


@pytest.mark.parametrize("name", ["vocab_ids", "teacher_vocab_ids"])
@pytest.mark.parametrize("logits", [False, True])
def test_of_a_wrong_list_a_divergence_is_nan(name: str, logits: bool) -> None:
    x, w, _, _ = problem((3, 11), VOCAB, 16)
    teacher, ids = teacher_of(logits, F32, "cpu"), list_of()
    t = targets_of(ids, (3, 11))
    counts = t != -100
    ids[3] = ids[5]
    head = w if name == "vocab_ids" else w.detach()[:LISTED].requires_grad_()
    wanted = OF_DIVERGENCE if name == "vocab_ids" else ("teacher_entropy", "acceptance")
    for kind in DIVERGENCES:
        with unseen():
            loss, s = linear_divergence(
                x, head, kind=kind, target=t, reduction="none", return_statistics=wanted,  # type: ignore[arg-type]
                **{name: ids}, **teacher,
            )  # type: ignore[call-overload]  # fmt: skip
        grads = torch.autograd.grad(loss.sum(), (x, head))
        for made in (loss, *(getattr(s, n) for n in wanted), grads[0]):
            assert made[counts].isnan().all() and not made[~counts].any()
        assert grads[1][ids if name == "vocab_ids" else slice(None)].isnan().all()


# --- mutants: bugs that these tests find ---


def _unordered(ids: Tensor, vocab: int, name: str) -> tuple[Tensor, Tensor, Tensor]:
    made = _sort_list(ids, vocab, name)
    return ids.long().clamp(0, vocab - 1), made[1], made[2]


def _loses_ignored(target: Tensor, *rest: Any) -> Tensor:
    made: Tensor = _places(target, *rest)
    return made.masked_fill(made == _vocabulary.ABSENT, 0)


def _reads_all(target: Tensor, *rest: Any) -> Tensor:
    made: Tensor = _on_host(target, *rest[:4], 0, *rest[5:])
    return made


def _adds(ctx: Any, grad: Tensor) -> Any:
    (rows,) = ctx.saved_tensors
    return grad.new_ones(ctx.shape).index_copy_(0, rows, grad), None, None


def _sums_wrong(ids: Tensor, vocab: int, name: str) -> Any:
    ordered, order, wrong = _sort_list(ids, vocab, name)
    return ordered, order, torch.zeros_like(wrong)


def _finds_near(target: Tensor, ordered: Tensor, order: Tensor, *rest: Any) -> Tensor:
    near: Tensor = _places(target, ordered, order, *rest)
    return near.clamp(max=ordered.shape[0] - 1)


def _paired_in_order(ids: Tensor, weight: Tensor, vocab: Any) -> Any:
    made = _paired(ids, weight, vocab)
    return made._replace(rows=made.ordered)


def _takes_columns(self: Any, logits: Tensor) -> Tensor:
    return logits.index_select(-1, self.rows)


_paired = _vocabulary.paired
_sort_list, _places = _vocabulary._sort_list, _vocabulary._places
_on_host = _vocabulary._places_on_host
_ops: Any = torch.ops.logitless
MUTANTS: dict[str, tuple[Any, str, Any, Callable[[], None]]] = {
    "the list is not sorted": (
        _ops, "sort_list", _unordered,
        lambda: test_it_has_the_bits_of_the_same_rows_by_hand("cpu", F32, "nothing", False),
    ),
    "ignored targets count": (
        _ops, "places", _loses_ignored,
        lambda: test_ignore_index_stays_what_it_is("cpu", 0, torch.int64),
    ),
    "targets that a shift drops are read": (
        _ops, "places", _reads_all,
        lambda: test_shift_moves_the_targets_and_leaves_the_first_unread("cpu"),
    ),
    "other rows have a gradient": (
        _vocabulary._Rows, "backward", staticmethod(_adds),
        lambda: test_nothing_of_other_rows_is_read("cpu"),
    ),
    "argmax is a place of the list": (
        _vocabulary.Vocabulary, "whole", lambda self, places: places,
        lambda: test_it_has_the_bits_of_the_same_rows_by_hand("cpu", F32, "nothing", False),
    ),
    "an id that is not listed is its neighbour": (
        _vocabulary, "_places", _finds_near,
        test_a_target_that_is_not_listed_is_out_of_range_where_nobody_waits,
    ),
    "a wrong list is taken": (
        _vocabulary, "_sort_list", _sums_wrong,
        lambda: test_of_a_wrong_list_everything_is_nan("twice"),
    ),
    "the teacher's rows are sorted": (
        _vocabulary, "paired", _paired_in_order,
        lambda: test_rows_of_a_draft_head_belong_to_the_teachers_in_the_lists_order(
            "cpu", "tv", False, False
        ),
    ),
    "a wrong list's columns of the teacher's logits are taken": (
        _vocabulary.Vocabulary, "columns", _takes_columns,
        lambda: test_of_a_wrong_list_a_divergence_is_nan("vocab_ids", True),
    ),
    "lengths are not looked at": (
        _vocabulary, "check_extent", lambda *_, **__: None,
        test_what_the_core_would_not_see_is_checked,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_bug_makes_a_check_fail(name: str) -> None:
    where, function, mutant, check = MUTANTS[name]
    check()
    with mock.patch.object(where, function, mutant), pytest.raises(BaseException):  # noqa: B017
        check()


@pytest.mark.parametrize("wrong", [[-1, 2], [1, 1, 5], [1, 37], [-3]])
def test_a_head_without_targets_checks_its_list_too(wrong: list[int]) -> None:
    from logitless.torch import LinearCrossEntropyHead

    head = LinearCrossEntropyHead(16, 37, vocab_ids=torch.tensor(wrong))
    with pytest.raises(ValueError, match=r"^vocab_ids\[\d\] is "):
        head(torch.randn(3, 16))

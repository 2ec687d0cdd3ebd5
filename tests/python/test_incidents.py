# SPDX-License-Identifier: Apache-2.0
"""What went wrong in implementations of this loss. The cases that name an incident are written from
its public description."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import reference
from logitless.torch import LinearCrossEntropyHead, cross_entropy, linear_cross_entropy
from reference import close
from test_linear import BF16, F32, check, problem


@pytest.mark.parametrize("upstream", ["ones", "random", "masked"])
def test_reduction_none_has_the_upstream_gradient_of_every_token(
    device: str, upstream: str
) -> None:
    """Liger-Kernel#968, DirectML#739: zero or wrong gradients with reduction none."""
    x, w, b, t = problem((4, 9), 37, 16, device=device, bias=True)
    assert b is not None
    factor = {
        "ones": torch.ones(4, 9),
        "random": torch.randn(4, 9),
        "masked": (torch.arange(36) % 3 == 0).float().view(4, 9),
    }[upstream].to(device)
    loss = linear_cross_entropy(x, w, t, linear_bias=b, reduction="none")
    expected = reference.loss(reference.logits_of(x, w, b), t, reduction="none")
    ours = torch.autograd.grad((loss * factor).sum(), (x, w, b))
    theirs = torch.autograd.grad((expected * factor).sum(), (x, w, b))
    for a, e in zip(ours, theirs):
        close(a, e)
        assert a.any()


@pytest.mark.parametrize("layout", ["input", "weight", "both"])
def test_a_transposed_operand_is_read_as_it_lies(device: str, layout: str) -> None:
    """TransformerEngine#2734: a silently wrong loss for transposed inputs."""
    x, w, _, t = problem((12,), 37, 16, device=device)
    x, w = x.detach(), w.detach()
    if layout != "weight":
        x = x.T.contiguous().T
    if layout != "input":
        w = w.T.contiguous().T
    check(x.requires_grad_(), w.requires_grad_(), None, t)


@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 33, 127, 128, 129, 255, 256, 257])
def test_targets_at_the_edges_of_any_vocabulary(device: str, vocab: int) -> None:
    """ml-cross-entropy#59: targets that met padded columns gave an infinite loss."""
    x, w, _, _ = problem((6,), vocab, 8, device=device)
    t = torch.tensor([0, vocab - 1, vocab // 2, 0, vocab - 1, -100], device=device)
    loss = linear_cross_entropy(x, w, t, reduction="none")
    assert loss.isfinite().all() and loss[5] == 0
    if vocab > 1:
        close(loss, reference.loss(reference.logits_of(x, w), t, reduction="none"))
    else:
        assert not loss.any()


def test_a_target_out_of_range_is_not_accepted() -> None:
    """pytorch#43840, #49882: accepted in silence on some devices."""
    x, w, _, t = problem((6,), 37, 8, ignored=0)
    for wrong in (37, 1 << 40, -1, -101):
        bad = t.clone()
        bad[2] = wrong
        for function in (linear_cross_entropy, lambda x, w, t: cross_entropy(x @ w.T, t)):
            with pytest.raises(ValueError, match="target"):
                function(x, w, bad)


def test_ignored_rows_may_hold_anything(device: str) -> None:
    """A padding row of NaN or inf must not reach the loss, or any gradient."""
    x, w, _, t = problem((8,), 37, 16, device=device, ignored=0)
    t[3], t[6] = -100, -100
    clean = linear_cross_entropy(x, w, t)
    wanted = torch.autograd.grad(clean, (x, w))
    dirty = x.detach().clone()
    dirty[3], dirty[6] = float("nan"), float("inf")
    dirty.requires_grad_()
    loss = linear_cross_entropy(dirty, w, t)
    grads = torch.autograd.grad(loss, (dirty, w))
    assert torch.equal(loss, clean)
    for a, e in zip(grads, wanted):
        assert torch.equal(a, e)


def test_many_small_bf16_contributions_are_not_lost(device: str) -> None:
    """Megatron-LM#2739: gradients of a weight added up in bf16 stop growing."""
    tokens = 4096
    x = torch.ones(tokens, 4, device=device, dtype=BF16)
    w = torch.zeros(8, 4, device=device, dtype=BF16, requires_grad=True)
    t = torch.zeros(tokens, dtype=torch.int64, device=device)
    linear_cross_entropy(x, w, t, reduction="sum").backward()
    expected = torch.full((8, 4), tokens / 8, device=device)
    expected[0] = -tokens * 7 / 8
    assert w.grad is not None
    close(w.grad, expected.double(), BF16)


def test_an_ignore_index_inside_the_vocabulary(device: str) -> None:
    """Padding by token 0: class 0 is ignored as a target, but remains in every softmax."""
    x, w, _, t = problem((12,), 9, 8, device=device, ignored=0)
    check(x, w, None, t, ignore_index=0)


def test_large_logits_and_losses_stay_finite(device: str) -> None:
    """Liger-Kernel#512, #507: divergence, and a loss of 0, where logits are large."""
    x, w, _, t = problem((12,), 37, 16, device=device, ignored=0)
    with torch.no_grad():
        x *= 300
    loss = linear_cross_entropy(x, w, t)
    expected = reference.loss(reference.logits_of(x, w), t)
    assert loss > 50 and loss.isfinite()
    close(loss, expected)
    # Logits near 1000 are exact to 2^-24 * 1000 * 8 (semantics.md), and so are the probabilities.
    for a, e in zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(expected, (x, w))):
        assert (a - e).abs().max() <= 5e-4 * e.abs().max()


def test_gradient_accumulation_counts_tokens_not_batches(device: str) -> None:
    """As num_items_in_batch in transformers: unequal micro-batches share one normalizer."""
    head = LinearCrossEntropyHead(16, 37, device=device)
    x, _, _, t = problem((3, 10), 37, 16, device=device, ignored=0)
    t[0, 2:] = -100
    items = (t != -100).sum()
    for i in range(3):
        head(x[i], t[i], normalizer=items).backward()
    logits = reference.logits_of(x, head.weight)
    (expected,) = torch.autograd.grad(reference.loss(logits, t), head.weight)
    close(head.weight.grad, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_misaligned_views(device: str, offset: int) -> None:
    """Tensors at addresses that are no multiple of 16, though kernels read vectors of 16 bytes."""
    x = torch.randn(7 * 13 + 4, device=device)[offset : offset + 7 * 13].view(7, 13)
    w = torch.randn(29 * 13 + 4, device=device)[offset : offset + 29 * 13].view(29, 13)
    t = torch.randint(0, 29, (7,), device=device)
    check(x.requires_grad_(), w.requires_grad_(), None, t)


def test_batch_invariance(device: str) -> None:
    """The bits of a token's loss do not depend on the other tokens of the batch."""
    if device == "cuda":
        import logitless

        if "every op" not in logitless.describe_backend("cuda"):
            return  # the library says that this op is not batch invariant
    x, w, _, t = problem((40,), 301, 64, F32, device, ignored=0)
    with torch.no_grad():
        whole = linear_cross_entropy(x, w, t, reduction="none")
        for rows in (slice(0, 1), slice(7, 9), slice(3, 36), slice(39, 40)):
            part: Any = linear_cross_entropy(x[rows], w, t[rows], reduction="none")
            assert torch.equal(part, whole[rows])

# SPDX-License-Identifier: Apache-2.0
"""The draft losses of docs/distillation.md, as they stand there, against their formulas on logits
in f64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import document_names
from logitless.torch import linear_divergence
from reference import close

PAGE = "docs/distillation.md"


def recipe(word: str) -> dict[str, Any]:
    """The names after running the page's only block with the word."""
    (block,) = (b for b in document_names.python_blocks(PAGE) if word in b.text)
    names = {**document_names.a_teacher(), "linear_divergence": linear_divergence}
    names["hidden"] = names["hidden"].detach().requires_grad_()
    exec(block.text, names)
    return names


def log_softmax(states: Tensor, weight: Tensor) -> Tensor:
    return (states.double() @ weight.double().T).log_softmax(-1)


def same(ours: Tensor, theirs: Tensor, *leaves: Tensor) -> None:
    close(ours, theirs)
    found, expected = (
        torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (ours, theirs)
    )
    for a, e in zip(found, expected):
        assert e.abs().max() > 1e-4
        close(a, e)


def test_eagle_3() -> None:
    n = recipe("draft_states")
    q = log_softmax(n["teacher_hidden"], n["teacher_head"].weight.detach())  # [B, T, V]
    words = n["words"].tolist()
    counts = torch.tensor([[int(i) in words for i in row] for row in q.argmax(-1)])
    assert 2 <= counts.sum() < counts.numel()
    of_words = q[..., words].log_softmax(-1)  # [B, T, V']
    expected = torch.zeros((), dtype=torch.float64)
    for step, states in enumerate(n["draft_states"]):
        length = states.shape[1] - step
        p = log_softmax(states[:, :length], n["draft_head"].weight)
        teacher, keep = of_words[:, step:], counts[:, step:]
        each = (teacher.exp() * (teacher - p)).sum(-1)
        expected = expected + 0.8**step * each[keep].sum() / keep.sum()
    same(n["loss"], expected, n["hidden"], n["draft_head"].weight)


def test_multi_token_prediction() -> None:
    n = recipe("mtp_states")
    labels, weight = n["labels"], n["lm_head"].weight
    total, draft = torch.zeros(2, dtype=torch.float64)
    for k, states in enumerate(n["mtp_states"], 1):
        p = log_softmax(states, weight)[:, : -(k + 1)]
        target = labels[:, k + 1 :]
        keep = target != -100
        total = total - p.gather(-1, target.clamp(min=0)[..., None])[..., 0][keep].mean()
        own = log_softmax(n["hidden"].detach(), weight.detach())[:, k:].exp()
        drafted = log_softmax(states, weight.detach())[:, :-k].exp()
        draft = draft + (0.5 * (own - drafted).abs().sum(-1)).mean()
    same(n["loss"], 0.3 / 2 * total, n["hidden"], weight)
    same(n["draft"], draft, n["hidden"])
    with pytest.raises(RuntimeError):  # the head is frozen
        torch.autograd.grad(n["draft"], weight)

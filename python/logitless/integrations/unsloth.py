# SPDX-License-Identifier: Apache-2.0
"""Replacements for Unsloth's functions of hidden states: log-probabilities for its GRPO and DPO
trainers, and the divergence of two heads for distillation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless._errors import renames, wrong_dtype, wrong_shape
from logitless.integrations._divergence import Head, check_heads, counted, generalized_jsd
from logitless.integrations._memory import Sizes, frugal
from logitless.torch import linear_logprob
from logitless.torch._checks import check_rows, check_tensor

# Bytes of logits that Unsloth's function computes at a time.
_TILE = 256 << 20


def _peak(call: Sizes) -> int:
    """The largest number of bytes that Unsloth's function needs for a head that is trained: a tile
    of logits, and f32 sums of the gradient of hidden_states."""
    sums = 4 * call.tokens * call.width if call.gradients else 0
    return min(_TILE, call.size * call.tokens * call.vocab) + sums


@renames(
    {
        "input": "hidden_states",
        "linear_weight": "lm_head",
        "target": "index",
        "softcap": "logit_softcapping",
    }
)
def chunked_hidden_states_selective_log_softmax(
    hidden_states: Tensor,
    lm_head: Tensor,
    index: Tensor,
    chunks: int = 4,
    logit_scale_multiply: float = 0.0,
    logit_scale_divide: float = 0.0,
    logit_softcapping: float = 0.0,
    temperature: float | Tensor = 1.0,
    *,
    memory: int | str | None = None,
) -> Any:
    """The log-probability of every token of `index`, [B, T] in f32. A scale of 0 means no scale;
    `chunks` has no effect. `memory` is an additional argument, that of linear_logprob. Its default
    is the bytes that the function of Unsloth 2026.10.9 needs, unless default_memory sets
    another."""
    return linear_logprob(
        hidden_states.to(lm_head.dtype), lm_head, index, temperature=temperature,
        logit_scale=(logit_scale_multiply or 1.0) / (logit_scale_divide or 1.0),
        softcap=logit_softcapping, memory=frugal(memory, hidden_states, lm_head, _peak),
    )  # fmt: skip


def _jsd_peak(call: Sizes, rows: int | None) -> int:
    """The largest number of bytes that Unsloth's function needs on a GPU with Triton: a chunk's
    logits of both heads in f32 and, for gradients, that of the student's logits in the products'
    dtype; for a 16-bit weight also f32 sums of its gradient. At the end the 16-bit gradient
    replaces the chunk."""
    rows = rows or min(
        1024, max(64, 1 << max(((1 << 26) // max(call.vocab, 1)).bit_length() - 1, 0))
    )
    chunk = min(rows, call.tokens) * call.vocab * (8 + call.size * call.gradients)
    of_weight = call.f32_weight_sums * call.size // 4
    return call.f32_weight_sums + max(chunk - of_weight, 0)


@renames(
    {
        "input": "student_hidden",
        "linear_weight": "student_weight",
        "linear_bias": "student_bias",
        "logit_scale": "student_logit_scale",
        "softcap": "student_logit_softcapping",
        "teacher_input": "teacher_hidden",
        "teacher_softcap": "teacher_logit_softcapping",
        "normalizer": "num_items_in_batch",
    }
)
def fused_linear_jsd(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    mask: Tensor | None = None,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    beta: float | Tensor = 0.5,
    temperature: float | Tensor = 1.0,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    student_logit_softcapping: float = 0.0,
    teacher_logit_scale: float = 1.0,
    teacher_logit_softcapping: float = 0.0,
    num_items_in_batch: float | Tensor | None = None,
    scaling: float | Tensor | None = None,
    rows_per_chunk: int | None = None,
    memory: int | str | None = None,
) -> Tensor:
    """The sum of the divergences over the tokens that count, divided by `num_items_in_batch`, or by
    the number of these tokens if it is None; a divisor of 0 counts as 1. f32. A token counts if
    `mask` is not 0 and its label is not ignored. A scale of 0 means no scale. `scaling` has no
    effect, because f16 gradients are kept in f32. `rows_per_chunk` determines the bytes that
    Unsloth's function needs. `memory` is that of linear_divergence. Its default is 5 % more than
    the bytes that the function of Unsloth 2026.10.9 needs, or the minimum of ours if that is more,
    unless default_memory sets another."""
    student = Head(student_hidden, student_weight, student_bias)
    teacher = Head(teacher_hidden, teacher_weight, teacher_bias)
    check_heads(student, teacher)
    for name, hidden in (("input", student_hidden), ("teacher_input", teacher_hidden)):
        check_rows(name, hidden, "[..., D]")
    device, tokens = student_weight.device, student_hidden.shape[:-1]
    keep = torch.ones(tokens.numel(), dtype=torch.bool, device=device)
    if mask is not None:
        keep = keep & (_of_tokens("mask", mask, tokens).to(device) != 0)
    if labels is not None:
        keep = keep & (_of_tokens("labels", labels, tokens).to(device) != ignore_index)
    by = num_items_in_batch
    if by is not None:
        by = torch.as_tensor(by, device=device).reshape(-1)[:1]
        if not by.numel():
            raise wrong_shape("num_items_in_batch has shape (0,); allowed: one element")
        by = by.reshape(()).masked_fill(by[0] == 0, 1)
    loss: Tensor = generalized_jsd(
        _flat(student), _flat(teacher), "weight", memory,
        lambda call: _jsd_peak(call, rows_per_chunk), beta=_number("beta", beta),
        temperature=_number("temperature", temperature), target=counted(keep), normalizer=by,
        logit_scale=_number("student_logit_scale", student_logit_scale or 1.0),
        softcap=_number("student_logit_softcapping", student_logit_softcapping or 0.0),
        teacher_logit_scale=_number("teacher_logit_scale", teacher_logit_scale or 1.0),
        teacher_softcap=_number("teacher_logit_softcapping", teacher_logit_softcapping or 0.0),
    )  # fmt: skip
    return loss


def _of_tokens(name: str, value: Any, tokens: torch.Size) -> Tensor:
    """[N], from a tensor that has an element for each token, in any shape."""
    check_tensor(name, value)
    if value.numel() != tokens.numel():
        raise wrong_shape(
            f"{name} has shape {tuple(value.shape)}; allowed: {tuple(tokens)}, the tokens of "
            "student_hidden, or as many elements in another shape"
        )
    flat: Tensor = value.reshape(-1)
    return flat


def _number(name: str, value: Any) -> float:
    """A number as a float. Unsloth also allows a tensor of one element."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise wrong_shape(f"{name} has shape {tuple(value.shape)}; allowed: one element")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise wrong_dtype(f"{name} is a {type(value).__name__}; allowed: a number") from None


def _flat(head: Head) -> Head:
    """The head with hidden states [N, D] and a bias [V] on the weight's device."""
    hidden, weight, bias = head
    hidden = hidden.reshape(-1, hidden.shape[-1]).to(weight.device)
    if bias is not None and bias.numel() == len(weight):
        bias = bias.reshape(-1).to(weight.device)
    return Head(hidden, weight, bias)

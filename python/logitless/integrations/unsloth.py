# SPDX-License-Identifier: Apache-2.0
"""Unsloth's log-probabilities of hidden states, for its GRPO and DPO trainers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from logitless._errors import renames
from logitless.integrations._memory import Sizes, frugal
from logitless.torch import linear_logprob

# Unsloth's function makes so many bytes of logits at a time.
_TILE = 256 << 20


def _peak(call: Sizes) -> int:
    """Bytes that Unsloth's function takes at most, of a head that is trained: a tile of logits and
    f32 sums of the gradient of hidden_states."""
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
    """Of every index, [B, T] in f32. A scale of 0 is none; `chunks` means nothing here. `memory`,
    which is ours, is linear_logprob's; None is what Unsloth 2026.10.9's function takes, unless
    default_memory says another."""
    return linear_logprob(
        hidden_states.to(lm_head.dtype), lm_head, index, temperature=temperature,
        logit_scale=(logit_scale_multiply or 1.0) / (logit_scale_divide or 1.0),
        softcap=logit_softcapping, memory=frugal(memory, hidden_states, lm_head, _peak),
    )  # fmt: skip

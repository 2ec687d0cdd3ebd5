# SPDX-License-Identifier: Apache-2.0
"""The log-probabilities that NeMo-RL's DistillationLossFn needs: a student's, at its teacher's most
likely tokens, computed from the student's hidden states and head. The loss itself needs little
memory, and NeMo-RL computes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless._errors import invalid, renames
from logitless.integrations._arguments import only
from logitless.integrations._memory import Sizes, frugal
from logitless.torch import linear_logprobs_at


def _peak(call: Sizes) -> int:
    """The smallest number of bytes that NeMo-RL's function needs: f32 logits and their log-softmax,
    and the gradients of the logits if there are gradients."""
    return (12 if call.gradients else 8) * call.tokens * call.vocab


@renames(
    {"input": "student_hidden_states", "linear_weight": "weight", "ids": "teacher_topk_indices"}
)
def get_distillation_topk_logprobs(
    student_hidden_states: Tensor,
    weight: Tensor,
    teacher_topk_logits: Tensor,
    teacher_topk_indices: Tensor,
    zero_outside_topk: bool,
    calculate_entropy: bool,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: Any = None,
    context_parallel_group: Any = None,
    *,
    temperature: float | Tensor = 1.0,
    memory: int | str | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(student_topk_logprobs [B, S - 1, k], teacher_topk_logprobs, H_all [B, S - 1] or None), as
    NeMo-RL's get_distillation_topk_logprobs_from_logits computes them from student_logits [B, S,
    V]. This function takes hidden states [B, S, D] and the head `weight` [V, D] instead.

    With `zero_outside_topk` the student's log-probabilities are over the whole vocabulary,
    otherwise over the k tokens alone; in this case the other tokens' logits are not computed,
    unless the vocabulary is split. H_all is the sum of p log p (at most 0), with a gradient; it is
    returned if both flags are set. With `vocab_parallel_group` the head is this rank's equal share
    of the rows; the hidden states are the same on every rank, and their gradient is summed over the
    ranks. `temperature` and `memory` are additional arguments, those of linear_logprobs_at. The
    default of `memory` is the bytes that NeMo-RL's function needs, unless default_memory sets
    another."""
    only("context_parallel_group", context_parallel_group, None)
    if teacher_topk_logits.shape != teacher_topk_indices.shape:
        raise invalid(
            f"teacher_topk_logits has shape {tuple(teacher_topk_logits.shape)}; allowed: "
            f"{tuple(teacher_topk_indices.shape)}, that of teacher_topk_indices"
        )
    entropy = zero_outside_topk and calculate_entropy
    split = vocab_parallel_group is not None or hasattr(weight, "placements")
    alone = not zero_outside_topk and not split
    ids = teacher_topk_indices.to(student_hidden_states.device)
    made: Any = linear_logprobs_at(
        student_hidden_states, weight, ids, temperature=temperature, group=vocab_parallel_group,
        over="ids" if alone else "vocab",
        memory=frugal(memory, student_hidden_states, weight, _peak),
        return_statistics=("entropy",) if entropy else (),
    )  # fmt: skip
    student = made[0] if entropy else made
    if not zero_outside_topk and not alone:
        # Not torch's: a token without an upstream gradient would have one if its p are NaN.
        ops: Any = torch.ops.logitless
        student = ops.log_softmax_at(student, ids, None)  # [B, S, k]
    teacher = teacher_topk_logits.to(student.device, student.dtype).log_softmax(-1)  # [B, S, k]
    every = -made[1].entropy[:, :-1] if entropy else None  # [B, S - 1]
    return student[:, :-1], teacher[:, :-1], every

# SPDX-License-Identifier: Apache-2.0
"""Replacements for verl's fused kernels (log-probabilities and entropies of every token, both
differentiable) and for its distillation from a teacher's most likely tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless import _abi
from logitless._call import is_flat
from logitless._errors import invalid, places, renames, wrong_shape
from logitless.integrations._memory import Sizes, frugal
from logitless.torch import Split, linear_logprob, linear_logprobs_at, linear_topk
from logitless.torch._checks import check_rows, check_tensor

# verl's kernel computes gradients of the logits for _COLUMNS columns at a time; its forward pass
# computes three numbers per token and _SPLIT columns.
_COLUMNS, _SPLIT = 9504, 1024


def _peak(call: Sizes) -> int:
    """The largest number of bytes that verl's kernel needs: without gradients, the forward pass's
    numbers; with them, the gradients of _COLUMNS columns' logits, and a product that is added to
    the gradient of hidden or a copy of the last columns' gradients."""
    if not call.gradients:
        return 12 * call.tokens * -(-call.vocab // _SPLIT)
    columns = max(min(_COLUMNS, call.vocab), 1)
    return call.size * call.tokens * (columns + max(call.width, call.vocab % columns))


@renames({"input": "hidden", "linear_weight": "weight", "target": "labels"})
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor | None = 1.0,
    reduction: str | None = "none",
    dist_process_group: Any = None,
    *,
    memory: int | str | None = None,
) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) of every token in f32, flattened to [N]. `reduction` ("none", "sum" or
    "mean") applies to logprobs only.

    The signature is that of verl 0.9.1, verl/utils/kernel/linear_cross_entropy.py. hidden [..., D]
    and labels [...] have the same number of tokens, but may have different leading shapes (Megatron
    passes [T, 1, D] and [1, T]); weight is [V, D]. With `dist_process_group` the weight is this
    rank's equal share of the vocabulary's rows; hidden and labels are the same on every rank, and
    so are both results. The gradient of hidden is then this rank's part of a sum, as in verl, whose
    callers add the parts up (in the backward of Megatron's gather_from_sequence_parallel_region).
    `memory` is an additional argument, that of linear_logprob. Its default is the bytes that verl's
    kernel needs, unless default_memory sets another. Raises ValueError for another reduction.
    """
    named = "none" if reduction is None else reduction
    named = named.lower() if isinstance(named, str) else named
    if named not in ("none", "sum", "mean"):
        raise invalid(f"reduction is {reduction!r}; allowed: 'none', 'sum', 'mean'")
    check_rows("input", hidden, "[..., D]")
    check_tensor("target", labels)
    split = None
    if dist_process_group is not None:
        split = Split(dist_process_group, reduce_input_grad=False)
    with places(labels.shape):
        logprobs, entropy = linear_logprob(
            hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1),
            temperature=_flat(temperature, labels), entropy=True,
            memory=frugal(memory, hidden, weight, _peak), group=split,
        )  # fmt: skip
    if named != "none":
        logprobs = logprobs.sum() if named == "sum" else logprobs.mean()
    return logprobs, entropy


def _flat(temperature: float | Tensor | None, labels: Tensor) -> float | Tensor:
    """The temperature: a number, or one for each token, [N]."""
    if not isinstance(temperature, Tensor):
        return 1.0 if temperature is None else temperature
    if temperature.numel() != labels.numel():
        is_flat(temperature.shape, labels.shape)  # raises for a shape that cannot be expanded
        temperature = temperature.expand(labels.shape)
    return temperature.reshape(-1)


class LinearCrossEntropy:
    """The replacement for the autograd function of verl's linear_cross_entropy."""

    apply = staticmethod(linear_cross_entropy)


class FusedLinearForPPO(torch.nn.Module):
    """forward(hidden_states, vocab_weights, input_ids, temperature) returns (log_probs, entropy),
    in the shape of input_ids and in f32. `chunk_size` and `impl_backend` determine the bytes that
    verl's module needs. They are the default of `memory`, an additional argument, unless
    default_memory sets another."""

    def __init__(
        self, chunk_size: int = 512, impl_backend: str = "torch", *,
        memory: int | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.chunk_size = chunk_size
        self.impl_backend = impl_backend
        self.memory = memory

    def _peak(self, call: Sizes) -> int:
        """The largest number of bytes that verl's module needs. Its own forward has three f32
        tensors of a chunk's logits at once; its backward has five in addition to the logits, and a
        product that is added to the gradient of the weight. The "liger" backend has the gradients
        of 1024 tokens' logits."""
        if self.impl_backend == "liger":
            return call.size * min(call.tokens, 1024) * call.vocab
        chunk = min(call.tokens, self.chunk_size) * call.vocab
        if not call.gradients:
            return 12 * chunk
        return (20 + call.size) * chunk + call.size * call.vocab * call.width

    @renames({"input": "hidden_states", "linear_weight": "vocab_weights", "target": "input_ids"})
    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor,
        temperature: float | Tensor = 1.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(log-probabilities, entropies), f32, of `hidden_states` [..., D], `vocab_weights` [V, D]
        and `input_ids` [...]."""
        log_probs, entropy = linear_logprob(
            hidden_states, vocab_weights, input_ids, temperature=temperature, entropy=True,
            memory=frugal(self.memory, hidden_states, vocab_weights, self._peak),
        )  # fmt: skip
        return log_probs, entropy


def _topk_peak(call: Sizes) -> int:
    """The smallest number of bytes that verl's function needs: the logits and their log-softmax,
    and the gradients of the logits if there are gradients."""
    return (3 if call.gradients else 2) * call.size * call.tokens * call.vocab


@renames({"input": "hidden_states", "linear_weight": "weight", "ids": "teacher_topk_ids"})
def compute_forward_kl_topk(
    hidden_states: Tensor,
    weight: Tensor,
    teacher_topk_log_probs: Tensor,
    teacher_topk_ids: Tensor,
    config: Any,
    data_format: str = "thd",
    *,
    temperature: float | Tensor = 1.0,
    overlap: bool = True,
    memory: int | str | None = None,
) -> dict[str, Tensor]:
    """{"distillation_losses", "student_mass", "teacher_mass", "overlap_count",
    "overlap_token_advantage"} [1, T] each, as the function of this name in verl 0.9.1,
    verl/trainer/distillation/fsdp/losses.py, computes them from student_logits [1, T, V]. This
    function takes hidden_states [1, T, D] and the head `weight` [V, D] instead. Only the first
    result has a gradient.

    The teacher's tensors [1, T, k] may be nested tensors of sequences [T_i, k]. Of `config` only
    distillation_loss.log_prob_min_clamp is read. There are three additional arguments.
    `overlap=False` leaves out the two results of the overlap, which needs another product with the
    weight. `temperature` is the number by which verl's engine divides the logits before it calls
    its function. `memory` is that of linear_logprobs_at; its default is the bytes that verl's
    function needs, unless default_memory sets another."""
    if data_format not in ("thd", "bshd"):
        raise invalid(f"data_format is {data_format!r}; allowed: 'thd', 'bshd'")
    log_q, ids = (
        part.values()[None] if part.is_nested else part
        for part in (teacher_topk_log_probs, teacher_topk_ids)
    )
    if log_q.shape != ids.shape or ids.shape[:-1] != hidden_states.shape[:-1]:
        raise wrong_shape(
            f"teacher_topk_log_probs has shape {tuple(log_q.shape)} and teacher_topk_ids "
            f"{tuple(ids.shape)}; allowed: {(*hidden_states.shape[:-1], 'k')}, as hidden_states"
        )
    if overlap and ids.shape[-1] > _abi.MOST_LISTED:
        raise invalid(
            f"teacher_topk_ids has {ids.shape[-1]} columns; allowed beside overlap: at most "
            f"{_abi.MOST_LISTED}; use overlap=False for up to {_abi.MOST_CHOSEN}"
        )
    memory = frugal(memory, hidden_states, weight, _topk_peak)
    given: dict[str, Any] = {"temperature": temperature, "memory": memory}
    log_p = linear_logprobs_at(hidden_states, weight, ids, **given)  # [1, T, k]
    made = {"student_mass": log_p.detach().exp().sum(-1), "teacher_mass": log_q.exp().sum(-1)}
    if (least := config.distillation_loss.log_prob_min_clamp) is not None:
        log_p, log_q = log_p.clamp_min(least), log_q.clamp_min(least)
    log_q = log_q.float()
    divergence = log_q.exp() * (log_q - log_p)  # [1, T, k]
    made = {"distillation_losses": divergence.sum(-1), **made}
    if overlap:
        _, likeliest = linear_topk(hidden_states, weight, ids.shape[-1], **given)  # [1, T, k]
        shared = (ids[..., None] == likeliest[..., None, :]).any(-1)  # [1, T, k]
        made["overlap_count"] = shared.sum(-1)
        advantage = -(divergence.detach() * shared).sum(-1)
        made["overlap_token_advantage"] = advantage / made["overlap_count"].clamp_min(1)
    return made

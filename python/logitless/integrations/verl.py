# SPDX-License-Identifier: Apache-2.0
"""verl's fused kernels: log-probabilities and entropies of every token, both differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless._errors import invalid, renames
from logitless.torch import linear_logprob


@renames({"input": "hidden", "linear_weight": "weight", "target": "labels"})
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor | None = 1.0,
    reduction: str | None = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) of every token in f32, flattened to [N]; `reduction` is that of logprobs.

    The signature is verl 0.9.1's, verl/utils/kernel/linear_cross_entropy.py: hidden [..., D] and
    labels [...] of as many tokens, which need not be ordered in alike shapes ([T, 1, D] and [1, T]
    come from Megatron), weight [V, D]. With `dist_process_group` the weight is this rank's equal
    share of the vocabulary's rows, hidden and labels are the same on every rank, and so are both
    results. The gradient of hidden is then this rank's part of a sum, as verl's kernel leaves it:
    its callers add the parts up (the backward of Megatron's gather_from_sequence_parallel_region
    does). Raises ValueError for another reduction.
    """
    reduction = "none" if reduction is None else reduction.lower()
    if reduction not in ("none", "sum", "mean"):
        raise invalid(f"reduction is {reduction!r}; allowed: 'none', 'sum', 'mean'")
    where: dict[str, Any] = {}
    if dist_process_group is not None:
        where = {"group": dist_process_group, "reduce_input_grad": False}
    logprobs, entropy = linear_logprob(
        hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1),
        temperature=_flat(temperature, labels), entropy=True, **where,
    )  # fmt: skip
    if reduction != "none":
        logprobs = logprobs.sum() if reduction == "sum" else logprobs.mean()
    return logprobs, entropy


def _flat(temperature: float | Tensor | None, labels: Tensor) -> float | Tensor:
    """A number, or one of each token [N]."""
    if not isinstance(temperature, Tensor):
        return 1.0 if temperature is None else temperature
    if temperature.numel() != labels.numel():
        temperature = temperature.expand(labels.shape)
    return temperature.reshape(-1)


class LinearCrossEntropy:
    """What stands behind verl's linear_cross_entropy."""

    apply = staticmethod(linear_cross_entropy)


class FusedLinearForPPO(torch.nn.Module):
    """forward(hidden_states, vocab_weights, input_ids, temperature): (log_probs, entropy), in the
    shape of input_ids and in f32. `chunk_size` and `impl_backend` mean nothing here."""

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        self.chunk_size = chunk_size
        self.impl_backend = impl_backend

    @renames({"input": "hidden_states", "linear_weight": "vocab_weights", "target": "input_ids"})
    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor,
        temperature: float | Tensor = 1.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        log_probs, entropy = linear_logprob(
            hidden_states, vocab_weights, input_ids, temperature=temperature, entropy=True
        )
        return log_probs, entropy

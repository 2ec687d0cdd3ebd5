# SPDX-License-Identifier: Apache-2.0
"""verl's fused kernels: log-probabilities and entropies of every token, both differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless._errors import invalid, renames
from logitless.integrations._arguments import only
from logitless.torch import linear_logprob


@renames({"input": "hidden", "target": "labels"})
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor | None = 1.0,
    reduction: str | None = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy): of every token, flattened to [N]; `reduction` is that of logprobs."""
    only("dist_process_group", dist_process_group, None)
    reduction = "none" if reduction is None else reduction.lower()
    if reduction not in ("none", "sum", "mean"):
        raise invalid(f"reduction is {reduction!r}; allowed: 'none', 'sum', 'mean'")
    logprobs, entropy = linear_logprob(
        hidden, weight, labels, temperature=1.0 if temperature is None else temperature,
        entropy=True,
    )  # fmt: skip
    logprobs, entropy = logprobs.reshape(-1), entropy.reshape(-1)
    if reduction != "none":
        logprobs = logprobs.sum() if reduction == "sum" else logprobs.mean()
    return logprobs, entropy


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

    @renames({"input": "hidden_states", "weight": "vocab_weights", "target": "input_ids"})
    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor,
        temperature: float | Tensor = 1.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        log_probs, entropy = linear_logprob(
            hidden_states, vocab_weights, input_ids, temperature=temperature, entropy=True
        )
        return log_probs, entropy

# SPDX-License-Identifier: Apache-2.0
"""verl's fused kernel: log-probabilities and entropies of every token, both differentiable."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from logitless._errors import invalid, renames
from logitless.integrations._arguments import only
from logitless.torch import linear_logprob


@renames({"input": "hidden", "target": "labels"})
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | None = 1.0,
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

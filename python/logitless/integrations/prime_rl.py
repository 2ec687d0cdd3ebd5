# SPDX-License-Identifier: Apache-2.0
"""prime-rl's output layer: log-probabilities and entropies of every token, whose temperatures may
differ."""

from __future__ import annotations

import torch
from torch import Tensor

from logitless._errors import invalid, renames, wrong_shape
from logitless.torch import linear_logprob


class FusedOutputLinear(torch.nn.Linear):
    """forward(hidden_states, labels, temperature): {"logprobs", "entropy"}, both differentiable, of
    the shape of the labels. `chunk_size` means nothing here."""

    def __init__(self, in_features: int, out_features: int, chunk_size: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.chunk_size = chunk_size

    @renames({"input": "hidden_states", "linear_weight": "weight", "target": "labels"})
    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        labels: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> dict[str, Tensor]:
        if labels is None or temperature is None:
            raise invalid("labels or temperature is None; allowed: tensors")
        if temperature.shape != labels.shape:
            raise wrong_shape(
                f"temperature has shape {tuple(temperature.shape)}; allowed: {tuple(labels.shape)}"
            )
        logprobs, entropy = linear_logprob(
            hidden_states, self.weight, labels, temperature=temperature, entropy=True
        )
        return {"logprobs": logprobs, "entropy": entropy}

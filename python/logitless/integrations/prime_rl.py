# SPDX-License-Identifier: Apache-2.0
"""A replacement for prime-rl's output layer: log-probabilities and entropies of every token, where
each token may have a different temperature."""

from __future__ import annotations

import torch
from torch import Tensor

from logitless._errors import invalid, renames, wrong_shape
from logitless.integrations._memory import Sizes, frugal
from logitless.torch import linear_logprob

# Columns whose logits prime-rl's layer computes at a time, for `chunk_size` tokens.
_COLUMNS = 8192


class FusedOutputLinear(torch.nn.Linear):
    """forward(hidden_states, labels, temperature) returns {"logprobs", "entropy"}, both
    differentiable and in the shape of the labels. `chunk_size` determines the bytes that prime-rl's
    layer needs. They are the default of `memory`, an additional argument, unless default_memory
    sets another."""

    def __init__(
        self, in_features: int, out_features: int, chunk_size: int, *,
        memory: int | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias=False)
        self.chunk_size = chunk_size
        self.memory = memory

    def _peak(self, call: Sizes) -> int:
        """The largest number of bytes that prime-rl's layer needs: a tile's logits and five f32
        tensors of the same size, or three without gradients."""
        tile = min(call.tokens, self.chunk_size) * min(call.vocab, _COLUMNS)
        return (call.size + (20 if call.gradients else 12)) * tile

    @renames({"input": "hidden_states", "linear_weight": "weight", "target": "labels"})
    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        labels: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """{"logprobs", "entropy"}, [...] in f32 each, of `hidden_states` [..., D], `labels` and
        `temperature` [...]."""
        if labels is None or temperature is None:
            raise invalid("labels or temperature is None; allowed: tensors")
        if temperature.shape != labels.shape:
            raise wrong_shape(
                f"temperature has shape {tuple(temperature.shape)}; allowed: {tuple(labels.shape)}"
            )
        logprobs, entropy = linear_logprob(
            hidden_states, self.weight, labels, temperature=temperature, entropy=True,
            memory=frugal(self.memory, hidden_states, self.weight, self._peak),
        )  # fmt: skip
        return {"logprobs": logprobs, "entropy": entropy}

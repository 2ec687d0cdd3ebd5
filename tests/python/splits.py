# SPDX-License-Identifier: Apache-2.0
"""The linear losses with a Split's fields as keywords of their own, for tests that vary them."""

from __future__ import annotations

from typing import Any

import logitless.torch
from logitless.torch import Split

FIELDS = {
    "vocab_start": "start", "vocab_total": "total", "vocab_blocks": "blocks",
    "sequence_dim": "sequence_dim", "local_tokens": "local_tokens",
    "reduce_input_grad": "reduce_input_grad", "reduce_dtype": "reduce_dtype",
}  # fmt: skip


def as_split(options: dict[str, Any]) -> dict[str, Any]:
    """The options with a Split in the place of its fields."""
    fields = {FIELDS[name]: value for name, value in options.items() if name in FIELDS}
    if not fields:
        return options
    rest = {name: value for name, value in options.items() if name not in FIELDS}
    return {**rest, "group": Split(rest.get("group"), **fields)}


def linear_cross_entropy(*given: Any, **options: Any) -> Any:
    return logitless.torch.linear_cross_entropy(*given, **as_split(options))


def linear_logprob(*given: Any, **options: Any) -> Any:
    return logitless.torch.linear_logprob(*given, **as_split(options))

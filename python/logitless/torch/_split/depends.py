# SPDX-License-Identifier: Apache-2.0
"""Results that a rank makes without its inputs, as a rank without columns does, for a compiler.

The inputs were exchanged between the ranks. A compiler drops an exchange whose result nothing
needs, and the ranks whose results need it would wait in it for ever.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless.torch._dispatch import define, once_only


def depending(made: Tensor, *given: Tensor | None) -> Tensor:
    """A copy of `made`, which a compiler takes for a result of `given`; none of them is read."""
    op: Any = torch.ops.logitless.depending
    copied: Tensor = op(made, [t for t in given if t is not None])
    return copied


define(
    "depending(Tensor made, Tensor[] given) -> Tensor",
    lambda made, given: made.clone(), lambda made, given: torch.empty_like(made), rule=once_only,
)  # fmt: skip

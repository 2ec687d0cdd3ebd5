# SPDX-License-Identifier: Apache-2.0
"""The signatures that frameworks already call, and a patch for Hugging Face models.

`liger`, `cce`, `verl`, `megatron`, `torchtitan`, `prime_rl` and `unsloth` are modules of drop-in
names; `patch_transformers` makes a causal LM compute its loss without logits, and `patch_trl` TRL's
trainers their log-probabilities. An argument without a counterpart here raises unless it is at its
default.
"""

from __future__ import annotations

import logitless.torch  # noqa: F401  It says what to install where there is no torch.
from logitless.integrations import cce, liger, megatron, prime_rl, torchtitan, unsloth, verl
from logitless.integrations.liger import (
    FusedLinearCrossEntropyFunction,
    LigerFusedLinearCrossEntropyLoss,
)
from logitless.integrations.transformers import Patch, patch_transformers
from logitless.integrations.trl import TrlPatch, patch_trl

__all__ = [
    "FusedLinearCrossEntropyFunction",
    "LigerFusedLinearCrossEntropyLoss",
    "Patch",
    "TrlPatch",
    "cce",
    "liger",
    "megatron",
    "patch_transformers",
    "patch_trl",
    "prime_rl",
    "torchtitan",
    "unsloth",
    "verl",
]

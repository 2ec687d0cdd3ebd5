# SPDX-License-Identifier: Apache-2.0
"""Functions with the signatures that other frameworks call, and patches for Hugging Face models and
trainers.

`liger`, `cce`, `verl`, `nemo_rl`, `megatron`, `torchtitan`, `prime_rl`, `unsloth` and `vllm` are
modules of replacements for functions of these libraries. `patch_transformers` makes a causal LM
compute its loss without logits, and `patch_trl` makes TRL's trainers compute log-probabilities and
divergences without logits. `lm_eval` has a model class for lm-evaluation-harness. `levanter` and
`tunix` are for JAX. An argument that would change results and has no counterpart here raises. Each
module is imported when it is first used, so that JAX users need not have torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logitless.integrations import (
        cce,
        liger,
        megatron,
        nemo_rl,
        prime_rl,
        torchtitan,
        unsloth,
        verl,
        vllm,
    )
    from logitless.integrations import levanter as levanter
    from logitless.integrations import lm_eval as lm_eval
    from logitless.integrations import transformers as transformers
    from logitless.integrations import trl as trl
    from logitless.integrations import tunix as tunix
    from logitless.integrations.liger import (
        FusedLinearCrossEntropyFunction,
        LigerFusedLinearCrossEntropyLoss,
        LigerFusedLinearJSD,
    )
    from logitless.integrations.transformers import Patch, patch_transformers
    from logitless.integrations.trl import TrlPatch, patch_trl

__all__ = [
    "FusedLinearCrossEntropyFunction",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearJSD",
    "Patch",
    "TrlPatch",
    "cce",
    "liger",
    "megatron",
    "nemo_rl",
    "patch_transformers",
    "patch_trl",
    "prime_rl",
    "torchtitan",
    "unsloth",
    "verl",
    "vllm",
]

_MODULES = {
    "FusedLinearCrossEntropyFunction": "liger",
    "LigerFusedLinearCrossEntropyLoss": "liger",
    "LigerFusedLinearJSD": "liger",
    "Patch": "transformers",
    "TrlPatch": "trl",
    "patch_transformers": "transformers",
    "patch_trl": "trl",
}

_IN_JAX = {"levanter": ("jax", "haliax"), "tunix": ("jax", "flax", "tunix")}
# `import *` leaves these out: the first two contain the patches and are named like what they patch;
# the others need packages besides torch or in place of it, and would fail without them.
_UNSTARRED = ("transformers", "trl", "lm_eval", *_IN_JAX)


def __getattr__(name: str) -> Any:
    if name not in (*__all__, *_UNSTARRED):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _IN_JAX:
        import logitless.torch  # noqa: F401  It says what to install where there is no torch.
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, name)}")
    return getattr(module, name) if name in _MODULES else module


def __dir__() -> list[str]:
    """The names whose requirements are installed."""
    needs: dict[str, tuple[str, ...]] = dict.fromkeys((*__all__, *_UNSTARRED), ("torch",))
    needs |= {**_IN_JAX, "lm_eval": ("torch", "lm_eval")}
    there = [name for name, need in needs.items() if all(map(importlib.util.find_spec, need))]
    return sorted({*globals(), *there})

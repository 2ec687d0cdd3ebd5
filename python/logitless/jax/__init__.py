# SPDX-License-Identifier: Apache-2.0
"""Logitless for JAX: losses, log-probabilities, top-k and divergences on CPU and CUDA, under jit,
grad and vmap."""

from __future__ import annotations

try:
    import jax
except ImportError as error:
    raise ImportError("logitless.jax needs JAX 0.6.1 or newer: pip install jax") from error
# Earlier versions of JAX have a foreign function interface of XLA older than its version 0.1.
if jax.__version_info__ < (0, 6, 1):
    raise ImportError(f"logitless.jax needs JAX 0.6.1 or newer; this is {jax.__version__}")

from logitless.jax._divergence import DivergenceStatistics, linear_divergence
from logitless.jax._functions import (
    Statistics,
    cross_entropy,
    linear_cross_entropy,
    linear_logprob,
    linear_logprobs_at,
    linear_topk,
    softmax,
)

__all__ = [
    "DivergenceStatistics",
    "Statistics",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_logprob",
    "linear_logprobs_at",
    "linear_topk",
    "softmax",
]

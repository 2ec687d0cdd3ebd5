# SPDX-License-Identifier: Apache-2.0
"""Logitless for JAX: CPU and CUDA, jit, grad, vmap; the same functions as logitless.torch."""

from __future__ import annotations

try:
    import jax.ffi  # noqa: F401
except ImportError as error:
    raise ImportError("logitless.jax needs JAX 0.6.1 or newer: pip install jax") from error

from logitless.jax._functions import (
    Statistics,
    cross_entropy,
    linear_cross_entropy,
    linear_logprob,
    softmax,
)

__all__ = ["Statistics", "cross_entropy", "linear_cross_entropy", "linear_logprob", "softmax"]

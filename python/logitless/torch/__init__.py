# SPDX-License-Identifier: Apache-2.0
"""Logitless for PyTorch: CPU and CUDA tensors, autograd, torch.compile."""

from __future__ import annotations

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("logitless.torch needs PyTorch 2.8 or newer: pip install torch") from error

from logitless.torch._divergence import DivergenceStatistics, linear_divergence
from logitless.torch._divergence_module import LinearDivergenceLoss
from logitless.torch._functions import (
    Statistics,
    cross_entropy,
    cross_entropy_,
    linear_cross_entropy,
    linear_logprob,
    linear_logprobs_at,
    linear_topk,
    softmax_,
    workspace_size,
)
from logitless.torch._memory import default_memory, set_default_memory
from logitless.torch._modules import (
    CrossEntropyLoss,
    LinearCrossEntropyHead,
    LinearCrossEntropyLoss,
)
from logitless.torch._split.given import Split

__all__ = [
    "CrossEntropyLoss",
    "DivergenceStatistics",
    "LinearCrossEntropyHead",
    "LinearCrossEntropyLoss",
    "LinearDivergenceLoss",
    "Split",
    "Statistics",
    "cross_entropy",
    "cross_entropy_",
    "default_memory",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_logprob",
    "linear_logprobs_at",
    "linear_topk",
    "set_default_memory",
    "softmax_",
    "workspace_size",
]

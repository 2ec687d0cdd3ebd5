# SPDX-License-Identifier: Apache-2.0
"""Logitless for PyTorch: CPU and CUDA tensors, autograd, torch.compile."""

from __future__ import annotations

from logitless.torch._functions import (
    Statistics,
    cross_entropy,
    cross_entropy_,
    linear_cross_entropy,
    linear_logprob,
    softmax_,
    workspace_size,
)
from logitless.torch._modules import (
    CrossEntropyLoss,
    LinearCrossEntropyHead,
    LinearCrossEntropyLoss,
)

__all__ = [
    "CrossEntropyLoss",
    "LinearCrossEntropyHead",
    "LinearCrossEntropyLoss",
    "Statistics",
    "cross_entropy",
    "cross_entropy_",
    "linear_cross_entropy",
    "linear_logprob",
    "softmax_",
    "workspace_size",
]

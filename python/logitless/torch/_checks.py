# SPDX-License-Identifier: Apache-2.0
"""What must hold of the tensors given, beyond what the core asks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless._errors import invalid, not_supported, wrong_dtype, wrong_shape


def check_target(input: Tensor, target: Any, what: str) -> None:
    if not isinstance(target, Tensor):
        raise wrong_dtype(f"target is a {type(target).__name__}; allowed: a tensor")
    if target.is_floating_point():
        raise not_supported(
            f"target is {str(target.dtype)[6:]} of shape {tuple(target.shape)}: soft targets and "
            "top-k log-probabilities are not supported; allowed: class indices, int64 or int32"
        )
    if target.shape != input.shape[:-1]:
        raise wrong_shape(
            f"target has shape {tuple(target.shape)}; allowed: {tuple(input.shape[:-1])}, the "
            f"shape of {what} without its last dimension"
        )


def check_matrix(name: str, weight: Any) -> None:
    if not isinstance(weight, Tensor):
        raise wrong_dtype(f"{name} is a {type(weight).__name__}; allowed: a tensor")
    if weight.dim() != 2:
        raise wrong_shape(
            f"{name} has shape {tuple(weight.shape)}; allowed: [V, D] (if it is sharded, as FSDP "
            "does outside its module's forward, make the head a LinearCrossEntropyHead)"
        )


def check_bias(bias: Any, weight: Tensor) -> None:
    """The core checks its length, of which ranks tell each other; no block can be cut of another
    rank."""
    if not isinstance(bias, Tensor):
        raise wrong_dtype(f"linear_bias is a {type(bias).__name__}; allowed: a tensor")
    if bias.dim() != 1:
        raise wrong_shape(
            f"linear_bias has shape {tuple(bias.shape)}; allowed: ({weight.shape[0]},)"
        )


def check_overwritten(logits: Tensor) -> None:
    """Backward writes over the logits as torch's own in-place functions write: over no memory of a
    parameter, which would become its own gradient, and each element once."""
    if logits.is_leaf:
        raise invalid("logits is a leaf that requires grad; cross_entropy_ would overwrite it")
    if torch.compiler.is_compiling():  # a compiled program writes elsewhere
        return
    base = logits._base
    if base is not None and base.is_leaf and base.requires_grad:
        raise invalid(
            "logits is a view of a leaf that requires grad; cross_entropy_ would overwrite it"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(logits.shape, logits.stride())):
        raise invalid(
            f"logits has shape {tuple(logits.shape)} and strides {logits.stride()}: elements "
            "overlap; cross_entropy_ could not write over them"
        )

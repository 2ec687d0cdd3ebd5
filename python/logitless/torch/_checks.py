# SPDX-License-Identifier: Apache-2.0
"""Checks of the caller's tensors, in addition to the core's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from logitless._abi import F32_RANGE
from logitless._call import soft_target, wrong_target
from logitless._errors import argument, invalid, wrong_device, wrong_dtype, wrong_shape

_PLAIN = (Tensor, torch.nn.Parameter)


def check_tensor(name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        return
    instead = ""
    if isinstance(value, torch.nn.Module):
        instead = f", as its {'weight' if name == 'linear_weight' else 'output'}"
    elif hasattr(value, "__array__"):
        instead = ", as of torch.from_numpy"
    raise wrong_dtype(f"{name} is a {type(value).__name__}; allowed: a tensor{instead}")


def check_rows(name: str, value: Any, shape: str) -> None:
    check_tensor(name, value)
    if value.dim() == 0:
        raise wrong_shape(f"{name} has shape (); allowed: {shape}")


def check_real(name: str, value: Tensor) -> None:
    """Refuses complex numbers, whose imaginary part would be lost."""
    if value.is_complex():
        raise wrong_dtype(f"{name} is {str(value.dtype)[6:]}; allowed: real numbers")


def as_f32(name: str, value: Tensor) -> Tensor:
    """The tensor in f32. A number that would become 0 or infinite is refused if it can be read
    without waiting: for f64 on the CPU, outside of torch.compile, tracers and modes."""
    check_real(name, value)
    held = value.float()
    if value.dtype is not torch.float64 or not value.is_cpu or type(value) not in _PLAIN:
        return held
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return held
    if torch._C._len_torch_dispatch_stack():
        return held
    lost = ((held == 0) != (value == 0)) | (held.isinf() & ~value.isinf())
    if lost.any():
        first = [int(place) for place in lost.nonzero()[0]]
        where = str(first) if first else ""
        raise invalid(f"{name}{where} is {float(value[tuple(first)])}; allowed: {F32_RANGE}")
    return held


def check_target(input: Tensor, target: Any, what: str) -> None:
    check_tensor("target", target)
    if target.is_floating_point():
        raise soft_target(str(target.dtype)[6:], target.shape)
    if target.shape != input.shape[:-1]:
        raise wrong_target(target.shape, input.shape, what)


def check_matrix(name: str, weight: Any) -> None:
    check_tensor(name, weight)
    if weight.dim() != 2:
        raise wrong_shape(
            f"{name} has shape {tuple(weight.shape)}; allowed: [V, D] (if it is sharded, as FSDP "
            "does outside its module's forward, make the head a LinearCrossEntropyHead)"
        )


def check_bias(bias: Any, weight: Tensor) -> None:
    """Refuses a bias with a wrong number of dimensions, which could not be divided into blocks. The
    core checks its length; with a group, _split/shards.py does, and all ranks raise that error."""
    check_tensor("linear_bias", bias)
    if bias.dim() != 1:
        raise wrong_shape(
            f"linear_bias has shape {tuple(bias.shape)}; allowed: ({weight.shape[0]},)"
        )


def check_meta(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    """Refuses tensors on meta beside others: for such a mix the dispatcher takes the kernel of
    meta tensors, and results are memory that nobody has written. The first tensor is the input."""
    input = tensors[0]
    assert input is not None
    for name, t in zip(names, tensors):
        if t is not None and (t.device.type == "meta") != (input.device.type == "meta"):
            raise wrong_device(
                f"{argument(name)} is on {t.device}; allowed: {input.device}, the device of input"
            )


def check_overwritten(logits: Tensor) -> None:
    """Refuses logits that torch's own in-place functions refuse: a parameter's memory, which would
    become its own gradient, and elements that share memory."""
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

# SPDX-License-Identifier: Apache-2.0
"""Decides whether a call goes straight to the C function or through torch's dispatcher, or is
refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext  # set_default_device and `with device` push this mode

from logitless._errors import argument, not_supported, wrong_device
from logitless.torch import _run
from logitless.torch._autograd import NO_TRANSFORMS

_function_mode = torch._C._get_function_stack_at
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def dispatches(*tensors: Tensor | None) -> bool:
    """Whether the call must go through torch's dispatcher: under torch.compile or jit.trace, in a
    mode such as FakeTensorMode, or for a subclass of Tensor or a device other than CPU and CUDA.
    Raises in functorch transforms, for forward-mode derivatives and for sharded tensors."""
    if torch.compiler.is_compiling():
        return True
    if forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    if torch._C._get_tracing_state() is not None:  # torch.jit.trace records only dispatched ops
        return True
    if not _PLAIN.issuperset(map(type, tensors)):
        _refuse_sharded(tensors)
        return True
    first = tensors[0]
    if torch._C._len_torch_dispatch_stack():
        return True
    modes = torch._C._len_torch_function_stack()
    if modes and not all(type(_function_mode(i)) is DeviceContext for i in range(modes)):
        return True
    if first is not None and not (first.is_cpu or first.is_cuda):
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise not_supported(NO_TRANSFORMS)
    return False


def refuse(tensors: Sequence[Tensor | None], names: Sequence[str] = tuple(_run.INPUTS)) -> None:
    """Raises for tensors that cannot be served in any way: those of transforms, sharded ones, and
    other layouts."""
    dispatches(*tensors)
    refuse_layouts(tensors, names)


def refuse_layouts(
    tensors: Sequence[Tensor | None], names: Sequence[str] = tuple(_run.INPUTS)
) -> None:
    for name, t in zip(names, tensors):
        if t is not None and t.layout is not torch.strided:
            raise wrong_device(f"{argument(name)} has layout {t.layout}; allowed: dense tensors")


def _refuse_tangents(tensors: Sequence[Tensor | None]) -> None:
    unpack: Any = forward_ad.unpack_dual
    for t in tensors:
        if t is not None and unpack(t).tangent is not None:
            raise not_supported(
                "forward-mode derivatives (torch.autograd.forward_ad, jvp) are not supported; use "
                "torch.nn.functional.cross_entropy for them"
            )


def _refuse_sharded(tensors: Sequence[Tensor | None]) -> None:
    for t in tensors:
        if hasattr(t, "placements") or hasattr(t, "local_shards"):
            raise not_supported(
                f"a {type(t).__name__} is sharded over devices and cannot be passed; make the head "
                "a LinearCrossEntropyHead, so that FSDP gathers it, or pass full_tensor()"
            )

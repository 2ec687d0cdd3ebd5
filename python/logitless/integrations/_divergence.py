# SPDX-License-Identifier: Apache-2.0
"""What the functions in other libraries' names share that measure a student's head against a
teacher's: one dtype for both, and the memory that they take by default."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless._call import IGNORE_INDEX
from logitless.integrations._memory import Sizes, frugal_beside
from logitless.torch import linear_divergence


class Head(NamedTuple):
    hidden: Tensor  # [..., D]
    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]

    def to(self, own: torch.dtype, dtype: torch.dtype) -> Head:
        """Rounded to `own`, and then in `dtype`, which holds that exactly."""
        hidden, weight = (_rounded(t, own, dtype) for t in (self.hidden, self.weight))
        return self._replace(hidden=hidden, weight=weight)


class _Rounded(torch.autograd.Function):
    """A tensor as it is rounded to `own`; its gradient is not rounded."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, own: torch.dtype, dtype: torch.dtype) -> Tensor:
        ctx.dtype = tensor.dtype
        return tensor.to(own).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].to(ctx.dtype), None, None


def _rounded(tensor: Tensor, own: torch.dtype, dtype: torch.dtype) -> Tensor:
    if own in (dtype, tensor.dtype):
        return tensor.to(dtype)
    rounded: Tensor = _Rounded.apply(tensor, own, dtype)  # type: ignore[no-untyped-call]
    return rounded


def generalized_jsd(
    student: Head, teacher: Head, dtypes: tuple[torch.dtype, torch.dtype], memory: int | str | None,
    peak: Callable[[Sizes], int], held: int = 0, **options: Any,
) -> Any:  # fmt: skip
    """linear_divergence of the kind that others call the generalized JSD. `dtypes` are those that
    they have the two heads' products in, outside autocast, and round each head to; where they
    differ both products are made in the wider, which holds the other's numbers exactly. `held` are
    bytes that their `peak` counts and this call's memory does not."""
    kind = student.hidden.device.type
    context: Any = contextlib.nullcontext()
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    else:
        dtype = torch.promote_types(*dtypes)
        if dtype.itemsize < 4 and any(t.dtype is not dtype for t in (*student[:2], *teacher[:2])):
            context = torch.autocast(kind, dtype)  # the gradient of an f32 weight is formed in f32
    with context:
        weights = (student.weight, teacher.weight)
        if not torch.is_autocast_enabled(kind):
            student, teacher = student.to(dtypes[0], dtype), teacher.to(dtypes[1], dtype)
        copies = sum(w.numel() * dtype.itemsize for w in weights if w.dtype is not dtype)
        memory = frugal_beside(memory, student.hidden, student.weight, peak, held + copies)
        return linear_divergence(
            student.hidden, student.weight, teacher.hidden, teacher.weight, kind="jsd",
            linear_bias=_in_f32(student.bias), teacher_bias=_in_f32(teacher.bias), memory=memory,
            **options,
        )  # fmt: skip


def _in_f32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


def counted(keep: Tensor) -> Tensor:
    """A target that says which tokens count, and of which no more is used."""
    return torch.zeros_like(keep, dtype=torch.int64).masked_fill(~keep, IGNORE_INDEX)

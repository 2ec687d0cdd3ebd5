# SPDX-License-Identifier: Apache-2.0
"""What the drop-in divergences of a student's and a teacher's head have in common: one dtype for
both heads, and the default memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from logitless._call import IGNORE_INDEX
from logitless.integrations._memory import Sizes, frugal_beside
from logitless.torch import linear_divergence
from logitless.torch._checks import check_tensor
from logitless.torch._functions import _autocast_dtype


class Head(NamedTuple):
    hidden: Tensor  # [..., D]
    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]

    def to(self, own: torch.dtype, dtype: torch.dtype) -> Head:
        """Hidden states and weight, rounded to the dtype `own` and then cast to `dtype`, which can
        represent every value of `own`."""
        hidden, weight = (_rounded(t, own, dtype) for t in (self.hidden, self.weight))
        return self._replace(hidden=hidden, weight=weight)

    def on_meta(self) -> Head:
        return Head(*(None if t is None else t.to("meta") for t in self))  # type: ignore[arg-type]


class _Rounded(torch.autograd.Function):
    """Rounds a tensor to `own`, but not its gradient."""

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


def check_heads(student: Head, teacher: Head) -> None:
    names = ("input", "linear_weight", "teacher_input", "teacher_weight")
    for name, value in zip(names, (*student[:2], *teacher[:2])):
        check_tensor(name, value)


def generalized_jsd(
    student: Head, teacher: Head, of: Literal["hidden", "weight"], memory: int | str | None,
    peak: Callable[[Sizes], int], held: int = 0, **options: Any,
) -> Any:  # fmt: skip
    """linear_divergence of the kind "jsd", which other libraries call the generalized JSD. Outside
    of autocast those libraries compute each head's product in the dtype `of` its hidden states or
    its weight, and round the other operand to it. If the dtypes of the two heads differ, both
    products are computed here in the wider dtype, which can represent every value of the other.
    `peak`: the bytes that the replaced function needs; `held`: bytes in use outside of this call,
    which are subtracted."""

    def divergence(own: Head, others: Head, dtype: torch.dtype) -> Any:
        copies = copied(dtype, student.weight, teacher.weight)
        room = frugal_beside(memory, own.hidden, own.weight, peak, held + copies)
        return linear_divergence(
            own.hidden, own.weight, others.hidden, others.weight, kind="jsd",
            linear_bias=bias_of(own), teacher_bias=bias_of(others), memory=room, **options,
        )  # fmt: skip

    return in_one_dtype(student, teacher, of, divergence)


def in_one_dtype(
    student: Head, teacher: Head, of: Literal["hidden", "weight"],
    compute: Callable[[Head, Head, torch.dtype], Any],
) -> Any:  # fmt: skip
    """`compute` of both heads with the dtypes that generalized_jsd describes, and of the dtype of
    the products."""
    check_heads(student, teacher)
    dtypes = getattr(student, of).dtype, getattr(teacher, of).dtype
    context: Any = contextlib.nullcontext()
    dtype = _autocast_dtype(student.hidden)
    if dtype is None:
        dtype = torch.promote_types(*dtypes)
        mixed = any(t.dtype is not dtype for t in (*student[:2], *teacher[:2]))
        if dtype.itemsize < 4 and mixed and not student.hidden.is_meta:
            # autocast instead of a cast, so that an f32 weight's gradient is computed in f32
            context = torch.autocast(student.hidden.device.type, dtype)
    with context:
        if _autocast_dtype(student.hidden) is None:
            student, teacher = student.to(dtypes[0], dtype), teacher.to(dtypes[1], dtype)
        return compute(student, teacher, dtype)


def copied(dtype: torch.dtype, *weights: Tensor) -> int:
    """The bytes of copies of these weights in this dtype."""
    return sum(w.numel() * dtype.itemsize for w in weights if w.dtype is not dtype)


def bias_of(head: Head) -> Any:
    """The head's bias in f32, [V]. Given as [1, V] it is reshaped."""
    bias = head.bias
    if not isinstance(bias, Tensor):
        return bias
    return (bias[0] if bias.shape == (1, len(head.weight)) else bias).float()


def counted(keep: Tensor) -> Tensor:
    """A target that only says which tokens count: class 0 if `keep`, otherwise the ignore_index."""
    return torch.zeros_like(keep, dtype=torch.int64).masked_fill(~keep, IGNORE_INDEX)

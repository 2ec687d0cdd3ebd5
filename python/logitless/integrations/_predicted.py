# SPDX-License-Identifier: Apache-2.0
"""The object that a Trainer's preprocess_logits_for_metrics gets in place of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitless._errors import not_supported

_aten = torch.ops.aten


class Predicted(Tensor):
    """Logits [..., V] without storage: only the most likely tokens, `ids` [...], are known.
    argmax(-1) returns them, and the operations that a Trainer applies before it are supported; all
    others raise."""

    ids: Tensor

    @staticmethod
    def __new__(cls, ids: Tensor, columns: int, dtype: torch.dtype) -> Predicted:
        make: Any = Tensor._make_wrapper_subclass
        made: Predicted = make(cls, (*ids.shape, columns), dtype=dtype, device=ids.device)
        made.ids = ids
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override,unused-ignore]
        return f"Predicted({self.ids!r}, columns={self.shape[-1]}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override,unused-ignore]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        served = _SERVED.get(op.overloadpacket)
        made = NotImplemented if served is None else served(*args, **(kwargs or {}))
        if made is NotImplemented:
            raise not_supported(
                f"preprocess_logits_for_metrics makes {op.overloadpacket} of the logits of "
                "evaluations, of which a patched model makes none; allowed: logits.argmax(-1); "
                "pass eval_logits=True to patch_transformers, which leaves evaluations alone"
            )
        return made


def _like(logits: Predicted, ids: Tensor, dtype: torch.dtype | None = None) -> Predicted:
    return Predicted(ids, logits.shape[-1], dtype or logits.dtype)


def _argmax(logits: Predicted, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim not in (-1, logits.dim() - 1):
        return NotImplemented
    return logits.ids[..., None] if keepdim else logits.ids


def _slice(
    logits: Predicted, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    if dim % logits.dim() != logits.dim() - 1:
        return _like(logits, _aten.slice(logits.ids, dim % logits.dim(), start, end, step))
    whole = not start and (end is None or end >= logits.shape[-1]) and step == 1
    return logits if whole else NotImplemented


def _to(logits: Predicted, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    if dtype not in (None, logits.dtype, torch.float32, torch.float64):
        return NotImplemented  # rounding may make logits equal, and so change the argmax
    return _like(logits, logits.ids.to(device or logits.device), dtype)


# A Trainer with several processes pads shorter logits by copying them into zeros.
def _new_zeros(logits: Predicted, size: Any, *, dtype: Any = None, **_: Any) -> Any:
    if list(size)[-1] != logits.shape[-1]:
        return NotImplemented
    return _like(logits, logits.ids.new_zeros(list(size)[:-1]), dtype)


def _add(logits: Any, other: Any, *, alpha: Any = 1) -> Any:
    return NotImplemented if isinstance(other, Tensor) else _like(logits, logits.ids)


def _copy(logits: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(logits, Predicted) or not isinstance(source, Predicted):
        return NotImplemented
    logits.ids.copy_(source.ids)
    return logits


_SERVED: dict[Any, Callable[..., Any]] = {
    _aten.argmax: _argmax, _aten.slice: _slice, _aten._to_copy: _to, _aten.new_zeros: _new_zeros,
    _aten.add: _add, _aten.copy_: _copy, _aten.detach: lambda logits: _like(logits, logits.ids),
    _aten.alias: lambda logits: _like(logits, logits.ids),
}  # fmt: skip

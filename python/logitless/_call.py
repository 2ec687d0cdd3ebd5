# SPDX-License-Identifier: Apache-2.0
"""Converts a caller's options to the core's, and checks shapes, for all bindings."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypedDict, TypeVar

from logitless import _abi
from logitless._abi import Options
from logitless._errors import LogitlessError, invalid, not_supported, wrong_dtype, wrong_shape

Reduction: TypeAlias = Literal["none", "sum", "mean"]
EmptyMean: TypeAlias = Literal["zero", "nan"]

if TYPE_CHECKING:  # Python 3.10 has no TypedDict of a type variable
    A = TypeVar("A")

    class _OfLogits(TypedDict, Generic[A], total=False):
        ignore_index: int | None
        logit_scale: float
        softcap: float | None
        temperature: float | A

    class _OfLoss(TypedDict, total=False):
        label_smoothing: float
        z_loss: float
        empty_mean: EmptyMean

    class _OfTokens(TypedDict, Generic[A], total=False):
        weight: A | None
        reduction: Reduction
        token_weight: A | None
        normalizer: float | A | None

    class _OfRows(TypedDict, Generic[A], total=False):
        memory: int | str | None
        vocab_ids: A | None

    class _OfHead(_OfRows[A], total=False):
        shift: bool | int

    class _OfBias(TypedDict, Generic[A], total=False):
        linear_bias: A | None

    class LossOptions(_OfLogits[A], _OfLoss, _OfTokens[A], total=False):
        """The options of a loss of given logits."""

    class LinearOptions(LossOptions[A], _OfHead[A], _OfBias[A], total=False):
        """The options of linear_cross_entropy that all bindings have."""

    class LogprobOptions(_OfLogits[A], _OfHead[A], _OfBias[A], total=False):
        """The options of linear_logprob that all bindings have."""

    class ChosenOptions(_OfRows[A], _OfBias[A], total=False):
        """The options of linear_logprobs_at and linear_topk that all bindings have."""

        logit_scale: float
        softcap: float | None
        temperature: float | A

    class ModuleOptions(_OfLogits[A], _OfLoss, total=False):
        """The options that the module of a loss of given logits stores, besides weight, reduction
        and return_statistics."""

    class LinearModuleOptions(ModuleOptions[A], _OfHead[A], total=False):
        """The options that the module of a linear loss stores, besides weight, reduction and
        return_statistics."""


REDUCTIONS = {
    "none": _abi.REDUCTION_NONE,
    "sum": _abi.REDUCTION_SUM,
    "mean": _abi.REDUCTION_MEAN,
}
EMPTY_MEANS = {"zero": _abi.EMPTY_MEAN_ZERO, "nan": _abi.EMPTY_MEAN_NAN}
IGNORE_INDEX = Options().ignore_index


def one_of(name: str, value: Any, allowed: Mapping[str, int]) -> int:
    code = allowed.get(value) if isinstance(value, str) else None
    if code is None:
        raise invalid(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")
    return code


def options_of(
    reduction: Any, ignore_index: Any, label_smoothing: Any, z_loss: Any, logit_scale: Any,
    softcap: Any, temperature: Any, empty_mean: Any,
) -> Options:  # fmt: skip
    """The core's options without the normalizer. An ignore_index of None means the default, as in
    torch.nn.functional.linear_cross_entropy; a softcap of None means none, as in models'
    configurations."""
    return Options(
        one_of("reduction", reduction, REDUCTIONS),
        IGNORE_INDEX if ignore_index is None else ignore_index,
        label_smoothing,
        z_loss,
        logit_scale,
        0.0 if softcap is None else softcap,
        temperature,
        one_of("empty_mean", empty_mean, EMPTY_MEANS),
    )


def is_flat(temperature: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a temperature of this shape must be reshaped to the target's: it is [N], and the
    target has another shape. Raises if it is neither [N] nor broadcastable to the target's
    shape."""
    tokens = math.prod(target)
    if len(temperature) == 1 and len(target) != 1 and temperature[0] == tokens:
        return True
    pairs = zip(reversed(temperature), reversed(target))
    if len(temperature) > len(target) or any(a not in (1, b) for a, b in pairs):
        raise wrong_shape(
            f"temperature has shape {tuple(temperature)}; allowed: {tuple(target)} as target, "
            f"({tokens},), or what is broadcastable to it"
        )
    return False


def shift_of(value: Any) -> int:
    """The argument `shift` as an int; a float is refused, not truncated."""
    # A compiler's symbol is an int here and stays one. NumPy's truths are no Python ints.
    if isinstance(value, int) or getattr(getattr(value, "dtype", None), "kind", "") == "b":
        return int(value)
    try:
        return operator.index(value)
    except TypeError:
        raise wrong_dtype(f"shift is a {type(value).__name__}; allowed: a bool or an int") from None


def check_shift(shift: int, shape: Sequence[int]) -> None:
    """Checks a shift of targets of `shape` [..., T]. A shift by one may leave no target if T is 1;
    a mean is then empty."""
    if not shape:
        raise wrong_shape("target has shape (); allowed with shift: [..., T]")
    tokens = shape[-1]
    if shift < 0 or (shift > 1 and tokens and shift >= tokens):
        raise invalid(
            f"shift is {shift} of targets {tuple(shape)}; allowed: False, True, or 0 to "
            f"{max(tokens - 1, 1)}, which leaves a target"
        )


def check_rows(rows: Any, what: str) -> None:
    if not rows.ndim:
        raise wrong_shape(f"{what} has shape (); allowed: [..., {'VD'[what == 'input']}]")


def soft_target(dtype: object, shape: Sequence[int]) -> LogitlessError:
    return not_supported(
        f"target is {dtype} of shape {tuple(shape)}: soft targets and top-k log-probabilities are "
        "not supported; allowed: class indices, int32 or int64"
    )


def wrong_target(shape: Sequence[int], rows: Sequence[int], what: str) -> LogitlessError:
    """The error about a target of another shape than `rows` [..., D], called `what`, demand."""
    return wrong_shape(
        f"target has shape {tuple(shape)}; allowed: {tuple(rows[:-1])}, the shape of {what} "
        "without its last dimension"
    )


def check_ids(shape: Sequence[int], rows: Sequence[int], what: str = "input") -> None:
    """Checks the shape of ids [..., K] against that of `rows` [..., D], called `what`."""
    alike = len(shape) > 0 and shape[:-1] == rows[:-1]
    if not alike or not 1 <= shape[-1] <= _abi.MOST_CHOSEN:
        tokens = "".join(f"{size}, " for size in rows[:-1])
        raise wrong_shape(
            f"ids has shape {tuple(shape)}; allowed: ({tokens}K), the shape of {what} with K from "
            f"1 to {_abi.MOST_CHOSEN} in the place of its last dimension"
        )


def check_listed_ids(shape: Sequence[int], tokens: int) -> None:
    """Checks the shape of ids [M] beside offsets."""
    if len(shape) != 1:
        raise wrong_shape(f"ids has shape {tuple(shape)}; allowed beside offsets: (M,)")
    if tokens == 0 and shape[0] > 0:
        raise wrong_shape(f"ids has shape {tuple(shape)}; allowed beside no tokens: (0,)")


def check_offsets(shape: Sequence[int], tokens: int) -> None:
    if tuple(shape) != (tokens + 1,):
        raise wrong_shape(
            f"offsets has shape {tuple(shape)}; allowed: ({tokens + 1},), N + 1 of the N tokens"
        )

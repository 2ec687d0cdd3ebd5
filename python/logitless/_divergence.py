# SPDX-License-Identifier: Apache-2.0
"""Divergences of two heads: the names of their kinds and statistics, and the conversion of a
caller's options to the core's, for all bindings. docs/semantics.md has the formulas."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from logitless import _abi, _call, _statistics
from logitless._abi import Divergence
from logitless._errors import invalid, wrong_shape
from logitless._statistics import Statistic

A = TypeVar("A")

Kind: TypeAlias = Literal["forward_kl", "reverse_kl", "jsd", "skew_kl", "tv"]
KINDS = {
    "forward_kl": _abi.FORWARD_KL,
    "reverse_kl": _abi.REVERSE_KL,
    "jsd": _abi.JSD,
    "skew_kl": _abi.SKEW_KL,
    "tv": _abi.TV,
}
MIXTURES = (_abi.JSD, _abi.SKEW_KL)  # the kinds that read beta

STATISTICS = {
    "entropy": Statistic("-sum p log p, of the student"),
    "teacher_entropy": Statistic("-sum q log q, of the teacher"),
    "acceptance": Statistic(
        "sum min(p, q): the probability that a token drafted by the student is accepted"
    ),
    "logprob": Statistic("log p of the target, at most 0"),
}

StatisticName: TypeAlias = Literal["entropy", "teacher_entropy", "acceptance", "logprob"]

if TYPE_CHECKING:
    from typing import TypedDict

    Names: TypeAlias = StatisticName | Sequence[StatisticName]

    class DivergenceStatistics(NamedTuple, Generic[A]):
        entropy: A | None = None
        teacher_entropy: A | None = None
        acceptance: A | None = None
        logprob: A | None = None

    class ModuleOptions(TypedDict, Generic[A], total=False):
        """The options that a module stores, besides kind, reduction and return_statistics."""

        beta: float
        label_weight: float
        ignore_index: int | None
        shift: bool | int
        temperature: float | A
        teacher_temperature: float | A | None
        logit_scale: float
        softcap: float | None
        teacher_logit_scale: float
        teacher_softcap: float | None
        empty_mean: _call.EmptyMean
        memory: int | str | None
        vocab_ids: A | None
        teacher_vocab_ids: A | None

    class DivergenceOptions(ModuleOptions[A], total=False):
        """The options of linear_divergence that all bindings have."""

        kind: Kind
        target: A | None
        linear_bias: A | None
        teacher_bias: A | None
        teacher_logits: A | None
        token_weight: A | None
        reduction: _call.Reduction
        normalizer: float | A | None

else:
    # Python 3.10 has no NamedTuple of a type variable.
    DivergenceStatistics = collections.namedtuple(
        "DivergenceStatistics", STATISTICS, defaults=(None,) * len(STATISTICS), module=__name__
    )
    DivergenceStatistics.__class_getitem__ = classmethod(lambda cls, _: cls)
    DivergenceStatistics.__doc__ = (
        "Statistics of every token, f32 in the shape of the tokens; None where not asked for. They "
        "have no gradient.\n\n"
    ) + _statistics.listed(STATISTICS)
    _statistics.describe(DivergenceStatistics, STATISTICS)


def names_of(names: Any) -> tuple[str, ...]:
    """The names of statistics that the caller asks for, each once, in the table's order."""
    return _statistics.names_of(names, STATISTICS) if names else ()


def options_of(
    kind: Any, beta: Any, label_weight: Any, reduction: Any, ignore_index: Any, logit_scale: Any,
    softcap: Any, temperature: Any, teacher_logit_scale: Any, teacher_softcap: Any,
    teacher_temperature: Any, empty_mean: Any,
) -> Divergence:  # fmt: skip
    """The core's options without the normalizer. For kinds that do not read beta, its value is
    replaced by the default, so that it is not checked and does not make two calls differ. None
    means the same as in _call.options_of; a teacher_temperature of None means the student's."""
    code = _call.one_of("kind", kind, KINDS)
    return Divergence(
        reduction=_call.one_of("reduction", reduction, _call.REDUCTIONS),
        ignore_index=_call.IGNORE_INDEX if ignore_index is None else ignore_index,
        logit_scale=logit_scale,
        softcap=0.0 if softcap is None else softcap,
        temperature=temperature,
        empty_mean=_call.one_of("empty_mean", empty_mean, _call.EMPTY_MEANS),
        kind=code,
        beta=beta if code in MIXTURES else 0.5,
        label_weight=label_weight,
        teacher_logit_scale=teacher_logit_scale,
        teacher_softcap=0.0 if teacher_softcap is None else teacher_softcap,
        teacher_temperature=temperature if teacher_temperature is None else teacher_temperature,
    )


def subtracts_mean(options: Divergence) -> bool:
    """Whether dz subtracts a mean: not in forward_kl, nor in what is forward_kl at beta 0."""
    if options.kind in MIXTURES and options.beta == 0:
        return False
    return options.kind != _abi.FORWARD_KL


def check_teachers_rows(
    name: str, shape: Sequence[int], tokens: Sequence[int], whose: str = "the tokens of input"
) -> None:
    """Raises unless teacher_input [..., D] or teacher_logits [..., V] has the tokens of input."""
    if len(shape) == 0 or tuple(shape[:-1]) != tuple(tokens):
        allowed = ", ".join((*map(str, tokens), "V" if name == "teacher_logits" else "D"))
        raise wrong_shape(f"{name} has shape {tuple(shape)}; allowed: ({allowed}), {whose}")


def check_shift_has_target(shift: int, target: object) -> None:
    if shift and target is None:
        raise invalid("target is missing; shift needs it")

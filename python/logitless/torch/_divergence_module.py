# SPDX-License-Identifier: Apache-2.0
"""linear_divergence as a module that holds plain options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from torch import Tensor

from logitless._call import EmptyMean, Reduction
from logitless.torch._divergence import DivergenceStatistics, linear_divergence
from logitless.torch._modules import Options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from logitless._divergence import Kind, ModuleOptions, Names

R = TypeVar("R")


class LinearDivergenceLoss(Options, Generic[R]):
    """`linear_divergence` as a module that holds the options. R is the type that a call returns:
    Tensor, or with statistics (Tensor, DivergenceStatistics). Options that are tensors
    (temperatures and lists of ids) move with the module and are not part of its checkpoint. `group`
    is an argument of each call, because it cannot be part of a checkpoint or a copy."""

    temperature: float | Tensor
    teacher_temperature: float | Tensor | None
    vocab_ids: Tensor | None
    teacher_vocab_ids: Tensor | None
    _names = (
        "kind", "reduction", "beta", "label_weight", "ignore_index", "shift", "temperature",
        "teacher_temperature", "logit_scale", "softcap", "teacher_logit_scale", "teacher_softcap",
        "empty_mean", "memory", "return_statistics", "vocab_ids", "teacher_vocab_ids",
    )  # fmt: skip

    if TYPE_CHECKING:

        @overload
        def __init__(
            self: LinearDivergenceLoss[Tensor], kind: Kind = ..., reduction: Reduction = ..., *,
            return_statistics: tuple[()] = ..., **options: Unpack[ModuleOptions[Tensor]],
        ) -> None: ...  # fmt: skip
        @overload
        def __init__(
            self: LinearDivergenceLoss[tuple[Tensor, DivergenceStatistics]], kind: Kind = ...,
            reduction: Reduction = ..., *, return_statistics: Names,
            **options: Unpack[ModuleOptions[Tensor]],
        ) -> None: ...  # fmt: skip
        def __init__(self, *args: Any, **options: Any) -> None: ...

        def __call__(
            self, input: Tensor, linear_weight: Tensor, teacher_input: Tensor | None = ...,
            teacher_weight: Tensor | None = ..., *, target: Tensor | None = ...,
            linear_bias: Tensor | None = ..., teacher_bias: Tensor | None = ...,
            teacher_logits: Tensor | None = ..., token_weight: Tensor | None = ...,
            normalizer: float | Tensor | None = ..., temperature: float | Tensor | None = ...,
            teacher_temperature: float | Tensor | None = ..., group: Any = ...,
        ) -> R: ...  # fmt: skip

    else:

        def __init__(
            self,
            kind: Kind = "forward_kl",
            reduction: Reduction = "mean",
            *,
            beta: float = 0.5,
            label_weight: float = 0.0,
            ignore_index: int | None = -100,
            shift: bool | int = False,
            temperature: float | Tensor = 1.0,
            teacher_temperature: float | Tensor | None = None,
            logit_scale: float = 1.0,
            softcap: float | None = 0.0,
            teacher_logit_scale: float = 1.0,
            teacher_softcap: float | None = 0.0,
            empty_mean: EmptyMean = "zero",
            memory: int | str | None = None,
            return_statistics: Any = (),
            vocab_ids: Tensor | None = None,
            teacher_vocab_ids: Tensor | None = None,
        ) -> None:
            super().__init__()
            self.kind = kind
            self.reduction = reduction
            self.beta = beta
            self.label_weight = label_weight
            self.ignore_index = ignore_index
            self.shift = shift
            self.hold_temperature("temperature", temperature)
            self.hold_temperature("teacher_temperature", teacher_temperature)
            self.logit_scale = logit_scale
            self.softcap = softcap
            self.teacher_logit_scale = teacher_logit_scale
            self.teacher_softcap = teacher_softcap
            self.empty_mean = empty_mean
            self.memory = memory
            self.return_statistics = return_statistics
            self.register_buffer("vocab_ids", vocab_ids, persistent=False)
            self.register_buffer("teacher_vocab_ids", teacher_vocab_ids, persistent=False)

    def forward(
        self,
        input: Tensor,
        linear_weight: Tensor,
        teacher_input: Tensor | None = None,
        teacher_weight: Tensor | None = None,
        *,
        target: Tensor | None = None,
        linear_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        teacher_logits: Tensor | None = None,
        token_weight: Tensor | None = None,
        normalizer: float | Tensor | None = None,
        temperature: float | Tensor | None = None,
        teacher_temperature: float | Tensor | None = None,
        group: Any = None,
    ) -> Any:
        """`linear_divergence` of these arguments with the module's options. Temperatures given here
        replace the module's."""
        options = self._options(temperature)
        if teacher_temperature is not None:
            options["teacher_temperature"] = teacher_temperature
        return linear_divergence(
            input, linear_weight, teacher_input, teacher_weight, target=target,
            linear_bias=linear_bias, teacher_bias=teacher_bias, teacher_logits=teacher_logits,
            token_weight=token_weight, normalizer=normalizer, group=group, **options,
        )  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""Replacements for Liger's fused losses of a head, with Liger's argument order: the module of the
cross-entropy takes the weight first, those of two heads do not."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless._call import Reduction
from logitless._errors import invalid, renames
from logitless._statistics import StatisticName
from logitless.integrations._arguments import only
from logitless.integrations._divergence import (
    Head,
    bias_of,
    check_heads,
    copied,
    counted,
    generalized_jsd,
    in_one_dtype,
)
from logitless.integrations._memory import Sizes, frugal, frugal_beside
from logitless.torch import linear_cross_entropy
from logitless.torch._checks import check_tensor


class CrossEntropyOutput(NamedTuple):
    """The result if the caller asks for more than the loss."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def _mean(values: Tensor, valid: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return values
    total = values.sum()
    return total if reduction == "sum" else total / valid.sum().clamp(min=1)


# linear_cross_entropy's arguments, and Liger's names for them.
_ARGUMENTS = {
    "input": "_input",
    "linear_weight": "weight",
    "linear_bias": "bias",
    "weight": "ce_weight",
    "z_loss": "lse_square_scale",
}


def _peak(
    call: Sizes, reduction: str, accum_dtype: torch.dtype | None, chunk_mem_const: int
) -> int:
    """The largest number of bytes that Liger's function needs: the logits of a chunk of tokens,
    twice if their gradients are multiplied by an upstream gradient, and f32 sums of the weight's
    gradient if `accum_dtype` requests them."""
    chunks = -(-call.vocab // max(chunk_mem_const * call.width, 1))
    rows = -(-call.tokens // max(chunks, 1))
    rows = min(1 << max(rows - 1, 0).bit_length(), call.tokens)
    logits = call.size * rows * call.vocab
    sums = 0 if accum_dtype is None else call.f32_weight_sums
    return logits * (2 if reduction == "none" and call.gradients else 1) + sums


def _tp_peak(call: Sizes) -> int:
    return call.size * min(call.tokens, 1024) * call.vocab


class FusedLinearCrossEntropyFunction:
    """`apply` has the positional arguments of LigerFusedLinearCrossEntropyFunction.apply. It
    returns (loss, z_loss, token_accuracy, predicted_tokens), where outputs that were not requested
    are None. `memory` is an additional argument, that of linear_cross_entropy. Its default is the
    bytes that Liger's function needs, or the minimum of ours if that is more, unless default_memory
    sets another."""

    @staticmethod
    @renames(_ARGUMENTS)
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        ce_impl: str | None = None,
        ce_mode: str | None = None,
        chunk_mem_const: int = 1,
        *,
        memory: int | str | None = None,
    ) -> CrossEntropyOutput:
        """As the class says. `_input` [N, D], `weight` [V, D], `target` [N], `bias` [V] and
        `ce_weight` [V]."""
        only("accum_dtype", accum_dtype, None, torch.float32)  # sums are always f32
        only("ce_impl", ce_impl, None)  # Liger's other kernels
        only("ce_mode", ce_mode, None)
        memory = frugal(
            memory, _input, weight,
            lambda call: _peak(call, reduction, accum_dtype, chunk_mem_const),
        )  # fmt: skip
        token_weight = None
        if use_token_scaling:  # each loss times its token's probability, as a constant
            with torch.no_grad():
                loss = linear_cross_entropy(
                    _input, weight, target, linear_bias=bias, ignore_index=ignore_index,
                    softcap=softcap, reduction="none", memory=memory,
                )  # fmt: skip
                token_weight = loss.neg().exp()
        # With class weights a mean divides by their sum, but Liger's z-loss by the number of
        # tokens.
        apart = ce_weight is not None and reduction == "mean" and lse_square_scale > 0
        names: list[StatisticName] = []
        if return_z_loss or apart:
            names.append("lse")
        if return_token_accuracy or return_predicted_tokens:
            names.append("argmax")
        result: Any = linear_cross_entropy(
            _input, weight, target, linear_bias=bias, weight=ce_weight, reduction=reduction,
            ignore_index=ignore_index, label_smoothing=label_smoothing,
            z_loss=0.0 if apart else lse_square_scale, softcap=softcap, token_weight=token_weight,
            return_statistics=names, memory=memory,
        )  # fmt: skip
        if not names:
            return CrossEntropyOutput(result)
        loss, statistics = result
        valid = target != ignore_index
        z_loss = accuracy = predicted = None
        if return_z_loss or apart:
            squares = lse_square_scale * statistics.lse.square()
            squares = squares if token_weight is None else squares * token_weight
            z_loss = _mean(squares, valid, reduction)
        if apart:
            loss, z_loss = loss + z_loss, z_loss if return_z_loss else None
        if return_token_accuracy:
            hits = (statistics.argmax == target).float()  # an ignored token's argmax is -1
            accuracy = hits if reduction == "none" else hits.sum() / valid.sum().clamp(min=1)
        if return_predicted_tokens:
            predicted = statistics.argmax
        return CrossEntropyOutput(loss, z_loss, accuracy, predicted)


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    """forward(lin_weight, _input, target, bias) returns the loss, or a CrossEntropyOutput if the
    constructor's arguments request more than the loss. `memory` is an additional argument, as in
    FusedLinearCrossEntropyFunction."""

    ce_weight: Tensor | None

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        *,
        memory: int | str | None = None,
    ) -> None:
        super().__init__()
        only("accum_dtype", accum_dtype, None, torch.float32)
        self.register_buffer("ce_weight", ce_weight, persistent=False)
        self._rest: tuple[Any, ...] = (
            ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
            accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
        )  # fmt: skip
        self._wants_more = return_z_loss or return_token_accuracy or return_predicted_tokens
        self.memory = memory

    @renames({"weight": "lin_weight"})
    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Any:
        """As the class says. `lin_weight` [V, D], `_input` [N, D], `target` [N], `bias` [V]."""
        output = FusedLinearCrossEntropyFunction.apply(
            _input, lin_weight, target, bias, self.ce_weight, *self._rest, memory=self.memory
        )
        return output if self._wants_more else output.loss


class LigerFusedLinearScaledCrossEntropyTPFunction:
    """`apply` has the arguments of the class of this name in Liger 0.8.5,
    liger_kernel/ops/fused_linear_scaled_cross_entropy.py. Unlike there, nothing needs to be
    configured first."""

    @staticmethod
    @renames(_ARGUMENTS)
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        tp_group: Any,
        temperature: float = 1.0,
        ignore_index: int = -100,
        tiles_per_reduce: int = 1,
        return_entropy: bool = False,
        *,
        memory: int | str | None = None,
    ) -> Any:
        """The loss of every token, [N] in f32 (0 for ignored tokens), or with `return_entropy` the
        pair (loss, entropy). Both are differentiable and the same on every rank. _input [N, D] and
        target [N] are the same on all P ranks of `tp_group` (None: all processes); weight [V / P,
        D] is the rank's equal share. The gradient of _input is the sum over the ranks, as in Liger.
        `tiles_per_reduce` concerns Liger's kernel and has no effect. `memory` is an additional
        argument, that of linear_cross_entropy. Its default is the bytes of the gradients of 1024
        tokens' logits, which Liger's function for one device needs."""
        only("tiles_per_reduce", tiles_per_reduce, 1, 2, 4)
        group = torch.distributed.group.WORLD if tp_group is None else tp_group
        result: Any = linear_cross_entropy(
            _input, weight, target, reduction="none", ignore_index=ignore_index,
            temperature=temperature, group=group, memory=frugal(memory, _input, weight, _tp_peak),
            return_statistics=("entropy",) if return_entropy else (),
        )  # fmt: skip
        return (result[0], result[1].entropy) if return_entropy else result


def _jsd_peak(call: Sizes) -> int:
    """The largest number of bytes that Liger's function needs on a GPU before Blackwell, without
    the f32 sums of the weight's gradient: nine f32 tensors of a chunk's logits, or eight if there
    is only one chunk."""
    chunks = -(-call.vocab // max(call.width, 1))
    rows = -(-call.tokens // max(chunks, 1))
    rows = min(1 << max(rows - 1, 0).bit_length(), call.tokens)
    return (8 if rows == call.tokens else 9) * 4 * rows * call.vocab


# linear_divergence's arguments, and Liger's names for them.
_JSD_ARGUMENTS = {
    "input": "student_input",
    "linear_weight": "student_weight",
    "linear_bias": "student_bias",
    "target": "shift_labels",
    "beta": "jsd_beta",
}


class LigerFusedLinearJSDFunction:
    """`apply` has the positional arguments of LigerFusedLinearJSDFunction.apply in Liger 0.8.5's
    liger_kernel.ops. It returns the mean over tokens whose label is not ignored, f32. `memory` is
    an additional argument, that of linear_divergence. Its default is 5 % more than the bytes that
    Liger's function needs on a GPU before Blackwell, or the minimum of ours if that is more, unless
    default_memory sets another."""

    @staticmethod
    @renames(_JSD_ARGUMENTS)
    def apply(
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
        jsd_impl: str | None = None,
        jsd_mode: str | None = None,
        *,
        memory: int | str | None = None,
    ) -> Tensor:
        """As the class says. Inputs [N, D] and [N, Dt], weights [V, D] and [V, Dt],
        `shift_labels` [N]."""
        only("accum_dtype", accum_dtype, None, torch.float32)  # sums are always f32
        only("jsd_impl", jsd_impl, None)  # Liger's other kernels
        only("jsd_mode", jsd_mode, None)
        target = None
        if shift_labels is not None:
            check_tensor("target", shift_labels)
            target = counted(shift_labels != ignore_index)
        loss: Tensor = generalized_jsd(
            Head(student_input, student_weight), Head(teacher_input, teacher_weight), "hidden",
            memory,
            lambda call: _jsd_peak(call) + (0 if accum_dtype is None else call.f32_weight_sums),
            beta=jsd_beta, target=target, temperature=temperature,
        )  # fmt: skip
        return loss


class LigerFusedLinearJSD(torch.nn.Module):
    """forward(student_input, student_weight, teacher_input, teacher_weight, shift_labels) returns
    the loss. `memory` is an additional argument, as in LigerFusedLinearJSDFunction."""

    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
        *,
        memory: int | str | None = None,
    ) -> None:
        super().__init__()
        only("accum_dtype", accum_dtype, None, torch.float32)
        self.jsd_beta = jsd_beta
        self.ignore_index = ignore_index
        self.temperature = temperature
        self.accum_dtype = accum_dtype
        self.memory = memory

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None,
    ) -> Tensor:
        """As the class says. Inputs [N, D] and [N, Dt], weights [V, D] and [V, Dt],
        `shift_labels` [N]."""
        return LigerFusedLinearJSDFunction.apply(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels,
            self.jsd_beta, self.ignore_index, self.temperature, self.accum_dtype,
            memory=self.memory,
        )  # fmt: skip


class LigerFusedLinearJSDLoss(torch.nn.Module):
    """The loss of this name in liger_kernel.chunked_loss: weight_hard_loss times the mean
    cross-entropy of the labels, without the temperature, plus weight_soft_loss times the mean
    divergence, with the temperature. It is computed in one pass if the temperature is 1, both
    weights are above 0 and the terms are not asked for, otherwise in one pass for each term. With
    `return_soft_hard_loss` the terms are returned too, without gradients, as in Liger. If hidden
    states and heads have several dtypes, the products of both terms are in that of the hidden
    states, the wider one of both models. `compiled` concerns Liger's code and has no effect.
    `chunk_size` determines the bytes that Liger's loss needs, which are the default of the
    additional argument `memory`."""

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
        *,
        memory: int | str | None = None,
    ) -> None:
        super().__init__()
        if temperature == 0:
            raise invalid("temperature is 0; allowed: finite, positive and not subnormal")
        self.weight_hard_loss = weight_hard_loss
        self.weight_soft_loss = weight_soft_loss
        self.beta = beta
        self.ignore_index = ignore_index
        self.temperature = temperature
        self.compiled = compiled
        self.chunk_size = chunk_size
        self.return_soft_hard_loss = return_soft_hard_loss
        self.memory = memory

    @renames(
        {
            "input": "student_input",
            "linear_weight": "student_weight",
            "linear_bias": "student_bias",
            "target": "true_labels",
            "label_weight": "weight_hard_loss / weight_soft_loss",
        }
    )
    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Any:
        """As the class says. Inputs [N, D] and [N, Dt], weights [V, D] and [V, Dt],
        `true_labels` [N], biases [V]."""
        student = Head(student_input, student_weight, student_bias)
        teacher = Head(teacher_input, teacher_weight, teacher_bias)
        check_heads(student, teacher)
        check_tensor("target", true_labels)
        hard, soft, parts = self.weight_hard_loss, self.weight_soft_loss, self.return_soft_hard_loss
        if hard > 0 and soft > 0 and self.temperature == 1 and not parts:
            return soft * self._divergence(
                student, teacher, target=true_labels, ignore_index=self.ignore_index,
                label_weight=hard / soft,
            )  # fmt: skip
        # With two passes, the gradients of the first stay in memory during the second.
        both = parts or (hard != 0 and soft != 0)
        if not both and hard != 0:
            self._check_teacher(student, teacher)
        held = student_input.itemsize * (student_input.numel() + student_weight.numel()) * both
        losses: list[Tensor] = []
        if both or hard == 0:
            target = counted(true_labels != self.ignore_index)
            losses.append(self._divergence(student, teacher, held, target=target))
        if both or hard != 0:
            losses.append(self._of_labels(student, teacher, held, true_labels))
        if not both:
            return (hard or soft) * losses[0]
        loss = soft * losses[0] + hard * losses[1]
        return (loss, *(part.detach() for part in losses)) if parts else loss

    def _divergence(self, student: Head, teacher: Head, held: int = 0, **options: Any) -> Tensor:
        loss: Tensor = generalized_jsd(
            student, teacher, "hidden", self.memory, self._peak, held, beta=self.beta,
            temperature=self.temperature, **options,
        )  # fmt: skip
        return loss

    def _of_labels(self, student: Head, teacher: Head, held: int, labels: Tensor) -> Tensor:
        """The cross-entropy of the student, whose product has the dtype that it has in the
        divergence."""

        def loss(own: Head, _: Head, dtype: torch.dtype) -> Tensor:
            beside = held + copied(dtype, student.weight)
            memory = frugal_beside(self.memory, own.hidden, own.weight, self._peak, beside)
            made: Tensor = linear_cross_entropy(
                own.hidden, own.weight, labels, linear_bias=bias_of(own),
                ignore_index=self.ignore_index, memory=memory,
            )  # fmt: skip
            return made

        made: Tensor = in_one_dtype(student, teacher, "hidden", loss)
        return made

    def _check_teacher(self, student: Head, teacher: Head) -> None:
        """Raises the errors that the divergence would raise. Liger computes the divergence even if
        its weight is 0; here a call on meta tensors finds the same errors."""
        with torch.no_grad():
            self._divergence(student.on_meta(), teacher.on_meta())

    def _peak(self, call: Sizes) -> int:
        """The smallest number of bytes that Liger's compiled loss needs: a chunk's logits of both
        heads and the gradients of the student's, and a chunk's gradient of the weight in addition
        to the whole gradient."""
        rows = -(-call.tokens // max(call.tokens // self.chunk_size, 1))
        return call.size * (3 * rows * call.vocab + call.vocab * call.width)

# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of a softmax over a token's ids alone: the ids' logits, whose Backward needs no
product of the whole vocabulary ("Only chosen columns" in docs/semantics.md), and the log-softmax of
these logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from logitless import _abi
from logitless._abi import Options
from logitless._vocabulary import ABSENT
from logitless.torch import _lists, _run
from logitless.torch._autograd import cast, cast_bias
from logitless.torch._dispatch import define, once_only
from logitless.torch._run import columns

_INPUTS = ("input", "weight", "bias", "target", "temperature", "ids", "id_offsets")
_FORWARD = (*_INPUTS, "logits_at")
_BACKWARD = (*_INPUTS, "grad_logits_at", "grad_input", "grad_weight", "grad_bias")


def logprobs(
    input: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor | None, ids: Tensor,
    offsets: Tensor | None, options: Options, memory: int | None, dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """The log-probabilities in the shape of `ids`, [..., K], or [M] with `offsets` [N + 1].
    `dtype`: that of the products under autocast; gradients have the dtypes of their tensors."""
    op: Any = torch.ops.logitless.logits_at
    absent = ids == ABSENT
    logits = op(
        input, weight, bias, temperature, ids, offsets, options.logit_scale, options.softcap,
        options.temperature, memory, dtype,
    )  # fmt: skip
    among = logits.log_softmax(-1) if offsets is None else _lists.log_softmax(logits, offsets)
    # masked_fill also stops the upstream gradient of absent ids.
    made: Tensor = among.masked_fill(absent, -float("inf"))
    return made


def _inputs(tensors: Sequence[Any], dtype: torch.dtype | None) -> tuple[Tensor | None, ...]:
    """The tensors that _INPUTS names, from the first arguments of an op."""
    input, weight, bias, temperature, ids, offsets = tensors
    tokens = input.shape[:-1].numel()
    rows = cast(input, dtype).reshape(tokens, input.shape[-1])  # [N, D]
    weight, bias = cast(weight, dtype), cast_bias(bias, dtype)
    target = rows.new_zeros(tokens, dtype=torch.int64)  # [N]
    return rows, weight, bias, target, temperature, columns(ids, offsets), offsets


def _options(logit_scale: float, softcap: float, temperature: float) -> Options:
    return Options(
        _abi.REDUCTION_NONE, ABSENT, logit_scale=logit_scale, softcap=softcap,
        temperature=temperature,
    )  # fmt: skip


def _logits_at(*args: Any) -> Tensor:
    *tensors, scale, softcap, temperature, memory, dtype = args
    ids, offsets = tensors[4:]
    given = _inputs(tensors, dtype)
    logits = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    options = _options(scale, softcap, temperature)
    kind = _abi.LINEAR_CROSS_ENTROPY_FORWARD
    _run.launch(kind, _FORWARD, (*given, columns(logits, offsets)), options, memory, "logits_at")
    return logits


def _backward(*args: Any) -> tuple[Tensor, ...]:
    *tensors, scale, softcap, temperature, memory, dtype, upstream, needs = args
    input, weight, bias, *_, offsets = tensors
    given = _inputs(tensors, dtype)
    upstream = upstream.resolve_neg().contiguous()
    grads = _gradients((input, weight, bias), given, needs)
    options = _options(scale, softcap, temperature)
    kind = _abi.LINEAR_CROSS_ENTROPY_BACKWARD
    asked = ("only_chosen", *(None if g is None else (g.dtype, g.stride()) for g in grads))
    every = (*given, columns(upstream, offsets), *grads)
    _run.launch(kind, _BACKWARD, every, options, memory, asked, only_chosen=True)
    if grads[0] is not None:
        grads[0] = grads[0].view(input.shape)
    return tuple(input.new_empty(0) if g is None else g for g in grads)


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    dtype, _, needs = args[-3:]
    input, weight, bias = args[:3]
    rows = cast(input, dtype).reshape(-1, input.shape[-1])  # [N, D]
    made = _gradients((input, weight, bias), (rows, cast(weight, dtype), bias), needs)
    if made[0] is not None:
        made[0] = made[0].view(input.shape)
    return tuple(input.new_empty(0) if g is None else g for g in made)


def _gradients(
    of: Sequence[Tensor | None], given: Sequence[Tensor | None], needs: int
) -> list[Tensor | None]:
    """Empty gradients in the dtypes of the tensors, with strides in the same order as those of the
    tensors that the core gets."""
    made: list[Tensor | None] = []
    for i, (tensor, like) in enumerate(zip(of, given)):
        wanted = tensor is not None and like is not None and needs & 1 << i
        made.append(torch.empty_like(like, dtype=tensor.dtype) if wanted else None)  # type: ignore[arg-type,union-attr]
    return made


_TENSORS = (
    "Tensor input, Tensor weight, Tensor? bias, Tensor? temperature, Tensor ids, Tensor? offsets, "
    "float logit_scale, float softcap, float temperature_number, int? memory, ScalarType? dtype"
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.numbers = inputs[6:]


def _rule(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    needs = sum(1 << i for i in range(3) if ctx.needs_input_grad[i])
    op: Any = torch.ops.logitless.logits_at_backward
    grads = op(*ctx.saved_tensors, *ctx.numbers, upstream, needs)
    rest = [None] * (3 + len(ctx.numbers))
    return *(g if needs & 1 << i else None for i, g in enumerate(grads)), *rest


define(
    f"logits_at({_TENSORS}) -> Tensor",
    _logits_at, lambda *args: args[0].new_empty(args[4].shape, dtype=torch.float32),
    rule=_rule, setup=_setup,
)  # fmt: skip
define(
    f"logits_at_backward({_TENSORS}, Tensor upstream, int needs) -> (Tensor, Tensor, Tensor)",
    _backward, _backward_fake, rule=once_only,
)  # fmt: skip

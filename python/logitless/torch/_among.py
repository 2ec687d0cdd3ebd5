# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of a softmax over a token's ids alone: the ids' logits, whose Backward needs no
product of the whole vocabulary ("Only chosen columns" in docs/semantics.md), and the log-softmax of
these logits.

    logits_at           the logits of the ids
    log_softmax_at      their log-softmax: -inf for absent ids; a token whose upstream gradients are
                        all 0 gets a gradient of 0, even if its logits are NaN
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from logitless import _abi
from logitless._abi import Options
from logitless._vocabulary import ABSENT
from logitless.torch import _device, _lists, _run
from logitless.torch._autograd import cast, cast_bias
from logitless.torch._dispatch import define, once_only
from logitless.torch._kept import FRESH
from logitless.torch._run import columns

TENSORS = ("input", "weight", "bias", "temperature", "ids", "offsets")
_INPUTS = ("input", "weight", "bias", "target", "temperature", "ids", "id_offsets")
_FORWARD = (*_INPUTS, "logits_at")
_BACKWARD = (*_INPUTS, "grad_logits_at", "grad_input", "grad_weight", "grad_bias")


def logprobs(
    input: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor | None, ids: Tensor,
    offsets: Tensor | None, options: Options, memory: int | None, dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """The log-probabilities in the shape of `ids`, [..., K], or [M] with `offsets` [N + 1].
    `dtype`: that of the products under autocast; gradients have the dtypes of their tensors."""
    ops: Any = torch.ops.logitless
    needs = 0
    if torch.is_grad_enabled():
        of = enumerate((input, weight, bias))
        needs = sum(1 << i for i, t in of if t is not None and t.requires_grad)
    logits = ops.logits_at(
        input, weight, bias, temperature, ids, offsets, options.logit_scale, options.softcap,
        options.temperature, memory, dtype, needs,
    )  # fmt: skip
    made: Tensor = ops.log_softmax_at(logits, ids, offsets)
    return made


def _log_softmax_at(logits: Tensor, ids: Tensor, offsets: Tensor | None) -> Tensor:
    absent = ids == ABSENT
    # A token whose ids are all absent would have NaN, which anomaly detection reports.
    if offsets is None:
        logits = logits.masked_fill(absent.all(-1, keepdim=True), 0.0)
        made = logits.log_softmax(-1)
    else:
        token = _lists.token_of(offsets, ids.shape[0])
        some = _lists.any_of(~absent, offsets)[token]
        # Only absent ids: if offsets are wrong, an id that belongs to no list stays NaN.
        logits = logits.masked_fill(absent & ~some, 0.0)
        made = _lists.log_softmax(logits, offsets)
    return made.masked_fill(absent, -float("inf"))


def _log_softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:], output)


def _log_softmax_rule(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    ids, offsets, made = ctx.saved_tensors
    upstream = upstream.masked_fill(ids == ABSENT, 0.0)
    if offsets is None:
        total, active = upstream.sum(-1, keepdim=True), (upstream != 0).any(-1, keepdim=True)
    else:
        token = _lists.token_of(offsets, ids.shape[0])
        total = _lists.sums(upstream, offsets)[token]
        active = _lists.any_of(upstream != 0, offsets)[token]
    return (upstream - made.exp() * total).where(active, 0.0), None, None


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
    *tensors, scale, softcap, temperature, memory, dtype, needs = args
    ids, offsets = tensors[4:]
    given = _inputs(tensors, dtype)
    logits = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    every = (*given, columns(logits, offsets))
    options = _options(scale, softcap, temperature)
    if memory is not None and memory >= 0 and needs:  # a Room, which is negative, bounds less
        grads = _gradients(tensors[:3], given, needs, torch.device("meta"))
        _check_memory(memory, every, grads, options)
    kind = _abi.LINEAR_CROSS_ENTROPY_FORWARD
    _run.launch(kind, _FORWARD, every, options, memory, "logits_at")
    return logits


def _check_memory(
    memory: int, forward: Sequence[Tensor | None], grads: Sequence[Tensor | None], options: Options
) -> None:
    """Refuses a `memory` that is too small for Forward or for the Backward that follows."""
    where = forward[0].device  # type: ignore[union-attr]
    named = [(name, t) for name, t in zip(_BACKWARD, (*forward, *grads)) if t is not None]
    addresses: tuple[int, ...] = ()
    if where.type == "cuda":  # whose plans depend on the tensors' alignment
        addresses = tuple(FRESH + (0 if t.is_meta else t.data_ptr() & 15) for _, t in named)
        tf32 = named[0][1].dtype is torch.float32 and _device.allows_tf32()
        options = options._replace(allow_tf32=tf32)
    else:
        _run.follow_torch_threads()
    views = tuple(_run.view(name, t, where) for name, t in named)
    made = sum(g is not None for g in grads)
    least, recommended = _bounds(views, made, addresses, options, torch.get_num_threads())
    if memory < least:
        raise _abi.too_small(memory, least, recommended)


@functools.lru_cache(_device.MOST_SHAPES)
def _bounds(
    views: tuple[_abi.View, ...], made: int, addresses: tuple[int, ...], options: Options,
    threads: int,
) -> tuple[int, int]:  # fmt: skip
    """The least and the recommended bytes of both calls; `made`: the number of gradients, whose
    views come last."""
    device = (views[0].device_type, views[0].device_index)
    *inputs, logits = views[: len(views) - made]
    plans = [
        _abi.Plan(
            _abi.LINEAR_CROSS_ENTROPY_FORWARD, (*inputs, logits._replace(name="logits_at")),
            options, device, addresses=addresses[: len(views) - made],
        ),
        _abi.Plan(
            _abi.LINEAR_CROSS_ENTROPY_BACKWARD, views, options, device, addresses=addresses,
            only_chosen=True,
        ),
    ]  # fmt: skip
    return max(p.minimum for p in plans), max(p.recommended for p in plans)


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
    of: Sequence[Tensor | None], given: Sequence[Tensor | None], needs: int,
    where: torch.device | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """Empty gradients in the dtypes of the tensors, with strides in the same order as those of the
    tensors that the core gets."""
    made: list[Tensor | None] = []
    for i, (tensor, like) in enumerate(zip(of, given)):
        wanted = tensor is not None and like is not None and needs & 1 << i
        made.append(torch.empty_like(like, dtype=tensor.dtype, device=where) if wanted else None)  # type: ignore[arg-type,union-attr]
    return made


_TENSORS = (
    "Tensor input, Tensor weight, Tensor? bias, Tensor? temperature, Tensor ids, Tensor? offsets, "
    "float logit_scale, float softcap, float temperature_number, int? memory, ScalarType? dtype"
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.numbers = inputs[6:-1]


def _rule(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    needs = sum(1 << i for i in range(3) if ctx.needs_input_grad[i])
    op: Any = torch.ops.logitless.logits_at_backward
    grads = op(*ctx.saved_tensors, *ctx.numbers, upstream, needs)
    rest = [None] * (4 + len(ctx.numbers))
    return *(g if needs & 1 << i else None for i, g in enumerate(grads)), *rest


define(
    "log_softmax_at(Tensor logits, Tensor ids, Tensor? offsets) -> Tensor",
    _log_softmax_at, lambda logits, *_: torch.empty_like(logits),
    rule=_log_softmax_rule, setup=_log_softmax_setup,
)  # fmt: skip
define(
    f"logits_at({_TENSORS}, int needs) -> Tensor",
    _logits_at, lambda *args: args[0].new_empty(args[4].shape, dtype=torch.float32),
    rule=_rule, setup=_setup,
)  # fmt: skip
define(
    f"logits_at_backward({_TENSORS}, Tensor upstream, int needs) -> (Tensor, Tensor, Tensor)",
    _backward, _backward_fake, rule=once_only,
)  # fmt: skip

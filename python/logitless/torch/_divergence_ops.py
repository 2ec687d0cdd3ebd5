# SPDX-License-Identifier: Apache-2.0
"""The ops of a divergence for torch's dispatcher, and its one autograd rule. Eager calls use them
too: they take milliseconds, so the dispatcher's microseconds do not matter.

    divergence            the loss and statistics; with them (FUSED) the gradients for an upstream
                          gradient of 1, or (KEEP) dz for divergence_backward
    divergence_backward   the gradients, from kept dz or from both heads

Functional and of fixed arity, like the ops of _ops.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from logitless import _abi
from logitless._abi import Divergence
from logitless.torch import _device, _kept, _ops
from logitless.torch import _divergence_run as _run
from logitless.torch._autograd import (
    cast,
    first_order,
    held_dtype,
    refuse_batches,
    scaled,
)
from logitless.torch._dispatch import define, once_only
from logitless.torch._divergence_run import FUSED, KEEP, OF_TENSORS, PLAIN, Inputs

_TENSORS = "Tensor input, Tensor weight, " + ", ".join(f"Tensor? {n}" for n in Inputs._fields[2:])
_OPTIONS = (
    "int reduction, int ignore_index, float logit_scale, float softcap, float temperature_number, "
    "int empty_mean, float normalizer_number, int kind, float beta, float label_weight, "
    "float teacher_logit_scale, float teacher_softcap, float teacher_temperature_number, "
    "SymInt vocab_start, SymInt vocab_total, int? memory, ScalarType? cast"
)
_TF32 = Divergence._fields.index("allow_tf32")  # no argument: torch's switch is read in each call
_FIRST_OPTION = len(Inputs._fields)
_WANTED = _FIRST_OPTION + len(Divergence._fields) + 1
_OUTPUTS = len(_run.OUTPUTS)

_GRADS = "Tensor grad_input, Tensor grad_weight, Tensor grad_bias"


def arguments(
    inputs: Inputs, options: Divergence, memory: int | None, dtype: torch.dtype | None, wanted: int
) -> tuple[Any, ...]:
    fields = list(options)  # torch 2.8 cannot trace a slice of a named tuple
    return (*inputs, *fields[:_TF32], *fields[_TF32 + 1 :], memory, dtype, wanted)


def _split(args: Sequence[Any]) -> tuple[Inputs, Divergence, int | None, Any, int]:
    *values, memory, dtype, wanted = args[_FIRST_OPTION : _WANTED + 1]
    values.insert(_TF32, False)
    options = Divergence(*values)
    return Inputs(*args[:_FIRST_OPTION]), options, memory, dtype, wanted


def _held(inputs: Inputs, wanted: int) -> _run.Dtypes:
    """The dtypes in which gradients wait for their upstream factor."""
    dtypes = _run.gradients_of(wanted, inputs[:3])
    return tuple(None if dtype is None else held_dtype(dtype) for dtype in dtypes)


def _kept_like(inputs: Inputs, dtype: torch.dtype | None, wanted: int) -> tuple[Tensor, Tensor]:
    """Uninitialized dz, whose sizes may be symbolic."""
    input = inputs.input
    if not wanted & KEEP:
        return input.new_empty(0), input.new_empty(0, dtype=torch.float32)
    dtype = dtype or input.dtype
    tokens, vocab = inputs.tokens(), inputs.weight.shape[0]
    bytes = _abi.whole_kept(tokens, vocab, _device.DTYPES.get(dtype, -1))
    (rows, width), rows_shape = _kept.shapes(tokens, vocab, dtype, bytes)
    return (
        input.new_empty((rows + _ops.SPARE, width), dtype=dtype),
        input.new_empty(rows_shape, dtype=torch.float32),
    )


def _filled(tensors: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0, dtype=torch.float32) if t is None else t for t in tensors)


def _forward(*args: Any) -> tuple[Tensor, ...]:
    inputs, options, memory, dtype, wanted = _split(args)
    columns, rows = _kept_like(inputs, dtype, wanted)
    grads: Sequence[Tensor | None] = (None, None, None)
    if wanted & FUSED:
        held = _held(inputs, wanted)
        outputs, grads = _run.forward_backward(inputs, options, memory, wanted, dtype, held)
    else:
        kept = (columns[: -_ops.SPARE], rows) if wanted & KEEP else None
        outputs = _run.forward(inputs, options, memory, wanted, dtype, kept)
    like = inputs.input
    return *_filled(outputs, like), columns, rows, *_filled(grads, like)


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    inputs, options, _, dtype, wanted = _split(args)
    held = _held(inputs, wanted) if wanted & FUSED else (None, None, None)
    outputs = _run._outputs(inputs, options, wanted)
    like = inputs.input
    kept = _kept_like(inputs, dtype, wanted)
    return *_filled(outputs, like), *kept, *_ops._fake_grads(inputs[:3], held)


def _backward(*args: Any) -> tuple[Tensor, ...]:
    inputs, options, memory, dtype, wanted = _split(args)
    grad_loss, columns, rows = args[_WANTED + 1 :]
    kept = None if columns is None else (columns[: -_ops.SPARE], rows)
    dtypes = _run.gradients_of(wanted, inputs[:3])
    made = _run.backward(inputs, options, memory, dtype, grad_loss, dtypes, kept)
    return _filled(made, inputs.input)


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    inputs, *_, wanted = _split(args)
    return _ops._fake_grads(inputs[:3], _run.gradients_of(wanted, inputs[:3]))


def _states(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _run.states(*_split(args))


def _states_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, _, _, dtype, wanted = _split(args)
    rows = len(_run.rows_of_states(inputs.target is not None, wanted))
    states = inputs.input.new_empty((rows, inputs.tokens()), dtype=torch.float32)
    return states, *_run.kept_logits_like(inputs, dtype, wanted)


def _sums(*args: Any) -> Tensor:
    return _run.sums(*_split(args), *args[_WANTED + 1 :])


def _sums_fake(*args: Any) -> Tensor:
    inputs, *_, wanted = _split(args)
    rows = len(_run.rows_of_sums(wanted))
    return inputs.input.new_empty((rows, inputs.tokens()), dtype=torch.float32)


def _shard_backward(*args: Any) -> tuple[Tensor, ...]:
    inputs = Inputs(*args[:_FIRST_OPTION])
    return _filled(_run.shard_backward(*_split(args), *args[_WANTED + 1 :]), inputs.input)


def _shard_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    inputs, *_, wanted = _split(args)
    flat = inputs.flat()
    dtypes = _run.gradients_of_shard(wanted, inputs)
    return _ops._fake_grads(flat[:3], dtypes)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.wanted = wanted = inputs[_WANTED]
    ctx.arguments = inputs[_FIRST_OPTION:_WANTED]
    ctx.dtypes = [None if t is None else t.dtype for t in inputs[: len(OF_TENSORS)]]
    ctx.mark_non_differentiable(*output[1:])
    columns, rows, *grads = output[_OUTPUTS:]
    tensors = inputs[:_FIRST_OPTION]
    if wanted & KEEP:  # Backward does not need the teacher
        student = [None if n.startswith("teacher") else t for n, t in zip(Inputs._fields, tensors)]
        ctx.save_for_backward(*student, columns, rows)
    elif wanted & FUSED and not wanted & PLAIN:
        ctx.save_for_backward(*tensors, *grads)
    else:
        # Tensors that autograd saves could neither be scaled in place nor become .grad.
        ctx.grads = list(grads) if wanted & FUSED else None
        ctx.save_for_backward(*tensors)


def _rule(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
    grad_loss = upstream[0]
    count = _WANTED + 1
    if grad_loss is None:
        return (None,) * count
    if ctx.wanted & PLAIN:
        refuse_batches((grad_loss,))
    grads = (_scaled_gradients if ctx.wanted & FUSED else _gradients)(ctx, grad_loss)
    needed = [g if need else None for g, need in zip(grads, ctx.needs_input_grad)]
    return *needed, *((None,) * (count - len(needed)))


def _gradients(ctx: Any, grad_loss: Tensor) -> Sequence[Tensor | None]:
    saved = ctx.saved_tensors
    tensors, kept = saved[:_FIRST_OPTION], saved[_FIRST_OPTION:] or (None, None)
    wanted = sum(bit for bit, need in zip(OF_TENSORS, ctx.needs_input_grad) if need)
    made: Sequence[Tensor | None] = torch.ops.logitless.divergence_backward(
        *tensors, *ctx.arguments, wanted, grad_loss, *kept
    )
    return made


def _scaled_gradients(ctx: Any, factor: Tensor) -> Sequence[Tensor | None]:
    hand_out = _handed_out if ctx.wanted & PLAIN else _multiplied
    grads: Sequence[Tensor | None] = first_order(ctx, hand_out, (factor,))
    return grads


def _needed(ctx: Any, grads: Sequence[Tensor]) -> list[Tensor | None]:
    return [g if need else None for g, need in zip(grads, ctx.needs_input_grad)]


def _multiplied(ctx: Any, factor: Tensor) -> Sequence[Tensor | None]:
    """The gradients times the factor, which stays f32: if it were rounded to 16 bits, every element
    would have its error."""
    grads = _needed(ctx, ctx.saved_tensors[_FIRST_OPTION:])
    return [
        None if g is None else (g.float() * factor).to(dtype) for g, dtype in zip(grads, ctx.dtypes)
    ]


def _handed_out(ctx: Any, factor: Tensor) -> Sequence[Tensor | None]:
    """The waiting gradients, scaled in place. The context gives up its references, so that .grad
    can take the tensors. A second backward repeats the call."""
    made, ctx.grads = ctx.grads, None
    if made is None:
        again = ctx.wanted & ~sum(_run.BITS.values()) | _run.BITS["loss"]
        with torch.no_grad():
            results = torch.ops.logitless.divergence(*ctx.saved_tensors, *ctx.arguments, again)
        made = list(results[_OUTPUTS + 2 :])
        del results
    grads = _needed(ctx, made)
    del made
    if not factor.is_cuda:
        scaled(grads, factor)
    elif any(g is not None for g in grads):
        _device.Scale(grads).by(factor)
    return [g if g is None else cast(g, dtype) for g, dtype in zip(grads, ctx.dtypes)]


_CALL = f"{_TENSORS}, {_OPTIONS}, int wanted"
define(
    f"divergence({_CALL}) -> ("
    + ", ".join(f"Tensor {name}" for name in (*_run.OUTPUTS, "kept", "kept_rows"))
    + f", {_GRADS})",
    _forward, _forward_fake, rule=_rule, setup=_setup,
)  # fmt: skip
define(
    f"divergence_backward({_CALL}, Tensor grad_loss, Tensor? kept, Tensor? kept_rows) "
    f"-> ({_GRADS})",
    _backward, _backward_fake, rule=once_only,
)  # fmt: skip
# For a shard of the vocabulary: its own states [k, N] and what is kept of the logits, its sums
# [k, N], and its gradients; that of the input is a part, in f32.
_KEPT = "Tensor? kept, Tensor? kept_rows"
OF_SHARD = f"{_CALL}, Tensor grad_loss, Tensor states, Tensor? slope_mean, {_KEPT}"
define(
    f"divergence_states({_CALL}) -> (Tensor states, Tensor kept, Tensor kept_rows)",
    _states, _states_fake,
)  # fmt: skip
define(f"divergence_sums({_CALL}, Tensor states, {_KEPT}) -> Tensor", _sums, _sums_fake)
define(
    f"divergence_shard_backward({OF_SHARD}) -> ({_GRADS})",
    _shard_backward, _shard_backward_fake,
)  # fmt: skip


def divergence(
    inputs: Inputs, options: Divergence, memory: int | None, wanted: int,
    dtype: torch.dtype | None, plain: bool,
) -> Sequence[Tensor]:  # fmt: skip
    """The outputs that are `wanted`, in their order. `plain`: no graph is traced. `dtype`: that of
    the products, under autocast; gradients have that of their tensors."""
    # torch.jit.trace makes one graph for calls with and without gradients: it records Forward, and
    # its autograd rule.
    tracing = not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None
    bits = wanted | (PLAIN if plain else 0)
    if torch.is_grad_enabled() and not tracing:
        of = (inputs.input, inputs.weight, inputs.bias)
        needed = [t is not None and t.requires_grad for t in of]
        bits |= sum(bit for bit, need in zip(OF_TENSORS, needed) if need)
        if any(needed) and options.reduction != _abi.REDUCTION_NONE:
            bits |= FUSED
        elif any(needed) and _keeps(inputs, options, memory, bits, dtype):
            bits |= KEEP
    results: Sequence[Tensor] = torch.ops.logitless.divergence(
        *arguments(inputs, options, memory, dtype, bits)
    )
    return [t for t, bit in zip(results, _run.BITS.values()) if wanted & bit]


def _keeps(
    inputs: Inputs, options: Divergence, memory: int | None, wanted: int, dtype: torch.dtype | None
) -> bool:
    """Whether Forward keeps dz for Backward, all of it. It keeps nothing under hooks on saved
    tensors, if `memory` is too small for all of it, or with any `memory` if sizes are symbols, for
    which no workspace can be planned."""
    if _ops.hooked() or inputs.tokens() == 0:
        return False
    if memory is None:
        return True
    given = tuple(
        (name, t.dtype, tuple(t.shape), tuple(t.stride()))
        for name, t in zip(Inputs._fields, inputs)
        if t is not None
    )
    if not _ops._static(given):
        return False
    device = inputs.input.device
    # Up to torch 2.11 the compiler knows no named tuple as a constant.
    return _run.fits(given, tuple(options), device.type, device.index or 0, memory, wanted, dtype)

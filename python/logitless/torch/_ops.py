# SPDX-License-Identifier: Apache-2.0
"""The ops as torch's dispatcher knows them: torch.compile, FakeTensorMode, functorch, meta tensors.

Functional and of fixed arity: a result that is not wanted is an empty tensor. Plain eager calls do
not come here (_autograd.py): the dispatcher costs them several microseconds a call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless import _abi
from logitless._abi import Options
from logitless._errors import not_supported
from logitless.torch import _kept, _run
from logitless.torch._autograd import (
    ONCE_ONLY,
    Call,
    cast,
    cast_bias,
    held_dtype,
    once,
    with_logprob,
)
from logitless.torch._device import DTYPES
from logitless.torch._kept import Keep, Kept, State
from logitless.torch._run import Constants, Upstream

_TENSORS = (
    "Tensor input, Tensor? weight, Tensor? bias, Tensor target, Tensor? token_weight, "
    "Tensor? vocab_weight, Tensor? normalizer"
)
_OPTIONS = (
    "int reduction, int ignore_index, float label_smoothing, float z_loss, float logit_scale, "
    "float softcap, float temperature, int empty_mean, float normalizer_value, int? memory"
)
_OPTION_COUNT = len(Options._fields) - 1  # allow_tf32 is asked when a call runs
_FIRST_OPTION = 7
_MEMORY = _FIRST_OPTION + _OPTION_COUNT
_UPSTREAM = (
    "Tensor row_state, Tensor? entropy, Tensor? grad_loss, "
    "Tensor? grad_lse, Tensor? grad_target_logit, Tensor? grad_entropy"
)
_KEPT = "Tensor? kept, Tensor? kept_rows"
# Rows of kept state beyond those that Forward writes: torch asks of a size that is a symbol whether
# it is 0 or 1, and compiles once more where it is.
_SPARE = 2
_NEEDS = "bool need_input, bool need_weight, bool need_bias"

_make_library: Any = torch.library.Library
_library = _make_library("logitless", "DEF")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define(
    f"forward({_TENSORS}, {_OPTIONS}, int wanted, SymInt kept_bytes) -> (Tensor loss, Tensor lse, "
    "Tensor target_logit, Tensor logprob, Tensor entropy, Tensor argmax, Tensor row_state, "
    "Tensor kept, Tensor kept_rows)",
    tags=_tags,
)
_library.define(
    f"forward_backward({_TENSORS}, {_OPTIONS}, int wanted, {_NEEDS}) -> (Tensor loss, "
    "Tensor argmax, Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    tags=_tags,
)
_library.define(
    f"backward({_TENSORS}, {_OPTIONS}, {_UPSTREAM}, {_KEPT}, {_NEEDS}) -> (Tensor grad_input, "
    "Tensor grad_weight, Tensor grad_bias)",
    tags=_tags,
)


def _split(args: tuple[Any, ...]) -> tuple[Any, Any, Any, Constants, Options, int | None]:
    input, weight, bias = args[:3]
    options = Options(*args[_FIRST_OPTION:_MEMORY])
    return input, weight, bias, Constants(*args[3:_FIRST_OPTION]), options, args[_MEMORY]


def _filled(tensors: Any, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(0, dtype=torch.float32, device=device) if t is None else t.contiguous()
        for t in tensors
    )


def _kept_like(
    input: Tensor, weight: Tensor | None, target: Tensor, kept_bytes: Any
) -> tuple[Tensor, Tensor]:
    """Kept state that nothing has written, whose sizes may be symbols."""
    if isinstance(kept_bytes, int) and not kept_bytes:
        return input.new_empty(0), input.new_empty(0, dtype=torch.float32)
    assert weight is not None
    tokens = target.numel()
    (rows, width), rows_shape = _kept.shapes(tokens, weight.shape[0], input.dtype, kept_bytes)
    return input.new_empty(rows + _SPARE, width), input.new_empty(rows_shape, dtype=torch.float32)


def _forward(*args: Any) -> tuple[Tensor, ...]:
    *rest, wanted, kept_bytes = args
    input, weight, bias, constants, options, memory = _split(tuple(rest))
    keep = None
    if kept_bytes and weight is not None:
        budget = _kept.budget_of(input, weight, constants.target.numel(), memory)
        keep = Keep(bytes=kept_bytes, budget=budget, spare=_SPARE)
    results: list[Tensor | None]
    (*results,), kept = _run.forward(input, weight, bias, constants, options, memory, wanted, keep)
    for index, bit in ((2, _run.TARGET_LOGIT), (6, _run.ROW_STATE)):
        if not wanted & bit:  # made for the logprob alone
            results[index] = None
    if kept is None:
        return *_filled(results, input.device), *_kept_like(
            input, weight, constants.target, kept_bytes
        )
    return *_filled(results, input.device), kept.columns, kept.rows


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    *_, wanted, kept_bytes = args
    reduction, target = args[_FIRST_OPTION], args[3]
    none = reduction == _abi.REDUCTION_NONE

    def make(bit: int, shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        wants = bool(wanted & bit)
        made: Tensor = args[0].new_empty(
            shape if wants else (0,), dtype=dtype if wants else torch.float32
        )
        return made

    return (
        make(_run.LOSS, target.shape if none else ()),
        make(_run.LSE, target.shape),
        make(_run.TARGET_LOGIT, target.shape),
        make(_run.LOGPROB, target.shape),
        make(_run.ENTROPY, target.shape),
        make(_run.ARGMAX, target.shape, torch.int64),
        make(_run.ROW_STATE, (2, target.numel())),
        *_kept_like(args[0], args[1], target, kept_bytes),
    )


def _forward_backward(*args: Any) -> tuple[Tensor, ...]:
    *rest, wanted, need_input, need_weight, need_bias = args
    call = _split(tuple(rest))
    dtypes = tuple(
        held_dtype(t.dtype) if need and t is not None else None
        for t, need in zip(call[:3], (need_input, need_weight, need_bias))
    )
    loss, argmax, _, *grads = _run.forward_backward(*call, wanted, dtypes)
    return _filled((loss, argmax, *grads), args[0].device)


def _fake_grads(tensors: Any, needs: Any, held: bool) -> tuple[Tensor, ...]:
    return tuple(
        tensors[0].new_empty(0, dtype=torch.float32)
        if t is None or not need
        else t.new_empty(t.shape, dtype=held_dtype(t.dtype) if held else t.dtype)
        for t, need in zip(tensors, needs)
    )


def _forward_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    input, target, wanted = args[0], args[3], args[-4]
    loss = input.new_empty((), dtype=torch.float32)
    argmax = (
        input.new_empty(target.shape, dtype=torch.int64)
        if wanted & _run.ARGMAX
        else input.new_empty(0, dtype=torch.float32)
    )
    return (loss, argmax, *_fake_grads(args[:3], args[-3:], True))


def _backward(*args: Any) -> tuple[Tensor, ...]:
    needs = args[-3:]
    call = _split(args)
    upstream = Upstream(*args[_MEMORY + 1 : -5])
    dtypes = tuple(t.dtype if need and t is not None else None for t, need in zip(call[:3], needs))
    kept = _given(call, *args[-5:-3])
    return _filled(_run.backward(*call, upstream, dtypes, kept=kept), args[0].device)


def _given(call: Any, columns: Tensor | None, rows: Tensor | None) -> Kept | None:
    """Kept state as Backward takes it. Never consumed: to the graph it is an input as any other."""
    if columns is None or rows is None or columns.shape[0] <= _SPARE:
        return None
    columns = columns[:-_SPARE]
    input, weight, _, constants, _, memory = call
    tokens = constants.target.numel()
    bytes = _abi.kept_bytes(tokens, columns.numel(), columns.element_size())
    return Kept(columns, rows, State(room=_kept.budget_of(input, weight, tokens, memory) - bytes))


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    return _fake_grads(args[:3], args[-3:], False)


def _forward_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = inputs[_FIRST_OPTION : _MEMORY + 1]
    *_, ctx.wanted, kept_bytes = inputs
    entropy, argmax, row_state, *kept = output[4:]
    ctx.mark_non_differentiable(argmax, row_state, *kept)
    if isinstance(kept_bytes, int) and not kept_bytes:
        kept = [None, None]
    ctx.save_for_backward(*inputs[:_FIRST_OPTION], row_state, entropy, *kept)


def _forward_backward_rule(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    row_state, entropy, *kept = saved[_FIRST_OPTION:]
    bits = (_run.LOSS, _run.LSE, _run.TARGET_LOGIT, _run.LOGPROB, _run.ENTROPY)
    grad_loss, grad_lse, grad_target_logit, grad_logprob, grad_entropy = (
        grad if ctx.wanted & bit else None for grad, bit in zip(upstream, bits)
    )
    grad_lse, grad_target_logit = with_logprob(grad_lse, grad_target_logit, grad_logprob)
    if grad_loss is None:  # absent would mean 1
        none = ctx.options[0] == _abi.REDUCTION_NONE
        grad_loss = row_state.new_zeros(saved[3].shape if none else ())
    needs = [bool(need) for need in ctx.needs_input_grad[:3]]
    grads = torch.ops.logitless.backward(
        *saved[:_FIRST_OPTION], *ctx.options, row_state,
        None if grad_entropy is None else entropy, grad_loss, grad_lse, grad_target_logit,
        grad_entropy, *kept, *needs,
    )  # fmt: skip
    rest = [None] * (_OPTION_COUNT + 1 + 4 + 2)
    return *(g if need else None for g, need in zip(grads, needs)), *rest


def _fused_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    grads = output[2:]
    ctx.mark_non_differentiable(output[1], *grads)
    ctx.dtypes = [None if t is None else t.dtype for t in inputs[:3]]
    ctx.save_for_backward(*inputs[:3], *grads)


def _multiplied(ctx: Any, grads: Any, factor: Tensor) -> list[Tensor | None]:
    """In f32: a factor rounded to 16 bits would be an error in every element."""
    return [
        (grad.float() * factor).to(dtype) if need else None
        for grad, dtype, need in zip(grads, ctx.dtypes, ctx.needs_input_grad)
    ]


def _fused_rule(ctx: Any, factor: Tensor | None, *_: Any) -> tuple[Any, ...]:
    rest = [None] * (_OPTION_COUNT + 1 + 4 + 4)
    if factor is None:
        return None, None, None, *rest
    saved = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return *_multiplied(ctx, saved[3:], factor), *rest
    with torch.no_grad():
        grads = _multiplied(ctx, saved[3:], factor)
    return *once((*saved[:3], factor), grads), *rest


def _never_twice(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(ONCE_ONLY)


for _name, _kernel, _fake in (
    ("forward", _forward, _forward_fake),
    ("forward_backward", _forward_backward, _forward_backward_fake),
    ("backward", _backward, _backward_fake),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _device)
    torch.library.register_fake(f"logitless::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    "logitless::forward", _forward_backward_rule, setup_context=_forward_setup, lib=_library
)
torch.library.register_autograd(
    "logitless::forward_backward", _fused_rule, setup_context=_fused_setup, lib=_library
)
torch.library.register_autograd("logitless::backward", _never_twice, lib=_library)


_OUTPUTS = (("loss", _run.LOSS), ("entropy", _run.ENTROPY), ("argmax", _run.ARGMAX))


def _kept_bytes(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call, needs: bool
) -> Any:
    """What the forward op may keep, by a closed formula where nothing else bounds it: sizes may be
    symbols. `memory` bounds workspaces too, which are planned, and so of numbers alone."""
    if not needs or weight is None or _hooked():
        return 0
    if not _kept.serves(input.dtype, input.device.type, call.options):
        return 0
    if call.memory is None:
        vocab, hidden = weight.shape
        dtype = DTYPES[input.dtype]
        return _abi.closed_budget(call.constants.target.numel(), vocab, hidden, dtype)
    tensors = (input, weight, bias, *call.constants)
    given = tuple(
        (name, t.dtype, tuple(t.shape), tuple(t.stride()))
        for name, t in zip(_run.INPUTS, tensors)
        if t is not None
    )
    if not _static(given):
        return 0
    outputs = tuple(name for name, bit in _OUTPUTS if call.wanted & bit)
    device = input.device
    return _kept.planned_bytes(
        given, outputs, call.options, device.type, device.index or 0, call.memory
    )


def _static(given: Any) -> bool:
    """Whether every size and stride is a number."""
    import torch.fx.experimental.symbolic_shapes as symbols  # which torch.compile has imported

    static: Any = getattr(symbols, "has_static_value", None)
    return static is not None and all(
        static(size) for *_, shape, stride in given for size in (*shape, *stride)
    )


def _hooked() -> bool:
    """In a compiled function what it was when the function was compiled."""
    return _kept.hooked()


# What torch.compiler.assume_constant_result says, which imports the compiler.
_hooked._dynamo_marked_constant = True  # type: ignore[attr-defined]
_kept.planned_bytes._dynamo_marked_constant = True  # type: ignore[attr-defined]


def loss(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call, needs: bool
) -> tuple[Tensor | None, ...]:
    """(loss, lse, target_logit, logprob, entropy, argmax) through the dispatcher."""
    if call.main_grad is not None:
        raise not_supported(
            'grad_accumulation="main_grad" writes outside the graph; it is not supported under '
            "torch.compile or in a functional transform"
        )
    if call.dtype is not None:
        assert weight is not None
        input, weight = cast(input, call.dtype), cast(weight, call.dtype)
        bias = cast_bias(bias, call.dtype)
    wanted = call.wanted
    common = (input, weight, bias, *call.constants, *call.options[:_OPTION_COUNT], call.memory)
    # A trace is one graph for calls with and without gradients: Forward, and its autograd rule.
    tracing = not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None
    if needs and not tracing and weight is not None and call.fused(weight):
        bias_needs = bias is not None and bias.requires_grad
        loss, argmax, *_ = torch.ops.logitless.forward_backward(
            *common, wanted, input.requires_grad, weight.requires_grad, bias_needs
        )
        return loss, None, None, None, None, argmax if wanted & _run.ARGMAX else None
    made = wanted | _run.ROW_STATE if needs or tracing else wanted
    kept_bytes = _kept_bytes(input, weight, bias, call, needs and not tracing)
    results = torch.ops.logitless.forward(*common, made, kept_bytes)
    bits = (_run.LOSS, _run.LSE, _run.TARGET_LOGIT, _run.LOGPROB, _run.ENTROPY, _run.ARGMAX)
    return tuple(t if wanted & bit else None for t, bit in zip(results, bits))

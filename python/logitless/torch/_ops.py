# SPDX-License-Identifier: Apache-2.0
"""The ops as torch's dispatcher knows them: torch.compile, FakeTensorMode, functorch, meta tensors.

Functional and of fixed arity: a result that is not wanted is an empty tensor. Plain eager calls do
not come here (_autograd.py): the dispatcher costs them several microseconds a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from logitless import _abi
from logitless._abi import Options
from logitless._errors import argument, not_supported, wrong_device
from logitless.torch import _kept, _run
from logitless.torch._autograd import (
    ONCE_ONLY,
    Call,
    asked_of,
    cast,
    cast_bias,
    held_dtype,
    of_columns,
    once,
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
# [N]  It is appended, because as one of _TENSORS it would have moved what follows them.
_LAST = "Tensor? temperatures"
_OPTION_COUNT = Options._fields.index("allow_tf32")  # allow_tf32 is asked when a call runs
_FIRST_OPTION = 7
_MEMORY = _FIRST_OPTION + _OPTION_COUNT
_UPSTREAM = (
    "Tensor row_state, Tensor? entropy, Tensor? grad_loss, "
    "Tensor? grad_lse, Tensor? grad_target_logit, Tensor? grad_entropy"
)
# Backward may overwrite rows of `kept`. It marks them in `kept_rows` and makes them again ever
# after, so that no gradient tells whether it did. That is not declared ("Tensor(a!)?"): torch would
# raise a version error where a retained graph is used twice, and would have a compiled Backward
# write into a copy of all that is kept, each time. Declared of `kept_rows` alone, marks would land
# in a copy, and be lost.
_KEPT = "Tensor? kept, Tensor? kept_rows"
# Kept state has so many rows beyond those that Forward writes, because torch asks of a size that is
# a symbol whether it is 0 or 1, and compiles once more where it is.
SPARE = 2
_NEEDS = "bool need_input, bool need_weight, bool need_bias"

_make_library: Any = torch.library.Library
_library = _make_library("logitless", "DEF")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define(
    f"forward({_TENSORS}, {_OPTIONS}, int wanted, SymInt kept_bytes, {_LAST}) -> ("
    + "".join(f"Tensor {name}, " for name in _run.OUTPUTS.values())
    + "Tensor row_state, Tensor kept, Tensor kept_rows)",
    tags=_tags,
)
_library.define(
    f"forward_backward({_TENSORS}, {_OPTIONS}, int wanted, {_NEEDS}, {_LAST}) -> (Tensor loss, "
    + "".join(f"Tensor {name}, " for name in _run.CONSTANTS.values())
    + "Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    tags=_tags,
)
_library.define(
    f"backward({_TENSORS}, {_OPTIONS}, {_UPSTREAM}, {_KEPT}, {_NEEDS}, {_LAST}) -> (Tensor "
    "grad_input, Tensor grad_weight, Tensor grad_bias)",
    tags=_tags,
)


def _split(args: tuple[Any, ...]) -> tuple[Any, Any, Any, Constants, Options, int | None]:
    input, weight, bias = args[:3]
    options = Options(*args[_FIRST_OPTION:_MEMORY])
    constants = Constants(*(*args[3:_FIRST_OPTION], args[-1]))
    return input, weight, bias, constants, options, args[_MEMORY]


def _arguments(tensors: Any, options: Any, *rest: Any) -> tuple[Any, ...]:
    """Those of an op: `tensors` in the order of _run.INPUTS, `options` with memory behind them."""
    *first, temperature = tensors
    return (*first, *options, *rest, temperature)


def _filled(tensors: Any, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(0, dtype=torch.float32, device=device) if t is None else t.contiguous()
        for t in tensors
    )


def kept_like(
    input: Tensor, weight: Tensor | None, target: Tensor, kept_bytes: Any
) -> tuple[Tensor, Tensor]:
    """Kept state that nothing has written, whose sizes may be symbols."""
    if isinstance(kept_bytes, int) and not kept_bytes:
        return input.new_empty(0), input.new_empty(0, dtype=torch.float32)
    assert weight is not None
    tokens = target.numel()
    (rows, width), rows_shape = _kept.shapes(tokens, weight.shape[0], input.dtype, kept_bytes)
    return input.new_empty(rows + SPARE, width), input.new_empty(rows_shape, dtype=torch.float32)


def keep_of(
    wanted: int, of: tuple[Tensor | None, ...], memory: int | None, kept_bytes: int
) -> Keep | None:
    """What a Forward is told that was asked for `wanted`."""
    if memory is None and not kept_bytes:
        return None
    entropy = wanted & (_run.ENTROPY | _run.DETACHED) == _run.ENTROPY
    dtypes = _run.gradients_of(wanted, of)
    return Keep(dtypes, bytes=kept_bytes, spare=SPARE, consume=False, of_entropy=entropy)


def _forward(*args: Any) -> tuple[Tensor, ...]:
    wanted, kept_bytes = args[-3:-1]
    input, weight, bias, constants, options, memory = _split(args)
    keep = None if weight is None else keep_of(wanted, (input, weight, bias), memory, kept_bytes)
    outputs, row_state, kept = _run.forward(
        input, weight, bias, constants, options, memory, wanted, keep
    )
    results = _filled((*outputs, row_state), input.device)
    if kept is None:
        return *results, *kept_like(input, weight, constants.target, kept_bytes)
    return *results, kept.columns, kept.rows


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    wanted, kept_bytes = args[-3:-1]
    reduction, target = args[_FIRST_OPTION], args[3]
    none = reduction == _abi.REDUCTION_NONE

    return (
        _fake_output(args[0], wanted, _run.LOSS, target.shape if none else ()),
        *(_fake_output(args[0], wanted, bit, target.shape) for bit in _run.STATISTICS),
        _fake_output(args[0], wanted, _run.ROW_STATE, (2, target.numel())),
        *kept_like(args[0], args[1], target, kept_bytes),
    )


def _fake_output(like: Tensor, wanted: int, bit: int, shape: Any) -> Tensor:
    if not wanted & bit:
        return like.new_empty((0,), dtype=torch.float32)
    return like.new_empty(shape, dtype=_run.dtype_of(bit))


def _forward_backward(*args: Any) -> tuple[Tensor, ...]:
    wanted, *needs = args[-5:-1]
    call = _split(args)
    dtypes = tuple(
        held_dtype(t.dtype) if need and t is not None else None for t, need in zip(call[:3], needs)
    )
    loss, statistics, grads = _run.forward_backward(*call, wanted, dtypes)
    return _filled((loss, *statistics, *grads), args[0].device)


def _fake_grads(tensors: Any, needs: Any, held: bool) -> tuple[Tensor, ...]:
    return tuple(
        tensors[0].new_empty(0, dtype=torch.float32)
        if t is None or not need
        else t.new_empty(t.shape, dtype=held_dtype(t.dtype) if held else t.dtype)
        for t, need in zip(tensors, needs)
    )


def _forward_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    input, target, wanted = args[0], args[3], args[-5]
    loss = input.new_empty((), dtype=torch.float32)
    statistics = (_fake_output(input, wanted, bit, target.shape) for bit in _run.CONSTANTS)
    return (loss, *statistics, *_fake_grads(args[:3], args[-4:-1], True))


def _backward(*args: Any) -> tuple[Tensor, ...]:
    needs = args[-4:-1]
    call = _split(args)
    upstream = Upstream(*args[_MEMORY + 1 : -6])
    dtypes = tuple(t.dtype if need and t is not None else None for t, need in zip(call[:3], needs))
    kept = given(call[3].target.numel(), call[5], *args[-6:-4])
    return _filled(_run.backward(*call, upstream, dtypes, kept=kept), args[0].device)


def given(
    tokens: int, memory: int | None, columns: Tensor | None, rows: Tensor | None
) -> Kept | None:
    """Kept state as Backward takes it. Never consumed: to the graph it is an input as any other."""
    if columns is None or rows is None or columns.shape[0] <= SPARE:
        return None
    columns = columns[:-SPARE]
    bytes = _abi.kept_bytes(tokens, columns.numel(), columns.element_size())
    return Kept(columns, rows, State(room=_kept.room_of(memory, bytes)))


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    return _fake_grads(args[:3], args[-4:-1], False)


def _forward_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = inputs[_FIRST_OPTION : _MEMORY + 1]
    *_, ctx.wanted, kept_bytes, temperature = inputs
    *_, row_state, columns, rows = output
    entropy = output[list(_run.OUTPUTS).index(_run.ENTROPY)]
    constants = [t for t, bit in zip(output, _run.OUTPUTS) if bit in _run.CONSTANTS]
    if ctx.wanted & _run.DETACHED:
        constants.append(entropy)
        entropy = None
    ctx.mark_non_differentiable(*constants, row_state, columns, rows)
    kept = (columns, rows)
    if isinstance(kept_bytes, int) and not kept_bytes:
        kept = (None, None)
    ctx.save_for_backward(*inputs[:_FIRST_OPTION], temperature, row_state, entropy, *kept)


def _forward_backward_rule(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    inputs, (row_state, entropy, *kept) = saved[: len(_run.INPUTS)], saved[len(_run.INPUTS) :]
    given = [grad if ctx.wanted & bit else None for grad, bit in zip(upstream, _run.OUTPUTS)]
    if not of_columns(given):
        kept = [None, None]
    options, constants = Options(*ctx.options[:_OPTION_COUNT]), Constants(*inputs[3:])
    needs = [bool(need) for need in ctx.needs_input_grad[:3]]
    asked = asked_of(given, options, constants, row_state, entropy)
    tensors = (*inputs[:3], *asked.constants)
    how = (*asked.options[:_OPTION_COUNT], *ctx.options[_OPTION_COUNT:])
    grads = torch.ops.logitless.backward(*_arguments(tensors, how, *asked.upstream, *kept, *needs))
    rest = [None] * (_OPTION_COUNT + 1 + 4 + 3)
    return *(g if need else None for g, need in zip(grads, needs)), *rest


def _fused_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    grads = output[-3:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.dtypes = [None if t is None else t.dtype for t in inputs[:3]]
    ctx.save_for_backward(*inputs[:3], *grads)


def _multiplied(ctx: Any, grads: Any, factor: Tensor) -> list[Tensor | None]:
    """In f32: a factor rounded to 16 bits would be an error in every element."""
    return [
        (grad.float() * factor).to(dtype) if need else None
        for grad, dtype, need in zip(grads, ctx.dtypes, ctx.needs_input_grad)
    ]


def _fused_rule(ctx: Any, factor: Tensor | None, *_: Any) -> tuple[Any, ...]:
    rest = [None] * (_OPTION_COUNT + 1 + 4 + 5)
    if factor is None:
        return None, None, None, *rest
    saved = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return *_multiplied(ctx, saved[3:], factor), *rest
    with torch.no_grad():
        grads = _multiplied(ctx, saved[3:], factor)
    return *once((*saved[:3], factor), grads), *rest


def _never_twice(ctx: Any, *_: Any) -> Any:
    raise not_supported(ONCE_ONLY)


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


def bytes_to_keep(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call, needs: bool,
    outputs: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """What the forward op may keep, by a closed formula where nothing else bounds it: sizes may be
    symbols. `memory` bounds workspaces too, which are planned, and so of numbers alone."""
    if not needs or weight is None or hooked():
        return 0
    if not _kept.serves(input.dtype, input.device.type, call.options):
        return 0
    if call.memory is None:
        return _abi.whole_kept(call.constants.target.numel(), weight.shape[0], DTYPES[input.dtype])
    tensors = (input, weight, bias, *call.constants)
    given = tuple(
        (name, t.dtype, tuple(t.shape), tuple(t.stride()))
        for name, t in zip(_run.INPUTS, tensors)
        if t is not None
    )
    if not _static(given):
        return 0
    outputs = outputs or tuple(name for bit, name in _run.OUTPUTS.items() if call.wanted & bit)
    device = input.device
    return _kept.planned_bytes(
        given, outputs, call.options, device.type, device.index or 0, call.memory, call.of_entropy
    )


def _static(given: Any) -> bool:
    """Whether every size and stride is a number."""
    return are_numbers([size for *_, shape, stride in given for size in (*shape, *stride)])


def are_numbers(sizes: Sequence[Any]) -> bool:
    """Whether none of them is a symbol."""
    # A compiler takes its symbols for numbers here.
    if not torch.compiler.is_compiling() and all(isinstance(size, int) for size in sizes):
        return True
    import torch.fx.experimental.symbolic_shapes as symbols  # torch.compile has imported it already

    static: Any = getattr(symbols, "has_static_value", None)
    return static is not None and all(map(static, sizes))


def hooked() -> bool:
    """In a compiled function what it was when the function was compiled."""
    return _kept.hooked()


# torch.compiler.assume_constant_result says the same, but imports the compiler.
hooked._dynamo_marked_constant = True  # type: ignore[attr-defined]
_kept.planned_bytes._dynamo_marked_constant = True  # type: ignore[attr-defined]


def loss(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call, needs: bool
) -> tuple[Tensor | None, ...]:
    """The outputs in their order, None where not wanted, through the dispatcher."""
    if call.main_grad is not None:
        raise not_supported(
            'grad_accumulation="main_grad" writes outside the graph; it is not supported under '
            "torch.compile or in a functional transform"
        )
    if input.is_meta:  # torch asks of its kernels for meta tensors alone that all are
        for name, t in zip(_run.INPUTS[1:], (weight, bias, *call.constants)):
            if t is not None and not t.is_meta:
                raise wrong_device(f"{argument(name)} is on {t.device}; allowed: meta, as input is")
    if call.dtype is not None:
        assert weight is not None
        input, weight = cast(input, call.dtype), cast(weight, call.dtype)
        bias = cast_bias(bias, call.dtype)
    wanted = call.wanted
    tensors, options = (input, weight, bias, *call.constants), call.options[:_OPTION_COUNT]
    # A trace is one graph for calls with and without gradients: it takes Forward, and its autograd
    # rule.
    tracing = not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None
    if needs and not tracing and weight is not None and call.fused(input, weight, bias, hooked()):
        bias_needs = bias is not None and bias.requires_grad
        how = (wanted, input.requires_grad, weight.requires_grad, bias_needs)
        loss, *results = torch.ops.logitless.forward_backward(
            *_arguments(tensors, (*options, call.memory), *how)
        )
        made = dict(zip(_run.CONSTANTS, results)) | {_run.LOSS: loss}
        return tuple(made[bit] if wanted & bit else None for bit in _run.OUTPUTS)
    bits = wanted | _run.ROW_STATE if needs or tracing else wanted
    if needs and not tracing:
        of = (input, weight, bias)
        dtypes = [t.dtype if t is not None and t.requires_grad else None for t in of]
        bits |= _run.followed_by(dtypes, of)
    kept_bytes = bytes_to_keep(input, weight, bias, call, needs and not tracing)
    results = torch.ops.logitless.forward(
        *_arguments(tensors, (*options, call.memory), bits, kept_bytes)
    )
    return tuple(t if wanted & bit else None for t, bit in zip(results, _run.OUTPUTS))

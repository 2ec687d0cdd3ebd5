# SPDX-License-Identifier: Apache-2.0
"""The core's calls as ops for torch's dispatcher. They are used under torch.compile, jit.trace
and modes such as FakeTensorMode, for meta tensors, and by the ranks of a split vocabulary.

    forward    the wanted outputs of a loss, or the loss [] and the gradients for an upstream
               gradient of 1 (FUSED)
    backward   the gradients, from the rows' states and what forward kept

Functional and of fixed arity: a result that is not wanted is an empty tensor. Plain eager calls on
one device do not come here (_autograd.py): the dispatcher would cost several microseconds a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from logitless import _abi
from logitless._abi import Options
from logitless._errors import not_supported
from logitless.torch import _dispatch, _kept, _run
from logitless.torch._autograd import (
    Call,
    asked_of,
    cast,
    cast_bias,
    first_order,
    held_dtype,
    of_columns,
)
from logitless.torch._checks import check_meta
from logitless.torch._device import DTYPES
from logitless.torch._kept import Keep, Kept, State
from logitless.torch._run import Constants, Upstream

TENSORS = (
    "Tensor input, Tensor? weight, Tensor? bias, Tensor target, Tensor? token_weight, "
    "Tensor? vocab_weight, Tensor? normalizer, Tensor? temperature, Tensor? ids, "
    "Tensor? id_offsets"
)
OPTIONS = (
    "int reduction, int ignore_index, float label_smoothing, float z_loss, float logit_scale, "
    "float softcap, float temperature_number, int empty_mean, float normalizer_number, "
    "SymInt vocab_start, SymInt vocab_total, int? memory"
)
_TF32 = Options._fields.index("allow_tf32")  # no argument: torch's switch is read when a call runs
_FIRST_OPTION = len(_run.INPUTS)
_MEMORY = _FIRST_OPTION + len(Options._fields) - 1
BEHIND = _MEMORY + 1  # where an op's own arguments begin
UPSTREAM = (
    "Tensor row_state, Tensor? entropy, Tensor? grad_loss, "
    "Tensor? grad_lse, Tensor? grad_target_logit, Tensor? grad_entropy, Tensor? grad_logits_at"
)
# Backward may overwrite rows of `kept`. It marks them in `kept_rows`, and later Backwards compute
# their logits a second time, so gradients do not change. This mutation is not declared
# ("Tensor(a!)?"): torch would raise a version error if a retained graph is used twice, and a
# compiled Backward would copy all kept state each time. If it were declared for `kept_rows` alone,
# marks would be written to a copy and lost.
KEPT = "Tensor? kept, Tensor? kept_rows"
# The number of rows of kept state beyond those that Forward writes. With them no size is 0 or 1,
# for which torch.compile would compile a second time if the size is a symbol.
SPARE = 2
GRADS = "Tensor grad_input, Tensor grad_weight, Tensor grad_bias"

RESULTS = (
    *_run.OUTPUTS.values(), "weighted_logit_sum", "row_state", "kept", "kept_rows", "grad_input",
    "grad_weight", "grad_bias",
)  # fmt: skip

_ROW_STATE, _GRAD_INPUT = RESULTS.index("row_state"), RESULTS.index("grad_input")


def arguments(tensors: Any, options: Options, memory: int | None, *rest: Any) -> tuple[Any, ...]:
    """The arguments of an op: `tensors` in the order of _run.INPUTS."""
    fields = list(options)  # torch 2.8 cannot trace a slice of a named tuple
    return (*tensors, *fields[:_TF32], *fields[_TF32 + 1 :], memory, *rest)


def split_arguments(args: tuple[Any, ...]) -> tuple[Any, Any, Any, Constants, Options, int | None]:
    values = args[_FIRST_OPTION:_MEMORY]
    options = Options(*(*values[:_TF32], False, *values[_TF32:]))
    return *args[:3], Constants(*args[3:_FIRST_OPTION]), options, args[_MEMORY]


def _filled(tensors: Any, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(0, dtype=torch.float32, device=device) if t is None else t.contiguous()
        for t in tensors
    )


def _kept_like(
    input: Tensor, weight: Tensor | None, target: Tensor, kept_bytes: Any
) -> tuple[Tensor, Tensor]:
    """Uninitialized kept state, whose sizes may be symbolic."""
    if isinstance(kept_bytes, int) and not kept_bytes:
        return input.new_empty(0), input.new_empty(0, dtype=torch.float32)
    assert weight is not None
    tokens = target.numel()
    (rows, width), rows_shape = _kept.shapes(tokens, weight.shape[0], input.dtype, kept_bytes)
    return input.new_empty(rows + SPARE, width), input.new_empty(rows_shape, dtype=torch.float32)


def _keep_of(
    wanted: int, of: tuple[Tensor | None, ...], memory: int | None, kept_bytes: int
) -> Keep | None:
    """The `keep` argument of a Forward for `wanted`."""
    if memory is None and not kept_bytes:
        return None
    return Keep(
        _run.gradients_of(wanted, of), bytes=kept_bytes, spare=SPARE, consume=False,
        of_entropy=bool(wanted & _run.OF_ENTROPY),
    )  # fmt: skip


def _held(tensors: Sequence[Tensor | None], wanted: int) -> tuple[torch.dtype | None, ...]:
    """The dtypes in which gradients wait for their upstream factor."""
    dtypes = _run.gradients_of(wanted, tensors)
    return tuple(None if dtype is None else held_dtype(dtype) for dtype in dtypes)


def _forward(*args: Any) -> tuple[Tensor, ...]:
    wanted, kept_bytes, anchor = args[BEHIND:]
    input, weight, bias, constants, _, memory = call = split_arguments(args)
    if wanted & _run.FUSED:
        dtypes = _held((input, weight, bias), wanted)
        loss, statistics, grads = _run.forward_backward(*call, wanted, dtypes)
        made = {_run.LOSS: loss, **dict(zip(_run.STATISTICS, statistics))}
        nothing = _kept_like(input, weight, constants.target, 0)
        found = _filled((*map(made.get, _run.OUTPUTS), None, None), input.device)
        return *found, *nothing, *_grads(grads, input)
    keep = None if weight is None else _keep_of(wanted, args[:3], memory, kept_bytes)
    outputs, row_state, kept, weighted = _run.forward(*call, wanted, keep, anchor=anchor)
    results = _filled((*outputs, weighted, row_state), input.device)
    if kept is None:
        state = _kept_like(input, weight, constants.target, kept_bytes)
    else:
        state = (kept.columns, kept.rows)
    return *results, *state, *_filled((None, None, None), input.device)


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    wanted, kept_bytes, _ = args[BEHIND:]
    input, _, _, constants, *_ = split_arguments(args)
    target = constants.target
    none = args[_FIRST_OPTION] == _abi.REDUCTION_NONE
    dtypes = _held(args[:3], wanted) if wanted & _run.FUSED else (None, None, None)

    def made(bit: int, shape: Any = None) -> Any:
        if not wanted & bit:
            return input.new_empty((0,), dtype=torch.float32)
        if shape is None:
            shape = _run.shape_of(bit, constants, wanted)
        return input.new_empty(shape, dtype=_run.dtype_of(bit))

    return (
        made(_run.LOSS, target.shape if none else ()),
        *(made(bit) for bit in _run.OUTPUTS if bit != _run.LOSS),
        made(_run.WEIGHTED),
        made(_run.ROW_STATE, (2, target.numel())),
        *_kept_like(input, args[1], target, kept_bytes),
        *_fake_grads(args[:3], dtypes),
    )


def _fake_grads(tensors: Any, dtypes: Sequence[torch.dtype | None]) -> tuple[Tensor, ...]:
    """Fake gradients with strides in the same order as the core's: the order of their tensor as a
    matrix."""
    made = []
    for t, dtype in zip(tensors, dtypes):
        if t is None or dtype is None:
            made.append(tensors[0].new_empty(0, dtype=torch.float32))
        elif t.dim() > 2:
            rows = t.reshape(-1, t.shape[-1])
            made.append(torch.empty_like(rows, dtype=dtype).view(t.shape))
        else:
            made.append(torch.empty_like(t, dtype=dtype))
    return tuple(made)


def _grads(made: Sequence[Tensor | None], input: Tensor) -> tuple[Tensor, ...]:
    return tuple(input.new_empty(0, dtype=torch.float32) if g is None else g for g in made)


def _backward(*args: Any) -> tuple[Tensor, ...]:
    wanted, *upstream, columns, rows = args[BEHIND:]
    call = split_arguments(args)
    kept = _given(call[3].target.numel(), call[5], columns, rows)
    dtypes = _run.gradients_of(wanted, call[:3])
    made = _run.backward(*call, Upstream(*upstream), dtypes, kept=kept)
    return _grads(made, args[0])


def _given(
    tokens: int, memory: int | None, columns: Tensor | None, rows: Tensor | None
) -> Kept | None:
    """Kept state as Backward takes it. It is never consumed, because in the graph it is an input
    like any other."""
    if columns is None or rows is None or columns.shape[0] <= SPARE:
        return None
    columns = columns[:-SPARE]
    bytes = _abi.kept_bytes(tokens, columns.numel(), columns.element_size())
    return Kept(columns, rows, State(room=_kept.room_of(memory, bytes)))


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    return _fake_grads(args[:3], _run.gradients_of(args[BEHIND], args[:3]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    wanted, kept_bytes, _ = inputs[BEHIND:]
    ctx.wanted, ctx.arguments = wanted, inputs[_FIRST_OPTION : _MEMORY + 1]
    differentiable = _run.LOSS if wanted & _run.FUSED else _run.LOSS | _run.DIFFERENTIABLE
    if wanted & _run.DETACHED:
        differentiable &= ~_run.ENTROPY
    constants = [t for t, bit in zip(output, _run.OUTPUTS) if not bit & differentiable]
    ctx.mark_non_differentiable(*constants, *output[len(_run.OUTPUTS) :])
    if wanted & _run.FUSED:
        ctx.dtypes = [None if t is None else t.dtype for t in inputs[:3]]
        ctx.save_for_backward(*inputs[:3], *output[_GRAD_INPUT:])
        return
    made = dict(zip(_run.OUTPUTS, output))
    entropy = None if wanted & _run.DETACHED else made[_run.ENTROPY]
    row_state, *kept = output[_ROW_STATE:_GRAD_INPUT]
    if isinstance(kept_bytes, int) and not kept_bytes:
        kept = [None, None]
    ctx.save_for_backward(*inputs[:_FIRST_OPTION], row_state, entropy, *kept)


def _rule(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
    grads = (_fused_gradients if ctx.wanted & _run.FUSED else _gradients)(ctx, upstream)
    rest = [None] * BEHIND  # all arguments except the first three
    return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad)), *rest


def _gradients(ctx: Any, upstream: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    saved = ctx.saved_tensors
    inputs, kept = saved[:_FIRST_OPTION], saved[_FIRST_OPTION + 2 :]
    given = [grad if ctx.wanted & bit else None for grad, bit in zip(upstream, _run.OUTPUTS)]
    if not of_columns(given):
        kept = [None, None]
    *_, options, memory = split_arguments((*inputs, *ctx.arguments))
    vocab = None if inputs[1] is None else inputs[1].shape[0]
    upstream, options, constants = asked_of(given, options, vocab, *saved[3 : _FIRST_OPTION + 2])
    needs = sum(bit for bit, need in zip(_run.OF_TENSORS, ctx.needs_input_grad) if need)
    made: Sequence[Tensor | None] = torch.ops.logitless.backward(
        *arguments((*inputs[:3], *constants), options, memory, needs, *upstream, *kept)
    )
    return made


def _fused_gradients(ctx: Any, upstream: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    if upstream[0] is None:
        return None, None, None
    grads: Sequence[Tensor | None] = first_order(ctx, _multiplied, upstream[:1])
    return grads


def _multiplied(ctx: Any, factor: Tensor) -> list[Tensor | None]:
    """The gradients times the factor, which stays f32: if it were rounded to 16 bits, every element
    would have its error."""
    return [
        (grad.float() * factor).to(dtype) if need else None
        for grad, dtype, need in zip(ctx.saved_tensors[3:], ctx.dtypes, ctx.needs_input_grad)
    ]


_dispatch.define(
    f"forward({TENSORS}, {OPTIONS}, int wanted, SymInt kept_bytes, Tensor? anchor) -> ("
    + ", ".join(f"Tensor {name}" for name in RESULTS)
    + ")",
    _forward, _forward_fake, rule=_rule, setup=_setup,
)  # fmt: skip
_dispatch.define(
    f"backward({TENSORS}, {OPTIONS}, int wanted, {UPSTREAM}, {KEPT}) -> ({GRADS})",
    _backward, _backward_fake, rule=_dispatch.once_only,
)  # fmt: skip


def bytes_to_keep(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call, needs: bool,
    outputs: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """The bytes that the forward op may keep. Without `memory` this is a closed formula, in which
    sizes may be symbolic. With `memory`, which bounds the workspaces too, plans are needed, and so
    sizes that are numbers."""
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
    # Up to torch 2.11 the compiler knows no named tuple as a constant.
    options = tuple(call.options)
    return _kept.planned_bytes(
        given, outputs, options, device.type, device.index or 0, call.memory, call.of_entropy
    )


def _static(given: Any) -> bool:
    """Whether every size and stride is a number."""
    return are_numbers([size for *_, shape, stride in given for size in (*shape, *stride)])


def shapes_alone(*tensors: Tensor | None) -> bool:
    """Whether the tensors are meta or fake, with sizes that are numbers. False under a compiler,
    whose calls are checked when they run."""
    if torch.compiler.is_compiling():
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    given = [t for t in tensors if t is not None]
    sizes = [size for t in given for size in t.shape]
    alone = all(t.is_meta or isinstance(t, FakeTensor) for t in given)
    return alone and all(isinstance(size, int) for size in sizes)


def are_numbers(sizes: Sequence[Any]) -> bool:
    """Whether none of the sizes is a symbol."""
    # Under a compiler, symbols look like numbers here.
    if not torch.compiler.is_compiling() and all(isinstance(size, int) for size in sizes):
        return True
    import torch.fx.experimental.symbolic_shapes as symbols  # torch.compile has imported it already

    static: Any = getattr(symbols, "has_static_value", None)
    return static is not None and all(map(static, sizes))


def hooked() -> bool:
    """Like _kept.hooked, but in a compiled function a constant: its value at compilation."""
    return _kept.hooked()


# torch.compiler.assume_constant_result does the same, but imports the compiler.
hooked._dynamo_marked_constant = True  # type: ignore[attr-defined]
_kept.planned_bytes._dynamo_marked_constant = True  # type: ignore[attr-defined]
_kept.library_keeps._dynamo_marked_constant = True  # type: ignore[attr-defined]


def loss(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call, needs: bool
) -> tuple[Tensor | None, ...]:
    """The outputs in their order, None where not wanted, through the dispatcher."""
    if call.main_grad is not None:
        raise not_supported(
            'grad_accumulation="main_grad" writes outside the graph; it is not supported under '
            "torch.compile or in a functional transform"
        )
    check_meta(_run.INPUTS, (input, weight, bias, *call.constants))
    if not torch.compiler.is_compiling():
        _abi.check_options(call.options)
    if shapes_alone(input, weight):
        from logitless.torch import _planned

        _planned.check_shapes(input, weight, bias, call)
    if call.dtype is not None:
        assert weight is not None
        input, weight = cast(input, call.dtype), cast(weight, call.dtype)
        bias = cast_bias(bias, call.dtype)
    wanted = call.wanted
    of = (input, weight, bias)
    # torch.jit.trace makes one graph for calls with and without gradients: it records Forward, and
    # its autograd rule.
    tracing = not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None
    bits, kept_bytes = wanted, 0
    if needs and not tracing:
        dtypes = [t.dtype if t is not None and t.requires_grad else None for t in of]
        bits |= _run.followed_by(dtypes, of)
    if needs and not tracing and weight is not None and call.fused(*of, hooked()):
        bits |= _run.FUSED
    elif needs or tracing:
        bits |= _run.ROW_STATE | (_run.OF_ENTROPY if call.of_entropy else 0)
        kept_bytes = bytes_to_keep(input, weight, bias, call, not tracing)
    results = torch.ops.logitless.forward(
        *arguments((*of, *call.constants), call.options, call.memory, bits, kept_bytes, None)
    )
    return tuple(t if wanted & bit else None for t, bit in zip(results, _run.OUTPUTS))

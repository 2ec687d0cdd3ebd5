# SPDX-License-Identifier: Apache-2.0
"""The C calls on torch tensors: allocates outputs and workspace, passes addresses and the stream.

Everything here runs on plain tensors, below autograd. `weight` None means that `input` holds the
logits [N, V]. Optional results that are not wanted are None. No tensor is kept from one call to the
next, because any call may run with special allocations, such as a CUDA graph's private pool.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from logitless import _abi
from logitless._abi import AnyOptions, Options
from logitless._errors import argument, wrong_device, wrong_dtype
from logitless._statistics import STATISTICS as TABLE
from logitless._statistics import names_where
from logitless.torch import _device, _kept, _lists
from logitless.torch._device import DEVICES, DTYPES, MOST_SHAPES
from logitless.torch._kept import FRESH, Keep, Kept, State

# What a forward call may be asked for, as bits: first the outputs, in the order that they have
# everywhere; then
# - ROW_STATE: what Backward needs; DETACHED: the entropy will not be differentiated;
# - OF_INPUT to BIAS_IN_F32 (only for torch.ops): which gradients may follow, and that they are f32
#   beside 16-bit tensors;
# - OF_ENTROPY: the entropy may get an upstream gradient; WEIGHTED: the class-weighted sum of a
#   shard's logits;
# - FUSED: the gradients are made with the loss; ALL_DETACHED: no statistic will be differentiated.
#
# `logits_at` [..., K] and `top_logits` [..., k] of the whole vocabulary become log-probabilities
# (logprobs_at, logprobs_of); those of a shard stay logits. The number k is stored above the bits.
OUTPUTS = {
    1 << place: name
    for place, name in enumerate(("loss", *TABLE, "logits_at", "top_logits", "top_ids"))
}
BITS = {name: bit for bit, name in OUTPUTS.items()}
(
    ROW_STATE, DETACHED, OF_INPUT, OF_WEIGHT, OF_BIAS, INPUT_IN_F32, WEIGHT_IN_F32, BIAS_IN_F32,
    OF_ENTROPY, WEIGHTED, FUSED, ALL_DETACHED,
) = (1 << (len(OUTPUTS) + place) for place in range(12))  # fmt: skip
OF_TENSORS, IN_F32 = (OF_INPUT, OF_WEIGHT, OF_BIAS), (INPUT_IN_F32, WEIGHT_IN_F32, BIAS_IN_F32)
LOSS, TARGET_LOGIT, LOGPROB, ENTROPY = (
    BITS[name] for name in ("loss", "target_logit", "logprob", "entropy")
)
ARGMAX, LOGITS_AT = BITS["argmax"], BITS["logits_at"]
TOP_LOGITS, TOP_IDS = BITS["top_logits"], BITS["top_ids"]
_K_AT = 40  # the lowest bit of k
TOP = TOP_LOGITS | TOP_IDS | (1023 << _K_AT)  # all bits about the largest logits
STATISTICS = {BITS[name]: name for name in TABLE}
DIFFERENTIABLE = sum(BITS[name] for name in names_where("differentiable")) | LOGITS_AT
CONSTANTS = {bit: name for bit, name in STATISTICS.items() if not bit & DIFFERENTIABLE}
_INDICES = sum(BITS[name] for name in names_where("indexes")) | TOP_IDS
_EVERY_STATISTIC = sum(STATISTICS)

INPUTS = (
    "input", "weight", "bias", "target", "token_weight", "vocab_weight", "normalizer",
    "temperature", "ids", "id_offsets",
)  # fmt: skip
_FORWARD = (*INPUTS, "anchor", *OUTPUTS.values(), "weighted_logit_sum")
_FORWARD_BACKWARD = (
    *INPUTS, "loss", *TABLE, "grad_input", "grad_weight", "grad_bias",
)  # fmt: skip
_BACKWARD = (
    *INPUTS, "entropy", "grad_loss", "grad_lse",
    "grad_target_logit", "grad_entropy", "grad_logits_at", "grad_input", "grad_weight", "grad_bias",
    "kept", "kept_rows",
)  # fmt: skip
_LOGITS_NAMES = {"input": "logits", "grad_input": "grad_logits"}

_Named = TypeVar("_Named", bound=NamedTuple)
_plans: dict[tuple[object, ...], _abi.Plan] = {}
_scratch: list[tuple[Any, int]] = []  # (memory, its address); append and pop are atomic
_SCRATCH_BYTES = 1 << 20
_SCRATCH_ALIGNMENT = 64
_threads = 0


def dtype_of(output: int) -> torch.dtype:
    return torch.int64 if output & _INDICES else torch.float32


def followed_by(dtypes: Sequence[torch.dtype | None], of: Sequence[Tensor | None]) -> int:
    """The bits that say which gradients may follow: `dtypes` are those of the gradients of input,
    weight and bias, None for one that is not needed."""
    bits = sum(bit for bit, dtype in zip(OF_TENSORS, dtypes) if dtype)
    for bit, dtype, tensor in zip(IN_F32, dtypes, of):
        if dtype is torch.float32 and tensor is not None and tensor.dtype is not dtype:
            bits |= bit
    return bits


def gradients_of(wanted: int, of: Sequence[Tensor | None]) -> tuple[torch.dtype | None, ...]:
    """The inverse of followed_by: the dtypes of the gradients of input, weight and bias."""
    return tuple(
        None if t is None or not wanted & bit else torch.float32 if wanted & in_f32 else t.dtype
        for t, bit, in_f32 in zip(of, OF_TENSORS, IN_F32)
    )


def replaced(given: _Named, **changed: Any) -> _Named:
    """Like a named tuple's _replace, which torch 2.8's compiler does not trace."""
    kind: Any = type(given)
    return kind(*[changed.get(name, value) for name, value in zip(kind._fields, given)])  # type: ignore[no-any-return,unused-ignore]


class Constants(NamedTuple):
    """The inputs without gradients. [...] stands for the dimensions of tokens."""

    target: Tensor  # [...]
    token_weight: Tensor | None = None  # [...] f32
    vocab_weight: Tensor | None = None  # [V] f32
    normalizer: Tensor | None = None  # [] f32 or i64
    temperature: Tensor | None = None  # [N] f32
    ids: Tensor | None = None  # [..., K], or [M] beside id_offsets
    id_offsets: Tensor | None = None  # [N + 1]


def top_of(k: int) -> int:
    """The bits that ask for the k largest logits and their ids."""
    return TOP_LOGITS | TOP_IDS | k << _K_AT


def k_of(wanted: int) -> int:
    return wanted >> _K_AT


def shape_of(output: int, constants: Constants, wanted: int) -> Any:
    """The shape of an output of tokens."""
    if output & TOP:
        return (*constants.target.shape, k_of(wanted))
    of = constants.ids if output == LOGITS_AT else constants.target
    assert of is not None
    return of.shape


def matrix(tensor: Tensor | None) -> Tensor | None:
    """[..., K] as [N, K]."""
    if tensor is None or tensor.dim() == 2:
        return tensor
    return tensor.reshape(-1, tensor.shape[-1])


def columns(tensor: Tensor | None, offsets: Tensor | None) -> Tensor | None:
    """A tensor of chosen columns as the core takes it: [N, K], or [M] with offsets."""
    return tensor if offsets is not None else matrix(tensor)


def logprobs_at(
    logits: Tensor, row_state: Tensor, ids: Tensor, offsets: Tensor | None = None
) -> Tensor:
    """The log-probabilities [..., K], or [M] with offsets, written over the logits at these ids;
    row_state [2, N] is that of the whole vocabulary."""
    if offsets is not None:
        reference, log_sum = row_state[:, _lists.token_of(offsets, logits.shape[0])]  # [M]
        made = logits.sub_(reference).sub_(log_sum).clamp_(max=0)  # a NaN stays
    else:
        made = logprobs_of(logits, row_state)
    return made.masked_fill_(ids == -1, -float("inf"))


def logprobs_of(logits: Tensor, row_state: Tensor) -> Tensor:
    """The log-probabilities [..., K], written over the logits; row_state [2, N] is that of the
    whole vocabulary."""
    reference, log_sum = row_state.view(2, *logits.shape[:-1], 1)
    return logits.sub_(reference).sub_(log_sum).clamp_(max=0)  # a NaN stays


def view(name: str, tensor: Tensor, where: torch.device | None = None) -> _abi.View:
    """The view of a tensor, without its address. `where`: its device, if the tensor has no
    memory."""
    where = where or tensor.device
    dtype, device = DTYPES.get(tensor.dtype), DEVICES.get(where.type)
    if dtype is None:
        allowed, way = "float32, float16, bfloat16", ""
        if name == "target":
            allowed, way = "int32, int64", " (target.long())"
        elif tensor.dtype is torch.float64:
            way = f" ({argument(name)}.float())"
        raise wrong_dtype(f"{argument(name)} is {str(tensor.dtype)[6:]}; allowed: {allowed}{way}")
    if device is None or tensor.layout != torch.strided:
        raise wrong_device(
            f"{argument(name)} is on {where} with layout {tensor.layout}; allowed: dense "
            "tensors on cpu or cuda"
        )
    return _abi.View(name, dtype, device, where.index or 0, tensor.shape, tensor.stride())


def make_plan(
    kind: int, names: Sequence[str], tensors: Sequence[Tensor | None], options: AnyOptions | None,
    row_state: Tensor | None, memory: int | None, accumulate: bool, addresses: Sequence[int],
    keep: Keep | None = None, kept: Kept | None = None, where: torch.device | None = None,
    only_chosen: bool = False, grad_input_first: bool = False,
) -> _abi.Plan:  # fmt: skip
    first, weight = tensors[0], tensors[1]
    assert first is not None
    linear = kind >= _abi.LINEAR_CROSS_ENTROPY_FORWARD
    views = [
        view(name if linear else _LOGITS_NAMES.get(name, name), tensor, where)
        for name, tensor in zip(names, tensors)
        if tensor is not None
    ]
    if row_state is not None:
        views += (
            view("row_reference", row_state[0], where), view("row_log_sum", row_state[1], where),
        )  # fmt: skip
    # The bytes of all logits of all heads and of all gradients in f32: no plan takes more.
    most = 0
    if linear and weight is not None and first.dim() == 2 and weight.dim() == 2:
        (tokens, hidden), vocab = first.shape, weight.shape[0]
        heads = 2 if kind >= _abi.LINEAR_DIVERGENCE_FORWARD else 1
        most = 4 * (heads * tokens * vocab + tokens * hidden + vocab * hidden)
    device = (views[0].device_type, views[0].device_index)
    how: dict[str, Any] = {"most": most, "accumulate": accumulate, "memory": memory}
    how |= {"only_chosen": only_chosen, "grad_input_first": grad_input_first}
    inputs = views[: sum(tensor is not None for tensor in tensors[: len(INPUTS)])]
    if keep is not None:
        assert isinstance(options, Options)
        forward = _kept.Forward(views, addresses, inputs, options, device, memory)
        _kept.check_memory(forward, keep)
    if kept is not None:
        assert options is not None
        how |= {"kept_key": kept.key(inputs, options, device), "consume_kept": kept.consume}
        how |= {"memory": None, "room": kept.state.room, "most": most if memory is not None else 0}
    plan = _abi.Plan(kind, views, options, device, addresses=addresses, **how)
    chosen = None if keep is None else _kept.choose(forward, keep)
    if chosen is None:
        return plan
    assert options is not None
    size, room = chosen
    return _abi.Plan(
        kind, (*views, *_kept.views(size, views[0])), options, device, room=room, kept=size,
        most=most if memory is not None else 0,
        addresses=(*addresses, FRESH, FRESH) if addresses else (),
    )  # fmt: skip


def follow_torch_threads() -> int:
    """Sets the library's number of threads to torch.get_num_threads(); the recommended workspace
    grows with it."""
    global _threads
    threads = torch.get_num_threads()
    if threads != _threads:
        _threads = threads
        _abi.follow_threads(threads)
    return threads


def _new_scratch() -> tuple[Any, int]:
    memory = ctypes.create_string_buffer(_SCRATCH_BYTES + _SCRATCH_ALIGNMENT)
    address = ctypes.addressof(memory)
    return memory, address + -address % _SCRATCH_ALIGNMENT


def launch(
    kind: int, names: Sequence[str], tensors: Sequence[Tensor | None], options: AnyOptions | None,
    memory: int | None, asked: object, row_state: Tensor | None = None, accumulate: bool = False,
    keep: Keep | None = None, kept: Kept | None = None, only_chosen: bool = False,
    between: _device.Between = (),
) -> Kept | None:  # fmt: skip
    """Runs the op `kind` on tensors of at most two dimensions, on the current stream. `asked` tells
    the outputs and their dtypes; it is part of the key of the cached plan. `row_state` [2, N] holds
    row_reference and row_log_sum. A Forward with `keep` returns what it kept; a Backward takes that
    as `kept`. `between`: a Backward runs in three parts, grad_input's first, and calls these
    functions between them; on the CPU after all of it.
    """
    first = tensors[0]
    assert first is not None
    cuda = first.is_cuda
    tf32, threads = False, 0
    # By torch's own switch; without TF32 an f32 product never rounds its operands.
    if cuda:
        tf32 = first.dtype is torch.float32 and _device.allows_tf32()
    else:
        threads = follow_torch_threads()
    number = 0.0  # the normalizer's value is passed when the plan runs, like addresses
    if options is not None and options.normalizer:
        number = options.normalizer
        options = options._replace(normalizer=1.0)
    try:
        addresses = [t.data_ptr() for t in tensors if t is not None]
    # For a tensor without memory, planning raises a better message first.
    except RuntimeError:
        make_plan(kind, names, tensors, options, row_state, memory, accumulate, ())
        raise
    if row_state is not None:
        address = row_state.data_ptr()
        # row_log_sum is N f32 after row_reference
        addresses += (address, address + 2 * row_state.numel())
    key: list[object] = [kind, options, memory, asked, tf32, threads, bool(between)]
    if cuda:  # CUDA's plans depend on the tensors' alignment
        key.append(tuple([a & 15 for a in addresses]))
    for t in tensors[: len(INPUTS)]:
        if t is None:
            key.append(None)
        else:
            key += (t.dtype, t.device, t.shape, t.stride())
    entry = tuple(key)
    plan = _plans.get(entry)
    if plan is None:
        if tf32 and options is not None:
            options = options._replace(allow_tf32=True)
        # On the host, plans do not depend on addresses.
        aligned = addresses if cuda else ()
        plan = make_plan(
            kind, names, tensors, options, row_state, memory, accumulate, aligned, keep, kept,
            only_chosen=only_chosen, grad_input_first=bool(between),
        )  # fmt: skip
        if len(_plans) >= MOST_SHAPES:
            _plans.clear()
        _plans[entry] = plan
    state = None
    if keep is not None and plan.kept is not None:
        state = _new_kept(first, plan, tf32, keep.spare)
        addresses += (state.columns.data_ptr(), state.rows.data_ptr())
    if cuda:
        _device.run_cuda(plan, addresses, first.get_device(), number, between)
    else:
        _run_on_host(plan, addresses, number)
        for enqueue in between:
            enqueue()
    return state


Launcher = Callable[..., Kept | None]  # launch, or _planned's, which only plans


def _run_on_host(plan: _abi.Plan, addresses: list[int], normalizer: float) -> None:
    if plan.bytes > _SCRATCH_BYTES:
        workspace = torch.empty(plan.bytes, dtype=torch.uint8, device="cpu")
        plan.run(addresses, workspace.data_ptr(), normalizer=normalizer)
        return
    # Small workspaces are reused, one per call in flight, because new pages cost more than a small
    # call.
    try:
        scratch = _scratch.pop()
    except IndexError:
        scratch = _new_scratch()
    try:
        plan.run(addresses, scratch[1], normalizer=normalizer)
    finally:
        _scratch.append(scratch)


def _new_kept(rows: Tensor, plan: _abi.Plan, tf32: bool, spare: int) -> Kept:
    size = plan.kept
    assert size is not None
    stream = torch._C._cuda_getCurrentRawStream(rows.get_device()) if rows.is_cuda else 0
    return Kept(
        rows.new_empty_strided((size.shape[0] + spare, size.shape[1]), (size.shape[1], 1)),
        rows.new_empty_strided(size.rows_shape, (size.rows_shape[1], 1), dtype=torch.float32),
        State(size.key, plan.room, tf32, stream),
    )


def _per_token(target: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """An output [...], allocated in the target's shape: a view of an output [N] could not be
    changed in place. empty_like takes a third of the time of empty with a dtype and a device."""
    return torch.empty_like(target, dtype=dtype, memory_format=torch.contiguous_format)


_NO_STATISTICS = (None,) * len(STATISTICS)


def _statistics(target: Tensor, wanted: int) -> list[Tensor | None]:
    """A tensor [...] for each wanted statistic, None for the others."""
    return [_per_token(target, dtype_of(bit)) if wanted & bit else None for bit in STATISTICS]


def _row_state(rows: Tensor) -> Tensor:
    """[2, N] f32: row_reference and row_log_sum of every token, for Backward. new_empty_strided is
    the fastest way to allocate another shape and dtype on a tensor's device."""
    n = rows.shape[0]
    return rows.new_empty_strided((2, n), (n, 1), dtype=torch.float32)


def _scalar(rows: Tensor) -> Tensor:
    """An output []."""
    return rows.new_empty_strided((), (), dtype=torch.float32)


def _grad_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype is dtype:
        return torch.empty_like(tensor)
    return torch.empty_like(tensor, dtype=dtype)


def _rows(input: Tensor, tokens: int) -> Tensor:
    """[..., D] as [N, D]: a view wherever strides allow one."""
    return input if input.dim() == 2 else input.reshape(tokens, input.shape[-1])


def _flat(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.dim() == 1 else tensor.reshape(-1)


def forward(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, constants: Constants,
    options: Options, memory: int | None, wanted: int, keep: Keep | None = None,
    launcher: Launcher | None = None, anchor: Tensor | None = None,
) -> tuple[tuple[Tensor | None, ...], Tensor | None, Kept | None, Tensor | None]:  # fmt: skip
    """The outputs, row_state [2, N], kept state, and weighted_logit_sum [N]."""
    target, token_weight, vocab_weight, normalizer, temperature, ids, id_offsets = constants
    flat = target if target.dim() == 1 else target.reshape(-1)  # [N]
    rows = input if input.dim() == 2 else _rows(input, target.numel())  # [N, D]
    none = options.reduction == _abi.REDUCTION_NONE
    loss = None
    if wanted & LOSS:
        loss = _per_token(target) if none else _scalar(rows)  # [...] or []
    statistics: Sequence[Tensor | None] = _NO_STATISTICS
    if wanted & _EVERY_STATISTIC:
        statistics = _statistics(target, wanted)  # [...]
    if not wanted & LOGITS_AT:
        ids = id_offsets = None
    logits_at = None if ids is None else _per_token(ids)  # [..., K]
    top_logits = top_ids = None
    if wanted & TOP:
        shape = shape_of(TOP_IDS, constants, wanted)
        top_logits = rows.new_empty(shape, dtype=torch.float32)  # [..., k]
        top_ids = rows.new_empty(shape, dtype=torch.int64)  # [..., k]
    outputs = given = (loss, *statistics, logits_at, top_logits, top_ids)
    if target.dim() != 1:
        of_tokens = map(_flat, statistics)  # [N]
        at = columns(logits_at, id_offsets)
        of_columns = map(matrix, (top_logits, top_ids))  # [N, k]
        given = (_flat(loss) if none else loss, *of_tokens, at, *of_columns)
    row_state = _row_state(rows) if wanted & ROW_STATE else None  # [2, N]
    weighted = _per_token(flat) if wanted & WEIGHTED else None  # [N]
    tensors = (
        rows, weight, bias, flat, _flat(token_weight), vocab_weight, normalizer,
        temperature, columns(ids, id_offsets), id_offsets, anchor, *given, weighted,
    )  # fmt: skip
    kind = _abi.CROSS_ENTROPY_FORWARD if weight is None else _abi.LINEAR_CROSS_ENTROPY_FORWARD
    asked: object = wanted if keep is None else (wanted, keep.asked())
    if anchor is not None:
        asked = (asked, "anchor")
    kept = (launcher or launch)(
        kind, _FORWARD, tensors, options, memory, asked, row_state, False, keep
    )
    if logits_at is not None and not options.vocab_total:
        assert row_state is not None and ids is not None
        logprobs_at(logits_at, row_state, ids, id_offsets)
    if top_logits is not None and not options.vocab_total:
        assert row_state is not None
        logprobs_of(top_logits, row_state)
    return outputs, row_state, kept, weighted


def forward_backward(
    input: Tensor, weight: Tensor, bias: Tensor | None, constants: Constants, options: Options,
    memory: int | None, wanted: int, dtypes: tuple[torch.dtype | None, ...],
    launcher: Launcher | None = None,
) -> tuple[Tensor, Sequence[Tensor | None], list[Tensor | None]]:  # fmt: skip
    """The loss [], the statistics, and the gradients of input, weight and bias for an upstream
    gradient of 1; `dtypes` are those of the gradients, None for one that is not wanted."""
    target, token_weight, vocab_weight, normalizer, temperature, *_ = constants
    flat = target if target.dim() == 1 else target.reshape(-1)  # [N]
    rows = input if input.dim() == 2 else _rows(input, target.numel())  # [N, D]
    loss = _scalar(rows)  # []
    grad_input = grad_weight = grad_bias = None
    statistics: Sequence[Tensor | None] = _NO_STATISTICS
    if wanted & _EVERY_STATISTIC:
        statistics = _statistics(target, wanted)  # [...]
    if dtypes[0] is not None:
        grad_input = _grad_of(rows, dtypes[0])  # [N, D]
    if dtypes[1] is not None:
        grad_weight = _grad_of(weight, dtypes[1])  # [V, D]
    if bias is not None and dtypes[2] is not None:
        grad_bias = _grad_of(bias, dtypes[2])  # [V]
    tensors = (
        rows, weight, bias, flat, _flat(token_weight), vocab_weight, normalizer,
        temperature, None, None, loss, *map(_flat, statistics), grad_input, grad_weight, grad_bias,
    )  # fmt: skip
    kind = _abi.LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD
    (launcher or launch)(kind, _FORWARD_BACKWARD, tensors, options, memory, (wanted, dtypes))
    if grad_input is not None and input.dim() != 2:
        grad_input = grad_input.view(input.shape)
    return loss, statistics, [grad_input, grad_weight, grad_bias]


class Upstream(NamedTuple):
    """Backward's arguments beside the inputs. [...] stands for the dimensions of tokens."""

    row_state: Tensor  # [2, N]
    entropy: Tensor | None = None  # [...]
    grad_loss: Tensor | None = None  # [...] or [N], or [] of a reduced loss
    grad_lse: Tensor | None = None  # [...]
    grad_target_logit: Tensor | None = None  # [...]
    grad_entropy: Tensor | None = None  # [...]
    grad_logits_at: Tensor | None = None  # [..., K], or [M] of lists


def _upstream(tensor: Tensor | None) -> Tensor | None:
    """An upstream gradient as [N] or [], without a lazy minus sign."""
    return None if tensor is None else _flat(tensor.resolve_neg())


def backward(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, constants: Constants,
    options: Options, memory: int | None, upstream: Upstream,
    dtypes: Sequence[torch.dtype | None], *, in_place: bool = False,
    main_grad: Tensor | None = None, kept: Kept | None = None, launcher: Launcher | None = None,
    part: Tensor | None = None, between: _device.Between = (),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(grad_input, grad_weight, grad_bias). `in_place`: grad_input overwrites the input. If
    `main_grad` [V, D] f32 is given, the weight's gradient is added to that tensor, and grad_weight
    is None. If `part` [N, D] f32 is given, grad_input is written there; `between`: see `launch`."""
    target, token_weight, vocab_weight, normalizer, temperature, ids, id_offsets = constants
    if upstream.grad_logits_at is None:
        ids = id_offsets = None
    tokens = target.numel()
    rows = _rows(input, tokens)  # [N, D]
    if kept is not None and rows.is_cuda:
        kept = _kept.usable(kept, rows)
    grads = [
        None if t is None or dtype is None else _grad_of(t, dtype)
        for t, dtype in zip((None if in_place else rows, weight, bias), dtypes)
    ]
    if in_place:
        grads[0] = rows
    if part is not None:
        grads[0] = part
    if main_grad is not None:
        grads[1] = main_grad
        if grads[2] is not None:  # grad_bias accumulates too, and must be f32
            grads[2] = torch.zeros(grads[2].shape, dtype=torch.float32, device=rows.device)
    tensors = (
        rows, weight, bias, _flat(target), _flat(token_weight), vocab_weight, normalizer,
        temperature, columns(ids, id_offsets), id_offsets, *map(_upstream, upstream[1:-1]),
        columns(upstream.grad_logits_at, id_offsets), *grads,
        *((None, None) if kept is None else kept[:2]),
    )  # fmt: skip
    kind = _abi.CROSS_ENTROPY_BACKWARD if weight is None else _abi.LINEAR_CROSS_ENTROPY_BACKWARD
    asked = tuple(
        None if t is None else (t.dtype, t.device, t.shape, t.stride())
        for t in tensors[len(INPUTS) :]
    )
    accumulate = main_grad is not None
    ordered: Any = {"between": between} if between else {}
    (launcher or launch)(
        kind,
        _BACKWARD,
        tensors,
        options,
        memory,
        (accumulate, asked, None if kept is None else kept[2:]),
        upstream.row_state,
        accumulate,
        None,
        kept,
        **ordered,
    )
    if main_grad is not None:
        grads[1] = None
        if grads[2] is not None and dtypes[2] is not None:
            grads[2] = grads[2].to(dtypes[2])
    result = grads[0]
    if in_place:
        if rows.data_ptr() != input.data_ptr():  # the logits became a matrix only by a copy
            input.copy_(rows.view(input.shape))
        result = input
    elif result is not None and input.dim() != 2:
        result = result.view(input.shape)
    return result, grads[1], grads[2]

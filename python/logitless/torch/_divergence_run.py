# SPDX-License-Identifier: Apache-2.0
"""The C calls of a divergence on torch tensors, below autograd, as _run.py has those of a loss. It
also decides whether dz of all columns is kept for Backward, if it fits `memory`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless import _abi
from logitless._abi import Divergence, KeptSize, View
from logitless._divergence import STATISTICS
from logitless._errors import LogitlessError
from logitless.torch import _device, _kept, _run
from logitless.torch._autograd import cast, cast_bias
from logitless.torch._device import DEVICES, DTYPES
from logitless.torch._kept import FRESH, Keep, Kept, State

# What a call may be asked for, as bits: the outputs in their order; which gradients may follow;
# that they are computed with the loss; that Forward keeps dz, or of a shard the logits; that no
# graph is traced, so that waiting gradients belong to the call alone; and (SLOPE) for a shard, the
# sum from which the mean that dz subtracts is made.
OUTPUTS = ("loss", *STATISTICS)
BITS = {name: 1 << place for place, name in enumerate(OUTPUTS)}
OF_INPUT, OF_WEIGHT, OF_BIAS, FUSED, KEEP, PLAIN, SLOPE = (
    1 << (len(OUTPUTS) + i) for i in range(7)
)
OF_TENSORS = (OF_INPUT, OF_WEIGHT, OF_BIAS)

Dtypes = tuple[torch.dtype | None, ...]


class Inputs(NamedTuple):
    """The inputs by the core's names. Those after the bias have no gradient."""

    input: Tensor  # [..., D]
    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    target: Tensor | None = None  # [...]
    token_weight: Tensor | None = None  # [...] f32
    normalizer: Tensor | None = None  # [] f32 or i64
    temperature: Tensor | None = None  # [N] f32
    teacher_input: Tensor | None = None  # [..., Dt]
    teacher_weight: Tensor | None = None  # [V, Dt]
    teacher_bias: Tensor | None = None  # [V]
    teacher_logits: Tensor | None = None  # [..., V]
    teacher_temperature: Tensor | None = None  # [N] f32

    def tokens(self) -> int:
        return math.prod(self.input.shape[:-1])

    def in_dtype(self, dtype: torch.dtype | None) -> Inputs:
        """Both heads cast to the dtype of autocast. A teacher's logits are not cast."""
        if dtype is None:
            return self
        teacher = [
            t if t is None else cast(t, dtype) for t in (self.teacher_input, self.teacher_weight)
        ]
        made: list[Any] = [cast(t, dtype) for t in self[:2]]
        made += [cast_bias(self.bias, dtype), *self[3:7]]
        made += [*teacher, cast_bias(self.teacher_bias, dtype), *self[10:]]
        return Inputs(*made)

    def flat(self) -> Inputs:
        """The inputs as [N, ...], as the core takes them."""
        made: list[Any] = [_flat(name, t) for name, t in zip(self._fields, self)]
        return Inputs(*made)


_ROWS = ("input", "teacher_input", "teacher_logits")
_TOKENS = ("target", "token_weight", "temperature", "teacher_temperature")


def _flat(name: str, tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    if name in _ROWS and tensor.dim() != 2:
        return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    return tensor.reshape(-1) if name in _TOKENS and tensor.dim() != 1 else tensor


def gradients_of(wanted: int, of: Sequence[Tensor | None]) -> Dtypes:
    """The dtypes of the gradients that are wanted of input, weight and bias."""
    return tuple(None if t is None or not wanted & b else t.dtype for t, b in zip(of, OF_TENSORS))


def _launch(
    kind: int, names: Sequence[str], tensors: Sequence[Tensor | None], options: Divergence,
    memory: int | None, kept: Kept | None = None, between: _device.Between = (),
) -> None:  # fmt: skip
    """Calls _run.launch. The key of its plans includes only the first tensors, so those after them
    are described in `asked`."""
    asked = [
        None if t is None else (t.dtype, t.device, t.shape, t.stride())
        for t in tensors[len(_run.INPUTS) :]
    ]
    state = None if kept is None else kept.state
    _run.launch(
        kind, names, tensors, options, memory, (tuple(asked), state), kept=kept, between=between
    )


def _outputs(inputs: Inputs, options: Divergence, wanted: int) -> list[Tensor | None]:
    """The loss [...] or [] and the statistics [...] that are wanted."""
    shape = inputs.input.shape[:-1]
    whole = options.reduction != _abi.REDUCTION_NONE
    return [
        inputs.input.new_empty(() if name == "loss" and whole else shape, dtype=torch.float32)
        if wanted & bit
        else None
        for name, bit in BITS.items()
    ]


def _as_given(outputs: Sequence[Tensor | None], options: Divergence) -> list[Tensor | None]:
    """The outputs of tokens as [N]."""
    none = options.reduction == _abi.REDUCTION_NONE
    return [
        t if t is None or (place == 0 and not none) else t.reshape(-1)
        for place, t in enumerate(outputs)
    ]


_STATES = ("row_reference", "row_log_sum", "teacher_row_reference", "teacher_row_log_sum")
_OF_SHARD = (*_STATES, "target_logit", "divergence_sum", "slope_sum")
_FORWARD = (*Inputs._fields, *OUTPUTS, "kept", "kept_rows", *_OF_SHARD)
_GRADIENTS = ("grad_input", "grad_weight", "grad_bias")


def forward(
    inputs: Inputs, options: Divergence, memory: int | None, wanted: int, dtype: torch.dtype | None,
    kept: tuple[Tensor, Tensor] | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """The outputs in their order; `kept` and `kept_rows` are written if they are given. If `wanted`
    says that gradients may follow, a `memory` that is too small for their Backward raises here."""
    outputs = _outputs(inputs, options, wanted)
    given = inputs.in_dtype(dtype).flat()
    followed = gradients_of(wanted, inputs[:3])
    if kept is None and memory is not None and memory >= 0 and any(followed):
        _check_memory(given, options, memory, wanted, followed)
    if kept is not None and memory is not None:
        memory = _left(memory, sum(t.numel() * t.element_size() for t in kept))
    tensors = (*given, *_as_given(outputs, options), *(kept or (None, None)))
    _launch(_abi.LINEAR_DIVERGENCE_FORWARD, _FORWARD, tensors, options, memory)
    return outputs


def _left(memory: int, kept: int) -> int:
    """The bytes of `memory` that `kept` leaves for a workspace; below 0 it is an _abi.Room."""
    return memory - kept if memory >= 0 else min(memory + kept, -1)


def _made(given: Inputs, dtypes: Dtypes) -> list[Tensor | None]:
    return [
        None if t is None or dtype is None else _run._grad_of(t, dtype)
        for t, dtype in zip(given[:3], dtypes)
    ]


def _shaped(grads: list[Tensor | None], like: Tensor) -> list[Tensor | None]:
    if grads[0] is not None and like.dim() != 2:
        grads[0] = grads[0].view(like.shape)
    return grads


def forward_backward(
    inputs: Inputs, options: Divergence, memory: int | None, wanted: int, dtype: torch.dtype | None,
    dtypes: Dtypes,
) -> tuple[list[Tensor | None], list[Tensor | None]]:  # fmt: skip
    """The outputs, and the gradients of `dtypes` for an upstream gradient of 1."""
    outputs = _outputs(inputs, options, wanted)
    given = inputs.in_dtype(dtype).flat()
    grads = _made(given, dtypes)
    names = (*Inputs._fields, *OUTPUTS, *_GRADIENTS)
    tensors = (*given, *_as_given(outputs, options), *grads)
    _launch(_abi.LINEAR_DIVERGENCE_FORWARD_BACKWARD, names, tensors, options, memory)
    return outputs, _shaped(grads, inputs.input)


def rows_of_states(has_target: bool, wanted: int) -> tuple[str, ...]:
    """The rows of states(), for each token of a shard."""
    asked = [name for name in ("entropy", "teacher_entropy") if wanted & BITS[name]]
    return (*_STATES, *(("target_logit",) if has_target else ()), *asked)


def rows_of_sums(wanted: int) -> tuple[str, ...]:
    asked = [("slope_sum", wanted & SLOPE), ("acceptance", wanted & BITS["acceptance"])]
    return ("divergence_sum", *(name for name, bit in asked if bit))


def gradients_of_shard(wanted: int, inputs: Inputs) -> Dtypes:
    """The dtypes of a shard's gradients: the input's part is f32, because the ranks sum it."""
    first, *others = gradients_of(wanted, inputs[:3])
    return (None if first is None else torch.float32, *others)


def _of_shard(
    given: Inputs, options: Divergence, memory: int | None, made: dict[str, Tensor]
) -> None:
    """Runs Forward of a shard with the tensors `made` beside its inputs."""
    tensors = (*given, *(made.get(name) for name in _FORWARD[len(given) :]))
    _launch(_abi.LINEAR_DIVERGENCE_FORWARD, _FORWARD, tensors, options, memory)


def kept_logits_like(
    inputs: Inputs, dtype: torch.dtype | None, wanted: int
) -> tuple[Tensor, Tensor]:
    """`kept` and `kept_rows`, uninitialized, for what a shard's Forward keeps if `wanted` says so:
    the f32 logits of both heads, or of the student if the teacher's are given, with N and V rounded
    up to multiples of 64. The sizes may be symbolic."""
    like, of = inputs.input, dtype or inputs.input.dtype
    if not wanted & KEEP:
        return like.new_empty(0, dtype=of), like.new_empty(0, dtype=torch.float32)
    heads = 1 if inputs.teacher_logits is not None else 2
    tokens, vocab = inputs.tokens(), inputs.weight.shape[0]
    rows, blocks = -(-tokens // 64) * 64, -(-vocab // 64) * (heads * 4 // of.itemsize)
    return (
        like.new_empty(rows * blocks, 64, dtype=of),
        like.new_empty(tokens, 8, dtype=torch.float32),
    )


def _of_kept(kept: Tensor | None, kept_rows: Tensor | None) -> dict[str, Tensor]:
    if kept is None or kept_rows is None or not kept.numel():
        return {}
    return {"kept": kept, "kept_rows": kept_rows}


def states(
    inputs: Inputs, options: Divergence, memory: int | None, dtype: torch.dtype | None, wanted: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The states [k, N] f32 of a shard's own columns; rows_of_states() names the rows. And what is
    kept of the logits. A `memory` that is too small for the Backward which may follow raises
    here."""
    given = inputs.in_dtype(dtype).flat()
    if memory is not None and memory >= 0 and any(gradients_of(wanted, inputs[:3])):
        dtypes = gradients_of_shard(wanted, inputs)
        least, recommended = _bounds_of_shard(
            _views(given), _with_tf32(options, given.input), dtypes
        )
        if memory < least:
            raise _abi.too_small(memory, least, recommended)
    names = rows_of_states(given.target is not None, wanted)
    rows = given.input.new_empty((len(names), given.tokens()), dtype=torch.float32)
    kept = kept_logits_like(given, None, wanted)
    _of_shard(given, options, memory, {**dict(zip(names, rows)), **_of_kept(*kept)})
    return rows, *kept


def sums(
    inputs: Inputs, options: Divergence, memory: int | None, dtype: torch.dtype | None, wanted: int,
    whole: Tensor, kept: Tensor | None, kept_rows: Tensor | None,
) -> Tensor:  # fmt: skip
    """The sums [k, N] f32 over a shard's columns; rows_of_sums() names the rows. `whole` [4, N]:
    the whole vocabulary's states. `kept` and `kept_rows`: of states()."""
    given = inputs.in_dtype(dtype).flat()
    names = rows_of_sums(wanted)
    rows = given.input.new_empty((len(names), given.tokens()), dtype=torch.float32)
    made = {**dict(zip(_STATES, whole)), **dict(zip(names, rows)), **_of_kept(kept, kept_rows)}
    _of_shard(given, options, memory, made)
    return rows


def shard_backward(
    inputs: Inputs, options: Divergence, memory: int | None, dtype: torch.dtype | None, wanted: int,
    grad_loss: Tensor, whole: Tensor, slope_mean: Tensor | None, kept: Tensor | None,
    kept_rows: Tensor | None, part: Tensor | None = None, between: _device.Between = (),
) -> list[Tensor | None]:  # fmt: skip
    """The part of grad_input [N, D] from the shard's columns, and the gradients of its rows. `kept`
    and `kept_rows`: of states(). If `part` [N, D] f32 is given, grad_input's part is written there;
    `between`: see _run.launch."""
    given = inputs.in_dtype(dtype).flat()
    first, *dtypes = gradients_of_shard(wanted, inputs)
    grads = _made(given, (None if part is not None else first, *dtypes))
    if part is not None:
        grads[0] = part
    upstream = grad_loss.resolve_neg()
    if options.reduction == _abi.REDUCTION_NONE:
        upstream = upstream.reshape(-1)
    names = (*Inputs._fields, "grad_loss", *_GRADIENTS, "kept", "kept_rows", *_STATES, "slope_mean")
    of = _of_kept(kept, kept_rows)
    state = None
    if kept is not None and kept_rows is not None and of:
        state = Kept(
            kept, kept_rows, State(_key_of_shard(_views(given), _with_tf32(options, given.input)))
        )
    tensors = (
        *given, upstream, *grads, of.get("kept"), of.get("kept_rows"), *whole, slope_mean,
    )  # fmt: skip
    _launch(_abi.LINEAR_DIVERGENCE_BACKWARD, names, tensors, options, memory, state, between)
    return grads


@functools.lru_cache(_device.MOST_SHAPES)
def _bounds_of_shard(
    views: tuple[View, ...], options: Divergence, dtypes: Dtypes
) -> tuple[int, int]:
    """The bytes of a shard's Backward, whatever its tensors' addresses."""
    device = (views[0].device_type, views[0].device_index)
    forward = _kept.Forward(views, (), views, options, device, None)
    (grad_loss,) = _kept._outputs(forward, ("grad_loss",))
    if options.reduction != _abi.REDUCTION_NONE:
        grad_loss = grad_loss._replace(shape=(), stride=())
    given = (grad_loss, *_kept._outputs(forward, (*_STATES, "slope_mean")))
    gradients = _kept._gradients(forward, Keep(dtypes))
    plan = forward.plan(_abi.LINEAR_DIVERGENCE_BACKWARD, (*given, *gradients), {}, kept_key=0)
    return plan.minimum, plan.recommended


def backward(
    inputs: Inputs, options: Divergence, memory: int | None, dtype: torch.dtype | None,
    grad_loss: Tensor, dtypes: Dtypes, kept: tuple[Tensor, Tensor] | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients, from kept dz (then the teacher is not needed) or from both heads' logits."""
    given = inputs.in_dtype(dtype).flat()
    grads = _made(given, dtypes)
    upstream = grad_loss.resolve_neg()
    if options.reduction == _abi.REDUCTION_NONE:
        upstream = upstream.reshape(-1)
    names: tuple[str, ...] = (*Inputs._fields, "grad_loss", *_GRADIENTS)
    tensors: tuple[Tensor | None, ...] = (*given, upstream, *grads)
    state = None
    if kept is not None:
        bytes = sum(t.numel() * t.element_size() for t in kept)
        room = _kept.room_of(memory, bytes)
        state = Kept(*kept, State(_key(given, options), room))
        names, tensors = (*names, "kept", "kept_rows"), (*tensors, *kept)
    _launch(_abi.LINEAR_DIVERGENCE_BACKWARD, names, tensors, options, memory, state)
    return _shaped(grads, inputs.input)


@functools.lru_cache(_device.MOST_SHAPES)
def _key_of_shard(views: tuple[View, ...], options: Divergence) -> int:
    """The key of the logits that a shard's Forward of these inputs keeps."""
    device = (views[0].device_type, views[0].device_index)
    return _abi.kept_size(views, options, device, 1 << 62).key


def _with_tf32(options: Divergence, input: Tensor) -> Divergence:
    tf32 = input.is_cuda and input.dtype is torch.float32 and _device.allows_tf32()
    return options._replace(allow_tf32=tf32)


def _views(given: Inputs) -> tuple[View, ...]:
    return tuple(_run.view(name, t) for name, t in zip(given._fields, given) if t is not None)


def _key(given: Inputs, options: Divergence) -> int:
    """The key of what a Forward of this student kept. It does not depend on the teacher, but a
    Forward needs one: logits without memory are used."""
    first = _run.view("input", given.input)
    shape = (given.input.shape[0], given.weight.shape[0])
    teacher = first._replace(name="teacher_logits", shape=shape, stride=(shape[1], 1))
    views = [v for v in _views(given) if not v.name.startswith("teacher")]
    return _key_of((*views, teacher), _with_tf32(options, given.input))


@functools.lru_cache(_device.MOST_SHAPES)
def _key_of(views: tuple[View, ...], options: Divergence) -> int:
    return _whole(views, options).key


def _whole(views: Sequence[View], options: Divergence) -> KeptSize:
    """Everything that a Forward of these inputs can keep."""
    first, vocab = views[0], views[1].shape[0]
    device = (first.device_type, first.device_index)
    bytes = _abi.whole_kept(first.shape[0], vocab, first.dtype)
    return _abi.kept_size(views, options, device, bytes)


def _plans(
    views: tuple[View, ...], addresses: Sequence[int], options: Divergence, wanted: int,
    dtypes: Dtypes, kept: KeptSize | None,
) -> tuple[_abi.Plan, _abi.Plan]:  # fmt: skip
    """The plans of Forward and of the Backward that may follow it."""
    device = (views[0].device_type, views[0].device_index)
    forward = _kept.Forward(views, addresses, views, options, device, None)
    state = () if kept is None else _kept.views(kept, views[0])
    made = _kept._outputs(forward, [name for name, bit in BITS.items() if wanted & bit])
    (grad_loss,) = _kept._outputs(forward, ("grad_loss",))
    if options.reduction != _abi.REDUCTION_NONE:
        made[0], grad_loss = (v._replace(shape=(), stride=()) for v in (made[0], grad_loss))
    backward = forward
    if kept is not None:  # Backward is then given no teacher
        own = [not view.name.startswith("teacher") for view in views]
        backward = forward._replace(
            inputs=[v for v, stays in zip(views, own) if stays],
            addresses=[a for a, stays in zip(addresses, own) if stays],
        )
    gradients = _kept._gradients(forward, Keep(dtypes))
    return (
        forward.plan(_abi.LINEAR_DIVERGENCE_FORWARD, (*made, *state), {}),
        backward.plan(
            _abi.LINEAR_DIVERGENCE_BACKWARD, (grad_loss, *gradients, *state), {},
            kept_key=0 if kept is None else kept.key,
        ),
    )  # fmt: skip


def _check_memory(
    given: Inputs, options: Divergence, memory: int, wanted: int, dtypes: Dtypes
) -> None:
    addresses: tuple[int, ...] = ()
    if given.input.is_cuda:  # CUDA's plans depend on the tensors' alignment
        addresses = tuple(FRESH + (t.data_ptr() & 15) for t in given if t is not None)
    options = _with_tf32(options, given.input)
    least, recommended = _bounds(_views(given), addresses, options, wanted, dtypes)
    if memory < least:
        raise _abi.too_small(memory, least, recommended)


@functools.lru_cache(_device.MOST_SHAPES)
def _bounds(
    views: tuple[View, ...], addresses: tuple[int, ...], options: Divergence, wanted: int,
    dtypes: Dtypes,
) -> tuple[int, int]:  # fmt: skip
    plans = _plans(views, addresses, options, wanted, dtypes, None)
    return max(plan.minimum for plan in plans), max(plan.recommended for plan in plans)


def check_shapes(inputs: Inputs, options: Divergence, wanted: int) -> None:
    """Raises the errors of a call with these shapes, dtypes and options on the CPU, because the
    device on which the call will run is unknown."""
    flat, where = inputs.flat(), torch.device("cpu")
    views = tuple(_run.view(n, t, where) for n, t in zip(flat._fields, flat) if t is not None)
    _bounds(views, (), options, wanted & ~(FUSED | KEEP), (flat.input.dtype, None, None))


def fits(
    given: tuple[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...]], ...],
    options: tuple[Any, ...], device: str, index: int, memory: int, wanted: int,
    dtype: torch.dtype | None,
) -> bool:  # fmt: skip
    """Whether `memory` is enough for dz of all columns and the larger workspace of Forward and
    Backward, for tensors at any addresses; `given` are the inputs: name, dtype, shape, strides."""
    if device not in DEVICES:
        return False
    like = {
        name: torch.empty_strided(shape, stride, dtype=of, device="meta")
        for name, of, shape, stride in given
    }
    inputs = Inputs(**like)
    dtypes = gradients_of(wanted, inputs[:3])
    flat = inputs.in_dtype(dtype).flat()
    where = torch.device(device, index)
    if flat.input.dtype not in DTYPES:
        return False
    try:
        views = tuple(
            _run.view(name, t, where) for name, t in zip(flat._fields, flat) if t is not None
        )
        return _fits(views, Divergence(*options), abs(memory), wanted, dtypes)
    except LogitlessError:  # the call itself raises it
        return False


@functools.lru_cache(_device.MOST_SHAPES)
def _fits(
    views: tuple[View, ...], options: Divergence, memory: int, wanted: int, dtypes: Dtypes
) -> bool:
    size = _whole(views, options)
    if not size.columns or size.bytes >= memory:
        return False
    plans = _plans(views, (), options, wanted, dtypes, size)
    return size.bytes + max(plan.minimum for plan in plans) <= memory


# torch.compiler.assume_constant_result does the same, but imports the compiler.
fits._dynamo_marked_constant = True  # type: ignore[attr-defined]

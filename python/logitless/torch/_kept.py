# SPDX-License-Identifier: Apache-2.0
"""Kept state (docs/semantics.md): when Forward keeps something of the logits for Backward, and how
much beside both calls' workspaces."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless import _abi
from logitless._abi import KeptSize, Options, View
from logitless._errors import LogitlessError
from logitless._statistics import names_where
from logitless.torch import _device
from logitless.torch._device import DEVICES, DTYPES

_top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
FRESH = 64  # an address aligned like those of torch's new tensors
_MOST_TRIES = 8


class Keep(NamedTuple):
    """What a Forward has to know if a Backward may follow: what Backward will be asked for, and the
    bytes for kept state. If `bytes` is None, they are planned."""

    # The dtypes of the gradients; None: not needed; (): nothing is known.
    dtypes: tuple[torch.dtype | None, ...] = ()
    main_grad: Tensor | None = None  # [V, D] f32, to which grad_weight is added
    bytes: int | None = None  # for kept state alone; 0: nothing is kept
    spare: int = 0  # rows to allocate beyond those that are written
    consume: bool = True  # Backward may overwrite kept state with dz, if consumes()
    of_entropy: bool = False  # Backward may get a gradient of the entropy

    def asked(self) -> tuple[object, ...]:
        """The fields that decide about the plan, as a part of its key. No tensor is among them,
        because it would live as long as the plan."""
        main_grad = self.main_grad
        if main_grad is None:
            return self.dtypes, self.of_entropy, self.bytes
        return self.dtypes, self.of_entropy, main_grad.stride(), main_grad.data_ptr() & 15


class State(NamedTuple):
    """Facts about what Forward kept, without the two tensors."""

    key: int = 0  # 0: unknown, so Kept.key() computes it from the shapes
    room: int | None = None  # the bound of Backward's workspace in bytes; None: no bound
    tf32: bool = False  # whether Forward's f32 products were in TF32
    stream: int | None = None  # the stream to which the tensors belong


def consumes(of_f16: bool, of_entropy: bool) -> bool:
    """Whether dz overwrites kept state, which takes less memory."""
    return of_f16 or of_entropy


class Kept(NamedTuple):
    """Kept state as Backward takes it."""

    columns: Tensor  # [b * R, 64]
    rows: Tensor  # [N, 8] f32
    state: State
    consume: bool = False

    def key(self, inputs: Sequence[View], options: _abi.AnyOptions, device: tuple[int, int]) -> int:
        """The key of the Forward that kept it, or of one of the same shape and options."""
        if self.state.key:
            return self.state.key
        columns = self.columns
        bytes = _abi.kept_bytes(self.rows.shape[0], columns.numel(), columns.element_size())
        return _size_of(inputs, options, device, bytes).key


def _size_of(
    inputs: Sequence[View], options: _abi.AnyOptions, device: tuple[int, int], bytes: int
) -> KeptSize:
    """kept_size without chosen columns, on which kept state does not depend."""
    given = [view for view in inputs if view.name not in ("ids", "id_offsets")]
    return _abi.kept_size(given, options, device, bytes)


def hooked() -> bool:
    """Whether there are hooks on saved tensors (checkpoint, save_on_cpu). Then nothing is kept:
    kept state is too large to be moved, or to be made only to be thrown away."""
    return _top_hooks is None or _top_hooks(True) is not None


# The options of a token's loss. Whether state is kept does not depend on the other options, some of
# which may be symbols.
_NUMBERS = slice(
    Options._fields.index("label_smoothing"), Options._fields.index("temperature") + 1
)  # fmt: skip


def serves(dtype: torch.dtype, device: str, options: Options) -> bool:
    """Whether Backward uses kept state, for any sizes; the library answers."""
    numbers = tuple(options)[_NUMBERS]
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_scalar  # torch.compile has it

        numbers = tuple([guard_scalar(x) for x in numbers])
    return library_keeps(dtype, device, numbers)


def library_keeps(dtype: torch.dtype, device: str, numbers: tuple[Any, ...]) -> bool:
    return _library_keeps(dtype, device, numbers)


@functools.lru_cache(_device.MOST_SHAPES)
def _library_keeps(dtype: torch.dtype, device: str, numbers: tuple[Any, ...]) -> bool:
    options = Options(_abi.REDUCTION_NONE, -100, *numbers)
    return _abi.keeps(DEVICES.get(device, -1), DTYPES.get(dtype, -1), options)


def room_of(memory: int | None, kept: int) -> int | None:
    """What `memory` leaves for a workspace beside `kept` bytes of kept state."""
    return None if memory is None else abs(memory) - kept  # below 0 it is an _abi.Room


def shapes(
    tokens: Any, vocab: Any, dtype: torch.dtype, bytes: Any
) -> tuple[tuple[Any, int], tuple[Any, int]]:
    """The shapes of `kept` and `kept_rows` by the closed formula; the sizes may be symbolic."""
    code = DTYPES.get(dtype, -1)
    return _abi.kept_formula(tokens, vocab, code, bytes, torch.sym_min, torch.sym_max)


def views(size: KeptSize, like: View) -> tuple[View, View]:
    return (
        like._replace(name="kept", shape=size.shape, stride=(size.shape[1], 1)),
        like._replace(
            name="kept_rows", dtype=_abi.F32, shape=size.rows_shape, stride=(size.rows_shape[1], 1)
        ),
    )


class Forward(NamedTuple):
    """A Forward that may keep something."""

    views: Sequence[View]  # inputs, outputs and row state
    addresses: Sequence[int]  # of the views
    inputs: Sequence[View]  # the first of the views
    options: _abi.AnyOptions
    device: tuple[int, int]
    memory: int | None

    def ids(self) -> View:
        return next(view for view in self.inputs if view.name == "ids")

    def is_shard(self) -> bool:
        return self.options.vocab_total > self.inputs[1].shape[0]

    def plan(self, kind: int, more: Sequence[View], at: dict[str, int], **how: Any) -> _abi.Plan:
        """The plan of an op on the same inputs and on new tensors; `at` has the addresses of those
        that exist already."""
        addresses = list(self.addresses[: len(self.inputs)])
        if addresses:  # without them the workspace serves any alignment
            addresses += [at.get(view.name, FRESH) for view in more]
        return _abi.Plan(
            kind, (*self.inputs, *more), self.options, self.device, addresses=addresses, **how
        )


def _size_in(forward: Forward, bytes: int) -> KeptSize | None:
    size = _size_of(forward.inputs, forward.options, forward.device, max(bytes, 0))
    return size if size.columns else None


def choose(forward: Forward, keep: Keep) -> tuple[KeptSize, int | None] | None:
    """What Forward keeps, and the room left for a workspace; None if nothing fits."""
    bytes, memory = keep.bytes, forward.memory
    if bytes is None and memory is None:
        first, (vocab, _) = forward.inputs[0], forward.inputs[1].shape
        bytes = _abi.whole_kept(first.shape[0], vocab, first.dtype)
    if bytes is not None:
        size = _size_in(forward, bytes)
        return None if size is None else (size, room_of(memory, size.bytes))
    assert memory is not None
    return _choose(forward, keep, abs(memory))


def check_memory(forward: Forward, keep: Keep) -> None:
    """Refuses a `memory` that is enough for Forward but not for every Backward that may follow,
    with any upstream gradients and any number of times; when kept state has been consumed, Backward
    runs without it."""
    memory = forward.memory
    if memory is None or memory < 0 or not any(keep.dtypes):  # below 0 it is an _abi.Room
        return
    plans = _both(forward, keep, None, ())
    least = max(plan.minimum for plan in plans)
    if memory < least:
        raise _abi.too_small(memory, least, max(plan.recommended for plan in plans))


def _choose(forward: Forward, keep: Keep, budget: int) -> tuple[KeptSize, int] | None:
    size = _size_in(forward, budget)
    for _ in range(_MOST_TRIES):
        if size is None:
            return None
        kept = views(size, forward.inputs[0])
        least = max(plan.minimum for plan in _both(forward, keep, size, kept))
        if size.bytes + least <= budget:
            return size, budget - size.bytes
        size = _size_in(forward, budget - least)
    return None


def _outputs(forward: Forward, names: Sequence[str]) -> list[View]:
    """Dense f32 outputs with these names, [N] or at chosen columns [N, K]."""
    first = forward.inputs[0]
    tokens = first._replace(dtype=_abi.F32, shape=(first.shape[0],), stride=(1,))
    made = []
    for name in names:
        view = tokens
        if name in ("logits_at", "grad_logits_at"):
            shape = forward.ids().shape
            view = tokens._replace(shape=shape, stride=(*shape[1:], 1))
        made.append(view._replace(name=name))
    return made


def _gradients(forward: Forward, keep: Keep) -> list[View]:
    """Dense gradients, with strides in their tensors' order, like torch.empty_like."""
    dtypes = dict(zip(("input", "weight", "bias"), keep.dtypes))
    found = []
    for view in forward.inputs:
        dtype = dtypes.get(view.name)
        if dtype is None:
            continue
        if keep.main_grad is not None and view.name != "input":
            dtype = torch.float32
        stride: tuple[int, ...] = (1,)
        if len(view.shape) == 2:
            rows, columns = view.shape
            stride = (1, rows) if view.stride[0] < view.stride[1] else (columns, 1)
        found.append(view._replace(name=f"grad_{view.name}", dtype=DTYPES[dtype], stride=stride))
    return found


_ROW_STATE = ("row_reference", "row_log_sum")


def _both(
    forward: Forward, keep: Keep, size: KeptSize | None, kept: Sequence[View]
) -> list[_abi.Plan]:
    """The plans of Forward and of every Backward that may follow it, with the kept state, if
    any."""
    outputs = (*forward.views[len(forward.inputs) :], *kept)
    if kept and forward.is_shard():
        outputs = (*outputs, *_outputs(forward, ("anchor",)))
    plans = [forward.plan(_abi.LINEAR_CROSS_ENTROPY_FORWARD, outputs, {})]
    chooses = any(view.name == "ids" for view in forward.inputs)
    at_ids = ("grad_logits_at",) if chooses else ()
    statistics = _outputs(forward, ("grad_lse", "grad_target_logit", *at_ids))
    gradients, at = _gradients(forward, keep), {}
    if keep.main_grad is not None:
        at["grad_weight"] = keep.main_grad.data_ptr()
        gradients = [
            g._replace(stride=keep.main_grad.stride()) if g.name in at else g for g in gradients
        ]
    of_f16 = forward.inputs[0].dtype == _abi.F16
    entropies = (False, True) if keep.of_entropy else (False,)
    for (form, grad_loss), of_entropy in itertools.product(_losses(forward), entropies):
        more = [grad_loss, *statistics, *_outputs(forward, _ROW_STATE), *gradients, *kept]
        if of_entropy:
            more += _outputs(forward, ("entropy", "grad_entropy"))
        consume = size is not None and keep.consume and consumes(of_f16, of_entropy)
        plans.append(
            form.plan(
                _abi.LINEAR_CROSS_ENTROPY_BACKWARD, more, at, accumulate=bool(at),
                kept_key=0 if size is None else size.key, consume_kept=consume,
            )
        )  # fmt: skip
    return plans


def _losses(forward: Forward) -> list[tuple[Forward, View]]:
    """The forms in which Backward may get the loss's upstream gradient: that of its reduction, and
    one per token, which is used if the loss has none (_autograd.asked_of)."""
    (each,) = _outputs(forward, ("grad_loss",))
    if forward.options.reduction == _abi.REDUCTION_NONE:
        return [(forward, each)]
    options = forward.options._replace(reduction=_abi.REDUCTION_NONE, normalizer=0.0)
    stays = [view.name != "normalizer" for view in forward.inputs]
    without = forward._replace(
        inputs=list(itertools.compress(forward.inputs, stays)),
        addresses=list(itertools.compress(forward.addresses, stays)),
        options=options,
    )
    return [(forward, each._replace(shape=(), stride=())), (without, each)]


def planned_bytes(
    given: tuple[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...]], ...],
    outputs: tuple[str, ...], options: tuple[Any, ...], device: str, index: int, memory: int,
    of_entropy: bool,
) -> int:  # fmt: skip
    """The bytes of state that an op in torch.ops keeps. These bytes plus the workspace, of forward
    or of backward, fit into `memory` for tensors at any addresses. `given`: the op's inputs (name,
    dtype, shape, strides)."""
    if device not in DEVICES:
        return 0
    where = (DEVICES[device], index)
    return _planned_bytes(given, outputs, Options(*options), where, memory, of_entropy)


@functools.lru_cache(_device.MOST_SHAPES)
def _planned_bytes(
    given: Any, outputs: tuple[str, ...], options: Options, device: tuple[int, int], memory: int,
    of_entropy: bool,
) -> int:  # fmt: skip
    inputs, dtypes = [], {}
    listed = any(name == "id_offsets" for name, *_ in given)
    for name, dtype, shape, stride in given:
        if name == "input" and len(shape) != 2:
            shape = (math.prod(shape[:-1]), shape[-1])
            stride = (shape[1], 1)
        elif name in ("target", "token_weight", "temperature"):
            shape, stride = (math.prod(shape),), (1,)
        elif name == "ids" and len(shape) != 2 and not listed:
            shape = (math.prod(shape[:-1]), shape[-1])
            stride = (shape[1], 1)
        inputs.append(View(name, DTYPES.get(dtype, -1), *device, shape, stride))
        dtypes[name] = dtype
    forward = Forward(inputs, (), inputs, options, device, memory)
    made = _outputs(forward, (*outputs, *_ROW_STATE))
    for place, view in enumerate(made):
        if view.name in names_where("indexes"):
            made[place] = view._replace(dtype=_abi.I64)
        elif view.name == "loss" and options.reduction != _abi.REDUCTION_NONE:
            made[place] = view._replace(shape=(), stride=())
    wanted = tuple(map(dtypes.get, ("input", "weight", "bias")))
    if options.vocab_total:  # a shard's grad_input is a part in f32
        wanted = (torch.float32, *wanted[1:])
    keep = Keep(wanted, consume=False, of_entropy=of_entropy)
    try:
        chosen = choose(forward._replace(views=(*inputs, *made)), keep)
    except LogitlessError:  # the call itself raises it
        return 0
    return 0 if chosen is None else chosen[0].bytes


def usable(kept: Kept, rows: Tensor) -> Kept | None:
    """The kept state that a Backward on the current stream of a CUDA device may use: None if the
    setting of f32 products has changed since Forward."""
    index, state = rows.get_device(), kept.state
    if rows.dtype is torch.float32 and state.key and state.tf32 != _device.allows_tf32():
        return None
    if state.stream not in (None, torch._C._cuda_getCurrentRawStream(index)):
        stream = torch.cuda.current_stream(index)
        for tensor in kept[:2]:  # their memory belongs to the other stream
            tensor.record_stream(stream)
    return kept

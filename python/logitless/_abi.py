# SPDX-License-Identifier: Apache-2.0
"""The C interface (include/logitless/c.h) by ctypes: structs, loading the library, prepared
calls."""

from __future__ import annotations

import ctypes
import math
import os
import pathlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from ctypes import POINTER, byref
from typing import Any, NamedTuple, TypeAlias

from logitless._errors import LogitlessError, argument, error_of, in_arguments, invalid

i32, i64, u32, u64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64
f32, f64, void_p = ctypes.c_float, ctypes.c_double, ctypes.c_void_p

VERSION = (0, 1, 0)  # of the header with these structs; tests/python/test_abi.py compares them
F32, F16, BF16, I32, I64 = range(5)
CPU, CUDA, WEBGPU, REFERENCE = range(4)
REDUCTION_NONE, REDUCTION_SUM, REDUCTION_MEAN = range(3)
EMPTY_MEAN_ZERO, EMPTY_MEAN_NAN = range(2)
INPUT_LOGITS, INPUT_PROBABILITIES = range(2)
(
    SOFTMAX,
    CROSS_ENTROPY_FORWARD,
    CROSS_ENTROPY_BACKWARD,
    CROSS_ENTROPY_FORWARD_BACKWARD,
    LINEAR_CROSS_ENTROPY_FORWARD,
    LINEAR_CROSS_ENTROPY_BACKWARD,
    LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD,
    COMBINE,
    LINEAR_DIVERGENCE_FORWARD,
    LINEAR_DIVERGENCE_BACKWARD,
    LINEAR_DIVERGENCE_FORWARD_BACKWARD,
) = range(11)
FORWARD_KL, REVERSE_KL, JSD, SKEW_KL, TV = range(5)

TENSORS = (
    "logits", "probabilities", "input", "weight", "bias", "target", "loss", "token_weight",
    "vocab_weight", "normalizer", "lse", "target_logit", "entropy", "argmax", "row_reference",
    "row_log_sum", "weighted_logit_sum", "grad_loss", "grad_lse", "grad_target_logit",
    "grad_entropy", "grad_logits", "grad_input", "grad_weight", "grad_bias", "fault", "kept",
    "kept_rows",
)  # fmt: skip
# New fields are added at the end of the struct, so these groups are not sorted by meaning.
MORE_TENSORS = (
    "temperature", "logprob", "sum_p_squared", "mean_logit", "rank", "anchor",
    "shard_row_reference", "shard_row_log_sum", "shard_target_logit", "shard_entropy",
    "shard_argmax", "shard_weighted_logit_sum", "shard_sum_p_squared", "shard_mean_logit",
    "max_logprob", "shard_max_logprob",
)  # fmt: skip
# These follow the field `divergence`.
DIVERGENCE_TENSORS = (
    "teacher_input", "teacher_weight", "teacher_bias", "teacher_logits", "teacher_temperature",
    "teacher_entropy", "acceptance", "mass_above", "teacher_row_reference", "teacher_row_log_sum",
    "divergence_sum", "slope_sum", "slope_mean",
)  # fmt: skip
CHOSEN_TENSORS = ("ids", "logits_at", "grad_logits_at")
MOST_CHOSEN = 1024  # chosen columns per token, at most
TOP_TENSORS = ("top_logits", "top_ids", "shard_top_logits", "shard_top_ids")
MOST_LISTED = 256  # largest logits per token, at most
# For lists of chosen columns.
LIST_TENSORS = ("id_offsets",)


class _Sized(ctypes.Structure):
    """A struct whose first field is its size."""

    def __init__(self, **values: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(self), **values)


class Status(_Sized):
    _fields_ = [("struct_size", u32), ("code", i32), ("message", ctypes.c_char * 248)]


class Tensor(_Sized):
    _fields_ = [
        ("struct_size", u32), ("dtype", i32), ("data", void_p), ("byte_offset", u64),
        ("device_type", i32), ("device_index", i32), ("rank", i32), ("reserved", i32),
        ("shape", i64 * 2), ("stride", i64 * 2),
    ]  # fmt: skip


class LossOptions(_Sized):
    _fields_ = [
        ("struct_size", u32), ("reduction", i32), ("ignore_index", i64),
        ("label_smoothing", f32), ("z_loss", f32), ("logit_scale", f32), ("softcap", f32),
        ("temperature", f32), ("out_of_range", i32), ("empty_mean", i32), ("input_kind", i32),
        ("probability_floor", f32), ("allow_tf32", i32), ("normalizer", f64),
        ("vocab_start", i64), ("vocab_total", i64),
    ]  # fmt: skip


class DivergenceOptions(_Sized):
    _fields_ = [
        ("struct_size", u32), ("kind", i32), ("beta", f32), ("label_weight", f32),
        ("teacher_logit_scale", f32), ("teacher_softcap", f32), ("teacher_temperature", f32),
        ("reserved", i32),
    ]  # fmt: skip


class Op(_Sized):
    _fields_ = [
        ("struct_size", u32), ("kind", i32), ("options", POINTER(LossOptions)),
        ("accumulate_grad_weight", i32), ("reserved", i32),
        *((name, POINTER(Tensor)) for name in TENSORS),
        ("kept_key", u64), ("consume_kept", i32), ("reserved_2", i32),
        *((name, POINTER(Tensor)) for name in MORE_TENSORS),
        ("divergence", POINTER(DivergenceOptions)),
        *((name, POINTER(Tensor))
          for name in (*DIVERGENCE_TENSORS, *CHOSEN_TENSORS, *TOP_TENSORS, *LIST_TENSORS)),
        ("only_chosen", i32), ("grad_input_first", i32),
    ]  # fmt: skip


class Execution(_Sized):
    _fields_ = [
        ("struct_size", u32), ("device_type", i32), ("device_index", i32), ("reserved", i32),
        ("stream", void_p), ("executor", void_p),
    ]  # fmt: skip


class WorkspaceSize(_Sized):
    _fields_ = [
        ("struct_size", u32), ("reserved", u32), ("minimum", u64), ("recommended", u64),
        ("alignment", u64),
    ]  # fmt: skip


class WorkspaceBuffer(_Sized):
    _fields_ = [
        ("struct_size", u32), ("reserved", u32), ("data", void_p), ("bytes", u64),
        ("byte_offset", u64),
    ]  # fmt: skip


class Kept(_Sized):
    _fields_ = [
        ("struct_size", u32), ("reserved", u32), ("columns", i64), ("shape", i64 * 2),
        ("rows_shape", i64 * 2), ("bytes", u64), ("key", u64),
    ]  # fmt: skip


class PlanArguments(_Sized):
    _fields_ = [
        ("struct_size", u32), ("count", u32), ("addresses", POINTER(void_p)), ("stream", void_p),
        ("normalizer", f64), ("part", i32), ("reserved", i32),
    ]  # fmt: skip


def library_path() -> str:
    """The path of the shared library: $LOGITLESS_LIBRARY, or by default the one next to this
    file."""
    given = os.environ.get("LOGITLESS_LIBRARY")
    if given:
        return given
    return str(pathlib.Path(__file__).with_name("liblogitless.so"))


def _load() -> ctypes.CDLL:
    path = library_path()
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(
            f"logitless: cannot load {path}: {error}; install the wheel, or set LOGITLESS_LIBRARY "
            "to a liblogitless.so"
        ) from error
    version = library.logitless_version()
    if version // 100 != VERSION[0] * 100 + VERSION[1]:
        raise ImportError(
            f"logitless: {path} is version {version // 10000}.{version // 100 % 100}; this package "
            f"needs {VERSION[0]}.{VERSION[1]}"
        )
    library.logitless_describe_backend.argtypes = [
        i32, ctypes.c_char_p, ctypes.c_size_t, POINTER(Status)]  # fmt: skip
    return library


library = _load()
# Bound once, because looking a function up costs as much as calling it. They have no argtypes:
# ctypes does not need them to pass its own pointers.
_workspace = library.logitless_workspace
_plan_create = library.logitless_plan_create
_plan_run = library.logitless_plan_run
_plan_destroy = library.logitless_plan_destroy
_scale_each = library.logitless_scale_each
_add = library.logitless_add
_kept_size = library.logitless_kept_size
_keeps = library.logitless_keeps


class Options(NamedTuple):
    """The fields of LossOptions as plain values, without those that Python always leaves at their
    defaults."""

    reduction: int = REDUCTION_MEAN
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_scale: float = 1.0
    softcap: float = 0.0
    temperature: float = 1.0
    empty_mean: int = EMPTY_MEAN_ZERO
    normalizer: float = 0.0
    allow_tf32: bool = False
    vocab_start: int = 0
    vocab_total: int = 0  # 0: the weight holds the whole vocabulary

    def of_nll(self) -> bool:
        """Whether the loss of a token without weights is its negative log-probability."""
        return not (self.reduction or self.label_smoothing or self.z_loss)


class Divergence(NamedTuple):
    """The options of LinearDivergence ops as plain values: those of Options that they have, and
    those of DivergenceOptions."""

    reduction: int = REDUCTION_MEAN
    ignore_index: int = -100
    logit_scale: float = 1.0
    softcap: float = 0.0
    temperature: float = 1.0
    empty_mean: int = EMPTY_MEAN_ZERO
    normalizer: float = 0.0
    allow_tf32: bool = False
    kind: int = FORWARD_KL
    beta: float = 0.5
    label_weight: float = 0.0
    teacher_logit_scale: float = 1.0
    teacher_softcap: float = 0.0
    teacher_temperature: float = 1.0
    vocab_start: int = 0
    vocab_total: int = 0


AnyOptions: TypeAlias = Options | Divergence


class View(NamedTuple):
    """A tensor's name, dtype and geometry; its address is given when the call runs."""

    name: str
    dtype: int
    device_type: int
    device_index: int
    shape: Sequence[int]
    stride: Sequence[int]  # in elements


class KeptSize(NamedTuple):
    """What Forward keeps within a given number of bytes: docs/semantics.md, "Kept state"."""

    columns: int  # the number of kept columns, the first of the vocabulary; 0: none
    shape: tuple[int, int]  # of `kept`, in the input's dtype
    rows_shape: tuple[int, int]  # of `kept_rows`, in f32
    bytes: int  # of both
    key: int


_KEPT_BLOCK, _KEPT_GROUP, _KEPT_ROW_WIDTH = 64, 3, 8
KEPT_ELEMENT = {F32: 4, F16: 2, BF16: 2}  # bytes


def _padded(size: Any) -> Any:
    return (size + _KEPT_BLOCK - 1) // _KEPT_BLOCK * _KEPT_BLOCK


def kept_formula(
    tokens: Any, vocab: Any, dtype: int, bytes: Any, least: Any = min, most: Any = max
) -> tuple[tuple[Any, int], tuple[Any, int]]:
    """The shapes of `kept` and `kept_rows` within `bytes`, by the formula of docs/semantics.md.

    The sizes may be symbolic, if `least` and `most` accept symbols: their values are not read, so
    that one compiled graph works for all sizes. A `kept` of 0 rows means that nothing is kept.
    """
    element = KEPT_ELEMENT.get(dtype)
    if element is None:
        return (0, _KEPT_BLOCK), (tokens, _KEPT_ROW_WIDTH)
    rows = _padded(tokens)
    every = most((vocab + _KEPT_BLOCK - 1) // _KEPT_BLOCK, 1)
    room = (bytes - kept_bytes(tokens, 0, 0)) // most(kept_bytes(0, rows * _KEPT_BLOCK, element), 1)
    fits = least(most(room, 0), every)
    blocks = most(fits // _KEPT_GROUP * _KEPT_GROUP, fits // every * every)
    return (blocks * rows, _KEPT_BLOCK), (tokens, _KEPT_ROW_WIDTH)


def kept_bytes(tokens: Any, elements: Any, element: int) -> Any:
    """The bytes of `kept`, which has `elements` elements of `element` bytes, plus those of
    `kept_rows` [tokens, 8]."""
    return elements * element + 4 * _KEPT_ROW_WIDTH * tokens


def whole_kept(tokens: Any, vocab: Any, dtype: int) -> Any:
    """The bytes for kept state if `memory` does not bound it: all logits in the input's dtype, with
    N and V rounded up to multiples of 64, and kept_rows. The sizes may be symbolic."""
    return kept_bytes(tokens, _padded(tokens) * _padded(vocab), KEPT_ELEMENT.get(dtype, 0))


_INT64 = 1 << 63


def check_ignore_index(value: object) -> None:
    if not isinstance(value, int):
        raise error_of(3, f"ignore_index is {value!r}; allowed: a 64-bit integer")
    if not -_INT64 <= value < _INT64:
        raise invalid(f"ignore_index is {value}; allowed: a 64-bit integer")


def float_of(name: str, value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        raise invalid(f"{name} is an int beyond 1.8e+308; allowed: what a float holds") from None


F32_RANGE = "0, or 1.4e-45 to 3.4e+38 in size (float32)"
_NUMBERS = {
    name: kind
    for name, kind, *_ in (*LossOptions._fields_, *DivergenceOptions._fields_)
    if kind in (f32, f64)
}


def _check_number(name: str, value: object) -> None:
    """Refuses a number that the field's dtype would round to 0 or to infinity, which may mean
    something else: a softcap of 1e-46 would become 0, no softcap."""
    if not isinstance(value, (int, float)):
        raise error_of(3, f"{name} is a {type(value).__name__}; allowed: a Python number")
    if name not in _NUMBERS:
        return
    held = _NUMBERS[name](float_of(name, value)).value
    if (held == 0) != (value == 0) or (math.isinf(held) and not math.isinf(value)):
        raise invalid(f"{name} is {value}; allowed: {F32_RANGE}")


_OF_DIVERGENCE = {name for name, *_ in DivergenceOptions._fields_}


def check_options(options: AnyOptions) -> None:
    for name, value in zip(options._fields, options):
        _check_number(name, value)
    check_ignore_index(options.ignore_index)


def _options_struct(options: AnyOptions) -> LossOptions:
    check_options(options)
    given = {name: v for name, v in options._asdict().items() if name not in _OF_DIVERGENCE}
    return LossOptions(probability_floor=1e-9, **given)


def _divergence_struct(options: Divergence) -> DivergenceOptions:
    given = {name: v for name, v in options._asdict().items() if name in _OF_DIVERGENCE}
    return DivergenceOptions(**given)


class _Call:
    """The structs of a call, filled except for addresses. `fields`: the op's fields that are not
    tensors."""

    def __init__(
        self, kind: int, views: Sequence[View], options: AnyOptions | None,
        device: tuple[int, int], fields: Mapping[str, int],
    ) -> None:  # fmt: skip
        self.op = Op(kind=kind, **fields)
        if options is not None:
            self.options = _options_struct(options)
            self.op.options = ctypes.pointer(self.options)
        if isinstance(options, Divergence):
            self.divergence = _divergence_struct(options)
            self.op.divergence = ctypes.pointer(self.divergence)
        self.tensors = []
        for view in views:
            tensor = Tensor(
                dtype=view.dtype,
                device_type=view.device_type,
                device_index=view.device_index,
                rank=len(view.shape),
            )
            tensor.shape[: len(view.shape)] = view.shape
            tensor.stride[: len(view.stride)] = view.stride
            self.tensors.append(tensor)
            setattr(self.op, view.name, ctypes.pointer(tensor))
        self.execution = Execution(device_type=device[0], device_index=device[1])
        self.status = Status()


def _error(code: int, status: Status) -> Exception:
    return error_of(code, in_arguments(status.message.decode(errors="replace")))


class _Run:
    """The structs of one run of a plan, filled except for the arguments of run(). Only one run may
    use them at a time."""

    def __init__(self, plan: ctypes.c_void_p, tensors: int, bytes: int) -> None:
        self.addresses = (void_p * tensors)()
        self.arguments = PlanArguments(count=tensors, addresses=self.addresses)
        self.workspace = WorkspaceBuffer(bytes=bytes)
        self.status = Status()
        structs = (self.arguments, self.workspace, self.status)
        self.pointers = (plan, *map(ctypes.pointer, structs))


_PLACE = {name: place for place, (name, *_) in enumerate(Op._fields_)}


def _in_words(bytes: int) -> str:
    """A number of bytes as in "502272 (490.5 KiB)", rounded as the command line does it."""
    number, unit = float(bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if number >= 1024:
            number, unit = number / 1024, larger
    return f"{bytes} ({number:.1f} {unit})" if unit != "B" else f"{bytes}"


def too_small(memory: int, least: int, recommended: int) -> LogitlessError:
    """The error about a `memory` that is too small, in bytes."""
    return error_of(
        7,
        f"memory is {memory} bytes; allowed: >= {_in_words(least)}; "
        f"recommended: {_in_words(recommended)}",
    )


class Plan:
    """A prepared call: for one set of shapes, options and device. Threads may share it.

    `memory` bounds the workspace in bytes (None: what the core recommends); more bytes than
    `most` would not be used. `room` bounds it too, but never below the minimum; a negative
    `memory` means a `room` (see Room). `addresses`, in the views' order, tell the alignment of
    the tensors: the plan is then valid only for tensors with at least this alignment. Without
    addresses it is valid for all tensors, but the workspace may have to be larger.
    """

    def __init__(
        self, kind: int, views: Sequence[View], options: AnyOptions | None,
        device: tuple[int, int], *, accumulate: bool = False, kept_key: int = 0,
        consume_kept: bool = False, memory: int | None = None, room: int | None = None,
        most: int = 0, kept: KeptSize | None = None, addresses: Sequence[int] = (),
        only_chosen: bool = False, grad_input_first: bool = False,
    ) -> None:  # fmt: skip
        for view in views:
            if len(view.shape) > 2:
                raise error_of(
                    2, f"{argument(view.name)} has rank {len(view.shape)}; allowed: 0, 1, 2"
                )
        fields = {
            "accumulate_grad_weight": accumulate,
            "kept_key": kept_key,
            "consume_kept": consume_kept,
            "only_chosen": only_chosen,
            "grad_input_first": grad_input_first,
        }
        self._call = call = _Call(kind, views, options, device, fields)
        for tensor, address in zip(call.tensors, addresses):
            tensor.data = address
        size = WorkspaceSize()
        code = _workspace(byref(call.op), byref(call.execution), byref(size), byref(call.status))
        if code:
            raise _error(code, call.status)
        self.minimum: int = size.minimum
        self.recommended: int = size.recommended
        self.alignment: int = size.alignment
        self.bytes: int = self.recommended
        if memory is not None and memory < 0:  # a Room
            room = -memory
        elif memory is not None:
            if memory < self.minimum:
                raise too_small(memory, self.minimum, self.recommended)
            self.bytes = min(memory, max(most, self.recommended))
        if room is not None:
            self.bytes = max(self.minimum, min(room, max(most, self.recommended)))
        self.room = room
        self.kept = kept
        # Addresses are passed in the order of logitless_op's fields, which differs from the views'.
        self._order = sorted(range(len(views)), key=lambda i: _PLACE[views[i].name])
        self._plan: ctypes.c_void_p | None = None
        self._runs: list[_Run] = []  # those not in use; append and pop are atomic

    def _create(self) -> ctypes.c_void_p:
        """Creates the core's plan. This happens at the first run, because an object that is only
        asked for its bytes needs none."""
        plan, call = void_p(), self._call
        structs = byref(call.op), byref(call.execution), u64(self.bytes), byref(plan)
        code = _plan_create(*structs, byref(call.status))
        if code:
            raise _error(code, call.status)
        # Two threads may create one each; both are destroyed with this object.
        weakref.finalize(self, _plan_destroy, plan).atexit = False
        self._plan = plan
        return plan

    def run(
        self, addresses: Sequence[int], workspace: int, stream: int = 0, normalizer: float = 0.0,
        part: int = 0,
    ) -> None:  # fmt: skip
        """Runs on the tensors at `addresses`, in the views' order. `workspace` is the address of
        `self.bytes` bytes. A `normalizer` other than 0 replaces the planned one. `part`: see
        logitless_plan_arguments in c.h."""
        try:
            run = self._runs.pop()
        except IndexError:
            run = _Run(self._plan or self._create(), len(self._order), self.bytes)
        if len(addresses) != len(self._order):
            raise ValueError(f"{len(addresses)} addresses of {len(self._order)} tensors")
        run.addresses[:] = [addresses[i] for i in self._order]
        run.workspace.data = workspace
        arguments = run.arguments
        arguments.stream = stream
        arguments.normalizer = normalizer
        arguments.part = part
        code = _plan_run(*run.pointers)
        if code:
            raise _error(code, run.status)
        self._runs.append(run)


def kept_size(
    views: Sequence[View], options: AnyOptions, device: tuple[int, int], bytes: int
) -> KeptSize:
    """What a linear Forward of these inputs keeps within `bytes` bytes."""
    kind = LINEAR_CROSS_ENTROPY_FORWARD
    if isinstance(options, Divergence):
        kind = LINEAR_DIVERGENCE_FORWARD
    call = _Call(kind, views, options, device, {})
    kept = Kept()
    code = _kept_size(
        byref(call.op), byref(call.execution), u64(bytes), byref(kept), byref(call.status)
    )
    if code:
        raise _error(code, call.status)
    shape, rows_shape = kept.shape, kept.rows_shape
    return KeptSize(
        kept.columns, (shape[0], shape[1]), (rows_shape[0], rows_shape[1]), kept.bytes, kept.key
    )


def keeps(device_type: int, dtype: int, options: Options) -> bool:
    """Whether a linear Forward can keep state that Backward uses, at any size."""
    return bool(_keeps(device_type, dtype, byref(_options_struct(options))))


def follow_threads(threads: int) -> None:
    """Uses a framework's number of threads, unless $LOGITLESS_NUM_THREADS sets one for this
    library."""
    if not os.environ.get("LOGITLESS_NUM_THREADS"):
        library.logitless_set_num_threads(threads)


MOST_SCALED = 4  # vectors per logitless_scale_each, at most


class Scale:
    """The structs of one logitless_scale_each on a CUDA device, filled except for addresses and the
    stream. `vectors` (dtype, count): at most MOST_SCALED, contiguous. Only one call may use them at
    a time."""

    def __init__(self, vectors: Sequence[tuple[int, int]], device_index: int) -> None:
        cuda: dict[str, int] = {"device_type": CUDA, "device_index": device_index}
        self.values = [Tensor(dtype=dtype, rank=1, **cuda) for dtype, _ in vectors]
        for values, (_, count) in zip(self.values, vectors):
            values.shape[0], values.stride[0] = count, 1
        self.factor = Tensor(dtype=F32, rank=0, **cuda)
        self.execution = Execution(**cuda)
        self.status = Status()
        self._each = (POINTER(Tensor) * len(vectors))(*map(ctypes.pointer, self.values))
        self._count = i32(len(vectors))
        self._pointers = tuple(map(ctypes.pointer, (self.factor, self.execution, self.status)))

    def place(self, addresses: Iterable[int]) -> None:
        for values, address in zip(self.values, addresses, strict=True):
            values.data = address

    def run(self, factor: int, stream: int) -> None:
        """Multiplies every value by the f32 at the address `factor`. If the factor is 1, no value
        is read or written."""
        self.factor.data = factor
        self.execution.stream = stream
        code = _scale_each(self._each, self._count, *self._pointers)
        if code:
            raise error_of(code, self.status.message.decode(errors="replace"))


MOST_ADDED = 16  # parts per logitless_add, at most


def add(
    parts: Sequence[int], sum: int, dtype: int, count: int, device_index: int, stream: int
) -> None:
    """On a CUDA device: writes the sum of the f32 vectors at the addresses `parts`, each of `count`
    elements, to `sum`: added in f32 in their order, rounded once to `dtype`."""
    cuda: dict[str, int] = {"device_type": CUDA, "device_index": device_index, "rank": 1}
    views = [Tensor(dtype=F32, data=part, **cuda) for part in parts]
    views.append(Tensor(dtype=dtype, data=sum, **cuda))
    for view in views:
        view.shape[0], view.stride[0] = count, 1
    each = (POINTER(Tensor) * len(parts))(*map(ctypes.pointer, views[:-1]))
    execution = Execution(device_type=CUDA, device_index=device_index, stream=stream)
    status = Status()
    code = _add(each, i32(len(parts)), byref(views[-1]), byref(execution), byref(status))
    if code:
        raise error_of(code, status.message.decode(errors="replace"))


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


class Room(NamedTuple):
    """A `memory` that is only a wish: a call whose minimum is more than these bytes gets its
    minimum instead of an error."""

    bytes: int


def parse_memory(memory: Any) -> int | None:
    """The bytes of a `memory` argument: a number of bytes, or a text such as "64MiB". A Room
    becomes a negative number, because torch's ops take only numbers. None stays None."""
    if memory is None:
        return None
    if isinstance(memory, Room):
        return -max(memory.bytes, 1)
    bytes = memory
    if isinstance(memory, str):
        text = memory.strip()
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
        unit = _UNITS.get(text[len(digits) :].strip().upper())
        try:
            number = int(digits) if digits.isdecimal() else float(digits)
            bytes = None if unit is None else int(number * unit)
        except (ValueError, OverflowError):
            bytes = None
    elif isinstance(memory, float) and memory.is_integer():  # such as 1e9
        bytes = int(memory)
    if isinstance(bytes, bool) or not isinstance(bytes, int) or not 0 <= bytes < _INT64:
        given = f'"{memory}"' if isinstance(memory, str) else repr(memory)
        raise invalid(
            f'memory is {given}; allowed: bytes from 0 to 2^63 - 1, or a text such as "64MiB" or '
            '"1.5GB"'
        )
    return bytes


def describe_backend(device_type: int) -> str:
    """One line of text about a backend; raises if it is not available."""
    text = ctypes.create_string_buffer(512)
    status = Status()
    code = library.logitless_describe_backend(device_type, text, len(text), byref(status))
    if code:
        raise error_of(code, status.message.decode(errors="replace"))
    return text.value.decode(errors="replace")


def warmup(device_type: int, device_index: int) -> None:
    """Loads the device's kernels ahead of the first call (logitless_warmup in c.h)."""
    execution = Execution(device_type=device_type, device_index=device_index)
    status = Status()
    code = library.logitless_warmup(byref(execution), byref(status))
    if code:
        raise error_of(code, status.message.decode(errors="replace"))

# SPDX-License-Identifier: Apache-2.0
"""The C interface (include/logitless/c.h) by ctypes: as much of it as the comparison calls."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, byref
from typing import Any, NamedTuple

char, void_p, size_t = ctypes.c_char, ctypes.c_void_p, ctypes.c_size_t
i32, i64, u32, u64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64
f32, f64 = ctypes.c_float, ctypes.c_double

F32, F16, BF16, I32, I64 = range(5)
CPU = 0
REDUCTION_NONE, REDUCTION_SUM, REDUCTION_MEAN = range(3)
SOFTMAX = 0
CROSS_ENTROPY_FORWARD = 1
CROSS_ENTROPY_FORWARD_BACKWARD = 3
LINEAR_CROSS_ENTROPY_FORWARD = 4
LINEAR_CROSS_ENTROPY_BACKWARD = 5
LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD = 6

TENSORS = (
    "logits", "probabilities", "input", "weight", "bias", "target", "loss", "token_weight",
    "vocab_weight", "normalizer", "lse", "target_logit", "entropy", "argmax", "row_reference",
    "row_log_sum", "weighted_logit_sum", "grad_loss", "grad_lse", "grad_target_logit",
    "grad_entropy", "grad_logits", "grad_input", "grad_weight", "grad_bias", "fault",
)  # fmt: skip
MORE_TENSORS = ("temperature", "logprob", "sum_p_squared", "mean_logit", "rank")


class _Sized(ctypes.Structure):
    """A struct that carries its own size first."""

    def __init__(self, **values: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(self), **values)


class Status(_Sized):
    _fields_ = [("struct_size", u32), ("code", i32), ("message", char * 248)]


class Tensor(_Sized):
    _fields_ = [
        ("struct_size", u32), ("dtype", i32), ("data", void_p),
        ("byte_offset", u64), ("device_type", i32), ("device_index", i32),
        ("rank", i32), ("reserved", i32), ("shape", i64 * 2), ("stride", i64 * 2),
    ]  # fmt: skip


class LossOptions(_Sized):
    _fields_ = [
        ("struct_size", u32), ("reduction", i32), ("ignore_index", i64),
        ("label_smoothing", f32), ("z_loss", f32), ("logit_scale", f32),
        ("softcap", f32), ("temperature", f32), ("out_of_range", i32),
        ("empty_mean", i32), ("input_kind", i32), ("probability_floor", f32),
        ("allow_tf32", i32), ("normalizer", f64), ("vocab_start", i64),
        ("vocab_total", i64),
    ]  # fmt: skip

    def __init__(self, **values: Any) -> None:
        defaults = {"reduction": REDUCTION_MEAN, "ignore_index": -100, "logit_scale": 1.0,
                    "temperature": 1.0, "probability_floor": 1e-9}  # fmt: skip
        super().__init__(**{**defaults, **values})


class Op(_Sized):
    _fields_ = [
        ("struct_size", u32), ("kind", i32), ("options", POINTER(LossOptions)),
        ("accumulate_grad_weight", i32), ("reserved", i32),
        *((name, POINTER(Tensor)) for name in TENSORS),
        ("kept", POINTER(Tensor)), ("kept_rows", POINTER(Tensor)), ("kept_key", u64),
        ("consume_kept", i32), ("reserved_2", i32),
        *((name, POINTER(Tensor)) for name in MORE_TENSORS),
    ]  # fmt: skip


class WorkspaceSize(_Sized):
    _fields_ = [
        ("struct_size", u32), ("reserved", u32), ("minimum", u64),
        ("recommended", u64), ("alignment", u64),
    ]  # fmt: skip


class Kept(_Sized):
    _fields_ = [
        ("struct_size", u32), ("reserved", u32), ("columns", i64), ("shape", i64 * 2),
        ("rows_shape", i64 * 2), ("bytes", u64), ("key", u64),
    ]  # fmt: skip


class WorkspaceBuffer(_Sized):
    _fields_ = [
        ("struct_size", u32), ("reserved", u32), ("data", void_p),
        ("bytes", u64), ("byte_offset", u64),
    ]  # fmt: skip


def tensor(address: int, dtype: int, shape: tuple[int, ...]) -> Tensor:
    """A dense row-major view of host memory."""
    view = Tensor(dtype=dtype, data=address, rank=len(shape))
    view.shape[: len(shape)] = shape
    view.stride[: len(shape)] = (shape[1], 1) if len(shape) == 2 else (1,) * len(shape)
    return view


def make_op(kind: int, tensors: Mapping[str, Tensor], **options: Any) -> Op:
    """An op that owns the structs it points at."""
    op = Op(kind=kind)
    if kind != SOFTMAX:  # the softmax has no options
        op.options = ctypes.pointer(LossOptions(**options))
    for name, view in tensors.items():
        setattr(op, name, ctypes.pointer(view))
    return op


class Failure(RuntimeError):
    """A call did not return ok."""


class Sizes(NamedTuple):
    minimum: int  # bytes
    recommended: int
    alignment: int


class Library:
    def __init__(self, path: str, threads: int) -> None:
        self._library = ctypes.CDLL(path)
        self._library.logitless_describe_backend.argtypes = [
            i32, ctypes.c_char_p, size_t, POINTER(Status)]  # fmt: skip
        self.threads = self.set_threads(threads)

    def set_threads(self, threads: int) -> int:
        """Sets the pool's number of threads (0: what this process may use) and returns it."""
        return int(self._library.logitless_set_num_threads(threads))

    @property
    def version(self) -> str:
        number = self._library.logitless_version()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def _check(self, code: int, status: Status) -> None:
        if code != 0:
            raise Failure(f"status {code}: {status.message.decode()}")

    def describe(self) -> str:
        text, status = ctypes.create_string_buffer(256), Status()
        describe = self._library.logitless_describe_backend
        self._check(describe(CPU, text, len(text), byref(status)), status)
        return text.value.decode()

    def workspace(self, op: Op) -> Sizes:
        size, status = WorkspaceSize(), Status()
        self._check(
            self._library.logitless_workspace(byref(op), None, byref(size), byref(status)), status
        )
        return Sizes(size.minimum, size.recommended, size.alignment)

    def kept(self, op: Op, size: int) -> Kept:
        """The shapes, bytes and key of the state that a Forward keeps in `size` bytes."""
        kept, status = Kept(), Status()
        self._check(
            self._library.logitless_kept_size(
                byref(op), None, u64(size), byref(kept), byref(status)
            ),
            status,
        )
        return kept

    def run(self, op: Op, address: int, size: int) -> None:
        buffer, status = WorkspaceBuffer(data=address, bytes=size), Status()
        self._check(
            self._library.logitless_run(byref(op), byref(buffer), None, byref(status)), status
        )

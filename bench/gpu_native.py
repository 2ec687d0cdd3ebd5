# SPDX-License-Identifier: Apache-2.0
"""The library's C interface on CUDA tensors of PyTorch, as thin as the benchmark needs it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int32: 3, torch.int64: 4}
KINDS = {
    "softmax": 0,
    "forward": 1,
    "backward": 2,
    "forward_backward": 3,
    "linear_forward": 4,
    "linear_backward": 5,
    "linear_forward_backward": 6,
}
FIELDS = (
    "logits probabilities input weight bias target loss token_weight vocab_weight normalizer lse "
    "target_logit entropy argmax row_reference row_log_sum weighted_logit_sum grad_loss grad_lse "
    "grad_target_logit grad_entropy grad_logits grad_input grad_weight grad_bias fault"
).split()


class Tensor(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("dtype", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 2),
        ("stride", ctypes.c_int64 * 2),
    ]


class Options(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("reduction", ctypes.c_int32),
        ("ignore_index", ctypes.c_int64),
        *[
            (name, ctypes.c_float)
            for name in ("label_smoothing", "z_loss", "logit_scale", "softcap", "temperature")
        ],
        ("out_of_range", ctypes.c_int32),
        ("empty_mean", ctypes.c_int32),
        ("input_kind", ctypes.c_int32),
        ("probability_floor", ctypes.c_float),
        ("allow_tf32", ctypes.c_int32),
        ("normalizer", ctypes.c_double),
        ("vocab_start", ctypes.c_int64),
        ("vocab_total", ctypes.c_int64),
    ]


class Op(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("kind", ctypes.c_int32),
        ("options", ctypes.POINTER(Options)),
        ("accumulate_grad_weight", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        *[(name, ctypes.POINTER(Tensor)) for name in FIELDS],
    ]


class Execution(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("executor", ctypes.c_void_p),
    ]


class Size(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("minimum", ctypes.c_uint64),
        ("recommended", ctypes.c_uint64),
        ("alignment", ctypes.c_uint64),
    ]


class Buffer(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("byte_offset", ctypes.c_uint64),
    ]


class Status(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("code", ctypes.c_int32),
        ("message", ctypes.c_char * 248),
    ]


def sized(struct: Any) -> Any:
    struct.struct_size = ctypes.sizeof(struct)
    return struct


class Library:
    """run(kind, fields, options) on the current stream; workspace of a given number of bytes."""

    def __init__(self, path: str) -> None:
        torch.cuda.init()
        torch.mm(*(torch.ones(8, 8, device="cuda", dtype=torch.bfloat16),) * 2)  # loads cuBLASLt
        self.library = ctypes.CDLL(path)

    def prepare(self, kind: str, fields: dict[str, torch.Tensor], **options: Any) -> Prepared:
        return Prepared(self.library, kind, fields, options)


class Prepared:
    """A call whose structs are made once."""

    def __init__(
        self,
        library: ctypes.CDLL,
        kind: str,
        fields: dict[str, torch.Tensor],
        options: dict[str, Any],
    ) -> None:
        self.library = library
        self.keep = [self.tensor(t) for t in fields.values()]
        self.fields = fields
        self.options = sized(Options())
        self.options.reduction, self.options.ignore_index = 2, -100
        self.options.logit_scale = self.options.temperature = 1
        self.options.label_smoothing = self.options.z_loss = self.options.softcap = 0
        self.options.probability_floor = 1e-9
        self.options.out_of_range = self.options.empty_mean = self.options.input_kind = 0
        self.options.allow_tf32 = 0
        self.options.normalizer = 0
        self.options.vocab_start = self.options.vocab_total = 0
        for name, value in options.items():
            if name != "accumulate_grad_weight":
                setattr(self.options, name, value)
        self.op = sized(Op())
        self.op.kind = KINDS[kind]
        self.op.options = ctypes.pointer(self.options)
        self.op.accumulate_grad_weight = int(options.get("accumulate_grad_weight", False))
        for name, struct in zip(fields, self.keep, strict=True):
            setattr(self.op, name, ctypes.pointer(struct))
        device = next(iter(fields.values())).device.index or 0
        self.execution = sized(Execution())
        self.execution.device_type, self.execution.device_index = 1, device
        self.status = sized(Status())
        self.size = sized(Size())
        self.check(
            library.logitless_workspace(
                ctypes.byref(self.op),
                ctypes.byref(self.execution),
                ctypes.byref(self.size),
                ctypes.byref(self.status),
            )
        )

    @staticmethod
    def tensor(t: torch.Tensor) -> Tensor:
        struct = sized(Tensor())
        struct.dtype, struct.data = DTYPES[t.dtype], t.data_ptr()
        struct.device_type, struct.device_index = 1, t.device.index or 0
        struct.rank = t.dim()
        for d in range(t.dim()):
            struct.shape[d], struct.stride[d] = t.shape[d], t.stride(d)
        return struct

    def check(self, code: int) -> None:
        if code != 0:
            raise RuntimeError(f"status {code}: {self.status.message.decode()}")

    def workspace(self, size: int | None = None) -> torch.Tensor:
        size = self.size.recommended if size is None else max(size, self.size.minimum)
        self.memory = torch.empty(size, dtype=torch.uint8, device="cuda")
        self.buffer = sized(Buffer())
        self.buffer.data, self.buffer.bytes, self.buffer.byte_offset = (
            self.memory.data_ptr(),
            size,
            0,
        )
        return self.memory

    def __call__(self) -> None:
        self.execution.stream = torch.cuda.current_stream().cuda_stream
        self.check(
            self.library.logitless_run(
                ctypes.byref(self.op),
                ctypes.byref(self.buffer),
                ctypes.byref(self.execution),
                ctypes.byref(self.status),
            )
        )

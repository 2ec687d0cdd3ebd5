# SPDX-License-Identifier: Apache-2.0
"""The C interface on CUDA tensors of PyTorch: an op with its workspace, ready to be called."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import byref
from typing import Any

import native
import torch

CUDA = 1
NATIVE = {
    torch.float32: native.F32,
    torch.float16: native.F16,
    torch.bfloat16: native.BF16,
    torch.int32: native.I32,
    torch.int64: native.I64,
}


class Execution(native._Sized):
    _fields_ = [
        ("struct_size", native.u32), ("device_type", native.i32), ("device_index", native.i32),
        ("reserved", native.i32), ("stream", native.void_p), ("executor", native.void_p),
    ]  # fmt: skip


def view(tensor: torch.Tensor) -> native.Tensor:
    out = native.Tensor(dtype=NATIVE[tensor.dtype], data=tensor.data_ptr(), rank=tensor.dim())
    out.device_type, out.device_index = CUDA, tensor.device.index or 0
    for d in range(tensor.dim()):
        out.shape[d], out.stride[d] = tensor.shape[d], tensor.stride(d)
    return out


class Library:
    def __init__(self, path: str) -> None:
        torch.mm(*(torch.ones(8, 8, device="cuda", dtype=torch.bfloat16),) * 2)  # loads cuBLASLt
        self.library = ctypes.CDLL(path)

    def prepare(self, kind: int, tensors: Mapping[str, torch.Tensor], **options: Any) -> Call:
        return Call(self.library, kind, tensors, options)


class Call:
    """One op; calling it enqueues it on the current stream."""

    def __init__(
        self,
        library: ctypes.CDLL,
        kind: int,
        tensors: Mapping[str, torch.Tensor],
        options: Mapping[str, Any],
    ) -> None:
        self.library, self.tensors = library, dict(tensors)
        self.op = native.make_op(kind, {k: view(t) for k, t in tensors.items()}, **options)
        self.execution = Execution(device_type=CUDA)
        self.status = native.Status()
        size = native.WorkspaceSize()
        self._check(
            library.logitless_workspace(
                byref(self.op), byref(self.execution), byref(size), byref(self.status)
            )
        )
        self.minimum, self.recommended = size.minimum, size.recommended

    def with_workspace(self, size: int | None = None) -> Call:
        """`size` bytes, or the minimum where that is more; by default the recommended ones."""
        self.bytes = self.recommended if size is None else max(size, self.minimum)
        self.memory = torch.empty(self.bytes, dtype=torch.uint8, device="cuda")
        self.buffer = native.WorkspaceBuffer(data=self.memory.data_ptr(), bytes=self.bytes)
        return self

    def __call__(self) -> None:
        self.execution.stream = torch.cuda.current_stream().cuda_stream
        self._check(
            self.library.logitless_run(
                byref(self.op), byref(self.buffer), byref(self.execution), byref(self.status)
            )
        )

    def _check(self, code: int) -> None:
        if code != 0:
            raise native.Failure(f"status {code}: {self.status.message.decode()}")

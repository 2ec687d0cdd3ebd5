# SPDX-License-Identifier: Apache-2.0
"""The C interface on tensors of PyTorch, on CUDA or the CPU: an op with its workspace, ready to be
called."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import byref
from typing import Any

import native
import torch

DEVICES = {"cpu": native.CPU, "cuda": 1}
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
    out.device_type, out.device_index = DEVICES[tensor.device.type], tensor.device.index or 0
    for d in range(tensor.dim()):
        out.shape[d], out.stride[d] = tensor.shape[d], tensor.stride(d)
    return out


class Library:
    def __init__(self, path: str, device: str = "cuda") -> None:
        self.device = device
        self.library = ctypes.CDLL(path)
        # One workspace serves all: calls run one after the other on one stream.
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    def describe(self) -> str:
        text, status = ctypes.create_string_buffer(256), native.Status()
        describe = self.library.logitless_describe_backend
        describe.argtypes = [native.i32, ctypes.c_char_p, native.size_t, ctypes.c_void_p]
        code = describe(DEVICES[self.device], text, len(text), ctypes.addressof(status))
        return text.value.decode() if code == 0 else status.message.decode()

    def warmup(self) -> None:
        execution, status = Execution(device_type=DEVICES[self.device]), native.Status()
        if self.library.logitless_warmup(byref(execution), byref(status)) != 0:
            raise native.Failure(status.message.decode())

    def scratch(self, size: int) -> int:
        """The address of `size` bytes, the same ones for every call; larger ones move it."""
        if self.memory.numel() < size + 256:
            self.memory = torch.empty(0, dtype=torch.uint8, device=self.device)
            self.memory = torch.empty(size + 256, dtype=torch.uint8, device=self.device)
        return (self.memory.data_ptr() + 255) // 256 * 256

    def prepare(
        self,
        kind: int,
        tensors: Mapping[str, torch.Tensor],
        accumulate: bool = False,
        **options: Any,
    ) -> Call:
        return Call(self, kind, tensors, accumulate, options)


class Call:
    """One op; calling it enqueues it on the current stream."""

    def __init__(
        self,
        library: Library,
        kind: int,
        tensors: Mapping[str, torch.Tensor],
        accumulate: bool,
        options: Mapping[str, Any],
    ) -> None:
        self.library, self.tensors = library, dict(tensors)
        self.op = native.make_op(kind, {k: view(t) for k, t in tensors.items()}, **options)
        self.op.accumulate_grad_weight = accumulate
        self.execution = Execution(device_type=DEVICES[library.device])
        self.status = native.Status()
        size = native.WorkspaceSize()
        self._check(
            library.library.logitless_workspace(
                byref(self.op), byref(self.execution), byref(size), byref(self.status)
            )
        )
        self.minimum, self.recommended = size.minimum, size.recommended
        self.bytes = self.recommended

    def with_workspace(self, size: int | None = None) -> Call:
        """`size` bytes, or the minimum where that is more; by default the recommended ones."""
        self.bytes = self.recommended if size is None else max(size, self.minimum)
        self.library.scratch(self.bytes)
        return self

    def __call__(self) -> None:
        if self.library.device == "cuda":
            self.execution.stream = torch.cuda.current_stream().cuda_stream
        buffer = native.WorkspaceBuffer(data=self.library.scratch(self.bytes), bytes=self.bytes)
        self._check(
            self.library.library.logitless_run(
                byref(self.op), byref(buffer), byref(self.execution), byref(self.status)
            )
        )

    def _check(self, code: int) -> None:
        if code != 0:
            raise native.Failure(f"status {code}: {self.status.message.decode()}")

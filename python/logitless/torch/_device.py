# SPDX-License-Identifier: Apache-2.0
"""The core's numbers for dtypes and devices, and what a CUDA device needs besides the C call: its
stream, memory in the stream's order, torch's switch for TF32, gradients that wait for a factor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from logitless import _abi
from logitless._errors import LogitlessError

DTYPES = {
    torch.float32: _abi.F32,
    torch.float16: _abi.F16,
    torch.bfloat16: _abi.BF16,
    torch.int32: _abi.I32,
    torch.int64: _abi.I64,
}
DEVICES = {"cpu": _abi.CPU, "cuda": _abi.CUDA}

MOST_SHAPES = 1024  # entries of a cache by shapes and options
_scales: dict[tuple[object, ...], list[_abi.Scale]] = {}  # ready for reuse
_warm: set[int] = set()
# Only torch for CUDA has the first two, only torch 2.9 and later the third.
_allocate: Any = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None)
_release: Any = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", None)
_fp32_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)


def allows_tf32() -> bool:
    """Whether torch.backends.cuda.matmul.fp32_precision is "tf32", read more directly. This
    reflects every setter, old or new, while torch.get_float32_matmul_precision raises after the new
    ones."""
    if _fp32_precision is None:  # torch before 2.9 has the old setters only
        return torch.get_float32_matmul_precision() != "highest"
    return bool(_fp32_precision("cuda", "matmul") == "tf32")


def _warm_up(index: int) -> None:
    """Loads the device's kernels before the first call. If the library does not support this device
    or has no CUDA, that is no error here: the call itself raises it."""
    try:
        _abi.warmup(_abi.CUDA, index)
    except LogitlessError as error:
        if error.status not in ("not_supported", "backend_unavailable"):
            raise
    _warm.add(index)


Between = Sequence[Callable[[], None]]  # enqueued after the first part, and after the second


def run_cuda(
    plan: _abi.Plan, addresses: list[int], index: int, normalizer: float = 0.0,
    between: Between = (),
) -> None:  # fmt: skip
    if torch._C._cuda_getDevice() != index:  # the allocator uses the current device
        with torch.cuda.device(index):
            run_cuda(plan, addresses, index, normalizer, between)
        return
    if index not in _warm and not torch.cuda.is_current_stream_capturing():
        _warm_up(index)
    stream = torch._C._cuda_getCurrentRawStream(index)
    # As torch.cuda.caching_allocator_alloc does: memory of this stream without a tensor around it,
    # returned as soon as the kernels are queued, for whatever comes after them.
    workspace = _allocate(plan.bytes, stream)
    try:
        if not between:
            plan.run(addresses, workspace, stream, normalizer)
            return
        for part, enqueue in enumerate(between, 1):
            plan.run(addresses, workspace, stream, normalizer, part)
            enqueue()
        plan.run(addresses, workspace, stream, normalizer, len(between) + 1)
    finally:
        _release(workspace)


class Scale:
    """Dense gradients on a CUDA device that wait for their factor. The call is prepared in forward,
    so that backward, in its own thread, has little left to do."""

    __slots__ = ("_frame", "_frames", "_index")

    def __init__(self, values: Sequence[Tensor | None]) -> None:
        given = [v for v in values if v is not None]
        index = self._index = given[0].get_device()
        key = (index, *[(v.dtype, v.numel()) for v in given])
        frames = _scales.get(key)
        if frames is None:
            if len(_scales) >= MOST_SHAPES:
                _scales.clear()
            frames = _scales[key] = []
        self._frames = frames
        try:
            frame = frames.pop()
        except IndexError:
            frame = _abi.Scale([(DTYPES[v.dtype], v.numel()) for v in given], index)
        frame.place([v.data_ptr() for v in given])
        self._frame = frame

    def by(self, factor: Tensor) -> None:
        """Multiplies every value by the factor [], f32 on their device: in f32, rounded once, in
        one launch. If the factor is 1 the kernel touches no value; the host does not wait to know
        that. May be called only once."""
        if factor.is_neg():
            factor = factor.resolve_neg()
        self._frame.run(factor.data_ptr(), torch._C._cuda_getCurrentRawStream(self._index))
        self._frames.append(self._frame)

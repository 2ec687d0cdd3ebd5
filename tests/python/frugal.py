# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the default memory of functions with other libraries' signatures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from logitless.torch import default_memory
from reference import close

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = ((1, 1, 1), (3, 8, 70), (0, 8, 5), (700, 8, 300))  # N, D, V
CASES = [(dtype, sizes) for dtype in DTYPES for sizes in SIZES]


def check_default_is_enough(call: Callable[..., Tensor], *given: Any) -> None:
    """In the default memory, the first two tensors have the same gradients as in 1 GiB."""
    x, w, *_ = given

    def gradients() -> Iterator[tuple[Tensor, Tensor]]:
        for memory in (None, "1GiB"):
            x.grad = w.grad = None
            with default_memory(memory):
                call(*given).sum().backward()
            yield x.grad, w.grad

    for ours, free in zip(*gradients()):
        assert ours is not None and free is not None
        close(ours, free.double(), x.dtype)

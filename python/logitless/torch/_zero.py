# SPDX-License-Identifier: Apache-2.0
"""Parameters of DeepSpeed's ZeRO-3, which are whole only while their module is called or where they
are gathered. DeepSpeed is no dependency: its attributes tell such a parameter."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from logitless._errors import not_supported


def is_zero(tensor: Any) -> bool:
    return hasattr(tensor, "ds_status")


def _is_whole(parameter: Any) -> bool:
    return bool(parameter.ds_status.name == "AVAILABLE")


def held(name: str, tensor: Any) -> Any:
    """The tensor, or for a ZeRO-3 parameter a view, which keeps the whole memory alive: DeepSpeed
    takes that from the parameter before Backward reads it."""
    if not is_zero(tensor):
        return tensor
    if not _is_whole(tensor):
        raise not_supported(
            f"{name} is a parameter of DeepSpeed ZeRO-3 that is not whole here; allowed: inside "
            "deepspeed.zero.GatheredParameters([weight, bias]) in the model's forward, or a "
            "LinearCrossEntropyHead, whose call gathers it"
        )
    return tensor.view_as(tensor)


@contextlib.contextmanager
def gathered(*tensors: Tensor | None) -> Iterator[None]:
    """Makes parameters whole, on all ranks together. One that is whole already (tied to another
    module that is being called) is left to that module."""
    apart = [t for t in tensors if is_zero(t) and not _is_whole(t)]
    if not apart:
        yield
        return
    with sys.modules["deepspeed"].zero.GatheredParameters(list({id(t): t for t in apart}.values())):
        yield

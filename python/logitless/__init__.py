# SPDX-License-Identifier: Apache-2.0
"""Logitless: cross-entropy for language models without the logits.

`logitless.torch`, `logitless.jax`, `logitless.numpy` and `logitless.integrations` are imported when
they are first used, so that each needs only its own framework.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING

from logitless import _abi
from logitless._errors import (
    LogitlessError,
    LogitlessNotSupportedError,
    LogitlessRuntimeError,
    LogitlessTypeError,
    LogitlessValueError,
)

__version__ = ".".join(map(str, _abi.VERSION))
__all__ = [
    "LogitlessError",
    "LogitlessNotSupportedError",
    "LogitlessRuntimeError",
    "LogitlessTypeError",
    "LogitlessValueError",
    "describe_backend",
    "library_path",
    "num_threads",
    "set_num_threads",
]

library_path = _abi.library_path

_FRAMEWORKS = {"integrations": "torch", "jax": "jax", "numpy": "numpy", "torch": "torch"}

if TYPE_CHECKING:
    from logitless import integrations as integrations
    from logitless import jax as jax
    from logitless import numpy as numpy
    from logitless import torch as torch
else:

    def __getattr__(name: str) -> ModuleType:
        if name in _FRAMEWORKS:
            return importlib.import_module(f"logitless.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        there = [name for name, need in _FRAMEWORKS.items() if importlib.util.find_spec(need)]
        return sorted({*globals(), *there})


def describe_backend(device: str = "cpu") -> str:
    """One line of text about the backend of a `device`. For "cpu" it gives the instruction set in
    use and the number of threads; for "cuda" and "webgpu" the first device and its abilities.
    Raises LogitlessRuntimeError if this machine does not have the backend, and LogitlessValueError
    for any other `device`."""
    kinds = {"cpu": _abi.CPU, "cuda": _abi.CUDA, "webgpu": _abi.WEBGPU}
    if device not in kinds:
        raise LogitlessValueError(f"device is {device!r}; allowed: {', '.join(kinds)}")
    return _abi.describe_backend(kinds[device])


def num_threads() -> int:
    """The number of threads in the library's own pool, which computes the calls on the CPU."""
    return int(_abi.library.logitless_num_threads())


def set_num_threads(threads: int) -> int:
    """Sets the number of `threads` in the library's pool, and returns the new number. 0 asks for
    the default: LOGITLESS_NUM_THREADS, OMP_NUM_THREADS, or the CPUs that this process may use.

    Results do not depend on the number. Calls of `logitless.torch` on the CPU set it when
    torch.get_num_threads() has changed, unless LOGITLESS_NUM_THREADS is set. Raises
    LogitlessTypeError unless `threads` is an int, and LogitlessValueError if it is negative.
    """
    if isinstance(threads, bool) or not isinstance(threads, int):
        raise LogitlessTypeError(f"threads is a {type(threads).__name__}; allowed: an int >= 0")
    if not 0 <= threads < 1 << 31:
        raise LogitlessValueError(f"threads is {threads}; allowed: >= 0 (0: the default)")
    return int(_abi.library.logitless_set_num_threads(threads))

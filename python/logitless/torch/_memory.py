# SPDX-License-Identifier: Apache-2.0
"""The default of `memory` for calls that do not pass it, such as calls through signatures of other
libraries, which have no such argument."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from logitless._abi import parse_memory
from logitless._errors import wrong_dtype

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Setting:
    """One value of the default. An object, because two blocks may set equal values."""

    def __init__(self, memory: int | None) -> None:
        self.memory = memory


# The process's setting, then those of open `with` blocks: the last one is in force. Readers take no
# lock, because no thread ever sees a list half changed.
_settings = [_Setting(None)]
_lock = threading.Lock()


def default() -> int | None:
    """Bytes, or None if no default was set."""
    return _settings[-1].memory


# Makes the result a constant of a compiled graph. With a guard it could become a symbol, for which
# no workspace can be planned. torch.compiler.assume_constant_result does the same, but imports the
# compiler.
default._dynamo_marked_constant = True  # type: ignore[attr-defined]


def source() -> str:
    """The name of the function that set the default in force, for error messages."""
    return "default_memory" if len(_settings) > 1 else "set_default_memory"


def set_default_memory(memory: int | str | None) -> None:
    """Sets the default of `memory`, in bytes or as "512MiB", for all later calls of this process,
    on any thread, that do not pass it: of logitless.torch's functions, and of the integrations for
    torch. With None, functions of logitless.torch take the memory that the library recommends, and
    each integration what its docstring says, mostly that of the replaced function. An open
    `with default_memory(...)` overrides it. A compiled function uses the value that was in force
    when it was traced. Raises LogitlessValueError for a wrong `memory`."""
    _settings[0].memory = parse_memory(memory)


class default_memory(contextlib.ContextDecorator):
    """`with default_memory("512MiB"):`, or `@default_memory("512MiB")` above a function, sets the
    default as set_default_memory does, for the duration of the block or of each call. It applies to
    all threads, because autograd recomputes a checkpoint on a thread of its own. Afterwards the
    earlier default is in force, in whatever order the blocks of several threads end. A compiled
    function uses the value that was in force when it was traced, so put the block around its first
    call, not inside it."""

    def __init__(self, memory: int | str | None) -> None:
        self._memory = parse_memory(memory)
        self._open: list[_Setting] = []  # one object may be entered several times

    def __call__(self, func: _Function) -> _Function:
        """Decorates a function: the default holds during each of its calls."""
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isclass)
        if not callable(func) or any(is_kind(func) for is_kind in kinds):
            raise wrong_dtype(
                f"default_memory decorates {func!r}; allowed: a function that is done when it "
                "returns, no class, generator or coroutine (`with default_memory(...)` inside it)"
            )
        return super().__call__(func)

    def __enter__(self) -> None:
        setting = _Setting(self._memory)
        with _lock:
            self._open.append(setting)
            _settings.append(setting)

    def __exit__(self, *_: object) -> None:
        with _lock:
            _settings.remove(self._open.pop())

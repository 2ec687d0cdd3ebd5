# SPDX-License-Identifier: Apache-2.0
"""The `memory` of calls that are given none, such as those through signatures of other libraries'
losses, which have no such argument."""

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
    """One value of the default; settings are told apart by identity."""

    def __init__(self, memory: int | None) -> None:
        self.memory = memory


# The process's setting, then those of open `with` blocks: the last one holds. Readers take no lock,
# because a list is never seen half changed.
_settings = [_Setting(None)]
_lock = threading.Lock()


def default() -> int | None:
    """Bytes, or None if no default was set."""
    return _settings[-1].memory


# torch.compiler.assume_constant_result does the same, but imports the compiler: a constant in the
# graph, because a guard could turn the number into a symbol, for which nothing can be planned.
default._dynamo_marked_constant = True  # type: ignore[attr-defined]


def source() -> str:
    """What set the default that holds, for an error about it."""
    return "default_memory" if len(_settings) > 1 else "set_default_memory"


def set_default_memory(memory: int | str | None) -> None:
    """Sets the `memory` of every later call of this process, on whatever thread, that is given
    none (or None), in logitless.torch and logitless.integrations. In bytes or as "512MiB"; None is
    what each takes by itself: in logitless.torch what the library recommends, in
    logitless.integrations what the function that it replaces takes. An open `with
    default_memory(...)` goes before it. A compiled function takes the value that held when it was
    traced."""
    _settings[0].memory = parse_memory(memory)


class default_memory(contextlib.ContextDecorator):
    """`with default_memory("512MiB"):`, or `@default_memory("512MiB")` above a function: as
    set_default_memory for the time of the block or of each call, on all threads (a checkpoint is
    run again on one of autograd's). What held before holds again after it, in whatever order the
    blocks of several threads end. A compiled function takes the value that held when it was traced,
    so that the block stands around its first call and not inside it."""

    def __init__(self, memory: int | str | None) -> None:
        self._memory = parse_memory(memory)
        self._open: list[_Setting] = []  # one object may be entered several times

    def __call__(self, func: _Function) -> _Function:
        """Decorates a function, for the time of each of its calls."""
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

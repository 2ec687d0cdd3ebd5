# SPDX-License-Identifier: Apache-2.0
"""The core's status as exceptions. A message names the field, its value and what is allowed, in the
names of the Python function's arguments."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class LogitlessError(Exception):
    """Any error of the library; `status` is the name of the core's status code."""

    status = "internal"


class LogitlessValueError(LogitlessError, ValueError):
    """A value, shape or address that is not allowed."""


class LogitlessTypeError(LogitlessError, TypeError):
    """A dtype that is not allowed."""


class LogitlessRuntimeError(LogitlessError, RuntimeError):
    """A device or backend that does not serve the call."""


class LogitlessNotSupportedError(LogitlessRuntimeError, NotImplementedError):
    """Something this library does not do; the message says what to do instead."""


# By code of c.h: its name and its exception.
_STATUS: dict[int, tuple[str, type[LogitlessError]]] = {
    1: ("invalid_argument", LogitlessValueError),
    2: ("wrong_shape", LogitlessValueError),
    3: ("wrong_dtype", LogitlessTypeError),
    4: ("wrong_device", LogitlessRuntimeError),
    5: ("misaligned", LogitlessValueError),
    6: ("unknown_enum", LogitlessValueError),
    7: ("workspace_too_small", LogitlessValueError),
    8: ("target_out_of_range", LogitlessValueError),
    9: ("backend_unavailable", LogitlessRuntimeError),
    10: ("not_supported", LogitlessNotSupportedError),
    11: ("device_error", LogitlessRuntimeError),
    12: ("internal", LogitlessRuntimeError),
}


def error_of(code: int, message: str) -> LogitlessError:
    """The exception of a status code other than ok."""
    name, kind = _STATUS.get(code, ("internal", LogitlessRuntimeError))
    error = kind(message)
    error.status = name
    return error


def invalid(message: str) -> LogitlessError:
    return error_of(1, message)


def wrong_shape(message: str) -> LogitlessError:
    return error_of(2, message)


def wrong_dtype(message: str) -> LogitlessError:
    return error_of(3, message)


def wrong_device(message: str) -> LogitlessError:
    return error_of(4, message)


def not_supported(message: str) -> LogitlessError:
    return error_of(10, message)


def _replaced(text: str, names: Mapping[str, str]) -> str:
    """`text` with each name that is a whole word replaced, once."""
    longest_first = sorted(map(re.escape, names), key=len, reverse=True)
    words = rf"(?<![\w.-])(?:{'|'.join(longest_first)})(?!\w)"
    return re.sub(words, lambda found: names[found.group()], text)


# The core's names for arguments of linear_cross_entropy, cross_entropy and softmax, which all
# bindings share. The core's weight and bias are the head's.
_ARGUMENTS = {
    "weight": "linear_weight",
    "bias": "linear_bias",
    "vocab_weight": "weight",
    "options.normalizer": "normalizer",
    "id_offsets": "offsets",
    "probabilities": "logits",  # softmax in place calls it logits
    "grad_logits": "logits",  # cross_entropy in place calls it logits
    "0: counted": "None: counted",  # in Python 0 is a normalizer
}


_DTYPES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i32": "int32", "i64": "int64"
}  # fmt: skip


def argument(name: str) -> str:
    """The argument that the core calls `name`."""
    return _ARGUMENTS.get(name, name)


def in_arguments(message: str) -> str:
    """A message of the core with Python's names of arguments and dtypes."""
    return _replaced(message, {**_ARGUMENTS, **_DTYPES})


def placed(
    message: str, shape: Sequence[int], shift: int = 0, name: str = "target",
    ranks: tuple[int, int] | None = None,
) -> str:  # fmt: skip
    """A message about one element of a tensor that the core was given flat, with the caller's
    index: "target[8] is 99; ..." for a target of `shape` (2, 5) becomes "target[1, 3] (flat:
    target[8]) is 99; ...". Other messages are returned unchanged.

    For a matrix whose rows have that `shape`, "ids[8, 1] is 99; ..." becomes "ids[1, 3, 1] (flat:
    ids[8, 1]) is 99; ...".

    `shape` is the caller's. `shift`: the places along the last dimension by which the binding had
    moved the elements before the core counted them. `name`: the tensor's name in the message.
    `ranks` (dim, size): the core counted a tensor that was gathered from `size` ranks along that
    dimension of `shape`, and the message names the rank too.

        except LogitlessError as error:
            error.args = (placed(str(error), target.shape, shift),)
            raise

    or, where a microsecond does not matter, `with places(target.shape, shift):`."""
    found = re.search(rf"(?<![\w.-]){re.escape(name)}\[(\d+)((?:, \d+)*)\](?= is )", message)
    if found is None:
        return message
    whole = list(shape)
    if ranks is not None:
        whole[ranks[0]] *= ranks[1]
    flat = int(found[1]) + shift
    if flat >= math.prod(whole):  # not an element of the caller's tensor
        return message
    index: list[int] = []
    for size in reversed(whole):
        flat, place = divmod(flat, size)
        index.insert(0, place)
    of_rank = ""
    if ranks is not None:
        dim = ranks[0]
        rank, index[dim] = divmod(index[dim], shape[dim])
        of_rank = f" on rank {rank}"
    flat = 0
    for place, size in zip(index, shape):
        flat = flat * size + place
    column = found[2] if index else found[2].removeprefix(", ")
    within = f"{', '.join(map(str, index))}{column}"
    where = f"[{within}]" if within else ""
    also = f" (flat: {name}[{flat}{found[2]}])" if len(index) > 1 else ""
    return f"{message[: found.start()]}{name}{where}{also}{of_rank}{message[found.end() :]}"


@contextlib.contextmanager
def places(
    shape: Sequence[int], shift: int = 0, name: str = "target",
    ranks: tuple[int, int] | None = None,
) -> Iterator[None]:  # fmt: skip
    """A context in which errors name their element as `placed` does."""
    try:
        yield
    except LogitlessError as error:
        error.args = (placed(str(error), shape, shift, name, ranks),)
        raise


def renames(names: Mapping[str, str]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function that calls another one of this package with differently named
    arguments, so that errors have its own names. `names`: {the other's: its own}."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def renamed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return function(*args, **kwargs)
            except LogitlessError as error:
                error.args = (_replaced(str(error), names),)
                raise

        return renamed

    return decorate


def refuses(old: Mapping[str, str]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function whose keywords were renamed. `old`: {a name that it no longer takes: the
    one that it takes instead}."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name, now in old.items():
                if name in kwargs:
                    error = LogitlessTypeError(
                        f"{name} is no argument of {function.__name__}; allowed: {now}, its name "
                        "now"
                    )
                    error.status = "invalid_argument"
                    raise error
            return function(*args, **kwargs)

        return checked

    return decorate


def entropy_detached(entropy: object) -> bool:
    """Whether linear_logprob returns the entropy without a gradient."""
    if isinstance(entropy, str) and entropy != "detached":
        raise invalid(f'entropy is {entropy!r}; allowed: False, True, "detached"')
    return entropy == "detached"


# linear_logprob's former names; elsewhere `weight` is the class weights.
OLD_OF_LOGPROB = {"weight": "linear_weight", "bias": "linear_bias"}

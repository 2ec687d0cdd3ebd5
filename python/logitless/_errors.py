# SPDX-License-Identifier: Apache-2.0
"""The core's status codes as exceptions. A message names the argument of the Python function, its
value and what is allowed."""

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
    """A device or backend that is missing, fails, or cannot run the call; or an internal error."""


class LogitlessNotSupportedError(LogitlessRuntimeError, NotImplementedError):
    """Something this library does not do; the message says what to do instead."""


# The status codes of c.h: the name and the exception of each.
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
    """`text`, in which each whole word that is a key of `names` is replaced by its value.
    Replacements are not replaced again."""
    longest_first = sorted(map(re.escape, names), key=len, reverse=True)
    words = rf"(?<![\w.-])(?:{'|'.join(longest_first)})(?!\w)"
    return re.sub(words, lambda found: names[found.group()], text)


# The core's names of arguments, and the names that Python's functions have for them, in all
# bindings. In the core `weight` and `bias` are those of the head.
_ARGUMENTS = {
    "weight": "linear_weight",
    "bias": "linear_bias",
    "vocab_weight": "weight",
    "options.normalizer": "normalizer",
    "id_offsets": "offsets",
    "probabilities": "logits",  # softmax_ writes them over its argument
    "grad_logits": "logits",  # cross_entropy_ writes them over its argument
    "0: counted": "None: counted",  # in Python 0 is a valid normalizer
}


_DTYPES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i32": "int32", "i64": "int64"
}  # fmt: skip


def argument(name: str) -> str:
    """The Python name of the argument that the core calls `name`."""
    return _ARGUMENTS.get(name, name)


def in_arguments(message: str) -> str:
    """A message of the core with Python's names of arguments and dtypes."""
    return _replaced(message, {**_ARGUMENTS, **_DTYPES})


def placed(
    message: str, shape: Sequence[int], shift: int = 0, name: str = "target",
    ranks: tuple[int, int] | None = None,
) -> str:  # fmt: skip
    """A message about one element of a tensor that the core saw flattened, with the index in the
    caller's tensor: "target[8] is 99; ..." for a target of `shape` (2, 5) becomes "target[1, 3]
    (flat: target[8]) is 99; ...". Other messages are returned unchanged.

    For a matrix whose rows have that `shape`, "ids[8, 1] is 99; ..." becomes "ids[1, 3, 1] (flat:
    ids[8, 1]) is 99; ...".

    `shape`: that of the caller's tensor. `shift`: the places along the last dimension by which the
    binding had moved the elements before the core saw them. `name`: the tensor's name in the
    message. `ranks` (dim, size): the core saw a tensor that was gathered from `size` ranks along
    dimension `dim`, and the message also names the rank.

    It is used like this:

        except LogitlessError as error:
            error.args = (placed(str(error), target.shape, shift),)
            raise

    The context manager `places` does the same, and takes a microsecond in every call."""
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
    """A context manager that rewrites the messages of errors with `placed`."""
    try:
        yield
    except LogitlessError as error:
        error.args = (placed(str(error), shape, shift, name, ranks),)
        raise


def renames(names: Mapping[str, str]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function that calls another function of this package, whose arguments have other
    names, so that error messages have the decorated function's names. `names`: {name in the called
    function: name in the decorated one}."""

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
    """Decorates a function whose keyword arguments were renamed, so that an old name is an error
    that gives the new one. `old`: {old name: new name}."""

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


# linear_logprob's former names of arguments. In other functions `weight` is the class weights.
OLD_OF_LOGPROB = {"weight": "linear_weight", "bias": "linear_bias"}

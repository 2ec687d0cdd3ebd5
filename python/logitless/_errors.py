# SPDX-License-Identifier: Apache-2.0
"""The core's status as exceptions. A message names the field, its value and what is allowed."""

from __future__ import annotations


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


# Code of c.h: its name, its exception.
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

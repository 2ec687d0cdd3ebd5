# SPDX-License-Identifier: Apache-2.0
"""Checks arguments of other libraries that have no counterpart here."""

from __future__ import annotations

from typing import Any

from logitless._errors import not_supported


def only(name: str, value: Any, *allowed: Any) -> None:
    """Raises unless `value` is one of `allowed`."""
    if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
        texts = ", ".join(map(repr, allowed))
        raise not_supported(f"{name} is {value!r}, which has no counterpart here; allowed: {texts}")

# SPDX-License-Identifier: Apache-2.0
"""Defines ops of torch's dispatcher, in the namespace `logitless`.

All are defined from this file: for each file that registers a fake, torch looks through all
modules of the process, which takes milliseconds of an import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from logitless._errors import not_supported

ONCE_ONLY = (
    "logitless: the loss can be differentiated once only; its gradients have no gradient (use "
    "torch.nn.functional.cross_entropy for double backward)"
)

_make_library: Any = torch.library.Library
_library = _make_library("logitless", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    on_host: Callable[..., Any] | None = None,
    rule: Callable[..., Any] | None = None,
    setup: Callable[..., None] | None = None,
) -> None:
    """An op for CPU and CUDA tensors. `on_host` is its kernel for the CPU if that is another one;
    `rule` and `setup` are torch.library.register_autograd's backward and setup_context."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=_TAGS)
    _library.impl(name, on_host or kernel, "CPU")
    _library.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"logitless::{name}", fake, lib=_library)
    if rule is not None:
        torch.library.register_autograd(
            f"logitless::{name}", rule, setup_context=setup, lib=_library
        )


def compose(schema: str, kernel: Callable[..., Any]) -> None:
    """An op that is composed of other ops, through which torch.compile traces."""
    _library.define(schema, tags=_TAGS)
    _library.impl(schema.partition("(")[0], kernel, "CompositeImplicitAutograd")


def once_only(ctx: Any, *_: Any) -> Any:
    """The `rule` of an op that makes gradients."""
    raise not_supported(ONCE_ONLY)

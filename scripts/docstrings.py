#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the docstrings of the public modules: complaints_of_all(), a line each.
scripts/python_reference.py and tests/python/test_reference.py call it.

- Every public name has a docstring of its own, not one that it inherits.
- A name in `backquotes` is an argument, a field, or what one of the modules has. So no docstring
  outlives what it speaks of.
- An argument of our own functions is named in the function's docstring, or in that of a function
  which it names: options are described once."""

from __future__ import annotations

import builtins
import importlib
import inspect
import keyword
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

# The submodules of logitless.integrations are added by documented().
MODULES = (
    "logitless",
    "logitless.torch",
    "logitless.torch.parallel",
    "logitless.jax",
    "logitless.numpy",
    "logitless.integrations",
)
QUOTED = re.compile(r"`([A-Za-z_][\w.]*)`")
SIGN = "`"


def documented() -> list[types.ModuleType]:
    """The modules that have pages."""
    ours = [importlib.import_module(name) for name in MODULES]
    integrations = ours[-1]
    others = (getattr(integrations, name) for name in integrations.__all__)
    return ours + [module for module in others if inspect.ismodule(module)]


def complaints_of_all() -> list[str]:
    modules = documented()
    known = known_names(modules)
    return [
        line
        for module in modules
        for line in complaints(module, known, own="integrations" not in module.__name__)
    ]


def members(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """The public functions and classes, and the functions of these classes."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
    ]
    for name in names:
        value = getattr(module, name)
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        yield name, value
        for own, attribute in vars(value).items() if inspect.isclass(value) else ():
            function = getattr(attribute, "__func__", attribute)
            if not own.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{own}", function


def parameters(value: Any) -> list[inspect.Parameter]:
    """The parameters of a function, or of a class's constructor."""
    try:
        return list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):  # a builtin
        return []


def arguments(function: Any) -> set[str]:
    """The arguments that a docstring must name."""
    names = {p.name for p in parameters(function) if p.kind is not p.VAR_KEYWORD}
    return names - {"self", "cls"}


def known_names(modules: Iterable[types.ModuleType]) -> set[str]:
    """The names that a docstring may have in backquotes."""
    known = {*dir(builtins), *keyword.kwlist}
    for module in modules:
        known |= {*module.__name__.split("."), *vars(module), *getattr(module, "__all__", ())}
        for name, value in members(module):
            known |= {name.split(".")[-1], *(p.name for p in parameters(value))}
            if inspect.isclass(value):
                known |= {*dir(value), *getattr(value, "__annotations__", ())}
    return known


def complaints(module: types.ModuleType, known: set[str], own: bool) -> Iterator[str]:
    """`known`: known_names of all modules. `own`: whether the functions are ours, whose arguments
    have to be described, and not another library's."""
    for name, value in members(module):
        where, text = f"{module.__name__}.{name}", value.__doc__ or ""
        if not text:
            yield f"{where} has no docstring of its own"
            continue
        if text.count(SIGN) % 2:
            yield f"{where}: a {SIGN} of its docstring is not closed"
        for quoted in QUOTED.findall(text):
            if quoted.split(".")[-1] not in known:
                yield f"{where}: its docstring names `{quoted}`, which is nowhere"
        if own and inspect.isroutine(value):
            for argument in sorted(arguments(value) - named(module, value)):
                yield f"{where}: its docstring does not say what {argument} is"


def named(module: types.ModuleType, function: Any) -> set[str]:
    """The words of a function's docstring, and of those of the functions that it names."""
    torch = importlib.import_module("logitless.torch")
    words: set[str] = set()
    waiting, seen = [(module, function)], set()
    while waiting:
        of, next_ = waiting.pop()
        if next_ in seen:
            continue
        seen.add(next_)
        text = next_.__doc__ or ""
        found = set(re.findall(r"\w+", text))
        words |= found
        functions = {name: f for name, f in members(of) if inspect.isroutine(f)}
        waiting += [(of, functions[word]) for word in found if word in functions]
        if "logitless.torch" in text and hasattr(torch, next_.__name__):
            waiting.append((torch, getattr(torch, next_.__name__)))
    return words

# SPDX-License-Identifier: Apache-2.0
"""The matrix that a PEFT adapter on the head multiplies hidden states by.

A plain LoRA is one product with a joined weight. For any other adapter, its own forward is called
with the unit vectors: the results are the columns of the matrix, and PEFT's code gives their
gradients. It is also called with three of the call's hidden states, and the results must be those
of the matrix. A call that is new and trains also compares the gradients.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from logitless._errors import LogitlessError
from logitless.integrations import _rows
from logitless.integrations._heads import (
    REPLACED,
    is_adapter,
    is_off,
    is_plain_lora,
    name_of,
    refused,
    weight_within,
    with_lora,
)

RandomState = dict[torch.device, Tensor]


def joined(adapter: Any, own: Callable[..., Any], input: Tensor, new: bool) -> tuple[Any, ...]:
    """(input [..., K], weight [V, K], bias [V] or None) whose logits are those of the adapter on
    the head. `own` is its forward; `new` says that no such call has been checked yet."""
    if is_plain_lora(adapter):
        return with_lora(adapter, input)
    return _with_matrix(adapter, own, input, new)


def _with_matrix(
    adapter: Any, own: Callable[..., Any], input: Tensor, new: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Like joined, for any adapter. Its forward of 0 is the bias, that of a unit vector a column
    plus the bias, in f32. For products in 16 bits the matrix is a sum of two 16-bit ones: what the
    adapter adds may be less than the rounding error of one."""
    if torch.compiler.is_compiling():
        raise refused(f"a {name_of(adapter)} in compiled code, where it cannot be checked")
    theirs = weight_within(adapter)
    kind, input = theirs.device.type, input.to(theirs.device)
    with torch.autocast(kind, enabled=False):
        units = torch.eye(input.shape[-1], device=input.device)
        rows, before = _rows.chosen(input.detach()).float(), random_state(adapter)
        if new:
            with drawing_again(before):
                # A refusal on a copy leaves the adapter's own buffers as they were.
                _called(_f32_copy(adapter), adapter, rows)
        out = _in_f32(adapter, own, torch.cat([torch.zeros_like(units[:1]), units]))
        bias, weight = out[0], (out[1:] - out[0]).T.contiguous()
        after = random_state(adapter)
        with drawing_again(before):
            drew = not _same(before, after)
            made, known = _check_products(adapter, own, rows, (weight, bias), after, new, drew)
        if new:
            with drawing_again(before):
                again = _in_f32(adapter, own, rows)
            _check_again(adapter, made, again)
            if made.requires_grad:
                _check_gradients(adapter, rows, made, known, again, drew)
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else theirs.dtype
    if dtype is torch.float32:
        return input, weight, bias
    high = weight.to(dtype)
    low = (weight.detach() - high.detach()).to(dtype)
    return torch.cat([input, input], -1), torch.cat([high, low], -1), bias


def random_state(adapter: Any) -> RandomState:
    devices = {torch.device("cpu"), weight_within(adapter).device}
    return {device: _read(device) for device in devices}


def _read(device: torch.device) -> Tensor:
    state: Tensor = (
        torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    )
    return state


@contextlib.contextmanager
def drawing_again(before: RandomState) -> Iterator[None]:
    """A context whose random numbers begin at the state `before`. Afterwards the state is again the
    one from before the context."""
    after = {device: _read(device) for device in before}
    _set(before)
    try:
        yield
    finally:
        _set(after)


def _set(states: RandomState) -> None:
    for device, state in states.items():
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)


def _same(one: RandomState, other: RandomState) -> bool:
    return all(torch.equal(state, other[device]) for device, state in one.items())


def _check_products(
    adapter: Any, own: Callable[..., Any], rows: Tensor, matrix: tuple[Tensor, Tensor],
    after: RandomState, new: bool, drew: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(the adapter's result for rows [3, D] of the call, that of its matrix and bias), [3, V] each.
    The adapter is called with the random state that the unit vectors' call began with: a dropout of
    weights draws the same numbers, a dropout of tokens others. The state tells this if the number
    of drawn numbers moves it (the CPU's does); otherwise the results differ. With gradients
    enabled, a `new` call makes the rows require them."""
    gradients = new and torch.is_grad_enabled()
    rows.requires_grad_(gradients)
    with torch.set_grad_enabled(gradients):
        made, known = _in_f32(adapter, own, rows), rows @ matrix[0].T + matrix[1]
    if not _same(after, random_state(adapter)):
        raise refused(f"a {name_of(adapter)} that draws random numbers for every token{_HINT}")
    if not _near(made, known, _bound(rows)):
        raise _no_matrix(adapter, drew)
    return made, known


def _check_again(adapter: Any, made: Tensor, again: Tensor) -> None:
    if not _near(made, again, 1e-5):
        raise refused(f"a {name_of(adapter)} that makes other logits when called again")


def _check_gradients(
    adapter: Any, rows: Tensor, made: Tensor, known: Tensor, again: Tensor, drew: bool
) -> None:
    """Raises unless the gradients are those of the matrix. Only they show what an adapter that adds
    nothing yet will add."""
    leaves = [rows, *(p for p in adapter.parameters() if p.requires_grad)]
    count = torch.arange(1, made.numel() + 1, device=made.device)
    factors = (1.7 * count).sin().view_as(made)
    theirs, ours, repeated = (
        torch.autograd.grad(
            value, leaves, factors, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for value in (made, known, again)
    )
    least = 1e-6 * float(torch.stack([grad.abs().amax() for grad in theirs]).amax())
    for a, b, c in zip(theirs, ours, repeated):
        if not _near(a, c, 1e-5, least):
            raise refused(f"a {name_of(adapter)} that makes other logits when called again")
        if not _near(a, b, 10 * _bound(rows), least):
            raise refused(
                f"a {name_of(adapter)} whose gradients are not those of a matrix times the hidden "
                f"states{_DREW if drew else ''}"
            )


_HINT = " (a dropout: its rate must be 0, or the model in eval mode)"
_DREW = f", and that draws random numbers{_HINT}"


def _no_matrix(adapter: Any, drew: bool = False) -> LogitlessError:
    return refused(
        f"a {name_of(adapter)} whose logits are no matrix times the hidden states"
        f"{_DREW if drew else ''}"
    )


def _bound(rows: Tensor) -> float:
    return 2e-3 if rows.is_cuda and torch.backends.cuda.matmul.allow_tf32 else 1e-4


def _near(one: Tensor, other: Tensor, bound: float, least: float = 0.0) -> bool:
    """Whether differences are within bound · max |other| + least. NaN passes: the loss is NaN."""
    one, other = one.detach(), other.detach()
    return not bool((one - other).abs().amax() > bound * other.abs().amax() + least)


def _in_f32(adapter: Any, own: Callable[..., Any], rows: Tensor) -> Tensor:
    """The adapter's forward of f32 rows [K, D]: own, or that of a copy if it has other dtypes."""
    tensors = [*adapter.parameters(), *adapter.buffers()]
    if any(t.is_floating_point() and t.dtype is not torch.float32 for t in tensors):
        return _called(_f32_copy(adapter), adapter, rows)
    return _called(own, adapter, rows)


def _called(own: Callable[..., Any], adapter: Any, rows: Tensor) -> Tensor:
    """own(rows). Raises if that changes a buffer, or a parameter that was cast for this call: the
    patch calls the adapter more often than the model would. The adapter's own parameters may
    change (some adapters project them)."""
    module = own if isinstance(own, torch.nn.Module) else adapter
    kinds = {name: p.dtype for name, p in adapter.named_parameters()}

    def kept() -> dict[str, Tensor]:
        cast = ((n, p) for n, p in module.named_parameters() if kinds[n] is not p.dtype)
        return {name: t.detach() for name, t in (*module.named_buffers(), *cast)}

    before = {name: t.clone() for name, t in kept().items()}
    made: Tensor = own(rows[None])[0]
    after = kept()
    for name in sorted({*before, *after}):
        if name not in before or name not in after or not _equal(before[name], after[name]):
            raise refused(f"a {name_of(adapter)} that keeps something of a call ({name})")
    return made


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers are the same; NaN is the same as NaN."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _f32_copy(module: Any, made_of: Callable[[Tensor], Tensor] = Tensor.float) -> Any:
    """A copy in f32 with its class's own forward. Other threads may use the module, so it is not
    changed. `made_of` makes the copy's parameters, except those of the base layer."""
    made = object.__new__(_without_del(type(module)))
    made.__dict__.update(
        {
            k: copy.copy(v) if isinstance(v, (dict, list)) else v
            for k, v in vars(module).items()
            if k not in REPLACED
        }
    )
    for kind, change in (("_parameters", made_of), ("_buffers", Tensor.float)):
        made.__dict__[kind] = {
            name: change(t) if t is not None and t.is_floating_point() else t
            for name, t in vars(module)[kind].items()
        }
    made.__dict__["_modules"] = {
        name: within if within is None else _f32_copy(
            within, Tensor.float if name == "base_layer" else made_of
        )
        for name, within in vars(module)["_modules"].items()
    }  # fmt: skip
    return made


def _without_del(cls: Any) -> Any:
    """The class without its __del__: that of PEFT's OSF removes hooks that a copy shares."""
    if not hasattr(cls, "__del__"):
        return cls
    own = {"__del__": lambda _: None, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), own)


def _moved(parameter: Tensor) -> Tensor:
    """The parameter with something added, because many adapters begin by adding nothing."""
    count = torch.arange(1, parameter.numel() + 1, device=parameter.device)
    return parameter.float() + 0.05 * (2.3 * count).sin().view_as(parameter)


def check_linear(adapter: Any) -> None:
    """Raises if calls of a copy show that the adapter is no matrix of hidden states alone."""
    if not is_adapter(adapter) or is_off(adapter) or is_plain_lora(adapter):
        return
    weight = weight_within(adapter)
    count = torch.arange(1, 2 * weight.shape[1] + 1, device=weight.device)
    one, other = (0.9 * count).sin().view(2, -1).float()
    before, made = random_state(adapter), []
    with (
        torch.no_grad(),
        torch.autocast(weight.device.type, enabled=False),
        drawing_again(before),
    ):
        own = _f32_copy(adapter, _moved)
        try:
            for row in (one + other, one, other, torch.zeros_like(one)):
                made.append(_called(own, adapter, row[None]))
        except (TypeError, ValueError) as error:
            if isinstance(error, LogitlessError):
                raise
            raise refused(
                f"a {name_of(adapter)} that cannot be called with hidden states alone ({error})"
            ) from error
        drawn = not _same(before, random_state(adapter))
    both, a, b, none = made
    # If random numbers were drawn, the check of the first call decides.
    if not drawn and not _near(both, a + b - none, _bound(both)):
        raise _no_matrix(adapter)

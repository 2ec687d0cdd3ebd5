# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that is split over mesh axes, inside jax.shard_map: every device holds V/P rows of
the weight; hidden states and targets are the same on all P.

    forward    each device's Forward on its columns; one all-gather of the rows' states, 12 bytes a
               token and device, and 4 more for each of entropy, smoothing and the like; every
               device folds them in the axis' order (_shards.py)
    backward   each device's Backward on its columns, from the global states: its grad_weight is
               done, its grad_input is a part in f32; the parts are exchanged and added up in the
               axis' order

One program runs on every device, and options are part of it: vocab_start cannot differ. A device is
told that its columns are the first ones, and gets targets and class weights rotated by its start:
(target - start) mod V is below V/P where the target is its own, and another shard's otherwise.

What an upstream gradient is. With check_vma=True JAX's types say it: the outputs are the same on
all devices, and so are their gradients; hidden states of which every device has a copy of its own
get their own part of the gradient. With check_vma=False nothing says it. jax.grad inside of
jax.shard_map hands every device the whole upstream gradient; jax.grad around it hands each 1/P,
and JAX's own collectives take gradients for parts that add up. The caller says which.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from logitless import _abi
from logitless._errors import (
    LogitlessError,
    argument,
    invalid,
    not_supported,
    wrong_dtype,
    wrong_shape,
)
from logitless.jax import _shards
from logitless.jax._call import Call, upstream_of
from logitless.jax._run import Array, Tensor, pvary, run, varying
from logitless.jax._shards import State, Tokens

_F32 = np.dtype(np.float32)
_WHOLE, _PARTS = "whole", "parts"
_PRIMALS = ("input", "weight", "bias")
_EXTRA = ("entropy", "weighted_logit_sum", "sum_p_squared", "mean_logit")  # in the order of State
_OWN_IGNORED = np.iinfo(np.int32).min
_GATHERS_INVARIANTLY = "to" in inspect.signature(lax.all_gather).parameters


class Shard(NamedTuple):
    axes: tuple[str, ...]
    size: int  # P
    checked: bool  # jax.shard_map checks types
    upstream: str | None
    part_of_input: bool  # the gradient of a device's hidden states is its own part


# --- the axis ---


def _axes_of(axis_name: Any) -> tuple[str, ...]:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        raise wrong_dtype(f"axis_name is {axis_name!r}; allowed: a str, or a tuple of them")
    if len(set(names)) < len(names):
        raise invalid(f"axis_name is {axis_name!r}; allowed: every axis once")
    return names


def _size_of(axes: tuple[str, ...]) -> int:
    try:
        return int(lax.psum(1, axes))
    except NameError:
        raise invalid(
            f"axis_name is {axes if len(axes) > 1 else axes[0]!r}; allowed: manual axes of the "
            "mesh, inside of jax.shard_map"
        ) from None


def _shard_of(axes: tuple[str, ...], operands: dict[str, Array], upstream: Any) -> Shard:
    """Checks what JAX's types say, if they are there."""
    if upstream not in (None, _WHOLE, _PARTS):
        raise invalid(f"upstream is {upstream!r}; allowed: None, {_WHOLE!r}, {_PARTS!r}")
    size = _size_of(axes)
    found = varying(lax.axis_index(axes))  # without axes of one device
    if not found:
        return Shard(axes, size, False, upstream, upstream == _PARTS)
    for name in ("weight", "bias"):
        if name in operands and not found <= varying(operands[name]):
            raise invalid(
                f"{argument(name)} is the same on all devices of the mesh axes {sorted(found)}; "
                "allowed: one that is split over axis_name"
            )
    of_input = varying(operands["input"]) & found
    if of_input and of_input != found:
        raise invalid(
            f"input varies over the mesh axes {sorted(of_input)} of {sorted(found)}; allowed: all "
            "of axis_name, or none"
        )
    for name in sorted(set(operands) - set(_PRIMALS)):
        if varying(operands[name]) & found:
            raise invalid(
                f"{argument(name)} varies over the mesh axes {sorted(found)}; allowed: the same on "
                "all devices of axis_name, in its type too (as jax.lax.all_gather makes it with "
                "to='invarying')"
            )
    return Shard(axes, size, True, None, bool(of_input))


def _gather(x: Array, shard: Shard) -> Array:
    """[P, ...] of every device's [...], in the axis' order, and the same on all in its type too."""
    if not shard.checked:
        gathered: Array = lax.all_gather(x, shard.axes)
        return gathered
    if _GATHERS_INVARIANTLY:
        to: dict[str, Any] = {"to": "invarying"}
        gathered = lax.all_gather(x, shard.axes, **to)
        return gathered
    own = jnp.arange(shard.size) == lax.axis_index(shard.axes)  # [P]
    alone = jnp.where(own.reshape(-1, *[1] * x.ndim), x[None], jnp.zeros((), x.dtype))
    gathered = lax.psum(alone, shard.axes)
    return gathered


def _summed(part: Array, shard: Shard, dtype: Any) -> Array:
    """The sum of the devices' [N, D] in the axis' order, rounded once: each device adds up its
    share of the rows, so that all get the same bits, whatever the backend does."""
    tokens, hidden = part.shape
    padded = jnp.pad(part, ((0, -tokens % shard.size), (0, 0)))
    shares = padded.reshape(shard.size, -1, hidden)  # [P, N/P, D]
    mine = lax.all_to_all(shares, shard.axes, 0, 0)
    own = _shards.ordered_sum(list(mine)).astype(dtype)
    return _gather(own, shard).reshape(-1, hidden)[:tokens]


# --- the device's columns as the first ones ---


def _own_options(call: Call) -> Any:
    """An ignore_index that is no target has no other meaning after the rotation."""
    options = call.options
    if 0 <= options.ignore_index < options.vocab_total:
        options = options._replace(ignore_index=_OWN_IGNORED)
    return options


def _rotated(call: Call, shard: Shard, operands: dict[str, Array]) -> dict[str, Array]:
    """The operands as the device's own call takes them."""
    total = call.options.vocab_total
    start = lax.axis_index(shard.axes) * (total // shard.size)
    target, ignore = operands["target"], _own_options(call).ignore_index
    local = target - start.astype(target.dtype)
    local = jnp.where(local < 0, local + total, local)
    inside = (target >= 0) & (target < total)
    local = jnp.where(inside, local, target)
    if ignore != call.options.ignore_index:
        local = jnp.where(~inside & (target == ignore), ignore + 1, local)
        local = jnp.where(target == call.options.ignore_index, ignore, local)
    found = operands | {"target": local}
    if "vocab_weight" in operands:
        c = operands["vocab_weight"]
        found["vocab_weight"] = lax.dynamic_slice_in_dim(jnp.concatenate((c, c)), start, total)
    return found


def _run(
    call: Call, kind: int, operands: dict[str, Array], results: list[Tensor], options: Any
) -> dict[str, Array]:
    """Of operands whose types vary alike."""
    axes = _union(map(varying, operands.values()))
    alike = {name: pvary(x, axes) for name, x in operands.items()}
    return run(kind, alike, results, options, call.memory)


# --- the loss ---


def _asked(call: Call) -> list[str]:
    wanted = {*call.outputs}
    if call.options.label_smoothing > 0 and "loss" in wanted:
        wanted.add("weighted_logit_sum")
    return [name for name in _EXTRA if name in wanted]


def forward(
    call: Call, shard: Shard, operands: dict[str, Array]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The outputs, and what Backward takes of them."""
    given = _rotated(call, shard, operands)
    of_forward = (
        "input", "weight", "bias", "target", "vocab_weight", "normalizer", "temperature"
    )  # fmt: skip
    extra = _asked(call)
    names = ["row_reference", "row_log_sum", "target_logit", *extra]
    shape = operands["target"].shape
    results = [Tensor(name, shape, _F32) for name in names]
    if "argmax" in call.outputs:
        results.append(Tensor("argmax", shape, np.dtype(np.int32)))
    options = _own_options(call)
    made = _run(
        call, _abi.LINEAR_CROSS_ENTROPY_FORWARD,
        {name: given[name] for name in of_forward if name in given}, results, options,
    )  # fmt: skip
    gathered = _gather(jnp.stack([made[name] for name in names]), shard)  # [P, k, N]
    states = [State(**dict(zip(names, one))) for one in gathered]
    state = _shards.fold(states)
    constants = map(operands.get, ("token_weight", "vocab_weight", "normalizer"))
    tokens = Tokens(operands["target"], *constants)
    ignored, outside = tokens.ignored(call.options), tokens.outside(call.options)
    outputs: dict[str, Array] = {}
    for name in call.outputs:
        if name == "loss":
            losses = _shards.token_losses(state, tokens, call.options)
            outputs[name] = _shards.reduced(losses, tokens, call.options)
        elif name == "argmax":
            start = lax.axis_index(shard.axes) * (call.options.vocab_total // shard.size)
            indices = _gather(made["argmax"] + start.astype(jnp.int32), shard)
            index = _shards.first_of_largest(states, list(indices))
            outputs[name] = jnp.where(ignored, -1, index)
        else:
            value = getattr(state, name)
            value = value() if callable(value) else value
            if name == "logprob":
                value = jnp.where(outside, jnp.nan, value)
            outputs[name] = jnp.where(ignored, 0.0, value)
    kept = {
        "row_reference": jnp.where(ignored, 0.0, state.row_reference),
        "row_log_sum": jnp.where(ignored, 0.0, state.row_log_sum),
    }
    if state.entropy is not None:
        kept["entropy"] = state.entropy
    return outputs, kept


def backward(
    call: Call, shard: Shard, operands: dict[str, Array], wanted: list[Tensor]
) -> dict[str, Array]:
    """The gradients `wanted`, of the whole vocabulary's states and upstream gradients."""
    parts = [t._replace(dtype=_F32) if t.name == "grad_input" else t for t in wanted]
    given = _rotated(call, shard, operands)
    made = _run(call, _abi.LINEAR_CROSS_ENTROPY_BACKWARD, given, parts, _own_options(call))
    for name, _, dtype in wanted:
        if name == "grad_input":
            own = shard.part_of_input
            part = made[name]
            made[name] = part.astype(dtype) if own else _summed(part, shard, dtype)
    return made


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(
    call: Call, shard: Shard, primals: dict[str, Array], rest: dict[str, Array]
) -> dict[str, Array]:
    return forward(call, shard, primals | rest)[0]


def _forward_rule(call: Call, shard: Shard, primals: Any, rest: Any) -> Any:
    for name, p in rest.items():
        if p.perturbed and jnp.issubdtype(p.value.dtype, jnp.floating):
            name = argument(name)
            raise invalid(
                f"{name} is differentiated, but it is a constant here; pass "
                f"jax.lax.stop_gradient({name})"
            )
    if not shard.checked and shard.upstream is None and shard.size > 1:
        raise invalid(
            "axis_name is given where jax.shard_map has check_vma=False, so that nothing says "
            "whether a device is handed the whole upstream gradient (jax.grad inside of "
            "jax.shard_map) or a part of it (jax.grad around it); use check_vma=True, or pass "
            f"upstream={_WHOLE!r} or upstream={_PARTS!r}"
        )
    wanted = {name: None for name, p in primals.items() if p.perturbed}  # its keys are static
    operands = jax.tree.map(lambda p: p.value, primals | rest)
    outputs, kept = forward(call, shard, operands)
    return outputs, (operands, kept, wanted)


def _backward_rule(call: Call, shard: Shard, residuals: Any, cotangents: Any) -> Any:
    operands, kept, wanted = residuals
    upstream = upstream_of(
        call, [cotangents[name] for name in call.outputs], operands["target"].shape
    )
    if shard.upstream == _PARTS:
        upstream = {name: lax.psum(x, shard.axes) for name, x in upstream.items()}
    if "grad_entropy" not in upstream:
        kept = {name: x for name, x in kept.items() if name != "entropy"}
    results = [
        Tensor(f"grad_{name}", operands[name].shape, np.dtype(operands[name].dtype))
        for name in wanted
    ]
    made = backward(call, shard, operands | kept | upstream, results)
    return {name: made.get(f"grad_{name}") for name in _PRIMALS if name in operands}, None


_differentiable.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _refuse(call: Call, operands: dict[str, Array], total: int) -> None:
    if "rank" in call.outputs:
        raise not_supported(
            "return_statistics is 'rank' with axis_name; a shard does not know the target's logit "
            "of another"
        )
    weight = operands.get("vocab_weight")
    if weight is not None and weight.shape != (total,):
        raise wrong_shape(
            f"weight has shape {weight.shape}; allowed: ({total},), a weight for every class of "
            "the whole vocabulary"
        )


def loss(call: Call, operands: dict[str, Array], axis_name: Any, upstream: Any) -> dict[str, Array]:
    """The outputs by name, of a weight [V/P, D] and a bias [V/P]."""
    axes = _axes_of(axis_name)
    if operands["weight"].ndim != 2:
        raise wrong_shape(
            f"linear_weight has shape {operands['weight'].shape}; allowed: [V/P, D], split over "
            "axis_name"
        )
    shard = _shard_of(axes, operands, upstream)
    total = shard.size * operands["weight"].shape[0]
    _refuse(call, operands, total)
    call = call._replace(options=call.options._replace(vocab_start=0, vocab_total=total))
    # Over other axes all vary alike from here on: JAX itself adds up the gradients of those that
    # did not.
    others = _union(map(varying, operands.values())) - set(axes)
    alike = {name: pvary(x, others) for name, x in operands.items()}
    primals = {name: alike.pop(name) for name in _PRIMALS if name in alike}
    try:
        made: dict[str, Array] = _differentiable(call, shard, primals, alike)
    except LogitlessError:
        raise
    except NotImplementedError:  # jax.shard_map outside of jit, where nothing is differentiated
        made = forward(call, shard, primals | alike)[0]
    return made


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset[str]().union(*sets)

# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that is split over mesh axes, inside jax.shard_map: every device holds V/P rows of
the weight; hidden states and targets are the same on all P.

    forward    If gradients follow, the targets' logits are gathered first, 4 bytes per token and
               device: the state that each device keeps is relative to them. Then each device runs
               its Forward; one all-gather of the rows' states, 12 bytes per token and device, and 4
               more for entropy, smoothing and others; the core's Combine, in the axis' order
    backward   Each device runs Backward on its columns, from the global states and its kept state.
               Its grad_weight is then complete, its grad_input a part in f32; the parts are
               exchanged and added up in the axis' order

One program runs on every device, and options are part of it, so vocab_start cannot differ. Instead
each device numbers the vocabulary from its own first column, `start`, and rotates targets and class
weights accordingly: (target - start) mod V is below V/P exactly if the target is among its columns.

What an upstream gradient means depends on jax.shard_map. With check_vma=True it follows from JAX's
types: the outputs are the same on all devices, and so are their gradients; hidden states whose type
varies over the axes get each device's own part of the gradient. With check_vma=False it cannot be
known. jax.grad inside of jax.shard_map hands every device the whole upstream gradient; jax.grad
around jax.shard_map hands each device 1/P of it, and JAX's own collectives treat gradients as parts
that add up. So the caller says which, by `upstream`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
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
from logitless._statistics import names_where
from logitless.jax import _shards
from logitless.jax._call import TOP, Call, asked_of, kept_of, output_of, reads_logits
from logitless.jax._run import KEPT, Array, Tensor, pvary, run, varying

_F32, _I32 = np.dtype(np.float32), np.dtype(np.int32)
_WHOLE, _PARTS = "whole", "parts"
_PRIMALS = ("input", "weight", "bias")
_STATE = ("row_reference", "row_log_sum")
_EXTRA = (*names_where("extra"), "weighted_logit_sum")
# The operands of each device's Forward; and `ids`, if logits_at is asked for.
_OF_FORWARD = ("input", "weight", "bias", "target", "vocab_weight", "normalizer", "temperature")
_OF_COMBINE = ("target", "token_weight", "vocab_weight", "normalizer")
_OWN_IGNORED = np.iinfo(np.int32).min
_GATHERS_INVARIANTLY = "to" in inspect.signature(lax.all_gather).parameters


class Shard(NamedTuple):
    axes: tuple[str, ...]
    size: int  # P
    checked: bool  # jax.shard_map checks types
    upstream: str | None
    part_of_input: bool  # whether a device returns only its part of the input's gradient


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


def size_of(axis_name: Any) -> int:
    """The number of devices over which the vocabulary is split, P."""
    return _size_of(_axes_of(axis_name))


def shard_of(
    operands: dict[str, Array], axis_name: Any, upstream: Any,
    split: Sequence[str] = ("weight", "bias"),
) -> Shard:  # fmt: skip
    """The shard, checked against JAX's types if they are tracked. `split`: the operands that are
    split over the axes."""
    axes = _axes_of(axis_name)
    if operands["weight"].ndim != 2:
        raise wrong_shape(
            f"linear_weight has shape {operands['weight'].shape}; allowed: [V/P, D], split over "
            "axis_name"
        )
    if upstream not in (None, _WHOLE, _PARTS):
        raise invalid(f"upstream is {upstream!r}; allowed: None, {_WHOLE!r}, {_PARTS!r}")
    size = _size_of(axes)
    found = varying(lax.axis_index(axes))  # empty unless check_vma; lacks axes of one device
    if not found:
        return Shard(axes, size, False, upstream, upstream == _PARTS)
    for name in split:
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
    for name in sorted(set(operands) - {"input", *split}):
        if varying(operands[name]) & found:
            raise invalid(
                f"{argument(name)} varies over the mesh axes {sorted(found)}; allowed: the same on "
                "all devices of axis_name, in its type too (as jax.lax.all_gather makes it with "
                "to='invarying')"
            )
    return Shard(axes, size, True, None, bool(of_input))


def _gather(x: Array, shard: Shard) -> Array:
    """[P, ...] from every device's [...], in the axis' order; the same on all devices, and also of
    a type that says so."""
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
    """The sum of the devices' [N, D] in the axis' order, rounded once. Each device sums its share
    of the rows, so that all get the same bits on any backend."""
    tokens, hidden = part.shape
    padded = jnp.pad(part, ((0, -tokens % shard.size), (0, 0)))
    shares = padded.reshape(shard.size, -1, hidden)  # [P, N/P, D]
    mine = lax.all_to_all(shares, shard.axes, 0, 0)
    own = _shards.ordered_sum(list(mine)).astype(dtype)
    return _gather(own, shard).reshape(-1, hidden)[:tokens]


# --- the device's columns as the first ones ---


def _own_options(call: Call) -> Any:
    """The options with an ignore_index that keeps its meaning after the rotation."""
    options = call.options
    if 0 <= options.ignore_index < options.vocab_total:
        options = options._replace(ignore_index=_OWN_IGNORED)
    return options


def _rotated(call: Call, shard: Shard, operands: dict[str, Array]) -> dict[str, Array]:
    """The operands of the device's own call, with columns counted from its first one."""
    total = call.options.vocab_total
    start = lax.axis_index(shard.axes) * (total // shard.size)
    target, ignore = operands["target"], _own_options(call).ignore_index
    local, inside = _from(start, target, total)
    if ignore != call.options.ignore_index:
        local = jnp.where(~inside & (target == ignore), ignore + 1, local)
        local = jnp.where(target == call.options.ignore_index, ignore, local)
    found = operands | {"target": local}
    if "vocab_weight" in operands:
        c = operands["vocab_weight"]
        found["vocab_weight"] = lax.dynamic_slice_in_dim(jnp.concatenate((c, c)), start, total)
    if "ids" in operands:
        found["ids"], _ = _from(start, operands["ids"], total)
    return found


def _from(start: Array, columns: Array, total: int) -> tuple[Array, Array]:
    """Columns counted from a device's `start`, and which of them are in the vocabulary; the others
    are left unchanged."""
    local = columns - start.astype(columns.dtype)
    local = jnp.where(local < 0, local + total, local)
    inside = (columns >= 0) & (columns < total)
    return jnp.where(inside, local, columns), inside


def _run(
    kind: int, operands: dict[str, Array], results: Sequence[Tensor], options: Any,
    memory: int | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Runs an op on operands that vary over the same axes."""
    axes = _union(map(varying, operands.values()))
    alike = {name: pvary(x, axes) for name, x in operands.items()}
    return run(kind, alike, results, options, memory)


# --- the loss ---


def _anchor(own: Array, shard: Shard) -> Array:
    """[N]: the targets' logits, from each device's `own` [N], which is -inf for targets of other
    devices."""
    return _gather(own, shard).max(0)  # a NaN stays


def _states(
    call: Call, shard: Shard, operands: dict[str, Array], keeps: bool
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The states [P, N] of every device's columns, as operands of Combine; and this device's kept
    state, together with `logits_at` over the whole vocabulary."""
    rotated, options = _rotated(call, shard, operands), _own_options(call)
    given = {name: rotated[name] for name in _OF_FORWARD if name in rotated}
    shape = operands["target"].shape
    forward = functools.partial(_run, _abi.LINEAR_CROSS_ENTROPY_FORWARD)
    kept = kept_of(call, operands["input"], operands["weight"]) if keeps else []
    if kept and shard.size > 1:
        results = [Tensor("target_logit", shape, _F32)]
        own = forward(given, results, options, call.memory)["target_logit"]
        given["anchor"] = _anchor(own, shard)
    smoothing = call.of_loss.label_smoothing > 0 and "loss" in call.outputs
    asked = {*call.outputs, *(("weighted_logit_sum",) if smoothing else ())}
    names = [*_STATE, "target_logit", *(name for name in _EXTRA if name in asked)]
    results = [Tensor(name, shape, _F32) for name in names]
    if "argmax" in asked:
        results.append(Tensor("argmax", shape, _I32))
    if "logits_at" in asked:
        given["ids"] = rotated["ids"]
        results.append(output_of(call, "logits_at", operands))
    if "top_ids" in asked:
        results += [output_of(call, name, operands) for name in TOP]
    made = forward(given, results + kept, options, call.memory)
    every = jnp.moveaxis(_gather(jnp.stack([made[name] for name in names]), shard), 1, 0)
    states = {f"shard_{name}": x for name, x in zip(names, every)}
    start = (lax.axis_index(shard.axes) * (call.of_loss.vocab_total // shard.size)).astype(_I32)
    if "argmax" in asked:
        states["shard_argmax"] = _gather(made["argmax"] + start, shard)
    if "top_ids" in asked:
        own = jnp.where(made["top_ids"] < 0, made["top_ids"], made["top_ids"] + start)
        for name, x in zip(TOP, (made["top_logits"], own)):  # [N, k], where an id below 0 is none
            states[f"shard_{name}"] = _gather(x, shard).reshape(shard.size, -1)  # [P, N k]
    kept_state = {name: made[name] for name in KEPT if name in made}
    if "logits_at" in asked:
        at = _gather(made["logits_at"], shard).max(0)  # -inf at others' columns; a NaN stays
        return states, kept_state | {"logits_at": at}
    return states, kept_state


def forward(
    call: Call, shard: Shard, operands: dict[str, Array], keeps: bool = False
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The outputs, and what Backward needs besides the operands, with kept state if `keeps`."""
    states, kept = _states(call, shard, operands, keeps)
    given = {name: operands[name] for name in _OF_COMBINE if name in operands} | states
    names = dict.fromkeys((*call.outputs, *_STATE))
    results = [output_of(call, name, operands) for name in names if name != "logits_at"]
    made = _run(_abi.COMBINE, given, results, call.options)
    if "logits_at" in kept:
        made["logits_at"] = kept.pop("logits_at")
    kept |= {name: made[name] for name in (*_STATE, "entropy") if name in made}
    return {name: made[name] for name in call.outputs}, kept


def own_gradients(
    call: Call, shard: Shard, operands: dict[str, Array], wanted: list[Tensor]
) -> dict[str, Array]:
    """The gradients `wanted` of this device's columns, from the whole vocabulary's states and
    upstream gradients; that of the input is a part, in f32."""
    parts = [t._replace(dtype=_F32) if t.name == "grad_input" else t for t in wanted]
    given, kind = _rotated(call, shard, operands), _abi.LINEAR_CROSS_ENTROPY_BACKWARD
    return _run(kind, given, parts, _own_options(call), call.memory)


def exchanged(shard: Shard, made: dict[str, Array], wanted: list[Tensor]) -> dict[str, Array]:
    """The gradients `wanted`, from those of every device's columns."""
    for name, _, dtype in wanted:
        if name == "grad_input":
            own = shard.part_of_input
            part = made[name]
            made[name] = part.astype(dtype) if own else _summed(part, shard, dtype)
    return made


class Rule(NamedTuple):
    """What differs between the ops: two functions like `forward` and `own_gradients` here."""

    forward: Callable[..., tuple[dict[str, Array], dict[str, Array]]]
    own_gradients: Callable[..., dict[str, Array]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _differentiable(
    rule: Rule, call: Call, shard: Shard, primals: dict[str, Array], rest: dict[str, Array]
) -> dict[str, Array]:
    return rule.forward(call, shard, primals | rest)[0]


def _refuse_to_differentiate(shard: Shard, rest: Any) -> None:
    """Refuses gradients of constants, and all gradients if it is unknown whether upstream gradients
    are whole or parts."""
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


def _forward_rule(rule: Rule, call: Call, shard: Shard, primals: Any, rest: Any) -> Any:
    _refuse_to_differentiate(shard, rest)
    wanted = {name: None for name, p in primals.items() if p.perturbed}  # its keys are static
    operands = jax.tree.map(lambda p: p.value, primals | rest)
    outputs, kept = rule.forward(call, shard, operands, keeps=True)
    return outputs, (operands, kept, wanted)


def _backward_rule(rule: Rule, call: Call, shard: Shard, residuals: Any, cotangents: Any) -> Any:
    operands, kept, wanted = residuals
    of_outputs = [cotangents[name] for name in call.outputs]
    asked, upstream = asked_of(call, of_outputs, operands["input"].shape[:1])
    if shard.upstream == _PARTS:
        upstream = {name: lax.psum(x, shard.axes) for name, x in upstream.items()}
    if "grad_entropy" not in upstream:
        kept = {name: x for name, x in kept.items() if name != "entropy"}
    if not reads_logits(call, of_outputs):
        kept = {name: x for name, x in kept.items() if name not in KEPT}
    results = [
        Tensor(f"grad_{name}", operands[name].shape, np.dtype(operands[name].dtype))
        for name in wanted
    ]
    given = {name: operands[name] for name in asked.names}
    own = rule.own_gradients(asked, shard, given | kept | upstream, results)
    made = exchanged(shard, own, results)
    return {name: made.get(f"grad_{name}") for name in _PRIMALS if name in operands}, None


_differentiable.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _refuse(call: Call, operands: dict[str, Array], total: int) -> None:
    for name in names_where("of_whole_rows"):
        if name in call.outputs:
            raise not_supported(
                f"return_statistics is {name!r} with axis_name; a shard does not know the target's "
                "logit of another"
            )
    weight = operands.get("vocab_weight")
    if weight is not None and weight.shape != (total,):
        raise wrong_shape(
            f"weight has shape {weight.shape}; allowed: ({total},), a weight for every class of "
            "the whole vocabulary"
        )


def loss(call: Call, operands: dict[str, Array], axis_name: Any, upstream: Any) -> dict[str, Array]:
    """The outputs by name, for a weight [V/P, D] and a bias [V/P]."""
    shard = shard_of(operands, axis_name, upstream)
    total = shard.size * operands["weight"].shape[0]
    _refuse(call, operands, total)
    return applied(Rule(forward, own_gradients), call.of_shards(total), shard, operands)


def applied(rule: Rule, call: Call, shard: Shard, operands: dict[str, Array]) -> dict[str, Array]:
    """The outputs of a call whose vocabulary is split over the shard's axes."""
    # From here on all operands vary over the same other axes. If one did not vary over them before,
    # JAX itself sums its gradients.
    others = _union(map(varying, operands.values())) - set(shard.axes)
    alike = {name: pvary(x, others) for name, x in operands.items()}
    primals = {name: alike.pop(name) for name in _PRIMALS if name in alike}
    try:
        made: dict[str, Array] = _differentiable(rule, call, shard, primals, alike)
    except LogitlessError:
        raise
    except NotImplementedError:  # jax.shard_map outside of jit, where nothing is differentiated
        made = rule.forward(call, shard, primals | alike)[0]
    return made


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset[str]().union(*sets)

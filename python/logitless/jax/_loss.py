# SPDX-License-Identifier: Apache-2.0
"""The loss of tokens as a JAX primitive with its own rules.

Gradients use jax.custom_vjp. For sum and mean of a linear loss they are computed with the loss, in
one pass, and multiplied by the upstream gradient in backward. Otherwise (reduction "none", a
differentiable statistic, given logits) Forward runs, then Backward, which for a linear loss uses
what Forward kept.

A vmap over only tokens and targets becomes one call on all tokens with reduction "none", which is
then reduced for each element of the batch. So there is one gradient of the weight and not one per
element. This needs a primitive of our own, which sees whether vmap is inside grad (this case) or
around it (gradients of each element, one call after another).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from logitless import _abi
from logitless._errors import invalid
from logitless.jax import _partition
from logitless.jax._call import Call, asked_of, kept_of, output_of, reads_logits, tokens_of
from logitless.jax._run import (
    Array,
    Tensor,
    evaluate,
    explicit_sharding,
    one_after_another,
    run,
)

_F32 = np.dtype(np.float32)
_TINY = float(np.finfo(_F32).tiny)
_STATE = ("row_reference", "row_log_sum")
_OF_ROWS = (
    "input", "logits", "target", "token_weight", "temperature", "ids",
    "teacher_input", "teacher_logits", "teacher_temperature",
)  # fmt: skip


def _run(
    call: Call, kind: int, operands: dict[str, Array], results: list[Tensor]
) -> dict[str, Array]:
    """Runs an op; a linear op on sharded arrays is split over their devices."""
    made = _partition.run if call.linear else run
    return made(kind, operands, results, call.options, call.memory)


def _forward(call: Call, operands: dict[str, Array], state: bool = False) -> dict[str, Array]:
    """The outputs and, with `state`, what Backward needs."""
    names = dict.fromkeys((*call.outputs, *(_STATE if state and not call.diverges else ())))
    results = [output_of(call, name, operands) for name in names]
    if state and call.linear and _partition.may_keep(operands["input"], operands["weight"]):
        results += kept_of(call, operands["input"], operands["weight"])
    return _run(call, call.kinds.forward, operands, results)


def _gradients(wrt: Sequence[Tensor], held: bool) -> list[Tensor]:
    """The gradients, as results of a call. If `held`, f16 ones are f32 until they are multiplied by
    their upstream factor, because f16 lacks the range."""
    return [
        Tensor(f"grad_{name}", shape, _F32 if held and dtype == np.float16 else dtype)
        for name, shape, dtype in wrt
    ]


def _merged(
    call: Call, wrt: Sequence[Tensor], primals: Sequence[Any], rest: Sequence[Any]
) -> dict[str, Any]:
    given, constants = dict(zip((tensor.name for tensor in wrt), primals)), iter(rest)
    return {name: given[name] if name in given else next(constants) for name in call.names}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(
    call: Call, wrt: tuple[Tensor, ...], primals: tuple[Array, ...], rest: tuple[Array, ...]
) -> tuple[Array, ...]:
    """The outputs, differentiable with respect to `primals`, which `wrt` names."""
    made = _forward(call, _merged(call, wrt, primals, rest))
    return tuple(made[name] for name in call.outputs)


def _forward_rule(call: Call, wrt: tuple[Tensor, ...], primals: Any, rest: Any) -> Any:
    values = jax.tree.map(lambda p: p.value, (primals, rest))
    operands = _merged(call, wrt, *values)
    if call.fused:
        results = [output_of(call, name, operands) for name in call.outputs]
        gradients = _gradients(wrt, held=True)
        made = _run(call, call.kinds.both, operands, results + gradients)
        held = tuple(made[gradient.name] for gradient in gradients)
        return tuple(made[name] for name in call.outputs), held
    made = _forward(call, operands, state=not call.only_chosen)
    of_rows = () if call.diverges else (*_STATE, "entropy")
    kept = {name: made[name] for name in (*of_rows, *_partition.KEPT) if name in made}
    return tuple(made[name] for name in call.outputs), (values, kept)


def _backward_rule(call: Call, wrt: tuple[Tensor, ...], residuals: Any, cotangents: Any) -> Any:
    if call.fused:
        factor = cotangents[0]
        if isinstance(factor, SymbolicZero):  # no product: 0 times infinity is NaN
            return tuple(jnp.zeros_like(h, t.dtype) for h, t in zip(residuals, wrt)), None
        return tuple((held * factor).astype(t.dtype) for held, t in zip(residuals, wrt)), None
    values, kept = residuals
    operands = _merged(call, wrt, *values)
    asked, upstream = asked_of(call, cotangents, tokens_of(operands))
    operands = {name: operands[name] for name in asked.names}
    if not reads_logits(call, cotangents):
        kept = {name: array for name, array in kept.items() if name not in _partition.KEPT}
    if "grad_entropy" not in upstream:
        kept = {name: array for name, array in kept.items() if name != "entropy"}
    results = _gradients(wrt, held=False)
    made = _run(asked, call.kinds.backward, operands | kept | upstream, results)
    return tuple(_as_given(operands[t.name], made[f"grad_{t.name}"]) for t in wrt), None


def _as_given(primal: Array, gradient: Array) -> Array:
    """The gradient, sharded like its primal's type. (The gradient of given logits is computed whole
    on every device.)"""
    given = explicit_sharding(primal)
    if given is None or given == explicit_sharding(gradient):
        return gradient
    placed: Array = jax.sharding.reshard(gradient, given)
    return placed


_differentiable.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)

loss_p = Primitive("logitless_loss")


def loss(call: Call, operands: Sequence[Array]) -> dict[str, Array]:
    """The outputs by name. Tokens have one dimension; in a linear loss they may have more."""
    lowered = _partition.FOR_DEVICES if call.linear else None
    return dict(zip(call.outputs, loss_p.bind(*operands, call=call, lowered=lowered)))


def _outputs(*operands: Array, call: Call, **_: Any) -> list[Array]:
    made = _forward(call, dict(zip(call.names, operands)))
    return [made[name] for name in call.outputs]


def _abstract(*avals: Any, call: Call, **_: Any) -> Any:
    like = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    made = jax.eval_shape(functools.partial(_outputs, call=call), *like)
    return [jax.core.ShapedArray(output.shape, output.dtype) for output in made]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call, **_: Any) -> Any:
    given = dict(zip(call.names, zip(primals, tangents)))
    moving = {name: t for name, (_, t) in given.items() if type(t) is not ad.Zero}
    for name in ("target", "ids", "id_offsets"):
        moving.pop(name, None)
    for name in moving:
        if name not in ("input", "weight", "bias", "logits"):
            name = {"vocab_weight": "weight"}.get(name, name)
            raise invalid(
                f"{name} is differentiated, but it is a constant here; pass "
                f"jax.lax.stop_gradient({name})"
            )
    moved = {name: given[name][0] for name in moving}
    wrt = tuple(Tensor(name, x.shape, np.dtype(x.dtype)) for name, x in moved.items())
    rest = tuple(primal for name, (primal, _) in given.items() if name not in moving)
    outputs, directions = jax.jvp(
        lambda *primals: _differentiable(call, wrt, primals, rest),
        tuple(moved.values()),
        tuple(moving.values()),
    )
    return list(outputs), list(directions)


def _normalizer(call: Call, operands: dict[str, Array], tokens: int, target: Array | None) -> Array:
    """The divisor of the mean for each element of the batch, which has `tokens` tokens, counted as
    in the core."""
    if "normalizer" in operands:
        return operands["normalizer"]
    if call.options.normalizer:
        return jnp.asarray(call.options.normalizer, jnp.float32)
    if target is None:
        return jnp.asarray(tokens, jnp.float32)
    valid = target != call.options.ignore_index  # [B, N]
    if "vocab_weight" not in operands:
        return valid.sum(1, dtype=jnp.float32)
    weights = jnp.take(operands["vocab_weight"], jnp.maximum(target, 0), mode="clip")
    divisor: Array = jnp.where(valid, weights, 0).sum(1)
    return divisor


def _mean(call: Call, total: Array, divisor: Array) -> Array:
    """[B]: the means. If the divisor is 0: 0 without a gradient, or NaN with a NaN gradient."""
    some = divisor != 0
    if call.options.empty_mean == _abi.EMPTY_MEAN_NAN:
        return total / jnp.where(some, divisor, jnp.nan)
    return jnp.where(some, total / jnp.where(some, divisor, 1), 0.0)


def _one_call(call: Call, given: dict[str, tuple[Array, int | None]]) -> bool:
    """Whether one call on all tokens can be used. It can if elements differ only in tokens and
    normalizers, if a normalizer comes with a mean (otherwise the core refuses it), and if XLA can
    divide by a normalizer that is a number, which it does by multiplying with the f32 inverse. It
    cannot be used with lists, because an error in one element's offsets could not be located in
    joined lists."""
    if "id_offsets" in given:
        return False
    if any(d is not None and n not in (*_OF_ROWS, "normalizer") for n, (_, d) in given.items()):
        return False
    number = call.options.normalizer
    if call.options.reduction != _abi.REDUCTION_MEAN:
        return not number and "normalizer" not in given
    return not number or _TINY <= number <= 1 / _TINY


def _batched(
    operands: Sequence[Array], dims: Sequence[int | None], *, call: Call, **more: Any
) -> Any:
    given = dict(zip(call.names, zip(operands, dims)))
    if not _one_call(call, given):
        return one_after_another(loss_p, operands, dims, call=call, **more)
    size = next(x.shape[d] for x, d in given.values() if d is not None)
    rows = {
        name: jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for name, (x, d) in given.items()
        if name in _OF_ROWS
    }
    of_each = math.prod(tokens_of(rows)[1:])  # known even if a size is 0
    flat = {name: x for name, (x, _) in given.items() if name != "normalizer"} | rows
    if not call.linear:
        flat |= {name: x.reshape(size * of_each) for name, x in rows.items() if name != "logits"}
    options = call.options._replace(reduction=_abi.REDUCTION_NONE, normalizer=0.0)
    made = loss(call._replace(names=tuple(flat), options=options), list(flat.values()))
    if not call.linear:
        made = {name: x.reshape(size, of_each) for name, x in made.items()}  # [B, N]
    if not call.per_token:
        made["loss"] = made["loss"].reshape(size, of_each).sum(1)  # [B]
    if call.options.reduction == _abi.REDUCTION_MEAN:
        arrays = {name: x for name, (x, _) in given.items()}
        target = flat["target"].reshape(size, of_each) if "target" in flat else None
        divisor = _normalizer(call, arrays, of_each, target)  # [B] or []
        made["loss"] = _mean(call, made["loss"], divisor)
    return [made[name] for name in call.outputs], [0] * len(call.outputs)


loss_p.multiple_results = True
loss_p.def_impl(functools.partial(evaluate, loss_p))
loss_p.def_abstract_eval(_abstract)
mlir.register_lowering(loss_p, mlir.lower_fun(_outputs))
ad.primitive_jvps[loss_p] = _jvp
batching.primitive_batchers[loss_p] = _batched

# SPDX-License-Identifier: Apache-2.0
"""A divergence of two heads whose vocabulary is split over mesh axes, inside jax.shard_map: every
device holds V/P rows of both heads, and the hidden states of both are the same on all P.

    forward    Each device's states of both heads are gathered, 16 to 28 bytes per token and device,
               and combined by the core's Combine, in the axis' order. Each device's sums over its
               columns are gathered, 4 to 12 bytes, and added in the same order
    backward   Each device runs Backward on its columns, from the global states and the mean that dz
               subtracts; the parts of grad_input are exchanged as in _parallel.py

Targets are rotated and upstream gradients treated as in _parallel.py.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from logitless import _abi, _divergence
from logitless._abi import Divergence, Options
from logitless.jax import _parallel, _shards
from logitless.jax._call import Call
from logitless.jax._parallel import Shard, _gather, _rotated, _run
from logitless.jax._run import Array, Tensor

_F32 = np.dtype(np.float32)
_STATES = ("row_reference", "row_log_sum", "teacher_row_reference", "teacher_row_log_sum")
_SPLIT = ("weight", "bias", "teacher_weight", "teacher_bias", "teacher_logits")


def _options(call: Call) -> Divergence:
    assert isinstance(call.options, Divergence)
    return call.options


def _tokens(call: Call, operands: dict[str, Array]) -> tuple[Array, Options]:
    """The targets and options for Combine. If the call has no targets, all are class 0, which is
    never ignored."""
    options = _options(call)
    ignored = options.ignore_index if "target" in operands else -1
    target = operands.get("target")
    if target is None:
        target = jnp.zeros(operands["input"].shape[0], jnp.int32)
    return target, Options(
        reduction=_abi.REDUCTION_NONE, ignore_index=ignored, vocab_total=options.vocab_total
    )


def _own(call: Call, shard: Shard, operands: dict[str, Array]) -> tuple[dict[str, Array], Any]:
    if "target" not in operands:
        return operands, call.options
    return _rotated(call, shard, operands), _parallel._own_options(call)


def _folded(
    call: Call, shard: Shard, operands: dict[str, Array], own: dict[str, Array], options: Any
) -> dict[str, Array]:
    """The whole vocabulary's states, logprob and entropies [N]."""
    target, of_combine = _tokens(call, operands)
    shape = target.shape
    names = [*_STATES, *(("target_logit",) if "target" in operands else ())]
    names += [name for name in ("entropy", "teacher_entropy") if name in call.outputs]
    results = [Tensor(name, shape, _F32) for name in names]
    made = _run(_abi.LINEAR_DIVERGENCE_FORWARD, own, results, options, call.memory)
    every = jnp.moveaxis(_gather(jnp.stack([made[name] for name in names]), shard), 1, 0)
    states = dict(zip(names, every))  # [P, N] each
    found: dict[str, Array] = {}
    for head in ("", "teacher_"):
        given = {
            "target": target,
            "shard_row_reference": states[f"{head}row_reference"],
            "shard_row_log_sum": states[f"{head}row_log_sum"],
            "shard_target_logit": states.get("target_logit", states["row_reference"]),
        }
        wanted = ["row_reference", "row_log_sum"]
        if f"{head}entropy" in states:
            given["shard_entropy"] = states[f"{head}entropy"]
            wanted.append("entropy")
        if not head and "target" in operands:
            wanted.append("logprob")
        of_head = [Tensor(name, shape, _F32) for name in wanted]
        combined = _run(_abi.COMBINE, given, of_head, of_combine)
        found |= {f"{head}{name}": x for name, x in combined.items()}
    return found


def _losses(call: Call, operands: dict[str, Array], found: dict[str, Array]) -> Array:
    """The loss: [], or [N] if it is per token."""
    options = _options(call)
    losses = found["divergence_sum"]
    if options.label_weight:
        losses = losses - options.label_weight * found["logprob"]
    if "token_weight" in operands:
        losses = losses * operands["token_weight"]
    target, of_combine = _tokens(call, operands)
    tokens = _shards.Tokens(target, of_combine.ignore_index, options.vocab_total)
    losses = jnp.where(tokens.outside(), jnp.nan, losses)  # on the CPU the core raised already
    losses = jnp.where(tokens.ignored(), 0.0, losses)
    if call.per_token:
        return losses
    total = _shards.tree_sum(losses)
    if options.reduction == _abi.REDUCTION_SUM:
        return total
    by = operands.get("normalizer")
    if by is None:
        by = jnp.float32(options.normalizer) if options.normalizer else _shards.divisor(tokens)
    by = by.astype(jnp.float32)
    empty = jnp.nan if options.empty_mean == _abi.EMPTY_MEAN_NAN else 0.0
    return jnp.where(by == 0, empty, total / jnp.where(by == 0, 1.0, by))


def forward(
    call: Call, shard: Shard, operands: dict[str, Array], keeps: bool = False
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The outputs, and what Backward needs besides the operands."""
    own, options = _own(call, shard, operands)
    found = _folded(call, shard, operands, own, options)
    names = ["divergence_sum"]
    if keeps and _divergence.subtracts_mean(_options(call)):
        names.append("slope_sum")
    names += [name for name in ("acceptance",) if name in call.outputs]
    shape = found["row_reference"].shape
    states = {name: found[name] for name in _STATES}
    results = [Tensor(name, shape, _F32) for name in names]
    made = _run(_abi.LINEAR_DIVERGENCE_FORWARD, own | states, results, options, call.memory)
    every = _gather(jnp.stack([made[name] for name in names]), shard)  # [P, k, N]
    found |= dict(zip(names, _shards.ordered_sum(list(every))))
    found["loss"] = _losses(call, operands, found)
    kept = states | ({"slope_mean": found["slope_sum"]} if "slope_sum" in found else {})
    return {name: found[name] for name in call.outputs}, kept


def own_gradients(
    call: Call, shard: Shard, operands: dict[str, Array], wanted: list[Tensor]
) -> dict[str, Array]:
    """The gradients `wanted` of this device's columns; that of the input is a part, in f32."""
    parts = [t._replace(dtype=_F32) if t.name == "grad_input" else t for t in wanted]
    own, options = _own(call, shard, operands)
    return _run(_abi.LINEAR_DIVERGENCE_BACKWARD, own, parts, options, call.memory)


def divergence(
    call: Call, operands: dict[str, Array], axis_name: Any, upstream: Any
) -> dict[str, Array]:
    """The outputs by name, for tokens [N] and heads whose rows are split."""
    shard = _parallel.shard_of(operands, axis_name, upstream, _SPLIT)
    call = call.of_shards(shard.size * operands["weight"].shape[0])
    return _parallel.applied(_parallel.Rule(forward, own_gradients), call, shard, operands)

# SPDX-License-Identifier: Apache-2.0
"""Describes a call, its results and its Backward, for one device and for several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from logitless import _abi
from logitless._abi import AnyOptions, Divergence, Options
from logitless._statistics import names_where
from logitless.jax._run import DTYPES, Array, Tensor

_F32 = np.dtype(np.float32)
_INDICES = frozenset((*names_where("indexes"), "top_ids"))
TOP = ("top_logits", "top_ids")
_DIFFERENTIABLE = frozenset((*names_where("differentiable"), "logits_at"))


class Kinds(NamedTuple):
    """The ops of a loss."""

    forward: int
    backward: int
    both: int  # the loss and the gradients


OF_LOGITS = Kinds(
    _abi.CROSS_ENTROPY_FORWARD, _abi.CROSS_ENTROPY_BACKWARD, _abi.CROSS_ENTROPY_FORWARD_BACKWARD
)
OF_HEAD = Kinds(
    _abi.LINEAR_CROSS_ENTROPY_FORWARD,
    _abi.LINEAR_CROSS_ENTROPY_BACKWARD,
    _abi.LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD,
)
OF_TWO_HEADS = Kinds(
    _abi.LINEAR_DIVERGENCE_FORWARD,
    _abi.LINEAR_DIVERGENCE_BACKWARD,
    _abi.LINEAR_DIVERGENCE_FORWARD_BACKWARD,
)


class Call(NamedTuple):
    """A call without its arrays."""

    names: tuple[str, ...]  # of the operands
    outputs: tuple[str, ...]  # "loss", then statistics
    options: AnyOptions
    memory: int | None = None
    k: int = 0  # the number of largest logits, if TOP is among the outputs

    @property
    def linear(self) -> bool:
        return "weight" in self.names

    @property
    def diverges(self) -> bool:
        return isinstance(self.options, Divergence)

    @property
    def of_loss(self) -> Options:
        """The options of a call that is no divergence."""
        assert isinstance(self.options, Options)
        return self.options

    def of_shards(self, vocab: int) -> Call:
        """The same call on a device's columns, as the first ones of a vocabulary of `vocab`."""
        return self._replace(options=self.options._replace(vocab_start=0, vocab_total=vocab))

    @property
    def kinds(self) -> Kinds:
        if self.diverges:
            return OF_TWO_HEADS
        return OF_HEAD if self.linear else OF_LOGITS

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The outputs that have gradients."""
        known = ("loss",) if self.diverges else ("loss", *_DIFFERENTIABLE)
        return tuple(name for name in self.outputs if name in known)

    @property
    def only_chosen(self) -> bool:
        """Whether nothing of the vocabulary but chosen columns is asked for."""
        return self.outputs == ("logits_at",)

    @property
    def per_token(self) -> bool:
        return self.options.reduction == _abi.REDUCTION_NONE

    @property
    def fused(self) -> bool:
        """Whether the gradients are made in the forward call."""
        return self.linear and not self.per_token and self.differentiable == ("loss",)


def tokens_of(operands: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of the tokens. It is not always the target's: a divergence may have no target, and
    given logits may have any number of dimensions with a target [N]."""
    shape = operands["input"].shape[:-1] if "input" in operands else operands["target"].shape
    return tuple(shape)


def output_of(call: Call, name: str, operands: Mapping[str, Any]) -> Tensor:
    shape = tokens_of(operands)
    if name == "loss" and not call.per_token:
        shape = ()
    elif name == "logits_at":
        shape = tuple(operands["ids"].shape)
    elif name in TOP:
        shape = (*shape, call.k)
    return Tensor(name, shape, np.dtype(np.int32) if name in _INDICES else _F32)


def kept_of(call: Call, input: Array, weight: Array) -> list[Tensor]:
    """What Forward keeps for Backward, by a closed formula, because the program may run on any
    platform and nothing is planned yet. Nothing is kept with `memory`, whose bound needs plans, and
    nothing if the CPU or this process's GPU would not use it. What a divergence keeps is used by
    every backend."""
    tokens, vocab = math.prod(input.shape[:-1]), weight.shape[0]
    dtype = np.dtype(input.dtype)
    code = DTYPES.get(dtype.name, -1)
    if call.memory is not None:
        return []
    options = call.options
    if isinstance(options, Options):
        if not _abi.keeps(_abi.CPU, code, options):
            return []
        if not _abi.keeps(_abi.CUDA, code, options) and jax.default_backend() == "gpu":
            return []
    bytes = _abi.whole_kept(tokens, vocab, code)
    shape, rows_shape = _abi.kept_formula(tokens, vocab, code, bytes)
    if not shape[0]:
        return []
    dtypes = [dtype, _F32]
    if _debugs():
        dtypes = [np.dtype(f"uint{8 * kept.itemsize}") for kept in dtypes]
    return [Tensor("kept", shape, dtypes[0]), Tensor("kept_rows", rows_shape, dtypes[1])]


def _debugs() -> bool:
    """Whether JAX looks for NaNs or infinities in every array of floats. Only then is kept state
    integers, because XLA copies it for the cast if it leaves the program that made it. (A function
    that was traced before JAX was told to look keeps floats.)"""
    config: Any = jax.config
    return bool(config.jax_debug_nans or config.jax_debug_infs)


def reads_logits(call: Call, cotangents: Sequence[Any]) -> bool:
    """Whether Backward needs all logits. The gradient of target_logit alone needs no other
    logit."""
    moving = {n for n, ct in zip(call.outputs, cotangents) if not isinstance(ct, SymbolicZero)}
    return bool(moving - {"target_logit"})


def asked_of(
    call: Call, cotangents: Sequence[Any], tokens: tuple[int, ...]
) -> tuple[Call, dict[str, Array]]:
    """Backward's call and its upstream gradients. An absent upstream gradient means 0 for a
    statistic, but 1 for the loss."""
    given = {
        name: ct
        for name, ct in zip(call.outputs, cotangents)
        if name in call.differentiable and not isinstance(ct, SymbolicZero)
    }
    if call.only_chosen and given:
        return call, {"grad_logits_at": given["logits_at"]}
    found = {}
    if "loss" in given:
        found["grad_loss"] = given["loss"]
    else:
        # 0 for each token, because the 0 of a mean is NaN if it divides by 0.
        options = call.options._replace(reduction=_abi.REDUCTION_NONE, normalizer=0.0)
        names = tuple(name for name in call.names if name != "normalizer")
        call = call._replace(names=names, options=options)
        found["grad_loss"] = jnp.zeros(tokens, _F32)
    for name in ("lse", "target_logit", "entropy", "logits_at"):
        if name in given:
            found[f"grad_{name}"] = given[name]
    if "logits_at" not in given:
        names = tuple(name for name in call.names if name not in ("ids", "id_offsets"))
        call = call._replace(names=names)
    if "logprob" in given:  # logprob is -loss, or target_logit - lse
        weighted = "token_weight" in call.names or "vocab_weight" in call.names
        nll = isinstance(call.options, Options) and call.options.of_nll()
        of_loss = nll and not weighted
        for name in ("grad_loss",) if of_loss else ("grad_lse", "grad_target_logit"):
            sign = 1.0 if name == "grad_target_logit" else -1.0
            found[name] = found.get(name, 0.0) + sign * given["logprob"]
    return call, found

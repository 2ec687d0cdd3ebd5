# SPDX-License-Identifier: Apache-2.0
"""The whole vocabulary's loss and statistics from the ranks' states, by the core's Combine. Every
rank that has the same states gets the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless import _abi
from logitless._abi import Options
from logitless._statistics import names_where
from logitless.torch import _run
from logitless.torch._dispatch import define
from logitless.torch._split.sums import Tokens

# The extra rows of a state [k, N], in their order, after row_reference, row_log_sum and
# target_logit.
EXTRA = {_run.BITS[name]: name for name in names_where("extra")} | {
    _run.WEIGHTED: "weighted_logit_sum"
}
_STATE = ("row_reference", "row_log_sum", "target_logit", *EXTRA.values())
_GIVEN = ("target", *(f"shard_{name}" for name in (*_STATE, "argmax", "top_logits", "top_ids")))
_AT, _TOP = (list(_run.OUTPUTS).index(bit) for bit in (_run.LOGITS_AT, _run.TOP_LOGITS))
_WEIGHTS = ("token_weight", "vocab_weight", "normalizer")
_NAMES = (*_GIVEN, *_WEIGHTS, *_run.OUTPUTS.values())
_OPTIONS = ("reduction", "ignore_index", "empty_mean", "vocab_total", "label_smoothing", "z_loss",
            "normalizer")  # fmt: skip


class Combined(NamedTuple):
    row_state: Tensor  # [2, N] f32: row_reference and row_log_sum
    # In the order of _run.OUTPUTS, [N] or [N, K] each; the loss as reduced.
    outputs: list[Tensor | None]


def empty_state(like: Tensor, wanted: int) -> Tensor:
    """[k, N]: the state of a shard without columns, with the same rows as one with columns."""
    extra = sum(bool(wanted & bit) for bit in EXTRA)
    state = torch.zeros_like(like)
    state[0] = -float("inf")
    state[2] = -float("inf")
    state[3 + extra :] = -float("inf")  # at chosen columns
    return state


def combine(
    states: Tensor, indices: Tensor | None, tokens: Tokens, options: Options, given: int,
    wanted: int, ids: Tensor | None = None,
) -> Combined:  # fmt: skip
    """The `wanted` outputs, from the shards' states [S, m, N] in the vocabulary's order, as a
    Forward that was asked for `given` wrote them. If the logits at `ids` [N, K] or the k largest
    are wanted, they are the rows after the states. `indices` [S, j, N] i64: the row of argmax and
    the k rows of top_ids, each if it is wanted."""
    op: Any = torch.ops.logitless.shard_combine
    values = options._asdict()
    at = argmax = top_logits = top_ids = None
    rows = states.shape[1]
    if wanted & _run.LOGITS_AT:
        assert ids is not None
        rows -= ids.shape[1]
        at = states[:, rows:].amax(0).t().contiguous()  # [N, K]
    if wanted & _run.TOP:
        assert indices is not None
        k = _run.k_of(wanted)
        rows -= k
        top_logits, top_ids = _lists(states[:, rows:]), _lists(indices[:, -k:])
    if wanted & _run.ARGMAX:
        assert indices is not None
        argmax = indices[:, 0]
    states = states[:, :rows]
    own = wanted & ~_run.LOGITS_AT
    numbers = (values[name] for name in _OPTIONS)
    row_state, *made = op(states, argmax, top_logits, top_ids, *tokens, *numbers, given, own)
    rest = iter(made)
    found = [next(rest) if own & bit else None for bit in _run.OUTPUTS]
    if at is not None and ids is not None:
        found[_AT] = _run.logprobs_at(at, row_state, ids)
    largest = found[_TOP]
    if largest is not None:
        found[_TOP] = _run.logprobs_of(largest, row_state)
    return Combined(row_state, found)


def _lists(columns: Tensor) -> Tensor:
    """Lists [S, k, N] in the layout that Combine takes, [S, N k]."""
    return columns.transpose(1, 2).flatten(1).contiguous()


def _outputs(states: Tensor, reduction: int, wanted: int) -> list[Tensor | None]:
    tokens = states.shape[2]
    made: list[Tensor | None] = []
    for bit in _run.OUTPUTS:
        scalar = bit == _run.LOSS and reduction != _abi.REDUCTION_NONE
        shape = () if scalar else (tokens, _run.k_of(wanted)) if bit & _run.TOP else (tokens,)
        there = wanted & bit
        made.append(states.new_empty(shape, dtype=_run.dtype_of(bit)) if there else None)
    return made


def _combine(
    states: Tensor, argmax: Tensor | None, top_logits: Tensor | None, top_ids: Tensor | None,
    target: Tensor, token_weight: Tensor | None, vocab_weight: Tensor | None,
    normalizer: Tensor | None, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    *values, given, wanted = rest
    options = Options()._replace(**dict(zip(_OPTIONS, values)))
    rows = iter(range(3, states.shape[1]))
    parts = [states[:, i] for i in range(3)]  # [S, N] each
    extra = [states[:, next(rows)] if given & bit else None for bit in EXTRA]
    row_state = states.new_empty(2, states.shape[2])
    outputs = _outputs(states, options.reduction, wanted)
    weights = (token_weight, vocab_weight, normalizer)
    tensors = (target, *parts, *extra, argmax, top_logits, top_ids, *weights, *outputs)
    asked: Sequence[Any] = (
        given, wanted, states.shape, argmax is None,
        *(None if t is None else (t.dtype, t.device, t.shape, t.stride()) for t in weights),
    )  # fmt: skip
    _run.launch(_abi.COMBINE, _NAMES, tensors, options, None, tuple(asked), row_state)
    return [row_state, *(t for t in outputs if t is not None)]


_REDUCTION = 3 + len(Tokens._fields)  # after argmax, top_logits, top_ids and those of Tokens


def _combine_fake(states: Tensor, *rest: Any) -> list[Tensor]:
    outputs = _outputs(states, rest[_REDUCTION], rest[-1])
    return [states.new_empty(2, states.shape[2]), *(t for t in outputs if t is not None)]


define(
    "shard_combine(Tensor states, Tensor? argmax, Tensor? top_logits, Tensor? top_ids, "
    "Tensor target, Tensor? token_weight, Tensor? vocab_weight, Tensor? normalizer, "
    "int reduction, int ignore_index, int empty_mean, SymInt vocab_total, "
    "float label_smoothing, float z_loss, float normalizer_number, int given, int wanted) "
    "-> Tensor[]",
    _combine, _combine_fake,
)  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""A rank's calls on its own columns, block by block: the row states that are combined later, and
the gradients. Nothing here communicates."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless._abi import Options
from logitless.torch import _ops, _run
from logitless.torch._autograd import Call
from logitless.torch._run import Constants, Upstream
from logitless.torch._split import combine, shards, sums
from logitless.torch._split.combine import EXTRA
from logitless.torch._split.depends import depending
from logitless.torch._split.shards import Given, Shard


class Block(NamedTuple):
    """The inputs of a rank's block of columns, and its call. A block without columns gets one
    made-up column, so that this rank raises the same errors as the others."""

    inputs: tuple[Tensor | None, ...]  # in the order of _run.INPUTS, without token weights
    options: Options
    memory: int | None
    wanted: int
    keeps: bool
    empty: bool

    def kept_bytes(self) -> Any:
        """The bytes for kept state. If there are several blocks, what each keeps must not depend on
        the number of ranks, so they keep everything, or nothing if `memory` is given."""
        input, weight, bias, *constants = self.inputs
        if not self.keeps:
            return 0
        assert input is not None and weight is not None
        call = Call(Constants(*constants), self.options, self.memory, self.wanted)  # type: ignore[arg-type]
        argmax = ("argmax",) if self.wanted & _run.ARGMAX else ()
        extra = (name for bit, name in EXTRA.items() if self.wanted & bit)
        at = ("logits_at",) if self.wanted & _run.LOGITS_AT else ()
        outputs = ("target_logit", *extra, *argmax, *at)
        return _ops.bytes_to_keep(input, weight, bias, call, True, outputs)


def blocks_of(
    shard: Shard, x: Tensor, w: Tensor, b: Tensor | None, constants: Constants, call: Call,
    wanted: int,
) -> list[Block]:  # fmt: skip
    """This rank's blocks."""
    target, _, *rest_of_constants = constants
    rest = (target, None, *rest_of_constants)
    blocks = []
    for first, stop in shard.ranges(w.shape[0]):
        own, bias, start, empty = w[first:stop], _rows_of(b, first, stop), first, first == stop
        if empty:
            own, start = w.new_zeros(1, w.shape[1]), -shard.start
            bias = None if b is None else b.new_zeros(1)
        options = call.options._replace(vocab_start=shard.start + start)
        keeps = shard.keeps and not empty
        blocks.append(Block((x, own, bias, *rest), options, call.memory, wanted, keeps, empty))
    return blocks


def local_targets(shard: Shard, given: Given, w: Tensor, blocks: Sequence[Block]) -> Tensor:
    """[1, N] f32: the logits of the targets that are among this rank's columns, -inf for others."""
    shards.check_rows(shard, w, given)
    found = [_made(b, _run.TARGET_LOGIT, 0, None)[0] for b in blocks if not b.empty]
    if not found:
        target: Any = blocks[0].inputs[3]
        return w.new_full((1, target.shape[0]), -float("inf"), dtype=torch.float32)
    largest: Tensor = functools.reduce(torch.maximum, found)
    return largest


Keeping = tuple[Tensor, Tensor]  # `kept` and `kept_rows` of a block


def _made(
    block: Block, states: int, kept_bytes: Any, anchor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs Forward on a block's columns. Returns the states [m, N] f32 (the last rows are the
    logits at ids, or the largest ones), argmax and top_ids [j, N], and what is kept. `states`: the
    bits of the states and indices that are asked for."""
    forward: Any = torch.ops.logitless.forward
    wanted = states | block.wanted & _FOLLOWING
    results = forward(
        *_ops.arguments(block.inputs, block.options, block.memory, wanted, kept_bytes, anchor)
    )
    made = dict(zip(_ops.RESULTS, results))
    rows = [*made["row_state"]] if states & _run.ROW_STATE else []
    rows += [made[name] for bit, name in _ROWS.items() if states & bit]
    state = torch.stack(rows)
    for bit, name in _COLUMNS.items():
        if states & bit:
            state = torch.cat((state, made[name].t()))
    indices = [made["argmax"][None]] if states & _run.ARGMAX else []
    indices += [made["top_ids"].t()] if states & _run.TOP else []
    none = made["argmax"].new_empty(0, state.shape[1])
    return state, torch.cat(indices) if indices else none, made["kept"], made["kept_rows"]


_ROWS = {_run.TARGET_LOGIT: "target_logit", **EXTRA}
_FOLLOWING = sum(_run.OF_TENSORS) + sum(_run.IN_F32) + _run.OF_ENTROPY
_COLUMNS = {_run.LOGITS_AT: "logits_at", _run.TOP_LOGITS: "top_logits"}
_STATES = _run.ROW_STATE | _run.TARGET_LOGIT | _run.ARGMAX | _run.LOGITS_AT | _run.TOP | sum(EXTRA)


def _local_state(block: Block, anchor: Tensor | None) -> tuple[Tensor, Tensor, Keeping | None]:
    """The states [m, N] f32, argmax and top_ids [j, N], and what is kept, of a block's columns."""
    kept_bytes, exchanged = block.kept_bytes(), anchor
    if block.empty or block.options.vocab_total == block.inputs[1].shape[0]:  # type: ignore[union-attr]
        anchor = None
    wanted = _run.ROW_STATE | _run.TARGET_LOGIT | block.wanted & _STATES
    states, indices, columns, rows = _made(block, wanted, kept_bytes, anchor)
    if block.empty:
        empty = depending(combine.empty_state(states, block.wanted), states, exchanged)
        return empty, torch.full_like(indices, -1), None
    if anchor is not exchanged:
        states = depending(states, exchanged)
    nothing = isinstance(kept_bytes, int) and not kept_bytes
    return states, indices, None if nothing else (columns, rows)


def _rows_of(bias: Tensor | None, first: int, stop: int) -> Tensor | None:
    """The block's rows of the bias."""
    if bias is None:
        return None
    own = bias[first:stop]
    # CUDA's plans, and so the bits, depend on a tensor's alignment.
    return own.clone() if first else own


def local_states(
    shard: Shard, given: Given, w: Tensor, blocks: Sequence[Block], anchor: Tensor | None
) -> tuple[Tensor, Tensor, list[Keeping | None]]:
    """The states [b, m, N] f32, argmax and top_ids [b, j, N], and what is kept, of this rank's
    blocks."""
    shards.check_rows(shard, w, given)
    states, indices, kept = zip(*(_local_state(block, anchor) for block in blocks))
    return _stacked(states), _stacked(indices), list(kept)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(list(parts))


def local_gradients(
    shard: Shard, inputs: Any, options: Options, memory: int | None, wanted: int,
    upstream: Upstream, kept: Sequence[Tensor | None] | None,
) -> tuple[sums.Carries, list[Tensor], list[Tensor]]:  # fmt: skip
    """The blocks' parts of grad_input, added up in a tree; and for each block with columns its rows
    of grad_weight and grad_bias."""
    backward: Any = torch.ops.logitless.backward
    rows, w, b, *constants = inputs
    need_input = bool(wanted & _run.OF_INPUT)
    parts: sums.Carries = []
    weights, biases = [], []
    for i, (first, stop) in enumerate(shard.ranges(w.shape[0])):
        if first < stop:
            own = (rows, w[first:stop], _rows_of(b, first, stop), *constants)
            of_block = options._replace(vocab_start=shard.start + first)
            own_kept = (None, None) if kept is None else kept[2 * i : 2 * i + 2]
            part, weight, bias = backward(
                *_ops.arguments(own, of_block, memory, wanted, *upstream, *own_kept)
            )
            weights.append(weight)
            biases.append(bias)
        elif need_input:
            none = rows.new_zeros(rows.shape, dtype=torch.float32)
            part = depending(none, *inputs, *upstream)
        if need_input:
            sums.carry(parts, part)
    return parts, weights, biases

# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a group exchange, and what they tell each other before they rely on it (on the
CPU only: on a GPU the host would wait). Collectives are torch's functional ones, which
torch.compile traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from logitless._errors import LogitlessError, invalid
from logitless.torch._split import ranks, shards, sums
from logitless.torch._split.shards import Shard


def facts_of(
    shard: Shard, input: Tensor, weight: Tensor, wanted: int, gathered: tuple[int, int] = (0, 0),
    columns: int = 0,
) -> tuple[int, ...]:  # fmt: skip
    """What must fit, or be the same, on all ranks. `gathered`: the teacher's hidden size, and which
    of the teacher's tensors are gathered beside the input. `columns`: the chosen ones of each
    token."""
    stop = shard.start + weight.shape[0]
    tokens, hidden = input.shape[:-1].numel(), input.shape[-1]
    own = (shard.start, stop, shard.total, tokens, hidden, shard.blocks, wanted)
    return *own, shard.keeps, shard.of_input, shard.of_any, *gathered, columns


_SAME = (
    "Split.total", "the number of the input's tokens", "its hidden size", "Split.blocks",
    "what is asked for, in bits,", "whether gradients follow", "whether the input has one",
    "whether anything has a gradient", "the teacher's hidden size",
    "which tensors of tokens are given, in bits,", "the number of ids of a token",
)  # fmt: skip
_NO_FACTS = (0,) * (2 + len(_SAME))


def _check_facts(shard: Shard, facts: Sequence[Sequence[int]]) -> None:
    """Raises unless the facts of all ranks fit."""
    for name, values in zip(_SAME, zip(*(own[2:] for own in facts))):
        if len(set(values)) > 1:
            pad = ""
            if shard.own and name == _SAME[1]:
                pad = " (pad with tokens of ignore_index, which cost no work)"
            raise invalid(f"{name} is {list(values)} on the ranks; allowed: the same on all{pad}")
    shards.check_split(shard, [(start, stop) for start, stop, *_ in facts])


def told(shard: Shard, own: Sequence[int]) -> list[list[int]]:
    """What each rank says."""
    said = all_gather(torch.tensor(own, dtype=torch.int64, device="cpu"), shard)
    lists: list[list[int]] = said.view(shard.size, -1).tolist()
    return lists


def together(shard: Shard, x: Tensor, facts: Sequence[int], function: Any, *args: Any) -> Any:
    """The function's result on this rank. Raises on every rank what the first of them raised, or
    that the facts do not fit: none is left waiting in a collective."""
    if shard.size == 1 or not shards.waits(x):
        return function(*args)
    made, error = None, None
    try:
        made = function(*args)
    except Exception as e:
        error = e
    said = told(shard, (0 if error is None else _FAILED, *facts))
    if facts and not any(failed == _REFUSED for failed, *_ in said):
        _check_facts(shard, [own[1:] for own in said])
    if not any(failed for failed, *_ in said):
        return made
    raise _first(shard, error)


_FAILED, _REFUSED = 1, 2


def _first(shard: Shard, error: Exception | None) -> Exception:
    """The first error of the ranks, at least one of which has one."""
    import torch.distributed as dist

    every: list[Any] = [None] * shard.size
    if error is not None and not isinstance(error, LogitlessError):
        error = RuntimeError(f"{type(error).__name__}: {error}")  # other types may not be picklable
    dist.all_gather_object(every, error, group=ranks.group_of(shard.group))
    first: Exception = next(e for e in every if e is not None)
    return first


def tell(error: LogitlessError, input: Tensor, shard: Shard) -> None:
    """Raises the first error about an argument on every rank: those with correct arguments wait for
    this one at their first exchange."""
    if error.status == "target_out_of_range" and shard.gathered() is not None:
        error.args = (f"{error} (on rank {shard.rank})",)  # whose target it is
    if shard.size == 1 or not shards.waits(input):
        return
    if ranks.ON:
        ranks.instead_of_forward(error, shard)
        return
    told(shard, (_REFUSED, *_NO_FACTS))
    raise _first(shard, error) from None


def all_gather(x: Tensor, shard: Shard) -> Tensor:
    """[P * n, ...] of every rank's [n, ...], in the ranks' order."""
    if shard.size == 1:
        return x
    ops: Any = torch.ops._c10d_functional
    gathered: Tensor = ops.all_gather_into_tensor(x.contiguous(), shard.size, shard.group)
    waited: Tensor = ops.wait_tensor(gathered)
    return waited


def _exchange(x: Tensor, shard: Shard) -> Tensor:
    """[P, n, ...]: this rank's part of every rank's [P * n, ...]."""
    if shard.size == 1:
        return x.unsqueeze(0)
    ops: Any = torch.ops._c10d_functional
    each = [x.shape[0] // shard.size] * shard.size
    parts: Tensor = ops.all_to_all_single(x.contiguous(), each, each, shard.group)
    waited: Tensor = ops.wait_tensor(parts)
    return waited.view(shard.size, each[0], *x.shape[1:])


def all_reduce(x: Tensor, group: str) -> Tensor:
    ops: Any = torch.ops._c10d_functional
    waited: Tensor = ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group))
    return waited


def gather_tokens(x: Tensor, shard: Shard, dim: int) -> Tensor:
    """The whole of a tensor that is split along `dim`, which must be as long on every rank."""
    first = x.movedim(dim, 0)
    return all_gather(first, shard).movedim(0, dim)


def own_tokens(x: Tensor, shard: Shard, dim: int) -> Tensor:
    length = x.shape[dim] // shard.size
    return x.narrow(dim, shard.rank * length, length)


def _summed(x: Tensor, shard: Shard, dtype: torch.dtype) -> Tensor:
    """[n, ...]: this rank's rows of the sum of every rank's [P * n, ...], in the ranks' order; with
    blocks, in a tree that is the same for any P. Two parts have the same sum in either order, so a
    GPU's own reduction may make it, in half the time of an exchange."""
    if shard.size == 2 and x.is_cuda:
        ops: Any = torch.ops._c10d_functional
        own = ops.reduce_scatter_tensor(x.contiguous(), "sum", shard.size, shard.group)
        added: Tensor = ops.wait_tensor(own).to(dtype)
        return added
    parts = _exchange(x, shard)
    if not shard.blocks:
        return sums.ordered_sum(parts).to(dtype)
    carries: sums.Carries = []
    for part in parts:
        sums.carry(carries, part)
    return sums.tree_of(carries).to(dtype)


def reduce_grad_input(part: Tensor, shard: Shard, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The gradient of the input of `shape`, from this rank's part of that of all tokens [N, D]: of
    its own tokens where the input is split, else of all. f32 parts are added in the ranks' order,
    so that every rank gets the same bits, whatever the backend does."""
    dim = shard.sequence_dim
    if dim is not None:
        first = part.view(shard.whole(shape)).movedim(dim, 0)
        if not shard.ordered:
            first = first.to(dtype)
        return _summed(first, shard, dtype).movedim(0, dim)
    if not shard.reduce_input_grad:
        return part.to(dtype).view(shape)
    if not shard.ordered:
        return all_reduce(part.to(dtype), shard.group).view(shape)
    tokens = part.shape[0]
    missing = -tokens % shard.size
    if not isinstance(missing, int) or missing:  # without comparing a symbol to 0
        padded = part.new_zeros(tokens + missing, part.shape[1])
        padded[:tokens] = part
        part = padded
    own = _summed(part, shard, dtype)
    return all_gather(own, shard)[:tokens].view(shape)

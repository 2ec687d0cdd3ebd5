# SPDX-License-Identifier: Apache-2.0
"""The exchanges of the ranks of a group. On the CPU, ranks first compare facts and errors, so that
none is left waiting (on a GPU the host would have to wait for that). Collectives are torch's
functional ones, which torch.compile traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from logitless._errors import LogitlessError, invalid
from logitless.torch._split import ranks, shards, sums
from logitless.torch._split.shards import Shard

# The tensors of tokens that may be gathered.
_OF_TOKENS = (
    "teacher_input", "ids", "target", "token_weight", "temperature", "teacher_temperature",
)  # fmt: skip
_DTYPES = (
    None, torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def _code(dtype: torch.dtype | None) -> int:
    return _DTYPES.index(dtype) if dtype in _DTYPES else -1


def facts_of(
    shard: Shard, input: Tensor, products: torch.dtype | None, weight: Tensor, wanted: int,
    gathered: Mapping[str, torch.dtype | None], columns: int = 0, teacher: int = 0,
) -> tuple[int, ...]:  # fmt: skip
    """The numbers that must fit together, or be the same, on all ranks. `products`: autocast's
    dtype, or None. `gathered`: the dtypes of the tensors of tokens that all ranks must give, or
    none. `columns`: the number of chosen columns of each token. `teacher`: the teacher's hidden
    size."""
    stop, dim = shard.start + weight.shape[0], shard.sequence_dim
    tokens, hidden = input.shape[:-1].numel(), input.shape[-1]
    outer = 0 if dim is None else input.shape[:dim].numel()
    return (
        shard.start, stop, shard.total, shard.blocks, dim is not None, shard.local_tokens,
        shard.reduce_input_grad, shard.ordered, tokens, hidden, outer, _code(input.dtype),
        _code(products), wanted, shard.keeps, shard.of_input, shard.of_any, teacher, columns,
        *(_code(gathered.get(name)) for name in _OF_TOKENS),
    )  # fmt: skip


_TOKENS = "the number of the input's tokens"
_OF_DTYPES = (
    "input's dtype",
    "the products' dtype (None: the input's)",
    *(f"{name}'s dtype (None: no tensor)" for name in _OF_TOKENS),
)
_SAME = (
    "Split.total", "Split.blocks", "whether Split.sequence_dim is given", "Split.local_tokens",
    "Split.reduce_input_grad", "whether Split.reduce_dtype is 'float32'", _TOKENS,
    "its hidden size", "the product of the input's dimensions before sequence_dim",
    *_OF_DTYPES[:2], "what is asked for, in bits,", "whether state is kept for Backward",
    "whether the input has a gradient", "whether anything has a gradient",
    "the teacher's hidden size", "the number of ids of a token", *_OF_DTYPES[2:],
)  # fmt: skip
_NO_FACTS = (0,) * (2 + len(_SAME))


def _dtype_of(code: int) -> str:
    dtype = _DTYPES[code] if code >= 0 else "another"
    return str(dtype).removeprefix("torch.")


def _check_facts(shard: Shard, facts: Sequence[Sequence[int]]) -> None:
    """Raises unless the facts of all ranks fit."""
    for name, values in zip(_SAME, zip(*(own[2:] for own in facts))):
        if len(set(values)) > 1:
            pad = ""
            if shard.own and name == _TOKENS:
                pad = " (pad with tokens of ignore_index, which cost no work)"
            found = ", ".join(map(_dtype_of if name in _OF_DTYPES else str, values))
            raise invalid(f"{name} is [{found}] on the ranks; allowed: the same on all{pad}")
    shards.check_split(shard, [(start, stop) for start, stop, *_ in facts])


def told(shard: Shard, own: Sequence[int]) -> list[list[int]]:
    """The numbers `own` of every rank."""
    said = all_gather(torch.tensor(own, dtype=torch.int64, device="cpu"), shard)
    lists: list[list[int]] = said.view(shard.size, -1).tolist()
    return lists


def together(shard: Shard, x: Tensor, facts: Sequence[int], function: Any, *args: Any) -> Any:
    """The function's result on this rank. If it raises on any rank, or the facts do not fit, every
    rank raises the first error, so that none is left waiting in a collective."""
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
    """The error of the first rank that has one; at least one rank must."""
    import torch.distributed as dist

    every: list[Any] = [None] * shard.size
    if error is not None and not isinstance(error, LogitlessError):
        error = RuntimeError(f"{type(error).__name__}: {error}")  # other types may not be picklable
    dist.all_gather_object(every, error, group=ranks.group_of(shard.group))
    first: Exception = next(e for e in every if e is not None)
    return first


def tell(error: Exception, input: Tensor, shard: Shard) -> None:
    """Called by a rank with a wrong argument: raises the first such error on every rank. The ranks
    with correct arguments wait for this rank at their first exchange."""
    if getattr(error, "status", "") == "target_out_of_range" and shard.gathered() is not None:
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
    """Gathers a tensor that is split along `dim`, with the same length on every rank."""
    first = x.movedim(dim, 0)
    return all_gather(first, shard).movedim(0, dim)


def own_tokens(x: Tensor, shard: Shard, dim: int) -> Tensor:
    length = x.shape[dim] // shard.size
    return x.narrow(dim, shard.rank * length, length)


def _summed(x: Tensor, shard: Shard, dtype: torch.dtype) -> Tensor:
    """[n, ...]: this rank's rows of the sum of all ranks' [P * n, ...], added in the ranks' order
    or, with blocks, in a tree that is the same for any P. Two parts have the same sum in either
    order, so for P = 2 a GPU's own reduce-scatter is used, which takes half the time."""
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
    """The gradient of the input, in its `shape`, from every rank's part [N, D] for all tokens. If
    the input is split, the result is for this rank's own tokens, otherwise for all. If
    `shard.ordered`, the f32 parts are added in the ranks' order, so that every rank gets the same
    bits, whatever the backend does."""
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

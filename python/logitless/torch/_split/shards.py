# SPDX-License-Identifier: Apache-2.0
"""Which columns a rank has, and checks of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless._errors import invalid, wrong_device, wrong_shape
from logitless.torch._checks import check_target
from logitless.torch._split import ranks
from logitless.torch._split.given import Split, check_group, of_integers


class Shard(NamedTuple):
    """Which columns this rank has, and how the group exchanges."""

    group: str
    rank: int
    size: int
    start: int
    total: int
    sequence_dim: int | None = None
    local_tokens: bool = False
    reduce_input_grad: bool = True
    ordered: bool = True  # grad_input's parts are added in f32 in the ranks' order
    blocks: int = 0  # number of separate blocks of all ranks; 0: a rank's columns are one
    own: bool = False  # each rank has its own tokens and loss; grad_weight is of the losses' mean
    replicas: str = ""  # the group of the ranks with the same columns and other tokens
    divisor: float = 1.0  # of the sum of all ranks' grad_weight
    keeps: bool = False  # whether Forward keeps state for Backward, where memory allows
    of_input: bool = False  # Backward will be asked for the input's gradient, which is exchanged
    of_any: bool = False  # a Backward, in which ranks exchange, may follow

    def gathered(self) -> tuple[int, int] | None:
        """The dimension along which targets are gathered, and the number of ranks."""
        if self.sequence_dim is None or not self.local_tokens:
            return None
        return self.sequence_dim, self.size

    def whole(self, shape: Sequence[int]) -> list[int]:
        """The shape for all tokens of a tensor that has `shape` for a rank's own tokens."""
        made = list(shape)
        if self.sequence_dim is not None:
            made[self.sequence_dim] *= self.size
        return made

    def ranges(self, rows: int) -> list[tuple[int, int]]:
        """Where this rank's blocks begin and end among its own rows."""
        if not self.blocks:
            return [(0, rows)]
        width, own = -(-self.total // self.blocks), self.blocks // self.size
        stops = [min((i + 1) * width, rows) for i in range(own)]
        return [(min(i * width, stop), stop) for i, stop in enumerate(stops)]


class Data(NamedTuple):
    """Facts for a call whose weight is sharded over ranks that have different tokens."""

    dtype: torch.dtype | None  # of the products
    replicas: str
    divisor: float

    def shard(self, shard: Shard) -> Shard:
        """The shard with these facts, for a call whose tokens have one dimension."""
        return shard._replace(
            sequence_dim=0, local_tokens=True, own=True, replicas=self.replicas,
            divisor=self.divisor,
        )  # fmt: skip


def _default_split(
    weight: Tensor, rank: int, size: int, total: int | None, blocks: int
) -> tuple[int, int]:
    """(start, total) of torch.chunk's split, or of equal shards, the last of which may be partly or
    completely padding."""
    rows = weight.shape[0]
    if total is None:
        return rank * rows, size * rows
    each = max(rows, -(-total // size))
    start = min(rank * each, total)
    if rows < min(each, total - start) and not blocks and not waits(weight):
        raise wrong_shape(
            f"linear_weight has {rows} rows on rank {rank} of {size}; allowed: "
            f"{min(each, total - start)}, as torch.chunk splits a vocabulary of {total}, or "
            "another split with Split.start"
        )
    return start, total


def _of_name(name: str) -> tuple[str, int, int]:
    """(name, rank, size) of a group."""
    import torch.distributed as dist

    group = ranks.group_of(name)
    return name, dist.get_rank(group), dist.get_world_size(group)


_of_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see _memory.default


def _check_backend(name: str) -> None:
    """Refuses an input on the CPU if the group has no collectives there."""
    import torch.distributed as dist

    backends = dist.get_backend_config(ranks.group_of(name))  # such as "cpu:gloo,cuda:nccl"
    devices = [backend.partition(":")[0] for backend in backends.split(",")]
    if "cpu" not in devices:
        raise wrong_device(
            f"input is on cpu; allowed: {', '.join(devices)}, where the group's ranks exchange "
            f"({backends})"
        )


def shard_of(split: Split, input: Tensor, weight: Tensor) -> Shard:
    """The shard, with the caller's group and Split checked."""
    import torch.distributed as dist

    split = of_integers(split)
    group, sequence_dim = split.group, split.sequence_dim
    if group is None:
        check_group(split)
        blocks = _check_blocks(split.blocks, 1, split.reduce_dtype)
        return Shard("", 0, 1, 0, weight.shape[0], blocks=blocks)
    if not (dist.is_available() and dist.is_initialized()):
        raise invalid("group is given, but torch.distributed is not initialized")
    if isinstance(group, str):
        name, rank, size = _of_name(group)
    elif isinstance(group, dist.ProcessGroup):
        name, rank, size = group.group_name, dist.get_rank(group), dist.get_world_size(group)
    else:
        raise invalid(
            f"group is a {type(group).__name__}; allowed: a torch.distributed.ProcessGroup that "
            "this rank belongs to, or its name"
        )
    if size > 1 and waits(input):
        _check_backend(name)
    if split.start is not None and split.total is None:
        raise invalid("Split.start is given without Split.total, the columns of all ranks together")
    blocks = _check_blocks(split.blocks, size, split.reduce_dtype)
    if split.start is None or split.total is None:
        start, total = _default_split(weight, rank, size, split.total, blocks)
    else:
        start, total = split.start, split.total
    if blocks and split.start is None:
        start, _ = _block_rows(blocks, rank, size, total)
    if total < 1:
        raise invalid(f"Split.total is {total}; allowed: >= 1")
    if start < 0:
        raise invalid(f"Split.start is {start}; allowed: >= 0")
    start = min(start, total)  # a shard may be only padding
    if split.reduce_dtype not in ("float32", "input"):
        raise invalid(f"reduce_dtype is {split.reduce_dtype!r}; allowed: 'float32', 'input'")
    if split.local_tokens and sequence_dim is None:
        raise invalid("local_tokens is True without sequence_dim; every rank has all tokens")
    if sequence_dim is not None:
        if not split.reduce_input_grad:
            raise invalid(
                "reduce_input_grad is False with sequence_dim; the gradient of a rank's own tokens "
                "is a sum over the ranks"
            )
        if not 0 <= sequence_dim % input.dim() < input.dim() - 1:
            raise wrong_shape(
                f"sequence_dim is {sequence_dim} of an input of shape {tuple(input.shape)}; "
                "allowed: one of its dimensions but the last"
            )
        sequence_dim %= input.dim()
    return Shard(
        name, rank, size, start, total, sequence_dim, bool(split.local_tokens),
        bool(split.reduce_input_grad), split.reduce_dtype == "float32", blocks,
    )  # fmt: skip


def _check_blocks(blocks: int | None, size: int, reduce_dtype: str) -> int:
    if blocks is None:
        return 0
    if type(blocks) is not int or blocks < 1 or blocks & (blocks - 1) or blocks % size:
        raise invalid(
            f"Split.blocks is {blocks!r} with {size} ranks; allowed: a power of two that the ranks "
            "divide"
        )
    if reduce_dtype != "float32":
        raise invalid("Split.blocks is given with reduce_dtype 'input', whose sum has no order")
    return blocks


def _block_rows(blocks: int, rank: int, size: int, total: int) -> tuple[int, int]:
    """The first of a rank's columns, and their number: whole blocks of equal width, the last ones
    narrower or empty."""
    each = blocks // size * -(-total // blocks)
    start = min(rank * each, total)
    return start, min(each, total - start)


Given = tuple[Tensor, Tensor | None]  # a rank's weight and bias, with padding


def _check_bias_rows(weight: Tensor, bias: Tensor | None) -> None:
    """Checks the bias in the caller's shapes, before padding is cut off and blocks are made."""
    if bias is not None and bias.shape[0] != weight.shape[0]:
        raise wrong_shape(
            f"linear_bias has shape {tuple(bias.shape)}; allowed: ({weight.shape[0]},)"
        )


def check_rows(shard: Shard, weight: Tensor, given: Given) -> None:
    """Checks a rank's rows; `weight` is the given one without padding."""
    _check_bias_rows(*given)
    if not shard.blocks:
        return
    start, rows = _block_rows(shard.blocks, shard.rank, shard.size, shard.total)
    if (shard.start, weight.shape[0]) != (start, rows):
        raise invalid(
            f"rank {shard.rank} of {shard.size} has the columns from {shard.start} on, "
            f"{weight.shape[0]} of them; allowed with Split.blocks {shard.blocks} of {shard.total} "
            f"columns: {rows} from {start} on"
        )


def check_tokens(
    input: Tensor, target: Any, shard: Shard, shift: int, check: Any = check_target
) -> None:
    """Checks with `check` that the target or the ids have the shape of all tokens, or of the rank's
    own."""
    dim = shard.sequence_dim
    if dim is None or shard.local_tokens or not isinstance(target, Tensor):
        check(input, target, "input")
        if shift and dim == input.dim() - 2 and shard.size > 1:
            raise invalid(
                "shift moves targets along the dimension that is split, and a rank has its own "
                "only; pass those of all tokens, without local_tokens, or shift them before"
            )
        return
    shape = shard.whole(input.shape)
    what = f"the whole input, which is split equally along sequence_dim {dim} over {shard.size},"
    check(torch.empty(shape, device="meta"), target, what)


def of_one(shard: Shard, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The weight and bias for the call without a group that replaces one of a single rank."""
    _check_bias_rows(weight, bias)
    check_split(shard, [(shard.start, shard.start + weight.shape[0])])
    return columns(shard, weight, bias)


def waits(x: Tensor) -> bool:
    return x.is_cpu and not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack())


def check_split(shard: Shard, ranges: Sequence[tuple[int, int]]) -> None:
    """Checks that each rank's columns follow those of the rank before, and none is missing."""
    cut = [(start, min(stop, shard.total)) for start, stop in ranges]
    end = 0
    for start, stop in cut:
        if start < stop:
            end = stop if start == end else -1
    if end != shard.total:
        found = ", ".join(f"[{start}, {stop})" for start, stop in cut)
        raise invalid(
            f"the ranks have the columns {found} of a vocabulary of {shard.total}; allowed: each "
            "column once, in the ranks' order (Split.start, Split.total and linear_weight's rows)"
        )


def columns(shard: Shard, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The rows that are columns of the vocabulary; padding follows them."""
    padding = max(weight.shape[0] - (shard.total - shard.start), 0)
    if not padding:
        return weight, bias
    bias = None if bias is None else bias[: max(bias.shape[0] - padding, 0)]
    return weight[: weight.shape[0] - padding], bias

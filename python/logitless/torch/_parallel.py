# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that is split over a process group: every rank holds some rows of the weight; hidden
states and targets are the same on all, or the hidden states are split along a dimension of tokens.

    forward    where gradients follow, the targets' logits first, exchanged by 4 bytes a token and
               rank: what each rank's Forward keeps of its columns is relative to them. Then each
               rank's Forward; one all-gather of the rows' states, 12 bytes a token and rank, and 4
               more for each of entropy, smoothing and the like; every rank folds them in the ranks'
               order (_shards.py)
    backward   each rank's Backward on its columns, from the global states and what it has kept: its
               grad_weight is done, its grad_input is a part in f32, which the ranks exchange and
               add up in their order
    own        where each rank has tokens and a loss of its own (Shard.own: data parallelism),
               hidden states and targets are gathered first, grad_input's sums go to the tokens'
               owners, and grad_weight is that of the mean of the ranks' losses, as FSDP's
    errors     on the CPU the ranks tell each other before they exchange, and raise the same one

Collectives are torch's functional ones, which torch.compile traces.
"""

from __future__ import annotations

import functools
import pathlib
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from logitless import _abi
from logitless._abi import Options
from logitless._errors import (
    LogitlessError,
    argument,
    invalid,
    not_supported,
    wrong_device,
    wrong_shape,
)
from logitless.torch import _autograd, _combine, _kept, _ops, _ranks, _run, _shards
from logitless.torch._autograd import Call, asked_of, cast, cast_bias, once, taken
from logitless.torch._checks import check_target
from logitless.torch._combine import EXTRA
from logitless.torch._device import allows_tf32
from logitless.torch._run import Constants, Upstream
from logitless.torch._shards import Tokens
from logitless.torch._split import Split, check_group

_DIFFERENTIABLE = tuple(
    bit for bit in _run.OUTPUTS if bit & (_run.LOSS | _run.DIFFERENTIABLE)
)  # the first of the outputs


class Shard(NamedTuple):
    """Where this rank's columns lie, and how the group exchanges."""

    group: str
    rank: int
    size: int
    start: int
    total: int
    sequence_dim: int | None = None
    local_tokens: bool = False
    reduce_input_grad: bool = True
    ordered: bool = True  # grad_input's parts are added in f32 in the ranks' order
    blocks: int = 0  # of all ranks, each computed by itself; 0: a rank's columns are one
    own: bool = False  # a rank's loss is of its own tokens alone, and grad_weight their mean
    replicas: str = ""  # the group of the ranks with the same columns and other tokens
    divisor: float = 1.0  # of the sum of all their grad_weight
    keeps: bool = False  # Forward keeps for Backward what it can
    of_input: bool = False  # Backward will be asked for the input's gradient, which is exchanged
    of_any: bool = False  # Backward, where ranks meet, may come

    def gathered(self) -> tuple[int, int] | None:
        """Along which dimension the targets are gathered, and of how many ranks."""
        if self.sequence_dim is None or not self.local_tokens:
            return None
        return self.sequence_dim, self.size

    def ranges(self, rows: int) -> list[tuple[int, int]]:
        """Where this rank's blocks begin and end among its own rows."""
        if not self.blocks:
            return [(0, rows)]
        width, own = -(-self.total // self.blocks), self.blocks // self.size
        stops = [min((i + 1) * width, rows) for i in range(own)]
        return [(min(i * width, stop), stop) for i, stop in enumerate(stops)]


class Data(NamedTuple):
    """What a call is told where the weight is sharded over the ranks that share the tokens out."""

    dtype: torch.dtype | None  # of the products
    replicas: str
    divisor: float

    def shard(self, shard: Shard) -> Shard:
        """Tokens are flat by then."""
        return shard._replace(
            sequence_dim=0, local_tokens=True, own=True, replicas=self.replicas,
            divisor=self.divisor,
        )  # fmt: skip


def _default_split(
    weight: Tensor, rank: int, size: int, total: int | None, blocks: int
) -> tuple[int, int]:
    """torch.chunk's, or equal shards, of which the last ones may be padded or padding alone."""
    rows = weight.shape[0]
    if total is None:
        return rank * rows, size * rows
    each = max(rows, -(-total // size))
    start = min(rank * each, total)
    if rows < min(each, total - start) and not blocks and not _waits(weight):
        raise wrong_shape(
            f"linear_weight has {rows} rows on rank {rank} of {size}; allowed: "
            f"{min(each, total - start)}, as torch.chunk splits a vocabulary of {total}, or "
            "another split with Split.start"
        )
    return start, total


def _of_name(name: str) -> tuple[str, int, int]:
    """(name, rank, size) of a group."""
    import torch.distributed as dist

    group = _ranks.group_of(name)
    return name, dist.get_rank(group), dist.get_world_size(group)


_of_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see _memory.default


def shard_of(split: Split, input: Tensor, weight: Tensor) -> Shard:
    """Checks what the caller says of the group and its shard."""
    import torch.distributed as dist

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
    start = min(start, total)  # a shard may be padding alone
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
        name, rank, size, start, total, sequence_dim, split.local_tokens, split.reduce_input_grad,
        split.reduce_dtype == "float32", blocks,
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
    """Where a rank's columns begin, and how many it has: whole blocks of equal width, the last ones
    narrower or empty."""
    each = blocks // size * -(-total // blocks)
    start = min(rank * each, total)
    return start, min(each, total - start)


Given = tuple[Tensor, Tensor | None]  # a rank's weight and bias, with what is padding


def _check_bias_rows(weight: Tensor, bias: Tensor | None) -> None:
    """In the caller's own shapes, of which a block, or what is left without padding, has none."""
    if bias is not None and bias.shape[0] != weight.shape[0]:
        raise wrong_shape(
            f"linear_bias has shape {tuple(bias.shape)}; allowed: ({weight.shape[0]},)"
        )


def _check_rows(shard: Shard, weight: Tensor, given: Given) -> None:
    """`weight` is what is left of the one given without padding."""
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


def check_tokens(input: Tensor, target: Any, shard: Shard, shift: int) -> None:
    """The target has the shape of all tokens, or of the rank's own."""
    dim = shard.sequence_dim
    if dim is None or shard.local_tokens or not isinstance(target, Tensor):
        check_target(input, target, "input")
        if shift and dim == input.dim() - 2 and shard.size > 1:
            raise invalid(
                "shift moves targets along the dimension that is split, and a rank has its own "
                "only; pass those of all tokens, without local_tokens, or shift them before"
            )
        return
    shape = list(input.shape)
    shape[dim] *= shard.size
    what = f"the whole input, which is split equally along sequence_dim {dim} over {shard.size},"
    check_target(torch.empty(shape, device="meta"), target, what)


def of_one(shard: Shard, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Of a group of one: what the call without a group is given."""
    _check_bias_rows(weight, bias)
    _check_split(shard, [(shard.start, shard.start + weight.shape[0])])
    return _columns(shard, weight, bias)


# --- what the ranks tell each other before they rely on it, on the CPU: a GPU would wait ---


def _waits(x: Tensor) -> bool:
    return x.is_cpu and not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack())


def _check_split(shard: Shard, ranges: Sequence[tuple[int, int]]) -> None:
    """Every rank's columns follow those of the rank before it, and none is missing."""
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


def _facts(shard: Shard, input: Tensor, weight: Tensor, wanted: int) -> tuple[int, ...]:
    """What must fit, or be the same, on all ranks."""
    stop = shard.start + weight.shape[0]
    tokens, hidden = input.shape[:-1].numel(), input.shape[-1]
    own = (shard.start, stop, shard.total, tokens, hidden, shard.blocks, wanted)
    return *own, shard.keeps, shard.of_input, shard.of_any


_SAME = (
    "Split.total", "the number of the input's tokens", "its hidden size", "Split.blocks",
    "what is asked for, in bits,", "whether gradients follow", "whether the input has one",
    "whether anything has a gradient",
)  # fmt: skip
_NO_FACTS = (0,) * (2 + len(_SAME))


def _check_facts(shard: Shard, facts: Sequence[Sequence[int]]) -> None:
    """Of every rank."""
    for name, values in zip(_SAME, zip(*(own[2:] for own in facts))):
        if len(set(values)) > 1:
            pad = ""
            if shard.own and name == _SAME[1]:
                pad = " (pad with tokens of ignore_index, which cost no work)"
            raise invalid(f"{name} is {list(values)} on the ranks; allowed: the same on all{pad}")
    _check_split(shard, [(start, stop) for start, stop, *_ in facts])


def _told(shard: Shard, own: Sequence[int]) -> list[list[int]]:
    """What each rank says."""
    said = _all_gather(torch.tensor(own, dtype=torch.int64, device="cpu"), shard)
    lists: list[list[int]] = said.view(shard.size, -1).tolist()
    return lists


def _together(shard: Shard, x: Tensor, facts: Sequence[int], function: Any, *args: Any) -> Any:
    """What the function makes on this rank. Raises on every rank what the first of them has raised,
    or that the facts do not fit: none is left waiting in a collective."""
    if shard.size == 1 or not _waits(x):
        return function(*args)
    made, error = None, None
    try:
        made = function(*args)
    except Exception as e:
        error = e
    said = _told(shard, (0 if error is None else _FAILED, *facts))
    if facts and not any(failed == _REFUSED for failed, *_ in said):
        _check_facts(shard, [own[1:] for own in said])
    if not any(failed for failed, *_ in said):
        return made
    raise _first(shard, error)


_FAILED, _REFUSED = 1, 2


def _first(shard: Shard, error: Exception | None) -> Exception:
    """The first error of the ranks, one of which has one."""
    import torch.distributed as dist

    every: list[Any] = [None] * shard.size
    if error is not None and not isinstance(error, LogitlessError):
        error = RuntimeError(f"{type(error).__name__}: {error}")  # others may not be sent
    dist.all_gather_object(every, error, group=_ranks.group_of(shard.group))
    first: Exception = next(e for e in every if e is not None)
    return first


def tell(error: LogitlessError, input: Tensor, shard: Shard) -> None:
    """Raises on every rank the first error about an argument: the others, whose arguments may be
    right, wait for this one where they first meet."""
    if shard.size == 1 or not _waits(input):
        return
    if _ranks.ON:
        _ranks.instead_of_forward(error, shard)
        return
    _told(shard, (_REFUSED, *_NO_FACTS))
    raise _first(shard, error) from None


# --- collectives ---


def _all_gather(x: Tensor, shard: Shard) -> Tensor:
    """[P * n, ...] of every rank's [n, ...], in the ranks' order."""
    if shard.size == 1:
        return x
    ops: Any = torch.ops._c10d_functional
    gathered: Tensor = ops.all_gather_into_tensor(x.contiguous(), shard.size, shard.group)
    waited: Tensor = ops.wait_tensor(gathered)
    return waited


def _exchange(x: Tensor, shard: Shard) -> Tensor:
    """[P, n, ...] of [P * n, ...]: this rank's part of every rank's."""
    if shard.size == 1:
        return x.unsqueeze(0)
    ops: Any = torch.ops._c10d_functional
    each = [x.shape[0] // shard.size] * shard.size
    parts: Tensor = ops.all_to_all_single(x.contiguous(), each, each, shard.group)
    waited: Tensor = ops.wait_tensor(parts)
    return waited.view(shard.size, each[0], *x.shape[1:])


def _all_reduce(x: Tensor, group: str) -> Tensor:
    ops: Any = torch.ops._c10d_functional
    waited: Tensor = ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group))
    return waited


def gather_tokens(x: Tensor, shard: Shard, dim: int) -> Tensor:
    """The whole of a tensor that is split along `dim`, which must be as long on every rank."""
    first = x.movedim(dim, 0)
    return _all_gather(first, shard).movedim(0, dim)


def own_tokens(x: Tensor, shard: Shard, dim: int) -> Tensor:
    length = x.shape[dim] // shard.size
    return x.narrow(dim, shard.rank * length, length)


def _summed(x: Tensor, shard: Shard, dtype: torch.dtype) -> Tensor:
    """[n, ...] of every rank's [P * n, ...]: this rank's rows of the sum, in the ranks' order; of
    blocks in a tree that is the same for any P. Two parts have the same sum in either order, so
    that a GPU's own reduction may make it, which takes half the time of an exchange."""
    if shard.size == 2 and x.is_cuda:
        ops: Any = torch.ops._c10d_functional
        own = ops.reduce_scatter_tensor(x.contiguous(), "sum", shard.size, shard.group)
        added: Tensor = ops.wait_tensor(own).to(dtype)
        return added
    parts = _exchange(x, shard)
    if not shard.blocks:
        return _shards.ordered_sum(parts).to(dtype)
    carries: _shards.Carries = []
    for part in parts:
        _shards.carry(carries, part)
    return _shards.tree_of(carries).to(dtype)


def reduce_grad_input(part: Tensor, shard: Shard, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The gradient of the input of `shape`, from this rank's part of that of all tokens [N, D]: of
    its own tokens where the input is split, else of all. f32 parts are added in the ranks' order,
    so that every rank gets the same bits, whatever the backend does."""
    dim = shard.sequence_dim
    if dim is not None:
        whole = list(shape)
        whole[dim] *= shard.size
        first = part.view(whole).movedim(dim, 0)
        if not shard.ordered:
            first = first.to(dtype)
        return _summed(first, shard, dtype).movedim(0, dim)
    if not shard.reduce_input_grad:
        return part.to(dtype).view(shape)
    if not shard.ordered:
        return _all_reduce(part.to(dtype), shard.group).view(shape)
    tokens = part.shape[0]
    missing = -tokens % shard.size
    if not isinstance(missing, int) or missing:  # a symbol is not asked whether it is 0
        padded = part.new_zeros(tokens + missing, part.shape[1])
        padded[:tokens] = part
        part = padded
    own = _summed(part, shard, dtype)
    return _all_gather(own, shard)[:tokens].view(shape)


# --- the loss ---


def _columns(shard: Shard, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The rows that are columns of the vocabulary: padding lies behind them."""
    padding = max(weight.shape[0] - (shard.total - shard.start), 0)
    if not padding:
        return weight, bias
    bias = None if bias is None else bias[: max(bias.shape[0] - padding, 0)]
    return weight[: weight.shape[0] - padding], bias


class Block(NamedTuple):
    """What a rank's block of columns is computed of, and its call is asked for. For a block without
    columns one that is nobody's stands in, so that this rank refuses what the others refuse."""

    inputs: tuple[Tensor | None, ...]  # in the order of _run.INPUTS, without token weights
    options: Options
    memory: int | None
    wanted: int
    keeps: bool
    empty: bool

    def kept_bytes(self) -> Any:
        """What is kept beside both calls' workspaces. Each of several blocks must keep as much on
        any number of ranks, so that they keep all of it, or nothing where memory is bounded."""
        input, weight, bias, *constants = self.inputs
        if not self.keeps:
            return 0
        assert input is not None and weight is not None
        call = Call(Constants(*constants), self.options, self.memory, self.wanted)  # type: ignore[arg-type]
        argmax = ("argmax",) if self.wanted & _run.ARGMAX else ()
        extra = (name for bit, name in EXTRA.items() if self.wanted & bit)
        outputs = ("target_logit", *extra, *argmax)
        return _ops.bytes_to_keep(input, weight, bias, call, True, outputs)


def _blocks_of(
    shard: Shard, x: Tensor, w: Tensor, b: Tensor | None, constants: Constants, call: Call,
    wanted: int,
) -> list[Block]:  # fmt: skip
    """This rank's."""
    target, _, vocab_weight, normalizer, temperature = constants
    rest = (target, None, vocab_weight, normalizer, temperature)
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


def _local_targets(shard: Shard, given: Given, w: Tensor, blocks: Sequence[Block]) -> Tensor:
    """[1, N] f32: the targets' logits, of those that are this rank's columns; else -inf."""
    _check_rows(shard, w, given)
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
    """Of a block's columns [k, N] f32, argmax [N] or [0], and what is kept. `states`: the bits of
    the row's state that are asked for, beside what may follow."""
    forward: Any = torch.ops.logitless.forward
    wanted = states | block.wanted & _FOLLOWING
    results = forward(
        *_ops.arguments(block.inputs, block.options, block.memory, wanted, kept_bytes, anchor)
    )
    made = dict(zip(_ops.RESULTS, results))
    rows = [*made["row_state"]] if states & _run.ROW_STATE else []
    rows += [made[name] for bit, name in _ROWS.items() if states & bit]
    return torch.stack(rows), made["argmax"], made["kept"], made["kept_rows"]


_ROWS = {_run.TARGET_LOGIT: "target_logit", **EXTRA}
_FOLLOWING = sum(_run.OF_TENSORS) + sum(_run.IN_F32) + _run.OF_ENTROPY
_STATES = _run.ROW_STATE | _run.TARGET_LOGIT | _run.ARGMAX | sum(EXTRA)


def _local_state(block: Block, anchor: Tensor | None) -> tuple[Tensor, Tensor, Keeping | None]:
    """[k, N] f32, argmax, and what is kept, of a block's columns."""
    kept_bytes = block.kept_bytes()
    if block.empty or block.options.vocab_total == block.inputs[1].shape[0]:  # type: ignore[union-attr]
        anchor = None
    wanted = _run.ROW_STATE | _run.TARGET_LOGIT | block.wanted & _STATES
    states, argmax, columns, rows = _made(block, wanted, kept_bytes, anchor)
    if block.empty:
        empty = _combine.empty_state(states.shape[1], states, block.wanted)
        return empty, torch.full_like(argmax, -1), None
    nothing = isinstance(kept_bytes, int) and not kept_bytes
    return states, argmax, None if nothing else (columns, rows)


def _rows_of(bias: Tensor | None, first: int, stop: int) -> Tensor | None:
    """A block's own."""
    if bias is None:
        return None
    own = bias[first:stop]
    # CUDA's plans, and so the bits, depend on how a tensor is aligned.
    return own.clone() if first else own


def _local_states(
    shard: Shard, given: Given, w: Tensor, blocks: Sequence[Block], anchor: Tensor | None
) -> tuple[Tensor, Tensor, list[Keeping | None]]:
    """[b, k, N] f32, argmax [b, N] and what is kept, of this rank's blocks."""
    _check_rows(shard, w, given)
    states, argmax, kept = zip(*(_local_state(block, anchor) for block in blocks))
    return _stacked(states), _stacked(argmax), list(kept)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(list(parts))


_ENTROPY = list(_run.OUTPUTS).index(_run.ENTROPY)


def _as_result(x: Tensor, shard: Shard, local_tokens: bool) -> Tensor:
    """A result of its own, which may be changed in place; of the rank's own tokens if asked."""
    if local_tokens and shard.sequence_dim is not None:
        x = own_tokens(x, shard, shard.sequence_dim)
    return x.clone()


def _flat(constants: Constants) -> Constants:
    """With targets and token weights [N]."""
    target, token_weight, *rest = constants
    return Constants(
        target.reshape(-1), None if token_weight is None else token_weight.reshape(-1), *rest
    )


class ShardedLoss(Function):
    """The outputs in the order of _run.OUTPUTS; None where not wanted."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, call: Call, shard: Shard
    ) -> tuple[Tensor | None, ...]:
        ctx.call, ctx.shard = call, shard
        ctx.set_materialize_grads(False)
        x, w, b = input, weight, bias
        if call.dtype is not None:
            x, w, b = cast(x, call.dtype), cast(w, call.dtype), cast_bias(b, call.dtype)
        constants, options, wanted = call.release(), call.options, call.wanted
        dim, shape = shard.sequence_dim, constants.target.shape
        counted = constants
        facts = _facts(shard, x, w, wanted) if _waits(x) else ()
        if dim is not None:
            # The sizes of what is gathered depend on them.
            _together(shard, x, facts, lambda: None)
            facts = ()
            x = gather_tokens(x, shard, dim)
            if shard.local_tokens:
                constants = _gathered(constants, shard, dim)
                shape = constants.target.shape
        rows = x.reshape(-1, x.shape[-1])  # [N, D]
        constants = _flat(constants)
        if options.label_smoothing > 0:
            wanted |= _run.WEIGHTED
        if shard.of_any:
            wanted |= _followed_by(ctx.needs_input_grad, (x, w, b), (weight, bias), shard)
            wanted |= _run.OF_ENTROPY if call.of_entropy else 0
        given = (w, b)
        w, b = _columns(shard, w, b)
        blocks = (shard, given, w, _blocks_of(shard, rows, w, b, constants, call, wanted))
        anchor = None
        if shard.keeps:
            own = _together(shard, rows, facts, _local_targets, *blocks)
            anchor, facts = _all_gather(own, shard).amax(0), ()  # [N]
        local, argmax, kept = _together(shard, rows, facts, _local_states, *blocks, anchor)
        states = _all_gather(local, shard)  # [P b, k, N]
        indices = _all_gather(argmax, shard) if call.wanted & _run.ARGMAX else None
        tokens = Tokens(*constants[:4])
        whole, local_tokens = options, shard.local_tokens and dim is not None
        if local_tokens:  # the loss is reduced of the rank's own tokens
            whole = options._replace(reduction=_abi.REDUCTION_NONE, normalizer=0.0)
            tokens = tokens._replace(normalizer=None)
        row_state, found = _combine.combine(states, indices, tokens, whole, wanted, call.wanted)
        entropy = found[_ENTROPY]
        outputs = [
            t if t is None or t.dim() == 0 else _as_result(t.view(shape), shard, local_tokens)
            for t in found
        ]
        if local_tokens:
            counted = _flat(counted) if shard.own else constants
            outputs[0] = _reduced(outputs[0], Tokens(*counted[:4]), options)
        gathered_rows = None if dim is None else rows
        keeping = [t for pair in kept for t in pair or (None, None)]
        ctx.save_for_backward(
            input, weight, bias, *constants, row_state, entropy, gathered_rows, *keeping
        )
        ctx.unused = [_tf32(rows)]  # what is kept serves one Backward at a time
        ctx.shape, ctx.dtype, ctx.whole = input.shape, input.dtype, shape
        constant = [
            t for t, bit in zip(outputs, _run.OUTPUTS) if t is not None and bit in _run.CONSTANTS
        ]
        detached = outputs[_ENTROPY] if call.wanted & _run.DETACHED else None
        if detached is not None:
            constant.append(detached)
        ctx.mark_non_differentiable(*constant)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return *ShardedLoss._gradients(ctx, *upstream), None, None
        with torch.no_grad():
            grads = ShardedLoss._gradients(ctx, *upstream)
        return *once((*ctx.saved_tensors[:3], *upstream), grads), None, None

    @staticmethod
    def _gradients(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        call, shard, needs = ctx.call, ctx.shard, ctx.needs_input_grad
        if _ranks.ON and shard.size > 1:
            _ranks.before_backward(upstream, needs[0], ctx.saved_tensors, shard)
        input, weight, bias, *rest = ctx.saved_tensors
        constants, (row_state, entropy, rows), kept = Constants(*rest[:5]), rest[5:8], rest[8:]
        options: Options = call.options
        grads: Sequence[Tensor | None] = upstream
        if shard.local_tokens:
            grads = _whole_upstream(upstream, call.wanted, constants, options, shard, ctx.whole)
            constants = constants._replace(normalizer=None)
            options = options._replace(reduction=_abi.REDUCTION_NONE, normalizer=0.0)
        given, options, constants = asked_of(
            (*grads, None, None, None, None), options, constants, row_state, entropy
        )
        w, b = _columns(shard, cast(weight, call.dtype), cast_bias(bias, call.dtype))
        if rows is None:
            rows = cast(input, call.dtype).reshape(-1, input.shape[-1])
        grad_weight = weight.new_zeros(0, weight.shape[1]) if needs[1] else None
        grad_bias = None if bias is None or not needs[2] else bias.new_zeros(0)
        made = _followed_by(needs, (rows, w, b), (weight, bias), shard)
        state = taken(ctx.unused)
        serves = state == _tf32(rows) and _autograd.of_columns(upstream)
        parts, weights, biases = _together(
            shard, rows, (), _local_gradients, shard, (rows, w, b, *constants), options,
            call.memory, made, given, kept if serves else None,
        )  # fmt: skip
        if state is not None:
            ctx.unused.append(state)
        if weights:
            grad_weight = _mean(_joined(weights), shard) if needs[1] else None
            grad_bias = None if grad_bias is None else _mean(_joined(biases), shard)
        grad_input = None
        if needs[0]:
            part = _shards.tree_of(parts)
            grad_input = reduce_grad_input(part, shard, ctx.shape, ctx.dtype)
        return grad_input, _padded(grad_weight, weight), _padded(grad_bias, bias)


def _followed_by(
    needs: Sequence[bool], tensors: Sequence[Tensor | None],
    parameters: tuple[Tensor, Tensor | None], shard: Shard,
) -> int:  # fmt: skip
    """_run's bits, of gradients of the parameters before they were cast."""
    made = [_made_dtype(p if n else None, shard) for p, n in zip(parameters, needs[1:])]
    return _run.followed_by((torch.float32 if needs[0] else None, *made), tensors)


def _local_gradients(
    shard: Shard, inputs: Any, options: Options, memory: int | None, wanted: int,
    upstream: Upstream, kept: Sequence[Tensor | None] | None,
) -> tuple[_shards.Carries, list[Tensor], list[Tensor]]:  # fmt: skip
    """Of each block with columns: its part of grad_input, its rows of grad_weight and grad_bias."""
    backward: Any = torch.ops.logitless.backward
    rows, w, b, *constants = inputs
    need_input = bool(wanted & _run.OF_INPUT)
    parts: _shards.Carries = []
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
            part = rows.new_zeros(rows.shape, dtype=torch.float32)
        if need_input:
            _shards.carry(parts, part)
    return parts, weights, biases


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _made_dtype(grad: Tensor | None, shard: Shard) -> torch.dtype | None:
    """In which the core makes a gradient of this dtype: a mean is rounded once, behind the sum."""
    if grad is None:
        return None
    return torch.float32 if shard.own else grad.dtype


def _mean(grad: Tensor, shard: Shard) -> Tensor:
    """Of the ranks' losses, whose sum over the tokens of this rank's group `grad` is."""
    if shard.divisor != 1:
        grad = grad.div_(shard.divisor)
    return _all_reduce(grad, shard.replicas) if shard.replicas else grad


def _padded(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
    """With rows of zeros for those that are no columns, in the dtype of `like`."""
    if grad is None or like is None:
        return None
    missing = like.shape[0] - grad.shape[0]
    if missing:
        grad = torch.cat((grad, grad.new_zeros(missing, *grad.shape[1:])))
    return cast(grad, like.dtype)


def _gathered(constants: Constants, shard: Shard, dim: int) -> Constants:
    """Those of all tokens, of each rank's own. Temperatures are [N] of the own ones."""
    shape = constants.target.shape
    target, token_weight, vocab_weight, normalizer, temperature = constants
    if temperature is not None:
        temperature = gather_tokens(temperature.view(shape), shard, dim).reshape(-1)
    if token_weight is not None:
        token_weight = gather_tokens(token_weight, shard, dim)
    return Constants(
        gather_tokens(target, shard, dim), token_weight, vocab_weight, normalizer, temperature
    )


def _reduced(losses: Tensor | None, tokens: Tokens, options: Options) -> Tensor | None:
    if losses is None or options.reduction == _abi.REDUCTION_NONE:
        return losses
    return _shards.reduced(losses.reshape(-1), tokens, options)


def _whole_upstream(
    upstream: Any, wanted: int, constants: Constants, options: Options, shard: Shard,
    shape: torch.Size,
) -> list[Tensor | None]:  # fmt: skip
    """Those of all tokens [N], the loss's as if it were not reduced, where a rank's outputs are
    those of its own tokens: ranks may have other upstream gradients. One collective, whichever of
    the outputs a rank has used."""
    dim = shard.sequence_dim
    assert dim is not None
    length = list(shape)
    length[dim] //= shard.size
    grads = list(upstream[: len(_DIFFERENTIABLE)])
    if grads[0] is not None and options.reduction == _abi.REDUCTION_MEAN:
        tokens = Tokens(*constants[:4])
        if shard.own:
            tokens = tokens._replace(target=own_tokens(tokens.target, shard, dim))
        grads[0] = _shards.mean_of(grads[0], tokens, options)
    asked = [bool(wanted & bit) for bit in _DIFFERENTIABLE]
    asked[-1] = asked[-1] and not wanted & _run.DETACHED
    none = constants.target.new_zeros((), dtype=torch.float32)
    own = [(none if g is None else g).expand(length) for g, there in zip(grads, asked) if there]
    whole = iter(gather_tokens(torch.stack(own), shard, dim + 1))
    return [next(whole).reshape(-1) if there else None for there in asked]


def refuse(call: Call) -> None:
    """What a vocabulary that is split does not have."""
    if call.wanted & _run.RANK:
        raise not_supported(
            "return_statistics is 'rank' with a group; a shard does not know the target's logit of "
            "another"
        )
    if call.main_grad is not None:
        raise not_supported('grad_accumulation="main_grad" is not supported with a group')


def _check_device(input: Tensor, constants: Constants) -> None:
    """Forward does not see the token weights, which are combined with the states."""
    for name, tensor in constants._asdict().items():
        if tensor is not None and tensor.device != input.device:
            raise wrong_device(
                f"{argument(name)} is on {tensor.device}; allowed: {input.device}, where the input "
                "is"
            )


def _tf32(rows: Tensor) -> bool:
    """Whether f32 products are made of rounded operands, which what is kept of them then is."""
    return rows.is_cuda and rows.dtype is torch.float32 and allows_tf32()


def _keeps(input: Tensor, call: Call, shard: Shard) -> bool:
    """Whether Forward keeps state, as far as every rank decides it alike. Backward of target_logit
    alone has no use for it."""
    if not shard.of_any or _ops.hooked():
        return False
    if not call.wanted & sum(_DIFFERENTIABLE) & ~_run.TARGET_LOGIT:
        return False
    if shard.blocks and call.memory is not None:  # Block.kept_bytes
        return False
    return _kept.serves(call.dtype or input.dtype, input.device.type, call.options)


def loss(
    input: Tensor, weight: Tensor, bias: Tensor | None, call: Call, shard: Shard
) -> tuple[Tensor | None, ...]:
    """The outputs in the order of _run.OUTPUTS."""
    refuse(call)
    call.options = call.options._replace(vocab_start=shard.start, vocab_total=shard.total)
    _check_device(input, call.constants)
    with_grad = torch.is_grad_enabled()
    shard = shard._replace(
        of_input=with_grad and input.requires_grad,
        of_any=with_grad and any(t is not None and t.requires_grad for t in (input, weight, bias)),
    )
    shard = shard._replace(keeps=_keeps(input, call, shard))
    if _ranks.ON and shard.size > 1:
        _ranks.before_forward(input, weight, bias, call, shard)
    if torch.compiler.is_compiling():
        return _traced(input, weight, bias, call, shard)
    apply: Any = ShardedLoss.apply
    outputs: tuple[Tensor | None, ...] = apply(input, weight, bias, call, shard)
    return outputs


def own_loss(
    input: Tensor, weight: Tensor, bias: Tensor | None, call: Call, shard: Shard
) -> list[Tensor | None]:
    """The outputs of this rank's own tokens, whatever shape they have: the ranks need as many."""
    shape, count = call.constants.target.shape, call.constants.target.numel()
    call.constants = _flat(call.constants)
    outputs = loss(input.reshape(count, input.shape[-1]), weight, bias, call, shard)
    return [t if t is None or t.dim() == 0 else t.view(shape) for t in outputs]


# The loss for torch.compile, which traces through an op that is made of others, autograd rule and
# all. Of an autograd.Function alone it makes a graph of its own, and fails at dynamic sizes.
_make_library: Any = torch.library.Library
_library = _make_library("logitless", "FRAGMENT")
_library.define(
    f"sharded_loss({_ops.TENSORS}, {_ops.OPTIONS}, int wanted, ScalarType? dtype, str group, "
    "int rank, int size, SymInt start, SymInt total, int? sequence_dim, bool local_tokens, "
    "bool reduce_input_grad, bool ordered, int blocks, bool own, str replicas, float divisor, "
    "bool keeps, bool of_input, bool of_any, str revision) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _revision() -> str:
    """Torch keeps compiled graphs on disk by the ops that were called, not by what this one is
    made of: those of another revision of it must not be taken."""
    files = sorted(pathlib.Path(__file__).parent.glob("*.py"))
    try:
        code = b"".join(file.read_bytes() for file in files)
    except OSError:  # not installed as files
        code = b""
    return f"{'.'.join(map(str, _abi.VERSION))}-{zlib.crc32(code):08x}"


_REVISION = _revision()


def _sharded_loss(*args: Any) -> list[Tensor]:
    input, weight, bias, constants, options, memory = _ops.split_arguments(args)
    wanted, dtype, *where, _ = args[_ops.BEHIND :]
    call = Call(constants, options, memory, wanted, dtype)
    apply: Any = ShardedLoss.apply
    return [t for t in apply(input, weight, bias, call, Shard(*where)) if t is not None]


_library.impl("sharded_loss", _sharded_loss, "CompositeImplicitAutograd")


def _traced(
    input: Tensor, weight: Tensor, bias: Tensor | None, call: Call, shard: Shard
) -> tuple[Tensor | None, ...]:
    made = torch.ops.logitless.sharded_loss(
        *_ops.arguments(
            (input, weight, bias, *call.constants), call.options, call.memory, call.wanted,
            call.dtype, *shard, _REVISION,
        )
    )  # fmt: skip
    rest = iter(made)
    return tuple(next(rest) if call.wanted & bit else None for bit in _run.OUTPUTS)

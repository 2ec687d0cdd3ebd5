# SPDX-License-Identifier: Apache-2.0
"""Backward on a rank's columns with the exchange of grad_input, on GPUs. An op, because the
exchange runs inside of it: between grad_input's product and grad_weight's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from logitless._abi import Options
from logitless.torch import _dispatch, _ops, _run
from logitless.torch._device import Between
from logitless.torch._run import Upstream
from logitless.torch._split import exchange, peers
from logitless.torch._split.shards import Shard

GROUP = (
    "str group, int rank, int size, SymInt[] shape, int? sequence_dim, ScalarType dtype, bool makes"
)
BEHIND = 7


def serves(shard: Shard, rows: Tensor, of_input: bool) -> bool:
    """Whether the exchange is part of Backward, by conditions that are the same on all ranks."""
    if shard.size == 1 or not _on_gpu(rows) or not of_input or not shard.ordered or shard.blocks:
        return False
    return shard.sequence_dim is not None or shard.reduce_input_grad


def _on_gpu(rows: Tensor) -> bool:
    return rows.is_cuda


def is_traced() -> bool:
    """Whether a compiler is tracing the call. Before PyTorch 2.13 `is_compiling` is False while a
    backward is traced."""
    if torch.compiler.is_compiling():
        return True
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def gradients(
    shard: Shard, shape: torch.Size, dtype: torch.dtype, inputs: Any, options: Options,
    memory: int | None, wanted: int, upstream: Upstream, kept: Sequence[Tensor | None] | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """grad_input in the `shape` and `dtype` of this rank's input, added over the ranks, and the
    gradients of its columns' weight and bias. `inputs` are rows [N, D], weight, bias and the
    constants."""
    backward: Any = torch.ops.logitless.backward_over_ranks
    own_kept = (None, None) if kept is None else kept
    options = options._replace(vocab_start=shard.start)
    made: tuple[Tensor, Tensor, Tensor] = backward(
        *_ops.arguments(inputs, options, memory, wanted, *upstream, *own_kept),
        *where(shard, shape, dtype),
    )  # fmt: skip
    return made[0].view(shape), made[1], made[2]


def where(shard: Shard, shape: torch.Size, dtype: torch.dtype) -> tuple[Any, ...]:
    """The values of GROUP. `shape` and `dtype` are those of this rank's input."""
    # A compiled function may run in a CUDA graph's memory pool, in which none may be made.
    makes = not is_traced()
    return shard.group, shard.rank, shard.size, shape, shard.sequence_dim, dtype, makes


Own = Callable[[Tensor | None, Between], tuple[Tensor, ...]]


def exchanged(like: Tensor, where: tuple[Any, ...], own: Own) -> tuple[Tensor, ...]:
    """grad_input [n, D] added over the ranks, and the other gradients, of `own(part, between)`: it
    writes grad_input's part to `part`, or to its own first result if that is None, and calls the
    functions `between` before and within the product of grad_weight. `where`: GROUP's values."""
    group, rank, size, shape, dim, dtype, makes = where
    found = peers.exchange_of(group, rank, size, shape, dim, like, dtype, makes)
    if found is None:
        shard = Shard(group, rank, size, 0, 0, dim)
        part, *others = own(None, ())
        made = exchange.reduce_grad_input(part, shard, torch.Size(shape), dtype)
        return made.reshape(-1, made.shape[-1]), *others
    try:
        _, *others = own(found.part, (found.send, found.add))
    except BaseException:
        found.abandon()
        raise
    return found.result(), *others


def without_columns(part: Tensor, between: Between) -> Tensor:
    """The part of a rank without columns, which takes part in the exchange."""
    part.zero_()
    for enqueue in between:
        enqueue()
    return part


def result_like(input: Tensor, where: tuple[Any, ...]) -> Tensor:
    """An uninitialized grad_input [n, D] as `exchanged` returns it, for an input [N, D]."""
    _, _, size, _, dim, dtype, _ = where
    tokens = input.shape[0] if dim is None else input.shape[0] // size
    return input.new_empty(tokens, input.shape[1], dtype=dtype)


def _backward(*args: Any) -> tuple[Tensor, ...]:
    call = args[:-BEHIND]
    return exchanged(args[0], args[-BEHIND:], lambda part, between: _own(call, part, between))


def _own(args: tuple[Any, ...], part: Tensor | None, between: Between) -> tuple[Tensor, ...]:
    """The op `backward`, whose grad_input is written to `part`."""
    input, weight, bias, constants, options, memory = _ops.split_arguments(args)
    if not weight.shape[0]:
        part = input.new_empty(input.shape, dtype=torch.float32) if part is None else part
        return without_columns(part, between), *_empty(args)
    wanted, *upstream, columns, rows = args[_ops.BEHIND :]
    kept = _ops._given(constants.target.numel(), memory, columns, rows)
    dtypes = _run.gradients_of(wanted, args[:3])
    made = _run.backward(
        input, weight, bias, constants, options, memory, Upstream(*upstream), dtypes, kept=kept,
        part=part, between=between,
    )  # fmt: skip
    return _ops._grads(made, input)


def _empty(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Uninitialized gradients of weight and bias."""
    return _ops._fake_grads(args[:3], _run.gradients_of(args[_ops.BEHIND], args[:3]))[1:]


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    return result_like(args[0], args[-BEHIND:]), *_empty(args)


_dispatch.define(
    f"backward_over_ranks({_ops.TENSORS}, {_ops.OPTIONS}, int wanted, {_ops.UPSTREAM}, "
    f"{_ops.KEPT}, {GROUP}) -> ({_ops.GRADS})",
    _backward, _backward_fake, rule=_dispatch.once_only,
)  # fmt: skip

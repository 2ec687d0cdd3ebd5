# SPDX-License-Identifier: Apache-2.0
"""A LinearCrossEntropyHead whose vocabulary is split over a device mesh.

Over the mesh dimension of tensor parallelism, use it in a plan for torch's parallelize_module,

    parallelize_module(model, mesh["tp"], {"lm_head": HeadParallel(), ...})

or split the head alone with `head.parallelize(mesh["tp"])`. Over that of data parallelism use
`head.parallelize(mesh["dp"], tokens="sharded")`; `head_costs` estimates when that is cheaper than
FSDP2.
"""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from logitless._errors import invalid, not_supported
from logitless.torch._modules import LinearCrossEntropyHead

__all__ = ["Cost", "HeadCosts", "HeadParallel", "head_costs"]


class HeadParallel(ParallelStyle):
    """How torch's parallelize_module splits a LinearCrossEntropyHead: its rows over the mesh.

    `input_layouts` describes hidden states that are plain tensors: Replicate(), the same on every
    rank, or Shard(dim), split along that dimension of tokens (after a norm under SequenceParallel:
    Shard(1)). For a DTensor its placements are used. Targets and the other arguments of the head's
    forward are passed on unchanged. They must be those of all tokens or, with `local_tokens` (if
    the input is split), of the rank's own. The results are plain tensors: see `parallelize` of the
    head. Other layouts, and modules of other classes, raise LogitlessNotSupportedError.
    """

    def __init__(self, *, input_layouts: Any = None, local_tokens: bool = False) -> None:
        super().__init__()
        layout = Replicate() if input_layouts is None else input_layouts
        if not isinstance(layout, (Replicate, Shard)):
            raise not_supported(
                f"input_layouts is {layout!r}; allowed: Replicate(), or Shard of a dimension of "
                "tokens"
            )
        self.input_layouts = layout
        self.local_tokens = local_tokens

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        if not isinstance(module, LinearCrossEntropyHead):
            raise not_supported(
                f"HeadParallel is given a {type(module).__name__}; allowed: a "
                "LinearCrossEntropyHead (LinearCrossEntropyHead.from_linear makes one of a Linear)"
            )
        layout = self.input_layouts
        return module.parallelize(
            device_mesh,
            sequence_dim=layout.dim if isinstance(layout, Shard) else None,
            local_tokens=self.local_tokens,
            src_data_rank=getattr(self, "src_data_rank", 0),
        )

    def __repr__(self) -> str:
        return (
            f"HeadParallel(input_layouts={self.input_layouts!r}, local_tokens={self.local_tokens})"
        )


def split_rows(
    head: LinearCrossEntropyHead[Any], mesh: Any, src_data_rank: int | None, own_tokens: bool
) -> None:
    """Turns weight and bias into DTensor parameters, Shard(0) on the last dimension of the mesh.
    With `own_tokens` the mesh may have another dimension before it, of replicas."""
    if mesh.ndim > 1 + own_tokens:
        allowed = "one, as of mesh['tp'] of a larger mesh"
        if own_tokens:
            allowed = "one, or two (replicas, shards), as fully_shard takes them"
        raise invalid(f"mesh has {mesh.ndim} dimensions; allowed: {allowed}")
    if head.grad_accumulation is not None:
        raise not_supported(
            'grad_accumulation="main_grad" is not supported of a head that is split'
        )
    own: tuple[Tensor | None, ...] = (head.weight, head.bias)
    if any(isinstance(t, DTensor) for t in own):
        raise invalid("the head's parameters are DTensors; allowed: plain parameters, split once")
    if own_tokens:
        _refuse_tied(head)
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    rank: dict[str, Any] = {} if src_data_rank == 0 else {"src_data_rank": src_data_rank}
    for name, parameter in head.named_parameters(recurse=False):
        rows: Any = distribute_tensor(parameter, mesh, placements, **rank)
        split = torch.nn.Parameter(rows, requires_grad=parameter.requires_grad)
        head.register_parameter(name, split)


def _other_holder(head: LinearCrossEntropyHead[Any]) -> str | None:
    """Another module that has a parameter of the head. The head does not know its model, so
    Python's garbage collector lists all modules."""
    for module in gc.get_objects():
        if module is head or not issubclass(type(module), torch.nn.Module):
            continue
        for name, parameter in vars(module).get("_parameters", {}).items():
            if parameter is not None and any(parameter is own for own in (head.weight, head.bias)):
                return f"{name!r} of a {type(module).__name__}"
    return None


def _refuse_tied(head: LinearCrossEntropyHead[Any]) -> None:
    if _other_holder(head) is None:
        return
    gc.collect()  # the other module may be garbage
    other = _other_holder(head)
    if other is not None:
        raise not_supported(
            f"a parameter of the head is {other} too (tied embeddings), which parallelize would "
            "untie silently; allowed with tokens='sharded': a head with parameters of its own "
            "(tied ones: leave the head whole to FSDP)"
        )


class Cost(NamedTuple):
    """The bytes for a rank and step. Not counted is what both ways have: the shards of weight and
    gradient, the workspace of the products, and what replicas exchange."""

    moved: int  # bytes received
    peak: int  # bytes held at once


class HeadCosts(NamedTuple):
    """What `head_costs` returns: the costs of exchanging tokens, and of gathering the weight."""

    tokens: Cost  # `parallelize(mesh, tokens="sharded")`
    weight: Cost  # FSDP2

    def cheaper(self) -> str:
        """The way that receives fewer bytes, "tokens" or "weight" (FSDP2); both take three
        products."""
        return "tokens" if self.tokens.moved < self.weight.moved else "weight"


def head_costs(
    tokens: int,
    hidden: int,
    vocab: int,
    ranks: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
) -> HeadCosts:
    """What a step of a head [vocab, hidden] costs on each of `ranks` ranks with `tokens` tokens of
    its own: if the tokens are exchanged, and if FSDP2 exchanges the weight, gathered once in
    `dtype`, with its gradient reduced in `reduce_dtype`. The formulas are in docs/devices.md.
    Raises LogitlessValueError for a number below 1."""
    for name, value in (("tokens", tokens), ("hidden", hidden), ("vocab", vocab), ("ranks", ranks)):
        if value < 1:
            raise invalid(f"{name} is {value}; allowed: >= 1")
    all_tokens, rows = ranks * tokens, -(-vocab // ranks)
    others = (ranks - 1) * tokens
    size, reduced = dtype.itemsize, reduce_dtype.itemsize
    if ranks == 1:
        return HeadCosts(Cost(0, 0), Cost(0, 0))
    # a token's target and upstream gradient, and its four states from each other rank
    numbers = (8 + 4) * others + 16 * (ranks - 1) * all_tokens
    copy = rows * hidden * size if dtype is not torch.float32 else 0
    return HeadCosts(
        Cost(
            others * hidden * (size + 4) + numbers,
            all_tokens * (hidden * (size + 2 * 4) + rows * size) + copy,
        ),
        Cost(
            (vocab - rows) * hidden * size + (ranks - 1) * rows * hidden * reduced,
            vocab * hidden * (2 * size + reduced),
        ),
    )

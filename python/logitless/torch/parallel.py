# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: a head whose vocabulary is split over a device mesh. Needs PyTorch 2.5.

    parallelize_module(model, mesh["tp"], {"lm_head": HeadParallel(), ...})

or, of the head alone, `head.parallelize(mesh["tp"])`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from logitless._errors import invalid, not_supported
from logitless.torch._modules import LinearCrossEntropyHead

__all__ = ["HeadParallel"]


class HeadParallel(ParallelStyle):
    """How torch's parallelize_module splits a LinearCrossEntropyHead: its rows over the mesh.

    `input_layouts` is what the hidden states are where they come as plain tensors: Replicate(), the
    same on every rank, or Shard(dim), split along that dimension of tokens (after a norm under
    SequenceParallel: Shard(1)). A DTensor says it itself. Targets and all else that the head's
    forward is given pass through; they are those of all tokens, or with `local_tokens` (of an input
    that is split) of the rank's own. The results are plain tensors: see `parallelize` of the head.
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


def split_rows(head: LinearCrossEntropyHead, mesh: Any, src_data_rank: int | None) -> None:
    """Makes weight and bias DTensor parameters, Shard(0) on a mesh of one dimension."""
    if mesh.ndim != 1:
        raise invalid(
            f"mesh has {mesh.ndim} dimensions; allowed: one, as of mesh['tp'] of a larger mesh"
        )
    if head.grad_accumulation is not None:
        raise not_supported(
            'grad_accumulation="main_grad" is not supported of a head that is split'
        )
    own: tuple[Tensor | None, ...] = (head.weight, head.bias)
    if any(isinstance(t, DTensor) for t in own):
        raise invalid("the head's parameters are DTensors; allowed: plain parameters, split once")
    rank: dict[str, Any] = {} if src_data_rank == 0 else {"src_data_rank": src_data_rank}
    for name, parameter in head.named_parameters(recurse=False):
        rows: Any = distribute_tensor(parameter, mesh, [Shard(0)], **rank)
        split = torch.nn.Parameter(rows, requires_grad=parameter.requires_grad)
        head.register_parameter(name, split)

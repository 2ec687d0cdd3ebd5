# SPDX-License-Identifier: Apache-2.0
"""DTensors as arguments of the losses: finds the group over which the weight's rows are split, and
the local tensors, whose gradients become those of the DTensors. Only placements that mean a
vocabulary split over ranks are accepted; for others the error names the placement."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless._errors import invalid, not_supported, wrong_shape
from logitless.torch._split.given import Split, of_integers


class Arguments(NamedTuple):
    """A call's arguments that may be DTensors, and its Split."""

    input: Any
    linear_weight: Any
    target: Any
    linear_bias: Any
    weight: Any
    token_weight: Any
    normalizer: Any
    temperature: Any
    split: Split


_HOW = (
    "FSDP's shards and those of tensor parallelism look alike. Allowed: the forward of a "
    "LinearCrossEntropyHead, before which FSDP gathers it; group=mesh.get_group(dim), where the "
    "vocabulary is split over that mesh dimension and the input is the same on all its ranks; or "
    "an input that is a DTensor"
)


def is_placed(tensor: Any) -> bool:
    """Whether a value is a DTensor, without importing DTensor."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "placements")


def _mesh_dim(mesh: Any, dim: int) -> str:
    names = mesh.mesh_dim_names
    return f"mesh dimension {dim}" if names is None else f"mesh dimension {names[dim]!r}"


def split_dim(weight: Any, name: str = "linear_weight") -> int:
    """The one mesh dimension over which the rows of a DTensor are split."""
    split = []
    for dim, placement in enumerate(weight.placements):
        if placement.is_partial():
            raise not_supported(
                f"{name} is a DTensor with a Partial placement; allowed: Shard(0) on one mesh "
                "dimension and Replicate on the others"
            )
        if not placement.is_replicate():
            if placement.dim != 0:
                raise not_supported(
                    f"{name} is a DTensor with {placement!r}, split along the hidden dimension; "
                    "allowed: Shard(0) on one mesh dimension and Replicate on the others"
                )
            split.append(dim)
    if len(split) == 1:
        return split[0]
    if not split:
        raise not_supported(
            f"{name} is a DTensor that is replicated on every mesh dimension; allowed: Shard(0) on "
            "one of them, or a plain tensor, as of to_local() or in a LinearCrossEntropyHead's "
            "forward under FSDP"
        )
    mesh = weight.device_mesh
    raise not_supported(
        f"{name} is a DTensor sharded on {' and '.join(_mesh_dim(mesh, d) for d in split)}; "
        "allowed: Shard(0) on one mesh dimension. Where one of them is FSDP's, call the head's "
        "forward, before which FSDP gathers that one"
    )


def _name(group: Any) -> str:
    name: str = group if isinstance(group, str) else group.group_name
    return name


def _replicated(name: str, tensor: Any) -> Any:
    if not is_placed(tensor):
        return tensor
    for placement in tensor.placements:
        if not placement.is_replicate():
            raise not_supported(f"{name} is a DTensor with {placement!r}; allowed: Replicate")
    return tensor.to_local()


def _token_dim(name: str, tensor: Any, group: str, last: int) -> int | None:
    """The dimension of tokens along which `tensor` is split over the group, or None. Dimensions
    from `last` on are not of tokens."""
    found = None
    mesh = tensor.device_mesh
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise not_supported(
                f"{name} is a DTensor with a Partial placement; allowed: Replicate, or Shard along "
                "a dimension of tokens; redistribute it"
            )
        if placement.dim % tensor.dim() >= last:
            raise not_supported(
                f"{name} is a DTensor with {placement!r}, split along the hidden dimension; "
                "allowed: Replicate, or Shard along a dimension of tokens"
            )
        if _name(mesh.get_group(dim)) != group:
            raise not_supported(
                f"{name} is a DTensor with {placement!r} on {_mesh_dim(mesh, dim)}, over which the "
                "vocabulary is not split; allowed there: Replicate, or each rank's own loss of its "
                f"{name}.to_local()"
            )
        found = placement.dim % tensor.dim()
        size = mesh.size(dim)
        if tensor.shape[found] % size:
            raise wrong_shape(
                f"{name} has shape {tuple(tensor.shape)}, split along dimension {found} over "
                f"{size} ranks; allowed: a length that they share equally"
            )
    return found


def _of_tokens(name: str, tensor: Any, group: str, sequence_dim: int | None) -> tuple[Any, bool]:
    """The local tensor of a DTensor in the target's shape, and whether it has only the rank's own
    tokens."""
    if not is_placed(tensor):
        return tensor, False
    dim = _token_dim(name, tensor, group, tensor.dim())
    if dim is not None and dim != sequence_dim:
        raise not_supported(
            f"{name} is a DTensor split along dimension {dim} and the input is "
            f"{'not split' if sequence_dim is None else f'split along {sequence_dim}'}; allowed: "
            "Replicate, or the input's split"
        )
    return tensor.to_local(), dim is not None


def _rows(
    weight: Any, bias: Any, group: Any, start: int | None, total: int | None
) -> tuple[Any, Any, Any, int, int]:
    """(weight, bias, group, start, total) of this rank's rows, from a DTensor."""
    mesh, dim = weight.device_mesh, split_dim(weight)
    own = mesh.get_group(dim)
    if group is not None and _name(group) != _name(own):
        raise not_supported(
            f"group is not that of {_mesh_dim(mesh, dim)}, over which linear_weight is sharded; "
            "allowed: mesh.get_group of that dimension. A shard of FSDP's is none of the "
            "vocabulary's: call the head's forward, before which FSDP gathers it"
        )
    if bias is not None:
        if not is_placed(bias):
            raise not_supported(
                "linear_bias is a plain tensor beside a linear_weight that is a DTensor; allowed: "
                "a DTensor of the same placements"
            )
        if split_dim(bias, "linear_bias") != dim or bias.device_mesh != mesh:
            raise not_supported(
                "linear_bias is sharded over another mesh dimension than linear_weight; allowed: "
                "the same placements"
            )
        bias = bias.to_local()
    rows, size, rank = weight.shape[0], mesh.size(dim), mesh.get_local_rank(dim)
    each = -(-rows // size)
    begin = min(rank * each, rows)
    local = weight.to_local()
    if local.shape[0] != min(each, rows - begin):
        raise wrong_shape(
            f"linear_weight is a DTensor of {rows} rows with {local.shape[0]} on rank {rank} of "
            f"{size}; allowed: {min(each, rows - begin)}, as torch.chunk splits them"
        )
    if start is not None and start != begin:
        raise invalid(f"Split.start is {start} and the DTensor's offset {begin}; allowed: None")
    if total is None:
        total = rows
    if not 0 <= total <= rows:
        raise invalid(f"Split.total is {total} of a DTensor of {rows} rows; allowed: 0 to {rows}")
    return local, bias, own if group is None else group, min(begin, total), total


def local(given: Arguments, labels: str = "target") -> Arguments:
    """The same call on local tensors. `labels`: the caller's name of the target."""
    input, weight, bias = given.input, given.linear_weight, given.linear_bias
    split = of_integers(given.split)
    group, start, total, sequence_dim = split.group, split.start, split.total, split.sequence_dim
    if is_placed(weight):
        over = split_dim(weight)
        if group is None and not is_placed(input):
            raise not_supported(
                f"linear_weight: a DTensor is sharded over {_mesh_dim(weight.device_mesh, over)}, "
                f"and the input is a plain tensor. {_HOW}"
            )
        weight, bias, group, start, total = _rows(weight, bias, group, start, total)
    elif is_placed(bias):
        raise not_supported(
            "linear_bias is a DTensor beside a plain linear_weight; allowed: its to_local()"
        )
    if group is None:
        raise not_supported(
            "an argument is a DTensor and linear_weight is a plain tensor; allowed without a "
            "group: plain tensors, as of to_local() or full_tensor()"
        )
    name = _name(group)
    if is_placed(input):
        dim = _token_dim("input", input, name, input.dim() - 1)
        if sequence_dim is not None and sequence_dim % input.dim() != dim:
            raise invalid(
                f"sequence_dim is {sequence_dim} and the input's placements are "
                f"{tuple(input.placements)}; allowed: None, for the placements say it"
            )
        sequence_dim = dim
        if dim is None and not split.reduce_input_grad:
            input = input.to_local(grad_placements=_partial(input, name))
        else:
            input = input.to_local()
    elif sequence_dim is not None and isinstance(input, Tensor):
        sequence_dim %= input.dim()
    target, own = _of_tokens(labels, given.target, name, sequence_dim)
    token_weight, own_weight = _of_tokens("token_weight", given.token_weight, name, sequence_dim)
    temperature, own_degrees = _of_tokens("temperature", given.temperature, name, sequence_dim)
    if own and is_placed(given.token_weight) and not own_weight:
        raise not_supported("token_weight is replicated and the target split; allowed: the same")
    if own and is_placed(given.temperature) and not own_degrees:
        raise not_supported(f"temperature is replicated and {labels} split; allowed: the same")
    if not own and not split.local_tokens and (own_weight or own_degrees):
        name = "token_weight" if own_weight else "temperature"
        raise not_supported(f"{name} is split and {labels} is not; allowed: the same")
    return Arguments(
        input, weight, target, bias, _replicated("weight", given.weight), token_weight,
        _replicated("normalizer", given.normalizer), temperature,
        Split(
            group, start=start, total=total, blocks=split.blocks, sequence_dim=sequence_dim,
            local_tokens=split.local_tokens or own, reduce_input_grad=split.reduce_input_grad,
            reduce_dtype=split.reduce_dtype,
        ),
    )  # fmt: skip


def _partial(tensor: Any, group: str) -> list[Any]:
    """The placements of a gradient that is a part of a sum over the group."""
    from torch.distributed.tensor import Partial

    mesh = tensor.device_mesh
    return [
        Partial() if _name(mesh.get_group(dim)) == group else placement
        for dim, placement in enumerate(tensor.placements)
    ]


def group_of(weight: Any) -> Any:
    """The group over which the rows of a DTensor are split."""
    return weight.device_mesh.get_group(split_dim(weight))


def data_of(weight: Any, dtype: torch.dtype | None, factor: float | None) -> Any:
    """The `data` argument of the loss, for a weight whose ranks have their own tokens. If its mesh
    has another dimension, that one is of replicas. `factor`: FSDP's gradient divide factor."""
    from logitless.torch._split.shards import Data

    mesh, split = weight.device_mesh, split_dim(weight)
    others = [dim for dim in range(mesh.ndim) if dim != split and mesh.size(dim) > 1]
    replicas = _name(mesh.get_group(others[0])) if others else ""
    divisor = float(mesh.size() if factor is None else factor)
    return Data(dtype, replicas, divisor)


def own_logits(input: Any, weight: Any, bias: Any, dtype: torch.dtype | None) -> Tensor:
    """input @ weight.T + bias for all columns and this rank's own tokens; gathers the weight."""
    whole, more = weight, bias
    if dtype is not None:
        input, whole = input.to(dtype), weight.to(dtype)
        more = None if bias is None else bias.to(dtype)
    more = None if more is None else more.full_tensor()
    return torch.nn.functional.linear(input, whole.full_tensor(), more)


def whole_logits(input: Any, weight: Any, bias: Any, sequence_dim: int | None) -> Tensor:
    """input @ weight.T + bias for all columns and all tokens, on every rank."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = weight.device_mesh
    if not is_placed(input):
        placements: list[Any] = [Replicate()] * mesh.ndim
        if sequence_dim is not None:
            placements[split_dim(weight)] = Shard(sequence_dim % input.dim())
        input = DTensor.from_local(input, mesh, placements, run_check=False)
    input = input.redistribute(input.device_mesh, [Replicate()] * input.device_mesh.ndim)
    logits: Any = torch.nn.functional.linear(input, weight, bias)
    whole: Tensor = logits.full_tensor()
    return whole

# SPDX-License-Identifier: Apache-2.0
"""Computes the bytes that a linear loss takes beyond its tensors, results and gradients, by
planning every call of the library that it would make. Nothing is run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from logitless._abi import Options
from logitless.torch import _kept, _run
from logitless.torch._autograd import Call, asked_of, held_dtype
from logitless.torch._device import allows_tf32
from logitless.torch._kept import FRESH, Keep, Kept, State
from logitless.torch._run import Constants

Dtypes = tuple[torch.dtype | None, ...]


class _Planner:
    """Replaces launch for tensors that have only shapes, in a call on `device`. Inputs are assumed
    at their `addresses`, other tensors aligned like torch's new ones; if `addresses` is None, the
    plan serves any addresses."""

    def __init__(self, device: torch.device, addresses: dict[str, int] | None) -> None:
        self.device = device
        self.addresses = addresses
        self.workspace = 0  # the largest of all calls'
        self.kept = 0

    def launch(
        self, kind: int, names: Sequence[str], tensors: Sequence[Tensor | None], options: Options,
        memory: int | None, asked: object, row_state: Tensor | None = None,
        accumulate: bool = False, keep: Keep | None = None, kept: Kept | None = None,
    ) -> Kept | None:  # fmt: skip
        first = tensors[0]
        assert first is not None
        tf32 = False
        if self.device.type == "cuda":
            tf32 = first.dtype is torch.float32 and allows_tf32()
        else:
            _run.follow_torch_threads()
        if tf32:
            options = options._replace(allow_tf32=True)
        addresses = []
        if self.addresses is not None:
            given = (name for name, tensor in zip(names, tensors) if tensor is not None)
            addresses = [self.addresses.get(name, FRESH) for name in given]
            if row_state is not None:
                addresses += (FRESH, FRESH + 2 * row_state.numel())
        plan = _run.make_plan(
            kind, names, tensors, options, row_state, memory, accumulate, addresses, keep, kept,
            self.device,
        )  # fmt: skip
        self.workspace = max(self.workspace, plan.bytes)
        if keep is None or plan.kept is None:
            return None
        self.kept = plan.kept.bytes
        columns = first.new_empty(plan.kept.shape)
        rows = first.new_empty(plan.kept.rows_shape, dtype=torch.float32)
        return Kept(columns, rows, State(plan.kept.key, plan.room, tf32))


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _address(tensor: Tensor) -> int | None:
    if isinstance(tensor, FakeTensor):  # data_ptr() warns, where others raise
        return None
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return None


def _shapes_of(
    given: dict[str, Tensor | None], dtypes: dict[str, torch.dtype], where: torch.device
) -> tuple[list[Tensor | None], dict[str, int] | None]:
    """Returns the tensors `given`, by the names of _run.INPUTS, as the library's calls on the
    device `where` take them, with these `dtypes` and one dimension of tokens; and their
    addresses."""
    target = given["target"]
    assert target is not None
    found: list[Tensor | None] = []
    addresses: dict[str, int] | None = {}
    for name, tensor in given.items():
        if tensor is None:
            found.append(None)
            continue
        _run.view(name, tensor, where)  # refuses a tensor without strides
        like = _like(tensor)
        used = like.to(dtypes.get(name, tensor.dtype))
        if name == "input":
            used = used.reshape(target.numel(), used.shape[-1])
        elif name in ("target", "token_weight", "temperature"):
            used = used.reshape(-1)
        elif name == "ids" and given.get("id_offsets") is None:
            used = used.reshape(target.numel(), used.shape[-1])
        found.append(used)
        if addresses is not None and _same_memory(used, like):
            address = _address(tensor)
            if address is None:
                addresses = None
            else:
                addresses[name] = address
    return found, addresses


def _forward_then_backward(
    planner: _Planner, tensors: Sequence[Tensor | None], call: Call, dtypes: Dtypes
) -> None:
    """Plans the calls of _autograd.Loss, for all upstream gradients that it may get."""
    input, weight, bias, *rest = tensors
    assert input is not None and weight is not None
    constants, options = Constants(*rest), call.options  # type: ignore[arg-type]
    keep = call.keep(input, dtypes, planner.device.type)
    outputs, row_state, kept, _ = _run.forward(
        input, weight, bias, constants, options, call.memory, call.wanted | _run.ROW_STATE, keep,
        planner.launch,
    )  # fmt: skip
    assert row_state is not None
    differentiable = _run.LOSS | _run.DIFFERENTIABLE
    upstream = [t if bit & differentiable else None for t, bit in zip(outputs, _run.OUTPUTS)]
    entropy = outputs[list(_run.OUTPUTS).index(_run.ENTROPY)]
    if kept is not None:
        of_f16 = kept.columns.dtype is torch.float16
        kept = kept._replace(consume=_kept.consumes(of_f16, entropy is not None))
    asked = asked_of(upstream, options, weight.shape[0], *constants, row_state, entropy)
    _run.backward(
        input, weight, bias, asked.constants, asked.options, call.memory, asked.upstream, dtypes,
        kept=kept, launcher=planner.launch,
    )  # fmt: skip


def _given_to_calls(
    given: tuple[Tensor, Tensor | None, Tensor | None], call: Call, where: torch.device
) -> tuple[list[Tensor | None], dict[str, int] | None]:
    bias, cast = given[2], {}
    if call.dtype is not None:
        cast = {"input": call.dtype, "weight": call.dtype}
        if bias is not None and bias.dtype is not torch.float32:  # f32 stays f32
            cast["bias"] = call.dtype
    return _shapes_of(dict(zip(_run.INPUTS, (*given, *call.constants))), cast, where)


@torch.no_grad()
def check_shapes(input: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call) -> None:
    """For tensors without memory: raises the errors of a call with these shapes, dtypes and options
    on the CPU, because the device on which the call will run is unknown."""
    where = torch.device("cpu")
    tensors, _ = _given_to_calls((input, weight, bias), call, where)
    x, w, b, *rest = tensors
    assert x is not None
    launch = _Planner(where, None).launch
    constants = Constants(*rest)  # type: ignore[arg-type]
    _run.forward(x, w, b, constants, call.options, None, call.wanted, launcher=launch)


@torch.no_grad()
def bytes_of(
    input: Tensor, weight: Tensor, bias: Tensor | None, call: Call, gradients: bool
) -> int:
    """The bytes of the workspace (the larger one of two calls) and of the state kept between them.
    `gradients`: whether to include the gradients of the tensors that require one, or of all if none
    does."""
    given = (input, weight, bias)
    needed = [t for t in given if t is not None and t.requires_grad]
    dtypes = tuple(
        t.dtype if t is not None and (t.requires_grad or not needed) else None for t in given
    )
    tensors, addresses = _given_to_calls(given, call, input.device)
    planner = _Planner(input.device, addresses)
    x, w, b, *rest = tensors
    assert x is not None and w is not None
    constants, options = Constants(*rest), call.options  # type: ignore[arg-type]
    if not gradients:
        _run.forward(x, w, b, constants, options, call.memory, call.wanted, launcher=planner.launch)
    elif call.fused(input, weight, bias, _kept.hooked(), all_needed=not needed):
        held = tuple(None if t is None else held_dtype(t) for t in dtypes)
        _run.forward_backward(
            x, w, b, constants, options, call.memory, call.wanted, held, planner.launch
        )
    else:
        _forward_then_backward(planner, tensors, call, dtypes)
    return planner.workspace + planner.kept

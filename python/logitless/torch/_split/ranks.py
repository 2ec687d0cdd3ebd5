# SPDX-License-Identifier: Apache-2.0
"""LOGITLESS_CHECK_RANKS=1: before each exchange of a vocabulary that is split, the ranks compare
what must be the same on all of them. An error says what differs and on which rank. If a rank does
not arrive within LOGITLESS_CHECK_RANKS_TIMEOUT seconds (60), the error names that rank. For
debugging: it reads tensors on the host and waits for every rank. Both variables are read when the
first group is used, and functions under torch.compile are not checked."""

from __future__ import annotations

import datetime
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from logitless._call import REDUCTIONS
from logitless._errors import (
    LogitlessError,
    LogitlessRuntimeError,
    LogitlessValueError,
    argument,
    invalid,
)
from logitless.torch import _run
from logitless.torch._divergence_run import KEEP

_VARIABLE = "LOGITLESS_CHECK_RANKS"
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20
_REDUCTIONS = {code: name for name, code in REDUCTIONS.items()}
_gloo: Any = weakref.WeakKeyDictionary()  # for each group, its _waiting()


def switch(environment: Mapping[str, str]) -> tuple[bool, float]:
    """Whether ranks are compared, and how many seconds one waits for another."""
    on = environment.get(_VARIABLE, "") not in ("", "0")
    given = environment.get(f"{_VARIABLE}_TIMEOUT") or "60"
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0
    if not 0 < seconds < float("inf"):
        raise invalid(f"{_VARIABLE}_TIMEOUT is {given!r}; allowed: seconds, above 0")
    return on, seconds


ON, SECONDS = switch(os.environ)


def digest(tensor: Tensor) -> str:
    """A digest of the bits of a tensor's elements in order, the same on every device."""
    bits = tensor.detach().resolve_neg().contiguous().reshape(-1)
    if bits.dtype is torch.bool:
        bits = bits.to(torch.int8)
    bits = bits.view(_INTEGERS[bits.element_size()])
    total = 0
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        place = torch.arange(start + 1, start + 1 + part.numel(), device=part.device)
        factor = (place * 0x9E3779B97F4A7C1) ^ (place << 21) | 1
        mixed = (part ^ 0x5DEECE66D) * factor  # wraps around
        total += int((mixed ^ (mixed >> 29)).sum())
    return f"#{total & (1 << 64) - 1:016x}"


def _like(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}"


def _real(*tensors: Tensor | None) -> bool:
    """Whether the call runs now, and is not only traced."""
    given = [t for t in tensors if t is not None]
    return not any(isinstance(t, (FakeTensor, FunctionalTensor)) or t.is_meta for t in given)


def before_forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, call: Any, shard: Any
) -> None:
    """Compares a loss's inputs, except the weight's rows, which are each rank's own."""
    if torch.compiler.is_compiling() or not _real(input, weight, call.constants.target):
        return
    options, constants = call.options, call.constants
    if shard.own:  # each rank's mean has its own divisor
        options = options._replace(normalizer=0.0)
        constants = constants._replace(normalizer=None)
    same = {"the call": "forward"}
    for name, value in options._asdict().items():
        if name not in ("vocab_start", "vocab_total", "allow_tf32"):
            same[name] = repr(_REDUCTIONS[value] if name == "reduction" else value)
    outputs = [name for bit, name in _run.OUTPUTS.items() if call.wanted & bit]
    same |= {
        "the outputs": ", ".join(outputs),
        "the dtype of autocast": "None" if call.dtype is None else str(call.dtype)[6:],
        "sequence_dim": repr(shard.sequence_dim),
        "local_tokens": repr(shard.local_tokens),
        "Split.total": repr(shard.total),
        "Split.blocks": repr(shard.blocks or None),
        "reduce_input_grad": repr(shard.reduce_input_grad),
        "reduce_dtype": repr("float32" if shard.ordered else "input"),
        "input.requires_grad": repr(torch.is_grad_enabled() and input.requires_grad),
        "whether state is kept for Backward": repr(shard.keeps),
        "input's dtype and shape": _like(input),
        "linear_weight's dtype": str(weight.dtype)[6:],
        "linear_weight's columns": repr(weight.shape[-1]),
        "linear_bias's dtype": "None" if bias is None else str(bias.dtype)[6:],
    }
    per_token = ("target", "token_weight", "temperature", "ids")
    for name, tensor in zip(constants._fields, constants):
        if name == "target" and constants.ids is not None:  # the target follows from the ids
            continue
        known = argument(name)
        same[f"{known}'s dtype and shape"] = _like(tensor)
        if tensor is not None and not (shard.local_tokens and name in per_token):
            same[f"{known}'s values"] = digest(tensor)
    if shard.sequence_dim is None:
        same["input's values"] = digest(input)
    stop = max(shard.start, min(shard.start + weight.shape[0], shard.total))
    _compare(same, (shard.start, stop, shard.total), shard)


def before_divergence(inputs: Any, asked: Any, shard: Any) -> None:
    """Compares a divergence's inputs, except the heads' rows, which are each rank's own."""
    if torch.compiler.is_compiling() or not _real(*inputs):
        return
    same = {"the call": "divergence"}
    for name, value in asked.options._asdict().items():
        if name not in ("vocab_start", "vocab_total", "allow_tf32"):
            same[name] = repr(_REDUCTIONS[value] if name == "reduction" else value)
    same |= {
        "the outputs, in bits": str(asked.wanted & ~KEEP),
        "the dtype of autocast": "None" if asked.dtype is None else str(asked.dtype)[6:],
        "sequence_dim": repr(shard.sequence_dim),
        "local_tokens": repr(shard.local_tokens),
        "Split.total": repr(shard.total),
        "reduce_input_grad": repr(shard.reduce_input_grad),
        "reduce_dtype": repr("float32" if shard.ordered else "input"),
        "input.requires_grad": repr(shard.of_input),
        "whether gradients follow": repr(shard.of_any),
    }
    rows = ("weight", "bias", "teacher_weight", "teacher_bias", "teacher_logits")
    own = () if shard.sequence_dim is None else ("input", "teacher_input")
    if shard.local_tokens:
        own = (*own, "target", "token_weight", "temperature", "teacher_temperature")
    for name, tensor in zip(inputs._fields, inputs):
        known = argument(name)
        if name in rows:
            same[f"{known}'s dtype"] = "None" if tensor is None else str(tensor.dtype)[6:]
            continue
        same[f"{known}'s dtype and shape"] = _like(tensor)
        if tensor is not None and name not in own:
            same[f"{known}'s values"] = digest(tensor)
    stop = max(shard.start, min(shard.start + inputs.weight.shape[0], shard.total))
    _compare(same, (shard.start, stop, shard.total), shard)


def before_list(name: str, ids: Tensor, shard: Any) -> None:
    """Compares a list of rows, before each rank takes its own."""
    if not _real(ids):
        return
    same = {"the call": f"a list, {name}", f"{name}'s dtype and shape": _like(ids)}
    _compare({**same, f"{name}'s values": digest(ids)}, None, shard)


def instead_of_forward(error: Exception, shard: Any) -> None:
    """Informs ranks that wait in a forward that this rank's arguments are wrong."""
    _compare({"the call": f"refused ({error})"}, None, shard)


def before_backward(
    upstream: Sequence[Tensor | None], needs_input: bool, saved: Sequence[Tensor | None], shard: Any
) -> None:
    """Compares the upstream gradients of a loss."""
    given = [g for g in upstream if g is not None]
    if not _real(*given, *saved):
        return
    same = {"the call": "backward", "input.requires_grad": repr(needs_input)}
    for name, grad in zip(_run.OUTPUTS.values(), upstream):
        same[f"the upstream gradient of {name}"] = _like(grad)
        if grad is not None and not shard.local_tokens:
            same[f"the upstream gradient of {name}'s values"] = digest(grad)
    _compare(same, None, shard)


def group_of(name: str) -> Any:
    """The process group with that name."""
    import torch.distributed.distributed_c10d as c10d

    resolve: Any = vars(c10d)["_resolve_process_group"]
    return resolve(name)


def _waiting(group: Any) -> Any:
    """A gloo group of the same ranks, whose waits have a timeout."""
    import torch.distributed as dist

    if dist.get_backend(group) == "gloo":
        return group
    if group not in _gloo:
        made: Any = dist.new_group(
            dist.get_process_group_ranks(group), backend="gloo",
            timeout=datetime.timedelta(seconds=SECONDS), use_local_synchronization=True,
        )  # fmt: skip
        _gloo[group] = made
    return _gloo[group]


def _compare(same: dict[str, str], rows: tuple[int, int, int] | None, shard: Any) -> None:
    """Raises on every rank of the group if anything differs on one."""
    import torch.distributed as dist

    try:
        group = _waiting(group_of(shard.group))
        dist.monitored_barrier(
            group, datetime.timedelta(seconds=SECONDS), wait_all_ranks=shard.rank == 0
        )
    except RuntimeError as error:
        named = re.search(r"Ranks? ([\d, ]*\d) failed to pass", str(error))  # rank 0 alone has it
        who = "a rank" if named is None else _ranks([int(n) for n in named[1].split(",")])
        raise _of(
            LogitlessRuntimeError,
            f"{who} of the group did not come to the {same['the call']} of a split vocabulary, "
            f"where rank {shard.rank} waited {SECONDS:g} s: {error}",
        ) from error
    every: list[Any] = [None] * shard.size
    dist.all_gather_object(every, (same, rows), group)
    found = differences([fields for fields, _ in every])
    if not found and rows is not None:
        found = gaps([r for _, r in every])
    if found:
        raise _of(LogitlessValueError, "; ".join(found))


def _of(kind: type[LogitlessError], message: str) -> LogitlessError:
    error = kind(f"{_VARIABLE}: {message}")
    error.status = "internal" if kind is LogitlessRuntimeError else "invalid_argument"
    return error


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def differences(every: Sequence[Mapping[str, str]]) -> list[str]:
    """Sentences about everything that is not the same on all ranks, in order. If ranks are in
    different calls, only that is reported."""
    names = list(dict.fromkeys(name for fields in every for name in fields))
    found = []
    for name in names:
        held: dict[str, list[int]] = {}
        for rank, fields in enumerate(every):
            held.setdefault(fields.get(name, "None"), []).append(rank)
        if len(held) == 1:
            continue
        most, *others = sorted(held.items(), key=lambda item: (-len(item[1]), item[1]))
        if most[0].startswith("#") or others[0][0].startswith("#"):
            each = ", ".join(_ranks(ranks) for _, ranks in others)
            found.append(f"{name} on {each} differ from those on {_ranks(most[1])}")
        else:
            each = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in (*others, most))
            found.append(f"{name}: {each}")
        if name == "the call":
            break
    return found


def gaps(rows: Sequence[tuple[int, int, int]]) -> list[str]:
    """Where the ranks' columns [start, stop) do not cover the whole vocabulary in order."""
    at = 0
    for rank, (start, stop, _) in enumerate(rows):
        if start != at and (stop > start or start < at):
            return [f"Split.start is {start} on rank {rank}, and the ranks before it end at {at}"]
        at = max(at, stop)
    if at != rows[0][2]:
        return [f"Split.total is {rows[0][2]}, and the columns of all ranks end at {at}"]
    return []

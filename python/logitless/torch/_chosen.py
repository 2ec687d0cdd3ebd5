# SPDX-License-Identifier: Apache-2.0
"""Chosen columns: turns `ids` [..., K] into arguments of a call, and its outputs into the caller's
results. Every row needs a target, as in any loss. With a single id the target is that id, and the
call is linear_logprob's, with the same bits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from logitless import _call
from logitless._errors import not_supported, placed, wrong_device, wrong_dtype
from logitless._vocabulary import ABSENT
from logitless.torch import _lists, _run
from logitless.torch._checks import check_tensor

_SINGLE = _run.LOGITS_AT | _run.ROW_STATE
_LOGPROB, AT = (list(_run.OUTPUTS).index(bit) for bit in (_run.LOGPROB, _run.LOGITS_AT))


def check_ids(input: Tensor, ids: Any, what: str) -> None:
    """Like check_target, for the ids [..., K] of each token."""
    check_tensor("ids", ids)
    if ids.dtype not in (torch.int32, torch.int64):
        way = " (ids.long())" if not ids.is_floating_point() else ""
        raise wrong_dtype(f"ids is {str(ids.dtype)[6:]}; allowed: int32, int64{way}")
    _call.check_ids(ids.shape, input.shape, what)


def check_list(input: Tensor, ids: Any, offsets: Any) -> None:
    """Like check_ids, for ids [M] with offsets [N + 1]."""
    for name, tensor in (("ids", ids), ("offsets", offsets)):
        check_tensor(name, tensor)
        if tensor.dtype not in (torch.int32, torch.int64):
            raise wrong_dtype(f"{name} is {str(tensor.dtype)[6:]}; allowed: int32, int64")
        if tensor.device != input.device:
            raise wrong_device(
                f"{name} is on {tensor.device}; allowed: {input.device}, where the input is"
            )
    tokens = input.shape[:-1].numel()
    _call.check_listed_ids(ids.shape, tokens)
    _call.check_offsets(offsets.shape, tokens)


def refuse_groups(tensors: Sequence[Any], group: Any, beside: str) -> None:
    if group is not None or any(hasattr(t, "placements") for t in tensors):
        raise not_supported(
            f"{beside} is of one process; allowed beside it: plain tensors, and no group"
        )


def targets_of_lists(input: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    """Targets [...] as in targets_of, for lists. A token with ids has the target 0, not one of its
    ids."""
    places = ids.shape[0]
    there = torch.cat((ids.new_zeros(1, dtype=torch.int64), (ids != ABSENT).long().cumsum(0)))
    some = there[_lists.ends_of(offsets, places)].diff() > 0  # [N]
    target = torch.zeros_like(some, dtype=torch.int64).masked_fill(~some, ABSENT)
    return target.view(input.shape[:-1])


def targets_of(ids: Tensor, vocab: Any) -> Tensor:
    """Targets [...]: one of each row's ids, or ABSENT if it has none. Of several ids the largest is
    taken and clipped to the vocabulary, so that a wrong id is reported as an id, and the row's
    other ids keep their values."""
    if ids.shape[-1] == 1:
        return ids[..., 0]
    some = (ids != ABSENT).any(-1)
    return ids.amax(-1).clamp(0, vocab - 1).masked_fill(~some, ABSENT)


def is_single(ids: Tensor, offsets: Tensor | None) -> bool:
    return offsets is None and ids.shape[-1] == 1


def wanted_of(wanted: int, single: bool) -> int:
    """The bits, as in _run, for a call with ids; `single`: whether there is one per token."""
    return wanted & ~_SINGLE | _run.LOGPROB if single else wanted | _run.ROW_STATE


def outputs_of(outputs: Sequence[Any], ids: Tensor, single: bool) -> list[Any]:
    """The caller's results from a call's outputs."""
    made = list(outputs)
    if single:
        logprob, made[_LOGPROB] = made[_LOGPROB].unsqueeze(-1), None
        made[AT] = logprob.masked_fill(ids == ABSENT, -float("inf"))
    return made


def in_callers_words(
    message: str, ids: Tensor, offsets: Tensor | None, ranks: tuple[int, int] | None = None
) -> str:
    """The text of an error about an id, with its index in the caller's tensor."""
    of_single = r"^target\[(\d+)\] (.*), or ignore_index .*"
    message = re.sub(of_single, r"ids[\1, 0] \2, or -1 for none", message)
    leading = ids.shape[:-1] if offsets is None else ids.shape
    return placed(message, leading, name="ids", ranks=ranks)

# SPDX-License-Identifier: Apache-2.0
"""Chosen columns: what a call is given of `ids` [..., K], and what the caller gets back. A row has
a target as that of any loss does; of a single id it is that id, with the way, and the bits, of
linear_logprob."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from logitless import _abi
from logitless._errors import placed, wrong_dtype, wrong_shape
from logitless.torch import _run
from logitless.torch._checks import check_tensor

ABSENT = -1  # an id, and the target of a row that has no other
_SINGLE = _run.LOGITS_AT | _run.ROW_STATE
_LOGPROB, AT = (list(_run.OUTPUTS).index(bit) for bit in (_run.LOGPROB, _run.LOGITS_AT))


def check_ids(input: Tensor, ids: Any, what: str) -> None:
    """As check_target of the columns of each token."""
    check_tensor("ids", ids)
    if ids.dtype not in (torch.int32, torch.int64):
        way = " (ids.long())" if not ids.is_floating_point() else ""
        raise wrong_dtype(f"ids is {str(ids.dtype)[6:]}; allowed: int32, int64{way}")
    alike = ids.dim() > 0 and ids.shape[:-1] == input.shape[:-1]
    if not alike or not 1 <= ids.shape[-1] <= _abi.MOST_CHOSEN:
        tokens = "".join(f"{size}, " for size in input.shape[:-1])
        raise wrong_shape(
            f"ids has shape {tuple(ids.shape)}; allowed: ({tokens}K), the shape of {what} with "
            f"K, 1 to {_abi.MOST_CHOSEN}, in the place of its last dimension"
        )


def targets_of(ids: Tensor, vocab: Any) -> Tensor:
    """[...]: of a row an id that it has, ABSENT where it has none. It is in the vocabulary, so that
    a wrong id is found where it stands and costs no other one its value."""
    if ids.shape[-1] == 1:
        return ids[..., 0]
    some = (ids != ABSENT).any(-1)
    return ids.amax(-1).clamp(0, vocab - 1).masked_fill(~some, ABSENT)


def wanted_of(wanted: int, ids: Tensor) -> int:
    """The bits of _run that a call of these ids is asked for."""
    return wanted & ~_SINGLE | _run.LOGPROB if ids.shape[-1] == 1 else wanted | _run.ROW_STATE


def outputs_of(outputs: Sequence[Any], ids: Tensor) -> list[Any]:
    """Those that were wanted, of what the call has made."""
    made = list(outputs)
    if ids.shape[-1] == 1:
        logprob, made[_LOGPROB] = made[_LOGPROB].unsqueeze(-1), None
        made[AT] = logprob.masked_fill(ids == ABSENT, -float("inf"))
    return made


def in_callers_words(
    message: str, shape: Sequence[int], ranks: tuple[int, int] | None = None
) -> str:
    """An error about an id, in the caller's index."""
    of_single = r"^target\[(\d+)\] (.*), or ignore_index .*"
    message = re.sub(of_single, r"ids[\1, 0] \2, or -1 for none", message)
    return placed(message, shape[:-1], name="ids", ranks=ranks)

# SPDX-License-Identifier: Apache-2.0
"""The largest logits of a token: the request and the results of linear_topk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless import _abi
from logitless._errors import invalid, wrong_dtype
from logitless.torch import _run

LOGITS, IDS = (list(_run.OUTPUTS).index(bit) for bit in (_run.TOP_LOGITS, _run.TOP_IDS))


def wanted_of(k: Any) -> int:
    """The bits, as in _run, that ask for the k largest logits. check_k checks k."""
    # A k that does not fit above the bits is out of range in any vocabulary.
    most = _abi.MOST_LISTED + 1
    return _run.top_of(min(max(k, 0), most) if isinstance(k, int) else most) | _run.ROW_STATE


def check_k(k: Any, vocab: Any) -> None:
    if not isinstance(k, int):
        raise wrong_dtype(f"k is a {type(k).__name__}; allowed: an int")
    most = min(vocab, _abi.MOST_LISTED)
    if isinstance(k, bool) or not 1 <= k <= most:
        raise invalid(f"k is {k}; allowed: 1 to {most}, the least of V and {_abi.MOST_LISTED}")


def target_of(input: Tensor, shard: Any) -> Tensor:
    """Targets of 0, on which no result depends: for all tokens, or for the rank's own."""
    shape = input.shape
    if shard is not None and not shard.local_tokens:
        shape = shard.whole(shape)
    return input.new_zeros(shape[:-1], dtype=torch.int64)

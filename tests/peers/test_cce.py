# SPDX-License-Identifier: Apache-2.0
"""Our vocabulary parallelism equals Cut Cross Entropy's: its torch_compile implementation, here not
compiled, in two processes. Its releases on PyPI have no vocab_parallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import both
import ranks
from logitless.integrations import cce
from ranks import Rank


def as_written(function: Any = None, **_: Any) -> Any:
    return as_written if function is None else function


with pytest.MonkeyPatch.context() as patch:
    patch.setattr(torch, "compile", as_written)
    cut = pytest.importorskip("cut_cross_entropy")
    pytest.importorskip("cut_cross_entropy.vocab_parallel")


def case(me: Rank, reduction: str, shift: int, reduce_e_grad: bool) -> dict[str, Tensor]:
    given = cut.VocabParallelOptions.from_vocab(37, None, reduce_e_grad)
    ours = cce.VocabParallelOptions.from_vocab(37, None, reduce_e_grad)
    assert (given.start, given.stop) == (ours.start, ours.stop)
    x, w, t = torch.randn(3, 7, 16), torch.randn(37, 16) / 4, torch.randint(0, 37, (3, 7))
    t[:, ::3] = -100
    more = {"softcap": 5.0, "reduction": reduction, "shift": shift, "return_lse": True}

    def of(function: Any, options: Any, **impl: Any) -> Any:
        return lambda x, w: function(x, w, t, vocab_parallel_options=options, **more, **impl)

    theirs = of(cut.linear_cross_entropy, given, impl="torch_compile")
    for options in (given, ours):
        both.same(of(cce.linear_cross_entropy, options), theirs, (x, w[given.start : given.stop]))
    return {}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("reduce_e_grad", [True, False])
def test_function(pair: ranks.Group, reduction: str, shift: int, reduce_e_grad: bool) -> None:
    pair.call(case, reduction, shift, reduce_e_grad)


def test_signatures() -> None:
    both.takes_what(cce.VocabParallelOptions, cut.VocabParallelOptions)
    ours, theirs = cce.linear_cross_entropy, cut.linear_cross_entropy
    own = [name for name in ours.__wrapped__.__annotations__ if name != "memory"]
    assert own == [*theirs.__annotations__]

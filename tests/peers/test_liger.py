# SPDX-License-Identifier: Apache-2.0
"""Liger's tensor-parallel function beside ours: its formulas in torch, which it runs where it has
no kernel, in two processes. The function itself refuses tensors that are not on CUDA."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import Tensor

import both
import ranks
from logitless.integrations import liger
from ranks import Rank

theirs = pytest.importorskip("liger_kernel.ops.fused_linear_scaled_cross_entropy")
OURS = liger.LigerFusedLinearScaledCrossEntropyTPFunction


def case(me: Rank, entropy: bool) -> dict[str, Tensor]:
    x, w, t = both.problem(me)
    x, t, group = x.flatten(0, 1), t.flatten(), dist.group.WORLD
    t[::3] = -100
    both.same(
        lambda x, w: OURS.apply(x, w, t, group, 0.7, return_entropy=entropy),
        lambda x, w: theirs._apply_tp_fallback(x, w, t, 0.7, -100, entropy, group), (x, w),
    )  # fmt: skip
    return {}


@pytest.mark.parametrize("entropy", [False, True])
def test_function(pair: ranks.Group, entropy: bool) -> None:
    pair.call(case, entropy)


def test_signature() -> None:
    name = OURS.__name__
    both.takes_what(OURS.apply, getattr(theirs, name).apply)

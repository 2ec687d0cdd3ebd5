# SPDX-License-Identifier: Apache-2.0
"""Our loss equals torchtitan's ChunkedLossWrapper, each built from a configuration, in one process
and in two processes under both of torchtitan's backends for tensor parallelism."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import both
import ranks
from logitless.integrations import torchtitan
from ranks import Rank

theirs = pytest.importorskip("torchtitan.components.loss")

TOKENS = torch.tensor(31.0)


def losses(vocab: int | None = None) -> list[Any]:
    inner = theirs.CrossEntropyLoss.Config(global_vocab_size=vocab)
    kinds = (torchtitan.LinearCrossEntropyLoss, theirs.ChunkedLossWrapper)
    made = [kind.Config(num_chunks=2, loss_fn=inner).build() for kind in kinds]
    assert all(isinstance(loss, theirs.ChunkedLossWrapper) for loss in made)
    return made


class Head(torch.nn.Module):
    """An lm_head whose weight is given."""

    bias = None

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.linear(x, self.weight)


def run(loss_of: Any, x: Any, weight: Any, t: Tensor, tokens: Any) -> list[Tensor]:
    head = Head(weight.detach().clone())
    loss_of.set_lm_head(head)
    leaf: Any = x.detach().clone().requires_grad_()
    loss, metrics = loss_of(leaf, t, tokens)
    assert metrics == {}
    loss.backward()
    return [loss, leaf.grad, head.weight.grad]  # type: ignore[list-item]


def local(x: Any) -> Tensor:
    found: Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return found


def compare(x: Any, weight: Any, t: Tensor, tokens: Any, vocab: int | None = None) -> None:
    ours, expected = (run(loss, x, weight, t, tokens) for loss in losses(vocab))
    for a, e in zip(ours, expected):
        both.close(local(a).detach(), local(e).detach().double())


def given() -> tuple[Tensor, Tensor, Tensor]:
    x, w = torch.randn(2, 6, both.HIDDEN), torch.randn(37, both.HIDDEN) / 4
    t = torch.randint(0, 37, (2, 6))
    t[:, ::4] = -100
    return x, w, t


@pytest.mark.parametrize("tokens", [None, TOKENS])
def test_alone(tokens: Any) -> None:
    compare(*given(), tokens)


def test_another_loss_is_refused() -> None:
    config = torchtitan.LinearCrossEntropyLoss.Config(loss_fn=theirs.MSELoss.Config())
    with pytest.raises(NotImplementedError, match=r"loss_fn is a MSELoss\.Config"):
        config.build()


@contextlib.contextmanager
def backend(name: str) -> Any:
    from torchtitan.distributed import utils

    before = utils.get_spmd_backend()
    utils.set_spmd_backend(name)
    try:
        yield
    finally:
        utils.set_spmd_backend(before)


def spmd_types(me: Rank) -> dict[str, Tensor]:
    """Plain shares of the weight; the gradient of the hidden states is the rank's part."""
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh

    x, w, t = given()
    mesh = init_device_mesh(ranks.DEVICE, (me.size,), mesh_dim_names=("tp",))
    with backend("spmd_types"), set_current_spmd_mesh(mesh):
        compare(x, w.chunk(me.size)[me.rank], t, TOKENS, 37)
    return {}


def partial_dtensor(me: Rank) -> dict[str, Tensor]:
    x, w, t = given()
    mesh = init_device_mesh(ranks.DEVICE, (me.size,), mesh_dim_names=("tp",))
    pred = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    weight = DTensor.from_local(
        w.chunk(me.size)[me.rank], mesh, [Shard(0)], run_check=False, shape=w.shape, stride=(16, 1)
    )
    with backend("partial_dtensor"):
        compare(pred, weight, t, TOKENS)
    return {}


@pytest.mark.parametrize("case", [spmd_types, partial_dtensor])
def test_tensor_parallel(pair: ranks.Group, case: Any) -> None:
    pair.call(case)

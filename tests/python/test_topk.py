# SPDX-License-Identifier: Apache-2.0
"""linear_topk of PyTorch: the list, its bits, and errors. test_devices_topk.py tests a split
vocabulary."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import reference
from logitless import numpy as of_numpy
from logitless.torch import default_memory, linear_cross_entropy, linear_logprobs_at, linear_topk
from reference import close
from test_linear import BF16, F16, F32, problem

NAN = math.nan
ROWS = ("lse", "entropy", "argmax", "sum_p_squared", "mean_logit", "max_logprob")
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)


def in_order(logprobs: Tensor, ids: Tensor) -> None:
    """A list does not increase, has each class once, and of equal ones the lowest first."""
    before, behind = logprobs[..., :-1], logprobs[..., 1:]
    equal = (before == behind) & (ids[..., :-1] < ids[..., 1:])
    assert bool(((before > behind) | equal).all())
    assert all(len(set(row)) == ids.shape[-1] for row in ids.reshape(-1, ids.shape[-1]).tolist())


@DTYPES
@pytest.mark.parametrize("k", [1, 3, 37])
def test_the_largest_in_order(device: str, dtype: torch.dtype, k: int) -> None:
    x, w, b, _ = problem((3, 11), 37, 6, dtype=dtype, device=device, bias=True)
    options = {"temperature": 0.7, "softcap": 5.0, "logit_scale": 0.9}
    logprobs, ids = linear_topk(x, w, k, linear_bias=b, **options)
    assert logprobs.shape == ids.shape == (3, 11, k)
    assert logprobs.dtype is F32 and ids.dtype is torch.int64
    assert not logprobs.requires_grad and not ids.requires_grad
    in_order(logprobs, ids)
    logits = reference.logits_of(x, w, b)
    zeros = torch.zeros(3, 11, dtype=torch.int64, device=device)
    whole = reference.statistics(logits, zeros, options)["z"].log_softmax(-1)
    close(logprobs, whole.topk(k)[0])
    close(logprobs, whole.gather(-1, ids))


@DTYPES
def test_the_bits_are_those_of_other_calls(device: str, dtype: torch.dtype) -> None:
    x, w, b, t = problem((2, 9), 61, 16, ignored=0, dtype=dtype, device=device, bias=True)
    logprobs, ids, made = linear_topk(x, w, 8, linear_bias=b, return_statistics=ROWS)
    assert torch.equal(ids[..., 0], made.argmax)
    close(logprobs[..., 0], made.max_logprob)
    for k in (1, 3):
        fewer = linear_topk(x, w, k, linear_bias=b)
        if device == "cpu":
            assert torch.equal(fewer[0], logprobs[..., :k])
        assert torch.equal(fewer[1], ids[..., :k])
    close(logprobs, linear_logprobs_at(x, w, ids, linear_bias=b))
    if device == "cpu":
        assert torch.equal(logprobs, linear_logprobs_at(x, w, ids, linear_bias=b))
        if dtype is F32:
            assert b is not None
            given = [v.detach().numpy() for v in (x, w, b)]
            theirs = of_numpy.linear_topk(given[0], given[1], 8, linear_bias=given[2])
            assert np.array_equal(logprobs.numpy(), theirs[0])
            assert np.array_equal(ids.numpy(), theirs[1])
    _, wanted = linear_cross_entropy(x, w, t, linear_bias=b, return_statistics=ROWS)
    for name in ROWS:
        close(getattr(made, name), getattr(wanted, name))
    assert made.rank is None and made.logprob is None


def test_equal_masked_and_nan_classes(device: str) -> None:
    x, w = torch.ones(4, 6, device=device), torch.ones(9, 6, device=device)
    assert torch.equal(linear_topk(x, w, 9)[1].cpu(), torch.arange(9).expand(4, 9))
    mask = torch.full((9,), -math.inf, device=device)
    mask[[3, 7]] = 0
    logprobs, ids = linear_topk(x, w, 4, linear_bias=mask)
    assert ids[0].tolist() == [3, 7, 0, 1] and bool(logprobs[:, 2:].isneginf().all())
    x[2, 1] = NAN
    logprobs, ids = linear_topk(x, w, 4)
    assert logprobs.isnan().any(-1).tolist() == [False, False, True, False]
    assert bool(logprobs[2].isnan().all()) and bool(((ids >= 0) & (ids < 9)).all())


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (5,), (2, 3, 4)])
def test_shapes(device: str, shape: tuple[int, ...]) -> None:
    x, w = torch.randn(*shape, 6, device=device), torch.randn(9, 6, device=device)
    logprobs, ids, made = linear_topk(x, w, 4, return_statistics="lse")
    assert logprobs.shape == ids.shape == (*shape, 4) and made.lse.shape == shape
    rows = linear_topk(x.reshape(-1, 6), w, 4)
    assert torch.equal(rows[1].view(ids.shape), ids)
    across = linear_topk(
        x.transpose(0, -1).contiguous().transpose(0, -1), w.t().contiguous().t(), 4
    )
    assert torch.equal(across[1], ids)


def test_a_temperature_of_each_token(device: str) -> None:
    x, w, _, _ = problem((2, 5), 9, 6, device=device)
    temperature = torch.linspace(0.5, 2, 10, device=device).view(2, 5)
    logprobs, ids = linear_topk(x, w, 3, temperature=temperature)
    close(logprobs, linear_logprobs_at(x, w, ids, temperature=temperature))
    assert torch.equal(ids, linear_topk(x, w, 3)[1])


def test_memory_is_obeyed_and_changes_no_bit_on_the_cpu(device: str) -> None:
    x, w, _, _ = problem((257,), 3001, 24, device=device)
    whole = linear_topk(x, w, 20)
    for memory in ("1MiB", 1 << 21) if device == "cpu" else ("5MiB", 1 << 23):
        bounded = linear_topk(x, w, 20, memory=memory)
        assert torch.equal(bounded[1], whole[1])
        if device == "cpu":
            assert torch.equal(bounded[0], whole[0])
    with default_memory(1), pytest.raises(ValueError, match=r"^memory, that of "):
        linear_topk(x, w, 20)


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph(device: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(linear_topk, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (5, 8):
        x, w, b, _ = problem((tokens,), 37, 6, device=device, bias=True)
        ours = compiled(x, w, 3, linear_bias=b, return_statistics=("entropy", "argmax"))
        eager = linear_topk(x, w, 3, linear_bias=b, return_statistics=("entropy", "argmax"))
        assert torch.equal(ours[0], eager[0]) and torch.equal(ours[1], eager[1])
        assert torch.equal(ours[2].entropy, eager[2].entropy)
        assert torch.equal(ours[2].argmax, eager[2].argmax)
    twice = compiled(x, w, 4)
    assert twice[0].shape == (8, 4) and not twice[0].requires_grad


def test_gradients_go_past_it() -> None:
    """A loss of the same tensors has the gradients that it has alone."""
    x, w, _, t = problem((5,), 37, 6, ignored=0)

    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy(x, w, t), linear_topk(x, w, 2)[0]

    for call in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        loss, logprobs = call(x, w)
        assert not logprobs.requires_grad
        ours = torch.autograd.grad(loss, (x, w))
        alone = torch.autograd.grad(linear_cross_entropy(x, w, t), (x, w))
        assert all(map(torch.equal, ours, alone))


def test_shapes_alone() -> None:
    x, w = torch.empty(3, 5, 6, device="meta"), torch.empty(9, 6, device="meta")
    logprobs, ids = linear_topk(x, w, 4)
    assert logprobs.is_meta and logprobs.shape == ids.shape == (3, 5, 4)
    assert ids.dtype is torch.int64
    with FakeTensorMode():
        made = linear_topk(torch.empty(7, 6), torch.empty(9, 6), 2)
        assert made[0].shape == (7, 2)


def test_autocast(device: str) -> None:
    x, w, _, _ = problem((4, 5), 37, 16, device=device)
    with torch.autocast(device, dtype=BF16):
        ours = linear_topk(x, w, 5)
    by_hand = linear_topk(x.to(BF16), w.to(BF16), 5)
    assert torch.equal(ours[0], by_hand[0]) and torch.equal(ours[1], by_hand[1])


@pytest.mark.parametrize("k", [0, -1, 10, 257, 1 << 40, -(1 << 40), True])
def test_no_such_k(k: Any) -> None:
    x, w, _, _ = problem((2, 5), 9, 6)
    with pytest.raises(ValueError, match=rf"^k is {k}; allowed: 1 to 9, the least of V and 256$"):
        linear_topk(x, w, k)


def test_bad_arguments() -> None:
    x, w, _, _ = problem((2, 5), 300, 6)
    with pytest.raises(TypeError, match=r"^k is a float; allowed: an int$"):
        linear_topk(x, w, 2.5)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"^k is 257; allowed: 1 to 256, "):
        linear_topk(x, w, 257)
    assert linear_topk(x, w, 256)[1].shape == (2, 5, 256)
    with pytest.raises(ValueError, match=r"^return_statistics is 'rank'; allowed: 'lse', "):
        linear_topk(x, w, 2, return_statistics="rank")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"^linear_weight has shape \(300,\)"):
        linear_topk(x, w[:, 0], 2)
    with pytest.raises(ValueError, match=r"^linear_weight has shape|^weight has shape"):
        linear_topk(x, w[:, :5], 2)
    with pytest.raises(TypeError):
        linear_topk(x, w, 2, ignore_index=3)  # type: ignore[call-overload]


def test_a_list_of_rows_as_the_vocabulary(device: str) -> None:
    x, w, b, _ = problem((2, 5), 37, 16, device=device, bias=True)
    assert b is not None
    ids = torch.tensor([31, 2, 17, 5, 8], device=device)
    made = linear_topk(x, w, 3, linear_bias=b, vocab_ids=ids, return_statistics=("lse", "argmax"))
    order = ids.sort().values
    alone = linear_topk(x, w[order], 3, linear_bias=b[order], return_statistics="lse")
    assert torch.equal(made[0], alone[0]) and torch.equal(made[1], order[alone[1]])
    assert torch.equal(made[2].lse, alone[2].lse) and torch.equal(made[2].argmax, made[1][..., 0])
    # Integers: every sum is exact, so the columns' logits are equal to the bit.
    equal = linear_topk(x.detach().mul(8).round(), torch.ones_like(w), 5, vocab_ids=ids)
    assert torch.equal(equal[1], order.expand(2, 5, 5))
    for k in (0, 6):
        with pytest.raises(ValueError, match=rf"^k is {k}; allowed: 1 to 5, the least of V and"):
            linear_topk(x, w, k, vocab_ids=ids)
    compiled = torch.compile(linear_topk, fullgraph=True, backend="aot_eager")
    again = compiled(x, w, 3, linear_bias=b, vocab_ids=ids)
    assert torch.equal(again[0], made[0]) and torch.equal(again[1], made[1])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
def test_a_list_of_rows_beside_tokens_of_any_shape(
    device: str, shape: tuple[int, ...], compiled: bool
) -> None:
    x, w = torch.randn(*shape, 4, device=device), torch.randn(7, 4, device=device)
    rows = torch.tensor([1, 5, 6], device=device)

    def call(x: Tensor) -> Any:
        return linear_topk(x, w, 2, vocab_ids=rows, return_statistics="argmax")

    made = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    logprobs, ids, statistics = made(x)
    wanted, places = linear_topk(x, w[rows], 2)
    assert torch.equal(logprobs, wanted) and torch.equal(ids, rows[places])
    assert torch.equal(statistics.argmax, ids[..., 0])


def test_every_option_beside_every_statistic() -> None:
    x, w, b, _ = problem((7,), 37, 6, bias=True)
    for names, bias, k in itertools.product([(), "argmax", ROWS], [None, b], [1, 36, 37]):
        made = linear_topk(x, w, k, linear_bias=bias, return_statistics=names)
        alone = linear_topk(x, w, k, linear_bias=bias)
        assert torch.equal(made[0], alone[0]) and torch.equal(made[1], alone[1])

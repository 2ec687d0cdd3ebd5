# SPDX-License-Identifier: Apache-2.0
"""linear_logprobs_at over the ids alone, and of lists of any length: values and gradients against
f64 of the whole logits."""

from __future__ import annotations

import functools
import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import reference
from logitless import numpy as of_numpy
from logitless.torch import Split, _lists, linear_logprobs_at
from reference import close
from test_linear import BF16, F16, F32, problem
from test_logprobs_at import ids_of

INFINITY, NAN = math.inf, math.nan
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
OVER = pytest.mark.parametrize("over", ["vocab", "ids"])
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "softcap, temperature": {"softcap": 3.0, "temperature": 0.7, "logit_scale": 0.9},
}


def listed(ids: Tensor, device: str = "cpu", dtype: torch.dtype = torch.int64) -> Any:
    """Lists of the ids [..., K] that are not absent; every third list ends with an absent id."""
    rows = ids.reshape(-1, ids.shape[-1]).tolist()
    lists = [[j for j in row if j >= 0] + [-1] * (i % 3 == 1) for i, row in enumerate(rows)]
    ends = [0, *np.cumsum([len(row) for row in lists])]
    flat = [j for row in lists for j in row]
    return torch.tensor(flat, device=device, dtype=dtype), torch.tensor(ends, device=device)


def exact(
    x: Tensor, w: Tensor, b: Tensor | None, lists: list[list[int]], over: str,
    options: dict[str, Any],
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The log-probabilities [M] of the lists in f64, and the leaves."""
    leaves = [v.detach().double().requires_grad_() for v in (x, w, b) if v is not None]
    target = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    z = reference.statistics(reference.logits_of(*leaves), target, options)["z"]
    rows = z.reshape(-1, z.shape[-1])
    made = []
    for row, ids in zip(rows, lists):
        there = torch.tensor([j for j in ids if j >= 0], dtype=torch.int64, device=x.device)
        values = row[there].log_softmax(0) if over == "ids" else row.log_softmax(0)[there]
        at = iter(values)
        made += [next(at) if j >= 0 else row.new_tensor(-INFINITY) for j in ids]
    return torch.stack(made) if made else rows.new_zeros(0), leaves


def compare(made: Tensor, theirs: Tensor, mine: list[Any], leaves: Any, dtype: Any = F32) -> None:
    absent = theirs.isneginf()
    assert torch.equal(made.isneginf(), absent) and made.dtype is F32
    close(made.masked_fill(absent, 0), theirs.masked_fill(absent, 0))
    g = torch.randn(made.shape, device=made.device)
    grads = torch.autograd.grad(made, mine, g.masked_fill(absent, NAN))
    expected = torch.autograd.grad(theirs, leaves, g.double().masked_fill(absent, 0))
    for ours, of in zip(grads, expected):
        close(ours, of, dtype)


@DTYPES
@OVER
@pytest.mark.parametrize("of", OPTIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_lists(device: str, dtype: torch.dtype, over: Any, of: str, bias: bool) -> None:
    x, w, b, _ = problem((3, 7), 37, 16, dtype=dtype, device=device, bias=bias)
    ids, offsets = listed(ids_of((3, 7), 37, 6, device), device)
    lists = [ids[s:e].tolist() for s, e in zip(offsets.tolist(), offsets.tolist()[1:])]
    mine = [v for v in (x, w, b) if v is not None]
    made = linear_logprobs_at(x, w, ids, linear_bias=b, over=over, offsets=offsets, **OPTIONS[of])
    compare(made, *_swapped(exact(x, w, b, lists, over, OPTIONS[of]), mine), dtype)


def _swapped(theirs: tuple[Tensor, list[Tensor]], mine: list[Any]) -> Any:
    return theirs[0], mine, theirs[1]


@DTYPES
@pytest.mark.parametrize("columns", [1, 2, 31])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_among_the_ids(device: str, dtype: torch.dtype, columns: int, index: torch.dtype) -> None:
    x, w, b, _ = problem((3, 7), 37, 16, dtype=dtype, device=device, bias=True)
    ids = ids_of((3, 7), 37, columns, device, index)
    options = {"temperature": 0.5 + torch.rand(3, 7, device=device)}
    made = linear_logprobs_at(x, w, ids, linear_bias=b, over="ids", **options)
    assert made.shape == ids.shape
    lists = ids.reshape(-1, columns).tolist()
    theirs, leaves = exact(x, w, b, lists, "ids", options)
    assert b is not None
    compare(made.flatten(), theirs, [x, w, b], leaves, dtype)


@OVER
def test_the_bits_of_rows(device: str, over: Any) -> None:
    """Lists of one length give what rows of ids give: over the vocabulary on a CPU, to the bit."""
    x, w, _, _ = problem((9,), 37, 16, device=device)
    ids = ids_of((9,), 37, 4, device, absent=0.0)
    offsets = torch.arange(0, 37, 4, device=device, dtype=torch.int32)
    of_rows = linear_logprobs_at(x, w, ids, over=over)
    of_lists = linear_logprobs_at(x, w, ids.flatten(), over=over, offsets=offsets)
    if over == "vocab" and device == "cpu":  # CUDA's anchor is another id's logit
        assert torch.equal(of_rows.flatten(), of_lists)
    close(of_rows.flatten(), of_lists)
    if device == "cpu":
        arrays = [v.detach().numpy() for v in (x, w, ids.flatten(), offsets)]
        theirs = of_numpy.linear_logprobs_at(*arrays[:3], over=over, offsets=arrays[3])
        np.testing.assert_allclose(of_lists.detach().numpy(), theirs, atol=2e-6)
    g = torch.randn(ids.shape, device=device)
    for ours, of in zip(
        torch.autograd.grad(of_lists, (x, w), g.flatten()),
        torch.autograd.grad(of_rows, (x, w), g),
    ):
        close(ours, of)


def test_statistics_beside_lists(device: str) -> None:
    x, w, _, _ = problem((9,), 37, 16, device=device)
    ids, offsets = listed(ids_of((9,), 37, 4, device), device)
    made, s = linear_logprobs_at(x, w, ids, offsets=offsets, return_statistics=("lse", "entropy"))
    of_rows, wanted = linear_logprobs_at(
        x, w, ids_of((9,), 37, 4, device, absent=0.0), return_statistics=("lse", "entropy")
    )
    ends = offsets.tolist()
    some = torch.tensor([bool((ids[s:e] >= 0).any()) for s, e in itertools.pairwise(ends)])
    some = some.to(device)
    assert bool(some.any()) and not bool(some.all()) and not s.lse[~some].any()
    close(s.lse[some], wanted.lse[some])
    grads = torch.autograd.grad((made.nan_to_num(neginf=0).sum(), s.entropy.sum()), (x, w))
    assert all(bool(g.isfinite().all()) for g in grads)
    del of_rows


@OVER
def test_what_is_not_asked_of_is_not_read(device: str, over: Any) -> None:
    """Tokens without ids are not read; with over="ids", nor are rows of the weight without ids."""
    x, w, _, _ = problem((5,), 37, 16, device=device)
    offsets = torch.tensor([0, 2, 2, 5, 6, 6], device=device)
    ids = torch.tensor([3, 7, 7, 1, 36, -1], device=device)
    with torch.no_grad():
        x[1], x[3], x[4] = NAN, INFINITY, NAN
        if over == "ids":
            w[20] = NAN
    made = linear_logprobs_at(x, w, ids, over=over, offsets=offsets)
    assert bool(made[:5].isfinite().all()) and bool(made[5].isneginf())
    g = torch.ones(6, device=device)
    g[5] = NAN
    of_x, of_w = torch.autograd.grad(made, (x, w), g)
    assert bool(of_x.isfinite().all()) and bool(of_w.isfinite().all())
    assert not of_x[[1, 3, 4]].any() and (over == "vocab" or not of_w[20].any())


@OVER
@pytest.mark.parametrize("empty", ["no tokens", "no ids"])
def test_nothing(device: str, over: Any, empty: str) -> None:
    x, w, _, _ = problem((0,) if empty == "no tokens" else (4,), 9, 16, device=device)
    offsets = torch.zeros(x.shape[0] + 1, dtype=torch.int64, device=device)
    ids = torch.zeros(0, dtype=torch.int64, device=device)
    made = linear_logprobs_at(x, w, ids, over=over, offsets=offsets)
    assert made.shape == (0,)
    assert not any(g.any() for g in torch.autograd.grad(made.sum(), (x, w)))
    if empty == "no tokens":
        none = linear_logprobs_at(x, w, ids.view(0, 1).expand(0, 3), over=over)
        assert none.shape == (0, 3)


def test_more_than_1024_ids_of_a_token(device: str) -> None:
    x, w, _, _ = problem((2,), 3001, 16, device=device)
    ids = torch.cat((torch.arange(3001), torch.tensor([5, 6]))).to(device)
    offsets = torch.tensor([0, 3001, 3003], device=device)
    for over in ("vocab", "ids"):
        made = linear_logprobs_at(x, w, ids, over=over, offsets=offsets)  # type: ignore[call-overload]
        whole = (x.double() @ w.double().T).log_softmax(-1)
        close(made[:3001], whole[0])


@OVER
@pytest.mark.parametrize("lists", [False, True])
def test_one_graph_checkpoint_and_autocast(device: str, over: Any, lists: bool) -> None:
    torch._dynamo.reset()
    x, w, b, _ = problem((9,), 37, 16, device=device, bias=True)
    ids = ids_of((9,), 37, 4, device)
    more: dict[str, Any] = {}
    if lists:
        ids, more["offsets"] = listed(ids, device)
    call = functools.partial(linear_logprobs_at, over=over, linear_bias=b, **more)
    eager = call(x, w, ids)
    g = torch.randn(eager.shape, device=device)
    wanted = torch.autograd.grad(eager, (x, w, b), g)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    again = checkpoint(call, x, w, ids, use_reentrant=False)
    for made in (compiled(x, w, ids), again):
        assert torch.equal(made, eager)
        grads = torch.autograd.grad(made, (x, w, b), g)
        if made is again and device == "cuda":  # without kept state the plan differs
            for ours, of in zip(grads, wanted):
                close(ours, of)
        else:
            assert all(map(torch.equal, grads, wanted))
    bounded = torch.compile(
        functools.partial(call, memory="8MiB"), fullgraph=True, backend="aot_eager"
    )
    close(bounded(x, w, ids).nan_to_num(neginf=0), eager.nan_to_num(neginf=0))
    for ours, of in zip(torch.autograd.grad(bounded(x, w, ids), (x, w, b), g), wanted):
        close(ours, of)
    with torch.autocast(device, dtype=BF16):
        cast = call(x, w, ids)
    rounded = call(x.to(BF16), w.to(BF16), ids)
    close(cast.nan_to_num(neginf=0), rounded.nan_to_num(neginf=0))
    # Gradients of f32 parameters never pass through a narrower dtype.
    for upstream in (1.0, 1e-8):
        given = torch.full_like(cast, upstream)
        some = torch.autograd.grad(cast, (x, w), given, retain_graph=True)
        assert all(g.dtype is F32 and not torch.equal(g, g.to(BF16).float()) for g in some)
    halved = torch.autograd.grad(call(x, w, ids), (x, w), torch.full_like(cast, 1e-8))
    for ours, of in zip(some, halved):
        assert float((ours - of).norm() / of.norm()) < 0.05


@OVER
def test_any_tensors_gradient_alone(device: str, over: Any) -> None:
    x, w, b, _ = problem((9,), 37, 16, device=device, bias=True)
    ids = ids_of((9,), 37, 4, device)
    all_of = torch.autograd.grad(
        linear_logprobs_at(x, w, ids, linear_bias=b, over=over).nan_to_num(neginf=0).sum(),
        (x, w, b),
    )
    for i in range(3):
        given = [v if j == i else v.detach() for j, v in enumerate((x, w, b))]  # type: ignore[union-attr]
        made = linear_logprobs_at(given[0], given[1], ids, linear_bias=given[2], over=over)
        alone = torch.autograd.grad(made.nan_to_num(neginf=0).sum(), given[i])[0]
        close(alone, all_of[i])
    with torch.no_grad():
        assert not linear_logprobs_at(x, w, ids, over=over).requires_grad


def test_strides_and_shapes(device: str) -> None:
    x, w, _, _ = problem((2, 3, 4), 9, 16, device=device)
    ids = ids_of((2, 3, 4), 9, 5, device)
    wanted = linear_logprobs_at(x, w, ids, over="ids")
    across = ids.transpose(0, 3).contiguous().transpose(0, 3)
    turned = w.t().contiguous().t()
    made = linear_logprobs_at(x.transpose(0, 1), turned, across.transpose(0, 1), over="ids")
    close(made.transpose(0, 1).nan_to_num(neginf=0), wanted.nan_to_num(neginf=0))
    g = torch.randn(wanted.shape, device=device)
    ours = torch.autograd.grad(made, x, g.transpose(0, 1), retain_graph=True)[0]
    close(ours, torch.autograd.grad(wanted, x, g)[0])
    one = linear_logprobs_at(x[0, 0, 0], w, ids[0, 0, 0], over="ids")
    close(one.nan_to_num(neginf=0), wanted[0, 0, 0].nan_to_num(neginf=0))
    assert linear_logprobs_at(x.to("meta"), w.to("meta"), ids.to("meta"), over="ids").is_meta


@OVER
def test_forward_mode_and_transforms_are_refused(over: Any) -> None:
    x, w, _, _ = problem((4,), 9, 16)
    ids = ids_of((4,), 9, 3, absent=0.0)

    def call(x: Tensor) -> Tensor:
        return linear_logprobs_at(x, w, ids, over=over)

    with pytest.raises(NotImplementedError):
        torch.func.jvp(call, (x.detach(),), (x.detach(),))
    with pytest.raises(NotImplementedError):
        torch.func.vmap(call)(x.detach().expand(2, 4, 16))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), x.detach())
        with pytest.raises(NotImplementedError):
            call(dual)


@OVER
def test_columns_of_hidden_states_under_inductors_rules(device: str, over: Any) -> None:
    """Fake and real gradients have the same order of strides, whichever the input has."""
    w = problem((4,), 9, 16, device=device)[1]
    ids = ids_of((2, 3), 9, 3, device, absent=0.0)
    for x in (
        torch.randn(2, 16, 3, device=device).transpose(1, 2),
        torch.randn(16, 2, 3, device=device).permute(1, 2, 0),
    ):
        x = x.requires_grad_()
        torch.library.opcheck(
            torch.ops.logitless.logits_at_backward,
            (x.detach(), w.detach(), None, None, ids, None, 1.0, 0.0, 1.0, None, None,
             torch.randn(2, 3, 3, device=device), 3),
        )  # fmt: skip
        made = linear_logprobs_at(x, w, ids, over=over)
        plain = x.detach().contiguous().requires_grad_()
        theirs = linear_logprobs_at(plain, w, ids, over=over)
        g = torch.randn(made.shape, device=device)
        close(torch.autograd.grad(made, x, g)[0], torch.autograd.grad(theirs, plain, g)[0])


@OVER
def test_a_list_of_every_class_is_summed_exactly(device: str, over: Any) -> None:
    """The CPU adds one value after another; in f32 the sum would lose digits."""
    x, w, b, _ = problem((1,), 20000, 16, device=device, bias=True)
    assert b is not None
    ids, offsets = torch.arange(20000, device=device), torch.tensor([0, 20000], device=device)
    made = linear_logprobs_at(x, w, ids, linear_bias=b, over=over, offsets=offsets)
    theirs, leaves = exact(x, w, b, [ids.tolist()], over, {})
    g = torch.full((20000,), 0.1, device=device)
    ours = torch.autograd.grad(made, b, g)[0].double()
    of = torch.autograd.grad(theirs, leaves, g.double())[2]
    scale = 2000 * theirs.detach().exp() + 0.1  # the size of each element's terms
    assert float(((ours - of).abs() / scale).max()) < 2e-6


def test_differentiated_once(device: str) -> None:
    x, w, _, _ = problem((4,), 9, 16, device=device)
    made = linear_logprobs_at(x, w, ids_of((4,), 9, 3, device, absent=0.0), over="ids")
    grad = torch.autograd.grad(made.sum(), x, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="differentiated once only"):
        torch.autograd.grad(grad.sum(), w)


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        ([0, 2, 1, 4], r"^offsets\[2\] is 1; "),
        ([1, 2, 3, 4], r"^offsets\[0\] is 1; "),
        ([0, 2, 3, 3], r"^offsets\[3\] is 3; "),
        ([0, 2, 3, 5], r"^offsets\[3\] is 5; "),
    ],
)
@OVER
def test_wrong_offsets(offsets: list[int], text: str, over: Any) -> None:
    x, w, _, _ = problem((3,), 9, 16)
    with pytest.raises(ValueError, match=text):
        linear_logprobs_at(x, w, torch.arange(4), over=over, offsets=torch.tensor(offsets))


@OVER
def test_bad_arguments(over: Any) -> None:
    x, w, _, _ = problem((3,), 9, 16)
    ids, offsets = torch.arange(4), torch.tensor([0, 2, 3, 4])
    call: Any = functools.partial(linear_logprobs_at, x, w)
    with pytest.raises(ValueError, match=r"^ids\[2\] is 9; allowed: "):
        call(torch.tensor([0, 1, 9, 2]), over=over, offsets=offsets)
    with pytest.raises(
        ValueError, match=r"^ids has shape \(4, 1\); allowed beside offsets: \(M,\)$"
    ):
        call(ids[:, None], over=over, offsets=offsets)
    with pytest.raises(ValueError, match=r"^offsets has shape \(3,\); allowed: \(4,\), N \+ 1 of"):
        call(ids, over=over, offsets=offsets[:3])
    with pytest.raises(
        ValueError, match=r"^ids has shape \(4,\); allowed beside no tokens: \(0,\)$"
    ):
        linear_logprobs_at(x[:0], w, ids, over=over, offsets=offsets[:1])
    with pytest.raises(TypeError, match=r"^offsets is float32; allowed: int32, int64$"):
        call(ids, over=over, offsets=offsets.float())
    with pytest.raises(ValueError, match=r"^over is 'all'; allowed: 'vocab', 'ids'$"):
        call(ids, over="all")
    with pytest.raises(NotImplementedError, match=r"^return_statistics is \('lse',\) with over="):
        call(ids[:3, None], over="ids", return_statistics=("lse",))
    with pytest.raises(NotImplementedError, match=r"^(over='ids'|offsets) is of one process; "):
        call(ids, over=over, offsets=offsets, group=Split(blocks=2))
    with pytest.raises(NotImplementedError, match=r"^vocab_ids is given with over='ids'; "):
        call(ids, over="ids", offsets=offsets, vocab_ids=ids)
    made = call(ids, over="vocab", offsets=offsets, vocab_ids=torch.tensor([3, 1, 0, 2]))
    theirs, _ = exact(x, w[:4], None, [[0, 1], [2], [3]], "vocab", {})
    close(made, theirs)
    wrong = torch.tensor([[0], [9], [1]]).expand(3, 2)
    with pytest.raises(ValueError, match=r"^ids\[1, [01]\] is 9; allowed: "):
        call(wrong, over="ids")
    assert not dist.is_initialized()


def test_offsets_that_a_gpu_does_not_look_at(device: str) -> None:
    """Wrong offsets are made non-decreasing and kept within the places."""
    values = torch.arange(1.0, 8, device=device)
    for offsets in ([0, 9, 3, 12], [-5, 2, -1, 7], [3, 3, 3, 3], [1 << 40, 0, 0, -(1 << 40)]):
        ends = torch.tensor(offsets, device=device)
        token = _lists.token_of(ends, 7)
        assert token.shape == (7,) and bool(((token >= 0) & (token < 3)).all())
        held = _lists.ends_of(ends, 7).tolist()
        assert held == sorted(held) and held[0] >= 0 and held[-1] <= 7
        wanted = [float(values[s:e].sum()) for s, e in itertools.pairwise(held)]
        assert _lists.sums(values, ends).tolist() == wanted
        assert _lists.log_softmax(values, ends).shape == (7,)


@pytest.mark.parametrize("shape", [(2, 3), (6, 1), (1, 6), (6,)], ids=str)
def test_upstream_gradients_of_a_statistic_beside_lists(
    device: str, shape: tuple[int, ...]
) -> None:
    """Statistics have the shape of the tokens, whichever that is."""
    x, w, _, _ = problem(shape, 37, 16, device=device)
    ids = ids_of((6,), 37, 2, device, absent=0.0).view(-1)
    offsets = torch.arange(0, 13, 2, device=device)
    made, s = linear_logprobs_at(x, w, ids, offsets=offsets, return_statistics=("lse", "entropy"))
    theirs, of = linear_logprobs_at(x, w, ids.view(*shape, 2), return_statistics=("lse", "entropy"))
    g, h = torch.randn(12, device=device), torch.randn(2, *shape, device=device)
    ours = torch.autograd.grad((made, s.lse, s.entropy), (x, w), (g, *h))
    wanted = torch.autograd.grad((theirs, of.lse, of.entropy), (x, w), (g.view(*shape, 2), *h))
    for one, two in zip(ours, wanted):
        close(one, two)


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("why", ["NaN", "masked"])
def test_over_the_ids_a_token_without_a_gradient_costs_none(
    device: str, lists: bool, compiled: bool, why: str
) -> None:
    """Not even if its logits are NaN, or all its ids are masked by a bias of -inf."""
    x, w, b, _ = problem((5,), 37, 16, device=device, bias=True)
    assert b is not None
    ids = torch.arange(15, device=device).view(5, 3)
    x, b = x.detach().clone(), b.detach().clone()
    if why == "NaN":
        x[1] = NAN
    else:
        b[ids[1]] = -INFINITY
    x.requires_grad_()
    b.requires_grad_()
    offsets = torch.arange(0, 16, 3, device=device) if lists else None

    def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        flat = ids.view(-1) if lists else ids
        return linear_logprobs_at(x, w, flat, linear_bias=b, over="ids", offsets=offsets)

    made = torch.compile(call, backend="aot_eager")(x, w, b) if compiled else call(x, w, b)
    assert bool(made.view(5, 3)[1].isnan().all())
    g = torch.randn(5, 3, device=device)
    g[1] = 0
    grads = torch.autograd.grad(made, (x, w, b), g.view(made.shape))
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert not grads[0][1].any() and not grads[1][ids[1]].any() and bool(grads[0][2].any())
    # The gradient of such a token that has one is NaN, as everywhere.
    g[1, 2] = 1
    made = call(x, w, b)
    of_x = torch.autograd.grad(made, x, g.view(made.shape))[0]
    assert bool(of_x[1].isnan().all()) and not of_x[2].isnan().any()


@OVER
@pytest.mark.parametrize("lists", [False, True])
def test_tokens_without_ids_are_no_anomaly(device: str, over: Any, lists: bool) -> None:
    x, w, _, _ = problem((3,), 9, 16, device=device)
    ids = torch.tensor([[1, 2], [-1, -1], [4, -1]], device=device)
    offsets = torch.arange(0, 7, 2, device=device) if lists else None
    flat = ids.view(-1) if lists else ids
    with torch.autograd.set_detect_anomaly(True):
        made = linear_logprobs_at(x, w, flat, over=over, offsets=offsets)
        made.where(flat >= 0, 0.0).sum().backward()


@OVER
@pytest.mark.parametrize("lists", [False, True])
def test_memory_that_suffices_in_forward_suffices_in_backward(
    device: str, over: Any, lists: bool
) -> None:
    x, w, b, _ = problem((200,), 300, 65, device=device, bias=True)
    assert b is not None
    ids = ids_of((200,), 300, 40, device, absent=0.0)
    offsets = torch.arange(0, 8001, 40, device=device) if lists else None
    flat = ids.view(-1) if lists else ids

    def call(memory: int) -> Tensor:
        how: dict[str, Any] = {"linear_bias": b, "over": over, "offsets": offsets}
        return linear_logprobs_at(x, w, flat, memory=memory, **how)

    with pytest.raises(ValueError, match=r"^memory is 0 bytes; allowed: >= ") as raised:
        call(0)
    least = int(re.search(r">= (\d+)", str(raised.value)).group(1))  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=f"^memory is {least - 1} bytes; allowed: >= {least}"):
        call(least - 1)
    torch.autograd.grad(call(least).sum(), (x, w, b))
    with torch.no_grad():  # Forward alone may need less
        with pytest.raises(ValueError, match=r"^memory is 0 bytes") as raised:
            call(0)
        forward = int(re.search(r">= (\d+)", str(raised.value)).group(1))  # type: ignore[union-attr]
        assert forward <= least
        call(forward)


def test_what_belongs_to_no_list_is_nan_over_the_ids(device: str) -> None:
    """Where nobody reads wrong offsets, the core makes such logits NaN."""
    log_softmax: Any = torch.ops.logitless.log_softmax_at
    logits = torch.tensor([1.0, 2.0, NAN], device=device)
    ids, offsets = torch.tensor([1, 2, 3], device=device), torch.tensor([0, 2, 2], device=device)
    assert log_softmax(logits, ids, offsets).isnan().tolist() == [False, False, True]
    logits = torch.tensor([NAN, -INFINITY, 2.0], device=device)
    ids, offsets = torch.tensor([1, -1, 3], device=device), torch.tensor([1, 2, 3], device=device)
    made = log_softmax(logits, ids, offsets)
    assert bool(made[0].isnan()) and bool(made[1].isneginf()) and not made[2]

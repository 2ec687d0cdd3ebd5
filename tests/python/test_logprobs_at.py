# SPDX-License-Identifier: Apache-2.0
"""linear_logprobs_at: log-probabilities of chosen columns, and their gradients, against f64 of the
whole logits; the bits of linear_logprob. test_devices_logprobs_at.py tests a split vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import reference
from exact_head import U32, UNIT, Exact, gamma, within
from logitless import _abi
from logitless import numpy as of_numpy
from logitless.torch import (
    _autograd,
    _chosen,
    _run,
    default_memory,
    linear_cross_entropy,
    linear_logprob,
    linear_logprobs_at,
)
from reference import close
from test_linear import BF16, F16, F32, problem

INFINITY, NAN = math.inf, math.nan
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
ROWS = ("lse", "entropy", "argmax", "sum_p_squared", "mean_logit", "max_logprob")


def ids_of(
    shape: tuple[int, ...], vocab: int, columns: int, device: str | None = None,
    dtype: torch.dtype = torch.int64, absent: float = 0.2,
) -> Tensor:  # fmt: skip
    """Ids, some absent, some given twice. If any may be absent, the second row has none."""
    ids = torch.randint(0, vocab, (*shape, columns), device=device)
    if columns > 2:
        ids[..., 2] = ids[..., 0]
    ids = ids.masked_fill(torch.rand(ids.shape, device=device) < absent, -1)
    if absent and ids.numel() > columns:
        ids.view(-1, columns)[1] = -1
    return ids.to(dtype)


def exact(
    x: Tensor, w: Tensor, b: Tensor | None, ids: Tensor, options: dict[str, Any],
    names: tuple[str, ...] = (),
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Log-probabilities and statistics in f64, and their leaves."""
    leaves = [v.detach().double().requires_grad_() for v in (x, w, b) if v is not None]
    logits = reference.logits_of(*leaves)
    target = (ids == -1).all(-1).long() * -100
    s = reference.statistics(logits, target, options)
    made = s["z"].log_softmax(-1).gather(-1, ids.long().clamp(min=0))
    return [made.masked_fill(ids == -1, -INFINITY), *(s[name] for name in names)], leaves


def compare(
    outputs: list[Tensor], leaves: list[Tensor], theirs: list[Tensor], mine: list[Tensor],
    ids: Tensor, dtype: torch.dtype = F32, **how: Any,
) -> None:  # fmt: skip
    """Values, and gradients for upstream gradients that are NaN where an id is absent."""
    absent = ids == -1
    assert torch.equal(outputs[0].isneginf(), absent) and outputs[0].dtype is F32
    assert outputs[0].shape == ids.shape
    close(outputs[0].masked_fill(absent, 0), theirs[0].masked_fill(absent, 0))
    for ours, of in zip(outputs[1:], theirs[1:]):
        close(ours, of)
    differ = [place for place, of in enumerate(outputs) if of.requires_grad]
    given = [torch.randn(theirs[place].shape, device=ids.device) for place in differ]
    upstream = [given[0].masked_fill(absent, NAN), *given[1:]]
    grads = torch.autograd.grad([outputs[place] for place in differ], mine, upstream, **how)
    clean = [given[0].masked_fill(absent, 0), *given[1:]]
    expected = torch.autograd.grad(
        [theirs[place] for place in differ], leaves, [g.double() for g in clean]
    )
    for ours, of, leaf in zip(grads, expected, mine):
        assert ours.dtype is leaf.dtype
        close(ours, of, dtype)


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.6},
    "softcap": {"softcap": 2.0, "logit_scale": 0.7},
    "memory": {"memory": "8MiB"},
}


@DTYPES
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("columns", [1, 2, 7])
def test_values_and_gradients_are_those_of_f64(
    device: str, dtype: torch.dtype, name: str, columns: int
) -> None:
    options = OPTIONS[name]
    x, w, b, _ = problem((3, 11), 37, 16, dtype, device, bias=True)
    assert b is not None
    ids = ids_of((3, 11), 37, columns, device)
    ours = linear_logprobs_at(x, w, ids, linear_bias=b, **options)
    theirs, leaves = exact(x, w, b, ids, options)
    compare([ours], leaves, theirs, [x, w, b], ids, dtype)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("columns", [1, 2, 6])
def test_every_element_is_within_the_contracts_bound(
    device: str, dtype: torch.dtype, columns: int
) -> None:
    x, w, _, _ = problem((4, 11), 211, 24, dtype, device)
    ids = ids_of((4, 11), 211, columns, device, absent=0)
    ours = linear_logprobs_at(x, w, ids)
    heads = [Exact(x, w, ids[..., k]) for k in range(columns)]
    for k, head in enumerate(heads):
        within(ours[..., k], head.logprob, head.of_logprob.view(4, 11))
    g = torch.randn(ids.shape, device=device)
    theirs, leaves = exact(x, w, None, ids, {})
    p, of_p, flat, each = heads[0].p, heads[0].of_p, ids.view(44, -1), g.double().view(44, -1)
    at, count = torch.zeros_like(p), torch.zeros_like(p)
    at.scatter_add_(1, flat, each.abs()), count.scatter_add_(1, flat, torch.ones_like(each))
    of_lse = each.abs().sum(-1, keepdim=True)  # [N, 1]
    summands = of_lse * p + at
    draw = of_lse * (of_p + columns * U32 * p) + 4 * U32 * summands + count * U32 * at
    rounded = 2 * UNIT[dtype] if dtype is BF16 else 0.0
    rows, weight = x.detach().double().view(44, -1).abs(), w.detach().double().abs()
    largest = (at[..., None] * rows[:, None]).amax(0)  # [V, D]
    bounds = (
        ((draw + (gamma(211) + rounded) * summands) @ weight).view_as(x),
        (draw + (gamma(44) + rounded) * summands).T @ rows + 44 * U32 * largest,
    )
    grads = torch.autograd.grad(ours, (x, w), g)
    expected = torch.autograd.grad(theirs[0], leaves, g.double())
    for mine, of, bound in zip(grads, expected, bounds):
        within(mine, of, bound)
        assert of.abs().max() > (5000 if dtype is F32 else 30) * bound.max()


@pytest.mark.parametrize("columns", [1, 3])
def test_a_temperature_of_each_token(device: str, columns: int) -> None:
    x, w, _, _ = problem((3, 11), 37, 16, device=device)
    ids = ids_of((3, 11), 37, columns, device)
    temperature = 0.5 + torch.rand(3, 11, device=device)
    for given in (temperature, temperature.flatten()):
        ours = linear_logprobs_at(x, w, ids, temperature=given)
        theirs, leaves = exact(x, w, None, ids, {"temperature": temperature})
        compare([ours], leaves, theirs, [x, w], ids)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_statistics_of_the_rows_come_with_it(device: str, columns: int, dtype: torch.dtype) -> None:
    x, w, _, _ = problem((3, 11), 37, 16, dtype, device)
    ids = ids_of((3, 11), 37, columns, device)
    ours, s = linear_logprobs_at(x, w, ids, return_statistics=ROWS)
    assert s.rank is s.logprob is s.target_logit is s.mass_above is None
    alike(ours, linear_logprobs_at(x, w, ids))
    theirs, leaves = exact(x, w, None, ids, {}, ROWS)
    assert torch.equal(s.argmax, theirs[3])
    compare([ours, *(getattr(s, n) for n in ROWS)], leaves, theirs, [x, w], ids, dtype)
    alone = torch.autograd.grad(
        linear_logprobs_at(x, w, ids, return_statistics="lse")[1].lse.sum(), w
    )
    lse, leaves = exact(x, w, None, ids, {}, ("lse",))
    close(alone[0], torch.autograd.grad(lse[1].sum(), leaves[1])[0], dtype)


@pytest.mark.parametrize("name", ["rank", "logprob", "target_logit", "mass_above", "loss"])
def test_statistics_of_a_target_are_refused(name: str) -> None:
    x, w, _, _ = problem((4,), 9, 6)
    allowed = r"allowed: 'lse', 'entropy', 'argmax', 'sum_p_squared', 'mean_logit', 'max_logprob'$"
    with pytest.raises(ValueError, match=rf"^return_statistics is '{name}'; {allowed}"):
        linear_logprobs_at(x, w, torch.zeros(4, 2).long(), return_statistics=(name,))


def alike(ours: Tensor, theirs: Tensor) -> None:
    """The same bits on the CPU, close values on CUDA: there, bits may depend on other outputs."""
    if not ours.is_cuda:
        assert torch.equal(bits(ours), bits(theirs))
    absent = theirs.isneginf()
    assert torch.equal(ours.isneginf(), absent)
    close(ours.masked_fill(absent, 0), theirs.detach().masked_fill(absent, 0).double())


def bits(x: Tensor) -> Tensor:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return x.detach().contiguous().view(integers[x.element_size()])


@DTYPES
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "temperature": 0.8}], ids=str)
def test_it_has_the_bits_of_linear_logprob(
    device: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """With one id, values and gradients have the same bits; with more, values on the CPU do."""
    x, w, b, t = problem((5, 7), 211, 24, dtype, device, bias=True)
    t = t.masked_fill(t == -100, -1)
    wanted = linear_logprob(x, w, t, linear_bias=b, ignore_index=-1, **options)
    one = linear_logprobs_at(x, w, t[..., None], linear_bias=b, **options)
    counts = t != -1
    assert torch.equal(bits(one[..., 0])[counts], bits(wanted)[counts])
    g = torch.randn(5, 7, device=device)
    for ours, theirs in zip(
        torch.autograd.grad(one, (x, w, b), g[..., None]),
        torch.autograd.grad(wanted, (x, w, b), g),
    ):
        assert torch.equal(bits(ours), bits(theirs))
    others = torch.randint(-1, 211, (5, 7, 9), device=device)
    for columns in (2, 10):
        ids = torch.cat((others[..., : columns - 1], t[..., None]), -1)
        many = linear_logprobs_at(x, w, ids, linear_bias=b, **options)
        alike(many[..., -1][counts], wanted[counts])
        with torch.no_grad():
            alike(linear_logprobs_at(x, w, ids, linear_bias=b, **options), many)


def test_it_has_the_bits_of_numpy() -> None:
    x, w, b, _ = problem((2, 5), 37, 16, bias=True)
    assert b is not None
    ids = ids_of((2, 5), 37, 4)
    made = of_numpy.linear_logprobs_at(
        *(v.detach().numpy() for v in (x, w)), ids.numpy(), linear_bias=b.detach().numpy()
    )
    assert torch.equal(
        torch.from_numpy(made), linear_logprobs_at(x, w, ids, linear_bias=b).detach()
    )


@pytest.mark.parametrize("columns", [1, 2, 1024])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_any_number_of_columns_of_either_dtype(
    device: str, columns: int, dtype: torch.dtype
) -> None:
    x, w, _, _ = problem((6,), 50, 8, device=device)
    ids = ids_of((6,), 50, columns, device, dtype)
    ours = linear_logprobs_at(x, w, ids)
    theirs, leaves = exact(x, w, None, ids, {})
    compare([ours], leaves, theirs, [x, w], ids)


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 1, 3), (2, 0), (0,)], ids=str)
@pytest.mark.parametrize("columns", [1, 3])
def test_tokens_have_any_shape(device: str, shape: tuple[int, ...], columns: int) -> None:
    x, w, _, _ = problem(shape, 19, 8, device=device)
    ids = ids_of(shape, 19, columns, device, absent=0)
    ours = linear_logprobs_at(x, w, ids)
    theirs, leaves = exact(x, w, None, ids, {})
    compare([ours], leaves, theirs, [x, w], ids)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("needed", [0, 1, 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_any_tensors_gradient_alone(device: str, columns: int, needed: int, compiled: bool) -> None:
    given = problem((70,), 37, 16, device=device, bias=True)[:3]
    ids = ids_of((70,), 37, columns, device)
    mine = [v.detach().requires_grad_(i == needed) for i, v in enumerate(given) if v is not None]
    call = torch.compile(linear_logprobs_at, fullgraph=True) if compiled else linear_logprobs_at
    ours = call(mine[0], mine[1], ids, linear_bias=mine[2])
    theirs, leaves = exact(*mine, ids, {})
    compare([ours], [leaves[needed]], theirs, [mine[needed]], ids)


@pytest.mark.parametrize("columns", [1, 3])
def test_noncontiguous_tensors(device: str, columns: int) -> None:
    x, w, _, _ = problem((4, 6), 19, 8, device=device)
    ids = ids_of((6, 4), 19, 2 * columns, device).transpose(0, 1)[..., ::2]
    turned = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert not turned.is_contiguous() and not ids.is_contiguous()
    ours = linear_logprobs_at(turned, w, ids)
    assert torch.equal(ours, linear_logprobs_at(x, w, ids.contiguous()))
    theirs, leaves = exact(x, w, None, ids, {})
    compare([ours], leaves, theirs, [turned, w], ids)


@pytest.mark.parametrize("columns", [1, 2, 5])
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_without_ids_are_not_read(device: str, columns: int, compiled: bool) -> None:
    """Neither the rows of tokens without ids nor upstream gradients of absent ids are read."""
    call = torch.compile(linear_logprobs_at, fullgraph=True) if compiled else linear_logprobs_at
    results = []
    for filled in (0.0, NAN):
        torch.manual_seed(1)
        x, w, _, _ = problem((70,), 37, 16, device=device)
        ids = ids_of((70,), 37, columns, device, absent=0.5)
        x = x.detach().masked_fill((ids == -1).all(-1)[:, None], filled).requires_grad_()
        g = torch.randn(70, columns, device=device).masked_fill(ids == -1, filled)
        made = call(x, w, ids)
        results.append((made.detach(), *torch.autograd.grad(made, (x, w), g)))
    for plain, odd in zip(*results):
        assert torch.equal(plain, odd) and not odd.isnan().any()
    assert not results[1][1][(ids == -1).all(-1)].any()


def test_a_token_without_a_gradient_costs_none(device: str) -> None:
    """A NaN in the row of a token whose upstream gradients are 0 changes nothing."""
    x, w, _, _ = problem((9,), 37, 16, device=device)
    x = x.detach()
    x[4] = NAN
    x.requires_grad_()
    ids = ids_of((9,), 37, 3, device, absent=0)
    g = torch.randn(9, 3, device=device)
    g[4] = 0
    grads = torch.autograd.grad(linear_logprobs_at(x, w, ids), (x, w), g)
    assert not grads[0].isnan().any() and not grads[1].isnan().any() and not grads[0][4].any()


def test_kept_or_made_again_it_is_within_the_same_bound(device: str, launched: list[int]) -> None:
    x, w, b, _ = problem((6, 50), 700, 16, device=device, bias=True)
    assert b is not None
    ids = ids_of((6, 50), 700, 5, device)
    theirs, leaves = exact(x, w, b, ids, {})
    memories = (None, "600KiB", "3MiB") if device == "cpu" else (None, "8MiB", "16MiB")
    for memory in memories:
        ours = linear_logprobs_at(x, w, ids, linear_bias=b, memory=memory)
        kept = ours.grad_fn.saved_tensors[_autograd._SAVED :]  # type: ignore[union-attr]
        assert len(kept) == (0 if memory == "600KiB" else 2)
        g = torch.randn(ids.shape, device=device)
        first = torch.autograd.grad(ours, (x, w, b), g, retain_graph=True)
        again = torch.autograd.grad(ours, (x, w, b), g, retain_graph=True)
        for one, two in zip(first, again):
            close(one, two.double())
        compare([ours], leaves, theirs, [x, w, b], ids)
        theirs, leaves = exact(x, w, b, ids, {})
    forward, backward = _abi.LINEAR_CROSS_ENTROPY_FORWARD, _abi.LINEAR_CROSS_ENTROPY_BACKWARD
    assert launched == [forward, backward, backward, backward] * 3


def test_memory_that_is_too_small_is_named(device: str) -> None:
    x, w, _, _ = problem((6, 50), 700, 16, device=device)
    ids = ids_of((6, 50), 700, 5, device)
    with pytest.raises(ValueError, match=r"^memory is 1 "):
        linear_logprobs_at(x, w, ids, memory=1)
    with pytest.raises(ValueError, match="default_memory"), default_memory(1):
        linear_logprobs_at(x, w, ids)


# --- functions that call it ---


@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph(device: str, columns: int, dynamic: bool) -> None:
    compiled = torch.compile(
        lambda x, w, i: linear_logprobs_at(x, w, i, return_statistics="lse"), fullgraph=True,
        dynamic=dynamic,
    )  # fmt: skip
    for shape in ((2, 5), (3, 7)):
        x, w, _, _ = problem(shape, 19, 8, device=device)
        ids = ids_of(shape, 19, columns, device)
        (ours, s), (plain, t) = (
            compiled(x, w, ids),
            linear_logprobs_at(x, w, ids, return_statistics="lse"),
        )
        assert torch.equal(ours, plain) and torch.equal(s.lse, t.lse)
        theirs, leaves = exact(x, w, None, ids, {}, ("lse",))
        compare([ours, s.lse], leaves, theirs, [x, w], ids)
        with torch.no_grad():
            alike(compiled(x, w, ids)[0], plain)


def test_a_checkpoint_makes_it_again(device: str) -> None:
    x, w, _, _ = problem((6, 50), 300, 16, device=device)
    ids = ids_of((6, 50), 300, 3, device)
    ours = checkpoint(linear_logprobs_at, x, w, ids, use_reentrant=False)
    theirs, leaves = exact(x, w, None, ids, {})
    compare([ours], leaves, theirs, [x, w], ids)


@pytest.mark.parametrize("columns", [1, 3])
def test_autocast_casts_both(device: str, columns: int) -> None:
    x, w, b, _ = problem((3, 11), 37, 16, device=device, bias=True)
    assert b is not None
    ids = ids_of((3, 11), 37, columns, device)
    with torch.autocast(device, BF16):
        ours = linear_logprobs_at(x, w, ids, linear_bias=b)
    with torch.no_grad():
        cast = linear_logprobs_at(x.bfloat16(), w.bfloat16(), ids, linear_bias=b)
    assert torch.equal(ours, cast)
    theirs, leaves = exact(x.bfloat16(), w.bfloat16(), b, ids, {})
    compare([ours], leaves, theirs, [x, w, b], ids, BF16)


@pytest.mark.parametrize("columns", [1, 3])
def test_meta_and_fake_tensors(columns: int) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for mode in (torch.device("meta"), FakeTensorMode()):
        with mode:
            x, w = torch.randn(2, 5, 8, requires_grad=True), torch.randn(19, 8, requires_grad=True)
            ids = torch.zeros(2, 5, columns, dtype=torch.int64)
            made = linear_logprobs_at(x, w, ids)
            assert made.shape == (2, 5, columns) and made.dtype is F32
            made.sum().backward()
            assert x.grad is not None and x.grad.shape == x.shape
            with pytest.raises(ValueError, match="linear_bias has"):
                linear_logprobs_at(x, w, ids, linear_bias=torch.zeros(3))


@pytest.mark.parametrize("columns", [1, 3])
def test_it_is_differentiated_once(columns: int) -> None:
    x, w, _, _ = problem((4,), 9, 6)
    made = linear_logprobs_at(x, w, torch.zeros(4, columns).long())
    (grad,) = torch.autograd.grad(made.sum(), w, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated once only"):
        grad.sum().backward()


def test_transforms_are_refused() -> None:
    x, w, _, _ = problem((4,), 9, 6)
    ids = torch.zeros(4, 2).long()
    with pytest.raises(NotImplementedError, match=r"torch\.func transforms"):
        torch.func.grad(lambda w: linear_logprobs_at(x.detach(), w, ids).sum())(w.detach())


def test_results_can_be_changed_in_place(device: str) -> None:
    x, w, _, _ = problem((4,), 9, 6, device=device)
    for columns in (1, 3):
        ids = ids_of((4,), 9, columns, device)
        made = linear_logprobs_at(x, w, ids)
        made.masked_fill_(ids == -1, 0).sum().backward()


@pytest.mark.cuda
@pytest.mark.parametrize("columns", [1, 3])
def test_a_wrong_id_on_a_gpu_is_nan_alone(columns: int) -> None:
    """A wrong id has no gradient; the others have theirs."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    for wrong in (37, -2, -100, 1 << 20):
        x, w, _, _ = problem((70,), 37, 16, device="cuda")
        ids = ids_of((70,), 37, columns, "cuda", absent=0)
        clean = ids.clone()
        ids[3, columns - 1], clean[3, columns - 1] = wrong, -1
        g = torch.randn(70, columns, device="cuda")
        g[3, columns - 1] = NAN
        ours, theirs = linear_logprobs_at(x, w, ids), linear_logprobs_at(x, w, clean)
        at = torch.zeros_like(ids, dtype=torch.bool)
        at[3, columns - 1] = True
        assert ours[at].isnan().all() and torch.equal(ours[~at], theirs[~at])
        for mine, of in zip(
            torch.autograd.grad(ours, (x, w), g), torch.autograd.grad(theirs, (x, w), g)
        ):
            close(mine, of.double())


@pytest.mark.cuda
@pytest.mark.parametrize("columns", [1, 3])
def test_a_cuda_graph_replays_it(columns: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    x, w, _, _ = problem((70,), 211, 64, BF16, "cuda")
    ids = ids_of((70,), 211, columns, "cuda")
    g = torch.randn(70, columns, device="cuda")

    def step() -> tuple[Tensor, ...]:
        made = linear_logprobs_at(x, w, ids)
        return made, *torch.autograd.grad(made, (x, w), g)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    ids.copy_(ids_of((70,), 211, columns, "cuda"))
    graph.replay()
    for ours, of in zip(replayed, step()):
        assert torch.equal(ours, of)


@pytest.mark.cuda
def test_the_host_never_waits() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    x, w, _, _ = problem((70,), 211, 64, BF16, "cuda")
    for columns in (1, 3):
        ids = ids_of((70,), 211, columns, "cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            linear_logprobs_at(x, w, ids).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


# --- errors ---


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("wrong", [9, -2, -100, 1 << 20])
@pytest.mark.parametrize("compiled", [False, True])
def test_wrong_ids_have_the_callers_index(columns: int, wrong: int, compiled: bool) -> None:
    x, w, _, _ = problem((2, 5), 9, 6)
    call = torch.compile(linear_logprobs_at, backend="eager") if compiled else linear_logprobs_at
    ids, last = torch.zeros(2, 5, columns, dtype=torch.int64), columns - 1
    ids[1, 3, last] = wrong
    flat = rf"ids\[8, {last}\]"
    where = flat if compiled else rf"ids\[1, 3, {last}\] \(flat: {flat}\)"
    if compiled and columns == 1:  # a single id is passed to the op as a target
        where = r"target\[8\]"
    with pytest.raises(ValueError, match=rf"{where} is {wrong}; allowed: 0 to 8, or "):
        call(x, w, ids)
    if not compiled:
        with pytest.raises(ValueError, match=rf"^ids\[3, {last}\] is {wrong}; .* -1 for none$"):
            linear_logprobs_at(x[1], w, ids[1])
        with pytest.raises(ValueError, match=rf"^ids\[{last}\] is {wrong}; allowed: 0 to 8, or -1"):
            linear_logprobs_at(x[1, 3], w, ids[1, 3])


def test_a_wrong_id_beside_absent_ones_is_found() -> None:
    x, w, _, _ = problem((4,), 9, 6)
    ids = torch.full((4, 3), -1)
    ids[2, 1] = -5
    with pytest.raises(ValueError, match=r"^ids\[2, 1\] is -5; allowed"):
        linear_logprobs_at(x, w, ids)


@pytest.mark.parametrize(
    "shape", [(2, 5), (2, 5, 0), (2, 5, 1025), (5, 2, 3), (10, 3), (2, 5, 3, 1), ()], ids=str
)
def test_ids_of_another_shape(shape: tuple[int, ...]) -> None:
    x, w, _, _ = problem((2, 5), 9, 6)
    with pytest.raises(ValueError, match=r"^ids has shape .*; allowed: \(2, 5, K\), .* 1 to 1024"):
        linear_logprobs_at(x, w, torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bool], ids=str)
def test_ids_of_another_dtype(dtype: torch.dtype) -> None:
    x, w, _, _ = problem((2, 5), 9, 6)
    name = str(dtype)[6:]
    with pytest.raises(TypeError, match=f"^ids is {name}; allowed: int32, int64"):
        linear_logprobs_at(x, w, torch.zeros(2, 5, 3, dtype=dtype))
    with pytest.raises(TypeError, match=r"^ids is a list; allowed: a tensor"):
        linear_logprobs_at(x, w, [[1]])  # type: ignore[arg-type]


# --- mutants: bugs that these tests find ---


def _other_sign(*given: Any) -> Any:
    asked = _asked_of(*given)
    lse = asked.upstream.grad_lse
    return asked._replace(upstream=asked.upstream._replace(grad_lse=None if lse is None else -lse))


def _reads_absent(grads: Any, options: Any, vocab: Any, *saved: Any) -> Any:
    ids = saved[5]
    return _asked_of(grads, options, vocab, *saved[:5], ids.clamp(min=0), *saved[6:])


def _not_above_zero(logits: Tensor, row_state: Tensor, ids: Tensor) -> Tensor:
    reference, log_sum = row_state.view(2, *logits.shape[:-1], 1)
    return logits.sub_(reference + log_sum).masked_fill_(ids == -1, -INFINITY)


def _one_target(ids: Tensor, vocab: Any) -> Tensor:
    return ids.amax(-1)


_asked_of = _autograd.asked_of
MUTANTS: dict[str, tuple[Any, str, Any, Callable[[], None]]] = {
    "the other sign of grad_lse": (
        _autograd, "asked_of", _other_sign,
        lambda: test_values_and_gradients_are_those_of_f64("cpu", F32, "nothing", 7),
    ),
    "the upstream gradient of an absent id is read": (
        _autograd, "asked_of", _reads_absent,
        lambda: test_values_and_gradients_are_those_of_f64("cpu", F32, "nothing", 7),
    ),
    "the lse is added up before it is taken off": (
        _run, "logprobs_at", _not_above_zero,
        lambda: test_it_has_the_bits_of_linear_logprob("cpu", F32, {}),
    ),
    "a row of absent and wrong ids counts as absent": (
        _chosen, "targets_of", _one_target, test_a_wrong_id_beside_absent_ones_is_found,
    ),
    "a single id goes the way of many": (
        _chosen, "wanted_of", lambda wanted, ids: wanted | _run.ROW_STATE,
        lambda: test_it_has_the_bits_of_linear_logprob("cpu", F32, {}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_bug_makes_a_check_fail(name: str) -> None:
    where, function, mutant, check = MUTANTS[name]
    check()
    with mock.patch.object(where, function, mutant), pytest.raises(BaseException):  # noqa: B017
        check()


def test_a_column_is_what_the_loss_makes_of_it() -> None:
    x, w, _, t = problem((7,), 19, 8, ignored=0)
    made = linear_logprobs_at(x, w, torch.stack((t, t), -1))
    loss = linear_cross_entropy(x, w, t, reduction="none")
    close(-made[:, 0], loss.double())

# SPDX-License-Identifier: Apache-2.0
"""A temperature of each token, the statistics that a caller names, the bits of a log-probability,
and tokens without an upstream gradient."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import logitless.numpy
import reference
from logitless import _abi
from logitless._abi import Options
from logitless.torch import (
    LinearCrossEntropyHead,
    LinearCrossEntropyLoss,
    _autograd,
    _ops,
    _run,
    cross_entropy,
    linear_cross_entropy,
    linear_logprob,
)
from reference import close
from test_compile import Counter
from test_kept import Ran, ran  # noqa: F401
from test_linear import BF16, F16, F32, problem

DIFFERENTIABLE = ("lse", "target_logit", "logprob", "entropy")
CONSTANT = ("argmax", "rank", "sum_p_squared", "mean_logit", "max_logprob", "mass_above")
EVERY = (*DIFFERENTIABLE, *CONSTANT)
FORWARD = _abi.LINEAR_CROSS_ENTROPY_FORWARD
BACKWARD = _abi.LINEAR_CROSS_ENTROPY_BACKWARD
FUSED = _abi.LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD


def temperatures(*shape: int, device: str = "cpu") -> Tensor:
    return torch.rand(shape, device=device) + 0.5


def gradients(outputs: Any, leaves: Any, retain: bool = True) -> tuple[Tensor, ...]:
    """Gradients for random upstream gradients that are the same in each call."""
    generator = torch.Generator().manual_seed(7)
    upstream = [torch.randn(o.shape, generator=generator).to(o.device) for o in outputs]
    upstream = [u.to(o.dtype) for u, o in zip(upstream, outputs)]
    return torch.autograd.grad(outputs, leaves, upstream, retain_graph=retain)


# --- temperatures per token ---


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("shape", [(3, 11), (33,), (3, 1), (11,), (1,), ()], ids=str)
def test_values_and_gradients_are_those_of_f64(
    device: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, w, b, t = problem((3, 11), 53, 24, dtype, device, bias=True)
    given = temperatures(*shape, device=device)
    each = given.reshape(3, 11) if shape == (33,) else given.expand(3, 11)
    options: dict[str, Any] = {"softcap": 5.0, "logit_scale": 0.7, "label_smoothing": 0.1}
    logits = reference.logits_of(x, w, b)
    s = reference.statistics(logits, t, {**options, "temperature": each})
    for reduction in ("none", "mean"):
        ours = linear_cross_entropy(
            x, w, t, linear_bias=b, reduction=reduction, temperature=given,
            return_statistics=DIFFERENTIABLE, **options,
        )  # fmt: skip
        theirs = reference.loss(logits, t, reduction=reduction, temperature=each, **options)
        outputs = [ours[0], *ours[1][:4]]
        exact = [theirs, *(s[name] for name in DIFFERENTIABLE)]
        for a, e in zip(outputs, exact):
            close(a, e)
        for a, e in zip(gradients(outputs, (x, w, b)), gradients(exact, (x, w, b))):
            close(a, e, dtype)
    loss = linear_cross_entropy(x, w, t, linear_bias=b, temperature=given, **options)
    exact = reference.loss(logits, t, temperature=each, **options)
    close(loss, exact)
    for a, e in zip(gradients([loss], (x, w, b)), gradients([exact], (x, w, b))):
        close(a, e, dtype)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_equal_ones_give_the_numbers_bits(dtype: torch.dtype) -> None:
    x, w, b, t = problem((3, 11), 700, 24, dtype, bias=True)
    z = x.detach().float().requires_grad_()
    functions: list[Callable[..., Any]] = [
        lambda c: [linear_cross_entropy(x, w, t, linear_bias=b, temperature=c)],
        lambda c: linear_logprob(x, w, t, linear_bias=b, temperature=c, entropy=True),
        lambda c: [cross_entropy(z, t % 24, temperature=c, reduction="none")],
    ]
    for function, number in itertools.product(functions, (1.0, 0.7)):
        leaves = (z,) if function is functions[2] else (x, w, b)
        expected = function(number)
        grads = gradients(expected, leaves)
        for given in (torch.tensor(number), torch.full((33,), number), torch.full((3, 1), number)):
            outputs = function(given)
            assert all(map(torch.equal, outputs, expected))
            assert all(map(torch.equal, gradients(outputs, leaves), grads))


@pytest.mark.parametrize("dtype", [torch.float64, BF16, torch.int64], ids=str)
def test_another_dtype_is_made_f32(dtype: torch.dtype) -> None:
    x, w, _, t = problem((3, 11), 53, 24)
    given = (temperatures(3, 11) * 4).to(dtype)
    given = given.clamp(min=1) if dtype is torch.int64 else given
    ours = linear_logprob(x, w, t, temperature=given)
    assert torch.equal(ours, linear_logprob(x, w, t, temperature=given.float()))


@pytest.mark.parametrize("shape", [(3, 11), (33,), (11,), (3, 1), ()], ids=str)
def test_shift_moves_it_as_the_target(shape: tuple[int, ...]) -> None:
    x, w, _, t = problem((3, 11), 53, 24)
    given = temperatures(*shape)
    each = given.reshape(3, 11) if shape == (33,) else given.expand(3, 11)
    for shift in (1, 4, 10):
        ours = linear_logprob(x, w, t, temperature=given, shift=shift)
        rest = 11 - shift
        theirs = linear_logprob(x[:, :rest], w, t[:, 11 - rest :], temperature=each[:, 11 - rest :])
        assert torch.equal(ours[:, :rest], theirs) and not ours[:, rest:].any()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 1e-40, 1e-38])
def test_a_bad_one_makes_its_own_row_nan(device: str, bad: float) -> None:
    x, w, _, t = problem((33,), 53, 24, device=device)
    t[3], t[4], t[5] = 7, -100, 8
    good = temperatures(33, device=device)
    given = good.clone()
    given[3] = given[4] = bad  # token 4 is ignored, so its temperature is not read
    expected, ours = (linear_logprob(x, w, t, temperature=c) for c in (good, given))
    rest = torch.arange(33, device=device) != 3
    assert ours[3].isnan() and torch.equal(ours[rest], expected[rest])
    (grad,), (theirs,) = (torch.autograd.grad(y[rest].sum(), x) for y in (ours, expected))
    close(grad, theirs.double())  # token 3 has no upstream gradient


def test_modules_take_one_for_a_call(device: str) -> None:
    head = LinearCrossEntropyHead(24, 53, temperature=0.7, device=device)
    x, _, _, t = problem((3, 11), 53, 24, device=device)
    given = temperatures(3, 11, device=device)
    w = head.weight
    assert torch.equal(head(x, t), linear_cross_entropy(x, w, t, temperature=0.7))
    assert torch.equal(
        head(x, t, temperature=given), linear_cross_entropy(x, w, t, temperature=given)
    )
    logits = (x @ w.T).double()
    close(head(x, temperature=given), logits / given.double()[..., None])
    close(head(x, temperature=given.flatten()), logits / given.double()[..., None])
    assert head.bfloat16()(x.bfloat16(), temperature=given).dtype is BF16
    half = LinearCrossEntropyLoss(temperature=torch.tensor(0.7)).to(torch.bfloat16)
    assert isinstance(half.temperature, Tensor) and half.temperature.dtype == torch.float32
    assert torch.equal(half.temperature, torch.tensor(0.7))
    own = LinearCrossEntropyLoss(temperature=torch.tensor(2.0)).to("meta")
    assert own.temperature.is_meta and not own.state_dict() and "temperature" not in repr(own)  # type: ignore[union-attr]


@pytest.mark.slow
def test_one_graph_for_every_value_and_shape(device: str) -> None:
    for dynamic, option in ((None, ()), (True, (3,)), (True, (3, 1))):
        counter, frames = Counter(), []
        how = {} if dynamic is None else {"dynamic": dynamic}
        function = counter.compile(
            lambda x, w, t, c: linear_logprob(x, w, t, temperature=c, shift=True), **how
        )
        for step in range(5):
            tokens = 11 if dynamic is None else 8 + step
            x, w, _, t = problem((3, tokens), 53, 24, device=device)
            given = temperatures(*option, device=device)
            given = given.repeat(tokens) if option == (3,) else given  # [N]
            ours, eager = (
                function(x, w, t, given),
                linear_logprob(x, w, t, temperature=given, shift=True),
            )
            close(ours, eager.double())
            for a, e in zip(gradients([ours], (x, w), False), gradients([eager], (x, w))):
                close(a, e.double())
            frames.append(counter.graphs.frame_count)
        # Dynamo recompiles once at most, to replace plain numbers by symbols.
        assert len(set(frames[1:])) == 1, frames


@pytest.mark.parametrize("op", ["forward", "fused", "backward"])
def test_the_ops_take_it(op: str) -> None:
    x, w, b, t = problem((2, 5), 19, 8, bias=True)
    inputs = [v.detach() for v in (x, w, b)] if op == "backward" else [x, w, b]  # type: ignore[union-attr]
    options = Options(2 if op == "fused" else 0, -100, 0.1, 1e-3, 0.9, 7.0, 1.0)
    ids = None if op == "fused" else torch.randint(-1, 19, (2, 5, 3))
    tensors = (*inputs, t, None, None, None, temperatures(10), ids, None)
    given = _ops.arguments(tensors, options, None)
    call, needs = torch.ops.logitless.forward, sum(_run.OF_TENSORS)
    more: tuple[Any, ...] = ((_run.DETACHED - 1) & ~_run.TOP, 0, None)
    if op == "fused":
        more = (_run.LOSS | sum(_run.CONSTANTS) | _run.FUSED | needs, 0, None)
    elif op == "backward":
        made = dict(zip(_ops.RESULTS, call(*given, *more)))
        upstream = [*torch.randn(4, 2, 5), torch.randn(2, 5, 3)]
        more = (needs, made["row_state"], made["entropy"], *upstream, None, None)
        call = torch.ops.logitless.backward
    torch.library.opcheck(call, (*given, *more), rtol=1e-3, atol=1e-3)


def test_under_autocast_it_stays_f32() -> None:
    x, w, _, t = problem((3, 11), 53, 24)
    given = temperatures(3, 11)
    with torch.autocast("cpu", dtype=BF16):
        ours = linear_logprob(x, w, t, temperature=given)
        compiled = Counter().compile(linear_logprob)(x, w, t, temperature=given)
    exact = reference.logits_of(x.bfloat16(), w.bfloat16())
    expected = reference.statistics(exact, t, {"temperature": given})["logprob"]
    close(ours, expected)
    assert torch.equal(ours, compiled)


def test_numpy_is_torch() -> None:
    x, w, _, t = (None if v is None else v.detach() for v in problem((3, 11), 53, 24))
    assert x is not None and w is not None and t is not None
    arrays = [v.numpy() for v in (x, w, t)]
    for shape, shift in itertools.product([(3, 11), (33,), (3, 1), (11,), ()], (0, 2)):
        given = temperatures(*shape)
        how: dict[str, Any] = {"shift": shift, "reduction": "none", "return_statistics": EVERY}
        _, theirs = linear_cross_entropy(x, w, t, temperature=given, **how)
        _, ours = logitless.numpy.linear_cross_entropy(
            *arrays, temperature=given.double().numpy(), **how
        )
        for a, e in zip(ours, theirs):
            assert np.array_equal(a, e.numpy())
        logprob, entropy = logitless.numpy.linear_logprob(
            *arrays, temperature=given.numpy(), shift=shift, entropy="detached"
        )
        assert np.array_equal(logprob, ours.logprob) and np.array_equal(entropy, ours.entropy)
    with pytest.raises(ValueError, match=r"temperature has shape \(5,\); allowed: \(3, 11\)"):
        logitless.numpy.linear_logprob(*arrays, temperature=np.ones(5))
    with pytest.raises(ValueError, match=r"temperature\[1\] is 1e-46"):
        logitless.numpy.linear_logprob(*arrays, temperature=np.array([1, 1e-46] * 11)[:11])


# --- statistics ---


@pytest.mark.parametrize("kind", ["linear", "logits", "compiled", "fused"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_statistics_are_those_of_f64(
    device: str, kind: str, dtype: torch.dtype, launched: list[int]
) -> None:
    x, w, b, t = problem((3, 11), 53, 24, dtype, device, bias=True)
    logits = reference.logits_of(x, w, b)
    names = CONSTANT if kind == "fused" else EVERY
    if kind == "logits":
        x = logits.detach().to(dtype).requires_grad_()
        logits = x
        _, s = cross_entropy(x, t, return_statistics=names, temperature=0.7)
    else:
        function = (
            Counter().compile(linear_cross_entropy) if kind == "compiled" else linear_cross_entropy
        )
        _, s = function(x, w, t, linear_bias=b, return_statistics=names, temperature=0.7)
    expected = reference.statistics(logits, t, {"temperature": 0.7})
    for name in names:
        value = getattr(s, name)
        assert value.dtype is (torch.int64 if name in ("argmax", "rank") else F32)
        assert value.requires_grad == (name in DIFFERENTIABLE)
        close(value, expected[name])
    assert len(launched) == 1 and (launched == [FUSED]) == (kind == "fused")
    alone = [
        linear_cross_entropy(x, w, t, linear_bias=b, return_statistics=name, temperature=0.7)[1]
        for name in (names if kind == "linear" else ())
    ]
    for name, one in zip(names, alone):
        assert [v is None for v in one] == [n != name for n in one._fields]
        assert (
            name in ("entropy", "lse")
            or device != "cpu"
            or torch.equal(getattr(one, name), getattr(s, name))
        )


def test_a_log_probability_has_the_same_bits_whatever_is_asked() -> None:
    x, w, _, t = problem((3, 70), 700, 24)
    expected = linear_logprob(x.detach(), w.detach(), t)
    asked: list[Callable[..., Any]] = [
        lambda x, w, t: linear_logprob(x, w, t),
        lambda x, w, t: linear_logprob(x, w, t, entropy=True)[0],
        lambda x, w, t: linear_logprob(x, w, t, entropy="detached")[0],
        lambda x, w, t: linear_logprob(x, w, t, memory="1MiB"),
        lambda x, w, t: linear_logprob(x, w, t, memory="64MiB", entropy=True)[0],
        lambda x, w, t: linear_logprob(x, w, t, temperature=torch.ones(())),
        lambda x, w, t: linear_logprob(x, w, t, temperature=torch.ones(3, 70)),
        lambda x, w, t: linear_logprob(x.flatten(0, 1), w, t.flatten()).view(3, 70),
        lambda x, w, t: torch.stack([linear_logprob(x[i], w, t[i]) for i in range(3)]),
        lambda x, w, t: torch.cat(
            (
                linear_logprob(x, w, t.roll(1, 1), shift=True)[:, :-1],
                linear_logprob(x, w, t)[:, -1:],
            ),
            1,
        ),
    ]
    for name in EVERY:
        names = ("logprob", name)
        asked.append(
            lambda x, w, t, names=names: (
                linear_cross_entropy(x, w, t, return_statistics=names)[1].logprob
            )
        )
    for function in asked:
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                assert torch.equal(function(x, w, t), expected)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_it_is_never_above_0(dtype: torch.dtype) -> None:
    """If the target has all of the probability, the row's lse may be rounded below its logit."""
    x = torch.zeros(513, 64, dtype=dtype)
    x[:, 0] = torch.linspace(0, 90, 513).to(dtype)
    w = (torch.randn(701, 64) * 0.01).to(dtype)
    w[5, 0] = 1.0
    t = torch.full((513,), 5)
    for entropy in (False, True):
        result = linear_logprob(x, w, t, entropy=entropy)
        logprob = result[0] if entropy else result
        assert (logprob <= 0).all() and (logprob == 0).any() and (logprob < -1).any()
        assert (logprob.exp() <= 1).all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_detached_entropy_costs_nothing_in_backward(
    device: str, ran: list[Ran], compiled: bool, dtype: torch.dtype  # noqa: F811
) -> None:  # fmt: skip
    x, w, _, t = problem((4, 80), 1000, 16, dtype, device)

    def both(x: Tensor, w: Tensor, t: Tensor, entropy: Any = "detached") -> Any:
        return linear_logprob(x, w, t, entropy=entropy)

    logprob, entropy = (Counter().compile(both) if compiled else both)(x, w, t)
    assert logprob.requires_grad and not entropy.requires_grad
    expected, exact = both(x, w, t, True)
    assert torch.equal(logprob, expected) and torch.equal(entropy, exact)
    ran.clear()
    for _ in range(2):
        ours = gradients([logprob], (x, w))
    assert [(r.kept, r.consume) for r in ran] == [(True, False)] * 2
    for a, e in zip(ours, gradients([linear_logprob(x, w, t)], (x, w))):
        close(a, e.double(), dtype)
        assert compiled or device != "cpu" or torch.equal(a, e)


def test_a_detached_entropy_leaves_as_much_memory_as_none(ran: list[Ran]) -> None:  # noqa: F811
    """No memory is reserved for a Backward of the entropy, so as much state is kept."""
    x, w, _, t = problem((700,), 1500, 64, BF16)
    sizes: dict[Any, list[int]] = {}
    for entropy in (False, "detached", True):
        for memory in (1_000_000, 1_500_000, 2_000_000, 4_000_000):
            result = linear_logprob(x, w, t, entropy=entropy, memory=memory)
            saved = (result[0] if entropy else result).grad_fn.saved_tensors[_autograd._SAVED :]
            sizes.setdefault(entropy, []).append(saved[0].numel() if saved else 0)
    assert sizes["detached"] == sizes[False] and any(sizes[False])
    assert all(a <= b for a, b in zip(sizes[True], sizes[False]))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_of_target_logit_alone_needs_no_kept_state(
    device: str, ran: list[Ran], compiled: bool  # noqa: F811
) -> None:  # fmt: skip
    x, w, _, t = problem((4, 80), 1000, 16, device=device)

    def chosen(x: Tensor, w: Tensor, t: Tensor, name: str) -> Any:
        s = linear_cross_entropy(x, w, t, reduction="none", return_statistics=DIFFERENTIABLE)[1]
        return getattr(s, name)

    exact = [v.detach().double().requires_grad_() for v in (x, w)]
    s = reference.statistics(reference.logits_of(*exact), t, {})
    for name in ("target_logit", "lse"):
        ran.clear()
        ours = (Counter().compile(chosen) if compiled else chosen)(x, w, t, name)
        for a, e in zip(gradients([ours], (x, w)), gradients([s[name]], exact)):
            close(a, e)
        assert [r.kept for r in ran] == [True, name != "target_logit"]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_log_probabilitys_gradient_is_that_of_the_loss(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward gets grad_loss alone. With class or token weights logprob is not -loss, and grad_lse
    and grad_target_logit are needed."""
    given: list[list[str]] = []
    real = _abi.Plan.run

    def spy(plan: _abi.Plan, *addresses: Any, **how: Any) -> None:
        names = ("grad_loss", "grad_lse", "grad_target_logit")
        given.append([name for name in names if getattr(plan._call.op, name)])
        real(plan, *addresses, **how)

    monkeypatch.setattr(_abi.Plan, "run", spy)
    x, w, _, t = problem((4, 80), 1000, 16)
    for weight in (None, torch.rand(1000) + 0.5):

        def run(x: Tensor, w: Tensor, t: Tensor, c: Tensor | None = weight) -> Any:
            if c is None:
                return linear_logprob(x, w, t)
            names = ("logprob",)
            return linear_cross_entropy(
                x, w, t, reduction="none", weight=c, return_statistics=names
            )[1].logprob  # fmt: skip

        logprob = (Counter().compile(run) if compiled else run)(x, w, t)
        close_to_loss = gradients([logprob], (x, w))
        loss = linear_cross_entropy(x, w, t, reduction="none")
        for a, e in zip(close_to_loss, gradients([-loss], (x, w))):
            close(a, e.double())
    assert [g for g in given if g][::2] == [
        ["grad_loss"], ["grad_loss", "grad_lse", "grad_target_logit"],
    ]  # fmt: skip


def test_only_detached_is_a_text() -> None:
    x, w, _, t = problem((3,), 53, 24)
    with pytest.raises(ValueError, match="entropy is 'none'; allowed: False, True, \"detached\""):
        linear_logprob(x, w, t, entropy="none")


# --- tokens without an upstream gradient ---


def clipped(x: Tensor, w: Tensor, t: Tensor, old: Tensor) -> Tensor:
    """PPO's objective for advantages of 1, whose gradient is exactly 0 where the ratio is above
    1.2."""
    ratio = (linear_logprob(x, w, t) - old).exp()
    return torch.min(ratio, ratio.clamp(0.8, 1.2)).sum()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_clipped_tokens_have_no_gradient(device: str, dtype: torch.dtype, compiled: bool) -> None:
    x, w, _, t = problem((6, 50), 700, 16, dtype, device, ignored=0)
    with torch.no_grad():
        old = linear_logprob(x, w, t)
        old += torch.where(torch.rand_like(old) < 0.6, -1.0, 0.0)  # the ratio is 1 or e
    function = Counter().compile(clipped) if compiled else clipped
    kept = (linear_logprob(x, w, t) - old).exp() < 1.2
    assert 50 < kept.sum() < 250
    grads = torch.autograd.grad(function(x, w, t, old), (x, w))
    assert not grads[0][~kept].any() and grads[0][kept].any(-1).all()
    exact = [v.detach().double().requires_grad_() for v in (x, w)]
    logprob = reference.statistics(reference.logits_of(*exact), t, {})["logprob"]
    ratio = (logprob - old.double()).exp()
    for a, e in zip(grads, torch.autograd.grad(ratio[kept].sum(), exact)):
        close(a, e, dtype)


@pytest.mark.parametrize("compiled", [False, True])
def test_masked_before_the_formula_a_nan_stays_out_of_it(compiled: bool) -> None:
    """With a mask only after the formula, exp's gradient would multiply 0 by NaN."""
    x, w, _, t = problem((6, 50), 700, 16, ignored=0)
    old, mask = linear_logprob(x, w, t).detach(), torch.rand(6, 50) < 0.5
    bad = x.detach().masked_fill(~mask[..., None], math.nan).requires_grad_()

    def masked(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        logprob = linear_logprob(x, w, t)
        ratio = (logprob.where(mask, 0) - old).exp()
        return torch.min(ratio, ratio.clamp(0.8, 1.2)).where(mask, 0).sum()

    function = Counter().compile(masked) if compiled else masked
    found = []
    for rows in (x, bad):
        loss = function(rows, w, t)
        found.append((loss, *torch.autograd.grad(loss, (rows, w))))
    assert all(map(torch.equal, *found)) and found[0][1][mask].any(-1).all()


@pytest.mark.parametrize("memory", [None, 0.3], ids=["kept", "a share"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_nan_row_without_a_gradient_changes_nothing(
    device: str, dtype: torch.dtype, compiled: bool, memory: Any
) -> None:
    """The same for infinite rows and bad temperatures, with logits kept or computed again."""
    x, w, _, t = problem((6, 50), 700, 16, dtype, device, ignored=0.1)
    least = 5_100_000 if device == "cuda" and dtype is F32 else 1 << 20
    memory = None if memory is None else int(memory * 300 * 700 * 4) + least
    mask = torch.rand(6, 50, device=device) < 0.7  # these have no upstream gradient
    bad = x.detach().clone()
    bad[mask] = torch.where(torch.rand(6, 50, 1, device=device) < 0.5, math.nan, math.inf).to(
        dtype
    )[mask]
    given = temperatures(6, 50, device=device)
    broken = given.masked_fill(mask & (torch.rand(6, 50, device=device) < 0.3), -1.0)

    def run(x: Tensor, w: Tensor, t: Tensor, c: Tensor) -> Any:
        return linear_logprob(x, w, t, temperature=c, entropy=True, memory=memory)

    function = Counter().compile(run) if compiled else run
    upstream = [torch.randn(6, 50, device=device).masked_fill(mask, 0) for _ in range(2)]
    found = []
    for rows, degrees in ((x, given), (bad.requires_grad_(), broken)):
        outputs = function(rows, w, t, degrees)
        found.append(torch.autograd.grad(outputs, (rows, w), upstream))
    for ours, theirs in zip(*found):
        assert torch.equal(ours, theirs)
    assert not found[1][0][mask].any() and found[1][0][~mask & (t != -100)].any(-1).all()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_retained_graph_with_other_masks(
    device: str, ran: list[Ran], dtype: torch.dtype, compiled: bool  # noqa: F811
) -> None:  # fmt: skip
    x, w, _, t = problem((4, 80), 1000, 16, dtype, device)
    function = Counter().compile(linear_logprob) if compiled else linear_logprob
    logprob = function(x, w, t)
    exact = [v.detach().double().requires_grad_() for v in (x, w)]
    theirs = reference.statistics(reference.logits_of(*exact), t, {})["logprob"]
    whole = torch.randn(4, 80, device=device)
    one = torch.rand(4, 80, device=device) < 0.5
    for mask in (one, ~one, torch.ones_like(one), torch.zeros_like(one), one):
        upstream = whole.masked_fill(mask, 0)
        grads = torch.autograd.grad(logprob, (x, w), upstream, retain_graph=True)
        assert not grads[0][mask].any()
        expected = torch.autograd.grad(theirs, exact, upstream.double(), retain_graph=True)
        for a, e in zip(grads, expected):
            close(a, e, dtype)
    assert [r.kept for r in ran] == [True] * 6 and ran[0].kind == FORWARD


def test_probabilities_of_a_few_classes_are_tokens_with_weights(device: str) -> None:
    """docs/python.md shows this in place of soft targets."""
    x, w, _, _ = problem((2, 3), 50, 8, F32, device)
    p, top = torch.randn(2, 3, 50, device=device).softmax(-1).topk(4)
    rows = x.unsqueeze(-2).expand(*top.shape, -1)
    loss = linear_cross_entropy(rows, w, top, token_weight=p, reduction="sum")
    exact = [v.detach().double().requires_grad_() for v in (x, w)]
    logprob = torch.nn.functional.linear(*exact).log_softmax(-1).gather(-1, top)
    expected = -(p.double() * logprob).sum()
    close(loss, expected, F32)
    for a, e in zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(expected, exact)):
        close(a, e, F32)

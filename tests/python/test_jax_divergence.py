# SPDX-License-Identifier: Apache-2.0
"""linear_divergence of logitless.jax against its definition in f64 (test_divergence.py), under jit,
grad, vmap, scan and checkpoint; which calls a program makes, what is kept, what is refused."""

from __future__ import annotations

import inspect
import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("jax")
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import torch

import logitless.jax
import logitless.numpy as ln
from jax_support import (  # noqa: F401
    DTYPES,
    fields,
    kinds,
    memory,
    platform,
    same,
    to_jax,
)
from logitless import LogitlessError, _abi
from logitless.jax import DivergenceStatistics, linear_cross_entropy, linear_divergence
from test_divergence import (
    BACKWARD,
    BOTH,
    FORWARD,
    KINDS,
    OPTIONS,
    SHAPE,
    STATISTICS,
    VOCAB,
    Heads,
    expected,
    heads,
    wrong,
)

F32, F16, BF16 = DTYPES
Tensors = torch.Tensor


def as_jax(value: Any) -> Any:
    return to_jax(value) if isinstance(value, Tensors) else value


def given(h: Heads) -> tuple[Any, Any, Any, Any]:
    """Input and weight of the student and of the teacher."""
    x, w, y, v = map(to_jax, h[:4])
    return x, w, y, v


def jax_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: as_jax(value) for name, value in options.items()}


def call(h: Heads, **options: Any) -> Callable[..., Any]:
    """linear_divergence as a function of the student's input, weight and, if given, bias."""
    _, _, y, v = given(h)
    teacher = (None, None) if "teacher_logits" in options else (y, v)
    rest = jax_options(options)

    def divergence(x: Any, w: Any, b: Any = None) -> Any:
        biased = {} if b is None else {"linear_bias": b}
        return linear_divergence(x, w, *teacher, **{**rest, **biased})

    return divergence


def upstream(shape: Any, seed: int = 0) -> torch.Tensor:
    drawn = np.random.default_rng(seed).standard_normal(tuple(shape))
    return torch.from_numpy(np.asarray(drawn, np.float32))


def equal(a: Any, b: Any) -> bool:
    return all(
        np.array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32), equal_nan=True)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def agree(h: Heads, dtype: Any = F32, moved: Any = None, **options: Any) -> None:
    """The loss, its gradients and every statistic are those of f64, with the same bits under jit
    and outside. `moved`: options that replace the reference's in the function's call."""
    names = STATISTICS if options.get("target") is not None else STATISTICS[:3]
    theirs, known = expected(h, **options)
    function = call(h, **{**options, **(moved or {})}, return_statistics=names)
    up = upstream(theirs.shape)
    biased = "linear_bias" in options

    def step(*primals: Any) -> Any:
        loss, pull, statistics = jax.vjp(function, *primals, has_aux=True)
        return loss, pull(jnp.asarray(up.numpy())), statistics

    primals = tuple(map(to_jax, h.leaves if biased else h.leaves[:2]))
    made = step(*primals)
    assert equal(jax.jit(step)(*primals), made)
    loss, grads, statistics = made
    assert loss.dtype == F32
    same(loss, theirs, dtype)
    for name in names:
        assert getattr(statistics, name).dtype == F32
        same(getattr(statistics, name), known[name], dtype)
    leaves = h.leaves if biased else h.leaves[:2]
    for grad, e in zip(grads, torch.autograd.grad(theirs, leaves, up.double()), strict=True):
        assert grad.dtype == dtype
        same(grad, e, dtype)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_that_of_f64(kind: str, reduction: str) -> None:
    agree(heads(), **KINDS[kind], reduction=reduction)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_16_bits(kind: str, reduction: str, dtype: Any) -> None:
    h = heads(dtype=DTYPES[dtype])
    agree(h, dtype, **KINDS[kind], reduction=reduction, **h.options("linear_bias", "target"))


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize(("name", "kind"), zip(OPTIONS, itertools.cycle(KINDS)))
def test_every_option_is_that_of_f64(kind: str, name: str, reduction: str) -> None:
    h = heads()
    agree(h, **KINDS[kind], **OPTIONS[name](h), reduction=reduction)


@pytest.mark.parametrize("seed", range(24))
def test_any_call_is_that_of_f64(seed: int) -> None:
    """Sizes, kind, options and dtype are drawn at random."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    dtype = draw.choice(list(DTYPES))
    shape = draw.choice([(1,), (7,), (2, 3), (3, 1, 5), (70,)])
    h = heads(dtype=DTYPES[dtype], shape=shape, vocab=draw.choice([1, 2, 63, 64, 65, 200]))
    options: dict[str, Any] = dict(draw.choice(list(KINDS.values())))
    for name in sorted(draw.sample(list(OPTIONS), draw.randrange(4)), key="ignore_index".__eq__):
        options |= OPTIONS[name](h)  # "ignore_index" comes last: it has a target of its own
    if options["kind"] == "tv":  # the gradient of tv jumps where p = q
        dtype, h = F32, Heads(*[t.float().detach().requires_grad_(t.requires_grad)
                                if t.is_floating_point() else t for t in h])  # fmt: skip
        options = {n: t for n, t in options.items() if n not in ("linear_bias", "teacher_bias")}
    for name in ("linear_bias", "teacher_bias"):
        if name in options:
            options |= h.options(name)
    if draw.random() < 0.3:
        options["teacher_logits"] = torch.randn(*shape, h.weight.shape[0])
        options.pop("teacher_bias", None)
    options["reduction"] = draw.choice(["none", "sum", "mean"])
    if not bool((options.get("target", h.target) != options.get("ignore_index", -100)).any()):
        options["reduction"] = "sum"
    if options["reduction"] == "mean" and draw.random() < 0.5:
        options["normalizer"] = draw.choice([3, 2.5, torch.tensor(4.5), torch.tensor(7)])
    agree(h, dtype, **options)


@pytest.mark.parametrize("normalizer", [7, 7.5, torch.tensor(7), torch.tensor(0.5)], ids=str)
def test_a_normalizer(normalizer: Any) -> None:
    h = heads()
    agree(h, target=h.target, normalizer=normalizer)
    x, w, y, v = given(h)
    step = jax.value_and_grad(lambda x, n: linear_divergence(x, w, y, v, normalizer=n))
    loss, grad = step(x, 0)
    assert loss == 0 and not grad.any()
    assert jnp.isnan(linear_divergence(x, w, y, v, normalizer=0, empty_mean="nan"))
    traced = jax.jit(lambda n: linear_divergence(x, w, y, v, normalizer=n))
    same(traced(jnp.float32(3.5)), expected(h, normalizer=3.5)[0])


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_of_logits(kind: str, dtype: Any) -> None:
    """Teacher logits of any dtype, with their own scale, softcap and temperature."""
    h = heads()
    logits = (3 * torch.randn(*SHAPE, VOCAB)).to(DTYPES[dtype])
    for reduction in ("none", "mean"):
        agree(
            h, **KINDS[kind], teacher_logits=logits, teacher_logit_scale=0.5, teacher_softcap=3.0,
            teacher_temperature=1.3, reduction=reduction,
        )  # fmt: skip


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 0), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_any_number_of_leading_dimensions(shape: tuple[int, ...], reduction: str) -> None:
    h = heads(shape=shape)
    options: dict[str, Any] = {"reduction": reduction}
    if reduction == "mean":  # without tokens ours is 0, the reference's 0 / 0
        options["normalizer"] = max(1, h.target.numel())
    agree(h, **options)
    agree(h, **options, temperature=torch.rand(shape) + 0.5, token_weight=torch.rand(shape))


@pytest.mark.parametrize("shift", [True, 2])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_shift_moves_what_belongs_to_a_label(reduction: str, shift: Any) -> None:
    """Position i gets the target, weight and temperatures of i + k; the last k positions do not
    count, not even in the mean's divisor."""
    h, by = heads(), int(shift)
    weights, own, others = (torch.rand(SHAPE) + 0.5 for _ in range(3))

    def moved(values: torch.Tensor, rest: float) -> torch.Tensor:
        return torch.cat([values[:, by:], torch.full_like(values[:, :by], rest)], 1)

    unmoved = {
        "target": h.target, "token_weight": weights, "temperature": own,
        "teacher_temperature": others, "shift": shift,
    }  # fmt: skip
    agree(
        h, target=moved(h.target, -100), token_weight=moved(weights, 1.0), label_weight=0.5,
        temperature=moved(own, 1.0), teacher_temperature=moved(others, 1.0), reduction=reduction,
        moved=unmoved,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(10,), (2, 1), (1, 5), ()], ids=str)
def test_temperatures_flat_or_broadcastable(shape: tuple[int, ...]) -> None:
    h = heads()
    x, w, y, v = given(h)
    temperature = np.random.default_rng(0).random(shape, np.float32) + 0.5
    whole = temperature.reshape(SHAPE) if shape == (10,) else np.broadcast_to(temperature, SHAPE)
    divergence = jax.jit(
        lambda t: linear_divergence(
            x, w, y, v, temperature=2.0, teacher_temperature=t, reduction="none"
        )
    )
    assert equal(divergence(temperature), divergence(whole))
    assert equal(
        linear_divergence(x, w, y, v, temperature=temperature, reduction="none"),
        linear_divergence(
            x, w, y, v, temperature=whole, teacher_temperature=whole, reduction="none"
        ),
    )


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_heads_are_exactly_0(kind: str, reduction: str, jitted: bool) -> None:
    """Both heads share a weight, whose gradient, as the student's, is 0 too."""
    h = heads()
    x, w, b = map(to_jax, h.leaves)

    def loss(x: Any, w: Any, b: Any) -> Any:
        return linear_divergence(
            x, w, x, w, **KINDS[kind], linear_bias=b, teacher_bias=b, reduction=reduction,
            temperature=0.7,
        ).sum()  # fmt: skip

    step = jax.value_and_grad(loss, (0, 1, 2))
    for made in jax.tree.leaves((jax.jit(step) if jitted else step)(x, w, b)):
        assert not made.any()


def test_one_weight_for_both_heads_has_the_students_gradient() -> None:
    h = heads()
    x, w, _, _ = given(h)
    y = x + 0.1
    both = jax.grad(lambda w: linear_divergence(x, w, y, w))(w)
    assert both.any() and equal(both, jax.grad(lambda w, v: linear_divergence(x, w, y, v))(w, w))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_teacher_has_no_gradient(reduction: str) -> None:
    """The teacher's gradients are zeros, for which no product is ever made."""
    h = heads()
    x, w, y, v = given(h)
    b, logits = to_jax(h.teacher_bias), jnp.ones((*SHAPE, VOCAB))

    def loss(x: Any, y: Any, v: Any, b: Any) -> Any:
        return linear_divergence(x, w, y, v, teacher_bias=b, reduction=reduction).sum()

    of_input, *of_teacher = jax.grad(loss, (0, 1, 2, 3))(x, y, v, b)
    assert of_input.any() and not any(g.any() for g in of_teacher)
    assert [g.shape for g in of_teacher] == [y.shape, v.shape, b.shape]
    made = " ".join(fields(jax.grad(loss, (0, 1, 2, 3)), x, y, v, b)).split()
    assert {n for n in made if n.startswith("grad_")} - {"grad_loss"} == {"grad_input"}
    assert kinds(jax.value_and_grad(loss, (1, 2, 3)), x, y, v, b) == [FORWARD]

    def of_logits(x: Any, z: Any) -> Any:
        return linear_divergence(x, w, teacher_logits=z, reduction=reduction).sum()

    of_input, of_teacher = jax.grad(of_logits, (0, 1))(x, logits)
    assert of_input.any() and not of_teacher.any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("of", ["input", "weight", "bias"])
def test_a_frozen_side_pays_nothing(of: str, reduction: str) -> None:
    h = heads()
    function = call(h, reduction=reduction)
    primals = tuple(map(to_jax, h.leaves))
    index = ("input", "weight", "bias").index(of)
    step = jax.grad(lambda *primals: function(*primals).sum(), index)
    made = fields(step, *primals)[-1].split()
    assert [n for n in made if n.startswith("grad_") and n != "grad_loss"] == [f"grad_{of}"]


def test_the_calls_a_program_makes() -> None:
    h = heads()
    x, w, _, _ = given(h)

    def made(reduction: str, **options: Any) -> list[int]:
        function = call(h, reduction=reduction, **options)
        loss = lambda *v: jax.tree.leaves(function(*v))[0].sum()  # noqa: E731
        return kinds(jax.value_and_grad(loss, (0, 1)), x, w)

    assert made("mean") == made("sum") == [BOTH]
    assert made("none") == [FORWARD, BACKWARD]
    assert made("mean", return_statistics=STATISTICS[:3]) == [BOTH]
    assert made("none", return_statistics="entropy") == [FORWARD, BACKWARD]
    for reduction in ("mean", "none"):
        assert kinds(call(h, reduction=reduction), x, w) == [FORWARD]
        function = call(h, reduction=reduction, return_statistics=("entropy", "acceptance"))

        def total(x: Any, w: Any, function: Any = function) -> Any:
            statistics = function(x, w)[1]
            return (statistics.entropy + statistics.acceptance).sum()

        value, grads = jax.value_and_grad(total, (0, 1))(x, w)
        assert value != 0 and not any(g.any() for g in grads), "statistics have no gradient"
        step = jax.jit(jax.grad(lambda x, total=total: (x * total(x, w)).sum()))
        assert BACKWARD not in kinds(step, x)
    text = jax.jit(jax.grad(call(h), (0, 1))).lower(x, w).compile().as_text()
    assert " multiply(" not in text, "an upstream gradient of 1 costs nothing"


def keeps(function: Any, *arguments: Any) -> list[tuple[bool, bool]]:
    """For each call of a program: whether it has kept state, and whether it has a teacher."""
    return [
        ("kept kept_rows" in names, "teacher" in names) for names in fields(function, *arguments)
    ]


def pulled(h: Heads, *ups: Any, **options: Any) -> Callable[..., Any]:
    """The gradients of x and w for each upstream gradient, from one Forward."""
    function = call(h, **options, reduction="none")

    def step(x: Any, w: Any) -> Any:
        _, pull = jax.vjp(function, x, w)
        return [pull(up) for up in ups]

    return step


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_dz_is_kept_for_any_upstream_gradient(kind: str, jitted: bool, dtype: Any) -> None:
    """A second backward uses kept dz again. Tokens with an upstream gradient of 0 add nothing.
    Backward from kept dz needs no teacher."""
    h = heads(dtype=DTYPES[dtype], shape=(4, 80), vocab=200)
    options = {**KINDS[kind], "target": h.target, "label_weight": 0.4}
    first = upstream(h.target.shape)
    first[0, 2:] = 0
    ups = [first, -3 * first]
    step = pulled(h, *(jnp.asarray(up.numpy()) for up in ups), **options)
    x, w, _, _ = given(h)
    theirs, _ = expected(h, **options, reduction="none")
    for grads, up in zip((jax.jit(step) if jitted else step)(x, w), ups):
        for grad, e in zip(grads, torch.autograd.grad(theirs, h.leaves[:2], up.double(), True)):
            same(grad, e, dtype)
        assert not np.asarray(grads[0], np.float32)[0, 2:].any()
    assert keeps(pulled(h, jnp.asarray(first.numpy()), **options), x, w) == [
        (True, True), (True, False),
    ]  # fmt: skip


def test_what_is_kept_is_what_backward_takes() -> None:
    """Zeroed kept state gives gradients of 0. Backward does not change it, so it is not copied."""
    h = heads(shape=(320,), vocab=200)
    x, w, _, _ = given(h)
    up = jnp.asarray(upstream((320,)).numpy())
    _, pull = jax.vjp(call(h, reduction="none"), x, w)
    leaves, tree = jax.tree.flatten(pull)
    emptied = [0 * leaf if leaf.shape[-1:] == (64,) else leaf for leaf in leaves]
    assert [leaf.shape for leaf in leaves if leaf.shape[-1:] == (64,)] == [(320, 4, 64)]
    for mine, other in zip(pull(up), jax.tree.unflatten(tree, emptied)(up)):
        assert mine.any() and not other.any()
    assert equal(pull(up), pull(up))
    step = jax.jit(pulled(h, up, 2 * up))
    text = step.lower(x, w).compile().as_text()
    assert text.count('custom_call_target="logitless_xla_run"') == 3
    lines = [line for line in text.splitlines() if f"[{320 * 4},64]" in line]
    assert lines and not any(" copy(" in line for line in lines)
    bytes = _abi.whole_kept(320, 200, _abi.F32)
    workspaces = [int(size) for size in re.findall(r"u8\[(\d+)\]", text)]
    used = memory(step, x, w).temp_size_in_bytes
    assert used < bytes + sum(workspaces) + (1 << 17)


def test_where_nothing_is_kept() -> None:
    """With `memory`, Backward computes both heads' logits again; without gradients none runs."""
    h = heads(shape=(80,))
    x, w, _, _ = given(h)
    up = jnp.asarray(upstream((80,)).numpy())
    bounded = pulled(h, up, memory="64MiB")
    assert keeps(bounded, x, w) == [(False, True)], "nobody asks for the loss"
    theirs, _ = expected(h, reduction="none")
    wanted = torch.autograd.grad(theirs, h.leaves[:2], upstream((80,)).double())
    for grad, e in zip(jax.jit(bounded)(x, w)[0], wanted):
        same(grad, e)
    assert keeps(call(h, reduction="none"), x, w) == [(False, True)], "nothing is differentiated"


def test_memory_bounds_the_workspace(platform: str) -> None:  # noqa: F811
    h = heads(shape=(256,), vocab=3000)
    x, w, _, _ = given(h)
    for reduction in ("mean", "none"):
        with pytest.raises(ValueError, match=r"^memory is 1 bytes; allowed: >= \d+") as caught:
            jax.jit(call(h, reduction=reduction, memory=1))(x, w)
        least = int(str(caught.value).split(">= ")[1].split()[0].strip(";"))
        with pytest.raises(ValueError, match=r"^memory is"):
            jax.jit(call(h, reduction=reduction, memory=least - 1))(x, w)
        same(
            jax.jit(call(h, reduction=reduction, memory=least))(x, w),
            expected(h, reduction=reduction)[0],
        )
    sizes = {}
    small, large = (1, 3) if platform == "cpu" else (6, 8)  # MiB of memory=
    for limit in (None, f"{large}MiB", f"{small}MiB"):
        step = jax.value_and_grad(call(h, memory=limit), (0, 1))
        sizes[limit] = memory(step, x, w).temp_size_in_bytes
    for limit in (small, large):
        assert sizes[f"{limit}MiB"] <= (limit << 20) + 4096
    assert sizes[f"{small}MiB"] < sizes[None]


def test_f16_gradients_are_rounded_after_the_upstream_factor() -> None:
    """With a loss scaler's factor, gradients are right that would be 0 in f16 without it."""
    h = heads(dtype=torch.float16)
    with torch.no_grad():
        h.weight.mul_(1e-4)
    options = {"teacher_logit_scale": 1e-3}
    x, w, _, _ = given(h)
    for reduction in ("mean", "none"):
        function = call(h, reduction=reduction, **options)
        grad = jax.grad(lambda x, f=function: f(x, w).sum() * 2.0**16)(x)
        theirs, _ = expected(h, reduction=reduction, **options)
        (e,) = torch.autograd.grad(theirs.sum() * 2.0**16, h.input)
        assert grad.dtype == F16
        same(grad, e, F16)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_bits_as_numpy(name: str, reduction: Any, platform: str) -> None:  # noqa: F811
    if platform != "cpu":
        return
    h = heads()
    options = {**OPTIONS[name](h), "kind": "jsd", "beta": 0.3, "reduction": reduction}
    if "target" in options:
        options["shift"] = True
    names = STATISTICS if "target" in options else STATISTICS[:3]
    held = {n: v.detach().numpy() if isinstance(v, Tensors) else v for n, v in options.items()}
    arrays = [t.detach().numpy() for t in h[:4]]
    theirs = ln.linear_divergence(*arrays, **held, return_statistics=names)
    function = jax.jit(call(h, **options, return_statistics=names))
    primals = tuple(map(to_jax, h.leaves if "linear_bias" in options else h.leaves[:2]))
    assert equal(function(*primals), theirs)
    if reduction == "none":
        return
    _, theirs = ln.linear_divergence(*arrays, **held, return_gradients=True)
    loss = call(h, **options)
    grads = jax.jit(jax.grad(loss, tuple(range(len(primals)))))(*primals)
    assert equal(grads, [g for g in theirs if g is not None])


# --- transforms ---


BATCH = (4, 5)


def of_batch(h: Heads) -> dict[str, Any]:
    """The target, token weights and temperatures of each sequence."""
    rng = np.random.default_rng(1)
    drawn = lambda: jnp.asarray(rng.random(BATCH, np.float32) + 0.5)  # noqa: E731
    return {
        "target": to_jax(h.target), "token_weight": drawn(), "temperature": drawn(),
        "teacher_temperature": drawn(),
    }  # fmt: skip


def each_of(x: Any, w: Any, y: Any, v: Any, own: dict[str, Any], **options: Any) -> Any:
    """The function's results of the sequences, one call after another."""
    return [
        linear_divergence(x[i], w, y[i], v, **{n: o[i] for n, o in own.items()}, **options)
        for i in range(len(x))
    ]


def near(ours: Any, theirs: Any) -> None:
    for a, e in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape
        np.testing.assert_allclose(a, e, atol=1e-5 * max(1e-6, np.abs(e).max(initial=0)))


@pytest.mark.parametrize("owned", [False, True], ids=["plain", "of tokens"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_vmap_inside_grad_is_one_call_of_all_tokens(reduction: str, owned: bool) -> None:
    h = heads(shape=BATCH)
    x, w, y, v = given(h)
    own = of_batch(h) if owned else {}
    options: dict[str, Any] = {"reduction": reduction, "kind": "jsd"}
    options |= {"label_weight": 0.3} if owned else {}
    factors = jnp.arange(1, 5, dtype=F32)

    def mapped(x: Any, w: Any) -> Any:
        made = jax.vmap(lambda x, y, own: linear_divergence(x, w, y, v, **own, **options))(
            x, y, own
        )
        return (factors * made.reshape(4, -1).sum(1)).sum()

    def alone(x: Any, w: Any) -> Any:
        made = each_of(x, w, y, v, own, **options)
        return sum(f * m.sum() for f, m in zip(factors, made))

    step = jax.value_and_grad(mapped, (0, 1))
    near(jax.jit(step)(x, w), jax.value_and_grad(alone, (0, 1))(x, w))
    assert kinds(step, x, w) == [FORWARD, BACKWARD]
    # All elements of the vmap share the teacher's logits.
    z = jnp.asarray(upstream((5, VOCAB)).numpy())
    ours = jax.vmap(lambda x: linear_divergence(x, w, teacher_logits=z, **options_of(reduction)))(x)
    theirs = [linear_divergence(a, w, teacher_logits=z, **options_of(reduction)) for a in x]
    near(ours, jnp.stack(theirs))


def options_of(reduction: str) -> dict[str, Any]:
    return {"reduction": reduction, "kind": "reverse_kl"}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("targets", [False, True])
def test_vmap_over_no_element(targets: bool, reduction: str) -> None:
    x, w, y, v = given(heads(shape=BATCH))
    x, y, t = x[:0], y[:0], jnp.zeros((0, BATCH[1]), jnp.int32)

    def mapped(x: Any, w: Any) -> Any:
        def loss(x: Any, y: Any, t: Any) -> Any:
            target = t if targets else None
            return linear_divergence(
                x, w, y, v, target=target, reduction=reduction, return_statistics=("entropy",)
            )

        return jax.vmap(loss)(x, y, t)

    loss, statistics = mapped(x, w)
    assert loss.shape == (0,) + (BATCH[1:] if reduction == "none" else ())
    assert statistics.entropy.shape == t.shape
    grads = jax.jit(jax.grad(lambda x, w: mapped(x, w)[0].sum(), (0, 1)))(x, w)
    assert grads[0].shape == x.shape and not grads[1].any()


def test_vmap_of_means_counts_each_alone() -> None:
    h = heads(shape=BATCH)
    x, w, y, v = given(h)
    t = to_jax(h.target).at[2].set(-100)
    some = jnp.float32([3.0, 0.0, 2.5, 7.0])

    def mean(x: Any, y: Any, t: Any, **options: Any) -> Any:
        return linear_divergence(x, w, y, v, target=t, **options)

    sums = jnp.stack(each_of(x, w, y, v, {"target": t}, reduction="sum"))
    made = jax.vmap(mean)(x, y, t)
    assert made[2] == 0
    near(made, sums / jnp.maximum(1, (t != -100).sum(1)))
    nan = jax.vmap(lambda *a: mean(*a, empty_mean="nan"))(x, y, t)
    assert jnp.isnan(nan[2]) and not jnp.isnan(nan[:2]).any()
    near(jax.vmap(lambda *a: mean(*a, normalizer=5))(x, y, t), sums / 5)
    given_some = jax.vmap(lambda x, y, t, n: mean(x, y, t, normalizer=n))(x, y, t, some)
    near(given_some, jnp.where(some == 0, 0, sums / some))
    near(
        jax.vmap(lambda x, y: linear_divergence(x, w, y, v))(x, y),
        jnp.stack(each_of(x, w, y, v, {})),
    )
    with pytest.raises(ValueError, match="normalizer is given with reduction"):
        jax.vmap(lambda x, y, t: mean(x, y, t, normalizer=5, reduction="sum"))(x, y, t)


def test_vmap_around_grad_and_over_weights() -> None:
    h = heads(shape=BATCH)
    x, w, y, v = given(h)
    of_each = jax.vmap(
        jax.value_and_grad(lambda x, w, y: linear_divergence(x, w, y, v), (0, 1)), (0, None, 0)
    )
    alone = [
        jax.value_and_grad(lambda x, w, y=y[i]: linear_divergence(x, w, y, v), (0, 1))(x[i], w)
        for i in range(4)
    ]
    near(jax.jit(of_each)(x, w, y), jax.tree.map(lambda *a: jnp.stack(a), *alone))
    for over in (0, 1):  # vmap over the student's or the teacher's weights
        stacks = [jnp.stack([a, 2 * a]) if i == over else a for i, a in enumerate((w, v))]
        axes = tuple(0 if i == over else None for i in range(2))
        ours = jax.vmap(lambda w, v: linear_divergence(x, w, y, v), axes)(*stacks)
        heads_of = [(a, v) if over == 0 else (w, a) for a in stacks[over]]
        near(ours, jnp.stack([linear_divergence(x, a, y, b) for a, b in heads_of]))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_scan_and_checkpoint(reduction: str) -> None:
    h = heads(shape=BATCH)
    x, w, y, v = given(h)
    own = of_batch(h)
    names = ("acceptance", "logprob")

    def one(x: Any, w: Any, y: Any, own: Any) -> Any:
        loss, statistics = linear_divergence(
            x, w, y, v, **own, reduction=reduction, return_statistics=names
        )
        return loss.sum(), statistics

    def looped(x: Any, w: Any, body: Any = one) -> Any:
        def step(total: Any, given: Any) -> Any:
            loss, statistics = body(given[0], w, *given[1:])
            return total + loss, statistics

        return jax.lax.scan(step, jnp.float32(0), (x, y, own))

    def alone(x: Any, w: Any) -> Any:
        made = each_of(x, w, y, v, own, reduction=reduction, return_statistics=names)
        return sum(loss.sum() for loss, _ in made), jax.tree.map(
            lambda *a: jnp.stack(a), *(statistics for _, statistics in made)
        )

    expect = jax.value_and_grad(alone, (0, 1), has_aux=True)(x, w)
    checkpointed = lambda x, w: looped(x, w, jax.checkpoint(one))  # noqa: E731
    for function in (looped, checkpointed, jax.checkpoint(looped)):
        step = jax.value_and_grad(function, (0, 1), has_aux=True)
        near(jax.jit(step)(x, w), expect)
        near(step(x, w), expect)


def test_one_program_for_one_shape() -> None:
    compiled = []

    def listen(event: str, *_: Any, **__: Any) -> None:
        compiled.append(event)

    h = heads()
    arrays = given(h)
    eager = jax.value_and_grad(linear_divergence, (0, 1))
    steps = (linear_divergence, eager, jax.jit(eager))
    variants = [[a * k for a in arrays] for k in range(1, 4)]
    for step in steps:
        step(*variants[0])
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for arguments in variants:
            for step in steps:
                jax.block_until_ready(step(*arguments))
        assert not [event for event in compiled if "compile" in event]
    finally:
        jax.monitoring.clear_event_listeners()
    linear_divergence(*arrays, kind="tv", beta=None)  # type: ignore[call-overload]
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        linear_divergence(*arrays, kind="tv", beta=0.7)  # tv ignores beta
        assert not [event for event in compiled if "compile" in event]
        linear_divergence(*arrays, kind="jsd", beta=0.7)
        assert [event for event in compiled if "compile" in event]
    finally:
        jax.monitoring.clear_event_listeners()


def test_f32_products_follow_jaxs_precision() -> None:
    h = heads()
    x, w, _, _ = given(h)

    def flag() -> str:
        return jax.jit(call(h)).lower(x, w).as_text().split("allow_tf32 = ")[1][0]

    assert flag() == "0"
    with jax.default_matmul_precision("tensorfloat32"):
        assert flag() == "1"


def test_a_program_is_exported() -> None:
    h = heads()
    x, w, _, _ = given(h)
    up = jnp.asarray(upstream(SHAPE).numpy())
    disabled = [jax.export.DisabledSafetyCheck.custom_call("logitless_xla_run")]
    step = jax.jit(pulled(h, up, kind="jsd", beta=0.2, teacher_temperature=2.0))
    exported = jax.export.export(step, platforms=["cpu"], disabled_checks=disabled)(x, w)
    assert "kept kept_rows" in exported.mlir_module()
    if jax.default_backend() == "cpu":
        assert equal(exported.call(x, w), step(x, w))


# --- edges ---


def test_ignored_rows_are_not_read() -> None:
    h = heads()
    x, w, y, v = given(h)
    t = to_jax(h.target)

    def step(x: Any, y: Any) -> Any:
        loss, pull, statistics = jax.vjp(
            lambda x, w: linear_divergence(
                x, w, y, v, target=t, reduction="none", return_statistics=STATISTICS
            ),
            x, w, has_aux=True,
        )  # fmt: skip
        return loss, statistics, pull(jnp.ones_like(loss))

    clean = step(x, y)
    ignored = (t == -100)[..., None]
    dirty = step(jnp.where(ignored, jnp.nan, x), jnp.where(ignored, jnp.nan, y))
    assert equal(clean, dirty)
    assert not np.asarray(dirty[0])[np.asarray(t) == -100].any()


@pytest.mark.parametrize("empty_mean", ["zero", "nan"])
def test_a_mean_over_no_token(empty_mean: Any) -> None:
    h = heads()
    x, w, y, v = given(h)
    t = jnp.full(SHAPE, -100, jnp.int32)
    loss, grads = jax.value_and_grad(
        lambda x, w: linear_divergence(x, w, y, v, target=t, empty_mean=empty_mean), (0, 1)
    )(x, w)
    assert jnp.isnan(loss) if empty_mean == "nan" else loss == 0
    assert not any(g.any() for g in grads)


def test_the_label_term_is_the_cross_entropy() -> None:
    h = heads()
    x, w, y, v = given(h)
    t = to_jax(h.target)
    both = linear_divergence(x, w, y, v, target=t, label_weight=2.0, reduction="none")
    alone = linear_divergence(x, w, y, v, target=t, reduction="none")
    near(both - alone, 2 * linear_cross_entropy(x, w, t, reduction="none"))


def test_an_unused_loss_adds_nothing() -> None:
    """An unused loss adds no gradient, even if its mean divides by 0."""
    h = heads()
    x, w, y, v = given(h)

    def total(x: Any, **options: Any) -> Any:
        made = linear_divergence(x, w, y, v, return_statistics="entropy", **options)
        return (x**2).sum() + made[1].entropy.sum()

    for options in ({"normalizer": 0, "empty_mean": "nan"}, {"reduction": "none"}):
        near(jax.grad(lambda x, o=options: total(x, **o))(x), 2 * x)


@pytest.mark.parametrize("index", [1 << 40, -(1 << 40)])
def test_an_ignore_index_beyond_int32(index: int) -> None:
    """The index is compared with a NumPy target in 64 bits; without a target it is not read."""
    h = heads()
    x, w, y, v = given(h)
    t = np.where(h.target.numpy() == -100, index, h.target.numpy())
    ours = linear_divergence(x, w, y, v, target=t, ignore_index=index)
    assert ours == linear_divergence(x, w, y, v, target=to_jax(h.target))
    assert linear_divergence(x, w, y, v, ignore_index=index) == linear_divergence(x, w, y, v)


# --- what is refused ---

# Cases or messages of torch alone; JAX's own cases are below.
OF_TORCH = {
    "group", "layout", "its gradient", "no tensor", "another dtype", "the weight's", "f64",
    "logits of i64", "beta, a tensor", "a bias's rank", "D", "a vector", "its type",
}  # fmt: skip


def own_errors() -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    ones = np.ones((37, 6), np.float32)
    value, kind = ValueError, TypeError
    return {
        "beta, an array": ({"kind": "jsd", "beta": ones}, kind, "^beta is a ndarray; allowed"),
        "no array": ({"teacher_weight": [1.0]}, kind, "^teacher_weight is a list; allowed: an arr"),
        "another dtype": (
            {"teacher_weight": jnp.ones((37, 6), F16)}, kind,
            r"^teacher_weight is float16; allowed: float32, .*use teacher_weight\.astype\(input",
        ),
        "integers": (
            {"teacher_input": None, "teacher_weight": None,
             "teacher_logits": np.ones((*SHAPE, 37), np.int32)},
            kind, "^teacher_logits is int32; allowed: float32",
        ),
        "a bias's rank": ({"teacher_bias": ones}, value, "^teacher_bias has "),
        "a vector": ({"linear_weight": ones[0]}, value, "^linear_weight has "),
        "a teacher's vector": ({"teacher_weight": ones[0]}, value, "^teacher_weight has "),
        "a scalar": ({"input": np.zeros((), np.float32)}, value, r"^input has shape \(\); allowed"),
        "its type": (
            {"teacher_temperature": "hot"}, kind,
            "^teacher_temperature is a str; allowed: a Python number",
        ),
        "ignore_index": ({"ignore_index": 1 << 70}, value, "^ignore_index is "),
        "ignore_index, a float": ({"ignore_index": 1.5}, kind, "^ignore_index is a float"),
        "shift, a float": ({"shift": 1.0}, kind, "^shift is a float"),
        "a moved target": (
            {"target": np.zeros(SHAPE, np.int32), "shift": 5}, value, "^shift is 5 of targets"
        ),
        "temperatures below f32": (
            {"teacher_temperature": np.full(SHAPE, 1e-46)}, value,
            r"^teacher_temperature\[0, 0\] is 1e-46",
        ),
        "logit_scale, traced": (
            {"teacher_logit_scale": jnp.float32(1)}, kind,
            "^teacher_logit_scale is a .*; allowed: a Python number",
        ),
    }  # fmt: skip


def refused() -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    of_all = {name: case for name, case in wrong(heads()).items() if name not in OF_TORCH}
    return of_all | own_errors()


@pytest.mark.parametrize("name", refused())
@pytest.mark.parametrize("how", ["eager", "jit", "grad"])
def test_errors_name_the_argument(name: str, how: str, platform: str) -> None:  # noqa: F811
    """The messages are those of the other bindings."""
    changed, kind, message = refused()[name]
    if platform == "cuda" and name.endswith("target outside"):
        pytest.skip("test_a_target_out_of_range_of_a_running_program: nobody waits for the device")
    x, w, y, v = given(heads())
    arguments = {
        "input": x, "linear_weight": w, "teacher_input": y, "teacher_weight": v,
        **jax_options(changed),
    }  # fmt: skip

    def loss(factor: Any) -> Any:
        made = linear_divergence(**arguments)
        return factor * jax.tree.leaves(made)[0].sum()

    step = {"eager": loss, "jit": jax.jit(loss), "grad": jax.grad(loss)}[how]
    with pytest.raises(kind, match=message.removesuffix("$")) as caught:  # JAX appends text
        step(jnp.float32(1))
    assert isinstance(caught.value, LogitlessError)


def test_differentiated_constants_and_second_derivatives() -> None:
    h = heads()
    x, w, y, v = given(h)
    for name, shape in (
        ("token_weight", SHAPE), ("normalizer", ()), ("temperature", ()),
        ("teacher_temperature", SHAPE),
    ):  # fmt: skip

        def step(value: Any, name: str = name) -> Any:
            return linear_divergence(x, w, y, v, **{name: value})

        with pytest.raises(ValueError, match=f"{name} is differentiated.*stop_gradient"):
            jax.grad(step)(jnp.ones(shape))
    for reduction in ("mean", "none"):
        loss = lambda x, r=reduction: linear_divergence(x, w, y, v, reduction=r).sum()  # noqa: E731
        for second in (
            lambda f=loss: jax.grad(lambda x: jax.grad(f)(x).sum())(x),
            lambda f=loss: jax.hessian(f)(x),
        ):
            with pytest.raises(Exception, match=r"differentiated once only|custom_vjp"):
                second()
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(loss, (x,), (x,))


def test_a_target_out_of_range_of_a_running_program(platform: str) -> None:  # noqa: F811
    h = heads()
    x, w, y, v = given(h)
    t = jnp.zeros(SHAPE, jnp.int32).at[1, 2].set(VOCAB)
    step = jax.jit(lambda t: linear_divergence(x, w, y, v, target=t, reduction="none"))
    if platform == "cuda":
        assert np.argwhere(np.isnan(step(t))).tolist() == [[1, 2]]
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"target\[7\] is {VOCAB}; allowed"):
        jax.block_until_ready(step(t))


def test_results_are_tuples_with_names() -> None:
    x, w, y, v = given(heads())
    loss, statistics = linear_divergence(x, w, y, v, return_statistics=("acceptance", "entropy"))
    assert isinstance(statistics, logitless.jax._divergence._divergence.DivergenceStatistics)
    assert statistics._fields == STATISTICS and "DivergenceStatistics" in logitless.jax.__all__
    assert statistics.teacher_entropy is None and statistics.logprob is None
    assert loss.shape == () and statistics.acceptance.shape == SHAPE
    assert isinstance(linear_divergence(x, w, y, v, return_statistics=()), jax.Array)
    assert "`acceptance`: sum min(p, q)" in (DivergenceStatistics.__doc__ or "")


def test_arguments_are_those_of_torch() -> None:
    """Instead of a group, JAX has mesh axes."""
    import logitless.torch

    ours, theirs = (
        {n: p.default for n, p in inspect.signature(f).parameters.items()}
        for f in (linear_divergence, logitless.torch.linear_divergence)
    )
    del theirs["group"], ours["axis_name"], ours["upstream"]
    assert ours == theirs and list(ours) == list(theirs)


class Variable:
    """An object around an array, like flax's nnx.Param."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __jax_array__(self) -> Any:
        return self.value


def test_a_variable_stands_for_its_array() -> None:
    x, w, y, v = given(heads())
    boxed = linear_divergence(Variable(x), Variable(w), Variable(y), Variable(v))
    assert boxed == linear_divergence(x, w, y, v)
    on_host = [np.asarray(a) for a in (x, w, y, v)]
    assert linear_divergence(*on_host) == boxed

# SPDX-License-Identifier: Apache-2.0
"""logitless.jax under vmap, scan, checkpoint and shard_map; donation, memory, compilations."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import numpy as np

from jax_support import (  # noqa: F401
    gpus,
    kinds,
    memory,
    platform,
    problem,
)
from logitless.jax import cross_entropy, linear_cross_entropy, softmax

F32 = jnp.float32


def plain(
    x: Any, w: Any, t: Any, *, mean: bool = True, c: Any = None, smoothing: float = 0.0
) -> Any:
    """The loss in jnp."""
    z = jnp.matmul(x, w.T, precision="highest")
    valid = t != -100
    weights = jnp.ones(w.shape[0]) if c is None else c
    logp = jax.nn.log_softmax(z)
    chosen = jnp.take_along_axis(logp, jnp.where(valid, t, 0)[..., None], -1)[..., 0]
    ct = weights[jnp.where(valid, t, 0)] * valid
    loss = -(1 - smoothing) * ct * chosen
    loss = loss - smoothing / w.shape[0] * (logp * weights).sum(-1) * valid
    return loss.sum() / ct.sum() if mean else loss


def near(ours: Any, theirs: Any) -> None:
    for a, e in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape
        np.testing.assert_allclose(a, e, atol=1e-5 * max(1e-6, np.abs(e).max()))


def batch(size: int = 4) -> tuple[Any, Any, Any]:
    x, w, _, t = problem((size, 9), 21, 8)
    return x, w, t


@pytest.mark.slow
def test_vmap_inside_grad_makes_one_gradient_of_the_weight() -> None:
    x, w, t = batch()
    c = jnp.arange(1, 22, dtype=F32)
    factors = jnp.arange(1, 5, dtype=F32)

    def total(loss: Any) -> Any:
        def step(x: Any, w: Any) -> Any:
            return (factors * jax.vmap(loss, (0, None, 0))(x, w, t)).sum()

        return step

    for options in ({}, {"c": c, "smoothing": 0.1}):
        ours = {"weight": options.get("c"), "label_smoothing": options.get("smoothing", 0.0)}
        step = total(lambda *v, o=ours: linear_cross_entropy(*v, **o))
        near(
            jax.jit(jax.value_and_grad(step, (0, 1)))(x, w),
            jax.value_and_grad(total(lambda *v, o=options: plain(*v, **o)), (0, 1))(x, w),
        )
        assert kinds(jax.grad(step, (0, 1)), x, w) == [4, 5], "one call of all tokens"
    near(
        jax.vmap(lambda x, t: linear_cross_entropy(x, w, t, reduction="none"))(x, t),
        jax.vmap(lambda x, t: plain(x, w, t, mean=False))(x, t),
    )
    near(
        jax.vmap(lambda x, t: linear_cross_entropy(x, w, t, reduction="sum"), (1, 1))(x, t),
        jax.vmap(lambda x, t: plain(x, w, t, mean=False).sum(), (1, 1))(x, t),
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("of_logits", [False, True])
def test_vmap_over_no_element(of_logits: bool, reduction: Any) -> None:
    _, w, t = batch()
    none, nothing = t[:0], () if reduction != "none" else t.shape[1:]
    x = jnp.zeros((*none.shape, 21 if of_logits else 8), F32)

    def loss(x: Any, w: Any, t: Any) -> Any:
        if of_logits:
            return cross_entropy(x, t, reduction=reduction)
        return linear_cross_entropy(x, w, t, reduction=reduction)

    mapped = jax.vmap(loss, (0, None, 0))
    assert mapped(x, w, none).shape == (0, *nothing)
    grads = jax.jit(jax.grad(lambda x, w: mapped(x, w, none).sum(), (0, 1)))(x, w)
    assert grads[0].shape == x.shape and not grads[1].any()
    assert jax.vmap(loss, (None, 0, None))(x, w[None][:0], none).shape[0] == 0


@pytest.mark.slow
def test_vmap_of_means_counts_each_alone() -> None:
    x, w, t = batch()
    t = t.at[2].set(-100)
    some = jnp.float32([3.0, 0.0, 2.5, 7.0])
    sums = jax.vmap(lambda x, t: plain(x, w, t, mean=False).sum())(x, t)
    mean = jax.vmap(lambda x, t: linear_cross_entropy(x, w, t))(x, t)
    assert mean[2] == 0
    near(mean, sums / jnp.maximum(1, (t != -100).sum(1)))
    nan = jax.vmap(lambda x, t: linear_cross_entropy(x, w, t, empty_mean="nan"))(x, t)
    assert jnp.isnan(nan[2]) and not jnp.isnan(nan[:2]).any()
    near(jax.vmap(lambda x, t: linear_cross_entropy(x, w, t, normalizer=5))(x, t), sums / 5)
    given = jax.vmap(lambda x, t, n: linear_cross_entropy(x, w, t, normalizer=n))(x, t, some)
    near(given, jnp.where(some == 0, 0, sums / some))
    grad = jax.grad(
        lambda w: jax.vmap(lambda x, t, n: linear_cross_entropy(x, w, t, normalizer=n))(
            x, t, some
        ).sum()
    )
    assert not jnp.isnan(grad(w)).any(), "an empty mean gives no NaN to its neighbours"


@pytest.mark.parametrize("empty", ["zero", "nan"])
def test_vmap_of_a_mean_that_divides_by_0_has_the_gradients_of_each_call(empty: str) -> None:
    x, w, _ = batch(3)
    # Only class 0 has a weight. The first element has tokens of it, the second none, the third has
    # no token that counts.
    t = jnp.stack([jnp.arange(9), jnp.arange(9) + 1, jnp.full(9, -100)]).at[:, 4].set(-100)
    c = jnp.zeros(21).at[0].set(2.0)

    def loss(x: Any, t: Any) -> Any:
        return linear_cross_entropy(x, w, t, weight=c, empty_mean=empty)

    value, grad = jax.value_and_grad(lambda x: jax.vmap(loss)(x, t).sum())(x)
    alone = [jax.value_and_grad(loss)(x[i], t[i]) for i in range(3)]
    near(value, sum(v for v, _ in alone))
    for i, (_, expected) in enumerate(alone):
        assert jnp.array_equal(jnp.isnan(grad[i]), jnp.isnan(expected))
        near(jnp.nan_to_num(grad[i]), jnp.nan_to_num(expected))
    rows = jnp.isnan(grad).all(-1)  # [3, 9]
    assert jnp.array_equal(rows, (jnp.arange(3) == 1)[:, None] & (t != -100) & (empty == "nan"))


@pytest.mark.parametrize("normalizer", [1e-46, 1e-40, 3e38, 1e39])
def test_vmap_of_means_divides_by_any_host_number(normalizer: float) -> None:
    x, w, t = batch()

    def loss(x: Any, t: Any) -> Any:
        return linear_cross_entropy(x, w, t, normalizer=normalizer)

    means = jax.vmap(loss)(x, t)
    for i in range(4):
        np.testing.assert_allclose(means[i], loss(x[i], t[i]), rtol=1e-6)


@pytest.mark.parametrize("normalizer", [5, np.full((), 5.0)], ids=["number", "array"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_vmap_refuses_what_each_call_refuses(reduction: str, normalizer: Any) -> None:
    x, w, t = batch()
    options: dict[str, Any] = {"reduction": reduction, "normalizer": normalizer}
    with pytest.raises(ValueError, match="normalizer is given with reduction"):
        jax.vmap(lambda x, t: linear_cross_entropy(x, w, t, **options))(x, t)


@pytest.mark.slow
def test_vmap_around_grad_and_over_weights() -> None:
    x, w, t = batch()
    of_each = lambda loss: jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (0, None, 0)))  # noqa: E731
    near(of_each(linear_cross_entropy)(x, w, t), of_each(plain)(x, w, t))
    ws = jnp.stack([w, 2 * w])
    over = lambda loss: jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0, None)))  # noqa: E731
    near(over(linear_cross_entropy)(x, ws, t), over(plain)(x, ws, t))
    twice = jax.vmap(jax.vmap(linear_cross_entropy, (0, None, 0)), (None, 0, None))
    near(twice(x, ws, t), jax.vmap(jax.vmap(plain, (0, None, 0)), (None, 0, None))(x, ws, t))
    x1, t1 = x[0], t[0]  # the rest tests statistics and constants
    tokens = jnp.arange(18, dtype=F32).reshape(2, 9)

    def weighted(a: Any) -> Any:
        return linear_cross_entropy(x1, w, t1, token_weight=a, return_statistics=("lse", "argmax"))

    for i in range(2):
        for all_at_once, alone in zip(
            jax.tree.leaves(jax.vmap(weighted)(tokens)), jax.tree.leaves(weighted(tokens[i]))
        ):
            near(all_at_once[i], alone)


def test_scan_and_checkpoint() -> None:
    x, w, t = batch()

    def scanned(loss: Any) -> Any:
        def step(w: Any) -> Any:
            body = jax.checkpoint(lambda total, v: (total + loss(v[0], w, v[1]), None))
            return jax.lax.scan(body, 0.0, (x, t))[0]

        return jax.jit(jax.value_and_grad(step))

    near(scanned(linear_cross_entropy)(w), scanned(plain)(w))


CALLS = {
    "logitless_loss": linear_cross_entropy,
    "logitless_linear": jax.grad(linear_cross_entropy),
    "logitless": lambda x, w, t: softmax(x),
}


@pytest.mark.parametrize("name", CALLS)
def test_without_jit(name: str) -> None:
    x, w, t = batch()
    expected = CALLS[name](x, w, t)
    with jax.disable_jit():
        near(CALLS[name](x, w, t), expected)
        near(jax.jit(CALLS[name])(x, w, t), expected)


@pytest.mark.parametrize("name", CALLS)
def test_jaxs_check_names_what_makes_a_nan(name: str) -> None:
    x, w, t = batch()
    x = x.at[0, 0].set(jnp.inf)
    message = rf"^invalid value \(nan\) encountered in {name}(\n|$)"
    with jax.debug_nans(True):
        for call in (CALLS[name], jax.jit(CALLS[name])):
            with pytest.raises(FloatingPointError, match=message):
                call(x, w, t)


@pytest.mark.slow
def test_shard_map_over_tokens(platform: str) -> None:  # noqa: F811
    devices = gpus() if platform == "cuda" else jax.devices("cpu")
    if not hasattr(jax, "shard_map") or len(devices) < 2:
        return
    x, w, t = batch()
    mesh = jax.sharding.Mesh(np.array(devices[:2]), ("d",))
    p = jax.sharding.PartitionSpec

    def loss(check_vma: bool) -> Any:
        def local(x: Any, w: Any, t: Any) -> Any:
            valid = jax.lax.psum((t != -100).sum(), "d")
            part = linear_cross_entropy(x, w, t, reduction="sum")
            return jax.lax.psum(part, "d") / valid

        return jax.shard_map(
            local, mesh=mesh, in_specs=(p("d"), p(), p("d")), out_specs=p(), check_vma=check_vma
        )  # fmt: skip

    near(
        jax.jit(jax.value_and_grad(loss(False), (0, 1)))(x, w, t),
        jax.value_and_grad(plain, (0, 1))(x, w, t),
    )
    for checked in (loss(True), jax.grad(loss(True)), jax.grad(loss(True), 1)):
        with pytest.raises(NotImplementedError, match="check_vma=False"):
            jax.jit(checked)(x, w, t)


@pytest.mark.slow
def test_the_gradient_takes_the_memory_of_donated_logits() -> None:
    z = jax.random.normal(jax.random.key(0), (2, 300, 1000))
    t = jax.random.randint(jax.random.key(1), (2, 300), 0, 1000)
    step = jax.value_and_grad(lambda z: cross_entropy(z, t))
    expected = step(z)
    donated = memory(step, z, donate_argnums=0)
    kept = memory(step, z)
    assert donated.alias_size_in_bytes >= z.nbytes
    assert kept.temp_size_in_bytes + kept.output_size_in_bytes < 2 * z.nbytes
    assert donated.temp_size_in_bytes < z.nbytes // 8
    again = jax.jit(step, donate_argnums=0)(z + 0)
    for a, e in zip(again, expected):
        assert jnp.array_equal(a, e)
    assert memory(softmax, z, donate_argnums=0).alias_size_in_bytes == z.nbytes
    # Logits used afterwards keep their values.
    _, grad, same = jax.jit(lambda z: (*step(z), z * 2))(z)
    assert jnp.array_equal(same, z * 2) and jnp.array_equal(grad, expected[1])


@pytest.mark.slow
def test_the_workspace_is_in_xlas_plan_and_within_memory(platform: str) -> None:  # noqa: F811
    x, w, _, t = problem((256,), 5000, 32)
    limits = {"500KB": 500_000, "3MiB": 3 << 20}
    if platform == "cuda":
        limits = {"64MiB": 64 << 20}
    sizes = {}
    for limit in (None, *limits):
        step = jax.value_and_grad(
            lambda x, w, m=limit: linear_cross_entropy(x, w, t, memory=m), (0, 1)
        )
        sizes[limit] = memory(step, x, w).temp_size_in_bytes
        near(jax.jit(step)(x, w), jax.value_and_grad(lambda x, w: plain(x, w, t), (0, 1))(x, w))
    for limit, allowed in limits.items():
        assert 0 < sizes[limit] <= allowed + 4096
    if platform == "cpu":
        assert sizes["500KB"] < sizes["3MiB"] < sizes[None]
    with pytest.raises(ValueError, match="memory is 10 bytes; allowed: >= "):
        jax.jit(lambda x: linear_cross_entropy(x, w, t, memory=10))(x)


def test_one_program_for_one_shape() -> None:
    compiled = []

    def listen(event: str, *_: Any, **__: Any) -> None:
        compiled.append(event)

    x, w, t = batch()
    jitted = jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1)))
    eager = jax.value_and_grad(linear_cross_entropy, (0, 1))
    variants = [(x * k, w + k, jnp.roll(t, k)) for k in range(4)]
    for step in (jitted, eager, linear_cross_entropy, cross_entropy_of_x, softmax_of_x):
        step(*variants[0])
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for arguments in variants:
            for step in (jitted, eager, linear_cross_entropy, cross_entropy_of_x, softmax_of_x):
                jax.block_until_ready(step(*arguments))
        seen = [event for event in compiled if "compile" in event]
        jax.jit(lambda x: x * 3)(x)
        assert not seen and any("compile" in event for event in compiled), seen
    finally:
        jax.monitoring.clear_event_listeners()


def cross_entropy_of_x(x: Any, _: Any, t: Any) -> Any:
    return cross_entropy(x, t % x.shape[-1])


def softmax_of_x(x: Any, *_: Any) -> Any:
    return softmax(x)


def test_f32_products_follow_jaxs_precision() -> None:
    x, w, t = batch()

    def flag() -> str:
        text = jax.jit(lambda x: linear_cross_entropy(x, w, t)).lower(x).as_text()
        return text.split("allow_tf32 = ")[1][0]

    assert flag() == "0"
    with jax.default_matmul_precision("tensorfloat32"):
        assert flag() == "1"
    with jax.default_matmul_precision("highest"):
        assert flag() == "0"

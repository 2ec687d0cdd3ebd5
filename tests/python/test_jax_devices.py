# SPDX-License-Identifier: Apache-2.0
"""logitless.jax on several devices: a vocabulary split over mesh axes, on 8 devices of the host;
programs for a machine of unequal GPUs, which need not be here."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import numpy as np
import torch

import reference
from jax_support import (  # noqa: F401
    fields,
    leaves,
    platform,
    problem,
    products,
    same,
    to_torch,
)
from logitless import _abi
from logitless.jax import _parallel, _run, linear_cross_entropy, linear_logprob

P = jax.sharding.PartitionSpec

# For each device: the minimum, the recommended size and the alignment.
SIZES = {0: (1000, 5000, 256), 1: (3000, 7000, 512), 3: (2000, 9000, 128)}


@pytest.fixture
def unequal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine of GPUs that need different workspaces, one of which is not supported."""

    def workspace(op: Any, execution: Any, size: Any, status: Any) -> int:
        cuda = execution._obj.device_type == _abi.CUDA
        sizes = SIZES.get(execution._obj.device_index) if cuda else (1, 1, 64)
        if sizes is None:
            status._obj.message = b"too old"
            return 9  # 9 is backend_unavailable
        size._obj.minimum, size._obj.recommended, size._obj.alignment = sizes
        return 0

    def devices(**_: Any) -> Any:
        return [SimpleNamespace(local_hardware_id=i) for i in (0, 1, 2, 3)]

    _run._plan.cache_clear()
    monkeypatch.setattr(_abi, "_workspace", workspace)
    monkeypatch.setattr(jax, "local_devices", devices)
    yield monkeypatch
    _run._plan.cache_clear()


def test_the_workspace_is_enough_for_every_gpu(unequal: Any) -> None:
    x, w, t = np.ones((6, 4), np.float32), np.ones((9, 4), np.float32), np.zeros(6, np.int32)

    def planned(memory: int | None) -> tuple[int, ...]:
        step = jax.jit(lambda x: linear_cross_entropy(x, w, t, memory=memory))
        text = step.trace(x).lower(lowering_platforms=("cuda",)).as_text()
        found = [re.search(rf"\b{n} = (\d+)", text) for n in ("workspace_bytes", "alignment")]
        return tuple(int(m[1]) for m in found if m)

    assert planned(None) == (9000, 512)
    assert planned(3000) == (3000, 512)
    with pytest.raises(ValueError, match="memory is 2500 bytes; allowed: >= 3000"):
        planned(2500)
    unequal.setitem(SIZES, 0, None)  # now the first device fails too
    assert planned(None) == (9000, 512)


# --- a vocabulary split over mesh axes ---

CHECKED = pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
TOKENS, HIDDEN, VOCAB = 13, 16, 48


@pytest.fixture(autouse=True)
def on_hosts(platform: str) -> None:  # noqa: F811
    if platform != "cpu" or len(jax.devices("cpu")) < 8:
        pytest.skip("needs 8 devices of the host")


def mesh_of(**axes: int) -> Any:
    devices = np.array(jax.devices("cpu")[: int(np.prod([*axes.values()]))])
    return jax.sharding.Mesh(devices.reshape([*axes.values()]), tuple(axes))


def arrays(dtype: Any = jnp.float32) -> tuple[Any, Any, Any, Any]:
    return problem((TOKENS,), VOCAB, HIDDEN, dtype, bias=True)


def sharded(
    fn: Any, mesh: Any, axes: Any = "tp", *, checked: bool = True, around: bool = True,
    rest: int = 0,
) -> Any:  # fmt: skip
    """fn(x, w, b, *rest) with w and b split over the axes. With `around` fn returns a value, else a
    pair of a value and the gradients of x, w and b."""
    of_shard = (P(), P(axes), P(axes))
    out = P() if around else (P(), of_shard)
    return jax.shard_map(
        fn, mesh=mesh, in_specs=of_shard + (P(),) * rest, out_specs=out, check_vma=checked
    )


def split(
    t: Any, mesh: Any, axes: Any = "tp", *, checked: bool = True, around: bool = True,
    scale: Any = 3.0, **options: Any,
) -> Any:  # fmt: skip
    """A function of x, w and b: the value of a scaled loss, and its gradients of them."""
    upstream = None if checked else "parts" if around else "whole"

    def loss(x: Any, w: Any, b: Any) -> Any:
        made = linear_cross_entropy(
            x, w, t, linear_bias=b, axis_name=axes, upstream=upstream, **options
        )
        return made if around else (scale * made).sum()

    if not around:
        of_device = jax.value_and_grad(loss, (0, 1, 2))
        return jax.jit(sharded(of_device, mesh, axes, checked=checked, around=False))
    whole = sharded(loss, mesh, axes, checked=checked)
    return jax.jit(jax.value_and_grad(lambda *a: (scale * whole(*a)).sum(), (0, 1, 2)))


def in_f64(x: Any, w: Any, b: Any, t: Any, scale: Any = 3.0, **options: Any) -> Any:
    xs = leaves(x, w, b)
    options = {n: to_torch(o) if hasattr(o, "shape") else o for n, o in options.items()}
    loss = reference.loss(reference.logits_of(*xs), to_torch(t).long(), **options)  # type: ignore
    total = (torch.as_tensor(np.array(scale)) * loss).sum()
    total.backward()  # type: ignore[no-untyped-call]
    return total.detach(), tuple(leaf.grad for leaf in xs if leaf is not None)


def agree(made: Any, expected: Any, dtype: Any = jnp.float32) -> None:
    same(made[0], expected[0])
    for a, e in zip(made[1], expected[1], strict=True):
        same(a, e, dtype)


def random(*shape: int, seed: int = 7) -> Any:
    return jax.random.uniform(jax.random.key(seed), shape) + 0.5


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "smoothing": {"label_smoothing": 0.3, "z_loss": 0.01, "reduction": "sum"},
    "classes": {"weight": random(VOCAB), "label_smoothing": 0.1, "token_weight": random(TOKENS)},
    "softcap": {"softcap": 2.0, "logit_scale": 0.7, "reduction": "none"},
    "temperature": {"temperature": random(TOKENS), "normalizer": 5.5, "z_loss": 0.1},
}


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, jnp.float32), (4, jnp.float32), (4, jnp.bfloat16)],
    ids=["2-f32", "4-f32", "4-bf16"],
)  # fmt: skip
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_of_shards_are_those_of_f64(name: str, dtype: Any, size: int) -> None:
    x, w, b, t = arrays(dtype)
    options = OPTIONS[name]
    scale = 3 * random(TOKENS, seed=8) if name == "softcap" else 3.0
    agree(
        split(t, mesh_of(tp=size), scale=scale, **options)(x, w, b),
        in_f64(x, w, b, t, scale, **options),
        dtype,
    )


@CHECKED
@pytest.mark.parametrize("around", [True, False], ids=["around", "inside"])
@pytest.mark.parametrize("axes", ["tp", ("fsdp", "tp"), ("tp", "fsdp")], ids=str)
def test_gradients_inside_and_around_shard_map(axes: Any, around: bool, checked: bool) -> None:
    x, w, b, t = arrays()
    options = OPTIONS["classes"]
    mesh = mesh_of(tp=4) if axes == "tp" else mesh_of(fsdp=2, tp=2)
    step = split(t, mesh, axes, checked=checked, around=around, **options)
    agree(step(x, w, b), in_f64(x, w, b, t, **options))


@CHECKED
def test_every_device_gets_the_same_bits(checked: bool) -> None:
    x, w, b, t = arrays()

    def step(x: Any, w: Any, b: Any) -> Any:
        def loss(x: Any) -> Any:
            return linear_cross_entropy(
                x, w, t, linear_bias=b, axis_name="tp", upstream=None if checked else "whole"
            )

        return jax.tree.map(lambda a: a[None], jax.value_and_grad(loss)(x))

    every = jax.jit(
        jax.shard_map(
            step, mesh=mesh_of(tp=4), in_specs=(P(), P("tp"), P("tp")), out_specs=P("tp"),
            check_vma=checked,
        )
    )  # fmt: skip
    loss, grad = every(x, w, b)
    assert loss.shape == (4,) and grad.shape == (4, TOKENS, HIDDEN)
    for a in (loss, grad):
        assert np.array_equal(np.asarray(a), np.broadcast_to(np.asarray(a[:1]), a.shape))


def test_one_shard_is_the_whole() -> None:
    x, w, b, t = arrays()
    for checked in (True, False):
        made = split(t, mesh_of(tp=1), checked=checked, label_smoothing=0.1)(x, w, b)
        agree(made, in_f64(x, w, b, t, label_smoothing=0.1))


STATISTICS = (
    "lse",
    "target_logit",
    "logprob",
    "entropy",
    "argmax",
    "sum_p_squared",
    "mean_logit",
    "max_logprob",
)


def test_statistics_of_shards_are_those_of_f64() -> None:
    x, w, b, t = arrays()
    names = STATISTICS[:4]
    factors = {name: random(TOKENS, seed=i) for i, name in enumerate(names)}

    def all_of(x: Any, w: Any, b: Any) -> Any:
        return linear_cross_entropy(
            x, w, t, linear_bias=b, axis_name="tp", return_statistics=STATISTICS, reduction="sum"
        )

    found = jax.jit(sharded(all_of, mesh_of(tp=4)))(x, w, b)[1]
    xs = leaves(x, w, b)
    logits = reference.logits_of(*xs)  # type: ignore[arg-type]
    expected = reference.statistics(logits, to_torch(t).long(), {})
    for name in STATISTICS:
        same(getattr(found, name), expected[name])
    assert found.argmax.dtype == jnp.int32

    def total(x: Any, w: Any, b: Any) -> Any:
        loss, s = sharded(all_of, mesh_of(tp=4))(x, w, b)
        return loss + sum((factors[name] * getattr(s, name)).sum() for name in names)

    made = jax.jit(jax.value_and_grad(total, (0, 1, 2)))(x, w, b)
    whole = reference.loss(logits, to_torch(t).long(), reduction="sum")
    for name in names:
        whole = whole + (to_torch(factors[name]) * expected[name]).sum()
    whole.backward()  # type: ignore[no-untyped-call]
    agree(made, (whole.detach(), [leaf.grad for leaf in xs if leaf is not None]))


def test_logprob_and_entropy_of_shards() -> None:
    x, w, b, t = arrays()

    def total(x: Any, w: Any, b: Any, **split: Any) -> Any:
        logprob, entropy = linear_logprob(
            x, w, t, linear_bias=b, temperature=0.7, entropy=True, **split
        )
        return (logprob * random(TOKENS)).sum() + 0.3 * entropy.sum()

    ours = sharded(lambda *a: total(*a, axis_name="tp"), mesh_of(tp=4))
    value, grads = jax.jit(jax.value_and_grad(ours, (0, 1, 2)))(x, w, b)
    whole, wholes = jax.value_and_grad(total, (0, 1, 2))(x, w, b)
    agree((value, grads), (to_torch(whole).double(), [to_torch(g).double() for g in wholes]))


@CHECKED
def test_tokens_and_vocabulary_are_split_at_once(checked: bool) -> None:
    x, w, b, t = problem((16,), VOCAB, HIDDEN, bias=True)
    upstream = None if checked else "parts"

    def loss(x: Any, w: Any, b: Any, t: Any) -> Any:
        count = jax.lax.psum((t != -100).sum(), "dp")
        part = linear_cross_entropy(
            x, w, t, linear_bias=b, axis_name="tp", normalizer=count, upstream=upstream,
            label_smoothing=0.1,
        )  # fmt: skip
        return jax.lax.psum(part, "dp")

    whole = jax.shard_map(
        loss, mesh=mesh_of(dp=2, tp=4), in_specs=(P("dp"), P("tp"), P("tp"), P("dp")),
        out_specs=P(), check_vma=checked,
    )  # fmt: skip
    made = jax.jit(jax.value_and_grad(lambda *a: 3 * whole(*a), (0, 1, 2)))(x, w, b, t)
    agree(made, in_f64(x, w, b, t, label_smoothing=0.1))
    if not checked:
        return
    # The same inside the function, where JAX's types add up the gradients over dp.
    inside = jax.shard_map(
        jax.value_and_grad(lambda *a: 3 * loss(*a), (0, 1, 2)), mesh=mesh_of(dp=2, tp=4),
        in_specs=(P("dp"), P("tp"), P("tp"), P("dp")),
        out_specs=(P(), (P("dp"), P("tp"), P("tp"))),
    )  # fmt: skip
    agree(jax.jit(inside)(x, w, b, t), in_f64(x, w, b, t, label_smoothing=0.1))


@CHECKED
def test_hidden_states_gathered_inside(checked: bool) -> None:
    """Tokens split over the vocabulary's own axis before the head: every device's copy has a part
    of the gradient, which the gathering's own rule adds up."""
    x, w, b, t = problem((16,), VOCAB, HIDDEN, bias=True)

    def loss(x: Any, w: Any, b: Any) -> Any:
        x = jax.lax.all_gather(x, "tp", tiled=True)
        upstream = None if checked else "parts"
        return linear_cross_entropy(x, w, t, linear_bias=b, axis_name="tp", upstream=upstream)

    whole = jax.shard_map(
        loss, mesh=mesh_of(tp=4), in_specs=P("tp"), out_specs=P(), check_vma=checked
    )
    made = jax.jit(jax.value_and_grad(lambda *a: 3 * whole(*a), (0, 1, 2)))(x, w, b)
    agree(made, in_f64(x, w, b, t))


@pytest.mark.parametrize("ignore_index", [5, 47, -1, -(2**31)])
def test_ignored_targets_may_be_classes(ignore_index: int) -> None:
    x, w, b, t = arrays()
    t = jnp.where(t == -100, ignore_index, t).at[:2].set([0, VOCAB - 1])
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": 0.1}
    agree(split(t, mesh_of(tp=4), **options)(x, w, b), in_f64(x, w, b, t, **options))


@pytest.mark.parametrize(
    ("wrong", "ignore_index"), [(VOCAB, -100), (-1, -100), (2**31 - 1, 5), (-(2**31), 5)]
)
def test_targets_out_of_range_are_errors(wrong: int, ignore_index: int) -> None:
    x, w, b, t = arrays()
    t = jnp.where(t == -100, ignore_index, t).at[4].set(wrong)
    with pytest.raises(Exception, match=rf"target\[4\] is .*; allowed: 0 to {VOCAB - 1}"):
        jax.block_until_ready(split(t, mesh_of(tp=2), ignore_index=ignore_index)(x, w, b))


def test_masked_shards_and_wrong_rows() -> None:
    x, w, b, t = arrays()
    t = jnp.where(t == -100, t, t % 12)
    t = t.at[0].set(3)
    b = b.at[12:24].set(-jnp.inf)  # the second shard has no probability
    (value, grads), whole = (f(x, w, b) for f in (split(t, mesh_of(tp=4)), _whole(t)))
    agree((value, grads), (to_torch(whole[0]).double(), [to_torch(g).double() for g in whole[1]]))
    row = int(jnp.argmax(t != -100))
    x = x.at[row].set(jnp.nan)
    options = {"reduction": "none"}
    value, grads = split(t, mesh_of(tp=4), **options)(x, w, b)
    assert np.isnan(value) and np.isnan(grads[0][row]).all()
    others = np.delete(np.asarray(grads[0]), row, 0)
    assert not np.isnan(others).any()


def _whole(t: Any) -> Any:
    return jax.value_and_grad(
        lambda x, w, b: 3 * linear_cross_entropy(x, w, t, linear_bias=b), (0, 1, 2)
    )


@pytest.mark.parametrize("empty", ["zero", "nan"])
def test_no_token_counts(empty: str) -> None:
    x, w, b, t = arrays()
    value, grads = split(jnp.full_like(t, -100), mesh_of(tp=2), empty_mean=empty)(x, w, b)
    assert value == 0 if empty == "zero" else np.isnan(value)
    assert all((g == 0).all() for g in grads)
    none = jnp.zeros((0,), jnp.int32)
    value, grads = split(none, mesh_of(tp=2), reduction="sum")(x[:0], w, b)
    assert value == 0 and (grads[1] == 0).all()


@pytest.mark.slow
@CHECKED
def test_outside_of_jit(checked: bool) -> None:
    x, w, b, t = arrays()

    def loss(x: Any, w: Any, b: Any) -> Any:
        upstream = None if checked else "parts"
        return linear_cross_entropy(
            x, w, t, linear_bias=b, axis_name="tp", upstream=upstream, reduction="sum"
        )

    whole, options = sharded(loss, mesh_of(tp=2), checked=checked), {"reduction": "sum"}
    expected = in_f64(x, w, b, t, 1.0, **options)
    same(whole(x, w, b), expected[0])
    agree(jax.value_and_grad(whole, (0, 1, 2))(x, w, b), expected)


@CHECKED
def test_checkpoint_and_scan(checked: bool) -> None:
    x, w, b, t = arrays()
    upstream = None if checked else "parts"

    def loss(x: Any, w: Any, b: Any) -> Any:
        def one(total: Any, factor: Any) -> Any:
            part = jax.checkpoint(
                lambda x, w, b: linear_cross_entropy(
                    x, w, t, linear_bias=b, axis_name="tp", upstream=upstream
                )
            )(x, w, b)
            return total + factor * part, None

        return jax.lax.scan(one, jnp.float32(0), jnp.float32([1.0, 2.0]))[0]

    whole = sharded(loss, mesh_of(tp=2), checked=checked)
    agree(jax.jit(jax.value_and_grad(whole, (0, 1, 2)))(x, w, b), in_f64(x, w, b, t))


@CHECKED
def test_vmap_over_tokens_inside(checked: bool) -> None:
    x, w, b, t = problem((3, TOKENS), VOCAB, HIDDEN, bias=True)
    upstream = None if checked else "parts"
    scale = jnp.float32([1.0, 2.0, 3.0])

    def loss(x: Any, w: Any, b: Any) -> Any:
        each = jax.vmap(
            lambda x, t: linear_cross_entropy(
                x, w, t, linear_bias=b, axis_name="tp", upstream=upstream
            )
        )(x, t)
        return (scale * each).sum()

    whole = sharded(loss, mesh_of(tp=2), checked=checked)
    made = jax.jit(jax.value_and_grad(whole, (0, 1, 2)))(x, w, b)
    expected = [in_f64(x[i], w, b, t[i], scale[i]) for i in range(3)]
    grads = [torch.stack([e[1][0] for e in expected])]
    grads += [sum(e[1][i] for e in expected) for i in (1, 2)]
    agree(made, (sum(e[0] for e in expected), grads))


def test_what_is_not_differentiated_is_not_computed() -> None:
    x, w, b, t = arrays()

    def loss(x: Any, w: Any, b: Any) -> Any:
        return linear_cross_entropy(x, w, t, linear_bias=b, axis_name="tp")

    whole = sharded(loss, mesh_of(tp=2))
    for wrt, name in ((0, "input"), (1, "weight"), (2, "bias")):
        made = fields(jax.grad(whole, wrt), x, w, b)[-1].split()
        assert [f for f in made if f.startswith("grad_") and f != "grad_loss"] == [f"grad_{name}"]


KEPT_VOCAB = 320  # four shards of 80 columns: one whole block of 64 each


def kept_problem(dtype: Any = jnp.float32, shape: tuple[int, ...] = (72,)) -> Any:
    return problem(shape, KEPT_VOCAB, HIDDEN, dtype, bias=True)


def check_kept(size: int, given: Any, *, checked: bool = True, around: bool = True) -> None:
    """Checks losses that are not reduced, each with its own upstream gradient."""
    x, w, b, t = given
    scale, options = 3 * random(*t.shape, seed=8), {"reduction": "none"}
    step = split(t, mesh_of(tp=size), checked=checked, around=around, scale=scale, **options)
    agree(step(x, w, b), in_f64(x, w, b, t, scale, **options), x.dtype.type)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
def test_state_is_kept_of_every_shard(size: int, dtype: Any) -> None:
    given = kept_problem(dtype)
    check_kept(size, given)
    check_kept(size, given, around=False)
    check_kept(size, given, checked=False)
    check_kept(size, given, checked=False, around=False)
    check_kept(size, kept_problem(dtype, (3, 64)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kept_state_of_targets_of_one_shard(dtype: Any) -> None:
    x, w, b, t = kept_problem(dtype)
    for shard in (0, 3):
        check_kept(4, (x, w, b, jnp.where(t == -100, t, shard * 80 + t % 80)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kept_state_of_a_shard_far_below_the_targets(dtype: Any) -> None:
    """A shard so far below, or at -inf, has no probability and no gradient."""
    x, w, b, t = kept_problem(dtype)
    t = jnp.where(t == -100, t, t % 80)
    check_kept(4, (x, w, b.at[80:160].add(-120.0), t))
    check_kept(4, (x, w, b.at[80:160].set(-jnp.inf), t))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_not_finite_in_one_shard(dtype: Any) -> None:
    x, w, b, t = kept_problem(dtype)
    t, counts = t.at[5].set(7), np.asarray(t) != -100
    step = split(t, mesh_of(tp=4), scale=random(72), reduction="none")
    column = b.at[90].set(jnp.nan)  # NaN for every token
    value, (grad_x, *_) = step(x, w, column)
    rows = np.asarray(grad_x, np.float32)
    counts[5] = True
    assert np.isnan(value) and np.isnan(rows[counts]).all() and (rows[~counts] == 0).all()
    x = x.at[:, 0].set(0).at[5, 0].set(1e30)  # one logit of one token is infinite
    w = w.at[:, 0].set(0).at[90, 0].set(1e30)
    value, (grad_x, *_) = step(x, w, b)
    rows = np.asarray(grad_x, np.float32)
    assert not np.isfinite(value) and np.isnan(rows[5]).all()
    assert np.isfinite(np.delete(rows, 5, 0)).all()


@CHECKED
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_loss_and_gradients_take_three_products(reduction: str, checked: bool) -> None:
    x, w, b, t = kept_problem()
    options = {"reduction": reduction, "checked": checked}

    def calls(given: Any, **more: Any) -> list[str]:
        return fields(split(t, mesh_of(tp=4), **options, **more), *given)

    now = calls((x, w, b))
    assert products(now) == 3
    assert now[0].endswith("target target_logit") and "anchor" in now[1]
    assert "kept kept_rows" in now[1] and "kept kept_rows" in now[-1]
    f16 = x.astype(jnp.float16), w.astype(jnp.float16), b
    bf16 = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), b
    for other in (calls((x, w, b), memory="64MiB"), calls(f16), calls(bf16, softcap=5.0)):
        assert products(other) == 4 and not any("kept" in names for names in other)
    whole = sharded(lambda *a: linear_cross_entropy(*a[:2], t, axis_name="tp"), mesh_of(tp=4))
    assert products(fields(whole, x, w, b)) == 1, "nothing is differentiated"


def test_the_gradient_of_target_logit_alone_needs_nothing_kept() -> None:
    x, w, b, t = kept_problem()

    def total(x: Any, w: Any, b: Any) -> Any:
        found = linear_cross_entropy(
            x, w, t, linear_bias=b, axis_name="tp", return_statistics="target_logit"
        )
        return found[1].target_logit.sum()

    step = jax.grad(sharded(total, mesh_of(tp=4)), (0, 1))
    assert "kept" not in fields(step, x, w, b)[-1]
    expected = jax.grad(lambda x, w: jnp.where(t == -100, 0, (x * w[t]).sum(-1)).sum(), (0, 1))
    for mine, theirs in zip(jax.jit(step)(x, w, b), expected(x, w)):
        same(mine, to_torch(theirs).double())


def held(given: Any) -> tuple[list[Any], Any]:
    """What forward leaves for backward, of per-token losses on four shards; and the function from
    this to the gradients of x and w."""
    x, w, b, t = given

    def loss(x: Any, w: Any, b: Any) -> Any:
        return linear_cross_entropy(x, w, t, linear_bias=b, axis_name="tp", reduction="none")

    whole = sharded(loss, mesh_of(tp=4))
    _, pull = jax.jit(lambda x, w: jax.vjp(lambda x, w: whole(x, w, b), x, w))(x, w)
    leaves, tree = jax.tree.flatten(pull)
    up = random(*t.shape)
    return leaves, jax.jit(lambda leaves: jax.tree.unflatten(tree, leaves)(up))


def overwritten(given: Any) -> np.ndarray[Any, Any]:
    """[4, tokens that count]: `overwritten` of KeptRow (src/kept.h), not 0 where Backward cannot
    use what the shard has kept of the token."""
    (rows,) = (leaf for leaf in held(given)[0] if leaf.shape[-1:] == (8,))
    counted = np.asarray(rows)[:, 4].reshape(4, -1)[:, np.asarray(given[3]) != -100]
    return counted


def test_every_token_is_kept_relative_to_its_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 exponentials are kept. Relative to another number than the anchor they would be of no
    use, and Backward would compute the logits again unnoticed."""
    given = kept_problem(jnp.bfloat16)
    assert not overwritten(given).any()
    for anchor in (lambda own, shard: own, lambda own, shard: _parallel._gather(own, shard)[0]):
        monkeypatch.setattr(_parallel, "_anchor", anchor)
        assert overwritten(given).mean() > 0.5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_backward_takes_what_is_kept(dtype: Any) -> None:
    leaves, pull = held(kept_problem(dtype))
    emptied = [0 * leaf if leaf.shape[-1:] == (64,) else leaf for leaf in leaves]
    assert any(leaf.shape[-1:] == (64,) for leaf in leaves)
    for mine, other in zip(pull(leaves), pull(emptied)):
        far = np.abs(np.asarray(mine, np.float32) - np.asarray(other, np.float32))
        assert far.max() > 0.1


def test_the_weight_is_never_gathered() -> None:
    x, w, b, t = arrays()
    sharding = jax.sharding.NamedSharding(mesh_of(tp=4), P("tp"))
    w, b = jax.device_put(w, sharding), jax.device_put(b, sharding)
    text = split(t, mesh_of(tp=4)).lower(x, w, b).compile().as_text()
    assert "kept kept_rows" in text
    exchanged = re.findall(r"= (.*) (?:all-gather|all-reduce|all-to-all)", text)
    assert exchanged, "the states are"
    of_weight = (f"[{VOCAB},{HIDDEN}]", f"[4,{VOCAB // 4},{HIDDEN}]", f"[{VOCAB // 4},{HIDDEN}]")
    assert not [found for found in exchanged if any(shape in found for shape in of_weight)]
    assert not [found for found in exchanged if ",64]" in found], "nor is what is kept"
    assert not re.search(r"\[\d+,64\]\S* copy\(", text), "which is not copied either"
    assert f"f32[{VOCAB},{HIDDEN}]" not in text


@pytest.mark.slow
def test_what_one_rule_cannot_serve_is_refused() -> None:
    x, w, _, t = arrays()
    mesh = mesh_of(fsdp=2, tp=2)

    def refused(message: str, fn: Any, *specs: Any, checked: bool = True, kind: Any = ValueError):  # type: ignore[no-untyped-def]
        specs = specs or (P(), P("tp"))
        step = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=checked)
        with pytest.raises(kind, match=message):
            jax.jit(step)(x, w)

    def loss(axes: Any = "tp", **options: Any) -> Any:
        return lambda x, w: linear_cross_entropy(x, w, t, axis_name=axes, **options)

    for name in ("rank", "mass_above"):
        refused(f"'{name}' with axis_name", loss(return_statistics=name), kind=NotImplementedError)
    refused("axis_name is 'x'; allowed: manual axes of the mesh", loss("x"))
    refused("axis_name is 3; allowed: a str", loss(3), kind=TypeError)
    refused("every axis once", loss(("tp", "tp")))
    refused("upstream is 'all'; allowed: None, 'whole', 'parts'", loss(upstream="all"))
    refused("linear_weight is the same on all devices", loss(), P(), P())
    of_both = loss(("fsdp", "tp"))
    part = r"input varies over the mesh axes \['tp'\] of"
    refused(part, of_both, P(None, "tp"), P(("fsdp", "tp")))
    refused(r"weight has shape \(24,\); allowed: \(48,\)", loss(weight=jnp.ones(24)))
    with pytest.raises(ValueError, match="upstream is 'whole' without axis_name"):
        linear_cross_entropy(x, w, t, upstream="whole")
    with pytest.raises(ValueError, match="axis_name is 'tp'; allowed: manual axes"):
        linear_cross_entropy(x, w, t, axis_name="tp")
    with pytest.raises(ValueError, match=r"weight is the same .*; allowed: one that is split"):
        jax.shard_map(lambda x, w: linear_logprob(x, w, t, axis_name="tp"), mesh=mesh,
                      in_specs=(P(), P()), out_specs=P())(x, w)  # fmt: skip

    def own_targets(x: Any, w: Any) -> Any:
        mine = t + 0 * jax.lax.axis_index("tp")
        return linear_cross_entropy(x, w, mine, axis_name="tp")

    refused("target varies over the mesh axes .*; allowed: the same on all", own_targets)

    def of_constant(x: Any, w: Any) -> Any:
        return jax.grad(lambda a: loss(token_weight=a)(x, w))(jnp.ones(TOKENS)).sum()

    refused("token_weight is differentiated, but it is a constant", of_constant)
    nothing = "upstream='whole' or upstream='parts'"
    refused(nothing, lambda x, w: jax.grad(loss())(x, w), checked=False)
    value = jax.shard_map(
        loss(), mesh=mesh, in_specs=(P(), P("tp")), out_specs=P(), check_vma=False
    )
    same(value(x, w), in_f64(x, w, None, t, 1.0)[0])
    with pytest.raises(ValueError, match=nothing):
        jax.grad(value)(x, w)
    with pytest.raises(NotImplementedError, match="once only"):
        whole = jax.shard_map(loss(), mesh=mesh, in_specs=(P(), P("tp")), out_specs=P())
        jax.grad(lambda x: (jax.grad(whole)(x, w) ** 2).sum())(x)

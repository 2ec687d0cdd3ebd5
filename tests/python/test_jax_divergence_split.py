# SPDX-License-Identifier: Apache-2.0
"""linear_divergence in JAX with the vocabulary split over mesh axes: values and gradients of one
device, the same on every device, inside of and around jax.shard_map; what is refused."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from logitless.jax import DivergenceStatistics, _parallel_divergence, linear_divergence  # noqa: E402
from test_jax_devices import CHECKED, mesh_of, on_hosts, platform  # noqa: E402, F401

TOKENS, HIDDEN, TEACHERS, VOCAB = 13, 16, 10, 48
KINDS: dict[str, dict[str, Any]] = {
    "forward_kl": {"kind": "forward_kl"},
    "reverse_kl": {"kind": "reverse_kl"},
    "jsd": {"kind": "jsd", "beta": 0.3},
    "jsd 0": {"kind": "jsd", "beta": 0.0},
    "skew_kl": {"kind": "skew_kl", "beta": 0.3},
    "tv": {"kind": "tv"},
}
OF_AXIS = ("linear_weight", "linear_bias", "teacher_weight", "teacher_bias", "teacher_logits")


def heads(dtype: Any = jnp.float32, logits: bool = False, target: bool = True) -> dict[str, Any]:
    key = iter(jax.random.split(jax.random.key(3), 9))

    def made(*shape: int, scale: float = 1.0) -> Any:
        return (scale * jax.random.normal(next(key), shape)).astype(dtype)

    given: dict[str, Any] = {
        "input": made(TOKENS, HIDDEN), "linear_weight": made(VOCAB, HIDDEN, scale=0.5),
        "linear_bias": made(VOCAB),
    }  # fmt: skip
    if logits:
        given["teacher_logits"] = made(TOKENS, VOCAB)
    else:
        given |= {
            "teacher_input": made(TOKENS, TEACHERS), "teacher_bias": made(VOCAB),
            "teacher_weight": made(VOCAB, TEACHERS, scale=0.5),
        }  # fmt: skip
    if target:
        given["target"] = jax.random.randint(next(key), (TOKENS,), 0, VOCAB).at[3].set(-100)
    return given


WRT = ("input", "linear_weight", "linear_bias")


def gradients(given: dict[str, Any], scale: Any, **options: Any) -> Any:
    """A scaled loss, the statistics and the gradients, on one device."""

    def loss(primals: dict[str, Any], rest: dict[str, Any]) -> Any:
        made, statistics = linear_divergence(**primals, **rest, **options)
        return (scale * made).sum(), statistics

    primals = {name: given[name] for name in WRT}
    rest = {name: x for name, x in given.items() if name not in WRT}
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(primals, rest)


def split(
    given: dict[str, Any], scale: Any, mesh: Any, axes: Any = "tp", *, checked: bool = True,
    around: bool = True, **options: Any,
) -> Any:  # fmt: skip
    """The results of gradients() with the vocabulary split over the axes."""
    upstream: Any = None if checked else "parts" if around else "whole"

    def spec(name: str) -> Any:
        if name == "teacher_logits":
            return P(None, axes)
        return P(axes) if name in OF_AXIS else P()

    specs = {name: spec(name) for name in given}
    names = options["return_statistics"]
    of_statistics = DivergenceStatistics(*[P() if n in names else None for n in _FIELDS])

    def own(given: dict[str, Any]) -> Any:
        return linear_divergence(**given, axis_name=axes, upstream=upstream, **options)

    def loss(primals: dict[str, Any], rest: dict[str, Any], of: Any) -> Any:
        made, statistics = of({**primals, **rest})
        return (scale * made).sum(), statistics

    primals = {name: given[name] for name in WRT}
    rest = {name: x for name, x in given.items() if name not in WRT}
    if around:
        whole = jax.shard_map(
            own, mesh=mesh, in_specs=(specs,), out_specs=(P(), of_statistics), check_vma=checked
        )
        return jax.jit(jax.value_and_grad(lambda p, r: loss(p, r, whole), has_aux=True))(
            primals, rest
        )
    inside = jax.shard_map(
        jax.value_and_grad(lambda p, r: loss(p, r, own), has_aux=True), mesh=mesh,
        in_specs=({n: specs[n] for n in primals}, {n: specs[n] for n in rest}),
        out_specs=((P(), of_statistics), {n: specs[n] for n in primals}), check_vma=checked,
    )  # fmt: skip
    return jax.jit(inside)(primals, rest)


_FIELDS = ("entropy", "teacher_entropy", "acceptance", "logprob")


def same(made: Any, expected: Any, tolerance: float) -> None:
    (value, statistics), grads = made
    (of_one, known), wanted = expected
    pairs = [(value, of_one), *((grads[name], wanted[name]) for name in WRT)]
    pairs += [(s, k) for s, k in zip(statistics, known) if k is not None]
    for a, e in pairs:
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert np.abs(a - e).max() <= tolerance * max(np.abs(e).max(), 1e-6)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_that_of_one_device(kind: str, reduction: str, size: int) -> None:
    scale = jax.random.uniform(jax.random.key(1), (TOKENS,)) if reduction == "none" else 3.0
    for target in (True, False):
        given = heads(target=target)
        options: dict[str, Any] = {
            **KINDS[kind], "reduction": reduction, "return_statistics": _FIELDS[: 3 + target],
        }  # fmt: skip
        if target:
            options["label_weight"] = 0.4
        made = split(given, scale, mesh_of(tp=size), **options)
        same(made, gradients(given, scale, **options), 8e-6)


OPTIONS: dict[str, dict[str, Any]] = {
    "maps": {
        "softcap": 2.0, "logit_scale": 0.7, "teacher_softcap": 3.0, "teacher_temperature": 1.5,
    },
    "temperatures": {"temperature": np.linspace(0.5, 2, TOKENS, dtype=np.float32)},
    "weights": {"token_weight": np.linspace(0, 2, TOKENS, dtype=np.float32), "normalizer": 5.5},
    "a normalizer": {"normalizer": np.float32(4)},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    given = heads()
    options: dict[str, Any] = {
        "kind": "reverse_kl", "return_statistics": ("acceptance",), **OPTIONS[name]
    }  # fmt: skip
    made = split(given, 3.0, mesh_of(tp=4), **options)
    same(made, gradients(given, 3.0, **options), 8e-6)


@CHECKED
@pytest.mark.parametrize("around", [True, False], ids=["around", "inside"])
@pytest.mark.parametrize("axes", ["tp", ("fsdp", "tp")], ids=str)
def test_gradients_inside_and_around_shard_map(axes: Any, around: bool, checked: bool) -> None:
    given = heads(logits=True)
    options: dict[str, Any] = {"kind": "jsd", "return_statistics": ("acceptance", "logprob")}
    mesh = mesh_of(tp=4) if axes == "tp" else mesh_of(fsdp=2, tp=2)
    made = split(given, 3.0, mesh, axes, checked=checked, around=around, **options)
    same(made, gradients(given, 3.0, **options), 8e-6)


def test_bf16() -> None:
    given = heads(jnp.bfloat16)
    options: dict[str, Any] = {"kind": "reverse_kl", "return_statistics": ("entropy",)}
    made = split(given, 3.0, mesh_of(tp=4), **options)
    same(made, gradients(given, 3.0, **options), 2e-2)


def test_equal_heads_give_exactly_zero() -> None:
    given = heads()
    given |= {f"teacher_{name}": given[f"{of}{name}"] for name, of in
              (("input", ""), ("weight", "linear_"), ("bias", "linear_"))}  # fmt: skip
    for options in KINDS.values():
        (value, _), grads = split(
            given, 3.0, mesh_of(tp=4), **options, return_statistics=("acceptance",)
        )
        assert value == 0 and not any(np.any(g) for g in grads.values())


def test_what_is_refused() -> None:
    given = heads()
    mesh = mesh_of(tp=4)
    with pytest.raises(ValueError, match=r"^upstream is 'whole' without axis_name"):
        linear_divergence(**given, upstream="whole")
    with pytest.raises(ValueError, match=r"^axis_name is 'x'; allowed: manual axes"):
        linear_divergence(**given, axis_name="x")

    def whole_teacher(given: dict[str, Any]) -> Any:
        return linear_divergence(**given, axis_name="tp")

    specs = {name: P("tp") if name.startswith("linear") else P() for name in given}
    whole = jax.shard_map(whole_teacher, mesh=mesh, in_specs=(specs,), out_specs=P())
    with pytest.raises(ValueError, match=r"^teacher_weight is the same on all devices"):
        jax.jit(whole)(given)
    unchecked = jax.shard_map(
        lambda g: linear_divergence(**g, axis_name="tp"), mesh=mesh, out_specs=P(),
        in_specs=({n: P("tp") if n in OF_AXIS else P() for n in given},), check_vma=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^axis_name is given where jax\.shard_map has check_vma"):
        jax.grad(lambda x: unchecked({**given, "input": x}))(given["input"])


@pytest.mark.parametrize("name", ["sums", "states", "mean"])
def test_a_known_bug_makes_a_check_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gather, run = _parallel_divergence._gather, _parallel_divergence._run
    rows = {"states": 5, "sums": 3}

    def own(x: Any, shard: Any) -> Any:
        found = gather(x, shard)
        return jnp.zeros_like(found) + found[:1] if len(x) == rows[name] else found

    def without_a_mean(kind: int, operands: Any, *rest: Any) -> Any:
        if "slope_mean" in operands:
            operands = {**operands, "slope_mean": jnp.zeros_like(operands["slope_mean"])}
        return run(kind, operands, *rest)

    if name == "mean":
        monkeypatch.setattr(_parallel_divergence, "_run", without_a_mean)
    else:
        monkeypatch.setattr(_parallel_divergence, "_gather", own)
    given = heads()
    options: dict[str, Any] = {"kind": "reverse_kl", "return_statistics": ("acceptance",)}
    made = split(given, 3.0, mesh_of(tp=4), **options)
    with pytest.raises(AssertionError):
        same(made, gradients(given, 3.0, **options), 8e-6)

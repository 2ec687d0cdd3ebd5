# SPDX-License-Identifier: Apache-2.0
"""logitless.jax under plain jax.jit on sharded arrays, on 8 devices of the host: tokens, vocabulary
and both split over mesh axes, against f64 and by the text of the compiled program."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import numpy as np
import torch

import reference
from jax_support import host_mesh, leaves, platform, problem, products, same, to_torch  # noqa: F401
from logitless.jax import (
    _parallel,
    _partition,
    cross_entropy,
    linear_cross_entropy,
    linear_logprob,
    softmax,
)
from test_jax_devices import STATISTICS, agree, in_f64, mesh_of, random

P = jax.sharding.PartitionSpec
BATCH, TIME, HIDDEN, VOCAB = 8, 4, 16, 48


@pytest.fixture(autouse=True)
def on_hosts(platform: str) -> None:  # noqa: F811
    if platform != "cpu" or len(jax.devices("cpu")) < 8:
        pytest.skip("needs 8 devices of the host")
    if not _partition.partitions():
        pytest.skip("needs a JAX whose partitioner is Shardy")


class Layout(NamedTuple):
    mesh: dict[str, int]
    tokens: tuple[Any, ...] = ()
    vocab: Any = None

    def own(self, vocab: int) -> int:
        """The columns of a device."""
        axes = (self.vocab,) if isinstance(self.vocab, str) else self.vocab
        return vocab // int(np.prod([self.mesh[axis] for axis in axes]))

    def put(self, x: Any, *spec: Any) -> Any:
        return jax.device_put(x, jax.sharding.NamedSharding(mesh_of(**self.mesh), P(*spec)))

    def put_all(self, x: Any, w: Any, b: Any, t: Any) -> tuple[Any, Any, Any, Any]:
        return (
            self.put(x, *self.tokens), self.put(w, self.vocab), self.put(b, self.vocab),
            self.put(t, *self.tokens),
        )  # fmt: skip


LAYOUTS = {
    "tokens": Layout({"dp": 4}, ("dp",)),
    "vocabulary": Layout({"tp": 4}, (), "tp"),
    "both": Layout({"dp": 2, "tp": 4}, ("dp",), "tp"),
    "axes of vocabulary": Layout({"fsdp": 2, "tp": 2}, (), ("fsdp", "tp")),
    "axes of tokens": Layout({"dp": 2, "fsdp": 2, "tp": 2}, (("dp", "fsdp"),), "tp"),
    "sequences": Layout({"dp": 2, "sp": 2, "tp": 2}, ("dp", "sp"), "tp"),
    "replicated": Layout({"dp": 2, "tp": 2}),
}
SHAPE = (BATCH, TIME)
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "classes": {
        "weight": random(VOCAB), "label_smoothing": 0.1, "token_weight": random(*SHAPE),
        "z_loss": 0.01,
    },
    "sum": {"softcap": 2.0, "logit_scale": 0.7, "reduction": "sum", "label_smoothing": 0.3},
    "none": {"reduction": "none", "temperature": random(*SHAPE, seed=3), "softcap": 3.0},
    "normalizer": {"normalizer": 5.5, "z_loss": 0.1},
}  # fmt: skip


def arrays(dtype: Any = jnp.float32, shape: tuple[int, ...] = SHAPE, vocab: int = VOCAB) -> Any:
    return problem(shape, vocab, HIDDEN, dtype, bias=True)


def step_of(scale: Any = 3.0, **options: Any) -> Any:
    """A scaled loss, and its gradients of x, w and b."""

    def loss(x: Any, w: Any, b: Any, t: Any) -> Any:
        return (scale * linear_cross_entropy(x, w, t, linear_bias=b, **options)).sum()

    return jax.value_and_grad(loss, (0, 1, 2))


def compiled(layout: Layout, given: Any, scale: Any = 3.0, **options: Any) -> Any:
    return jax.jit(step_of(scale, **options)).lower(*layout.put_all(*given)).compile()


def alike(made: Any) -> None:
    """Devices that have the same part have the same bits."""
    for x in jax.tree.leaves(made):
        parts: dict[str, Any] = {}
        for shard in x.addressable_shards:
            part = np.asarray(shard.data)
            assert np.array_equal(parts.setdefault(str(shard.index), part), part, equal_nan=True)


def check(layout: Layout, given: Any, scale: Any = 3.0, **options: Any) -> None:
    made = compiled(layout, given, scale, **options)(*layout.put_all(*given))
    alike(made)
    agree(made, in_f64(*given, scale, **options), given[0].dtype.type)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        *(("both", name) for name in OPTIONS),
        *((name, "none") for name in LAYOUTS if name != "both"),
        *((name, "classes") for name in ("tokens", "axes of vocabulary", "sequences")),
        *((name, "mean") for name in ("tokens", "vocabulary", "axes of tokens")),
    ],
)
def test_loss_and_gradients_are_those_of_f64(layout: str, options: str) -> None:
    scale = 3 * random(*SHAPE, seed=8) if options == "none" else 3.0
    check(LAYOUTS[layout], arrays(), scale, **OPTIONS[options])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_in_16_bits(dtype: Any) -> None:
    check(LAYOUTS["tokens"], arrays(dtype), reduction="none")
    check(LAYOUTS["both"], arrays(dtype))


@pytest.mark.parametrize(("layout", "reduction"), [("tokens", "none"), ("both", "mean")])
def test_outside_of_jit(layout: str, reduction: str) -> None:
    given = arrays()
    made = step_of(reduction=reduction)(*LAYOUTS[layout].put_all(*given))
    agree(made, in_f64(*given, reduction=reduction))


@pytest.mark.parametrize("layout", ["tokens", "sequences"])
def test_statistics_and_their_gradients(layout: str) -> None:
    x, w, b, t = arrays()
    names = STATISTICS[:4]
    factors = {name: random(*SHAPE, seed=i) for i, name in enumerate(names)}

    def total(x: Any, w: Any, b: Any, t: Any) -> Any:
        loss, s = linear_cross_entropy(x, w, t, linear_bias=b, return_statistics=STATISTICS)
        return loss + sum((factors[name] * getattr(s, name)).sum() for name in names), s

    step = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))
    (value, found), grads = step(*LAYOUTS[layout].put_all(x, w, b, t))
    xs = leaves(x, w, b)
    logits = reference.logits_of(*xs)  # type: ignore[arg-type]
    expected = reference.statistics(logits, to_torch(t).long(), {})
    for name in STATISTICS:
        same(getattr(found, name), expected[name])
    whole = reference.loss(logits, to_torch(t).long())
    for name in names:
        whole = whole + (to_torch(factors[name]) * expected[name]).sum()
    whole.backward()  # type: ignore[no-untyped-call]
    agree((value, grads), (whole.detach(), [leaf.grad for leaf in xs if leaf is not None]))


def test_a_split_of_the_tokens_changes_no_bit_of_theirs() -> None:
    given = arrays()

    def forward(x: Any, w: Any, b: Any, t: Any) -> Any:
        return linear_cross_entropy(x, w, t, linear_bias=b, reduction="none")

    whole, split = jax.jit(forward)(*given), jax.jit(forward)(*LAYOUTS["tokens"].put_all(*given))
    assert np.array_equal(whole, split)


@pytest.mark.parametrize("layout", ["tokens", "both"])
def test_logprob_and_entropy(layout: str) -> None:
    given = arrays()

    def total(x: Any, w: Any, b: Any, t: Any) -> Any:
        logprob, entropy = linear_logprob(x, w, t, linear_bias=b, temperature=0.7, entropy=True)
        return (logprob * random(*SHAPE)).sum() + 0.3 * entropy.sum()

    step = jax.jit(jax.value_and_grad(total, (0, 1, 2)))
    whole, wholes = step(*given)
    exact = (to_torch(whole).double(), [to_torch(g).double() for g in wholes])
    agree(step(*LAYOUTS[layout].put_all(*given)), exact)


# --- the compiled program ---


def collectives(text: str) -> dict[str, list[str]]:
    """The results' types of each kind of collective."""
    found: dict[str, list[str]] = {}
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    for types, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
        found.setdefault(kind, []).append(types)
    return found


def elements(types: str) -> int:
    """The number of elements of the largest array."""
    shapes = re.findall(r"\[([\d,]*)\]", types)
    return max(int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes)


BIG = {"shape": (8, 64), "vocab": 320}  # N 512, D 16: sizes tell arrays apart


@pytest.mark.parametrize(
    ("layout", "reduction"),
    [
        ("vocabulary", "mean"),
        ("both", "mean"),
        ("both", "none"),
        ("axes of vocabulary", "none"),
        ("sequences", "mean"),
    ],
)
def test_no_device_has_the_weight_or_the_logits(layout: str, reduction: str) -> None:
    tokens, vocab = 512, 320
    where = LAYOUTS[layout]
    text = compiled(where, arrays(**BIG), reduction=reduction).as_text()  # type: ignore[arg-type]
    assert f"[{vocab},{HIDDEN}]" not in text
    assert f"[{vocab}," not in text and f",{vocab}]" not in text
    found = collectives(text)
    # Gathered are the tokens' states and their gradients; neither a shard of the weight nor logits.
    assert max(map(elements, found["all-gather"])) <= max(tokens * HIDDEN, 3 * 4 * tokens)
    own = vocab // 4 if layout != "sequences" else vocab // 2
    weights = [types for types in found.get("all-gather", []) if f"[{own},{HIDDEN}]" in types]
    assert not weights
    assert not re.search(rf"\[{tokens},(?:{vocab}|{own})\]", text)
    summed = [t for t in found.get("all-reduce", []) if f"[{own},{HIDDEN}]" in t]
    assert len(summed) == bool(where.tokens), "grad_weight over the token axes, and only there"


@pytest.mark.parametrize("layout", ["both", "sequences"])
def test_gradients_are_sharded_as_what_they_are_of(layout: str) -> None:
    given = arrays()
    where = LAYOUTS[layout]
    placed = where.put_all(*given)
    _, grads = jax.jit(step_of())(*placed)
    for grad, x in zip(grads, placed):
        assert grad.sharding.is_equivalent_to(x.sharding, x.ndim)


def kept(text: str) -> list[bool]:
    """For each custom call, whether it has kept state."""
    return ["kept kept_rows" in names for names in re.findall(r'fields = "([^"]*)"', text)]


def per_token(layout: Layout, **sizes: Any) -> str:
    text: str = compiled(layout, arrays(**sizes), reduction="none").as_text()
    return text


def test_state_is_kept_where_tokens_alone_are_split() -> None:
    whole = 512 * 320
    for layout in (LAYOUTS["tokens"], Layout({"dp": 2, "sp": 2}, ("dp", "sp"))):
        given = arrays(**BIG)  # type: ignore[arg-type]
        program = compiled(layout, given, reduction="none")
        agree(program(*layout.put_all(*given)), in_f64(*given, reduction="none"))
        text = program.as_text()
        assert kept(text) == [True, True] and "conditional" not in text
        assert f"[{whole // 4 // 64},64]" in text, "a device keeps that of its own tokens"
        assert all(elements(t) < whole // 4 for of in collectives(text).values() for t in of)
    assert kept(per_token(LAYOUTS["replicated"], **BIG)) == [True, True]
    assert kept(per_token(LAYOUTS["tokens"], shape=(8, 24), vocab=320)) == [False, False]


def calls(text: str) -> list[str]:
    return re.findall(r'fields = "([^"]*)"', text)


WHOLE = {"shape": (8, 64), "vocab": 768}  # blocks of 64 columns, which the axes divide


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "layout", ["vocabulary", "both", "axes of vocabulary", "axes of tokens", "sequences"]
)
def test_state_is_kept_where_the_vocabulary_is_split(layout: str, dtype: Any) -> None:
    where, given = LAYOUTS[layout], arrays(dtype, **WHOLE)  # type: ignore[arg-type]
    scale, options = 3 * random(8, 64, seed=8), {"reduction": "none"}
    program = compiled(where, given, scale, **options)
    made = program(*where.put_all(*given))
    alike(made)
    agree(made, in_f64(*given, scale, **options), dtype)
    text = program.as_text()
    assert products(calls(text)) == 3 and kept(text) == [False, True, False, True]
    assert "conditional" not in text
    parts = int(np.prod([*where.mesh.values()]))  # each axis splits tokens or the vocabulary
    rows = 512 * 768 // parts // 64
    assert f"[{rows},64]" in text, "a device keeps that of its own"
    assert not re.search(rf"\[{rows},64\]\S* copy\(", text)
    exchanged = [types for of in collectives(text).values() for types in of]
    own = where.own(768)
    assert f"[768,{HIDDEN}]" not in text
    assert not [types for types in exchanged if re.search(rf"\[\d+,{own},{HIDDEN}\]", types)]
    assert all(elements(types) <= 512 * HIDDEN for types in exchanged), "no kept state"


@pytest.mark.parametrize(("vocab", "blocks"), [(768, 3), (320, None)])
def test_outside_of_jit_a_device_keeps_its_own(vocab: int, blocks: int | None) -> None:
    given, up = arrays(shape=(8, 64), vocab=vocab), random(8, 64)
    x, w, b, t = LAYOUTS["both"].put_all(*given)

    def loss(x: Any, w: Any, b: Any) -> Any:
        return linear_cross_entropy(x, w, t, linear_bias=b, reduction="none")

    value, pull = jax.vjp(loss, x, w, b)
    agree(((value * up).sum(), pull(up)), in_f64(*given, up, reduction="none"))
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.shape[-1:] == (64,) and leaf.ndim == 4]
    shapes = [shard.data.shape for leaf in kept for shard in leaf.addressable_shards]
    assert shapes == ([(4, 64, blocks, 64)] * 8 if blocks else [])


def test_state_of_tokens_that_fill_no_block_is_kept() -> None:
    given = arrays(shape=(8, 9), vocab=768)
    check(LAYOUTS["vocabulary"], given, random(8, 9), reduction="none")
    text = per_token(LAYOUTS["vocabulary"], shape=(8, 9), vocab=768)
    assert products(calls(text)) == 3 and kept(text) == [False, True, False, True]
    assert not [t for of in collectives(text).values() for t in of if ",64]" in t]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["vocabulary", "both"])
def test_a_mean_keeps_state_of_any_split_vocabulary(layout: str) -> None:
    """Loss and gradients are computed together, so no kept state leaves the program."""
    for dtype, shape, vocab in ((jnp.float32, (8, 9), 300), (jnp.bfloat16, (8, 64), 768)):
        given = arrays(dtype, shape, vocab)
        check(LAYOUTS[layout], given)
        text = compiled(LAYOUTS[layout], given).as_text()
        assert products(calls(text)) == 3 and kept(text) == [False, True, False, True]
        text = compiled(LAYOUTS[layout], given, memory="64MiB").as_text()
        assert products(calls(text)) == 4 and kept(text) == [False, False, False]


@pytest.mark.slow
def test_where_nothing_is_kept_of_a_split_vocabulary() -> None:
    """Without kept state there are four products: blocks that the axes do not divide, a number of
    tokens per device that 64 does not divide, f16, a softcap in bf16, `memory`."""
    tp, both = LAYOUTS["vocabulary"], LAYOUTS["both"]
    cases: tuple[tuple[Layout, Any, dict[str, Any]], ...] = (
        (tp, arrays(shape=(8, 64), vocab=320), {}),  # 5 blocks
        (tp, arrays(shape=(8, 64), vocab=384), {}),  # 6 blocks, which 2 devices could divide
        (LAYOUTS["axes of vocabulary"], arrays(shape=(8, 64), vocab=384), {}),
        (tp, arrays(shape=(8, 64), vocab=528), {}),  # not whole blocks
        (both, arrays(shape=(8, 24), vocab=768), {}),  # 96 tokens per device
        (Layout({"tp": 3}, (), "tp"), arrays(shape=(8, 64), vocab=384), {}),  # of 8 devices
        (tp, arrays(jnp.float16, (8, 64), 768), {}),
        (tp, arrays(jnp.bfloat16, (8, 64), 768), {"softcap": 3.0}),
        (tp, arrays(shape=(8, 64), vocab=768), {"memory": "64MiB"}),
    )
    for layout, given, options in cases:
        program = compiled(layout, given, reduction="none", **options)
        options.pop("memory", None)
        expected = in_f64(*given, reduction="none", **options)
        agree(program(*layout.put_all(*given)), expected, given[0].dtype.type)
        text, vocab = program.as_text(), given[1].shape[0]
        assert products(calls(text)) == 4 and kept(text) == [False] * 3
        assert not re.search(r"\[(?:\d+,)*(?:\d+),64\][^ ]* (?:broadcast|constant)", text)
        assert f"[{vocab},{HIDDEN}]" not in text, "nor is the weight whole anywhere"
        own = layout.own(vocab)
        part = rf"\[(?:\d+,)?(?:{own}|{2 * own}),{HIDDEN}\]"
        assert not re.search(part, str(collectives(text).get("all-gather")))
    assert products(calls(per_token(LAYOUTS["axes of tokens"], shape=(8, 64), vocab=384))) == 3


def pulled(given: Any, up: Any, layout: Layout) -> tuple[Any, Any, Any]:
    """The leaves of a vjp function, made under jit from a layout's arrays; a function from them to
    gradients; and the gradients of one device."""
    x, w, b, t = given

    def forward(x: Any, w: Any) -> Any:
        return jax.vjp(lambda x, w: linear_cross_entropy(x, w, t, reduction="none"), x, w)

    _, pull = jax.jit(forward)(*layout.put_all(x, w, b, t)[:2])
    held, tree = jax.tree.flatten(pull)
    return held, lambda held, up: jax.tree.unflatten(tree, held)(up), forward(x, w)[1](up)


SPLITS = ["tokens", "vocabulary", "both", "replicated"]


@pytest.mark.parametrize("made_by", SPLITS[:3])
@pytest.mark.parametrize("other", SPLITS)
def test_kept_state_of_another_split_is_not_used(other: str, made_by: str) -> None:
    given, up = arrays(shape=(512,), vocab=256), random(512)
    held, pull, expected = pulled(given, up, LAYOUTS[made_by])
    assert [h.shape for h in held if h.ndim == 3] == [(512, 4, 64), (512, 4, 8)]
    layout = LAYOUTS[other]
    spec = {512: P(*layout.tokens), 256: P(layout.vocab)}
    moved = [layout.put(np.asarray(h), *(spec[h.shape[0]] if h.ndim == 2 else ())) for h in held]
    if other == made_by:
        moved = held
    program = jax.jit(pull).lower(moved, up).compile()
    for mine, theirs in zip(program(moved, up), expected):
        same(mine, to_torch(theirs).double())
    assert "conditional" in program.as_text()
    if other == made_by:  # with equal layouts Backward reads the kept state
        emptied = [0 * h if h.shape[-1:] == (64,) else h for h in moved]
        assert any(np.abs(a - b).max() > 0.1 for a, b in zip(pull(emptied, up), expected))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_device_has_the_calls_of_old(reduction: str) -> None:
    """Several devices that each have all arrays run the same calls and exchange nothing."""
    given = arrays()
    step = jax.jit(step_of(reduction=reduction))
    one = step.lower(*given).compile().as_text()
    many = compiled(LAYOUTS["replicated"], given, reduction=reduction).as_text()
    state = "row_reference row_log_sum"
    expected = {
        "mean": ["input weight bias target loss grad_input grad_weight grad_bias -"],
        "none": [
            f"input weight bias target loss {state} -",
            f"input weight bias target {state} grad_loss grad_input grad_weight grad_bias -",
        ],
    }
    assert calls(one) == calls(many)
    assert len(calls(one)) == len(expected[reduction])
    assert not collectives(many) and "conditional" not in many and "conditional" not in one


# --- sizes, targets and transforms ---


def test_sizes_that_the_axes_do_not_divide() -> None:
    """Ignored tokens pad the tokens; such a vocabulary is not split but whole on every device."""
    layout = Layout({"dp": 4, "tp": 2}, ("dp",), "tp")
    t_rows = layout.put(jnp.zeros(16), "dp").sharding
    x, w, b, t = arrays(shape=(16,), vocab=48)
    cases: tuple[tuple[int, int, dict[str, Any]], ...] = (
        (13, 48, {}), (13, 48, {"reduction": "none"}), (16, 45, {"weight": random(45)}),
        (5, 47, {"reduction": "sum"}),
    )  # fmt: skip
    for tokens, vocab, options in cases:
        t_own = jnp.where(t < vocab, t, 3)

        def step(x: Any, w: Any, b: Any, t: Any) -> Any:
            rows = jax.lax.with_sharding_constraint(x[:tokens], t_rows)  # noqa: B023
            columns = w[:vocab], b[:vocab]  # noqa: B023
            return step_of(**options)(rows, *columns, t[:tokens])  # noqa: B023

        made = jax.jit(step)(*layout.put_all(x, w, b, t_own))
        agree(made, in_f64(x[:tokens], w[:vocab], b[:vocab], t_own[:tokens], **options))


def test_tokens_that_do_not_count() -> None:
    x, w, b, t = arrays()
    one = jnp.where(jnp.arange(BATCH)[:, None] < 2, t, -100)  # none on the last devices
    check(LAYOUTS["tokens"], (x, w, b, one), weight=random(VOCAB), label_smoothing=0.1)
    check(LAYOUTS["both"], (x, w, b, jnp.where(t == -100, 5, t)), ignore_index=5)
    none = jnp.full_like(t, -100)
    for layout, empty in (("tokens", "zero"), ("both", "nan")):
        step = jax.jit(step_of(empty_mean=empty))
        value, grads = step(*LAYOUTS[layout].put_all(x, w, b, none))
        assert value == 0 if empty == "zero" else np.isnan(value)
        assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("layout", ["tokens", "vocabulary", "both"])
def test_a_wrong_target_is_an_error_of_every_device(layout: str) -> None:
    """No device waits for one that has failed."""
    x, w, b, t = arrays()
    t = t.at[7, 3].set(VOCAB)
    for reduction in ("mean", "none"):
        step = jax.jit(step_of(reduction=reduction))
        with pytest.raises(
            Exception, match=rf"target\[\d+\] is {VOCAB}; allowed: 0 to {VOCAB - 1}"
        ):
            jax.block_until_ready(step(*LAYOUTS[layout].put_all(x, w, b, t)))


def test_transforms() -> None:
    """vmap in a gradient and around it, and jax.checkpoint in a loop."""
    given = arrays()
    placed = LAYOUTS["both"].put_all(*given)
    each = [in_f64(*(a[i] if a.ndim == n else a for a, n in zip(given, (3, 0, 0, 2))), 1.0)
            for i in range(BATCH)]  # fmt: skip
    rows = torch.stack([grads[0] for _, grads in each])

    def one(x: Any, w: Any, b: Any, t: Any) -> Any:
        return linear_cross_entropy(x, w, t, linear_bias=b)

    def mapped(*given: Any) -> Any:
        return jax.vmap(one, (0, None, None, 0))(*given).sum()

    def looped(x: Any, w: Any, b: Any, t: Any) -> Any:
        def body(total: Any, given: Any) -> Any:
            return total + jax.checkpoint(mapped)(given[0], w, b, given[1]), None

        return jax.lax.scan(body, jnp.float32(0), (x[None], t[None]))[0]

    total = sum(value for value, _ in each)
    sums = [sum(grads[i] for _, grads in each) for i in (1, 2)]
    for fn in (mapped, looped):
        agree(jax.jit(jax.value_and_grad(fn, (0, 1, 2)))(*placed), (total, [rows, *sums]))
    around = jax.vmap(jax.value_and_grad(one, (0, 1, 2)), (0, None, None, 0))
    stacked = [torch.stack([grads[i] for _, grads in each]) for i in (1, 2)]
    values = torch.stack([value for value, _ in each])
    agree(jax.jit(around)(*placed), (values, [rows, *stacked]))


def test_an_axis_of_both_tokens_and_weight() -> None:
    """As under FSDP: XLA gathers one of the two arrays, and a hidden dimension that is split."""
    given = arrays()
    check(Layout({"dp": 2, "tp": 2}, ("dp",), ("dp", "tp")), given)
    x, w, b, t = given
    layout = LAYOUTS["both"]
    placed = (layout.put(x, "dp", None, "tp"), layout.put(w, None, "tp"), b, t)
    agree(jax.jit(step_of())(*placed), in_f64(x, w, b, t))


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="an older JAX")
def test_a_mesh_of_explicit_axes() -> None:
    x, w, b, t = arrays()
    mesh = host_mesh((2, 4), ("dp", "tp"))
    put = lambda a, *spec: jax.device_put(a, jax.sharding.NamedSharding(mesh, P(*spec)))  # noqa: E731
    for options in ({"shift": True}, {"reduction": "none"}):
        step = jax.jit(step_of(**options))
        value, grads = step(x, w, b, t)
        exact = (to_torch(value).double(), [to_torch(g).double() for g in grads])
        with jax.set_mesh(mesh):
            agree(step(put(x, "dp"), put(w, "tp"), put(b, "tp"), put(t, "dp")), exact)


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="an older JAX")
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "of",
    [
        ((), (), (), ("dp",)),  # only the target
        ((), ("dp",), (), ()),
        ((), (None, "tp"), (), ()),
        (("dp",), (), ("tp",), ()),
        (("dp",), ("dp",), (), ("dp",)),  # the tokens' axis splits the weight too
        ((None, None, "tp"), ("dp", "tp"), ("dp",), ()),
    ],
    ids=str,
)
def test_a_gradient_has_its_own_sharding_on_explicit_axes(
    of: Any, reduction: str, jitted: bool
) -> None:
    """A gradient is sharded as its array, whatever the shardings of the other arrays."""
    given = arrays()
    mesh = host_mesh((2, 2), ("dp", "tp"))
    step = step_of(reduction=reduction)
    value, grads = step(*given)
    exact = (to_torch(value).double(), [to_torch(g).double() for g in grads])
    with jax.set_mesh(mesh):
        put = [
            jax.device_put(a, jax.sharding.NamedSharding(mesh, P(*s))) for a, s in zip(given, of)
        ]
        made = (jax.jit(step) if jitted else step)(*put)
        agree(made, exact)
    for gradient, primal in zip(made[1], put):
        assert gradient.sharding.is_equivalent_to(primal.sharding, gradient.ndim)


OF_TOKENS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": random(BATCH, 8, seed=3), "reduction": "none"},
    "of a sequence": {"temperature": random(BATCH, 1, seed=3)},
    "of a place": {"temperature": random(8, seed=3)},
    "flat": {"temperature": random(BATCH * 8, seed=3)},
    "of all": {"temperature": random(seed=3)},
    "weights": {"token_weight": random(BATCH, 8), "weight": random(VOCAB), "normalizer": 5.0},
    "host's": {"token_weight": np.asarray(random(BATCH, 8)), "reduction": "sum"},
}


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="an older JAX")
@pytest.mark.parametrize(
    ("name", "types", "spec"),
    [
        *((name, "Explicit", (None, "dp")) for name in OF_TOKENS),
        *(("weights", "Explicit", spec) for spec in (("tp", "dp"), (("dp", "tp"),))),
        ("weights", "Auto", ("tp", "dp")),
        ("of a sequence", "Auto", (None, "dp")),
    ],
    ids=str,
)
def test_what_belongs_to_a_label_moves_along_a_split_sequence(
    name: str, types: str, spec: Any
) -> None:
    x, w, b, t = arrays(shape=(BATCH, 8))
    mesh = host_mesh((2, 2), ("dp", "tp"), types)
    put = lambda a, *spec: jax.device_put(a, jax.sharding.NamedSharding(mesh, P(*spec)))  # noqa: E731
    options = {"shift": True, **OF_TOKENS[name]}
    axes = {(BATCH, 8): spec, (BATCH, 1): spec[:1], (8,): spec[1:], (BATCH * 8,): ("dp",)}
    placed = {
        n: put(o, *axes.get(o.shape, ())) if isinstance(o, jax.Array) else o
        for n, o in options.items()
    }
    given = put(x, *spec), put(w), put(b), put(t, *spec)
    made = jax.jit(step_of(**options))(x, w, b, t)
    exact = (to_torch(made[0]).double(), [to_torch(g).double() for g in made[1]])
    context = jax.set_mesh(mesh) if types == "Explicit" else contextlib.nullcontext()
    with context:  # JAX needs it outside of jit
        for step in (step_of(**placed), jax.jit(step_of(**placed))):
            agree(step(*given), exact)


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="an older JAX")
@pytest.mark.parametrize("length", [1, 2])
def test_a_shift_of_short_sequences_on_explicit_axes(length: int) -> None:
    """Targets are an argument of the program, then constants in it."""
    x, w, b, t = arrays(shape=(BATCH, length))
    mesh = host_mesh((2, 2), ("dp", "tp"))
    put = lambda a, *spec: jax.device_put(a, jax.sharding.NamedSharding(mesh, P(*spec)))  # noqa: E731
    value, grads = step_of(shift=True)(x, w, b, t)
    exact = (to_torch(value).double(), [to_torch(g).double() for g in grads])
    spec = ("dp",) if length == 1 else ("dp", "tp")
    given = put(x, *spec), put(w), put(b)
    own = put(t, *spec)
    with jax.set_mesh(mesh):
        agree(jax.jit(step_of(shift=True))(*given, own), exact)
        agree(jax.jit(lambda *given: step_of(shift=True)(*given, own))(*given), exact)
        agree(step_of(shift=True)(*given, own), exact)


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="an older JAX")
@pytest.mark.parametrize("jitted", [False, True])
def test_given_logits_on_a_mesh_of_explicit_axes(jitted: bool) -> None:
    """The gradient is sharded as the logits are."""
    x, w, _, t = arrays()
    mesh = host_mesh((2, 2), ("dp", "tp"))
    put = lambda a, *spec: jax.device_put(a, jax.sharding.NamedSharding(mesh, P(*spec)))  # noqa: E731

    def loss(z: Any, t: Any, c: Any) -> Any:
        per_token = cross_entropy(z, t, reduction="none", temperature=c, token_weight=c)
        return (per_token * c).sum()

    z, c = x @ w.T, random(*SHAPE)
    step = jax.value_and_grad(loss)
    value, gradient = step(z, t, c)
    with jax.set_mesh(mesh):
        given = put(z, "dp", None, "tp"), put(t, "dp"), put(c, "dp", "tp")
        made = (jax.jit(step) if jitted else step)(*given)
        softmaxed = softmax(given[0])
    same(made[0], to_torch(value).double())
    same(made[1], to_torch(gradient).double())
    assert made[1].sharding.is_equivalent_to(given[0].sharding, 3)
    same(softmaxed, to_torch(z).double().softmax(-1))


def test_what_cannot_be_served_is_refused() -> None:
    x, w, _, t = LAYOUTS["both"].put_all(*arrays())
    for name in ("rank", "mass_above"):
        with pytest.raises(Exception, match=f"'{name}', and linear_weight is split over the mesh"):
            jax.jit(lambda x, w, name=name: linear_cross_entropy(x, w, t, return_statistics=name))(
                x, w
            )
    with pytest.raises(Exception, match="memory is 100 bytes; allowed: >= "):
        jax.jit(lambda x, w: linear_cross_entropy(x, w, t, memory=100))(x, w)
    x, w, _, t = LAYOUTS["tokens"].put_all(*arrays())
    found = jax.jit(lambda x, w: linear_cross_entropy(x, w, t, return_statistics="rank"))(x, w)
    whole = linear_cross_entropy(*arrays()[:2], arrays()[3], return_statistics="rank")
    assert np.array_equal(found[1].rank, whole[1].rank)


# --- mutants: known bugs ---


class Mutant(NamedTuple):
    where: Any
    name: str
    make: Callable[[Any], Any]
    layout: str
    options: dict[str, Any]


MUTANTS = {
    "grad_weight of a device's own tokens": Mutant(
        _partition, "_sum_of_gradients", lambda real: lambda x, split: x, "both", {}
    ),
    "normalizer of a device's own tokens": Mutant(
        _partition, "_counted", lambda real: lambda operands, split, options: operands,
        "tokens", {},
    ),
    "loss of a device's own tokens": Mutant(
        _partition, "_sum_of_scalars", lambda real: lambda x, split: x, "tokens",
        {"reduction": "sum"},
    ),
    "grad_input reduced twice": Mutant(
        _parallel, "_summed",
        lambda real: lambda part, shard, dtype: jax.lax.psum(real(part, shard, dtype), shard.axes),
        "vocabulary", {},
    ),
    "grad_input not reduced": Mutant(
        _parallel, "_summed", lambda real: lambda part, shard, dtype: part.astype(dtype),
        "both", {},
    ),
    "grad_weight summed over the vocabulary": Mutant(
        _partition, "_sum_of_gradients",
        lambda real: lambda x, split: jax.lax.psum(x, (*split.token_axes, *split.vocab_axes)),
        "both", {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_bug_makes_a_check_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, make, layout, options = MUTANTS[name]
    monkeypatch.setattr(where, attribute, make(getattr(where, attribute)))
    with pytest.raises(AssertionError):
        check(LAYOUTS[layout], arrays(), **options)


def test_padding_that_counts_and_foreign_state_make_a_check_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(_partition, "_padded", lambda target, split, options: target)
        with pytest.raises(AssertionError):
            test_sizes_that_the_axes_do_not_divide()
    real = _partition._with_kept

    def trusting(parts: Any, operands: Any, made: Any) -> Any:
        if _partition._PARTS in operands and parts is not None:
            operands = operands | {_partition._PARTS: jnp.array(parts, jnp.int32)}
        return real(parts, operands, made)

    monkeypatch.setattr(_partition, "_with_kept", trusting)
    for other, made_by in (("replicated", "tokens"), ("both", "vocabulary")):
        with pytest.raises(AssertionError):
            test_kept_state_of_another_split_is_not_used(other, made_by)

# SPDX-License-Identifier: Apache-2.0
"""vocab_ids of logitless.jax: the bits of the same call on the listed rows given by hand, eager and
under jit; other rows' gradients; errors where the host can read a list, NaN where it cannot."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_support import platform, problem, to_jax  # noqa: F401
from logitless import jax as logitless_jax
from logitless.jax import (
    _vocabulary,
    linear_cross_entropy,
    linear_divergence,
    linear_logprob,
    linear_logprobs_at,
)
from test_jax_devices import mesh_of
from test_vocab_ids import VOCAB, in_list, list_of, targets_of

P = jax.sharding.PartitionSpec
JITTED = pytest.mark.parametrize("jitted", [False, True])
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "softcap": {"softcap": 2.0, "logit_scale": 0.7, "temperature": 0.8},
    "smoothing": {"label_smoothing": 0.1, "z_loss": 0.01, "weight": VOCAB, "reduction": "sum"},
    "shift": {"shift": True, "token_weight": (3, 11)},
}


def given(dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """Input, weight, bias, list and target; the sorted list, and the target's places in it."""
    x, w, b, _ = problem((3, 11), VOCAB, 16, dtype, bias=True)
    ids = list_of()
    t = targets_of(ids, (3, 11))
    ordered = to_jax(ids.sort().values.int())
    return x, w, b, to_jax(ids.int()), to_jax(t.int()), ordered, to_jax(in_list(t, ids).int())


def same(ours: Any, theirs: Any) -> None:
    for mine, of in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert mine.dtype == of.dtype and mine.shape == of.shape
        assert np.asarray(mine).tobytes() == np.asarray(of).tobytes()


def spread(grads: Any, ordered: Any) -> Any:
    """The gradients of the whole vocabulary: those of the listed rows, and 0 at other rows."""
    return [
        grads[0], *(jnp.zeros((VOCAB, *g.shape[1:]), g.dtype).at[ordered].set(g) for g in grads[1:])
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@JITTED
def test_it_has_the_bits_of_the_same_rows_by_hand(dtype: Any, name: str, jitted: bool) -> None:
    x, w, b, ids, t, ordered, places = given(dtype)
    options = dict(OPTIONS[name])
    if "token_weight" in options:
        options["token_weight"] = to_jax(0.5 + torch.rand(3, 11))
    by_hand = dict(options)
    if "weight" in options:
        options["weight"] = to_jax(0.5 + torch.rand(VOCAB))
        by_hand["weight"] = options["weight"][ordered]

    def loss(x: Any, w: Any, b: Any, t: Any, ids: Any, options: Any) -> Any:
        value, s = linear_cross_entropy(
            x, w, t, linear_bias=b, return_statistics=("lse", "argmax"), vocab_ids=ids, **options
        )
        return value, s

    def graded(options: Any) -> Any:
        call = jax.value_and_grad(lambda *a: loss(*a, options), argnums=(0, 1, 2), has_aux=True)
        return jax.jit(call) if jitted else call

    (value, s), grads = graded(by_hand)(x, w[ordered], b[ordered], places, None)
    s = s._replace(argmax=jnp.where(s.argmax < 0, s.argmax, ordered[s.argmax]))
    for order in (ids, ids[::-1]):
        made = graded(options)(x, w, b, t, order)
        same(made, ((value, s), tuple(spread(grads, ordered))))


@JITTED
def test_other_functions_take_it(jitted: bool) -> None:
    x, w, _, ids, t, ordered, places = given()
    wrap: Any = jax.jit if jitted else lambda f: f
    made = wrap(lambda *a: linear_logprob(*a[:3], vocab_ids=a[3], entropy=True))(x, w, t, ids)
    same(made, wrap(lambda *a: linear_logprob(*a, entropy=True))(x, w[ordered], places))
    for columns in (1, 3):
        chosen, by_hand = (jnp.stack([v] * columns, -1) for v in (t, places))
        chosen, by_hand = (jnp.where(v < 0, -1, v) for v in (chosen, by_hand))
        ours = wrap(
            lambda x, w, c, i: linear_logprobs_at(
                x, w, c, vocab_ids=i, return_statistics=("lse", "argmax")
            )
        )(x, w, chosen, ids)
        theirs, s = wrap(
            lambda x, w, c: linear_logprobs_at(x, w, c, return_statistics=("lse", "argmax"))
        )(x, w[ordered], by_hand)
        s = s._replace(argmax=jnp.where(s.argmax < 0, s.argmax, ordered[s.argmax]))
        same(ours, (theirs, s))


@pytest.mark.parametrize("logits", [False, True])
@JITTED
def test_divergences_of_both_heads_and_of_the_teachers(logits: bool, jitted: bool) -> None:
    x, w, _, ids, t, ordered, places = given()
    wrap: Any = jax.jit if jitted else lambda f: f
    teacher, head = to_jax(torch.randn(3, 11, 8)), to_jax(torch.randn(VOCAB, 8))
    options: dict[str, Any] = {"kind": "tv", "label_weight": 0.3}

    def rows(chosen: Any) -> dict[str, Any]:
        if logits:
            return {"teacher_logits": (teacher @ head.T)[..., chosen]}
        return {"teacher_input": teacher, "teacher_weight": head[chosen]}

    def call(x: Any, w: Any, of: Any, t: Any, more: Any) -> Any:
        return linear_divergence(x, w, target=t, **of, **more, **options)

    def graded(*a: Any) -> Any:
        return wrap(jax.value_and_grad(call, (0, 1)))(*a)

    value, grads = graded(x, w[ordered], rows(ordered), places, {})
    made = graded(x, w, rows(jnp.arange(VOCAB)), t, {"vocab_ids": ids})
    same(made, (value, tuple(spread(grads, ordered))))
    draft, at = w[: len(ids)], jnp.argsort(ids)[jnp.maximum(places, 0)]
    paired = jnp.where(places < 0, -100, at)
    made = graded(x, draft, rows(jnp.arange(VOCAB)), t, {"teacher_vocab_ids": ids})
    same(made, graded(x, draft, rows(ids), paired, {}))


def test_a_head_that_is_sharded_over_devices() -> None:
    x, w, _, ids, t, _, _ = given()
    mesh = mesh_of(vocab=8)
    plain = linear_cross_entropy(x, w, t, vocab_ids=ids)
    pad = jnp.concatenate([w, jnp.zeros((-VOCAB % 8, 16))])
    split = jax.device_put(pad, jax.sharding.NamedSharding(mesh, P("vocab")))
    made = jax.jit(lambda x, w: linear_cross_entropy(x, w, t, vocab_ids=ids))(x, split)
    np.testing.assert_allclose(made, plain, rtol=1e-6)


def wrong_lists() -> dict[str, tuple[Any, str]]:
    return {
        "beyond": ([7, 2, 41, 11], r"vocab_ids\[2\] is 41; allowed: 0 to 40, each once"),
        "negative": ([7, -1, 30, 11], r"vocab_ids\[1\] is -1; allowed: 0 to 40, each once"),
        "twice": ([7, 2, 30, 2], r"vocab_ids\[3\] is 2, as vocab_ids\[1\] is; allowed: each id on"),
    }


@pytest.mark.parametrize("name", wrong_lists())
def test_a_wrong_list_is_named_where_it_can_be_looked_at(name: str, platform: str) -> None:  # noqa: F811
    x, w, b, _, _, _, _ = given()
    ids, message = wrong_lists()[name]
    t = jnp.full((3, 11), 7, jnp.int32)
    lists: list[Any] = [np.array(ids), np.array(ids, np.int32)]
    if platform == "cpu":
        lists.append(jnp.array(ids))
    for one in lists:
        with pytest.raises(ValueError, match=f"^{message}"):
            linear_cross_entropy(x, w, t, vocab_ids=one)
        with pytest.raises(ValueError, match=f"^{message}"):
            jax.jit(functools.partial(linear_logprob, linear_weight=w, target=t, vocab_ids=one))(x)
    call = jax.value_and_grad(
        lambda x, w, b, i: linear_logprob(x, w, t, linear_bias=b, vocab_ids=i).sum(), (0, 1, 2)
    )
    value, grads = jax.jit(call)(x, w, b, jnp.array(ids))
    assert np.isnan(value) and np.isnan(grads[0]).all()
    assert np.isnan(grads[1][jnp.clip(jnp.array(ids), 0, 40)]).all()


@pytest.mark.parametrize("value", [8, 0, -5, VOCAB])
def test_a_target_that_is_not_listed_has_the_callers_index(value: int, platform: str) -> None:  # noqa: F811
    x, w, _, _, _, _, _ = given()
    ids = np.array([7, 2, 30, 11])
    t = np.full((3, 11), 7)
    t[1, 3] = value
    said = f"is {value}, which is not in vocab_ids; allowed: an id of the list, or "
    targets: list[Any] = [t, jnp.asarray(t)] if platform == "cpu" else [t]
    for one in targets:
        with pytest.raises(ValueError, match=rf"^target\[1, 3\] \(flat: target\[14\]\) {said}ign"):
            linear_cross_entropy(x, w, one, vocab_ids=ids)
        with pytest.raises(ValueError, match=rf"^ids\[1, 3, 0\] \(flat: ids\[14, 0\]\) {said}-1"):
            linear_logprobs_at(x, w, one[..., None], vocab_ids=ids)
    t[1, 3], t[:, 0] = 7, value
    linear_cross_entropy(x, w, t, vocab_ids=ids, shift=True)


def test_of_what_is_traced_a_target_that_is_not_listed_lies_beyond_the_list() -> None:
    listed = _vocabulary.Listed("vocab_ids", jnp.array([7, 2, 30, 11]), None, VOCAB)
    target = jnp.array([7, 8, -100, 41, 30])
    assert listed.places(target, -100).tolist() == [1, 4, -1, 4, 3]


def test_what_does_not_go_with_it() -> None:
    x, w, b, ids, t, _, _ = given()
    for more, message in (
        ({"axis_name": "v"}, r"axis_name is 'v'; allowed with vocab_ids: None"),
        ({"vocab_ids": ids[None]}, r"vocab_ids has shape \(1, 13\); allowed: \(V',\), of 1 to 41"),
        ({"vocab_ids": ids[:0]}, r"vocab_ids has shape \(0,\); allowed: \(V',\), of 1 to 41 ids"),
        ({"linear_bias": b[:-1]}, r"linear_bias has shape \(40,\); allowed: 41 in its first dim"),
        ({"weight": jnp.ones(3)}, r"weight has shape \(3,\); allowed: 41 in its first dimension"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=f"^{message}"):
            linear_cross_entropy(x, w, t, **{"vocab_ids": ids, **more})
    with pytest.raises(TypeError, match=r"^vocab_ids is float32; allowed: int32, int64"):
        linear_cross_entropy(x, w, t, vocab_ids=ids.astype(jnp.float32))
    teacher: Any = {"teacher_input": x, "teacher_weight": w}
    for more, message in (
        ({"vocab_ids": ids, "teacher_vocab_ids": ids}, "vocab_ids and teacher_vocab_ids are both"),
        ({"teacher_vocab_ids": ids}, r"teacher_vocab_ids has shape \(13,\); allowed: \(41,\), an "),
        ({"vocab_ids": ids, "teacher_bias": b[1:]}, r"teacher_bias has shape \(40,\); allowed: 41"),
        ({"vocab_ids": ids, "axis_name": "v"}, "axis_name is 'v'; allowed with vocab_ids: None"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=f"^{message}"):
            linear_divergence(x, w, **teacher, **more)
    with pytest.raises(ValueError, match=r"^teacher_vocab_ids is given without a teacher"):
        linear_divergence(x, w[:13], teacher_vocab_ids=ids)
    for head, shape in ((w[0, 0], r"\(\)"), (w[:, 0], r"\(41,\)")):
        for name, heads in (("teacher_weight", (w[:13], x, head)), ("linear_weight", (head, x, w))):
            with pytest.raises(ValueError, match=rf"^{name} has shape {shape}; allowed: \[V, D\]$"):
                linear_divergence(x, *heads, teacher_vocab_ids=ids)
    whole = jnp.ones(w.shape, jnp.int32)
    with pytest.raises(TypeError, match=r"^linear_weight is int32; allowed: float32, float16"):
        linear_cross_entropy(x, whole, t, vocab_ids=ids)


def _unordered(self: Any, name: str, ids: Any, *rest: Any) -> None:
    _made(self, name, ids, *rest)
    self.ordered = self.rows = ids


_made = _vocabulary.Listed.__init__


@pytest.mark.parametrize(
    ("function", "mutant"),
    [
        ("__init__", _unordered),
        ("whole", lambda self, places: places),
        ("places", lambda self, target, ignored: target % 13),
    ],
)  # fmt: skip
def test_a_known_bug_makes_a_check_fail(function: str, mutant: Any) -> None:
    def check() -> None:
        test_it_has_the_bits_of_the_same_rows_by_hand(jnp.float32, "nothing", False)

    check()
    with (
        mock.patch.object(_vocabulary.Listed, function, mutant),
        pytest.raises(BaseException),  # noqa: B017
    ):
        check()


def test_it_is_of_every_linear_function() -> None:
    import inspect

    for name in logitless_jax.__all__:
        function = getattr(logitless_jax, name)
        if name.startswith("linear_"):
            assert "vocab_ids" in inspect.signature(function).parameters

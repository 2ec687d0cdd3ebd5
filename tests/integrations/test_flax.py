# SPDX-License-Identifier: Apache-2.0
"""flax's nnx and optax, with the loss of logitless.jax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import support
from logitless import jax as ours_of_jax
from logitless.jax import linear_cross_entropy
from support import STEPS, same_run

TOKENS = 4 * (support.LENGTH - 1)


class Model(nnx.Module):
    """Mixes each token's embedding with that of the token before; its head may be tied."""

    def __init__(self, tied: bool, dtype: Any, rngs: nnx.Rngs) -> None:
        sizes = {"dtype": dtype, "rngs": rngs}
        self.embed = nnx.Embed(support.VOCAB, support.HIDDEN, **sizes)
        self.mix = nnx.Linear(2 * support.HIDDEN, support.HIDDEN, **sizes)
        if not tied:
            self.head = nnx.Linear(support.HIDDEN, support.VOCAB, use_bias=False, **sizes)
        self.tied = tied
        self.dtype = dtype

    def hidden(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return jnp.tanh(self.mix(jnp.concatenate((x, before), -1)))

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self.embed.attend(hidden) if self.tied else self.head(hidden)

    def weight(self) -> jax.Array:
        """[V, D]; nnx.Linear keeps [D, V]."""
        made = self.embed.embedding[...] if self.tied else self.head.kernel[...].T
        return made.astype(self.dtype)


def plain(model: Model, ids: jax.Array, labels: jax.Array) -> jax.Array:
    logits = model.logits(model.hidden(ids))[:, :-1].astype(jnp.float32)
    target = labels[:, 1:]
    valid = target != -100
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, target.clip(0))
    return (losses * valid).sum() / valid.sum()


def ours(model: Model, ids: jax.Array, labels: jax.Array) -> jax.Array:
    return linear_cross_entropy(model.hidden(ids), model.weight(), labels, shift=True)


def train(loss: Any, tied: bool, dtype: Any) -> tuple[list[float], Any, int]:
    """The losses, the parameters in the end, and how often a step's program calls us."""
    model = Model(tied, dtype, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    graph, _ = nnx.split((model, optimizer))

    @jax.jit
    def step(state: Any, ids: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        model, optimizer = nnx.merge(graph, state)
        value, gradients = nnx.value_and_grad(loss)(model, ids, labels)
        optimizer.update(model, gradients)
        return value, nnx.state((model, optimizer))

    losses, text = [], ""
    state = nnx.state((model, optimizer))
    for number in range(STEPS):
        batch = {k: jnp.asarray(v.numpy()) for k, v in support.batch(number).items()}
        if not text:
            text = step.lower(state, batch["input_ids"], batch["labels"]).compile().as_text()
        value, state = step(state, batch["input_ids"], batch["labels"])
        losses.append(float(value))
    return losses, nnx.state(nnx.merge(graph, state)[0], nnx.Param), text.count("logitless_xla_run")


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_nnx_with_optax_learns_the_same_without_logits(tied: bool, dtype: Any) -> None:
    expected, own, none = train(plain, tied, dtype)
    actual, made, calls = train(ours, tied, dtype)
    bf16 = dtype == jnp.bfloat16
    assert none == 0 and calls == 1, "loss and gradients are one call of every step"
    same_run(actual, expected, bf16)
    for a, e in zip(jax.tree.leaves(made), jax.tree.leaves(own), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=3e-2 if bf16 else 2e-5)


def test_nnx_jit_of_a_module_learns_the_same() -> None:
    """flax's documentation passes modules and optimizers to nnx.jit as arguments."""
    model = Model(False, jnp.float32, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Model, optimizer: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(ours)(model, ids, labels)
        optimizer.update(model, gradients)
        return value

    losses = []
    for number in range(STEPS):
        batch = support.batch(number)
        value = step(model, optimizer, *(jnp.asarray(batch[k].numpy()) for k in batch))
        losses.append(float(value))
    same_run(losses, train(plain, False, jnp.float32)[0])


@pytest.mark.parametrize("transform", ["nnx", "jax"])
def test_parameters_are_taken_as_they_are(transform: str) -> None:
    """nnx.Params may be passed in place of arrays; their gradients are nnx.Params too."""
    rngs = nnx.Rngs(0)
    embed = nnx.Embed(support.VOCAB, support.HIDDEN, rngs=rngs)
    bias = nnx.Param(jax.random.normal(rngs(), (support.VOCAB,)))
    hidden = jax.random.normal(rngs(), (2, 9, support.HIDDEN))
    labels = jax.random.randint(rngs(), (2, 9), 0, support.VOCAB)

    def of_arrays(weight: Any, bias: Any) -> jax.Array:
        return linear_cross_entropy(hidden, weight, labels, linear_bias=bias, shift=True)

    value, expected = jax.value_and_grad(of_arrays, (0, 1))(embed.embedding[...], bias[...])
    if transform == "nnx":

        class Head(nnx.Module):
            def __init__(self) -> None:
                self.embed, self.bias = embed, bias

        def loss(head: Head) -> jax.Array:
            return of_arrays(head.embed.embedding, head.bias)

        made, gradients = nnx.value_and_grad(loss)(Head())
        ours = gradients["embed"]["embedding"], gradients["bias"]
    else:
        made, ours = jax.jit(jax.value_and_grad(of_arrays, (0, 1)))(embed.embedding, bias)
        assert all(isinstance(gradient, nnx.Param) for gradient in ours)
    assert made == value
    for mine, theirs in zip(ours, expected):
        np.testing.assert_allclose(mine[...], theirs, rtol=0, atol=1e-7)
    assert linear_cross_entropy(nnx.Param(hidden), embed.embedding, nnx.Param(labels)) > 0
    with pytest.raises(
        TypeError, match=r"linear_weight is a Linear; .*, as its kernel\[\.\.\.\]\.T"
    ):
        linear_cross_entropy(hidden, nnx.Linear(8, 9, rngs=rngs), labels)
    with pytest.raises(
        TypeError, match=r"linear_weight is a Embed; .*, as its embedding\[\.\.\.\]"
    ):
        linear_cross_entropy(hidden, embed, labels)


BOXES: dict[str, Any] = {
    "nnx.Param": nnx.Param,
    "nnx.Variable": nnx.Variable,
    "linen.Partitioned": lambda x: linen.Partitioned(x, names=(None,) * x.ndim),
    "linen.LogicallyPartitioned": lambda x: linen.LogicallyPartitioned(x, names=(None,) * x.ndim),
    "a box in a Param": lambda x: nnx.Param(linen.Partitioned(x, names=(None,) * x.ndim)),
}


def arrays() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "x": jax.random.normal(keys[0], (3, 5, 8)), "w": jax.random.normal(keys[1], (11, 8)),
        "b": jax.random.normal(keys[2], (11,)), "t": jax.random.randint(keys[3], (3, 5), 0, 11),
    }  # fmt: skip


FUNCTIONS: dict[str, Any] = {
    "linear_cross_entropy": lambda x, w, b, t: linear_cross_entropy(x, w, t, linear_bias=b),
    "linear_logprob": lambda x, w, b, t: ours_of_jax.linear_logprob(x, w, t, linear_bias=b),
    "linear_logprobs_at": lambda x, w, b, t: ours_of_jax.linear_logprobs_at(
        x, w, t[..., None] if isinstance(t, jax.Array) else t, linear_bias=b
    ),
    "linear_topk": lambda x, w, b, t: ours_of_jax.linear_topk(x, w, 3, linear_bias=b)[0],
    "linear_divergence": lambda x, w, b, t: ours_of_jax.linear_divergence(
        x, w, x, w, linear_bias=b, teacher_temperature=2.0
    ),
    "cross_entropy": lambda x, w, b, t: ours_of_jax.cross_entropy(x, t),
    "softmax": lambda x, w, b, t: ours_of_jax.softmax(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("box", BOXES)
def test_parameters_are_the_arrays_that_they_hold(box: str, name: str) -> None:
    given, function = arrays(), FUNCTIONS[name]
    if name in ("cross_entropy", "linear_logprobs_at"):
        given["t"] = given["t"] % 8
    boxed = {key: BOXES[box](value) for key, value in given.items() if key != "t"}
    expected = function(**given)
    assert np.array_equal(function(**boxed, t=given["t"]), expected)
    if name in ("linear_cross_entropy", "linear_logprob"):
        assert np.array_equal(function(**boxed, t=BOXES[box](given["t"])), expected)


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("jitted", [False, True], ids=["", "jit"])
def test_parameters_have_gradients(box: str, jitted: bool) -> None:
    given = arrays()
    target = given.pop("t")

    def loss(p: Any) -> Any:
        return linear_cross_entropy(p["x"], p["w"], target, linear_bias=p["b"])

    boxed = {key: BOXES[box](value) for key, value in given.items()}
    grad = jax.jit(jax.grad(loss)) if jitted else jax.grad(loss)
    made, expected = grad(boxed), jax.grad(loss)(given)
    assert jax.tree.structure(made) == jax.tree.structure(boxed)
    for a, e in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-7)


def test_a_module_gives_its_embedding_itself() -> None:
    model, ids = Model(True, jnp.float32, nnx.Rngs(0)), jnp.arange(12).reshape(2, 6)

    def loss(weight: Any) -> Any:
        return lambda m: linear_cross_entropy(m.hidden(ids), weight(m), ids, shift=True)

    found = nnx.value_and_grad(loss(lambda m: m.embed.embedding))(model)
    expected = nnx.value_and_grad(loss(lambda m: m.embed.embedding[...]))(model)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, e)


def test_a_box_of_something_else_is_an_error() -> None:
    given = arrays()
    for wrong in (nnx.Param({"w": given["w"]}), linen.Partitioned("w", names=())):
        with pytest.raises(TypeError, match="linear_weight is a"):
            linear_cross_entropy(given["x"], wrong, given["t"])

# SPDX-License-Identifier: Apache-2.0
"""flax's nnx and optax, with the loss of logitless.jax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import support
from logitless.jax import linear_cross_entropy
from support import STEPS, same_run

TOKENS = 4 * (support.LENGTH - 1)


class Model(nnx.Module):
    """A word and the one before it, mixed; a head of its own or the embedding."""

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
    """The way of flax's documentation: modules and optimizers as arguments of nnx.jit."""
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
    """As jnp takes them; gradients with respect to them are parameters too."""
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

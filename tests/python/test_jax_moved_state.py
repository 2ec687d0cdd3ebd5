# SPDX-License-Identifier: Apache-2.0
"""State that one program of logitless.jax has kept, used by another: however the first was split
over devices, and however the second is lowered, the gradients are right."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import numpy as np

from jax_support import platform, problem, same, to_torch  # noqa: F401
from logitless.jax import linear_cross_entropy, linear_logprob
from test_jax_devices import random
from test_jax_jit import LAYOUTS, Layout, on_hosts  # noqa: F401

P = jax.sharding.PartitionSpec
# With the first size every device has whole blocks of 64 tokens, with the second none of the
# devices that share the tokens has.
KEPT, NOTHING_KEPT = 512, 192
VOCAB, HIDDEN = 256, 16
FOUR = Layout({"all": 4})


@contextlib.contextmanager
def without_shardy() -> Iterator[None]:
    """Uses XLA's older partitioner, which cannot split a custom call: every device does all."""
    name = "jax_use_shardy_partitioner"
    before = jax.config.values.get(name)
    if before is None:
        pytest.skip("this JAX has one partitioner")
    jax.config.update(name, False)
    jax.clear_caches()
    try:
        yield
    finally:
        jax.config.update(name, before)
        jax.clear_caches()


def in_shard_map(function: Any) -> Any:
    """The function in a shard_map that splits nothing: every device does all."""
    mesh = FOUR.put(jnp.zeros(4)).sharding.mesh
    return jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


class Way(NamedTuple):
    """A program: how it is made of a function, and where its arrays lie."""

    layout: Layout | None  # None: on one device
    wrap: Callable[[Any], Any] = jax.jit
    around: Callable[[], Any] = contextlib.nullcontext

    def put(self, x: Any, tokens: int) -> Any:
        if self.layout is None:
            return jax.device_put(np.asarray(x), jax.devices("cpu")[0])
        spec = {tokens: self.layout.tokens, VOCAB: (self.layout.vocab,)}
        # Kept state has three dimensions and no sharding of its own.
        return self.layout.put(x, *(spec.get(x.shape[0], ()) if x.ndim < 3 else ()))

    def run(self, function: Any, *given: Any) -> Any:
        with self.around():
            return self.wrap(function)(*given)


WAYS = {
    **{name: Way(LAYOUTS[name]) for name in ("tokens", "vocabulary", "both")},
    "one device": Way(None),
    "one device, eager": Way(None, lambda f: f),
    "replicated": Way(FOUR),
    "shard_map": Way(FOUR, lambda f: jax.jit(in_shard_map(f))),
    "shard_map, eager": Way(FOUR, in_shard_map),
    "not Shardy": Way(LAYOUTS["tokens"], around=without_shardy),
}
SPLIT = ("tokens", "vocabulary", "both")
WHOLE = tuple(name for name in WAYS if name not in SPLIT)


def pulled(way: Way, tokens: int, dtype: Any) -> Any:
    """jax.vjp's function from a program that keeps what it can."""
    x, w, _, t = problem((tokens,), VOCAB, HIDDEN, dtype)

    def forward(x: Any, w: Any, t: Any) -> Any:
        return jax.vjp(lambda x, w: linear_cross_entropy(x, w, t, reduction="none"), x, w)[1]

    return way.run(forward, *(way.put(a, tokens) for a in (x, w, t)))


def gradients(way: Way, pull: Any, up: Any) -> Any:
    """The gradients from state that another program has kept, moved to this way's layout."""
    leaves, tree = jax.tree.flatten(pull)
    leaves = [way.put(np.asarray(leaf), up.shape[0]) for leaf in leaves]
    return way.run(
        lambda leaves, up: jax.tree.unflatten(tree, leaves)(up), leaves, way.put(up, up.shape[0])
    )


def check(made: str, used: str, tokens: int, dtype: Any = jnp.float32) -> None:
    up = random(tokens)
    of_one_program = pulled(WAYS["one device"], tokens, dtype)(up)
    for mine, theirs in zip(
        gradients(WAYS[used], pulled(WAYS[made], tokens, dtype), up), of_one_program
    ):
        same(mine, to_torch(theirs).double(), dtype)


@pytest.mark.parametrize("used", WHOLE)
@pytest.mark.parametrize("made", SPLIT)
def test_state_of_a_split_serves_where_nothing_is_split(made: str, used: str) -> None:
    check(made, used, KEPT)


@pytest.mark.parametrize("used", ["one device", "shard_map", "not Shardy"])
@pytest.mark.parametrize("made", SPLIT)
def test_of_a_split_that_kept_nothing(made: str, used: str) -> None:
    check(made, used, NOTHING_KEPT)


@pytest.mark.parametrize("used", SPLIT)
@pytest.mark.parametrize("made", WHOLE)
def test_state_of_no_split_serves_a_split(made: str, used: str) -> None:
    check(made, used, KEPT)


@pytest.mark.parametrize(("made", "used"), zip(WHOLE, (*WHOLE[1:], WHOLE[0])))
def test_state_of_no_split_serves_where_nothing_is_split(made: str, used: str) -> None:
    check(made, used, KEPT)


@pytest.mark.parametrize("made", SPLIT)
def test_state_in_16_bits(made: str) -> None:
    check(made, "one device", KEPT, jnp.bfloat16)


@pytest.mark.parametrize("used", WHOLE)
def test_state_of_no_split_is_used_where_nothing_is_split(used: str) -> None:
    """Zeroed state changes the gradients, so it is read and nothing is computed again."""
    up, pull = random(KEPT), pulled(WAYS["one device"], KEPT, jnp.float32)
    leaves, tree = jax.tree.flatten(pull)
    emptied = jax.tree.unflatten(tree, [0 * x if x.shape[-1:] == (64,) else x for x in leaves])
    for mine, other in zip(gradients(WAYS[used], emptied, up), pull(up)):
        assert np.abs(np.asarray(mine) - np.asarray(other)).max() > 0.1


@pytest.mark.parametrize("used", ["one device", "shard_map", "not Shardy"])
def test_one_program_asks_nothing(used: str) -> None:
    """In one program XLA knows how the state was split and leaves one Backward, without copies."""
    way, (x, w, _, t) = WAYS[used], problem((KEPT,), VOCAB, HIDDEN)

    def step(x: Any, w: Any, t: Any) -> Any:
        return jax.grad(lambda x, w: linear_logprob(x, w, t).sum(), (0, 1))(x, w)

    with way.around():
        program = way.wrap(step).lower(*(way.put(a, KEPT) for a in (x, w, t))).compile()
    text = program.as_text()
    names = re.findall(r'fields = "([^"]*)"', text)
    assert ["kept kept_rows" in of for of in names] == [True, True]
    assert "conditional" not in text
    assert not re.search(rf"\[{KEPT},{VOCAB // 64},64\]\S* copy\(", text)
    assert not re.search(rf"\[{KEPT * VOCAB // 64},64\]\S* copy\(", text)

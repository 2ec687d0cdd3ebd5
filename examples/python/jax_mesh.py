# SPDX-License-Identifier: Apache-2.0
"""Trains a small transformer in JAX on a mesh of devices: sequences are split over its axis "data",
and the embedding, which is also the head, over "vocab". No device holds the whole head or logits.

    python examples/python/jax_mesh.py --mesh 2x2                    # on four GPUs
    python examples/python/jax_mesh.py --mesh 2x2 --cpu-devices 4    # on four devices of the CPU

With --compare 1e-4 it trains again on one device, and fails if a loss differs by more than that.
The text is Python's own language reference (pydoc's topics), a token a word. Needs JAX alone.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from logitless.jax import linear_cross_entropy

BATCH, CONTEXT, HIDDEN, HEADS = 16, 32, 64, 4
Parameters = dict[str, jax.Array]


def initial(vocab: int) -> tuple[Parameters, Parameters, Parameters]:
    """Parameters and the two moments of Adam."""
    shapes = {
        "embedding": (vocab, HIDDEN),
        "position": (CONTEXT, HIDDEN),
        "qkv": (HIDDEN, 3 * HIDDEN),
        "out": (HIDDEN, HIDDEN),
        "up": (HIDDEN, 4 * HIDDEN),
        "down": (4 * HIDDEN, HIDDEN),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    scales = {"embedding": 0.1, "position": 0.1}
    parameters = {
        name: jax.random.normal(key, shape) * scales.get(name, shape[0] ** -0.5)
        for key, (name, shape) in zip(keys, shapes.items())
    }
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    return parameters, zeros, zeros


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def model_loss(p: Parameters, tokens: jax.Array) -> jax.Array:
    """The mean loss of tokens [B, T], each predicted from those before it."""
    x = p["embedding"][tokens] + p["position"]  # [B, T, D]
    qkv = (norm(x) @ p["qkv"]).reshape(*tokens.shape, 3, HEADS, HIDDEN // HEADS)
    q, k, v = jnp.moveaxis(qkv, 2, 0)  # [B, T, H, D / H]
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)  # [B, T, H, D / H]
    x += mixed.reshape(x.shape) @ p["out"]
    x += jax.nn.silu(norm(x) @ p["up"]) @ p["down"]
    return linear_cross_entropy(norm(x), p["embedding"], tokens, shift=True)


def step(state: Any, tokens: jax.Array, count: jax.Array) -> tuple[Any, jax.Array]:
    """One step of Adam."""
    parameters, first, second = state
    loss, grads = jax.value_and_grad(model_loss)(parameters, tokens)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, grads)
    rate = 2e-3 * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
    parameters = jax.tree.map(
        lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), parameters, first, second
    )
    return (parameters, first, second), loss


def train(mesh: Mesh, ids: np.ndarray, vocab: int, steps: int) -> list[float]:
    def place(*axes: str | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*axes))

    whole = dict.fromkeys(("position", "qkv", "out", "up", "down"), place())
    split = {"embedding": place("vocab"), **whole}
    init = jax.jit(initial, static_argnums=0, out_shardings=(split, split, split))
    update = jax.jit(step, donate_argnums=0, out_shardings=((split, split, split), place()))
    state = init(vocab)
    shard = state[0]["embedding"].addressable_shards[0].data.shape
    print(f"{dict(mesh.shape)}: a device holds {list(shard)} of the head [{vocab}, {HIDDEN}]")
    order, losses = np.random.default_rng(0), []
    for count in range(1, steps + 1):
        at = order.integers(0, len(ids) - CONTEXT, BATCH)
        tokens = jax.device_put(ids[at[:, None] + np.arange(CONTEXT)], place("data"))  # [B, T]
        state, loss = update(state, tokens, float(count))
        losses.append(float(loss))
        if count % 10 == 0 or count == steps:
            print(f"step {count:4}: loss {np.mean(losses[-10:]):.4f}, the mean of ten steps")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--mesh", default="1x1", help='devices of "data" x of "vocab"')
    parser.add_argument("--cpu-devices", type=int, help="run on the CPU as this many devices")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compare", type=float, help="the difference that is allowed")
    args = parser.parse_args()
    if args.cpu_devices:  # JAX reads both before its first operation
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    sizes = tuple(int(size) for size in args.mesh.split("x"))
    axes = {"axis_names": ("data", "vocab"), "axis_types": (AxisType.Auto, AxisType.Auto)}

    words = re.findall(r"\w+|[^\w\s]", "\n".join(pydoc_data.topics.topics.values()))
    names, numbers = np.unique(words, return_inverse=True)
    ids = numbers.astype(np.int32)
    vocab = -(-len(names) // 64) * 64  # XLA would gather a vocabulary that an axis does not divide
    losses = train(jax.make_mesh(sizes, **axes), ids, vocab, args.steps)
    if args.compare is not None:
        one = jax.make_mesh((1, 1), devices=jax.devices()[:1], **axes)
        alone = train(one, ids, vocab, args.steps)
        difference = np.max(np.abs(np.subtract(losses, alone)))
        print(f"largest difference of the losses: {difference:.2e}")
        sys.exit(not difference <= args.compare)  # NaN is a difference too


if __name__ == "__main__":
    main()

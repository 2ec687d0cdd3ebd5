# SPDX-License-Identifier: Apache-2.0
"""Trains a small language model in JAX twice from the same seed, with the cross-entropy of jnp's
logits and with logitless, and prints both losses, the memory XLA plans for a step, and the time.

    python examples/python/jax_head.py
    python examples/python/jax_head.py --text *.txt --steps 500 --batch 2048

The text is Python's own language reference (pydoc's topics) unless files are given. Its tokens are
all its words; the model predicts each from the four before. Needs JAX alone.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import pydoc_data.topics
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from logitless.jax import linear_cross_entropy

CONTEXT = 4
Parameters = dict[str, jax.Array]


def read_words(paths: list[str]) -> tuple[np.ndarray, int]:
    """The text as word numbers, and how many different words there are."""
    topics = pydoc_data.topics.topics
    text = "\n".join(pathlib.Path(p).read_text() for p in paths) or "\n".join(topics.values())
    words, ids = np.unique(re.findall(r"\w+|[^\w\s]", text), return_inverse=True)
    return ids.astype(np.int32), len(words)


def initial(vocab: int, hidden: int) -> Parameters:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "embedding": jax.random.normal(keys[0], (vocab, hidden)) * 0.1,
        "mix": jax.random.normal(keys[1], (CONTEXT * hidden, hidden)) / hidden**0.5,
        "head": jax.random.normal(keys[2], (vocab, hidden)) * 0.02,
    }


def plain_loss(x: jax.Array, head: jax.Array, target: jax.Array) -> jax.Array:
    logits = jnp.matmul(x, head.T, precision="highest")  # [N, V]  logitless never stores them
    chosen = jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - chosen)


def model_loss(loss: Any, parameters: Parameters, windows: jax.Array) -> jax.Array:
    """windows [N, CONTEXT + 1]: CONTEXT words, and the next one, which is the target."""
    x = parameters["embedding"][windows[:, :CONTEXT]].reshape(len(windows), -1)  # [N, CONTEXT D]
    x = jax.nn.gelu(jnp.matmul(x, parameters["mix"], precision="highest"))  # [N, D]
    return loss(x, parameters["head"], windows[:, CONTEXT])


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def step(loss: Any, parameters: Parameters, moments: Any, windows: jax.Array, count: Any) -> Any:
    """One step of Adam."""
    value, grads = jax.value_and_grad(functools.partial(model_loss, loss))(parameters, windows)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, moments[1], grads)
    scale = 2e-3 * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
    parameters = jax.tree.map(
        lambda p, m, v: p - scale * m / (jnp.sqrt(v) + 1e-8), parameters, first, second
    )
    return value, parameters, (first, second)


def train(loss: Any, ids: np.ndarray, vocab: int, args: argparse.Namespace) -> dict[str, Any]:
    parameters = initial(vocab, args.hidden)
    moments = (jax.tree.map(jnp.zeros_like, parameters), jax.tree.map(jnp.zeros_like, parameters))
    order, losses, elapsed = np.random.default_rng(0), [], 0.0
    shape = jax.ShapeDtypeStruct((args.batch, CONTEXT + 1), jnp.int32)
    planned = step.lower(loss, parameters, moments, shape, 1.0).compile().memory_analysis()
    for count in range(1, args.steps + 1):
        at = order.integers(0, len(ids) - CONTEXT, args.batch)
        windows = jnp.asarray(ids[at[:, None] + np.arange(CONTEXT + 1)])
        start = time.perf_counter()
        value, parameters, moments = step(loss, parameters, moments, windows, float(count))
        losses.append(float(value))
        # excludes the first step, which compiles
        elapsed += time.perf_counter() - start if count > 1 else 0
    return {
        "losses": losses,
        "mib": planned.temp_size_in_bytes / 2**20,
        "ms": 1000 * elapsed / max(1, args.steps - 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--text", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=128)
    args = parser.parse_args()
    ids, vocab = read_words(args.text)
    print(f"{len(ids)} words, {vocab} different ones, on {jax.devices()[0].device_kind}")
    results = {}
    for name, loss in (("plain", plain_loss), ("logitless", linear_cross_entropy)):
        r = results[name] = train(loss, ids, vocab, args)
        print(f"{name:10} loss {r['losses'][0]:.4f} -> {r['losses'][-1]:.4f}, temporary memory "
              f"{r['mib']:.1f} MiB, {r['ms']:.1f} ms a step")  # fmt: skip
    pairs = zip(results["plain"]["losses"], results["logitless"]["losses"])
    print(f"largest difference of the losses: {max(abs(a - b) for a, b in pairs):.2e}")


if __name__ == "__main__":
    main()

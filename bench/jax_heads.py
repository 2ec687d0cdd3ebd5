# SPDX-License-Identifier: Apache-2.0
"""Loss and gradients of an LM head under jax.jit: XLA's own of f32 logits, optax's, and ours,
compared with three bare products of the same operands.

    LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python \
        python bench/jax_heads.py --out bench/results/jax-DATE

One process; all take turns in bursts, in orders in which each follows each equally often; medians
of `--rounds`, by the host's clock around bursts that are waited for. bf16, the mean, random data;
the products' V is padded to a multiple of 64. MiB: the temporary memory that XLA plans for the
compiled function (`compiled.memory_analysis()`), our workspace in it, beyond inputs and gradients.
"off": the relative difference of the input's gradient from XLA's own. A contender that is absent or
fails is left out with one line. Needs JAX with CUDA, and optax; `--shapes 64x32x300` tries it
anywhere, and its figures mean nothing."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from timing import balanced_orders

MIB = 1 << 20
HEADS = {
    "Llama-3": (8192, 4096, 128256),
    "Qwen": (8192, 2048, 151936),
    "GPT-2": (20480, 768, 50257),
    "Gemma-2-2B": (8192, 2304, 256000),
}
PRODUCTS, XLA = "three products", "XLA, log_softmax"
Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def xla(x: jax.Array, w: jax.Array, t: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax((x @ w.T).astype(jnp.float32))
    return -jnp.take_along_axis(logp, t[:, None], axis=1).mean()


def of_optax(x: jax.Array, w: jax.Array, t: jax.Array) -> jax.Array:
    import optax

    logits = (x @ w.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, t).mean()


def ours(memory: str | None) -> Loss:
    def loss(x: jax.Array, w: jax.Array, t: jax.Array) -> jax.Array:
        from logitless.jax import linear_cross_entropy

        return linear_cross_entropy(x, w, t, memory=memory)

    return loss


LOSSES: dict[str, Loss] = {
    XLA: xla,
    "optax": of_optax,
    "ours": ours(None),
    "ours, 512 MiB": ours("512MiB"),
}


def products(x: jax.Array, w: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    del t
    logits = x @ w.T
    return logits @ w, logits.T @ x


class Contender:
    def __init__(self, name: str, function: Callable[..., Any], operands: tuple[Any, ...]) -> None:
        start = time.perf_counter()
        self.name, self.operands, self.samples = name, operands, list[float]()
        self.compiled = jax.jit(function).lower(*operands).compile()
        self.mib = self.compiled.memory_analysis().temp_size_in_bytes / MIB
        self.result = jax.block_until_ready(self.compiled(*operands))
        self.first_s = time.perf_counter() - start

    def burst(self, seconds: float) -> None:
        """Samples the milliseconds per call, over a burst of calls."""
        start, count = time.perf_counter(), 0
        while count < 2 or time.perf_counter() - start < seconds:
            made = self.compiled(*self.operands)
            count += 1
            if count % 4 == 0:
                jax.block_until_ready(made)
        jax.block_until_ready(made)
        self.samples.append((time.perf_counter() - start) * 1e3 / count)


def operands(shape: tuple[int, int, int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    tokens, hidden, vocab = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, hidden), jnp.bfloat16)
    w = jax.random.normal(keys[1], (vocab, hidden), jnp.bfloat16) / hidden**0.5
    return x, w, jax.random.randint(keys[2], (tokens,), 0, vocab)


def norm(x: jax.Array) -> float:
    return float(jnp.linalg.norm(x.astype(jnp.float32)))


def measure(shape: tuple[int, int, int], given: argparse.Namespace) -> list[dict[str, Any]]:
    x, w, t = operands(shape)
    padded = jnp.pad(w, ((0, -len(w) % 64), (0, 0)))
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        PRODUCTS: (products, (x, padded, t))
    }
    for name, loss in LOSSES.items():
        calls[name] = jax.value_and_grad(loss, argnums=(0, 1)), (x, w, t)
    contenders, records, exact = [], [], None
    for name, (function, arrays) in calls.items():
        record: dict[str, Any] = {"contender": name, "shape": shape}
        records.append(record)
        try:
            made = Contender(name, function, arrays)
        except Exception as error:  # not installed, or its logits do not fit, ...
            text = (str(error).strip() or "no message").splitlines()[0]
            record["failed"] = f"{type(error).__name__}: {text[:160]}"
            continue
        record |= {"mib": made.mib, "first_s": made.first_s}
        if name != PRODUCTS:
            loss, (grad, _) = made.result
            exact = grad if exact is None else exact
            record |= {"loss": float(loss), "off": norm(grad - exact) / norm(exact)}
        made.result = None
        contenders.append((made, record))
    del exact
    for order in balanced_orders(len(contenders), given.rounds):
        for i in order:
            contenders[i][0].burst(given.burst)
    for made, record in contenders:
        record |= {"ms": statistics.median(made.samples), "samples": made.samples}
    return records


def lines(records: list[dict[str, Any]]) -> list[str]:
    text = [f"  {'':18s} {'ms':>9s} {'x three':>8s} {'MiB':>9s} {'loss':>9s} {'off':>8s}"]
    base = next((r["ms"] for r in records if r["contender"] == PRODUCTS and "ms" in r), None)
    for r in records:
        if "failed" in r:
            text.append(f"  {r['contender']:18s} is left out: {r['failed']}")
            continue
        ratio = f"{r['ms'] / base:8.3f}" if base else f"{'-':>8s}"
        row = f"  {r['contender']:18s} {r['ms']:9.3f} {ratio} {r['mib']:9.1f}"
        text.append(row + (f" {r['loss']:9.5f} {r['off']:8.1e}" if "loss" in r else ""))
    return text


def machine() -> dict[str, str]:
    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "absent"

    return {
        "device": jax.devices()[0].device_kind, "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv),
        **{package: version(package) for package in ("jax", "jaxlib", "optax")},
    }  # fmt: skip


def shape_of(text: str) -> tuple[int, int, int]:
    try:
        tokens, hidden, vocab = (int(extent) for extent in text.split("x"))
    except ValueError:
        raise SystemExit(f"jax_heads: --shapes: {text!r}; allowed: 8192x4096x128256, ...") from None
    return tokens, hidden, vocab


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", help="tokens x hidden x vocab, separated by ','")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=float, default=0.3, help="seconds")
    parser.add_argument("--out", type=Path, help="prefix of a .json and a .txt")
    given = parser.parse_args()
    heads = HEADS
    if given.shapes:
        heads = {text: shape_of(text) for text in given.shapes.split(",")}
    facts, records = machine(), []
    text = [", ".join(f"{name} {value}" for name, value in facts.items())]
    print(text[0], flush=True)
    for name, shape in heads.items():
        made = measure(shape, given)
        records += [{"head": name, **record} for record in made]
        said = [f"\n{name}: N {shape[0]}, D {shape[1]}, V {shape[2]}, bf16", *lines(made)]
        print(*said, sep="\n", flush=True)
        text += said
        if given.out:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            whole = {"machine": facts, "records": records}
            given.out.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
            given.out.with_suffix(".txt").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()

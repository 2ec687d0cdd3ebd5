# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that is split over the GPUs of one host in JAX: loss and gradients, compared with
one GPU that has the whole weight.

    LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python \
        python bench/jax_devices.py --devices 4 --heads 8192x4096x128256

One process. "axis_name" is inside jax.shard_map, "jit" leaves the split to JAX's partitioner;
"exchange" is a call's exchange of the input's gradient alone. Contenders take turns in bursts, in
balanced orders; medians of `--rounds`, by the host's clock around bursts that are waited for. bf16,
random data. Of the ideal: one GPU's time divided by P times that of the split. `--text` prints the
collectives in the compiled programs. On a CPU (XLA_FLAGS=--xla_force_host_platform_device_count=4)
the figures mean nothing."""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from timing import in_turns

from logitless.jax import linear_cross_entropy
from logitless.jax._parallel import Shard, _summed


def gradients(loss: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(loss, argnums=(0, 1))


def contenders(mesh: Mesh, tokens: int, hidden: int, vocab: int) -> dict[str, tuple[Any, Any]]:
    """Each compiled function and its arguments."""
    size = mesh.size
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, hidden), jnp.bfloat16)
    w = (jax.random.normal(keys[1], (vocab, hidden)) / hidden**0.5).astype(jnp.bfloat16)
    t = jax.random.randint(keys[2], (tokens,), 0, vocab)
    everywhere, by_rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("tp"))
    alone = jax.devices()[0]
    split = jax.device_put(x, everywhere), jax.device_put(w, by_rows), jax.device_put(t, everywhere)

    def of_axis(x: Any, w: Any, t: Any) -> Any:
        return gradients(
            lambda x, w: linear_cross_entropy(x, w, t, axis_name="tp", upstream="whole")
        )(x, w)

    mapped = jax.shard_map(
        of_axis, mesh=mesh, in_specs=(P(), P("tp"), P()), out_specs=(P(), (P(), P("tp"))),
        check_vma=False,
    )  # fmt: skip

    def exchange(part: Any) -> Any:
        return _summed(part[0], Shard(("tp",), size, False, None, False), jnp.bfloat16)

    exchanged = jax.shard_map(exchange, mesh=mesh, in_specs=P("tp"), out_specs=P(), check_vma=False)
    parts = jax.device_put(jnp.ones((size, tokens, hidden), jnp.float32), by_rows)
    whole = tuple(jax.device_put(a, alone) for a in (x, w, t))
    jobs = {
        "one GPU": (gradients(linear_cross_entropy), whole),
        f"axis_name, {size}": (mapped, split),
        f"jit, {size}": (gradients(linear_cross_entropy), split),
        "exchange": (exchanged, (parts,)),
    }
    return {name: (jax.jit(f).lower(*a).compile(), a) for name, (f, a) in jobs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--heads", default="8192x4096x128256")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--text", action="store_true")
    args = parser.parse_args()
    mesh = Mesh(jax.devices()[: args.devices], ("tp",))
    for head in args.heads.split(","):
        found = contenders(mesh, *map(int, head.split("x")))
        for call, arguments in found.values():
            jax.block_until_ready(call(*arguments))

        def sample(name: str, found: Any = found) -> float:
            call, arguments = found[name]
            start = time.perf_counter()
            jax.block_until_ready([call(*arguments) for _ in range(args.repeats)])
            return (time.perf_counter() - start) * 1e3 / args.repeats

        samples = in_turns(found, args.rounds, sample)
        print(
            f"{head} bf16 on {args.devices} x {jax.devices()[0].device_kind}, jax {jax.__version__}"
        )
        medians = {name: statistics.median(values) for name, values in samples.items()}
        for name, ms in medians.items():
            share = medians["one GPU"] / (args.devices * ms)
            spread = f"[{min(samples[name]):.2f}, {max(samples[name]):.2f}]"
            print(f"  {name:16} {ms:8.2f} ms {spread:18} {share:6.3f}", flush=True)
        if args.text:
            for name, (call, _) in found.items():
                print(f"  {name}:")
                for line in call.as_text().splitlines():
                    if re.search(r"all-to-all|all-gather|all-reduce|custom-call|fusion\(", line):
                        print("   ", line.strip()[:150])


if __name__ == "__main__":
    main()

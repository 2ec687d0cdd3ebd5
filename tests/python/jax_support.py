# SPDX-License-Identifier: Apache-2.0
"""What the tests of logitless.jax share: problems, the f64 reference, the calls a program makes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

# Set before JAX starts: eight CPU devices, and no reservation of most of a GPU's memory.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import test_linear
from reference import close

DTYPES = {jnp.float32: torch.float32, jnp.float16: torch.float16, jnp.bfloat16: torch.bfloat16}


def gpus() -> list[Any]:
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


@pytest.fixture(
    params=["cpu", *([pytest.param("cuda", marks=pytest.mark.cuda)] if gpus() else [])],
    autouse=True,
)
def platform(request: pytest.FixtureRequest) -> Any:
    """Runs every test on the CPU and, if JAX has a GPU, on the GPU."""
    with jax.default_device(jax.devices(request.param)[0]):
        yield request.param


def host_mesh(sizes: tuple[int, ...], names: tuple[str, ...], kind: str = "Explicit") -> Any:
    """A mesh of the CPU's devices: by default JAX takes a GPU's, where it has one."""
    kinds = (getattr(jax.sharding.AxisType, kind),) * len(sizes)
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=jax.devices("cpu"))


def to_jax(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return jnp.asarray(tensor.float().numpy(), jnp.bfloat16)
    return jnp.asarray(tensor.numpy())


def to_torch(array: Any) -> torch.Tensor:
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.array(array))


def problem(
    shape: tuple[int, ...], vocab: int, hidden: int, dtype: Any = jnp.float32, *,
    bias: bool = False, ignored: float = 0.2, seed: int = 0,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Input, weight, bias and a target of which some are ignored."""
    torch.manual_seed(seed)
    tensors = test_linear.problem(shape, vocab, hidden, DTYPES[dtype], bias=bias, ignored=ignored)
    return tuple(to_jax(t) for t in tensors)  # type: ignore[return-value]


def leaves(*arrays: Any) -> list[torch.Tensor | None]:
    """The arrays as torch's leaves in f64."""
    return [None if a is None else to_torch(a).double().requires_grad_() for a in arrays]


def same(actual: Any, expected: torch.Tensor, dtype: Any = jnp.float32) -> None:
    close(to_torch(actual), expected, DTYPES[dtype])


def _compiled(fn: Callable[..., Any], *args: Any) -> str:
    """The compiled program's text, in which XLA has left one of two Backwards."""
    text: str = jax.jit(fn).lower(*args).compile().as_text()
    return text


def kinds(fn: Callable[..., Any], *args: Any) -> list[int]:
    """The kinds of op in the program of fn, in order."""
    text = _compiled(fn, *args)
    return [int(k) for k in re.findall(r'"logitless_xla_run".*?\bkind = (\d+)', text)]


def fields(fn: Callable[..., Any], *args: Any) -> list[str]:
    """The tensors of every op in the program of fn."""
    return re.findall(r'fields = "([^"]*)"', _compiled(fn, *args))


def products(calls: Sequence[str]) -> int:
    """The number of products of N V D terms in linear ops; `calls` has each op's tensors' names."""
    count = 0
    for names in map(str.split, calls):
        gradients = len({"grad_input", "grad_weight"} & {*names})
        states = [name for name in names if name.startswith(("row_", "loss", "lse", "entropy"))]
        if gradients and "kept" not in names:
            count += 1  # computes the logits again
        elif not gradients and states and "shard_row_reference" not in names:
            count += 1  # neither Combine nor a Forward of target logits alone makes logits
        count += gradients
    return count


def memory(fn: Callable[..., Any], *args: Any, **jit: Any) -> Any:
    return jax.jit(fn, **jit).lower(*args).compile().memory_analysis()

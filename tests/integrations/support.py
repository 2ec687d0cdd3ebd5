# SPDX-License-Identifier: Apache-2.0
"""What the tests of frameworks share: a tiny model, its batches, the calls counted, two runs
compared."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import transformers

from logitless import _abi
from logitless.torch import _run

# With "cuda", the tests that scripts/test-device-integrations lists run on a GPU.
DEVICE = os.environ.get("LOGITLESS_TEST_DEVICE", "cpu")
ON_CPU = DEVICE == "cpu"
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
STEPS = 20
VOCAB, HIDDEN, LENGTH = 61, 16, 12
PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "trl", "lm_eval", "lightning", "jax", "flax",
    "optax",
)  # fmt: skip
LOSSES = (_abi.LINEAR_CROSS_ENTROPY_FORWARD, _abi.LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD)


def versions() -> str:
    installed = {
        d.name.lower().replace("-", "_"): d.version for d in importlib.metadata.distributions()
    }
    return "with " + ", ".join(f"{n} {installed[n]}" for n in PACKAGES if n in installed)


class Calls:
    """Counts the losses of a head that the library computes in this process."""

    def __init__(self, setattr: Callable[..., None] = setattr) -> None:
        self.count = 0
        real = _run.launch

        def launch(kind: int, *rest: Any, **more: Any) -> Any:
            self.count += kind in LOSSES
            return real(kind, *rest, **more)

        setattr(_run, "launch", launch)

    def taken(self) -> int:
        """The losses since the last call of this function."""
        count, self.count = self.count, 0
        return count


def llama(seed: int = 0, **changes: Any) -> Any:
    """A LlamaForCausalLM of some 6,000 parameters, the same for a seed."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=32,
        pad_token_id=0, initializer_range=0.2, **changes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train().to(DEVICE)


def example(index: int) -> dict[str, torch.Tensor]:
    """A sequence of which something can be learnt, its first labels ignored."""
    ids = (torch.arange(LENGTH) * (index % 3 + 1) + 7 * index) % (VOCAB - 1) + 1
    labels = ids.clone()
    labels[: index % 4] = -100
    return {"input_ids": ids, "labels": labels}


def batch(step: int, size: int = 4) -> dict[str, torch.Tensor]:
    rows = [example(step * size + i) for i in range(size)]
    return {name: torch.stack([row[name] for row in rows]).to(DEVICE) for name in rows[0]}


def same_run(
    actual: Sequence[float], expected: Sequence[float], bf16: bool = False, steps: int = STEPS
) -> None:
    """Asserts that two runs have the same losses, and that the losses fall."""
    assert len(actual) == len(expected) == steps
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if bf16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), **tolerance)
    assert sum(actual[-3:]) < sum(actual[:3])


def same_parameters(
    actual: Iterable[tuple[str, torch.Tensor]], expected: Iterable[tuple[str, torch.Tensor]],
    atol: float = 1e-5,
) -> None:  # fmt: skip
    ours, theirs = dict(actual), dict(expected)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )

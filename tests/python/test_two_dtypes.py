# SPDX-License-Identifier: Apache-2.0
"""Hidden states and a head of two dtypes: the error names both, and autocast as a way out. Where a
library's function casts its operands, so does ours with the same signature."""

from __future__ import annotations

import itertools
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from logitless.integrations import (
    FusedLinearCrossEntropyFunction,
    LigerFusedLinearCrossEntropyLoss,
    cce,
    liger,
    megatron,
    nemo_rl,
    patch_transformers,
    prime_rl,
    torchtitan,
    unsloth,
    verl,
    vllm,
)
from logitless.torch import (
    LinearCrossEntropyHead,
    LinearCrossEntropyLoss,
    linear_cross_entropy,
    linear_divergence,
    linear_logprob,
    linear_logprobs_at,
    linear_topk,
    workspace_size,
)

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
PAIRS = list(itertools.permutations(DTYPES, 2))
N, V, D, K = 4, 5, 8, 2
T = torch.tensor([1, 2, 3, 0])
IDS = torch.tensor([[0, 1], [1, 2], [2, 3], [0, 1]])
CONFIG = types.SimpleNamespace(distillation_loss=types.SimpleNamespace(log_prob_min_clamp=None))


def of_head(x: Tensor, w: Tensor) -> Any:
    head = LinearCrossEntropyHead(D, V, bias=False, dtype=w.dtype)
    return head(x, T)


def of_prime_rl(x: Tensor, w: Tensor) -> Any:
    head = prime_rl.FusedOutputLinear(D, V, 4)
    head.weight = torch.nn.Parameter(w.detach().clone())
    return head(x[None], T[None], torch.ones(1, N))


def of_torchtitan(x: Tensor, w: Tensor) -> Any:
    loss = torchtitan.HeadLoss()
    head = torch.nn.Linear(D, V, bias=False)
    head.weight = torch.nn.Parameter(w.detach().clone())
    loss.set_lm_head(head)
    return loss(x[None], T[None], global_valid_tokens=torch.tensor(4.0))


Door = Callable[[Tensor, Tensor], Any]
# Each call, and its names of the weight and of the input.
DOORS: dict[str, tuple[Door, str, str]] = {
    "loss": (lambda x, w: linear_cross_entropy(x, w, T), "linear_weight", "input"),
    "per token": (
        lambda x, w: linear_cross_entropy(x, w, T, reduction="none"), "linear_weight", "input",
    ),
    "vocab_ids": (
        lambda x, w: linear_cross_entropy(x, w, T, vocab_ids=torch.arange(4)),
        "linear_weight", "input",
    ),
    "workspace_size": (lambda x, w: workspace_size(x, w, T), "linear_weight", "input"),
    "logprob": (lambda x, w: linear_logprob(x, w, T), "linear_weight", "input"),
    "logprobs_at": (lambda x, w: linear_logprobs_at(x, w, IDS), "linear_weight", "input"),
    "topk": (lambda x, w: linear_topk(x, w, K), "linear_weight", "input"),
    "divergence": (
        lambda x, w: linear_divergence(x, w, x.detach(), w.detach()), "linear_weight", "input",
    ),
    "teacher": (
        lambda x, w: linear_divergence(x, w.to(x.dtype), x.detach(), w.detach()),
        "teacher_weight", "input",
    ),
    "module": (lambda x, w: LinearCrossEntropyLoss()(x, w, T), "linear_weight", "input"),
    "head": (of_head, "head.weight", "input"),
    "Liger's module": (
        lambda x, w: LigerFusedLinearCrossEntropyLoss()(w, x, T), "lin_weight", "_input",
    ),
    "Liger's function": (
        lambda x, w: FusedLinearCrossEntropyFunction.apply(x, w, T), "weight", "_input",
    ),
    "cce": (lambda x, w: cce.linear_cross_entropy(x, w, T), "c", "e"),
    "verl": (
        lambda x, w: verl.linear_cross_entropy(x[None], w, T[None], 1.0, "none"),
        "weight", "hidden",
    ),
    "verl's PPO": (
        lambda x, w: verl.FusedLinearForPPO()(x[None], w, T[None]),
        "vocab_weights", "hidden_states",
    ),
    "verl's top k": (
        lambda x, w: verl.compute_forward_kl_topk(
            x[None], w, -IDS[None].float(), IDS[None], CONFIG
        ),
        "weight", "hidden_states",
    ),
    "NeMo-RL": (
        lambda x, w: nemo_rl.get_distillation_topk_logprobs(
            x[None], w, IDS[None].float(), IDS[None], True, False
        ),
        "weight", "student_hidden_states",
    ),
    "vLLM": (lambda x, w: vllm.gather_logprobs(x, w, K, T), "weight", "hidden_states"),
    "Megatron": (lambda x, w: megatron.linear_cross_entropy(x, w, T), "weight", "hidden"),
    "torchtitan": (of_torchtitan, "linear_weight", "pred"),
    "prime-rl": (of_prime_rl, "weight", "hidden_states"),
}  # fmt: skip


def operands(pair: tuple[str, str]) -> tuple[Tensor, Tensor]:
    x, w = (
        torch.randn(rows, D).to(DTYPES[name]).requires_grad_() for rows, name in zip((N, V), pair)
    )
    return x, w


def said(weight: str, input: str, pair: tuple[str, str]) -> str:
    of_input, of_weight = (str(DTYPES[name])[6:] for name in pair)
    return re.escape(
        f"{weight} is {of_weight}; allowed: {of_input}, the dtype of {input} (torch.autocast casts "
        f"both, or {weight}.to({input}.dtype))"
    )


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("name", DOORS)
def test_every_door_gives_one_error(name: str, pair: tuple[str, str]) -> None:
    door, weight, input = DOORS[name]
    with pytest.raises(TypeError, match=f"^{said(weight, input, pair)}$") as found:
        door(*operands(pair))
    assert found.value.status == "wrong_dtype"  # type: ignore[attr-defined]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("name", DOORS)
def test_autocast_serves_both(name: str, pair: tuple[str, str]) -> None:
    x, w = operands(pair)
    if name in ("workspace_size",):
        return
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        made = DOORS[name][0](x, w)
    torch.manual_seed(3)
    expected = DOORS[name][0](x.bfloat16(), w.bfloat16())
    flat = [
        (a, e)
        for a, e in zip(*map(torch.utils._pytree.tree_leaves, (made, expected)))
        if isinstance(a, Tensor)
    ]
    assert flat
    for a, e in flat:
        torch.testing.assert_close(a, e.to(a.dtype), rtol=1e-2, atol=1e-2)


def jsd(x: Tensor, w: Tensor) -> Any:
    return liger.LigerFusedLinearJSD()(x, w, x.detach() + 1, w.detach(), T)


# Functions that round hidden states to the weight's dtype, as the libraries' own do.
SERVED: dict[str, Door] = {
    "Liger's JSD": jsd,
    "Liger's JSD loss": lambda x, w: liger.LigerFusedLinearJSDLoss()(x, w, x.detach() + 1, w, T),
    "Unsloth": lambda x, w: unsloth.chunked_hidden_states_selective_log_softmax(
        x[None], w, T[None]
    ),
    "Unsloth's JSD": lambda x, w: unsloth.fused_linear_jsd(x, w, x.detach() + 1, w),
}


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("name", SERVED)
def test_names_of_what_rounds_the_hidden_states(name: str, pair: tuple[str, str]) -> None:
    x, w = operands(pair)
    expected = SERVED[name](x.to(w.dtype), w)
    torch.testing.assert_close(
        SERVED[name](x, w), expected, rtol=2e-2, atol=2e-2, check_dtype=False
    )


@pytest.mark.parametrize("module", ["numpy", "jax"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_arrays(module: str, pair: tuple[str, str]) -> None:
    np, types_ = pytest.importorskip("numpy"), pytest.importorskip("ml_dtypes")
    ours = pytest.importorskip(f"logitless.{module}")
    dtypes = {"f32": np.float32, "f16": np.float16, "bf16": types_.bfloat16}
    x, w = (np.ones((rows, D), dtypes[name]) for rows, name in zip((N, V), pair))
    if module == "jax":
        jnp = pytest.importorskip("jax.numpy")
        x, w = jnp.asarray(x), jnp.asarray(w)
    more = {
        "linear_cross_entropy": (T.numpy(),), "linear_logprob": (T.numpy(),), "linear_topk": (K,),
        "linear_logprobs_at": (IDS.numpy(),), "linear_divergence": (x, w),
    }  # fmt: skip
    of_input, of_weight = (str(DTYPES[name])[6:] for name in pair)
    message = re.escape(
        f"linear_weight is {of_weight}; allowed: {of_input}, the dtype of input; use "
        "linear_weight.astype(input.dtype)"
    )
    for name, rest in more.items():
        with pytest.raises(TypeError, match=f"^{message}(\n|$)"):
            getattr(ours, name)(x, w, *rest)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_patched_model(pair: tuple[str, str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(DTYPES[pair[0]])
    model.lm_head.to(DTYPES[pair[1]])
    ids = torch.randint(1, 61, (2, 7))
    batch = {"input_ids": ids, "labels": ids}
    with pytest.raises(RuntimeError, match="dtype"):  # the error of torch's own product
        model(**batch)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**batch).loss
    patch_transformers(model)
    with pytest.raises(TypeError, match=f"^{said('lm_head.weight', 'input', pair)}$"):
        model(**batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    torch.testing.assert_close(loss, expected.float(), rtol=1e-2, atol=1e-2)


def test_a_head_that_casts_its_input_is_refused_by_the_patch() -> None:
    """Such a head works unpatched, but the patch does not call the head's forward."""
    transformers = pytest.importorskip("transformers")

    class Casts(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.to(self.weight.dtype))

    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.lm_head = Casts(16, 61, bias=False)
    with pytest.raises(NotImplementedError, match=r"lm_head is a .*Casts; allowed: a plain"):
        patch_transformers(model)
    model.lm_head = torch.nn.Linear(16, 61, bias=False)
    model.lm_head.forward = lambda x: torch.nn.functional.linear(x.float(), model.lm_head.weight)
    with pytest.raises(NotImplementedError, match="forward of the lm_head was replaced"):
        patch_transformers(model)

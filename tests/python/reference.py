# SPDX-License-Identifier: Apache-2.0
"""The loss in f64 with plain torch, written from docs/semantics.md; gradients by autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Error bounds of losses and gradients of small shapes, relative to the largest element.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def logits_of(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    raw = input.double() @ weight.double().T
    return raw if bias is None else raw + bias.double()


def statistics(logits: Tensor, target: Tensor, o: dict[str, Any]) -> dict[str, Tensor]:
    """The statistics of every token, 0 if it is ignored (argmax and rank -1). A temperature may be
    a tensor in the target's shape."""
    u = logits.double() * o.get("logit_scale", 1.0)
    cap = o.get("softcap", 0.0)
    temperature = o.get("temperature", 1.0)
    if isinstance(temperature, Tensor):
        temperature = temperature.double()[..., None]
    z = (cap * torch.tanh(u / cap) if cap > 0 else u) / temperature  # [..., V]
    valid = target != o.get("ignore_index", -100)
    safe = target.where(valid, torch.zeros_like(target)).long()
    lse = z.logsumexp(-1)
    chosen = z.gather(-1, safe[..., None])[..., 0]
    p = z.softmax(-1)
    entropy = lse - (p * z).sum(-1)
    zero = torch.zeros_like(lse)
    found = {
        "lse": lse,
        "target_logit": chosen,
        "logprob": chosen - lse,
        "entropy": entropy,
        "sum_p_squared": p.square().sum(-1),
        "mean_logit": z.mean(-1),
        "max_logprob": z.amax(-1) - lse,
        "mass_above": (p * (z > chosen[..., None])).sum(-1),
    }
    result = {name: value.where(valid, zero) for name, value in found.items()}
    result["argmax"] = z.argmax(-1).where(valid, torch.full_like(safe, -1))
    rank = (z > chosen[..., None]).sum(-1)
    result["rank"] = rank.where(valid, torch.full_like(rank, -1))
    result["z"] = z
    result["valid"] = valid
    result["safe"] = safe
    return result


def loss(logits: Tensor, target: Tensor, **o: Any) -> Tensor:
    s = statistics(logits, target, o)
    z, valid, safe = s["z"], s["valid"], s["safe"]
    vocab = z.shape[-1]
    weight = o.get("weight")
    c = (
        torch.ones(vocab, dtype=torch.float64, device=z.device)
        if weight is None
        else weight.double()
    )
    eps = o.get("label_smoothing", 0.0)
    token = (1 - eps) * c[safe] * (s["lse"] - s["target_logit"])
    if eps:
        token = token + eps / vocab * (c * (z.logsumexp(-1, keepdim=True) - z)).sum(-1)
    token = token + o.get("z_loss", 0.0) * s["lse"] ** 2
    if o.get("token_weight") is not None:
        token = token * o["token_weight"].double()
    token = token.where(valid, torch.zeros_like(token))
    reduction = o.get("reduction", "mean")
    if reduction == "none":
        return token
    if reduction == "sum":
        return token.sum()
    normalizer = o.get("normalizer")
    if normalizer is None:
        normalizer = (c[safe] * valid).sum()
    return token.sum() / normalizer


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Asserts every element within the dtype's tolerance, relative to the largest element."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not expected.numel():
        return
    a, e = actual.detach().double(), expected.detach().double()
    assert torch.equal(a.isnan(), e.isnan())
    largest = max(1e-6, e.nan_to_num().abs().max().item())
    worst = (a - e).nan_to_num().abs().max().item() / largest
    assert worst <= TOLERANCE[dtype], f"off by {worst:.2e} of the largest element"

# SPDX-License-Identifier: Apache-2.0
"""Losses of reinforcement learning and of preferences, without logits: the recipes of docs/rl.md,
to be copied. None of them is part of the library.

    hidden [B, T, D]       the backbone's last hidden states
    linear_weight [V, D]   the head
    target [B, T]          the token that each position predicts, -100 where nothing is learned
    old, reference [B, T]  log-probabilities of an earlier policy and of a frozen one, no gradient
    advantage  [B, 1] or [B, T]
    top, probability [B, T, k]  a teacher's likeliest tokens and their probabilities, no gradient
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from logitless.torch import linear_cross_entropy, linear_logprob, linear_logprobs_at


def k3(logprob: Tensor, reference: Tensor) -> Tensor:
    log_ratio = reference - logprob
    return torch.expm1(log_ratio) - log_ratio


def clipped(logprob: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    ratio = (logprob - old).exp()
    return -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def grpo(
    hidden: Tensor, linear_weight: Tensor, target: Tensor, advantage: Tensor, old: Tensor,
    reference: Tensor, clip: float = 0.2, beta: float = 0.04,
) -> Tensor:  # fmt: skip
    counts = target != -100
    logprob = linear_logprob(hidden, linear_weight, target)
    token = clipped(logprob, old, advantage, clip) + beta * k3(logprob, reference)
    return (token.where(counts, 0).sum(-1) / counts.sum(-1).clamp(min=1)).mean()


def on_policy(hidden: Tensor, linear_weight: Tensor, target: Tensor, advantage: Tensor) -> Tensor:
    count = (target != -100).sum(-1, keepdim=True).clamp(min=1)
    share = (advantage / count / len(target)).expand_as(target)
    return linear_cross_entropy(hidden, linear_weight, target, reduction="sum", token_weight=share)


def ppo(
    hidden: Tensor, linear_weight: Tensor, target: Tensor, advantage: Tensor, old: Tensor,
    clip: float = 0.2, bonus: float = 0.01,
) -> Tensor:  # fmt: skip
    counts = target != -100
    logprob, entropy = linear_logprob(hidden, linear_weight, target, entropy=True)
    token = clipped(logprob, old, advantage, clip) - bonus * entropy
    return token.where(counts, 0).sum() / counts.sum().clamp(min=1)


def dpo(
    hidden: Tensor, linear_weight: Tensor, target: Tensor, reference: Tensor, beta: float = 0.1
) -> Tensor:
    score = (linear_logprob(hidden, linear_weight, target) - reference).sum(-1)
    chosen, rejected = score.chunk(2)  # the chosen completions, then the rejected ones
    return -functional.logsigmoid(beta * (chosen - rejected)).mean()


def kto(
    hidden: Tensor, linear_weight: Tensor, target: Tensor, reference: Tensor, desirable: Tensor,
    divergence: Tensor, beta: float = 0.1, weights: tuple[float, float] = (1.0, 1.0),
) -> Tensor:  # fmt: skip
    score = (linear_logprob(hidden, linear_weight, target) - reference).sum(-1)
    gain = torch.sigmoid(torch.where(desirable, beta, -beta) * (score - divergence))
    return (torch.where(desirable, *weights) * (1 - gain)).mean()


def kto_divergence(
    hidden: Tensor, linear_weight: Tensor, mismatched: Tensor, reference: Tensor
) -> Tensor:
    with torch.no_grad():
        score = (linear_logprob(hidden, linear_weight, mismatched) - reference).sum(-1)
        return score.mean().clamp(min=0)


def dft(hidden: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
    logprob = linear_logprob(hidden, linear_weight, target)
    return -(logprob.detach().exp() * logprob).sum() / (target != -100).sum().clamp(min=1)


def distillation(
    hidden: Tensor, linear_weight: Tensor, target: Tensor, top: Tensor, probability: Tensor,
    temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    keep = (target != -100)[..., None]
    log_q = linear_logprobs_at(hidden, linear_weight, top.where(keep, -1), temperature=temperature)
    return -(probability * log_q).where(keep, 0).sum() / keep.sum().clamp(min=1)


def nucleus_logprob(
    hidden: Tensor, linear_weight: Tensor, nuclei: Tensor, offsets: Tensor, drawn: Tensor,
    temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    among = linear_logprobs_at(
        hidden, linear_weight, nuclei, over="ids", offsets=offsets, temperature=temperature
    )
    return among[offsets[:-1] + drawn]  # [N]


def packed_targets(ids: Tensor, learned: Tensor, cu_seqlens: Tensor) -> Tensor:
    target = torch.full_like(ids, -100)
    target[:-1] = ids[1:].where(learned[1:], -100)
    target[cu_seqlens[1:].long() - 1] = -100  # the last of a sequence predicts nothing
    return target


def multi_token(
    hidden: Tensor, linear_weight: Tensor, ids: Tensor, memory: int | str | None = None
) -> Tensor:
    losses = [
        linear_cross_entropy(h, linear_weight, ids, shift=k + 1, memory=memory)
        for k, h in enumerate(hidden)  # [K, B, T, D]: those of head k predict k + 1 tokens ahead
    ]
    return torch.stack(losses).mean()


def last_stage(
    received: Tensor, linear_weight: Tensor, target: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor | None]:
    hidden = received.detach().requires_grad_()
    loss = linear_cross_entropy(hidden, linear_weight, target, normalizer=tokens)
    loss.backward()  # linear_weight.grad adds up over the micro-batches
    return loss.detach(), hidden.grad


def lora_logprob(
    hidden: Tensor, linear_weight: Tensor, a: Tensor, b: Tensor, target: Tensor, scale: float = 1.0
) -> Tensor:
    hidden = torch.cat((hidden, hidden @ a.T * scale), -1)  # [B, T, D + r], a [r, D]
    linear_weight = torch.cat((linear_weight, b), -1)  # [V, D + r], b [V, r]
    return linear_logprob(hidden, linear_weight, target)


def merged_lora_logprob(
    hidden: Tensor, linear_weight: Tensor, a: Tensor, b: Tensor, target: Tensor, scale: float = 1.0
) -> Tensor:
    merged = torch.addmm(linear_weight, b, a, alpha=scale)  # [V, D]
    return linear_logprob(hidden, merged, target)

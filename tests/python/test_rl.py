# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/rl.md (examples/python/rl.py): their values and gradients within what
docs/semantics.md ("Accuracy") allows, of f64 with the whole logits. Those of
TRL's trainers are compared with TRL's own code, run in f64 on log-probabilities of those logits."""

from __future__ import annotations

import ast
import itertools
import math
import pathlib
import sys
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import trl
from torch import Tensor

import reference
from exact_head import U32, Exact, within
from logitless.torch import linear_logprob
from reference import close
from test_linear import problem

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples/python"))
import rl  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)


# --- the contract ---


# An objective that takes log-probabilities and entropies [B, T].
Tail = Callable[[Tensor, Tensor], Tensor]


class Tangent(NamedTuple):
    value: Tensor
    of_value: Tensor  # tolerance of the recipe's value
    upstream: tuple[Tensor, Tensor]  # [N] of the log-probability and of the entropy
    of_upstream: tuple[Tensor, Tensor]


def tangent(head: Exact, tail: Tail) -> Tangent:
    """The tail's value and gradients, and tolerances, found by differences, because a tail may
    detach. The tail's own rounding in f32 counts as one of its arguments."""
    shape, n = head.logprob.shape, head.logprob.numel()
    at = torch.cat((head.logprob.flatten(), head.entropy.flatten())).detach()
    valid = (head.target != -100).repeat(2)
    off = valid * (torch.cat((head.of_logprob, head.of_entropy)) + 4 * U32 * (1 + at.abs()))

    def of(both: Tensor) -> tuple[Tensor, Tensor]:
        both.requires_grad_()
        value = tail(both[:n].view(shape), both[n:].view(shape))
        return value.detach(), valid * torch.autograd.grad(value, both)[0]

    value, g = of(at.clone())
    of_value = 16 * U32 * (1 + value.abs())
    of_g = 16 * U32 * g.abs().view(2, n).amax(1).repeat_interleave(n)
    for step in torch.eye(2 * n, dtype=at.dtype, device=at.device) * 1e-6:
        moved, turned = of(at + step)
        share = off @ step / 1e-12
        of_value += (moved - value).abs() * share
        of_g += (turned - g).abs() * share
    return Tangent(value, of_value, (g[:n], g[n:]), (of_g[:n], of_g[n:]))


def judge(recipe: Callable[..., Tensor], tail: Tail, x: Tensor, w: Tensor, t: Tensor) -> None:
    """The recipe of (hidden, weight, target) against the tail of the exact head; ignored rows of
    the recipe's hidden states hold NaN."""
    head = Exact(x, w, t)
    expected = tangent(head, tail)
    theirs = torch.autograd.grad(
        tail(head.logprob, head.entropy), (head.input, head.weight), retain_graph=True
    )
    unread = x.detach().masked_fill((t == -100)[..., None], math.nan).requires_grad_()
    value = recipe(unread, w, t)
    within(value, expected.value, expected.of_value)
    bounds = head.bounds(*expected.upstream, *expected.of_upstream)
    for ours, exact, bound in zip(torch.autograd.grad(value, (unread, w)), theirs, bounds):
        assert ours.dtype is x.dtype
        within(ours, exact, bound)
        least = 8000 if x.dtype is F32 else 30
        assert exact.abs().max() > least * bound.max(), "the bound would let anything pass"
    assert (t == -100).any() and not theirs[0][t == -100].any()


# --- TRL's formulas ---


class Trainer(SimpleNamespace):
    """The attributes that `_compute_loss` of TRL's trainers reads."""

    def __init__(self, target: Tensor, **own: Any) -> None:
        def same(value: Tensor, **_: Any) -> Tensor:
            return value

        super().__init__(
            model=SimpleNamespace(training=False), aux_loss_enabled=False, label_smoother=None,
            _metrics=defaultdict(lambda: defaultdict(list)), compute_loss_func=None,
            _total_train_tokens=0, precompute_ref_logps=True, **own,
            accelerator=SimpleNamespace(
                device=target.device, gather=same, gather_for_metrics=same, reduce=same,
                sync_gradients=False, parallelism_config=None, num_processes=1,
            ),
        )  # fmt: skip


def model_of(target: Tensor, logprob: Tensor, entropy: Tensor) -> Callable[..., SimpleNamespace]:
    """Stands for a model with TRL's fused head, whose outputs are given."""
    return lambda **_: SimpleNamespace(
        log_probs=logprob, entropy=entropy, mean_logits=torch.zeros_like(logprob),
        is_top1=logprob > 0, label_mask=target != -100,
    )  # fmt: skip


def trl_grpo(
    loss_type: str, target: Tensor, advantage: Tensor, old: Tensor, reference: Tensor | None,
    beta: float = 0.0, bonus: float = 0.0,
) -> Tail:  # fmt: skip
    def tail(logprob: Tensor, entropy: Tensor) -> Tensor:
        trainer = Trainer(
            target, loss_type=loss_type, beta=beta, epsilon_low=0.2, epsilon_high=0.2,
            use_vllm=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
            importance_sampling_level="token", use_adaptive_entropy=False, entropy_coef=bonus,
            _entropy_bonus_enabled=bonus != 0, current_gradient_accumulation_steps=1,
            args=SimpleNamespace(use_bias_correction_kl=False, delta=None),
            _get_per_token_logps_and_entropies=lambda *_, **__: (logprob, entropy, None),
        )  # fmt: skip
        mask = (target != -100).long()
        inputs = {
            "prompt_ids": target[:, :1], "prompt_mask": mask[:, :1], "completion_ids": target,
            "completion_mask": mask, "advantages": advantage.double(),
            "old_per_token_logps": old.double(),
            "ref_per_token_logps": None if reference is None else reference.double(),
        }  # fmt: skip
        loss: Tensor = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
        return loss

    return tail


def completions(target: Tensor) -> dict[str, Tensor]:
    """TRL's batch, in which tokens come one position later than in `target`."""
    mask = torch.nn.functional.pad((target != -100).long(), (1, 0))
    return {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}


def trl_dpo(target: Tensor, reference: Tensor, beta: float) -> Tail:
    def tail(logprob: Tensor, entropy: Tensor) -> Tensor:
        trainer = Trainer(
            target, ld_alpha=None, f_divergence_type="reverse_kl", loss_types=["sigmoid"],
            loss_weights=[1.0], beta=beta, use_weighting=False,
        )  # fmt: skip
        chosen, rejected = reference.double().sum(-1).chunk(2)
        inputs = {
            **completions(target), "ref_chosen_logps": chosen, "ref_rejected_logps": rejected,
        }  # fmt: skip
        loss: Tensor = trl.DPOTrainer._compute_loss(
            trainer, model_of(target, logprob, entropy), inputs, False
        )
        return loss

    return tail


def trl_kto(
    target: Tensor, reference: Tensor, desirable: Tensor, divergence: Tensor, beta: float,
    weights: tuple[float, float],
) -> Tail:  # fmt: skip
    def tail(logprob: Tensor, entropy: Tensor) -> Tensor:
        trainer = Trainer(
            target, calculate_KL=True, loss_type="kto", beta=beta, desirable_weight=weights[0],
            undesirable_weight=weights[1], _compute_kl_logps=lambda *_: divergence.double(),
        )  # fmt: skip
        inputs = {
            **completions(target), "label": desirable, "ref_logps": reference.double().sum(-1),
            "ref_KL_logps": torch.zeros_like(divergence),
        }  # fmt: skip
        loss: Tensor = trl.KTOTrainer._compute_loss(
            trainer, model_of(target, logprob, entropy), inputs, False
        )
        return loss

    return tail


def trl_dft(target: Tensor) -> Tail:
    def tail(logprob: Tensor, entropy: Tensor) -> Tensor:
        args = SimpleNamespace(loss_type="dft", average_tokens_across_devices=False)
        loss: Tensor = trl.SFTTrainer.compute_loss(
            Trainer(target, args=args), model_of(target, logprob, entropy), {"labels": target}
        )
        return loss

    return tail


# --- the recipes ---


def batch(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, a head and targets, some of them ignored; log-probabilities of an earlier
    policy and of a reference, which differ from the head's by about a quarter of a nat."""
    x, w, _, t = problem((4, 11), 203, 24, dtype, device, ignored=0.3)
    w = (2 * w).detach().requires_grad_()
    logprob = Exact(x, w, t).logprob.detach()
    old, frozen = (
        (logprob + torch.randn_like(logprob) / 4).float().masked_fill(t == -100, 0) for _ in "ab"
    )
    return x, w, t, old, frozen


@DTYPES
@pytest.mark.parametrize("of", ["tokens", "sequences"])
def test_grpo_is_that_of_trl(device: str, dtype: torch.dtype, of: str) -> None:
    x, w, t, old, frozen = batch(dtype, device)
    advantage = torch.randn(4, 11 if of == "tokens" else 1, device=device)
    ratio = (Exact(x, w, t).logprob - old).exp()
    for sign, clipped in ((1, ratio > 1.2), (-1, ratio < 0.8)):
        assert (clipped & (advantage.sign() == sign) & (t != -100)).any()
    judge(
        lambda x, w, t: rl.grpo(x, w, t, advantage, old, frozen),
        trl_grpo("grpo", t, advantage, old, frozen, beta=0.04), x, w, t,
    )  # fmt: skip


@DTYPES
def test_on_policy_has_grpos_gradient_in_one_call(
    device: str, dtype: torch.dtype, launched: list[int]
) -> None:
    x, w, t, _, _ = batch(dtype, device)
    advantage = torch.randn(4, 1, device=device)

    def exact(logprob: Tensor, _: Tensor) -> Tensor:
        counts = (t != -100).sum(-1, keepdim=True).clamp(min=1)
        return -(logprob * advantage.double() / counts).sum() / 4

    judge(lambda x, w, t: rl.on_policy(x, w, t, advantage), exact, x, w, t)
    assert len(launched) == 1
    head = Exact(x, w, t)
    same = trl_grpo("grpo", t, advantage, head.logprob.detach(), None)
    theirs, ours = (
        torch.autograd.grad(loss(head.logprob, head.entropy), head.weight, retain_graph=True)[0]
        for loss in (same, exact)
    )
    assert (ours - theirs).abs().max() < 1e-12


@DTYPES
def test_ppo_is_that_of_trl(device: str, dtype: torch.dtype) -> None:
    """GRPOTrainer's "bnpo" without a reference: a mean over tokens of PPO's objective."""
    x, w, t, old, _ = batch(dtype, device)
    advantage = torch.randn(4, 11, device=device)
    judge(
        lambda x, w, t: rl.ppo(x, w, t, advantage, old, bonus=0.5),
        trl_grpo("bnpo", t, advantage, old, None, bonus=0.5), x, w, t,
    )  # fmt: skip


@DTYPES
def test_dpo_is_that_of_trl(device: str, dtype: torch.dtype) -> None:
    x, w, t, _, frozen = batch(dtype, device)
    judge(
        lambda x, w, t: rl.dpo(x, w, t, frozen, beta=0.3), trl_dpo(t, frozen, 0.3), x, w, t
    )  # fmt: skip


@DTYPES
def test_kto_is_that_of_trl(device: str, dtype: torch.dtype) -> None:
    x, w, t, _, frozen = batch(dtype, device)
    desirable = torch.tensor([True, False, False, True], device=device)
    divergence, weights = torch.tensor(0.7, device=device), (1.0, 1.5)
    judge(
        lambda x, w, t: rl.kto(x, w, t, frozen, desirable, divergence, 0.3, weights),
        trl_kto(t, frozen, desirable, divergence, 0.3, weights), x, w, t,
    )  # fmt: skip


def test_ktos_divergence_is_a_mean_of_sequences_and_never_negative(device: str) -> None:
    x, w, t, _, frozen = batch(F32, device)
    for sign in (1, -1):
        off = frozen - sign * 3 * (t != -100)
        expected = (Exact(x, w, t).logprob - off).sum(-1).mean().clamp(min=0)
        actual = rl.kto_divergence(x, w, t, off)
        assert not actual.requires_grad and (expected > 0) == (sign > 0)
        within(actual, expected, 1e-5)


@DTYPES
def test_dft_is_that_of_trl(device: str, dtype: torch.dtype) -> None:
    x, w, t, _, _ = batch(dtype, device)
    judge(rl.dft, trl_dft(t), x, w, t)


@DTYPES
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_distillation_is_the_cross_entropy_with_the_teachers_tokens(
    device: str, dtype: torch.dtype, temperature: float
) -> None:
    x, w, t, _, _ = batch(dtype, device)
    teacher = torch.randn(4, 11, len(w), device=device).mul(2).softmax(-1)
    probability, top = teacher.topk(9)  # their sum is below 1
    loss = rl.distillation(x, w, t, top, probability, temperature)
    loss.backward()
    exact = [v.detach().double().requires_grad_() for v in (x, w)]
    log_q = (exact[0] @ exact[1].T / temperature).log_softmax(-1).gather(-1, top)
    token = -(probability.double() * log_q).sum(-1)
    expected = token.where(t != -100, 0).sum() / (t != -100).sum()
    expected.backward()
    bound = 2e-6 if dtype is F32 else 2e-3
    torch.testing.assert_close(loss.double(), expected, rtol=bound, atol=0)
    for made, of in zip((x.grad, w.grad), exact):
        assert made is not None and of.grad is not None and made.dtype is dtype
        apart = (made.double() - of.grad).norm() / of.grad.norm()
        assert apart < (2e-6 if dtype is F32 else 6e-3), apart


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)
def test_distillation_adds_up_a_class_of_every_token(device: str, dtype: torch.dtype) -> None:
    """One class is in every token's list. Sums in 16 bits would stop growing at a few hundred."""
    x, w, _, t = problem((4096,), 97, 16, dtype, device, ignored=0)
    x = (x + 1).detach().requires_grad_()
    top = torch.randint(1, 97, (4096, 3), device=device)
    top[:, 0] = 0
    probability = torch.tensor([0.5, 0.25, 0.125], device=device).expand(4096, 3)
    rl.distillation(x[None], w, t[None], top[None], probability[None]).backward()
    exact = [v.detach().double().requires_grad_() for v in (x, w)]
    log_q = (exact[0] @ exact[1].T).log_softmax(-1).gather(-1, top)
    (-(probability * log_q).sum() / 4096).backward()
    assert w.grad is not None and exact[1].grad is not None
    apart = (w.grad.double() - exact[1].grad).norm(dim=-1) / exact[1].grad.norm(dim=-1)
    assert apart.max() < (1e-4 if dtype is F32 else 3e-2), apart.max()


@DTYPES
def test_distillation_does_not_read_ignored_tokens(device: str, dtype: torch.dtype) -> None:
    x, w, t, _, _ = batch(dtype, device)
    probability, top = torch.rand(4, 11, 203, device=device).softmax(-1).topk(9)
    results = []
    for filled in (False, True):
        hidden, p, classes = x.detach().clone(), probability.clone(), top.clone()
        if filled:
            hidden[t == -100], p[t == -100], classes[t == -100] = math.nan, math.nan, -100
        hidden.requires_grad_()
        w.grad = None
        loss = rl.distillation(hidden, w, t, classes, p)
        loss.backward()
        results.append((loss, hidden.grad, w.grad))
    for plain, odd in zip(*results):
        assert torch.equal(plain, odd)


def test_a_nucleus_is_renormalised() -> None:
    """The log-probability of a drawn token within its own top-p set."""
    x, w, _, _ = problem((6,), 23, 16)
    z = (x.double() @ w.double().T / 0.8).detach()
    sets = [torch.randperm(23)[: 1 + 3 * i] for i in range(6)]
    drawn = torch.tensor([len(s) // 2 for s in sets])
    offsets = torch.tensor([0, *itertools.accumulate(len(s) for s in sets)])
    made = rl.nucleus_logprob(x, w, torch.cat(sets), offsets, drawn, 0.8)
    close(
        made, torch.stack([z[i, s].log_softmax(0)[d] for i, (s, d) in enumerate(zip(sets, drawn))])
    )
    of_x, of_w = torch.autograd.grad(made[1:].sum(), (x, w))
    assert not of_x[0].any() and bool(of_x[1:].any(-1).all())
    nobodys = [j for j in range(23) if all(j not in s for s in sets[1:])]
    assert not of_w[nobodys].any()


@DTYPES
def test_k3_has_the_gradient_of_an_estimate_of_the_divergence(
    device: str, dtype: torch.dtype
) -> None:
    x, w, t, _, frozen = batch(dtype, device)

    # From Schulman's "Approximating KL Divergence".
    def exact(logprob: Tensor, _: Tensor) -> Tensor:
        ratio = (frozen.double() - logprob).exp()
        return ((ratio - 1) - ratio.log()).masked_fill(t == -100, 0).sum()

    judge(lambda x, w, t: rl.k3(linear_logprob(x, w, t), frozen).sum(), exact, x, w, t)


def test_k3_is_never_negative_and_keeps_small_differences() -> None:
    logprob = -torch.rand(2000) * 9
    frozen = logprob + torch.randn(2000) * 10.0 ** -torch.randint(1, 6, (2000,))
    exact = torch.expm1(frozen.double() - logprob.double()) - (frozen.double() - logprob.double())
    ours = rl.k3(logprob, frozen)
    textbook = (frozen - logprob).exp() - (frozen - logprob) - 1
    assert (ours >= 0).all() and (textbook < 0).any()
    assert (ours - exact).abs().max() < 1e-6
    at = (frozen - logprob).abs() < 1e-3
    assert (ours - exact)[at].abs().max() < (textbook - exact)[at].abs().max() / 100


@DTYPES
def test_what_lies_in_ignored_tokens_changes_nothing(device: str, dtype: torch.dtype) -> None:
    """Even values that make the upstream gradient of an ignored token NaN change nothing."""
    x, w, t, old, frozen = batch(dtype, device)
    advantage = torch.randn(4, 11, device=device)
    results = []
    for junk in (0.0, 1e4, -1e4, math.nan):
        other = [v.masked_fill(t == -100, junk) for v in (advantage, old, frozen)]
        loss = rl.grpo(x, w, t, *other) + rl.ppo(x, w, t, *other[:2])
        loss = loss + rl.on_policy(x, w, t, other[0])
        results.append((loss, *torch.autograd.grad(loss, (x, w))))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0]))


@DTYPES
@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
def test_the_ratio_of_a_policy_and_itself_is_one(dtype: torch.dtype, entropy: bool) -> None:
    """Log-probabilities have the same bits with and without a gradient, alone and in a batch."""
    x, w, t, _, _ = batch(dtype, "cpu")

    def of(x: Tensor, t: Tensor) -> Tensor:
        result = linear_logprob(x, w, t, entropy=entropy)
        logprob: Tensor = result[0] if entropy else result
        return logprob

    new = of(x, t)
    with torch.no_grad():
        old, alone = of(x, t), torch.stack([of(x[i], t[i]) for i in range(len(t))])
    assert new.requires_grad and torch.equal(new, old) and torch.equal(new, alone)


# --- around the head ---


def test_targets_of_packed_sequences_do_not_cross_a_boundary(device: str) -> None:
    lengths = [3, 1, 0, 5, 2]
    ids = torch.arange(13, device=device)  # the last two tokens are padding
    learned = torch.ones(13, dtype=torch.bool, device=device)
    learned[[6, 11, 12]] = False  # token 6: prompt; others: padding
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    n = -100
    expected = [1, 2, n, n, 5, n, 7, 8, n, 10, n, n, n]
    assert rl.packed_targets(ids, learned, bounds).tolist() == expected


@DTYPES
def test_packed_sequences_are_the_sequences_one_by_one(device: str, dtype: torch.dtype) -> None:
    x, w, _, _ = problem((1, 12), 203, 24, dtype, device, ignored=0)
    ids = torch.randint(203, (12,), device=device)
    learned = torch.rand(12, device=device) < 0.7
    ends = [0, 5, 6, 12]
    target = rl.packed_targets(ids, learned, torch.tensor(ends, device=device))
    packed, sums = linear_logprob(x[0], w, target), []
    for start, end in itertools.pairwise(ends):
        labels = ids[start:end].where(learned[start:end], -100)
        alone = linear_logprob(x[0, start:end], w, labels, shift=True)
        assert torch.equal(packed[start:end], alone) or device != "cpu"
        close(packed[start:end], alone)
        sums.append(alone.sum())
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    reduced = torch.segment_reduce(packed, "sum", offsets=offsets)
    close(reduced, torch.stack(sums))
    head = Exact(x[0], w, target)
    grads = torch.autograd.grad(reduced.sum(), (x, w))
    theirs = torch.autograd.grad(head.logprob.sum(), (head.input, head.weight))
    for ours, exact in zip(grads, theirs):
        close(ours.view_as(exact), exact, dtype)


@DTYPES
@pytest.mark.parametrize("memory", [None, "8MiB"])
def test_heads_of_several_tokens_ahead_add_up(
    device: str, dtype: torch.dtype, memory: str | None
) -> None:
    x, w, _, _ = problem((3, 2, 9), 203, 24, dtype, device)
    ids = torch.randint(203, (2, 9), device=device)
    loss = rl.multi_token(x, w, ids, memory)
    hidden, weight = (v.detach().double().requires_grad_() for v in (x, w))
    logprob = (hidden @ weight.T).log_softmax(-1)
    expected = torch.zeros((), dtype=torch.float64, device=device)
    for k in range(3):
        rows = logprob[k, :, : 9 - k - 1].gather(-1, ids[:, k + 1 :, None])
        expected = expected - rows.mean() / 3
    close(loss, expected)
    theirs = torch.autograd.grad(expected, (hidden, weight))
    for ours, exact in zip(torch.autograd.grad(loss, (x, w)), theirs):
        close(ours, exact, dtype)


@DTYPES
def test_the_heads_stage_of_a_pipeline_is_the_whole(device: str, dtype: torch.dtype) -> None:
    x, w, _, t = problem((4, 11), 203, 24, dtype, device, ignored=0.4)
    tokens = (t != -100).sum()
    exact_x, exact_w = (v.detach().double().requires_grad_() for v in (x, w))
    expected = reference.loss(exact_x @ exact_w.T, t)
    expected.backward()
    stages = [rl.last_stage(x[i : i + 1], w, t[i : i + 1], tokens) for i in range(4)]
    assert x.grad is None, "the gradient is sent, not passed on"
    close(torch.stack([loss for loss, _ in stages]).sum(), expected)
    assert exact_x.grad is not None and exact_w.grad is not None and w.grad is not None
    close(torch.cat([grad for _, grad in stages]), exact_x.grad, dtype)
    close(w.grad, exact_w.grad, dtype)


def lora(dtype: torch.dtype, device: str) -> list[Tensor]:
    """Hidden states, a frozen head, A, B, and targets."""
    x, w, _, t = problem((4, 11), 203, 24, dtype, device)
    a = (torch.randn(8, 24, device=device) / 24**0.5).to(dtype).requires_grad_()
    b = (torch.randn(203, 8, device=device) / 8).to(dtype).requires_grad_()
    return [x, w.detach(), a, b, t]


@DTYPES
@pytest.mark.parametrize("recipe", [rl.lora_logprob, rl.merged_lora_logprob])
def test_a_lora_on_the_head_has_its_gradients(
    device: str, dtype: torch.dtype, recipe: Callable[..., Tensor]
) -> None:
    x, w, a, b, t = lora(dtype, device)
    upstream = torch.randn(4, 11, device=device)
    mine = [v.detach().double().requires_grad_() for v in (x, a, b)]
    logits = mine[0] @ (w.double() + 0.5 * mine[2] @ mine[1]).T
    expected = reference.statistics(logits, t, {})["logprob"]
    theirs = torch.autograd.grad(expected, mine, upstream.double())
    actual = recipe(x, w, a, b, t, 0.5)
    close(actual, expected, dtype)
    for ours, exact in zip(torch.autograd.grad(actual, (x, a, b), upstream), theirs):
        assert ours.dtype is dtype
        close(ours, exact, dtype)


def test_merging_a_small_update_in_bf16_rounds_it_away(device: str) -> None:
    x, w, a, b, t = lora(BF16, device)
    b = b.detach() / 100
    logits = x.double() @ (w.double() + b.double() @ a.double()).T
    expected = reference.statistics(logits, t, {})["logprob"]
    beside, merged = (
        (recipe(x, w, a, b, t) - expected).abs().max()
        for recipe in (rl.lora_logprob, rl.merged_lora_logprob)
    )
    assert beside < merged / 10


# --- the page ---


def test_the_page_shows_what_is_tested() -> None:
    """Every function of the file stands in docs/rl.md as it is."""
    source = (ROOT / "examples/python/rl.py").read_text()
    page = (ROOT / "docs/rl.md").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            text = ast.get_source_segment(source, node)
            assert text and text in page, node.name
            assert node.end_lineno and node.end_lineno - node.body[0].lineno < 10

# SPDX-License-Identifier: Apache-2.0
"""Distillation of a teacher's likeliest tokens with verl's and NeMo-RL's signatures, against their
formulas on logits in f64."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from frugal import CASES, check_default_is_enough
from logitless import LogitlessError
from logitless.integrations import nemo_rl, verl
from reference import close
from test_linear import problem

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPE, V, D, K = (2, 9), 17, 8, 4


def config(least: float | None = None) -> Any:
    return types.SimpleNamespace(
        distillation_loss=types.SimpleNamespace(log_prob_min_clamp=least, use_chunked_topk=False)
    )


def teacher(shape: tuple[int, ...], k: int = K, vocab: int = V) -> tuple[Tensor, Tensor]:
    """(log-probabilities, ids) [..., k] of a random teacher's likeliest tokens."""
    torch.manual_seed(5)
    made = (3 * torch.randn(*shape, vocab)).log_softmax(-1).topk(k, -1)
    return made.values, made.indices


def gradients(outputs: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """The gradients of a sum in which the elements have different factors."""
    total = sum(
        (part * torch.linspace(0.5, 1.5, part.numel()).reshape(part.shape)).sum()
        for part in outputs
    )
    return torch.autograd.grad(total, inputs)  # type: ignore[arg-type]


def verls_formula(
    z: Tensor, log_q: Tensor, ids: Tensor, least: float | None
) -> dict[str, Tensor]:  # fmt: skip
    log_q, all_of_it = log_q.double(), z.log_softmax(-1)
    log_p = all_of_it.gather(-1, ids)
    mass, teacher_mass = log_p.exp().sum(-1), log_q.exp().sum(-1)
    if least is not None:
        log_p, log_q = log_p.clamp_min(least), log_q.clamp_min(least)
    each = log_q.exp() * (log_q - log_p)
    own = all_of_it.topk(ids.shape[-1], -1).indices
    shared = (ids[..., None] == own[..., None, :]).any(-1)
    advantage = -(each * shared).sum(-1) / shared.sum(-1).clamp_min(1)
    return {
        "distillation_losses": each.sum(-1), "student_mass": mass, "teacher_mass": teacher_mass,
        "overlap_count": shared.sum(-1), "overlap_token_advantage": advantage,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("least", [None, -10.0, -2.0])
@pytest.mark.parametrize("nested", [True, False])
def test_verls_forward_kl(dtype: torch.dtype, least: float | None, nested: bool) -> None:
    x, w, _, _ = problem((1, 18), V, D, dtype, ignored=0)
    log_q, ids = teacher((1, 18))
    given = (log_q, ids)
    if nested:
        given = tuple(
            torch.nested.nested_tensor([t[0, :7], t[0, 7:]], layout=torch.jagged) for t in given
        )
    made = verl.compute_forward_kl_topk(x, w, *given, config(least), "thd", temperature=0.7)
    z = reference.logits_of(x, w) / 0.7
    expected = verls_formula(z, log_q, ids, least)
    assert list(made) == list(expected)
    for name, value in made.items():
        assert value.shape == (1, 18)
        assert value.requires_grad == (name == "distillation_losses")
        if name == "overlap_count":
            assert torch.equal(value, expected[name])
        else:
            close(value, expected[name])
    assert len(made["overlap_count"].unique()) > 1
    ours = gradients([made["distillation_losses"]], x, w)
    for a, e in zip(ours, gradients([expected["distillation_losses"]], x, w)):
        close(a, e, dtype)


def test_verls_overlap_may_be_left_out() -> None:
    x, w, _, _ = problem((1, 18), V, D, ignored=0)
    log_q, ids = teacher((1, 18))
    whole = verl.compute_forward_kl_topk(x, w, log_q, ids, config())
    less = verl.compute_forward_kl_topk(x, w, log_q, ids, config(), overlap=False)
    assert list(less) == list(whole)[:3]
    assert all(torch.equal(value, whole[name]) for name, value in less.items())


def test_verls_overlap_is_of_as_many_as_a_list_has() -> None:
    x, w, _, _ = problem((1, 3), 300, D, ignored=0)
    log_q, ids = teacher((1, 3), 257, 300)
    with pytest.raises(ValueError, match=r"^teacher_topk_ids has 257 columns; .* overlap=False"):
        verl.compute_forward_kl_topk(x, w, log_q, ids, config())
    made = verl.compute_forward_kl_topk(x, w, log_q, ids, config(), overlap=False)
    close(made["teacher_mass"], log_q.exp().sum(-1))


NEMO = [(False, False), (False, True), (True, False), (True, True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outside", "entropy"), NEMO, ids=str)
def test_nemo_rls_inputs_of_the_loss(dtype: torch.dtype, outside: bool, entropy: bool) -> None:
    x, w, _, _ = problem(SHAPE, V, D, dtype, ignored=0)
    logits, ids = teacher(SHAPE)
    made = nemo_rl.get_distillation_topk_logprobs(
        x, w, logits, ids, outside, entropy, temperature=0.7
    )
    z = reference.logits_of(x, w) / 0.7
    log_p = z.log_softmax(-1)
    student = log_p.gather(-1, ids) if outside else z.gather(-1, ids).log_softmax(-1)
    expected = [student[:, :-1], logits.double().log_softmax(-1)[:, :-1]]
    outputs: list[Tensor] = [made[0]]
    theirs = [expected[0]]
    if outside and entropy:
        assert made[2] is not None and made[2].shape == (2, 8)
        expected.append((log_p.exp() * log_p).sum(-1)[:, :-1])
        outputs.append(made[2])
        theirs.append(expected[2])
    else:
        assert made[2] is None
    for value, want in zip(made, expected):
        assert value is not None and value.shape == want.shape
        close(value, want)
    assert not made[1].requires_grad
    for a, e in zip(gradients(outputs, x, w), gradients(theirs, x, w)):
        close(a, e, dtype)


def nemo_rls_loss(
    student: Tensor, teacher: Tensor, entropy: Tensor | None, kind: str, weight: float
) -> Tensor:  # fmt: skip
    """NeMo-RL's DistillationLossFn for each token. With `entropy`, zero_outside_topk is set."""
    p, q = student.exp(), teacher.exp()
    forward, reverse = (q * (teacher - student)).sum(-1), (p * (student - teacher)).sum(-1)
    if entropy is not None:
        # outside the list the teacher's log-probability is taken as -100
        reverse = reverse + entropy - (p * student).sum(-1) + 100 * (1 - p.sum(-1))
    return {"forward": forward, "reverse": reverse}.get(
        kind, weight * forward + (1 - weight) * reverse
    )


@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed"])
@pytest.mark.parametrize("outside", [False, True])
def test_nemo_rls_loss_is_the_same(kind: str, outside: bool) -> None:
    x, w, _, _ = problem(SHAPE, V, D, ignored=0)
    logits, ids = teacher(SHAPE)
    made = nemo_rl.get_distillation_topk_logprobs(x, w, logits, ids, outside, kind != "forward")
    z = reference.logits_of(x, w)
    log_p = z.log_softmax(-1)
    student = log_p.gather(-1, ids) if outside else z.gather(-1, ids).log_softmax(-1)
    entropy = (log_p.exp() * log_p).sum(-1)[:, :-1] if outside and kind != "forward" else None
    theirs = nemo_rls_loss(
        student[:, :-1], logits.double().log_softmax(-1)[:, :-1], entropy, kind, 0.3
    )
    ours = nemo_rls_loss(*made, kind, 0.3)
    close(ours, theirs)
    for a, e in zip(gradients([ours], x, w), gradients([theirs], x, w)):
        close(a, e)


def test_nemo_rls_tokens_without_an_upstream_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the vocabulary is split, the softmax over the k tokens is of log-probabilities."""
    log_p = torch.randn(2, 3, 4)
    log_p[0, 1] = torch.nan
    log_p.requires_grad_()
    monkeypatch.setattr(nemo_rl, "linear_logprobs_at", lambda *_, **__: log_p)
    ids = torch.arange(4).expand(2, 3, 4)
    made = nemo_rl.get_distillation_topk_logprobs(
        torch.ones(2, 3, 5), torch.ones(9, 5), torch.zeros(2, 3, 4), ids, False, False, 0, "a group"
    )[0]
    keep = ~made.isnan()
    assert keep.all(-1).tolist() == [[True, False], [True, True]]
    upstream = torch.randn(2, 2, 4) * keep
    (grad,) = torch.autograd.grad(made, log_p, upstream)
    theirs = log_p.detach().nan_to_num().requires_grad_()
    of = torch.autograd.grad(theirs.log_softmax(-1)[:, :-1], theirs, upstream)[0]
    close(grad, of.double())
    assert not grad[0, 1].any()


@pytest.mark.parametrize(("dtype", "sizes"), CASES, ids=str)
def test_the_default_memory_is_enough(
    dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:  # fmt: skip
    n, d, v = sizes
    x, w, _, _ = problem((1, n), v, d, dtype, ignored=0)
    log_q, ids = teacher((1, n), min(K, v), v)

    def verls(x: Tensor, w: Tensor) -> Tensor:
        return verl.compute_forward_kl_topk(x, w, log_q, ids, config(-10.0))["distillation_losses"]

    def nemos(x: Tensor, w: Tensor) -> Tensor:
        return nemo_rl.get_distillation_topk_logprobs(x, w, log_q, ids, True, False)[0]

    for call in (verls, nemos):
        check_default_is_enough(call, x, w)


def test_what_is_refused() -> None:
    x, w, _, _ = problem(SHAPE, V, D, ignored=0)
    log_q, ids = teacher(SHAPE)
    for change, said in (
        ({"data_format": "sbhd"}, "data_format is 'sbhd'; allowed: 'thd', 'bshd'"),
        ({"teacher_topk_ids": ids[:, :4]}, r"teacher_topk_ids \(2, 4, 4\); allowed: \(2, 9, 'k'\)"),
        ({"teacher_topk_ids": ids + V}, r"teacher_topk_ids\[0, 0, 0\] .*is \d+; allowed"),
        ({"weight": w[:, :3]}, "^weight|^hidden_states"),
    ):
        given: dict[str, Any] = {
            "hidden_states": x, "weight": w, "teacher_topk_log_probs": log_q,
            "teacher_topk_ids": ids, "config": config(), **change,
        }  # fmt: skip
        with pytest.raises(LogitlessError, match=said):
            verl.compute_forward_kl_topk(**given)
    for more, said in (
        ({"context_parallel_group": "cp"}, "context_parallel_group is 'cp', which has no"),
        ({"teacher_topk_indices": ids[:, :4]}, r"teacher_topk_logits has shape \(2, 9, 4\)"),
        ({"student_hidden_states": x[:, :4]}, "teacher_topk_indices|student_hidden_states"),
    ):
        given = {
            "student_hidden_states": x, "weight": w, "teacher_topk_logits": log_q,
            "teacher_topk_indices": ids, "zero_outside_topk": True, "calculate_entropy": False,
            **more,
        }  # fmt: skip
        with pytest.raises(LogitlessError, match=said):
            nemo_rl.get_distillation_topk_logprobs(**given)

# SPDX-License-Identifier: Apache-2.0
"""Prompt log-probabilities in vLLM's shapes, against its formulas on logits in f64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from logitless import LogitlessError
from logitless._abi import Room
from logitless.integrations import vllm
from logitless.torch import default_memory
from reference import close
from test_linear import problem

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def expected(log_p: Tensor, k: int, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What vLLM's Sampler.gather_logprobs makes of log-probabilities [N, V] of which no two are
    equal: ids and log-probabilities [N, k + 1], and ranks from 1 on."""
    chosen = log_p.gather(-1, tokens[:, None])  # [N, 1]
    likeliest = log_p.topk(k, -1)
    ids = torch.cat([tokens[:, None], likeliest.indices], -1)
    return ids, torch.cat([chosen, likeliest.values], -1), (log_p >= chosen).sum(-1)


class Words:
    def decode(self, ids: list[int]) -> str:
        (one,) = ids
        return f"<{one}>"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [0, 1, 5, 17])
def test_tensors_are_those_of_the_formula(dtype: torch.dtype, k: int) -> None:
    x, w, b, t = problem((23,), 17, 8, dtype, ignored=0)
    for options in ({}, {"linear_bias": b, "temperature": 0.7, "softcap": 3.0, "logit_scale": 0.5}):
        made = vllm.gather_logprobs(x, w, k, t, **options)
        logits = reference.logits_of(x, w, options.get("linear_bias"))
        s = reference.statistics(logits, t, options)
        ids, logprobs, ranks = expected(s["z"].log_softmax(-1), k, t)
        assert made.logprob_token_ids.dtype == torch.int32 and not made.logprobs.requires_grad
        assert (
            made.logprobs.dtype == torch.float32 and made.selected_token_ranks.dtype == torch.int64
        )
        assert torch.equal(made.logprob_token_ids.long(), ids)
        assert torch.equal(made.selected_token_ranks, ranks)
        close(made.logprobs, logprobs)
        listed = made.logprob_token_ids[:, 1:] == made.logprob_token_ids[:, :1]
        assert listed.any(-1).sum() == (ranks <= k).sum()
        again = made.logprobs[:, :1].expand(-1, k)
        assert torch.equal(again[listed], made.logprobs[:, 1:][listed])  # the same, to the bit


@pytest.mark.parametrize("last", [True, False])
def test_the_list_of_a_prompt(last: bool) -> None:
    x, w, _, t = problem((12,), 17, 8, ignored=0)
    log_p = reference.logits_of(x, w).log_softmax(-1).detach()
    states = x if last else x[:-1]
    found = vllm.prompt_logprobs(states, w, t.tolist(), 3, tokenizer=Words())
    assert len(found) == 12 and found[0] is None
    for i, at in enumerate(found[1:], 1):
        assert at is not None
        order = log_p[i - 1].argsort(descending=True)
        token, best = int(t[i]), order[:3].tolist()
        assert list(at) == list(dict.fromkeys([token, *best]))  # the token itself comes first
        for id, (logprob, rank, word) in at.items():
            assert rank == int((order == id).nonzero()) + 1 and word == f"<{id}>"
            assert logprob == pytest.approx(float(log_p[i - 1, id]), abs=1e-5)
    plain = vllm.prompt_logprobs(states, w, t, 0)
    assert [list(at) for at in plain[1:] if at] == [[token] for token in t[1:].tolist()]
    assert plain[1] is not None and plain[1][int(t[1])].decoded_token is None


def test_the_shortest_prompt_and_no_tokens() -> None:
    x, w, _, t = problem((3,), 17, 8, ignored=0)
    assert vllm.prompt_logprobs(x[:1], w, t[:1], 2) == [None]
    made = vllm.gather_logprobs(x[:0], w, 2, t[:0])
    assert [tuple(part.shape) for part in made] == [(0, 3), (0, 3), (0,)]


def test_a_row_that_holds_a_nan() -> None:
    x, w, _, t = problem((4,), 17, 8, ignored=0)
    x = x.detach().clone()
    x[1, 2] = torch.nan
    made = vllm.gather_logprobs(x, w, 3, t)
    assert made.logprobs.isnan().all(-1).tolist() == [False, True, False, False]
    assert not made.logprobs[[0, 2, 3]].isnan().any()


def test_memory_bounds_the_call() -> None:
    x, w, _, t = problem((64,), 300, 8, ignored=0)
    bounded, free = (vllm.gather_logprobs(x, w, 4, t, memory=m) for m in ("1MiB", None))
    assert all(torch.equal(a, b) for a, b in zip(bounded, free))
    with pytest.raises(LogitlessError, match="memory"):
        vllm.gather_logprobs(x, w, 4, t, memory=1)


def test_the_default_memory_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    real = vllm.linear_outputs

    def spy(*arguments: Any, **options: Any) -> Any:
        given.append(options["memory"])
        return real(*arguments, **options)

    monkeypatch.setattr(vllm, "linear_outputs", spy)
    x, w, _, t = problem((4,), 17, 8, ignored=0)
    for memory in (None, "64MiB"):
        vllm.gather_logprobs(x, w, 2, t, memory=memory)
    large = torch.empty(8192, 16, device="meta"), torch.empty(151936, 16, device="meta")
    vllm.gather_logprobs(*large, 2, torch.zeros(8192, dtype=torch.int64, device="meta"))
    with default_memory("1GiB"):
        vllm.gather_logprobs(x, w, 2, t)
    small = 4 * 4 * 17 // 3
    assert given == [Room(small), "64MiB", Room(92 << 20), None]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_logprobs": -1}, "^num_logprobs is -1; allowed: 0 to 17, the least of V and 256$"),
        ({"num_logprobs": True}, "num_logprobs is True; allowed"),
        ({"num_logprobs": 18}, r"^num_logprobs is 18; allowed: 0 to 17, the least of V and 256$"),
        ({"num_logprobs": 2.0}, r"^num_logprobs is 2\.0; allowed: 0 to 17"),
        ({"token_ids": torch.zeros(4, dtype=torch.int64)}, r"token_ids \(4,\); allowed: \[N, D\]"),
        ({"token_ids": torch.full((5,), 17)}, r"^token_ids\[0\] is 17; allowed: 0 to 16$"),
        ({"token_ids": torch.ones(5, dtype=torch.bool)}, "^token_ids is bool; allowed: int32, int"),
        ({"weight": torch.zeros(17, 9)}, "^weight|^hidden_states"),
        ({"weight": torch.zeros(())}, "^weight has"),
        ({"weight": None}, "^weight is a NoneType"),
    ],
)
def test_what_is_refused(change: dict[str, Any], said: str) -> None:
    x, w, _, t = problem((5,), 17, 8, ignored=0)
    given = {"hidden_states": x, "weight": w, "num_logprobs": 2, "token_ids": t, **change}
    with pytest.raises(LogitlessError, match=said):
        vllm.gather_logprobs(**given)


def test_a_prompt_of_another_length_is_refused() -> None:
    x, w, _, t = problem((5,), 17, 8, ignored=0)
    for tokens in (t[:4], torch.cat([t, t]), t[None], t[:0]):
        with pytest.raises(LogitlessError, match="prompt_token_ids has shape"):
            vllm.prompt_logprobs(x, w, tokens, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_prompt_logprobs": 18}, r"^num_prompt_logprobs is 18; allowed: 0 to 17, the least"),
        ({"num_prompt_logprobs": -1}, r"^num_prompt_logprobs is -1; allowed: 0 to 17, the least"),
        ({"prompt_token_ids": [1, 2, 17, 3]}, r"^prompt_token_ids\[2\] is 17; allowed: 0 to 16$"),
        ({"prompt_token_ids": [1, -1, 2, 3]}, r"^prompt_token_ids\[1\] is -1; allowed: 0 to 16$"),
        ({"prompt_token_ids": [1, 2, 3, 99]}, r"^prompt_token_ids\[3\] is 99; allowed: 0 to 16$"),
        ({"prompt_token_ids": [1.0, 2, 3, 4]}, r"^prompt_token_ids is float32; allowed: int32"),
        ({"weight": torch.zeros(17, 9)}, r"^weight has shape \[17, 9\]; allowed: \[V, 8\]$"),
        ({"softcap": -1.0}, "^softcap is -1"),
    ],
)
def test_what_is_wrong_with_a_prompt_has_its_names(change: dict[str, Any], said: str) -> None:
    given = {
        "hidden_states": torch.randn(4, 8), "weight": torch.randn(17, 8),
        "prompt_token_ids": [1, 2, 3, 4], "num_prompt_logprobs": 2, **change,
    }  # fmt: skip
    for states in (given["hidden_states"], given["hidden_states"][:-1]):
        with pytest.raises(LogitlessError, match=said):
            vllm.prompt_logprobs(**{**given, "hidden_states": states})


def test_what_is_no_token_is_refused() -> None:
    x, w = torch.randn(4, 6), torch.randn(50, 6)
    with pytest.raises(ValueError, match=r"is -100; allowed: 0 to 49"):
        vllm.gather_logprobs(x, w, 2, torch.tensor([1, -100, 3, 4]))
    with pytest.raises(TypeError, match=r"^token_ids is float32; allowed: int32, int64$"):
        vllm.gather_logprobs(x, w, 2, torch.tensor([1.9, 2.7, 3.0, 4.0]))
    for call in (vllm.gather_logprobs, vllm.prompt_logprobs):
        with pytest.raises(TypeError, match=rf"^{call.__name__}\(\) got an unexpected keyword"):
            call(x, w, torch.arange(4), 2, shift=True)  # type: ignore[call-arg,operator]

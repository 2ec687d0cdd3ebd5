# SPDX-License-Identifier: Apache-2.0
"""A prompt's log-probabilities in vLLM's formats: each token's log-probability, its rank, and the
most likely tokens, from hidden states and head, without logits.

vLLM is not imported. LogprobsTensors and Logprob are tuples with the field names and the order of
vLLM's; vLLM's `LogprobsTensors(*ours)` converts one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless._errors import invalid, renames, wrong_dtype, wrong_shape
from logitless.integrations._memory import frugal
from logitless.torch import _run, _top
from logitless.torch._functions import linear_outputs


class LogprobsTensors(NamedTuple):
    """In each row the prompt's token comes first, then the most likely ones."""

    logprob_token_ids: Tensor  # [N, k + 1] int32
    logprobs: Tensor  # [N, k + 1] f32
    selected_token_ranks: Tensor  # [N] int64; 1 is the likeliest


class Logprob(NamedTuple):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


_NEVER = -(1 << 63)  # an ignore_index that no token has
_MEMORY = 92 << 20  # 96 MiB with the results of 8192 tokens and their 20 most likely ones
PromptLogprobs = list[dict[int, Logprob] | None]


@renames(
    {
        "input": "hidden_states",
        "linear_weight": "weight",
        "target": "token_ids",
        "k": "num_logprobs",
    }
)
@torch.no_grad()
def gather_logprobs(
    hidden_states: Tensor, weight: Tensor, num_logprobs: int, token_ids: Tensor, *,
    linear_bias: Tensor | None = None, temperature: float | Tensor = 1.0, logit_scale: float = 1.0,
    softcap: float | None = 0.0, memory: int | str | None = None,
) -> LogprobsTensors:  # fmt: skip
    """The log-probabilities and ranks of token_ids [N], where hidden_states[i] ([N, D]) predicts
    token_ids[i], and the `num_logprobs` most likely tokens, as vLLM's Sampler.gather_logprobs
    computes them from log-probabilities [N, V]. `num_logprobs` is 0 to 256 and at most V. The
    options are those of linear_topk. The default of `memory` is 92 MiB, or the call's minimum if
    that is more, unless default_memory sets another."""
    if isinstance(num_logprobs, bool) or not isinstance(num_logprobs, int) or num_logprobs < 0:
        raise invalid(f"num_logprobs is {num_logprobs!r}; allowed: 0 to 256, and at most V")
    if hidden_states.dim() != 2 or token_ids.shape != hidden_states.shape[:1]:
        raise wrong_shape(
            f"hidden_states has shape {tuple(hidden_states.shape)} and token_ids "
            f"{tuple(token_ids.shape)}; allowed: [N, D] and [N]"
        )
    if token_ids.is_floating_point():
        raise wrong_dtype(f"token_ids is {str(token_ids.dtype)[6:]}; allowed: int32, int64")
    # In one call, so that a token which is also among the most likely ones has the same
    # log-probability there, to the bit.
    wanted = _run.LOGPROB | _run.BITS["rank"]
    if num_logprobs:
        wanted |= _top.wanted_of(num_logprobs)
    memory = frugal(memory, hidden_states, weight, lambda _: _MEMORY)
    outputs = linear_outputs(
        hidden_states, weight, token_ids.long(), wanted, linear_bias, reduction="none",
        ignore_index=_NEVER, logit_scale=logit_scale, softcap=softcap, temperature=temperature,
        memory=memory, k=num_logprobs,
    )  # fmt: skip
    made = dict(zip(_run.OUTPUTS.values(), outputs))
    logprobs, ids = made["logprob"][:, None], token_ids[:, None].long()  # [N, 1]
    if num_logprobs:
        logprobs = torch.cat([logprobs, made["top_logits"]], -1)  # [N, k + 1]
        ids = torch.cat([ids, made["top_ids"]], -1)  # [N, k + 1]
    return LogprobsTensors(ids.int(), logprobs, made["rank"].long() + 1)


def prompt_logprobs(
    hidden_states: Tensor, weight: Tensor, prompt_token_ids: Sequence[int] | Tensor,
    num_prompt_logprobs: int, *, tokenizer: Any = None, **options: Any,
) -> PromptLogprobs:  # fmt: skip
    """The list RequestOutput.prompt_logprobs for a prompt of T tokens with hidden_states [T, D];
    the last row is not read, and may be absent. The list has None for the first token, and for each
    other token a dict from ids (its id and the most likely ones) to Logprob. `tokenizer`, if given,
    decodes them with its decode([id])."""
    tokens = torch.as_tensor(prompt_token_ids, device=hidden_states.device)  # [T]
    if tokens.dim() != 1 or len(tokens) < 1 or len(tokens) - len(hidden_states) not in (0, 1):
        raise wrong_shape(
            f"prompt_token_ids has shape {tuple(tokens.shape)} and hidden_states "
            f"{tuple(hidden_states.shape)}; allowed: [T] and [T, D], or [T - 1, D]"
        )
    made = gather_logprobs(
        hidden_states[: len(tokens) - 1], weight, num_prompt_logprobs, tokens[1:], **options
    )
    every, *numbers = (part.tolist() for part in made)
    words: dict[int, str] = {}
    if tokenizer is not None:
        words = {i: tokenizer.decode([i]) for i in {i for ids in every for i in ids}}
    found: PromptLogprobs = [None]
    for ids, logprobs, rank in zip(every, *numbers):
        ranks = (rank, *range(1, len(ids)))
        found.append({i: Logprob(p, r, words.get(i)) for i, p, r in zip(ids, logprobs, ranks)})
    return found

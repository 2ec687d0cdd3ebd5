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

from logitless import _abi
from logitless._errors import LogitlessError, invalid, places, renames, wrong_dtype, wrong_shape
from logitless.integrations._memory import frugal
from logitless.torch import _run, _top
from logitless.torch._checks import check_tensor
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


_HEAD = {"input": "hidden_states", "linear_weight": "weight"}


@renames({**_HEAD, "target": "token_ids", "k": "num_logprobs"})
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
    return _gathered(
        hidden_states, weight, num_logprobs, token_ids, linear_bias=linear_bias,
        temperature=temperature, logit_scale=logit_scale, softcap=softcap, memory=memory,
    )  # fmt: skip


@torch.no_grad()
def _gathered(
    hidden: Tensor, weight: Tensor, k: int, target: Tensor, *, linear_bias: Tensor | None = None,
    memory: int | str | None = None, **options: Any,
) -> LogprobsTensors:  # fmt: skip
    """gather_logprobs, whose errors have the names of linear_topk and linear_logprob."""
    check_tensor("linear_weight", weight)
    most = min(weight.shape[0], _abi.MOST_LISTED) if weight.dim() == 2 else _abi.MOST_LISTED
    if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= most:
        raise invalid(f"k is {k!r}; allowed: 0 to {most}, the least of V and {_abi.MOST_LISTED}")
    if hidden.dim() != 2 or target.shape != hidden.shape[:1]:
        raise wrong_shape(
            f"input has shape {tuple(hidden.shape)} and target {tuple(target.shape)}; allowed: "
            "[N, D] and [N]"
        )
    if target.is_floating_point() or target.is_complex() or target.dtype is torch.bool:
        raise wrong_dtype(f"target is {str(target.dtype)[6:]}; allowed: int32, int64")
    # In one call, so that a token which is also among the most likely ones has the same
    # log-probability there, to the bit.
    wanted = _run.LOGPROB | _run.BITS["rank"]
    if k:
        wanted |= _top.wanted_of(k)
    memory = frugal(memory, hidden, weight, lambda _: _MEMORY)
    try:
        outputs = linear_outputs(
            hidden, weight, target.long(), wanted, linear_bias, reduction="none",
            ignore_index=_NEVER, memory=memory, k=k, **options,
        )  # fmt: skip
    except LogitlessError as error:
        error.args = (str(error).removesuffix(f", or ignore_index {_NEVER}"),)
        raise
    made = dict(zip(_run.OUTPUTS.values(), outputs))
    logprobs, ids = made["logprob"][:, None], target[:, None].long()  # [N, 1]
    if k:
        logprobs = torch.cat([logprobs, made["top_logits"]], -1)  # [N, k + 1]
        ids = torch.cat([ids, made["top_ids"]], -1)  # [N, k + 1]
    return LogprobsTensors(ids.int(), logprobs, made["rank"].long() + 1)


@renames({**_HEAD, "target": "prompt_token_ids", "k": "num_prompt_logprobs"})
def prompt_logprobs(
    hidden_states: Tensor, weight: Tensor, prompt_token_ids: Sequence[int] | Tensor,
    num_prompt_logprobs: int, *, tokenizer: Any = None, linear_bias: Tensor | None = None,
    temperature: float | Tensor = 1.0, logit_scale: float = 1.0, softcap: float | None = 0.0,
    memory: int | str | None = None,
) -> PromptLogprobs:  # fmt: skip
    """The list RequestOutput.prompt_logprobs for a prompt of T tokens with hidden_states [T, D];
    the last row is not read, and may be absent. The list has None for the first token, and for each
    other token a dict from ids (its id and the most likely ones) to Logprob. `num_prompt_logprobs`
    is 0 to 256 and at most V. `tokenizer`, if given, decodes them with its decode([id]). The other
    options are those of gather_logprobs."""
    tokens = torch.as_tensor(prompt_token_ids, device=hidden_states.device)  # [T]
    if tokens.dim() != 1 or len(tokens) < 1 or len(tokens) - len(hidden_states) not in (0, 1):
        raise wrong_shape(
            f"prompt_token_ids has shape {tuple(tokens.shape)} and hidden_states "
            f"{tuple(hidden_states.shape)}; allowed: [T] and [T, D], or [T - 1, D]"
        )
    with places(tokens.shape, shift=1):
        made = _gathered(
            hidden_states[: len(tokens) - 1], weight, num_prompt_logprobs, tokens[1:],
            linear_bias=linear_bias, temperature=temperature, logit_scale=logit_scale,
            softcap=softcap, memory=memory,
        )  # fmt: skip
    every, *numbers = (part.tolist() for part in made)
    words: dict[int, str] = {}
    if tokenizer is not None:
        words = {i: tokenizer.decode([i]) for i in {i for ids in every for i in ids}}
    found: PromptLogprobs = [None]
    for ids, logprobs, rank in zip(every, *numbers):
        ranks = (rank, *range(1, len(ids)))
        found.append({i: Logprob(p, r, words.get(i)) for i, p, r in zip(ids, logprobs, ranks)})
    return found

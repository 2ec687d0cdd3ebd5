# SPDX-License-Identifier: Apache-2.0
"""A model class of lm-evaluation-harness: log-likelihoods of a transformers causal LM without its
logits.

    import lm_eval
    from logitless.integrations.lm_eval import LogitlessLM

    lm_eval.simple_evaluate(model=LogitlessLM("meta-llama/Llama-3.1-8B", batch_size=8), tasks=[...])

The class is the harness's HFLM with all its options, except that log-likelihoods are computed from
the head, in f32, at the continuations' positions only. Prefix, windows, truncation and
generate_until are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

try:
    from lm_eval.api.registry import register_model  # type: ignore[import-not-found,unused-ignore]
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found,unused-ignore]
except ModuleNotFoundError as error:
    raise ImportError(
        "logitless.integrations.lm_eval needs lm-evaluation-harness: pip install lm_eval[hf]"
    ) from error
import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

from logitless._errors import invalid, not_supported
from logitless.integrations.transformers import patch_transformers, score

# (the request's strings or None, tokens of the context, tokens of the continuation)
_Request = tuple[Any, list[int], list[int]]
_Answer = tuple[float, bool]


@register_model("logitless")  # type: ignore[untyped-decorator,unused-ignore]
class LogitlessLM(HFLM):  # type: ignore[misc,unused-ignore]
    """HFLM, with linear_cross_entropy's `memory` as an additional option. A model that is passed as
    an object is patched by patch_transformers and stays patched; without labels it works as
    before."""

    def __init__(
        self, pretrained: Any, backend: str = "causal", *, memory: int | str | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(pretrained, backend, **options)
        if self.backend != "causal":
            raise not_supported(f"backend is {self.backend!r}; allowed: 'causal'")
        if self.softmax_dtype not in (None, torch.float32):
            raise not_supported(
                f"softmax_dtype is {str(self.softmax_dtype)[6:]}; allowed: None, float32 (which "
                "log-probabilities are made in)"
            )
        given: dict[str, Any] = {} if memory is None else {"memory": memory}
        patch_transformers(self.model, **given)
        self._detects = False

    def _scores(self, input: Tensor, *wanted: Tensor) -> tuple[Tensor, Tensor]:
        dtype = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            return score(self.model, input, *wanted)  # type: ignore[no-any-return]

    def _model_call(self, inps: Tensor, attn_mask: Any = None, labels: Any = None) -> Tensor:
        """The harness's search for a batch size calls this for all logits. During the search it
        returns log-probabilities [B, T, 1] instead."""
        if not self._detects:
            return super()._model_call(inps, attn_mask, labels)  # type: ignore[no-any-return]
        count, length = inps.shape
        rows = torch.arange(count, device=inps.device).repeat_interleave(length)  # [B T]
        positions = torch.arange(length, device=inps.device).repeat(count)  # [B T]
        return self._scores(inps, rows, positions, inps.flatten())[0].view(count, length, 1)

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        self._detects = True
        try:
            return super()._detect_batch_size(requests, pos)  # type: ignore[no-any-return]
        finally:
            self._detects = False

    def _loglikelihood_tokens(
        self, requests: list[_Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[_Answer]:
        answers: list[_Answer] = [(0.0, False)] * len(requests)
        shown = not disable_tqdm and self.rank == 0
        with tqdm(total=len(requests), disable=not shown, desc="log-likelihoods") as progress:
            for batch in self._batches(requests, override_bs):
                for index, answer in self._answers(batch, requests):
                    answers[index] = answer
                    if (
                        asked := requests[index][0]
                    ) is not None:  # None: a window of loglikelihood_rolling
                        self.cache_hook.add_partial("loglikelihood", asked, answer)
                    progress.update()
        return answers

    def _input(self, request: _Request) -> tuple[int, ...]:
        """The model's input: all but the last token, cut from the left."""
        _, context, continuation = request
        if not context or not 0 < len(continuation) <= self.max_length:
            raise invalid(
                f"a request has {len(context)} tokens of context and {len(continuation)} of "
                f"continuation; allowed: at least 1, and 1 to {self.max_length}, the model's length"
            )
        return tuple([*context, *continuation][-(self.max_length + 1) :][:-1])

    def _batches(
        self, requests: list[_Request], override_bs: int | None
    ) -> Iterator[list[tuple[tuple[int, ...], list[int]]]]:
        """Batches of (input, indices of the requests with this input), the longest inputs first.
        With logits_cache, requests that differ only in their last token share an input."""
        served: dict[Any, list[int]] = {}
        for index, request in enumerate(requests):
            tokens = self._input(request)
            key = tokens if self.logits_cache else (tokens, index)
            served.setdefault(key, []).append(index)
        inputs = [(self._input(requests[indices[0]]), indices) for indices in served.values()]
        inputs.sort(key=lambda row: (-len(row[0]), row[0]))
        size = override_bs if self.batch_size == "auto" else self.batch_size
        self.batch_sizes: dict[int, int] = {}  # forget those found for other lengths
        ordered = [requests[indices[0]] for _, indices in inputs]
        start = 0
        while start < len(inputs):
            count = size or self._batch_scheduler(start, ordered)
            yield inputs[start : start + count]
            start += count

    def _answers(
        self, batch: list[tuple[tuple[int, ...], list[int]]], requests: list[_Request]
    ) -> Iterator[tuple[int, _Answer]]:
        rows: list[int] = []
        positions: list[int] = []
        target: list[int] = []
        asked = [(row, index) for row, (_, served) in enumerate(batch) for index in served]
        for row, index in asked:
            continuation, length = requests[index][2], len(batch[row][0])
            rows += [row] * len(continuation)
            positions += range(length - len(continuation), length)
            target += continuation
        # Padding after the end, which no earlier position attends to.
        padded = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(tokens) for tokens, _ in batch], batch_first=True
        ).to(self.device)  # [B, T]
        wanted = (torch.tensor(part, device=self.device) for part in (rows, positions, target))
        logprob, greedy = (made.cpu() for made in self._scores(padded, *wanted))  # [M]
        start = 0
        for _, index in asked:
            part = slice(start, start := start + len(requests[index][2]))
            yield index, (float(logprob[part].double().sum()), bool(greedy[part].all()))

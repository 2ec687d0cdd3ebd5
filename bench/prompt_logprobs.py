# SPDX-License-Identifier: Apache-2.0
"""A prompt's log-probabilities in vLLM's shapes, each token's own, its rank and the k likeliest:
ours in several bounds of memory, compared with vLLM's formula on logits in f32.

    LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python \
        python bench/prompt_logprobs.py --heads 8192x2048x151936 --counts 20

One process; all take turns in bursts, in an order that is reversed every round; medians. bf16
inputs. MiB: the allocator's peak beyond the inputs, results in it. The error is that of
log-probabilities of 256 tokens against f64, each of its own id; "ranks" the largest difference of
their ranks from those of f64. Needs a GPU; `--heads 64x32x300` tries it anywhere.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from chosen_columns import run
from compare_later import medians
from topk import mebibytes
from torch import Tensor

from logitless.integrations import vllm

Made = tuple[Tensor, Tensor, Tensor]  # ids and log-probabilities [N, k + 1], ranks [N]
MEMORY = (None, "64MiB", "256MiB")


def of_logits(x: Tensor, w: Tensor, k: int, tokens: Tensor) -> Made:
    """What vLLM's Sampler makes of logits in f32."""
    logprobs = (x @ w.t()).float().log_softmax(-1)
    likeliest = logprobs.topk(k, -1)
    own = logprobs.gather(-1, tokens[:, None])  # [N, 1]
    ids = torch.cat([tokens[:, None], likeliest.indices], -1)
    return ids, torch.cat([own, likeliest.values], -1), (logprobs >= own).sum(-1)


def errors(made: Made, x: Tensor, w: Tensor, tokens: Tensor) -> tuple[float, int]:
    exact = (x[:256].double() @ w.double().t()).log_softmax(-1)
    ids, logprobs, ranks = (part[:256] for part in made)
    error = (logprobs.double() - exact.gather(-1, ids.long())).abs().max().item()
    own = exact.gather(-1, tokens[:256, None])
    return error, int(((exact > own).sum(-1) + 1 - ranks).abs().max())


def compare(shape: str, given: argparse.Namespace, device: str) -> None:
    tokens, hidden, vocab = (int(extent) for extent in shape.split("x"))
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    w = (torch.randn(vocab, hidden, device=device) / hidden**0.5).bfloat16()
    target = torch.randint(0, vocab, (tokens,), device=device)
    calls: dict[str, Callable[[], Any]] = {}
    for k in map(int, given.counts.split(",")):
        for memory in MEMORY:
            name = f"ours, top {k}, {memory or 'default'}"
            ours = functools.partial(vllm.gather_logprobs, x, w, k, target, memory=memory)
            calls[name] = ours
        calls[f"logits, top {k}"] = functools.partial(of_logits, x, w, k, target)
    found = {
        name: (mebibytes(call, device), *errors(call(), x, w, target))
        for name, call in calls.items()
    }
    median = medians(calls, given.rounds, given.burst, device)
    print(f"{shape:28s} {'ms':>9s} {'MiB':>9s} {'error':>8s} {'ranks':>6s}")
    for name, ms in median.items():
        mib, error, ranks = found[name]
        print(f"  {name:26s} {ms:9.3f} {mib:9.1f} {error:8.1e} {ranks:6d}")


if __name__ == "__main__":
    run(__doc__, "8192x2048x151936", "--counts", "20", compare)

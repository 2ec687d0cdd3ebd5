# SPDX-License-Identifier: Apache-2.0
"""The k largest logits of each token with lse, through the C interface, compared with the
loss alone, and with torch's logsumexp and topk of the logits. torch's product rounds the logits to
bf16; they are used in bf16 and cast to f32.

    LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python \
        python bench/topk.py --heads 8192x4096x128256 --counts 20,32,256

One process; all take turns in bursts, in an order that is reversed every round; medians of
`--rounds`. bf16 inputs. MiB is what a call takes beyond the inputs: ours the workspace and the
outputs, torch's what its allocator had at most. The last column is the largest error of 64 tokens'
log-probabilities, each against f64 of its own id. Needs a GPU; `--heads 64x32x300` tries it
anywhere, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from chosen_columns import Op, run
from compare_later import medians
from torch import Tensor

from logitless import _abi

KIND = _abi.LINEAR_CROSS_ENTROPY_FORWARD
Made = tuple[Tensor, Tensor]  # log-probabilities and ids, each [N, k]


class Head:
    def __init__(self, sizes: list[int], device: str) -> None:
        tokens, hidden, vocab = sizes
        torch.manual_seed(0)
        self.input = torch.randn(tokens, hidden, device=device).bfloat16()
        self.weight = (torch.randn(vocab, hidden, device=device) / hidden**0.5).bfloat16()
        target = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.inputs = {"input": self.input, "weight": self.weight, "target": target}
        self.states = {
            name: torch.empty(tokens, device=device) for name in ("row_reference", "row_log_sum")
        }

    def loss(self) -> Op:
        tokens = len(self.input)
        return Op(KIND, {**self.inputs, "loss": torch.empty(tokens, device=self.input.device)})

    def top(self, count: int) -> tuple[Op, Callable[[], Made]]:
        """The op, and a function that runs it and makes log-probabilities of its logits."""
        shape, device = (len(self.input), count), self.input.device
        logits = torch.empty(shape, device=device)
        ids = torch.empty(shape, dtype=torch.int64, device=device)
        op = Op(KIND, {**self.inputs, **self.states, "top_logits": logits, "top_ids": ids})

        def made() -> Made:
            op()
            reference, log_sum = (state[:, None] for state in self.states.values())
            return ((logits - reference) - log_sum).clamp_(max=0), ids

        return op, made

    def torch(self, count: int, f32: bool) -> Callable[[], Made]:
        def made() -> Made:
            logits = self.input @ self.weight.t()
            if f32:
                logits = logits.float()
            lse = logits.logsumexp(-1, keepdim=True)
            values, ids = logits.topk(count)
            return (values - lse).float(), ids

        return made

    def error(self, made: Made) -> float:
        """The largest error of the first 64 tokens; a likelier class left out counts too."""
        worst = 0.0
        weight = self.weight.double()
        for logprobs, ids, x in zip(made[0][:64], made[1][:64], self.input[:64].double()):
            exact = torch.log_softmax(weight @ x, -1)
            worst = max(worst, (logprobs.double() - exact[ids]).abs().max().item())
            least = exact.topk(len(ids)).values[-1]
            worst = max(worst, (least - exact[ids].min()).item())
        return worst


def mebibytes(call: Callable[[], object], device: str) -> float:
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    held = call()
    torch.cuda.synchronize()
    del held
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def compare(shape: str, given: argparse.Namespace, device: str) -> None:
    head = Head([int(extent) for extent in shape.split("x")], device)
    loss = head.loss()
    calls: dict[str, Callable[[], object]] = {"the loss alone": loss}
    memory, errors = {"the loss alone": loss.plan.bytes / 2**20}, {}
    for count in map(int, given.counts.split(",")):
        name = f"top {count}"
        op, calls[name] = head.top(count)
        memory[name] = (op.plan.bytes + len(head.input) * count * 12) / 2**20
        errors[name] = head.error(head.top(count)[1]())
        for f32 in (True, False):
            name = f"torch, top {count}, {'f32' if f32 else 'bf16'} logits"
            call = head.torch(count, f32)
            calls[name] = call
            memory[name] = mebibytes(call, device)
            errors[name] = head.error(call())
    median = medians(calls, given.rounds, given.burst, device)
    base = median["the loss alone"]
    print(f"{shape:32s} {'ms':>9s} {'x loss':>8s} {'MiB':>9s} {'error':>8s}")
    for name, ms in median.items():
        error = f"{errors[name]:8.1e}" if name in errors else ""
        print(f"  {name:30s} {ms:9.3f} {ms / base:8.3f} {memory[name]:9.1f} {error}".rstrip())


if __name__ == "__main__":
    heads = "8192x4096x128256,8192x2048x151936,1x4096x128256"
    run(__doc__, heads, "--counts", "20,32,256", compare)

# SPDX-License-Identifier: Apache-2.0
"""Chosen columns through the C interface: logits and row states of K random columns a token, then
both gradients for random upstream gradients, from the state that Forward keeps; and the same for a
softmax over the ids alone. Compared with linear_logprobs_at for as many ids, linear_logprob for one
target a token, and three cuBLAS products of the same operands.

    LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python \
        python bench/chosen_columns.py --heads 8192x4096x128256 --columns 1,32,64

One process; all take turns in bursts, in an order that is reversed every round; medians of
`--rounds`. bf16. The last column is the largest error of 64 tokens' logits against f64, relative to
the largest logit. Needs a GPU; `--heads 64x32x300` tries it anywhere, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from compare_later import medians
from torch import Tensor

from logitless import _abi
from logitless import torch as logitless
from logitless.torch import _run

OPTIONS = _abi.Options(reduction=_abi.REDUCTION_NONE)


class Op:
    """An op on these tensors, ready to be called."""

    def __init__(
        self, kind: int, tensors: dict[str, Tensor], key: int = 0, *, only_chosen: bool = False
    ) -> None:
        self.tensors = tensors  # keeps the memory at the addresses
        self.addresses = [t.data_ptr() for t in tensors.values()]
        device = next(iter(tensors.values())).device
        where = (int(device.type == "cuda"), 0)
        views = views_of(tensors)
        self.plan = _abi.Plan(
            kind, views, OPTIONS, where, kept_key=key, addresses=self.addresses, consume_kept=False,
            only_chosen=only_chosen,
        )  # fmt: skip
        self.workspace = torch.empty(self.plan.bytes + 256, dtype=torch.uint8, device=device)
        self.cuda = device.type == "cuda"

    def __call__(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream if self.cuda else 0
        aligned = (self.workspace.data_ptr() + 255) // 256 * 256
        self.plan.run(self.addresses, aligned, stream)


def views_of(tensors: dict[str, Tensor]) -> list[_abi.View]:
    return [_run.view(name, t) for name, t in tensors.items()]


class Head:
    def __init__(self, sizes: list[int], device: str) -> None:
        tokens, hidden, vocab = sizes
        torch.manual_seed(0)
        self.input = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_()
        weight = torch.randn(vocab, hidden, device=device) / hidden**0.5
        self.weight = weight.bfloat16().requires_grad_()
        self.target = torch.randint(0, vocab, (tokens,), device=device)
        self.upstream = torch.randn(tokens, device=device)

    def products(self) -> None:
        x, w = self.input.detach(), self.weight.detach()
        logits = x @ w.t()
        logits @ w
        logits.t() @ x

    def logprob(self) -> None:
        self.input.grad = self.weight.grad = None
        logitless.linear_logprob(self.input, self.weight, self.target).backward(self.upstream)

    def logprobs_at(self, count: int) -> Callable[[], None]:
        """linear_logprobs_at of `count` random ids a token, and its gradients."""
        (tokens, _), vocab = self.input.shape, len(self.weight)
        ids = torch.randint(0, vocab, (tokens, count), device=self.input.device)
        upstream = torch.randn(tokens, count, device=self.input.device)

        def both() -> None:
            self.input.grad = self.weight.grad = None
            logitless.linear_logprobs_at(self.input, self.weight, ids).backward(upstream)

        return both

    def chosen(self, count: int) -> tuple[Callable[[], None], Tensor, Tensor]:
        """A Forward and a Backward; and the ids and logits of the Forward."""
        x, w = self.input.detach(), self.weight.detach()
        (tokens, _), vocab, device = x.shape, w.shape[0], x.device
        ids = torch.randint(0, vocab, (tokens, count), device=device)
        ids[:, 0] = self.target
        inputs = {"input": x, "weight": w, "target": self.target}
        where = (int(device.type == "cuda"), 0)
        bytes = _abi.whole_kept(tokens, vocab, _abi.BF16)
        size = _abi.kept_size(views_of(inputs), OPTIONS, where, bytes)
        state = {
            "row_reference": torch.empty(tokens, device=device),
            "row_log_sum": torch.empty(tokens, device=device),
            "kept": torch.empty(size.shape, dtype=x.dtype, device=device),
            "kept_rows": torch.empty(size.rows_shape, device=device),
        }
        logits = torch.empty(tokens, count, device=device)
        forward = Op(
            _abi.LINEAR_CROSS_ENTROPY_FORWARD,
            {**inputs, **state, "ids": ids, "logits_at": logits},
        )
        grads = torch.randn(tokens, count, device=device)
        backward = Op(
            _abi.LINEAR_CROSS_ENTROPY_BACKWARD,
            {
                **inputs, **state, "ids": ids, "grad_logits_at": grads,
                "grad_loss": torch.zeros(tokens, device=device), "grad_lse": -grads.sum(1),
                "grad_input": torch.empty_like(x), "grad_weight": torch.empty_like(w),
            },
            size.key,
        )  # fmt: skip

        def both() -> None:
            forward()
            backward()

        both()
        return both, ids, logits

    def among(self, count: int) -> tuple[Callable[[], None], Tensor, Tensor]:
        """Like `chosen`, with torch's softmax over the logits at the ids alone."""
        x, w = self.input.detach(), self.weight.detach()
        (tokens, _), vocab, device = x.shape, w.shape[0], x.device
        ids = torch.randint(0, vocab, (tokens, count), device=device)
        inputs = {"input": x, "weight": w, "target": self.target, "ids": ids}
        logits = torch.empty(tokens, count, device=device)
        upstream = torch.randn(tokens, count, device=device)
        grads = torch.empty_like(upstream)
        forward = Op(_abi.LINEAR_CROSS_ENTROPY_FORWARD, {**inputs, "logits_at": logits})
        backward = Op(
            _abi.LINEAR_CROSS_ENTROPY_BACKWARD,
            {
                **inputs, "grad_logits_at": grads, "grad_input": torch.empty_like(x),
                "grad_weight": torch.empty_like(w),
            },
            only_chosen=True,
        )  # fmt: skip

        def both() -> None:
            forward()
            of_log_softmax = upstream.sum(1, keepdim=True) * torch.softmax(logits, 1)
            torch.sub(upstream, of_log_softmax, out=grads)
            backward()

        both()
        return both, ids, logits


def compare(shape: str, given: argparse.Namespace, device: str) -> None:
    head = Head([int(extent) for extent in shape.split("x")], device)
    calls: dict[str, Callable[[], None]] = {
        "three cuBLAS products": head.products,
        "linear_logprob": head.logprob,
    }
    errors = {}
    counts = [int(count) for count in given.columns.split(",")]
    for count in counts:
        calls[f"linear_logprobs_at, K {count}"] = head.logprobs_at(count)
    made = {
        f"{count} columns{over}": make(count)
        for count in counts
        for over, make in (("", head.chosen), (", over the ids", head.among))
    }
    for name, (both, ids, logits) in made.items():
        calls[name] = both
        x, w = head.input.detach()[:64].double(), head.weight.detach()
        exact = torch.stack([w[row].double() @ y for row, y in zip(ids[:64], x)])
        errors[name] = ((logits[:64] - exact).abs().max() / exact.abs().max()).item()
    median = medians(calls, given.rounds, given.burst, device)
    base = median["three cuBLAS products"]
    print(f"{shape:32s} {'ms':>9s} {'x three':>8s} {'error':>8s}")
    for name, ms in median.items():
        error = f"{errors[name]:8.1e}" if name in errors else ""
        print(f"  {name:30s} {ms:9.3f} {ms / base:8.3f} {error}".rstrip(), flush=True)


def run(
    text: str, heads: str, option: str, counts: str,
    compare: Callable[[str, argparse.Namespace, str], None],
) -> None:  # fmt: skip
    """The command line of a benchmark of heads: calls `compare` for each. `heads` and `counts` are
    defaults, of --heads and of `option`."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--heads", default=heads)
    parser.add_argument(option, default=counts)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--burst", type=float, default=0.25, help="seconds")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, N x D x V, bf16")
    for shape in given.heads.split(","):
        compare(shape, given, device)
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    run(__doc__, "8192x4096x128256,8192x2048x151936", "--columns", "1,32,64", compare)

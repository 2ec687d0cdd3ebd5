# SPDX-License-Identifier: Apache-2.0
"""A list of rows as the vocabulary: loss and gradients over the whole head, over V / PART random
rows of it by vocab_ids, and over the same rows copied before, which shows what copy and scatter
cost; and the total variation and acceptance of a frozen draft head, compared with its three bare
products.

    LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python \
        python bench/vocab_ids.py --heads 8192x4096x128256 --parts 4

Targets: a quarter of the rows takes at most 0.30 of the whole, a frozen draft head 1.14 of its
three products. One process; all take turns in bursts, in an order that is reversed every round;
medians of `--rounds`. bf16; the teacher's D is the student's. The last column is the relative
error of grad_input against f32 logits of the listed rows, for 256 tokens. Needs a GPU;
`--heads 64x32x300` tries it anywhere, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from chosen_columns import run
from compare_later import medians
from torch import Tensor
from torch.nn import functional

from logitless.torch import linear_cross_entropy, linear_divergence


class Head:
    def __init__(self, sizes: list[int], device: str) -> None:
        tokens, hidden, vocab = sizes
        torch.manual_seed(0)

        def rows() -> Tensor:
            return (torch.randn(vocab, hidden, device=device) / hidden**0.5).bfloat16()

        self.input = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_()
        self.weight, self.teacher = rows().requires_grad_(), rows()
        self.states = torch.randn(tokens, hidden, device=device).bfloat16()

    def loss(self, weight: Tensor, target: Tensor, **options: Any) -> Callable[[], None]:
        def both() -> None:
            self.input.grad = weight.grad = None
            linear_cross_entropy(self.input, weight, target, **options).backward()

        return both

    def draft(self, weight: Tensor, teacher: Tensor, **options: Any) -> Callable[[], None]:
        def both() -> None:
            self.input.grad = None
            loss, _ = linear_divergence(
                self.input, weight, self.states, teacher, kind="tv",
                return_statistics="acceptance", **options,
            )  # fmt: skip
            loss.backward()

        return both

    def three(self, rows: Tensor) -> Callable[[], None]:
        def products() -> None:
            logits = self.input.detach() @ rows.t()
            logits @ rows
            logits.t() @ self.input.detach()

        return products

    def three_of_a_draft(self, rows: Tensor, teacher: Tensor) -> Callable[[], None]:
        def products() -> None:
            logits = self.input.detach() @ rows.t()
            self.states @ teacher.t()
            logits @ rows

        return products

    def error(self, call: Callable[[], None], loss: Callable[[Tensor], Tensor]) -> float:
        """The relative error of the first 256 tokens' grad_input, for a mean over all tokens."""
        call()
        assert self.input.grad is not None
        count = min(256, len(self.input))
        x = self.input.detach()[:count].float().requires_grad_()
        (loss(x) / len(self.input)).backward()
        assert x.grad is not None
        ours = self.input.grad[:count].float()
        return ((ours - x.grad).norm() / x.grad.norm()).item()


def tv_of(head: Head, weight: Tensor, teacher: Tensor, x: Tensor) -> Tensor:
    """The total variation, summed over the tokens of x."""
    p = (x @ weight.float().t()).softmax(-1)
    q = (head.states[: len(x)].float() @ teacher.float().t()).softmax(-1)
    return (p - q).abs().sum() / 2


def compare(shape: str, given: argparse.Namespace, device: str) -> None:
    head = Head([int(extent) for extent in shape.split("x")], device)
    tokens, vocab = len(head.input), len(head.weight)
    whole, target = "the whole head", torch.randint(0, vocab, (tokens,), device=device)
    calls: dict[str, Callable[[], None]] = {
        "three cuBLAS products": head.three(head.weight.detach()),
        whole: head.loss(head.weight, target),
    }
    bases, errors = {whole: "three cuBLAS products"}, {}
    for part in map(int, given.parts.split(",")):
        ids = torch.randperm(vocab, device=device)[: vocab // part]
        ordered = ids.sort().values
        place = torch.randint(0, len(ids), (tokens,), device=device)
        copied = head.weight.detach()[ordered].requires_grad_()
        rows, teacher = copied.detach(), head.teacher[ordered]
        frozen = head.weight.detach()
        name, products = f"vocab_ids of 1/{part}", f"the draft's three products, 1/{part}"
        made = {
            name: (head.loss(head.weight, ordered[place], vocab_ids=ids), whole),
            f"  these rows, copied before, 1/{part}": (head.loss(copied, place), whole),
            products: (head.three_of_a_draft(rows, teacher), ""),
            f"frozen draft head, tv, 1/{part}": (head.draft(rows, teacher), products),
            f"  by vocab_ids, 1/{part}": (
                head.draft(frozen, head.teacher, vocab_ids=ids), products,
            ),
            f"  by teacher_vocab_ids, 1/{part}": (
                head.draft(rows, head.teacher, teacher_vocab_ids=ordered), products,
            ),
        }  # fmt: skip
        for label, (call, base) in made.items():
            calls[label], bases[label] = call, base
        errors[name] = head.error(
            calls[name],
            lambda x, r=rows, p=place: functional.cross_entropy(
                x @ r.float().t(), p[: len(x)], reduction="sum"
            ),
        )
        for label in (f"frozen draft head, tv, 1/{part}", f"  by vocab_ids, 1/{part}"):
            errors[label] = head.error(
                calls[label], lambda x, r=rows, t=teacher: tv_of(head, r, t, x)
            )
    median = medians(calls, given.rounds, given.burst, device)
    print(f"{shape:40s} {'ms':>9s} {'of':>7s} {'error':>8s}")
    for name, ms in median.items():
        base = bases.get(name)
        ratio = f"{ms / median[base]:7.3f}" if base else ""
        error = f"{errors[name]:8.1e}" if name in errors else ""
        print(f"  {name:38s} {ms:9.3f} {ratio:>7s} {error}".rstrip(), flush=True)


if __name__ == "__main__":
    run(__doc__, "8192x4096x128256,8192x2048x151936", "--parts", "4", compare)

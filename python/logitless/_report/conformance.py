# SPDX-License-Identifier: Apache-2.0
"""A sample of calls, compared with the formulas of docs/semantics.md in double on the same device.

The conformance suite compares every element with the contract's bound, which needs the C++
reference. This sample is for machines that have only the package: it compares whole gradients, in
the 2-norm, with limits of 3 to 10 times the error of a correct kernel."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from logitless._divergence import Kind
from logitless._errors import LogitlessError
from logitless._report.heads import DTYPES
from logitless.torch import (
    cross_entropy,
    linear_cross_entropy,
    linear_divergence,
    linear_logprob,
    linear_logprobs_at,
)

# The limits: of a gradient's error, relative to its 2-norm; and of a value's error, relative to 1
# plus its absolute value.
_GRADIENT = {"f32": 2e-5, "f16": 2e-3, "bf16": 1.2e-2}
_VALUE = 1e-5


KINDS: tuple[Kind, ...] = ("forward_kl", "reverse_kl", "jsd", "skew_kl")


@dataclass
class Sample:
    """A call on random operands, as a function `ours` and as the formula in double, `exact`."""

    ours: Callable[[list[Tensor]], Tensor]
    exact: Callable[[list[Tensor]], Tensor]
    leaves: list[Tensor]


@dataclass
class Row:
    """The cases of one function and dtype."""

    function: str
    dtype: str
    cases: int = 0
    failures: list[str] = field(default_factory=list)
    worst: float = 0.0  # the largest error in units of its limit


class Draw:
    """Random shapes, options and operands of one seed."""

    def __init__(self, seed: int, dtype: str, device: str) -> None:
        self.random, self.device, self.dtype = random.Random(seed), device, DTYPES[dtype]
        self.generator = torch.Generator(device).manual_seed(seed)
        self.tokens = self.random.choice([1, 2, 7, 33, 130, 257])
        self.hidden = self.random.choice([8, 40, 64, 72, 200, 512])
        self.vocab = self.random.choice([3, 50, 129, 1000, 2051, 4096])

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*shape, device=self.device, generator=self.generator) * scale
        return values.to(self.dtype)

    def targets(self) -> Tensor:
        shape = (self.tokens,)
        target = torch.randint(
            0, self.vocab, shape, device=self.device, generator=self.generator
        )  # [N]
        ignored = torch.rand(*shape, device=self.device, generator=self.generator) < 0.2
        return target.masked_fill(ignored, -100)

    def head(self, hidden: int | None = None) -> list[Tensor]:
        hidden = hidden or self.hidden
        return [self.normal(self.tokens, hidden),
                self.normal(self.vocab, hidden, scale=3 / hidden**0.5)]  # fmt: skip

    def row_options(self) -> dict[str, Any]:
        """Options that change a token's logits."""
        pick = self.random.choice
        return {"softcap": pick([0.0, 0.0, 5.0, 30.0]), "logit_scale": pick([1.0, 1.0, 0.5]),
                "temperature": pick([1.0, 1.0, 0.7])}  # fmt: skip


def _logits(
    operands: list[Tensor], softcap: float, logit_scale: float, temperature: float
) -> Tensor:
    z = operands[0] @ operands[1].t()  # [N, V]
    if len(operands) > 2:
        z = z + operands[2]
    z = z * logit_scale
    return (softcap * torch.tanh(z / softcap) if softcap else z) / temperature


def _loss(draw: Draw) -> Sample:
    options, target = draw.row_options(), draw.targets()
    smoothing, z_loss = draw.random.choice([0.0, 0.1]), draw.random.choice([0.0, 1e-3])
    leaves = draw.head()
    if draw.random.random() < 0.5:
        leaves.append(draw.normal(draw.vocab))

    def ours(v: list[Tensor]) -> Tensor:
        loss: Tensor = linear_cross_entropy(
            v[0], v[1], target, linear_bias=v[2] if len(v) > 2 else None, reduction="none",
            label_smoothing=smoothing, z_loss=z_loss, **options,
        )  # fmt: skip
        return loss

    def exact(v: list[Tensor]) -> Tensor:
        z = _logits(v, **options)
        loss = torch.nn.functional.cross_entropy(
            z, target, reduction="none", label_smoothing=smoothing
        )
        return loss + z_loss * (target >= 0) * torch.logsumexp(z, 1) ** 2

    return Sample(ours, exact, leaves)


def _logprob(draw: Draw) -> Sample:
    options, target = draw.row_options(), draw.targets()

    def ours(v: list[Tensor]) -> Tensor:
        return torch.stack(linear_logprob(v[0], v[1], target, entropy=True, **options))

    def exact(v: list[Tensor]) -> Tensor:
        counts = target >= 0
        logp = torch.log_softmax(_logits(v, **options), 1)
        chosen = logp.gather(1, target.clamp(min=0)[:, None])[:, 0]
        return torch.stack((chosen, -(logp.exp() * logp).sum(1))) * counts

    return Sample(ours, exact, draw.head())


def _logprobs_at(draw: Draw) -> Sample:
    options, count = draw.row_options(), draw.random.choice([1, 2, 31, 64])
    draw.vocab = max(draw.vocab, 50)  # with few columns 64 upstream gradients nearly cancel
    ids = torch.randint(
        0, draw.vocab, (draw.tokens, count), device=draw.device, generator=draw.generator
    )  # [N, K]

    def ours(v: list[Tensor]) -> Tensor:
        logprobs: Tensor = linear_logprobs_at(v[0], v[1], ids, **options)
        return logprobs

    def exact(v: list[Tensor]) -> Tensor:
        return torch.log_softmax(_logits(v, **options), 1).gather(1, ids)

    return Sample(ours, exact, draw.head())


def _divergence(draw: Draw) -> Sample:
    kind: Kind = draw.random.choice(KINDS)
    temperature, beta = draw.random.choice([1.0, 2.0]), 0.3
    teacher = draw.head(hidden=draw.random.choice([8, 40, 96]))

    def ours(v: list[Tensor]) -> Tensor:
        return linear_divergence(
            v[0], v[1], teacher[0], teacher[1], kind=kind, beta=beta, temperature=temperature,
            reduction="none",
        )  # fmt: skip

    def exact(v: list[Tensor]) -> Tensor:
        q_logits = _logits([t.double() for t in teacher], 0.0, 1.0, temperature)
        logp = torch.log_softmax(_logits(v, 0.0, 1.0, temperature), 1)  # [N, V]
        logq = torch.log_softmax(q_logits, 1)  # [N, V]
        p, q = logp.exp(), logq.exp()
        logm = torch.log((1 - beta) * p + beta * q)
        forward = {"forward_kl": logp, "skew_kl": logm, "jsd": logm}.get(kind)
        if forward is None:
            return (p * (logp - logq)).sum(1)
        kl = (q * (logq - forward)).sum(1)
        return kl if kind != "jsd" else beta * kl + (1 - beta) * (p * (logp - logm)).sum(1)

    return Sample(ours, exact, draw.head())


def _given_logits(draw: Draw) -> Sample:
    target = draw.targets()

    def ours(v: list[Tensor]) -> Tensor:
        return cross_entropy(v[0], target, reduction="none")

    def exact(v: list[Tensor]) -> Tensor:
        return torch.nn.functional.cross_entropy(v[0], target, reduction="none")

    return Sample(ours, exact, [draw.normal(draw.tokens, draw.vocab, scale=3)])


FUNCTIONS: dict[str, Callable[[Draw], Sample]] = {
    "linear_cross_entropy": _loss,
    "linear_logprob": _logprob,
    "linear_logprobs_at": _logprobs_at,
    "linear_divergence": _divergence,
    "cross_entropy": _given_logits,
}


def _value_and_gradients(
    call: Callable[[list[Tensor]], Tensor], leaves: list[Tensor], upstream: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    taken = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    value = call(taken)
    gradients = torch.autograd.grad(value, taken, torch.ones_like(value) if upstream is None
                                    else upstream.to(value.dtype))  # fmt: skip
    return value.detach(), list(gradients)


def check(draw: Draw, make: Callable[[Draw], Sample], dtype: str) -> tuple[float, str | None]:
    """Returns the largest error in units of its limit, and a text about what is wrong, or None."""
    sample = make(draw)
    with torch.no_grad():
        shape = sample.ours([leaf.clone() for leaf in sample.leaves]).shape
    upstream = torch.randn(shape, device=draw.device, generator=draw.generator)
    value, gradients = _value_and_gradients(sample.ours, sample.leaves, upstream)
    again, twice = _value_and_gradients(sample.ours, sample.leaves, upstream)
    wide = [leaf.double() for leaf in sample.leaves]
    want, exact = _value_and_gradients(sample.exact, wide, upstream)
    shares = [("value", ((value.double() - want).abs() / (1 + want.abs())).max() / _VALUE)]
    for i, (got, right) in enumerate(zip(gradients, exact)):
        size = right.norm() + 1e-6 * sample.leaves[i].numel() ** 0.5
        shares.append((f"gradient {i}", (got.double() - right).norm() / size / _GRADIENT[dtype]))
    shape_of_call = f"N {draw.tokens} D {draw.hidden} V {draw.vocab}"
    for name, share in shares:
        if not share <= 1:  # NaN too
            return float(share), f"{shape_of_call}: {name} at {float(share):.3g} of its limit"
    if not torch.equal(value, again) or any(map(lambda a, b: not a.equal(b), gradients, twice)):
        return 0.0, f"{shape_of_call}: two runs differ"
    return max(float(share) for _, share in shares), None


def run(device: str, cases: int, seconds: Callable[[], float]) -> list[Row]:
    """Runs `cases` of each function and dtype, or as many as `seconds()` allow."""
    rows = [Row(function, dtype) for function in FUNCTIONS for dtype in DTYPES]
    for case in range(cases):
        for row in rows:
            if seconds() <= 0:
                return rows
            seed = case * 1000 + rows.index(row)
            try:
                draw = Draw(seed, row.dtype, device)
                share, wrong = check(draw, FUNCTIONS[row.function], row.dtype)
            except (LogitlessError, RuntimeError) as error:
                share, wrong = 0.0, f"{type(error).__name__}: {str(error).splitlines()[0]}"
            row.cases += 1
            row.worst = max(row.worst, share if math.isfinite(share) else 0.0)
            if wrong:
                row.failures.append(f"seed {seed}: {wrong}")
    return rows

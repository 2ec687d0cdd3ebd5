# SPDX-License-Identifier: Apache-2.0
"""A head in f64, with the error that docs/semantics.md ("Accuracy") allows for every element."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import reference

F32, BF16 = torch.float32, torch.bfloat16
U32 = 2.0**-24
UNIT = {F32: U32, BF16: 2.0**-8}


class Exact:
    """A head in f64, and how far the library may be from it."""

    def __init__(self, x: Tensor, w: Tensor, t: Tensor) -> None:
        self.dtype, self.target = x.dtype, t.flatten()
        self.input, self.weight = (v.detach().double().requires_grad_() for v in (x, w))
        rows = self.input.flatten(0, -2)  # [N, D]
        s = reference.statistics(rows @ self.weight.T, self.target, {})
        self.logprob, self.entropy = (s[name].view(t.shape) for name in ("logprob", "entropy"))
        valid = s["valid"].double()
        with torch.no_grad():
            z, lse, entropy = s["z"], s["lse"][:, None], s["entropy"][:, None]
            self.log_p, self.p = z - z.logsumexp(-1, keepdim=True), z.softmax(-1)
            depth = rows.abs() @ self.weight.abs().T  # sum of the magnitudes of a logit's terms
            e = gamma(rows.shape[-1]) * depth + 3 * U32 * z.abs()  # [N, V]
            e_t, z_t = (v.gather(-1, s["safe"][:, None])[:, 0] for v in (e, z))
            vocab = math.log2(z.shape[-1])
            # Valid for any row_reference that the contract allows.
            log_sum = lse - z.amax(-1, keepdim=True) + math.log(2)
            b = 4 * U32 * (entropy + vocab + 3 + log_sum) + U32 * lse.abs()
            b = b + (self.p * e).sum(-1, keepdim=True)
            u = e_t + 2 * U32 * (z_t.abs() + self.logprob.flatten().abs())
            self.of_logprob = valid * (b[:, 0] + u)  # [N]
            self.surprise = (self.log_p + entropy).abs()  # [N, V]
            h = (self.p * e * (1 + self.surprise)).sum(-1)
            magnitude = (lse.abs() + (self.p * z.abs()).sum(-1, keepdim=True))[:, 0]
            self.of_entropy = valid * (h + 4 * U32 * (vocab + 3 + magnitude))  # [N]
            apart = (z - z.amax(-1, keepdim=True)).abs() + math.log(2)
            self.of_p = self.p * (e + b + 4 * U32 * (3 + apart))  # [N, V]

    def bounds(self, g: Tensor, g_entropy: Tensor, dg: Tensor, dg_entropy: Tensor) -> list[Tensor]:
        """Error bounds of the gradients of input and weight. g and g_entropy [N] are the upstream
        gradients, dg and dg_entropy their errors."""
        unit, p = UNIT[self.dtype], self.p
        column = torch.nn.functional.one_hot(self.target.clamp(min=0), p.shape[-1])
        rest = p * self.surprise
        g, g_entropy, dg, dg_entropy = (v.abs()[:, None] for v in (g, g_entropy, dg, dg_entropy))
        entropy = self.entropy.detach().view(-1, 1)
        summands = g * (p + column) + g_entropy * p * (self.log_p.abs() + entropy)
        draw = g * self.of_p + dg * (p + column) + dg_entropy * rest + 4 * U32 * summands
        draw += g_entropy * (self.of_p * (1 + self.surprise) + p * self.of_entropy[:, None])
        if self.dtype is BF16:
            draw += unit * g_entropy * p  # the additional error of kept state
        rounded = 2 * unit if self.dtype is BF16 else 0.0
        n, vocab = p.shape
        x, w = self.input.detach().flatten(0, -2).abs(), self.weight.detach().abs()
        to_input = (draw + (gamma(vocab) + rounded) * summands) @ w
        to_weight = (draw + (gamma(n) + rounded) * summands).T @ x
        return [to_input.view_as(self.input), to_weight]


def gamma(depth: int) -> float:
    return U32 * (4 + max(math.sqrt(depth), depth / 16))


def within(actual: Tensor, exact: Tensor, bound: Tensor | float) -> None:
    bound = torch.as_tensor(bound, dtype=torch.float64, device=exact.device)
    if exact.dim():
        bound = bound + UNIT[actual.dtype] * exact.detach().abs() + 2.0**-120
    off = (actual.detach().double() - exact.detach()).abs()
    assert (off <= bound).all(), f"{(off / bound).max():.3g} of the bound"

# SPDX-License-Identifier: Apache-2.0
"""One LM head: its data, our calls, the bare products that all need, and a reference in double.

    input [N, D] bf16, weight [V, D] bf16, target [N]; gradients bf16, mean loss
Data as of a trained head: weight is random with logits of standard deviation 3, and twice the
target's row is added to each input, so that the target's logit stands out and most probabilities
are tiny."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import native
import torch
from gpu_native import Call, Library

HEADS = {  # N, D, V
    "llama3": (8192, 4096, 128256),
    "qwen": (8192, 2048, 151936),
    "gemma": (8192, 2304, 256000),
    "deepseek": (4096, 7168, 129280),
    "gpt2": (20480, 768, 50257),
}
# For trying the program without a GPU.
TINY = {"tiny": (96, 64, 1003), "tiny4": (64, 32, 256)}
# MiB that torch.compile takes beyond the gradients (measured on the peers' machine).
COMPILE_MIB = {"llama3": 2004, "qwen": 2374, "gemma": 4000, "deepseek": 1010, "gpt2": 3932}
MIB = 1 << 20
ALL_OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0}


@dataclass
class Reference:
    loss: float
    grad_input: torch.Tensor  # [N, D]  f64
    grad_weight: torch.Tensor  # [V, D]  f64


class Head:
    def __init__(self, library: Library, name: str, shape: tuple[int, int, int]) -> None:
        self.library, self.name, self.shape = library, name, shape
        self.device = library.device
        tokens, hidden, vocab = shape
        torch.manual_seed(0)
        self.weight = (
            torch.randn(vocab, hidden, device=self.device) * (3 / hidden**0.5)
        ).bfloat16()
        self.target = torch.randint(0, vocab, (tokens,), device=self.device)  # [N]
        self.input = torch.randn(tokens, hidden, device=self.device).bfloat16()  # [N, D]
        self.input += self.weight[self.target] * 2
        self.half = self.target.clone()  # [N]  half of them are ignored, at random
        self.half[torch.rand(tokens, device=self.device) < 0.5] = -100
        self.loss = torch.empty((), device=self.device)
        self.grad_input = torch.empty_like(self.input)  # [N, D]
        self.grad_weight = torch.empty_like(self.weight)  # [V, D]
        self.sums = 4 * tokens * hidden  # bytes of the f32 accumulator of grad_input
        budget = COMPILE_MIB.get(name)
        self.compile_bytes = int(1.05 * budget * MIB) if budget else 8 * tokens * vocab
        self.frugal_bytes = 128 * MIB + self.sums

    @property
    def gradient_bytes(self) -> int:
        return self.grad_input.nbytes + self.grad_weight.nbytes

    def both(
        self, size: int | None, accumulate: bool = False, options: dict[str, Any] | None = None,
        **changes: torch.Tensor,
    ) -> Call:  # fmt: skip
        tensors = {
            "input": self.input, "weight": self.weight, "target": self.target, "loss": self.loss,
            "grad_input": self.grad_input, "grad_weight": self.grad_weight, **changes,
        }  # fmt: skip
        kind = native.LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD
        call = self.library.prepare(kind, tensors, accumulate, **(options or {}))
        return call.with_workspace(size)

    def forward(self, size: int | None, **changes: torch.Tensor) -> Call:
        tensors = {"input": self.input, "weight": self.weight, "target": self.target,
                   "loss": self.loss, **changes}  # fmt: skip
        kind = native.LINEAR_CROSS_ENTROPY_FORWARD
        reduction = native.REDUCTION_NONE if tensors["loss"].dim() else native.REDUCTION_MEAN
        return self.library.prepare(kind, tensors, reduction=reduction).with_workspace(size)

    def option_tensors(self) -> dict[str, torch.Tensor]:
        """Inputs of the options and the outputs they bring."""
        tokens, _, vocab = self.shape
        make = {"device": self.device}
        names = ("lse", "target_logit", "entropy")
        return {
            "bias": torch.randn(vocab, **make).bfloat16(),
            "grad_bias": torch.empty(vocab, dtype=torch.bfloat16, **make),
            "vocab_weight": torch.rand(vocab, **make) + 0.5,
            "token_weight": torch.rand(tokens, **make) + 0.5,
            "argmax": torch.empty(tokens, dtype=torch.int64, **make),
            **{name: torch.empty(tokens, **make) for name in names},
        }

    def floor(self) -> dict[str, Callable[[], None]]:
        """The products themselves, V padded to 64; half of them where half the rows are ignored."""
        tokens, hidden, vocab = self.shape
        padded = (vocab + 63) // 64 * 64
        weight = torch.randn(padded, hidden, device=self.device).bfloat16()
        logits = torch.randn(tokens, padded, device=self.device).bfloat16()
        grad_weight = torch.empty_like(weight)

        def three(rows: int) -> Callable[[], None]:
            def run() -> None:
                torch.mm(logits[:rows], weight, out=self.grad_input[:rows])
                torch.mm(logits[:rows].t(), self.input[:rows], out=grad_weight)
                torch.mm(self.input[:rows], weight.t(), out=logits[:rows])

            return run

        def one() -> None:
            torch.mm(self.input, weight.t(), out=logits)

        return {"three products": three(tokens), "one product": one,
                "three products of half the rows": three(tokens // 2)}  # fmt: skip

    def reference(
        self, target: torch.Tensor | None = None, label_smoothing: float = 0, z_loss: float = 0,
        softcap: float = 0, bias: torch.Tensor | None = None,
        vocab_weight: torch.Tensor | None = None, token_weight: torch.Tensor | None = None,
    ) -> Reference:  # fmt: skip
        """The formulas of docs/semantics.md in double, all tokens and the whole vocabulary."""
        tokens, hidden, vocab = self.shape
        target = self.target if target is None else target
        wide = self.weight.double()  # [V, D]
        classes = (
            torch.ones(vocab, device=self.device) if vocab_weight is None else vocab_weight
        ).double()
        each = (
            torch.ones(tokens, device=self.device) if token_weight is None else token_weight
        ).double()
        valid = target >= 0
        normalizer = classes[target[valid]].sum()
        out = Reference(
            0.0,
            torch.zeros(tokens, hidden, device=self.device, dtype=torch.float64),
            torch.zeros(vocab, hidden, device=self.device, dtype=torch.float64),
        )
        rows = max(1, (1 << 31) // (8 * vocab))
        for some in valid.nonzero().flatten().split(rows):
            h, t, a = self.input[some].double(), target[some], each[some]
            u = h @ wide.t()  # [n, V]
            if bias is not None:
                u += bias.double()
            z = softcap * torch.tanh(u / softcap) if softcap else u
            slope = 1 - (z / softcap) ** 2 if softcap else None
            lse = torch.logsumexp(z, 1)
            at = torch.arange(len(some), device=self.device)
            hard, soft = (1 - label_smoothing) * classes[t], label_smoothing / vocab
            loss = hard * (lse - z[at, t]) + z_loss * lse**2
            if soft:
                loss += soft * (classes.sum() * lse - z @ classes)
            out.loss += float((a * loss).sum() / normalizer)
            dz = torch.exp(z - lse[:, None]).mul_(
                (hard + soft * classes.sum() + 2 * z_loss * lse)[:, None])  # fmt: skip
            del z, u
            if soft:
                dz -= soft * classes
            dz[at, t] -= hard
            dz *= (a / normalizer)[:, None]
            if slope is not None:
                dz *= slope
            out.grad_input[some] = dz @ wide
            out.grad_weight.addmm_(dz.t(), h)
        return out


def errors(want: Reference, loss: torch.Tensor, grad_input: torch.Tensor,
           grad_weight: torch.Tensor) -> dict[str, float]:  # fmt: skip
    """Relative errors of the whole gradients, in the 2-norm, and the loss's own error."""

    def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
        return ((got.double() - exact).norm() / exact.norm()).item()

    return {
        "loss": abs(float(loss) - want.loss),
        "grad_input": relative(grad_input, want.grad_input),
        "grad_weight": relative(grad_weight, want.grad_weight),
    }

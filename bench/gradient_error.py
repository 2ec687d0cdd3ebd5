# SPDX-License-Identifier: Apache-2.0
"""The error of grad_input of a divergence of two heads in bf16 against how far apart the heads are,
on the CPU: of bf16 logits, of linear_divergence and of f32 logits, whose gradients are rounded to
bf16 only at the end, each against f64. Writes the figures and draws PREFIX.svg and PREFIX-dark.svg.

    LOGITLESS_LIBRARY=build/release/liblogitless.so PYTHONPATH=python \\
        python bench/gradient_error.py --json bench/results/cpu-DATE-gradient-error.json
    python bench/gradient_error.py --draw bench/results/cpu-DATE-gradient-error.json \\
        --out docs/pictures/gradient-error

The head is random, but its distributions are like a trained one's: rows of the weight whose norms
vary, hidden states that point towards a few rows each, so that a few tokens have most of the
probability, of some tokens nearly all, over a broad background. The student has the teacher's head;
its hidden states are the teacher's and noise, of a relative size that goes down from 1. All are
bf16 numbers. Errors are relative to the norm of all tokens' gradients. Needs matplotlib to draw."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

WAYS = ("bf16 logits", "linear_divergence", "f32 logits")
COLUMNS = 8192


class Heads:
    """A teacher [N, D], whose weight [V, D] is the student's too."""

    def __init__(self, tokens: int, hidden: int, vocab: int) -> None:
        torch.manual_seed(0)
        norms = (0.2 * torch.randn(vocab, 1)).exp()
        self.weight = (torch.randn(vocab, hidden) / math.sqrt(hidden) * norms).bfloat16()
        states = 2.5 * torch.randn(tokens, hidden)
        for place in range(6):
            rows = self.weight[torch.randint(0, vocab, (tokens,))].float()
            rows = rows / rows.square().sum(-1, keepdim=True)
            states += (torch.rand(tokens, 1) * 14 + 14 - 2 * place) * rows
        self.teacher = states.bfloat16()

    def student(self, noise: float) -> Tensor:
        states = self.teacher.float()
        each = states.square().mean(-1, keepdim=True).sqrt()
        return (states + noise * each * torch.randn(states.shape)).bfloat16()

    def logits(self, states: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits [N, V] with products and sums in `dtype`, some columns at a time."""
        of = states.to(dtype)
        return torch.cat([of @ w.to(dtype).t() for w in self.weight.split(COLUMNS)], -1)

    def gradient(self, dz: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient [N, D] of the hidden states, from that of the logits."""
        parts = zip(dz.split(COLUMNS, -1), self.weight.split(COLUMNS))
        total = torch.zeros(len(dz), self.weight.shape[1], dtype=dtype)
        for part, w in parts:
            total += part.to(dtype) @ w.to(dtype)
        return total


def difference(student: Tensor, teacher: Tensor) -> Tensor:
    """The derivative of KL(q | p) to the student's logits."""
    return functional.softmax(student, -1) - functional.softmax(teacher, -1)


def of_bf16_logits(heads: Heads, states: Tensor) -> Tensor:
    """As torch.compile does: products in f32, logits and dz rounded to bf16, softmax in f32."""
    p, q = (heads.logits(s, torch.float32).bfloat16().float() for s in (states, heads.teacher))
    return heads.gradient(difference(p, q).bfloat16(), torch.float32).bfloat16()


def of_f32_logits(heads: Heads, states: Tensor) -> Tensor:
    p, q = (heads.logits(s, torch.float32) for s in (states, heads.teacher))
    return heads.gradient(difference(p, q), torch.float32).bfloat16()


def ours(heads: Heads, states: Tensor) -> Tensor:
    from logitless.torch import linear_divergence

    leaf = states.clone().requires_grad_()
    linear_divergence(leaf, heads.weight, heads.teacher, heads.weight, reduction="sum").backward()
    assert leaf.grad is not None
    return leaf.grad


CALLS: dict[str, Callable[[Heads, Tensor], Tensor]] = dict(
    zip(WAYS, (of_bf16_logits, ours, of_f32_logits))
)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    shape = [int(n) for n in given.shape.split("x")]
    heads = Heads(*shape)
    exact = heads.logits(heads.teacher, torch.float64)
    log_q = functional.log_softmax(exact, -1)
    q = log_q.exp()
    entropies = -(q * log_q).sum(-1)
    points = []
    for place in range(given.points):
        noise = 10 ** (-given.decades * place / max(given.points - 1, 1))
        states = heads.student(noise)
        z = heads.logits(states, torch.float64)
        log_p = functional.log_softmax(z, -1)
        divergence = float((q * (log_q - log_p)).sum(-1).mean())
        true = heads.gradient(log_p.exp() - q, torch.float64)
        point: dict[str, float] = {"noise": noise, "divergence": divergence}
        for name, call in CALLS.items():
            error = (call(heads, states).double() - true).norm() / true.norm()
            point[name] = float(error)
        points.append(point)
        errors = "".join(f"  {name} {point[name]:.2e}" for name in WAYS)
        print(f"noise {noise:.1e}  divergence {divergence:.2e}{errors}", flush=True)
    return {
        "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "shape": shape,
        "entropy": [float(entropies.quantile(part)) for part in (0.1, 0.5, 0.9)],
        "largest_probability": float(q.amax(-1).median()), "points": points,
    }  # fmt: skip


def draw(run: dict[str, Any], prefix: Path) -> list[Path]:
    import picture
    from matplotlib import pyplot, ticker

    def made(theme: picture.Theme) -> pyplot.Figure:
        figure, axis = pyplot.subplots(figsize=(7.2, 3.9), layout="constrained")
        looks = ((theme.other, "o", "-"), (theme.ours, "o", "-"), (theme.faint, "", "--"))
        x = [p["divergence"] for p in run["points"]]
        for name, (color, marker, line) in zip(WAYS, looks):
            y = [p[name] for p in run["points"]]
            axis.loglog(x, y, color=color, marker=marker, linestyle=line, markersize=4, label=name)
        axis.invert_xaxis()
        axis.set_xlabel(
            "divergence of a token, KL(teacher ‖ student), nats; nearer heads to the right"
        )
        axis.set_ylabel("error of grad_input")
        axis.yaxis.set_major_formatter(ticker.PercentFormatter(1, decimals=None))
        axis.grid(True, which="major", linewidth=0.5, alpha=0.5)
        axis.legend(frameon=False, loc="upper left")
        tokens, hidden, vocab = run["shape"]
        axis.set_title(f"N {tokens}, D {hidden}, V {vocab}, bf16", loc="left", fontsize=11)
        return figure

    return picture.both(prefix, made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="64x2048x151936", help="tokens x hidden x vocab")
    parser.add_argument("--points", type=int, default=11)
    parser.add_argument("--decades", type=float, default=3.5, help="that the noise goes down")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    parser.add_argument("--draw", type=Path, help="figures of an earlier run, drawn alone")
    parser.add_argument(
        "--out", type=Path, help="prefix of the picture; default: the figures' name"
    )
    given = parser.parse_args()
    run = json.loads(given.draw.read_text()) if given.draw else measure(given)
    if given.json:
        given.json.write_text(json.dumps(run, indent=1) + "\n")
    prefix = given.out or (given.draw or given.json or Path("gradient-error.json")).with_suffix("")
    for path in draw(run, prefix):
        print(path)


if __name__ == "__main__":
    main()

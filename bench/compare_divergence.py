# SPDX-License-Identifier: Apache-2.0
"""Divergences of a student's and a teacher's head, loss and gradients: ours compared with
torch.compile of logits, with TRL's, Unsloth's and Liger's functions, and with four cuBLAS products
of the same operands.

    LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python \
        python bench/compare_divergence.py --pairs 8192x4096x128256x4096 --peers-from peers

For the kinds that peers have, our functions with their signatures are measured too, in their
default memory, which is meant to be at most 1.1 times the peer's.

A pair is N x D x V x the teacher's D. FOLDER of `--peers-from` holds the packages (trl,
unsloth_zoo, liger_kernel), of which the files of these functions alone are imported. A peer that is
absent or fails is left out, with one line that says so. `--near SIZE` takes a teacher whose weight
is the student's with noise of that relative size.

One process; all take turns in bursts, in an order that is reversed every round; medians of
`--rounds`. Random data of `--dtype`; f32 products are without TF32. MiB: the allocator's peak
beyond the inputs and their gradients. The last column is the relative error of grad_input against
f32 logits; in f16 the loss is multiplied by 65536. Needs a GPU; `--pairs 64x32x300x16` tries it
anywhere, and its figures mean nothing."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compare_later import MIB, left_out, medians, peak
from dropins import bare, stand_in
from torch import Tensor
from torch.nn import functional

from logitless import torch as logitless
from logitless.integrations import liger, unsloth
from logitless.integrations.trl import TrlPatch

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
KINDS = ("forward_kl", "reverse_kl", "jsd", "skew_kl", "tv")
BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}  # the kinds that the peers compute too
Call = Callable[[], Tensor]


class Pair:
    def __init__(self, sizes: list[int], near: float, device: str, dtype: torch.dtype) -> None:
        tokens, hidden, vocab, width = sizes
        torch.manual_seed(0)
        self.input = torch.randn(tokens, hidden, device=device).to(dtype).requires_grad_()
        weight = torch.randn(vocab, hidden, device=device) / hidden**0.5
        self.weight = weight.to(dtype).requires_grad_()
        if near:
            self.teacher_input = self.input.detach().clone()
            noise = 1 + near * torch.randn(vocab, hidden, device=device)
            self.teacher_weight = (weight * noise).to(dtype)
        else:
            self.teacher_input = torch.randn(tokens, width, device=device).to(dtype)
            teacher = torch.randn(vocab, width, device=device) / width**0.5
            self.teacher_weight = teacher.to(dtype)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.input, self.weight, self.teacher_input, self.teacher_weight

    def products(self) -> None:
        x, w, y, u = (t.detach() for t in self.tensors())
        logits = x @ w.t()
        y @ u.t()
        logits @ w
        logits.t() @ x

    def exact(self, kind: str, rows: int = 256) -> tuple[float, Tensor]:
        """The mean and grad_input [N, D] of f32 logits, some rows at a time."""
        w, u = self.weight.detach().float(), self.teacher_weight.float()
        total, grads = 0.0, []
        allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        for start in range(0, self.input.shape[0], rows):
            x = self.input.detach()[start : start + rows].float().requires_grad_()
            y = self.teacher_input[start : start + rows].float()
            loss = of_logits(x @ w.t(), y @ u.t(), kind)
            loss.backward()
            total += loss.item()
            grads.append(x.grad)
        torch.backends.cuda.matmul.allow_tf32 = allowed
        tokens = self.input.shape[0]
        return total / tokens, torch.cat(grads) / tokens


def of_logits(student: Tensor, teacher: Tensor, kind: str) -> Tensor:
    """The divergence summed over rows, from the definitions."""
    log_p, log_q = functional.log_softmax(student, -1), functional.log_softmax(teacher, -1)
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl":
        return (q * (log_q - log_p)).sum()
    if kind == "reverse_kl":
        return (p * (log_p - log_q)).sum()
    if kind == "tv":
        return 0.5 * (p - q).abs().sum()
    log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0))
    if kind == "skew_kl":
        return (q * (log_q - log_m)).sum()
    return 0.5 * (q * (log_q - log_m)).sum() + 0.5 * (p * (log_p - log_m)).sum()


def ours(pair: Pair, kind: str) -> dict[str, Call]:
    tokens, hidden = pair.input.shape
    less = 256 * MIB + 4 * tokens * hidden

    def call(**how: Any) -> Tensor:
        loss: Tensor = logitless.linear_divergence(*pair.tensors(), kind=kind, **how)
        return loss

    def later() -> Tensor:
        return call(reduction="none").mean()

    return {
        "ours": call,
        "ours, reduction none": later,
        f"ours in {less // MIB} MiB": lambda: call(memory=less),
    }


def adapters(pair: Pair, kind: str) -> dict[str, Call]:
    """Our functions with the peers' signatures."""
    x, w, y, u = pair.tensors()
    beta = BETAS[kind]
    trl = TrlPatch(None).divergence
    return {
        "ours in TRL's name": lambda: trl.apply(x, w, None, y, u, None, beta)[0].mean(),
        "ours in Unsloth's name": lambda: unsloth.fused_linear_jsd(x, w, y, u, beta=beta),
        "ours in Liger's name": lambda: liger.LigerFusedLinearJSD(beta)(x, w, y, u, None),
    }


def compiled(pair: Pair, kind: str) -> Call:
    def call(x: Tensor, w: Tensor, y: Tensor, u: Tensor) -> Tensor:
        return of_logits((x @ w.t()).float(), (y @ u.t()).float(), kind) / x.shape[0]

    made = torch.compile(call)
    return lambda: made(*pair.tensors())


def trls(folder: Path) -> Any:
    bare(folder, "trl", "trl.kernels", "trl.trainer")
    stand_in("trl.trainer.utils", maybe_gather_lm_head_ctx=lambda *_: contextlib.nullcontext())
    stand_in("transformers")
    stand_in("transformers.utils", is_triton_available=torch.cuda.is_available)
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def make(pair: Pair, kind: str) -> Call:
        x, w, y, u = pair.tensors()
        beta = BETAS[kind]
        return lambda: ChunkedDivergenceFunction.apply(x, w, None, y, u, None, beta)[0].mean()

    return make


def unsloths(folder: Path) -> Any:
    bare(folder, "unsloth_zoo", "unsloth_zoo.fused_losses", "unsloth_zoo.temporary_patches")
    from unsloth_zoo.fused_losses.fused_linear import fused_linear_jsd

    def make(pair: Pair, kind: str) -> Call:
        return lambda: fused_linear_jsd(*pair.tensors(), beta=BETAS[kind])

    return make


def ligers(folder: Path) -> Any:
    sys.path.insert(0, str(folder))
    from liger_kernel.ops import LigerFusedLinearJSDFunction

    def make(pair: Pair, kind: str) -> Call:
        x, w, y, u = pair.tensors()
        rest = (None, BETAS[kind], -100, 1.0, None, None, None)
        return lambda: LigerFusedLinearJSDFunction.apply(x, w, y, u, *rest)

    return make


PEERS = {"TRL": trls, "Unsloth": unsloths, "Liger": ligers}


class Contenders:
    def __init__(self, pair: Pair, kind: str) -> None:
        self.pair, self.device = pair, pair.input.device.type
        self.value, self.exact = pair.exact(kind)
        # In f16 a mean's gradients would be 0 without the factor that trainers use.
        scale = 65536.0 if pair.input.dtype is torch.float16 else 1.0
        self.scale = torch.tensor(scale, device=self.device)
        self.calls: dict[str, Callable[[], None]] = {"four cuBLAS products": pair.products}
        self.facts: dict[str, str] = {}

    def add(self, name: str, call: Call) -> None:
        def train() -> None:
            self.pair.input.grad = self.pair.weight.grad = None
            call().backward(self.scale)

        try:
            for _ in range(2):
                train()
            mib = peak(self.pair, train) if self.device == "cuda" else 0.0
            value, grad = call().item(), self.pair.input.grad
            assert grad is not None
            error = ((grad.float() / self.scale - self.exact).norm() / self.exact.norm()).item()
        except Exception as reason:  # packages raise many types, also when out of memory
            left_out(name, reason)
        else:
            self.calls[name] = train
            self.facts[name] = f"{mib:7.0f} {value:12.6g} {error:8.1e}"
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def run(self, rounds: int, seconds: float, head: str) -> None:
        median = medians(self.calls, rounds, seconds, self.device)
        base = median["four cuBLAS products"]
        exact = f"{self.value:.6g}"
        print(f"{head:34s} {'ms':>9s} {'x four':>7s} {'MiB':>7s} {exact:>12s} {'error':>8s}")
        for name, ms in median.items():
            row = f"  {name:32s} {ms:9.3f} {ms / base:7.3f} {self.facts.get(name, '')}"
            print(row.rstrip(), flush=True)


def compare(shape: str, kind: str, given: argparse.Namespace, device: str) -> None:
    sizes = [int(extent) for extent in shape.split("x")]
    pair = Pair(sizes, given.near, device, getattr(torch, DTYPES[given.dtype]))
    contenders = Contenders(pair, kind)
    in_their_names = adapters(pair, kind) if kind in BETAS else {}
    for name, call in {**ours(pair, kind), **in_their_names}.items():
        contenders.add(name, call)
    torch._dynamo.reset()
    contenders.add("torch.compile", compiled(pair, kind))
    for name, load in PEERS.items():
        if not given.peers_from or kind not in BETAS:
            continue
        try:
            made = load(Path(given.peers_from))(pair, kind)
        except Exception as reason:  # a package of another version, or none
            left_out(name, reason)
        else:
            contenders.add(name, made)
    near = f", near {given.near:g}" if given.near else ""
    contenders.run(given.rounds, given.burst, f"{shape} {kind}{near}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", default="8192x4096x128256x4096,8192x2048x151936x4096")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--near", type=float, default=0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--burst", type=float, default=0.25, help="seconds")
    parser.add_argument("--peers-from", default="", help="a folder that holds their packages")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, N x D x V x the teacher's D, {given.dtype}")
    for shape in given.pairs.split(","):
        for kind in given.kinds.split(","):
            compare(shape, kind, given, device)


if __name__ == "__main__":
    main()

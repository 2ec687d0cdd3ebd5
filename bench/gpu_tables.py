# SPDX-License-Identifier: Apache-2.0
"""Two published comparisons, repeated with ours included, on CUDA or, small, on the CPU.

The table of the article "Fused Linear Cross-Entropy" (Ian's Blog): regular against vocabulary
chunks with an online softmax, f32, loss and gradients. Its shape is not printed; N 4096, D 1024, V
65536 with weights of 0.01 gives its memory (3072 MiB; chunked 356) and its loss (11.1427). The case
of "Fused Cross Entropy Loss", a report on a fused GEMM kernel: V 50257, 20480 tokens, D 768, the
loss alone, against its algorithm 1. Both algorithms are written here from their descriptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import native
import torch
import torch.nn.functional as F
from gpu_native import Call
from gpu_sections import Bench
from gpu_timing import MIB, Contender, bursts

ARTICLE = {"cuda": (4096, 1024, 65536), "cpu": (256, 128, 4096)}
PAPER = {"cuda": (20480, 768, 50257), "cpu": (256, 64, 5003)}
CHUNK = 1024  # columns, as in the article


class OnlineSoftmax(torch.autograd.Function):
    """Mean loss over chunks of the vocabulary: running maximum m and sum s; the backward recomputes
    each chunk's logits."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(t), device=t.device)
        m = torch.full((len(t),), -torch.inf, device=t.device)  # [N]
        s, hit = torch.zeros_like(m), torch.zeros_like(m)
        for begin in range(0, len(w), CHUNK):
            z = (h @ w[begin : begin + CHUNK].t()).float()  # [N, CHUNK]
            top = torch.maximum(m, z.amax(1))
            s = s * torch.exp(m - top) + torch.exp(z - top[:, None]).sum(1)
            m = top
            inside = (t >= begin) & (t < begin + z.shape[1])
            hit = torch.where(inside, z[rows, (t - begin).clamp(0, z.shape[1] - 1)], hit)
        lse = m + torch.log(s)
        ctx.save_for_backward(h, w, t, lse)
        return (lse - hit).mean()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        h, w, t, lse = ctx.saved_tensors
        grad_h, grad_w = torch.zeros_like(h), torch.zeros_like(w)
        for begin in range(0, len(w), CHUNK):
            part = w[begin : begin + CHUNK]  # [CHUNK, D]
            dz = torch.exp((h @ part.t()).float() - lse[:, None])
            inside = ((t >= begin) & (t < begin + len(part))).nonzero().flatten()
            dz[inside, t[inside] - begin] -= 1
            dz = (dz * (upstream / len(t))).to(h.dtype)
            grad_h += dz @ part
            grad_w[begin : begin + CHUNK] = dz.t() @ h
        return grad_h, grad_w, None


def algorithm_1(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    s = h @ w.t()  # [N, V]
    s = s - s.amax(1, keepdim=True)
    gold = s.gather(1, t[:, None]).squeeze(1)
    return (torch.logsumexp(s.float(), 1) - gold.float()).mean()


def regular(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(h, w), t)


def peak_mib(bench: Bench, call: Callable[[], object]) -> float:
    """Peak memory beyond what was held before the call, gradients included."""
    if bench.clock.cuda:
        return (bench.clock.peak(call) or 0) / MIB
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / MIB


def table(
    bench: Bench,
    title: str,
    contenders: list[Contender],
    losses: dict[str, torch.Tensor],
    dtype: str,
) -> None:
    contenders = [c for c in contenders if bench.ready(c)]
    for c in contenders:
        if "mib" not in c.facts:
            c.facts["mib"] = peak_mib(bench, c.call)
    bursts(bench.clock, contenders, bench.arguments.rounds)
    for c in contenders:
        c.call()
        value = float(losses[c.name])
        bench.report.record(
            f"  {c.name:26s} {dtype:5s} {c.ms:9.3f} ms {c.facts['mib']:9.1f} MiB  loss {value:.6f}",
            section="tables", table=title, contender=c.name, dtype=dtype, ms=c.ms, loss=value,
            samples=c.samples, **c.facts,
        )  # fmt: skip
    bench.report.save()


def article(bench: Bench) -> None:
    device = bench.library.device
    n, d, v = ARTICLE[device]
    bench.report.say(
        f"\nregular against chunked (article): N {n}, D {d}, V {v}, f32, loss and gradients; "
        "memory with the gradients"
    )
    torch.manual_seed(0)
    h = torch.randn(n, d, device=device, requires_grad=True)
    w = (torch.randn(v, d, device=device) * 0.01).requires_grad_()
    t = torch.randint(0, v, (n,), device=device)
    values: dict[str, torch.Tensor] = {}

    def train(name: str, f: Callable[..., torch.Tensor]) -> Contender:
        def run() -> None:
            loss = f(h, w, t)
            loss.backward()
            h.grad = w.grad = None  # so that the next peak counts its own gradients
            values[name] = loss.detach()

        return Contender(name, run)

    torch._dynamo.reset()
    contenders = [
        train("regular", regular),
        train("chunked online softmax", OnlineSoftmax.apply),
        train("regular, torch.compile", torch.compile(regular, dynamic=False)),
    ]
    tensors = {
        "input": h.detach(),
        "weight": w.detach(),
        "target": t,
        "loss": torch.empty((), device=device),
        "grad_input": torch.empty_like(h),
        "grad_weight": torch.empty_like(w),
    }
    call = bench.library.prepare(native.LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD, tensors)
    gradients = tensors["grad_input"].nbytes + tensors["grad_weight"].nbytes
    for name, size in (("ours, recommended", call.recommended), ("ours, minimum", call.minimum)):
        again = bench.library.prepare(native.LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD, tensors)
        again.with_workspace(size)
        contenders.append(
            Contender(name, again, facts={"mib": (size + gradients) / MIB}, ours=True)
        )
        values[name] = tensors["loss"]
    table(bench, "article", contenders, values, "f32")


def paper(bench: Bench) -> None:
    device = bench.library.device
    n, d, v = PAPER[device]
    bench.report.say(f"\nfused GEMM and cross-entropy (report): {v} x {n} x {d}, the loss alone")
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        torch.manual_seed(0)
        h = torch.randn(n, d, device=device).to(dtype)
        w = (torch.randn(v, d, device=device) * 0.1).to(dtype)
        t = torch.randint(0, v, (n,), device=device)
        out: dict[str, torch.Tensor] = {}

        def alone(what: str, f: Callable[..., torch.Tensor]) -> Contender:
            def run() -> None:
                with torch.no_grad():
                    out[what] = f(h, w, t)  # noqa: B023

            return Contender(what, run)

        torch._dynamo.reset()
        compiled = torch.compile(regular, dynamic=False)
        contenders = [alone("algorithm 1", algorithm_1), alone("F.cross_entropy", regular),
                      alone("torch.compile", compiled)]  # fmt: skip
        tensors = {"input": h, "weight": w, "target": t, "loss": torch.empty((), device=device)}
        for what, size in (("ours, 128 MiB", 128 * MIB), ("ours, minimum", 0)):
            call: Call = bench.library.prepare(native.LINEAR_CROSS_ENTROPY_FORWARD, tensors)
            call.with_workspace(size)
            contenders.append(Contender(what, call, facts={"mib": call.bytes / MIB}, ours=True))
            out[what] = tensors["loss"]
        table(bench, "paper", contenders, out, name)


def tables(bench: Bench) -> None:
    for f in (article, paper):
        if bench.report.time_for(f.__name__, 25 if bench.clock.cuda else 0):
            f(bench)

# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend beside PyTorch and beside the products it cannot avoid, in one process and one run.

Loss and gradients of LM heads, bf16, mean: ours in several workspaces, torch.compile, eager, and the
floor of three cuBLAS products (V padded to 64 for it). Data as of a trained head: the target's logit
stands out. Contenders in bursts, interleaved in balanced order, medians; gradients and loss of ours
against f64 on the first tokens. It reports; it does not judge. Needs PyTorch with CUDA and a build:
    python bench/compare_gpu.py --library build/device/liblogitless.so [--heads llama3,qwen,...]"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import native
import torch
import torch.nn.functional as F
from gpu_native import Call, Library

HEADS = {  # N, D, V
    "llama3": (8192, 4096, 128256),
    "qwen": (8192, 2048, 151936),
    "gemma": (8192, 2304, 256000),
    "deepseek": (4096, 7168, 129280),
    "gpt2": (20480, 768, 50257),
}
# What torch.compile takes beyond the gradients, MiB (measured where the peers were).
COMPILE_MIB = {"llama3": 2004, "qwen": 2374, "gemma": 4000, "deepseek": 1010, "gpt2": 3932}
MIB = 1 << 20
CHECKED = 256  # tokens compared with f64
Contenders = dict[str, Callable[[], object]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--heads", default=",".join(HEADS), help="of " + ", ".join(HEADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=float, default=0.06, help="seconds a burst (0.06)")
    parser.add_argument("--frontier", type=int, default=0, help="budgets of the frontier (0)")
    parser.add_argument("--no-peers", action="store_true", help="ours and the floor alone")
    parser.add_argument("--out", type=Path, help="JSON lines, one a contender")
    arguments = parser.parse_args()
    arguments.heads = arguments.heads.split(",")
    for head in arguments.heads:
        if head not in HEADS:
            parser.error(f'--heads: "{head}"; allowed: {", ".join(HEADS)}')
    return arguments


class Head:
    def __init__(self, library: Library, tokens: int, hidden: int, vocab: int) -> None:
        self.library, self.shape = library, (tokens, hidden, vocab)
        self.weight = (torch.randn(vocab, hidden, device="cuda") * (3 / hidden**0.5)).bfloat16()
        self.target = torch.randint(0, vocab, (tokens,), device="cuda")
        self.input = torch.randn(tokens, hidden, device="cuda").bfloat16()
        self.input += self.weight[self.target] * 2
        self.half = self.target.clone()
        self.half[torch.rand(tokens, device="cuda") < 0.5] = -100
        self.loss = torch.empty((), device="cuda")
        self.grad_input = torch.empty_like(self.input)
        self.grad_weight = torch.empty_like(self.weight)

    def both(self, size: int | None, **changes: torch.Tensor) -> Call:
        tensors = {
            "input": self.input, "weight": self.weight, "target": self.target, "loss": self.loss,
            "grad_input": self.grad_input, "grad_weight": self.grad_weight,
        }  # fmt: skip
        call = self.library.prepare(
            native.LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD, {**tensors, **changes}
        )
        return call.with_workspace(size)

    def forward(self, size: int | None) -> Call:
        tensors = {"input": self.input, "weight": self.weight, "target": self.target}
        call = self.library.prepare(
            native.LINEAR_CROSS_ENTROPY_FORWARD, {**tensors, "loss": self.loss}
        )
        return call.with_workspace(size)

    def ours(self, compile_mib: int, frontier: int) -> Contenders:
        tokens, hidden, vocab = self.shape
        sums = 4 * tokens * hidden
        least = self.both(0).bytes
        whole = 2 * tokens * vocab + 64 * MIB + 3 * sums
        budgets = [
            int(1.05 * compile_mib * MIB),
            1024 * MIB + sums,
            128 * MIB + sums,
            64 * MIB + sums,
        ]
        if frontier > 1:
            budgets += [
                round(least * (whole / least) ** (i / (frontier - 1))) for i in range(frontier)
            ]
        calls: Contenders = {}
        for size in (None, *budgets):
            call = self.both(size)
            calls[f"ours, {call.bytes / MIB:.0f} MiB"] = call
        calls["ours, half ignored"] = self.both(int(1.05 * compile_mib * MIB), target=self.half)
        loss_only = self.forward(128 * MIB)
        calls[f"ours, loss only, {loss_only.bytes / MIB:.0f} MiB"] = loss_only
        return calls

    def floor(self) -> Contenders:
        tokens, hidden, vocab = self.shape
        padded = (vocab + 63) // 64 * 64
        weight = torch.randn(padded, hidden, device="cuda").bfloat16()
        logits = torch.randn(tokens, padded, device="cuda", dtype=torch.bfloat16)
        grad_weight = torch.empty_like(weight)

        def three() -> None:
            torch.mm(logits, weight, out=self.grad_input)
            torch.mm(logits.t(), self.input, out=grad_weight)
            torch.mm(self.input, weight.t(), out=logits)

        return {
            "three products": three,
            "one product": lambda: torch.mm(self.input, weight.t(), out=logits),
        }

    def peers(self) -> Contenders:
        def loss(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(F.linear(h, w).float(), self.target)

        compiled = torch.compile(loss)
        h = self.input.detach().requires_grad_()
        w = self.weight.detach().requires_grad_()

        def train(f: Callable[..., torch.Tensor]) -> Callable[[], None]:
            def run() -> None:
                h.grad = w.grad = None
                f(h, w).backward()

            return run

        def loss_only() -> torch.Tensor:
            with torch.no_grad():
                return compiled(self.input, self.weight)

        return {
            "torch.compile": train(compiled),
            "eager": train(loss),
            "torch.compile, loss only": loss_only,
        }

    def errors(self, call: Call) -> tuple[float, float]:
        """Relative error of grad_input on the first tokens against f64, and of the loss."""
        each = torch.empty(self.shape[0], device="cuda")
        tensors = {"input": self.input, "weight": self.weight, "target": self.target, "loss": each}
        self.library.prepare(
            native.LINEAR_CROSS_ENTROPY_FORWARD, tensors, reduction=native.REDUCTION_NONE
        ).with_workspace()()
        self.grad_input.fill_(float("nan"))
        call()
        some = slice(0, CHECKED)
        z = self.input[some].double() @ self.weight.double().t()
        target = self.target[some]
        loss = F.cross_entropy(z, target, reduction="none")
        p = torch.softmax(z, 1)
        p[torch.arange(CHECKED, device="cuda"), target] -= 1
        want = (p @ self.weight.double()) / self.shape[0]
        error = (self.grad_input[some].double() - want).norm() / want.norm()
        return error.item(), (each[some].double() - loss).abs().max().item()


def measure(contenders: Contenders, rounds: int, burst: float) -> dict[str, float]:
    """Median milliseconds a call."""
    repeats = {}
    for name, call in contenders.items():
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        repeats[name] = max(1, int(burst / (time.perf_counter() - start)))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for r in range(rounds):
        for name in list(contenders)[:: 1 if r % 2 == 0 else -1]:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            for _ in range(repeats[name]):
                contenders[name]()
            last.record()
            torch.cuda.synchronize()
            samples[name].append(first.elapsed_time(last) / repeats[name])
    return {name: statistics.median(s) for name, s in samples.items()}


def main() -> None:
    arguments = parse()
    torch.manual_seed(0)
    library = Library(arguments.library)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, bf16, mean, "
          f"{arguments.rounds} rounds of {arguments.burst * 1e3:.0f} ms bursts")  # fmt: skip
    lines = []
    for name in arguments.heads:
        torch.cuda.empty_cache()
        head = Head(library, *HEADS[name])
        contenders = head.ours(COMPILE_MIB[name], arguments.frontier)
        errors = {k: head.errors(c) for k, c in contenders.items()
                  if isinstance(c, Call) and k.endswith("MiB") and "loss" not in k}  # fmt: skip
        contenders |= head.floor() | ({} if arguments.no_peers else head.peers())
        times = measure(contenders, arguments.rounds, arguments.burst)
        one, three = times["one product"], times["three products"]
        print(f"\n{name}: N {HEADS[name][0]}, D {HEADS[name][1]}, V {HEADS[name][2]}")
        for contender, ms in times.items():
            base = one if "loss only" in contender or contender == "one product" else three
            error = errors.get(contender)
            text = f"  grad_input {error[0]:.1e}, loss {error[1]:.1e}" if error else ""
            print(f"  {contender:32s} {ms:9.3f} ms  x {ms / base:6.3f}{text}", flush=True)
            lines.append({"head": name, "contender": contender, "ms": ms, "ratio": ms / base,
                          "errors": error})  # fmt: skip
        del contenders, head
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What the Python binding costs a call: forward + backward of linear_cross_entropy on a tiny shape,
compared in one run with an empty autograd.Function of the same arguments, and with the one C call
that computes loss and gradients. Also the loss alone, under no_grad.

python bench/python_overhead.py [--device cuda] [--threads 1]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import logitless.torch as lt
from logitless.torch import _run


class Empty(torch.autograd.Function):
    """Takes the same tensors, returns an existing loss and, in backward, existing gradients."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, target: Any, state: Any) -> Any:
        ctx.save_for_backward(input, weight, target)
        ctx.state = state
        return state[0]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ctx.state[1], ctx.state[2], None, None


def microseconds(functions: list[Callable[[], None]], calls: int, rounds: int = 40) -> list[float]:
    """The least time a call of each, over rounds in which they take turns: other work of the
    machine can only add time."""
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            function()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            best[i] = min(best[i], (time.perf_counter() - start) / calls)
    return [1e6 * seconds for seconds in best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x = torch.randn(4, 16, device=device, dtype=dtype, requires_grad=True)  # [N, D]
    w = torch.randn(32, 16, device=device, dtype=dtype, requires_grad=True)  # [V, D]
    t = torch.randint(0, 32, (4,), device=device)  # [N]
    up = torch.ones((), device=device)
    state = (torch.zeros((), device=device), torch.zeros_like(x), torch.zeros_like(w))

    def empty() -> None:
        x.grad = w.grad = None
        Empty.apply(x, w, t, state).backward(up)

    def ours() -> None:
        x.grad = w.grad = None
        lt.linear_cross_entropy(x, w, t).backward(up)

    def forward_only() -> None:
        with torch.no_grad():
            lt.linear_cross_entropy(x, w, t)

    calls: list[tuple[Any, ...]] = []
    real = _run.launch

    def spy(*launched: Any) -> None:
        calls.append(launched)
        real(*launched)

    _run.launch = spy  # type: ignore[assignment]
    kept = lt.linear_cross_entropy(x, w, t)
    _run.launch = real
    tensors = [v for v in calls[0][2] if v is not None]
    plan = next(reversed(_run._plans.values()))
    workspace = torch.empty(plan.bytes, dtype=torch.uint8, device=device)
    addresses = [v.data_ptr() for v in tensors]  # the fused call has no row state

    def c_call() -> None:
        plan.run(addresses, workspace.data_ptr())

    a, b, c, d = microseconds([empty, ours, c_call, forward_only], args.calls)
    print(f"torch {torch.__version__} on {device}, N 4, D 16, V 32, {dtype}, least of 40 rounds")
    print(f"empty autograd.Function, forward + backward  {a:8.2f} us")
    print(f"linear_cross_entropy, forward + backward     {b:8.2f} us")
    print(f"  beyond the empty function                  {b - a:8.2f} us")
    print(f"  of which the C call itself                 {c:8.2f} us")
    print(f"linear_cross_entropy under no_grad           {d:8.2f} us")
    del kept


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What a call costs the host on CUDA: microseconds of each C call and what it puts on the stream
(nodes of a graph captured from it), and what torch's binding adds to it.

LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python python bench/host_cost.py

Bursts are short, so that the host does not wait for the device. Figures are the least of many.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import logitless.torch as lt
from logitless import _abi
from logitless.torch import _device

NODES = {0: "kernel", 1: "memcpy", 2: "memset", 4: "graph"}
ROUNDS = 60
BURST = 16  # calls between two synchronizations, below the launch queue's limit


def expect(code: int, what: str) -> None:
    if code:
        sys.exit(f"host_cost: {what} returned {code}")


def nodes_of(call: Callable[[int], Any]) -> Counter[str]:
    """Counts, by kind, the nodes that `call` puts on the stream it is given."""
    driver = ctypes.CDLL("libcuda.so.1")
    stream = torch.cuda.Stream()
    raw, graph, count = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p(), ctypes.c_size_t()
    torch.cuda.synchronize()
    expect(driver.cuStreamBeginCapture_v2(raw, 2), "cuStreamBeginCapture")  # 2: the relaxed mode
    call(stream.cuda_stream)
    expect(driver.cuStreamEndCapture(raw, ctypes.byref(graph)), "cuStreamEndCapture")
    expect(driver.cuGraphGetNodes(graph, None, ctypes.byref(count)), "cuGraphGetNodes")
    nodes = (ctypes.c_void_p * count.value)()
    expect(driver.cuGraphGetNodes(graph, nodes, ctypes.byref(count)), "cuGraphGetNodes")
    found: Counter[str] = Counter()
    for node in nodes:
        kind = ctypes.c_int()
        expect(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)), "node's type")
        found[NODES.get(kind.value, str(kind.value))] += 1
    expect(driver.cuGraphDestroy(graph), "cuGraphDestroy")
    return found


def microseconds(functions: list[Callable[[], Any]]) -> list[float]:
    """Microseconds per call of each; they take turns."""
    best = [float("inf")] * len(functions)
    for _ in range(ROUNDS):
        for i, function in enumerate(functions):
            function()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(BURST):
                function()
            best[i] = min(best[i], (time.perf_counter() - start) / BURST)
            torch.cuda.synchronize()
    return [1e6 * seconds for seconds in best]


class Launched:
    """The C calls that a function of torch's binding makes, recorded to be repeated."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.calls: list[tuple[_abi.Plan, list[int], torch.Tensor]] = []
        real = _abi.Plan.run

        def spy(plan: _abi.Plan, addresses: Any, workspace: int, *rest: Any) -> None:
            addresses = list(addresses)
            real(plan, addresses, workspace, *rest)
            memory = torch.empty(plan.bytes, dtype=torch.uint8, device="cuda")
            self.calls.append((plan, addresses, memory))

        _abi.Plan.run = spy  # type: ignore[method-assign]
        try:
            self.kept = function()
        finally:
            _abi.Plan.run = real  # type: ignore[method-assign]

    def again(self, at: int, stream: int = 0) -> None:
        plan, addresses, memory = self.calls[at]
        plan.run(addresses, memory.data_ptr(), stream)


def problem(n: int, d: int, v: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x = torch.randn(n, d, device="cuda", dtype=dtype, requires_grad=True)  # [N, D]
    w = torch.randn(v, d, device="cuda", dtype=dtype, requires_grad=True)  # [V, D]
    return x, w, torch.randint(0, v, (n,), device="cuda")  # [N]


def op_rows() -> None:
    print(f"{'C call':58} {'us':>7}  on the stream")
    shapes = [(4, 16, 32), (256, 512, 4096), (1024, 768, 50257)]
    for dtype in (torch.bfloat16, torch.float32):
        for n, d, v in shapes:
            x, w, t = problem(n, d, v, dtype)

            def none(x: Any = x, w: Any = w, t: Any = t) -> Any:
                loss = lt.linear_cross_entropy(x, w, t, reduction="none")
                loss.sum().backward()
                return loss

            def mean(x: Any = x, w: Any = w, t: Any = t) -> Any:
                return lt.linear_cross_entropy(x, w, t)

            def forward(x: Any = x, w: Any = w, t: Any = t) -> Any:
                with torch.no_grad():
                    return lt.linear_cross_entropy(x, w, t)

            def logits(x: Any = x, w: Any = w, t: Any = t) -> Any:
                z = torch.nn.functional.linear(x, w).detach().requires_grad_()
                loss = lt.cross_entropy(z, t)
                return z, loss, torch.autograd.grad(loss, z)

            for name, function in (("linear forward, mean", forward),
                                   ("linear forward_backward, mean", mean),
                                   ("linear forward + backward, none", none),
                                   ("given logits, forward + backward", logits)):  # fmt: skip
                launched = Launched(function)
                for at, (plan, _, _) in enumerate(launched.calls):
                    us = microseconds([lambda: launched.again(at)])[0]  # noqa: B023
                    nodes = nodes_of(lambda s: launched.again(at, s))  # noqa: B023
                    label = f"{name} [{at}] N {n} D {d} V {v} {str(dtype)[6:]}"
                    said = ", ".join(f"{c} {k}" for k, c in sorted(nodes.items()))
                    print(f"{label:58} {us:7.1f}  {said}; {plan.bytes >> 10} KiB", flush=True)


class Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, target: Any, state: Any) -> Any:
        ctx.save_for_backward(input, weight, target)
        ctx.state = state
        return state[0]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ctx.state[1], ctx.state[2], None, None


def binding_rows() -> None:
    x, w, t = problem(4, 16, 32, torch.bfloat16)
    up = torch.ones((), device="cuda")
    state = (torch.zeros((), device="cuda"), torch.zeros_like(x), torch.zeros_like(w))

    def empty() -> None:
        x.grad = w.grad = None
        Empty.apply(x, w, t, state).backward(up)

    def ours() -> None:
        x.grad = w.grad = None
        lt.linear_cross_entropy(x, w, t).backward(up)

    def implicit() -> None:
        x.grad = w.grad = None
        lt.linear_cross_entropy(x, w, t).backward()

    def theirs() -> None:
        x.grad = w.grad = None
        logits = torch.nn.functional.linear(x, w)
        torch.nn.functional.cross_entropy(logits.float(), t).backward(up)

    def forward_only() -> None:
        with torch.no_grad():
            lt.linear_cross_entropy(x, w, t)

    launched = Launched(lambda: lt.linear_cross_entropy(x, w, t))
    grads = (torch.empty_like(x), torch.empty_like(w))

    def c_call() -> None:
        launched.again(0)

    def scales() -> None:
        _device.Scale(grads).by(up)

    def torch_memory() -> None:
        torch.empty(1 << 20, dtype=torch.uint8, device="cuda")

    before = _abi._plan_run, _abi._scale_each

    class Without:
        """The binding alone: C functions that do nothing."""

        def __enter__(self) -> None:
            _abi._plan_run = lambda *_: 0
            _abi._scale_each = lambda *_: 0

        def __exit__(self, *_: object) -> None:
            _abi._plan_run, _abi._scale_each = before

    def alone() -> None:
        x.grad = w.grad = None
        lt.linear_cross_entropy(x, w, t).backward(up)

    names = {
        "empty autograd.Function, forward + backward": empty,
        "linear_cross_entropy, forward + backward": ours,
        "the same, backward() without a gradient": implicit,
        "torch eager, F.linear and F.cross_entropy": theirs,
        "linear_cross_entropy under no_grad": forward_only,
        "the C call of forward_backward": c_call,
        "scale of both gradients": scales,
        "torch.empty of a workspace": torch_memory,
    }
    times = dict(zip(names, microseconds(list(names.values()))))
    with Without():
        times["linear_cross_entropy, its C functions doing nothing"] = microseconds([alone])[0]
    print(f"\n{'torch ' + torch.__version__ + ', N 4 D 16 V 32 bfloat16':58} {'us':>7}")
    for name, us in times.items():
        print(f"{name:58} {us:7.1f}")
    base = times["empty autograd.Function, forward + backward"]
    beyond = times["linear_cross_entropy, forward + backward"] - base
    python = times["linear_cross_entropy, its C functions doing nothing"] - base
    print(f"{'beyond the empty function (asked: 25)':58} {beyond:7.1f}")
    print(f"{'  of it the binding, without the C functions':58} {python:7.1f}")
    eager = times["torch eager, F.linear and F.cross_entropy"]
    print(f"{'beyond torch eager':58} {beyond + base - eager:7.1f}")


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    if not torch.cuda.is_available():
        print("host_cost: no CUDA device that torch can use")
        return
    print(_abi.describe_backend(_abi.CUDA))
    op_rows()
    binding_rows()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What CUDA adds: no host synchronization, graphs, streams, devices, memory, the scale kernel. The
rest of the suite runs on the device too, where there is one."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import fresh
import reference
from logitless import _abi
from logitless.torch import (
    _device,
    cross_entropy,
    linear_cross_entropy,
    linear_logprob,
    workspace_size,
)
from reference import close
from test_linear import BF16, F16, F32, problem

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def everything(x: Any, w: Any, t: Any) -> None:
    """Calls of several kinds, most with gradients."""
    for reduction in ("mean", "sum", "none"):
        loss = linear_cross_entropy(x, w, t, reduction=reduction, shift=True, softcap=9.0)
        (loss.sum() * 0.3).backward()
    loss, s = linear_cross_entropy(x, w, t, return_statistics=("lse", "entropy", "argmax"))
    (loss + s.lse.sum() + s.entropy.sum()).backward()
    linear_logprob(x, w, t).sum().backward()
    cross_entropy(torch.nn.functional.linear(x, w), t).backward()
    with torch.no_grad():
        linear_cross_entropy(x, w, t, normalizer=torch.ones((), device="cuda"))


def test_no_host_synchronization() -> None:
    x, w, _, t = problem((2, 40), 300, 64, BF16, "cuda")
    everything(x, w, t)  # a first call loads kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything(x, w, t)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_calls_return_while_the_stream_is_busy() -> None:
    x, w, _, t = problem((2, 40), 300, 64, BF16, "cuda")
    everything(x, w, t)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # the stream is busy for about a second
    end = torch.cuda.Event()
    everything(x, w, t)
    end.record()
    assert not end.query(), "a call has waited for the stream"
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_cuda_graph(dtype: torch.dtype) -> None:
    x, w, _, t = problem((64,), 500, 64, dtype, "cuda")

    def step() -> Any:
        loss = linear_cross_entropy(x, w, t, label_smoothing=0.1)
        return loss, *torch.autograd.grad(loss * 2, (x, w))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        for a, e in zip(captured, step()):
            assert torch.equal(a, e)


def test_a_stream_of_its_own() -> None:
    x, w, _, t = problem((64,), 500, 64, BF16, "cuda")
    expected = linear_cross_entropy(x, w, t)
    expected.backward()
    want = (expected.detach().clone(), x.grad.clone(), w.grad.clone())  # type: ignore[union-attr]
    x.grad = w.grad = None
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        y, v = (x.detach() * 1).requires_grad_(), (w.detach() * 1).requires_grad_()
        loss = linear_cross_entropy(y, v, t)
        loss.backward()
    stream.synchronize()
    for a, e in zip((loss, y.grad, v.grad), want):
        assert a is not None and torch.equal(a, e)


def test_another_device_than_the_current_one() -> None:
    before = torch.cuda.current_device()  # JAX in this process may have changed it
    device = f"cuda:{(before + 1) % torch.cuda.device_count()}"
    x, w, _, t = problem((64,), 500, 64, BF16, device)
    loss = linear_cross_entropy(x, w, t)
    loss.backward()
    assert loss.device == x.device and torch.cuda.current_device() == before
    close(loss, reference.loss(reference.logits_of(x, w), t))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 1000, 1 << 20])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_scale_rounds_once_and_leaves_one_alone(
    dtype: torch.dtype, count: int, offset: int
) -> None:
    memory = torch.randn(count + offset + 5, device="cuda").to(dtype)
    before = memory.clone()
    values = memory[offset : offset + count]
    for factor in (1.0, 1 / 3, 65536.0):
        expected = (values.float() * torch.tensor(factor, device="cuda")).to(dtype)
        other = torch.arange(5.0, device="cuda")
        _device.Scale((values, None, other)).by(torch.tensor(factor, device="cuda"))
        assert torch.equal(values, expected)
        assert torch.equal(other, torch.arange(5.0, device="cuda") * factor)
    assert torch.equal(memory[:offset], before[:offset])
    assert torch.equal(memory[offset + count :], before[offset + count :])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_f16_gradients_are_rounded_after_the_scalers_factor(compiled: bool) -> None:
    """Without the factor, gradients of other classes than the targets' would be 0 in f16."""
    x, w, b, t = problem((512,), 5000, 64, F16, "cuda", bias=True)

    def loss(x: Any, w: Any, b: Any) -> Any:
        return linear_cross_entropy(x, w, t, linear_bias=b)

    leaves = (x, w, b)
    actual = torch.autograd.grad(
        (torch.compile(loss) if compiled else loss)(*leaves) * 2**16, leaves
    )
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves if leaf is not None]
    logits = doubles[0] @ doubles[1].T + doubles[2]
    expected = torch.nn.functional.cross_entropy(logits, t)
    for ours, theirs in zip(actual, torch.autograd.grad(expected * 2**16, doubles)):
        assert ours.dtype is F16
        close(ours, theirs, F16)


@pytest.mark.parametrize("retained", [False, True], ids=["again", "retained"])
def test_f16_gradients_twice(retained: bool) -> None:
    """The first backward overwrites kept state; the second computes the logits again."""
    x, w, _, t = problem((300,), 1000, 64, F16, "cuda")
    loss = linear_cross_entropy(x, w, t)
    first = torch.autograd.grad(
        loss, (x, w), torch.tensor(2.0**16, device="cuda"), retain_graph=True
    )
    second = torch.autograd.grad(loss, (x, w), torch.tensor(2.0**15, device="cuda"), retained)
    for once, half in zip(first, second):
        close(half * 2, once, F16)


@pytest.mark.parametrize("how", ["bounded", "small head", "f32 parameters"])
def test_f16_gradients_that_wait_in_f32(how: str) -> None:
    """Nothing is kept, and the gradients are computed with the loss, if `memory` is given, if kept
    state would take much more than the f32 gradients, or if the gradients are f32 anyway."""
    tokens, hidden, vocab = (4096, 16, 8192) if how == "small head" else (1024, 512, 8192)
    dtype = F32 if how == "f32 parameters" else F16
    x = torch.randn(tokens, hidden, device="cuda", dtype=dtype, requires_grad=True)
    w = torch.randn(vocab, hidden, device="cuda", dtype=dtype, requires_grad=True)
    t = torch.randint(0, vocab, (tokens,), device="cuda")
    least = least_memory(x.detach().half(), w.detach().half(), t) if how == "bounded" else None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.float16, enabled=how == "f32 parameters"):
        loss = linear_cross_entropy(x, w, t, memory=least)
    held = torch.cuda.memory_allocated() - before
    assert held <= 4 * (x.numel() + w.numel()) + (2 << 20), held
    loss.backward(torch.tensor(2.0**16, device="cuda"))
    assert x.grad is not None and x.grad.dtype is dtype and not x.grad.isnan().any()


def test_f16_gradients_take_no_f32_beside_what_is_kept() -> None:
    tokens, hidden, vocab = 2048, 1024, 50304
    x = torch.randn(tokens, hidden, device="cuda", dtype=F16, requires_grad=True)
    w = torch.randn(vocab, hidden, device="cuda", dtype=F16, requires_grad=True)
    t = torch.randint(0, vocab, (tokens,), device="cuda")
    linear_cross_entropy(x, w, t).backward()
    x.grad = w.grad = None
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(x, w, t).backward()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= 2 * (x.numel() + w.numel() + tokens * vocab) + (64 << 20), taken


def test_out_of_range_targets_give_nan_and_touch_nothing() -> None:
    x, w, _, t = problem((64,), 500, 64, BF16, "cuda", ignored=0)
    t[3], t[9] = 500, -7
    loss = linear_cross_entropy(x, w, t, reduction="none")
    assert loss.isnan().nonzero().flatten().tolist() == [3, 9]
    loss.nansum().backward()
    assert not x.grad[[3, 9]].any()  # type: ignore[index]
    logprob = linear_logprob(x, w, t)
    assert logprob.isnan().nonzero().flatten().tolist() == [3, 9]


def least_memory(x: Any, w: Any, t: Any) -> int:
    with pytest.raises(ValueError, match=r"^memory is 0 bytes; allowed: >= \d+") as caught:
        workspace_size(x, w, t, memory=0)
    return int(str(caught.value).split(">= ")[1].split()[0])


@pytest.mark.parametrize("share", [None, 0, 0.5], ids=["recommended", "least", "between"])
def test_peak_memory_is_what_was_said(share: float | None) -> None:
    tokens, hidden, vocab = 4096, 1024, 50304
    x = torch.randn(tokens, hidden, device="cuda", dtype=BF16, requires_grad=True)
    w = torch.randn(vocab, hidden, device="cuda", dtype=BF16, requires_grad=True)
    t = torch.randint(0, vocab, (tokens,), device="cuda")
    least, memory = least_memory(x, w, t), None
    assert least <= 48 << 20, "the logits in f32 are 16 times that"
    if share is not None:
        memory = least + int(share * (workspace_size(x, w, t) - least))
    linear_cross_entropy(x, w, t, memory=memory).backward()
    x.grad = w.grad = None
    torch.cuda.synchronize()
    gc.collect()  # so that nothing of other tests is freed below
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    inputs = torch.cuda.memory_allocated()
    linear_cross_entropy(x, w, t, memory=memory).backward()
    peak = torch.cuda.max_memory_allocated()
    workspace = workspace_size(x, w, t, memory=memory)
    assert memory is None or workspace <= memory
    predicted = inputs + 2 * (x.numel() + w.numel()) + workspace
    assert abs(peak - predicted) <= 0.01 * predicted, (peak, predicted, workspace)


def test_memory_is_what_tensors_so_aligned_take() -> None:
    """Aligned tensors need less workspace, and a plan for other alignments is not reused."""
    tokens, hidden, vocab = 4096, 1024, 50304
    x = torch.randn(tokens, hidden, device="cuda", dtype=BF16, requires_grad=True)
    memory = torch.randn(vocab * hidden + 1, device="cuda", dtype=BF16)
    t = torch.randint(0, vocab, (tokens,), device="cuda")
    aligned, off = (
        memory[first : first + vocab * hidden].view(vocab, hidden).detach().requires_grad_()
        for first in (0, 1)
    )
    least, of_off = least_memory(x, aligned, t), least_memory(x, off, t)
    assert least < of_off
    for w, bytes_of_it in ((aligned, least), (off, of_off), (aligned, least)):
        linear_cross_entropy(x, w, t, memory=bytes_of_it).backward()
        with pytest.raises(ValueError, match=f"allowed: >= {bytes_of_it} "):
            linear_cross_entropy(x, w, t, memory=bytes_of_it - 1)


COMPILED_FIRST = """
import torch
from logitless.torch import linear_cross_entropy
from test_linear import BF16, problem
x, w, _, t = problem((64,), 500, 64, BF16, "cuda")
step = torch.compile(lambda x, w, t: linear_cross_entropy(x, w, t), mode="reduce-overhead")
for _ in range(4):
    torch.compiler.cudagraph_mark_step_begin()
    loss = step(x, w, t)
    grads = torch.autograd.grad(loss, (x, w))
    eager = linear_cross_entropy(x, w, t)
    assert torch.equal(loss, eager)
    for a, e in zip(grads, torch.autograd.grad(eager, (x, w))):
        assert torch.equal(a, e)
print("equal")
"""


def test_compiled_with_cuda_graphs_as_the_first_call_of_a_process() -> None:
    """A tensor that the first call kept would be in the graph's pool, which torch refuses."""
    assert fresh.run(COMPILED_FIRST).strip() == "equal"


def _added(parts: list[Any], dtype: torch.dtype) -> Any:
    """logitless_add's sum of vectors."""
    made = torch.full_like(parts[0], float("nan"), dtype=dtype)
    stream = torch.cuda.current_stream().cuda_stream
    _abi.add(
        [part.data_ptr() for part in parts], made.data_ptr(), _device.DTYPES[dtype], made.numel(),
        made.get_device(), stream,
    )  # fmt: skip
    return made


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_parts_are_added_in_their_order(dtype: torch.dtype) -> None:
    for count in (1, 2, 3, 16):
        for size in (1, 3, 4, 1000, 300_001):
            for offset in (0, 1):  # elements; vectors that are not aligned are added singly
                many = torch.randn(count, size + offset, device="cuda") * 100
                parts = [row[offset:].clone() if offset == 0 else row[offset:] for row in many]
                total = parts[0]
                for part in parts[1:]:
                    total = total + part
                assert torch.equal(_added(parts, dtype), total.to(dtype)), (count, size, offset)
    parts = list(torch.randn(3, 1000, device="cuda"))
    want = parts[0] + parts[1] + parts[2]
    _abi.add([p.data_ptr() for p in parts], parts[1].data_ptr(), 0, 1000, 0,
             torch.cuda.current_stream().cuda_stream)  # fmt: skip
    assert torch.equal(parts[1], want)

# SPDX-License-Identifier: Apache-2.0
"""The default memory of functions with other libraries' signatures: as much as the other libraries'
functions take, or the minimum of ours if that is more."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from frugal import CASES, check_default_is_enough
from logitless._abi import REDUCTION_MEAN, Options, Room, parse_memory
from logitless.integrations import (
    LigerFusedLinearCrossEntropyLoss,
    cce,
    liger,
    megatron,
    prime_rl,
    torchtitan,
    unsloth,
    verl,
)
from logitless.integrations import _memory as integrations_memory
from logitless.integrations import trl as trl_module
from logitless.integrations._memory import Sizes
from logitless.torch import (
    _kept,
    _run,
    default_memory,
    linear_cross_entropy,
    linear_logprob,
    set_default_memory,
)
from logitless.torch._autograd import Call as Call16
from reference import close
from test_linear import problem

MIB = 1 << 20
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
Call = Callable[..., Tensor]
MODULES = (cce, liger, megatron, prime_rl, torchtitan, trl_module, unsloth, verl)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    set_default_memory(None)


def trl(x: Tensor, w: Tensor, t: Tensor, chunk_size: int = 256, memory: Any = None) -> Tensor:
    made: Any = trl_module.TrlPatch(parse_memory(memory)).apply(x, w, None, t, 1.0, chunk_size)
    return made[0]


def prime(x: Tensor, w: Tensor, t: Tensor, **more: Any) -> Tensor:
    layer = prime_rl.FusedOutputLinear(*reversed(w.shape), chunk_size=64, **more)
    del layer.weight  # w is the leaf instead
    layer.weight = w
    made: Any = layer(x, t, torch.ones(t.shape))
    return made["logprobs"]


def titan(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    loss = torchtitan.HeadLoss()
    head = torch.nn.Linear(1, 1, bias=False)
    del head.weight
    head.weight = w
    loss.set_lm_head(head)
    return loss(x, t)[0]


def ligers(reduction: str, **options: Any) -> Call:
    def call(x: Tensor, w: Tensor, t: Tensor, **more: Any) -> Tensor:
        return LigerFusedLinearCrossEntropyLoss(reduction=reduction, **options, **more)(w, x, t)

    return call


# Each adapter, and the bytes that the function it replaces takes beyond inputs and gradients, as a
# formula of (N, D, V, element size) that follows its chunks of columns or tokens.
ADAPTERS: dict[str, tuple[Call, Callable[[int, int, int, int], int]]] = {
    "trl": (trl, lambda n, d, v, s: s * n * 256 + (4 * (n + v) * d if s < 4 else 0)),
    "verl": (
        lambda x, w, t, **more: verl.linear_cross_entropy(x, w, t, **more)[0],
        lambda n, d, v, s: s * n * (min(9504, v) + max(d, v % min(9504, v))),
    ),
    "verl's module": (
        lambda x, w, t, **more: verl.FusedLinearForPPO(chunk_size=16, **more)(x, w, t)[0],
        lambda n, d, v, s: v * ((20 + s) * 16 + s * d),
    ),
    "unsloth": (
        lambda x, w, t, **more: unsloth.chunked_hidden_states_selective_log_softmax(
            x[None], w, t[None], **more
        ),
        lambda n, d, v, s: min(256 * MIB, n * v * s) + 4 * n * d,
    ),
    "prime-rl": (prime, lambda n, d, v, s: (20 + s) * 64 * min(v, 8192)),
    "liger mean": (ligers("mean"), lambda n, d, v, s: 2 * n * d * s),
    "liger sum": (ligers("sum"), lambda n, d, v, s: 2 * n * d * s),
    "liger none": (ligers("none"), lambda n, d, v, s: 4 * n * d * s),
    "liger, f32 sums": (
        ligers("mean", accum_dtype=F32),
        lambda n, d, v, s: 2 * n * d * s + (4 * v * d if s < 4 else 0),
    ),
    "cce": (cce.linear_cross_entropy, lambda n, d, v, s: 0),
    "cce_exact": (
        lambda x, w, t, **more: cce.linear_cross_entropy(x, w, t, impl="cce_exact", **more),
        lambda n, d, v, s: 4 * (n + v) * d if s < 4 else 0,
    ),
    "megatron": (
        lambda x, w, t, **more: megatron.linear_cross_entropy(x, w, t, reduction="none", **more),
        lambda n, d, v, s: n * (3072 * s + 4 * d + 8),
    ),
    "torchtitan": (titan, lambda n, d, v, s: n * v * (s + 8) // 8 + 4 * n * d),
}


class Taken:
    """Calls a function and returns the bytes of its kept state and largest workspace."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workspace = self.kept = 0
        make = _run.make_plan
        _run._plans.clear()

        def made(*args: Any, **kwargs: Any) -> Any:
            plan = make(*args, **kwargs)
            self.workspace = max(self.workspace, plan.bytes)
            self.kept += plan.kept.bytes if plan.kept is not None else 0
            return plan

        monkeypatch.setattr(_run, "make_plan", made)

    def __call__(self, call: Call, *tensors: Tensor, **more: Any) -> int:
        _run._plans.clear()  # so that new plans are made
        self.workspace = self.kept = 0
        loss = call(*tensors, **more)
        if loss.requires_grad:
            loss.backward(torch.randn(loss.shape))
        return self.workspace + self.kept


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    return Taken(monkeypatch)


def tensors(dtype: torch.dtype, n: int = 600, d: int = 16, v: int = 2500) -> tuple[Tensor, ...]:
    x, w, _, t = problem((n,), v, d, dtype, ignored=0)
    return x, w, t


def least(taken: Taken, call: Call, given: tuple[Tensor, ...], patch: pytest.MonkeyPatch) -> int:
    """The bytes that a call takes if it is given its minimum."""
    with patch.context() as nothing:
        for module in MODULES:
            nothing.setattr(module, "frugal", lambda *_: Room(1))
        return taken(call, *given)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ADAPTERS)
def test_takes_what_the_other_takes(
    name: str, dtype: torch.dtype, taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, peak = ADAPTERS[name]
    given = tensors(dtype)
    x, w, _ = given
    (n, d), v, size = x.shape, w.shape[0], x.element_size()
    # all 16-bit logits and the sums, or a third of the f32 logits
    most = 2 * n * v + 4 * (n + v) * d if size < 4 else 4 * n * v // 3
    allowed = min(peak(n, d, v, size), most)
    found, smallest = taken(call, *given), least(taken, call, given, monkeypatch)
    assert smallest <= found <= max(allowed, smallest)
    with default_memory("1TiB"):
        whole = taken(call, *given)
    assert smallest < whole, "else the case shows nothing"
    if smallest < allowed < whole:
        assert found > 0.6 * allowed, "what is allowed is used"


@pytest.mark.parametrize("name", ADAPTERS)
def test_without_gradients_too(name: str, taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    call, peak = ADAPTERS[name]
    given = tensors(F32)
    x, w, _ = given
    with torch.no_grad():
        found, smallest = taken(call, *given), least(taken, call, given, monkeypatch)
    assert found <= max(peak(*x.shape, w.shape[0], 4), smallest)


@pytest.mark.parametrize("name", ADAPTERS)
def test_more_is_taken_of_those_who_say_so(name: str, taken: Taken) -> None:
    call, _ = ADAPTERS[name]
    given = tensors(F32)
    frugal = taken(call, *given)
    with default_memory("64MiB"):
        generous = taken(call, *given)
    assert frugal < generous
    set_default_memory("64MiB")
    assert taken(call, *given) == generous
    set_default_memory(None)
    assert taken(call, *given) == frugal
    if name != "torchtitan":  # its configuration has no such field
        assert taken(call, *given, memory="64MiB") == generous
        with default_memory("64MiB"), pytest.raises(ValueError, match="memory is 1 bytes"):
            call(*given, memory=1)


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize(("dtype", "sizes"), CASES, ids=str)
def test_a_default_is_never_too_small(name: str, dtype: Any, sizes: Any) -> None:
    check_default_is_enough(ADAPTERS[name][0], *tensors(dtype, *sizes))


def test_our_own_functions_keep_all(taken: Taken) -> None:
    x, w, t = tensors(F32)
    for call in (linear_logprob, lambda *args: linear_cross_entropy(*args, reduction="none")):
        taken(call, x, w, t)
        assert taken.kept >= 4 * x.shape[0] * w.shape[0]


# Memory that the replaced functions take with gradients, and in a forward pass alone, in MiB: at
# N 8192, D 2048, V 151936 in bf16 on an H100 (bench/results/gpu-2026-11-27-dropins.txt).
PRIME = prime_rl.FusedOutputLinear(1, 1, 8192)
MEASURED: dict[str, tuple[Callable[[Sizes], int], float, float | None]] = {
    "trl": (lambda call: trl_module._peak(call, 32768), 1509, 256),
    "verl": (verl._peak, 296, 16),
    "verl's module": (verl.FusedLinearForPPO()._peak, 2232, 891),
    "unsloth": (unsloth._peak, 395, 259),
    "prime-rl": (PRIME._peak, 1409, 897),
    "liger mean": (lambda call: liger._peak(call, "mean", None, 1), 38, None),
    "liger none": (lambda call: liger._peak(call, "none", None, 1), 75, None),
    "liger, f32 sums": (lambda call: liger._peak(call, "mean", F32, 1), 1189, None),
}


@pytest.mark.parametrize("name", MEASURED)
def test_peaks_are_those_that_were_measured(name: str) -> None:
    peak, *measured = MEASURED[name]
    n, d, v = 8192, 2048, 151936
    for mib, gradients in zip(measured, (True, False)):
        sums = (4 * (n + v) * d, 4 * v * d) if gradients else (0, 0)
        found = peak(Sizes(n, d, v, 2, gradients, *sums)) / MIB
        assert mib is None or 0.75 * mib <= found <= 1.05 * mib


def test_f16_gradients_do_not_wait_in_f32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients in one call would hold gradients in f32 until the gradient scaler's factor
    is known. Where kept state serves (CUDA), a Room therefore takes Forward and Backward; a fixed
    `memory` does not, because it may have no room for the kept state."""
    monkeypatch.setattr(_kept, "serves", lambda *_: True)
    x, w, t = tensors(F16)
    options = Options(REDUCTION_MEAN, -100, 0.0, 0.0, 1.0, 0.0, 1.0, 0, 0.0)

    def fused(memory: Any) -> bool:
        constants = _run.Constants(t, None, None, None, None)
        return Call16(constants, options, parse_memory(memory), _run.LOSS).fused(x, w, None, False)

    assert not fused(Room(1)) and not fused(Room(1000))
    assert fused(1000) and fused("1GiB")
    assert fused(Room(1 << 40)) is fused(None)


def test_under_autocast_sizes_are_those_of_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sizes] = []
    x, w, _ = tensors(F32)
    with torch.autocast("cpu", BF16):
        integrations_memory.frugal(None, x, w, lambda call: seen.append(call) or 1)
    integrations_memory.frugal(None, x, w.detach(), lambda call: seen.append(call) or 1)
    of_16_bits = x.detach().bfloat16().requires_grad_(), w.detach().bfloat16()
    integrations_memory.frugal(None, *of_16_bits, lambda call: seen.append(call) or 1)
    assert [(call.size, call.f32_sums, call.f32_weight_sums) for call in seen] == [
        (2, 0, 0), (4, 0, 0), (2, 4 * x.numel(), 0)
    ]  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_nothing_more_is_kept(dynamic: bool) -> None:
    """Compiled code keeps no more than eager code. With symbols as sizes, another length does not
    recompile."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(
        lambda x, w, t: verl.FusedLinearForPPO(chunk_size=16)(x, w, t)[0], backend=counter,
        fullgraph=True, dynamic=dynamic,
    )  # fmt: skip
    counts = []
    for tokens in (500, 601) if dynamic else (500,):
        x, w, t = tensors(F32, tokens)
        eager = verl.FusedLinearForPPO(chunk_size=16)(x, w, t)[0]
        found = call(x, w, t)
        assert found.grad_fn is not None
        saved = [s for s in found.grad_fn.saved_tensors if s.dim() == 2 and s.shape[1] == 64]  # type: ignore[attr-defined]
        kept = sum(s.numel() * s.element_size() for s in saved)
        assert kept <= w.shape[0] * (24 * 16 + 4 * 16)
        assert bool(kept) is not dynamic
        close(found, eager.double())
        close(*(torch.autograd.grad(o.sum(), x)[0] for o in (found, eager)))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


GROWTH = """
import os, resource, sys, torch
torch.set_num_threads(1)
from test_frugal import ADAPTERS, tensors
import torch.nn.functional
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
x, w, t = tensors(torch.float32, 4096, 64, 24576)
for name, (call, _) in ADAPTERS.items():
    child = os.fork()
    if child == 0:
        before = peak()
        call(x, w, t).sum().backward()
        print(name, (peak() - before) >> 10, sep="=", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_peak_resident_memory_of_a_process() -> None:
    """The logits would be 384 MiB, and the gradients are 7."""
    folder = pathlib.Path(__file__).parent
    paths = os.pathsep.join([str(folder.parents[1] / "python"), str(folder)])
    environment = {**os.environ, "PYTHONPATH": paths, "LOGITLESS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], env=environment, capture_output=True, text=True, check=True
    )
    grew = {name: int(mib) for name, mib in (line.split("=") for line in done.stdout.splitlines())}
    assert set(grew) == set(ADAPTERS)
    for name, (_, peak_of) in ADAPTERS.items():
        allowed = peak_of(4096, 64, 24576, 4) / MIB
        assert grew[name] <= allowed + 48, name

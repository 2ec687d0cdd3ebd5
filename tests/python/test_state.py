# SPDX-License-Identifier: Apache-2.0
"""What the binding keeps from one call to the next: plans, which any thread and any number may use
again, and which devices are warm; but no tensor, whose memory may belong to a framework."""

from __future__ import annotations

import concurrent.futures
import gc
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import reference
from logitless import _abi
from logitless._errors import error_of
from logitless.torch import (
    LinearCrossEntropyHead,
    _device,
    _run,
    cross_entropy,
    cross_entropy_,
    linear_cross_entropy,
    linear_logprob,
    softmax_,
    workspace_size,
)
from reference import close
from test_linear import F16, F32, problem
from test_second_derivatives import PassThrough


def every_call(device: str, dtype: torch.dtype) -> None:
    x, w, b, t = problem((3, 5), 17, 8, dtype, device, bias=True)
    classes, tokens = torch.rand(17, device=device), torch.rand(3, 5, device=device)
    names = ("lse", "target_logit", "logprob", "entropy", "argmax")
    for reduction in ("mean", "none"):
        loss, s = linear_cross_entropy(
            x, w, t, linear_bias=b, weight=classes, token_weight=tokens, reduction=reduction,
            return_statistics=names, shift=True,
        )  # fmt: skip
        (loss.sum() + s.lse.sum()).backward()
        linear_cross_entropy(x, w, t, linear_bias=b, reduction=reduction).sum().backward()
    linear_cross_entropy(x, w, t, normalizer=7, memory="16MiB").backward(retain_graph=True)
    linear_cross_entropy(x, w, t, normalizer=torch.tensor(7, device=device)).backward()
    linear_logprob(x, w, t, entropy=True)
    logits = torch.nn.functional.linear(x, w)
    cross_entropy(logits, t).backward(retain_graph=True)
    cross_entropy_(logits, t).backward()
    softmax_(logits.detach())
    workspace_size(x, w, t)
    LinearCrossEntropyHead(8, 17, device=device, dtype=dtype, grad_accumulation="main_grad")(
        x, t
    ).backward()
    with torch.autocast(device, dtype=torch.bfloat16):
        linear_cross_entropy(x, w, t).backward()
    with PassThrough():
        linear_cross_entropy(x, w, t).backward()


def kept() -> Iterator[tuple[str, object]]:
    """Every object that the package's modules and classes reach through its own objects and builtin
    containers, each with the module's attribute that leads to it."""
    modules = [m for name, m in sys.modules.items() if name.startswith("logitless")]
    todo: list[tuple[str, object]] = [
        (f"{module.__name__}.{name}", value)
        for module in modules
        for name, value in vars(module).items()
    ]
    seen: set[int] = set()
    while todo:
        where, thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        yield where, thing
        owner = thing if isinstance(thing, (type, types.FunctionType)) else type(thing)
        own = str(owner.__module__).startswith("logitless")
        more: list[object] = []
        if isinstance(thing, types.FunctionType):
            more = [*(thing.__closure__ or ()), thing.__defaults__, thing.__kwdefaults__]
        elif isinstance(thing, type):
            more = [*vars(thing).values()] if own else []
        elif isinstance(thing, types.ModuleType):
            continue
        elif own or type(thing).__module__ in ("builtins", "functools", "collections"):
            more = gc.get_referents(thing)
        todo += [(where, value) for value in more]


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_no_tensor_is_kept(device: str, dtype: torch.dtype) -> None:
    """The first call may run while a framework manages memory (a CUDA graph's private pool, a
    warm-up of torch.compile). A tensor that it kept would be in memory that is reused."""
    if device == "cuda" and (rows := sys.modules.get("logitless.integrations._rows")):
        torch.cuda.synchronize()
        rows._raise_late()  # a late error of an earlier test's model
    every_call(device, dtype)
    tensors = (torch.Tensor, torch.UntypedStorage)
    assert [where for where, value in kept() if isinstance(value, tensors)] == []


def test_what_is_kept_is_found() -> None:
    """kept() finds a tensor in a list, in a tuple in a dictionary, and in a closure or a default of
    a function."""
    holder = types.ModuleType("logitless._holder")
    tensor = torch.ones(3)
    sys.modules[holder.__name__] = holder
    try:
        for place in ([tensor], {"a": (tensor,)}, lambda: tensor, lambda t=tensor: t):
            holder.place = place  # type: ignore[attr-defined]
            assert any(v is tensor for _, v in kept())
        del holder.place
        assert not any(v is tensor for _, v in kept())
    finally:
        del sys.modules[holder.__name__]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for every call that is planned, beginning with no plan at all."""
    plans: list[int] = []
    real = _abi._workspace

    def spy(*arguments: Any) -> int:
        plans.append(1)
        return int(real(*arguments))

    monkeypatch.setattr(_abi, "_workspace", spy)
    _run._plans.clear()
    yield plans


def test_a_call_is_planned_for_the_addresses_that_it_runs_on(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan without addresses must serve tensors of any alignment, which takes more workspace. On
    the host it takes no more, so plans have no addresses there."""
    names = ("input", "weight", "target", "grad_input", "grad_weight")
    seen: list[list[int]] = []
    workspace, run = _abi._workspace, _abi.Plan.run

    def addresses(op: Any) -> list[int]:
        return [getattr(op, name).contents.data for name in names]

    def spy_workspace(op: Any, *rest: Any) -> int:
        seen.append(addresses(op._obj))
        return int(workspace(op, *rest))

    def spy_run(plan: _abi.Plan, given: list[int], *rest: Any, **how: Any) -> None:
        op = plan._call.op
        present = [name for name in (*_abi.TENSORS, *_abi.MORE_TENSORS) if getattr(op, name)]
        at = dict(zip(present, (given[i] for i in plan._order), strict=True))
        seen.append([at[name] for name in names])
        run(plan, given, *rest, **how)

    monkeypatch.setattr(_abi, "_workspace", spy_workspace)
    monkeypatch.setattr(_abi.Plan, "run", spy_run)
    _run._plans.clear()
    x, w, _, t = problem((9,), 17, 8, device=device)
    linear_cross_entropy(x, w, t)
    asked, ran = seen
    assert all(ran)
    assert asked == ran if device == "cuda" else not any(asked)


def test_threads_with_other_numbers_of_threads_keep_their_plans(planned: list[int]) -> None:
    """torch.set_num_threads is each thread's own; two threads that take turns do not plan again."""
    x, w, _, t = problem((9,), 17, 8)
    before = torch.get_num_threads()

    def call(threads: int) -> torch.Tensor:
        torch.set_num_threads(threads)
        loss: torch.Tensor = linear_cross_entropy(x, w, t)
        return loss

    with concurrent.futures.ThreadPoolExecutor(1) as other:
        results = []
        for _ in range(5):
            results += [call(2), other.submit(call, 1).result()]
    torch.set_num_threads(before)
    assert len(planned) == 2
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_normalizer_that_changes_is_not_planned_anew(device: str, planned: list[int]) -> None:
    """Trainers pass each batch's number of tokens."""
    x, w, _, t = problem((9,), 17, 8, device=device)
    for number in (7, 8.5, 1e6, 0.25, 7):
        loss = linear_cross_entropy(x, w, t, normalizer=number)
        expected = reference.loss(reference.logits_of(x, w), t, normalizer=number)
        close(loss, expected)
        for ours, theirs in zip(
            torch.autograd.grad(loss, (x, w)), torch.autograd.grad(expected, (x, w))
        ):
            close(ours, theirs)
    assert len(planned) == 1
    close(linear_cross_entropy(x, w, t), reference.loss(reference.logits_of(x, w), t))
    assert len(planned) == 2, "without a number the valid tokens are counted: another plan"
    logits = torch.randn(9, 17, device=device)
    for number in (7, 8):
        expected = reference.loss(logits, t, normalizer=number)
        close(cross_entropy(logits, t, normalizer=number), expected)
    assert len(planned) == 3


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
def test_a_wrong_normalizer_is_said_where_the_call_was_planned_with_a_right_one(
    number: float,
) -> None:
    x, w, _, t = problem((9,), 17, 8)
    good = linear_cross_entropy(x, w, t, normalizer=3.0)
    with pytest.raises(ValueError, match=f"normalizer is {number:g}; allowed"):
        linear_cross_entropy(x, w, t, normalizer=number)
    assert torch.equal(linear_cross_entropy(x, w, t, normalizer=3.0), good)


class PlanOfADevice:
    """Stands for a plan that run_cuda runs, on a machine without such a device."""

    bytes = 64

    def __init__(self) -> None:
        self.runs = 0

    def run(self, *_: object) -> None:
        self.runs += 1


@pytest.fixture
def warmups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A test puts the status first, with which every warm-up fails; then come the devices."""
    asked: list[int] = []

    def warmup(_: int, index: int) -> None:
        asked.append(index)
        raise error_of(asked[0], "cuda: what a warm-up needs and the call does not")

    monkeypatch.setattr(_abi, "warmup", warmup)
    monkeypatch.setattr(_device, "_warm", set())
    monkeypatch.setattr(_device, "_allocate", lambda bytes, stream: 1)
    monkeypatch.setattr(_device, "_release", lambda address: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    yield asked


@pytest.mark.parametrize("code", [9, 10], ids=["backend_unavailable", "not_supported"])
def test_a_device_without_warmup_serves_calls(warmups: list[int], code: int) -> None:
    """Loading kernels early is a convenience (drivers before 12.4 cannot, and no cuBLASLt is needed
    for logits that are given): the call says by itself what is missing."""
    warmups.append(code)
    plan: Any = PlanOfADevice()
    for _ in range(2):
        _device.run_cuda(plan, [], 3)
    assert plan.runs == 2 and warmups[1:] == [3]


def test_a_warmup_that_finds_the_device_broken_says_so(warmups: list[int]) -> None:
    warmups.append(11)
    plan: Any = PlanOfADevice()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a warm-up needs"):
            _device.run_cuda(plan, [], 3)
    assert plan.runs == 0 and warmups[1:] == [3, 3], "a failure is not remembered"

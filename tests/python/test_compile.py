# SPDX-License-Identifier: Apache-2.0
"""torch.library's own checks, torch.compile without graph breaks or recompiles, fake and meta
tensors, functorch."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import reference
from logitless import LogitlessError
from logitless._abi import Options
from logitless.torch import (
    Split,
    _ops,
    _run,
    cross_entropy,
    linear_cross_entropy,
    linear_logprob,
    linear_logprobs_at,
)
from logitless.torch._split.shards import Shard
from reference import close
from test_linear import BF16, F16, F32, problem

OPTIONS = Options(0, -100, 0.1, 1e-3, 0.9, 7.0, 1.1)


def arguments(kind: str, reduction: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    x, w, b, t = problem((2, 5), 19, 8, dtype, device, bias=True)
    token_weight = torch.rand(2, 5, device=device)
    if kind == "logits":
        x, w, b = torch.randn(2, 5, 19, device=device, requires_grad=True), None, None
    vocab_weight = torch.rand(19, device=device)
    normalizer = torch.tensor(4.0, device=device) if reduction == 2 else None
    ids = torch.randint(-1, 19, (2, 5, 3), device=device) if kind == "linear" else None
    tensors = (x, w, b, t, token_weight, vocab_weight, normalizer, None, ids, None)
    return _ops.arguments(tensors, OPTIONS._replace(reduction=reduction), None)


EVERYTHING = (_run.DETACHED - 1) | _run.top_of(3)
NOTHING_KEPT = 0


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("kind", ["linear", "logits"])
@pytest.mark.parametrize("wanted", [_run.LOSS | _run.ROW_STATE, EVERYTHING], ids=["loss", "all"])
def test_opcheck_forward(device: str, kind: str, reduction: int, wanted: int) -> None:
    if kind == "logits":
        wanted &= ~(_run.LOGITS_AT | _run.TOP)
    args = (*arguments(kind, reduction, F32, device), wanted, NOTHING_KEPT, None)
    torch.library.opcheck(torch.ops.logitless.forward, args)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_opcheck_of_gradients_made_with_the_loss(device: str, dtype: torch.dtype) -> None:
    wanted = _run.LOSS | _run.ARGMAX | _run.FUSED | sum(_run.OF_TENSORS)
    args = (*arguments("linear", 2, dtype, device), wanted, NOTHING_KEPT, None)
    torch.library.opcheck(torch.ops.logitless.forward, args, rtol=5e-3, atol=5e-3)


def test_opcheck_backward(device: str) -> None:
    args = arguments("linear", 0, F32, device)
    with torch.no_grad():
        results = torch.ops.logitless.forward(*args, EVERYTHING, NOTHING_KEPT, None)
        made = dict(zip(_ops.RESULTS, results))
        entropy, row_state = made["entropy"], made["row_state"]
        detached = [a.detach() if isinstance(a, Tensor) else a for a in args]
        grads = [torch.randn(2, 5, device=device) for _ in range(4)]
        grads.append(torch.randn(2, 5, 3, device=device))
    torch.library.opcheck(
        torch.ops.logitless.backward,
        (*detached, _run.OF_INPUT | _run.OF_WEIGHT, row_state, entropy, *grads, None, None),
    )


@pytest.mark.parametrize("lists", [False, True])
def test_opcheck_of_chosen_columns_alone(device: str, lists: bool) -> None:
    x, w, b, _ = problem((2, 5), 19, 8, F32, device, bias=True)
    ids = torch.randint(0, 19, (2, 5, 3), device=device)
    offsets = torch.arange(0, 31, 3, device=device) if lists else None
    given = (x, w, b, None, ids.flatten() if lists else ids, offsets, 0.9, 7.0, 1.1, None, None)
    torch.library.opcheck(torch.ops.logitless.logits_at, (*given, 7))
    upstream = torch.randn(given[4].shape, device=device)
    fixed = [a.detach() if isinstance(a, Tensor) else a for a in given]
    torch.library.opcheck(torch.ops.logitless.logits_at_backward, (*fixed, upstream, 7))
    logits = torch.randn(given[4].shape, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.logitless.log_softmax_at, (logits, given[4], offsets))
    if lists:
        values = torch.randn(30, device=device)
        torch.library.opcheck(torch.ops.logitless.list_sums, (values, offsets))


@pytest.mark.parametrize("which", ["input", "weight", "both"])
def test_opcheck_of_transposed_tensors(device: str, which: str) -> None:
    """A gradient has its tensor's order of strides."""
    x, w, _, t = problem((10,), 19, 8, F32, device)
    x, w = x.detach(), w.detach()
    x = x if which == "weight" else x.t().contiguous().t()
    w = w if which == "input" else w.t().contiguous().t()
    tensors: Any = (x, w, None, t, *[None] * 6)
    given, both = _ops.arguments(tensors, Options(2), None), _run.OF_INPUT | _run.OF_WEIGHT
    made = dict(zip(_ops.RESULTS, torch.ops.logitless.forward(*given, _run.ROW_STATE, 0, None)))
    upstream = (made["row_state"], None, torch.ones((), device=device), *[None] * 4)
    args = (*given, both, *upstream, None, None)
    torch.library.opcheck(torch.ops.logitless.backward, args)
    grads = torch.ops.logitless.backward(*args)
    assert [g.stride() for g in grads[:2]] == [x.stride(), w.stride()]
    fused = (*given, both | _run.FUSED | _run.LOSS, 0, None)
    torch.library.opcheck(torch.ops.logitless.forward, fused)
    rows = x.t().reshape(2, 4, 10).permute(2, 0, 1)[..., :2]  # [10, 2, 2], no view of a matrix
    tensors = (rows, torch.ones(19, 2, device=device), None, t.repeat(2).view(10, 2), *[None] * 6)
    given = _ops.arguments(tensors, Options(2), None)
    torch.library.opcheck(
        torch.ops.logitless.forward, (*given, both | _run.FUSED | _run.LOSS, 0, None)
    )


@pytest.mark.parametrize("default", [torch.float64, BF16], ids=str)
def test_opcheck_under_another_default_dtype(default: torch.dtype) -> None:
    """The empty tensors of unwanted results have a fixed dtype, whatever torch's default is."""
    forward = arguments("linear", 2, F32, "cpu")
    with torch.no_grad():
        made = torch.ops.logitless.forward(*forward, _run.LOSS | _run.ROW_STATE, NOTHING_KEPT, None)
    backward = [a.detach() if isinstance(a, Tensor) else a for a in forward]
    row_state = made[_ops.RESULTS.index("row_state")]
    upstream = (row_state, None, torch.ones(()), *[None] * 6)
    fused = _run.LOSS | _run.FUSED | _run.OF_INPUT
    torch.set_default_dtype(default)
    try:
        for op, args in (
            (torch.ops.logitless.forward, (*forward, _run.LOSS, NOTHING_KEPT, None)),
            (torch.ops.logitless.forward, (*forward, fused, NOTHING_KEPT, None)),
            (torch.ops.logitless.backward, (*backward, _run.OF_INPUT, *upstream)),
        ):
            torch.library.opcheck(op, args, test_utils="test_faketensor")
    finally:
        torch.set_default_dtype(F32)


class Counter:
    """A compiler backend that counts graphs."""

    def __init__(self) -> None:
        self.graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def compile(self, function: Any, **options: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(function, backend=self.graphs, fullgraph=True, **options)


CASES: dict[str, Any] = {
    "mean": lambda x, w, b, t: linear_cross_entropy(x, w, t, linear_bias=b, label_smoothing=0.1),
    "sum": lambda x, w, b, t: linear_cross_entropy(x, w, t, reduction="sum") + b.sum(),
    "none": lambda x, w, b, t: linear_cross_entropy(
        x, w, t, linear_bias=b, reduction="none", shift=True
    ).sum(),
    "statistics": lambda x, w, b, t: (
        lambda r: r[0] + (r[1].lse + r[1].logprob * 2).sum() + r[1].argmax.sum()
    )(
        linear_cross_entropy(
            x, w, t, linear_bias=b, return_statistics=("lse", "logprob", "argmax"), memory="64MiB"
        )
    ),
    "logprob": lambda x, w, b, t: sum(
        v.sum() for v in linear_logprob(x, w, t, linear_bias=b, entropy=True)
    ),
    "logits": lambda x, w, b, t: cross_entropy(torch.nn.functional.linear(x, w, b), t),
}


@pytest.mark.parametrize("name", CASES)
def test_compiled_is_one_graph_with_the_eager_gradients(device: str, name: str) -> None:
    x, w, b, t = problem((2, 5), 19, 8, device=device, bias=True)
    assert b is not None
    counter = Counter()
    compiled = counter.compile(CASES[name])
    loss = compiled(x, w, b, t)
    eager = CASES[name](x, w, b, t)
    close(loss, eager.double())
    grads = torch.autograd.grad(loss * 3, (x, w, b))
    for a, e in zip(grads, torch.autograd.grad(eager * 3, (x, w, b))):
        close(a, e.double())
    assert counter.graphs.frame_count == 1


def test_inductor(device: str) -> None:
    x, w, b, t = problem((2, 5), 19, 8, device=device, bias=True)
    loss = torch.compile(CASES["mean"], fullgraph=True)(x, w, b, t)
    expected = reference.loss(reference.logits_of(x, w, b), t, label_smoothing=0.1)
    close(loss, expected)
    grads = torch.autograd.grad(loss, (x, w, b))
    for a, e in zip(grads, torch.autograd.grad(expected, (x, w, b))):
        close(a, e)


def test_dynamic_shapes_do_not_recompile(device: str) -> None:
    counter = Counter()
    compiled = counter.compile(lambda x, w, t: linear_cross_entropy(x, w, t), dynamic=True)
    for tokens in (5, 6, 9, 33):
        x, w, _, t = problem((2, tokens), 19, 8, device=device)
        loss = compiled(x, w, t)
        loss.backward()
        close(loss, reference.loss(reference.logits_of(x, w), t))
        if tokens == 5:  # the graphs of the first shape; the other shapes must add none
            first = counter.graphs.frame_count
    assert counter.graphs.frame_count == first


def test_compiled_autocast(device: str) -> None:
    x, w, _, t = problem((2, 5), 19, 8, device=device)
    counter = Counter()

    def run(x: Tensor, w: Tensor, t: Tensor) -> Any:
        with torch.autocast(device, dtype=BF16):
            return linear_cross_entropy(x, w, t)

    loss = counter.compile(run)(x, w, t)
    assert loss.dtype is F32 and torch.equal(loss, run(x, w, t))
    loss.backward()
    assert x.grad is not None and x.grad.dtype is F32


@pytest.mark.parametrize(("dtype", "factor"), [(F16, 65536.0), (BF16, 1 / 3)], ids=str)
def test_compiled_16_bit_gradients_are_multiplied_in_f32(
    device: str, dtype: torch.dtype, factor: float
) -> None:
    x = (torch.randn(64, 32, device=device) * 1e-3).to(dtype).requires_grad_()
    w = (torch.randn(512, 32, device=device) * 1e-3).to(dtype).requires_grad_()
    t = torch.randint(0, 512, (64,), device=device)
    loss = Counter().compile(lambda x, w, t: linear_cross_entropy(x, w, t))(x, w, t)
    eager = linear_cross_entropy(x, w, t)
    grads = torch.autograd.grad(loss * factor, (x, w))
    for a, e in zip(grads, torch.autograd.grad(eager * factor, (x, w))):
        assert torch.equal(a, e)


def test_a_trace_records_the_op(device: str) -> None:
    def head(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        loss = linear_cross_entropy(x, w, t)
        return loss + linear_logprob(x, w, t)

    x, w, _, t = problem((2, 5), 19, 8, device=device)
    traced = torch.jit.trace(head, (x, w, t))
    x, w, _, t = problem((2, 5), 19, 8, device=device)
    loss, expected = traced(x, w, t), head(x, w, t)
    assert torch.equal(loss, expected)
    grads = torch.autograd.grad(loss.sum(), (x, w))
    for ours, theirs in zip(grads, torch.autograd.grad(expected.sum(), (x, w))):
        close(ours, theirs.double())


@pytest.mark.parametrize("option", ["normalizer", "token_weight"])
def test_a_number_that_changes_does_not_recompile_each_time(device: str, option: str) -> None:
    x, w, _, t = problem((2, 5), 19, 8, device=device)
    counter = Counter()
    compiled = counter.compile(lambda x, w, t, v: linear_cross_entropy(x, w, t, **{option: v}))
    for step in range(6):
        value: Any = 1.5 + 0.25 * step
        if option == "token_weight":
            value = torch.full_like(t, value, dtype=F32)
        loss = compiled(x, w, t, value)
        close(loss, reference.loss(reference.logits_of(x, w), t, **{option: value}))
    assert counter.graphs.frame_count <= 2


def test_a_model_on_meta_and_fake_tensors() -> None:
    x = torch.empty(2, 5, 8, device="meta", requires_grad=True)
    w = torch.empty(19, 8, device="meta", requires_grad=True)
    t = torch.empty(2, 5, device="meta", dtype=torch.int64)
    loss, s = linear_cross_entropy(x, w, t, return_statistics=("argmax",))
    loss.backward()
    assert loss.is_meta and s.argmax.shape == t.shape and x.grad is not None
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, w, _, t = problem((2, 5), 19, 8)
        assert linear_cross_entropy(x, w, t, reduction="none").shape == (2, 5)


@pytest.mark.parametrize("fake", [False, True], ids=["meta", "fake"])
@pytest.mark.parametrize(
    "changed",
    [
        {"linear_weight": torch.ones(19, 8, dtype=BF16)}, {"linear_weight": torch.ones(19, 7)},
        {"linear_bias": torch.ones(19, dtype=BF16)}, {"linear_bias": torch.ones(18)},
        {"input": torch.ones(5, 8).double()}, {"target": torch.zeros(5, dtype=torch.int8)},
        {"softcap": -1.0},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_with_meta_and_fake_tensors_is_said(
    changed: dict[str, Any], fake: bool
) -> None:
    """The error is that of a call with real tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    given: dict[str, Any] = {
        "input": torch.ones(5, 8), "linear_weight": torch.ones(19, 8),
        "target": torch.zeros(5, dtype=torch.int64), **changed,
    }  # fmt: skip
    with pytest.raises(LogitlessError) as real:
        linear_cross_entropy(**given)
    mode = FakeTensorMode()
    empty = mode.from_tensor if fake else lambda t: t.to("meta")
    given = {n: empty(v) if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    with pytest.raises(type(real.value)) as caught, mode if fake else contextlib.nullcontext():
        linear_cross_entropy(**given)
    assert str(caught.value) == str(real.value)


def test_every_shift_in_one_graph() -> None:
    """The first is compiled as a number, all others as a symbol."""
    x, w, _, t = problem((2, 12), 19, 8)
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=count, fullgraph=True)
    def compiled(x: Tensor, shift: int) -> Tensor:
        return linear_cross_entropy(x, w, t, shift=shift)

    for shift in range(1, 11):
        made = compiled(x, shift)
        assert torch.equal(made, linear_cross_entropy(x, w, t, shift=shift))
    assert len(graphs) == 2


@pytest.mark.parametrize("name", ["linear_weight", "linear_bias", "target", "token_weight"])
def test_a_tensor_beside_one_on_meta_is_named(name: str) -> None:
    """torch itself would not notice, and the result would be on meta."""
    tensors = {
        "input": torch.empty(5, 8), "linear_weight": torch.empty(19, 8),
        "target": torch.zeros(5, dtype=torch.int64), "linear_bias": torch.empty(19),
        "token_weight": torch.empty(5),
    }  # fmt: skip
    given: dict[str, Any] = {n: t if n == name else t.to("meta") for n, t in tensors.items()}
    with pytest.raises(RuntimeError, match=f"^{name} is on cpu; allowed: meta, the device"):
        linear_cross_entropy(**given)


def test_functional_transforms_are_a_clear_error() -> None:
    x, w, _, t = problem((7,), 19, 8)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda w: linear_cross_entropy(x.detach(), w, t))(w.detach())
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.vmap(lambda x, t: linear_cross_entropy(x, w.detach(), t))(
            x.detach()[None], t[None]
        )


def test_a_dispatch_mode_sees_the_op() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(f))
            return f(*args, **(kwargs or {}))

    x, w, _, t = problem((7,), 19, 8)
    with Mode():
        linear_cross_entropy(x, w, t).backward()
    assert any("logitless.forward" in name for name in seen)
    assert _ops is not None


@pytest.mark.parametrize("number", [3.0, 1e-40, 1e-50, 1e39, 0.0])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_normalizer_is_the_eager_one_whatever_f32_holds(number: float, dynamic: bool) -> None:
    x, w, _, t = problem((5,), 19, 8)
    compiled = Counter().compile(
        lambda x, w, t, n: linear_cross_entropy(x, w, t, normalizer=n), dynamic=dynamic
    )
    eager = linear_cross_entropy(x, w, t, normalizer=number)
    torch.testing.assert_close(compiled(x, w, t, number), eager)


@pytest.mark.parametrize("number", [float("inf"), float("nan"), -1.0])
def test_a_wrong_normalizer_is_refused_by_a_compiled_function(number: float) -> None:
    x, w, _, t = problem((5,), 19, 8)
    compiled = Counter().compile(lambda x, w, t, n: linear_cross_entropy(x, w, t, normalizer=n))
    for call in (compiled, lambda x, w, t, n: linear_cross_entropy(x, w, t, normalizer=n)):
        with pytest.raises(ValueError, match=r"^normalizer is .*; allowed: finite"):
            call(x, w, t, number)


@pytest.mark.parametrize("given", ["nothing", "temperature", "normalizer", "blocks", "ids"])
def test_a_trace_takes_named_tuples_apart_by_iteration_alone(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.8 cannot trace a named tuple's _replace or _asdict, or a slice of a named tuple."""

    def outside(real: Any) -> Any:
        def method(named: Any, **given: Any) -> Any:
            assert not torch.compiler.is_dynamo_compiling(), "a method of the tuple in a trace"
            return real(named, **given)

        return method

    def item(named: Any, at: Any) -> Any:
        inside = torch.compiler.is_dynamo_compiling() and isinstance(at, slice)
        assert not inside, "a slice in a trace"
        return tuple.__getitem__(named, at)

    for kind in (Options, Shard, _run.Constants):
        for name in ("_replace", "_asdict"):
            monkeypatch.setattr(kind, name, outside(getattr(kind, name)))
        monkeypatch.setattr(kind, "__getitem__", item)
    x, w, _, t = problem((5,), 19, 8)
    options: dict[str, Any] = {
        "nothing": {},
        "temperature": {"temperature": torch.full((5,), 2.0)},
        "normalizer": {"normalizer": 3.0},
        "blocks": {"group": Split(blocks=2)},
        "ids": {},
    }[given]
    torch._dynamo.reset()
    function: Any = linear_cross_entropy
    if given == "ids":
        function, t = linear_logprobs_at, torch.randint(-1, 19, (5, 3))
    compiled = torch.compile(
        lambda x, w, t: function(x, w, t, **options), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(compiled(x, w, t), function(x, w, t, **options))

# SPDX-License-Identifier: Apache-2.0
"""Kept state: when Forward keeps something for Backward, how much, and what becomes of it.
Gradients are those of f64, whatever was kept."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import reference
from logitless import _abi
from logitless._abi import CPU, I64, Options, View
from logitless.torch import (
    LinearCrossEntropyHead,
    _autograd,
    _device,
    _kept,
    _ops,
    _run,
    default_memory,
    workspace_size,
)
from reference import close
from splits import linear_cross_entropy, linear_logprob
from test_linear import BF16, F16, F32, problem

FORWARD = _abi.LINEAR_CROSS_ENTROPY_FORWARD
BACKWARD = _abi.LINEAR_CROSS_ENTROPY_BACKWARD
NOTHING = (None, None)


class Ran(NamedTuple):
    """One call of the library."""

    kind: int
    kept: bool
    consume: bool
    bytes: int  # of kept state and workspace together


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ran]]:
    calls: list[Ran] = []
    real = _abi.Plan.run

    def spy(plan: _abi.Plan, *given: Any, **how: Any) -> None:
        fields, bytes = plan._call.op, plan.bytes
        for name, size in (("kept", 2 if fields.kind == BACKWARD else 4), ("kept_rows", 4)):
            if getattr(fields, name):
                tensor = getattr(fields, name).contents
                size = 4 if tensor.dtype == _abi.F32 else 2
                bytes += size * tensor.shape[0] * tensor.shape[1]
        calls.append(Ran(fields.kind, bool(fields.kept), bool(fields.consume_kept), bytes))
        real(plan, *given, **how)

    monkeypatch.setattr(_abi.Plan, "run", spy)
    yield calls


def head(dtype: torch.dtype = F32, device: str = "cpu", **how: Any) -> tuple[Any, ...]:
    """A head with enough tokens and columns for kept state by default."""
    return problem((6, 50), 700, 16, dtype, device, **how)


def per_token(x: Tensor, w: Tensor, t: Tensor, **options: Any) -> Tensor:
    loss: Tensor = linear_cross_entropy(x, w, t, reduction="none", **options)
    return loss


def kept_of(loss: Tensor) -> tuple[Tensor | None, Tensor | None]:
    assert loss.grad_fn is not None
    saved = loss.grad_fn.saved_tensors[_autograd._SAVED :]  # type: ignore[attr-defined]
    return tuple(saved) or NOTHING  # type: ignore[return-value]


def check_gradients(
    outputs: Any, theirs: Any, leaves: Any, mine: Any, dtype: torch.dtype, **how: Any
) -> None:
    upstream = [torch.randn(o.shape, device=o.device) for o in outputs]
    grads = torch.autograd.grad(outputs, mine, upstream, **how)
    double = [u.double() for u in upstream]
    for ours, exact in zip(grads, torch.autograd.grad(theirs, leaves, double, retain_graph=True)):
        close(ours, exact, dtype)


# --- the formula of the size ---


def inputs(tokens: int, vocab: int, dtype: int) -> list[View]:
    hidden = 8
    return [
        View("input", dtype, CPU, 0, (tokens, hidden), (hidden, 1)),
        View("weight", dtype, CPU, 0, (vocab, hidden), (hidden, 1)),
        View("target", I64, CPU, 0, (tokens,), (1,)),
    ]


@pytest.mark.parametrize("dtype", [_abi.F32, _abi.BF16, _abi.F16])
def test_the_formula_is_the_librarys(dtype: int) -> None:
    """Python's formula gives the library's sizes, also beyond 2^31 elements and bytes."""
    chance = random.Random(0)
    element = {_abi.F32: 4}.get(dtype, 2)
    some = 0
    for tokens, vocab in itertools.product(
        (0, 1, 63, 64, 65, 300, 8192, 1 << 20), (1, 64, 65, 191, 192, 193, 50257, 262144)
    ):
        rows, every = (tokens + 63) // 64 * 64, (vocab + 63) // 64
        block = 64 * rows * element
        near = [32 * tokens + n * block for n in (0, 1, 2, 3, 4, 6, every - 1, every, 2 * every)]
        near += [chance.randrange(32 * tokens + 2 * every * block + 1) for _ in range(8)]
        for bytes in {0, *near, *(n - 1 for n in near if n), *(n + 1 for n in near)}:
            size = _abi.kept_size(inputs(tokens, vocab, dtype), Options(), (CPU, 0), bytes)
            shape, rows_shape = _abi.kept_formula(tokens, vocab, dtype, bytes)
            if not size.columns:
                assert shape == (0, 64)
                continue
            some += 1
            assert (shape, rows_shape) == (size.shape, size.rows_shape)
            made = _abi.kept_bytes(tokens, shape[0] * shape[1], element)
            assert made == size.bytes <= bytes
    assert some > 500, "the cases would not notice a formula of nothing"


def test_the_key_is_forwards(ran: list[Ran]) -> None:
    """Backward takes the key that Forward got; another key is refused."""
    x, w, _, t = head()
    loss = per_token(x, w, t)
    loss.grad_fn.kept[0] = loss.grad_fn.kept[0]._replace(key=1)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="kept_key is 0x1; allowed"):
        loss.sum().backward()
    assert [r.kind for r in ran] == [FORWARD]


# --- values ---


STATISTICS = ("lse", "target_logit", "logprob", "entropy")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_gradients_of_what_is_kept_are_those_of_f64(
    device: str, ran: list[Ran], dtype: torch.dtype, share: float
) -> None:
    """Any 1, any 2 or all 5 outputs have an upstream gradient, which Forward does not know."""
    x, w, b, t = head(dtype, device, bias=True)
    memory = int(share * x.shape[0] * x.shape[1] * 700 * 4) + (8 << 20)
    exact = [v.detach().double().requires_grad_() for v in (x, w, b)]
    logits = reference.logits_of(*exact)
    options: dict[str, Any] = {"label_smoothing": 0.1, "temperature": 1.3}
    theirs = reference.statistics(logits, t, options)
    theirs["loss"] = reference.loss(logits, t, reduction="none", **options)
    names = ("loss", *STATISTICS)
    for count in (1, 2, 5):
        for asked in itertools.combinations(names, count):
            loss, s = linear_cross_entropy(
                x, w, t, linear_bias=b, reduction="none", memory=memory,
                return_statistics=STATISTICS, **options,
            )  # fmt: skip
            ours = [loss if name == "loss" else getattr(s, name) for name in asked]
            check_gradients(ours, [theirs[n] for n in asked], exact, (x, w, b), dtype)
            assert ran[-2].kept and ran[-1].kept == (asked != ("target_logit",))
            assert ran[-1].consume == ("entropy" in asked)


@pytest.mark.parametrize("asked", ["input", "weight", "bias", "frozen head", "frozen trunk"])
def test_one_gradient_alone(device: str, ran: list[Ran], asked: str) -> None:
    x, w, b, t = head(BF16, device, bias=True)
    exact = [v.detach().double().requires_grad_() for v in (x, w, b)]
    theirs = reference.loss(reference.logits_of(*exact), t, reduction="none")
    which = {"input": 0, "weight": 1, "bias": 2, "frozen head": 0, "frozen trunk": 1}[asked]
    if asked == "frozen head":
        w.requires_grad_(False)
        b.requires_grad_(False)
    elif asked == "frozen trunk":
        x.requires_grad_(False)
    ours = per_token(x, w, t, linear_bias=b)
    leaf = (x, w, b)[which]
    check_gradients([ours], [theirs], [exact[which]], [leaf], BF16)
    assert ran[-1] == ran[-1]._replace(kind=BACKWARD, kept=True)


def test_a_mean_with_a_statistic(device: str, ran: list[Ran]) -> None:
    x, w, _, t = head(device=device)
    loss, s = linear_cross_entropy(x, w, t, return_statistics=("logprob",))
    exact = [v.detach().double().requires_grad_() for v in (x, w)]
    logits = reference.logits_of(*exact)
    theirs = [reference.loss(logits, t), reference.statistics(logits, t, {})["logprob"]]
    check_gradients([loss, s.logprob], theirs, exact, (x, w), F32)
    assert all(r.kept for r in ran) and len(ran) == 2


def test_autocast_keeps_in_its_dtype(device: str, ran: list[Ran]) -> None:
    x, w, b, t = head(device=device, bias=True)
    with torch.autocast(device, dtype=BF16):
        loss = per_token(x, w, t, linear_bias=b)
    columns, rows = kept_of(loss)
    assert columns is not None and columns.dtype is BF16 and rows is not None
    exact = [v.detach().to(BF16).double().requires_grad_() for v in (x, w, b)]
    theirs = reference.loss(reference.logits_of(*exact), t, reduction="none")
    check_gradients([loss], [theirs], exact, (x, w, b), BF16)
    assert ran[-1].kept


# --- kept state that is used twice ---


def test_a_retained_graph_gives_equal_gradients(device: str, ran: list[Ran]) -> None:
    x, w, _, t = head(device=device)
    loss = per_token(x, w, t)
    upstream = torch.randn_like(loss)
    first = torch.autograd.grad(loss, (x, w), torch.zeros_like(loss), retain_graph=True)
    assert not any(grad.any() for grad in first)
    grads = [torch.autograd.grad(loss, (x, w), upstream, retain_graph=True) for _ in range(3)]
    assert [r.kept for r in ran] == [True] * 5 and not any(r.consume for r in ran)
    fresh = torch.autograd.grad(per_token(x, w, t), (x, w), upstream)
    for again in grads:
        for ours, theirs in zip(again, fresh):
            assert torch.equal(ours, theirs)


def test_what_entropys_gradient_consumed_is_not_used_again(device: str, ran: list[Ran]) -> None:
    x, w, _, t = head(BF16, device)
    exact = [v.detach().double().requires_grad_() for v in (x, w)]
    logits = reference.logits_of(*exact)
    theirs = reference.statistics(logits, t, {})
    logprob, entropy = linear_logprob(x, w, t, entropy=True)
    for asked in ("logprob", "entropy", "entropy", "logprob"):
        ours = logprob if asked == "logprob" else entropy
        check_gradients([ours], [theirs[asked]], exact, (x, w), BF16, retain_graph=True)
    assert [(r.kept, r.consume) for r in ran[1:]] == [
        (True, False), (True, True), (False, False), (False, False),
    ]  # fmt: skip
    columns, _ = kept_of(entropy)
    assert columns is not None and columns.untyped_storage().nbytes() == 0, "given back at once"


def test_another_threads_backward_meanwhile_does_without(
    ran: list[Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two Backwards that use one kept state at the same time would give wrong gradients."""
    x, w, _, t = head()
    loss = per_token(x, w, t)
    real, started = _run.backward, threading.Event()
    others: list[Any] = []

    def backward(*arguments: Any, **how: Any) -> Any:
        if not started.is_set():
            started.set()
            thread = threading.Thread(target=lambda: others.append(gradients()))
            thread.start()
            thread.join()
        return real(*arguments, **how)

    def gradients() -> Any:
        return torch.autograd.grad(loss.sum(), (x, w), retain_graph=True)

    monkeypatch.setattr(_run, "backward", backward)
    mine = gradients()
    assert [r.kept for r in ran] == [True, False, True]
    for ours, theirs in zip(mine, others[0]):
        close(ours, theirs.double())
    gradients()
    assert ran[-1].kept, "it is there for the next one"


def test_double_backward_is_refused_as_ever(device: str, ran: list[Ran]) -> None:
    x, w, _, t = head(device=device)
    loss = per_token(x, w, t)
    (grad,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
    assert ran[-1].kept
    with pytest.raises(RuntimeError, match="differentiated once"):
        grad.square().sum().backward()


# --- kept state of another call ---


def test_kept_state_lives_as_long_as_the_graph(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept state is among autograd's saved tensors, which are freed after backward. An attribute of
    the context would live as long as the loss."""
    made: list[Any] = []
    real = _run._new_kept

    def spy(*arguments: Any) -> Any:
        kept = real(*arguments)
        made.extend(map(weakref.ref, kept[:2]))
        return kept

    monkeypatch.setattr(_run, "_new_kept", spy)
    x, w, _, t = head(device=device)
    loss = per_token(x, w, t)
    assert len(made) == 2 and all(ref() is not None for ref in made)
    loss.sum().backward(retain_graph=True)
    assert all(ref() is not None for ref in made)
    loss.sum().backward()
    assert loss.grad_fn is not None and [ref() for ref in made] == [None, None]


def test_hooks_on_saved_tensors_keep_nothing(device: str, ran: list[Ran]) -> None:
    """The hooks would move kept state to the host, or discard it."""
    x, w, _, t = head(device=device)
    moved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        moved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = per_token(x, w, t)
    assert max(tensor.numel() for tensor in moved) <= max(x.numel(), w.numel())
    loss.sum().backward()
    with torch.autograd.graph.save_on_cpu():
        loss = per_token(x, w, t)
    loss.sum().backward()
    assert len(ran) == 4 and not any(r.kept for r in ran)
    per_token(x, w, t)
    assert ran[-1].kept, "the case would not notice that nothing is ever kept"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_nothing_in_the_pass_that_it_discards(
    device: str, ran: list[Ran], reentrant: bool
) -> None:
    from torch.utils.checkpoint import checkpoint

    x, w, _, t = head(device=device)
    loss = checkpoint(per_token, x, w, t, use_reentrant=reentrant)
    assert [r.kept for r in ran] == [False]
    loss.sum().backward()
    # Reentrant checkpointing runs the function again without knowing of the checkpoint.
    assert [r.kept for r in ran[1:]] == [reentrant] * 2
    expected = reference.loss(reference.logits_of(x, w), t, reduction="none")
    for ours, theirs in zip((x, w), torch.autograd.grad(expected.sum(), (x, w))):
        assert ours.grad is not None
        close(ours.grad, theirs)


def test_where_nothing_is_kept(device: str, ran: list[Ran]) -> None:
    x, w, _, t = head(device=device)
    linear_cross_entropy(x, w, t).backward()  # gradients are computed with the loss
    with torch.no_grad():
        per_token(x, w, t)
    per_token(x.detach(), w.detach(), t)
    per_token(x[:0], w, t[:0]).sum().backward()
    if device == "cpu":  # the CPU would not use kept state here
        per_token(x.detach().half().requires_grad_(), w.detach().half(), t).sum().backward()
        per_token(x.detach().bfloat16().requires_grad_(), w.detach().bfloat16(), t, softcap=5.0)
    assert not any(r.kept for r in ran)
    per_token(x, w, t, softcap=5.0)
    assert ran[-1].kept


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_the_library_says_where_something_is_kept(
    device: str, ran: list[Ran], dtype: torch.dtype, compiles: bool
) -> None:
    x, w, _, t = problem((4, 80), 700, 16, dtype, device)

    def call(x: Tensor, w: Tensor, t: Tensor, softcap: float, smoothing: float) -> Tensor:
        return per_token(x, w, t, softcap=softcap, label_smoothing=smoothing)

    # Dynamo replaces numbers that change by symbols.
    function = compiled(call, []) if compiles else call
    for softcap, smoothing in itertools.product((0.0, 30.0, 40.0), (0.0, 0.1)):
        ran.clear()
        function(x, w, t, softcap, smoothing)
        options = Options(softcap=softcap, label_smoothing=smoothing)
        kind, code = _device.DEVICES[device], _device.DTYPES[dtype]
        assert ran[0].kept == _abi.keeps(kind, code, options)


def test_the_library_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = _abi.keeps
    monkeypatch.setattr(_abi, "keeps", lambda *a: asked.append(a) or real(*a))
    for tokens in (100, 200, 300):
        x, w, _, t = problem((tokens,), 700, 16)
        per_token(x, w, t, z_loss=0.012345)
    assert len(asked) == 1


class OfAStream:
    """Stands for a tensor on a CUDA device."""

    def __init__(self) -> None:
        self.streams: list[object] = []

    def record_stream(self, stream: object) -> None:
        self.streams.append(stream)

    def get_device(self) -> int:
        return 3


def test_another_streams_backward_is_told_to_the_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: ("stream of", index))
    monkeypatch.setattr(_device, "allows_tf32", lambda: False)
    for stream, recorded in ((7, []), (0, [("stream of", 3)])):
        columns, rows, input = OfAStream(), OfAStream(), OfAStream()
        input.dtype = F32  # type: ignore[attr-defined]
        given: Any = _kept.Kept(columns, rows, _kept.State(1, 0, False, stream))  # type: ignore[arg-type]
        assert _kept.usable(given, input) is given  # type: ignore[arg-type]
        assert columns.streams == rows.streams == recorded
        monkeypatch.setattr(_device, "allows_tf32", lambda: True)
        assert _kept.usable(given, input) is None, "what is asked for now is made otherwise"  # type: ignore[arg-type]
        monkeypatch.setattr(_device, "allows_tf32", lambda: False)


# --- how much is kept ---


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("entropy", [False, True])
def test_memory_bounds_kept_state_and_workspace_together(
    device: str, ran: list[Ran], dtype: torch.dtype, entropy: bool
) -> None:
    x, w, _, t = problem((700,), 1500, 64, dtype, device)
    with pytest.raises(ValueError, match="memory is 0 bytes; allowed: >= ") as caught:
        linear_logprob(x, w, t, entropy=True, memory=0)
    least = int(str(caught.value).split(">= ")[1].split()[0])
    whole = x.shape[0] * w.shape[0] * x.element_size()
    shares = set()
    for memory in range(least, least + 3 * whole, whole // 5):
        ran.clear()
        logprob, h = linear_logprob(x, w, t, entropy=True, memory=memory)
        total = logprob.sum() + h.sum() if entropy else logprob.sum()
        total.backward(retain_graph=True)
        total.backward()
        assert all(r.bytes <= memory for r in ran) and len(ran) == 3
        shares.add(ran[0].kept)
        expected = [True, True, not entropy] if ran[0].kept else [False] * 3
        assert [r.kept for r in ran] == expected
    assert shares == {False, True}


BOUNDED: dict[str, dict[str, Any]] = {
    "none": {"reduction": "none"},
    "none of everything": {"reduction": "none", "return_statistics": STATISTICS},
    "none with options": {
        "reduction": "none", "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 8.0,
        "return_statistics": ("lse", "entropy"),
    },
    "mean": {},
    "sum of constants": {"reduction": "sum", "return_statistics": ("argmax", "rank")},
    "mean of everything": {"return_statistics": STATISTICS},
    "a normalizer": {"return_statistics": ("lse",), "normalizer": torch.tensor(3.0)},
}  # fmt: skip


def every_backward(call: Callable[..., Any], memory: int) -> None:
    """Runs backward for subsets of the results (any 1, any 2, and all), each twice on one graph."""
    made = call(memory=memory)
    loss, statistics = made if isinstance(made, tuple) else (made, ())
    results = [r for r in (loss, *statistics) if r is not None and r.requires_grad]
    for count in {1, 2, len(results)} & set(range(len(results) + 1)):
        for asked in itertools.combinations(results, count):
            for _ in range(2):
                sum(r.sum() for r in asked).backward(retain_graph=True)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("way", ["plain", "hooks", "dispatcher", "main_grad", "autocast", "blocks"])
def test_a_memory_that_forward_takes_is_enough_for_every_backward(
    device: str, dtype: torch.dtype, name: str, way: str
) -> None:
    """Forward requires what the largest Backward needs; so does workspace_size."""
    x, w, b, t = problem((70,), 1500, 16, F32 if way == "autocast" else dtype, device, bias=True)
    options = {
        key: value.to(device) if isinstance(value, Tensor) else value
        for key, value in BOUNDED[name].items()
    }

    def call(**more: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if way == "hooks":
                stack.enter_context(torch.autograd.graph.save_on_cpu())
            if way == "dispatcher":
                stack.enter_context(FlopCounterMode(display=False))
            if way == "autocast":
                stack.enter_context(torch.autocast(device, BF16 if dtype is F32 else dtype))
            if way == "main_grad":
                head = LinearCrossEntropyHead(16, 1500, grad_accumulation="main_grad", **{
                    k: v for k, v in (options | more).items() if k != "normalizer"})  # fmt: skip
                head.weight = torch.nn.Parameter(w.detach(), requires_grad=w.requires_grad)
                return head.to(device)(x, t, normalizer=options.get("normalizer"))
            more |= {"vocab_blocks": 2} if way == "blocks" else {}
            return linear_cross_entropy(x, w, t, linear_bias=b, **options, **more)

    if way == "blocks" and "rank" in options.get("return_statistics", ()):
        options["return_statistics"] = ("argmax",)  # a split vocabulary has no rank
    for needed in ((x, w, b), (x,), (w,)) if way == "plain" else ((x, w),):
        for leaf in (x, w, b):
            leaf.requires_grad_(any(leaf is one for one in needed))
        said = []
        for ask in (call, functools.partial(workspace_size, x, w, t, linear_bias=b, **options)):
            with pytest.raises(ValueError, match="memory is 0 bytes; allowed: >= ") as caught:
                ask(memory=0)  # type: ignore[operator]
            said.append(int(str(caught.value).split(">= ")[1].split()[0]))
        if way == "plain":
            assert said[0] == said[1]
        with pytest.raises(ValueError, match=f"memory is {said[0] - 1} bytes; allowed: >= "):
            call(memory=said[0] - 1)
        every_backward(call, said[0])


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_forward_asks_for_the_backwards_memory(dynamic: bool) -> None:
    x, w, _, t = problem((200,), 3000, 16)

    def least(call: Callable[..., Any]) -> int:
        with pytest.raises(ValueError, match="memory is 0 bytes; allowed: >= ") as caught:
            call(memory=0)
        return int(str(caught.value).split(">= ")[1].split()[0])

    call = functools.partial(linear_logprob, x, w, t, entropy=True)
    eager = least(call)

    def compiled(memory: int) -> Any:
        torch._dynamo.reset()
        made = torch.compile(
            lambda x, w, t: linear_logprob(x, w, t, entropy=True, memory=memory),
            fullgraph=True, backend="aot_eager", dynamic=dynamic,
        )  # fmt: skip
        return made(x, w, t)

    assert least(compiled) >= eager
    for result in range(2):
        compiled(least(compiled))[result].sum().backward()


def test_what_fits_is_kept_whole(device: str) -> None:
    x, w, _, t = problem((700,), 1500, 64, BF16, device)
    columns, rows = kept_of(per_token(x, w, t, memory="1GiB"))
    assert columns is not None and columns.shape == (1536 // 64 * 704, 64)
    assert rows is not None and rows.shape == (700, 8)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_by_default_everything_is_kept(dtype: torch.dtype, device: str, ran: list[Ran]) -> None:
    x, w, _, t = problem((700,), 15000, 16, dtype, device)
    loss = per_token(x, w, t)
    columns, _ = kept_of(loss)
    assert columns is not None and columns.shape == (15040 // 64 * 704, 64)
    loss.sum().backward()
    kept = columns.numel() * columns.element_size() + 700 * 32
    assert kept == _abi.whole_kept(700, 15000, _device.DTYPES[dtype])
    blocks = 0 if device == "cpu" else 64 << 20  # f32 logits, one block at a time
    assert len(ran) == 2 and all(r.kept and r.bytes < 1.5 * kept + blocks for r in ran)


ASKED: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean of class weights": {"weight": torch.ones(3000)},
    "mean with constants": {"return_statistics": ("argmax", "rank", "mean_logit")},
    "mean with the entropy": {"return_statistics": "entropy"},
    "sum in memory": {"reduction": "sum", "memory": 6 << 20},
    "none": {"reduction": "none"},
    "none in memory": {"reduction": "none", "memory": 6 << 20},
    "none of everything": {
        "reduction": "none", "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 8.0,
        "temperature": torch.ones(2, 350), "token_weight": torch.ones(2, 350), "shift": True,
        "logit_scale": 0.5,
        "return_statistics": ("lse", "target_logit", "logprob", "entropy", "sum_p_squared"),
    },
    "none of both": {"reduction": "none", "return_statistics": ("logprob", "entropy")},
    "an empty mean of a normalizer": {"normalizer": 3.0, "empty_mean": "nan"},
    "a normalizer on the device": {"normalizer": torch.ones(())},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("name", ASKED)
def test_workspace_size_is_what_the_call_takes(
    device: str, ran: list[Ran], name: str, dtype: torch.dtype
) -> None:
    """Each result gets an upstream gradient. workspace_size itself runs nothing."""
    x, w, b, t = problem((2, 350), 3000, 48, dtype, device, bias=True)
    options = {
        key: value.to(device) if isinstance(value, Tensor) else value
        for key, value in ASKED[name].items()
    }
    for needed in ((x, w, b), (x,), (w, b), ()):
        for leaf in (x, w, b):
            leaf.requires_grad_(any(leaf is one for one in needed))
        said = workspace_size(x, w, t, linear_bias=b, gradients=bool(needed), **options)
        assert not ran
        made = linear_cross_entropy(x, w, t, linear_bias=b, **options)
        if needed:
            loss, statistics = made if isinstance(made, tuple) else (made, ())
            results = [r for r in (loss, *statistics) if r is not None and r.requires_grad]
            sum(r.sum() for r in results).backward()  # type: ignore[union-attr]
        assert said == max(r.bytes for r in ran), (len(needed), ran)
        ran.clear()
    without = workspace_size(x, w, t, linear_bias=b, **options)  # whatever requires a gradient
    for leaf in (x, w, b):
        leaf.requires_grad_()
    assert without == workspace_size(x, w, t, linear_bias=b, **options)


def test_workspace_size_of_other_surroundings(device: str, ran: list[Ran]) -> None:
    """Under autocast, hooks and a default memory; for rows that are no matrix or have no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, w, _, t = problem((2, 350), 3000, 48, device=device)

    def check(**options: Any) -> int:
        said = workspace_size(x, w, t, reduction="none", **options)
        linear_cross_entropy(x, w, t, reduction="none", **options).sum().backward()
        assert said == max(r.bytes for r in ran)
        ran.clear()
        return said

    plain = check()
    with torch.autocast(device, dtype=BF16):
        assert check() < plain
    with torch.autograd.graph.save_on_cpu():
        assert check() < plain
    with default_memory("6MiB"):
        assert check() <= 6 << 20 < plain
    with torch.inference_mode():
        assert workspace_size(x, w, t, reduction="none") == plain
        assert workspace_size(x * 1, w * 1, t * 1, reduction="none") == plain
    x = x.detach().transpose(0, 1).requires_grad_()
    t = t.T
    check()
    with FakeTensorMode():
        x, w = (torch.empty(*v.shape, device=device).requires_grad_() for v in (x, w))
        t = torch.zeros(*t.shape, dtype=torch.int64, device=device)
        said = workspace_size(x, w, t, reduction="none")
    assert said == plain if device == "cpu" else said >= plain


def test_workspace_size_refuses_what_the_call_refuses() -> None:
    x, w, _, t = head()
    for options, message in (
        ({"reduction": "max"}, r"^reduction is 'max'"),
        ({"return_statistics": "top"}, r"^return_statistics is 'top'"),
        ({"linear_bias": torch.ones(5)}, r"^linear_bias has shape \[5\]; allowed: \[700\]"),
        ({"reduction": "none", "memory": 9}, r"^memory is 9 bytes; allowed: >= "),
    ):
        with pytest.raises(ValueError, match=message):
            workspace_size(x, w, t, **options)
    with pytest.raises(RuntimeError, match=r"^input is on meta"):
        workspace_size(x.to("meta"), w, t)
    with pytest.raises(ValueError, match="D >= 1"):
        workspace_size(torch.ones(6, 50, 0), torch.ones(9, 0), t)


def test_a_shape_is_planned_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[int] = []
    workspace, size = _abi._workspace, _abi._kept_size
    monkeypatch.setattr(_abi, "_workspace", lambda *a: plans.append(1) or workspace(*a))
    monkeypatch.setattr(_abi, "_kept_size", lambda *a: plans.append(1) or size(*a))
    x, w, _, t = problem((333,), 444, 8, device=device)
    numbers = []
    for _ in range(3):
        per_token(x, w, t).sum().backward()
        linear_logprob(x, w, t, entropy=True)[1].sum().backward()
        numbers.append(len(plans))
    assert numbers == numbers[:1] * 3 and numbers[0] > 4


def test_main_grad_is_added_to(device: str, ran: list[Ran]) -> None:
    module = LinearCrossEntropyHead(
        16, 700, bias=True, device=device, dtype=BF16, grad_accumulation="main_grad",
        reduction="none",
    )  # fmt: skip
    x, _, _, t = head(BF16, device)
    module.weight.main_grad = torch.ones(700, 16, device=device)
    exact = [v.detach().double().requires_grad_() for v in (module.weight, module.bias)]
    loss = module(x, t)
    upstream = torch.randn_like(loss)
    loss.backward(upstream, retain_graph=True)
    loss.backward(upstream)
    assert [r.kept for r in ran] == [True] * 3
    theirs = reference.loss(reference.logits_of(x.detach(), *exact), t, reduction="none")
    grad, _ = torch.autograd.grad(theirs, exact, upstream.double())
    close(module.weight.main_grad, 1 + 2 * grad, BF16)


def test_the_alignment_of_main_grad_is_part_of_the_plan(device: str) -> None:
    keep = _kept.Keep((F32,), torch.zeros(4, 4, device=device))
    other = _kept.Keep((F32,), torch.zeros(17, device=device)[1:].view(4, 4))
    assert keep.asked() != other.asked()
    assert not any(isinstance(part, Tensor) for part in keep.asked()), "a key outlives the call"


# --- compiled functions ---


def op_arguments(device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    x, w, b, t = head(dtype, device, bias=True)
    options = Options(0, -100, 0.1, 1e-3, 0.9, 0.0, 1.1)
    ids = torch.randint(-1, 700, (6, 50, 2), device=device)
    tensors = (x, w, b, t, None, None, None, None, ids, None)
    return _ops.arguments(tensors, options, None)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("share", [0.0, 1e-3, 0.5, 2.0])
def test_opcheck(device: str, dtype: torch.dtype, share: float) -> None:
    """Real and fake kernels agree on shapes, and no argument is written. Without the check that
    compares outputs: nothing says what kept state holds, or that all of it is written."""
    args = op_arguments(device, dtype)
    kept_bytes = int(share * 320 * 700 * dtype.itemsize)
    everything = (_run.DETACHED - 1) & ~_run.TOP
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.logitless.forward, (*args, everything, kept_bytes, None), test_utils=checks
    )
    with torch.no_grad():
        made = torch.ops.logitless.forward(*args, everything, kept_bytes, None)
    found = dict(zip(_ops.RESULTS, made))
    kept = (found["kept"], found["kept_rows"])
    assert (kept[0].shape[0] > 64) == (share >= 0.5)
    detached = [a.detach() if isinstance(a, Tensor) else a for a in args]
    grads = [*torch.randn(4, 6, 50, device=device), torch.randn(6, 50, 2, device=device)]
    wanted = _run.OF_INPUT | _run.OF_WEIGHT
    torch.library.opcheck(
        torch.ops.logitless.backward,
        (*detached, wanted, found["row_state"], found["entropy"], *grads, *kept),
    )


def compiled(function: Any, counter: list[Any], **options: Any) -> Any:
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter.append(torch._dynamo.testing.CompileCounterWithBackend("aot_eager"))
    return torch.compile(function, backend=counter[0], fullgraph=True, **options)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_compiled_backward_uses_and_never_consumes(
    device: str, ran: list[Ran], dtype: torch.dtype
) -> None:
    x, w, _, t = problem((4, 80), 1000, 16, dtype, device)
    exact = [v.detach().double().requires_grad_() for v in (x, w)]
    s = reference.statistics(reference.logits_of(*exact), t, {})
    function = compiled(lambda x, w, t: linear_logprob(x, w, t, entropy=True), [])
    outputs = function(x, w, t)
    check_gradients(outputs, [s["logprob"], s["entropy"]], exact, (x, w), dtype)
    assert [(r.kept, r.consume) for r in ran] == [(True, False)] * 2
    assert max(r.bytes for r in ran) <= 320 * 1000 + 4 * 16 * (320 + 1000) + (16 << 20)


def test_dynamic_shapes_keep_and_do_not_recompile(device: str, ran: list[Ran]) -> None:
    """All columns are kept, whatever the number of tokens."""
    counter: list[Any] = []
    function = compiled(lambda x, w, t: per_token(x, w, t), counter, dynamic=True)
    frames = []
    for tokens in (100, 5, 200, 63, 300, 32, 33):
        x, w, _, t = problem((2, tokens), 1000, 8, device=device)
        ran.clear()
        loss = function(x, w, t)
        loss.sum().backward()
        expected = reference.loss(reference.logits_of(x, w), t, reduction="none")
        close(loss, expected)
        for ours, theirs in zip((x, w), torch.autograd.grad(expected.sum(), (x, w))):
            assert ours.grad is not None
            close(ours.grad, theirs)
        assert ran[0].kept and ran[1].kept
        frames.append(counter[0].frame_count)
    # The first call makes the graphs; other numbers of tokens may add none.
    assert frames == frames[:1] * len(frames)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_memory_bounds_what_is_planned(ran: list[Ran], dynamic: bool) -> None:
    """With symbols as sizes nothing can be planned, so nothing is kept."""
    x, w, b, t = problem((2, 350), 1500, 64, BF16, bias=True)
    exact = [v.detach().double().requires_grad_() for v in (x, w, b)]
    s = reference.statistics(reference.logits_of(*exact), t, {})
    kept = set()
    for memory in (1_000_000, 1_500_000, 3_000_000, 40_000_000):
        ran.clear()

        def call(x: Tensor, w: Tensor, b: Tensor, t: Tensor, memory: int = memory) -> Any:
            return linear_logprob(x, w, t, linear_bias=b, entropy=True, memory=memory)

        outputs = compiled(call, [], dynamic=dynamic)(x, w, b, t)
        check_gradients(outputs, [s["logprob"], s["entropy"]], exact, (x, w, b), BF16)
        assert len(ran) == 2 and all(r.bytes <= memory for r in ran)
        kept.add(tuple((r.kept, r.consume) for r in ran))
    every = {((False, False),) * 2, ((True, False),) * 2}
    assert kept == ({((False, False),) * 2} if dynamic else every)


def test_compiled_under_hooks_keeps_nothing(device: str, ran: list[Ran]) -> None:
    x, w, _, t = problem((4, 80), 1000, 16, device=device)
    with torch.autograd.graph.save_on_cpu():
        loss = compiled(per_token, [])(x, w, t)
    loss.sum().backward()
    compiled(per_token, [])(x, w, t)
    assert [r.kept for r in ran] == [False, False, True]


def test_fake_tensors_keep_by_the_formula() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(1 << 20, 64, dtype=BF16, requires_grad=True)
        w = torch.empty(262144, 64, dtype=BF16, requires_grad=True)
        loss = per_token(x, w, torch.zeros(1 << 20, dtype=torch.int64))
        saved: Any = loss.grad_fn.saved_tensors  # type: ignore[union-attr]
        assert saved[_autograd._SAVED].shape == ((1 << 20) * (262144 // 64) + 2, 64)
        loss.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape

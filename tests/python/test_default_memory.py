# SPDX-License-Identifier: Apache-2.0
"""default_memory and set_default_memory: the `memory` of calls that pass none, such as calls
through signatures without this argument."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from logitless.integrations import FusedLinearCrossEntropyFunction, cce, prime_rl, unsloth, verl
from logitless.torch import (
    LinearCrossEntropyHead,
    _autograd,
    _memory,
    cross_entropy,
    default_memory,
    linear_cross_entropy,
    linear_logprob,
    set_default_memory,
    workspace_size,
)
from reference import close
from test_linear import problem

KIB = 1 << 10
SOME = 700 * KIB  # too little for all logits of `head`, enough for some


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    set_default_memory(None)
    assert _memory.default() is None, "a block has not been closed"


def head() -> tuple[Tensor, Tensor, Tensor]:
    x, w, _, t = problem((6, 50), 700, 16, ignored=0)
    return x, w, t


def kept_bytes(output: Tensor) -> int:
    """The bytes of kept state in an output's graph: the loss saves it last."""
    nodes = [output.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is not None and node.name() == "LossBackward":
            return sum(t.numel() * t.element_size() for t in node.saved_tensors[_autograd._SAVED :])
        nodes += [] if node is None else [next for next, _ in node.next_functions]
    raise AssertionError("there is no loss in this graph")


def primes(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    layer = prime_rl.FusedOutputLinear(*reversed(w.shape), chunk_size=64)
    layer.weight = torch.nn.Parameter(w)
    found: Tensor = layer(x, t, torch.ones(t.shape))["logprobs"]
    return found


def heads(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    layer = LinearCrossEntropyHead(*reversed(w.shape), reduction="none")
    layer.weight = torch.nn.Parameter(w)
    found: Tensor = layer(x, t)
    return found


WITHOUT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "verl": lambda x, w, t: verl.linear_cross_entropy(x, w, t)[0],
    "verl's module": lambda x, w, t: verl.FusedLinearForPPO()(x, w, t)[1],
    "prime-rl": primes,
    "unsloth": unsloth.chunked_hidden_states_selective_log_softmax,
    "liger": lambda x, w, t: (
        FusedLinearCrossEntropyFunction.apply(
            x.flatten(0, 1), w, t.flatten(), reduction="none"
        ).loss
    ),
    "cce": lambda x, w, t: cce.linear_cross_entropy(x, w, t, reduction="none"),
    "head": heads,
    "logprob": linear_logprob,
    "loss": lambda x, w, t: linear_cross_entropy(x, w, t, reduction="none", memory=None),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_without_the_argument_what_is_kept_is_bounded_by_the_default(name: str) -> None:
    x, w, t = head()
    call = WITHOUT[name]
    with default_memory("1GiB"):  # by default, functions of integrations keep less
        free = call(x, w, t)
    with default_memory(SOME):
        bound = call(x, w, t)
    assert kept_bytes(free) >= 4 * t.numel() * w.shape[0] > SOME, "else the case shows nothing"
    assert 0 < kept_bytes(bound) <= SOME
    upstream = torch.randn(free.shape)
    gradients = [torch.autograd.grad(output, x, upstream)[0] for output in (bound, free)]
    close(gradients[0], gradients[1].double())


def test_an_argument_goes_before_it() -> None:
    x, w, t = head()
    set_default_memory("700KiB")
    argument = linear_logprob(x, w, t, memory=4 * SOME)
    assert kept_bytes(argument) > SOME >= kept_bytes(linear_logprob(x, w, t))


def test_workspace_size_and_a_mean_follow_it() -> None:
    x, w, t = head()
    free = workspace_size(x, w, t)
    with default_memory(SOME):
        assert workspace_size(x, w, t) <= SOME < free
        linear_cross_entropy(x, w, t).backward()
        cross_entropy(torch.randn(3, 7), torch.zeros(3, dtype=torch.int64))  # needs no workspace
    with (
        default_memory(1),
        pytest.raises(ValueError, match=r"that of default_memory, is 1 bytes; all"),
    ):
        linear_cross_entropy(x, w, t)


def test_blocks_nest_and_restore() -> None:
    assert _memory.default() is None
    set_default_memory("3KiB")
    again = default_memory("1KiB")
    with again:
        assert _memory.default() == KIB
        with default_memory(None):
            assert _memory.default() is None
            with again:
                assert _memory.default() == KIB
            assert _memory.default() is None
        set_default_memory(7)
        assert _memory.default() == KIB, "an open block goes before it"
        with pytest.raises(KeyError), default_memory(5):
            raise KeyError
        assert _memory.default() == KIB
    assert _memory.default() == 7
    set_default_memory(None)
    assert _memory.default() is None


@pytest.mark.parametrize("bad", ["lots", -5, 1.5, True, [1]], ids=str)
@pytest.mark.parametrize("function", [set_default_memory, default_memory])
def test_bad_values_are_errors_as_of_the_argument(function: Any, bad: Any) -> None:
    x, w, t = head()
    with pytest.raises(ValueError) as expected:
        linear_cross_entropy(x, w, t, memory=bad)
    set_default_memory(9)
    with pytest.raises(type(expected.value)) as error:
        function(bad)
    assert str(error.value) == str(expected.value) and str(error.value).startswith("memory is ")
    assert _memory.default() == 9, "what held before still holds"


def test_it_holds_on_every_thread() -> None:
    """Autograd may recompute a checkpoint on a thread of its own."""
    x, w, t = head()
    found: list[int] = []

    def call() -> None:
        found.append(kept_bytes(linear_logprob(x, w, t)))

    with default_memory(SOME):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert 0 < found[0] <= SOME


def test_blocks_of_threads_that_end_in_the_order_they_began() -> None:
    """The first block must not restore the default that it found: the second still holds."""
    first, second = default_memory(1), default_memory(2)
    first.__enter__()
    thread = threading.Thread(target=second.__enter__)
    thread.start()
    thread.join()
    first.__exit__()
    assert _memory.default() == 2
    second.__exit__()
    assert _memory.default() is None


def test_many_threads_leave_nothing_behind() -> None:
    def work(memory: int) -> None:
        for _ in range(200):
            with default_memory(memory):
                assert _memory.default() is not None

    threads = [threading.Thread(target=work, args=(i + 1,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(_memory._settings) == 1


def test_compiled_it_is_what_held_when_it_was_traced() -> None:
    x, w, t = head()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(
        lambda x, w, t: verl.linear_cross_entropy(x, w, t)[0], backend=counter, fullgraph=True
    )
    with default_memory(SOME):
        bound = call(x, w, t)
    after = call(x, w, t)
    assert counter.frame_count == 1
    sizes = [compiled_kept(o) for o in (bound, after)]
    assert 0 < sizes[0] == sizes[1] <= SOME
    torch._dynamo.reset()
    with default_memory("1GiB"):
        free = call(x, w, t)
    assert compiled_kept(free) > SOME
    assert torch.equal(bound, free)


def compiled_kept(output: Tensor) -> int:
    """The bytes of kept state in a compiled graph: saved matrices of 64 columns."""
    assert output.grad_fn is not None
    saved = output.grad_fn.saved_tensors  # type: ignore[attr-defined]
    return sum(t.numel() * t.element_size() for t in saved if t.dim() == 2 and t.shape[1] == 64)


def test_fake_tensors_follow_it() -> None:
    """The op's argument tells how many bytes would be kept."""
    asked: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if op is torch.ops.logitless.forward.default:
                asked.append(args[-2])
            return op(*args, **(kwargs or {}))

    with FakeTensorMode(allow_non_fake_inputs=True), Watch():
        x, w, t = (torch.empty_like(a, requires_grad=a.requires_grad) for a in head())
        for memory in (None, SOME):
            with default_memory(memory):
                assert linear_logprob(x, w, t).shape == t.shape
    assert asked[0] > SOME > asked[1] > 0


def test_a_default_that_is_too_small_says_where_it_came_from() -> None:
    x, w, t = torch.ones(64, 64), torch.ones(900, 64), torch.zeros(64, dtype=torch.int64)
    for call in (linear_cross_entropy, linear_logprob):
        with default_memory("1B"):
            with pytest.raises(
                ValueError, match=r"^memory, that of default_memory, is 1 bytes; all"
            ):
                call(x, w, t)
            with pytest.raises(ValueError, match=r"^memory is 2 bytes; allowed"):
                call(x, w, t, memory=2)
        set_default_memory("1B")
        try:
            with pytest.raises(
                ValueError, match=r"^memory, that of set_default_memory, is 1 bytes"
            ):
                call(x, w, t)
        finally:
            set_default_memory(None)


def test_a_function_is_decorated() -> None:
    set_to = default_memory("64MiB")

    @set_to
    def inner(depth: int) -> list[int | None]:
        """What it says."""
        return [_memory.default(), *(inner(depth - 1) if depth else [])]

    assert inner.__doc__ == "What it says." and inner.__name__ == "inner"
    for _ in range(2):
        assert inner(1) == [64 << 20, 64 << 20] and _memory.default() is None
    with pytest.raises(ZeroDivisionError):
        set_to(lambda: 1 / 0)()
    assert _memory.default() is None

    def values() -> Iterator[int]:
        yield 1

    async def later() -> None:
        pass

    for other in (values, later, torch.nn.Linear, 3):
        with pytest.raises(TypeError, match=r"^default_memory decorates .*; allowed: a function"):
            set_to(other)

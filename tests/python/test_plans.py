# SPDX-License-Identifier: Apache-2.0
"""The library's plans, as this package holds them: created at the first run, destroyed with their
owner, run by several threads, for tensors wherever they lie."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from logitless import _abi
from logitless._abi import Options, Plan, View
from logitless._errors import LogitlessError
from logitless.torch import linear_cross_entropy


def a_plan(tokens: int = 3, **how: Any) -> Plan:
    """A linear Forward of D 4 and V 5 in f32, in an order that is not the C struct's."""
    views = [
        View("loss", _abi.F32, _abi.CPU, 0, (), ()),
        View("weight", _abi.F32, _abi.CPU, 0, (5, 4), (4, 1)),
        View("target", _abi.I64, _abi.CPU, 0, (tokens,), (1,)),
        View("input", _abi.F32, _abi.CPU, 0, (tokens, 4), (4, 1)),
    ]
    options = Options(normalizer=2.0)
    return Plan(_abi.LINEAR_CROSS_ENTROPY_FORWARD, views, options, (_abi.CPU, 0), **how)


def tensors(tokens: int = 3) -> list[torch.Tensor]:
    """The tensors of a_plan, the loss first."""
    torch.manual_seed(1)
    target = torch.arange(tokens) % 5
    return [torch.tensor(-1.0), torch.randn(5, 4), target, torch.randn(tokens, 4)]


def run(plan: Plan | None, given: list[torch.Tensor], **how: Any) -> float:
    assert plan is not None
    workspace = torch.empty(plan.bytes + 64, dtype=torch.uint8)
    start = workspace.data_ptr() + -workspace.data_ptr() % 64
    plan.run([t.data_ptr() for t in given], start, **how)
    return given[0].item()


def expected(given: list[torch.Tensor], normalizer: float = 2.0) -> float:
    _, weight, target, input = given
    loss = torch.nn.functional.cross_entropy(input @ weight.T, target, reduction="sum")
    return loss.item() / normalizer


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many plans of the library were created and destroyed."""
    counts = {"create": 0, "destroy": 0}

    def counting(name: str) -> None:
        real = getattr(_abi, f"_plan_{name}")

        def count(*arguments: object) -> object:
            counts[name] += 1
            return real(*arguments)

        monkeypatch.setattr(_abi, f"_plan_{name}", count)

    counting("create")
    counting("destroy")
    return counts


def test_one_is_created_at_the_first_run_and_goes_with_its_owner(counted: dict[str, int]) -> None:
    plan, given = a_plan(), tensors()
    assert counted == {"create": 0, "destroy": 0}
    for _ in range(3):
        assert run(plan, given) == pytest.approx(expected(given))
    assert counted == {"create": 1, "destroy": 0}
    del plan
    gc.collect()
    assert counted == {"create": 1, "destroy": 1}


def test_the_normalizer_of_a_run_takes_the_place_of_the_plans() -> None:
    plan, given = a_plan(), tensors()
    assert run(plan, given, normalizer=7.0) == pytest.approx(expected(given, 7.0))
    assert run(plan, given) == pytest.approx(expected(given))


def test_a_refused_run_names_the_field_and_leaves_the_plan_usable() -> None:
    plan, given = a_plan(), tensors()
    with pytest.raises(LogitlessError, match=r"weight has shape .* NULL data"):
        plan.run([given[0].data_ptr(), 0, given[2].data_ptr(), given[3].data_ptr()], 64)
    assert run(plan, given) == pytest.approx(expected(given))


def test_threads_run_one_plan(counted: dict[str, int]) -> None:
    plan: Plan | None = a_plan(300)
    sets = [tensors(300) for _ in range(4)]
    found: list[list[float]] = [[] for _ in sets]

    def work(i: int) -> None:
        for _ in range(20):
            found[i].append(run(plan, sets[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(sets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {value for each in found for value in each} == {found[0][0]}
    assert found[0][0] == pytest.approx(expected(sets[0]))
    plan = None
    gc.collect()
    assert counted["create"] == counted["destroy"] >= 1


def test_host_tensors_may_lie_anywhere() -> None:
    """Calls of one shape share a plan, whatever the alignment of the tensors that made it."""
    target = torch.tensor([1, 2, 3])
    values, weights = torch.randn(3 * 4 + 1), torch.randn(5 * 4 + 1)
    for first in (0, 1):
        input = values[first : first + 12].view(3, 4).requires_grad_()
        weight = weights[first : first + 20].view(5, 4).requires_grad_()
        loss = linear_cross_entropy(input, weight, target)
        loss.backward()
        whole = torch.nn.functional.cross_entropy(input.detach() @ weight.detach().T, target)
        torch.testing.assert_close(loss.detach(), whole)

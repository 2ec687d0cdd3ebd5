# SPDX-License-Identifier: Apache-2.0
"""verl's kernel needs Triton and a GPU, so only its signature is compared, read from its file: the
package itself imports Ray. verl's distillation of a teacher's likeliest tokens is plain PyTorch,
so it is run, from its file too, and compared with ours."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pathlib
import types
from typing import Any

import pytest
import torch

import both
from logitless.integrations import verl
from reference import close


def file(path: str) -> pathlib.Path:
    found = importlib.util.find_spec("verl")
    if found is None or found.origin is None:
        pytest.skip("verl is not installed")
    return pathlib.Path(found.origin).parent / path


def test_signature() -> None:
    path = file("utils/kernel/linear_cross_entropy.py")
    spec = importlib.util.spec_from_file_location("verls", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    both.takes_what(verl.linear_cross_entropy, module.LinearCrossEntropy.forward, skip=1)


def theirs() -> Any:
    """compute_forward_kl_topk without what its file imports of verl."""
    tree = ast.parse(file("trainer/distillation/fsdp/losses.py").read_text())
    functions: list[ast.stmt] = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    future = ast.parse("from __future__ import annotations").body
    namespace: dict[str, Any] = {
        "torch": torch, "F": torch.nn.functional,
        "get_ulysses_sequence_parallel_world_size": lambda: 1,
    }  # fmt: skip
    exec(compile(ast.Module(future + functions, []), "losses.py", "exec"), namespace)
    return namespace["compute_forward_kl_topk"]


def nested(given: torch.Tensor) -> Any:
    return torch.nested.nested_tensor([given[0, :5], given[0, 5:]], layout=torch.jagged)


@pytest.mark.parametrize("least", [None, -10.0, -3.0])
@pytest.mark.parametrize("chunked", [False, True])
def test_forward_kl_topk(least: float | None, chunked: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(1, 13, 16).requires_grad_(), torch.randn(36, 16).requires_grad_()
    likeliest = (2 * torch.randn(1, 13, 36)).log_softmax(-1).topk(6, -1)
    teacher = nested(likeliest.values), nested(likeliest.indices)
    config = types.SimpleNamespace(
        distillation_loss=types.SimpleNamespace(log_prob_min_clamp=least, use_chunked_topk=chunked)
    )
    function = theirs()
    names = list(inspect.signature(verl.compute_forward_kl_topk).parameters)
    assert names[2:6] == list(inspect.signature(function).parameters)[1:]
    found = verl.compute_forward_kl_topk(x, w, *teacher, config, "thd")
    expected = function(x.double() @ w.double().T, *teacher, config, "thd")
    assert list(found) == list(expected)
    for name, value in found.items():
        assert value.shape == expected[name].shape
        close(value.double(), expected[name].double())
    grads = [torch.autograd.grad(m["distillation_losses"].square().sum(), (x, w))
             for m in (found, expected)]  # fmt: skip
    for a, e in zip(*grads):
        close(a, e.double())

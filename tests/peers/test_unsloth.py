# SPDX-License-Identifier: Apache-2.0
"""Our divergence of two heads equals Unsloth's, on the CPU, where Unsloth uses no kernel. Only its
file is imported, because the package itself needs a GPU."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from logitless.integrations import unsloth

spec = importlib.util.find_spec("unsloth_zoo")
if spec is None or spec.origin is None:
    pytest.skip("unsloth_zoo is not installed", allow_module_level=True)
for name in ("unsloth_zoo", "unsloth_zoo.fused_losses", "unsloth_zoo.temporary_patches"):
    module = types.ModuleType(name)
    module.__path__ = [str(Path(spec.origin).parent.joinpath(*name.split(".")[1:]))]
    sys.modules[name] = module
theirs = pytest.importorskip("unsloth_zoo.fused_losses.fused_linear").fused_linear_jsd

MASK = torch.arange(12).view(2, 6) % 3
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "forward kl": {"beta": 0.0, "mask": MASK, "temperature": 2.0, "num_items_in_batch": 3},
    "reverse kl": {"beta": 1.0, "student_logit_scale": 0.5, "student_logit_softcapping": 2.0,
                   "teacher_logit_softcapping": 3.0, "teacher_logit_scale": 0},
    "divisor of 0": {"num_items_in_batch": torch.tensor([0])},
    "nothing": {"mask": torch.zeros(2, 6)},
    "scaling": {"scaling": torch.tensor(64.0), "rows_per_chunk": 2, "beta": 0.2},
}  # fmt: skip


@pytest.mark.parametrize("labels", [False, True], ids=["", "labels"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", CASES)
def test_loss(name: str, bias: bool, labels: bool) -> None:
    torch.manual_seed(0)
    options = dict(CASES[name])
    leaves = [torch.randn(2, 6, 8).requires_grad_(), torch.randn(37, 8).requires_grad_()]
    teacher = torch.randn(2, 6, 5), torch.randn(37, 5)
    if bias:
        leaves.append(torch.randn(37).requires_grad_())
        options.update(student_bias=leaves[2], teacher_bias=torch.randn(37))
    if labels:
        options["labels"] = torch.randint(0, 37, (2, 6)).where(torch.arange(6) % 2 > 0, -100)
    made, other = (f(*leaves[:2], *teacher, **options) for f in (unsloth.fused_linear_jsd, theirs))
    assert made.dtype is other.dtype
    of_made, of_other = (torch.autograd.grad(3 * loss, leaves) for loss in (made, other))
    for a, e in zip((made, *of_made), (other, *of_other)):  # relative to each one's largest element
        torch.testing.assert_close(a, e, rtol=0, atol=2e-5 * max(float(e.abs().max()), 1e-3))


def test_signature() -> None:
    own, other = (inspect.signature(f).parameters for f in (unsloth.fused_linear_jsd, theirs))
    assert list(own)[-1] == "memory"
    assert [(p.name, p.kind, p.default) for p in list(own.values())[:-1]] == [
        (p.name, p.kind, p.default) for p in other.values()
    ]

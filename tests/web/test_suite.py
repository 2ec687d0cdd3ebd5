# SPDX-License-Identifier: Apache-2.0
"""The conformance suite in headless Chromium: the cases, bounds and tests of native programs,
compiled to wasm (tests/web/suite.cpp), on Tint and SwiftShader at the default limits. A part of
them, since SwiftShader takes seconds for what lavapipe takes a tenth of; with
LOGITLESS_TEST_FULL=1 all."""

from __future__ import annotations

import os

import pytest
from playwright.sync_api import Page

FULL = os.environ.get("LOGITLESS_TEST_FULL") == "1"
LOGITS_OPS = ["softmax", "forward", "backward", "forward_backward"]
LINEAR_OPS = ["linear_forward", "linear_backward", "linear_forward_backward"]
DIVERGENCES = ["divergence_forward", "divergence_backward", "divergence_forward_backward"]
DTYPES = ["f32", "f16", "bf16"]
# All dtypes of the op that uses most kernels, and some dtype of most others. The ops on given
# logits have SwiftShader's slowest kernel, that of whole rows.
CASES = [("linear_forward_backward", dtype) for dtype in DTYPES]
CASES += [
    ("linear_forward", "bf16"),
    ("linear_forward", "f16"),
    ("linear_backward", "f32"),
    ("softmax", "bf16"),
    ("forward", "f16"),
    ("backward", "bf16"),
    ("forward_backward", "f32"),
    ("divergence_forward_backward", "f32"),
]
if FULL:
    CASES = [(op, dtype) for op in LOGITS_OPS + LINEAR_OPS + DIVERGENCES for dtype in DTYPES]
RULES = ["Edges.*/webgpu_forward_f32", "Edges.*/webgpu_linear_forward_backward_f32"]
RULES += ["NonFinite.*/webgpu_forward_f32", "NonFinite.*/webgpu_linear_backward_f32"]
RULES += ["NonFinite.RowsOf*/webgpu_*_f32", "Invariants.*/webgpu_linear_forward_backward_f32"]
RULES += ["Shards.*/webgpu_linear_forward_f32", "Combines.*/webgpu_forward_f32"]
RULES += ["ChosenColumns.*/webgpu_linear_forward_f32"]
RULES += [
    f"Divergences.{test}/webgpu_divergence_forward_backward_f32"
    for test in ("Equal*", "Columns*", "What*", "KeptState*")
]
if FULL:
    RULES = [
        f"{part}.*"
        for part in (
            *("Edges", "NonFinite", "Invariants", "Shards"),
            *("Combines", "Divergences", "ChosenColumns"),
        )
    ]


def passes(suite: Page, planned: list[str], test: str) -> list[str]:
    """Runs a test. Returns the pipelines made so far, all of them planned (test_shaders.py)."""
    result = suite.evaluate("(filter) => runTests(filter)", f"All/{test}")
    assert result["failed"] == 0, result["text"][-3000:]
    made = suite.evaluate("madePipelines()")
    assert set(made) <= set(planned)
    return made


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_conformance(suite: Page, planned: list[str], op: str, dtype: str) -> None:
    made = passes(suite, planned, f"Conformance.*/webgpu_{op}_{dtype}-*EveryInstructionSet*")
    assert made


@pytest.mark.parametrize("test", RULES)
def test_rules_of_the_contract(suite: Page, planned: list[str], test: str) -> None:
    passes(suite, planned, test)


def test_a_failure_is_seen(suite: Page) -> None:
    """A test that does not exist, and one whose work is never submitted."""
    assert suite.evaluate("runTests('None.*')")["failed"] == -1
    result = suite.evaluate(
        """async () => {
          GPUQueue.prototype.submitted = GPUQueue.prototype.submit;
          GPUQueue.prototype.submit = function () {};
          try {
            return await runTests('All/Conformance.EveryShape/webgpu_softmax_f32');
          } finally {
            GPUQueue.prototype.submit = GPUQueue.prototype.submitted;
          }
        }"""
    )
    assert result["failed"] == 1
    assert "reference" in result["text"]

# SPDX-License-Identifier: Apache-2.0
"""linearDivergence of logitless.js in headless Chromium, within the contract's bounds of the
reference at the default limits."""

# ruff: noqa: E501
from __future__ import annotations

import math
from typing import Any

import pytest
from playwright.sync_api import Page
from test_module import within

DIVERGENCE = """async ([N, D, Dt, V, options, more]) => {
  const {shapes, bias, target, ...student} = problem(N, D, V, more);
  const other = problem(N + 1, Dt, V, more);
  const teacher = more.logits ? {teacherLogits: fill(N * V, 3)} : {teacherInput: other.input.slice(0, N * Dt), teacherWeight: other.weight};
  Object.assign(shapes, {teacherInput: [N, Dt], teacherWeight: [V, Dt], teacherLogits: [N, V], teacherBias: [V]});
  const arrays = {...student, ...teacher, ...(more.noTarget ? {} : {target})};
  if (more.bias) Object.assign(arrays, {bias, ...(more.logits ? {} : {teacherBias: fill(V, 0.7)})});
  if (more.temperatures) Object.assign(arrays, {temperature: fill(N).map((x) => 1.5 + x), teacherTemperature: fill(N + 3).map((x) => 1.5 + x).slice(0, N)});
  const tensors = upload(logitless, {shapes, ...arrays});
  const scalar = options.reduction === 'none' ? [N] : [];
  const outputs = {loss: scalar, gradInput: [N, D], gradWeight: [V, D], ...(more.bias ? {gradBias: [V]} : {})};
  const statistics = more.statistics ?? [];
  for (const name of statistics) outputs[name] = [N];
  const plan = logitless.plan({tokens: N, hidden: D, vocab: V, ...(more.logits ? {teacherLogits: true} : {teacherHidden: Dt}), ...options});
  const result = logitless.linearDivergence({...tensors, gradients: true, statistics, budget: more.least ? plan.minimum : undefined, ...options});
  const expected = logitless.evaluate({kind: 'linearDivergenceForwardBackward', tensors: arrays, shapes, outputs, bounds: true, ...options});
  return worst(result, expected);
}"""
STATISTICS = ["entropy", "teacherEntropy", "acceptance"]
KINDS = ["forward_kl", "reverse_kl", "jsd", "skew_kl", "tv"]


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(page: Page, kind: str) -> None:
    options = {"divergence": kind, "beta": 0.3, "reduction": "none"}
    more = {"ignored": 3, "statistics": [*STATISTICS, "logprob"]}
    shares = page.evaluate(DIVERGENCE, [20, 24, 33, 1300, options, more])
    assert set(shares) == {"loss", "gradInput", "gradWeight", *STATISTICS, "logprob"}
    within(shares)


def test_kinds_by_hand(page: Page) -> None:
    """p = (1/2, 1/2), q = (1/4, 3/4). Two kinds exchanged by name would agree with the reference,
    because evaluate() takes the same names."""
    got = page.evaluate(
        """([kinds]) => Promise.all(kinds.map((divergence) => logitless.linearDivergence({
          input: logitless.tensor(new Float32Array(1), [1, 1]), weight: logitless.tensor(new Float32Array(2), [2, 1]),
          teacherLogits: logitless.tensor(new Float32Array([0, Math.log(3)]), [1, 2]), divergence, beta: 0.25}).loss.item()))""",
        [KINDS],
    )
    p, q, m = (0.5, 0.5), (0.25, 0.75), (0.4375, 0.5625)
    forward, reverse, of_q, of_p = (
        sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))
        for a, b in ((q, p), (p, q), (q, m), (p, m))
    )
    want = [forward, reverse, 0.25 * of_q + 0.75 * of_p, of_q, 0.25]
    assert got == pytest.approx(want, rel=1e-6)


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"noTarget": True, "statistics": STATISTICS}),
    ({"labelWeight": 0.7, "reduction": "sum"}, {"bias": True}),
    ({"softcap": 5, "logitScale": 1.5, "teacherSoftcap": 4, "teacherLogitScale": 0.8}, {}),
    ({"temperature": 2, "teacherTemperature": 0.5, "normalizer": 7}, {"bias": True}),
    ({"divergence": "reverse_kl"}, {"logits": True, "bias": True}),
    ({"divergence": "tv"}, {"logits": True, "temperatures": True}),
]


@pytest.mark.parametrize(("options", "more"), OPTIONS, ids=str)
def test_options(page: Page, options: dict[str, Any], more: dict[str, Any]) -> None:
    within(page.evaluate(DIVERGENCE, [20, 24, 24, 600, {"divergence": "jsd", **options}, more]))


def test_the_least_workspace(page: Page) -> None:
    within(page.evaluate(DIVERGENCE, [140, 16, 12, 1500, {}, {"least": True}]))


def test_equal_heads_are_exactly_0(page: Page) -> None:
    sizes = page.evaluate(
        """async ([kinds]) => {
          const {bias, ...rest} = problem(20, 24, 1300);
          const {input, weight} = upload(logitless, rest);
          const sizes = [];
          for (const divergence of kinds) {
            const {loss, gradInput, gradWeight} = logitless.linearDivergence({input, weight, teacherInput: input, teacherWeight: weight,
              divergence, gradients: true, softcap: 6, teacherSoftcap: 6, temperature: 1.3, teacherTemperature: 1.3});
            for (const x of [loss, gradInput, gradWeight]) sizes.push((await x.read()).reduce((most, y) => Math.max(most, Math.abs(y)), 0));
          }
          return sizes;
        }""",
        [KINDS],
    )
    assert sizes == [0] * 15


def test_a_loss_alone_and_the_gradients_that_are_asked_for(page: Page) -> None:
    names = page.evaluate(
        """() => {
          const {bias, ...rest} = problem(5, 8, 40);
          const {input, weight} = upload(logitless, rest);
          const head = {input, weight, teacherLogits: logitless.tensor(fill(200), [5, 40])};
          return [[], ['weight'], true].map((gradients) => Object.keys(logitless.linearDivergence({...head, gradients})).sort());
        }"""
    )
    assert names[0] == ["loss", "workspaceBytes"]
    assert names[1] == ["gradWeight", "loss", "workspaceBytes"]
    assert names[2] == ["gradInput", "gradWeight", "loss", "workspaceBytes"]


def test_workspace_is_what_was_planned(page: Page) -> None:
    planned, used = page.evaluate(
        """() => {
          const {bias, target, ...rest} = problem(48, 32, 3000);
          const {input, weight, target: labels} = upload(logitless, {...rest, target});
          const teacher = {teacherInput: input, teacherWeight: weight};
          return [logitless.plan({tokens: 48, hidden: 32, vocab: 3000, teacherHidden: 32}).recommended,
            logitless.linearDivergence({input, weight, target: labels, ...teacher, gradients: true}).workspaceBytes];
        }"""
    )
    assert planned == used


@pytest.mark.parametrize(
    ("code", "word", "call"),
    [
        ("unknown_enum", "divergence", "linearDivergence({...head, ...teacher, divergence: 'kl'})"),
        ("invalid_argument", "beta", "linearDivergence({...head, ...teacher, divergence: 'jsd', beta: 2})"),
        ("invalid_argument", "label_smoothing", "linearDivergence({...head, ...teacher, labelSmoothing: 0.1})"),
        ("invalid_argument", "teacher_weight", "linearDivergence(head)"),
        ("invalid_argument", "teacher_input", "linearDivergence({...head, teacherInput: head.input})"),
        ("wrong_shape", "teacher_logits", "linearDivergence({...head, teacherLogits: logitless.tensor(fill(40), [4, 10])})"),
        ("invalid_argument", "beta", "linearCrossEntropy({...head, beta: 0.5})"),
        ("invalid_argument", "tensor", "linearCrossEntropy({...head, ...teacher})"),
    ],
)  # fmt: skip
def test_refused_calls_say_why(page: Page, code: str, word: str, call: str) -> None:
    got = page.evaluate(
        f"""() => {{
          const {{bias, ...rest}} = problem(4, 8, 20);
          const head = upload(logitless, rest);
          delete head.bias;
          const teacher = {{teacherInput: head.input, teacherWeight: head.weight}};
          try {{
            logitless.{call};
          }} catch (error) {{
            return [error.code, error.message];
          }}
        }}"""
    )
    assert got is not None
    assert got[0] == code
    assert word in got[1]

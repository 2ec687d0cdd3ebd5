# SPDX-License-Identifier: Apache-2.0
"""logitless.js in headless Chromium: softmax and cross-entropy within the contract's bounds of the
reference; status codes, the caller's device and buffers. Most tests are at the default limits."""

# ruff: noqa: E501
from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

LINEAR = """async ([N, D, V, options, more]) => {
  const {shapes, ...arrays} = problem(N, D, V, more);
  if (!more.bias) delete arrays.bias;
  if (more.temperatures) arrays.temperature = fill(N).map((x) => 1.2 + x);
  const tensors = upload(logitless, {shapes, ...arrays});
  const scalar = options.reduction === 'none' ? [N] : [];
  const outputs = {loss: scalar, gradInput: [N, D], gradWeight: [V, D], ...(more.bias ? {gradBias: [V]} : {})};
  const statistics = more.statistics ?? [];
  for (const name of statistics) outputs[name] = [N];
  const plan = logitless.plan({tokens: N, hidden: D, vocab: V, dtype: more.half ? 'f16' : 'f32', ...options});
  const budget = more.least ? plan.minimum : undefined;
  const result = logitless.linearCrossEntropy({...tensors, gradients: true, gradientDtype: 'f32', statistics, budget, ...options});
  const expected = logitless.evaluate({tensors: arrays, shapes, outputs, bounds: true, ...options});
  return worst(result, expected);
}"""


def within(shares: dict[str, float]) -> None:
    assert shares
    assert all(share <= 1 for share in shares.values()), shares


SHAPES = [(1, 1, 1), (3, 5, 7), (17, 33, 1025), (64, 64, 8192), (70, 130, 300)]
OPTIONS: list[dict[str, Any]] = [
    {"labelSmoothing": 0.1, "zLoss": 0.01},
    {"softcap": 5, "logitScale": 1.5, "temperature": 0.7},
    {"reduction": "none"},
    {"reduction": "sum", "normalizer": 0},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_loss_and_gradients(page: Page, shape: tuple[int, int, int]) -> None:
    within(page.evaluate(LINEAR, [*shape, {}, {"bias": True}]))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(page: Page, options: dict[str, Any]) -> None:
    more = {"bias": True, "ignored": 3, "statistics": ["lse", "entropy", "targetLogit"]}
    within(page.evaluate(LINEAR, [20, 24, 600, options, more]))


@pytest.mark.parametrize("temperatures", [False, True])
def test_statistics_and_temperatures_of_tokens(page: Page, temperatures: bool) -> None:
    statistics = ["logprob", "rank", "sumPSquared", "meanLogit", "maxLogprob", "massAbove"]
    more = {"ignored": 3, "statistics": statistics, "temperatures": temperatures}
    shares = page.evaluate(LINEAR, [20, 24, 1600, {}, more])
    assert set(statistics) < set(shares)
    within(shares)


def test_half_precision(page: Page) -> None:
    within(page.evaluate(LINEAR, [20, 24, 600, {}, {"bias": True, "half": True}]))


def test_the_least_workspace(page: Page) -> None:
    within(page.evaluate(LINEAR, [40, 16, 5000, {}, {"least": True}]))


def test_logits_ops(page: Page) -> None:
    shares = page.evaluate(
        """async () => {
          const [N, V] = [9, 1500];
          const logits = fill(N * V, 8), target = Int32Array.from({length: N}, (_, i) => i * 100);
          const shapes = {logits: [N, V], target: [N]};
          const tensors = upload(logitless, {logits, target, shapes});
          const own = logitless.tensor(logits, [N, V]);
          const result = logitless.crossEntropy({...tensors, gradients: true, inPlace: true, labelSmoothing: 0.1});
          const expected = logitless.evaluate({kind: 'crossEntropyForwardBackward', tensors: {logits, target}, shapes,
            outputs: {loss: [], gradLogits: [N, V]}, bounds: true, labelSmoothing: 0.1});
          const probabilities = logitless.softmax(own);
          const soft = logitless.evaluate({kind: 'softmax', tensors: {logits}, shapes, outputs: {probabilities: [N, V]}, bounds: true});
          if (result.gradLogits.buffer !== tensors.logits.buffer) throw new Error('not in place');
          return {...await worst(result, expected), ...await worst({probabilities}, soft)};
        }"""
    )
    assert set(shares) == {"loss", "gradLogits", "probabilities"}
    within(shares)


def test_workspace_is_what_was_planned(page: Page) -> None:
    """Buffers are counted when they are created."""
    planned, made, again = page.evaluate(
        """async () => {
          const own = await module.Logitless.create({limits: 'default'});
          const [N, D, V] = [48, 32, 3000];
          const {bias, ...rest} = problem(N, D, V);
          const tensors = upload(own, rest);
          delete tensors.bias;
          const {workspaceBytes} = own.linearCrossEntropy({...tensors, gradients: true});
          await own.done();
          const made = own.side.allocated;
          own.linearCrossEntropy({...tensors, gradients: true});
          await own.done();
          return [own.plan({tokens: N, hidden: D, vocab: V}).recommended, made, own.side.most];
        }"""
    )
    assert made == planned
    assert again == made


def test_a_plan_of_other_gradients_is_what_runs(page: Page) -> None:
    """f16 gradients of the weight are summed in the workspace, f32 ones where they lie."""
    for gradient in ("f32", "f16"):
        planned, least = page.evaluate(
            """([gradientDtype]) => {
              const [N, D, V] = [48, 32, 3000];
              const {bias, ...tensors} = upload(logitless, problem(N, D, V, {half: true}));
              const {minimum} = logitless.plan({tokens: N, hidden: D, vocab: V, dtype: 'f16', gradientDtype});
              return [minimum, logitless.linearCrossEntropy({...tensors, gradients: true, gradientDtype, budget: 1}).workspaceBytes];
            }""",
            [gradient],
        )
        assert planned == least


def test_larger_limits_are_used_where_the_adapter_has_them(page: Page) -> None:
    """1024 rows of this weight are 156 MiB, more than a binding is by default."""
    asked, refused, plan = page.evaluate(
        """async () => {
          const own = await module.Logitless.create();
          const {limits} = await navigator.gpu.requestAdapter();
          const shape = {tokens: 8, hidden: 40000, vocab: 1024};
          let refused = null;
          try { logitless.plan(shape); } catch (error) { refused = error.code; }
          const names = ['maxBufferSize', 'maxStorageBufferBindingSize', 'maxComputeWorkgroupStorageSize'];
          return [names.map((name) => [own.device.limits[name], limits[name]]), refused, own.plan(shape)];
        }"""
    )
    assert all(own == adapters for own, adapters in asked)
    assert asked[1][0] > 2**27  # SwiftShader's limit is 1 GiB
    assert refused == "not_supported"
    assert plan["minimum"] > 0


def test_a_callers_device_and_buffer(page: Page) -> None:
    shares = page.evaluate(
        """async () => {
          const device = await (await navigator.gpu.requestAdapter()).requestDevice();
          const own = await module.Logitless.create({device});
          if (own.device !== device) throw new Error('another device');
          const {shapes, bias, ...arrays} = problem(8, 12, 50);
          const tensors = upload(own, {shapes, ...arrays});
          const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
          const buffer = device.createBuffer({size: 256 + 8 * 12 * 4, usage});
          device.queue.writeBuffer(buffer, 256, arrays.input);
          tensors.input = own.wrap(buffer, [8, 12], 'f32', {byteOffset: 256});
          const result = own.linearCrossEntropy({...tensors, gradients: true});
          tensors.input.destroy();  // forgets it; the buffer stays the caller's
          const expected = own.evaluate({tensors: arrays, shapes, bounds: true, outputs: {loss: [], gradInput: [8, 12], gradWeight: [50, 12]}});
          return worst(result, expected);
        }"""
    )
    within(shares)


def test_views_beyond_one_binding(page: Page) -> None:
    """N and V pass a binding when its limit is lowered."""
    shares = page.evaluate(
        """async () => {
          const own = await module.Logitless.create({limits: 'default'});
          own.core.exports.set_limits(2 ** 21, 2 ** 18, 8, 256, 16384, 256, 65535);
          const [N, D, V] = [1200, 60, 2100];  // 281 KiB and 492 KiB of 256
          const {shapes, bias, ...arrays} = problem(N, D, V, {ignored: 5});
          const result = own.linearCrossEntropy({...upload(own, {shapes, ...arrays}), gradients: true});
          const expected = own.evaluate({tensors: arrays, shapes, bounds: true, outputs: {loss: [], gradInput: [N, D], gradWeight: [V, D]}});
          return worst(result, expected);
        }"""
    )
    within(shares)


def test_pipelines_are_made_once_and_compile_everywhere(page: Page, planned: list[str]) -> None:
    """What the ops ask for is what test_shaders.py gives to both compilers."""
    for more in ({"bias": True}, {"half": True}, {"least": True}):
        page.evaluate(LINEAR, [20, 24, 600, {"softcap": 5, "temperature": 2}, more])
        page.evaluate(LINEAR, [20, 24, 600, {}, more])
    names = page.evaluate("logitless.side.kernels.slice(1).map(({kernel}) => kernel.label)")
    assert len(names) > 10
    assert len(set(names)) == len(names)
    assert set(names) <= set(planned)


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("wrong_shape", "{...tensors, target: logitless.tensor(new Int32Array(3))}"),
        ("wrong_dtype", "{...tensors, target: logitless.tensor(new Float32Array(4))}"),
        ("invalid_argument", "{...tensors, labelSmoothing: 2}"),
        ("invalid_argument", "{...tensors, labelSmothing: 0.1}"),
        ("unknown_enum", "{...tensors, reduction: 'average'}"),
    ],
)
def test_refused_calls_say_why(page: Page, code: str, call: str) -> None:
    got = page.evaluate(
        f"""() => {{
          const {{bias, ...rest}} = problem(4, 8, 20);
          const tensors = upload(logitless, rest);
          delete tensors.bias;
          try {{
            logitless.linearCrossEntropy({call});
          }} catch (error) {{
            return [error.name, error.code, error.message];
          }}
        }}"""
    )
    assert got is not None
    assert got[:2] == ["LogitlessError", code]
    assert len(got[2]) > 10


def test_the_pipelines_that_are_compiled_are_counted(page: Page) -> None:
    """A page shows a visitor who waits both counts: `asked` after the call, `ready` at its end."""
    before, after, done, again = page.evaluate(
        """async () => {
          const own = await module.Logitless.create({limits: 'default'});
          const before = own.pipelines;
          const tensors = {input: own.tensor(fill(32), [4, 8]), weight: own.tensor(fill(160), [20, 8]), target: own.tensor(new Int32Array(4))};
          const {loss} = own.linearCrossEntropy({...tensors, gradients: true});
          const after = own.pipelines;
          await loss.item();
          const done = own.pipelines;
          own.linearCrossEntropy({...tensors, gradients: true});
          return [before, after, done, own.pipelines];
        }"""
    )
    assert before == {"asked": 0, "ready": 0}
    assert after["asked"] > 3
    assert after["ready"] == 0
    assert done == {"asked": after["asked"], "ready": after["asked"]}
    assert again == done

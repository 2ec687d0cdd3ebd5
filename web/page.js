// SPDX-License-Identifier: Apache-2.0
// The page: finds a GPU or says why there is none, runs one call and judges it, plots its memory.

import {bytesText, drawChart} from './chart.js';
import {halves} from './halves.js';
import {Logitless, whyUnavailable} from './logitless.js';
import {prepareTraining} from './train.js';

const at = (id) => document.getElementById(id);
// What the double-precision check may cost: multiplications of one product, about a second's worth.
const CHECKED = 2 ** 27;

let redraw = () => {};
let instance = null;

// The module; after its device was lost, on a new one.
async function ready() {
  if (!instance || instance.isLost) {
    instance = await Logitless.create({limits: new URLSearchParams(location.search).get('limits') ?? undefined});
    showDevice(instance);
    instance.lost.then((why) => {
      at('lost').hidden = false;
      at('lost').textContent = `${why[0].toUpperCase()}${why.slice(1)} The next run asks for a new one.`;
    });
  }
  at('lost').hidden = true;
  return instance;
}

// Calls f with the tensors and destroys them.
async function using(tensors, f) {
  try {
    return await f(tensors);
  } finally {
    for (const tensor of Object.values(tensors)) tensor?.destroy?.();
  }
}

function normal() {
  return Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
}

function readForm() {
  const form = new FormData(at('options'));
  const number = (name) => Number(form.get(name));
  const shape = {tokens: number('tokens'), hidden: number('hidden'), vocab: number('vocab')};
  const options = {reduction: form.get('reduction')};
  for (const name of ['labelSmoothing', 'zLoss', 'softcap', 'logitScale', 'temperature']) options[name] = number(name);
  return {
    ...shape, options, dtype: form.get('dtype'), ignored: number('ignored') / 100, bias: form.has('bias'),
    gradients: form.has('gradients'), workspace: form.get('workspace'),
  };
}

// Arrays of a random problem: logits of a few units, so that some tokens are likely and some are not.
function makeProblem({tokens, hidden, vocab, dtype, ignored, bias}) {
  const fill = (size, spread) => {
    const values = Float32Array.from({length: size}, () => spread * normal());
    return dtype === 'f16' ? halves(values) : values;
  };
  const arrays = {
    input: fill(tokens * hidden, 1),
    weight: fill(vocab * hidden, 2 / Math.sqrt(hidden)),
    target: Int32Array.from({length: tokens}, () => (Math.random() < ignored ? -100 : Math.floor(Math.random() * vocab))),
  };
  if (bias) arrays.bias = fill(vocab, 1);
  const shapes = {input: [tokens, hidden], weight: [vocab, hidden], target: [tokens], bias: [vocab]};
  return {arrays, shapes};
}

async function timed(work) {
  const start = performance.now();
  const result = await work();
  return [result, performance.now() - start];
}

function callOf(tensors, problem, workspace, rows) {
  const {input, target} = tensors;
  const head = (tensor) => (rows === undefined ? tensor : Object.assign(Object.create(Object.getPrototypeOf(tensor)), tensor, {shape: [rows, ...tensor.shape.slice(1)]}));
  return {
    ...tensors, input: head(input), target: head(target), gradients: problem.gradients, budget: workspace, ...problem.options,
    gradientDtype: 'f32',
  };
}

// The greatest error of every output, in units of what the contract allows.
async function judge(logitless, problem, arrays, shapes, tensors, workspace) {
  const {tokens, hidden, vocab, options, gradients, bias} = problem;
  const rows = Math.max(1, Math.min(tokens, Math.floor(CHECKED / (hidden * vocab))));
  const outputs = {loss: []};
  if (gradients) Object.assign(outputs, {gradInput: [rows, hidden], gradWeight: [vocab, hidden]}, bias ? {gradBias: [vocab]} : {});
  const expected = logitless.evaluate({
    kind: gradients ? 'linearCrossEntropyForwardBackward' : 'linearCrossEntropyForward',
    tensors: {...arrays, input: arrays.input.subarray(0, rows * hidden), target: arrays.target.subarray(0, rows)},
    shapes: {...shapes, input: [rows, hidden], target: [rows]}, outputs, bounds: true, ...options,
  });
  const shares = {};
  let greatest = 0;
  await using(logitless.linearCrossEntropy(callOf(tensors, problem, workspace, rows)), async (result) => {
    for (const [name, {value, bound}] of Object.entries(expected)) {
      const got = await result[name].read();
      let worst = 0;
      for (let i = 0; i < got.length; i++) {
        const error = Math.abs(got[i] - value[i]);
        if (!(error <= 0)) worst = Math.max(worst, bound[i] > 0 ? error / bound[i] : Infinity, Number.isNaN(error) ? Infinity : 0);
        if (name !== 'loss') greatest = Math.max(greatest, error);
      }
      shares[name] = worst;
    }
  });
  return {rows, shares, greatestGradientError: greatest};
}

// Bytes of workspace of a choice on the page.
function budgetOf({minimum, recommended}, {workspace, tokens, vocab}) {
  if (workspace === 'minimum') return minimum;
  return workspace === 'quarter' ? Math.max(minimum, Math.min(recommended, tokens * vocab)) : recommended;
}

// Bytes of workspace of a call as this page makes it; null of one that passes the device's limits.
function planned(logitless, shape) {
  try {
    return logitless.plan({...shape, gradientDtype: 'f32'});
  } catch (error) {
    if (error.code !== 'not_supported') throw error;
    return null;
  }
}

function showMemory(logitless, problem, used) {
  const {tokens, hidden, vocab, gradients, dtype} = problem;
  const sizes = [];
  for (let power = 10; power <= 18; power++) sizes.push(2 ** power);
  const planOf = (shape) => planned(logitless, {tokens, hidden, gradients, dtype, ...shape});
  const plans = sizes.map((v) => [v, planOf({vocab: v})]).filter(([, plan]) => plan);
  const curves = [
    {name: 'materialised logits', colour: 'var(--orange)', points: sizes.map((v) => [v, 4 * tokens * v])},
    {name: 'workspace, recommended', colour: 'var(--blue)', points: plans.map(([v, plan]) => [v, plan.recommended])},
    {name: 'workspace, minimum', colour: 'var(--green)', dashed: true, points: plans.map(([v, plan]) => [v, plan.minimum])},
  ];
  const all = curves.flatMap(({points}) => points.map(([, y]) => y)).filter((y) => y > 0);
  drawChart(at('memory-chart'), {
    title: `Memory beside inputs and gradients, for ${tokens} tokens of ${hidden}, by vocabulary`,
    x: {low: sizes[0], high: sizes.at(-1), log: true, label: `vocabulary V (N = ${tokens}, D = ${hidden})`, format: (v) => (v >= 1024 ? `${v / 1024}k` : String(v))},
    y: {low: Math.min(...all), high: Math.max(...all), log: true, format: bytesText},
    curves, here: vocab,
  });
  redraw = () => showMemory(logitless, problem, used);
  const materialised = 4 * tokens * vocab;
  at('memory').textContent =
    `${bytesText(used)} of workspace (${used} bytes); the f32 logits alone would take ${bytesText(materialised)}, ` +
    `${(materialised / Math.max(1, used)).toPrecision(3)} times as much`;
  const [n, v] = [4096, 131072];  // of a training step of today
  const step = planOf({tokens: n, vocab: v});
  at('memory-note').textContent =
    `A training step of ${n} tokens with a vocabulary of ${v / 1024}k would hold ${bytesText(4 * n * v)} of logits; ` +
    (step ? `here it takes ${bytesText(step.recommended)}, or ${bytesText(step.minimum)} at least.` : "it passes this device's limits here.");
}

async function runOnce(logitless) {
  const problem = readForm();
  at('progress').textContent = 'making the inputs…';
  const {arrays, shapes} = makeProblem(problem);
  const plan = logitless.plan({...problem, gradientDtype: 'f32'});
  const workspace = budgetOf(plan, problem);
  const dtypeOf = (name) => (name === 'target' ? 'i32' : problem.dtype);
  const upload = () => Object.fromEntries(Object.keys(arrays).map((name) => [name, logitless.tensor(arrays[name], shapes[name], dtypeOf(name))]));
  await using(upload(), async (tensors) => {
    at('progress').textContent = 'running…';
    const run = () => using(
        logitless.linearCrossEntropy(callOf(tensors, problem, workspace)),
        async (result) => ({loss: await result.loss.item(), used: result.workspaceBytes}));
    const [{loss, used}, first] = await timed(run);
    at('results').hidden = false;
    at('loss').textContent = `${loss.toPrecision(8)} nats`;
    at('time').textContent = `${first.toFixed(1)} ms, the first call (with any shaders still to be compiled)`;
    at('check').textContent = 'computing…';
    at('check').className = '';
    showMemory(logitless, problem, used);
    document.body.dataset.firstResult ??= String(performance.now());
    const times = [];
    for (let i = 0; i < 3; i++) times.push((await timed(run))[1]);
    const products = problem.gradients ? 3 : 1;
    const rate = products * 2 * problem.tokens * problem.hidden * problem.vocab / Math.min(...times) / 1e6;
    const on = isSoftware(logitless.device.adapterInfo) ? ' on a software adapter, without a GPU' : '';
    at('time').textContent = `${Math.min(...times).toFixed(1)} ms (best of 3, with the read of the loss; ${rate.toPrecision(3)} GFLOP/s${on}); the first call ${first.toFixed(1)} ms`;
    at('progress').textContent = 'the same in double precision…';
    await new Promise((resolve) => setTimeout(resolve, 20));
    showVerdict(problem, await judge(logitless, problem, arrays, shapes, tensors, workspace));
  });
  at('progress').textContent = '';
}

function showVerdict(problem, {rows, shares, greatestGradientError}) {
  const worst = Math.max(...Object.values(shares));
  const part = rows < problem.tokens ? ` (a call of the first ${rows} tokens)` : '';
  at('check').textContent =
    `${worst <= 1 ? 'within' : 'BEYOND'} the contract's bound${part}: ` +
    Object.entries(shares).map(([name, share]) => `${name} at ${(100 * share).toPrecision(2)} %`).join(', ') +
    (problem.gradients ? `; greatest gradient error ${greatestGradientError.toExponential(1)}` : '');
  at('check').className = worst <= 1 ? 'good' : 'bad';
}

// Chromium does not call its SwiftShader a fallback everywhere.
function isSoftware(info) {
  return Boolean(info?.isFallbackAdapter) || /swiftshader|llvmpipe|software/i.test(`${info?.architecture} ${info?.description}`);
}

function showDevice(logitless) {
  const info = logitless.device.adapterInfo ?? {};
  const names = [info.vendor, info.architecture, info.description].filter(Boolean).join(', ');
  const l = logitless.device.limits;
  at('adapter').textContent =
    `GPU: ${names || 'not named'}${isSoftware(info) ? ' (software)' : ''}; one binding up to ${bytesText(l.maxStorageBufferBindingSize)}, workgroups of up to ` +
    `${l.maxComputeInvocationsPerWorkgroup} with ${bytesText(l.maxComputeWorkgroupStorageSize)}.`;
}

async function start() {
  const why = await whyUnavailable();
  if (why) {
    at('adapter').hidden = true;
    at('absent').hidden = false;
    at('absent').textContent = `${why} Nothing on this page runs without it.`;
    document.body.classList.add('off');
    return;
  }
  const button = at('run');
  const run = async () => {
    button.disabled = true;
    at('progress').className = 'soft';
    try {
      await runOnce(await ready());
    } catch (error) {
      at('progress').className = 'bad';
      at('progress').textContent = error.message;
    }
    button.disabled = false;
  };
  button.addEventListener('click', () => at('options').reportValidity() && run());
  at('options').addEventListener('submit', (event) => event.preventDefault());
  let width = innerWidth;
  addEventListener('resize', () => {
    if (width !== innerWidth) redraw();
    width = innerWidth;
  });
  prepareTraining(ready);
  await run();
}

start().catch((error) => {
  at('absent').hidden = false;
  at('absent').textContent = error.message;
});

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
  const result = logitless.linearCrossEntropy(callOf(tensors, problem, workspace, rows));
  const outputs = {loss: []};
  if (gradients) Object.assign(outputs, {gradInput: [rows, hidden], gradWeight: [vocab, hidden]}, bias ? {gradBias: [vocab]} : {});
  const expected = logitless.evaluate({
    kind: gradients ? 'linearCrossEntropyForwardBackward' : 'linearCrossEntropyForward',
    tensors: {...arrays, input: arrays.input.subarray(0, rows * hidden), target: arrays.target.subarray(0, rows)},
    shapes: {...shapes, input: [rows, hidden], target: [rows]}, outputs, bounds: true, ...options,
  });
  const shares = {};
  let least = 0;
  for (const [name, {value, bound}] of Object.entries(expected)) {
    const got = await result[name].read();
    let worst = 0;
    for (let i = 0; i < got.length; i++) {
      const error = Math.abs(got[i] - value[i]);
      if (!(error <= 0)) worst = Math.max(worst, bound[i] > 0 ? error / bound[i] : Infinity, Number.isNaN(error) ? Infinity : 0);
      if (name !== 'loss') least = Math.max(least, error);
    }
    shares[name] = worst;
  }
  for (const name of Object.keys(outputs)) result[name].destroy();
  return {rows, shares, loss: expected.loss.value[0], greatestGradientError: least};
}

// Bytes of workspace of a choice on the page.
function budgetOf({minimum, recommended}, {workspace, tokens, vocab}) {
  if (workspace === 'minimum') return minimum;
  return workspace === 'quarter' ? Math.max(minimum, Math.min(recommended, tokens * vocab)) : recommended;
}

function showMemory(logitless, problem, used) {
  const {tokens, hidden, vocab, gradients, dtype} = problem;
  const sizes = [];
  for (let power = 10; power <= 18; power++) sizes.push(2 ** power);
  const plans = sizes.map((v) => logitless.plan({tokens, hidden, vocab: v, gradients, dtype}));
  const logits = sizes.map((v) => 4 * tokens * v);
  const curves = [
    {name: 'materialised logits', colour: 'var(--orange)', points: sizes.map((v, i) => [v, logits[i]])},
    {name: 'workspace, recommended', colour: 'var(--blue)', points: sizes.map((v, i) => [v, plans[i].recommended])},
    {name: 'workspace, minimum', colour: 'var(--green)', dashed: true, points: sizes.map((v, i) => [v, plans[i].minimum])},
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
}

async function runOnce(logitless) {
  const problem = readForm();
  at('progress').textContent = 'making the inputs…';
  const {arrays, shapes} = makeProblem(problem);
  const tensors = {};
  for (const name of Object.keys(arrays)) tensors[name] = logitless.tensor(arrays[name], shapes[name], name === 'target' ? 'i32' : problem.dtype);
  const plan = logitless.plan(problem);
  const workspace = budgetOf(plan, problem);
  at('progress').textContent = 'running…';
  const run = async () => {
    const result = logitless.linearCrossEntropy(callOf(tensors, problem, workspace));
    const loss = await result.loss.item();
    for (const name of ['loss', 'gradInput', 'gradWeight', 'gradBias']) result[name]?.destroy();
    return {loss, used: result.workspaceBytes};
  };
  const [{loss, used}, first] = await timed(run);
  at('results').hidden = false;
  at('loss').textContent = `${loss.toPrecision(8)} nats`;
  at('time').textContent = `${first.toFixed(1)} ms, the first call (with any shaders still to be compiled)`;
  at('check').textContent = 'computing…';
  showMemory(logitless, problem, used);
  document.body.dataset.firstResult = String(performance.now());
  const times = [];
  for (let i = 0; i < 3; i++) times.push((await timed(run))[1]);
  const products = problem.gradients ? 3 : 1;
  const rate = products * 2 * problem.tokens * problem.hidden * problem.vocab / Math.min(...times) / 1e6;
  at('time').textContent = `${Math.min(...times).toFixed(1)} ms (best of 3, with the read of the loss; ${rate.toPrecision(3)} GFLOP/s); the first call ${first.toFixed(1)} ms`;
  at('progress').textContent = 'the same in double precision…';
  await new Promise((resolve) => setTimeout(resolve, 20));
  const verdict = await judge(logitless, problem, arrays, shapes, tensors, workspace);
  const worst = Math.max(...Object.values(verdict.shares));
  const part = verdict.rows < problem.tokens ? ` (a call of the first ${verdict.rows} tokens)` : '';
  at('check').textContent =
    `${worst <= 1 ? 'within' : 'BEYOND'} the contract's bound${part}: ` +
    Object.entries(verdict.shares).map(([name, share]) => `${name} at ${(100 * share).toPrecision(2)} %`).join(', ') +
    (problem.gradients ? `; greatest gradient error ${verdict.greatestGradientError.toExponential(1)}` : '');
  at('check').className = worst <= 1 ? 'good' : 'bad';
  at('progress').textContent = '';
  for (const tensor of Object.values(tensors)) tensor.destroy();
}

async function start() {
  const why = await whyUnavailable();
  if (why) {
    at('adapter').hidden = true;
    at('absent').hidden = false;
    at('absent').textContent = `${why} Nothing on this page runs without it.`;
    return;
  }
  const limits = new URLSearchParams(location.search).get('limits') ?? undefined;
  const logitless = await Logitless.create({limits});
  const info = logitless.device.adapterInfo ?? {};
  const names = [info.vendor, info.architecture, info.description].filter(Boolean).join(', ');
  const l = logitless.device.limits;
  at('adapter').textContent =
    `GPU: ${names || 'not named'}${info.isFallbackAdapter ? ' (software)' : ''}; one binding up to ${bytesText(l.maxStorageBufferBindingSize)}, workgroups of up to ` +
    `${l.maxComputeInvocationsPerWorkgroup} with ${bytesText(l.maxComputeWorkgroupStorageSize)}.`;
  const button = at('run');
  const run = async () => {
    button.disabled = true;
    try {
      await runOnce(logitless);
    } catch (error) {
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
  prepareTraining(logitless);
  await run();
}

start().catch((error) => {
  at('absent').hidden = false;
  at('absent').textContent = error.message;
});

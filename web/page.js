// SPDX-License-Identifier: Apache-2.0
// The page: finds a GPU or says why there is none, runs one call, checks its errors, plots its memory.

import {bytesText, clearChart, drawChart} from './chart.js';
import {halves} from './halves.js';
import {Logitless, whyUnavailable} from './logitless.js';
import {drawn, showing, watching} from './progress.js';
import {prepareScoring} from './score.js';
import {using} from './tensor.js';
import {prepareTraining} from './train.js';

const at = (id) => document.getElementById(id);
// The most multiplications of one product in the double-precision check, about a second's worth.
const CHECKED = 2 ** 27;
// The form's defaults on a GPU, where such a call takes no longer than index.html's defaults on the CPU.
const ON_A_GPU = {tokens: 1024, vocab: 32768};
// The section that derives the bound.
const CONTRACT = 'document.html?docs/semantics.md#accuracy-promised-and-tested-per-element-against-the-double-reference';
const STEP = 4096;  // tokens of a typical training step
const NOT_FINITE = "The numbers of this call pass f32's largest, 3.4e38. Choose a smaller logit scale or z-loss, or a larger temperature.";

let instance = null;
const formText = () => new URLSearchParams(new FormData(at('options'))).toString();
const fields = watching(at('changed'), formText);

// Resolves to a Logitless, which is a new one if the last one's device was lost.
async function ready() {
  if (!instance || instance.isLost) {
    instance = await Logitless.create({limits: new URLSearchParams(location.search).get('limits') ?? undefined});
    showDevice(instance);
    fitToDevice(instance);
    instance.lost.then((why) => {
      at('lost').hidden = false;
      at('lost').textContent = `${why[0].toUpperCase()}${why.slice(1)} The next run asks for a new one.`;
    });
  }
  at('lost').hidden = true;
  return instance;
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

// An error that is the fault of the field with that name.
const faultOf = (name, sentence) => Object.assign(new Error(sentence), {field: name});

// Throws what is wrong with the first field that the browser refuses.
function refuseFields(form) {
  const field = form.querySelector('input:invalid');
  if (!field) return;
  const name = field.labels[0].firstChild.textContent.trim();
  const whole = field.step === 'any' ? '' : 'whole numbers, ';
  const range = field.max ? `${field.min} to ${field.max}` : field.min ? `${field.min} or more` : 'a number';
  throw faultOf(field.name, `${name} is ${field.value || 'not a number'}; allowed: ${whole}${range}.`);
}

function sentenceOf(error) {
  // JavaScript throws a RangeError for an array that is too large.
  if (error instanceof RangeError) return `This call is too large for this browser's memory (${error.message}).`;
  if (error.code === 'device_error') return `The device did not run this call: ${error.message}`;
  return error.message;
}

// Says what is wrong: below the row of the field at fault, or beside the button.
function complain(form, error) {
  // The library's messages begin with the option's name.
  const option = error.message.match(/^\w+/)?.[0].replace(/_(\w)/g, (_, letter) => letter.toUpperCase());
  const field = form.elements.namedItem(error.field ?? option ?? '');
  at('progress').className = 'bad';
  at('progress').textContent = field ? '' : sentenceOf(error);
  if (!field) return;
  const told = Object.assign(document.createElement('p'), {id: 'wrong', className: 'bad', textContent: sentenceOf(error)});
  field.labels[0].after(told);
  field.setAttribute('aria-invalid', 'true');
  field.setAttribute('aria-describedby', told.id);
  const folded = field.closest('details');
  if (folded) folded.open = true;
  field.focus();
}

function dropComplaint(form) {
  at('wrong')?.remove();
  for (const field of form.querySelectorAll('[aria-invalid]')) {
    field.removeAttribute('aria-invalid');
    field.removeAttribute('aria-describedby');
  }
}

// Throws if a tensor of the call is larger than the device's largest buffer.
function refuseSizes(logitless, {tokens, hidden, vocab, dtype, gradients}) {
  const most = logitless.device.limits.maxBufferSize;
  const bytes = dtype === 'f16' && !gradients ? 2 : 4;  // gradients are f32
  for (const [name, what, rows, sizes] of [['tokens', 'hidden states', tokens, 'N or D'], ['vocab', 'vocabulary', vocab, 'V or D']]) {
    const size = rows * hidden * bytes;
    if (size > most) throw faultOf(name, `This call is too large: its ${what} [${rows}, ${hidden}] take ${bytesText(size)}, and a buffer of this device holds ${bytesText(most)}. Choose a smaller ${sizes}.`);
  }
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

// The outputs in double precision, with bounds; null if they do not fit into the module's memory.
function evaluated(logitless, call) {
  try {
    return logitless.evaluate({...call, bounds: true});
  } catch (error) {
    if (!/out of memory/.test(error.message)) throw error;
    return null;
  }
}

// The greatest error of every output, as a share of the contract's bound, or null; of a large call's first tokens.
async function judge(logitless, problem, arrays, shapes, tensors, workspace) {
  const {tokens, hidden, vocab, options, gradients, bias} = problem;
  const rows = Math.max(1, Math.min(tokens, Math.floor(CHECKED / (hidden * vocab))));
  const outputs = {loss: []};
  if (gradients) Object.assign(outputs, {gradInput: [rows, hidden], gradWeight: [vocab, hidden]}, bias ? {gradBias: [vocab]} : {});
  const expected = evaluated(logitless, {
    kind: gradients ? 'linearCrossEntropyForwardBackward' : 'linearCrossEntropyForward',
    tensors: {...arrays, input: arrays.input.subarray(0, rows * hidden), target: arrays.target.subarray(0, rows)},
    shapes: {...shapes, input: [rows, hidden], target: [rows]}, outputs, ...options,
  });
  if (!expected) return null;
  const shares = {};
  let greatest = 0;
  await using(logitless.linearCrossEntropy(callOf(tensors, problem, workspace, rows)), async (result) => {
    for (const [name, {value, bound}] of Object.entries(expected)) {
      const got = await result[name].read();
      let worst = 0;
      for (let i = 0; i < got.length; i++) {
        if (!(Math.abs(value[i]) <= 3.4e38)) throw new Error(NOT_FINITE);
        const error = Math.abs(got[i] - value[i]);
        if (!(error <= 0)) worst = Math.max(worst, bound[i] > 0 ? error / bound[i] : Infinity, Number.isNaN(error) ? Infinity : 0);
        if (name !== 'loss') greatest = Math.max(greatest, error);
      }
      shares[name] = worst;
    }
  });
  return {rows, shares, greatestGradientError: greatest};
}

// The bytes that the form's choice of workspace means.
function budgetOf({minimum, recommended}, {workspace, tokens, vocab}) {
  if (workspace === 'minimum') return minimum;
  return workspace === 'quarter' ? Math.max(minimum, Math.min(recommended, tokens * vocab)) : recommended;
}

// The workspace sizes of a call as this page makes it; null if the call passes the device's limits.
function planned(logitless, shape) {
  try {
    return logitless.plan({...shape, gradientDtype: 'f32'});
  } catch (error) {
    if (error.code !== 'not_supported') throw error;
    return null;
  }
}

// Plots memory against tokens, from 16 to 64k, for this call's vocabulary.
function showMemory(logitless, problem, used) {
  const {tokens, hidden, vocab, gradients, dtype} = problem;
  const sizes = [];
  for (let power = 4; power <= 16; power++) sizes.push(2 ** power);
  const planOf = (shape) => planned(logitless, {tokens, hidden, vocab, gradients, dtype, ...shape});
  const plans = sizes.map((n) => [n, planOf({tokens: n})]).filter(([, plan]) => plan);
  const curves = [
    {name: 'f32 logits [N, V]', colour: 'var(--orange)', points: sizes.map((n) => [n, 4 * n * vocab])},
    {name: 'recommended', colour: 'var(--blue)', points: plans.map(([n, plan]) => [n, plan.recommended])},
    {name: 'minimum (slower)', colour: 'var(--green)', dashed: true, points: plans.map(([n, plan]) => [n, plan.minimum])},
  ];
  const all = [used, ...curves.flatMap(({points}) => points.map(([, y]) => y))].filter((y) => y > 0);
  const thousands = (v) => (v >= 1024 ? `${v / 1024}k` : String(v));
  drawChart(at('memory-chart'), {
    title: `Memory beside inputs and gradients by tokens, for a vocabulary of ${vocab} and hidden states of ${hidden}`,
    x: {low: Math.min(tokens, sizes[0]), high: sizes.at(-1), log: true, label: `tokens N (V = ${vocab}, D = ${hidden})`, format: thousands},
    y: {low: Math.min(...all), high: Math.max(...all), log: true, label: 'memory', format: bytesText},
    curves, at: {x: STEP, name: 'a training step'}, dot: {x: tokens, y: Math.max(1, used), name: 'this call'},
  });
  sayMemory(problem, used, planOf({}));
  const told = (v) => {
    const plan = planOf({tokens: STEP, vocab: v});
    const here = plan ? `${bytesText(plan.recommended)} of workspace (at least ${bytesText(plan.minimum)})` : "which passes this device's limits";
    return `${bytesText(4 * STEP * v)} of logits, ${here}`;
  };
  at('memory-note').textContent = `A training step of ${STEP} tokens: ${told(vocab)}; with V = ${2 ** 17}, ${told(2 ** 17)}.`;
}

// Compares the workspace with the f32 logits and their gradient, which a simple implementation stores.
function sayMemory({tokens, vocab, gradients}, used, plan) {
  const logits = 4 * tokens * vocab;
  const held = gradients ? 2 * logits : logits;
  const [whole, name] = used < logits ? [logits, 'logits'] : [held, gradients ? 'logits and their gradient' : 'logits'];
  if (used < held) {
    at('memory').textContent = `${bytesText(used)} of workspace instead of ${bytesText(whole)} of ${name}`;
    at('memory-meaning').textContent =
      `What the call takes beside inputs and gradients; f32 ${name} are ${(whole / Math.max(1, used)).toPrecision(3)} times as much.`;
    return;
  }
  at('memory').textContent = `${bytesText(used)} of workspace: nothing is saved at this size`;
  const least = plan && plan.minimum < held ? `; the workspace "minimum" takes ${bytesText(plan.minimum)}` : '';
  at('memory-meaning').textContent = `f32 ${name} are ${bytesText(held)}${least}.`;
}

// After a refused call, an earlier call's results would mislead.
function clearResults() {
  fields.forget();
  at('results').hidden = true;
  clearChart(at('memory-chart'));
  at('memory-note').textContent = '';
}

async function runOnce(logitless) {
  const problem = readForm();
  const asIs = formText();
  refuseSizes(logitless, problem);
  at('progress').textContent = 'making the inputs…';
  await drawn();
  const {arrays, shapes} = makeProblem(problem);
  const plan = logitless.plan({...problem, gradientDtype: 'f32'});
  const workspace = budgetOf(plan, problem);
  const dtypeOf = (name) => (name === 'target' ? 'i32' : problem.dtype);
  const upload = () => Object.fromEntries(Object.keys(arrays).map((name) => [name, logitless.tensor(arrays[name], shapes[name], dtypeOf(name))]));
  await using(upload(), async (tensors) => {
    const run = () => using(
        logitless.linearCrossEntropy(callOf(tensors, problem, workspace)),
        async (result) => ({loss: await result.loss.item(), used: result.workspaceBytes}));
    const {asked} = logitless.pipelines;
    const [{loss, used}, first] = await timed(() => showing(at('progress'), logitless, run));
    // A loss that is not a number is a fault if the exact one is; else nothing is shown.
    const verdict = () => judge(logitless, problem, arrays, shapes, tensors, workspace);
    const early = Number.isFinite(loss) ? null : await verdict();
    if (!early && !Number.isFinite(loss)) throw new Error(NOT_FINITE);
    at('results').hidden = false;
    fields.keep(asIs);
    showLoss(problem, loss, arrays.target);
    at('time').textContent = `the first call ${first.toFixed(1)} ms`;
    at('time-meaning').textContent = logitless.pipelines.asked > asked ? 'Most of it compiles shaders.' : '';
    at('check').textContent = 'computing…';
    at('check').className = '';
    at('check-meaning').textContent = '';
    showMemory(logitless, problem, used);
    document.body.dataset.firstResult ??= String(performance.now());
    at('progress').textContent = 'three calls more…';
    const times = [];
    for (let i = 0; i < 3; i++) times.push((await timed(run))[1]);
    showTime(logitless, problem, Math.min(...times), first);
    at('progress').textContent = 'the same in double precision…';
    await drawn();
    showVerdict(problem, early ?? await verdict());
  });
  at('progress').textContent = '';
}

function showLoss({vocab, options}, loss, targets) {
  at('loss').textContent = `${loss.toPrecision(8)} nats`;
  at('loss-meaning').textContent = targets.every((target) => target < 0) ? 'Every token is ignored, so the loss is 0.' :
    `The ${options.reduction} over the tokens of −log p(target); a random guess costs ln ${vocab} = ${Math.log(vocab).toFixed(2)} a token.`;
}

// The rate is shown only for a GPU: a software adapter's means nothing for one.
function showTime(logitless, {tokens, hidden, vocab, gradients}, best, first) {
  at('time').textContent = `${best.toFixed(1)} ms a call; the first call ${first.toFixed(1)} ms`;
  const rate = (gradients ? 3 : 1) * 2 * tokens * hidden * vocab / best / 1e6;
  at('time-meaning').textContent =
    'The best of 3, until the loss is read; the first also compiles shaders that are new. ' +
    (isSoftware(logitless.device.adapterInfo) ? 'This adapter is software, on the CPU: it says nothing of a GPU.' : `The matrix products alone: ${rate.toPrecision(3)} GFLOP/s.`);
}

function showVerdict(problem, judged) {
  if (!judged) {
    at('check').textContent = 'not checked';
    at('check').className = 'soft';
    at('check-meaning').textContent = "Double precision of this call takes more memory than WebAssembly has: choose a smaller V or D to check it.";
    return;
  }
  const {rows, shares, greatestGradientError} = judged;
  const worst = Math.max(...Object.values(shares));
  const part = rows < problem.tokens ? ` (a call of the first ${rows} tokens)` : '';
  const bound = Object.assign(document.createElement('a'), {href: CONTRACT, textContent: "the contract's bound"});
  at('check').replaceChildren(
    worst <= 1 ? 'within ' : 'BEYOND ', bound,
    `${part}: ` + Object.entries(shares).map(([name, share]) => `${name} ${(100 * share).toPrecision(2)}\u00a0%`).join(', '));
  at('check').className = worst <= 1 ? 'good' : 'bad';
  at('check-meaning').textContent =
    'The worst element of each, in % of what rounding may cost' +
    (problem.gradients ? `; greatest gradient error ${greatestGradientError.toExponential(1)}.` : '.');
}

// Chromium does not always set isFallbackAdapter for its SwiftShader.
function isSoftware(info) {
  return Boolean(info?.isFallbackAdapter) || /swiftshader|llvmpipe|software/i.test(`${info?.architecture} ${info?.description}`);
}

function showDevice(logitless) {
  const info = logitless.device.adapterInfo ?? {};
  const names = [info.vendor, info.architecture, info.description].filter(Boolean).join(', ');
  const l = logitless.device.limits;
  at('where').textContent = isSoftware(info) ? 'on a software adapter' : "on this machine's GPU";
  at('adapter').textContent =
    `${isSoftware(info) ? 'No GPU, but a software adapter on the CPU' : 'GPU'}: ${names || 'not named'}; one binding up to ` +
    `${bytesText(l.maxStorageBufferBindingSize)}, workgroups of up to ${l.maxComputeInvocationsPerWorkgroup} with ${bytesText(l.maxComputeWorkgroupStorageSize)}.`;
}

// Sets only fields that have their default value: others were filled by the visitor or the browser.
function fitToDevice(logitless) {
  if (isSoftware(logitless.device.adapterInfo)) return;
  for (const [name, value] of Object.entries(ON_A_GPU)) {
    const field = at('options').elements[name];
    if (field.value === field.defaultValue) field.value = value;
  }
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
  const [button, form] = [at('run'), at('options')];
  const run = async () => {
    button.disabled = true;
    dropComplaint(form);
    at('progress').className = 'soft';
    try {
      refuseFields(form);
      await runOnce(await ready());
    } catch (error) {
      clearResults();
      complain(form, error);
    }
    button.disabled = false;
  };
  button.addEventListener('click', run);
  form.addEventListener('submit', (event) => event.preventDefault());
  form.addEventListener('input', () => {
    dropComplaint(form);
    fields.look();
  });
  prepareTraining(ready, prepareScoring());
  await run();
}

start().catch((error) => {
  at('absent').hidden = false;
  at('absent').textContent = error.message;
});

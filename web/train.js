// SPDX-License-Identifier: Apache-2.0
// A small model trained live on the visitor's text: h = tanh(sum of the last three tokens' rows, each from
// its own table); the head [V, D] and its bias live on the GPU, where logitless makes loss and gradients and
// Adagrad applies them. The tables are on the CPU: a step touches at most 3 N of their 3 V rows.

import {drawChart} from './chart.js';
import {showing} from './progress.js';

const CONTEXT = 3;
const HIDDEN = 64;
const TOKENS = 64;  // of a step
const MOST_TOKENS = 8192;  // of the vocabulary; rarer ones are not predicted
const RATE = 0.1;

export const DEFAULT_TEXT = `The last layer of a language model is a question with many thousands of answers. The model reads a few words and gives every word of its vocabulary a score, and the loss asks how much of the score went to the word that really came next. A score for every word and every position makes a very large table, and the table is the largest thing in the whole step of training. Nobody needs the table. The loss needs one number for every position, and the gradient needs two sums over the table. So the table can be made a window at a time, used, and forgotten. A window of the vocabulary is multiplied, its largest score is kept, its exponentials are added, and the next window takes its place. When the last window is done the loss is known, and the windows come by once more for the gradient. The model learns the same thing, word by word, and the memory stays small. The words that come often are learned first. The words that come rarely are learned last, or not at all.`;

// Adagrad on the GPU, one invocation per element; `gradient` is the buffer that logitless writes.
const ADAGRAD = `
@group(0) @binding(0) var<storage, read_write> value: array<f32>;
@group(0) @binding(1) var<storage, read_write> squares: array<f32>;
@group(0) @binding(2) var<storage, read> gradient: array<f32>;
override rate: f32;
@compute @workgroup_size(256)
fn adagrad(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  let i = id.x + id.y * groups.x * 256u;
  if (i < arrayLength(&value)) {
    let g = gradient[i];
    squares[i] += g * g;
    value[i] -= rate * g * inverseSqrt(squares[i] + 1e-10);
  }
}`;

function split(text, letters) {
  return letters ? [...text.toLowerCase().replace(/\s+/g, ' ')] : text.toLowerCase().match(/[\p{L}\p{N}'’]+|[^\s\p{L}\p{N}]/gu) ?? [];
}

// Numbers the pieces by frequency. Those beyond the vocabulary become -100, which the loss ignores.
function readText(text, letters) {
  const pieces = split(text, letters);
  const counts = new Map();
  for (const piece of pieces) counts.set(piece, (counts.get(piece) ?? 0) + 1);
  const vocabulary = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a)).slice(0, MOST_TOKENS);
  const numbers = new Map(vocabulary.map((piece, i) => [piece, i]));
  const entropy = vocabulary.reduce((sum, piece) => {
    const p = counts.get(piece) / pieces.length;
    return sum - p * Math.log(p);
  }, 0);
  return {vocabulary, tokens: Int32Array.from(pieces, (piece) => numbers.get(piece) ?? -100), entropy};
}

class Model {
  constructor(logitless, vocab) {
    this.logitless = logitless;
    this.vocab = vocab;
    const random = (size, spread) => Float32Array.from({length: size}, () => spread * (Math.random() * 2 - 1));
    this.tables = Array.from({length: CONTEXT}, () => random(vocab * HIDDEN, 0.3));
    this.squares = this.tables.map((table) => new Float32Array(table.length));
    const zeros = (...shape) => logitless.empty(shape);
    this.weight = logitless.tensor(random(vocab * HIDDEN, 0.1), [vocab, HIDDEN]);
    this.bias = zeros(vocab);
    this.input = zeros(TOKENS, HIDDEN);
    this.target = logitless.empty([TOKENS], 'i32');
    this.outputs = {loss: zeros(), gradInput: zeros(TOKENS, HIDDEN), gradWeight: zeros(vocab, HIDDEN), gradBias: zeros(vocab)};
    this.sums = [zeros(vocab, HIDDEN), zeros(vocab)];
    const {device} = logitless;
    this.adagrad = device.createComputePipeline({
      layout: 'auto', compute: {module: device.createShaderModule({code: ADAGRAD}), constants: {rate: RATE}},
    });
    const group = (value, squares, gradient) => device.createBindGroup({
      layout: this.adagrad.getBindGroupLayout(0),
      entries: [value, squares, gradient].map((tensor, binding) => ({binding, resource: {buffer: tensor.buffer}})),
    });
    this.updates = [
      [group(this.weight, this.sums[0], this.outputs.gradWeight), vocab * HIDDEN],
      [group(this.bias, this.sums[1], this.outputs.gradBias), vocab],
    ];
  }

  destroy() {
    const {weight, bias, input, target, outputs, sums} = this;
    for (const tensor of [weight, bias, input, target, ...Object.values(outputs), ...sums]) tensor.destroy();
  }

  // h [n, D] of the tokens before each place.
  hidden(tokens, places) {
    const h = new Float32Array(places.length * HIDDEN);
    places.forEach((place, row) => {
      for (let c = 0; c < CONTEXT; c++) {
        const token = tokens[place - 1 - c] ?? -1;
        if (token < 0) continue;
        for (let d = 0; d < HIDDEN; d++) h[row * HIDDEN + d] += this.tables[c][token * HIDDEN + d];
      }
    });
    return h.map(Math.tanh);
  }

  #updateTables(tokens, places, h, gradient) {
    places.forEach((place, row) => {
      for (let c = 0; c < CONTEXT; c++) {
        const token = tokens[place - 1 - c] ?? -1;
        if (token < 0) continue;
        for (let d = 0; d < HIDDEN; d++) {
          const i = row * HIDDEN + d;
          const g = gradient[i] * (1 - h[i] * h[i]);
          const at = token * HIDDEN + d;
          this.squares[c][at] += g * g;
          this.tables[c][at] -= RATE * g / Math.sqrt(this.squares[c][at] + 1e-10);
        }
      }
    });
  }

  async step(tokens) {
    const places = Array.from({length: TOKENS}, () => Math.floor(Math.random() * tokens.length));
    const h = this.hidden(tokens, places);
    this.input.write(h);
    this.target.write(Int32Array.from(places, (place) => tokens[place]));
    const {device} = this.logitless;
    this.logitless.linearCrossEntropy({
      input: this.input, weight: this.weight, bias: this.bias, target: this.target, gradients: true, ...this.outputs,
    });
    const encoder = device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    pass.setPipeline(this.adagrad);
    for (const [group, size] of this.updates) {
      const groups = Math.ceil(size / 256);
      pass.setBindGroup(0, group);
      pass.dispatchWorkgroups(Math.min(groups, 65535), Math.ceil(groups / 65535));
    }
    pass.end();
    device.queue.submit([encoder.finish()]);
    const [loss, gradient] = await Promise.all([this.outputs.loss.item(), this.outputs.gradInput.read()]);
    this.#updateTables(tokens, places, h, gradient);
    return loss;
  }

  async write(start, length) {
    const [weight, bias] = await Promise.all([this.weight.read(), this.bias.read()]);
    const tokens = [...start];
    for (let n = 0; n < length; n++) {
      const h = this.hidden(tokens, [tokens.length]);
      const scores = bias.map((b, j) => b + h.reduce((sum, value, d) => sum + value * weight[j * HIDDEN + d], 0));
      const highest = scores.reduce((a, b) => Math.max(a, b));
      const weights = scores.map((score) => Math.exp((score - highest) / 0.7));
      let left = Math.random() * weights.reduce((a, b) => a + b, 0);
      let next = 0;
      while (next < weights.length - 1 && (left -= weights[next]) > 0) next++;
      tokens.push(next);
    }
    return tokens.slice(start.length);
  }
}

function join(pieces, letters) {
  return letters ? pieces.join('') : pieces.join(' ').replace(/ ([.,;:!?)’'])/g, '$1');
}

function drawLosses(losses, entropy) {
  const smooth = [];
  let mean = losses[0];
  losses.forEach((loss, i) => {
    mean += (loss - mean) * Math.max(0.05, 1 / (i + 1));
    smooth.push([i + 1, mean]);
  });
  const most = Math.max(losses[0], entropy) * 1.05;
  drawChart(document.getElementById('loss-chart'), {
    title: 'Loss of every step of training',
    x: {low: 1, high: Math.max(10, losses.length), label: 'step of training', format: (v) => String(Math.round(v))},
    y: {low: 0, high: most, label: 'loss of a token, nats (running mean)', format: (v) => v.toPrecision(2)},
    curves: [
      {name: 'this model', colour: 'var(--blue)', points: smooth},
      {name: 'word counts alone', colour: 'var(--orange)', dashed: true, points: [[1, entropy], [Math.max(10, losses.length), entropy]]},
    ],
  });
}

async function train(logitless, at, running) {
  const letters = at('letters').checked;
  const {vocabulary, tokens, entropy} = readText(at('text').value, letters);
  if (tokens.length < 10 || vocabulary.length < 2) throw new Error('The text is too short: at least ten words.');
  const model = new Model(logitless, vocabulary.length);
  const losses = [];
  let shown = performance.now();
  let spent = 0;
  try {
    while (running()) {
      const start = performance.now();
      losses.push(losses.length > 0 ? await model.step(tokens) : await showing(at('state'), logitless, () => model.step(tokens)));
      spent += performance.now() - start;
      if (losses.length === 1 || performance.now() - shown > 250) {
        shown = performance.now();
        drawLosses(losses, entropy);
        at('state').textContent = `step ${losses.length}, loss ${losses.at(-1).toFixed(3)}, ${(spent / losses.length).toFixed(0)} ms a step; ${tokens.length} tokens, vocabulary ${vocabulary.length}`;
        await new Promise((resolve) => setTimeout(resolve));
      }
      if (losses.length === 1 || losses.length % 25 === 0) {
        const written = await model.write(tokens.slice(0, CONTEXT), letters ? 160 : 40);
        at('written').hidden = false;
        at('written-after').textContent = losses.length === 1 ? '1 step' : `${losses.length} steps`;
        at('sample').textContent = join(written.map((token) => vocabulary[token]), letters);
      }
    }
  } finally {
    model.destroy();
  }
}

// `ready` resolves to a Logitless whose device is not lost.
export function prepareTraining(ready) {
  const at = (id) => document.getElementById(id);
  if (!at('text').value) at('text').value = DEFAULT_TEXT;
  const button = at('start');
  let running = false;
  button.disabled = false;
  button.addEventListener('click', async () => {
    running = !running;
    button.textContent = running ? 'Stop' : 'Train';
    if (!running) return;
    at('state').className = 'soft';
    try {
      await train(await ready(), at, () => running);
    } catch (error) {
      at('state').className = 'bad';
      at('state').textContent = error.message;
    }
    running = false;
    button.textContent = 'Train';
  });
}

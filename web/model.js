// SPDX-License-Identifier: Apache-2.0
// A small model of a text: h = tanh(sum of the last three tokens' rows, each from its own table); the head [V, D] and
// its bias live on the GPU, where logitless makes loss, gradients and statistics, and Adagrad applies the gradients.
// The tables are on the CPU: a step touches at most 3 N of their 3 V rows.

import {using} from './tensor.js';

export const CONTEXT = 3;
const HIDDEN = 64;
const TOKENS = 64;  // of a step
const RATE = 0.1;
const MOST_CHARACTERS = 2e6;
const WORD = /[\p{L}\p{M}\p{N}'’]+|[^\s\p{L}\p{M}\p{N}]/gu;
const LETTER = /\s+|\S/gu;

// A number and its noun.
export const counted = (n, noun) => `${n.toLocaleString('en')} ${noun}${n === 1 ? '' : 's'}`;

// The pieces of a text, words or letters: as written and where, and as the model knows them.
export function split(text, letters) {
  if (text.length > MOST_CHARACTERS) throw new Error(`The text has ${counted(text.length, 'character')}; at most ${counted(MOST_CHARACTERS, 'character')} can be read.`);
  return Array.from(text.matchAll(letters ? LETTER : WORD), ({0: written, index}) => ({written, index, piece: written.toLowerCase().replace(/\s+/g, ' ')}));
}

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

export class Model {
  constructor(logitless, vocabulary, letters) {
    this.logitless = logitless;
    this.vocabulary = vocabulary;
    this.letters = letters;
    this.numbers = new Map(vocabulary.map((piece, i) => [piece, i]));
    this.steps = 0;
    const vocab = vocabulary.length;
    const random = (size, spread) => Float32Array.from({length: size}, () => spread * (Math.random() * 2 - 1));
    this.tables = Array.from({length: CONTEXT}, () => random(vocab * HIDDEN, 0.3));
    this.squares = this.tables.map((table) => new Float32Array(table.length));
    this.tensors = [];
    const kept = (tensor) => {
      this.tensors.push(tensor);
      return tensor;
    };
    const zeros = (...shape) => kept(logitless.empty(shape));
    try {
      this.weight = kept(logitless.tensor(random(vocab * HIDDEN, 0.1), [vocab, HIDDEN]));
      this.bias = zeros(vocab);
      this.input = zeros(TOKENS, HIDDEN);
      this.target = kept(logitless.empty([TOKENS], 'i32'));
      this.outputs = {loss: zeros(), gradInput: zeros(TOKENS, HIDDEN), gradWeight: zeros(vocab, HIDDEN), gradBias: zeros(vocab)};
      this.sums = [zeros(vocab, HIDDEN), zeros(vocab)];
      this.#makeUpdates(logitless.device, vocab);
    } catch (error) {
      this.destroy();
      throw error;
    }
  }

  // Adagrad's steps of weight and bias.
  #makeUpdates(device, vocab) {
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

  // The numbers of pieces; -100, which the loss ignores, for those that are not in the vocabulary.
  tokens(pieces) {
    return Int32Array.from(pieces, ({piece}) => this.numbers.get(piece) ?? -100);
  }

  destroy() {
    for (const tensor of this.tensors) tensor.destroy();
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
    this.logitless.linearCrossEntropy({
      input: this.input, weight: this.weight, bias: this.bias, target: this.target, gradients: true, ...this.outputs,
    });
    const [loss, gradient] = await Promise.all([this.outputs.loss.item(), this.outputs.gradInput.read()]);
    // Tables and head change together, so that a score in between is of one step.
    this.#updateTables(tokens, places, h, gradient);
    this.#updateHead();
    this.steps++;
    return loss;
  }

  #updateHead() {
    const {device} = this.logitless;
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
  }

  // How well the model expected every token: the mean loss, and for each its logprob, its rank, and the likeliest one.
  async score(tokens) {
    const {logitless, weight, bias, steps} = this;
    const places = Array.from(tokens.keys());
    const call = {weight, bias, statistics: ['logprob', 'rank', 'argmax']};
    const read = async ({loss, logprob, rank, argmax}) => {
      const [mean, ...each] = await Promise.all([loss.item(), logprob.read(), rank.read(), argmax.read()]);
      return {steps, loss: mean, logprob: each[0], rank: each[1], argmax: each[2]};
    };
    return using({target: logitless.tensor(tokens)}, ({target}) => using(
        {input: logitless.tensor(this.hidden(tokens, places), [tokens.length, HIDDEN])},
        ({input}) => using(logitless.linearCrossEntropy({...call, input, target}), read)));
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

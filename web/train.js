// SPDX-License-Identifier: Apache-2.0
// The section that trains a small model on the visitor's text, plots its loss and shows what it writes.

import {clearChart, drawChart} from './chart.js';
import {CONTEXT, counted, Model, split} from './model.js';
import {showing, watching} from './progress.js';

const MOST_TOKENS = 8192;  // of the vocabulary; rarer ones are not predicted
const LEAST_TOKENS = 10;  // of a text

const DEFAULT_TEXT = `The last layer of a language model is a question with many thousands of answers. The model reads a few words and gives every word of its vocabulary a score, and the loss asks how much of the score went to the word that really came next. A score for every word and every position makes a very large table, and the table is the largest thing in the whole step of training. Nobody needs the table. The loss needs one number for every position, and the gradient needs two sums over the table. So the table can be made a window at a time, used, and forgotten. A window of the vocabulary is multiplied, its largest score is kept, its exponentials are added, and the next window takes its place. When the last window is done the loss is known, and the windows come by once more for the gradient. The model learns the same thing, word by word, and the memory stays small. The words that come often are learned first. The words that come rarely are learned last, or not at all.`;

// The model's vocabulary, by frequency; the text's pieces; and the loss of who knows only how often each comes.
function readText(text, letters) {
  const pieces = split(text, letters);
  const noun = letters ? 'letter' : 'word';
  if (pieces.length < LEAST_TOKENS) throw new Error(`The text has ${counted(pieces.length, noun)}; training takes at least ${counted(LEAST_TOKENS, noun)}.`);
  const counts = new Map();
  for (const {piece} of pieces) counts.set(piece, (counts.get(piece) ?? 0) + 1);
  if (counts.size < 2) throw new Error(`The text repeats one ${noun}; training takes at least two different ones.`);
  const vocabulary = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a)).slice(0, MOST_TOKENS);
  const entropy = vocabulary.reduce((sum, piece) => {
    const p = counts.get(piece) / pieces.length;
    return sum - p * Math.log(p);
  }, 0);
  return {vocabulary, pieces, entropy};
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

// Trains the model while running() is true, and shows and scores what it has learned.
async function train(model, {pieces, entropy}, at, running, score) {
  const {letters, vocabulary} = model;
  const tokens = model.tokens(pieces);
  const losses = [];
  let shown = performance.now();
  let spent = 0;
  const tell = () => {
    drawLosses(losses, entropy);
    at('state').textContent = `step ${losses.length}, loss ${losses.at(-1).toFixed(3)}, ${(spent / losses.length).toFixed(0)} ms a step; ${tokens.length} tokens, vocabulary ${vocabulary.length}`;
  };
  while (running()) {
    const start = performance.now();
    losses.push(losses.length > 0 ? await model.step(tokens) : await showing(at('state'), model.logitless, () => model.step(tokens)));
    spent += performance.now() - start;
    if (losses.length === 1 || performance.now() - shown > 250) {
      shown = performance.now();
      tell();
      await new Promise((resolve) => setTimeout(resolve));
    }
    if (losses.length === 1 || losses.length % 25 === 0) {
      const written = await model.write(tokens.slice(0, CONTEXT), letters ? 160 : 40);
      at('written').hidden = false;
      at('written-after').textContent = counted(losses.length, 'step');
      at('sample').textContent = join(written.map((token) => vocabulary[token]), letters);
      await score(model);
    }
  }
  if (losses.length === 0) return;
  tell();
  await score(model);
}

// `ready` resolves to a Logitless whose device is not lost; `score` is told of every model, and of null if there is none.
export function prepareTraining(ready, score) {
  const at = (id) => document.getElementById(id);
  if (!at('text').value) at('text').value = DEFAULT_TEXT;
  const button = at('start');
  const fields = watching(at('text-changed'), () => `${at('letters').checked} ${at('text').value}`);
  for (const id of ['text', 'letters']) at(id).addEventListener('input', fields.look);
  let model = null;
  let running = false;
  const clear = () => {
    score(null);
    model?.destroy();
    model = null;
    fields.forget();
    clearChart(at('loss-chart'));
    at('written').hidden = true;
  };
  const run = async () => {
    clear();
    at('state').className = 'soft';
    at('state').textContent = '';
    try {
      const letters = at('letters').checked;
      const text = readText(at('text').value, letters);
      fields.keep();
      model = new Model(await ready(), text.vocabulary, letters);
      await train(model, text, at, () => running, score);
    } catch (error) {
      clear();
      at('state').className = 'bad';
      at('state').textContent = error.message;
    }
    running = false;
    button.disabled = false;
    button.textContent = 'Train';
  };
  button.disabled = false;
  button.addEventListener('click', () => {
    running = !running;
    button.textContent = 'Stop';
    button.disabled = !running;  // until the last step has ended
    if (running) run();
  });
}

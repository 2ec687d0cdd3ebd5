// SPDX-License-Identifier: Apache-2.0
// The section that scores the visitor's text: how well the trained model expected every word of it.

import {counted, split} from './model.js';
import {showing} from './progress.js';

const MOST_PIECES = 4096;
const NAMED = 8;  // unknown words that the summary names
// A word's colour is the number of these that its probability is below; index.html has the legend.
const LEVELS = [0.5, 0.1, 0.01, 0.001];
const NO_MODEL = 'Train a model above first: then every word here gets its probability.';

const at = (id) => document.getElementById(id);
const percent = (p) => `${p < 0.0995 ? Number((100 * p).toPrecision(2)) : Math.round(100 * p)}\u00a0%`;

function element(name, text, attributes = {}) {
  return Object.assign(document.createElement(name), {textContent: text, ...attributes});
}

// The text's pieces and their numbers; throws a sentence if none can be scored.
function readText(text, model) {
  const noun = model.letters ? 'letter' : 'word';
  const pieces = split(text, model.letters);
  if (pieces.length === 0) throw new Error(`There is no ${noun} to score: type or paste a text.`);
  if (pieces.length > MOST_PIECES) throw new Error(`The text has ${counted(pieces.length, noun)}; at most ${counted(MOST_PIECES, noun)} are scored at once.`);
  const tokens = model.tokens(pieces);
  if (tokens.every((token) => token < 0)) throw new Error(`The model knows no ${noun} of this text, so nothing can be scored: it knows only what it was trained on.`);
  return {pieces, tokens, noun};
}

function showSummary({vocabulary}, {pieces, tokens, noun}, {steps, loss}) {
  const unknown = pieces.filter((_, i) => tokens[i] < 0).map(({piece}) => piece);
  const perplexity = Math.exp(loss).toPrecision(3);
  at('perplexity').textContent =
    `Perplexity ${Number(perplexity)} over ${counted(pieces.length - unknown.length, noun)}, after ${counted(steps, 'step')} of training. ` +
    `A blind guess among the ${counted(vocabulary.length, noun)} it knows would have ${vocabulary.length}.`;
  const names = [...new Set(unknown)].map((name) => (name.length > 30 ? `${name.slice(0, 30)}…` : name));
  const more = names.length > NAMED ? ` and ${names.length - NAMED} more` : '';
  at('unknown').hidden = unknown.length === 0;
  at('unknown').textContent =
    `Unknown to the model: ${names.slice(0, NAMED).join(', ')}${more}. What is unknown gets no probability, ` +
    `is left out of the perplexity, and counts as no ${noun} for what comes after it.`;
}

// Shows the text as it is written, every piece in the colour of its probability, and a table of all.
function showWords({vocabulary}, text, {pieces, tokens}, {logprob, rank, argmax}) {
  const [words, rows] = [[], []];
  let end = 0;
  pieces.forEach(({written, index, piece}, i) => {
    const known = tokens[i] >= 0;
    const p = Math.exp(logprob[i]);
    const cells = known
      ? [percent(p), logprob[i].toFixed(3), String(rank[i] + 1), vocabulary[argmax[i]]]
      : ['unknown', '–', '–', '–'];
    const className = known ? `p${LEVELS.filter((level) => p < level).length}` : 'unknown';
    const title = known ? `${cells[0]}, rank ${cells[2]} of ${vocabulary.length}` : 'unknown to the model';
    words.push(text.slice(end, index), element('span', written, {className, title}));
    end = index + written.length;
    const row = element('tr', '');
    row.append(...[piece, ...cells].map((cell) => element('td', cell === ' ' ? '␣' : cell)));
    rows.push(row);
  });
  at('words').replaceChildren(...words, text.slice(end));
  at('scores').replaceChildren(...rows);
}

// Returns a function that takes the model to score with, or null if there is none, and resolves when that is shown.
export function prepareScoring() {
  const field = at('score-text');
  const scored = at('scored');
  let model = null;
  let asked = 0;
  let running = null;

  const tell = (sentence, className = 'soft') => {
    scored.hidden = true;
    at('score-state').textContent = sentence;
    at('score-state').className = className;
  };
  const once = async () => {
    const [text, used] = [field.value, model];
    if (!used) return tell(NO_MODEL);
    const isLatest = () => field.value === text && model === used;
    try {
      const read = readText(text, used);
      const work = () => used.score(read.tokens);
      const stands = !scored.hidden && scored.className === '';
      const result = stands ? await work() : await showing(at('score-state'), used.logitless, work);
      if (!isLatest()) return;
      showSummary(used, read, result);
      showWords(used, text, read, result);
      tell('');
      scored.hidden = false;
      scored.className = '';
    } catch (error) {
      if (isLatest()) tell(used.logitless.isLost ? `${error.message} Train the model again.` : error.message, 'bad');
    }
  };
  const follow = async () => {
    for (let done = 0; done !== asked;) {
      done = asked;
      await once();
    }
    running = null;
  };
  const update = () => {
    asked++;
    running ??= follow();
    return running;
  };
  field.addEventListener('input', () => {
    scored.className = 'stale';
    update();
  });
  update();
  return (given) => {
    model = given;
    return update();
  };
}

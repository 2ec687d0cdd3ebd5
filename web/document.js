// SPDX-License-Identifier: Apache-2.0
// Shows one of the Markdown documents in this page's folder: document.html?docs/semantics.md#section.
// Reads only the Markdown that they use: headings, paragraphs, lists, tables, fenced code, links, bold and code.

const HERE = ['README.md', 'docs/semantics.md', 'docs/web.md', 'docs/results.md'];
const INLINE = /`([^`]+)`|\[([^\]]*)\]\(([^)\s]+)\)|\*\*(.+?)\*\*/g;
const HEADING = /^(#{1,6}) (.*)/;
const ITEM = /^(?:-|\d+\.) (.*)/;

function element(name, children = [], attributes = {}) {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(...children);
  return made;
}

// The id of a heading, as links in the documents spell it.
function slug(heading) {
  return heading.toLowerCase().replace(/[^\p{L}\p{N}\s_-]/gu, '').trim().replace(/\s/g, '-');
}

// The target of a document's link, seen from this page; null if the file is not in HERE.
function follow(link, folder) {
  if (/^https?:/.test(link)) return link;
  const [file, section] = link.split('#');
  if (!file) return `#${section}`;
  const path = new URL(`${folder}${file}`, 'http://root/').pathname.slice(1);
  return HERE.includes(path) ? `document.html?${path}${section ? `#${section}` : ''}` : null;
}

function inline(text, folder) {
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, code, words, link, bold] = found;
    nodes.push(text.slice(end, found.index));
    end = found.index + whole.length;
    if (code !== undefined) {
      nodes.push(element('code', [code]));
    } else if (bold !== undefined) {
      nodes.push(element('strong', inline(bold, folder)));
    } else {
      const href = follow(link, folder);
      nodes.push(href ? element('a', inline(words, folder), {href}) : element('span', inline(words, folder)));
    }
  }
  return [...nodes, text.slice(end)];
}

function table(lines, folder) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, '').split('|').map((cell) => cell.trim());
  const row = (line, name) => element('tr', cells(line).map((cell) => element(name, inline(cell, folder))));
  const [head, , ...rows] = lines;
  return element('div', [element('table', [row(head, 'th'), ...rows.map((line) => row(line, 'td'))])], {className: 'wide'});
}

// Takes the lines of one block from the front, and returns its element, or undefined for HTML, which is not shown.
function block(lines, folder) {
  const take = (belongs) => {
    const taken = [lines.shift()];
    while (lines.length > 0 && belongs(lines[0])) taken.push(lines.shift());
    return taken;
  };
  const [line] = lines;
  if (line.startsWith('```')) {
    const code = take((next) => !next.startsWith('```')).slice(1);
    lines.shift();
    return element('pre', [element('code', [code.join('\n')])]);
  }
  const heading = line.match(HEADING);
  if (heading) {
    lines.shift();
    const children = inline(heading[2], folder);
    const made = element(`h${heading[1].length}`, children);
    made.id = slug(made.textContent);
    return made;
  }
  if (line.startsWith('|')) return table(take((next) => next.startsWith('|')), folder);
  const begins = (next) => next === '' || ITEM.test(next) || HEADING.test(next) || /^(```|\|)/.test(next);
  if (ITEM.test(line)) {
    const items = [];
    const name = line.startsWith('-') ? 'ul' : 'ol';
    while (lines.length > 0 && ITEM.test(lines[0])) items.push(take((next) => !begins(next)).join(' ').match(ITEM)[1]);
    return element(name, items.map((item) => element('li', inline(item, folder))));
  }
  if (line.startsWith('<')) return void take((next) => next !== '');
  return element('p', inline(take((next) => !begins(next)).join(' '), folder));
}

function show(text, path) {
  const folder = path.slice(0, path.lastIndexOf('/') + 1);
  const lines = text.split('\n');
  const blocks = [];
  while (lines.length > 0) {
    if (lines[0].trim() === '') lines.shift();
    else blocks.push(block(lines, folder));
  }
  const main = document.getElementById('document');
  main.replaceChildren(...blocks.filter(Boolean));
  document.title = `${main.querySelector('h1')?.textContent ?? path} · Logitless`;
  document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

async function start() {
  const path = decodeURIComponent(location.search.slice(1));
  const answer = HERE.includes(path) ? await fetch(path) : {ok: false};
  if (answer.ok) show(await answer.text(), path);
  else document.getElementById('document').textContent = `There is no document "${path}" here.`;
}

start();

// SPDX-License-Identifier: Apache-2.0
// A line chart in SVG: linear or logarithmic axes with labels; every curve is named at its end or, if narrow, on top.

const SVG = 'http://www.w3.org/2000/svg';

function put(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function scale({low, high, log}, from, to) {
  const place = log ? Math.log : (x) => x;
  const [a, b] = [place(low), place(high)];
  return (x) => from + (to - from) * (b > a ? (place(x) - a) / (b - a) : 0.5);
}

function ticks({low, high, log}) {
  if (log) {
    const every = Math.ceil(Math.log2(high / low) / 7);
    const found = [];
    for (let power = Math.ceil(Math.log2(low)); power <= Math.log2(high); power++) {
      if (power % every === 0) found.push(2 ** power);
    }
    return found;
  }
  const rough = (high - low) / 5;
  const unit = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= rough) ?? 1;
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step / 1e6; tick += step) found.push(tick);
  return found;
}

// Returns the places of labels, pushed apart so that no two labels overlap.
function apart(places, gap) {
  const order = places.map((_, i) => i).sort((a, b) => places[a] - places[b]);
  const placed = [...places];
  for (let i = 1; i < order.length; i++) placed[order[i]] = Math.max(placed[order[i]], placed[order[i - 1]] + gap);
  return placed;
}

// Charts are drawn again when their width changes.
const charts = new Map();
addEventListener('resize', () => {
  for (const [svg, {width, chart}] of charts) if (svg.clientWidth !== width) drawChart(svg, chart);
});

export function clearChart(svg) {
  charts.delete(svg);
  svg.replaceChildren();
}

const axisText = ({label, log}) => (log ? `${label}, log scale` : label);

// x, y: {low, high, log, label, format}; curves: [{name, colour, dashed, points: [[x, y], ...]}]; at: an x to mark,
// {x, name}; dot: a point to mark, {x, y, name}.
export function drawChart(svg, chart) {
  const {title, x, y, curves, at, dot} = chart;
  charts.set(svg, {width: svg.clientWidth, chart});
  const width = Math.max(300, svg.clientWidth || 600);
  const narrow = width < 460;
  const height = Math.round(Math.min(196, width * 0.6));
  const legend = narrow ? 16 * curves.length : 0;
  const [left, right, top, bottom] = [58, narrow ? 20 : 150, 30 + legend, 40];
  svg.setAttribute('viewBox', `0 0 ${width} ${height + legend}`);
  svg.setAttribute('role', 'img');
  svg.setAttribute('aria-label', title);
  svg.replaceChildren();
  const floor = height + legend - bottom;
  const toX = scale(x, left, width - right);
  const toY = scale(y, floor, top);
  for (const tick of ticks(y)) {
    put(svg, 'line', {class: 'grid', x1: left, x2: width - right, y1: toY(tick), y2: toY(tick)});
    put(svg, 'text', {x: left - 6, y: toY(tick) + 4, 'text-anchor': 'end'}, y.format(tick));
  }
  put(svg, 'text', {class: 'axis', x: 0, y: top - 14}, axisText(y));
  const across = ticks(x).filter((_, i) => !narrow || i % 2 === 0);
  for (const tick of across) put(svg, 'text', {x: toX(tick), y: floor + 18, 'text-anchor': 'middle'}, x.format(tick));
  put(svg, 'text', {class: 'axis', x: (left + width - right) / 2, y: floor + 34, 'text-anchor': 'middle'}, axisText(x));
  if (at) {
    put(svg, 'line', {class: 'at', x1: toX(at.x), x2: toX(at.x), y1: top, y2: floor});
    put(svg, 'text', {x: toX(at.x), y: top - 3, 'text-anchor': 'middle'}, at.name);
  }
  const ends = curves.map(({points}) => (points.length > 0 ? toY(points.at(-1)[1]) : top));
  const labels = apart(ends, 15);
  curves.forEach(({name, colour, dashed, points}, i) => {
    const inside = points.map(([a, b]) => `${toX(a).toFixed(1)},${toY(Math.min(y.high, Math.max(y.low, b))).toFixed(1)}`);
    const curve = put(svg, 'polyline', {class: 'curve', points: inside.join(' '), stroke: colour});
    if (dashed) curve.setAttribute('stroke-dasharray', '5 4');
    const [labelX, labelY] = narrow ? [left + 18, 12 + 16 * i] : [width - right + 8, labels[i] + 4];
    if (narrow) put(svg, 'line', {x1: left, x2: left + 14, y1: labelY - 4, y2: labelY - 4, stroke: colour, 'stroke-width': 2});
    put(svg, 'text', {x: labelX, y: labelY, style: `fill:${colour}`}, name);
  });
  if (dot) {
    put(svg, 'circle', {class: 'dot', cx: toX(dot.x), cy: toY(dot.y), r: 4});
    const isLeft = toX(dot.x) < (left + width - right) / 2;
    put(svg, 'text', {class: 'dot', x: toX(dot.x) + (isLeft ? 8 : -8), y: toY(dot.y) + 4, 'text-anchor': isLeft ? 'start' : 'end'}, dot.name);
  }
}

export function bytesText(bytes) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(1, bytes)) / 10)));
  const value = bytes / 1024 ** power;
  return `${value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toPrecision(3)} ${units[power]}`;
}

// Line and area charts on a canvas: time on the x axis, one shared crosshair, a legend with values.

import { el } from "../common/dom.js";

const HEIGHT = 150, LEAST_LEFT = 30, GAP = 8, RIGHT = 10, TOP = 10, BOTTOM = 22;
const charts = new Set();
const probe = document.body.appendChild(el("i", { hidden: true })), colors = new Map();
const font = getComputedStyle(document.body).fontFamily;
let hovered = null;  // Fraction of the time axis under the pointer, for all charts.

/** The colour of a CSS variable as a canvas takes it: light-dark() is resolved only in a computed style. */
export function chartColor(name) {
  if (!colors.has(name)) { probe.style.color = `var(--chart-${name})`; colors.set(name, getComputedStyle(probe).color); }
  return colors.get(name);
}

/** Ticks at 1, 2 or 5 times a power of ten, and the top of the axis. */
function axis(most, isShare) {
  if (isShare) return { top: 1, ticks: [0, 0.5, 1] };
  if (!(most > 0)) return { top: 1, ticks: [0, 1] };
  const power = 10 ** Math.floor(Math.log10(most / 2));
  const step = [1, 2, 5, 10].map(one => one * power).find(one => most / one <= 3.2) ?? 10 * power;
  const top = Math.ceil(most / step - 1e-9) * step;
  return { top, ticks: Array.from({ length: Math.round(top / step) + 1 }, (_, number) => number * step) };
}

export class Chart {
  /** `series`: [{ label, color (a CSS variable), values }], `format` writes a value, `stacked` draws areas on each other. */
  constructor(title, { format, isShare = false, stacked = false, note = "" }) {
    Object.assign(this, { format, isShare, stacked, series: [], time: [], points: null, summary: null, width: 0, left: LEAST_LEFT, usualNote: note });
    this.canvas = el("canvas", { height: HEIGHT, role: "img" });
    this.legend = el("div", { class: "legend" });
    this.empty = el("p", { class: "none" }, "Nothing measured yet");
    this.title = title;
    this.note = el("small", {}, note);
    this.root = el("figure", { class: "chart card" }, el("figcaption", {}, el("h3", {}, title), this.note), el("div", { class: "plot" }, this.canvas, this.empty), this.legend);
    this.canvas.addEventListener("pointermove", event => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => { hovered = null; drawAll(); });
    charts.add(this);
    // Reading a width while drawing would lay out the page once per chart.
    new ResizeObserver(([entry]) => { this.width = Math.floor(entry.contentRect.width); this.draw(); }).observe(this.canvas.parentElement);
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    hovered = Math.max(0, Math.min(1, (event.clientX - box.left - this.left) / (box.width - this.left - RIGHT)));
    drawAll();
  }

  /**
   * `points`: [time, value] of each request, if there are few: they are drawn instead of the lines.
   * `summary`: one value per series that the legend shows while nothing is pointed at; by default the last ones.
   */
  update(time, series, points = null, summary = null) {
    Object.assign(this, { time, series, points, summary });
    this.note.textContent = points?.length ? `${points.length} measured, each a point` : this.usualNote;
    this.draw();
  }

  get isEmpty() { return !this.points?.length && this.series.every(one => one.values.every(value => !value)); }

  draw() {
    const width = this.width;
    if (!width) return;
    const scale = devicePixelRatio || 1, context = this.canvas.getContext("2d");
    if (this.canvas.width !== Math.round(width * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = HEIGHT * scale;
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${HEIGHT}px`;
    }
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, HEIGHT);
    const points = this.points, lines = points ? [] : this.stacked ? stack(this.series) : this.series.map(one => ({ ...one, low: null, high: one.values }));
    const values = points ? points.map(([, value]) => value) : lines.flatMap(one => one.high).filter(value => value !== null);
    this.empty.hidden = values.length > 0;
    const { top, ticks } = axis(Math.max(...values, 0), this.isShare);
    context.font = `11px ${font}`;
    this.left = Math.max(LEAST_LEFT, ...ticks.map(tick => Math.ceil(context.measureText(this.format(tick)).width) + GAP + 2));
    const across = share => this.left + Math.max(0, Math.min(1, share)) * (width - this.left - RIGHT);
    const x = number => across(this.time.length < 2 ? 0 : number / (this.time.length - 1));
    const y = value => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
    this.drawAxes(context, width, ticks, y);
    for (const line of lines.toReversed()) drawLine(context, line, x, y, chartColor(line.color), this.stacked);
    if (points) drawPoints(context, points, at => across((at - this.time[0]) / (this.time.at(-1) - this.time[0])), y, chartColor("1"));
    this.showLegend(this.crosshair(context, x));
  }

  drawAxes(context, width, ticks, y) {
    context.fillStyle = chartColor("label");
    context.strokeStyle = chartColor("grid");
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const tick of ticks) {
      const at = Math.round(y(tick)) + 0.5;
      context.beginPath();
      context.moveTo(this.left, at);
      context.lineTo(width - RIGHT, at);
      context.stroke();
      context.fillText(this.format(tick), this.left - GAP, at);
    }
    if (this.time.length < 2) return;
    context.textBaseline = "alphabetic";
    const clock = seconds => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
    context.textAlign = "left";
    context.fillText(clock(this.time[0]), this.left, HEIGHT - 5);
    context.textAlign = "right";
    context.fillText(clock(this.time.at(-1)), width - RIGHT, HEIGHT - 5);
  }

  /** The index whose values the legend shows: under the pointer, or the last. */
  crosshair(context, x) {
    if (hovered === null || this.time.length < 2) return this.time.length - 1;
    const at = Math.round(hovered * (this.time.length - 1)), place = Math.round(x(at)) + 0.5;
    context.strokeStyle = chartColor("label");
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(place, TOP);
    context.lineTo(place, HEIGHT - BOTTOM);
    context.stroke();
    context.setLineDash([]);
    return at;
  }

  showLegend(at) {
    const texts = this.series.map((one, number) => {
      let value = (hovered === null ? this.summary?.[number] : null) ?? one.values[at] ?? null;
      if (hovered === null) for (let back = at; value === null && back >= 0; back--) value = one.values[back];
      return [one, value === null || value === undefined ? "–" : this.format(value)];
    });
    this.legend.replaceChildren(...texts.map(([one, text]) => {
      const mark = el("i");
      mark.style.background = chartColor(one.color);
      return el("span", {}, mark, one.label, el("b", {}, text));
    }));
    this.canvas.setAttribute("aria-label", `${this.title}: ${texts.map(([one, text]) => `${one.label} ${text}`).join(", ")}`);
  }
}

/** Each series on top of those before it. */
function stack(series) {
  let below = [];
  return series.map(one => {
    const low = below;
    below = one.values.map((value, number) => (value === null ? low[number] ?? null : value + (low[number] ?? 0)));
    return { ...one, low, high: below };
  });
}

function drawLine(context, { high, low }, x, y, color, isFilled) {
  context.strokeStyle = context.fillStyle = color;
  context.lineWidth = 1.8;
  context.lineJoin = "round";
  for (const [from, to] of runs(high)) {
    if (isFilled) {
      context.beginPath();
      for (let at = from; at <= to; at++) context.lineTo(x(at), y(high[at]));
      for (let at = to; at >= from; at--) context.lineTo(x(at), y(low?.[at] ?? 0));
      context.globalAlpha = 0.28;
      context.fill();
      context.globalAlpha = 1;
    }
    context.beginPath();
    for (let at = from; at <= to; at++) context.lineTo(x(at), y(high[at]));
    context.stroke();
    if (from === to) { context.beginPath(); context.arc(x(from), y(high[from]), 2.8, 0, 7); context.fill(); }
  }
}

function drawPoints(context, points, x, y, color) {
  context.fillStyle = color;
  context.globalAlpha = 0.75;
  for (const [at, value] of points) { context.beginPath(); context.arc(x(at), y(value), 3, 0, 7); context.fill(); }
  context.globalAlpha = 1;
}

/** Stretches without a gap. */
function runs(values) {
  const found = [];
  for (let at = 0; at < values.length; at++) {
    if (values[at] === null) continue;
    if (at && values[at - 1] !== null) found.at(-1)[1] = at; else found.push([at, at]);
  }
  return found;
}

export function drawAll() { for (const chart of charts) chart.draw(); }
addEventListener("millrace:theme", () => { colors.clear(); drawAll(); });

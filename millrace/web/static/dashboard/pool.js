// The block pool as a picture: cells stand for blocks and change colour as blocks are taken, cached and freed.

import { el } from "../common/dom.js";
import { STATE_NAMES } from "./cache.js";
import { chartColor } from "./chart.js";
import { count } from "./format.js";

const MAX_CELLS = 960, MAX_CELLS_NARROW = 400, CELL = 11, GAP = 2;
const STATES = [["in_use", "1"], ["shared", "4"], ["kept", "2"], ["cached", "3"], ["moving", "5"], ["ending", "label"], ["free", "free"]];
const TITLES = { device: "Blocks on the device", host: "Blocks in host memory", disk: "Blocks on the disk" };

export class PoolPicture {
  constructor(container) {
    this.container = container;
    this.places = new Map();
    const redraw = () => this.places.forEach(view => this.draw(view));
    addEventListener("resize", redraw);
    addEventListener("millrace:theme", redraw);
  }

  /** `blocks` of /v1/stats; `states` of /v1/kv/tree, by location, tell more but may be missing. */
  update(blocks, states) {
    const shown = Object.entries(blocks ?? {}).filter(([, figures]) => figures.total).map(([place, { total, used, cached, free }]) => [place, { total, ...(states?.[place] ?? (place === "device" ? { in_use: used, cached, free } : { cached: used, free })) }]);
    for (const [place] of shown) if (!this.places.has(place)) this.places.set(place, this.add(place));
    for (const [place, figures] of shown) this.show(this.places.get(place), figures);
  }

  add(place) {
    const canvas = el("canvas", { role: "img", width: 0, height: 0 }), legend = el("div", { class: "legend" }), title = el("small");
    this.container.append(el("figure", { class: "chart card pool" }, el("figcaption", {}, el("h3", {}, TITLES[place] ?? place), title), canvas, legend));
    return { place, canvas, legend, title, shown: null, frame: 0 };
  }

  show(view, figures) {
    const isNarrow = this.container.clientWidth < 560;
    const perCell = Math.max(1, Math.ceil(figures.total / (isNarrow ? MAX_CELLS_NARROW : MAX_CELLS)));
    const cells = Math.ceil(figures.total / perCell);
    // A state that has any block gets at least one cell.
    const size = name => (figures[name] > 0 ? Math.max(1, Math.round(figures[name] / perCell)) : 0);
    view.target = [];
    for (const [name] of STATES) if (name !== "free") view.target.push(...Array(Math.min(cells - view.target.length, size(name))).fill(name));
    view.title.textContent = `${count(figures.total)} blocks${perCell > 1 ? ` · one cell is ${perCell}` : ""}`;
    const present = STATES.filter(([name]) => figures[name] || (name === "free" && figures.free !== undefined));
    view.legend.replaceChildren(...present.map(([name]) => el("span", {}, el("i", { class: `state-${name}` }), STATE_NAMES[name], el("b", {}, count(figures[name])))));
    view.canvas.setAttribute("aria-label", `${view.place}: ${present.map(([name]) => `${figures[name]} ${STATE_NAMES[name]}`).join(", ")}`);
    if (!view.shown || view.shown.length !== cells) view.shown = Array.from({ length: cells }, (_, at) => ({ state: stateAt(view.target, at), age: 1 }));
    view.shown.forEach((cell, at) => { const state = stateAt(view.target, at); if (cell.state !== state) Object.assign(cell, { before: cell.state, state, age: 0 }); });
    cancelAnimationFrame(view.frame);
    this.draw(view);
  }

  draw(view) {
    const width = view.canvas.parentElement.clientWidth - 32;
    if (width <= 0) return;
    const columns = Math.max(1, Math.floor((width + GAP) / (CELL + GAP))), rows = Math.ceil(view.shown.length / columns);
    const scale = devicePixelRatio || 1, height = rows * (CELL + GAP);
    Object.assign(view.canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
    view.canvas.style.width = `${width}px`;
    view.canvas.style.height = `${height}px`;
    const context = view.canvas.getContext("2d");
    const color = Object.fromEntries(STATES.map(([name, shade]) => [name, chartColor(shade)]));
    context.scale(scale, scale);
    let moving = false;
    view.shown.forEach((cell, at) => {
      const x = (at % columns) * (CELL + GAP), y = Math.floor(at / columns) * (CELL + GAP);
      const draw = (state, alpha, inset) => { context.globalAlpha = alpha; context.fillStyle = color[state]; context.beginPath(); context.roundRect(x + inset, y + inset, CELL - 2 * inset, CELL - 2 * inset, 2.5); context.fill(); };
      if (cell.age < 1) { draw(cell.before, 1 - cell.age, 0); draw(cell.state, cell.age, (1 - cell.age) * 4); cell.age = Math.min(1, cell.age + 0.06); moving = true; } else draw(cell.state, 1, 0);
    });
    if (moving && !document.hidden && !matchMedia("(prefers-reduced-motion: reduce)").matches) view.frame = requestAnimationFrame(() => this.draw(view));
    else if (moving) view.shown.forEach(cell => { cell.age = 1; });
  }
}

const stateAt = (target, at) => target[at] ?? "free";

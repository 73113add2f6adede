// What the KV cache holds: where input was found, what was evicted and why, and the prefix tree. Never text.

import { ApiError, getJson } from "../common/api.js";
import { byId, el } from "../common/dom.js";
import { count, duration, share } from "./format.js";

const EVERY_MS = 3000, MAX_NODES = 60;
export const STATE_NAMES = { in_use: "in use", shared: "shared", kept: "kept", cached: "cached", moving: "moving", ending: "ending", free: "free" };
const PLACES = { device: "Device", host: "Host memory", disk: "Disk", documents: "Documents at other places", none: "Nowhere: computed" };
const CAUSES = { new_tokens: "room for new tokens", arrival: "room for blocks from below", room: "room for other blocks", failed: "a copy failed", forgotten: "its tenant was forgotten" };

export class CacheView {
  constructor() { Object.assign(this, { due: 0, states: null, isRefused: false }); }

  /** `data` of /v1/stats; asks for the tree of `model` now and then. */
  async update(data, model) {
    this.showFound(data.totals.found_in ?? {});
    this.showEvictions(data.totals);
    if (data.view?.is_operator === false || !data.now.kv_blocks?.device?.total) { this.hideTree(); return; }
    if (performance.now() < this.due) return;
    this.due = performance.now() + EVERY_MS;
    try {
      this.showTree(await getJson(`/v1/kv/tree?nodes=${MAX_NODES}${model ? `&model=${encodeURIComponent(model)}` : ""}`));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.hideTree();
    }
  }

  showFound(found) {
    const total = Object.values(found).reduce((sum, tokens) => sum + tokens, 0);
    byId("found").hidden = !total;
    byId("found-rows").replaceChildren(...Object.entries(PLACES).filter(([place]) => found[place]).map(([place, name]) => row(name, count(found[place]), share(found[place] / total))));
  }

  showEvictions({ evictions_by_reason: device = {}, evictions_below: below = {} }) {
    const causes = Object.entries({ device, ...below }).flatMap(([place, found]) => Object.entries(found).filter(([, blocks]) => blocks).map(([cause, blocks]) => row(`${PLACES[place] ?? place}: ${CAUSES[cause] ?? cause}`, count(blocks))));
    byId("evictions").hidden = !causes.length;
    byId("eviction-rows").replaceChildren(...causes);
  }

  hideTree() {
    this.states = null;
    byId("tree").hidden = true;
  }

  showTree({ states, nodes, tokens, other_nodes, other_tokens, is_whole, block_tokens }) {
    this.states = states;
    byId("tree").hidden = !nodes.length;
    const depths = [], most = Math.max(1, ...nodes.map(one => one.tokens));
    byId("tree-rows").replaceChildren(...nodes.map(one => {
      depths.push(one.parent < 0 ? 0 : depths[one.parent] + 1);
      return this.node(one, depths.at(-1), most);
    }));
    const notes = [`${count(tokens)} tokens in blocks of ${block_tokens}`];
    if (other_nodes) notes.push(`${count(other_nodes)} smaller nodes with ${count(other_tokens)} tokens are not shown`);
    if (!is_whole) notes.push("only the most recently used blocks were looked at");
    byId("tree-note").textContent = `${notes.join("; ")}.`;
  }

  node({ tokens, start, hits, refs, location, state, idle_s, owner }, depth, most) {
    const bar = el("i", { class: `state-${state}` }), first = el("td", { class: "node" }, bar, el("span", {}, STATE_NAMES[state] ?? state), start === null ? el("small", {}, "beginning evicted") : null);
    first.style.setProperty("--depth", Math.min(depth, 8));
    bar.style.setProperty("--size", Math.max(0.06, tokens / most));
    const number = text => el("td", { class: "number" }, text);
    return el("tr", {}, first, number(count(tokens)), number(count(hits)), number(refs ? count(refs) : "–"), el("td", {}, location), el("td", { class: "number idle" }, idle_s === null ? "–" : duration(idle_s)), el("td", { class: "owner" }, owner ? el("code", {}, owner) : "anyone"));
  }
}

const row = (name, ...values) => el("tr", {}, el("td", {}, name), ...values.map(value => el("td", { class: "number" }, value)));

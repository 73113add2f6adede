// Running requests, and one request's timeline with the reasons for its waits.

import { ApiError, getJson, remove } from "../common/api.js";
import { copyButton, el, iconButton, toast } from "../common/dom.js";
import { seconds } from "./format.js";

export const SHOWN = 50;
const EXPLAINED = 8;  // Requests without output whose stage is asked for in one round.
const STAGES = { front: "Front", link: "Link", lost: "Engine lost", queue: "Queue", prefill: "Prefill", decode: "Decode" };

export class RunningRequests {
  constructor(body, note, onOpen) {
    Object.assign(this, { body, note, onOpen, stages: new Map() });
  }

  async update() {
    const { data, total = data.length } = await getJson(`/v1/requests?limit=${SHOWN}`);
    await this.askStages(data.filter(one => one.output_tokens === 0).slice(0, EXPLAINED));
    const hasTenants = data.some(one => one.tenant);
    this.body.closest("table").classList.toggle("with-tenants", hasTenants);
    this.body.closest("table").classList.toggle("with-models", new Set(data.map(one => one.model)).size > 1);
    this.body.replaceChildren(...data.map(one => this.row(one)));
    this.note.textContent = total === 0 ? "No request is running." : total > data.length ? `The ${data.length} longest running of ${total}.` : "";
    this.body.closest("table").hidden = total === 0;
  }

  async askStages(waiting) {
    this.stages.clear();
    await Promise.all(waiting.map(async one => {
      const known = await getJson(`/v1/requests/${encodeURIComponent(one.id)}/explain`).catch(() => null);
      const stages = known?.sequences?.[0]?.stages_s ?? {};
      const last = Object.keys(STAGES).findLast(name => name in stages);
      if (last) this.stages.set(one.id, last);
    }));
  }

  row(one) {
    const stage = one.awaits_engine ? "lost" : one.output_tokens > 0 ? "decode" : this.stages.get(one.id) ?? "starting";
    const cancel = async event => {
      event.stopPropagation();
      try { const answer = await remove(`/v1/requests/${encodeURIComponent(one.id)}`); toast(answer.cancelled ? "The request is cancelled." : "The request had already ended."); } catch (error) { toast(error.message, "bad"); }
    };
    return el("tr", {}, el("td", {}, el("button", { type: "button", class: "link id", title: one.id, on: { click: () => this.onOpen(one.id) } }, one.id)),
      el("td", { class: "tenant" }, one.tenant || ""), el("td", {}, el("span", { class: `stage ${stage}` }, stage)), el("td", {}, one.priority), el("td", { class: "model" }, one.model ?? ""), el("td", { class: "path" }, one.path),
      el("td", { class: "number" }, seconds(one.running_s)), el("td", { class: "number" }, one.prompt_tokens), el("td", { class: "number" }, one.output_tokens), el("td", {}, iconButton("close", `Cancel ${one.id}`, cancel)));
  }
}

// ── one request ──────────────────────────────────────────────────────────────────────────────────────────────────────
export async function showRequest(container, id) {
  let known;
  try { known = await getJson(`/v1/requests/${encodeURIComponent(id)}/explain`); } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    container.replaceChildren(el("div", { class: "error-card" }, el("strong", {}, error.status === 404 ? "Not found" : "The request cannot be explained"), el("p", {}, error.message)));
    return null;
  }
  const first = known.sequences[0];
  container.replaceChildren(el("div", { class: "facts" }, fact("State", known.state), fact("Priority", known.priority), fact("Prompt tokens", first.prompt_tokens), fact("Output tokens", known.sequences.reduce((sum, one) => sum + (one.output_tokens ?? 0), 0) || "–"),
    wide("Id", el("code", {}, known.id), copyButton(() => known.id, "Copy the id")), wide("Request id", el("code", {}, known.request_id))),
    ...known.sequences.flatMap((one, number) => sequence(one, known.sequences.length > 1 ? number + 1 : 0)));
  return known;
}

const fact = (name, ...value) => el("div", {}, el("span", { class: "label" }, name), el("div", {}, value));
const wide = (...parts) => { const shown = fact(...parts); shown.className = "wide"; return shown; };

function sequence(one, number) {
  const total = one.stages_s.total || 1e-9;
  const stages = Object.entries(STAGES).filter(([name]) => name in one.stages_s);
  const bar = el("div", { class: "timeline", role: "img", "aria-label": stages.map(([name, label]) => `${label} ${seconds(one.stages_s[name])}`).join(", ") }, stages.map(([name, label]) => {
    const piece = el("span", { class: name, title: `${label}: ${seconds(one.stages_s[name])}` });
    piece.style.flexGrow = one.stages_s[name] / total;
    return piece;
  }));
  const legend = el("div", { class: "legend" }, stages.map(([name, label]) => el("span", {}, el("i", { class: `stage-${name}` }), label, el("b", {}, seconds(one.stages_s[name])))), el("span", {}, "Total", el("b", {}, seconds(total))));
  const drafted = one.preemptions?.count ? `Preempted ${one.preemptions.count === 1 ? "once" : `${one.preemptions.count} times`} (${Object.entries(one.preemptions.reasons ?? {}).map(([why, times]) => `${why}: ${times}`).join(", ")}).` : null;
  return [number ? el("h3", {}, `Choice ${number}`) : null, bar, legend,
    el("ul", { class: "reasons" }, [one.queue?.why, one.cache?.why, drafted, one.resumed?.why, one.message].filter(Boolean).map(text => el("li", {}, text))),
    el("div", { class: "facts" }, fact("Cached tokens", one.cache?.cached_tokens ?? "–"), fact("Output tokens", one.output_tokens ?? "–"), fact("Finish reason", one.finish_reason ?? "–"), fact("Preemptions", one.preemptions?.count ?? "–"))].filter(Boolean);
}

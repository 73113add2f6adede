// The dashboard: one aggregated answer per second drives everything on the page.

import { ApiError, getJson, remove } from "../common/api.js";
import { byId, el, toast } from "../common/dom.js";
import { startShell } from "../common/shell.js";
import { CacheView } from "./cache.js";
import { count, duration, seconds, share } from "./format.js";
import { Panels } from "./panels.js";
import { PoolPicture } from "./pool.js";
import { RunningRequests, showRequest } from "./requests.js";

const EVERY_MS = 1000, COST_EVERY_MS = 15_000;
const STEPS = { 60: 1, 300: 5, 900: 15 };
const panels = new Panels(byId("panels")), pool = new PoolPicture(byId("pool")), cache = new CacheView();
const requests = new RunningRequests(byId("requests"), byId("requests-note"), openRequest);
let windowSeconds = 300, timer = 0, openId = null, cost = null, costDue = 0, chosen = "";

const last = values => values?.findLast(value => value !== null) ?? null;
const hitRates = (found = {}) => {
  const total = Object.values(found).reduce((sum, tokens) => sum + tokens, 0);
  return ["device", "host", "disk", "documents"].filter(tier => found[tier]).map(tier => `${tier} ${share(found[tier] / total)}`).join(", ") || "–";
};
const shown = (value, format) => (value === null || value === undefined ? "–" : format(value));

// ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────
const measured = latency => (latency?.n ? `${count(latency.n)} in this time` : "none in this time");

function tiles({ now, series, totals, latency = {} }) {
  const blocks = now.kv_blocks?.device;
  const list = [
    ["Running", shown(now.running, count), `${shown(now.waiting, count)} waiting`],
    ["TTFT, p95", shown(latency.ttft_s?.p95, seconds), `p50 ${shown(latency.ttft_s?.p50, seconds)}, ${measured(latency.ttft_s)}`],
    ["TPOT, p50", shown(latency.tpot_s?.p50, seconds), `p95 ${shown(latency.tpot_s?.p95, seconds)}, ${measured(latency.tpot_s)}`],
    ["Output tokens/s", shown(last(series.output_tokens_per_s), count), `${shown(last(series.input_tokens_per_s), count)} input`],
    ["KV pool in use", blocks?.total ? share(blocks.used / blocks.total) : "–", blocks ? `${count(blocks.cached)} blocks cached` : ""],
    ["Prefix hits", shown(last(series.prefix_hit_rate), share), `${shown(totals.cached_tokens, count)} tokens so far`],
    ["Requests", shown(totals.requests, count), `${errorCount(totals)}, ${shown(totals.refused, count)} refused`],
    ["Open streams", shown(now.open_streams, count), `${now.fronts} front${now.fronts === 1 ? "" : "s"}`],
  ];
  byId("tiles").replaceChildren(...list.map(([name, value, more]) => el("div", { class: "tile card" }, el("span", { class: "label" }, name), el("strong", {}, value), el("small", {}, more))));
}

function tenants({ tenants: list = [], view }) {
  const named = list.filter(one => one.tenant);
  byId("tenants").hidden = named.length === 0;
  byId("tenants-title").textContent = view?.is_operator ? "Tenants" : "Your figures";
  byId("tenant-rows").replaceChildren(...named.map(one => el("tr", {}, el("td", {}, one.tenant), ...["running", "waiting", "requests", "input_tokens", "cached_tokens", "output_tokens"].map(name => el("td", { class: "number" }, count(one[name] ?? 0))), el("td", { class: "number" }, hitRates(one.found_in)))));
}

/** 99.9 % must not read 100 %. */
const fineShare = value => `${+(value * 100).toFixed(value > 0.99 ? 3 : 1)} %`;

function objectives({ slos = [] }) {
  byId("objectives").hidden = !slos.length && !cost;
  byId("slos").replaceChildren(...slos.map(one => {
    const left = Math.max(0, Math.min(1, one.budget_left ?? 0)), bar = el("i");
    bar.style.setProperty("--share", left);
    return el("div", { class: "card slo" }, el("strong", {}, one.slo), el("span", { class: `pill ${one.is_met ? "good" : "bad"}` }, one.is_met ? "met" : "missed"),
      el("small", {}, [one.class, one.total ? `${fineShare(one.good / one.total)} of ${count(one.total)} good, objective ${fineShare(one.objective)}` : "no requests yet"].filter(Boolean).join(" · ")), el("span", { class: "meter" }, bar),
      el("small", {}, `Error budget left: ${share(left)}${one.burn ? ` · burn rate ${Object.entries(one.burn).map(([span, rate]) => `${span} ${shown(rate, value => value.toFixed(2))}`).join(", ")}` : ""}`),
      (one.used_by ?? []).slice(0, 2).map(minute => el("small", {}, `${new Date(minute.time * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })}: ${minute.beyond_limit} of ${minute.of} beyond the limit${minute.cause ? ` (${minute.cause})` : ""}`)));
  }));
  byId("cost").hidden = !cost;
  if (!cost) return;
  const dollars = value => `$${value.toFixed(value < 1 ? 3 : 2)}`;
  const prices = Object.entries(cost.usd_per_million ?? {}).map(([kind, { busy, all_in, interval }]) => el("span", { title: `${interval.map(dollars).join(" to ")} (95%); ${dollars(busy)} without idle time` }, kind, el("b", {}, dollars(all_in))));
  byId("cost").replaceChildren(el("strong", {}, "Cost"), ...prices, el("small", {}, `${cost.note ?? "Per million tokens, idle time included"} · $${cost.price_per_hour} per hour`));
}

/** On a server with a price. The figures are fitted over minutes, so they are asked for seldom. */
async function readCost({ price_per_hour: price }) {
  if (!price || performance.now() < costDue) return;
  costDue = performance.now() + COST_EVERY_MS;
  cost = await getJson(`/v1/cost${chosen ? `?model=${encodeURIComponent(chosen)}` : ""}`);
}

function errorCount({ errors }) {
  const sum = Object.values(errors ?? {}).reduce((total, one) => total + one, 0);
  return `${count(sum)} ${sum === 1 ? "error" : "errors"}`;
}

function errors({ totals }) {
  const list = Object.entries(totals.errors ?? {}).sort((one, other) => other[1] - one[1]);
  byId("errors").hidden = list.length === 0;
  byId("error-rows").replaceChildren(...list.map(([code, times]) => el("tr", {}, el("td", {}, el("code", {}, code)), el("td", { class: "number" }, count(times)))));
}

/** The server's models, if there are several. Those that are not loaded have no figures of now. */
function models({ model, models: list = [] }) {
  const select = byId("which");
  select.hidden = list.length < 2;
  const texts = list.map(one => (one.status === "loaded" ? one.name : `${one.name} (${one.status})`));
  const isSame = select.options.length === list.length && texts.every((text, number) => select.options[number].text === text);
  if (!isSame) select.replaceChildren(...list.map((one, number) => el("option", { value: one.name }, texts[number])));
  if (document.activeElement !== select) select.value = model;
}

function head({ model, uptime_s, now, view }) {
  byId("model").textContent = model;
  byId("about").textContent = `up ${duration(uptime_s)}${now.ready ? "" : ` · ${now.reason}`}${now.status && now.status !== "loaded" ? ` · ${now.status}` : ""}`;
  byId("view").hidden = !view?.tenant;
  if (view?.tenant) byId("view").textContent = view.is_operator ? "Operator's view" : `View of ${view.tenant}`;
}

// ── kept prompts ─────────────────────────────────────────────────────────────────────────────────────────────────────
const MAX_KEPT = 50, KEPT_EVERY_MS = 5000;
let keptDue = 0;

/** Handles of `/v1/cache`, with the tier that has their tokens; those that no tier has are computed again. */
async function readKept() {
  if (document.hidden || Date.now() < keptDue) return;
  keptDue = Date.now() + KEPT_EVERY_MS;
  try {
    const { data, used_bytes, max_bytes } = await getJson("/v1/cache"), list = data.toSorted((one, other) => other.tokens - one.tokens);
    byId("kept").hidden = list.length === 0;
    byId("kept-rows").replaceChildren(...list.slice(0, MAX_KEPT).map(one => el("tr", {}, el("td", {}, one.id), el("td", {}, one.tenant), el("td", { class: "number" }, count(one.tokens)), el("td", {}, places(one)), el("td", { class: "number" }, duration(one.expires_in_s)))));
    byId("kept-note").textContent = `${list.length > MAX_KEPT ? `The ${MAX_KEPT} largest of ${count(list.length)}. ` : ""}${share(max_bytes ? used_bytes / max_bytes : 0)} of what may be kept.`;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    byId("kept").hidden = true;
  }
}

function places({ tokens, locations }) {
  const found = Object.entries(locations).filter(([, held]) => held), missing = tokens - found.reduce((sum, [, held]) => sum + held, 0);
  return [...found.map(([place, held]) => `${count(held)} ${place}`), ...(missing ? [`${count(missing)} evicted`] : [])].join(", ");
}

// ── the round ────────────────────────────────────────────────────────────────────────────────────────────────────────
async function round() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const data = await getJson(`/v1/stats?window=${windowSeconds}&step=${STEPS[windowSeconds]}${chosen ? `&model=${encodeURIComponent(chosen)}` : ""}`);
    await readCost(data);
    for (const part of [head, models, tiles, tenants, objectives, errors]) part(data);
    panels.update(data);
    await cache.update(data, chosen);
    pool.update(data.now.kv_blocks, cache.states);
    await requests.update();
    readKept();
    problem(null);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    problem(error);
  } finally {
    timer = setTimeout(round, EVERY_MS);
  }
  if (openId) refreshRequest();
}

function problem(error) {
  byId("problem").hidden = !error;
  byId("content").classList.toggle("stale", Boolean(error));
  if (error) byId("problem").replaceChildren(el("strong", {}, error.status === 401 ? "This server requires a key" : error.status ? `Error ${error.status}` : "No connection"), el("p", {}, error.message));
  if (error?.status === 401) clearTimeout(timer);
}

// ── one request ──────────────────────────────────────────────────────────────────────────────────────────────────────
function openRequest(id) {
  openId = id;
  history.replaceState(null, "", `#request=${encodeURIComponent(id)}`);
  byId("request-cancel").hidden = true;
  byId("request-body").replaceChildren(el("p", { class: "soft" }, "…"));
  if (!byId("request").open) byId("request").showModal();
  refreshRequest();
}

async function refreshRequest() {
  const id = openId, known = await showRequest(byId("request-body"), id);
  byId("request-cancel").hidden = !known || known.state === "ended";
  if (!known || known.state === "ended") openId = null;  // Nothing changes any more.
}

async function cancelRequest() {
  const id = decodeURIComponent(location.hash.slice("#request=".length));
  try { await remove(`/v1/requests/${encodeURIComponent(id)}`); } catch (error) { toast(error.message, "bad"); }
  openRequest(id);
}

function openFromAddress() {
  if (location.hash.startsWith("#request=")) openRequest(decodeURIComponent(location.hash.slice("#request=".length)));
}

byId("which").addEventListener("change", event => { chosen = event.target.value; cost = null; costDue = 0; round(); });
byId("window").addEventListener("change", event => { windowSeconds = Number(event.target.value); round(); });
byId("request").addEventListener("close", () => { openId = null; history.replaceState(null, "", location.pathname); });
byId("request-close").addEventListener("click", () => byId("request").close());
byId("request-cancel").addEventListener("click", cancelRequest);
byId("find").addEventListener("submit", event => { event.preventDefault(); const id = byId("find-id").value.trim(); if (id) openRequest(id); });
document.addEventListener("visibilitychange", round);
addEventListener("millrace:key", round);
addEventListener("hashchange", openFromAddress);
startShell();
round();
openFromAddress();

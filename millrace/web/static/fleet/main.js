// The fleet page of a gateway: replicas with their state, and the last routes with their reasons.

import { getJson } from "../common/api.js";
import { byId, el } from "../common/dom.js";
import { startShell } from "../common/shell.js";
import { count, share } from "../dashboard/format.js";

const EVERY_MS = 1000;
const number = value => el("td", { class: "number" }, value);

function replica(one) {
  const kind = { healthy: "good", ejected: "bad" }[one.state] ?? "";
  return el("tr", {}, el("td", { title: one.url }, one.name), el("td", {}, el("span", { class: `pill ${kind}` }, one.state)), number(share(one.share)),
    number(count(one.open_requests)), number(count(one.outstanding_tokens)), number(one.token_ms ? one.token_ms.toFixed(1) : "–"), number(share(one.load.kv_used ?? 0)),
    number(count(one.sent)), number(count(one.failed)), number(count(one.ejections)), el("td", {}, one.models.join(", ")), el("td", { class: "soft" }, one.reason));
}

function route(one) {
  return el("tr", {}, el("td", { class: "cut" }, one.id), el("td", { title: one.why_model }, one.model || "–"), el("td", {}, one.replica), el("td", {}, one.causes.join(", ")), el("td", {}, one.ended ?? "running"),
    el("td", { class: "soft" }, one.reason), el("td", { class: "soft" }, one.notes.join("; ")));
}

function rolloutRows({ rollout, shadow }) {
  const row = (group, kind, state, part, requests, failed, time, reason) => el("tr", {}, el("td", {}, group), el("td", {}, kind), el("td", {}, el("span", { class: `pill ${state === "returned" ? "bad" : "good"}` }, state)),
    number(share(part)), number(count(requests)), number(count(failed)), number(time), el("td", { class: "soft" }, reason));
  const seconds = side => (side.requests > side.failed ? `${side.median_first_data_s.toFixed(3)} s` : "–");
  const rows = [];
  if (rollout) rows.push(row(rollout.group, "rollout", rollout.state, rollout.share, rollout.new.requests, rollout.new.failed, `${seconds(rollout.new)} / ${seconds(rollout.old)}`, rollout.reason));
  if (shadow) rows.push(row(shadow.group, "shadow", "running", shadow.share, shadow.sent, shadow.failed, shadow.time_over_clients === null ? "–" : `${shadow.time_over_clients} × whole answer`, `same text in ${shadow.same_text} of ${shadow.compared}`));
  return rows;
}

function budget(one) {
  const models = Object.entries(one.requests).map(([name, requests]) => `${name} ${count(requests)}`);
  const money = value => (value === null ? "no limit" : value.toPrecision(4));
  return el("tr", {}, el("td", {}, one.tenant || "everybody"), number(money(one.per_hour)), number(money(one.left)), el("td", {}, models.join(", ")));
}

function ejections(replicas) {
  const all = replicas.flatMap(one => one.recent_ejections.map(ejection => ({ name: one.name, ...ejection })));
  all.sort((one, other) => other.at - one.at);
  return all.slice(0, 20).map(one => el("tr", {}, el("td", {}, new Date(one.at * 1000).toLocaleTimeString()), el("td", {}, one.name), el("td", { class: "soft" }, one.reason)));
}

function fill(id, rows) {
  byId(id).replaceChildren(...rows);
  byId(`${id}-section`).hidden = rows.length === 0;
}

function limits({ scope, lost }) {
  if (lost) return ` · the store of limits is lost (${lost}): limits are local`;
  return scope === "shared" ? " · limits are shared" : "";
}

async function update() {
  try {
    const fleet = await getJson("/v1/fleet");
    byId("about").textContent = `policy ${fleet.policy} · ${fleet.replicas.length} replicas · ${fleet.open_requests} open requests${limits(fleet.limits)}`;
    fill("rollout", rolloutRows(fleet));
    fill("budgets", fleet.budgets.map(budget));
    fill("ejections", ejections(fleet.replicas));
    byId("replicas").replaceChildren(...fleet.replicas.map(replica));
    byId("routes").replaceChildren(...fleet.routes.map(route));
    byId("problem").hidden = true;
  } catch (error) {
    byId("problem").textContent = error.message;
    byId("problem").hidden = false;
  }
  setTimeout(update, EVERY_MS);
}

startShell();
update();

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
  return el("tr", {}, el("td", { class: "cut" }, one.id), el("td", {}, one.replica), el("td", {}, one.causes.join(", ")), el("td", {}, one.ended ?? "running"),
    el("td", { class: "soft" }, one.reason), el("td", { class: "soft" }, one.notes.join("; ")));
}

async function update() {
  try {
    const fleet = await getJson("/v1/fleet");
    byId("about").textContent = `policy ${fleet.policy} · ${fleet.replicas.length} replicas · ${fleet.open_requests} open requests`;
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

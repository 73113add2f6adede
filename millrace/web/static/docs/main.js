// The API documentation, drawn from /openapi.json.

import { getJson, headers } from "../common/api.js";
import { byId, el } from "../common/dom.js";
import { startShell } from "../common/shell.js";
import { kindOf, part, rich, row, typePart } from "./schema.js";
import { tryIt } from "./try.js";

const verb = method => el("span", { class: `verb ${method}` }, method === "delete" ? "DEL" : method.toUpperCase());
/** May break after a slash or an underscore, not within a word. */
const breakable = path => path.split(/(?<=[/_])/).flatMap(part => [part, el("wbr")]);
const namesIn = schema => (schema?.$ref ? [schema.$ref.split("/").pop()] : []);

function operation(api, path, method, spec, model) {
  const content = Object.values(spec.requestBody?.content ?? {})[0];
  const example = content?.example && "model" in content.example && model ? { ...content.example, model } : content?.example;
  const answers = Object.values(spec.responses["200"]?.content ?? {}).flatMap(entry => namesIn(entry.schema?.properties?.data?.contentSchema ?? entry.schema));
  const statuses = () => [el("table", {}, el("tbody", {}, Object.entries(spec.responses).map(([status, answer]) =>
    row(status, Object.entries(answer.content ?? {}).map(([media, entry]) => `${kindOf(entry.schema)} as ${media}`).join("; "), answer.description)))),
  ...[...new Set(answers)].map(name => typePart(api, name, ["answer"]))];
  const parameters = spec.parameters ?? [];
  return el("section", { class: "operation", id: spec.operationId }, el("h2", {}, verb(method), path),
    el("p", { class: "soft" }, spec.summary, ". ", rich(spec.description)),
    parameters.length ? part("Parameters", () => [el("table", {}, el("tbody", {}, parameters.map(one => row(one.name, `${kindOf(one.schema)}, in ${one.in}`, one.description, { isRequired: one.required }))))]) : null,
    namesIn(content?.schema).map(name => typePart(api, name)),
    part("Answers", statuses),
    part("Try it", () => [tryIt(method, path, spec, example)], spec.operationId === "createChatCompletion"));
}

function filter() {
  const wanted = byId("filter").value.trim().toLowerCase();
  for (const item of document.querySelectorAll("#index a")) item.hidden = Boolean(wanted) && !item.dataset.words.includes(wanted);
  for (const head of document.querySelectorAll("#index h2")) {
    let next = head.nextElementSibling, any = false;
    for (; next?.tagName === "A"; next = next.nextElementSibling) any ||= !next.hidden;
    head.hidden = !any;
  }
}

async function servedModel() {
  const answer = await fetch("/v1/models", { headers: headers() }).catch(() => null);
  return answer?.ok ? (await answer.json()).data[0]?.id : undefined;
}

let hasModel = false;

async function start() {
  const [api, model] = await Promise.all([getJson("/openapi.json"), servedModel()]);
  const main = byId("main"), index = byId("index");
  hasModel = Boolean(model);
  index.replaceChildren();
  main.replaceChildren(el("div", { class: "intro" }, el("h1", {}, "API"), el("p", { class: "soft" }, rich(api.info.description)),
    el("p", { class: "soft" }, `Version ${api.info.version} · `, el("a", { href: "/openapi.json" }, "openapi.json"))));
  for (const tag of api.tags) {
    index.append(el("h2", { title: tag.description }, tag.name));
    for (const [path, methods] of Object.entries(api.paths)) for (const [method, spec] of Object.entries(methods)) {
      if (!spec.tags.includes(tag.name)) continue;
      index.append(el("a", { href: `#${spec.operationId}`, data: { words: `${method} ${path} ${spec.summary}`.toLowerCase() }, on: { click: () => { if (isNarrow()) byId("contents").open = false; } } }, verb(method), el("span", {}, breakable(path))));
      main.append(operation(api, path, method, spec, model));
    }
  }
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

const isNarrow = () => matchMedia("(max-width: 56rem)").matches;
byId("contents").open = !isNarrow();
matchMedia("(max-width: 56rem)").addEventListener("change", event => { byId("contents").open = !event.matches; });
byId("filter").addEventListener("input", filter);
const show = () => start().catch(error => byId("main").replaceChildren(el("div", { class: "error-card" }, el("strong", {}, "The documentation could not be loaded"), el("p", {}, error.message))));
startShell();
show();
addEventListener("millrace:key", () => { if (!hasModel) show(); });  // The examples name the served model.

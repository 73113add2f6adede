// The request as a command or a program that repeats it.

import { codeBlock } from "../common/markdown.js";
import { el } from "../common/dom.js";
import { getKey } from "../common/api.js";

const STANDARD = new Set(["model", "messages", "prompt", "temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "stop", "stream", "logprobs", "top_logprobs", "response_format", "tools", "tool_choice", "reasoning_effort", "n", "logit_bias"]);

export function asCurl(body) {
  const data = JSON.stringify({ ...body, stream: true }, null, 2).replaceAll("'", "'\\''");
  const key = getKey() ? ` \\\n  -H "Authorization: Bearer $MILLRACE_KEY"` : "";
  return `curl -N ${location.origin}${"prompt" in body ? "/v1/completions" : "/v1/chat/completions"} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${data}'`;
}

export function asPython(body) {
  const own = Object.entries(body).filter(([name]) => STANDARD.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !STANDARD.has(name)));
  const lines = own.map(([name, value]) => `    ${name}=${literal(value, 1)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra, 1)},`);
  const key = getKey() ? 'os.environ["MILLRACE_KEY"]' : '"none"';
  return `${getKey() ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url=${literal(`${location.origin}/v1`)}, api_key=${key})\nanswer = client.${"prompt" in body ? "completions" : "chat.completions"}.create(\n${lines.join("\n")}\n    stream=True,\n)\n`
    + `for chunk in answer:\n    if chunk.choices:\n        print(chunk.choices[0].${"prompt" in body ? "text" : "delta.content"} or "", end="", flush=True)\n`;
}

/** A value as a Python literal. */
function literal(value, depth = 0) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const parts = Array.isArray(value) ? value.map(one => literal(one, depth + 1)) : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, depth + 1)}`);
  const short = open + parts.join(", ") + close;
  if (short.length + depth * 4 < 88) return short;
  const pad = "    ".repeat(depth + 1);
  return `${open}\n${parts.map(part => pad + part + ",").join("\n")}\n${"    ".repeat(depth)}${close}`;
}

export function snippetDialog(body) {
  const kinds = [["curl", "bash", asCurl(body)], ["Python", "python", asPython(body)], ["JSON", "json", JSON.stringify(body, null, 2)]];
  const view = el("div");
  const tabs = kinds.map(([name, language, text]) => el("button", { type: "button", role: "tab", class: "tab", on: { click: () => choose(name, language, text) } }, name));
  function choose(name, language, text) {
    tabs.forEach(tab => tab.setAttribute("aria-selected", String(tab.textContent === name)));
    view.replaceChildren(codeBlock(text, language));
  }
  const dialog = document.body.appendChild(el("dialog", { class: "wide", "aria-label": "This request as code", on: { close: () => dialog.remove() } },
    el("h2", {}, "This request as code"), el("div", { class: "tabs", role: "tablist" }, tabs), view,
    getKey() ? el("p", { class: "soft" }, "The key is not shown: put it in the variable MILLRACE_KEY.") : null,
    el("div", { class: "actions" }, el("button", { type: "button", on: { click: () => dialog.close() } }, "Close"))));
  choose(...kinds[0]);
  dialog.showModal();
}


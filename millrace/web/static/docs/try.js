// "Try it": sends the request with the tab's key and shows the answer as it arrives.

import { getKey, headers } from "../common/api.js";
import { copyText, el, icon, toast } from "../common/dom.js";

const MAX_SHOWN = 200_000;  // Characters of an answer that the page keeps.

export function tryIt(method, path, spec, example) {
  const media = Object.keys(spec.requestBody?.content ?? {})[0];
  const isForm = media === "multipart/form-data";
  const parameters = (spec.parameters ?? []).map(parameter => ({ ...parameter, input: el("input", { placeholder: parameter.required ? "required" : "", "aria-label": parameter.name, spellcheck: "false" }) }));
  const text = JSON.stringify(example ?? {}, null, 2);
  const body = media && !isForm ? el("textarea", { spellcheck: "false", "aria-label": "Request body", rows: Math.min(20, text.split("\n").length + 1), value: text }) : null;
  const purpose = isForm ? el("input", { value: "batch", "aria-label": "purpose" }) : null;
  const file = isForm ? el("input", { type: "file", "aria-label": "file" }) : null;
  const output = el("pre", { tabindex: "0", "aria-label": "Answer" }), head = el("div", { class: "head" });
  const answer = el("div", { class: "answer", hidden: true, "aria-live": "polite" }, head, output);
  const send = el("button", { type: "button" }, icon("play"), "Send"), stop = el("button", { type: "button", class: "plain", hidden: true }, "Stop");
  let abort = null;

  function target() {
    let url = path;
    const query = new URLSearchParams(), extra = {};
    for (const { name, in: where, required, input } of parameters) {
      const value = input.value.trim();
      if (!value && required) throw new Error(`Fill in ${name}.`);
      if (where === "path") url = url.replace(`{${name}}`, encodeURIComponent(value));
      else if (value && where === "query") query.set(name, value);
      else if (value) extra[name] = value;
    }
    return [url + (query.size ? `?${query}` : ""), extra];
  }

  async function run() {
    let url, extra;
    try { [url, extra] = target(); } catch (error) { toast(error.message, "bad"); return; }
    const init = { method: method.toUpperCase(), headers: headers(extra), cache: "no-store" };
    if (body) { init.body = body.value; init.headers["Content-Type"] = "application/json"; }
    if (isForm) {
      if (!file.files.length) { toast("Choose a file.", "bad"); return; }
      init.body = new FormData();
      init.body.append("purpose", purpose.value);
      init.body.append("file", file.files[0]);
    }
    abort = new AbortController();
    [answer.hidden, stop.hidden, send.disabled] = [false, false, true];
    head.replaceChildren(el("span", { class: "pill" }, "waiting"));
    output.textContent = "";
    const began = performance.now();
    try {
      const reply = await fetch(url, { ...init, signal: abort.signal });
      if (reply.status === 401) dispatchEvent(new Event("millrace:unauthorised"));
      const took = () => `${((performance.now() - began) / 1000).toFixed(2)} s`;
      const show = () => head.replaceChildren(el("span", { class: `pill ${reply.ok ? "good" : "bad"}` }, `${reply.status}`), el("span", { class: "soft" }, `${took()} · ${reply.headers.get("Content-Type") ?? ""}`));
      show();
      await read(reply, show);
    } catch (error) {
      head.replaceChildren(el("span", { class: "pill bad" }, error.name === "AbortError" ? "stopped" : "failed"));
      if (error.name !== "AbortError") output.textContent += error.message;
    }
    abort = null;
    [stop.hidden, send.disabled] = [true, false];
  }

  async function read(reply, show) {
    const isJson = reply.headers.get("Content-Type")?.startsWith("application/json");
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (let step; !(step = await reader.read()).done;) {
      text += step.value;
      if (!isJson) { output.append(step.value); if (text.length > MAX_SHOWN) { output.append("\n… (the rest is not shown)"); await reader.cancel(); break; } }
      show();
    }
    if (isJson) { try { output.textContent = JSON.stringify(JSON.parse(text), null, 2); } catch { output.textContent = text; } }
    if (!text) output.textContent = "(empty)";
  }

  function curl() {
    const [url, extra] = target();
    const lines = [`curl -N ${method === "get" ? "" : `-X ${method.toUpperCase()} `}'${location.origin}${url}'`];
    if (getKey()) lines.push('-H "Authorization: Bearer $MILLRACE_KEY"');
    for (const [name, value] of Object.entries(extra)) lines.push(`-H '${name}: ${value.replaceAll("'", "'\\''")}'`);
    if (body) lines.push("-H 'Content-Type: application/json'", `-d '${body.value.replaceAll("'", "'\\''")}'`);
    if (isForm) lines.push(`-F purpose=${purpose.value}`, "-F file=@FILE");
    return lines.join(" \\\n  ");
  }

  send.addEventListener("click", run);
  stop.addEventListener("click", () => abort?.abort());
  body?.addEventListener("keydown", event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(); });
  const copy = el("button", { type: "button", class: "plain", on: { click: async () => { try { await copyText(curl()); toast("Copied."); } catch (error) { toast(error.message, "bad"); } } } }, icon("copy"), "Copy as curl");
  const field = (name, input) => el("label", { class: "field" }, el("span", { class: "label" }, name), input);
  const named = isHeader => parameters.filter(one => (one.in === "header") === isHeader).map(one => field(one.name, one.input));
  const inputs = [...named(false), ...(isForm ? [field("purpose", purpose), field("file", file)] : [])];
  return el("div", { class: "try" }, inputs.length ? el("div", { class: "inputs" }, inputs) : null, body,
    named(true).length ? el("details", {}, el("summary", { class: "soft" }, "Headers"), el("div", { class: "inputs" }, named(true))) : null, el("div", { class: "actions" }, send, stop, copy), answer);
}

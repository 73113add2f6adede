// The settings of a pane: the form that edits them and the request that they make. An empty field is not sent.

import { el } from "../common/dom.js";

const NUMBERS = [
  ["temperature", "Temperature", "1", { min: 0, max: 2, step: 0.05 }, "0 always takes the likeliest token"],
  ["top_p", "Top p", "1", { min: 0.01, max: 1, step: 0.01 }, "keeps the likeliest tokens up to this total probability"],
  ["top_k", "Top k", "off", { min: 0, step: 1 }, "keeps the k likeliest tokens"],
  ["min_p", "Min p", "off", { min: 0, max: 1, step: 0.01 }, "drops tokens below this fraction of the likeliest one"],
  ["max_tokens", "Max tokens", "no limit", { min: 1, step: 1 }, "maximum number of output tokens"],
  ["seed", "Seed", "random", { step: 1 }, "the same seed gives the same text"],
  ["presence_penalty", "Presence penalty", "0", { min: -2, max: 2, step: 0.1 }, ""],
  ["frequency_penalty", "Frequency penalty", "0", { min: -2, max: 2, step: 0.1 }, ""],
  ["repetition_penalty", "Repetition penalty", "1", { min: 0.01, step: 0.05 }, ""],
];
const FIRST_NUMBERS = 6;
const NEUTRAL_TOP_K = 0;

const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { city: { type: "string" }, country: { type: "string" }, population: { type: "integer" } },
  required: ["city", "country", "population"],
  additionalProperties: false,
};
const EXAMPLE_TOOLS = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city now",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];
const pretty = value => JSON.stringify(value, null, 2);

export class SettingsError extends Error {}

function parsed(text, what, check) {
  let value;
  try { value = JSON.parse(text); } catch (error) { throw new SettingsError(`${what} is not valid JSON: ${error.message}`); }
  if (!check(value)) throw new SettingsError(`${what} has the wrong form.`);
  return value;
}
const isObject = value => value !== null && typeof value === "object" && !Array.isArray(value);

const readSchema = text => parsed(text || "null", "The schema", isObject);
const isTool = value => isObject(value) && typeof value.function?.name === "string" && value.function.name !== "";
const readTools = text => parsed(text || "null", "The list of tools", value => Array.isArray(value) && value.length > 0 && value.every(isTool));
const readExtra = text => (text?.trim() ? parsed(text, "The further fields", isObject) : {});

/** Why nothing can be sent with these settings, or null. */
export function problemOf(settings, models) {
  try { requestFields(settings, models); return null; } catch (error) { if (!(error instanceof SettingsError)) throw error; return error.message; }
}

/** The fields of the request that the settings ask for and the model can honour, without messages. Throws `SettingsError`. */
export function requestFields(settings, models) {
  const can = what => models.can(settings.model, what), isChat = can("chat");
  const fields = { model: settings.model };
  for (const [name] of NUMBERS) if (settings[name] !== undefined && settings[name] !== "") fields[name] = Number(settings[name]);
  const stops = (settings.stop ?? "").split("\n").filter(Boolean).map(one => one.replaceAll("\\n", "\n"));
  if (stops.length) fields.stop = stops;
  if (settings.priority) fields.priority = settings.priority;
  if (settings.reasoning && can("thinking")) fields.reasoning_effort = settings.reasoning;
  if (settings.logprobs && isChat) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
  if (settings.format === "json_object" && isChat) fields.response_format = { type: "json_object" };
  if (settings.format === "json_schema" && isChat) {
    const schema = readSchema(settings.schema);
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  if (settings.useTools && isChat && can("tools")) {
    fields.tools = readTools(settings.tools);
    if (settings.toolChoice) fields.tool_choice = settings.toolChoice;
  }
  return { ...fields, ...readExtra(settings.extra) };
}

/** `messages` for a model that chats; a base model continues their text. */
export function requestBody(settings, messages, models) {
  const fields = requestFields(settings, models);
  if (!models.can(settings.model, "chat")) return { ...fields, prompt: messages.map(one => one.content).join("") };
  const system = settings.system?.trim() ? [{ role: "system", content: settings.system }] : [];
  return { ...fields, messages: [...system, ...messages] };
}

/** One line for the head of a pane: what differs from the defaults. */
export function summary(settings) {
  const parts = NUMBERS.filter(([name]) => settings[name] !== undefined && settings[name] !== "").map(([name, label]) => `${label.toLowerCase()} ${settings[name]}`);
  if (settings.system?.trim()) parts.unshift("system prompt");
  if (settings.format && settings.format !== "text") parts.push(settings.format.replace("_", " "));
  if (settings.useTools) parts.push("tools");
  return parts.join(" · ") || "server defaults";
}

// ── the form ─────────────────────────────────────────────────────────────────────────────────────────────────────────
/** Fill `container`, a fieldset, with the form for `settings`; `onChange` is called after each edit. It is disabled until the
    models are known, because what it offers depends on them. */
export function settingsForm(container, settings, models, onChange) {
  const again = () => { settingsForm(container, settings, models, onChange); document.getElementById("set-model").focus(); };
  const can = what => models.can(settings.model, what), isChat = can("chat"), inForce = models.sampling(settings.model);
  const unsent = (name, unset) => (!models.isKnown ? "" : name in inForce && !(name === "top_k" && inForce[name] <= NEUTRAL_TOP_K) ? String(inForce[name]) : unset);
  const set = (name, value) => { settings[name] = value; onChange(); };
  const input = (name, props) => el("input", { id: `set-${name}`, value: settings[name] ?? "", ...props, on: { input: event => set(name, event.target.value) } });
  const area = (name, props) => el("textarea", { id: `set-${name}`, spellcheck: "false", value: settings[name] ?? "", ...props, on: { input: event => set(name, event.target.value) } });
  const row = (name, label, control, hint) => el("div", { class: "field" }, el("label", { for: `set-${name}` }, label), control, hint ? el("small", {}, hint) : null);
  const choice = (name, options, after) => {
    const control = el("select", { id: `set-${name}`, on: { change: event => { set(name, event.target.value); after?.(); } } },
      options.map(([value, label]) => el("option", { value }, label)));
    control.value = settings[name] ?? options[0][0];
    return control;
  };
  const number = ([name, label, unset, props, hint]) => el("div", { class: "field", title: hint || null }, el("label", { for: `set-${name}` }, label),
    input(name, { type: "number", inputmode: "decimal", placeholder: unsent(name, unset), ...props }));
  const check = (name, label, after) => {
    const box = el("input", { type: "checkbox", checked: Boolean(settings[name]), on: { change: event => { set(name, event.target.checked); after?.(); } } });
    return el("label", { class: "check" }, box, label);
  };
  /** A field for JSON: begins with an example, and says while one types whether it can be sent. */
  const json = (name, label, read, example, props) => {
    const verdict = el("small", { class: "verdict", id: `verdict-${name}`, role: "status" });
    const control = area(name, { rows: 9, class: "code", "aria-describedby": `verdict-${name}`, ...props });
    const judge = () => {
      let problem = null;
      try { read(control.value); } catch (error) { if (!(error instanceof SettingsError)) throw error; problem = error.message; }
      verdict.textContent = problem ?? (control.value.trim() ? "Valid" : "");
      verdict.classList.toggle("bad", problem !== null);
      control.setAttribute("aria-invalid", String(problem !== null));
    };
    const restore = () => { control.value = pretty(example); set(name, control.value); judge(); };
    control.addEventListener("input", judge);
    judge();
    const box = el("div", { class: "field" }, el("label", { for: `set-${name}` }, label), control, verdict, example ? el("button", { type: "button", class: "link", on: { click: restore } }, "Restore the example") : null);
    return { box, prefill: () => { if (!control.value.trim()) restore(); } };
  };
  const schema = json("schema", "JSON schema", readSchema, EXAMPLE_SCHEMA, {});
  const tools = json("tools", "Tools, as JSON", readTools, EXAMPLE_TOOLS, {});
  const extra = json("extra", "Further fields, as JSON", readExtra, null, { rows: 2, placeholder: '{"ignore_eos": true}' });
  const toolBox = el("div", { class: "stack" }, tools.box,
    row("toolChoice", "Tool choice", choice("toolChoice", [["", "auto"], ["required", "required"], ["none", "none"]]), "When the model calls a tool, you type its result."));
  const show = () => {
    if (settings.format === "json_schema") schema.prefill();
    if (settings.useTools) tools.prefill();
    schema.box.hidden = settings.format !== "json_schema";
    toolBox.hidden = !settings.useTools;
  };
  const reset = () => {
    for (const name of Object.keys(settings)) if (name !== "model") delete settings[name];
    onChange();
    again();
  };
  const why = text => el("p", { class: "why soft" }, text);
  const group = (title, ...content) => el("section", {}, el("h3", {}, title), content);
  const names = models.list.map(model => [model.id, model.id]);
  if (settings.model && !models.has(settings.model)) names.push([settings.model, `${settings.model} (not served)`]);

  container.replaceChildren(
    el("section", {}, row("model", "Model", choice("model", names.length ? names : [["", "not known yet"]], again)),
      isChat ? row("system", "System prompt", area("system", { rows: 4, spellcheck: "true", placeholder: "You are …" })) : why("A base model: it continues text. It has no chat template, so there are no system prompt, formats, reasoning or tools.")),
    group("Sampling", el("div", { class: "grid" }, NUMBERS.slice(0, FIRST_NUMBERS).map(number)),
      el("details", { open: NUMBERS.slice(FIRST_NUMBERS).some(([name]) => settings[name]) || Boolean(settings.stop) },
        el("summary", {}, "Penalties and stop strings"), el("div", { class: "grid" }, NUMBERS.slice(FIRST_NUMBERS).map(number)),
        row("stop", "Stop strings, one per line", area("stop", { rows: 2, class: "code" })))),
    ...(isChat ? [
      group("Output", row("format", "Format", choice("format", [["text", "Text"], ["json_object", "JSON object"], ["json_schema", "JSON schema"]], show)), schema.box,
        can("thinking") ? row("reasoning", "Reasoning effort", choice("reasoning", [["", "default"], ["none", "none"], ["low", "low"], ["medium", "medium"], ["high", "high"]])) : why("No reasoning effort: this model does not reason before it answers."),
        check("logprobs", "Token probabilities")),
      group("Tools", ...(can("tools") ? [check("useTools", "Offer tools to the model", show), toolBox] : [why("This model takes no tools.")])),
    ] : []),
    group("Request", row("priority", "Priority", choice("priority", [["", "default"], ["interactive", "interactive"], ["standard", "standard"], ["batch", "batch"]])), extra.box),
    el("section", {}, el("button", { type: "button", class: "plain", on: { click: reset } }, "Reset the settings")),
  );
  container.disabled = !models.isKnown;
  show();
}

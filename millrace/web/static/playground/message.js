// One message of a conversation as DOM nodes.

import { copyButton, el, icon, iconButton } from "../common/dom.js";
import { codeBlock, renderMarkdown } from "../common/markdown.js";
import { thumbnail } from "./images.js";
import { compare } from "./schema_check.js";
import { tokenView } from "./tokens.js";

const seconds = value => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`);
const FINISH = { length: "The limit of tokens was reached.", stopped: "Stopped.", content_filter: "The answer was filtered." };

/**
 * `actions`: regenerate, edit, branch, continueFrom, sendToolResults, switchBranch, retry.
 * Returns { root, update }; `update` is cheap and is called for each frame of a stream.
 */
export function messageView(node, place, actions) {
  if (node.role === "user") return userMessage(node, place, actions);
  if (node.role === "tool") return toolMessage(node);
  return assistantMessage(node, place, actions);
}

function branchSwitch(node, { index, count }, actions) {
  if (count < 2) return null;
  return el("span", { class: "branches" }, iconButton("left", "Previous branch", () => actions.switchBranch(node, -1), { disabled: index === 0 }),
    el("span", { "aria-label": `Branch ${index + 1} of ${count}` }, `${index + 1}/${count}`),
    iconButton("right", "Next branch", () => actions.switchBranch(node, 1), { disabled: index === count - 1 }));
}

// ── user ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
function userMessage(node, place, actions) {
  const text = el("div", { class: "bubble" }, node.content);
  const images = node.images?.length ? el("div", { class: "thumbnails" }, node.images.map(url => thumbnail(url))) : null;
  const root = el("article", { class: "message user", "aria-label": "You" }, images, node.content ? text : null);
  const bar = el("footer", {}, branchSwitch(node, place, actions), copyButton(() => node.content),
    iconButton("edit", "Edit and send as a new branch", () => root.replaceChildren(editor())));
  const editor = () => {
    const area = el("textarea", { rows: Math.min(12, node.content.split("\n").length + 1), "aria-label": "Edit the message", value: node.content });
    const form = el("form", { class: "editor", on: { submit: event => { event.preventDefault(); actions.edit(node, area.value); } } }, area,
      el("div", { class: "actions" }, el("button", { type: "button", class: "plain", on: { click: () => { root.replaceChildren(...content); } } }, "Cancel"), el("button", {}, "Send")));
    area.addEventListener("keydown", event => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
      if (event.key === "Escape") { event.stopPropagation(); root.replaceChildren(...content); }
    });
    queueMicrotask(() => area.focus());
    return form;
  };
  root.append(bar);
  const content = [...root.childNodes];
  return { root, update: () => {}, edit: () => root.replaceChildren(editor()) };
}

function toolMessage(node) {
  return { root: el("article", { class: "message tool", "aria-label": "Tool result" }, el("h4", {}, node.name ? `Result of ${node.name}` : "Tool result"), codeBlock(node.content, looksLikeJson(node.content) ? "json" : "")), update: () => {} };
}

// ── assistant ────────────────────────────────────────────────────────────────────────────────────────────────────────
function assistantMessage(node, place, actions) {
  const thought = el("div", { class: "markdown" });
  const reasoning = el("details", { class: "reasoning", hidden: true }, el("summary", {}, "Reasoning"), thought);
  const text = el("div", { class: "markdown" });
  const calls = el("div", { class: "calls" });
  const notice = el("div");
  const bar = el("footer", {}), stats = el("span", { class: "stats" });
  const root = el("article", { class: "message assistant", "aria-label": "Answer" }, reasoning, text, calls, notice, bar);
  let mode = node.tokens?.length ? "tokens" : "text", shownMode = null, shownButtons = null, wasOpened = false;

  function update() {
    root.classList.toggle("running", node.status === "running");
    root.setAttribute("aria-busy", String(node.status === "running"));
    const waiting = node.status === "running" && !node.content && !node.reasoning && !node.toolCalls;
    root.classList.toggle("waiting", waiting);
    if (node.reasoning) {
      reasoning.hidden = false;
      if (!wasOpened) { wasOpened = true; reasoning.open = node.status === "running"; }
      if (node.content && shownMode === null && node.status === "running") reasoning.open = false;
      renderMarkdown(thought, node.reasoning);
    }
    showText();
    showCalls();
    showNotice();
    stats.textContent = statsText(node);
    // Only when they change: a click is lost if its button is replaced between press and release.
    const buttons = node.status === "running" ? "running" : [node.status, mode, Boolean(node.tokens?.length), node.requestId].join();
    if (buttons === shownButtons) return;
    shownButtons = buttons;
    bar.replaceChildren(...footer());
  }

  function showText() {
    const effective = node.status === "running" && mode === "tokens" ? "text" : mode;
    if (effective === "tokens" && node.tokens?.length) {
      if (shownMode !== "tokens") { text.blockSources = null; text.replaceChildren(tokenView(node, prefix => actions.continueFrom(node, prefix))); }
    } else {
      if (shownMode === "tokens") { text.blockSources = null; text.replaceChildren(); }
      if (node.isPlain) text.replaceChildren(el("div", { class: "plain-text" }, node.content));
      else if (node.format === "json" && node.status === "done") { text.blockSources = null; text.replaceChildren(codeBlock(prettyJson(node.content), "json")); }
      else renderMarkdown(text, node.content);
    }
    if (node.content || node.tokens) shownMode = effective;
  }

  function showCalls() {
    if (!node.toolCalls?.length || calls.dataset.done) return;
    calls.replaceChildren(...node.toolCalls.map(call => el("div", { class: "call" }, el("h4", {}, icon("code"), call.name || "…"), codeBlock(prettyJson(call.arguments), "json"))));
    if (node.status === "running") return;
    calls.dataset.done = "yes";
    if (node.status === "done" && place.isLast) calls.append(resultForm(node, actions));
  }

  function showNotice() {
    if (node.error) notice.replaceChildren(errorCard(node.error, () => actions.regenerate(node)));
    else if (FINISH[node.finish]) notice.replaceChildren(el("p", { class: "notice" }, FINISH[node.finish],
      place.isLast && !node.toolCalls ? el("button", { type: "button", class: "link", on: { click: () => actions.continueFrom(node, node.content) } }, "Continue") : null));
    else if (node.format === "json" && node.status === "done") notice.replaceChildren(jsonVerdict(node.content, node.schema));
  }

  function footer() {
    const parts = [branchSwitch(node, place, actions)];
    if (node.status !== "running") {
      parts.push(copyButton(() => node.content), iconButton("retry", "Regenerate as a new branch", () => actions.regenerate(node)));
      if (node.tokens?.length) parts.push(iconButton("tokens", mode === "tokens" ? "Show as text" : "Show token probabilities", () => { mode = mode === "tokens" ? "text" : "tokens"; update(); }, { "aria-pressed": String(mode === "tokens") }));
      if (node.requestId) parts.push(el("a", { class: "ghost", href: `/dashboard#request=${encodeURIComponent(node.requestId)}`, title: "Timeline of this request", "aria-label": "Timeline of this request" }, icon("clock")));
    }
    return [...parts, stats].filter(Boolean);
  }
  update();
  return { root, update };
}

function statsText({ stats, model }) {
  if (!stats) return model ?? "";
  const parts = [];
  if (stats.ttft !== null) parts.push(`TTFT ${seconds(stats.ttft)}`);
  if (stats.rate) parts.push(`${stats.rate.toFixed(stats.rate < 10 ? 1 : 0)} tok/s`);
  if (stats.output) parts.push(`${stats.output} tokens`);
  if (stats.prompt) parts.push(`prompt ${stats.prompt}${stats.cached ? ` (${stats.cached} cached)` : ""}`);
  return parts.join(" · ");
}

function resultForm(node, actions) {
  const areas = node.toolCalls.map(call => el("textarea", { rows: 2, class: "code", placeholder: '{"result": …}', "aria-label": `Result of ${call.name}` }));
  return el("form", { class: "editor", on: { submit: event => { event.preventDefault(); actions.sendToolResults(node, areas.map(area => area.value)); } } },
    node.toolCalls.map((call, number) => el("div", { class: "field" }, el("label", {}, `Result of ${call.name}`), areas[number])),
    el("div", { class: "actions" }, el("button", {}, node.toolCalls.length > 1 ? "Send results" : "Send result")));
}

function errorCard(error, retry) {
  const head = error.status ? `Error ${error.status}${error.code ? ` · ${error.code}` : ""}` : "The request failed";
  return el("div", { class: "error-card", role: "alert" }, el("strong", {}, head), el("p", {}, error.message),
    error.param ? el("p", { class: "soft" }, "Field: ", el("code", {}, error.param)) : null,
    el("button", { type: "button", class: "plain", on: { click: retry } }, "Try again"));
}

const looksLikeJson = text => /^\s*[[{]/.test(text);
function prettyJson(text) { try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; } }
function jsonVerdict(text, schema) {
  const good = verdict => el("p", { class: "notice good" }, icon("check"), verdict), bad = verdict => el("p", { class: "notice bad" }, verdict);
  let value;
  try { value = JSON.parse(text); } catch (error) { return bad(`Does not parse as JSON: ${error.message}`); }
  if (!schema) return good("Parses as JSON");
  const { problem, isComplete } = compare(value, schema);
  if (problem) return bad(`Does not match your schema: ${problem}`);
  return good(isComplete ? "Matches your schema" : "Parses as JSON, and matches the parts of your schema that this page knows");
}

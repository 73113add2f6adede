// One conversation on the page: shows the tree's path, runs generations, keeps the view at the end of the text.

import { el, iconButton } from "../common/dom.js";
import { generate } from "./generate.js";
import { messageView } from "./message.js";
import { requestBody, SettingsError, summary } from "./settings.js";
import { hidePopover, placePopover } from "./tokens.js";
import { addNode, lastOf, messagesBefore, path, siblings, switchBranch } from "./tree.js";

const STARTERS = ["Explain how a prefix cache speeds up chat.", "Write a Python function that merges two sorted lists.", "Compare TCP and UDP in a table.", "Name three rivers of Europe, as JSON."];
const SMALL_STARTERS = ["What is the capital of France? Answer in one sentence.", "Explain in two sentences why the sky is blue.", "Give me three tips for a good night's sleep.", "Write a polite email that asks for a day off."];
const BEGINNINGS = ["Once upon a time, in a village by the river,", "The three most important inventions of the last century are", "Dear Sir or Madam,\n\nI am writing to", "def is_prime(number):\n"];
const STARTER_TOKENS = 300;  // A first answer must end by itself, whatever the model does.

export class Pane {
  /** `hooks`: changed(), runningChanged(), openSettings(pane), close(pane), start(text, maxTokens). `models`: what they can do. */
  constructor(data, hooks, models) {
    Object.assign(this, { data, hooks, models, views: [], abort: null });
    this.list = el("div", { class: "messages", role: "log", "aria-label": "Conversation" });
    this.jump = iconButton("down", "Jump to the latest message", () => this.toEnd(), { class: "ghost jump", hidden: true });
    this.title = el("strong");
    this.summary = el("span", { class: "soft" });
    this.head = el("header", { class: "pane-head" }, el("button", { type: "button", class: "pane-name", title: "Settings of this side", on: { click: () => hooks.openSettings(this) } }, this.title, this.summary),
      iconButton("close", "Close this side", () => hooks.close(this)));
    this.scroller = el("div", { class: "scroller" }, this.list);
    this.root = el("section", { class: "pane", "aria-label": "Chat" }, this.head, this.scroller, this.jump);
    this.scroller.addEventListener("scroll", () => { this.jump.hidden = this.isAtEnd(); placePopover(); }, { passive: true });
    this.render();
  }

  get isRunning() { return this.abort !== null; }
  /** True for a model without a chat template, which continues text. */
  get isBase() { return !this.models.can(this.data.settings.model, "chat"); }

  showSettings() {
    this.title.textContent = this.data.settings.model || "No model";
    this.summary.textContent = summary(this.data.settings);
    this.root.classList.toggle("base", this.isBase);
    if (this.list.firstChild?.classList.contains("empty")) this.list.replaceChildren(this.empty());
  }

  // ── showing ─────────────────────────────────────────────────────────────────────────────────────────────────────────
  render() {
    hidePopover();
    this.showSettings();
    const nodes = path(this.data.tree);
    this.views = nodes.map((node, number) => {
      const family = siblings(this.data.tree, node);
      const place = { index: family.indexOf(node.id), count: family.length, isLast: number === nodes.length - 1 };
      return { node, ...messageView(node, place, this) };
    });
    this.list.replaceChildren(...(nodes.length ? this.views.map(view => view.root) : [this.empty()]));
    this.toEnd();
  }

  empty() {
    const { model } = this.data.settings, better = this.models.suggestion(model);
    const starters = !this.models.isKnown ? [] : this.isBase ? BEGINNINGS : better ? SMALL_STARTERS : STARTERS;
    const size = better?.download_bytes ? `, a download of ${(better.download_bytes / 1e9).toFixed(1)} GB,` : "";
    return el("div", { class: "empty" }, el("h2", {}, this.isBase ? "What shall it continue?" : "What shall we try?"),
      el("p", { class: "soft" }, this.isBase ? `${model} is a base model: it continues the text that you give it.` : "Everything stays between this browser and this server."),
      el("div", { class: "starters" }, starters.map(text => el("button", { type: "button", class: "plain", on: { click: () => this.hooks.start(text, STARTER_TOKENS) } }, text))),
      better ? el("p", { class: "nudge soft" }, "This is a small model, good for a first try. For better answers ", el("code", {}, `millrace serve ${better.name}`), `${size} fits this machine.`) : null);
  }

  isAtEnd() { return this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < 80; }
  toEnd() { this.scroller.scrollTop = this.scroller.scrollHeight; this.jump.hidden = true; }

  /** Redraw the node that is being written, at most once per frame. */
  refresh(node) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      const stick = this.isAtEnd();
      this.views.find(view => view.node === node)?.update();
      if (stick) this.toEnd(); else this.jump.hidden = false;
    });
  }

  // ── what the user does ──────────────────────────────────────────────────────────────────────────────────────────────
  /** `maxTokens`: limit of this answer, if the settings have none. */
  send(content, images, maxTokens = null) {
    const last = lastOf(this.data.tree);
    const user = addNode(this.data.tree, last.id, { role: "user", content, ...(images.length ? { images: [...images] } : {}) });
    return this.answer(user.id, "", maxTokens);
  }

  regenerate(node) { return this.answer(node.parent); }

  edit(node, content) {
    const user = addNode(this.data.tree, node.parent, { role: "user", content, ...(node.images ? { images: node.images } : {}) });
    return this.answer(user.id);
  }

  /** A new branch whose answer begins with `prefix`. */
  continueFrom(node, prefix) { return this.answer(node.parent, prefix); }

  sendToolResults(node, results) {
    let parent = node.id;
    node.toolCalls.forEach((call, number) => { parent = addNode(this.data.tree, parent, { role: "tool", toolCallId: call.id, name: call.name, content: results[number] }).id; });
    return this.answer(parent);
  }

  switchBranch(node, by) { switchBranch(this.data.tree, node, by); this.render(); this.hooks.changed(); }

  editLast() {
    const view = this.views.findLast(one => one.node.role === "user");
    view?.edit();
  }

  stop() { this.abort?.abort(); }

  async answer(parent, prefix = "", maxTokens = null) {
    if (this.isRunning) return;
    const node = addNode(this.data.tree, parent, { role: "assistant", content: prefix, ...(prefix ? { prefix } : {}), model: this.data.settings.model });
    let body;
    try {
      body = requestBody(this.data.settings, messagesBefore(this.data.tree, node), this.models);
    } catch (error) {
      if (!(error instanceof SettingsError)) throw error;
      Object.assign(node, { status: "failed", error: { message: error.message, status: 0, code: null, param: null } });
      this.render();
      this.hooks.openSettings(this);
      return;
    }
    if (maxTokens !== null) body = { max_tokens: maxTokens, ...body };
    if ("prompt" in body) { node.isPlain = true; body.prompt += prefix; }
    else if (prefix) Object.assign(body, { continue_final_message: true, add_generation_prompt: false, messages: [...body.messages, { role: "assistant", content: prefix }] });
    if (body.response_format) Object.assign(node, { format: "json", schema: body.response_format.json_schema?.schema ?? null });
    this.abort = new AbortController();
    this.hooks.runningChanged();
    const done = generate(node, body, this.abort.signal, () => this.refresh(node));
    this.render();
    await done;
    this.abort = null;
    const stick = this.isAtEnd(), top = this.scroller.scrollTop;
    this.render();
    if (!stick) this.scroller.scrollTop = top;
    this.hooks.runningChanged();
    this.hooks.changed();
  }

  /** The next request as it would be sent, for copying. */
  preview(draft) {
    const messages = messagesBefore(this.data.tree, { parent: lastOf(this.data.tree).id });
    const last = messages.at(-1);
    if (draft || !messages.length) messages.push({ role: "user", content: draft || "Hello" });
    else if (last.role === "assistant") messages.pop();
    return requestBody(this.data.settings, messages, this.models);
  }
}

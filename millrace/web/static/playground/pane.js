// One conversation on the page: shows the tree's path, runs generations, keeps the view at the end of the text.

import { el, iconButton } from "../common/dom.js";
import { generate } from "./generate.js";
import { messageView } from "./message.js";
import { requestBody, SettingsError, summary } from "./settings.js";
import { hidePopover, placePopover } from "./tokens.js";
import { addNode, lastOf, messagesBefore, path, siblings, switchBranch } from "./tree.js";

const STARTERS = ["Explain how a prefix cache speeds up chat.", "Write a Python function that merges two sorted lists.", "Compare TCP and UDP in a table.", "Name three rivers of Europe, as JSON."];

export class Pane {
  /** `hooks`: changed(), runningChanged(), openSettings(pane), close(pane), notify(text). */
  constructor(data, hooks) {
    Object.assign(this, { data, hooks, views: [], abort: null });
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

  showSettings() {
    this.title.textContent = this.data.settings.model || "No model";
    this.summary.textContent = summary(this.data.settings);
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
    return el("div", { class: "empty" }, el("h2", {}, "What shall we try?"), el("p", { class: "soft" }, "Everything stays between this browser and this server."),
      el("div", { class: "starters" }, STARTERS.map(text => el("button", { type: "button", class: "plain", on: { click: () => this.hooks.start(text) } }, text))));
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
  send(content, images) {
    const last = lastOf(this.data.tree);
    const user = addNode(this.data.tree, last.id, { role: "user", content, ...(images.length ? { images: [...images] } : {}) });
    return this.answer(user.id);
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

  async answer(parent, prefix = "") {
    if (this.isRunning) return;
    const node = addNode(this.data.tree, parent, { role: "assistant", content: prefix, ...(prefix ? { prefix } : {}), model: this.data.settings.model });
    let body;
    try {
      body = requestBody(this.data.settings, messagesBefore(this.data.tree, node));
    } catch (error) {
      if (!(error instanceof SettingsError)) throw error;
      Object.assign(node, { status: "failed", error: { message: error.message, status: 0, code: null, param: null } });
      this.render();
      this.hooks.openSettings(this);
      return;
    }
    if (prefix) Object.assign(body, { continue_final_message: true, add_generation_prompt: false, messages: [...body.messages, { role: "assistant", content: prefix }] });
    if (body.response_format) node.format = "json";
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
    return requestBody(this.data.settings, messages);
  }
}

// What every page has: theme switch, key dialog, and whether the server is ready.

import { getKey, setKey } from "./api.js";
import { byId, el, icon } from "./dom.js";

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function themeSwitch() {
  const button = byId("theme");
  const show = () => {
    button.replaceChildren(icon(isDark() ? "sun" : "moon"));
    button.title = isDark() ? "Light theme" : "Dark theme";
    button.setAttribute("aria-label", button.title);
  };
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try { localStorage.setItem("millrace.theme", theme); } catch { /* Applies to this page only. */ }
    show();
    dispatchEvent(new Event("millrace:theme"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { show(); dispatchEvent(new Event("millrace:theme")); });
  show();
}

function keyDialog() {
  const button = byId("key");
  const input = el("input", { type: "password", name: "key", autocomplete: "off", spellcheck: "false", placeholder: "Key", "aria-label": "API key" });
  const why = el("p", { class: "soft" }, "The key stays in this tab and is forgotten when the tab closes.");
  const dialog = document.body.appendChild(el("dialog", { class: "small", "aria-label": "API key" }));
  const close = () => dialog.close();
  const save = event => { event.preventDefault(); setKey(input.value.trim()); close(); };
  dialog.append(el("form", { on: { submit: save } }, el("h2", {}, "API key"), why, input,
    el("div", { class: "actions" },
      el("button", { type: "button", class: "plain", on: { click: () => { input.value = ""; setKey(""); close(); } } }, "Forget"),
      el("button", { type: "submit" }, "Use key"))));
  const open = () => { input.value = getKey(); if (!dialog.open) dialog.showModal(); input.focus(); };
  const show = () => {
    button.replaceChildren(icon("key"));
    button.classList.toggle("on", Boolean(getKey()));
    button.title = getKey() ? "API key: set for this tab" : "API key";
    button.setAttribute("aria-label", button.title);
  };
  button.addEventListener("click", open);
  addEventListener("millrace:key", show);
  addEventListener("millrace:unauthorised", () => {
    why.textContent = getKey() ? "The server does not know this key. Enter another one." : "This server requires a key. It stays in this tab and is forgotten when the tab closes.";
    open();
  });
  show();
}

/** Shows readiness; asks every 5 s, more often while not ready. `onReady` runs each time it becomes ready. */
function readiness(onReady) {
  const pill = byId("status");
  let wasReady = false;
  async function ask() {
    let text, kind;
    try {
      const answer = await fetch("/ready", { cache: "no-store" });
      const body = await answer.json();
      [text, kind] = answer.ok ? ["Ready", "good"] : [body.reason ?? "Not ready", "warn"];
    } catch { [text, kind] = ["Not reachable", "bad"]; }
    pill.className = `pill ${kind}`;
    pill.textContent = text;
    pill.title = text;
    const ready = kind === "good";
    if (ready && !wasReady) onReady?.();
    wasReady = ready;
    setTimeout(ask, document.hidden ? 30000 : ready ? 5000 : 1500);
  }
  ask();
}

export function startShell({ onReady } = {}) {
  themeSwitch();
  keyDialog();
  readiness(onReady);
}

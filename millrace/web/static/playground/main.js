// The playground: chats, panes, composer and settings, wired together.

import { byId, el, icon, iconButton, toast } from "../common/dom.js";
import { startShell } from "../common/shell.js";
import { readImage, thumbnail } from "./images.js";
import { Pane } from "./pane.js";
import { Models } from "./facts.js";
import { problemOf, settingsForm, SettingsError } from "./settings.js";
import { snippetDialog } from "./snippets.js";
import { deleteChat, lastSettings, listChats, loadChat, newChat, rememberSettings, saveChat } from "./store.js";
import { path } from "./tree.js";

const MAX_PANES = 2;
const input = byId("input");
const drawers = { chats: byId("chats"), settings: byId("settings") };
const models = new Models();
let chat, panes = [], active = 0, images = [], submitWhenReady = false;

// ── chats ────────────────────────────────────────────────────────────────────────────────────────────────────────────
function open(next) {
  panes.forEach(pane => pane.stop());
  chat = next;
  active = 0;
  images = [];
  showPanes();
  showChats();
  showImages();
}

function save() {
  if (!chat.panes.some(pane => path(pane.tree).length)) return;
  if (chat.title === "New chat") chat.title = titleOf(chat);
  const problem = saveChat(chat);
  if (problem) toast(problem, "bad");
  showChats();
}

function titleOf({ panes: [first] }) {
  const text = path(first.tree).find(node => node.role === "user")?.content.trim() ?? "";
  return text.split("\n")[0].slice(0, 60) || "New chat";
}

function showChats() {
  const chats = listChats();
  byId("chat-list").replaceChildren(...chats.map(one => el("li", { class: one.id === chat.id ? "current" : "" },
    el("button", { type: "button", class: "chat-name", "aria-current": one.id === chat.id ? "true" : null, title: one.title, on: { click: () => { const found = loadChat(one.id); if (found) open(found); toggle("chats", false); } } }, one.title),
    iconButton("trash", `Delete the chat ${one.title}`, () => dropChat(one)))));
  byId("no-chats").hidden = chats.length > 0;
}

function dropChat({ id, title }) {
  const restore = deleteChat(id), wasOpen = id === chat.id;
  if (wasOpen) open(fresh()); else showChats();
  toast(`The chat “${title.slice(0, 40)}” is deleted.`, "", ["Undo", () => {
    restore();
    const found = wasOpen ? loadChat(id) : null;
    if (found) open(found); else showChats();
  }]);
}

const fresh = () => newChat({ ...lastSettings(), model: defaultModel(lastSettings().model) });
const defaultModel = wanted => (models.has(models.rootOf(wanted)) ? models.rootOf(wanted) : models.list[0]?.id ?? wanted ?? "");

// ── panes ────────────────────────────────────────────────────────────────────────────────────────────────────────────
function showPanes() {
  panes = chat.panes.map(data => new Pane(data, { changed: save, runningChanged: showRunning, openSettings: pane => openSettings(panes.indexOf(pane)), close: closePane, start: (text, maxTokens) => { input.value = text; submit(maxTokens); } }, models));
  byId("panes").replaceChildren(...panes.map(pane => pane.root));
  byId("panes").classList.toggle("two", panes.length > 1);
  byId("compare").setAttribute("aria-pressed", String(panes.length > 1));
  byId("compare").disabled = !models.isKnown;
  showSettings();
  showRunning();
}

function compare() {
  if (panes.some(pane => pane.isRunning)) return;
  if (chat.panes.length >= MAX_PANES) chat.panes.pop();
  else {
    chat.panes.push(structuredClone(chat.panes[0]));
    const other = models.list.find(model => model.id !== models.rootOf(chat.panes[0].settings.model));
    if (other) chat.panes[1].settings.model = other.id;
  }
  active = chat.panes.length - 1;
  showPanes();
  save();
}

function closePane(pane) {
  pane.stop();
  chat.panes.splice(panes.indexOf(pane), 1);
  active = 0;
  showPanes();
  save();
}

function showRunning() {
  const running = panes.some(pane => pane.isRunning);
  const button = byId("send");
  button.replaceChildren(icon(running ? "stop" : "send"));
  button.title = running ? "Stop (Esc)" : "Send (Enter)";
  button.setAttribute("aria-label", running ? "Stop" : "Send");
  button.classList.toggle("stop", running);
  const problem = running ? null : panes.map(pane => problemOf(pane.data.settings, models)).find(Boolean) ?? null;
  button.disabled = problem !== null;
  if (problem) button.title = problem;
  input.placeholder = panes.every(pane => pane.isBase) ? "Text to continue" : "Message";
}

// ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────
function showSettings() {
  const tabs = byId("sides");
  tabs.hidden = panes.length < 2;
  tabs.replaceChildren(...panes.map((_, number) => el("button", { type: "button", role: "tab", class: "tab", "aria-selected": String(number === active), on: { click: () => openSettings(number) } }, number ? "Right side" : "Left side")));
  const pane = panes[active];
  settingsForm(byId("settings-form"), pane.data.settings, models, () => {
    pane.showSettings();
    showName();
    rememberSettings(pane.data.settings);
    showAttach();
    showRunning();
    if (path(pane.data.tree).length) saveSoon();
  });
  showName();
  showAttach();
}

function showName() { byId("model-name").textContent = panes.map(one => one.data.settings.model || "no model").join(" | "); }

let timer;
function saveSoon() { clearTimeout(timer); timer = setTimeout(save, 400); }

function openSettings(number) {
  active = number;
  showSettings();
  toggle("settings", true);
}

// ── composer ─────────────────────────────────────────────────────────────────────────────────────────────────────────
/** `maxTokens`: for answers whose settings have no limit. */
function submit(maxTokens = null) {
  if (panes.some(pane => pane.isRunning) || byId("send").disabled) return;
  const text = panes.every(pane => pane.isBase) ? input.value : input.value.trim();
  if (!text && !images.length) return;
  if (!panes.every(pane => pane.data.settings.model)) { submitWhenReady = true; toast("Waiting for the server's list of models."); return; }
  input.value = "";
  grow();
  const attached = images;
  images = [];
  showImages();
  panes.forEach(pane => pane.send(text, attached, maxTokens));
  save();
}

const stop = () => panes.forEach(pane => pane.stop());

function grow() {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight, innerHeight * 0.4)}px`;
}

function showAttach() { byId("attach").hidden = !panes.some(pane => models.can(pane.data.settings.model, "vision")); }

function showImages() {
  byId("attached").replaceChildren(...images.map((url, number) => thumbnail(url, () => { images = images.filter((_, other) => other !== number); showImages(); })));
}

async function attach(files) {
  for (const file of files) { const url = await readImage(file); if (url) images = [...images, url]; }
  showImages();
}

input.addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  if (event.key === "ArrowUp" && !input.value) { event.preventDefault(); panes[active].editLast(); }
});
input.addEventListener("input", grow);
input.addEventListener("paste", event => { if (!byId("attach").hidden && event.clipboardData?.files.length) { event.preventDefault(); attach(event.clipboardData.files); } });
byId("composer").addEventListener("submit", event => { event.preventDefault(); if (panes.some(pane => pane.isRunning)) stop(); else submit(); });
byId("file").addEventListener("change", event => { attach(event.target.files); event.target.value = ""; });
byId("attach").addEventListener("click", () => byId("file").click());

// ── drawers and keys ─────────────────────────────────────────────────────────────────────────────────────────────────
const isNarrow = name => matchMedia(name === "chats" ? "(max-width: 60rem)" : "(max-width: 78rem)").matches;

function toggle(name, wanted) {
  const drawer = drawers[name];
  const isOpen = wanted ?? !drawer.classList.contains("open");
  for (const [other, one] of Object.entries(drawers)) if (isOpen && other !== name && isNarrow(other)) one.classList.remove("open");
  if (isNarrow(name)) drawer.classList.toggle("open", isOpen);
  else if (wanted === undefined) drawer.classList.toggle("closed");
  else if (wanted) drawer.classList.remove("closed");
  byId("backdrop").hidden = !Object.entries(drawers).some(([other, one]) => isNarrow(other) && one.classList.contains("open"));
  showExpanded();
  if (isNarrow(name) && isOpen) drawer.querySelector("button, select")?.focus();
}

function showExpanded() {
  for (const [name, drawer] of Object.entries(drawers)) {
    const isShown = isNarrow(name) ? drawer.classList.contains("open") : !drawer.classList.contains("closed");
    drawer.inert = !isShown;
    byId(`show-${name}`).setAttribute("aria-expanded", String(isShown));
  }
}

addEventListener("keydown", event => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (Object.values(drawers).some(drawer => drawer.classList.contains("open"))) { toggle("chats", false); toggle("settings", false); input.focus(); }
    else stop();
  }
  if (event.key === "/" && document.activeElement === document.body) { event.preventDefault(); input.focus(); }
});
addEventListener("resize", () => { if (!isNarrow("settings")) byId("backdrop").hidden = true; showExpanded(); });

// ── start ────────────────────────────────────────────────────────────────────────────────────────────────────────────
async function loadModels() {
  try {
    if (!await models.load()) return;  // A form that is built again loses what somebody is typing.
  } catch (error) {
    toast(error.message, "bad");
    return;
  }
  panes.forEach(pane => {
    const { settings, tree } = pane.data;
    settings.model = path(tree).length ? models.rootOf(settings.model) : defaultModel(settings.model);
    pane.showSettings();
  });
  byId("compare").disabled = false;
  showSettings();
  showRunning();
  if (submitWhenReady && models.list.length) { submitWhenReady = false; submit(); }
}

byId("new-chat").append(icon("plus"), "New chat");
byId("new-chat").addEventListener("click", () => { open(fresh()); toggle("chats", false); input.focus(); });
byId("show-chats").append(icon("menu"));
byId("show-chats").addEventListener("click", () => toggle("chats"));
byId("show-settings").append(icon("sliders"));
byId("show-settings").addEventListener("click", () => toggle("settings"));
byId("close-settings").append(icon("close"));
byId("close-settings").addEventListener("click", () => toggle("settings", isNarrow("settings") ? false : undefined));
byId("backdrop").addEventListener("click", () => { toggle("chats", false); toggle("settings", false); });
byId("compare").append(icon("columns"), el("span", {}, "Compare"));
byId("compare").addEventListener("click", compare);
byId("code").append(icon("code"), el("span", {}, "Code"));
byId("code").addEventListener("click", () => {
  try { snippetDialog(panes[active].preview(input.value.trim())); } catch (error) { if (!(error instanceof SettingsError)) throw error; toast(error.message, "bad"); }
});
byId("attach").append(icon("image"));
byId("help").append(icon("keyboard"));
byId("help").addEventListener("click", () => byId("help-dialog").showModal());
byId("close-help").addEventListener("click", () => byId("help-dialog").close());

const newest = listChats()[0];
open((newest && loadChat(newest.id)) ?? fresh());
showExpanded();
startShell({ onReady: loadModels });
addEventListener("millrace:key", loadModels);
if (!matchMedia("(pointer: coarse)").matches) input.focus();

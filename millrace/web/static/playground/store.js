// Chats in this browser's localStorage: an index, and one entry per chat. Keys are never stored here.

import { newTree } from "./tree.js";

const INDEX = "millrace.chats";
const entry = id => `millrace.chat.${id}`;

function read(name, fallback) {
  try { return JSON.parse(localStorage.getItem(name)) ?? fallback; } catch { return fallback; }
}

/** Newest first: [{ id, title, updated }]. */
export const listChats = () => read(INDEX, []).filter(one => one && typeof one.id === "string");

export function newChat(settings) {
  return { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title: "New chat", updated: Date.now(), panes: [{ settings: { ...settings }, tree: newTree() }] };
}

export function loadChat(id) {
  const chat = read(entry(id), null);
  return chat && Array.isArray(chat.panes) && chat.panes.every(pane => pane?.tree?.nodes?.root) ? chat : null;
}

/** Returns an error message if the browser has no room for it. */
export function saveChat(chat) {
  chat.updated = Date.now();
  const rest = listChats().filter(one => one.id !== chat.id);
  try {
    localStorage.setItem(entry(chat.id), JSON.stringify(chat));
    localStorage.setItem(INDEX, JSON.stringify([{ id: chat.id, title: chat.title, updated: chat.updated }, ...rest]));
    return null;
  } catch {
    return "This chat is not saved: the browser's storage is full. Delete older chats.";
  }
}

/** Returns the function that brings the chat back, to its place. */
export function deleteChat(id) {
  const text = localStorage.getItem(entry(id)), index = localStorage.getItem(INDEX);
  const at = listChats().findIndex(one => one.id === id), listed = listChats()[at];
  localStorage.removeItem(entry(id));
  localStorage.setItem(INDEX, JSON.stringify(listChats().filter(one => one.id !== id)));
  return () => {
    if (text === null || index === null) return;
    localStorage.setItem(entry(id), text);
    const rest = listChats().filter(one => one.id !== id);
    localStorage.setItem(INDEX, JSON.stringify(listed ? rest.toSpliced(at, 0, listed) : rest));
  };
}

export const lastSettings = () => read("millrace.settings", {});
export function rememberSettings(settings) {
  try { localStorage.setItem("millrace.settings", JSON.stringify(settings)); } catch { /* Full: the chat's own save reports it. */ }
}

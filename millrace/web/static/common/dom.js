// Builds DOM nodes. Text always becomes a text node, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** `props`: `class`, `on` (event handlers), `data` (dataset), booleans, and attributes. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return node;
}

export function svg(tag, props = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

export const byId = id => document.getElementById(id);

const ICONS = {
  plus: "M12 5v14M5 12h14", close: "M6 6l12 12M18 6L6 18", menu: "M4 7h16M4 12h16M4 17h16",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4", send: "M12 19V5M6 11l6-6 6 6", stop: "M8 8h8v8H8z",
  copy: "M9 9h10v10H9zM5 15V5h10", check: "M5 12l5 5 9-10", retry: "M20 11a8 8 0 10-2.300 6M20 5v6h-6",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4", trash: "M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12", left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6", image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15 9h.01", key: "M14 10a4 4 0 11-3.500-4A4 4 0 0114 10zm0 0h7v3m-3-3v3",
  columns: "M4 5h7v14H4zM13 5h7v14h-7z", code: "M8 8l-4 4 4 4M16 8l4 4-4 4", moon: "M19 14.500A8 8 0 019.500 5 8 8 0 1019 14.500z",
  sun: "M12 8a4 4 0 100 8 4 4 0 000-8zM12 3v2M12 19v2M3 12h2M19 12h2M5.600 5.600L7 7M17 17l1.400 1.400M18.400 5.600L17 7M7 17l-1.400 1.400",
  tokens: "M4 8h5v8H4zM11 8h9M11 12h6M11 16h9", clock: "M12 4a8 8 0 100 16 8 8 0 000-16zM12 8v4l3 2", down: "M12 5v14M6 13l6 6 6-6",
  keyboard: "M3 7h18v10H3zM7 11h.01M11 11h.01M15 11h.01M8 14h8", play: "M8 5l11 7-11 7z", more: "M6 12h.01M12 12h.01M18 12h.01",
};

export function icon(name) {
  const drawing = svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" });
  drawing.append(svg("path", { d: ICONS[name] }));
  return drawing;
}

/** A button that shows only an icon; `label` is its accessible name and tooltip. */
export function iconButton(name, label, onClick, props = {}) {
  return el("button", { type: "button", class: "ghost", "aria-label": label, title: label, on: { click: onClick }, ...props }, icon(name));
}

export async function copyText(text) {
  try { await navigator.clipboard.writeText(text); return; } catch { /* Not a secure context: use the old way. */ }
  const area = el("textarea", { class: "offscreen", value: text });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A button that copies what `text()` returns and confirms it for a moment. */
export function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    await copyText(text());
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1200);
  });
  return button;
}

let toasts;
/** A message at the bottom of the page, also read out. `action`: [label, function], offered as a button. */
export function toast(text, kind = "", action = null) {
  toasts ??= document.body.appendChild(el("div", { class: "toasts", role: "status", "aria-live": "polite" }));
  const button = action ? el("button", { type: "button", class: "link", on: { click: () => { item.remove(); action[1](); } } }, action[0]) : null;
  const item = toasts.appendChild(el("div", { class: `toast ${kind}` }, text, button));
  setTimeout(() => item.remove(), kind === "bad" || action ? 8000 : 3500);
}

// An answer token by token, each coloured by its probability, with the alternatives on hover, focus or tap.

import { el } from "../common/dom.js";

const SHADES = [[0.9, ""], [0.6, "p3"], [0.3, "p2"], [0.1, "p1"], [0, "p0"]];
const percent = logprob => { const p = Math.exp(logprob) * 100; return p >= 10 ? `${p.toFixed(0)} %` : p >= 0.1 ? `${p.toFixed(1)} %` : "< 0.1 %"; };
const shown = text => (text === "" ? "∅" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣"));

/** The text of the tokens before `end`. A character can span tokens, so bytes are joined before decoding. */
export function textBefore(tokens, end, last = null) {
  const encoder = new TextEncoder();
  const bytes = [...tokens.slice(0, end), ...(last ? [last] : [])].flatMap(token => token.b ?? [...encoder.encode(token.t)]);
  return new TextDecoder().decode(new Uint8Array(bytes));
}

let popover = null, anchor = null, unpin = null;
export function hidePopover() { popover?.remove(); popover = null; unpin?.(); unpin = null; }
document.addEventListener("click", event => { if (popover && !popover.contains(event.target) && !event.target.closest?.(".token")) hidePopover(); });

/** `onBranch(text)` continues the answer from a prefix that ends with another token. */
export function tokenView(node, onBranch) {
  const tokens = node.tokens ?? [];
  const spans = tokens.map((token, number) => el("span", { class: `token ${SHADES.find(([from]) => Math.exp(token.p) >= from)[1]}`, data: { number } }, token.t));
  const view = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens with their probabilities; use the arrow keys" }, node.prefix ? el("span", { class: "prefix", title: "Given: not drawn in this branch" }, node.prefix) : null, spans);
  let current = -1, pinned = false;
  const select = (number, pin) => {
    spans[current]?.classList.remove("current");
    current = number;
    spans[current].classList.add("current");
    showPopover(spans[current], tokens, current, text => onBranch((node.prefix ?? "") + text));
    pinned = pin;
    unpin = () => { pinned = false; };
  };
  const numberOf = event => Number(event.target.closest?.(".token")?.dataset.number ?? -1);
  view.addEventListener("pointerover", event => { if (!pinned && event.pointerType === "mouse" && numberOf(event) >= 0) select(numberOf(event), false); });
  view.addEventListener("click", event => { if (numberOf(event) >= 0) select(numberOf(event), true); });
  view.addEventListener("pointerleave", () => { if (!pinned) hidePopover(); });
  view.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step && tokens.length) { event.preventDefault(); select(Math.max(0, Math.min(tokens.length - 1, current + step)), true); anchor.scrollIntoView({ block: "nearest" }); }
    if (event.key === "Enter" && popover) popover.querySelector("button")?.focus();
    if (event.key === "Escape" && popover) { event.stopPropagation(); hidePopover(); }
  });
  return el("div", {}, view, node.tokensCut ? el("p", { class: "soft" }, "Later tokens were not kept.") : null);
}

function showPopover(span, tokens, number, onBranch) {
  hidePopover();
  const token = tokens[number];
  const others = token.top.some(one => one.t === token.t) ? token.top : [...token.top, token];
  const rows = others.map(one => {
    const isChosen = one.t === token.t;
    const bar = el("i");
    bar.style.setProperty("--share", Math.exp(one.p));
    return el("button", { type: "button", class: isChosen ? "chosen" : "", disabled: isChosen, title: isChosen ? "the token that was drawn" : "Branch: continue with this token instead",
      on: { click: () => { hidePopover(); onBranch(textBefore(tokens, number, one)); } } }, el("code", {}, shown(one.t)), bar, el("span", {}, percent(one.p)));
  });
  popover = document.body.appendChild(el("div", { class: "popover", role: "dialog", "aria-label": "Alternatives of this token" },
    el("header", {}, el("code", {}, shown(token.t)), el("span", {}, `${percent(token.p)} · logprob ${token.p.toFixed(3)}`)), rows));
  anchor = span;
  placePopover();
}

/** Keep the popover beside its token while the page scrolls. */
export function placePopover() {
  if (!popover) return;
  const box = anchor.getBoundingClientRect(), size = popover.getBoundingClientRect();
  popover.style.left = `${Math.max(8, Math.min(box.left, innerWidth - size.width - 8))}px`;
  popover.style.top = `${box.bottom + size.height + 8 < innerHeight ? box.bottom + 4 : Math.max(8, box.top - size.height - 4)}px`;
}

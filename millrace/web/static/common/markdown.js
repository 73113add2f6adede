// Markdown to DOM nodes. The text comes from a model, so nothing of it becomes markup, a script, a style or a request:
// nodes are created one by one, links have a safe scheme, and images are shown as links.
// Work is linear in the length of the text, up to small bounded look-aheads.

import { copyButton, el } from "./dom.js";
import { highlight } from "./highlight.js";

const MAX_DEPTH = 12;
const MAX_LINK_TEXT = 400;
const MAX_LINK_URL = 2000;
const LIST = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: +(.*?))?(?: +#+)? *$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_RULE = /^ {0,3}\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;
const URL_AT = /https?:\/\/[^\s<>"'`]+/y;
const DELIMITERS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

/** Show `text` in `container`. Blocks that did not change keep their nodes, so that a stream costs little. */
export function renderMarkdown(container, text) {
  const blocks = parseBlocks(text.replaceAll("\r\n", "\n").split("\n"));
  const old = container.blockSources ?? [];
  let same = 0;
  while (same < old.length && same < blocks.length && old[same] === blocks[same].source) same++;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const block of blocks.slice(same)) container.append(renderBlock(block, 0));
  container.blockSources = blocks.map(block => block.source);
}

// ── blocks ───────────────────────────────────────────────────────────────────────────────────────────────────────────
function parseBlocks(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at++; continue; }
    const [block, next] = readBlock(lines, at);
    block.source = block.kind + "\n" + lines.slice(at, next).join("\n");
    blocks.push(block);
    at = next;
  }
  return blocks;
}

function readBlock(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence && !(fence[1][0] === "`" && fence[2].includes("`"))) return readFence(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [{ kind: "heading", level: heading[1].length, text: heading[2] ?? "" }, at + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (QUOTE.test(line)) return readQuote(lines, at);
  if (LIST.test(line)) return readList(lines, at);
  if (isTable(lines, at)) return readTable(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines, end)) end++;
  return [{ kind: "paragraph", text: lines.slice(at, end).map(part => part.trimStart()).join("\n") }, end];
}

const startsBlock = (lines, at) => FENCE.test(lines[at]) || HEADING.test(lines[at]) || RULE.test(lines[at]) || QUOTE.test(lines[at])
  || LIST.test(lines[at]) || isTable(lines, at);
const isTable = (lines, at) => lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && TABLE_RULE.test(lines[at + 1])
  && cells(lines[at]).length === cells(lines[at + 1]).length;

function readFence(lines, at, [, mark, info]) {
  const closing = new RegExp(`^ {0,3}${mark[0]}{${mark.length},} *$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end++;
  return [{ kind: "code", language: info.trim().split(/\s+/)[0].toLowerCase(), text: lines.slice(at + 1, end).join("\n") }, Math.min(end + 1, lines.length)];
}

function readQuote(lines, at) {
  const inner = [];
  let end = at;
  for (; end < lines.length && QUOTE.test(lines[end]); end++) inner.push(QUOTE.exec(lines[end])[1]);
  return [{ kind: "quote", lines: inner }, end];
}

function readList(lines, at) {
  const first = LIST.exec(lines[at]), ordered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const marker = LIST.exec(lines[end]);
    if (!marker || /\d/.test(marker[2]) !== ordered || RULE.test(lines[end])) break;
    const indent = marker[1].length + marker[2].length + Math.min(marker[3].length || 1, 4);
    const item = [marker[4]];
    for (end++; end < lines.length; end++) {
      const line = lines[end];
      if (!line.trim()) {
        if (end + 1 < lines.length && /^ {2,}\S/.test(lines[end + 1])) item.push(""); else break;
      } else if (/^ {2,}/.test(line)) item.push(line.slice(Math.min(indent, line.search(/\S/))));
      else if (startsBlock(lines, end)) break;
      else item.push(line);
    }
    items.push(item);
    let next = end;
    while (next < lines.length && !lines[next].trim()) next++;
    if (next < lines.length && LIST.test(lines[next])) end = next; else break;
  }
  return [{ kind: "list", ordered, start: ordered ? parseInt(first[2], 10) : 1, items }, end];
}

function cells(line) {
  const row = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return row.split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));
}

function readTable(lines, at) {
  const align = cells(lines[at + 1]).map(cell => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].trim() && lines[end].includes("|"); end++) rows.push(cells(lines[end]));
  return [{ kind: "table", head: cells(lines[at]), align, rows }, end];
}

function renderBlock(block, depth) {
  switch (block.kind) {
    case "heading": return el(`h${Math.min(block.level + 2, 6)}`, {}, inline(block.text, depth));
    case "rule": return el("hr");
    case "code": return codeBlock(block.text, block.language);
    case "quote": return el("blockquote", {}, nested(block.lines, depth));
    case "list": return renderList(block, depth);
    case "table": return renderTable(block, depth);
    default: return el("p", {}, inline(block.text, depth));
  }
}

function nested(lines, depth) {
  if (depth >= MAX_DEPTH) return [el("p", {}, lines.join("\n"))];
  return parseBlocks(lines).map(block => renderBlock(block, depth + 1));
}

function renderList(block, depth) {
  const items = block.items.map(lines => {
    const task = /^\[([ xX])\] +(.*)$/.exec(lines[0]);
    if (!task) return el("li", {}, tight(nested(lines, depth)));
    const box = el("input", { type: "checkbox", disabled: true, checked: task[1] !== " " });
    return el("li", { class: "task" }, box, tight(nested([task[2], ...lines.slice(1)], depth)));
  });
  return el(block.ordered ? "ol" : "ul", block.ordered && block.start !== 1 ? { start: block.start } : {}, items);
}

/** The first paragraph of a list item without its margin. */
function tight(nodes) {
  return nodes[0]?.tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function renderTable({ head, align, rows }, depth) {
  const cell = (tag, text, column) => el(tag, { class: align[column] === "left" ? null : align[column] }, inline(text, depth));
  return el("div", { class: "scroll-x", tabindex: "0", role: "region", "aria-label": "Table" }, el("table", {},
    el("thead", {}, el("tr", {}, head.map((text, column) => cell("th", text, column)))),
    el("tbody", {}, rows.map(row => el("tr", {}, head.map((_, column) => cell("td", row[column] ?? "", column)))))));
}

export function codeBlock(text, language) {
  return el("figure", { class: "code" },
    el("figcaption", {}, el("span", {}, language.slice(0, 30) || "text"), copyButton(() => text, "Copy code")),
    el("pre", { tabindex: "0" }, el("code", {}, highlight(text, language))));
}

// ── inline ───────────────────────────────────────────────────────────────────────────────────────────────────────────
function inline(text, depth) {
  const out = [];
  const hopeless = new Set();  // Delimiters without a closing one in the rest of this text.
  let plain = "";
  const push = node => { if (plain) { out.push(plain); plain = ""; } out.push(node); };
  for (let at = 0; at < text.length;) {
    const found = depth < MAX_DEPTH ? readInline(text, at, depth, hopeless) : null;
    if (found) { if (typeof found[0] === "string") plain += found[0]; else push(found[0]); at = found[1]; }
    else plain += text[at++];
  }
  if (plain) out.push(plain);
  return out;
}

/** The node or literal text at `at` and where it ends, or null for an ordinary character. */
function readInline(text, at, depth, hopeless) {
  switch (text[at]) {
    case "\\": return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? [text[at + 1], at + 2] : text[at + 1] === "\n" ? [el("br"), at + 2] : null;
    case "\n": return [el("br"), at + 1];
    case "`": return readCode(text, at, hopeless);
    case "!": return text[at + 1] === "[" ? readLink(text, at + 1, depth, true) : null;
    case "[": return readLink(text, at, depth, false);
    case "<": return readAngle(text, at);
    case "h": return readUrl(text, at);
    case "*": case "_": case "~": return readEmphasis(text, at, depth, hopeless);
    default: return null;
  }
}

function readCode(text, at, hopeless) {
  let length = 1;
  while (text[at + length] === "`") length++;
  const mark = "`".repeat(length);
  if (hopeless.has(mark)) return [mark, at + length];
  for (let end = text.indexOf(mark, at + length); end >= 0;) {
    let run = length;
    while (text[end + run] === "`") run++;
    if (run === length) return [el("code", {}, text.slice(at + length, end).replaceAll("\n", " ").replace(/^ (.*\S.*) $/s, "$1")), end + length];
    end = text.indexOf(mark, end + run);
  }
  hopeless.add(mark);
  return [mark, at + length];
}

function readEmphasis(text, at, depth, hopeless) {
  for (const [mark, tag] of DELIMITERS) {
    if (!text.startsWith(mark, at) || hopeless.has(mark)) continue;
    const inWord = mark[0] === "_" && /\w/.test(text[at - 1] ?? "");
    if (inWord || !/\S/.test(text[at + mark.length] ?? "") || text[at + mark.length] === mark[0]) continue;
    const end = closing(text, at + mark.length + 1, mark);
    if (end < 0) { hopeless.add(mark); continue; }
    return [el(tag, {}, inline(text.slice(at + mark.length, end), depth + 1)), end + mark.length];
  }
  return null;
}

function closing(text, from, mark) {
  for (let end = text.indexOf(mark, from); end >= 0; end = text.indexOf(mark, end + 1)) {
    const isOpening = /\s/.test(text[end - 1]) || text[end - 1] === "\\";
    const isLonger = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
    if (isLonger) { while (text[end + 1] === mark) end++; continue; }
    if (!isOpening && !(mark[0] === "_" && /\w/.test(text[end + mark.length] ?? ""))) return end;
  }
  return -1;
}

function readLink(text, at, depth, isImage) {
  const label = bracketed(text, at, "[", "]", MAX_LINK_TEXT);
  if (label < 0 || text[label + 1] !== "(") return null;
  const end = bracketed(text, label + 1, "(", ")", MAX_LINK_URL);
  if (end < 0) return null;
  const url = text.slice(label + 2, end).trim().replace(/\s+["'(].*$/s, "").replace(/^<(.*)>$/, "$1");
  const words = text.slice(at + 1, label);
  const content = isImage ? ["Image: ", words || url] : inline(words, depth + 1);
  return [link(url, content, isImage ? "image-link" : null), end + 1];
}

function bracketed(text, at, open, close, limit) {
  let level = 0;
  for (let end = at; end < text.length && end < at + limit; end++) {
    if (text[end] === "\\") end++;
    else if (text[end] === open) level++;
    else if (text[end] === close && --level === 0) return end;
  }
  return -1;
}

function readAngle(text, at) {
  const found = /^<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/.exec(text.slice(at, at + MAX_LINK_URL));
  return found ? [link(found[1], [found[1]]), at + found[0].length] : null;
}

function readUrl(text, at) {
  if (/\w/.test(text[at - 1] ?? "")) return null;
  URL_AT.lastIndex = at;
  const found = URL_AT.exec(text);
  if (!found) return null;
  let url = found[0].replace(/[.,;:!?*_~\]]+$/, "");
  if (url.endsWith(")") && !url.includes("(")) url = url.slice(0, -1);
  return [link(url, [url]), at + url.length];
}

/** A link for http, https and mailto; anything else (javascript:, data:, relative) is shown as text. */
function link(url, content, kind = null) {
  let parsed = null;
  try { parsed = new URL(url); } catch { /* Not an absolute address. */ }
  if (!parsed || !["http:", "https:", "mailto:"].includes(parsed.protocol)) return el("span", { class: "dead-link", title: url.slice(0, 200) }, content);
  return el("a", { href: parsed.href, target: "_blank", rel: "noopener noreferrer nofollow", class: kind, title: parsed.href.slice(0, 300) }, content);
}

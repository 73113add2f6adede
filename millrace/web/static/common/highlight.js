// Colours for code: comments, strings, numbers and keywords, in the languages that chats contain most.

import { el } from "./dom.js";

const MAX_CHARACTERS = 60_000;  // Longer code is shown plain.
const words = text => new Set(text.split(" "));
const PYTHON = words("and as assert async await break class continue def del elif else except False finally for from global if import in is lambda match None nonlocal not or pass raise return True try while with yield self");
const C_LIKE = words("abstract async await bool boolean break case catch char class const constexpr continue crate default defer delete do double dyn else enum export extends false final float fn for func function go if impl implements import in instanceof int interface let long loop map match mod move mut namespace new nil null override package private protected pub public range ref return self short sizeof static string struct super switch template this throw throws trait true try type typedef typeof undefined union unsafe unsigned use using var virtual void where while yield");
const SHELL = words("case do done echo elif else esac exit export fi for function if in local return set source then unset until while cd sudo");
const SQL = words("add all alter and as asc between by case create delete desc distinct drop else end exists from full group having in index inner insert into is join key left like limit not null on or order outer primary references right select set table then union unique update values view when where with");
const JSON_WORDS = words("true false null");

const STRINGS = String.raw`"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?`;
const NUMBER = String.raw`\b(?:0x[\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b`;
const WORD = String.raw`[A-Za-z_$][\w$]*`;
const rule = comment => new RegExp(`(${comment})|(${STRINGS})|(${NUMBER})|(${WORD})`, "g");
const HASH = rule(String.raw`#[^\n]*|"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)`);
const SLASH = new RegExp(String.raw`(//[^\n]*|/\*[\s\S]*?(?:\*/|$))|(${STRINGS}|${"`"}(?:\\.|[^\\${"`"}])*${"`"}?)|(${NUMBER})|(${WORD})`, "g");
const DASH = rule(String.raw`--[^\n]*|/\*[\s\S]*?(?:\*/|$)`);
const MARKUP = new RegExp(String.raw`(<!--[\s\S]*?(?:-->|$))|(${STRINGS})|(\b\d+\b)|(</?[A-Za-z][\w:-]*|/?>)`, "g");

const LANGUAGES = {};
const register = (names, pattern, keywords) => names.split(" ").forEach(name => { LANGUAGES[name] = [pattern, keywords]; });
register("python py python3 ruby rb", HASH, PYTHON);
register("bash sh shell zsh console fish dockerfile makefile", HASH, SHELL);
register("yaml yml toml ini", HASH, JSON_WORDS);
register("javascript js jsx typescript ts tsx c cpp c++ h java kotlin rust rs go swift csharp cs php scala dart zig css scss", SLASH, C_LIKE);
register("json json5 jsonc", SLASH, JSON_WORDS);
register("sql postgresql mysql sqlite lua", DASH, SQL);
register("html xml svg vue", MARKUP, null);

/** Nodes and strings for `text`. */
export function highlight(text, language) {
  const [pattern, keywords] = LANGUAGES[language] ?? [];
  if (!pattern || text.length > MAX_CHARACTERS) return [text];
  const out = [];
  let last = 0;
  for (const found of text.matchAll(pattern)) {
    const kind = found[1] ? "comment" : found[2] ? "string" : found[3] ? "number" : isKeyword(found[4], keywords, pattern) ? "keyword" : null;
    if (!kind) continue;
    out.push(text.slice(last, found.index), el("span", { class: `hl-${kind}` }, found[0]));
    last = found.index + found[0].length;
  }
  out.push(text.slice(last));
  return out;
}

function isKeyword(word, keywords, pattern) {
  return keywords === null || keywords.has(pattern === DASH ? word.toLowerCase() : word);
}

// JSON Schemas of the OpenAPI document as tables of fields. Nested types are drawn when they are opened.

import { el } from "../common/dom.js";

const FEW_FIELDS = 8;

export const rich = text => (text || "").split(/`([^`]*)`/).map((piece, number) => (number % 2 ? el("code", {}, piece) : piece));
const nameOf = schema => schema.$ref.split("/").pop();

export function kindOf(schema) {
  if (!schema) return "any";
  if (schema.$ref) return nameOf(schema);
  if (schema.properties?.data?.contentSchema) return kindOf(schema.properties.data.contentSchema);
  if (schema.enum) return schema.enum.map(value => JSON.stringify(value)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  const parts = schema.anyOf || schema.oneOf;
  if (parts) return [...new Set(parts.map(kindOf))].filter(kind => kind !== "null").join(" | ");
  if (schema.type === "array") return `array of ${kindOf(schema.items)}`;
  if (schema.type === "object" && schema.additionalProperties) return `object of ${kindOf(schema.additionalProperties)}`;
  return schema.type || "any";
}

function limitsOf(schema) {
  const isPlain = limit => limit !== undefined && Math.abs(limit) < 2 ** 31 - 1;  // Larger ones are the range of an integer type.
  const from = schema.minimum ?? schema.exclusiveMinimum, shown = [];
  if (isPlain(from)) shown.push(("exclusiveMinimum" in schema ? "> " : "≥ ") + from);
  if (isPlain(schema.maximum)) shown.push(`≤ ${schema.maximum}`);
  if (schema.maxItems) shown.push(`at most ${schema.maxItems}`);
  return shown.length ? ` (${shown.join(", ")})` : "";
}

export const row = (name, kind, description, { isRequired = false, isLater = false } = {}) =>
  el("tr", { class: isLater ? "later" : null }, el("td", {}, name, isRequired ? el("div", { class: "must" }, "required") : null), el("td", { class: "kind" }, kind), el("td", {}, rich(description)));

function fieldTable(schema) {
  const required = new Set(schema.required ?? []);
  return el("table", {}, el("tbody", {}, Object.entries(schema.properties ?? {}).map(([name, field]) =>
    row(name, kindOf(field) + limitsOf(field), field.description, { isRequired: required.has(name), isLater: /^Not supported yet/.test(field.description ?? "") }))));
}

/** The names of the types that a schema refers to directly. */
function references(schema) {
  const found = new Set();
  const walk = node => {
    if (Array.isArray(node)) node.forEach(walk);
    else if (node && typeof node === "object") { if (node.$ref) found.add(nameOf(node)); Object.entries(node).forEach(([key, value]) => key !== "discriminator" && walk(value)); }
  };
  walk(schema.$ref ? null : schema);
  return [...found];
}

/** A closed block that draws its content when it is opened. */
export function part(title, draw, isOpen = false) {
  const details = el("details", { class: "part" }, el("summary", {}, title));
  const fill = () => { if (details.childElementCount === 1) details.append(...draw()); };
  details.addEventListener("toggle", fill);
  if (isOpen) { details.open = true; fill(); }
  return details;
}

/** `above`: the types around this one, so that a type that contains itself ends. */
export function typePart(api, name, above = []) {
  const schema = api.components.schemas[name];
  const isShort = above.length === 0 && Object.keys(schema.properties ?? {}).length <= FEW_FIELDS;
  return part(name, () => [
    ...(schema.description ? [el("p", { class: "soft" }, rich(schema.description))] : []),
    fieldTable(schema),
    ...references(schema.properties ?? schema).filter(one => one !== name && !above.includes(one)).map(one => typePart(api, one, [...above, name])),
  ], isShort);
}

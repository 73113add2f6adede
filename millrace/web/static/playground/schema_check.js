// Compares a value with a JSON schema, as far as it is written in the common keywords.

const KNOWN = new Set(["type", "properties", "required", "additionalProperties", "items", "enum", "const", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions",
  "title", "description", "default", "examples", "$schema", "$id", "$comment"]);
const equal = (one, other) => JSON.stringify(one) === JSON.stringify(other);

function typeOf(value) {
  if (value === null) return "null";
  if (Array.isArray(value)) return "array";
  return typeof value === "number" && Number.isInteger(value) ? "integer" : typeof value;
}

/** { problem: the first difference in words or null, isComplete: false if a keyword was not looked at }. */
export function compare(value, schema) {
  let isComplete = true;
  const resolve = ref => ref.slice(2).split("/").reduce((at, part) => at?.[part.replaceAll("~1", "/").replaceAll("~0", "~")], schema);

  function check(one, rule, at, depth) {
    if (rule === true || rule === undefined) return null;
    if (rule === false) return `${at} is not allowed`;
    if (depth > 60) { isComplete = false; return null; }
    if (Object.keys(rule).some(name => !KNOWN.has(name))) isComplete = false;
    if (rule.$ref) return rule.$ref.startsWith("#/") ? check(one, resolve(rule.$ref), at, depth + 1) : ((isComplete = false), null);
    return scalar(one, rule, at) ?? parts(one, rule, at, depth) ?? alternatives(one, rule, at, depth);
  }

  function scalar(one, rule, at) {
    const type = typeOf(one), types = [rule.type ?? []].flat();
    if (types.length && !types.includes(type) && !(type === "integer" && types.includes("number"))) return `${at} is of type ${type}, not ${types.join(" or ")}`;
    if (rule.enum && !rule.enum.some(allowed => equal(allowed, one))) return `${at} is none of the allowed values`;
    if ("const" in rule && !equal(rule.const, one)) return `${at} is not ${JSON.stringify(rule.const)}`;
    if (typeof one === "number" && (one < (rule.minimum ?? -Infinity) || one > (rule.maximum ?? Infinity))) return `${at} is out of range`;
    if (typeof one === "string" && ([...one].length < (rule.minLength ?? 0) || [...one].length > (rule.maxLength ?? Infinity))) return `${at} has the wrong length`;
    if (typeof one === "string" && rule.pattern) try { if (!new RegExp(rule.pattern, "u").test(one)) return `${at} does not match its pattern`; } catch { isComplete = false; }
    return null;
  }

  function parts(one, rule, at, depth) {
    if (Array.isArray(one)) {
      if (one.length < (rule.minItems ?? 0) || one.length > (rule.maxItems ?? Infinity)) return `${at} has the wrong number of items`;
      return first(one.map((item, number) => () => check(item, rule.items, `${at}[${number}]`, depth + 1)));
    }
    if (typeOf(one) !== "object") return null;
    const missing = (rule.required ?? []).find(name => !Object.hasOwn(one, name));
    if (missing) return `${at}.${missing} is missing`;
    return first(Object.entries(one).map(([name, item]) => () => check(item, Object.hasOwn(rule.properties ?? {}, name) ? rule.properties[name] : rule.additionalProperties, `${at}.${name}`, depth + 1)));
  }

  function alternatives(one, rule, at, depth) {
    const fitting = list => list.filter(other => check(one, other, at, depth + 1) === null).length;
    if (rule.anyOf && fitting(rule.anyOf) === 0) return `${at} fits none of the alternatives`;
    if (rule.oneOf && fitting(rule.oneOf) !== 1) return `${at} does not fit exactly one alternative`;
    return first((rule.allOf ?? []).map(other => () => check(one, other, at, depth + 1)));
  }

  const problem = check(value, schema, "answer", 0);
  return { problem, isComplete };
}

function first(checks) {
  for (const one of checks) { const problem = one(); if (problem) return problem; }
  return null;
}

"""JSON schemas: what is checked before llguidance reads them, and their spelling inside a Lark grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from millrace.text.grammar.apart import are_apart
from millrace.text.grammar.compiler import GrammarError
from millrace.text.grammar.rewrite import rewrite

OPTIONS_KEY = "x-guidance"
"""llguidance's options inside a schema. A client may not set them: some of them ignore parts of the schema."""
ITEM_SEPARATOR, KEY_SEPARATOR = ", ", ": "
"""One fixed spelling of JSON: where whitespace is free, a small model may write it without end."""
FIXED_SPELLING: dict[str, object] = {
    "whitespace_flexible": False,
    "item_separator": ITEM_SEPARATOR,
    "key_separator": KEY_SEPARATOR,
}
MAX_MULTIPLE = 10_000
_INLINE = re.compile(r"%json\s*(?=\{)")
_DATA = frozenset(("const", "enum", "default", "example", "examples"))
"""Keywords whose values are not schemas."""
_NOT_ALONE = frozenset(
    ("anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "dependentSchemas", "dependencies")
) | {"minProperties", "patternProperties", "propertyNames", "unevaluatedProperties"}
"""Keywords beside `properties` that may speak of further properties."""
STRING_FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri")
) | {"uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex"}
"""Formats of strings that JSON Schema defines. Others, such as password, are labels that no validator reads."""
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose values are schemas by name."""


def inline_schema(schema: str) -> str:
    """The schema as a part of a Lark rule, which matches JSON in the fixed spelling."""
    return "%json " + json.dumps({**checked_schema(schema), OPTIONS_KEY: FIXED_SPELLING})


def checked_schema(schema: str) -> dict[str, Any]:
    """The schema without keywords that have no effect. Refuses what llguidance would not enforce."""
    try:
        fields = json.loads(schema)
    except RecursionError:
        raise GrammarError("The schema is nested too deeply; send fewer levels.") from None
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise GrammarError('The schema is not a JSON object; send one, such as {"type": "object"}.')
    if OPTIONS_KEY in fields:
        raise GrammarError(f"The schema contains {OPTIONS_KEY!r}, which is not supported; remove it.")
    try:
        _check(fields, fields)
    except RecursionError:
        raise GrammarError("The schema is nested too deeply; send fewer levels.") from None
    return fields


def closed_schema(schema: str) -> str:
    """The schema with objects that have no properties besides those that it names. Raises ValueError."""
    loaded = json.loads(schema)
    if isinstance(loaded, dict):
        _close(loaded)
    return json.dumps(loaded, ensure_ascii=False)


def tightened_schema(schema: str) -> str:
    """As `closed_schema`, for a schema that does not say so itself: unchanged unless each object stands alone, so that
    every answer also conforms to the schema as it was sent. Text that is no schema is returned, to be refused later."""
    try:
        loaded = json.loads(schema)
        if not isinstance(loaded, dict) or not _can_be_closed(loaded, loaded):
            return schema
        _close(loaded)
        return json.dumps(loaded, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return schema


def _close(schema: dict[str, Any]) -> None:
    for inner in _inner(schema):
        _close(inner)
    if "properties" in schema or "patternProperties" in schema:
        schema.setdefault("additionalProperties", False)


def _can_be_closed(schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """False if properties of one object are named in several places, if more are required than are named, or if the
    alternatives of a `oneOf` may overlap."""
    if "properties" in schema and not _NOT_ALONE.isdisjoint(schema):
        return False
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and isinstance(required, list) and not set(map(str, required)) <= set(properties):
        return False
    if "oneOf" in schema and not are_apart(schema["oneOf"], root):
        return False
    return _merges_no_objects(schema) and all(_can_be_closed(inner, root) for inner in _inner(schema))


def _merges_no_objects(schema: dict[str, Any]) -> bool:
    """True if `allOf` has one member, which stands for itself, or none that may name properties."""
    members = schema.get("allOf", [])
    if not isinstance(members, list) or (members and "properties" in schema):
        return False
    may_name = _NOT_ALONE | {"properties", "allOf"}
    return len(members) < 2 or all(isinstance(one, dict) and may_name.isdisjoint(one) for one in members)


def check_inline(lark: str) -> None:
    """Check the schemas inside a Lark grammar as `checked_schema` does. `inline_schema` may have written them."""
    decoder = json.JSONDecoder()
    for found in _INLINE.finditer(lark):
        try:
            schema, _ = decoder.raw_decode(lark, found.end())
        except (ValueError, RecursionError):
            continue  # llguidance reads it too, and says what is wrong.
        if schema.get(OPTIONS_KEY) == FIXED_SPELLING:
            del schema[OPTIONS_KEY]
        checked_schema(json.dumps(schema))


def _check(schema: dict[str, Any], root: dict[str, Any]) -> None:
    """Check a schema and the schemas in it, and write all of them as llguidance reads them."""
    _remove_neutral(schema)
    for inner in _inner(schema):
        _check(inner, root)
    rewrite(schema, root)
    _complete_reference(schema)
    _check_repeated_names(schema)
    _check_multiple(schema)


def _inner(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas in a schema. A keyword that is not known may hold some: a reference can point anywhere."""
    for keyword, value in schema.items():
        if keyword in _DATA:
            continue
        values = value.values() if keyword in _MAPS and isinstance(value, dict) else [value]
        for one in values:
            yield from (item for item in (one if isinstance(one, list) else [one]) if isinstance(item, dict))


def _remove_neutral(schema: dict[str, Any]) -> None:
    """llguidance refuses some keywords whatever their value is, and formats that are only labels."""
    kind, label = schema.get("type", "string"), schema.get("format")
    is_text = "string" in (kind if isinstance(kind, list) else [kind])
    if isinstance(label, str) and (label not in STRING_FORMATS or not is_text):
        del schema["format"]
    for keyword in ("unevaluatedProperties", "unevaluatedItems", "propertyNames"):
        if schema.get(keyword) is True:
            del schema[keyword]
    for keyword, owner in (("then", "if"), ("else", "if"), ("minContains", "contains"), ("maxContains", "contains")):
        if owner not in schema:
            schema.pop(keyword, None)


def _complete_reference(schema: dict[str, Any]) -> None:
    """`/$defs/x` names another document, which is never read; litellm means `#/$defs/x` by it."""
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith(("/$defs/", "/definitions/")):
        schema["$ref"] = f"#{target}"


def _check_multiple(schema: dict[str, Any]) -> None:
    """The memory and time that a multiple takes grow with its number of digits' value: 14 s for 999983."""
    value = schema.get("multipleOf")
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    limited = max(-MAX_MULTIPLE - 1, min(value, MAX_MULTIPLE + 1))  # An integer may be too large for a float.
    digits = f"{limited:.12f}".rstrip("0").replace(".", "").lstrip("-0")
    if int(digits or "0") > MAX_MULTIPLE:
        raise GrammarError(
            f"The schema uses 'multipleOf' {str(value)[:24]}, which is not supported; at most {MAX_MULTIPLE} without"
            " the decimal point is."
        )


def _check_repeated_names(schema: dict[str, Any]) -> None:
    """Names that the schema does not list can be repeated in an answer: then it has fewer properties than it shows."""
    least, required = schema.get("minProperties"), schema.get("required")
    is_open = schema.get("additionalProperties") is not False or "patternProperties" in schema
    if not isinstance(least, int) or not is_open:
        return
    if least - (len(set(map(str, required))) if isinstance(required, list) else 0) > 1:
        raise GrammarError(
            f"The schema uses 'minProperties' {least} with names that it does not list, which is not supported, because"
            " a name could be repeated; list the names in 'required' or lower it."
        )
